"""Decides how much of each partition may be taken in now, and explains why not more."""

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
"""A partition takes in nothing until a quarter of its fair share is free; otherwise a full buffer would lead to polls
of single records."""
_EVERYTHING = 1 << 62


class HasEpoch(Protocol):
    """An assigned partition, as the admission sees it."""

    @property
    def epoch(self) -> Epoch:
        """The ownership of the partition."""

    @property
    def wanted(self) -> int:
        """How many more records its handler wants queued, to keep its workers busy."""

    def when_wanted(self, wake: Callable[[], None]) -> int:
        """Arrange for *wake* to be called when a worker is idle.

        Returns:
            Number of completions after which more records are wanted at the latest.
        """

    def no_room(self) -> None:
        """Flush batches still filling: nothing else of the partition can be taken in now."""


class _Waiting(NamedTuple):
    """A record that did not fit, and the position of its partition at that time."""

    oversized: Oversized
    epoch: Epoch
    position: int

    @property
    def lasts(self) -> bool:
        """Whether it is still the next record of an open partition."""
        return self.epoch.gate is Gate.OPEN and self.epoch.tracker.position == self.position


class Limit(NamedTuple):
    """The reason why a partition has no room."""

    reason: str
    """A clause with figures."""
    what_to_do: str | None


class Admission:
    """Decides for the pump; owned by the event loop, and also read by explanations.

    A record that does not fit stays with the client, and nothing else is taken in until it fits or can be admitted
    alone. Otherwise small records would use up all the room that becomes free (I6).
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
            buffer: The records buffered for all partitions.
            partitions: The assigned partitions.
            clock: Loop time.
            stuck_after: Seconds after which a partition with an incomplete record counts as one that cannot advance.
            notes: Says how many records of a partition may finish beyond its committed offset.
        """
        self._buffer = buffer
        self._partitions = partitions
        self._clock = clock
        self._stuck_after = stuck_after
        self._notes = notes
        self._waiting: _Waiting | None = None

    def keep_room_for(self, oversized: Oversized, epoch: Epoch) -> None:
        """Remember that the next record of a partition did not fit."""
        self._waiting = _Waiting(oversized, epoch, epoch.tracker.position)

    def taken(self, epoch: Epoch) -> None:
        """Forget the record of a partition that did not fit, since the partition has taken something in."""
        if self._waiting is not None and self._waiting.epoch is epoch:
            self._waiting = None

    def stuck(self, epoch: Epoch) -> bool:
        """Whether a partition cannot advance."""
        return epoch.stuck(self._clock(), self._stuck_after)

    def allowance(self, topic_partition: TopicPartition) -> Allowance:
        """How much the pump may take in of a partition; without room, the pump is woken when there may be some.

        No more than the handler needs soon: a record that waits in memory costs twice as much as one that starts while
        it is young, because the garbage collector visits it again and again.
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
        """Flush batches still filling, as nothing else can be taken in; not if the partition itself cannot advance."""
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
            return NOTHING  # evicted records come before new ones
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
        """Some records of a paused partition, however full the buffer is: without a probe it might never resume."""
        if epoch.gate is not Gate.PAUSED or (epoch.shed and not epoch.fetching_again):
            return NOTHING
        free = self._buffer.bounds.bytes - self._buffer.bytes
        return Allowance(epoch.probe_room, max(free, 0), alone=not self._buffer.records)

    def _waits_for_room(self) -> _Waiting | None:
        """The record that others leave room for; None if its partition cannot advance, as it might wait forever."""
        waiting = self._waiting
        return waiting if waiting is not None and waiting.lasts and not self.stuck(waiting.epoch) else None

    def _for_oversized(self, oversized: Oversized) -> Allowance:
        """The free room for a record that did not fit, or unlimited room if it is alone.

        Records of partitions that cannot advance do not count: they might stay forever.
        """
        free = self._buffer.bounds.bytes - self._buffer.bytes
        if oversized.size <= free:
            return Allowance(1, free)
        others = (partition.epoch for partition in tuple(self._partitions.values()))
        if any(epoch.held_usage.records and not self.stuck(epoch) for epoch in others):
            return NOTHING
        return Allowance(1, _EVERYTHING, alone=True)

    def reason(self, topic_partition: TopicPartition) -> str | None:
        """Why nothing of a partition is taken in now; None if something is. Safe from any thread."""
        limit = self.limit(topic_partition)
        if limit is not None:
            return limit.reason
        partition = self._partitions.get(topic_partition)
        if partition is None or partition.epoch.gate is not Gate.OPEN or partition.wanted > 0:
            return None
        return "its handler has enough queued that no worker has started yet"

    def limit(self, topic_partition: TopicPartition) -> Limit | None:
        """The limit that leaves a partition no room; None if it has some. Safe from any thread."""
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
