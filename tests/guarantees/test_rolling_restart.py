"""P8, a rolling deploy: every member is replaced, and kept partitions hardly pause (I7, I12)."""

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from aioshard import Record, Settings
from tests.guarantees.behaviour import Behaviour
from tests.guarantees.checks import DEPLOYED, SAFE
from tests.guarantees.observations import Kind, RecordId, Seen
from tests.guarantees.pauses import Pause, idle_workers, pauses
from tests.guarantees.scenario import SHORT, GroupProtocol, Scenario

NAMES = "abc"
PARTITIONS = 6
"""Of each of the two topics."""
SLOWEST = 1.5
"""Seconds that a handler takes at most: how long a drain lasts that meets such a run."""
HEARTBEAT = SHORT["heartbeat_interval"]
JOIN = 1.0
"""Seconds in which a group whose members have all drained has a new assignment, and positions are checked."""
UNNOTICED = 0.75
"""Seconds that processes on a busy machine may need for anything."""
CONCURRENCY = 48
PLENTY = 1_000
"""Workers that are never all busy, also when a partition that stood still has to catch up."""
EVERY = 0.05
"""Seconds between two records of each partition under a steady load."""


@dataclass(frozen=True)
class Membership:
    """One way to be a member of the group, and how long a kept partition may pause in it, in seconds."""

    protocol: GroupProtocol
    idle: float
    """A worker, while records are in memory."""
    pause: float
    """A partition, while the brokers have records."""
    static: bool = False

    def settings(self, name: str) -> Mapping[str, Any]:
        """Of one member."""
        static = {"group_instance_id": f"member-{name}", "session_timeout": 20} if self.static else {}
        return {"start_timeout": 60, "drain_timeout": 2 * SLOWEST, **static}


EAGER = HEARTBEAT + SLOWEST + JOIN
MEMBERSHIPS = {
    "eager": Membership("eager", idle=EAGER, pause=EAGER),
    "static": Membership("classic", idle=UNNOTICED, pause=UNNOTICED, static=True),
    "classic": Membership("classic", idle=UNNOTICED, pause=SLOWEST + 0.5),
    "consumer": Membership("consumer", idle=UNNOTICED, pause=SLOWEST + 0.5),
}


@pytest.mark.chaos
@pytest.mark.timeout(240)
@pytest.mark.parametrize("shards", [pytest.param(None, id=pytest.HIDDEN_PARAM)])  # a fixed shard's worker may idle
@pytest.mark.parametrize(
    ("membership", "protocol"),
    [pytest.param(membership, membership.protocol, id=name) for name, membership in MEMBERSHIPS.items()],
)
async def test_replacing_three_members_in_turn_leaves_kept_partitions_running(
    scenario: Scenario, membership: Membership
) -> None:
    """Two handlers: one has more to do than it can, so records wait in memory; the other one waits for records."""
    async with scenario.beside("steady") as steady:
        await scenario.create(PARTITIONS)
        await steady.create(PARTITIONS)
        deploy = Deploy(scenario, steady, membership)
        for name in NAMES:
            deploy.start(name)
        await deploy.until_shared()
        scenario.start_feeding((b"k%d" % number for number in itertools.count()), backlog=1_500, chunk=500)
        async with steady_load(steady) as available:
            await scenario.until_finished(500)
            for name in NAMES:
                await deploy.replace(name)
            await scenario.until_finished(len(scenario.observations.finished) + 500)

        figures = deploy.figures(available)
        scenario.notes |= figures.as_notes()
        await steady.verify(*DEPLOYED)
        await scenario.verify(*DEPLOYED)
        assert figures.replayed == 0
        assert figures.idle.seconds <= membership.idle + figures.late
        assert figures.stayed.seconds <= membership.pause + figures.late
        if not membership.static:
            assert max(figures.drains) > SLOWEST / 2, "nothing had to be waited for: this shows nothing"
            assert figures.kept > 0, "nothing stayed where it was: this shows nothing"


KEPT = 0.5
"""Seconds for which a kept partition may pause."""
DELAY, SESSION = 2.0, 3.0


@pytest.mark.chaos
@pytest.mark.timeout(180)
@pytest.mark.parametrize("shards", [pytest.param(None, id=pytest.HIDDEN_PARAM)])
async def test_kept_partitions_hardly_pause_when_members_join_and_die(scenario: Scenario) -> None:
    """Two members have four partitions. A third one joins, in two rounds; one is killed, and its partitions wait."""
    settings = {"session_timeout": SESSION, "reassignment_delay": DELAY, "assignor": "cooperative-lag"}
    await scenario.create(partitions=4)
    for name in "ab":
        scenario.start(name, settings, spread=0.05)
    await scenario.until_settled("a", "b")
    async with steady_load(scenario, 4) as available:
        await scenario.until_finished(100)
        scenario.start("c", settings, spread=0.05)
        await scenario.until_settled("a", "b", "c")
        await scenario.until_finished(len(scenario.observations.finished) + 100)
        await scenario.kill("b")
        await scenario.until_settled("a", "c")
        await scenario.until_finished(len(scenario.observations.finished) + 100)

    observations = scenario.observations.refresh()
    late = min(max(overruns(observations.seen, 0.05)), 0.5)
    found = list(pauses(observations.seen, available))
    stayed, moved = (max(pause for pause in found if pause.moved is each) for each in (False, True))
    scenario.notes |= {
        "what stayed paused": _as_note(stayed),
        "what moved paused": _as_note(moved),
        "late": round(late, 2),
    }
    assert stayed.seconds <= KEPT + late
    assert DELAY <= moved.seconds <= DELAY + SESSION + 5
    await scenario.verify(*SAFE)


QUICK: Mapping[str, Any] = {"session_timeout": 10}
DEFAULT: Mapping[str, Any] = {
    name: Settings.model_fields[name].default for name in SHORT if name != "auto_offset_reset"
}
LATE = 2.0
"""Seconds that processes on a busy machine may be late at most; a member that waits for a dead one stops for longer."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(QUICK, id="short session"),
        pytest.param(DEFAULT, id="default settings", marks=pytest.mark.chaos),
    ],
)
@pytest.mark.parametrize("shards", [pytest.param(None, id=pytest.HIDDEN_PARAM)])
async def test_a_killed_member_and_its_replacement_do_not_stop_the_survivor(
    scenario: Scenario, settings: Mapping[str, Any]
) -> None:
    """The group waits for the dead member until its session ends; meanwhile, the survivor's partitions continue."""
    session = settings["session_timeout"]
    await scenario.create(partitions=4)
    for name in "ab":
        scenario.start(name, settings, spread=0.05)
    await scenario.until_settled("a", "b")
    survivor = scenario.members["a"]
    own = set(survivor.partitions)
    async with steady_load(scenario, 4) as available:
        await scenario.until_finished(400)
        await scenario.kill("b")
        killed_at = time.monotonic_ns()
        scenario.start("b", settings, spread=0.05)
        await scenario.until_settled("a", "b", timeout=session + 60)
        await scenario.until_finished(len(scenario.observations.finished) + 200)

    seen = scenario.observations.refresh().seen
    found = [pause for pause in pauses(seen, available) if pause.record_id[0] in own and not pause.moved]
    before = max(pause for pause in found if available[pause.record_id] < killed_at)
    after = max(pause for pause in found if available[pause.record_id] >= killed_at)
    moved = max(pause for pause in pauses(seen, available) if pause.moved)
    late = min(max(overruns(seen, 0.05)), LATE)
    scenario.notes |= {
        "the survivor paused before": _as_note(before),
        "and after the kill": _as_note(after),
        "what the dead one had paused": _as_note(moved),
        "late": round(late, 2),
    }
    print(scenario.notes)
    assert moved.seconds > session / 2, "the group did not wait for the dead member: this shows nothing"
    assert after.seconds <= KEPT + before.seconds + late
    await scenario.verify(*SAFE)


@dataclass(frozen=True)
class Figures:
    """The measurements."""

    idle: Pause
    """The longest time in which a worker idled while a record that stayed was in memory."""
    stayed: Pause
    """The longest time in which nothing of a partition that stayed was started although the broker had a record."""
    moved: Pause
    """The same of a partition that went to another process."""
    drains: Sequence[float]
    """Seconds of each rebalance that took something away."""
    kept: int
    """How many partitions stayed in these, over all members."""
    replayed: int
    late: float
    """Seconds by which a run took longer than it slept, at most: so busy was the machine. Half a second counts."""

    def as_notes(self) -> dict[str, object]:
        """For the report of the test."""
        return {
            "a worker idled": _as_note(self.idle),
            "what stayed paused": _as_note(self.stayed),
            "what moved paused": _as_note(self.moved),
            "drains": [round(seconds, 2) for seconds in self.drains],
            "kept": self.kept,
            "late": round(self.late, 2),
        }


def _as_note(pause: Pause) -> str:
    return f"{pause.seconds:.2f} s, {pause.process} at {pause.record_id[0]}/{pause.record_id[1]}"


class Deploy:
    """The members of both topics, replaced one by one."""

    def __init__(self, scenario: Scenario, steady: Scenario, membership: Membership) -> None:
        self._scenario = scenario
        self._steady = steady
        self._membership = membership
        self._ended: list[Mapping[str, Any]] = []
        """The last statistics of members that have ended."""

    def start(self, name: str) -> None:
        """Starts a member."""
        self._scenario.start(
            name,
            self._membership.settings(name),
            concurrency=CONCURRENCY,
            spread=SLOWEST,
            report_intake=True,
            beside=[self._steady.handled(report_intake=False, concurrency=PLENTY)],
        )

    async def until_shared(self) -> None:
        """Returns when each partition is open in one member, and each member has some."""
        members = self._scenario.members
        everything = sorted(
            (topic, n) for topic in (self._scenario.topic, self._steady.topic) for n in range(PARTITIONS)
        )

        def shared() -> bool:
            owned = [members[name].owned for name in NAMES]
            return all(owned) and sorted(itertools.chain(*owned)) == everything

        await self._scenario.until(shared, "the members share all partitions", 40)

    async def replace(self, name: str) -> None:
        """Stops a member and starts another one instead of it."""
        leaving = self._scenario.members[name]
        code = await leaving.stop()
        assert code == 0, leaving.tail
        self._ended.append(leaving.statistics)
        self.start(name)
        await self.until_shared()

    def figures(self, available: Mapping[RecordId, int]) -> Figures:
        """Looks at what stood still; *available* is when the records of the steady load were there."""
        statistics = [*self._ended, *(self._scenario.members[name].statistics for name in NAMES)]
        reports = [report for each in statistics for report in each["rebalance_reports"] if report["revoked"]]
        observations = self._scenario.observations.refresh()
        idle = (
            idle_workers(observations.of(process, *Kind), CONCURRENCY)
            for process in {observation.process for observation in observations.seen}
        )
        found = list(pauses(self._steady.observations.refresh().seen, available))
        return Figures(
            idle=max(itertools.chain(*idle)),
            stayed=max(pause for pause in found if not pause.moved),
            moved=max(pause for pause in found if pause.moved),
            drains=sorted(report["drain_seconds"] for report in reports),
            kept=sum(report["kept"] for report in reports),
            replayed=sum(each["replayed"] for each in statistics),
            late=min(max(overruns(observations.seen, SLOWEST)), 0.5),
        )


def overruns(seen: Iterable[Seen], spread: float) -> Iterator[float]:
    """By how many seconds each run took longer than it slept."""
    sleeping = Behaviour("", "", "", "", {}, spread=spread)
    began: dict[RecordId, int] = {}
    for observation in seen:
        if observation.kind is Kind.STARTED:
            began[observation.record_id] = observation.at
        elif observation.kind is Kind.FINISHED:
            sleeps = sleeping.duration(Record("", *observation.record_id, None, None, (), 0.0))
            yield (observation.at - began[observation.record_id]) / 1e9 - sleeps


@contextlib.asynccontextmanager
async def steady_load(scenario: Scenario, partitions: int = PARTITIONS) -> AsyncIterator[Mapping[RecordId, int]]:
    """Produces one record after the other to each partition; yields when each of them was acknowledged."""
    available: dict[RecordId, int] = {}
    enough = asyncio.Event()

    def acknowledged(key: bytes, sent: asyncio.Future[Any]) -> None:
        record_id = sent.result().partition, sent.result().offset
        available[record_id] = time.monotonic_ns()
        scenario.produced[record_id] = key.decode()

    async def load(producer: AIOKafkaProducer) -> None:
        for number in itertools.count():
            for partition in range(partitions):
                key = b"%d-%d" % (partition, number % 200)
                sent = await producer.send(scenario.topic, b"", key, partition)
                sent.add_done_callback(functools.partial(acknowledged, key))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(enough.wait(), EVERY)
                return

    async with AIOKafkaProducer(bootstrap_servers=scenario.kafka.bootstrap) as producer:
        loading = asyncio.create_task(load(producer), name="steady load")
        try:
            yield available
        finally:
            enough.set()
            await loading
            await producer.flush()
