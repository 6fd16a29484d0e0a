"""Backfills of a whole topic: an app and Spark jobs, each in one process for all rounds."""

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

from benchmarks.report import Cell
from benchmarks.spec import Measurement, Spec, Work
from benchmarks.stage import PROJECT, RUN_TIMEOUT, Contestant, ContestantFailedError, Runs, Stage, Topic, with_bytecode
from benchmarks.tables import rate_rows

PLAIN_APP = "aioshard, app"
"""The contestant that needs no Spark."""
ONE_CORE = "aioshard, fused, local[1]"
"""The contestant whose session runs one task at a time; all others run two."""
_END_TIMEOUT = 30.0


class _Jobs:
    """The processes, started on first use: the start of a process and of its session is not measured."""

    def __init__(self, spec: Spec, log: IO[bytes]) -> None:
        self._spec = spec
        self._log = log
        self._running: dict[str, asyncio.subprocess.Process] = {}

    async def run(self, spec: Spec) -> Measurement:
        """Run one job.

        Raises:
            ContestantFailedError: It failed, or took too long.
        """
        process = await self._process({PLAIN_APP: "app", ONE_CORE: "local[1]"}.get(spec.contestant, "local[2]"))
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{spec.to_json()}\n".encode())
            async with asyncio.timeout(RUN_TIMEOUT):
                line = await process.stdout.readline()
        except TimeoutError as error:
            raise ContestantFailedError(f"{spec.contestant} did not end within {RUN_TIMEOUT:g} s") from error
        if not line:
            raise ContestantFailedError(f"{spec.contestant} ended with {await process.wait()}:\n{self._output()}")
        return Measurement(**json.loads(line))

    async def _process(self, kind: str) -> asyncio.subprocess.Process:
        if kind not in self._running:
            self._running[kind] = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "benchmarks.contestants.history",
                kind,
                self._spec.to_json(),
                cwd=PROJECT,
                env=with_bytecode(os.environ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._log,
            )
        return self._running[kind]

    def _output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]

    async def end(self) -> None:
        """Let the processes end; kill those that take too long."""
        for process in self._running.values():
            if process.stdin is not None:
                process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_TIMEOUT)
            if process.returncode is None:
                process.kill()
                await process.wait()


async def measure(
    stage: Stage,
    contestants: Sequence[Contestant],
    topic: Topic,
    *,
    rounds: int,
    work: Work,
    concurrency: int,
    **handler: float,
) -> tuple[Runs, Runs]:
    """Let every contestant consume a topic once, to check that it processes all of it, and then in turn.

    The check is the first job of each contestant, so it also warms up.

    Returns:
        The runs of the check, and those of the rounds; in a quick run they are the same.

    Raises:
        ContestantFailedError: One of them failed, or Spark is not installed.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise ContestantFailedError("Spark is not installed: pip install 'aioshard[spark]'")
    spec = stage.spec("", topic, records=topic.records, work=work, concurrency=concurrency, **handler)
    with tempfile.TemporaryFile() as log:
        jobs = _Jobs(spec, log)
        try:
            checked = await stage.contest(
                contestants, topic, rounds=1, work="check", concurrency=concurrency, run=jobs.run, **handler
            )
            if stage.quick:
                return checked, checked
            runs = await stage.contest(
                contestants, topic, rounds=rounds, work=work, concurrency=concurrency, run=jobs.run, **handler
            )
        finally:
            await jobs.end()
    return checked, runs


def job_rows(runs: Runs, checked: Runs, *, ceiling: str) -> list[dict[str, Cell]]:
    """Return a row per contestant, as `rate_rows` does; lost and repeated records are those of the check."""
    rows = rate_rows(runs, ceiling=ceiling)
    for row, name in zip(rows, runs, strict=True):
        row["lost"], row["twice"] = checked[name][0].missing, checked[name][0].repeated
    return rows
