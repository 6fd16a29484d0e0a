"""The leader of a classic group: what it assigns, and when it has the group rebalance."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from aioshard.core.assignment import Member
from aioshard.kafka.fetcher import Fetcher
from aioshard.kafka.group import leader as leading
from aioshard.kafka.group.assignors import GroupAssignor, Plan
from aioshard.kafka.group.classic import Elected
from aioshard.kafka.group.classic_driver import ClassicDriver
from aioshard.kafka.group.leader import Leader
from aioshard.kafka.groups import DescribedGroup
from aioshard.kafka.offsets import READ_UNCOMMITTED, GroupOffsets
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.consumer_protocol import Subscription
from aioshard.kafka.wire.errors import ConnectionLostError
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.records import TopicPartition
from aioshard.settings import Settings

ONE, TWO = TopicPartition("orders", 0), TopicPartition("orders", 1)


class Metadata:
    """The knowledge of topics."""

    def __init__(self) -> None:
        self.version = 0
        self.known: dict[str, int] = {}
        self.missing: frozenset[str] = frozenset()
        self.denied: frozenset[str] = frozenset()

    @property
    def topics(self) -> Collection[str]:
        return self.known.keys()

    def partitions(self, topic: str) -> Mapping[int, None]:
        return dict.fromkeys(range(self.known.get(topic, 0)))


class Brokers:
    """Knows topics, and answers unless it is away."""

    def __init__(self, **topics: int) -> None:
        self.metadata = Metadata()
        self.existing = topics
        self.answers = asyncio.Event()
        self.answers.set()
        self.refusals = 0
        self.followed: set[str] = set()
        self.asked = asyncio.Event()
        self._updated = asyncio.Event()

    def follow(self, topics: Collection[str]) -> None:
        self.followed.update(topics)

    async def look_up(self, topics: Collection[str]) -> None:
        self.asked.set()
        await self.answers.wait()
        if self.refusals:
            self.refusals -= 1
            raise ConnectionLostError("gone")
        self.learn({topic: self.existing[topic] for topic in topics if topic in self.existing})

    def learn(self, known: Mapping[str, int], missing: Collection[str] = ()) -> None:
        """Accept an answer about topics."""
        self.metadata.known.update(known)
        self.metadata.missing = frozenset(missing)
        self.metadata.version += 1
        self._updated.set()
        self._updated = asyncio.Event()

    async def updated_after(self, version: int) -> None:
        while self.metadata.version <= version:
            await self._updated.wait()

    async def coordinator(self, *_: object) -> int:
        return 1

    async def ask(self, *_: object) -> object:
        return object()


class Thread:
    """Stands for the driver: it records what the leader tells its member."""

    def __init__(self, *watched: str) -> None:
        self.watched = frozenset(watched)
        self.leads = True
        self.led: asyncio.Queue[tuple[Elected, Any, Any, float]] = asyncio.Queue()
        self.reported: asyncio.Queue[Mapping[str, Collection[int]]] = asyncio.Queue()
        self.rejoined: asyncio.Queue[str] = asyncio.Queue()

    def clock(self) -> float:
        return 100.0

    def lead(self, election: Elected, assignments: Any, partitions: Any, *, rejoin_at: float) -> None:
        self.led.put_nowait((election, assignments, partitions, rejoin_at))

    def partitions_changed(self, partitions: Mapping[str, Collection[int]]) -> None:
        self.reported.put_nowait(partitions)

    def rejoin(self, reason: str) -> None:
        self.rejoined.put_nowait(reason)


class Positions:
    """The positions of our own partitions, and the ends of their logs."""

    partitions = frozenset({ONE})

    def position(self, _: TopicPartition) -> int:
        return 10

    def end_offset(self, _: TopicPartition) -> int:
        return 15


class Commits:
    """The committed offsets of the group."""

    def __init__(self, **offsets: int) -> None:
        self.offsets = offsets
        self.is_away = False

    async def committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, CommittedOffset]:
        if self.is_away:
            raise ConnectionLostError("gone")
        return {
            at: CommittedOffset(self.offsets[str(at.partition)], -1, "")
            for at in partitions
            if str(at.partition) in self.offsets
        }


class Assignor(GroupAssignor):
    """Shows what it is asked."""

    def __init__(self, group: "Group", name: str, delay: float) -> None:
        super().__init__(name, delay=delay)
        self._group_of_test = group

    def assign(self, election: Elected, partitions: Any, now: float, backlogs: Any = None) -> Plan:
        self._group_of_test.backlogs = backlogs
        return super().assign(election, partitions, now, backlogs)


class Group:
    """A member that leads, with everything around it."""

    def __init__(self, brokers: Brokers, assignor: str = "fair", delay: float = 0.0, **settings: Any) -> None:
        self.brokers = brokers
        self.thread = Thread("orders")
        self.commits = Commits()
        self.assignor = Assignor(self, assignor, delay)
        self.backlogs: Mapping[TopicPartition, int] = {}
        """Those that the latest assignment was computed with."""
        self.leader = Leader(
            cast("ClassicDriver", self.thread),
            self.assignor,
            group_id="billing",
            cluster=cast("Cluster", brokers),
            offsets=cast("GroupOffsets", self.commits),
            fetcher=cast("Fetcher", Positions()),
            settings=Settings(assignor=assignor, **settings),
            isolation=READ_UNCOMMITTED,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.leader.run(), name="leader")
        try:
            async with asyncio.timeout(30):
                yield
        finally:
            task.cancel()
            await asyncio.wait([task])


def election(
    *topics: str, generation: int = 5, had: Collection[TopicPartition] = (), assignor: str = "fair"
) -> Elected:
    data = GroupAssignor(assignor).user_data(had, generation - 1)
    members = {"a": Subscription(frozenset(topics), data, frozenset(), generation - 1)}
    return Elected(generation, assignor, members)


def log_ends(monkeypatch: pytest.MonkeyPatch, ends: Mapping[TopicPartition, int]) -> None:
    async def log_ranges(*_: object) -> dict[TopicPartition, tuple[int, int, int]]:
        return {partition: (2, end, end) for partition, end in ends.items()}

    monkeypatch.setattr(leading, "log_ranges", log_ranges)


# Assignments ------------------------------------------------------------------------------


async def test_the_partitions_that_exist_now_are_assigned() -> None:
    group = Group(Brokers(orders=2))
    async with group.running():
        elected = election("orders")
        group.leader.elect(elected)
        (answered, assignments, partitions, _) = await group.thread.led.get()
    assert answered is elected
    assert set(assignments["a"]) == {ONE, TWO}
    assert partitions == {"orders": [0, 1]}
    assert "orders" in group.brokers.followed


async def test_the_group_waits_until_a_broker_answers() -> None:
    brokers = Brokers(orders=1)
    brokers.refusals = 2
    group = Group(brokers)
    async with group.running():
        group.leader.elect(election("orders"))
        (_, assignments, *_) = await group.thread.led.get()
    assert set(assignments["a"]) == {ONE}


async def test_an_election_that_a_later_one_has_replaced_is_given_up() -> None:
    brokers = Brokers(orders=1)
    brokers.refusals = 1
    brokers.answers.clear()
    group = Group(brokers)
    later = election("orders", generation=6)
    async with group.running():
        group.leader.elect(election("orders"))
        await brokers.asked.wait()
        group.leader.elect(later)
        brokers.answers.set()
        (answered, *_) = await group.thread.led.get()
        assert group.thread.led.empty()
    assert answered is later


async def test_a_topic_that_one_broker_does_not_know_keeps_its_partitions() -> None:
    brokers = Brokers()
    brokers.learn({"orders": 2})
    group = Group(brokers)
    async with group.running():
        group.leader.elect(election("orders"))
        (_, assignments, *_) = await group.thread.led.get()
    assert set(assignments["a"]) == {ONE, TWO}


async def test_a_topic_without_partitions_is_named(caplog: pytest.LogCaptureFixture) -> None:
    group = Group(Brokers(orders=1))
    async with group.running():
        group.leader.elect(election("orders", "gone"))
        (_, _, partitions, _) = await group.thread.led.get()
    assert partitions == {"gone": [], "orders": [0]}
    assert [record.levelno for record in caplog.records if "gone" in record.getMessage()] == [logging.WARNING]


async def test_partitions_that_wait_for_a_replacement_are_named_with_their_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = Group(Brokers(orders=2), assignor="sticky", delay=30.0, reassignment_delay=30)
    async with group.running():
        first = election("orders", had=[ONE], assignor="sticky")
        other = GroupAssignor("sticky").user_data([TWO], 4)
        both = {**first.members, "b": Subscription(frozenset({"orders"}), other, frozenset(), 4)}
        group.leader.elect(Elected(5, "sticky", both))
        await group.thread.led.get()
        group.leader.elect(election("orders", generation=6, had=[ONE], assignor="sticky"))
        (_, assignments, _, rejoin_at) = await group.thread.led.get()
    assert set(assignments["a"]) == {ONE}
    assert rejoin_at == 130.0
    (warning,) = [record for record in caplog.records if "30 s" in record.getMessage()]
    assert str(TWO) in warning.getMessage()


async def test_backlogs_count_from_the_commits_to_the_ends_of_the_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(Brokers(orders=2), assignor="lag", auto_offset_reset="earliest")
    log_ends(monkeypatch, {ONE: 20, TWO: 40})
    group.commits.offsets = {"0": 12}
    async with group.running():
        group.leader.elect(election("orders", assignor="lag"))
        await group.thread.led.get()
    assert group.backlogs == {ONE: 8, TWO: 38}, "nothing is committed of the second: from the beginning"


async def test_records_that_retention_has_deleted_are_no_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(Brokers(orders=1), assignor="lag")
    log_ends(monkeypatch, {ONE: 20})
    group.commits.offsets = {"0": 1}
    async with group.running():
        group.leader.elect(election("orders", assignor="lag"))
        await group.thread.led.get()
    assert group.backlogs == {ONE: 18}, "the log begins at 2"


async def test_without_an_answer_backlogs_count_from_our_own_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(Brokers(orders=2), assignor="lag")
    log_ends(monkeypatch, {})
    group.commits.is_away = True
    async with group.running():
        group.leader.elect(election("orders", assignor="lag"))
        await group.thread.led.get()
    assert group.backlogs == {ONE: 5}


async def test_partitions_that_appear_while_backlogs_are_queried_are_reported_behind_the_assignment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The assignment sets back what the member knows; the next metadata may come minutes later."""
    group = Group(Brokers(orders=1), assignor="lag")

    async def log_ranges(*_: object) -> dict[TopicPartition, tuple[int, int, int]]:
        group.brokers.learn({"orders": 2})
        await until_reported([0, 1])
        return {}

    async def until_reported(numbers: list[int]) -> None:
        while (await group.thread.reported.get()).get("orders") != numbers:
            pass

    monkeypatch.setattr(leading, "log_ranges", log_ranges)
    async with group.running():
        group.leader.elect(election("orders", assignor="lag"))
        (_, _, partitions, _) = await group.thread.led.get()
        assert partitions == {"orders": [0]}
        await until_reported([0, 1])


# Reasons for another assignment -----------------------------------------------------------


async def test_changed_partitions_are_reported_and_uncertain_ones_are_not() -> None:
    group = Group(Brokers())
    group.thread.watched = frozenset({"orders", "gone", "unknown"})
    async with group.running():
        assert await group.thread.reported.get() == {}
        group.brokers.learn({"orders": 2, "of others": 1}, missing=["gone", "another"])
        assert await group.thread.reported.get() == {"orders": [0, 1], "gone": []}
    assert group.brokers.followed == {"orders", "gone", "unknown"}


async def test_the_group_rebalances_when_two_looks_in_a_row_find_unequal_backlogs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Group(Brokers(orders=2), assignor="lag", balance_interval=0.001)
    group.assignor.take_over({"a": Member(frozenset({"orders"}), (ONE, TWO))})
    looks: list[bool] = []
    answers = iter([True, False, True, True])

    def would_pay(_: object) -> bool:
        looks.append(next(answers, False))
        return looks[-1]

    monkeypatch.setattr(group.assignor, "would_pay", would_pay)
    log_ends(monkeypatch, {})
    async with group.running():
        await group.thread.rejoined.get()
    assert looks == [True, False, True, True]


async def test_a_follower_does_not_look_at_backlogs(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(Brokers(orders=2), assignor="lag", balance_interval=0.001)
    group.thread.leads = False
    group.assignor.take_over({"a": Member(frozenset({"orders"}), (ONE, TWO))})
    began = asyncio.Event()
    monkeypatch.setattr(asyncio, "sleep", _counted(began, 3))
    monkeypatch.setattr(group.assignor, "would_pay", lambda _: pytest.fail("it is not the leader"))
    async with group.running():
        await began.wait()
    assert group.thread.rejoined.empty()


def _counted(event: asyncio.Event, count: int) -> Any:
    """Return a sleep that sets an event when it is called for the last time."""
    sleep = asyncio.sleep
    calls: list[float] = []

    async def counted(seconds: float) -> None:
        calls.append(seconds)
        if len(calls) == count:
            event.set()
        await sleep(seconds)

    return counted


async def test_a_leader_learns_what_its_predecessor_has_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(Brokers(orders=2), assignor="lag", balance_interval=0.001, auto_offset_reset="earliest")
    group.brokers.learn({"orders": 2})
    log_ends(monkeypatch, {ONE: 9_000, TWO: 9_000})
    both = {"a": Member(frozenset({"orders"}), (ONE, TWO)), "b": Member(frozenset({"orders"}))}
    monkeypatch.setattr(
        leading, "classic_members", lambda *_: DescribedGroup(is_stable=True, members=both, instances={})
    )
    async with group.running():
        await group.thread.rejoined.get()
    assert group.assignor.knows_group
