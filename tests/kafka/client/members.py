"""A group member that acts like the engine and records its events."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, NamedTuple, cast

from aioshard.kafka.clients import kafka_clients
from aioshard.kafka.group.transport import MemberTransport
from aioshard.ports import Allowance, AllowanceOf, Fault, FetchedBatch, Membership, Oversized, record_size
from aioshard.records import Record, TopicPartition
from aioshard.settings import Settings

EVERYTHING = Allowance(1_000_000, 1 << 40)
PATIENCE = 30.0
"""Seconds until a test gives up waiting for what must happen."""
POLL = 0.05
"""Seconds of one poll while something is waited for; a poll is woken by what it waits for."""


def everything(_: TopicPartition) -> Allowance:
    """The allowance of an engine without bounds."""
    return EVERYTHING


def settings_for(bootstrap: str, **overrides: Any) -> Settings:
    """Settings with short group timeouts."""
    quick: dict[str, Any] = {
        "session_timeout": 6,
        "heartbeat_interval": 0.2,
        "rebalance_timeout": 20,
        "assignor": "roundrobin",
        "fetch_max_wait": 0.05,
        "metadata_max_age": 0.5,
    }
    return Settings(bootstrap_servers=bootstrap, **(quick | overrides))


class Assigned(NamedTuple):
    """An assignment that arrived."""

    partitions: tuple[TopicPartition, ...]
    membership: Membership


class Revoked(NamedTuple):
    """Partitions that were taken away."""

    partitions: tuple[TopicPartition, ...]
    lost: bool


class Member:
    """One transport, and the listener that an engine would give it. Starts each partition at *start*."""

    def __init__(self, settings: Settings, group: str, start: int = 0) -> None:
        self.transport = cast("MemberTransport", kafka_clients(settings, group).transport())
        self.start = start
        self.at_revoke: Callable[[Collection[TopicPartition], bool], Awaitable[None]] | None = None
        self.at_assign: Callable[[Collection[TopicPartition], Membership], None] | None = None
        """Replaces the seek to *start*."""
        self.events: list[Assigned | Revoked] = []
        self.records: dict[TopicPartition, list[Record]] = {}
        self.next_offsets: dict[TopicPartition, int] = {}
        self.batches: list[FetchedBatch] = []
        self.faults: list[Fault] = []
        self.oversized: list[Oversized] = []

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        self.events.append(Revoked(tuple(sorted(partitions)), lost=True))

    async def revoked(self, partitions: Collection[TopicPartition]) -> None:
        self.events.append(Revoked(tuple(sorted(partitions)), lost=False))
        if self.at_revoke is not None:
            await self.at_revoke(partitions, False)  # noqa: FBT003 - not lost

    def assigned(self, partitions: Collection[TopicPartition], membership: Membership) -> None:
        self.events.append(Assigned(tuple(sorted(partitions)), membership))
        if self.at_assign is not None:
            self.at_assign(partitions, membership)
            return
        for topic_partition in partitions:
            self.transport.seek(topic_partition, self.start)
            self.next_offsets[topic_partition] = self.start
        self.transport.resume(partitions)

    @property
    def assignments(self) -> list[Assigned]:
        return [event for event in self.events if isinstance(event, Assigned)]

    @property
    def revocations(self) -> list[Revoked]:
        return [event for event in self.events if isinstance(event, Revoked)]

    async def join(self, *topics: str, pattern: str | None = None) -> Assigned:
        """Start, and wait for the first assignment; takes no record."""
        await self.transport.start(topics, pattern, self)
        await self.poll_until(lambda: bool(self.assignments), lambda _: Allowance(0, 0))
        return self.assignments[0]

    async def poll(self, allowance: AllowanceOf = everything, timeout: float = POLL) -> Sequence[Any]:
        """Poll once, check what any poll promises, and write down what came."""
        found = await self.transport.poll(allowance, timeout)
        for item in found:
            if isinstance(item, FetchedBatch):
                self._accept(item)
            elif isinstance(item, Fault):
                self.faults.append(item)
            else:
                self.oversized.append(item)
        return found

    async def poll_until(self, condition: Callable[[], bool], allowance: AllowanceOf = everything) -> None:
        """Poll until a condition holds."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await self.poll(allowance)

    async def read_to(self, ends: dict[TopicPartition, int], allowance: AllowanceOf = everything) -> None:
        """Poll until the position of each partition is at its end."""
        await self.poll_until(lambda: all(self.next_offsets.get(at, 0) >= end for at, end in ends.items()), allowance)

    def offsets(self, topic_partition: TopicPartition) -> list[int]:
        return [record.offset for record in self.records.get(topic_partition, ())]

    def _accept(self, batch: FetchedBatch) -> None:
        topic_partition = batch.topic_partition
        assert list(batch.sizes) == [record_size(record.key, record.value, record.headers) for record in batch.records]
        assert all(record.topic_partition == topic_partition for record in batch.records)
        offsets = [record.offset for record in batch.records]
        known = self.next_offsets.get(topic_partition, 0)
        assert offsets == sorted(set(offsets)), "records of a batch come in order, each once"
        assert not offsets or known <= offsets[0], "nothing comes twice"
        assert not offsets or offsets[-1] < batch.next_offset, "the position is past what was handed out"
        assert self.transport.position(topic_partition) == batch.next_offset
        self.batches.append(batch)
        self.next_offsets[topic_partition] = batch.next_offset
        self.records.setdefault(topic_partition, []).extend(batch.records)


def buffered(member: Member) -> set[TopicPartition]:
    """The partitions whose fetched records have not been taken yet."""
    return {name for name, partition in member.transport._fetcher._partitions.items() if partition.chunk is not None}


def background_tasks(transport: Any) -> dict[str, asyncio.Task[Any]]:
    """The tasks of a client without which nothing works, by their purpose."""
    tasks = {task.get_name().partition(" of ")[0]: task for task in transport._tasks}
    tasks["metadata"] = transport._cluster._refreshing
    for task in transport._fetcher._tasks:
        tasks["fetching" if task.get_name().startswith("fetches from") else "leaders"] = task
    return tasks


def rejoin(transport: Any) -> None:
    """Have the group of a classic member rebalance."""
    transport._driver.rejoin("the test wants it")


async def silence(transport: Any) -> None:
    """End a membership without a word to the group."""
    driver = transport._driver
    driver._call(driver._stop)
    await asyncio.wait([driver._ended], timeout=PATIENCE)


async def vanish(transport: Any) -> None:
    """End a member without a word to its group."""
    await silence(transport)
    await transport.close()


def held(member: Member) -> set[TopicPartition]:
    """The partitions that a member has: those of its latest assignment, without those that were revoked since."""
    partitions: set[TopicPartition] = set()
    for event in member.events:
        if isinstance(event, Assigned):
            partitions = set(event.partitions)
        else:
            partitions -= set(event.partitions)
    return partitions


def generation_of(transport: Any) -> int:
    """The generation of a member, which rises also when its assignment stays."""
    driver = getattr(transport, "_driver", None)
    return int(transport.membership().generation if driver is None else driver.ownership.epoch)


async def until_assigned(*members: Member, partitions: int, some_idle: bool = False) -> None:
    """Poll all members until they are in one generation and have all partitions, each once.

    Args:
        members: Those of the group.
        partitions: How many there are.
        some_idle: Whether a member may have none; otherwise each has had an assignment.
    """
    async with asyncio.timeout(PATIENCE):
        while True:
            generations = {generation_of(member.transport) for member in members}
            everything = [at for member in members for at in held(member)]
            is_complete = len(everything) == len(set(everything)) == partitions
            all_assigned = all(member.assignments for member in members)
            if len(generations) == 1 and -1 not in generations and is_complete and (some_idle or all_assigned):
                return
            await asyncio.gather(*(member.poll() for member in members))
