"""Runs parked records again when they are due: which ones, how many at the same time, and from which reads."""

import asyncio
import itertools
from collections.abc import Callable, Sequence

import anyio

from aioshard.core.fairness import most_failing_runs
from aioshard.core.flow import Usage
from aioshard.core.parking import ParkedEntry
from aioshard.core.sharding import fixed_shard
from aioshard.engine.buffer import Buffer
from aioshard.engine.epoch import Delivery
from aioshard.engine.outcomes import Recovery
from aioshard.engine.parked_partition import ParkedPartition
from aioshard.engine.read_ahead import ReadAhead
from aioshard.engine.shards import Shards
from aioshard.errors import TransportError
from aioshard.ports import UNKNOWN_OFFSET, SideTopics, record_size
from aioshard.records import Record
from aioshard.serde.header_names import undecodable
from aioshard.serde.side_records import Coordinates, ParkedRecord, read_parked

_BACKOFF = 1.0
"""Seconds until a record is tried again that could not be read, or for which there was no room."""
_SOON = 1.0
"""Seconds; records of keys that are due by then are kept when they are read."""
_KEPT = 30.0
"""Seconds for which unused records are kept."""
_MOST_SKIPPED = 100
"""Maximum number of due records of a partition that are passed over in one look."""
_SHORTEST_WAIT = 0.01
_LONGEST_WAIT = 60.0
"""Seconds from one look for due records to the next, at least and at most."""
_MOST_READS = 4
"""Maximum number of reads at a time; each brings up to a megabyte, which is in memory until it is sorted out."""
_SHARE = 10
"""Records that were read and do not run yet hold at most this part of the buffer: a tenth."""
_LEAST_IN_BATCHES = 16
"""Replays of a batch handler that may be in flight at the same time, at least."""
_NO_ROOM_WAIT = 0.1
"""Seconds until the next look if no more replays may run: nothing tells when one waits for its next attempt."""


class Replays:
    """The replays of one handler's parked records, over all partitions that we own.

    `run` is its task: it looks which keys are due, takes what has been read of them, and starts reads for the rest, one
    per partition. A decision never awaits, so a slow partition delays no other. Owned by the event loop.

    Invariants:
        * At most one record of a key is in flight (I4): `ParkedKeys.take_due` returns a key once.
        * While other records wait, replays hold at most `FAILING_SHARE` of the workers, from their start until they are
          removed from the side topic.
    """

    def __init__(
        self,
        *,
        shards: Sequence[Shards],
        fixed: bool,
        batch_workers: int | None,
        exactly_once: bool,
        side_topics: SideTopics,
        buffer: Buffer,
        finished: Recovery,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        """Start without partitions.

        Args:
            shards: Shards of the handler.
            fixed: Whether they are fixed; if so, deliveries carry the number of their shard as key.
            batch_workers: Number of workers of a batch handler; None for a handler of single records.
            exactly_once: Whether messages become visible in the transaction that commits the completion.
            side_topics: Reads the side topic.
            buffer: Buffer shared by all partitions.
            finished: Removes a record from the side topic once its handler has succeeded.
            clock: Returns the loop time.
            now: Returns the time of the entries' due times, in seconds since the epoch.
        """
        self._shards = shards
        self._fixed = fixed
        self._batch_workers = batch_workers
        self._exactly_once = exactly_once
        self._side = side_topics
        self._buffer = buffer
        self._finished = finished
        self._clock = clock
        self._now = now
        self._read_ahead: dict[ParkedPartition, ReadAhead] = {}
        """The partitions, each with its records that were read ahead."""
        self._reading: set[ParkedPartition] = set()
        """Partitions that are being read."""
        self._unreadable: dict[ParkedPartition, float] = {}
        """Partitions that could not be read, each with the loop time of the next try."""
        self._turn = itertools.count()
        self._due = asyncio.Event()

    # Partitions ---------------------------------------------------------------------

    def add(self, parked: ParkedPartition) -> None:
        """Begin with a partition, once its gate is open."""
        self._read_ahead[parked] = ReadAhead(parked, self._buffer)

    def remove(self, parked: ParkedPartition) -> None:
        """Forget a partition that has ended, with its records that were read ahead."""
        self._read_ahead.pop(parked).clear()
        self._unreadable.pop(parked, None)

    def wake(self) -> None:
        """Look for due records now: something has changed."""
        self._due.set()

    @property
    def read_ahead(self) -> Usage:
        """How much of the buffer the records hold that were read and do not run yet."""
        held = [read_ahead.held for read_ahead in self._read_ahead.values()]
        return Usage(sum(usage.records for usage in held), sum(usage.bytes for usage in held))

    # Running ------------------------------------------------------------------------

    async def run(self) -> None:
        """Replay due records until cancelled."""
        async with asyncio.TaskGroup() as reading:
            while True:
                self._due.clear()
                self._forget_unused()
                for parked in self._replay_due():
                    self._reading.add(parked)
                    reading.create_task(self._read(parked), name=f"read due records of {parked.topic_partition}")
                with anyio.move_on_after(self._until_due()):
                    await self._due.wait()

    def _forget_unused(self) -> None:
        """Give back the room of records that were read and, against expectation, are not needed."""
        latest = self._clock() - _KEPT
        for read_ahead in self._read_ahead.values():
            if read_ahead.held.records and read_ahead.read_at < latest:
                read_ahead.clear()

    def _replay_due(self) -> list[ParkedPartition]:
        """Queue the due records that have been read, as many as may run; return the partitions to read."""
        to_read: list[ParkedPartition] = []
        room = self._room()
        partitions = self._eligible()
        # Each partition is the first in turn: none may use all the room again and again.
        begin = next(self._turn) % max(len(partitions), 1)
        for parked in partitions[begin:] + partitions[:begin]:
            skipped: list[ParkedEntry] = []
            queued, is_short = self._replay(parked, room, skipped)
            self._put_back(parked, skipped)
            room -= queued
            if is_short and len(self._reading) + len(to_read) < _MOST_READS:
                to_read.append(parked)
        return to_read

    def _put_back(self, parked: ParkedPartition, skipped: Sequence[ParkedEntry]) -> None:
        """Let keys wait again that were passed over; if there are many, the next look begins with those behind them."""
        later = self._now() + _NO_ROOM_WAIT if len(skipped) >= _MOST_SKIPPED else 0.0
        for entry in skipped:
            parked.keys.postpone(entry.key, max(entry.due, later))

    def _eligible(self) -> list[ParkedPartition]:
        """Return the partitions with waiting keys that may be replayed and read now."""
        now = self._clock()
        return [
            parked
            for parked in self._read_ahead
            if parked.may_replay
            and parked.keys.next_due is not None
            and parked not in self._reading
            and self._unreadable.get(parked, 0.0) <= now
        ]

    @property
    def _in_flight(self) -> int:
        return sum(len(parked.tracker) for parked in self._read_ahead)

    def _room(self) -> int:
        """Return how many more replays may run: a share of the workers, and those that nothing else needs."""
        in_flight = 0
        running = 0
        for parked in self._read_ahead:
            for replay in parked.tracker.values():
                in_flight += 1
                # One that waits, maybe for hours, holds no worker.
                running += not self._shards_of(replay).is_waiting(replay)
        most = max(self._buffer.bounds.records // _SHARE, 1) - in_flight
        if self._batch_workers is not None:
            return min(max(2 * self._batch_workers, _LEAST_IN_BATCHES) - running, most)
        workers = sum(shards.allowed_workers for shards in self._shards)
        spare = sum(shards.spare_workers for shards in self._shards)
        return min(max(most_failing_runs(workers, others_wait=True) - running, spare), most)

    def _until_due(self) -> float:
        """Return the seconds until the next key is due; `wake` ends the wait earlier."""
        now = self._clock()
        waits = [at - now for parked, at in self._unreadable.items() if parked.may_replay and at > now]
        if len(self._reading) < _MOST_READS:
            time = self._now()
            waits += [due - time for parked in self._eligible() if (due := parked.keys.next_due) is not None]
        # A replay or a read that ends, or a partition that opens, wakes us.
        shortest = _SHORTEST_WAIT if self._room() > 0 else _NO_ROOM_WAIT
        return min(max(min(waits, default=_LONGEST_WAIT), shortest), _LONGEST_WAIT)

    def _replay(self, parked: ParkedPartition, room: int, skipped: list[ParkedEntry]) -> tuple[int, bool]:
        """Queue the first records of due keys of a partition.

        Args:
            parked: The partition.
            room: Maximum number of records.
            skipped: Receives those that were taken and stay due, because other records of their shards come first.

        Returns:
            How many were queued, at most *room*, and whether the next one must be read.
        """
        queued = 0
        now = self._now()
        while queued < room and (entry := parked.keys.first_due(now)) is not None:
            # 1. Its fixed shard is a single worker, which has other records to run between two replays.
            if self._fixed and self._has_replay(self._shard_of(entry)):
                parked.keys.take_due(now)
                skipped.append(entry)
                if len(skipped) >= _MOST_SKIPPED:
                    return queued, False
                continue
            # 2. It is not known where it is, because the transaction that parks it has not ended.
            if entry.stored_at == UNKNOWN_OFFSET:
                parked.keys.postpone(entry.key, now + _BACKOFF)
                continue
            stored = self._read_ahead[parked].take(entry)
            # 3. It has to be read, with those around it.
            if stored is None:
                return queued, True
            record = _original_of(parked, entry, stored)
            # 4. It is not what was parked.
            if record is None:
                self._give_up(parked, entry, _gone(parked, entry))
            # 5. There is no room for it.
            elif not self._fits(record):
                parked.keys.postpone(entry.key, now + _BACKOFF)
                return queued, False
            # 6. It can be replayed.
            else:
                parked.unread.pop(entry.offset, None)
                parked.keys.take_due(now)
                self._queue(parked, entry, record)
                queued += 1
        return queued, False

    def _shards_of(self, replay: Delivery) -> Shards:
        """Return the fixed shard of a replay, or the one object that serves all keys."""
        return self._shards[replay.key] if self._fixed and isinstance(replay.key, int) else self._shards[0]

    def _shard_of(self, entry: ParkedEntry) -> int:
        """Return the number of the fixed shard of a record."""
        return fixed_shard(None if entry.alone else entry.key, len(self._shards), entry.offset)

    def _has_replay(self, number: int) -> bool:
        """Return whether a fixed shard has a replay already, and something waits in it."""
        if not self._shards[number].unseen:
            return False
        return any(replay.key == number for parked in self._read_ahead for replay in parked.tracker.values())

    def _give_up(self, parked: ParkedPartition, entry: ParkedEntry, why: str) -> None:
        """Let a key wait whose first record cannot be read."""
        parked.unread[entry.offset] = why
        parked.keys.postpone(entry.key, self._now() + _BACKOFF)

    def _fits(self, record: Record) -> bool:
        """Return whether there is room for a record, or no running replay that it could wait for."""
        size = record_size(record.key, record.value, record.headers)
        return self._buffer.bytes + size <= self._buffer.bounds.bytes or not self._in_flight

    def _queue(self, parked: ParkedPartition, entry: ParkedEntry, record: Record) -> None:
        """Queue a parked record for its replay, ahead of the records that arrive, except for the first of them.

        A single worker would otherwise run one replay after the other, however many records wait.
        """
        shard_key = parked.identity(record)
        number = 0
        delivery_key = shard_key
        if self._fixed:
            number = self._shard_of(entry)
            delivery_key = number
        replay = parked.replay(entry, record, delivery_key, self._clock())
        replay.finish_with(self._finished)
        if self._exactly_once:
            # The messages of a batch belong to one completion.
            replay.isolate()
        error = undecodable(record)
        if error is not None:
            replay.refuse(error)
        # Unlike other records, it may run again in the epoch in which its message was refused.
        parked.source.fail_refused([replay])
        parked.source.refused.pop(record.offset, None)
        self._shards[number].put_second(replay)

    # Reading ------------------------------------------------------------------------

    async def _read(self, parked: ParkedPartition) -> None:
        """Read the first record that is due, and those stored behind it."""
        try:
            entry = parked.keys.first_due(self._now())
            read_ahead = self._read_ahead.get(parked)
            # The partition may have ended before this task began.
            if read_ahead is not None and entry is not None and entry.stored_at != UNKNOWN_OFFSET:
                await self._read_from(parked, entry, entry.stored_at, read_ahead)
        finally:
            self._reading.discard(parked)
            self.wake()

    async def _read_from(
        self, parked: ParkedPartition, entry: ParkedEntry, position: int, read_ahead: ReadAhead
    ) -> None:
        max_bytes = read_ahead.bytes_for(self._share(read_ahead).records)
        try:
            records = await self._side.read(parked.topic_partition, position, max_bytes)
        except TransportError as error:
            if parked in self._read_ahead:
                parked.unread[entry.offset] = str(error)
                self._unreadable[parked] = self._clock() + _BACKOFF
            return
        # The partition has ended meanwhile.
        if parked not in self._read_ahead:
            return
        # Meanwhile an operator may have dropped the record, or a later copy of it may have been seen.
        is_wanted = parked.keys.get(entry.offset) is entry and entry.stored_at == position
        if is_wanted and (not records or records[0].offset != position):
            self._give_up(parked, entry, _gone(parked, entry))
        read_ahead.store(records, self._share(read_ahead), until=self._now() + _SOON, now=self._clock())

    def _share(self, read_ahead: ReadAhead) -> Usage:
        """Return how much of the buffer the unused records of a partition may hold."""
        bounds = self._buffer.bounds
        active = sum(other.keys.next_due is not None for other in self._read_ahead) or 1
        held = read_ahead.held
        return Usage(
            min(bounds.records // _SHARE // active, held.records + bounds.records - self._buffer.records),
            min(bounds.bytes // _SHARE // active, held.bytes + bounds.bytes - self._buffer.bytes),
        )


def _original_of(parked: ParkedPartition, entry: ParkedEntry, stored: Record) -> Record | None:
    """Return the record that was parked; None if something else is stored in its place."""
    decoded = read_parked(stored)
    if not isinstance(decoded, ParkedRecord):
        return None
    is_entry = decoded.coordinates == Coordinates(*parked.source.topic_partition, entry.offset)
    return decoded.original if is_entry else None


def _gone(parked: ParkedPartition, entry: ParkedEntry) -> str:
    return (
        f"parked record {parked.source.topic_partition}/{entry.offset} is not in {parked.topic_partition} at offset "
        f"{entry.stored_at}: something other than compaction deleted it. Its key waits; 'aioshard park drop' gives the "
        "record up"
    )
