"""Which dead letters a run works on: found before it begins, so that an operator sees how many there are."""

import dataclasses
import uuid
from array import array
from collections import Counter
from collections.abc import AsyncIterator
from typing import NamedTuple

from aioshard.dead_letters.dead_letter import Position
from aioshard.dead_letters.filters import EVERYTHING, Filters
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.dead_letters.results import WorkItem
from aioshard.errors import TransportError


@dataclasses.dataclass(slots=True)
class Plan:
    """The dead letters that match filters and are due, one for each record.

    A record may have several dead letters: if a process is killed after it wrote one and before it committed, the
    record is delivered again. The first one is used; all of them are done together, whether they match or not.
    """

    due: dict[Position, list[Position]] = dataclasses.field(default_factory=dict)
    """The dead letters to work on, in the order in which they were read, each with all of its record."""
    covered: list[Position] = dataclasses.field(default_factory=list)
    """Dead letters that match and are due, whose record was finished by another one."""
    done: int = 0
    """Number of dead letters that match and were done before: they are left out."""
    beyond_limit: int = 0
    """Number of records that are due and left out because of the limit."""
    topics: Counter[str] = dataclasses.field(default_factory=Counter)
    """How many records come from each topic."""
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
    """How many failed with each error."""
    offsets: dict[int, "array[int]"] = dataclasses.field(default_factory=dict)
    """The offsets of all dead letters, by partition."""
    again: bool = False
    """Whether dead letters that are done are included."""
    topic_id: uuid.UUID | None = None
    """The id of the dead-letter topic, if its brokers give ids: another topic of this name has other dead letters."""

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.due)

    def adopt(self, topic: DeadLetterTopic) -> None:
        """Leave out what is done by now, according to the progress of *topic*, which learns all dead letters.

        Raises:
            TransportError: The topic was deleted and created again after this plan was made.
        """
        if topic.topic_id != self.topic_id:
            raise TransportError(
                f"topic {topic.name!r} was deleted and created again after the dead letters were selected: nothing was "
                "changed; select them again",
                retriable=False,
            )
        for number, offsets in self.offsets.items():
            for offset in offsets:
                topic.progress[number].add(offset)
        if self.again:
            return
        for position, positions in list(self.due.items()):
            if any(map(topic.is_done, positions)):
                self.covered += positions
                del self.due[position]
        self.covered = [position for position in self.covered if not topic.is_done(position)]

    def bounds(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the offsets between which its dead letters are, by partition: the first, and one past the last."""
        starts: dict[int, int] = {}
        ends = dict.fromkeys(self.offsets, 0)
        for number, offset in self.due:
            starts[number] = min(offset, starts.get(number, offset))
            ends[number] = max(offset + 1, ends.get(number, 0))
        return starts, ends

    async def items(self, topic: DeadLetterTopic) -> AsyncIterator[WorkItem]:
        """Read its dead letters again, and yield each record once.

        Raises:
            TransportError: The records cannot be read.
        """
        async for dead_letter in topic.dead_letters(EVERYTHING, *self.bounds()):
            positions = self.due.get(dead_letter.position)
            if positions is not None:
                yield WorkItem(dead_letter, dead_letter.original, positions)


class _Chosen(NamedTuple):
    """The first dead letter of a record that matches."""

    position: Position
    topic: str
    error: str


async def make_plan(
    topic: DeadLetterTopic,
    filters: Filters,
    *,
    limit: int | None = None,
    again: bool = False,
) -> Plan:
    """Read a topic from its start to its end, and find the dead letters that match and are due.

    Keeps some 200 bytes for each dead letter, and no record.

    Args:
        topic: The topic, with its progress, and all partitions open.
        filters: Which dead letters.
        limit: Maximum number of records.
        again: Whether to include those that are done.

    Raises:
        TransportError: The records cannot be read.
    """
    plan = Plan(again=again, offsets={number: array("q") for number in topic.ranges}, topic_id=topic.topic_id)
    positions: dict[bytes, list[Position]] = {}
    """The dead letters of each record that are due."""
    chosen: dict[bytes, _Chosen] = {}
    done: set[bytes] = set()
    async for dead_letter in topic.dead_letters(EVERYTHING):
        number, offset = dead_letter.position
        plan.offsets[number].append(offset)
        identity = dead_letter.identity
        if dead_letter.done and not again:
            done.add(identity)
            plan.done += dead_letter.matches(filters)
            continue
        positions.setdefault(identity, []).append(dead_letter.position)
        if identity not in chosen and dead_letter.matches(filters):
            chosen[identity] = _Chosen(dead_letter.position, dead_letter.original.topic, dead_letter.failure.error)
    for identity, first in chosen.items():
        if identity in done:
            plan.covered += positions[identity]
        elif limit is None or len(plan.due) < limit:
            plan.due[first.position] = positions[identity]
            plan.topics[first.topic] += 1
            plan.errors[first.error] += 1
        else:
            plan.beyond_limit += 1
    return plan
