r"""Formats of the records that aioshard writes to side topics: dead letters and parked records.

Both keep the headers of the original record and append ours, each as UTF-8 text: `aioshard.topic`,
`aioshard.partition`, `aioshard.offset`, `aioshard.timestamp` (seconds since the epoch), `aioshard.group`,
`aioshard.handler`, `aioshard.attempts`, `aioshard.error` (class), `aioshard.message`, `aioshard.failed_at` (seconds
since the epoch). If the handler takes values with a schema registry, a dead letter also has `aioshard.schema_id` (the
number or GUID of the schema, if the value names one) and `aioshard.subject`. The clients cannot write a
header name that is not UTF-8: its other bytes are written as `\xNN`.

**A dead letter** has the key, value and timestamp of the original. A timestamp that brokers may refuse is replaced by
the time of writing; the header has it. Headers left by an earlier failure of the record are
replaced, not duplicated. A dead letter from a backfill also has `aioshard.message_id`, `topic/partition/offset`: a
crash may send it twice, and both copies have the same id.

**A parked record** lives in a compacted topic, in the partition with the *same number* as its own. Its key is
`topic/partition/offset@generation`: the position of the original, and the generation of the group in which it was
parked, so that a previous owner of the partition cannot remove records that the new owner parked. The original's own
key moves to the header `aioshard.key` (bytes; missing if there was none). A null value, which would be a tombstone,
becomes an empty one with `aioshard.null` = `1`. If a header name is not UTF-8, `aioshard.header_names` is the JSON list
of the original names. `aioshard.due` is the time of the next retry of the key (seconds since
the epoch), `aioshard.retries` the number of retries so far. A tombstone for that key removes the record; its header
`aioshard.generation` says which owner of the partition removed it, and is missing if an operator did. A request to
release the key of a record has the key `release/topic/partition/offset` and the value `1`; its tombstone means that
the owner has answered it.
"""

import functools
import json
import math
from typing import NamedTuple

from aioshard.ports import Message
from aioshard.records import TOPIC_NAME, Record
from aioshard.serde.header_names import Headers, all_utf8, escaped

LONGEST_MESSAGE = 1000
"""Maximum length of a stored error message; headers count towards the size of a record."""

_PREFIX = "aioshard."
"""Prefix of the names of our headers."""
MESSAGE_ID = "aioshard.message_id"
"""Id of a dead letter from a backfill, `topic/partition/offset`: the same if it is sent again."""
REPLAYED = "aioshard.replayed"
"""Header of a record that was sent back to its topic: `topic/partition/offset` of its dead letter."""
_GENERATION = "aioshard.generation"
_RELEASE = "release/"

_LONGEST_NUMBER = len(str(2**63 - 1))
_MOST_AHEAD = 3600.0
"""Seconds in the future that the timestamp of a record may be (the default of `message.timestamp.after.max.ms`)."""


class SchemaRef(NamedTuple):
    """The schema of a value in a schema registry; each known field has a header of its name."""

    schema_id: int | str | None
    """The number or GUID; None if the value names none."""
    subject: str


class Failure(NamedTuple):
    """Why a record left its topic; each field has a header of its name."""

    group: str
    handler: str
    attempts: int
    error: str
    """Name of the exception's class."""
    message: str
    """Message of the exception; cut to `LONGEST_MESSAGE` characters when it is written."""
    failed_at: float
    """Seconds since the epoch."""


_ONLY_PARKED = frozenset({"key", "null", "due", "retries", "header_names"})
_OURS = {
    _PREFIX + name: name
    for name in (
        *("topic", "partition", "offset", "timestamp"),
        *Failure._fields,
        *SchemaRef._fields,
        *_ONLY_PARKED,
        "message_id",
    )
}
"""Names of our headers, each with its short name."""


class Coordinates(NamedTuple):
    """The position of a record: unlike a key, it is unique.

    Example:
        >>> str(Coordinates("orders", 0, 41))
        'orders/0/41'
        >>> Coordinates.parse("orders/0/41")
        Coordinates(topic='orders', partition=0, offset=41)
        >>> Coordinates.parse("orders/0") is None
        True
    """

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"

    @classmethod
    def of(cls, record: Record) -> "Coordinates":
        """Return the coordinates of *record*."""
        return cls(record.topic, record.partition, record.offset)

    @classmethod
    def parse(cls, text: str) -> "Coordinates | None":
        """Parse the output of `str`; None for any other *text*."""
        match text.split("/"):
            case topic, partition, offset if TOPIC_NAME.fullmatch(topic) and is_number(partition) and is_number(offset):
                return cls(topic, int(partition), int(offset))
            case _:
                return None


class DeadLetterRecord(NamedTuple):
    """A decoded dead letter."""

    original: Record
    """The record as the handler received it; its coordinates are those in its own topic."""
    failure: Failure
    schema_id: str | None = None
    """The number or GUID of the schema that the value names in a schema registry; None if it is not known."""
    subject: str | None = None
    """The subject of that schema; None if it is not known."""


# Headers ------------------------------------------------------------------------------


def failure_headers(record: Record, failure: Failure) -> Headers:
    """Return the headers that describe the original and why it left its topic."""
    if len(failure.message) > LONGEST_MESSAGE:
        longest = LONGEST_MESSAGE - 1
        failure = failure._replace(message=f"{failure.message[:longest]}…")
    return (
        ("aioshard.topic", as_text(record.topic)),
        ("aioshard.partition", b"%d" % record.partition),
        ("aioshard.offset", b"%d" % record.offset),
        ("aioshard.timestamp", as_text(str(float(record.timestamp)))),
        *_headers_of(failure),
    )


@functools.lru_cache(maxsize=1024)
def _headers_of(failure: Failure) -> Headers:
    """Return the headers of a failure; all records that are parked behind a failed one have those of that one."""
    return _headers(failure._replace(failed_at=float(failure.failed_at))._asdict())


def _headers(values: dict[str, object]) -> Headers:
    return tuple((_PREFIX + name, as_text(str(value))) for name, value in values.items())


def parted(headers: Headers) -> tuple[Headers, dict[str, bytes | None]]:
    """Split the original's headers from ours; ours get their short names.

    Ours are those with our names, from the last `aioshard.topic` on. Headers that a proxy or tracer appended after
    them count as the record's own.
    """
    begin = max((index for index, (name, _) in enumerate(headers) if name == "aioshard.topic"), default=None)
    if begin is None:
        return headers, {}
    ours = {_OURS[name]: value for name, value in headers[begin:] if name in _OURS}
    return headers[:begin] + tuple(header for header in headers[begin:] if header[0] not in _OURS), ours


def read_original(
    headers: Headers, ours: dict[str, bytes | None], key: bytes | None, value: bytes | None
) -> DeadLetterRecord | None:
    """Restore the original and why it left its topic; None if our headers are missing or unreadable.

    Args:
        headers: Headers of the original.
        ours: Our headers, from `parted`.
        key: Key of the original.
        value: Value of the original.
    """
    try:
        coordinates = Coordinates(_string(ours, "topic"), whole(ours, "partition"), whole(ours, "offset"))
        failure = Failure(
            group=_string(ours, "group"),
            handler=_string(ours, "handler"),
            attempts=whole(ours, "attempts"),
            error=_string(ours, "error"),
            message=_string(ours, "message"),
            failed_at=seconds(ours, "failed_at"),
        )
        timestamp = seconds(ours, "timestamp")
    except ValueError:
        return None
    if not TOPIC_NAME.fullmatch(coordinates.topic):
        return None
    schema = {name: _string(ours, name) for name in SchemaRef._fields if ours.get(name) is not None}
    return DeadLetterRecord(Record(*coordinates, key, value, headers, timestamp), failure, **schema)


# Text ---------------------------------------------------------------------------------


def as_text(text: str) -> bytes:
    """Encode *text* for a header."""
    # A lone surrogate, as in a file name that is not UTF-8, must not keep a record from being written.
    return text.encode("utf-8", "backslashreplace")


def _string(headers: dict[str, bytes | None], name: str) -> str:
    value = headers.get(name)
    if value is None:
        raise ValueError(name)
    return value.decode("utf-8", "replace")


def whole(headers: dict[str, bytes | None], name: str) -> int:
    """Read a header that is a whole number.

    Raises:
        ValueError: The header is missing, or is not a number.
    """
    text = _string(headers, name)
    if not is_number(text):
        raise ValueError(name)
    return int(text)


def seconds(headers: dict[str, bytes | None], name: str) -> float:
    """Read a header that is a timestamp or a duration; raises as `whole`."""
    value = float(_string(headers, name))
    if not math.isfinite(value):
        raise ValueError(name)
    return value


def is_number(text: str) -> bool:
    """Return whether *text* is a number as `str` writes an offset; unlike `int`, no signs, blanks or underscores."""
    return text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER and (text == "0" or text[0] != "0")


class StorageKey(NamedTuple):
    """The key under which a parked record is stored: position of the original, and generation in which it was parked.

    Example:
        >>> str(StorageKey(Coordinates("orders", 0, 41), 7))
        'orders/0/41@7'
        >>> StorageKey.parse("orders/0/41@7").generation, StorageKey.parse("orders/0/41")
        (7, None)
    """

    coordinates: Coordinates
    generation: int

    def __str__(self) -> str:
        return f"{self.coordinates}@{self.generation}"

    @classmethod
    def parse(cls, text: str) -> "StorageKey | None":
        """Parse the output of `str`; None for any other *text*."""
        position, _, generation = text.rpartition("@")
        coordinates = Coordinates.parse(position)
        if coordinates is None or not is_number(generation):
            return None
        return cls(coordinates, int(generation))


# Dead letters -------------------------------------------------------------------------


def dead_letter(topic: str, record: Record, failure: Failure, schema: SchemaRef | None = None) -> Message:
    """Build the dead letter of a record.

    Args:
        topic: The dead-letter topic.
        record: The failed record.
        failure: Why it failed.
        schema: The schema of its value; None if its handler takes values without one.

    Example:
        >>> record = Record("orders", 0, 41, b"k", b"{}", (("trace", b"7"),), 1700000000.0)
        >>> message = dead_letter("orders.dlt", record, Failure("g", "h", 5, "ValueError", "no", 1700000009.5))
        >>> message.key, message.value, len(message.headers), dict(message.headers)["aioshard.failed_at"]
        (b'k', b'{}', 11, b'1700000009.5')
    """
    own = escaped(tuple(header for header in record.headers if header[0] not in _OURS))
    # A record of the first message format has no timestamp; it reads as -1 ms. One far in the future, in milliseconds
    # beyond 64 bits or just later than the topic allows, would be refused however often it is sent.
    takes_timestamp = 0 <= record.timestamp <= failure.failed_at + _MOST_AHEAD
    timestamp = record.timestamp if takes_timestamp else None
    headers = own + failure_headers(record, failure)
    if schema is not None:
        headers += _headers({name: part for name, part in schema._asdict().items() if part is not None})
    return Message(topic, record.value, record.key, headers, None, timestamp)


def read_dead_letter(record: Record) -> DeadLetterRecord | None:
    """Decode *record* as a dead letter; None if it is something else, or its headers cannot be read."""
    original, ours = parted(record.headers)
    if ours.keys() & _ONLY_PARKED:
        return None
    return read_original(original, ours, record.key, record.value)


def replay(letter: DeadLetterRecord, read: Coordinates, *, partition: int | None, timestamp: float | None) -> Message:
    """Turn a dead letter back into its original record, for the topic that it came from.

    Args:
        letter: The decoded dead letter.
        read: Position of the dead letter; the message names it in the header `REPLAYED`.
        partition: Destination; the original's partition keeps it behind the records that were there before.
        timestamp: Seconds since the epoch; None is now.
    """
    record = letter.original
    own = escaped(tuple(header for header in record.headers if header[0] != REPLAYED))
    headers = (*own, (REPLAYED, as_text(str(read))))
    return Message(record.topic, record.value, record.key, headers, partition, timestamp)


# Parked records -----------------------------------------------------------------------


class ParkedRecord(NamedTuple):
    """A record that waits in a side topic."""

    original: Record
    """The record as the handler received it."""
    failure: Failure
    """Why it failed; for a record parked behind an older one of its key, the failure of that one."""
    due: float
    """When its key is retried automatically, in seconds since the epoch."""
    retries: int
    """Number of retries so far."""
    generation: int
    """Generation of the group in which the record was first parked."""

    @property
    def storage_key(self) -> StorageKey:
        """The key under which it is stored."""
        return StorageKey(self.coordinates, self.generation)

    @property
    def coordinates(self) -> Coordinates:
        """Coordinates of the original."""
        return Coordinates.of(self.original)


class Removed(NamedTuple):
    """Reports that a record is no longer parked: it was finished or dropped."""

    storage_key: StorageKey
    by: int | None = None
    """Generation of the owner that removed it; None if an operator did."""

    @property
    def coordinates(self) -> Coordinates:
        """Coordinates of the original."""
        return self.storage_key.coordinates


class ReleaseRequest(NamedTuple):
    """A request to retry the key of a parked record now."""

    coordinates: Coordinates
    answered: bool = False


def park(topic: str, record: Record, failure: Failure, *, generation: int, due: float, retries: int = 0) -> Message:
    """Build the message that parks a record in the side topic; a later one replaces it.

    Args:
        topic: The side topic.
        record: The record to park.
        failure: Why it is parked.
        generation: Generation of the group in which the record was first parked.
        due: When to retry its key, in seconds since the epoch.
        retries: Number of retries so far.

    Example:
        >>> record = Record("orders", 3, 41, b"k", None, (), 1700000000.0)
        >>> message = park("parked", record, Failure("g", "h", 5, "ValueError", "no", 1.5), generation=2, due=61.5)
        >>> message.key, message.value, message.partition
        (b'orders/3/41@2', b'', 3)
    """
    extra: Headers = (("aioshard.due", as_text(str(due))), ("aioshard.retries", b"%d" % retries))
    if record.key is not None:
        extra += (("aioshard.key", record.key),)
    if record.value is None:
        extra += (("aioshard.null", b"1"),)
    names = [name for name, _ in record.headers]
    if not all_utf8(names):
        extra += (("aioshard.header_names", as_text(json.dumps(names))),)
    # The record returns to its handler, so even headers with names like ours are kept.
    headers = (*escaped(record.headers), *failure_headers(record, failure), *extra)
    storage_key = StorageKey(Coordinates.of(record), generation)
    return Message(topic, record.value or b"", as_text(str(storage_key)), headers, record.partition)


def tombstone(topic: str, storage_key: StorageKey, *, by: int | None = None) -> Message:
    """Build the message that removes a parked record from the side topic.

    Args:
        topic: The side topic.
        storage_key: The key under which the record is stored.
        by: Generation in which the remover owns the partition; None for an operator.
    """
    headers = () if by is None else ((_GENERATION, as_text(str(by))),)
    return Message(topic, None, as_text(str(storage_key)), headers, storage_key.coordinates.partition)


def release(topic: str, coordinates: Coordinates, *, answered: bool = False) -> Message:
    """Build the request to retry the key of a parked record now.

    The owner of the partition answers it: with *answered*, the message removes the request from the side topic.
    """
    return Message(
        topic, None if answered else b"1", as_text(f"{_RELEASE}{coordinates}"), partition=coordinates.partition
    )


def storage_key_of(record: Record) -> StorageKey | None:
    """Return the key under which a record of a side topic parks or removes another one; None for any other record."""
    return StorageKey.parse((record.key or b"").decode("utf-8", "replace"))


def read_parked(record: Record) -> ParkedRecord | Removed | ReleaseRequest | None:
    """Decode a record of a side topic; None if it is not ours, or is in the wrong partition."""
    stored_key = (record.key or b"").decode("utf-8", "replace")
    storage_key = StorageKey.parse(stored_key)
    requested = stored_key.removeprefix(_RELEASE) if stored_key.startswith(_RELEASE) else ""
    coordinates = Coordinates.parse(requested) if storage_key is None else storage_key.coordinates
    if coordinates is None or coordinates.partition != record.partition:
        return None
    if storage_key is None:
        return ReleaseRequest(coordinates, answered=record.value is None)
    if record.value is not None:
        return _parked(record, storage_key)
    by = (dict(record.headers).get(_GENERATION) or b"").decode("utf-8", "replace")
    return Removed(storage_key, int(by) if is_number(by) else None)


def _renamed(headers: Headers, names: bytes | None) -> Headers:
    """Return headers with their original names, if these are stored."""
    if names is None:
        return headers
    try:
        originals = json.loads(names)
        return tuple((str(name), content) for name, (_, content) in zip(originals, headers, strict=True))
    except (ValueError, TypeError):
        return headers


def _parked(record: Record, storage_key: StorageKey) -> ParkedRecord | None:
    original, ours = parted(record.headers)
    original = _renamed(original, ours.get("header_names"))
    decoded = read_original(original, ours, ours.get("key"), None if "null" in ours else record.value)
    if decoded is None or Coordinates.of(decoded.original) != storage_key.coordinates:
        return None
    try:
        due = seconds(ours, "due")
        retries = whole(ours, "retries")
    except ValueError:
        return None
    return ParkedRecord(decoded.original, decoded.failure, due, retries, storage_key.generation)
