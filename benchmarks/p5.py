"""P5: CPU per record with many partitions."""

from benchmarks.p1 import CONCURRENCY, numbered_messages
from benchmarks.report import Cell, Report, Verdict, spread
from benchmarks.stage import Contestant, Stage

TITLE = "CPU per record: 8, 512 and 2,048 partitions, large and small batches; no-op handler, 100 B"
OURS, PLAIN = "aioshard", "plain loop"
RECORDS = 600_000
FEW, MANY, MOST = 8, 512, 2_048
KEYS_PER_PARTITION = 20
BATCHES = {"120 KB": 120_000, "4 records": 540}
"""Maximum bytes of a batch. A producer fills a batch of a partition up to this size, or with all that it has."""
MUSTS = {MANY: (1.1, 1.05), MOST: (1.3, 1.2)}
"""Must and aim of the CPU per record, times that with 8 partitions."""


async def run(stage: Stage) -> Report:
    """Fill a topic for each number of partitions and shape of batches, and consume them in turn."""
    contestants = [Contestant(PLAIN), Contestant(OURS)]
    report = Report("P5", TITLE)
    for shape, batch_bytes in BATCHES.items():
        topics = {}
        for partitions in (FEW, MANY, MOST):
            count = stage.size(partitions, min(partitions, 32))
            messages = numbered_messages(stage.size(RECORDS, 4_000), KEYS_PER_PARTITION * MOST)
            topics[partitions] = await stage.fill(f"p5-{partitions}", count, messages, batch_bytes=batch_bytes)
        for topic in () if stage.quick else (topics[FEW], topics[MANY]):
            checked = await stage.contest([Contestant(OURS)], topic, rounds=1, work="check", concurrency=CONCURRENCY)
            report.blame(OURS, checked[OURS])
        costs: dict[tuple[str, int], list[float]] = {(one.name, at): [] for one in contestants for at in topics}
        for _ in range(stage.size(5, 1)):
            for partitions, topic in topics.items():
                runs = await stage.contest(contestants, topic, rounds=1, work="count", concurrency=CONCURRENCY)
                for name, (measured,) in runs.items():
                    costs[name, partitions].append(measured.cpu_per_record)
        for contestant in contestants:
            few = costs[contestant.name, FEW]
            row: dict[str, Cell] = {
                "batches": shape,
                "contestant": contestant.name,
                f"µs CPU/record, {FEW}": spread(few),
            }
            for partitions, (must, aim) in MUSTS.items():
                many = costs[contestant.name, partitions]
                ratios = spread([cost / base for cost, base in zip(many, few, strict=True)])
                row |= {f"µs, {partitions:,}": spread(many), f"{partitions:,} × {FEW}": ratios}
                if contestant.name == OURS:
                    what = f"CPU per record with {partitions:,} partitions, times that with {FEW}, batches of {shape}"
                    judged = not stage.quick
                    report.verdicts.append(Verdict(what, ratios.median, must=must, aim=aim, judged=judged))
            report.rows.append(row)
        await stage.tidy()
    return report
