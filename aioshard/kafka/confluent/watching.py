"""Checks outside the client's reads: log ends, recovered brokers, new topics."""

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
"""Seconds between two checks."""


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
    """Run the checks every second, forever.

    Args:
        asking: Queries the brokers.
        topics: The topics to subscribe to.
        former: Stale members to remove from the group.
        member: Our client, queried through *calls*.
        calls: Runs calls to the client between reads.
        ends: Fetches the ends of logs that we have not reached.
        subscribe: Changes the subscription, through *calls*.
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
