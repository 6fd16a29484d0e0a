"""P16: CPU-bound handlers, in worker processes and in threads."""

import time
from collections.abc import Iterator

from benchmarks.contestants.handlers import compute
from benchmarks.p1 import KEYS, PARTITIONS
from benchmarks.report import Report, Verdict
from benchmarks.stage import Contestant, Stage
from benchmarks.tables import rate_ratio, rate_rows
from tests.support.cluster import Message

TITLE = "Computing: 2 ms of pure Python, 8 partitions, 1,000 keys, as many processes as processors"
PROCESSES, THREADS = "aioshard, processes", "aioshard, threads"
SECONDS = 0.002
CONCURRENCY = 64


async def run(stage: Stage) -> Report:
    """Let both consume the same topic in turn; then measure the cost of a call that computes nothing."""
    topic = await stage.fill("p16", PARTITIONS, _messages(stage.size(10_000, 200)))
    contestants = [Contestant(PROCESSES), Contestant(THREADS)]
    runs = await stage.contest(
        contestants,
        topic,
        rounds=stage.size(5, 1),
        work="compute",
        concurrency=CONCURRENCY,
        keys=KEYS,
        turns=_turns(SECONDS),
    )
    report = Report("P16", TITLE, rate_rows(runs, ceiling=THREADS))
    report.verdicts.append(
        Verdict(
            "records/s in processes, times those in threads",
            rate_ratio(runs, PROCESSES, THREADS).median,
            must=1.7,
            aim=1.9,
            at_least=True,
            judged=not stage.quick,
        )
    )
    idle = await stage.contest(
        contestants, topic, rounds=stage.size(3, 1), work="compute", concurrency=CONCURRENCY, keys=KEYS
    )
    costs = {row["contestant"]: row["µs CPU/record"] for row in rate_rows(idle, ceiling=THREADS)}
    report.notes.append(
        f"A call that computes nothing costs {costs[PROCESSES]:.0f} µs of CPU per record in processes, of the app's "
        f"process and the worker together, and {costs[THREADS]:.0f} µs in threads; the reading and the notes are in it."
    )
    for name in runs:
        report.blame(name, [*runs[name], *idle[name]])
    return report


def _messages(records: int) -> Iterator[Message]:
    return ((b"%08d" % (number % KEYS), b"x" * 100) for number in range(records))


def _turns(seconds: float) -> int:
    """Return how many iterations of `compute` take *seconds* here, at best."""
    turns = 10_000
    times = []
    for _ in range(20):
        began = time.process_time()
        compute(None, turns)
        times.append(time.process_time() - began)
    return round(turns * seconds / min(times))
