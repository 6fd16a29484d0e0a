"""P3: a 10 ms handler on 32 partitions, which a sequential consumer cannot keep up with; CPU of waiting handlers."""

from benchmarks.p1 import numbered_messages
from benchmarks.report import Report, Verdict, spread
from benchmarks.stage import COMPILED, Contestant, Stage
from benchmarks.tables import cpu_ratio, rate_rows

TITLE = "Throughput: handler sleeps 10 ms, 32 partitions, 10,000 keys, concurrency 1,024"
OURS, BARE = "aioshard", "bare loop, no Kafka"
PARTITIONS = 32
KEYS = 10_000
CONCURRENCY = 1_024
SECONDS = 0.010
SHORTER = 0.005


async def run(stage: Stage) -> Report:
    """Fill a topic, then let the contestants consume all of it in turn."""
    topic = await stage.fill("p3", PARTITIONS, numbered_messages(stage.size(600_000, 2_000), KEYS))
    contestants = stage.lineup(
        [Contestant(BARE), Contestant(OURS)],
        [
            Contestant("task per record", rounds=2),
            Contestant("fixed queues", rounds=2),
            Contestant("task per partition", 15_000, rounds=2),
        ],
    )
    runs = await stage.contest(
        contestants, topic, rounds=stage.size(3, 1), work="sleep", concurrency=CONCURRENCY, seconds=SECONDS
    )
    report = Report("P3", TITLE, rate_rows(runs, ceiling=BARE))
    report.verdicts.append(
        Verdict(
            "records/s, 20 times what 32 sequential partitions do",
            spread([run.rate for run in runs[OURS]]).median,
            must=64_000,
            at_least=True,
            judged=not stage.quick,
        )
    )
    shorter = await stage.contest(
        stage.lineup([Contestant(BARE), Contestant(OURS)], [Contestant(COMPILED, compiled=True)]),
        topic,
        rounds=stage.size(5, 1),
        work="sleep",
        concurrency=CONCURRENCY,
        seconds=SHORTER,
    )
    report.rows += [row | {"contestant": f"{row['contestant']}, 5 ms"} for row in rate_rows(shorter, ceiling=BARE)]
    for what, measured, name, must, aim in (
        ("10 ms", runs, OURS, 2.1, 1.8),
        ("5 ms", shorter, OURS, 2.0, 1.7),
        ("5 ms, compiled", shorter, COMPILED, 2.0, 1.7),
    ):
        if name in measured:
            ratio = cpu_ratio(measured, name, BARE).median
            text = f"CPU per record, times bare coroutines, {what}"
            report.verdicts.append(Verdict(text, ratio, must=must, aim=aim, judged=not stage.quick))
    for name, rounds in [*runs.items(), *shorter.items()]:
        report.blame(name, rounds)
    report.notes.append("32 partitions that are processed one record at a time do 3,200 records/s at most.")
    return report
