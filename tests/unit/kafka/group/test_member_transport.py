"""The transport of members of the consumer protocol, with a driver that only says what the test tells it."""

import asyncio
import math
from collections.abc import Collection, Mapping
from typing import Any, cast

import pytest

from aioshard.errors import CommitRefusedError, InstanceIdTakenError, TransportError
from aioshard.kafka.group.consumer_driver import ConsumerDriver
from aioshard.kafka.group.member import (
    NO_PARTITIONS,
    Assigned,
    Ended,
    Event,
    Lost,
    Ownership,
    Refused,
    Revoked,
    Troubled,
)
from aioshard.kafka.group.transport import MemberTransport
from aioshard.kafka.groups import GroupMember
from aioshard.kafka.offsets import Member
from aioshard.kafka.wire.codes import ERROR_CODES
from aioshard.ports import NOT_A_MEMBER, Committed, Membership
from aioshard.records import TopicPartition
from aioshard.settings import Settings

FIRST, SECOND = TopicPartition("orders", 0), TopicPartition("orders", 1)
BOTH = frozenset({FIRST, SECOND})


class Driver:
    """Stands for the thread."""

    session = 6.0
    is_alive = False

    def __init__(self) -> None:
        self.now = 0.0
        self.ownership = Ownership(1, "one", 5, BOTH, 10.0)
        self.let_go: list[tuple[int, Collection[TopicPartition]]] = []

    def clock(self) -> float:
        return self.now

    def released(self, life: int, partitions: Collection[TopicPartition]) -> None:
        self.let_go.append((life, partitions))

    def heartbeat_now(self) -> None:
        raise AssertionError("nothing was sent, so nothing was refused")

    async def close(self, timeout: float, reason: str) -> None:
        """Nothing runs."""

    def begin_another_life(self) -> None:
        self.ownership = Ownership(2, "two", 8, BOTH, 20.0)


class Engine:
    """Records what a transport tells its engine."""

    def __init__(self) -> None:
        self.told: list[tuple[str, frozenset[TopicPartition]]] = []
        self.draining = asyncio.Event()
        self.drained = asyncio.Event()

    async def revoked(self, partitions: Collection[TopicPartition]) -> None:
        self.told.append(("revoked", frozenset(partitions)))
        self.draining.set()
        await self.drained.wait()

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        self.told.append(("lost", frozenset(partitions)))

    def assigned(self, partitions: Collection[TopicPartition], membership: Membership) -> None:
        del membership
        self.told.append(("assigned", frozenset(partitions)))


class Alone(MemberTransport):
    """Without brokers; nobody else is in its group, unless *others* are."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(Settings(bootstrap_servers="127.0.0.1:1", group_protocol="consumer", **settings), "billing")
        self.driver = Driver()
        self._driver = cast("ConsumerDriver", self.driver)
        self.engine = Engine()
        self._listener = self.engine
        self._is_started = True
        self.others: list[GroupMember] = []
        self._tasks.append(asyncio.create_task(self._pass_on_changes(), name="assignments"))

    async def _look_up_others(self) -> list[GroupMember]:
        return self.others

    async def _send_commit(self, offsets: Mapping[TopicPartition, Committed], member: Member) -> None:
        raise AssertionError(f"{member} commits {offsets}")

    async def tell(self, *events: Event) -> None:
        for event in events:
            self._on_event(event)
        for _ in range(5):
            await asyncio.sleep(0)

    async def assign(self) -> Membership:
        own = self.driver.ownership
        await self.tell(Assigned(own.life, own.partitions, own))
        assert self.engine.told[-1] == ("assigned", own.partitions)
        return self.membership()

    async def failure(self) -> TransportError:
        with pytest.raises(TransportError) as raised:
            await self.poll(lambda _: pytest.fail("nothing is asked for"), 0.0)
        return raised.value


async def test_a_membership_ends_with_its_time_before_the_engine_hears_of_that() -> None:
    transport = Alone()
    assert await transport.assign() == Membership("one", 5)
    transport.driver.now = 4.0
    assert transport.owned_for == 6.0
    transport.driver.now = 10.0
    assert transport.owned_for == 0.0
    assert transport.membership() == NOT_A_MEMBER
    await transport.close()


async def test_nothing_starts_under_the_identity_of_a_later_life() -> None:
    """The loss waits in the queue of the event loop, and the thread has joined again."""
    transport = Alone()
    await transport.assign()
    transport.driver.begin_another_life()
    assert transport.owned_for == 0.0
    await transport.close()


async def test_a_manual_assignment_is_ours_for_ever() -> None:
    transport = Alone()
    transport._driver = None
    assert transport.owned_for == math.inf
    await transport.close()


async def test_a_commit_is_not_sent_under_the_identity_of_a_later_life() -> None:
    """The brokers would store it: they compare the member and its epoch, not the partitions."""
    transport = Alone()
    membership = await transport.assign()
    transport.driver.begin_another_life()
    assert transport.membership() == NOT_A_MEMBER
    with pytest.raises(CommitRefusedError):
        await transport.commit({FIRST: Committed(7, "")}, membership)
    await transport.close()


async def test_a_commit_is_not_sent_for_what_the_group_has_taken_back() -> None:
    transport = Alone()
    membership = await transport.assign()
    transport.driver.ownership = Ownership(1, "one", 6, frozenset({SECOND}), 10.0)
    with pytest.raises(CommitRefusedError):
        await transport.commit({FIRST: Committed(7, "")}, membership)
    await transport.close()


async def test_a_loss_does_not_wait_for_a_drain_and_ends_what_was_planned_behind_it() -> None:
    transport = Alone()
    await transport.assign()
    own = transport.driver.ownership
    await transport.tell(Revoked(1, frozenset({FIRST}), 9.0))
    await transport.engine.draining.wait()
    transport.driver.begin_another_life()
    await transport.tell(Assigned(1, NO_PARTITIONS, own), Lost(1, BOTH, "the session is over"))
    transport.engine.drained.set()
    await transport.tell()
    assert transport.engine.told[1:] == [("revoked", frozenset({FIRST})), ("lost", BOTH)]
    assert transport.driver.let_go == []
    await transport.close()


async def test_an_engine_that_is_closed_during_a_drain_is_told_nothing_more() -> None:
    transport = Alone()
    await transport.assign()
    await transport.tell(Revoked(1, frozenset({FIRST}), 9.0))
    await transport.engine.draining.wait()
    closing = asyncio.create_task(transport.close(), name="close")
    await asyncio.sleep(0)
    transport.engine.drained.set()
    await closing
    assert transport.engine.told[1:] == [("revoked", frozenset({FIRST}))]


async def test_partitions_are_released_once_the_engine_has_drained_them() -> None:
    transport = Alone()
    await transport.assign()
    await transport.tell(Revoked(1, frozenset({FIRST}), 9.0))
    await transport.engine.draining.wait()
    assert transport.driver.let_go == []
    transport.engine.drained.set()
    await transport.tell()
    assert transport.driver.let_go == [(1, frozenset({FIRST}))]
    assert transport.engine.told[-1] == ("assigned", frozenset({SECOND}))
    await transport.close()


async def test_an_empty_assignment_counts_only_when_no_member_has_to_release_anything() -> None:
    transport = Alone()
    transport.others = [GroupMember("dead", "aioshard", "/127.0.0.1", None)]
    nothing = Ownership(1, "one", 5, NO_PARTITIONS, 10.0)
    transport.driver.ownership = nothing
    await transport.tell(Assigned(1, NO_PARTITIONS, nothing))
    assert transport.engine.told == []
    assert "dead" in (transport.slow_join or "")
    transport.driver.ownership = Ownership(1, "one", 6, BOTH, 10.0)
    await transport.assign()
    assert transport.engine.told == [("assigned", BOTH)]
    await transport.close()


@pytest.mark.parametrize(
    ("event", "permanent"),
    [(Refused(35, "the broker does not have the protocol"), True), (Refused(25, ""), False)],
)
async def test_a_group_without_the_protocol_says_which_one_to_use(event: Event, permanent: bool) -> None:
    transport = Alone()
    await transport.tell(event)
    error = await transport.failure()
    assert error.retriable is not permanent
    assert "group_protocol='classic'" in str(error)
    await transport.close()


async def test_an_instance_id_that_stays_taken_for_more_than_a_session_ends_the_app() -> None:
    transport = Alone(group_instance_id="one")
    await transport.tell(Ended(111, ""))
    error = await transport.failure()
    assert isinstance(error, InstanceIdTakenError)
    assert (error.persists, error.session_timeout) == (True, 6.0)
    await transport.close()


async def test_a_task_that_is_cancelled_from_outside_ends_the_client() -> None:
    transport = Alone()
    (task,) = transport._tasks
    task.add_done_callback(transport._note_end)
    task.cancel()
    await transport.tell()
    assert "assignments" in str(await transport.failure())
    await transport.close()


async def test_trouble_tells_silence_from_a_refusal() -> None:
    transport = Alone()
    await transport.assign()
    texts = []
    for event in (Troubled(None, "no answer in time"), Troubled(81, "")):
        await transport.tell(event)
        texts.append(transport._group_trouble)
    assert "does not answer" in (texts[0] or "")
    assert ERROR_CODES[81].text in (texts[1] or "")
    await transport.close()
