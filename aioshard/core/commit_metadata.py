"""Metadata of a committed offset: one versioned text format for everything stored there.

`aioshard/1 first=12 of=8 at=1750000000 lease=7f3a@1750000000 done=r:420:pzt_:AQM foreign=of another`: fields in this
order, separated by spaces, each at most once and only if it has a value. Unknown fields are skipped; a field that must
not be skipped needs a new version. `foreign` takes the rest of the text.
"""

import dataclasses
import re
from typing import Final, NamedTuple

from aioshard.core.finished_offsets import LAST_OFFSET, Run, read_finished, written
from aioshard.core.parallel_consumer import read_parallel_consumer

__all__ = ["MOST_UNITS", "CommitMetadata", "Lease", "utf16_units"]

MOST_UNITS: Final = 4095
"""Longest text that a broker stores with its default settings (`offset.metadata.max.bytes`), in UTF-16 code units: the
broker allows 4,096, and librdkafka appends one."""

_VERSION = 1
_HEAD = re.compile(r"aioshard/(\d{1,9})(?: |$)")
_FIELD = re.compile(r"([a-z]+)=([^ ]*)(?: |$)")
_LEASE = re.compile(r"([A-Za-z0-9_.-]{1,64})@(\d{1,12})")
_LATEST = 253_402_300_799
"""The last second that has a date."""
_NUMBER = re.compile(r"\d{1,19}")
_FOREIGN = " foreign="

_PLANE_END = 0xFFFF
"""The last character that takes a single code unit."""
_HALVES = re.compile("[\ud800-\udfff]")


class Lease(NamedTuple):
    """A temporary claim on the partition by a process that is not a member of the group."""

    plan: str
    """The id of a backfill; letters, digits, `.`, `_` and `-`, at most 64."""
    until: int
    """When the claim expires, in seconds since the epoch."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommitMetadata:
    """The content of the metadata of a committed offset.

    Attributes:
        first_generation: Generation in which the group first resolved its position on the partition.
        first_partitions: Number of partitions that the topic had then.
        first_at: Time of that, in seconds since the epoch.
        lease: Temporary claim on the partition while the group has no member.
        finished: Completed records beyond the committed offset; ascending and not adjacent.
        foreign: Metadata that another program had stored. It belongs to the offset that it was committed with.
        ignored: Reasons why parts of the text were ignored; empty if the text is intact. Never written.

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
        """Read metadata committed with *offset*, including that of Confluent's Parallel Consumer; never raises.

        Args:
            text: The text as stored by the broker. A trailing NUL, which librdkafka appends, is ignored.
            offset: The committed offset. Records noted as finished for a different offset are ignored: another
                program moved the offset and kept the text.
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
        """Return the text to commit with *offset*; empty if there is nothing to store.

        It contains no NUL and no lone surrogate. Finished records that do not fit are left out, the highest first:
        they will be processed again.

        Args:
            offset: The committed offset.
            most_units: Number of code units that the broker stores; only finished records are left out to meet it.

        Raises:
            ValueError: `foreign` does not fit or cannot be stored, or a value is outside the range of the format. The
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
        """Return the short fields."""
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
    """Return the length of a text as the broker counts it."""
    return len(text) + sum(1 for character in text if ord(character) > _PLANE_END)


def _read_of_others(text: str, offset: int) -> CommitMetadata:
    """Convert Parallel Consumer's text, which holds the same facts as ours; keep any other text as foreign."""
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
