"""The parked records of one partition: which ones are in the side topic, and which of them run again."""

import sys
from collections.abc import Callable, Collection, Hashable, Iterable

from aioshard.core.finished_offsets import holds
from aioshard.core.parking import ParkedEntry, ParkedKeys
from aioshard.core.sharding import ShardKey
from aioshard.engine.buffer import Buffer
from aioshard.engine.epoch import Delivery, Epoch, Gate, Outputs
from aioshard.ports import UNKNOWN_OFFSET, FetchedBatch, Message, record_size
from aioshard.records import Record, TopicPartition
from aioshard.serde.side_records import (
    Coordinates,
    Failure,
    ParkedRecord,
    ReleaseRequest,
    Removed,
    StorageKey,
    read_parked,
    release,
    storage_key_of,
    tombstone,
)


class Replay(Delivery):
    """A parked record that runs again."""

    __slots__ = ("entry", "parked")

    def __init__(
        self, record: Record, key: ShardKey, size: int, *, parked: "ParkedPartition", entry: ParkedEntry, now: float
    ) -> None:
        super().__init__(record, parked, key, size, now)
        self.offset = parked.tracker.position
        self.parked = parked
        self.entry = entry


class ParkedPartition(Epoch):
    """Parked records of one partition, for as long as we own it, and the epoch of those that run again.

    A replay is a delivery like any other, but it is not part of the partition's own epoch: its offset was committed
    long ago. This epoch opens, closes and ends together with the partition's. So a drain waits for a replay, and a
    late result changes nothing.

    Invariants:
        * The side topic determines which records are parked. A record parked by this process counts once its write
          is acknowledged.
        * A record that the partition delivers again is not parked: it arrives anyway, in order.
    """

    def __init__(
        self,
        source: Epoch,
        topic: str,
        generation: int,
        *,
        buffer: Buffer,
        identity: Callable[[Record], ShardKey],
        exactly_once: bool,
    ) -> None:
        """Start without known parked records.

        Args:
            source: Epoch of the partition.
            topic: Side topic; its partition with the same number stores the parked records.
            generation: Group generation in which we got the partition; records parked here are stored under it.
            buffer: Buffer shared by all partitions.
            identity: Returns the shard key of a record; None if it has none and is parked alone.
            exactly_once: Whether our records and tombstones are in transactions, so that none is ever in doubt.
        """
        super().__init__(
            TopicPartition(topic, source.topic_partition.partition), source.number, 0, buffer, source.counts
        )
        self.source = source
        self.generation = generation
        self.identity = identity
        self.keys = ParkedKeys()
        self.failures: dict[Hashable, Failure] = {}
        """Failure of the first record of each key."""
        self.unread: dict[int, str] = {}
        """Parked records that could not be read when they were due, by offset, each with the reason."""
        self.read_to = sys.maxsize
        """Where the initial read ended: `read` ignores earlier records, and all records until then."""
        self._start = source.tracker.position
        self._stored: dict[StorageKey, tuple[ParkedEntry, Failure]] = {}
        """Records that were in the side topic when we got the partition, until it is clear whether they are parked."""
        self._unacknowledged: set[int] = set()
        """Offsets seen in the side topic as parked by us, but not acknowledged to us."""
        self._dropped: set[StorageKey] = set()
        """Records that an operator dropped while we parked them: a copy that is written later must not stay."""
        self._stored_keys: dict[int, Hashable] = {}
        """During the initial read: the key of each offset that was ever parked."""
        self._requested: dict[Coordinates, None] = {}
        """During the initial read: unanswered release requests."""
        self._releasing: dict[Hashable, list[Coordinates]] = {}
        """Release requests in progress, by key; the next owner must repeat them unless they are answered."""
        self._outgoing: list[Message] = []
        self._exactly_once = exactly_once

    # Reading the side topic ---------------------------------------------------------

    def restore(self, record: Record) -> str | None:
        """Process a record that was in the side topic when we got the partition.

        Returns:
            The group that parked the record; None if this is not a parked record.
        """
        decoded = read_parked(record)
        match decoded:
            case ParkedRecord() if self._is_ours(decoded):
                entry = ParkedEntry(
                    decoded.original.offset,
                    self.identity(decoded.original),
                    generation=decoded.generation,
                    stored_at=record.offset,
                    due=decoded.due,
                    retries=decoded.retries,
                )
                self._stored[decoded.storage_key] = (entry, decoded.failure)
                self._stored_keys[entry.offset] = entry.key
            case Removed() if self._is_ours(decoded):
                self._stored.pop(decoded.storage_key, None)
            case ReleaseRequest(answered=True):
                self._requested.pop(decoded.coordinates, None)
            case ReleaseRequest() if self._is_ours(decoded):
                self._requested[decoded.coordinates] = None
        return decoded.failure.group if isinstance(decoded, ParkedRecord) else None

    def finish_restoring(self, newest: float) -> None:
        """Decide which of the stored records are parked, and handle release requests.

        A record stored under several generations is parked once, under the latest one. A stale member, which had lost
        the partition without knowing it, wrote the other copies. If they stayed, a later owner would consider them
        parked and run them again, after later records of their key were processed. One case is left: a copy arrives
        late, and the owner, which has finished the record, dies within the second before it would have removed it.

        Args:
            newest: Generation up to which records are ours; the others stay undecided.
        """
        latest_first = sorted(self._stored.items(), key=lambda item: item[0].generation, reverse=True)
        undecided: dict[StorageKey, tuple[ParkedEntry, Failure]] = {}
        for storage_key, (entry, failure) in latest_first:
            # 1. Somebody may own the partition later than we do.
            if entry.generation > newest:
                undecided[storage_key] = (entry, failure)
            # 2. It is not parked: the partition delivers the record again, or a later copy counts.
            elif self._comes_again(entry.offset) or self.keys.get(entry.offset) is not None:
                self._outgoing.append(self.tombstone(entry.offset, entry.generation))
            # 3. It is parked.
            else:
                self.add(entry, failure)
        self._stored = undecided
        for coordinates in self._requested:
            # The previous owner may have run the record that was named, and not those behind it.
            self._release(coordinates, self._stored_keys.get(coordinates.offset))
        self._stored_keys.clear()
        self._requested.clear()

    def _comes_again(self, offset: int) -> bool:
        """Return whether the partition delivers a record that was parked before we got it."""
        return offset >= self._start and not holds(self.source.finished_ahead, offset)

    @property
    def in_doubt(self) -> bool:
        """Whether records are parked under a later generation than ours: the group moved on, or was recreated."""
        return bool(self._stored)

    def read(self, record: Record) -> None:
        """Process a record of the side topic that was written after we got the partition."""
        if record.offset < self.read_to or self._acknowledges(record):
            return
        decoded = read_parked(record)
        if not self._is_ours(decoded):
            return
        match decoded:
            # 1. A record was parked, by us or by a stale member.
            case ParkedRecord():
                self._parked(decoded)
            # 2. A record was removed. If a later owner did it, we are a stale member, and must not run those behind it.
            case Removed() if decoded.by is None or decoded.by <= self.generation:
                self._stored.pop(decoded.storage_key, None)
                self._removed(decoded, record.offset)
            # 3. An operator wants a key to run again.
            case ReleaseRequest(answered=False):
                entry = self.keys.get(decoded.coordinates.offset)
                self._release(decoded.coordinates, None if entry is None else entry.key)

    def _acknowledges(self, record: Record) -> bool:
        """Process a record that is known as parked already, which most are, without decoding all of it."""
        storage_key = storage_key_of(record)
        if record.value is None or storage_key is None or storage_key.coordinates[:2] != self.source.topic_partition:
            return False
        known = self.keys.get(storage_key.coordinates.offset)
        if known is None or known.generation != storage_key.generation:
            return False
        known.stored_at = max(known.stored_at, record.offset)
        return True

    def _is_ours(self, decoded: ParkedRecord | Removed | ReleaseRequest | None) -> bool:
        return decoded is not None and decoded.coordinates[:2] == self.source.topic_partition

    def _parked(self, parked: ParkedRecord) -> None:
        """Process a record that is not known as parked; remove it again if a stale member parked it."""
        offset = parked.coordinates.offset
        generation = parked.generation
        # 1. An operator dropped it before this copy was written: we repeat the drop.
        if parked.storage_key in self._dropped:
            self._outgoing.append(self.tombstone(offset, generation))
        # 2. Only transactions park and remove: a tombstone outside of them could be visible without the outputs.
        elif self._exactly_once:
            return
        # 3. We have parked it, and the acknowledgment is on its way or lost.
        elif generation == self.generation:
            self._unacknowledged.add(offset)
        # 4. A stale member has parked it. (A later generation belongs to the next owner of the partition.)
        elif generation < self.generation:
            self._outgoing.append(self.tombstone(offset, generation))

    def _removed(self, removed: Removed, removed_at: int) -> None:
        """Process a tombstone of the side topic."""
        storage_key = removed.storage_key
        offset = storage_key.coordinates.offset
        entry = self.keys.get(offset)
        if entry is not None and entry.generation != storage_key.generation:
            return
        # 1. The record is gone from the side topic.
        if entry is not None and UNKNOWN_OFFSET < entry.stored_at < removed_at:
            self._outgoing += self.remove(offset)
        # 2. We park it, and that copy may come after the tombstone. An operator has not seen it, and means the record.
        elif removed.by is None and (entry is not None or offset in self._unacknowledged):
            self._dropped.add(storage_key)
            self._outgoing += self.remove(offset)

    def _release(self, coordinates: Coordinates, key: Hashable) -> None:
        if key in self.keys:
            self.keys.release(key)
            self._releasing.setdefault(key, []).append(coordinates)
        else:
            self._outgoing += self._answers([coordinates])

    def _answers(self, requests: Iterable[Coordinates]) -> list[Message]:
        # Only when the key is gone or has failed again: a request answered earlier would be lost in a deploy.
        return [release(self.topic_partition.topic, coordinates, answered=True) for coordinates in requests]

    def write_later(self, messages: Iterable[Message]) -> None:
        """Add messages to those that `outgoing` returns."""
        self._outgoing += messages

    def outgoing(self) -> list[Message]:
        """Return the messages to write: answers to release requests, and tombstones for copies that must not run."""
        for offset in [offset for offset in self._unacknowledged if offset not in self.source.tracker.incomplete]:
            self._unacknowledged.discard(offset)
            # It was stored but not acknowledged, and the record ended in another way.
            if self.keys.get(offset) is None:
                self._outgoing.append(self.tombstone(offset, self.generation))
        messages = self._outgoing
        self._outgoing = []
        return messages

    def tombstone(self, offset: int, generation: int) -> Message:
        """Return the message that removes a record parked under a generation; it names us as the remover."""
        return tombstone(self.topic_partition.topic, self._storage_key(offset, generation), by=self.generation)

    def _storage_key(self, offset: int, generation: int) -> StorageKey:
        return StorageKey(Coordinates(*self.source.topic_partition, offset), generation)

    # Parked records -----------------------------------------------------------------

    def add(self, entry: ParkedEntry, failure: Failure) -> bool:
        """Add a record that is parked and acknowledged; return whether it is now the first of its key.

        Does nothing if an operator has dropped it already.
        """
        if self._dropped and self._storage_key(entry.offset, entry.generation) in self._dropped:
            return False
        is_first = self.keys.add(entry)
        if is_first:
            self.failures[entry.key] = failure
        return is_first

    def remove(self, offset: int) -> list[Message]:
        """Remove a record that is no longer parked; return the answers to requests to release its key."""
        entry = self.keys.remove(offset)
        self.unread.pop(offset, None)
        if entry is None or entry.key in self.keys:
            return []
        self.failures.pop(entry.key, None)
        return self._answers(self._releasing.pop(entry.key, ()))

    def failed_again(self, entry: ParkedEntry, failure: Failure) -> list[Message]:
        """Make a key whose replay failed wait until its first record is due; return the answers to its requests."""
        self.failures[entry.key] = failure
        self.keys.postpone(entry.key, entry.due)
        return self._answers(self._releasing.pop(entry.key, ()))

    # Replays ------------------------------------------------------------------------

    @property
    def may_replay(self) -> bool:
        """Whether due records may be replayed now.

        The gate of the partition decides: a pause from before it was ours does not close that of its replays.
        """
        return self.source.gate is Gate.OPEN

    def replay(self, entry: ParkedEntry, record: Record, key: ShardKey, now: float) -> Replay:
        """Create the delivery of a parked record."""
        size = record_size(record.key, record.value, record.headers)
        replay = Replay(record, key, size, parked=self, entry=entry, now=now)
        self.take_in(FetchedBatch(self.topic_partition, [record], [size], replay.offset + 1), [replay])
        return replay

    def complete(self, delivery: Delivery) -> bool:
        """See `Epoch.complete`; the messages of a replay belong to the transactions of the partition."""
        if not super().complete(delivery):
            return False
        if delivery.outgoing:
            self.source.send_later(Outputs.of(delivery))
        return True

    def close(self, running: Collection[Delivery] = (), *, below: bool = False) -> None:  # noqa: ARG002
        """See `Epoch.close`; a drain does not wait for replays that are only queued.

        It does wait for those whose handler has succeeded, although their removal may only be queued: otherwise they
        would run a second time.
        """
        succeeded = [
            replay for replay in self.tracker.values() if replay.then is not None and replay.recovery is replay.then
        ]
        super().close({*running, *succeeded})
