"""The backfill transport: reads ranges of offsets once, without a group and without commits."""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio
from aiokafka import AIOKafkaConsumer

from aioshard.errors import ClientLostError, DataLossError, OffsetOutOfRangeError, StateError
from aioshard.kafka.connecting import advertised_by, connected
from aioshard.kafka.groupless import Groupless
from aioshard.kafka.intake import Found, Intake
from aioshard.kafka.internals import Internals
from aioshard.kafka.options import consumer_options, partition_share
from aioshard.kafka.waiting import Waiting, raise_ended_task
from aioshard.ports import (
    AllowanceOf,
    Committed,
    Fault,
    FetchedBatch,
    GroupListener,
    LogRange,
    Oversized,
)
from aioshard.records import TopicPartition

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["RangeTransport"]


class RangeTransport(Groupless):
    """Reads ranges of offsets as if they were whole logs; implements `aioshard.ports.Transport`.

    All partitions are assigned at the start and never revoked. Commits stay in this object: the planner of the ranges
    records their progress. One instance is one life of the client.

    Invariants:
        * `poll` returns no record outside its range and no offset that already counts as finished.
        * If retention has deleted the start of a range, that is an error: records are never skipped silently.
    """

    def __init__(
        self,
        settings: "Settings",
        ranges: Mapping[TopicPartition, LogRange],
        finished: Mapping[TopicPartition, Collection[int]] | None = None,
    ) -> None:
        """Check the options; connects to nothing yet.

        Args:
            settings: The brokers, sizes and isolation level.
            ranges: The start (inclusive) and end (exclusive) of each range.
            finished: Offsets to skip, as if the log did not contain them.

        Raises:
            SettingsError: TLS and SASL settings cannot work.
        """
        super().__init__("range", {name: Committed(bounds.start, "") for name, bounds in ranges.items()})
        self._settings = settings
        self._ranges = dict(ranges)
        self._finished = {name: frozenset(offsets) for name, offsets in (finished or {}).items() if offsets}
        options = consumer_options(settings, "")
        self._options = options | {"group_id": None, "group_instance_id": None}
        self._internals: Internals | None = None
        self._intake: Intake | None = None
        self._closed = False
        self._waiting = Waiting()

    @property
    def trouble(self) -> str | None:
        """See `Transport.trouble`."""
        internals = self._internals
        if internals is None or self._closed or internals.connected:
            return None
        return f"no connection to a broker of {self._settings.bootstrap_servers} is open; the client goes on trying"

    # Life -----------------------------------------------------------------------------

    async def start(self, topics: Collection[str], pattern: str | None, listener: GroupListener) -> None:  # noqa: ARG002
        """See `Transport.start`; reads the ranges, regardless of *topics* and *pattern*."""
        if self._internals is not None or self._closed:
            raise StateError("this transport was started before: build a new one for each life of the client")
        internals = self._internals = await connected(
            self._settings,
            self._options,
            lambda options: Internals(AIOKafkaConsumer(**options), ""),
            begin=Internals.start,
            end=Internals.tear_down,
            advertised=lambda internals: advertised_by(internals.client.cluster),
        )
        self._intake = Intake(internals, "", read_committed=self._settings.isolation_level == "read_committed")
        internals.consumer.assign(list(self._ranges))
        self._intake.begin(internals.assignment())
        for task in internals.background_tasks().values():
            task.add_done_callback(self._waiting.look_again)
        listener.assigned(list(self._ranges), self.membership())

    async def close(self) -> None:
        """See `Transport.close`."""
        if self._closed:
            return
        self._closed = True
        self._waiting.look_again()
        if self._intake is not None:
            self._intake.end()
        if self._internals is not None:
            with anyio.CancelScope(shield=True):
                await self._internals.tear_down()

    # Records --------------------------------------------------------------------------

    async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[FetchedBatch | Fault | Oversized]:
        """See `Transport.poll`.

        Raises:
            DataLossError: Retention has deleted records of a range before they were read.
        """
        found = await self._waiting.until_new(functools.partial(self._look, allowance), timeout)
        _, intake = self._running()
        return [self._within(one, intake) for one in found.new + found.repeated]

    def _look(self, allowance: AllowanceOf) -> tuple[Internals, Found]:
        internals, intake = self._running()
        raise_ended_task(internals)
        return internals, intake.take(allowance)

    def _running(self) -> tuple[Internals, Intake]:
        if self._internals is None or self._intake is None or self._closed:
            raise ClientLostError(f"the Kafka client {'is closed' if self._closed else 'was not started'}")
        return self._internals, self._intake

    def _within(self, found: FetchedBatch | Fault | Oversized, intake: Intake) -> FetchedBatch | Fault | Oversized:
        """Trim a batch to its range, without finished offsets; pause the partition at the end of the range."""
        name = found.topic_partition
        if isinstance(found, Fault) and isinstance(found.error, OffsetOutOfRangeError):
            bounds = self._ranges[name]
            position = intake.position(name)
            first = bounds.start if position is None else position
            lost = f"{name}: from offset {first} on, of {bounds.start} to {bounds.end - 1}"
            raise DataLossError([lost], "Plan anew from the offsets that are left")
        if not isinstance(found, FetchedBatch):
            return found
        records, sizes, end = found.records, found.sizes, self._ranges[name].end
        if found.next_offset >= end:
            intake.pause([name])
            kept = sum(record.offset < end for record in records)
            records, sizes = records[:kept], sizes[:kept]
        finished = self._finished.get(name)
        if finished is not None:
            chosen = [index for index, record in enumerate(records) if record.offset not in finished]
            records, sizes = [records[index] for index in chosen], [sizes[index] for index in chosen]
        return FetchedBatch(name, records, sizes, min(found.next_offset, end))

    def wake(self) -> None:
        """See `Transport.wake`."""
        self._waiting.wake()

    # Positions ------------------------------------------------------------------------

    def position(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.position`."""
        position = None if self._intake is None else self._intake.position(topic_partition)
        return None if position is None else min(position, self._ranges[topic_partition].end)

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.end_offset`: the end of the range."""
        bounds = self._ranges.get(topic_partition)
        return None if bounds is None else bounds.end

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.pause`."""
        if self._intake is not None:
            self._intake.pause(partitions)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.resume`; a partition stays paused once its range is read."""
        if self._intake is not None:
            left = [name for name in partitions if (self.position(name) or 0) < self._ranges[name].end]
            self._intake.resume(left)
            self._waiting.look_again()

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """See `Transport.seek`."""
        if self._intake is not None:
            self._intake.seek(topic_partition, offset)

    def adjust_prefetch(self, partitions: int, max_bytes: int) -> None:
        """See `Transport.adjust_prefetch`."""
        if self._internals is not None:
            self._internals.bound_prefetch(partition_share(partitions, max_bytes))

    # Queries --------------------------------------------------------------------------

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """See `Transport.log_ranges`: the ranges themselves."""
        return {name: self._ranges[name] for name in partitions}

    async def partitions(self, topic: str) -> frozenset[int]:
        """See `Transport.partitions`."""
        return frozenset(name.partition for name in self._ranges if name.topic == topic)

    async def topics(self) -> frozenset[str]:
        """See `Transport.topics`: the topics of the ranges."""
        return frozenset(name.topic for name in self._ranges)
