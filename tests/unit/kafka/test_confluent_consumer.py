"""The thread that calls the client: its queue, revocations, and commits."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from aioshard.errors import ClientLostError, CommitError, CommitRefusedError, MetadataRefusedError
from aioshard.kafka.confluent import consumer as module
from aioshard.kafka.confluent.consumer import Callbacks, ConsumerThread
from aioshard.ports import Committed, Membership
from aioshard.records import TopicPartition

ONE = TopicPartition("orders", 0)
FIRST, SECOND = {ONE: Committed(1, "")}, {ONE: Committed(2, "")}
US = Membership("us", 1)
SESSION = 45.0


def answer(error: int | None = None) -> Any:
    """The client's response for one partition."""
    return SimpleNamespace(topic=ONE.topic, partition=ONE.partition, error=None if error is None else KafkaError(error))


class FakeClient:
    """Stands in for `confluent_kafka.Consumer`; `consume` calls what is in `events`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.on_commit = options["on_commit"]
        self.events: list[Callable[[], object]] = []
        self.sent: list[int] = []
        self.at_once: list[int] = []
        self.refuse: int | None = None
        self.answered: list[Any] | None = [answer()]
        self.released: list[Any] = []
        self.at_close: Callable[[], object] | None = None

    def subscribe(self, _: Any, **callbacks: Any) -> None:
        self.callbacks = callbacks

    def consume(self, *_: Any) -> list[Any]:
        while self.events:
            self.events.pop(0)()
        return []

    def commit(self, offsets: list[KafkaPartition], asynchronous: bool) -> list[Any] | None:
        if asynchronous:
            self.sent.append(offsets[0].offset)
            return None
        if self.refuse is not None:
            raise KafkaException(KafkaError(self.refuse))
        self.at_once.append(offsets[0].offset)
        return self.answered

    def consumer_group_metadata(self) -> bytes:
        return b"CGMDv2:" + struct.pack("=i", 1) + b"billing\0us\0\1"

    def incremental_unassign(self, partitions: list[KafkaPartition]) -> None:
        self.released.extend(partitions)

    def close(self) -> None:
        if self.at_close is not None:
            self.at_close()


class World:
    """A consumer thread with a fake client, and an engine that drains on request."""

    def __init__(self, **options: str) -> None:
        self.ours = True
        self.draining, self.drained = asyncio.Event(), asyncio.Event()
        self.failures: list[KafkaError] = []
        callbacks = Callbacks(self._check, self._assigned, self._revoked, self.failures.append)
        self.thread = ConsumerThread(
            {name.replace("_", "."): value for name, value in options.items()}, "billing", SESSION, callbacks
        )
        self.client: Any = self.thread._consumer
        self.now = 0.0

    def _check(self, _: Collection[TopicPartition], membership: Membership) -> None:
        if not self.ours or membership != US:
            raise CommitRefusedError("not ours")

    async def _assigned(self, _: list[TopicPartition], __: Membership) -> None:
        """Nothing to be opened."""

    async def _revoked(self, _: list[TopicPartition], lost: bool) -> None:
        self.ours = self.ours and not lost
        self.draining.set()
        await self.drained.wait()
        self.ours = False
        self.thread.end_revocation()

    async def read(self, *events: Callable[[], object]) -> None:
        self.client.events.extend(events)
        await self.thread.call(self.thread.read, [])

    async def hear(self, error: int | None = None, partitions: list[Any] | None = None) -> None:
        known = None if error is None else KafkaError(error)
        await self.read(lambda: self.client.on_commit(known, partitions))

    async def commit(self, offsets: Any = FIRST) -> "asyncio.Task[None]":
        """Commit, and return once the commit was sent, or refused."""
        task = asyncio.create_task(self.thread.commit(offsets, US), name="commits")
        await asyncio.sleep(0)
        await self.thread.call(lambda: None)
        return task

    async def revoke(self, lost: bool = False) -> "asyncio.Task[None]":
        """Begin a read in which a partition is revoked, and return once the thread serves calls again."""
        self.draining.clear()
        await self.thread.call(self.thread.subscribe, ["orders"])
        callback = self.client.callbacks["on_lost" if lost else "on_revoke"]
        reading = asyncio.create_task(self.read(lambda: callback(self.client, [KafkaPartition(*ONE)])), name="reads")
        await self.draining.wait()
        await self.thread.call(lambda: None)
        return reading


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(module, "Consumer", FakeClient)
    made = World()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
    yield made
    made.drained.set()
    made.thread.stop()


async def test_a_commit_is_acknowledged_in_a_later_read(world: World) -> None:
    committing = await world.commit()
    assert not committing.done()

    await world.hear(None, [answer()])

    await committing
    assert world.client.sent == [1]


async def test_nothing_is_sent_before_the_previous_commit_is_answered(world: World) -> None:
    committing = await world.commit()
    committing.cancel()  # as the engine does when commit_timeout is over

    with pytest.raises(CommitError, match="the previous one is not answered"):
        await world.thread.commit(SECOND, US)
    await world.hear(None, [answer()])
    await world.commit(SECOND)

    assert world.client.sent == [1, 2]


async def test_a_commit_for_a_foreign_partition_is_not_sent(world: World) -> None:
    with pytest.raises(CommitRefusedError):
        await world.thread.commit(FIRST, US._replace(generation=0))

    assert world.client.sent == []


@pytest.mark.parametrize("waits", [True, False])
async def test_an_unanswered_commit_is_settled_once_before_partitions_are_released(world: World, waits: bool) -> None:
    committing = await world.commit()
    if not waits:
        committing.cancel()
    for _ in range(2):
        reading = await world.revoke()
        assert world.client.at_once == [1]
        world.drained.set()
        await reading
        world.ours = True

    await asyncio.wait([committing])
    assert committing.cancelled() is not waits
    await world.hear(None, [answer()])  # the first answer comes after all
    await world.commit(SECOND)
    assert world.client.sent == [1, 2]


async def test_a_commit_while_partitions_drain_is_answered_before_they_are_released(world: World) -> None:
    reading = await world.revoke()

    await world.thread.commit(FIRST, US)
    await world.thread.commit(SECOND, US)
    assert world.client.released == []
    world.drained.set()
    await reading

    assert (world.client.at_once, world.client.sent) == ([1, 2], [])
    assert len(world.client.released) == 1
    with pytest.raises(CommitRefusedError):
        await world.thread.commit(SECOND, US)


async def test_a_commit_that_cannot_be_settled_fails(world: World) -> None:
    committing = await world.commit()
    world.client.refuse = KafkaError.UNKNOWN_MEMBER_ID
    reading = await world.revoke()

    with pytest.raises(CommitRefusedError, match="the group has rebalanced"):
        await committing
    world.drained.set()
    await reading


async def test_an_unanswered_commit_is_refused_when_the_membership_is_lost(world: World) -> None:
    committing = await world.commit()
    reading = await world.revoke(lost=True)

    with pytest.raises(CommitRefusedError, match="before the membership was lost"):
        await committing
    with pytest.raises(CommitRefusedError):
        await world.thread.commit(SECOND, US)
    world.drained.set()
    await reading
    assert world.client.at_once == []


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (KafkaError.ILLEGAL_GENERATION, CommitRefusedError),
        (KafkaError.STALE_MEMBER_EPOCH, CommitRefusedError),
        (KafkaError.COORDINATOR_NOT_AVAILABLE, CommitError),
        (KafkaError.OFFSET_METADATA_TOO_LARGE, MetadataRefusedError),
        (KafkaError.INVALID_COMMIT_OFFSET_SIZE, MetadataRefusedError),
    ],
)
async def test_a_response_for_a_single_partition_counts(world: World, code: int, error: type[Exception]) -> None:
    committing = await world.commit()

    await world.hear(None, [answer(code)])

    with pytest.raises(error):
        await committing


@pytest.mark.parametrize("answered", [[], None])
async def test_a_partition_missing_in_the_response_is_not_acknowledged(world: World, answered: Any) -> None:
    committing = await world.commit()
    await world.hear(None, answered)
    with pytest.raises(CommitError, match="orders/0"):
        await committing

    world.client.answered = answered
    reading = await world.revoke()
    with pytest.raises(CommitError, match="orders/0"):
        await world.thread.commit(FIRST, US)
    world.drained.set()
    await reading


async def test_an_error_of_the_whole_commit_counts_for_every_partition(world: World) -> None:
    committing = await world.commit()

    await world.hear(KafkaError.UNKNOWN_MEMBER_ID, [])

    with pytest.raises(CommitRefusedError):
        await committing


@pytest.mark.parametrize(
    ("code", "lost"),
    [
        (None, False),
        (KafkaError.REBALANCE_IN_PROGRESS, False),
        (KafkaError._TIMED_OUT, True),
        (KafkaError._WAIT_COORD, True),
    ],
    ids=["acknowledged", "refused", "timed out", "no coordinator"],
)
async def test_a_session_expires_without_a_coordinator_response(world: World, code: int | None, lost: bool) -> None:
    """Under KIP-848, the client itself keeps reading."""
    for offsets in (FIRST, SECOND):
        committing = await world.commit(offsets)
        world.now += 10
        await world.hear(code, [answer(code)])
        await asyncio.wait([committing])
    world.now = SESSION - 0.5
    await world.read()
    world.now = SESSION

    if lost:
        with pytest.raises(ClientLostError, match="was answered for 45 s"):
            await world.read()
    else:
        await world.read()


async def test_a_response_read_late_by_a_blocked_loop_keeps_the_session(world: World) -> None:
    committing = await world.commit()
    world.now = 3 * SESSION
    await world.read()

    await world.hear(None, [answer()])

    await committing
    world.now += SESSION
    await world.read()


async def test_a_response_during_a_revocation_keeps_the_session(world: World) -> None:
    await world.commit()
    world.now = 40.0
    reading = await world.revoke()
    world.drained.set()
    await reading
    world.now = 100.0

    await world.read()
    await world.read()


async def test_a_commit_queued_before_the_loss_is_not_sent(world: World) -> None:
    reading = await world.revoke(lost=True)
    world.ours = True  # the event loop has not heard of it yet

    with pytest.raises(CommitRefusedError, match="the membership was lost"):
        await world.thread.commit(FIRST, US)

    world.drained.set()
    await reading
    assert (world.client.at_once, world.client.sent) == ([], [])


async def test_an_abandoned_call_never_starts(world: World) -> None:
    made: list[str] = []
    reading = await world.revoke()
    hold = asyncio.Event()
    loop = asyncio.get_running_loop()
    holding = world.thread.call(lambda: asyncio.run_coroutine_threadsafe(hold.wait(), loop).result())
    waiting = world.thread.call(made.append, "called")
    waiting.cancel()
    await asyncio.sleep(0)
    hold.set()
    await holding
    world.drained.set()
    await reading

    assert made == []


async def test_closing_during_a_revocation_waits_for_its_commit(world: World) -> None:
    reading = await world.revoke()
    world.client.at_close = lambda: world.client.sent.append("closed")
    committing = await world.commit(SECOND)
    world.drained.set()
    await reading
    await asyncio.wrap_future(world.thread.stop())

    await committing
    assert (world.client.at_once, world.client.sent) == ([2], ["closed"])
    with pytest.raises(ClientLostError, match="is closed"):
        await world.thread.commit(FIRST, US)


async def test_a_commit_unanswered_at_close_fails(world: World) -> None:
    committing = await world.commit()

    await asyncio.wrap_future(world.thread.stop())

    with pytest.raises(ClientLostError, match="is closed"):
        await committing


@pytest.mark.parametrize(("protocol", "fails"), [("consumer", True), ("classic", False)])
async def test_an_unknown_member_ends_only_under_kip_848(world: World, protocol: str, fails: bool) -> None:
    """The client joins again by itself under the classic protocol, and reads on under the other one."""
    other = World(group_protocol=protocol)
    committing = await other.commit()
    await other.hear(None, [answer(KafkaError.UNKNOWN_MEMBER_ID)])
    with pytest.raises(CommitRefusedError):
        await committing
    await asyncio.sleep(0.01)
    assert [failure.code() for failure in other.failures] == [KafkaError.UNKNOWN_MEMBER_ID] * fails
    other.thread.stop()
    assert world.failures == []
