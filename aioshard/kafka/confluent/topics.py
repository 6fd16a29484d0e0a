"""Which topics to subscribe to: names, and what a pattern matches, looked up again and again."""

import re
import time

from aioshard.kafka.confluent.asking import Asking

__all__ = ["Topics"]

_NO_TOPIC = "^aioshard has found no topic$"
"""A subscription that matches nothing: joining the group with it tells that nothing is ours."""


class Topics:
    """The names that a transport subscribes to.

    Patterns are Python's and for a whole name. The client's own are another language, and under the group protocol
    `consumer` the broker's; so they are matched here, and the client is told names.
    """

    def __init__(self, asking: Asking, names: frozenset[str], pattern: str | None, max_age: float) -> None:
        """Look for *names* and for what matches *pattern*, every *max_age* seconds."""
        self._asking = asking
        self._names = names
        self._pattern = re.compile(pattern) if pattern is not None else None
        self._max_age = max_age
        self._looked_at = 0.0
        self._subscribed: frozenset[str] = frozenset()

    async def exist(self) -> bool:
        """Whether any topic of the subscription does."""
        for name in self._subscribed - {_NO_TOPIC}:
            if await self._asking.transport.partitions(name):
                return True
        return False

    async def look_up(self) -> frozenset[str]:
        """What to subscribe to now.

        Raises:
            TransportError: The brokers did not tell.
        """
        self._looked_at = time.monotonic()
        names = self._names
        if self._pattern is not None:
            names |= {name for name in await self._asking.transport.topics() if self._pattern.fullmatch(name)}
        self._subscribed = names or frozenset([_NO_TOPIC])
        return self._subscribed

    async def changed(self) -> frozenset[str] | None:
        """What to subscribe to, when it is time to look and that is something else than before; else None."""
        if self._pattern is None or time.monotonic() < self._looked_at + self._max_age:
            return None
        before = self._subscribed
        names = await self.look_up()
        return names if names != before else None
