"""How far a run over dead letters has come."""

import dataclasses
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from aioshard.dead_letters.letters import Letter, Place
from aioshard.records import Record


class Work(NamedTuple):
    """A dead letter to send or to run."""

    letter: Letter
    record: Record
    """The record to send or to run: the original, or as it was edited."""
    places: list[Place]
    """All dead letters of this record."""


class Failed(NamedTuple):
    """A dead letter that stays due."""

    letter: Letter
    """Without value and headers."""
    reason: str


@dataclasses.dataclass(slots=True)
class Result:
    """How far a run has come. Owned by the run; others only read it."""

    done: Counter[str] = dataclasses.field(default_factory=Counter)
    """Number of records that were sent or processed, by topic of the original."""
    edited: int = 0
    """Number of those that were changed before."""
    left: int = 0
    """Number of dead letters that the transform left alone."""
    failed: list[Failed] = dataclasses.field(default_factory=list)
    places: list[Place] = dataclasses.field(default_factory=list)
    """The dead letters that were done in the latest transaction."""
    stopped: bool = False
    """Whether the run ended early because it was asked to."""

    def total(self) -> int:
        """Return the number of dead letters with an outcome: done, left alone or failed."""
        return self.done.total() + self.left + len(self.failed)

    def finish(self, work: Collection[Work]) -> None:
        """Report dead letters that are stored as done."""
        for item in work:
            self.done[item.letter.original.topic] += 1
            self.edited += item.record is not item.letter.original
            self.places += item.places

    def fail(self, item: Work, reason: str) -> None:
        """Report a dead letter that stays due."""
        slim = item.letter.original._replace(value=None, headers=())
        self.failed.append(Failed(item.letter._replace(original=slim), reason))
