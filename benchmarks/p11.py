"""P11: the effect of a few slow records on a backfill on Spark."""

from benchmarks.history import job_rows, measure
from benchmarks.p1 import PARTITIONS, numbered_messages
from benchmarks.report import Report, Verdict
from benchmarks.stage import Contestant, Stage
from benchmarks.tables import rate_ratio

TITLE = "Slow records on Spark, local[2]: 1 % take 300 ms, the others 4 ms; 256 in flight in each task"
OURS, THOUSAND, TEN_THOUSAND = "aioshard, fused", "gather per 1,000 rows", "gather per 10,000 rows"
CONCURRENCY = 256
KEYS = 20_000
"""Enough that order per key does not limit anybody."""


async def run(stage: Stage) -> Report:
    """Fill a topic, then let the jobs consume all of it in turn."""
    topic = await stage.fill("p11", PARTITIONS, numbered_messages(stage.size(320_000, 4_000), KEYS))
    contestants = stage.lineup([Contestant(OURS), Contestant(THOUSAND), Contestant(TEN_THOUSAND)], [])
    checked, runs = await measure(
        stage, contestants, topic, rounds=5, work="sleep", concurrency=CONCURRENCY, seconds=0.004, slow_seconds=0.3
    )
    report = Report("P11", TITLE, job_rows(runs, checked, ceiling=THOUSAND))
    for row in report.rows:
        row[f"× {TEN_THOUSAND}"] = rate_ratio(runs, str(row["contestant"]), TEN_THOUSAND)
    for other, must in ((THOUSAND, 3.0), (TEN_THOUSAND, 1.3)):
        ratio = rate_ratio(runs, OURS, other).median
        what = f"records/s, times a {other}, which keeps no order"
        report.verdicts.append(Verdict(what, ratio, must=must, at_least=True, judged=not stage.quick))
    for name, measured in checked.items():
        report.blame(name, measured)
    report.notes.append(
        "From the start of a job to its end; without the start of the session and the first job of each."
    )
    return report
