"""Cluster faults: the coordinator moves, a member is cut off from it or stands still, a partition has no leader.

Each is a scenario here, and an event that all worlds choose. Clients with the mistakes that were found on a real
cluster show that the worlds notice.
"""

import asyncio
import math
from collections.abc import Collection, Mapping
from typing import cast

import pytest

from aioshard.errors import TransportError
from aioshard.ports import Committed, GroupListener, LogRange
from aioshard.records import Record, TopicPartition
from aioshard.testing import VirtualTimeLoop
from tests.simulation.test_interleavings import simulate
from tests.simulation.world import GROUP, MARGIN, SESSION, TOPIC, ClusterTransport, Process, World, live

PARTITIONS = [TopicPartition(TOPIC, number) for number in range(3)]


class Credulous(ClusterTransport):
    """A client that looks at no error of an answer: a partition that is missing counts as never committed."""

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        _, found = await self.ask_offsets(partitions)
        return {partition: found.get(partition) for partition in partitions}


class Timeless(ClusterTransport):
    """A client that does not look at the clock before a record starts."""

    @property
    def owned_for(self) -> float:
        return math.inf


class Unaware(Timeless):
    """A client that does not know that its session is over until the coordinator says so."""

    async def _wait_for_coordinator(self, _: GroupListener) -> None:
        await self._group_changed.wait()


class AllOrNothing(ClusterTransport):
    """A client that gives no log range at all while one of the leaders is away."""

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        found = await super().log_ranges(partitions)
        if len(found) < len(partitions):
            raise TransportError("a leader is away")
        return found


class Scenario(World):
    """A world of two members with quick handlers, in which one fault happens after everything was committed."""

    def __init__(self, reset: str) -> None:
        super().__init__(0, clean=True)
        self.reset = reset

    async def something_happens(self) -> None:
        self.start_process()
        await self.finish_within(30.0)
        await self.fault()

    async def fault(self) -> None:
        raise NotImplementedError

    def owners(self) -> set[str | None]:
        return {self.broker.group(GROUP).owner(name) for name in PARTITIONS}

    async def finish_within(self, seconds: float) -> None:
        """Wait until everything that has a leader is committed, and all members have started."""
        async with asyncio.timeout(seconds):
            await self.broker.until(lambda: self.finished() and all(process.runs for process in self.living))


class CoordinatorMoves(Scenario):
    """The coordinator moves and a member dies; its successor asks the old one for offsets."""

    async def fault(self) -> None:
        self.publish(60)
        await asyncio.sleep(0.1)
        dying, successor = self.living
        committed = {name: self.broker.committed(GROUP, *name) or 0 for name in PARTITIONS}
        before = self.runs
        await dying.kill()
        successor.transports[-1].ask_old_coordinator(SESSION + 4.0)
        await self.finish_within(SESSION + 10.0)
        left = sum(offset >= committed[name] for name in PARTITIONS for offset in self.offsets[name])
        assert 0 < self.runs - before <= left, "only uncommitted records run again"


class MemberIsCutOff(Scenario):
    """The heartbeats and commits of a member go unanswered for a minute, while records come."""

    async def fault(self) -> None:
        cut, other = self.living
        self.cut_off(cut, 60.0)
        for _ in range(120):
            self.publish(4)
            await asyncio.sleep(0.5)
            if cut.is_overdue:
                assert self.owners() == {other.member_id}
        async with asyncio.timeout(10.0):
            await self.broker.until(lambda: self.owners() == {cut.member_id, other.member_id})


class MemberStandsStill(Scenario):
    """A member does nothing for longer than its session, in the middle of its work."""

    _next: Process | None = None
    """The process that stands still at the end of its next run."""

    async def fault(self) -> None:
        still, other = self.living
        self._next = still
        self.publish(300)
        await self.broker.until(lambda: self._next is None)
        await asyncio.sleep(MARGIN / 4)
        assert self.owners() == {other.member_id}
        async with asyncio.timeout(20.0):
            await self.broker.until(lambda: self.owners() == {still.member_id, other.member_id})

    async def _work(self, process: Process, *records: Record) -> bool:
        is_done = await super()._work(process, *records)
        if process is self._next:
            self._next = None
            self.cut_off(process, SESSION + 2 * MARGIN)
            cast("VirtualTimeLoop", asyncio.get_running_loop()).pass_time(SESSION + 1.5 * MARGIN)
        return is_done


class LeaderIsAway(Scenario):
    """A partition has no leader while the group rebalances and a member starts."""

    async def fault(self) -> None:
        self.broker.set_leader(*PARTITIONS[0], available=False)
        self.publish(60)
        self.broker.group(GROUP).rebalance()
        await self.finish_within(10.0)
        self.start_process()
        self.publish(60)
        await self.finish_within(10.0)
        assert not self.done[PARTITIONS[0]].issuperset(self.offsets[PARTITIONS[0]])
        self.broker.set_leader(*PARTITIONS[0], available=True)
        await self.finish_within(10.0)
        assert self.done[PARTITIONS[0]].issuperset(self.offsets[PARTITIONS[0]])


MISTAKES = [
    (CoordinatorMoves, Credulous),
    (MemberIsCutOff, Unaware),
    (MemberStandsStill, Timeless),
    (LeaderIsAway, AllOrNothing),
]


def play(scenario: type[Scenario], reset: str) -> None:
    worlds: list[Scenario] = []

    async def life() -> None:
        worlds.append(scenario(reset))
        await worlds[0].live_through(1, [0.0])

    live(life(), seed=0, on_step=lambda: worlds[0].check() if worlds else None)


@pytest.mark.parametrize("reset", ["earliest", "latest"])
@pytest.mark.parametrize("scenario", [scenario for scenario, _ in MISTAKES])
def test_guarantees_hold(scenario: type[Scenario], reset: str) -> None:
    play(scenario, reset)


@pytest.mark.parametrize("reset", ["earliest", "latest"])
@pytest.mark.parametrize(("scenario", "mistake"), MISTAKES)
def test_the_scenario_detects_a_faulty_client(
    scenario: type[Scenario], mistake: type[ClusterTransport], reset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "transport_class", mistake)
    with pytest.raises((AssertionError, TimeoutError)):
        play(scenario, reset)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [Credulous, AllOrNothing, pytest.param(Unaware, marks=pytest.mark.chaos)])
def test_random_worlds_detect_a_faulty_client(mistake: type[ClusterTransport], monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate_many() -> None:
        for seed in range(500):
            simulate(seed)

    monkeypatch.setattr(World, "transport_class", mistake)
    with pytest.raises(AssertionError, match=r"I\d+: "):
        simulate_many()
