"""From what users publish to a message."""

import json
from collections.abc import Iterable

from aioshard.ports import Message

__all__ = ["encoded", "message"]


def encoded(value: object) -> bytes:
    """Bytes as they are, text in UTF-8, anything else as JSON.

    Raises:
        TypeError: JSON has no form for it.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    return (value if isinstance(value, str) else json.dumps(value)).encode()


def message(
    topic: str,
    value: object,
    *,
    key: bytes | str | None = None,
    headers: Iterable[tuple[str, bytes | str | None]] = (),
    partition: int | None = None,
) -> Message:
    """What a user publishes, as the producer takes it.

    Args:
        topic: Where it goes.
        value: None is a tombstone; see `encoded` for the rest.
        key: Bytes, or text in UTF-8.
        headers: Name and content of each.
        partition: None lets the key choose.

    Example:
        >>> message("invoices", {"total": 7}, key="a").value
        b'{"total": 7}'
    """
    return Message(
        topic,
        None if value is None else encoded(value),
        None if key is None else encoded(key),
        tuple((name, None if content is None else encoded(content)) for name, content in headers),
        partition,
    )
