"""P19: how long `aioshard run` takes from its spawn to the first record."""

import asyncio
import os
import sys
import time
import uuid

from benchmarks.report import Report, Verdict, spread
from benchmarks.stage import PROJECT, Stage, Topic, with_bytecode

TITLE = "Start: from the spawn of `aioshard run` to its first record, in a new group, 8 partitions"


async def run(stage: Stage) -> Report:
    """Start the app again and again; the first start writes the byte code and does not count."""
    topic = await stage.fill("p19", 8, ((b"%d" % number, b"") for number in range(100)))
    await _start(stage, topic)
    starts = [await _start(stage, topic) for _ in range(stage.size(15, 2))]
    report = Report("P19", TITLE)
    took, used = spread([seconds for seconds, _ in starts]), spread([cpu for _, cpu in starts])
    report.rows.append({"contestant": "aioshard run", "s": took, "s CPU": used})
    report.verdicts += [
        Verdict("CPU time up to first record", used.median, must=0.5, unit="s", judged=not stage.quick),
        Verdict(
            "time from spawn to the first record", took.median, must=1.0, aim=0.5, unit="s", judged=not stage.quick
        ),
    ]
    report.notes.append("On a machine that does nothing else; the CPU time holds on a busy one too.")
    return report


async def _start(stage: Stage, topic: Topic) -> tuple[float, float]:
    """Seconds from one spawn to the first record, and seconds of CPU up to it."""
    variables = {
        **with_bytecode(os.environ),
        "AIOSHARD_BOOTSTRAP_SERVERS": stage.cluster.bootstrap,
        "GROUP": f"bench-{uuid.uuid4().hex[:8]}",
        "TOPIC": topic.name,
    }
    spawned_at = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aioshard", "run", "benchmarks.first_record:app", "--log-level", "error"),
        cwd=PROJECT,
        env=variables,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            used = float(await process.stdout.readline())
        seconds = time.monotonic() - spawned_at
    finally:
        process.kill()
        await process.wait()
    return seconds, used
