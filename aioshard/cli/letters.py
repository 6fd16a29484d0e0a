"""The dead letters of a topic, with what is noted of them."""

from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import NamedTuple, Protocol

import click

from aioshard.cli.replayed import LONGEST_NOTE, NoteTooLongError, Replayed, note_group
from aioshard.cli.selection import Selection
from aioshard.cli.sides import SideTopic
from aioshard.errors import TransportError
from aioshard.records import Record
from aioshard.serde.side_records import Coordinates, Failure, read_dead_letter

__all__ = ["DeadLetters", "Destination", "Letter", "Outcome"]

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


class Outcome:
    """What became of dead letters; whoever processes them adds to it."""

    def __init__(self) -> None:
        self.done: list[Letter] = []
        self.failed: dict[Coordinates, str] = {}
        """Why not, by the coordinates of the record."""


class Destination(Protocol):
    """Where dead letters are sent to, or processed."""

    verb: str
    """What becomes of them there, as in "were sent back"."""
    most_records: int
    """How many it takes at once; what it was given when the command is killed, the next run gives it again."""
    most_bytes: int

    async def check(self, letters: Sequence[Letter]) -> None:
        """Refuse what cannot arrive, before any of it is sent.

        Raises:
            AioshardError: Some of it cannot.
        """

    async def process(self, letters: Sequence[Letter], outcome: Outcome) -> None:
        """Send or process dead letters; *outcome* gets each as it is known, also when this raises or is cancelled.

        Raises:
            AioshardError: It cannot go on.
        """


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
        for number, bounds in side.reader.ranges.items():
            noted = found.get(number)
            if noted is not None and noted.offset > bounds.end:
                click.echo(
                    f"What is noted of {side.name}/{number} is about offsets up to {noted.offset}, past its end "
                    f"{bounds.end}: the topic was created anew, so that is left out",
                    err=True,
                )
                noted = None
            self.notes[number] = Replayed(noted)

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

    def check_notes(self, letters: Iterable[Letter]) -> None:
        """Refuse dead letters that cannot be noted once they are done.

        Raises:
            TransportError: What is done would be too scattered.
        """
        soon: dict[int, list[int]] = defaultdict(list)
        for letter in letters:
            soon[letter.at.partition].append(letter.at.offset)
        for partition, offsets in soon.items():
            try:
                self.notes[partition].note(self.position(partition), soon=offsets)
            except NoteTooLongError:
                raise TransportError(
                    f"which dead letters of {self._side.name}/{partition} are done would not fit in what a broker "
                    f"stores for a group ({LONGEST_NOTE} characters), so a later run would send some of them again: "
                    "first replay what is older without filters"
                ) from None

    async def note(self, done: Iterable[Letter]) -> None:
        """Have the brokers keep that dead letters are done.

        Raises:
            TransportError: They did not.
        """
        touched = set()
        for letter in done:
            noted = self.notes[letter.at.partition]
            if not noted.is_done(letter.at.offset):
                noted.finish(letter.at.offset)
                touched.add(letter.at.partition)
        if not touched:
            return
        side = self._side
        due = {number: self.notes[number].note(self.position(number)) for number in touched}
        await side.administration.commit(self._group, side.name, due, retention=_FOR_GOOD)
