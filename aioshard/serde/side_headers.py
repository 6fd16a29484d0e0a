"""The headers by which a side record says what it is about; text that is written, and read with distrust."""

import math
from typing import NamedTuple

from aioshard.records import TOPIC_NAME, Record

__all__ = [
    "DUE",
    "KEY",
    "LONGEST_MESSAGE",
    "MESSAGE_ID",
    "NULL",
    "ONLY_PARKED",
    "OURS",
    "REPLAYS",
    "Coordinates",
    "DeadLetterRecord",
    "Failure",
    "Headers",
    "as_text",
    "failure_headers",
    "is_number",
    "parted",
    "read_original",
    "seconds",
    "whole",
]

LONGEST_MESSAGE = 1000
"""Characters of an error's message that are kept; headers count against the size of a record."""

_TOPIC = "aioshard.topic"
_PARTITION = "aioshard.partition"
_OFFSET = "aioshard.offset"
_TIMESTAMP = "aioshard.timestamp"
_GROUP = "aioshard.group"
_HANDLER = "aioshard.handler"
_ATTEMPTS = "aioshard.attempts"
_ERROR = "aioshard.error"
_MESSAGE = "aioshard.message"
_FAILED_AT = "aioshard.failed_at"
KEY = "aioshard.key"
NULL = "aioshard.null"
DUE = "aioshard.due"
REPLAYS = "aioshard.replays"
MESSAGE_ID = "aioshard.message_id"
"""Of a dead letter from a run over history, `topic/partition/offset`: the same where it is sent again."""

_OF_A_DEAD_LETTER = frozenset(
    {_TOPIC, _PARTITION, _OFFSET, _TIMESTAMP, _GROUP, _HANDLER, _ATTEMPTS, _ERROR, _MESSAGE, _FAILED_AT}
)
ONLY_PARKED = frozenset({KEY, NULL, DUE, REPLAYS})
OURS = _OF_A_DEAD_LETTER | ONLY_PARKED | {MESSAGE_ID}

_LONGEST_NUMBER = len(str(2**63 - 1))

Headers = tuple[tuple[str, bytes | None], ...]


class Failure(NamedTuple):
    """Why a record left its topic."""

    group: str
    handler: str
    attempts: int
    error: str
    """Name of the exception's class."""
    message: str
    """What the exception says; cut to `LONGEST_MESSAGE` characters when it is written."""
    failed_at: float
    """Seconds since the epoch."""


class Coordinates(NamedTuple):
    """Where a record is: unlike its key, no two records share them.

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
        """Those of *record*."""
        return cls(record.topic, record.partition, record.offset)

    @classmethod
    def parse(cls, text: str) -> "Coordinates | None":
        """What `str` made of them; None when *text* is something else."""
        match text.split("/"):
            case topic, partition, offset if TOPIC_NAME.fullmatch(topic) and is_number(partition) and is_number(offset):
                return cls(topic, int(partition), int(offset))
            case _:
                return None


class DeadLetterRecord(NamedTuple):
    """A dead letter that was read."""

    original: Record
    """As the handler got it; its coordinates are those in its own topic."""
    failure: Failure


# Headers ------------------------------------------------------------------------------


def failure_headers(record: Record, failure: Failure) -> Headers:
    """What a side record says of its original, and of why it left its topic."""
    return (
        (_TOPIC, as_text(record.topic)),
        (_PARTITION, as_text(str(record.partition))),
        (_OFFSET, as_text(str(record.offset))),
        (_TIMESTAMP, as_text(repr(float(record.timestamp)))),
        (_GROUP, as_text(failure.group)),
        (_HANDLER, as_text(failure.handler)),
        (_ATTEMPTS, as_text(str(failure.attempts))),
        (_ERROR, as_text(failure.error)),
        (_MESSAGE, as_text(_cut(failure.message))),
        (_FAILED_AT, as_text(repr(float(failure.failed_at)))),
    )


def parted(headers: Headers) -> tuple[Headers, dict[str, bytes | None]]:
    """The original's headers, and ours: those from the last `aioshard.topic` on that are named like ours.

    What a proxy or a tracer appended behind them is no less the record's own than what it came with.
    """
    begin = max((index for index, (name, _) in enumerate(headers) if name == _TOPIC), default=None)
    if begin is None:
        return headers, {}
    ours = {name: value for name, value in headers[begin:] if name in OURS}
    return headers[:begin] + tuple(header for header in headers[begin:] if header[0] not in OURS), ours


def read_original(
    headers: Headers, ours: dict[str, bytes | None], key: bytes | None, value: bytes | None
) -> DeadLetterRecord | None:
    """The original, and why it left its topic; None when our headers are missing or cannot be read.

    Args:
        headers: Of the original.
        ours: As `parted` gives them.
        key: Of the original.
        value: Of the original.
    """
    try:
        coordinates = Coordinates(_string(ours, _TOPIC), whole(ours, _PARTITION), whole(ours, _OFFSET))
        failure = Failure(
            group=_string(ours, _GROUP),
            handler=_string(ours, _HANDLER),
            attempts=whole(ours, _ATTEMPTS),
            error=_string(ours, _ERROR),
            message=_string(ours, _MESSAGE),
            failed_at=seconds(ours, _FAILED_AT),
        )
        timestamp = seconds(ours, _TIMESTAMP)
    except ValueError:
        return None
    if not TOPIC_NAME.fullmatch(coordinates.topic):
        return None
    return DeadLetterRecord(Record(*coordinates, key, value, headers, timestamp), failure)


# Text ---------------------------------------------------------------------------------


def _cut(message: str) -> str:
    return message if len(message) <= LONGEST_MESSAGE else f"{message[: LONGEST_MESSAGE - 1]}…"


def as_text(text: str) -> bytes:
    """*text* as it is written."""
    # Half a surrogate pair, as in the name of a file that is no UTF-8, must not keep a record from being written.
    return text.encode("utf-8", "backslashreplace")


def _string(headers: dict[str, bytes | None], name: str) -> str:
    found = headers.get(name)
    if found is None:
        raise ValueError(name)
    return found.decode("utf-8", "replace")


def whole(headers: dict[str, bytes | None], name: str) -> int:
    """A header that is a whole number.

    Raises:
        ValueError: It is missing, or says something else.
    """
    text = _string(headers, name)
    if not is_number(text):
        raise ValueError(name)
    return int(text)


def seconds(headers: dict[str, bytes | None], name: str) -> float:
    """A header that is a moment, or a time; as `whole`."""
    found = float(_string(headers, name))
    if not math.isfinite(found):
        raise ValueError(name)
    return found


def is_number(text: str) -> bool:
    """Whether it is a number as `str` writes an offset: `int` takes signs, blanks and underscores too."""
    return text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER and (text == "0" or text[0] != "0")
