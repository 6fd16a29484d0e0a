"""The text that goes with a committed offset: one versioned format for all that is noted there.

`aioshard/1 first=12 of=8 at=1750000000 lease=7f3a@1750000000 done=r:420:pzt_:AQM foreign=of another`: fields in this
order, each at most once and only where there is something to say, a space between them. A field that this version
does not know is passed over; what must not be passed over is another version's. `foreign` takes the rest of the text.
"""

import dataclasses
import re
from typing import Final, NamedTuple

from aioshard.core.finished_offsets import LAST_OFFSET, Run, read_finished, written
from aioshard.core.parallel_consumer import read_parallel_consumer

__all__ = ["MOST_UNITS", "CommitMetadata", "Lease", "utf16_units"]

MOST_UNITS: Final = 4095
"""What a broker stores at most with its default settings (`offset.metadata.max.bytes`), in UTF-16 code units: it allows
4,096, and librdkafka appends one."""

_VERSION = 1
_HEAD = re.compile(r"aioshard/(\d{1,9})(?: |$)")
_FIELD = re.compile(r"([a-z]+)=([^ ]*)(?: |$)")
_LEASE = re.compile(r"([A-Za-z0-9_.-]{1,64})@(\d{1,12})")
_LATEST = 253_402_300_799
"""The last second that has a date."""
_NUMBER = re.compile(r"\d{1,19}")
_FOREIGN = " foreign="

_PLANE_END = 0xFFFF
"""The last character that is one code unit."""
_HALVES = re.compile("[\ud800-\udfff]")


class Lease(NamedTuple):
    """Somebody has the partition for a time, without being a member of the group."""

    plan: str
    """The id of a run over history; letters, digits, `.`, `_` and `-`, at most 64."""
    until: int
    """Seconds since the epoch, from when on it means nothing any more."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommitMetadata:
    """What is noted with a committed offset.

    Attributes:
        first_generation: In which the group first resolved its position on the partition.
        first_partitions: How many partitions the topic had then.
        first_at: When that was, in seconds since the epoch.
        lease: Who has the partition although the group has no member.
        finished: Records that are complete beyond the committed offset; ascending, apart from each other.
        foreign: What another program had noted. It belongs to the offset that it was committed with.
        ignored: Why something of the text counts as not there; empty in a text that is whole. Never written.

    Example:
        >>> noted = CommitMetadata(first_generation=12, finished=(Run(421, 424),))
        >>> noted.text(420)
        'aioshard/1 first=12 done=r:420:pzt_:AQM'
        >>> CommitMetadata.read(noted.text(420), 420) == noted
        True
        >>> CommitMetadata.read("worker-7", 420) == CommitMetadata(foreign="worker-7")
        True
    """

    first_generation: int | None = None
    first_partitions: int | None = None
    first_at: int | None = None
    lease: Lease | None = None
    finished: tuple[Run, ...] = ()
    foreign: str | None = None
    ignored: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str, offset: int) -> "CommitMetadata":
        """Read what was committed with *offset*, also by Confluent's Parallel Consumer; never raises.

        Args:
            text: As the broker has it. A NUL at its end, which librdkafka appends, is no part of it.
            offset: The committed offset. What is noted as finished for another one counts as not there: whoever
                moved the offset took the text along.
        """
        text = text.removesuffix("\0")
        if not text:
            return cls()
        head = _HEAD.match(text)
        if head is None:
            damaged = text.startswith("aioshard/")
            return cls(ignored=("it begins like ours and is not",)) if damaged else _read_of_others(text, offset)
        if int(head[1]) != _VERSION:
            return cls(foreign=text, ignored=(f"its format {head[1]} is not known to this version of aioshard",))
        return _read_fields(text, head.end(), offset)

    def text(self, offset: int, most_units: int = MOST_UNITS) -> str:
        """The text to commit with *offset*; empty when there is nothing to note.

        It has no NUL and no half of a surrogate pair. Finished records for which there is no room are left out, the
        highest first: they are processed once more.

        Args:
            offset: The committed offset.
            most_units: How many code units the broker stores; what else is noted is never left out.

        Raises:
            ValueError: `foreign` has no room or cannot be stored, or a value is outside of what the format knows. The
                message is a sentence.
        """
        fields = self._fields()
        foreign = "" if self.foreign is None else _FOREIGN + _storable(self.foreign)
        head = f"aioshard/{_VERSION} "
        room = MOST_UNITS - len(head) - sum(len(field) + 1 for field in fields) - utf16_units(foreign)
        if room < 0:
            raise ValueError(
                f"what another program noted ({utf16_units(self.foreign or '')} characters) does not fit beside ours "
                f"into {MOST_UNITS}"
            )
        room -= MOST_UNITS - min(most_units, MOST_UNITS) + len("done=")
        done = written(self.finished, offset, room) if self.finished else ""
        if done:
            fields.append(f"done={done}")
        if not fields and not foreign:
            return ""
        return (head + " ".join(fields)).rstrip() + foreign

    def _fields(self) -> list[str]:
        """What is short."""
        fields = []
        for name, value, most in (
            ("first", self.first_generation, LAST_OFFSET),
            ("of", self.first_partitions, LAST_OFFSET),
            ("at", self.first_at, _LATEST),
        ):
            if value is not None:
                if not 0 <= value <= most:
                    raise ValueError(f"{name}={value} cannot be noted: a number from 0 to {most} was expected")
                fields.append(f"{name}={value}")
        if self.lease is not None:
            lease = f"{self.lease.plan}@{self.lease.until}"
            if not _LEASE.fullmatch(lease) or self.lease.until > _LATEST:
                raise ValueError(f"{self.lease} cannot be noted: a plan id of up to 64 letters and digits was expected")
            fields.append(f"lease={lease}")
        return fields


def utf16_units(text: str) -> int:
    """How long a broker finds a text."""
    return len(text) + sum(1 for character in text if ord(character) > _PLANE_END)


def _read_of_others(text: str, offset: int) -> CommitMetadata:
    """Parallel Consumer's text says the same as ours, so that nothing of it has to be kept; others are foreign."""
    try:
        finished = read_parallel_consumer(text, offset)
    except ValueError as error:
        return CommitMetadata(foreign=text, ignored=(f"Confluent Parallel Consumer has noted it, and {error}",))
    return CommitMetadata(foreign=text) if finished is None else CommitMetadata(finished=finished)


# The fields ---------------------------------------------------------------------------


def _read_fields(text: str, position: int, offset: int) -> CommitMetadata:
    first: int | None = None
    partitions: int | None = None
    at: int | None = None
    lease: Lease | None = None
    finished: tuple[Run, ...] = ()
    foreign: str | None = None
    ignored: list[str] = []
    while position < len(text):
        if text.startswith(_FOREIGN[1:], position):
            foreign = text[position + len(_FOREIGN) - 1 :]
            break
        field = _FIELD.match(text, position)
        if field is None:
            ignored.append(f"what comes from character {position} on is no field")
            break
        position = field.end()
        name, value = field.groups()
        try:
            if name == "first":
                first = _number(value)
            elif name == "of":
                partitions = _number(value)
            elif name == "at":
                at = min(_number(value), _LATEST)
            elif name == "lease":
                lease = _read_lease(value)
            elif name == "done":
                finished = read_finished(value, offset)
        except ValueError as error:
            ignored.append(f"{name}: {error}")
    return CommitMetadata(
        first_generation=first,
        first_partitions=partitions,
        first_at=at,
        lease=lease,
        finished=finished,
        foreign=foreign,
        ignored=tuple(ignored),
    )


def _number(value: str) -> int:
    if not _NUMBER.fullmatch(value, endpos=19) or int(value) > LAST_OFFSET:
        raise ValueError("it is no number")
    return int(value)


def _read_lease(value: str) -> Lease:
    found = _LEASE.fullmatch(value)
    if found is None or int(found[2]) > _LATEST:
        raise ValueError("it is no lease")
    return Lease(found[1], int(found[2]))


def _storable(foreign: str) -> str:
    if "\0" in foreign or _HALVES.search(foreign):
        raise ValueError("what another program noted holds characters that no broker stores")
    return foreign
