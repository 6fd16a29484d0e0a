"""Pages of a dead-letter topic, newest first: a page reads backwards from a cursor, and so only what it shows."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from aioshard.dead_letters.dead_letter import StoredDeadLetter
from aioshard.dead_letters.filters import EVERYTHING, Filters
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.ports import record_size
from aioshard.serde.side_records import is_number

Cursor = Mapping[int, int]
"""For each partition, the offset below which dead letters were not shown yet."""

_LEAST_SPAN = 100
_MOST_SPAN = 5_000
"""Offsets of a partition that are read together."""
_MOST_BYTES = 16 * 1024 * 1024
"""Memory for dead letters that were read for a page and are not part of it yet; shared by the partitions."""
_MOST_READ = 50_000
"""Dead letters after which a page ends, full or not, if few match the filters."""


class Page(NamedTuple):
    """Some dead letters, newest first."""

    dead_letters: list[StoredDeadLetter]
    cursor: Cursor | None
    """Where the next page begins; None after the last one."""


def cursor_as_text(cursor: Cursor) -> str:
    """Return a cursor as text, for an option or an address.

    Example:
        >>> cursor_as_text({0: 120, 1: 7}), read_cursor("0:120,1:7")
        ('0:120,1:7', {0: 120, 1: 7})
    """
    return ",".join(f"{partition}:{offset}" for partition, offset in sorted(cursor.items()))


def read_cursor(text: str) -> Cursor:
    """Read the output of `cursor_as_text`.

    Raises:
        ValueError: The text is something else; the message says so.
    """
    cursor: dict[int, int] = {}
    for part in text.split(","):
        partition, _, offset = part.partition(":")
        if not is_number(partition) or not is_number(offset):
            raise ValueError(f"{text!r} is not a cursor: expected one that a page has named, such as 0:120,1:7")
        cursor[int(partition)] = int(offset)
    return cursor


async def read_page(
    topic: DeadLetterTopic, filters: Filters = EVERYTHING, *, cursor: Cursor | None = None, size: int = 50
) -> Page:
    """Read the next dead letters that match, newest first.

    Each dead letter is on exactly one page. Those of a partition come in descending order of their offsets; between
    partitions, the time of the failure decides.

    Args:
        topic: The topic, with its progress.
        filters: Which dead letters.
        cursor: That of the page before; None begins with the newest. Partitions that it does not name are at their end.
        size: Maximum number of dead letters. There may be fewer before the last page, if few match.

    Raises:
        TransportError: The records cannot be read.
    """
    parts = {
        number: _Part(log.start, min(log.end, log.end if cursor is None else cursor.get(number, log.start)))
        for number, log in topic.ranges.items()
    }
    budget = _MOST_BYTES // max(len(parts), 1)
    read_before = topic.records_read
    dead_letters: list[StoredDeadLetter] = []
    while len(dead_letters) < size:
        empty = {number: part for number, part in parts.items() if not part.dead_letters and part.begin < part.below}
        if empty:
            if topic.records_read - read_before >= _MOST_READ:
                break
            await _read_back(topic, filters, empty, budget)
            continue
        latest = max((part for part in parts.values() if part.dead_letters), key=_Part.failed_at, default=None)
        if latest is None:
            break
        dead_letters.append(latest.dead_letters.popleft())
        await asyncio.sleep(0)
    following = {number: part.following for number, part in parts.items() if part.begin < part.following}
    return Page(dead_letters, following or None)


@dataclasses.dataclass(slots=True, eq=False)
class _Part:
    """A partition, of which a page is made."""

    begin: int
    """The start of its log."""
    below: int
    """The offset below which nothing was read."""
    span: int = _LEAST_SPAN
    """Number of offsets to read next."""
    dead_letters: deque[StoredDeadLetter] = dataclasses.field(default_factory=deque)
    """Those that were read and match, in descending order."""

    @property
    def following(self) -> int:
        """The offset below which nothing is on the page."""
        return self.dead_letters[0].at.offset + 1 if self.dead_letters else self.below

    def failed_at(self) -> float:
        """Return when the next one has failed."""
        return self.dead_letters[0].failure.failed_at


async def _read_back(topic: DeadLetterTopic, filters: Filters, parts: Mapping[int, _Part], budget: int) -> None:
    """Read the offsets before those that were read; keep at most *budget* bytes of each partition."""
    starts = {number: max(part.begin, part.below - part.span) for number, part in parts.items()}
    ends = {number: parts[number].below if number in parts else 0 for number in topic.ranges}
    for number, part in parts.items():
        part.below = starts[number]
        part.span = min(2 * part.span, _MOST_SPAN)
    sizes = dict.fromkeys(parts, 0)
    async for dead_letter in topic.dead_letters(filters, starts, ends):
        number = dead_letter.at.partition
        part = parts[number]
        part.dead_letters.appendleft(dead_letter)
        sizes[number] += _size(dead_letter)
        while sizes[number] > budget and len(part.dead_letters) > 1:
            dropped = part.dead_letters.pop()
            sizes[number] -= _size(dropped)
            part.below = dropped.at.offset + 1
            part.span = len(part.dead_letters)


def _size(dead_letter: StoredDeadLetter) -> int:
    original = dead_letter.original
    return record_size(original.key, original.value, original.headers)
