"""Epochs with deliveries, for tests of single parts of the engine."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import cast

from aioshard.core.commit_metadata import MOST_UNITS
from aioshard.core.flow import Usage
from aioshard.core.options import Retry
from aioshard.engine.buffer import Buffer
from aioshard.engine.committer import Committer
from aioshard.engine.counts import Counters, TopicCounts
from aioshard.engine.current_client import CurrentClient
from aioshard.engine.epoch import Delivery, Epoch, Outputs, PastFailures
from aioshard.engine.failures import FailureHandler
from aioshard.engine.handler import Resources
from aioshard.engine.handler_set import HandlerSet
from aioshard.engine.intake import Intake
from aioshard.engine.lease import Lease
from aioshard.engine.outcomes import FailedAttempt, Recovery
from aioshard.engine.partition import Partition
from aioshard.engine.partitions import Partitions
from aioshard.engine.rebalance import Rebalance
from aioshard.engine.sharder import Sharder
from aioshard.engine.shards import Shards
from aioshard.ports import FetchedBatch, Message, record_size
from aioshard.records import Record, TopicPartition


def make_buffer(records: int = 1_000, size: int = 1_000_000) -> Buffer:
    return Buffer(Usage(records, size), CurrentClient())


def endless_lease() -> Lease:
    """A lease that no worker asks about."""
    lease = Lease(CurrentClient(), lambda: 0.0)
    lease.due = math.inf
    return lease


class WokenClient(CurrentClient):
    """Counts how often a poll is made to return."""

    __slots__ = ("wakes",)

    def __init__(self) -> None:
        super().__init__()
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1


def no_handlers() -> HandlerSet:
    return HandlerSet((), cast("Resources", None))


def crowd(buffer: Buffer) -> None:
    """Fill a buffer with messages for a transaction, for a moment."""
    buffer.hold(buffer.bounds.bytes)
    buffer.let_go(buffer.bounds.bytes)


def make_epoch(
    keys: Sequence[Hashable], *, partition: int = 0, buffer: Buffer | None = None, size: int = 10, arrived: float = 0.0
) -> tuple[Epoch, list[Delivery]]:
    """An open epoch that has taken in one record for each of *keys*; they are queued nowhere."""
    name = TopicPartition("orders", partition)
    epoch = Epoch(name, 1, 0, buffer or make_buffer())
    epoch.open()
    return epoch, add(epoch, keys, size=size, arrived=arrived)


def make_sharder(shards: Shards | None = None) -> Sharder:
    """A sharder by key that wants any number of records, with shards that are made on demand unless they are given."""
    served = [Shards() if shards is None else shards]
    return Sharder(
        lambda record: record.key, served, fixed=False, workers=1, failures=halting(served), at_once=1_000_000
    )


def make_partition(
    keys: Sequence[Hashable] = (),
    *,
    partition: int = 0,
    buffer: Buffer | None = None,
    sharder: Sharder | None = None,
    clock: Callable[[], float] = lambda: 0.0,
) -> tuple[Partition, list[Delivery]]:
    """An open partition that has taken in one record for each of *keys*; they are queued nowhere."""
    made = Partition(
        TopicPartition("orders", partition),
        1,
        0,
        buffer=buffer or make_buffer(),
        counts=TopicCounts(),
        sharder=sharder or make_sharder(),
        clock=clock,
    )
    made.open()
    return made, add(made, keys)


class Owner:
    """The part of a rebalance that an intake needs."""

    def __init__(self, partitions: Sequence[Partition]) -> None:
        self.partitions = Partitions()
        self.lost: list[Partition] = []
        """Those whose position is not in their log."""
        for partition in partitions:
            self.partitions.add(partition)

    def reset_position(self, partition: Partition, _: Exception) -> None:
        self.lost.append(partition)


def make_intake(*partitions: Partition, buffer: Buffer, now: float = 0.0, metadata_limit: int = MOST_UNITS) -> Intake:
    """An intake of these partitions at a moment."""
    committer = Committer(buffer, lambda: now, interval=1.0, timeout=5.0)
    committer.metadata_limit = metadata_limit
    return Intake(buffer, cast("Rebalance", Owner(partitions)), committer, lambda: now, stuck_after=60.0)


def add(epoch: Epoch, keys: Sequence[Hashable], *, size: int = 10, arrived: float = 0.0) -> list[Delivery]:
    """Take in one record for each of *keys*."""
    first = epoch.tracker.position
    records = [Record(*epoch.topic_partition, first + n, None, b"", (), 0.0) for n in range(len(keys))]
    deliveries = [Delivery(record, epoch, key, size, arrived) for record, key in zip(records, keys, strict=True)]
    batch = FetchedBatch(epoch.topic_partition, records, [size] * len(records), first + len(keys))
    epoch.take_in(batch, deliveries)
    return deliveries


def start(delivery: Delivery | None) -> Delivery:
    """As a worker does."""
    assert delivery is not None
    delivery.epoch.highest_started = max(delivery.epoch.highest_started, delivery.offset)
    return delivery


def halting(shards: Sequence[Shards]) -> FailureHandler:
    """A failure handler with which each record that fails halts."""
    return FailureHandler(Retry(attempts=1), None, shards=shards, counters=Counters(), clock=lambda: 0.0, workers=1)


def unsent(messages: Sequence[Message], *offsets: int, recovery: Recovery | None = None) -> Outputs:
    """The messages of a completed record that no transaction has committed; of the one at offset 0 by default."""
    past = None if recovery is None else PastFailures(1, FailedAttempt("ValueError", "", 1), recovery, 0)
    size = sum(record_size(message.key, message.value, message.headers) for message in messages)
    first = offsets[0] if offsets else 0
    return Outputs(messages, size, first, offsets if len(offsets) > 1 else (), past)
