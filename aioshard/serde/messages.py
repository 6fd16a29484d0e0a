"""Build a message from the arguments of a user's publish call."""

import json
from collections.abc import Iterable

from aioshard.errors import MessageError
from aioshard.ports import Message
from aioshard.records import TOPIC_NAME

__all__ = ["encoded", "message"]


def encoded(value: object) -> bytes:
    """Encode a value: bytes stay as they are, text becomes UTF-8, anything else JSON.

    Raises:
        TypeError: JSON cannot represent the value.
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
    """Build the message that the producer publishes.

    Args:
        topic: Destination topic.
        value: None is a tombstone; see `encoded` for the rest.
        key: Bytes, or text in UTF-8.
        headers: Pairs of name and content.
        partition: None lets the key choose.

    Raises:
        MessageError: The topic name is invalid, or the headers are not pairs.

    Example:
        >>> message("invoices", {"total": 7}, key="a").value
        b'{"total": 7}'
    """
    if not TOPIC_NAME.fullmatch(str(topic)) or not isinstance(topic, str):
        raise MessageError(f"{topic!r} is no topic name: 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-' were expected")
    try:
        pairs = [(name, content) for name, content in headers]
    except (TypeError, ValueError):
        raise MessageError(f"headers={headers!r} was refused: pairs of a name and a content were expected") from None
    return Message(
        topic,
        None if value is None else encoded(value),
        None if key is None else encoded(key),
        tuple((name, None if content is None else encoded(content)) for name, content in pairs),
        partition,
    )
