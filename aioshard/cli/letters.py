"""The dead letters of a topic, with what is noted of them."""

from collections.abc import AsyncIterator
from typing import NamedTuple

from aioshard.cli.replayed import Replayed, note_group
from aioshard.cli.selection import Selection
from aioshard.cli.sides import SideTopic
from aioshard.records import Record
from aioshard.serde.side_records import Coordinates, Failure, read_dead_letter

__all__ = ["DeadLetters", "Letter"]

_FOR_GOOD = 10 * 365 * 86_400.0
"""Seconds that a note is kept. Without saying so, a broker forgets those of a group that nobody is in after a week."""


class Letter(NamedTuple):
    """A dead letter that a command is about."""

    at: Coordinates
    """Where it is in the dead-letter topic."""
    original: Record
    failure: Failure
    done: bool
    """Whether it is noted as sent back or processed."""


class DeadLetters:
    """Reads the dead letters of an open topic. Owned by one command.

    Invariants:
        * `position` of a partition is one past the last record that was given out, or passed over.
    """

    def __init__(self, side: SideTopic, selection: Selection) -> None:
        """Make a reading.

        Args:
            side: The open topic.
            selection: Which of its dead letters are given out.
        """
        self.read = 0
        """Dead letters that were met."""
        self.selected = 0
        self.strange = 0
        """Records that are no dead letters."""
        self.notes: dict[int, Replayed] = {number: Replayed(None) for number in side.partitions}
        self._side = side
        self._selection = selection
        self._positions = {number: bounds.start for number, bounds in side.reader.ranges.items()}
        self._begin = dict(self._positions)
        self._group = note_group(side.name)

    async def look_up_notes(self) -> None:
        """Ask the brokers what is noted.

        Raises:
            AuthorizationError: We may not read with the group of the notes.
        """
        side = self._side
        found = await side.administration.committed(self._group, side.name, side.partitions)
        self.notes = {number: Replayed(found.get(number)) for number in side.partitions}

    async def letters(self, *, from_notes: bool = False) -> AsyncIterator[Letter]:
        """Those selected, in offset order for each partition of the dead-letter topic.

        Args:
            from_notes: Whether to leave out what is below the offset up to which everything is done.
        """
        if from_notes:
            self._begin = {number: max(at, self.notes[number].start) for number, at in self._begin.items()}
            self._positions = dict(self._begin)
        async for records in self._side.reader.read(self._begin):
            for record in records:
                letter = self._take_in(record)
                if letter is not None:
                    yield letter
        # Whatever is behind the last record, such as the marker of a transaction, is no dead letter.
        self._positions = {number: bounds.end for number, bounds in self._side.reader.ranges.items()}

    def _take_in(self, record: Record) -> Letter | None:
        letter = read_dead_letter(record)
        self._positions[record.partition] = record.offset + 1
        if letter is None:
            self.strange += 1
            return None
        self.read += 1
        noted = self.notes[record.partition]
        noted.meet(record.offset)
        if not self._selection.takes(*letter):
            return None
        self.selected += 1
        return Letter(Coordinates.of(record), *letter, noted.is_done(record.offset))

    @property
    def share(self) -> str:
        """How much of the topic was read, in per cent."""
        total = sum(bounds.end - self._begin[number] for number, bounds in self._side.reader.ranges.items())
        passed = sum(at - self._begin[number] for number, at in self._positions.items())
        return f"{100 * passed // total} % read" if total > 0 else ""

    def position(self, partition: int) -> int:
        """Up to where a partition was read."""
        return self._positions[partition]

    async def note(self, partitions: frozenset[int]) -> None:
        """Have the brokers keep what is done of these partitions.

        Raises:
            TransportError: They did not.
        """
        side = self._side
        due = {number: self.notes[number].note(self.position(number)) for number in partitions}
        await side.administration.commit(self._group, side.name, due, retention=_FOR_GOOD)
