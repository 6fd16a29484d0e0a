"""Metadata of a committed offset: one versioned text format for everything stored there.

`aioshard/1 first=8,1750000000 done=420:...`: both fields are optional. A format with other fields gets another version:
older readers treat it as the text of another program.
"""

import dataclasses
import re
from typing import Final, NamedTuple

from aioshard.core.finished_offsets import Run, read_finished, written, written_whole

MOST_UNITS: Final = 4095
"""Longest text that a broker stores with its default settings (`offset.metadata.max.bytes`), in UTF-16 code units: the
broker allows 4,096, and programs on librdkafka append one."""

_FIRST_COMMIT_LASTS = 300
"""Seconds after which every member of a group has committed on a topic that was new to the group."""

_HEAD = "aioshard/1"
_TEXT = re.compile(rf"{_HEAD}(?: first=(\d{{1,9}}),(\d{{1,11}}))?(?: done=(\S*))?")


class FirstCommit(NamedTuple):
    """Marks the first commits of a group on a topic; see `aioshard.core.ownership.knows_topic`."""

    partitions: int
    """Number of partitions that the topic had when the group first resolved its position on the partition."""
    at: int
    """When that was, in seconds since the epoch."""

    def is_recent(self, now: float) -> bool:
        """Whether members that joined then may still be resolving their positions; *now* is in seconds."""
        return now - self.at <= _FIRST_COMMIT_LASTS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommitMetadata:
    """The content of the metadata of a committed offset.

    Attributes:
        first: First-commit marker of the partition; None if the commit is not one of the first.
        finished: Completed records beyond the committed offset; ascending and not adjacent.
        foreign: The text of another program. Never written, and never read as completions: Parallel Consumer up to
            0.5.3.3 may list a hanging record as finished. A second run is better than a lost record.
        ignored: Reasons why parts of the text were ignored; empty if the text is intact. Never written.

    Example:
        >>> metadata = CommitMetadata(first=FirstCommit(8, 1750000000), finished=(Run(421, 424),))
        >>> metadata.text(420, most_units=40)
        'aioshard/1 first=8,1750000000'
        >>> CommitMetadata.read(metadata.text(420), 420) == metadata
        True
        >>> CommitMetadata.read("worker-7", 420) == CommitMetadata(foreign="worker-7")
        True
    """

    first: FirstCommit | None = None
    finished: tuple[Run, ...] = ()
    foreign: str | None = None
    ignored: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str, offset: int) -> "CommitMetadata":
        """Read metadata committed with *offset*; never raises.

        Args:
            text: The text as stored by the broker. A trailing NUL, which librdkafka appends, is ignored.
            offset: The committed offset. Records stored as finished with a different offset are ignored: another
                program moved the offset and kept the text.
        """
        text = text.removesuffix("\0")
        if not text:
            return cls()
        match = _TEXT.fullmatch(text)
        if match is None:
            if text.startswith(f"{_HEAD} "):
                return cls(ignored=("damaged",))
            return cls(foreign=text)
        partitions, at, done = match.groups()
        first = None if partitions is None else FirstCommit(int(partitions), int(at))
        try:
            return cls(first=first, finished=() if done is None else read_finished(done, offset))
        except ValueError as error:
            return cls(first=first, ignored=(f"done: {error}",))

    def text(self, offset: int, most_units: int = MOST_UNITS) -> str:
        """Return the text to commit with *offset*; empty without any field.

        Finished records that do not fit are left out, the highest first: they will be processed again.

        Args:
            offset: The committed offset.
            most_units: Longest text that the broker stores; only finished records are left out to fit.

        Raises:
            ValueError: The finished records are out of order, or not beyond *offset*.
        """
        fields = "" if self.first is None else f" first={self.first.partitions},{self.first.at}"
        if self.finished:
            done = written(self.finished, offset, most_units - len(f"{_HEAD}{fields} done="))
            fields += f" done={done}" if done else ""
        return _HEAD + fields if fields else ""

    def whole_text(self, offset: int, most_units: int) -> str | None:
        """Return the text with all finished records; None if it would be too long.

        Without any finished record there always is a text, if necessary an empty one.

        Args:
            offset: As for `text`.
            most_units: As for `text`.

        Raises:
            ValueError: As for `text`.
        """
        if not self.finished:
            text = self.text(offset)
            return text if len(text) <= most_units else ""
        head = f"{dataclasses.replace(self, finished=()).text(offset) or _HEAD} done="
        done = written_whole(self.finished, offset, most_units - len(head))
        return None if done is None else head + done
