"""What no read of the client tells: ends of logs, brokers that are back, topics that are new."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aioshard.errors import TransportError
from aioshard.kafka.confluent.asking import Asking
from aioshard.kafka.confluent.calls import Calls
from aioshard.kafka.confluent.former import Former
from aioshard.kafka.confluent.member import Member
from aioshard.kafka.confluent.topics import Topics
from aioshard.kafka.translate import reason

__all__ = ["watch"]

logger = logging.getLogger("aioshard.kafka.confluent.client")

_INTERVAL = 1.0
"""Seconds between two looks."""


async def watch(
    asking: Asking,
    topics: Topics,
    former: Former,
    member: Member,
    calls: Calls,
    *,
    ends: Callable[[], Awaitable[object]],
    subscribe: Callable[[frozenset[str]], Coroutine[Any, Any, None]],
) -> None:
    """Look every second, for ever.

    Args:
        asking: Asks the brokers.
        topics: What to subscribe to.
        former: Whom the group is to be told of that they have left.
        member: Who we are, asked as one of *calls*.
        calls: What is done between two reads.
        ends: Looks at the ends of logs that were not reached.
        subscribe: Changes the subscription, as one of *calls*.
    """
    while True:
        await asyncio.sleep(_INTERVAL)
        if former.may_be_unknown(asking.trouble):
            await calls.call(functools.partial(former.look_at, member))
        try:
            async with asyncio.timeout(2 * _INTERVAL):
                await former.leave(asking)
                await ends()
                names = await topics.changed()
        except (TransportError, TimeoutError) as error:
            logger.debug("the brokers did not tell what was asked between reads: %s", reason(error))
            continue
        if names is not None:
            await calls.call(functools.partial(subscribe, names))
