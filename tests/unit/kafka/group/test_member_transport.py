"""The transport of members of the consumer protocol, with a driver that only says what the test tells it."""

import asyncio
import logging
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any, cast

import pytest

from aioshard.errors import CommitRefusedError, InstanceIdTakenError, TransportError
from aioshard.kafka.group import transport as of_members
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
        self.subscribed: list[tuple[Collection[str], Collection[str]]] = []
        self.unnamed: dict[uuid.UUID, float] = {}
        self.let_go: list[tuple[int, Collection[TopicPartition]]] = []

    def clock(self) -> float:
        return self.now

    def released(self, life: int, partitions: Collection[TopicPartition]) -> None:
        self.let_go.append((life, partitions))

    def heartbeat_now(self) -> None:
        raise AssertionError("nothing was sent, so nothing was refused")

    def subscribe(self, topics: Collection[str], patterns: Collection[str]) -> None:
        self.subscribed.append((topics, patterns))

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
    transport.driver.now = 10.0
    assert transport.membership() == NOT_A_MEMBER
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


async def test_an_engine_that_drains_while_the_client_closes_hears_of_a_loss() -> None:
    """Its handlers would run until the drain deadline, beside those of the next owner."""
    transport = Alone()
    await transport.assign()
    await transport.tell(Revoked(1, frozenset({FIRST}), 9.0))
    await transport.engine.draining.wait()
    closing = asyncio.create_task(transport.close(), name="close")
    await asyncio.sleep(0)
    transport.driver.begin_another_life()
    await transport.tell(Lost(1, BOTH, "the session is over"))
    assert transport.engine.told[1:] == [("revoked", frozenset({FIRST})), ("lost", BOTH)]
    transport.engine.drained.set()
    await closing
    assert transport.driver.let_go == []
    assert len(transport.engine.told) == 3


async def test_a_closing_client_tells_nothing_of_the_loss_by_its_leave() -> None:
    transport = Alone()
    await transport.assign()
    await transport.close()
    await transport.tell(Lost(1, BOTH, "the app closes its client"))
    assert transport.engine.told == [("assigned", BOTH)]


async def test_partitions_are_released_once_the_engine_has_drained_them() -> None:
    transport = Alone()
    await transport.assign()
    await transport.tell(Revoked(1, frozenset({FIRST}), 9.0))
    await transport.engine.draining.wait()
    assert transport.driver.let_go == []
    transport.engine.drained.set()
    await transport.tell()
    assert transport.driver.let_go == [(1, frozenset({FIRST}))]
    assert transport.engine.told[1:] == [("revoked", frozenset({FIRST}))], "it knows the others"
    await transport.close()


async def test_an_engine_with_nothing_left_is_told_so() -> None:
    """It cannot know whether something else is assigned at once."""
    transport = Alone()
    await transport.assign()
    transport.engine.drained.set()
    await transport.tell(Revoked(1, frozenset({FIRST}), 9.0), Revoked(1, frozenset({SECOND}), 9.0))
    await transport.tell()
    assert transport.engine.told[2:] == [("revoked", frozenset({SECOND})), ("assigned", NO_PARTITIONS)]
    await transport.close()


async def test_an_engine_with_nothing_left_is_told_only_what_comes_next() -> None:
    transport = Alone()
    transport.others = [GroupMember("slow", "aioshard", "/127.0.0.1", None)]
    await transport.assign()
    transport.engine.drained.set()
    await transport.tell(Revoked(1, BOTH, 9.0))
    await transport.tell()
    assert transport.engine.told[1:] == [("revoked", BOTH)]
    await transport.assign()
    assert transport.engine.told[1:] == [("revoked", BOTH), ("assigned", BOTH)]
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


async def test_trouble_names_a_topic_that_no_broker_names_after_a_while() -> None:
    transport = Alone()
    topic_id = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
    transport.driver.unnamed = {topic_id: time.time()}
    assert transport._unnamed_trouble is None, "it may have been created, or deleted, a moment ago"
    transport.driver.unnamed = {topic_id: 1_700_000_000.0}
    text = str(transport._unnamed_trouble)
    assert "ABEiM0RVZneImaq7zN3u_w" in text, "as Kafka's commands print it"
    assert "of a topic that" in text
    assert "2023-11-14 22:13:20+00:00" in text
    assert "deleted" in text
    assert "DESCRIBE" in text

    transport.driver.unnamed |= {uuid.UUID(int=1): time.time(), uuid.UUID(int=2**127): 1_600_000_000.0}
    text = str(transport._unnamed_trouble)
    assert "2 topics" in text
    assert "gAAAAAAAAAAAAAAAAAAAAA first, since 2020-09-13" in text
    transport._is_started = False  # no broker is there, which would count more
    assert transport.trouble == text
    await transport.close()
    assert transport._unnamed_trouble is None


class Wanting(Alone):
    """Its brokers list the topics in none of the next *failures* look-ups."""

    failures = 0
    found: frozenset[str] = frozenset()
    looks = 0

    async def _wanted_topics(self) -> frozenset[str]:
        self.looks += 1
        if self.failures:
            self.failures -= 1
            raise TransportError(f"no answer to look-up {self.looks}")
        return self.found

    async def look_up(self, *, failures: int) -> None:
        """Let it look up its topics, until it succeeds."""
        self.failures = failures
        looks = self.looks + failures + 1
        self._subscription_changed.set()
        async with asyncio.timeout(10.0):
            while self.looks < looks:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_an_outage_is_logged_when_it_begins_and_when_it_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Topics are looked up once a second then."""
    caplog.set_level(logging.INFO, "aioshard.kafka.group")
    monkeypatch.setattr(of_members, "_RETRY_PAUSE", 0.0)
    transport = Wanting()
    transport._tasks.append(asyncio.create_task(transport._watch_topics(), name="topics"))
    logged = []
    for failures in (0, 3, 0, 2):
        transport.found |= {f"topic-{failures}"}
        await transport.look_up(failures=failures)
        logged.append([record.getMessage() for record in caplog.records])
        caplog.clear()
    (first, last), (again, _) = logged[1], logged[3]
    assert logged[0] == logged[2] == []
    assert "no answer to look-up 2" in first
    assert "known again" in last
    assert "no answer to look-up 7" in again
    assert transport.driver.subscribed[-1] == (transport.found, ())
    await transport.close()
