"""P18: the cost of thousands of partitions: CPU of idle ones, and of moving half of them."""

import time

from aioshard.core.assignment import ASSIGNORS, Member
from aioshard.records import TopicPartition
from benchmarks.report import Report, Verdict, spread
from benchmarks.stage import Stage

TITLE = "Thousands of partitions"
START = 10.0
"""Seconds for connecting, joining and the first assignment, which are not measured."""
ROUNDS = 15


async def run(stage: Stage) -> Report:
    """Wait on empty partitions, more in each run; then assign half of them to a second member."""
    report = Report("P18", TITLE)
    share = 0.0
    for partitions in (stage.size(number, 4) for number in (1, 100, 2_000)):
        share = await _idle(stage, partitions)
        report.rows.append({"contestant": "aioshard", "idle partitions": partitions, "% of a core": share})
    what = "% of a core, 2,000 idle partitions"
    report.verdicts.append(Verdict(what, share, must=4.0, unit="%", judged=not stage.quick))
    for name in ("sticky", "lag"):
        partitions = stage.size(8_000, 80)
        took = spread([_hand_over(name, partitions) for _ in range(ROUNDS)])
        report.rows.append({"contestant": "aioshard", "assignor": name, "partitions": partitions, "ms CPU": took})
        what = f"ms of CPU, 8,000 partitions from 1 member to 2, {name}"
        report.verdicts.append(Verdict(what, took.median, must=500.0, aim=50.0, unit="ms", judged=not stage.quick))
    report.notes.append("The event loop of the group's leader is held for as long as the assignor computes.")
    return report


async def _idle(stage: Stage, partitions: int) -> float:
    """Return the percent of a core that idle partitions use: CPU of a long run minus that of a short one."""
    topic = await stage.fill(f"p18-{partitions}", partitions, iter(()))
    start, wait = (1.0, 1.0) if stage.quick else (START, 20.0)
    short, long = [
        await stage.run(stage.spec("aioshard", topic, records=0, work="hang", concurrency=64, watch_seconds=seconds))
        for seconds in (start, start + wait)
    ]
    return 100 * (long.cpu_seconds - short.cpu_seconds) / (long.wall_seconds - short.wall_seconds)


def _hand_over(name: str, partitions: int) -> float:
    """Return the milliseconds of CPU when a second member joins one that owns everything."""
    everything = [TopicPartition("t", number) for number in range(partitions)]
    topics = frozenset({"t"})
    members = {
        "a": Member(topics, everything, 1, {at: 1_000 + at.partition for at in everything}),
        "b": Member(topics),
    }
    before = time.process_time()
    ASSIGNORS[name](members, {"t": range(partitions)})
    return 1_000 * (time.process_time() - before)
