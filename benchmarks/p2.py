"""P2: how much of the concurrency is used, with handlers that wait."""

from benchmarks.p1 import KEYS, PARTITIONS, numbered_messages
from benchmarks.report import Report, Verdict
from benchmarks.stage import Contestant, Stage
from benchmarks.tables import rate_ratio, rate_rows

TITLE = "Throughput: handler sleeps 5 ms, concurrency 128, 8 partitions, 1,000 keys"
OURS, BARE = "aioshard", "bare loop, no Kafka"
CONCURRENCY = 128
SECONDS = 0.005


async def run(stage: Stage) -> Report:
    """Fill a topic, then let the contestants consume all of it in turn."""
    topic = await stage.fill("p2", PARTITIONS, numbered_messages(stage.size(150_000, 1_000), KEYS))
    contestants = stage.lineup(
        [Contestant(BARE), Contestant(OURS)],
        [
            Contestant("aioshard, fixed shards", rounds=2),
            Contestant("fixed queues", rounds=2),
            Contestant("task per record"),
            Contestant("faststream-concurrent-aiokafka", 10_000, rounds=2, package="faststream_concurrent_aiokafka"),
        ],
    )
    runs = await stage.contest(
        contestants, topic, rounds=stage.size(5, 1), work="sleep", concurrency=CONCURRENCY, seconds=SECONDS
    )
    report = Report("P2", TITLE, rate_rows(runs, ceiling=BARE))
    report.verdicts.append(
        Verdict(
            "records/s, times a bare loop of 128 coroutines",
            rate_ratio(runs, OURS, BARE).median,
            must=0.92,
            aim=0.97,
            at_least=True,
            judged=not stage.quick,
        )
    )
    for name, measured in runs.items():
        report.blame(name, measured)
    report.notes.append(f"128 coroutines that sleep 5 ms cannot do more than {CONCURRENCY / SECONDS:,.0f} records/s.")
    return report
