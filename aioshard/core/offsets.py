"""Which offset of one partition may be committed."""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from aioshard.core.finished_offsets import Run
from aioshard.errors import OffsetRegressionError

__all__ = ["OffsetTracker"]

T = TypeVar("T")


class OffsetTracker(Generic[T]):
    """The incomplete records of one partition, in the order in which they arrived.

    Handlers finish in any order; Kafka can only be told "everything below this offset is done". The
    tracker turns the first into the second: the committable offset is that of the oldest incomplete
    record, or the position when nothing is incomplete.

    Each offset carries a value (the engine keeps its delivery there), so whoever asks why a partition
    does not advance gets the record that is in the way.

    Synchronous and owned by one event loop: no method awaits, so every method is atomic. Costs 0.2 µs a
    record, whatever the window: completion is a deletion, and the first key of an `OrderedDict` is
    found in constant time after any number of deletions (that of a plain `dict` is not).

    Invariants:
        * `committable` never decreases.
        * No tracked offset below `committable` is incomplete.
        * Only offsets that arrived are tracked, so the holes that compaction, transaction markers and
          retention leave are passed without being known.

    Example:
        >>> tracker = OffsetTracker(start=40)
        >>> tracker.track([40, 41, 44], ["a", "b", "c"], next_offset=46)
        >>> tracker.complete(41), tracker.committable
        (False, 40)
        >>> tracker.complete(40), tracker.committable
        (True, 44)
        >>> tracker.watch(), tracker.complete(44), tracker.committable
        (44, True, 46)
    """

    __slots__ = ("_arrived", "_position", "incomplete", "watched")

    def __init__(self, start: int) -> None:
        self.incomplete: OrderedDict[int, T] = OrderedDict()
        """The values by offset; nobody but an epoch's `complete` takes something out of it, to spare a call."""
        self._position = start
        self.watched = -1
        """What `watch` named."""
        self._arrived = 0

    def __len__(self) -> int:
        """How many records are incomplete."""
        return len(self.incomplete)

    def __contains__(self, offset: int) -> bool:
        """Whether the record at *offset* arrived and is incomplete."""
        return offset in self.incomplete

    @property
    def position(self) -> int:
        """One past everything that arrived, holes at the end included."""
        return self._position

    @property
    def committable(self) -> int:
        """The offset to commit: the first one that a restarted consumer should read."""
        return next(itertools.chain(self.incomplete), self._position)  # in one step, for other threads

    @property
    def arrived(self) -> int:
        """How many records have arrived since the start."""
        return self._arrived

    @property
    def completed(self) -> int:
        """How many records have completed since the start."""
        return self._arrived - len(self.incomplete)

    def finished(self) -> list[Run]:
        """What is finished between the committable offset and the position, holes included; ascending.

        Takes time in proportion to the number of incomplete records.

        Example:
            >>> tracker = OffsetTracker(start=40)
            >>> tracker.track([40, 41, 44], ["a", "b", "c"], next_offset=46)
            >>> tracker.complete(41), tracker.finished()
            (False, [Run(start=41, end=44), Run(start=45, end=46)])
        """
        runs = []
        ends = iter(self.incomplete)
        before = next(ends, self._position)
        for offset in ends:
            if offset > before + 1:
                runs.append(Run(before + 1, offset))
            before = offset
        if self._position > before + 1:
            runs.append(Run(before + 1, self._position))
        return runs

    @property
    def oldest(self) -> T | None:
        """The value of the oldest incomplete record; None when nothing is incomplete."""
        return next(itertools.chain(self.incomplete.values()), None)  # in one step, for other threads

    def get(self, offset: int) -> T | None:
        """The value of an incomplete record; None when there is none at *offset*."""
        return self.incomplete.get(offset)

    def values(self) -> Iterator[T]:
        """The values of the incomplete records, oldest first."""
        return iter(self.incomplete.values())

    def track(self, offsets: Sequence[int], values: Iterable[T], next_offset: int) -> None:
        """Register one batch as incomplete and take over the position captured with it.

        Args:
            offsets: Strictly increasing, none below the position. May be empty: the position moves over
                a hole.
            values: One for each offset.
            next_offset: The client's position right after the batch was taken.

        Raises:
            OffsetRegressionError: If an offset is below the position, or *next_offset* goes back. The
                partition was rewound, and its epoch must end. Nothing was registered.
        """
        if offsets:
            if offsets[0] < self._position:
                raise OffsetRegressionError(offsets[0], self._position)
            if next_offset <= offsets[-1]:
                raise OffsetRegressionError(next_offset, offsets[-1] + 1)
            self.incomplete.update(zip(offsets, values, strict=True))
            self._arrived += len(offsets)
            if self.watched < 0:
                self.watched = offsets[0]
        elif next_offset < self._position:
            raise OffsetRegressionError(next_offset, self._position)
        self._position = next_offset

    def complete(self, offset: int) -> bool:
        """Mark a record as done.

        Returns:
            Whether it is the one that `watch` named: the committable offset has moved.

        Raises:
            KeyError: If the record is not incomplete. A record completes once.
        """
        del self.incomplete[offset]
        return offset == self.watched

    def watch(self) -> int:
        """Name the oldest incomplete offset, whose completion `complete` will report.

        Returns:
            That offset, or -1 when nothing is incomplete: the next record that arrives is named then.
        """
        self.watched = next(iter(self.incomplete), -1)
        return self.watched
