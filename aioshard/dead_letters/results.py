"""Records that a run sends, processes or marks as done, and how they ended."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aioshard.dead_letters.dead_letter import Position, StoredDeadLetter
from aioshard.records import Record


class WorkItem(NamedTuple):
    """A record to work on, with its dead letters."""

    dead_letter: StoredDeadLetter
    record: Record
    """The record to send or to run: the original, or as it was edited."""
    positions: list[Position]
    """All dead letters of this record."""

    @property
    def is_edited(self) -> bool:
        """Whether a transform has changed the record."""
        return self.record is not self.dead_letter.original


def positions_of(items: Iterable[WorkItem]) -> list[Position]:
    """Return all dead letters of some records."""
    return [position for item in items for position in item.positions]


class Failed(NamedTuple):
    """A dead letter that stays due."""

    dead_letter: StoredDeadLetter
    """Without value and headers."""
    reason: str

    @classmethod
    def of(cls, item: WorkItem, reason: str) -> "Failed":
        """Say why an item has failed; forget its value and headers, because a run may collect many."""
        slim = item.dead_letter.original._replace(value=None, headers=())
        return cls(item.dead_letter._replace(original=slim), reason)

    def as_object(self) -> dict[str, str]:
        """Return the failure for JSON."""
        return {"record": str(self.dead_letter.source), "dead_letter": str(self.dead_letter.at), "error": self.reason}


class Chunk:
    """Items that are worked on together. The action that does it reports here how they ended.

    Invariants:
        * An item in `done` is stored as done, also if the action raises an error afterwards.
    """

    def __init__(self, items: Sequence[WorkItem]) -> None:
        """Begin with items in the order of their records."""
        self.items = items
        self.done: list[WorkItem] = []
        self.failed: list[Failed] = []

    def finish(self, items: Sequence[WorkItem]) -> None:
        """Report items that are stored as done."""
        self.done += items

    def fail(self, item: WorkItem, reason: str) -> None:
        """Report an item whose dead letters stay due."""
        self.failed.append(Failed.of(item, reason))


@dataclasses.dataclass(slots=True)
class Result:
    """How far a run has come. Only its run changes it."""

    done: Counter[str] = dataclasses.field(default_factory=Counter)
    """Number of records that were sent, processed or marked as done, by topic of the original."""
    edited: int = 0
    """Number of those that were changed before."""
    left_alone: int = 0
    """Number of records that the transform left alone."""
    failed: list[Failed] = dataclasses.field(default_factory=list)
    stopped: bool = False
    """Whether the run ended early because it was asked to."""

    def total(self) -> int:
        """Return the number of records with an outcome: done, left alone or failed."""
        return self.done.total() + self.left_alone + len(self.failed)

    def add(self, chunk: Chunk) -> None:
        """Count the outcomes of a chunk."""
        for item in chunk.done:
            self.done[item.dead_letter.original.topic] += 1
            self.edited += item.is_edited
        self.failed += chunk.failed
