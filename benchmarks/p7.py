"""P7: the time of `import aioshard`, and the modules that it imports."""

import asyncio
import json
import os
import sys
import time

from benchmarks.report import Report, Verdict, spread
from benchmarks.stage import PROJECT, with_bytecode

TITLE = "Import: `import aioshard` above a bare interpreter"
FORBIDDEN = ("pyspark", "pyarrow", "pandas", "fastapi", "starlette", "uvicorn", "aiohttp", "flask", "django")
"""Never imported by aioshard itself."""
ON_USE = ("click", "rich", "prometheus_client", "uvloop", "pydantic_settings")
"""Imported only on use."""


async def run(*, quick: bool) -> Report:
    """Start interpreters in turn, with and without the import."""
    bare: list[tuple[float, float]] = []
    importing: list[tuple[float, float]] = []
    await _measure("import aioshard")  # writes the byte code and warms the file cache
    for _ in range(2 if quick else 15):
        bare.append(await _measure("pass"))
        importing.append(await _measure("import aioshard"))
    script = "import json, sys, aioshard; print(json.dumps(sorted(sys.modules)))"
    loaded = {name.partition(".")[0] for name in json.loads(await _output(script))}
    report = Report("P7", TITLE)
    for name, measured in (("bare interpreter", bare), ("import aioshard", importing)):
        cpu, wall = spread([one for one, _ in measured]), spread([one for _, one in measured])
        report.rows.append({"what": name, "CPU, s": cpu, "wall, s": wall})
    above = spread([with_import - without for (with_import, _), (without, _) in zip(importing, bare, strict=True)])
    wall = spread([with_import - without for (_, with_import), (_, without) in zip(importing, bare, strict=True)])
    report.verdicts += [
        Verdict("CPU time above a bare interpreter", above.median, must=0.3, unit="s", judged=not quick),
        Verdict("modules that must not be imported", len(loaded & {*FORBIDDEN, *ON_USE}), must=0),
    ]
    if found := sorted(loaded & {*FORBIDDEN, *ON_USE}):
        report.problems.append(f"import aioshard imports {', '.join(found)}")
    report.notes.append(
        f"Wall time above a bare interpreter: {wall} s. Looked for: {', '.join((*FORBIDDEN, *ON_USE))}."
    )
    return report


async def _measure(statement: str) -> tuple[float, float]:
    """Return CPU and wall seconds of an interpreter that runs *statement*."""
    started = time.perf_counter()
    process_id = os.posix_spawn(
        sys.executable, [sys.executable, "-c", statement], {**with_bytecode(os.environ), "PYTHONPATH": _path()}
    )
    _, status, used = await asyncio.to_thread(os.wait4, process_id, 0)
    if status != 0:
        message = f"`{statement}` ended with status {status}"
        raise RuntimeError(message)
    return used.ru_utime + used.ru_stime, time.perf_counter() - started


async def _output(script: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        cwd=PROJECT,
        env={**with_bytecode(os.environ), "PYTHONPATH": _path()},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    return out


def _path() -> str:
    return os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
