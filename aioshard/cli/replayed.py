"""Which dead letters of a partition were sent back or processed already, as it is noted with the brokers.

The note is a committed offset of a group of its own, `aioshard-dlt.<topic>`, and the text that is stored with it: every
dead letter below the offset is done, and so are those that the text names.
"""

import base64
import binascii
import zlib
from collections.abc import Iterable

from aioshard.core.offsets import OffsetTracker
from aioshard.ports import Committed

__all__ = ["LONGEST_NOTE", "NoteTooLongError", "Replayed", "note_group"]

LONGEST_NOTE = 4000
"""Characters of the text; brokers store 4,096 bytes (`offset.metadata.max.bytes`)."""

_MARK = "aioshard-dlt/1 "
_MOST_BYTES = 1 << 24
"""What the text of a note may grow to, unpacked; ours stay far below."""


def note_group(topic: str) -> str:
    """The group whose committed offsets say what of a dead-letter topic is done."""
    return f"aioshard-dlt.{topic}"


class NoteTooLongError(Exception):
    """What is done is so scattered that it does not fit in a note."""


class Replayed:
    """What of one partition is done, and what is not; fed with its dead letters in offset order.

    Example:
        >>> replayed = Replayed(None)
        >>> for offset in (3, 5, 6, 9):
        ...     replayed.meet(offset)
        >>> replayed.finish(6)
        >>> replayed.below(position=12), replayed.is_done(6), replayed.is_done(5)
        (3, True, False)
        >>> replayed.finish(3)
        >>> again = Replayed(replayed.note(position=12))
        >>> [offset for offset in (3, 5, 6, 9) if again.is_done(offset)]
        [3, 6]
    """

    def __init__(self, note: Committed | None) -> None:
        """Make what a note says.

        Args:
            note: None where there is none. A text that is not ours, as after a reset of the group's offsets by hand,
                is left out; the offset counts.
        """
        self.start = 0 if note is None else note.offset
        """Everything below it is done, as of the last note; reading may begin here."""
        self._done = set() if note is None else _unpacked(note)
        self._tracker: OffsetTracker[None] = OffsetTracker(self.start)

    def is_done(self, offset: int) -> bool:
        """Whether the dead letter at *offset* was noted or has been finished."""
        return offset < self.start or offset in self._done

    def meet(self, offset: int) -> None:
        """Take note that there is a dead letter at *offset*; offsets come in order."""
        if not self.is_done(offset):
            self._tracker.track([offset], [None], offset + 1)

    def finish(self, offset: int) -> None:
        """Take note that the dead letter at *offset*, which was met, is done."""
        self._tracker.complete(offset)
        self._done.add(offset)

    def below(self, position: int) -> int:
        """The offset below which everything is done.

        Args:
            position: Up to where the partition was read.
        """
        return self._tracker.committable if len(self._tracker) else max(position, self._tracker.position)

    def note(self, position: int, *, soon: Iterable[int] = ()) -> Committed:
        """What is to be committed.

        Args:
            position: Up to where the partition was read.
            soon: Offsets to count as done as well: does it fit once they are?

        Raises:
            NoteTooLongError: It does not fit.
        """
        below = self.start = self.below(position)
        self._done = {offset for offset in self._done if offset >= below}
        text = _packed(below, {*self._done, *(offset for offset in soon if offset >= below)})
        if len(text) > LONGEST_NOTE:
            raise NoteTooLongError
        return Committed(below, text)


def _packed(base: int, offsets: set[int]) -> str:
    if not offsets:
        return ""
    bits = bytearray((max(offsets) - base) // 8 + 1)
    for offset in offsets:
        bits[(offset - base) // 8] |= 1 << (offset - base) % 8
    return _MARK + base64.b85encode(zlib.compress(bytes(bits), 9)).decode()


def _unpacked(note: Committed) -> set[int]:
    if not note.metadata.startswith(_MARK):
        return set()
    unpacking = zlib.decompressobj()
    try:
        bits = unpacking.decompress(base64.b85decode(note.metadata.removeprefix(_MARK)), _MOST_BYTES)
    except (ValueError, binascii.Error, zlib.error):
        return set()
    return {note.offset + at * 8 + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1}
