"""P4: the effect of a few slow records on the others (head-of-line blocking)."""

from benchmarks.p1 import KEYS, PARTITIONS, numbered_messages
from benchmarks.report import Report, Verdict
from benchmarks.stage import Contestant, Stage
from benchmarks.tables import rate_ratio, rate_rows

TITLE = "Head-of-line blocking: 1 % of the records take 100 ms, the others 1 ms; concurrency 128"
OURS, QUEUES, TASKS = "aioshard", "fixed queues", "task per record"
CONCURRENCY = 128


async def run(stage: Stage) -> Report:
    """Fill a topic, then let the contestants consume all of it in turn."""
    topic = await stage.fill("p4", PARTITIONS, numbered_messages(stage.size(200_000, 1_000), KEYS))
    contestants = stage.lineup(
        [Contestant(QUEUES), Contestant(OURS), Contestant(TASKS)],
        [Contestant("aioshard, fixed shards", rounds=2), Contestant("bare loop, no Kafka", rounds=2)],
    )
    runs = await stage.contest(
        contestants,
        topic,
        rounds=stage.size(5, 1),
        work="sleep",
        concurrency=CONCURRENCY,
        seconds=0.001,
        slow_seconds=0.1,
    )
    report = Report("P4", TITLE, rate_rows(runs, ceiling=TASKS))
    for other, must, aim, what in (
        (QUEUES, 1.7, 2.2, "records/s, times fixed queues"),
        (TASKS, 0.55, 0.8, "records/s, times a task per record, which keeps no order"),
    ):
        ratio = rate_ratio(runs, OURS, other).median
        report.verdicts.append(Verdict(what, ratio, must=must, aim=aim, at_least=True, judged=not stage.quick))
    for name, measured in runs.items():
        report.blame(name, measured)
    return report
