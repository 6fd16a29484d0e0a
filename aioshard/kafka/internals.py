"""The only module that touches private attributes of aiokafka, each guarded by a canary test.

The version is pinned (`aiokafka>=0.14,<0.15`). What is used, and why the public way does not do:

* records are taken from the fetcher's buffer, because `getmany` builds a slow record class, cannot be
  bounded per partition, does not keep its time-out and blocks while the group rebalances;
* commits, the generation and the member id come from the coordinator, because the public `commit`
  retries for ever and sends whatever generation is current;
* stopping is done part by part, because the public `stop` hangs or breaks off when brokers are gone.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.client import ConnectionGroup, CoordinationType
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import CloseReason
from aiokafka.consumer.fetcher import READ_COMMITTED, FetchError, FetchResult
from aiokafka.errors import CorruptRecordException
from aiokafka.protocol.group import LeaveGroupRequest
from aiokafka.structs import OffsetAndMetadata

from aioshard.ports import NOT_A_MEMBER, RECORD_OVERHEAD, Committed, LogRange, Membership
from aioshard.records import Record, TopicPartition

__all__ = ["Chunk", "FetchError", "FetchResult", "Internals", "Taken"]

CLOSE_GRACE = 1.0
"""Seconds for tasks and connections to end once they were told to."""

_new_record = tuple.__new__
"""Builds a `Record` from a tuple in half the time of calling the class."""


class Taken:
    """What `Chunk.take` took; plain attributes because one is made per partition and poll."""

    __slots__ = ("oversized", "records", "sizes")

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.sizes: list[int] = []
        self.oversized = 0
        """The size of the next record when it did not fit, else 0."""


class Chunk:
    """What one fetch brought of one partition, decoded record by record as it is taken.

    Follows aiokafka's `PartitionRecords` with our record class and our bounds. The position lives in
    aiokafka's `next_fetch_offset`, so that its own checks go on holding. The first record that does not
    fit is kept here, already decoded, and taken first the next time.
    """

    __slots__ = ("_batch", "_held", "_held_size", "_part", "_raw", "drained", "error", "reported", "result", "topic_partition")

    def __init__(self, topic_partition: TopicPartition, result: Any) -> None:
        self.topic_partition = topic_partition
        self.result = result
        self._part: Any = result._partition_records
        self._batch: Any = None
        self._raw: Any = None
        self._held: Record | None = None
        self._held_size = 0
        self.drained = False
        """Whether nothing is left: another fetch may be sent."""
        self.error: Exception | None = None
        """What broke off the decoding; the position is before it."""
        self.reported = False
        """Whether the record that did not fit, or the error, was handed out."""

    @property
    def next_offset(self) -> int:
        """The offset of the next record, as far as known."""
        return int(self._part.next_fetch_offset)

    def take(self, limit: int, room: int, *, alone: bool) -> Taken:
        """Decode up to *limit* records of together at most *room* bytes; with *alone* the first may be larger.

        Never raises: what cannot be decoded ends up in `error`.
        """
        taken = Taken()
        held = self._held
        if held is not None:
            size = self._held_size
            if size > room and not alone:
                taken.oversized = size
                return taken
            taken.records.append(held)
            taken.sizes.append(size)
            self._held = None
            self.reported = False
            self._part.next_fetch_offset = held[2] + 1
            room -= size
            limit -= 1
            alone = False
            if limit <= 0:
                return taken
        try:
            self._decode(taken, limit, room, alone=alone)
        except Exception as error:  # noqa: BLE001 - whatever a broken batch makes the decoders raise
            self.error = error
        return taken

    def _decode(self, taken: Taken, limit: int, room: int, *, alone: bool) -> None:
        part = self._part
        topic, partition = self.topic_partition
        add_record = taken.records.append
        add_size = taken.sizes.append
        while True:
            batch = self._batch
            if batch is None:
                self._batch = batch = self._next_batch()
                if batch is None:
                    self.drained = True
                    return
                # A batch allows `iter` only once; this goes on where it stopped.
                self._raw = islice(batch, None)
            next_offset = part.next_fetch_offset
            try:
                # The hot loop: each line in it costs about 3 % of the whole reading.
                for raw in self._raw:
                    offset = raw.offset
                    if offset < next_offset:
                        continue  # A batch is returned whole, also when asked for from its middle.
                    key = raw.key
                    value = raw.value
                    headers = raw.headers
                    size = RECORD_OVERHEAD
                    if key is not None:
                        size += len(key)
                    if value is not None:
                        size += len(value)
                    if headers:
                        headers = tuple(headers)
                        size += sum([len(name) + len(content or b"") for name, content in headers])
                    else:
                        headers = ()
                    record = _new_record(Record, (topic, partition, offset, key, value, headers, raw.timestamp / 1000))
                    if size > room:
                        if not alone:
                            self._held = record
                            self._held_size = size
                            next_offset = offset
                            if not taken.records:
                                taken.oversized = size
                            return
                        room = size
                    alone = False
                    room -= size
                    add_record(record)
                    add_size(size)
                    next_offset = offset + 1
                    limit -= 1
                    if not limit:
                        return
            finally:
                part.next_fetch_offset = next_offset
            # A batch keeps its last offset when compaction has removed that record.
            part.next_fetch_offset = batch.next_offset
            self._batch = None

    def _next_batch(self) -> Any:
        """The next batch with records for us, iterated from its first record; None at the end of the chunk."""
        part = self._part
        memory = part._records
        while memory.has_next():
            batch = memory.next_batch()
            if part._check_crcs and not batch.validate_crc():
                message = "its checksum is wrong"
                raise CorruptRecordException(message)
            if part._isolation_level == READ_COMMITTED and batch.producer_id is not None:
                part._consume_aborted_up_to(batch.base_offset)
                if batch.is_control_batch and part._contains_abort_marker(batch):
                    part._aborted_producers.discard(batch.producer_id)
                if batch.is_transactional and batch.producer_id in part._aborted_producers:
                    part.next_fetch_offset = batch.next_offset
                    continue
            if batch.is_control_batch:
                part.next_fetch_offset = batch.next_offset
                continue
            return batch
        return None


class Internals:
    """The parts of one started consumer, and what we do with them."""

    def __init__(self, consumer: AIOKafkaConsumer, group_id: str) -> None:
        self.group_id = group_id
        self.consumer: Any = consumer
        self.client: Any = consumer._client
        self.subscription: Any = consumer._subscription
        self.leaving = False

    # What there is --------------------------------------------------------------------

    @property
    def fetcher(self) -> Any:
        """The fetcher; None before the consumer has started."""
        return self.consumer._fetcher

    @property
    def coordinator(self) -> Any:
        """The group coordinator's client side; None before the consumer has started."""
        return self.consumer._coordinator

    @property
    def buffered(self) -> dict[Any, Any]:
        """What was fetched and not yet taken: `FetchResult` or `FetchError` by partition."""
        return self.fetcher._records  # type: ignore[no-any-return]

    @property
    def rebalancing(self) -> bool:
        """Whether partitions are being taken away or given out."""
        return bool(self.subscription.reassignment_in_progress)

    def assignment(self) -> Any:
        """The current assignment, or None; a new object after each rebalance."""
        subscribed = self.subscription.subscription
        return None if subscribed is None else subscribed.assignment

    def states(self, assignment: Any) -> dict[TopicPartition, Any]:
        """Position, marks and pause of each partition of an assignment."""
        return {
            TopicPartition(partition.topic, partition.partition): assignment.state_value(partition)
            for partition in assignment.tps
        }

    def membership(self) -> Membership:
        """Member id and generation as the coordinator's client side has them now."""
        coordinator = self.coordinator
        if coordinator is None or coordinator.generation < 0:
            return NOT_A_MEMBER
        return Membership(coordinator.member_id, coordinator.generation)

    def background_tasks(self) -> dict[str, asyncio.Task[Any]]:
        """The tasks without which nothing moves, by what they do."""
        found = {
            "fetching": self.fetcher and self.fetcher._fetch_task,
            "group membership": self.coordinator and self.coordinator._coordination_task,
            "looking up topics": self.client._sync_task,
        }
        return {name: task for name, task in found.items() if task is not None}

    def take_pending_error(self) -> Exception | None:
        """A fatal error that the coordinator wants to tell; it goes on trying once it was taken."""
        coordinator = self.coordinator
        if coordinator._pending_exception is None:
            return None
        try:
            coordinator.check_errors()
        except Exception as error:  # noqa: BLE001 - it is the return value
            return error
        return None

    # Fetching -------------------------------------------------------------------------

    def bound_prefetch(self, partition_bytes: int) -> None:
        """Set how much one fetch may bring of one partition."""
        self.fetcher._max_partition_fetch_bytes = partition_bytes

    def waiter(self) -> asyncio.Future[None]:
        """A future that resolves when something was fetched, or raises when the group is lost."""
        return self.fetcher._create_fetch_waiter()  # type: ignore[no-any-return]

    def nudge_fetcher(self) -> None:
        """Make the fetcher look again at what it may fetch."""
        self.fetcher._notify(self.fetcher._wait_consume_future)

    def release_broker(self, result: Any) -> None:
        """Let other partitions of the same broker be fetched although *result* is not being taken."""
        if result._backoff:
            result._backoff = 0
            self.nudge_fetcher()

    def discard(self, topic_partition: TopicPartition) -> None:
        """Forget what was fetched of a partition; it is fetched again from its position."""
        if self.buffered.pop(topic_partition, None) is not None:
            self.nudge_fetcher()

    # Questions to the brokers ---------------------------------------------------------

    async def find_coordinator(self) -> None:
        """Wait until the broker that coordinates the group is known and connected; has no deadline."""
        await self.coordinator.ensure_coordinator_known()

    async def look_up_group(self) -> None:
        """Ask once which broker coordinates the group; raises when the group is not allowed."""
        await self.client.coordinator_lookup(CoordinationType.GROUP, self.group_id)

    async def commit_once(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Send one commit request under the membership of this moment: nothing is awaited before it is built."""
        await self.coordinator._do_commit_offsets(
            None, {partition: OffsetAndMetadata(*due) for partition, due in offsets.items()}
        )

    async def committed_once(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Committed]:
        """Ask once for committed offsets; partitions without one are left out."""
        found = await self.coordinator._do_fetch_commit_offsets(partitions)
        return {
            TopicPartition(partition.topic, partition.partition): Committed(committed.offset, committed.metadata)
            for partition, committed in found.items()
        }

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, LogRange]:
        """The bounds of logs; retries what passes and has no deadline."""
        # One after the other: a start never lies behind an end that was asked for before it.
        starts = await self.fetcher.beginning_offsets(partitions, None)
        ends = await self.fetcher.end_offsets(partitions, None)
        return {partition: LogRange(starts[partition], ends[partition]) for partition in partitions}

    async def look_up_topic(self, topic: str) -> frozenset[int]:
        """The partitions of a topic that is not subscribed to, without subscribing to its metadata."""
        separate = ClusterMetadata()
        await self.client._metadata_update(separate, [topic])
        return frozenset(separate.partitions_for_topic(topic) or ())

    # The end --------------------------------------------------------------------------

    async def leave(self) -> None:
        """Stop taking part in the group, and say so unless the member is static."""
        self.leaving = True
        coordinator = self.coordinator
        if coordinator is None:
            return
        if not coordinator._closing.done():
            coordinator._closing.set_result(None)
        joining = bool(coordinator._performed_join_prepare)
        # Cancelled, not awaited: a join in progress lasts as long as the slowest member drains.
        await _end(task for task in (coordinator._coordination_task, coordinator._heartbeat_task) if task is not None)
        node = coordinator.coordinator_id
        if not coordinator.member_id or coordinator._group_instance_id is not None or node is None:
            return
        if joining:
            # The broker reads nothing more from a connection whose join it has not answered.
            connection = self.client._conns.pop((node, ConnectionGroup.COORDINATION), None)
            if connection is not None:
                connection.close(reason=CloseReason.SHUTDOWN)
        request = LeaveGroupRequest(self.group_id, coordinator.member_id)
        await self.client.send(node, request, group=ConnectionGroup.COORDINATION)

    async def tear_down(self) -> None:
        """End every task and connection, whatever state they are in; takes at most twice `CLOSE_GRACE`."""
        self.leaving = True
        self.consumer._closed = True
        tasks: set[asyncio.Task[Any] | None] = {self.client._sync_task}
        if self.fetcher is not None:
            self.fetcher._closed = True
            tasks |= {self.fetcher._fetch_task, *self.fetcher._pending_tasks}
        if self.coordinator is not None:
            coordinator = self.coordinator
            tasks |= {coordinator._coordination_task, coordinator._heartbeat_task, coordinator._commit_refresh_task}
        await _end(task for task in tasks if task is not None)
        closing = []
        for connection in list(self.client._conns.values()):
            transport = connection._writer and connection._writer.transport
            closed = connection.close(reason=CloseReason.SHUTDOWN)
            if closed is not None:
                closing.append((closed, transport))
        self.client._conns.clear()
        if closing:
            await asyncio.wait([closed for closed, _ in closing], timeout=CLOSE_GRACE)
        for closed, transport in closing:
            if not closed.done() and transport is not None:
                transport.abort()


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, whatever they end with."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    if not ending:
        return
    done, _ = await asyncio.wait(ending, timeout=CLOSE_GRACE)
    for task in done:
        if not task.cancelled():
            task.exception()  # Retrieved, so that the loop does not complain about it.
