"""P6: memory when handlers hang and the topic is large."""

import itertools
from collections.abc import Iterator

from benchmarks.report import Report, Verdict
from benchmarks.spec import Measurement
from benchmarks.stage import Stage, Topic
from tests.support.cluster import Message

TITLE = "Memory: handlers hang on 1 GiB in 64 partitions, records of 100 B and 100 KiB mixed"
MIB = 1024 * 1024
PARTITIONS = 64
KEYS = 1_000
CONCURRENCY = 64
MAX_BUFFERED_BYTES = 64 * MIB
"""The default of the setting."""


def _mixed_messages(total_bytes: int) -> Iterator[Message]:
    values = itertools.cycle((b"s" * 100, b"l" * 100 * 1024))
    keys = itertools.cycle([b"key-%d" % number for number in range(KEYS)])
    sent = 0
    while sent < total_bytes:
        value = next(values)
        sent += len(value)
        yield next(keys), value


async def run(stage: Stage) -> Report:
    """Compare memory with hanging handlers on a full topic and on an empty one."""
    size = 1024 * MIB if not stage.quick else 8 * MIB
    partitions = stage.size(PARTITIONS, 4)
    full = await stage.fill("p6", partitions, _mixed_messages(size))
    empty = await stage.fill("p6-empty", partitions, iter(()))
    report = Report("P6", TITLE)
    bound = (2 * MAX_BUFFERED_BYTES + 50 * MIB) / MIB
    names = ["aioshard"] if stage.quick else ["aioshard", "aioshard, fixed shards", "fixed queues", "task per record"]
    for name in names:
        idle = await _watch(stage, name, empty)
        hanging = await _watch(stage, name, full)
        over_idle = (hanging.peak_rss - idle.rss) / MIB
        stage.say(f"{name}: {over_idle:.0f} MiB over idle")
        report.rows.append(
            {
                "contestant": name,
                "idle, MiB": idle.rss / MIB,
                "peak, MiB": hanging.peak_rss / MIB,
                "over idle, MiB": over_idle,
                "growth in the last third, MiB": hanging.late_growth / MIB,
                "handlers that hang": hanging.records,
            }
        )
        if name.startswith("aioshard"):
            what = f"RSS over idle, {name}"
            report.verdicts.append(Verdict(what, over_idle, must=bound, unit="MiB", judged=not stage.quick))
    report.notes.append("The bound is 2 × max_buffered_bytes + 50 MiB; the others bound the number of records only.")
    return report


async def _watch(stage: Stage, name: str, topic: Topic) -> Measurement:
    seconds = 1.0 if stage.quick else 20.0
    return await stage.run(
        stage.spec(name, topic, records=0, work="hang", concurrency=CONCURRENCY, watch_seconds=seconds)
    )
