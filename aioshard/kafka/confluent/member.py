"""A thin layer over confluent-kafka's `AIOConsumer` that makes few calls, with one thread hop each.

The only module of this package that uses private attributes of the client: `_call` and `_consumer` of `AIOConsumer`,
which dispatch a call. Its public methods would cost a thread hop each. Canary tests say when one of them changes.
"""

import struct
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, KafkaException, Message
from confluent_kafka import TopicPartition as Place
from confluent_kafka.aio import AIOConsumer

from aioshard.kafka.confluent.threads import DaemonThreads
from aioshard.ports import Committed, Membership
from aioshard.records import TopicPartition

__all__ = ["Change", "Member", "Turn", "membership_of", "places"]

_THREADS = 3
"""One for the call that a callback interrupts, one for calls of that callback, and a spare one."""
_METADATA_HEAD = struct.Struct("=7si")
"""The head of a group's serialized metadata: a magic word, and the generation in native byte order."""
_MAGIC = b"CGMDv2:"

OnPartitions = Callable[[Sequence[Any]], Awaitable[None]]


class Change(NamedTuple):
    """A change to one partition that the client must make before its next read."""

    topic_partition: TopicPartition
    fetch_from: int | None
    """The offset to resume at; None stops fetching."""
    anew: bool = False
    """Whether the client has given up on the partition, so that it must be assigned again."""


class Turn(NamedTuple):
    """The result of one call to the client."""

    messages: Sequence[Message]
    failed: Collection[Change]
    """Changes that the client could not make yet."""


class Member(AIOConsumer):
    """A consumer with batched calls: only one call at a time, plus those made by a callback.

    Owns its threads. Make every call from the same task, or from inside a callback: the client blocks any others.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._threads = DaemonThreads(_THREADS, "aioshard confluent")
        super().__init__(dict(options), executor=self._threads)

    async def join(self, topics: Collection[str], given: OnPartitions, taken: OnPartitions, lost: OnPartitions) -> None:
        """Subscribe. The coroutines are called inside `turn`, which waits for them."""

        async def on_assign(_: Any, partitions: Sequence[Any]) -> None:
            await given(partitions)

        async def on_revoke(_: Any, partitions: Sequence[Any]) -> None:
            await taken(partitions)

        async def on_lost(_: Any, partitions: Sequence[Any]) -> None:
            await lost(partitions)

        await self.subscribe(sorted(topics), on_assign=on_assign, on_revoke=on_revoke, on_lost=on_lost)

    async def turn(self, changes: Sequence[Change], most: int, wait: float) -> Turn:
        """Make *changes*, then take up to *most* messages; wait up to *wait* seconds for the first one."""
        turn: Turn = await self._call(self._turn, changes, most, wait)
        return turn

    def _turn(self, changes: Sequence[Change], most: int, wait: float) -> Turn:
        consumer = self._consumer
        failed = []
        for change in changes:
            name, offset, anew = change
            try:
                if offset is None:
                    consumer.pause([Place(*name)])
                elif anew:
                    consumer.incremental_unassign([Place(*name)])
                    consumer.incremental_assign([Place(*name, offset)])
                    consumer.resume([Place(*name)])
                else:
                    consumer.resume([Place(*name)])
                    # The seek wakes the fetcher thread, which would otherwise sleep for up to a second.
                    consumer.seek(Place(*name, offset))
            except KafkaException:
                failed.append(change)
        messages = consumer.consume(most, 0)
        if not messages and wait > 0:
            # A call for many messages waits until it has that many; this one ends with the first.
            messages = consumer.consume(1, wait)
            if messages:
                messages += consumer.consume(most, 0)
        return Turn(messages, failed)

    async def who(self) -> Membership:
        """Return our current membership."""
        return membership_of(await self.consumer_group_metadata())

    async def start_over(self, partitions: Collection[TopicPartition]) -> None:
        """Assign all partitions again, paused: the only way to reassign one if assignments are not incremental."""
        await self._call(self._place, places(partitions), incremental=False)

    async def adopt(self, partitions: Sequence[Any], *, incremental: bool) -> Membership:
        """Assign the partitions, paused, and return our membership; only inside a callback."""
        membership: Membership = await self._call(self._adopt, partitions, incremental)
        return membership

    def _adopt(self, partitions: Sequence[Any], incremental: bool) -> Membership:
        self._place(partitions, incremental=incremental)
        return membership_of(self._consumer.consumer_group_metadata())

    def _place(self, partitions: Sequence[Any], *, incremental: bool) -> None:
        # A position that is always valid keeps the client from giving up; nothing is read from it.
        placed = [Place(each.topic, each.partition, OFFSET_BEGINNING) for each in partitions]
        if incremental:
            self._consumer.incremental_assign(placed)
        else:
            self._consumer.assign(placed)
        if placed:
            self._consumer.pause(placed)

    async def let_go(self, partitions: Sequence[Any], *, incremental: bool) -> None:
        """Release partitions; only inside a callback."""
        if incremental:
            await self.incremental_unassign(list(partitions))
        else:
            await self.unassign()

    async def send_commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Send a commit; the `on_commit` coroutine gets the answer, inside a later `turn`."""
        await self.commit(offsets=_committing(offsets), asynchronous=True)

    async def commit_once(self, offsets: Mapping[TopicPartition, Committed]) -> Sequence[Any]:
        """Send one commit and wait for the answer; the result contains the errors of single partitions.

        Raises:
            KafkaException: Nothing was acknowledged.
        """
        answered: Sequence[Any] = await self.commit(offsets=_committing(offsets), asynchronous=False)
        return answered

    async def leave(self) -> None:
        """Leave the group and close the client."""
        await self.close()

    def abandon(self) -> None:
        """Let the threads end after their current calls; nothing else is called."""
        self._closed = True
        self._threads.shutdown()


def membership_of(metadata: object) -> Membership:
    """Extract our membership from a group's metadata, as the client serializes them for producers.

    The client exposes its generation nowhere else. Under the group protocol `consumer`, it is the member epoch.
    """
    raw = bytes(metadata) if isinstance(metadata, bytes | bytearray) else b""
    if len(raw) < _METADATA_HEAD.size:
        return Membership("", -1)
    magic, generation = _METADATA_HEAD.unpack_from(raw)
    if magic != _MAGIC:
        return Membership("", -1)
    _, member_id, *_ = raw[_METADATA_HEAD.size :].split(b"\0")
    return Membership(member_id.decode(errors="replace"), generation)


def _committing(offsets: Mapping[TopicPartition, Committed]) -> list[Place]:
    return [
        Place(*name, committed.offset, committed.metadata) if committed.metadata else Place(*name, committed.offset)
        for name, committed in offsets.items()
    ]


def places(partitions: Collection[TopicPartition]) -> list[Place]:
    """Convert partitions to the client's type."""
    return [Place(*name) for name in partitions]
