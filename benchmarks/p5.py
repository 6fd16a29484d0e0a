"""P5: what many partitions cost."""

from benchmarks.p1 import CONCURRENCY, numbered_messages
from benchmarks.report import Report, Verdict, spread
from benchmarks.stage import Contestant, Stage

TITLE = "CPU per record: 512 partitions against 8; no-op handler, 100 B, 10,000 keys"
OURS, PLAIN = "aioshard", "plain loop"
KEYS = 10_000
FEW = 8


async def run(stage: Stage) -> Report:
    """Fill two topics with the same records, and consume both in turn."""
    many = stage.size(512, 32)
    records = stage.size(1_000_000, 4_000)
    wide = await stage.fill("p5-many", many, numbered_messages(records, KEYS))
    narrow = await stage.fill("p5-few", FEW, numbered_messages(records, KEYS))
    contestants = [Contestant(PLAIN), Contestant(OURS)]
    report = Report("P5", TITLE)
    for topic in () if stage.quick else (wide, narrow):
        checked = await stage.contest([Contestant(OURS)], topic, rounds=1, work="check", concurrency=CONCURRENCY)
        report.blame(OURS, checked[OURS])
    costs: dict[tuple[str, int], list[float]] = {(one.name, at): [] for one in contestants for at in (FEW, many)}
    for _ in range(stage.size(5, 1)):
        for topic in (narrow, wide):
            runs = await stage.contest(contestants, topic, rounds=1, work="count", concurrency=CONCURRENCY)
            for name, (measured,) in runs.items():
                costs[name, len(topic.ends)].append(measured.cpu_per_record)
    for contestant in contestants:
        few_cost, many_cost = costs[contestant.name, FEW], costs[contestant.name, many]
        ratios = spread([one / other for one, other in zip(many_cost, few_cost, strict=True)])
        report.rows.append(
            {
                "contestant": contestant.name,
                "µs CPU/record, 8 partitions": spread(few_cost),
                f"µs CPU/record, {many} partitions": spread(many_cost),
                "ratio": ratios,
            }
        )
        if contestant.name == OURS:
            what = f"CPU per record with {many} partitions, times that with 8"
            report.verdicts.append(Verdict(what, ratios.median, must=1.5, judged=not stage.quick))
    return report
