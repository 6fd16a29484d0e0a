"""Encode shard keys as bytes: the same in every process, and equal exactly if the keys are equal."""

import datetime as dt
import enum
import ipaddress
import pathlib
import uuid
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from aioshard.core.sharding import ShardKey
from aioshard.errors import HandlerError

__all__ = ["key_bytes"]


def key_bytes(key: ShardKey) -> bytes:
    """Encode a shard key as bytes, so that several processes agree which records belong together.

    Args:
        key: Bytes, text, a number, a date or a time, a UUID, an IP address, a path, an enum member, None, or a tuple or
            frozenset of these. Numbers that Python considers equal have the same encoding: 1, 1.0 and True.

    Raises:
        HandlerError: The key has another type, such as a class of the application: other processes could not tell
            which of its objects are equal.

    Example:
        >>> key_bytes(("tenant", 7)) == key_bytes(("tenant", 7.0)), key_bytes("7") == key_bytes(7)
        (True, False)
    """
    for kind, mark, encode in _ENCODINGS:
        if isinstance(key, kind):
            return mark + encode(key)
    raise HandlerError(
        f"a shard key of type {type(key).__name__} was found ({key!r}): where several processes share the records, "
        "they must agree on what belongs together, so give text, bytes, a number, or a tuple of such"
    )


def _text(key: str) -> bytes:
    return str.encode(key, errors="surrogatepass")


def _number(key: float | Decimal | Fraction) -> bytes:
    """Encode equal numbers equally."""
    try:
        whole = int(key)
    except (OverflowError, ValueError):  # infinite, or not a number
        return repr(float(key)).encode()
    return b"%d" % whole if whole == key else b"%d/%d" % key.as_integer_ratio()


def _tuple(key: tuple[ShardKey, ...]) -> bytes:
    return b"".join(_framed(key_bytes(part)) for part in key)


def _set(key: frozenset[ShardKey]) -> bytes:
    return b"".join(_framed(part) for part in sorted(map(key_bytes, key)))


def _framed(part: bytes) -> bytes:
    return b"%d:" % len(part) + part


def _member(key: enum.Enum) -> bytes:
    kind = type(key)
    return f"{kind.__module__}.{kind.__qualname__}.{key.name}".encode()


def _moment(key: dt.datetime) -> bytes:
    aware = key.utcoffset() is not None
    return (key.astimezone(dt.UTC) if aware else key).isoformat().encode()


def _shown(key: object) -> bytes:
    return repr(key).encode()


_SHOWN = (
    dt.date,
    dt.time,
    dt.timedelta,
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    pathlib.PurePath,
    uuid.UUID,
)
"""Types whose `repr` distinguishes values exactly as `==` does, in every process."""

_ENCODINGS: tuple[tuple[Any, bytes, Callable[[Any], bytes]], ...] = (
    (bytes, b"b", bytes),
    (str, b"s", _text),
    ((int, float, Decimal, Fraction), b"i", _number),
    (tuple, b"t", _tuple),
    (type(None), b"n", _shown),
    (frozenset, b"f", _set),
    (enum.Enum, b"e", _member),
    (dt.datetime, b"m", _moment),
    (_SHOWN, b"o", _shown),
)
"""The most frequent types first; an enum member that is also text or a number is encoded as that value."""
