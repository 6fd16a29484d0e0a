"""The parked records of one partition: in order per shard key, with the time when each key is due."""

import bisect
import heapq
import itertools
from collections.abc import Hashable, Iterator

from aioshard.core.sharding import ShardKey

NEVER = 253_402_300_799.0
"""Due time of a key that waits for a manual release: the last second of the year 9999."""


class ParkedEntry:
    """One parked record, without its payload, which is in the side topic."""

    __slots__ = ("due", "generation", "key", "offset", "retries", "stored_at")

    def __init__(
        self, offset: int, key: ShardKey, *, generation: int, stored_at: int, due: float, retries: int
    ) -> None:
        self.generation = generation
        """The group's generation when the record was parked."""
        self.offset = offset
        """Offset in its own partition."""
        self.key: Hashable = self if key is None else key
        """Shard key; a record without one is parked alone, under itself."""
        self.stored_at = stored_at
        """Offset in the side topic; -1 while it is not known, because the record's transaction has not ended."""
        self.due = due
        """When its key is to be retried, in seconds since the epoch; only that of the key's first record counts."""
        self.retries = retries
        """Number of retries so far."""

    @property
    def alone(self) -> bool:
        """Whether it has no key."""
        return self.key is self


class ParkedKeys:
    """The parked keys of a partition, and the records waiting behind the first one of each.

    Pure; owned by the code that parks. Memory grows with the number of parked records (about 200 bytes each), not
    with their size.

    Invariants:
        * The records of a key are in offset order.
        * A key is due at most once at a time: `take_due` does not return it again before `add` or `postpone`.

    Example:
        >>> parked = ParkedKeys()
        >>> parked.add(ParkedEntry(7, b"a", generation=1, stored_at=0, due=60.0, retries=0))
        True
        >>> parked.add(ParkedEntry(9, b"a", generation=1, stored_at=1, due=61.0, retries=0))
        False
        >>> b"a" in parked, len(parked), parked.take_due(now=59.0)
        (True, 2, None)
        >>> parked.take_due(now=60.0).offset, parked.take_due(now=70.0)
        (7, None)
        >>> parked.remove(7).offset, parked.take_due(now=70.0).offset
        (7, 9)
    """

    def __init__(self) -> None:
        self._by_key: dict[Hashable, list[ParkedEntry]] = {}
        self._by_offset: dict[int, ParkedEntry] = {}
        self._due: list[tuple[float, int, int, Hashable]] = []
        """Due time, position in the side topic (so that keys due together are read in one pass), and key."""
        self._waiting: dict[Hashable, float] = {}
        """Due times of the waiting keys. The other keys are being retried."""
        self._tie_break = itertools.count()

    def __contains__(self, key: object) -> bool:
        """Whether a record of this shard key is parked."""
        return key in self._by_key

    def __len__(self) -> int:
        """Return the number of parked records."""
        return len(self._by_offset)

    def __iter__(self) -> Iterator[ParkedEntry]:
        return iter(self._by_offset.values())

    @property
    def keys(self) -> int:
        """Number of parked keys."""
        return len(self._by_key)

    @property
    def next_due(self) -> float | None:
        """When the next key is due; None if none is waiting."""
        while self._due:
            due, _, _, key = self._due[0]
            if self._waiting.get(key) == due:
                return due
            # Since then the key was postponed, retried or removed.
            heapq.heappop(self._due)
        return None

    def heads(self, most: int) -> list[ParkedEntry]:
        """Return the first records of up to *most* keys, earliest parked keys first. Safe from any thread."""
        # In one step: another thread must not find a dictionary that changes.
        entry_lists = list(itertools.islice(itertools.chain(self._by_key.values()), most))
        return [first for entries in entry_lists for first in entries[:1]]

    def get(self, offset: int) -> ParkedEntry | None:
        """Return the record at an offset of its own partition; None if it is not parked."""
        return self._by_offset.get(offset)

    def add(self, entry: ParkedEntry) -> bool:
        """Insert a record in order, unless it is parked already; return whether it is now the first of its key."""
        if self._by_offset.setdefault(entry.offset, entry) is not entry:
            return False
        entries = self._by_key.setdefault(entry.key, [])
        if not entries or entries[-1].offset < entry.offset:  # most come in order
            entries.append(entry)
        else:
            bisect.insort(entries, entry, key=lambda parked: parked.offset)
        is_first = entries[0] is entry
        if is_first and (len(entries) == 1 or entry.key in self._waiting):
            self.postpone(entry.key, entry.due)
        return is_first

    def remove(self, offset: int) -> ParkedEntry | None:
        """Remove a record; if it was the first of its key, the next one is due immediately.

        Returns:
            The record, or None if it was not parked.
        """
        entry = self._by_offset.pop(offset, None)
        if entry is None:
            return None
        entries = self._by_key[entry.key]
        was_first = entries[0] is entry
        entries.remove(entry)
        if not entries:
            del self._by_key[entry.key]
            self._waiting.pop(entry.key, None)
        elif was_first:
            self.postpone(entry.key, 0.0)
        return entry

    def postpone(self, key: Hashable, due: float) -> None:
        """Make a parked key wait until *due*, in seconds since the epoch."""
        head = self._by_key[key][0]
        head.due = due
        self._waiting[key] = due
        heapq.heappush(self._due, (due, head.stored_at, next(self._tie_break), key))

    def waits(self, key: Hashable) -> bool:
        """Whether a key is parked and waiting until it is due; otherwise it is being retried."""
        return key in self._waiting

    def release(self, key: Hashable) -> None:
        """Make a key due immediately, unless it is being retried already."""
        if key in self._waiting:
            self.postpone(key, 0.0)

    def first_due(self, now: float) -> ParkedEntry | None:
        """Return the first record of the key that `take_due` would take; None if no key is due."""
        due = self.next_due
        return None if due is None or due > now else self._by_key[self._due[0][-1]][0]

    def run_soon(self, until: float, most: int) -> list[ParkedEntry]:
        """Return the records that run next: the first ones of each key that is being retried, or is due by a time.

        Args:
            until: The time, in seconds since the epoch.
            most: Maximum number of records; about as many of each key, but at least one.
        """
        waiting = self._waiting
        soon = [entries for key, entries in self._by_key.items() if waiting.get(key, 0.0) <= until]
        of_each = max(most // max(len(soon), 1), 1)
        return [entry for entries in soon for entry in entries[:of_each]]

    def take_due(self, now: float) -> ParkedEntry | None:
        """Return the first record of a due key, which then no longer waits; None if no key is due."""
        due = self.next_due
        if due is None or due > now:
            return None
        key = heapq.heappop(self._due)[-1]
        del self._waiting[key]
        return self._by_key[key][0]
