"""A member on aiokafka: the membership of its commits, and the partitions that it releases, keeps and loses."""

import asyncio
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.consumer.subscription_state import Assignment

from aioshard.errors import CommitError, CommitRefusedError, InstanceIdTakenError
from aioshard.kafka import transport as common
from aioshard.kafka.aiokafka import transport as transports
from aioshard.kafka.aiokafka.internals import Internals
from aioshard.kafka.aiokafka.transport import AiokafkaTransport
from aioshard.kafka.assignors import ConsumerAssignor
from aioshard.kafka.offsets import Member as CommittingMember
from aioshard.kafka.wire.codes import error_for
from aioshard.kafka.wire.errors import ConnectionLostError, WireError
from aioshard.kafka.wire.metadata import Leader
from aioshard.kafka.wire.responses import CommittedOffset, EpochEnd
from aioshard.ports import NOT_A_MEMBER, Committed, LogRange, Membership
from aioshard.records import TopicPartition
from aioshard.settings import Settings

ONE, TWO = TopicPartition("orders", 0), TopicPartition("orders", 1)
COMMIT = {ONE: Committed(5, "")}


class Listener:
    """The engine; it hands partitions over when the test lets it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, set[TopicPartition]]] = []
        self.drained = asyncio.Event()
        self.drained.set()

    def assigned(self, partitions: Collection[TopicPartition], _: Membership) -> None:
        self.events.append(("assigned", set(partitions)))

    async def revoked(self, partitions: Collection[TopicPartition]) -> None:
        self.events.append(("revoked", set(partitions)))
        await self.drained.wait()

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        self.events.append(("lost", set(partitions)))


class Coordinator:
    """As much of aiokafka's coordinator as a membership takes."""

    def __init__(self) -> None:
        self.member_id = "us"
        self.generation = 4
        self.rejoins = 0
        self._performed_join_prepare = False
        self._group_subscription: Any = None

    def request_rejoin(self) -> None:
        self.rejoins += 1

    def reset_generation(self) -> None:
        self.generation = -1

    def _start_heartbeat_task(self) -> None: ...


class Parts(Internals):
    """The parts of a consumer without a broker."""

    def __init__(self, assignor: str) -> None:
        self._coordinator: Any = Coordinator()
        self.subscription = SimpleNamespace(subscription=None)
        client = SimpleNamespace(_get_conn=None, bootstrap=None, get_random_node=None, _conns={})
        consumer: Any = SimpleNamespace(
            _client=client, _subscription=self.subscription, _coordinator=self._coordinator, _fetcher=None
        )
        super().__init__(consumer, ConsumerAssignor(assignor), "billing")
        self._session_timeout = 45.0

    def assign(self, partitions: Collection[TopicPartition]) -> None:
        self.subscription.subscription = SimpleNamespace(assignment=Assignment(partitions))


class Offsets:
    """The group's committed offsets."""

    def __init__(self) -> None:
        self.commits: list[tuple[dict[TopicPartition, CommittedOffset], CommittingMember]] = []
        self.stored: dict[TopicPartition, CommittedOffset] = {}
        self.is_away = False
        self.refuse: Callable[[], int] | None = None
        """Returns the error code of the next commits; called when one has arrived."""

    async def commit(
        self, offsets: dict[TopicPartition, CommittedOffset], member: CommittingMember
    ) -> dict[TopicPartition, WireError]:
        self.commits.append((offsets, member))
        return {} if self.refuse is None else dict.fromkeys(offsets, error_for(self.refuse()))

    async def committed(self, _: object) -> dict[TopicPartition, CommittedOffset]:
        if self.is_away:
            raise ConnectionLostError("gone")
        return self.stored


class Member:
    """A transport that has joined in generation 4; `parts` is its client."""

    def __init__(self, *partitions: TopicPartition, assignor: str = "range", **settings: Any) -> None:
        self.parts = Parts(assignor)
        self.listener = Listener()
        self.offsets = Offsets()
        chosen = Settings(bootstrap_servers="127.0.0.1:9", assignor=assignor, **settings)
        self.transport = AiokafkaTransport(chosen, "billing")
        self.transport._internals = self.parts
        self.transport._listener = self.listener
        self.transport._offsets = self.offsets  # type: ignore[assignment]
        self.transport._is_started = True
        self.releasing = self.assign(*partitions)

    def assign(self, *partitions: TopicPartition) -> Any:
        """Let the group assign partitions; returns the release of those that move, with a cooperative assignor."""
        self.parts.assign(partitions)
        self.parts.assignor.owned = partitions
        releasing = self.transport.on_partitions_assigned(())
        for partition in partitions:
            self.transport.seek(partition, 0)
        return releasing

    async def commit(self, membership: Membership | None = None, offsets: Any = COMMIT) -> None:
        await self.transport.commit(offsets, membership or self.transport.membership())

    @property
    def commits(self) -> list[Any]:
        return self.offsets.commits

    def rejoin(self, member_id: str, generation: int) -> None:
        self.parts.coordinator.member_id, self.parts.coordinator.generation = member_id, generation


# Commits --------------------------------------------------------------------------------


async def test_a_commit_carries_its_membership() -> None:
    member = Member(ONE)
    await member.commit()
    assert member.commits == [({ONE: CommittedOffset(5, -1, "")}, CommittingMember(4, "us"))]


async def test_a_commit_of_a_static_member_names_its_instance() -> None:
    member = Member(ONE, group_instance_id="worker-1")
    await member.commit()
    [(_, committing)] = member.commits
    assert committing == CommittingMember(4, "us", "worker-1")


@pytest.mark.parametrize(
    "membership", [Membership("us", 3), Membership("us", 5), Membership("somebody", 4), NOT_A_MEMBER]
)
async def test_a_commit_of_another_membership_is_not_sent(membership: Membership) -> None:
    member = Member(ONE)
    with pytest.raises(CommitRefusedError, match=f"made for generation {membership.generation}, and ours is 4"):
        await member.commit(membership)
    assert member.commits == []


async def test_a_commit_of_a_partition_that_is_not_ours_is_not_sent() -> None:
    member = Member(ONE)
    with pytest.raises(CommitRefusedError, match="not assigned to us: orders/1"):
        await member.commit(offsets={**COMMIT, TWO: Committed(1, "")})
    assert member.commits == []


@pytest.mark.parametrize("now", [("us", 5), ("us", -1), ("somebody", 4)])
async def test_nothing_is_committed_before_the_engine_sees_the_new_membership(now: tuple[str, int]) -> None:
    member = Member(ONE)
    before = member.transport.membership()
    member.rejoin(*now)

    assert member.transport.membership() == NOT_A_MEMBER
    for membership in (before, NOT_A_MEMBER, Membership(*now)):
        with pytest.raises(CommitRefusedError, match="we are not a member"):
            await member.commit(membership)
    assert member.commits == []


@pytest.mark.parametrize(("code", "rejoins", "generation"), [(27, 1, 4), (22, 0, -1), (25, 0, -1), (16, 0, 4)])
async def test_a_refused_commit_tells_what_became_of_the_membership(code: int, rejoins: int, generation: int) -> None:
    member = Member(ONE)
    member.offsets.refuse = lambda: code
    with pytest.raises(CommitError):
        await member.commit()
    coordinator = member.parts.coordinator
    assert (coordinator.rejoins, coordinator.generation) == (rejoins, generation)


async def test_an_older_generation_is_not_a_loss_during_a_cooperative_join() -> None:
    member = Member(ONE)
    member.parts.coordinator._performed_join_prepare = True
    member.offsets.refuse = lambda: 22
    with pytest.raises(CommitRefusedError):
        await member.commit()
    assert member.parts.coordinator.generation == 4


@pytest.mark.parametrize("code", [22, 25, 27])
async def test_an_answer_to_a_commit_of_an_earlier_generation_changes_nothing(code: int) -> None:
    """The commit and the join take different connections, so the join may be answered first."""
    member = Member(ONE)

    def refuse() -> int:
        member.rejoin("us", 5)
        return code

    member.offsets.refuse = refuse
    with pytest.raises(CommitRefusedError):
        await member.commit()
    coordinator = member.parts.coordinator
    assert (coordinator.rejoins, coordinator.generation) == (0, 5)


# Releases -------------------------------------------------------------------------------


async def test_topics_without_partitions_are_not_followed_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The application has unsubscribed from them, or a pattern has assigned them for a while."""
    member = Member(ONE)
    followed: list[set[str]] = []
    monkeypatch.setattr(member.transport._cluster, "follow_only", lambda topics: followed.append(set(topics)))
    sales = TopicPartition("sales", 0)
    member.assign(ONE, sales)
    await member.transport.on_partitions_revoked(())
    member.assign(sales)
    assert followed == [{"orders", "sales"}, {"sales"}]


async def test_a_revocation_ends_the_assignment_once_the_engine_has_released_it() -> None:
    member = Member(ONE, TWO)
    member.listener.drained.clear()
    assert member.transport.last_heartbeat is not None

    revoking = asyncio.create_task(member.transport.on_partitions_revoked(()))
    await asyncio.sleep(0)
    await member.commit()
    assert len(member.commits) == 1, "the last commit of the released partitions"
    member.listener.drained.set()
    await revoking

    assert member.listener.events[1:] == [("revoked", {ONE, TWO})]
    assert member.transport.position(ONE) is None
    assert member.transport.last_heartbeat is None
    with pytest.raises(CommitRefusedError, match="not a member"):
        await member.commit()


async def test_a_lost_session_is_reported_once_and_ends_the_assignment() -> None:
    member = Member(ONE)

    member.transport._lose()
    member.transport._lose()
    await member.transport.on_partitions_revoked(())

    assert member.listener.events[1:] == [("lost", {ONE})]
    assert member.transport.membership() == NOT_A_MEMBER
    assert member.transport.position(ONE) is None
    assert member.transport.last_heartbeat is None


async def test_a_cooperative_member_keeps_its_partitions_and_releases_those_that_move() -> None:
    member = Member(ONE, TWO, assignor="cooperative-fair")
    await member.releasing

    await member.transport.on_partitions_revoked(())
    assert member.transport.membership() == Membership("us", 4)
    assert member.transport.position(TWO) == 0
    member.rejoin("us", 5)
    member.parts.assignor.moving = {TWO: "them"}
    await member.assign(ONE)

    assert member.listener.events[1:] == [
        ("assigned", {ONE, TWO}),
        ("revoked", {TWO}),
        ("assigned", {ONE}),
    ]
    assert member.transport.position(TWO) is None
    assert member.parts.coordinator.rejoins == 1, "the leader lets the group assign what was released"
    with pytest.raises(CommitRefusedError, match="not assigned to us"):
        await member.commit(offsets={TWO: Committed(1, "")})


async def test_closing_waits_for_a_drain_in_progress() -> None:
    member = Member(ONE)
    left: list[bool] = []

    async def leave() -> None:
        left.append(member.listener.drained.is_set())

    async def tear_down() -> None:
        """Do nothing."""

    member.parts.leave, member.parts.tear_down = leave, tear_down  # type: ignore[method-assign]
    member.listener.drained.clear()
    revoking = asyncio.create_task(member.transport.on_partitions_revoked(()))
    await asyncio.sleep(0)
    closing = asyncio.create_task(member.transport.close())
    await asyncio.sleep(0.01)
    await member.commit()
    assert left == []
    member.listener.drained.set()
    await asyncio.gather(revoking, closing)

    assert left == [True]
    assert len(member.commits) == 1


# Another process with our instance id ----------------------------------------------------


def taken_twice(member: Member) -> Exception | None:
    """Lose the member's place twice in one generation; return why it must not rejoin."""
    watch = member.transport._instance
    watch.rejoins(NOT_A_MEMBER)
    watch.joined(Membership("second", 4))
    watch.rejoins(Membership("second", 4))
    assert watch.taken is None, "one loss may be two processes that overlap, and a rebalance is none"
    watch.rejoins(NOT_A_MEMBER)
    return watch.taken


async def test_a_static_member_that_loses_its_place_again_does_not_take_it_back() -> None:
    member = Member(ONE, group_instance_id="worker-1")
    assert isinstance(taken_twice(member), InstanceIdTakenError)
    joining = asyncio.create_task(member.transport.on_partitions_revoked(()))
    await asyncio.sleep(0.01)
    assert not joining.done(), "the client would rejoin"
    joining.cancel()


async def test_a_member_without_an_instance_id_has_no_place_to_lose() -> None:
    """A group that was deleted and recreated counts its generations from 1 again."""
    assert taken_twice(Member(ONE)) is None


async def test_a_silent_member_has_not_lost_its_place() -> None:
    """It comes back with a new id too, but in a later generation."""
    watch = Member(ONE, group_instance_id="worker-1").transport._instance
    for generation in (5, 6, 7):
        watch.rejoins(NOT_A_MEMBER)
        watch.joined(Membership(f"us in {generation}", generation))
    watch.rejoins(NOT_A_MEMBER)
    assert watch.taken is None


async def test_a_displaced_member_has_lost_its_place_in_any_generation() -> None:
    """The other process makes the group rebalance if its subscription is another one."""
    watch = Member(ONE, group_instance_id="worker-1").transport._instance
    for generation in (6, 8):
        watch.rejoins(NOT_A_MEMBER)
        watch.joined(Membership(f"us in {generation}", generation), was_displaced=True)
    assert isinstance(watch.taken, InstanceIdTakenError)


# Backlogs -----------------------------------------------------------------------------


async def test_the_backlog_counts_from_the_commit_within_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member(ONE, TWO, assignor="lag", auto_offset_reset="earliest")

    async def log_ranges(*_: object) -> Any:
        return {ONE: LogRange(5, 9, 9), TWO: LogRange(2, 6, 6)}

    monkeypatch.setattr(transports, "log_ranges", log_ranges)
    member.offsets.stored = {ONE: CommittedOffset(3, -1, "")}
    member.parts.subscribed_partitions = lambda: [ONE, TWO]  # type: ignore[method-assign]
    member.transport.seek(TWO, 4)
    assert await member.transport._backlogs(member.parts) == {ONE: 4, TWO: 2}

    member.offsets.is_away = True
    monkeypatch.setattr(member.transport._fetcher, "end_offset", {TWO: 5}.get)
    assert await member.transport._backlogs(member.parts) == {TWO: 1}, "our own position, where nobody answers"


# Lost records -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        pytest.param(EpochEnd(5, 400), 400, id="the log has everything"),
        pytest.param(EpochEnd(5, 900), 900, id="and more of that epoch"),
        pytest.param(EpochEnd(5, 300), 300, id="the epoch ends earlier"),
        pytest.param(EpochEnd(4, 250), 250, id="the log does not have the epoch"),
        pytest.param(None, None, id="the leader does not know"),
        pytest.param(EpochEnd(6, 100), None, id="the leader answers about another epoch"),
    ],
)
async def test_a_log_is_the_one_that_was_read_up_to_the_end_of_its_newest_epoch(
    end: EpochEnd | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[TopicPartition, int]] = []

    async def epoch_ends(_: object, epochs: dict[TopicPartition, int], __: float) -> Any:
        asked.append(epochs)
        return dict.fromkeys(epochs, end)

    monkeypatch.setattr(common, "epoch_ends", epoch_ends)
    member = Member(ONE, TWO)
    member.offsets.stored = {ONE: CommittedOffset(400, 5, ""), TWO: CommittedOffset(9, -1, "")}
    stored = await member.transport.committed([ONE, TWO])
    commits = {name: committed for name, committed in stored.items() if committed is not None}

    assert await member.transport.truncations(commits) == {ONE: expected, TWO: None}
    assert asked == [{ONE: 5}], "without an epoch, nobody can tell"


@pytest.mark.parametrize(("leader_epoch", "expected"), [(5, None), (4, None), (6, 300), (-1, 300)])
async def test_only_an_election_loses_records(
    leader_epoch: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, a log that is too short is that of a topic that was created again: all of it is new to the group."""

    async def epoch_ends(_: object, epochs: dict[TopicPartition, int], __: float) -> Any:
        return dict.fromkeys(epochs, EpochEnd(5, 300))

    monkeypatch.setattr(common, "epoch_ends", epoch_ends)
    member = Member(ONE)
    member.offsets.stored = {ONE: CommittedOffset(400, 5, "")}
    await member.transport.committed([ONE])
    metadata = SimpleNamespace(leader=lambda _: Leader(1, leader_epoch))
    monkeypatch.setattr(member.transport._cluster, "metadata", metadata)

    assert await member.transport.truncations({ONE: Committed(400, "")}) == {ONE: expected}


async def test_a_partition_that_comes_back_keeps_the_leader_epoch_of_its_position() -> None:
    """It may be beyond the commit, which then tells nothing about the log before it."""
    member = Member(ONE)
    member.offsets.stored = {ONE: CommittedOffset(300, 4, "")}
    await member.transport.committed([ONE])
    member.transport._fetcher.seek(ONE, 400, 5)

    await member.transport.on_partitions_revoked(())
    member.assign(ONE)
    member.transport.seek(ONE, 400)

    assert member.transport._fetcher.epoch_at(ONE, 400) == 5


async def test_the_leader_epoch_travels_with_the_offset() -> None:
    member = Member(ONE)
    member.offsets.stored = {ONE: CommittedOffset(400, 5, "")}
    await member.transport.committed([ONE])

    member.transport.seek(ONE, 400)
    await member.commit(offsets={ONE: Committed(400, "")})
    member.transport.seek(ONE, 399)
    await member.commit(offsets={ONE: Committed(399, "")})

    member.transport.seek(ONE, 500)
    await member.commit(offsets={ONE: Committed(500, "")})

    assert [committed[ONE].epoch for committed, _ in member.commits] == [5, 5, -1], "nobody has read up to 500"
