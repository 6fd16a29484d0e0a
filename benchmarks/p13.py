"""P13: side by side with Confluent Parallel Consumer, on the same broker, with the same handlers."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.peers import HEAP, PEERS
from benchmarks.report import Cell, Report, Verdict, spread
from benchmarks.spec import Measurement
from benchmarks.stage import Contestant, ContestantFailedError, Stage, Topic
from benchmarks.workloads import (
    DESCRIPTIONS,
    WARM_UP_KEYS,
    WORKLOADS,
    Filled,
    UnfilledError,
    Workload,
    fill,
    fill_to_warm_up,
)

TITLE = "Side by side with Confluent Parallel Consumer: order per key; threads there, coroutines and processes here"
OURS = "aioshard"
COMPUTING = ("aioshard, processes", "aioshard, batches in processes")
"""Contestants for handlers that compute only."""
PEER = PEERS[0]
MIB = 1024 * 1024
WARM_UP = 100_000
WARM_UP_HASHES = 4_000
SPARE_SECONDS = 60.0
"""Seconds that a run may take in addition to twice the bound."""


BOUND_NOTE = "× bound: of the records/s that nobody can exceed who keeps the order of each key with that concurrency."
CLOCK_NOTE = (
    "Records/s and CPU are from the first record to the last, after a warm-up with another topic in the same process; "
    "start is from the start of the process to the first record of that."
)
PEER_NOTE = (
    "Parallel Consumer 0.5.3.3 has its pool of threads, order by key, a commit each second as aioshard, the same "
    f"isolation and fetch sizes, and a heap of at most {HEAP}."
)


@dataclass(slots=True)
class Outcome:
    """The result of one contestant on one workload."""

    runs: list[Measurement] = field(default_factory=list)
    uncommitted: int = 0
    """Number of records in all rounds that its commits did not cover at the end."""
    failure: str = ""
    """Sentence that explains why it was excluded."""


async def run(stage: Stage) -> Report:
    """Measure each workload, with the contestants in turn."""
    report = Report("P13", TITLE)
    others = [Contestant(PEER, peer=True)]
    names = [contestant.name for contestant in stage.lineup([Contestant(OURS)], others)]
    easy = await fill_to_warm_up(stage, stage.size(WARM_UP, 200))
    hard = await fill_to_warm_up(stage, stage.size(WARM_UP_HASHES, 50))
    wrong = {name: 0 for name in [*names, *COMPUTING] if name != PEER}
    for workload in WORKLOADS if not stage.quick else [workload for workload in WORKLOADS if workload.quick]:
        try:
            filled = await fill(stage, workload)
        except UnfilledError as failure:
            report.problems.append(f"{workload.name} was not measured: {failure}")
            continue
        course = Course(stage, workload, filled, hard if workload.work == "hash" else easy)
        outcomes = await course.contest([*names, *COMPUTING] if workload.work == "hash" else names)
        if workload.work == "hash" and PEER in outcomes:
            report.verdicts += _verdicts(outcomes)
        for name, outcome in outcomes.items():
            report.rows.append(row_of(workload, name, filled, outcome))
            if name in wrong:
                report.blame(name, outcome.runs)
                wrong[name] += outcome.uncommitted + sum(run.disordered for run in outcome.runs)
                if outcome.failure:
                    report.problems.append(f"{workload.name}: {outcome.failure}")
    for name, records in wrong.items():
        report.verdicts.append(Verdict(f"records out of order or not committed, {name}", records, must=0))
    report.notes += [*DESCRIPTIONS, BOUND_NOTE, CLOCK_NOTE, PEER_NOTE]
    if PEER not in names and not stage.quick:
        report.notes.append(f"{PEER} was not measured: a JDK or Maven is missing.")
    return report


@dataclass(frozen=True, slots=True)
class Course:
    """One workload, ready to be run."""

    stage: Stage
    workload: Workload
    filled: Filled
    warm_up: Topic

    async def contest(self, names: Sequence[str]) -> dict[str, Outcome]:
        """Run the contestants in turn, backwards in every second round; exclude a contestant that fails."""
        outcomes = {name: Outcome() for name in names}
        for number in range(self.stage.size(self.workload.rounds, 1)):
            for name in names if number % 2 == 0 else reversed(names):
                if not outcomes[name].failure:
                    await self._run(name, outcomes[name])
        return outcomes

    async def _run(self, name: str, outcome: Outcome) -> None:
        filled, workload = self.filled, self.workload
        spec = self.stage.spec(
            name, filled.topic, records=filled.records, work=workload.work, concurrency=workload.concurrency
        )
        spec = replace(
            spec,
            present=filled.records,
            keys=max(workload.keys, WARM_UP_KEYS),
            warm_up=self.warm_up.name,
            warm_up_ends=self.warm_up.ends,
        )
        needed = filled.records / filled.bound if filled.bound else SPARE_SECONDS
        try:
            measured = await self.stage.run(spec, 2 * needed + SPARE_SECONDS)
        except ContestantFailedError as failure:
            outcome.failure = str(failure).splitlines()[-1]
            self.stage.say(f"{workload.name}  {name}: {failure}")
            return
        outcome.runs.append(measured)
        committed = await self.stage.cluster.committed(spec.group, filled.topic.name)
        outcome.uncommitted += filled.uncommitted(committed)
        self.stage.say(
            f"{workload.name}  {name}: {measured.rate:,.0f} records/s, {measured.cpu_seconds:.1f} s CPU, "
            f"{measured.peak_rss / MIB:.0f} MiB, at most {measured.peak_concurrency} at once"
        )


def _verdicts(outcomes: dict[str, Outcome]) -> list[Verdict]:
    """Compare CPU-bound handlers in processes with Parallel Consumer."""
    rates = {name: [run.rate for run in outcome.runs] for name, outcome in outcomes.items() if outcome.runs}
    if PEER not in rates:
        return []
    best = max(statistics.median(rates[name]) for name in COMPUTING if name in rates)
    ratio = best / statistics.median(rates[PEER])
    what = f"records/s of the better of {' and '.join(COMPUTING)}, times {PEER}, SHA-256"
    return [Verdict(what, ratio, must=1.0, aim=1.2, at_least=True)]


def row_of(workload: Workload, name: str, filled: Filled, outcome: Outcome) -> dict[str, Cell]:
    """Return a row of the table."""
    row: dict[str, Cell] = {"workload": workload.name, "contestant": name, "records": filled.records}
    if outcome.failure:
        return row | {"records/s": outcome.failure}
    runs = outcome.runs
    rates = spread([run.rate for run in runs])
    return row | {
        "records/s": rates if len(runs) > 1 else rates.median,
        "× bound": rates.median / filled.bound if filled.bound else None,
        "99 % after, s": statistics.median(run.nearly_seconds for run in runs),
        "CPU, s": statistics.median(run.cpu_seconds for run in runs),
        "memory, MiB": max(run.peak_rss for run in runs) / MIB,
        "at once": max(run.peak_concurrency for run in runs),
        "start, s": statistics.median(run.start_seconds for run in runs),
        "lost": sum(run.missing for run in runs),
        "twice": sum(run.repeated for run in runs),
        "out of order": sum(run.disordered for run in runs),
        "uncommitted": outcome.uncommitted,
    }
