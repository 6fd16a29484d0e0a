"""Epochs with deliveries, for tests of single parts of the engine."""

from collections.abc import Callable, Hashable, Sequence

from aioshard.core.commit_metadata import MOST_UNITS
from aioshard.core.flow import Usage
from aioshard.engine.buffer import Buffer
from aioshard.engine.counts import TopicCounts
from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.feed import Feed
from aioshard.engine.intake import Intake
from aioshard.engine.partition import Partition
from aioshard.engine.shards import Shards
from aioshard.ports import FetchedBatch
from aioshard.records import Record, TopicPartition


def make_buffer(records: int = 1_000, size: int = 1_000_000) -> Buffer:
    return Buffer(Usage(records, size), lambda: None)


def make_epoch(
    keys: Sequence[Hashable], *, partition: int = 0, buffer: Buffer | None = None, size: int = 10, arrived: float = 0.0
) -> tuple[Epoch, list[Delivery]]:
    """An open epoch that has taken in one record for each of *keys*; they are queued nowhere."""
    name = TopicPartition("orders", partition)
    epoch = Epoch(name, 1, 0, buffer or make_buffer())
    epoch.open()
    return epoch, add(epoch, keys, size=size, arrived=arrived)


def make_feed(shards: Shards | None = None) -> Feed:
    """A feed by key that wants any number of records, with shards that are made on demand unless they are given."""
    served = [Shards() if shards is None else shards]
    return Feed(lambda record: record.key, served, fixed=False, workers=1, unkeyed=never, at_once=1_000_000)


def make_partition(
    keys: Sequence[Hashable] = (),
    *,
    partition: int = 0,
    buffer: Buffer | None = None,
    feed: Feed | None = None,
    clock: Callable[[], float] = lambda: 0.0,
) -> tuple[Partition, list[Delivery]]:
    """An open partition that has taken in one record for each of *keys*; they are queued nowhere."""
    made = Partition(
        TopicPartition("orders", partition),
        1,
        0,
        buffer=buffer or make_buffer(),
        counts=TopicCounts(),
        feed=feed or make_feed(),
        clock=clock,
    )
    made.open()
    return made, add(made, keys)


def make_intake(*partitions: Partition, buffer: Buffer, now: float = 0.0, metadata_limit: int = MOST_UNITS) -> Intake:
    """An intake of these partitions at a moment."""
    return Intake(
        buffer,
        {partition.topic_partition: partition for partition in partitions},
        lambda: now,
        stuck_after=60.0,
        metadata_limit=lambda: metadata_limit,
        out_of_range=lambda *_: None,
    )


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


def never(delivery: Delivery, error: Exception, shards: Shards) -> None:  # noqa: ARG001 - a callback by its shape
    """For a feed whose sharding function cannot fail."""
    raise error
