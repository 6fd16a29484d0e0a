"""P10: what a run over history costs on Spark, where handlers do nothing."""

from benchmarks.history import PLAIN_APP, job_rows, measure
from benchmarks.p1 import CONCURRENCY, KEYS, PARTITIONS, numbered_messages
from benchmarks.report import Report, Verdict
from benchmarks.stage import Contestant, Stage
from benchmarks.tables import rate_ratio

TITLE = "A topic on Spark, local[2]: no-op handler, 100 B, 8 partitions, 1,000 keys"
FUSED, MAPPED = "aioshard, fused", "aioshard, mapInArrow"


async def run(stage: Stage) -> Report:
    """Fill a topic, then let the app and the jobs consume all of it in turn."""
    topic = await stage.fill("p10", PARTITIONS, numbered_messages(stage.size(1_000_000, 4_000), KEYS))
    contestants = stage.lineup(
        [Contestant(PLAIN_APP), Contestant(FUSED), Contestant(MAPPED)], [Contestant("source alone", rounds=2)]
    )
    checked, runs = await measure(stage, contestants, topic, rounds=5, work="count", concurrency=CONCURRENCY)
    report = Report("P10", TITLE, job_rows(runs, checked, ceiling=PLAIN_APP))
    for row in report.rows:
        row[f"× {MAPPED}"] = rate_ratio(runs, str(row["contestant"]), MAPPED)
    for other, must, what in (
        (PLAIN_APP, 0.8, "records/s of the fused source, times the plain app's"),
        (MAPPED, 1.5, "records/s of the fused source, times those of the source and mapInArrow"),
    ):
        ratio = rate_ratio(runs, FUSED, other).median
        report.verdicts.append(Verdict(what, ratio, must=must, at_least=True, judged=not stage.quick))
    for name, measured in checked.items():
        report.blame(name, measured)
    report.notes.append(
        "From the start of a job, or of the app, to its end; without the session's start and the first job of each."
    )
    report.notes.append("µs CPU/record is that of all processes together, Spark's Java and its workers among them.")
    return report
