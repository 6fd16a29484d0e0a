"""Recoveries complete a failed delivery without its handler: they skip it, or write its dead letter."""

import time
from collections.abc import Awaitable, Callable

from aioshard.engine.epoch import Delivery
from aioshard.engine.outcomes import Outcome, Recovery
from aioshard.ports import Message
from aioshard.schema_registry.formats import RegistryFormat
from aioshard.serde.side_records import Failure, dead_letter

Send = Callable[[Delivery, Message], Awaitable[int]]
"""Publishes a message for a delivery that completes after that; returns its offset, or -1 if not known yet."""


async def _skip(delivery: Delivery) -> Outcome:  # noqa: ARG001 - signature shared by all recoveries
    return Outcome.SKIPPED


def skipping(why: str) -> Recovery:
    """Return a recovery that completes a record without processing it."""
    return Recovery(f"it is skipped ({why})", _skip)


def dead_lettering(
    topic: str, send: Send, *, group: str, handler: str, value_format: RegistryFormat | None = None
) -> Recovery:
    """Return a recovery that completes a record when its dead letter is acknowledged (I2).

    Args:
        topic: The dead-letter topic.
        send: Publishes it.
        group: The consumer group.
        handler: Name of the handler.
        value_format: The format of the values, if they have schemas in a registry.
    """

    async def take(delivery: Delivery) -> Outcome:
        record = delivery.record
        schema = None if value_format is None else value_format.ref_of(record)
        await send(delivery, dead_letter(topic, record, failure_of(delivery, group, handler), schema))
        return Outcome.DEAD_LETTERED

    return Recovery(f"its dead letter is written to {topic}", take)


def failure_of(delivery: Delivery, group: str, handler: str) -> Failure:
    """Describe a failed delivery for the headers of a side record."""
    failure = delivery.failure
    assert failure is not None  # noqa: S101 - only failed deliveries are diverted
    return Failure(group, handler, failure.attempts, failure.error, failure.message, time.time())
