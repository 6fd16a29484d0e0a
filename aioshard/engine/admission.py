"""How much of each partition may be taken in now, and in words why not more."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from aioshard.core.flow import NONE, Usage, room_for
from aioshard.engine.buffer import Buffer
from aioshard.engine.epoch import Epoch, Gate
from aioshard.engine.notes import Notes
from aioshard.ports import NOTHING, Allowance, Oversized
from aioshard.records import TopicPartition

__all__ = ["Admission", "HasEpoch", "Limit"]

_CHUNKS = 4
"""A partition takes in nothing until a quarter of its fair share is free, so that a full buffer does not
lead to polls of single records."""
_EVERYTHING = 1 << 62


class HasEpoch(Protocol):
    """What serves one assigned partition."""

    @property
    def epoch(self) -> Epoch:
        """The ownership of the partition."""

    @property
    def wanted(self) -> int:
        """How many more records its handler wants queued, to have enough for its workers."""

    def when_wanted(self, wake: Callable[[], None]) -> int:
        """Have *wake* called when a worker finds nothing to do.

        Returns:
            After how many completions at the latest more is wanted.
        """

    def no_room(self) -> None:
        """Nothing more of the partition finds room now: what waits to be joined by more is not to wait."""


class _Waiting(NamedTuple):
    """A record that found no room, and where its partition stood then."""

    oversized: Oversized
    epoch: Epoch
    position: int

    @property
    def lasts(self) -> bool:
        """Whether it still is the next record of a partition that is ours."""
        return self.epoch.gate is Gate.OPEN and self.epoch.tracker.position == self.position


class Limit(NamedTuple):
    """What leaves a partition no room."""

    reason: str
    """With its figures; a clause."""
    what_to_do: str | None


class Admission:
    """Decides for the pump; owned by the event loop, and read by whoever explains.

    A record that finds no room stays with the client, and nothing else is taken in until it fits, or can be
    admitted alone: else records that are small would take every room that becomes free (I6).
    """

    def __init__(
        self,
        buffer: Buffer,
        partitions: Mapping[TopicPartition, HasEpoch],
        clock: Callable[[], float],
        stuck_after: float,
        notes: Notes,
    ) -> None:
        """Make an admission.

        Args:
            buffer: What is held of all partitions.
            partitions: Those that are assigned.
            clock: Loop time.
            stuck_after: Seconds after which an incomplete record makes its partition one that cannot advance.
            notes: Say how much of a partition may finish beyond its committed offset.
        """
        self._buffer = buffer
        self._partitions = partitions
        self._clock = clock
        self._stuck_after = stuck_after
        self._notes = notes
        self._waiting: _Waiting | None = None

    def keep_room_for(self, oversized: Oversized, epoch: Epoch) -> None:
        """The next record of a partition found no room."""
        self._waiting = _Waiting(oversized, epoch, epoch.tracker.position)

    def taken(self, epoch: Epoch) -> None:
        """Something of a partition was taken in."""
        if self._waiting is not None and self._waiting.epoch is epoch:
            self._waiting = None

    def stuck(self, epoch: Epoch) -> bool:
        """Whether a partition cannot advance."""
        return epoch.stuck(self._clock(), self._stuck_after)

    def allowance(self, topic_partition: TopicPartition) -> Allowance:
        """What the pump may take in of a partition; without room, it is woken when there may be some.

        No more than its handler soon needs: a record that waits in memory costs twice what one costs that is
        started while it is young, as the garbage collector then looks at it again and again.
        """
        allowance = self._allowance(topic_partition)
        if not allowance.records:
            self._buffer.arm()
            self._tell_no_room(topic_partition)
        if not allowance.records or allowance.alone:
            return allowance
        partition = self._partitions[topic_partition]
        wanted = partition.wanted
        if wanted <= 0:
            self._buffer.arm(partition.when_wanted(self._buffer.wake))
            return NOTHING
        return allowance._replace(records=min(allowance.records, wanted))

    def _tell_no_room(self, topic_partition: TopicPartition) -> None:
        """What waits to be joined by more waits in vain; but not because this partition itself cannot advance."""
        partition = self._partitions.get(topic_partition)
        if partition is not None and partition.epoch.gate is Gate.OPEN and not self.stuck(partition.epoch):
            partition.no_room()

    def _allowance(self, topic_partition: TopicPartition) -> Allowance:
        partition = self._partitions.get(topic_partition)
        if partition is None or (partition.epoch.gate is not Gate.OPEN and not partition.epoch.probe_room):
            return NOTHING
        epoch, buffer = partition.epoch, self._buffer
        if epoch.gate is not Gate.OPEN:
            return self._for_probing(epoch)
        stuck = self.stuck(epoch)
        if epoch.shed and not epoch.fetching_again:
            return NOTHING  # what was given back comes before anything new
        waiting = self._waits_for_room()
        if waiting is not None and not stuck:
            return self._for_oversized(waiting.oversized) if waiting.epoch is epoch else NOTHING
        held = epoch.held_usage
        room = room_for(buffer.bounds, Usage(buffer.records, buffer.bytes), held, stuck=stuck)
        if held.records and not stuck:
            shares = _CHUNKS * (len(self._partitions) + 1)
            if room.records < buffer.bounds.records // shares or room.bytes < buffer.bounds.bytes // shares:
                room = NONE
        notable = self._notes.room(epoch)
        if notable is not None and notable < room.records:
            room = Usage(notable, room.bytes) if notable else NONE
        return Allowance(room.records, room.bytes)

    def _for_probing(self, epoch: Epoch) -> Allowance:
        """Some records of a paused partition, whatever else is in hand: without them it might never go on."""
        if epoch.gate is not Gate.PAUSED or (epoch.shed and not epoch.fetching_again):
            return NOTHING
        free = self._buffer.bounds.bytes - self._buffer.bytes
        return Allowance(epoch.probe_room, max(free, 0), alone=not self._buffer.records)

    def _waits_for_room(self) -> _Waiting | None:
        """What others leave room for: not a record of a partition that cannot advance, which might never take it."""
        waiting = self._waiting
        return waiting if waiting is not None and waiting.lasts and not self.stuck(waiting.epoch) else None

    def _for_oversized(self, oversized: Oversized) -> Allowance:
        """The room that has become free for a record that found none, or all of it when it is alone.

        What a partition that cannot advance holds does not count: it might be held for ever.
        """
        free = self._buffer.bounds.bytes - self._buffer.bytes
        if oversized.size <= free:
            return Allowance(1, free)
        others = (partition.epoch for partition in tuple(self._partitions.values()))
        if any(epoch.held_usage.records and not self.stuck(epoch) for epoch in others):
            return NOTHING
        return Allowance(1, _EVERYTHING, alone=True)

    def reason(self, topic_partition: TopicPartition) -> str | None:
        """Why nothing of a partition is taken in now, or None when something is. Safe from any thread."""
        limit = self.limit(topic_partition)
        if limit is not None:
            return limit.reason
        partition = self._partitions.get(topic_partition)
        if partition is None or partition.epoch.gate is not Gate.OPEN or partition.wanted > 0:
            return None
        return "its handler has enough queued that no worker has started yet"

    def limit(self, topic_partition: TopicPartition) -> Limit | None:
        """What leaves a partition no room, or None when it has some. Safe from any thread."""
        partition = self._partitions.get(topic_partition)
        if partition is None or partition.epoch.gate is not Gate.OPEN or self._allowance(topic_partition).records:
            return None
        epoch, buffer, waiting = partition.epoch, self._buffer, self._waits_for_room()
        if self.stuck(epoch):
            return Limit(
                f"it cannot advance past record {epoch.tracker.oldest!r} and already holds {epoch.held_usage.records} "
                "records, its minimum share of the buffer",
                "see what that record waits for: more is taken in when it is complete",
            )
        if epoch.shed:
            return Limit(
                f"{len(epoch.shed)} record(s) from offset {min(epoch.shed, default=0)} on, which were given back while "
                "it could not advance, are fetched again first",
                None,
            )
        if waiting is not None:
            whose = "its next record" if waiting.epoch is epoch else f"a record of {waiting.epoch.topic_partition}"
            return Limit(
                f"{whose}, of {waiting.oversized.size} bytes, waits for room in the buffer",
                "wait: others are finished and make room; where such records are usual, raise max_buffered_bytes",
            )
        if self._notes.room(epoch) == 0:
            return Limit(
                f"no more of what finishes beyond offset {epoch.tracker.committable} can be noted with a commit: "
                f"{len(epoch.tracker)} records, far apart, are not complete, record {epoch.tracker.oldest!r} the first",
                "see what the oldest records wait for; more is taken in when some of them are complete",
            )
        return Limit(
            f"the buffer is full: {buffer.records} of {buffer.bounds.records} records and {buffer.bytes} of "
            f"{buffer.bounds.bytes} bytes, {epoch.held_usage.records} records of it from this partition",
            "see what the oldest records wait for; where many keys are slow, raise max_buffered_records or "
            "max_buffered_bytes",
        )
