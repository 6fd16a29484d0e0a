"""Changes dead letters before they are sent or run: another value for one, or a function for many."""

import inspect
from collections.abc import Callable

from aioshard.core.text import message_of
from aioshard.dead_letters.results import Failed, WorkItem
from aioshard.errors import MessageError
from aioshard.ports import Message
from aioshard.records import Record
from aioshard.serde.payloads import encoded, unwritable

Transform = Callable[[Record], object]
"""Takes the original record, and returns its new value: bytes, text, a JSON value or a pydantic model; or a `Record` or
`Message` that replaces key, value and headers; or None to leave the dead letter alone. It may be a coroutine function.

A `Message` for another topic is sent there. For a tombstone, return a `Message` or `Record` with the value None."""

ANY_PARTITION = -1
"""The partition of an edited record whose key decides it."""


def with_value(value: bytes) -> Transform:
    """Return a transform that replaces the value."""
    return lambda _: value


async def edit(item: WorkItem, transform: Transform | None) -> WorkItem | Failed | None:
    """Return an item as a transform changes it. Never raises an error of the transform.

    Args:
        item: A record, and its dead letters.
        transform: None returns the item itself.

    Returns:
        None if the transform leaves the item alone, and `Failed` if it raises an error.
    """
    if transform is None:
        return item
    try:
        record = await transformed(item.record, transform)
    except Exception as error:  # noqa: BLE001 - the user's own function
        return Failed.of(item, f"the transform failed: {type(error).__name__}: {message_of(error)}")
    return None if record is None else item._replace(record=record)


async def transformed(record: Record, transform: Transform) -> Record | None:
    """Return the record as a transform changes it; None if it leaves it alone.

    Raises:
        MessageError: Its result cannot be sent.
        Exception: The transform raised it.
    """
    result = transform(record)
    if inspect.isawaitable(result):
        result = await result
    if result is None:
        return None
    if isinstance(result, Record):
        return _checked(record._replace(key=result.key, value=result.value, headers=result.headers))
    if isinstance(result, Message):
        return _checked(_replaced_by(record, result))
    return record._replace(value=encoded(result))


def _replaced_by(record: Record, message: Message) -> Record:
    partition = message.partition
    if partition is None:
        partition = record.partition if message.topic == record.topic else ANY_PARTITION
    return record._replace(
        topic=message.topic, partition=partition, key=message.key, value=message.value, headers=message.headers
    )


def _checked(record: Record) -> Record:
    why = unwritable(Message(record.topic, record.value, record.key, record.headers, record.partition))
    if why is not None:
        raise MessageError(f"the transform returned a record that cannot be sent: {why}")
    return record
