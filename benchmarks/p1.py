"""P1: CPU per record of the engine, with handlers that do nothing."""

import itertools
from collections.abc import Iterator

from benchmarks.report import Cell, Report, Verdict, spread
from benchmarks.spec import Measurement
from benchmarks.stage import COMPILED, Contestant, Runs, Stage
from benchmarks.tables import cpu_ratio
from tests.support.cluster import Message

TITLE = "CPU per record: no-op handler, 100 B, 8 partitions, 1,000 keys"
OURS, PLAIN, JOURNAL = "aioshard", "plain loop", "aioshard, journal"
CONCURRENCY = 64
PARTITIONS = 8
KEYS = 1_000


def numbered_messages(records: int, keys: int) -> Iterator[Message]:
    """Return messages of 100 bytes of JSON, with keys in turn."""
    value = b'{"padding":"%s"}' % (b"x" * 86)
    names = [b"key-%d" % number for number in range(keys)]
    return zip(itertools.islice(itertools.cycle(names), records), itertools.repeat(value))


async def run(stage: Stage) -> Report:
    """Fill a topic, check each contestant once, then measure them in turn."""
    records = stage.size(1_000_000, 4_000)
    topic = await stage.fill("p1", PARTITIONS, numbered_messages(records, KEYS))
    part = stage.size(200_000, 2_000)
    few, fewer = stage.size(20_000, 500), stage.size(3_000, 200)
    framework, addon = "faststream", "faststream_concurrent_aiokafka"
    contestants = stage.lineup(
        [
            Contestant(PLAIN),
            Contestant(OURS),
            Contestant("aioshard, fixed shards"),
            Contestant(JOURNAL, package="pyarrow"),
            Contestant("fixed queues", part, rounds=3),
            Contestant("task per record", part, rounds=3),
            Contestant("FastStream", few, rounds=3, package=framework),
            Contestant("FastStream, manual ack", fewer, rounds=3, package=framework),
            Contestant("faststream-concurrent-aiokafka", fewer, rounds=3, package=addon),
        ],
        [Contestant(COMPILED, compiled=True)],
    )
    runs = checked = await stage.contest(contestants, topic, rounds=1, work="check", concurrency=CONCURRENCY)
    if not stage.quick:
        runs = await stage.contest(contestants, topic, rounds=5, work="count", concurrency=CONCURRENCY)
    report = Report("P1", TITLE, [_row(name, runs, checked[name][0]) for name in runs])
    ratio = cpu_ratio(runs, OURS, PLAIN).median
    report.verdicts.append(
        Verdict("CPU per record, times the plain loop", ratio, must=1.5, aim=1.4, judged=not stage.quick)
    )
    if COMPILED in runs:
        ratio = cpu_ratio(runs, COMPILED, PLAIN).median
        report.verdicts.append(Verdict("the same, compiled", ratio, must=1.05, aim=0.9))
    elif not stage.quick:
        report.notes.append("Without the compiled package: there is no C compiler.")
    for name, measured in checked.items():
        report.blame(name, measured)
    for name in {OURS, COMPILED} & runs.keys():
        report.problems += await stage.uncommitted(name)
    report.notes.append("Median (least–most) of the rounds; each ratio is within one round.")
    if JOURNAL in runs:
        dropped = max(run.dropped for run in runs[JOURNAL])
        report.notes.append(f"Rows that the journal dropped in a round: {dropped} at most.")
    return report


def _row(name: str, runs: Runs, checked: Measurement) -> dict[str, Cell]:
    measured = runs[name]
    return {
        "contestant": name,
        "records": measured[0].records,
        "µs CPU/record": spread([run.cpu_per_record for run in measured]),
        "× plain loop": cpu_ratio(runs, name, PLAIN),
        "records/s": spread([run.rate for run in measured]).median,
        "lost": checked.missing,
        "twice": checked.repeated,
    }
