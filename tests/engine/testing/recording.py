"""A group listener that records its calls."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple

from aioshard.ports import Allowance, AllowanceOf, FetchedBatch, Membership, Transport
from aioshard.records import Record, TopicPartition


class Revoked(NamedTuple):
    partitions: tuple[TopicPartition, ...]
    lost: bool


class Assigned(NamedTuple):
    partitions: tuple[TopicPartition, ...]
    membership: Membership


class RecordingListener:
    """Notes every call; *on_revoked* runs while the group waits, and with *opening* all is read from 0."""

    def __init__(
        self,
        transport: Transport,
        *,
        opening: bool = True,
        on_revoked: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.events: list[Revoked | Assigned] = []
        self.assignments: asyncio.Queue[Assigned] = asyncio.Queue()
        self.revocations: asyncio.Queue[Revoked] = asyncio.Queue()
        self.on_revoked = on_revoked
        self._transport = transport
        self._opening = opening

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        self._record(Revoked(tuple(sorted(partitions)), lost=True))

    def _record(self, event: Revoked) -> None:
        self.events.append(event)
        self.revocations.put_nowait(event)

    async def revoked(self, partitions: Collection[TopicPartition]) -> None:
        self._record(Revoked(tuple(sorted(partitions)), lost=False))
        if self.on_revoked is not None:
            await self.on_revoked()

    def assigned(self, partitions: Collection[TopicPartition], membership: Membership) -> None:
        event = Assigned(tuple(sorted(partitions)), membership)
        self.events.append(event)
        self.assignments.put_nowait(event)
        if self._opening:
            for partition in partitions:
                self._transport.seek(partition, 0)
            self._transport.resume(partitions)


def unlimited(_: TopicPartition) -> Allowance:
    return Allowance(1_000_000, 1 << 40)


def nothing(_: TopicPartition) -> Allowance:
    return Allowance(0, 0)


async def poll_batches(
    transport: Transport, allowance: AllowanceOf = unlimited, timeout: float = 5.0
) -> list[FetchedBatch]:
    """One poll that must bring nothing but batches."""
    batches = []
    for item in await transport.poll(allowance, timeout):
        assert isinstance(item, FetchedBatch), item
        batches.append(item)
    return batches


async def take(transport: Transport, count: int, *, within: float = 30.0) -> list[Record]:
    """The next *count* records of a client, in the order in which they come."""
    records: list[Record] = []
    async with asyncio.timeout(within):
        while len(records) < count:
            for batch in await poll_batches(transport):
                records.extend(batch.records)
    return records
