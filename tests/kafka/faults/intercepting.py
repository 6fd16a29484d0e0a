"""A client wrapper that records its traffic and can change it."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from aioshard.ports import (
    NOTHING,
    AllowanceOf,
    ChosenProtocol,
    Committed,
    Fault,
    FetchedBatch,
    GroupListener,
    LogRange,
    Membership,
    Oversized,
    TransactionCounts,
    Transport,
    TransportFactory,
)
from aioshard.records import PartitionInfo, TopicPartition


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclasses.dataclass
class Interceptor:
    """Makes the clients of an app, records the calls between them and the engine, and interferes on request.

    Attributes:
        transports: Every client that was made, the newest last.
        taken: Every record that the engine was given, in order.
        events: The events, in order: `("commit", offsets)`, `("records", partition, offsets)`,
            `("revoked", partitions, lost)`, `("assigned", partitions, membership)`.
        fail_commits: Errors for the next commits, first one first; None lets one pass.
        fail_polls: Errors for the next polls.
        fail_starts: Errors for the next starts of a client.
        lose_answers: The next commits are applied and answered with these errors.
        after_revoked: Awaited once the engine has handed its partitions back, while the group still waits.
        member_id: Given to the engine instead of the real one.
        skipped_generations: Added to the generation that the engine sees.
        commits: While it is not set, commits are on their way and do not arrive.
        questions: While it is not set, nobody answers what the committed offsets are.
        hand_out: Whether polls return anything.
        kept_back: Partitions that the engine does not see in an assignment.
    """

    make: TransportFactory
    transports: list["InterceptedTransport"] = dataclasses.field(default_factory=list)
    taken: list[tuple[TopicPartition, int]] = dataclasses.field(default_factory=list)
    events: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    fail_commits: list[Exception | None] = dataclasses.field(default_factory=list)
    fail_polls: list[Exception] = dataclasses.field(default_factory=list)
    fail_starts: list[Exception] = dataclasses.field(default_factory=list)
    lose_answers: list[Exception] = dataclasses.field(default_factory=list)
    after_revoked: Callable[["InterceptedTransport"], Awaitable[None]] | None = None
    member_id: str | None = None
    skipped_generations: int = 0
    commits: asyncio.Event = dataclasses.field(default_factory=_set)
    questions: asyncio.Event = dataclasses.field(default_factory=_set)
    hand_out: bool = True
    kept_back: frozenset[TopicPartition] = frozenset()

    def __call__(self) -> Transport:
        """Make a client."""
        transport = InterceptedTransport(self.make(), self)
        self.transports.append(transport)
        return transport

    @property
    def transport(self) -> "InterceptedTransport":
        """The client in use."""
        return self.transports[-1]

    def resume_delivery(self) -> None:
        """Let polls return something again."""
        self.hand_out = True
        self.transport.wake()

    @property
    def delivered_twice(self) -> list[str]:
        """Return the records that the engine received more than once."""
        return [f"{name}/{offset}" for (name, offset), count in Counter(self.taken).items() if count > 1]

    def disguise(self, real: Membership) -> Membership:
        """The membership as the engine sees it."""
        if real.generation < 0:
            return real
        return Membership(self.member_id or real.member_id, real.generation + self.skipped_generations)


class _Listener:
    """Stands between a client and the engine's listener."""

    def __init__(self, listener: GroupListener, transport: "InterceptedTransport", interceptor: Interceptor) -> None:
        self._listener = listener
        self._transport = transport
        self._interceptor = interceptor

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        self._interceptor.events.append(("revoked", frozenset(partitions), True))
        self._listener.lost(partitions)

    async def revoked(self, partitions: Collection[TopicPartition]) -> None:
        given = tuple(partitions)
        self._interceptor.events.append(("revoked", frozenset(given), False))
        await self._listener.revoked(given)
        if self._interceptor.after_revoked is not None:
            await self._interceptor.after_revoked(self._transport)

    def assigned(self, partitions: Collection[TopicPartition], membership: Membership) -> None:
        disguised = self._interceptor.disguise(membership)
        given = frozenset(partitions) - self._interceptor.kept_back
        self._interceptor.events.append(("assigned", given, disguised))
        self._listener.assigned(given, disguised)


class InterceptedTransport:
    """A client with somebody in between; implements `aioshard.ports.Transport`.

    Attributes:
        inner: The real client.
    """

    def __init__(self, inner: Transport, interceptor: Interceptor) -> None:
        self.inner = inner
        self._interceptor = interceptor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def start(
        self, topics: Collection[str], pattern: str | None, listener: GroupListener, *, needs_all: bool = True
    ) -> None:
        if self._interceptor.fail_starts:
            raise self._interceptor.fail_starts.pop(0)
        await self.inner.start(topics, pattern, _Listener(listener, self, self._interceptor), needs_all=needs_all)

    async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[FetchedBatch | Fault | Oversized]:
        interceptor = self._interceptor
        if interceptor.fail_polls:
            raise interceptor.fail_polls.pop(0)
        found = await self.inner.poll(lambda name: allowance(name) if interceptor.hand_out else NOTHING, timeout)
        for item in found:
            if isinstance(item, FetchedBatch) and item.records:
                offsets = tuple(record.offset for record in item.records)
                interceptor.taken += [(item.topic_partition, offset) for offset in offsets]
                interceptor.events.append(("records", item.topic_partition, offsets))
        return found

    def wake(self) -> None:
        self.inner.wake()

    @property
    def last_heartbeat(self) -> float | None:
        return self.inner.last_heartbeat

    @property
    def trouble(self) -> str | None:
        return self.inner.trouble

    @property
    def hang(self) -> str | None:
        return self.inner.hang

    @property
    def transaction_counts(self) -> TransactionCounts:
        return self.inner.transaction_counts

    @property
    def missing_topics(self) -> Sequence[str]:
        return self.inner.missing_topics

    @property
    def group_protocol(self) -> ChosenProtocol | None:
        return self.inner.group_protocol

    @property
    def slow_join(self) -> str | None:
        return self.inner.slow_join

    @property
    def inherits_within(self) -> float:
        return self.inner.inherits_within

    @property
    def owned_for(self) -> float:
        return self.inner.owned_for

    def membership(self) -> Membership:
        return self._interceptor.disguise(self.inner.membership())

    def position(self, topic_partition: TopicPartition) -> int | None:
        return self.inner.position(topic_partition)

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        return self.inner.end_offset(topic_partition)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        self.inner.pause(partitions)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        self.inner.resume(partitions)

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        self.inner.seek(topic_partition, offset)

    async def commit(
        self,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: object = None,  # noqa: ARG002
    ) -> None:
        interceptor = self._interceptor
        interceptor.events.append(("commit", {name: due.offset for name, due in offsets.items()}, membership))
        refused = interceptor.fail_commits.pop(0) if interceptor.fail_commits else None
        if refused is not None:
            raise refused
        await interceptor.commits.wait()
        real = self.inner.membership() if membership == self.membership() else membership
        await self.inner.commit(offsets, real)
        if interceptor.lose_answers:
            raise interceptor.lose_answers.pop(0)
        interceptor.events.append(("committed", {name: due.offset for name, due in offsets.items()}))

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        await self._interceptor.questions.wait()
        return await self.inner.committed(partitions)

    async def truncations(self, commits: Mapping[TopicPartition, Committed]) -> Mapping[TopicPartition, int | None]:
        return await self.inner.truncations(commits)

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        return await self.inner.log_ranges(partitions)

    def subscribe(self, topics: Collection[str], pattern: str | None) -> None:
        self.inner.subscribe(topics, pattern)

    async def partitions(self, topic: str) -> Mapping[int, PartitionInfo]:
        return await self.inner.partitions(topic)

    async def topics(self) -> frozenset[str]:
        return await self.inner.topics()

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        return await self.inner.offset_at(topic_partition, timestamp)

    async def close(self) -> None:
        await self.inner.close()
