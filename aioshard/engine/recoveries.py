"""Recoveries complete a failed delivery without its handler: they skip it, or write its dead letter."""

import time
from collections.abc import Awaitable, Callable

from aioshard.engine.epoch import Delivery
from aioshard.engine.outcomes import Outcome, Recovery
from aioshard.ports import Message
from aioshard.serde.side_records import Failure, dead_letter

Send = Callable[[Delivery, Message], Awaitable[int]]
"""Publishes a message for a delivery that completes after that; returns its offset, or -1 if not known yet."""


async def _skip(delivery: Delivery) -> Outcome:  # noqa: ARG001 - signature shared by all recoveries
    return Outcome.SKIPPED


def skipping(why: str) -> Recovery:
    """Return a recovery that completes a record without processing it."""
    return Recovery(f"it is skipped ({why})", _skip)


def dead_lettering(topic: str, send: Send, *, group: str, handler: str) -> Recovery:
    """Return a recovery that completes a record when its dead letter is acknowledged (I2)."""

    async def take(delivery: Delivery) -> Outcome:
        await send(delivery, dead_letter(topic, delivery.record, failure_of(delivery, group, handler)))
        return Outcome.DEAD_LETTERED

    return Recovery(f"its dead letter is written to {topic}", take)


def failure_of(delivery: Delivery, group: str, handler: str) -> Failure:
    """Describe a failed delivery for the headers of a side record."""
    failure = delivery.failure
    assert failure is not None  # noqa: S101 - only failed deliveries are diverted
    return Failure(group, handler, failure.attempts, failure.error, failure.message, time.time())
