"""P10: throughput per core of a backfill on Spark, with handlers that do nothing."""

import psutil

from benchmarks.history import ONE_CORE, PLAIN_APP, job_rows, measure
from benchmarks.p1 import CONCURRENCY, KEYS, PARTITIONS, numbered_messages
from benchmarks.report import Report, Verdict, spread
from benchmarks.stage import Contestant, Stage
from benchmarks.tables import rate_ratio

TITLE = "A topic on Spark: no-op handler, 100 B, 8 partitions, 1,000 keys"
FUSED, MAPPED = "aioshard, fused", "aioshard, mapInArrow"
ENOUGH_CORES = 4
"""Two for the tasks, the others for the broker and for Spark's Java: fewer cannot show that two tasks run twice as fast
as one."""


async def run(stage: Stage) -> Report:
    """Fill a topic, then let the app and the jobs consume all of it in turn."""
    topic = await stage.fill("p10", PARTITIONS, numbered_messages(stage.size(2_000_000, 4_000), KEYS))
    contestants = stage.lineup(
        [Contestant(PLAIN_APP), Contestant(ONE_CORE), Contestant(FUSED), Contestant(MAPPED, rounds=3)],
        [Contestant("source alone", rounds=2)],
    )
    checked, runs = await measure(stage, contestants, topic, rounds=5, work="count", concurrency=CONCURRENCY)
    report = Report("P10", TITLE, job_rows(runs, checked, ceiling=PLAIN_APP))
    for row in report.rows:
        row[f"× {ONE_CORE}"] = rate_ratio(runs, str(row["contestant"]), ONE_CORE)
    for one, other, must, aim, cores, what in (
        (ONE_CORE, PLAIN_APP, 0.75, 0.8, 1, "records/s of the fused source on one core, times the plain app's"),
        (FUSED, MAPPED, 1.5, None, 1, "records/s of the fused source, times those of the source and mapInArrow"),
        (FUSED, ONE_CORE, 1.8, 2.0, ENOUGH_CORES, "records/s of the fused source on two cores, times that on one"),
    ):
        judged = not stage.quick and (psutil.cpu_count() or 1) >= cores
        ratio = rate_ratio(runs, one, other).median
        report.verdicts.append(Verdict(what, ratio, must=must, aim=aim, at_least=True, judged=judged))
    for name, measured in checked.items():
        report.blame(name, measured)
    cpu = spread(
        [
            mine.cpu_per_record / theirs.cpu_per_record
            for mine, theirs in zip(runs[ONE_CORE], runs[PLAIN_APP], strict=True)
        ]
    )
    report.notes.append(
        "From the start of a job, or of the app, to its end; without the session's start and the first job of each."
    )
    report.notes.append(
        "The app and local[1] run handlers on one core, all others on two. Spark's Java and the broker take what they "
        "need of any core."
    )
    report.notes.append(
        "µs CPU/record is that of all processes together, Spark's Java and its workers among them: for "
        f"{ONE_CORE} it is {cpu} times the plain app's."
    )
    return report
