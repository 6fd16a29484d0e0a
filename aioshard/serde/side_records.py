"""The records that aioshard writes beside the ones it reads: dead letters, and records that are parked.

Both keep the headers of the original record and add ours behind them, UTF-8 text each: `aioshard.topic`,
`aioshard.partition`, `aioshard.offset`, `aioshard.timestamp` (seconds since the epoch), `aioshard.group`,
`aioshard.handler`, `aioshard.attempts`, `aioshard.error` (class), `aioshard.message`, `aioshard.failed_at` (seconds
since the epoch).

**A dead letter** has the key, value and timestamp of the original. Headers that an earlier life of the record left are
replaced, not doubled. One from a run over history has `aioshard.message_id` as well, `topic/partition/offset`: a crash
may send it twice, and both have the same.

**A parked record** lives in a compacted topic, in the partition that has the *same number* as its own. Its key is
`topic/partition/offset@generation`: where the original is, and the generation of the group in which it was parked, so
that whoever lost the partition since cannot take out what its new owner has parked. The original's own key moves into
the header `aioshard.key` (bytes; missing where there was none). A null value, which would delete, becomes an empty one
with `aioshard.null` = `1`. `aioshard.due` says when the key is run again (seconds since the epoch), `aioshard.replays`
how often it was. The tombstone of that key takes the record out; with `aioshard.generation` it says which owner of the
partition did, or that an operator did, without it. A request to release the key of a record has the key
`release/topic/partition/offset` and the value `1`; its tombstone says that it was answered.
"""

from typing import NamedTuple

from aioshard.ports import Message
from aioshard.records import Record
from aioshard.serde.side_headers import (
    DUE,
    KEY,
    LONGEST_MESSAGE,
    NULL,
    ONLY_PARKED,
    OURS,
    REPLAYS,
    Coordinates,
    DeadLetterRecord,
    Failure,
    as_text,
    failure_headers,
    is_number,
    parted,
    read_original,
    seconds,
    whole,
)

__all__ = [
    "LONGEST_MESSAGE",
    "REPLAYED",
    "Coordinates",
    "DeadLetterRecord",
    "Failure",
    "ParkedRecord",
    "Place",
    "ReleaseEnded",
    "ReleaseRequest",
    "Removed",
    "dead_letter",
    "park",
    "read_dead_letter",
    "read_parked",
    "release",
    "released",
    "replay",
    "tombstone",
]

REPLAYED = "aioshard.replayed"
"""Header of a record that was sent back to its topic: `topic/partition/offset` of its dead letter."""

_RELEASE = "release"
_GENERATION = "aioshard.generation"


class Place(NamedTuple):
    """Under which key a parked record is stored: where the original is, and in which generation it was parked.

    Example:
        >>> str(Place(Coordinates("orders", 0, 41), 7))
        'orders/0/41@7'
        >>> Place.parse("orders/0/41@7").generation, Place.parse("orders/0/41")
        (7, None)
    """

    coordinates: Coordinates
    generation: int

    def __str__(self) -> str:
        return f"{self.coordinates}@{self.generation}"

    @classmethod
    def parse(cls, text: str) -> "Place | None":
        """What `str` made of it; None when *text* is something else."""
        where, _, generation = text.rpartition("@")
        coordinates = Coordinates.parse(where)
        if coordinates is None or not is_number(generation):
            return None
        return cls(coordinates, int(generation))


# Dead letters -------------------------------------------------------------------------


def dead_letter(topic: str, record: Record, failure: Failure) -> Message:
    """A record as a message for the dead-letter topic.

    Args:
        topic: The dead-letter topic.
        record: The record that failed.
        failure: Why.

    Example:
        >>> record = Record("orders", 0, 41, b"k", b"{}", (("trace", b"7"),), 1700000000.0)
        >>> message = dead_letter("orders.dlt", record, Failure("g", "h", 5, "ValueError", "no", 1700000009.5))
        >>> message.key, message.value, len(message.headers), dict(message.headers)["aioshard.failed_at"]
        (b'k', b'{}', 11, b'1700000009.5')
    """
    own = tuple(header for header in record.headers if header[0] not in OURS)
    headers = own + failure_headers(record, failure)
    # A record of the first message format has no time, and says -1 ms.
    timestamp = record.timestamp if record.timestamp >= 0 else None
    return Message(topic, record.value, record.key, headers, None, timestamp)


def read_dead_letter(record: Record) -> DeadLetterRecord | None:
    """The dead letter that *record* is; None when it is none, or its headers cannot be read."""
    original, ours = parted(record.headers)
    if ours.keys() & ONLY_PARKED:
        return None
    return read_original(original, ours, record.key, record.value)


def replay(letter: DeadLetterRecord, read: Coordinates, *, partition: int | None, timestamp: float | None) -> Message:
    """A dead letter as the record that it was, for the topic that it came from.

    Args:
        letter: What was read.
        read: Where it was read; the message names it in the header `REPLAYED`.
        partition: Where it is to go; that of the original keeps it behind the records that were there before.
        timestamp: Seconds since the epoch; None is now.
    """
    record = letter.original
    headers = tuple(header for header in record.headers if header[0] != REPLAYED)
    mark = (REPLAYED, as_text(str(read)))
    return Message(record.topic, record.value, record.key, (*headers, mark), partition, timestamp)


# Parked records -----------------------------------------------------------------------


class ParkedRecord(NamedTuple):
    """A record that waits in a side topic."""

    original: Record
    """As the handler got it."""
    failure: Failure
    """Of a record that was parked because an older one of its key is, the failure of that one."""
    due: float
    """Seconds since the epoch at which its key is run again by itself."""
    replays: int
    """How often it was run again so far."""
    generation: int
    """Of the group, when the record was parked first."""

    @property
    def place(self) -> Place:
        """Under which key it is stored."""
        return Place(self.coordinates, self.generation)

    @property
    def coordinates(self) -> Coordinates:
        """Of the original."""
        return Coordinates.of(self.original)


class Removed(NamedTuple):
    """A record is not parked any more: finished, or dropped."""

    place: Place
    by: int | None = None
    """Generation of the owner that took it out; None where an operator did."""

    @property
    def coordinates(self) -> Coordinates:
        """Of the original."""
        return self.place.coordinates


class ReleaseRequest(NamedTuple):
    """Somebody wants the key of a parked record to be run again now."""

    coordinates: Coordinates


class ReleaseEnded(NamedTuple):
    """A request was answered."""

    coordinates: Coordinates


def park(topic: str, record: Record, failure: Failure, *, generation: int, due: float, replays: int = 0) -> Message:
    """A record as a message for the side topic; written again, it replaces what is there.

    Args:
        topic: The side topic.
        record: The record that is parked.
        failure: Why.
        generation: Of the group, when the record was parked first.
        due: Seconds since the epoch at which its key is to be run again.
        replays: How often it was run again so far.

    Example:
        >>> record = Record("orders", 3, 41, b"k", None, (), 1700000000.0)
        >>> message = park("parked", record, Failure("g", "h", 5, "ValueError", "no", 1.5), generation=2, due=61.5)
        >>> message.key, message.value, message.partition
        (b'orders/3/41@2', b'', 3)
    """
    extra: list[tuple[str, bytes | None]] = [(DUE, as_text(repr(due))), (REPLAYS, as_text(str(replays)))]
    if record.key is not None:
        extra.append((KEY, record.key))
    if record.value is None:
        extra.append((NULL, b"1"))
    # The record comes back to its handler, so that even headers named like ours stay as they are.
    headers = record.headers + failure_headers(record, failure) + tuple(extra)
    place = Place(Coordinates.of(record), generation)
    return Message(topic, record.value or b"", as_text(str(place)), headers, record.partition)


def tombstone(topic: str, place: Place, *, by: int | None = None) -> Message:
    """What takes a parked record out of the side topic.

    Args:
        topic: The side topic.
        place: Under which key it is stored.
        by: Generation in which the partition belongs to who takes it out; None for an operator.
    """
    headers = () if by is None else ((_GENERATION, as_text(str(by))),)
    return Message(topic, None, as_text(str(place)), headers, place.coordinates.partition)


def release(topic: str, coordinates: Coordinates) -> Message:
    """The request to run the key of a parked record again now; its owner answers."""
    return Message(topic, b"1", as_text(f"{_RELEASE}/{coordinates}"), (), coordinates.partition)


def released(topic: str, coordinates: Coordinates) -> Message:
    """What takes an answered request out of the side topic."""
    return Message(topic, None, as_text(f"{_RELEASE}/{coordinates}"), (), coordinates.partition)


def read_parked(record: Record) -> ParkedRecord | Removed | ReleaseRequest | ReleaseEnded | None:
    """What a record of a side topic says; None when it is nothing of ours, or in a partition where it means nothing."""
    named = (record.key or b"").decode("utf-8", "replace")
    place = Place.parse(named)
    if place is None:
        return _request(record, named)
    if place.coordinates.partition != record.partition:
        return None
    return Removed(place, _taken_out_by(record)) if record.value is None else _parked(record, place)


def _taken_out_by(record: Record) -> int | None:
    text = (dict(record.headers).get(_GENERATION) or b"").decode("utf-8", "replace")
    return int(text) if is_number(text) else None


def _request(record: Record, named: str) -> ReleaseRequest | ReleaseEnded | None:
    if not named.startswith(f"{_RELEASE}/"):
        return None
    coordinates = Coordinates.parse(named.removeprefix(f"{_RELEASE}/"))
    if coordinates is None or coordinates.partition != record.partition:
        return None
    return ReleaseEnded(coordinates) if record.value is None else ReleaseRequest(coordinates)


def _parked(record: Record, place: Place) -> ParkedRecord | None:
    original, ours = parted(record.headers)
    letter = read_original(original, ours, ours.get(KEY), None if NULL in ours else record.value)
    if letter is None or Coordinates.of(letter.original) != place.coordinates:
        return None
    try:
        due, replays = seconds(ours, DUE), whole(ours, REPLAYS)
    except ValueError:
        return None
    return ParkedRecord(letter.original, letter.failure, due, replays, place.generation)
