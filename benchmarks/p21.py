"""P21: side by side with Prosody, whose core is in Rust: rates, a tenth of the keys failing, and a killed process."""

import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from benchmarks.deploying import Deploy, kill
from benchmarks.outage import Outage
from benchmarks.p1 import numbered_messages
from benchmarks.p22 import healthy_rate, observe
from benchmarks.peers.prosody import PROSODY, find_prosody
from benchmarks.report import Cell, Report, Spread, Verdict, spread
from benchmarks.spec import Measurement, Spec, Work
from benchmarks.stage import Contestant, Runs, Stage, Topic
from benchmarks.tables import rate_ratio
from tests.support.cluster import Message

TITLE = "Side by side with Prosody: 100 B of JSON, 8 partitions, 1,000 keys, concurrency 128"
OURS = "aioshard, JSON"
PARTITIONS = 8
KEYS = 1_000
CONCURRENCY = 128
FAILING = "5 ms, a tenth of the keys fails"
KILLED = "5 ms, kill -9"
RATE_SECONDS = 0.5
"""Seconds before a kill in which the rate is measured."""

MOCK_NOTE = (
    "Prosody ran in mock mode: its Kafka broker and its storage, instead of Cassandra, are in its process, and its CPU "
    "includes theirs. That process cannot be killed, because the records would be gone with it."
)


class Workload(NamedTuple):
    """One kind of handler."""

    name: str
    records: int
    peer_records: int
    """Number of records for Prosody, which takes longer for each."""
    work: Work
    seconds: float = 0.0
    slow_seconds: float = 0.0
    """Seconds for one record in a hundred; 0 if all take the same time."""


WORKLOADS = (
    Workload("nothing", 600_000, 40_000, "count"),
    Workload("5 ms", 200_000, 30_000, "sleep", 0.005),
    Workload("1 ms, 1 % 100 ms", 300_000, 30_000, "sleep", 0.001, 0.1),
)


class Outcome(NamedTuple):
    """The measurements of one workload."""

    runs: Runs
    observed: Runs
    """Those in which each record was observed."""


async def run(stage: Stage) -> Report:
    """Measure each workload, with the contestants in turn; then kill aioshard several times."""
    names = [contestant.name for contestant in stage.lineup([Contestant(OURS), Contestant(PROSODY, prosody=True)], [])]
    report = Report("P21", TITLE, notes=[MOCK_NOTE])
    ratios: dict[str, Spread] = {}
    disordered = 0
    for workload in WORKLOADS:
        outcome = await _contest(stage, workload, names)
        report.rows += [_row(workload, name, outcome) for name in names]
        report.blame(OURS, outcome.observed[OURS])
        disordered += sum(run.disordered for run in outcome.observed[OURS])
        if PROSODY in names:
            ratios[workload.name] = rate_ratio(outcome.runs, OURS, PROSODY)
    report.problems += await stage.uncommitted(OURS)

    outages = await _outages(stage, names)
    report.rows += [_outage_row(name, outages) for name in names]
    disordered += sum(outage.disordered for outage in outages[OURS])
    repeated = sum(outage.repeated for outage in outages[OURS])
    if repeated:
        report.problems.append(f"{FAILING}: {OURS} ran {repeated} records more than once")
    if PROSODY in names:
        ratios[FAILING] = _outage_ratio(outages, OURS)
    else:
        report.notes.append(f"{PROSODY} was not measured, because its environment cannot be made here.")

    kills = [await kill(stage, "p21-kill", OURS, 100_000) for _ in range(stage.size(5, 1))]
    again = spread([_work(killed) for killed in kills])
    report.rows.append(_kill_row(kills))
    report.verdicts = [
        Verdict(f"records/s, times Prosody, {name}", ratio.median, must=5.0, at_least=True, judged=not stage.quick)
        for name, ratio in ratios.items()
    ]
    report.verdicts += [
        Verdict("work that ran again after kill -9", again.median, must=0.05, unit="s", judged=not stage.quick),
        Verdict("records lost, kill -9", sum(killed.lost for killed in kills), must=0),
        Verdict("records out of order", disordered, must=0),
    ]
    return report


# A handler that succeeds ----------------------------------------------------------------


async def _contest(stage: Stage, workload: Workload, names: Sequence[str]) -> Outcome:
    records = {
        OURS: stage.size(workload.records, 4_000),
        PROSODY: stage.size(workload.peer_records, 1_000),
    }
    topic = await stage.fill("p21", PARTITIONS, _messages(records[OURS]))
    contestants = [Contestant(name, records[name]) for name in names]

    async def run(spec: Spec) -> Measurement:
        if spec.contestant == PROSODY:  # it fills its own topics, in any order
            spec = replace(spec, ends=(spec.records,) * PARTITIONS, present=spec.records)
        return await stage.run(spec)

    async def contest(work: Work, rounds: int, keys: int) -> Runs:
        return await stage.contest(
            contestants,
            topic,
            rounds=rounds,
            work=work,
            concurrency=CONCURRENCY,
            run=run,
            keys=keys,
            seconds=workload.seconds,
            slow_seconds=workload.slow_seconds,
        )

    rounds = stage.size(3, 1)
    if workload.work == "sleep":
        runs = await contest("sleep", rounds, KEYS)
        return Outcome(runs, runs)
    # Observing takes longer than a handler that does nothing, so a separate round observes.
    observed = await contest("check", 1, KEYS)
    return Outcome(await contest("count", rounds, 0), observed)


def _messages(records: int) -> Iterator[Message]:
    _, value = next(numbered_messages(1, 1))
    return ((b"%08d" % (number % KEYS), value) for number in range(records))


def _row(workload: Workload, name: str, outcome: Outcome) -> dict[str, Cell]:
    runs = outcome.runs[name]
    observed = outcome.observed[name]
    return {
        "workload": workload.name,
        "contestant": name,
        "records": runs[0].records,
        "records/s": spread([run.rate for run in runs]),
        f"× {PROSODY}": rate_ratio(outcome.runs, name, PROSODY) if PROSODY in outcome.runs else None,
        "µs CPU/record": spread([run.cpu_per_record for run in runs]).median,
        "lost": sum(run.missing for run in observed),
        "twice": sum(run.repeated for run in observed),
        "out of order": sum(run.disordered for run in observed),
    }


# Keys that fail -------------------------------------------------------------------------


class Observation(NamedTuple):
    """The result of one run in which a tenth of the keys fails."""

    healthy: float
    """Records per second of the other keys meanwhile."""
    records: int
    repeated: int
    disordered: int


Outages = dict[str, list[Observation]]
"""The observations of each contestant, in the order of the rounds."""


async def _outages(stage: Stage, names: Sequence[str]) -> Outages:
    """Let the contestants run in turn."""
    topic = await stage.fill("p21-failing", PARTITIONS, _messages(stage.size(800_000, 30_000)))
    outages: Outages = {name: [] for name in names}
    for number in range(stage.size(3, 1)):
        for name in names if number % 2 == 0 else reversed(names):
            observed = await _outage(stage, topic, name)
            outages[name].append(observed)
            stage.say(f"round {number + 1}  {FAILING}, {name}: {observed}")
    return outages


async def _outage(stage: Stage, topic: Topic, name: str) -> Observation:
    seconds = stage.size(20, 4)
    outage = Outage(
        bootstrap=stage.cluster.bootstrap,
        topic=topic.name,
        side_topic=await stage.begin("p21-parked", PARTITIONS, {"cleanup.policy": "compact"}),
        group=uuid.uuid4().hex[:8],
        delay=stage.size(5, 1),
        seconds=seconds,
        watch=stage.size(8, 2),
        concurrency=CONCURRENCY,
        decodes=True,
        records=stage.size(120_000, 12_000),
    )
    if name == PROSODY:
        observed = await observe(name, outage, str(find_prosody()), "benchmarks.contestants.prosody_pipeline")
    else:
        observed = await observe(name, outage, sys.executable, "benchmarks.parked_keys")
    records = sum(observed["healthy"].values()) + sum(observed["others"].values())
    return Observation(healthy_rate(observed, seconds), records, observed["repeated"], observed["disordered"])


def _outage_row(name: str, outages: Outages) -> dict[str, Cell]:
    observed = outages[name]
    return {
        "workload": FAILING,
        "contestant": name,
        "records": round(median(outage.records for outage in observed)),
        "records/s": spread([outage.healthy for outage in observed]),
        f"× {PROSODY}": _outage_ratio(outages, name) if PROSODY in outages else None,
        "twice": sum(outage.repeated for outage in observed),
        "out of order": sum(outage.disordered for outage in observed),
    }


def _outage_ratio(outages: Outages, name: str) -> Spread:
    """Return the records/s of healthy keys divided by those of Prosody, round by round."""
    pairs = zip(outages[name], outages[PROSODY], strict=True)
    return spread([one.healthy / max(other.healthy, 1.0) for one, other in pairs])


# A killed process -----------------------------------------------------------------------


def _kill_row(kills: Sequence[Deploy]) -> dict[str, Cell]:
    return {
        "workload": KILLED,
        "contestant": OURS,
        "records": kills[0].produced,
        "records/s": spread([killed.rate_before(RATE_SECONDS) for killed in kills]),
        "lost": sum(killed.lost for killed in kills),
        "ran again": spread([killed.twice for killed in kills]),
        "s of work": spread([_work(killed) for killed in kills]),
    }


def _work(killed: Deploy) -> float:
    """Return the seconds of work that ran again, at the rate before the kill."""
    return killed.twice / max(killed.rate_before(RATE_SECONDS), 1.0)
