"""The topics to subscribe to: names, and the topics that match a pattern, looked up regularly."""

import re
import time

from aioshard.kafka.confluent.asking import Asking

__all__ = ["Topics"]

_NO_TOPIC = "^aioshard has found no topic$"
"""A subscription that matches no topic; joining the group with it yields an empty assignment."""


class Topics:
    """The topic names that a transport subscribes to.

    Patterns are Python's and match a whole name. librdkafka has a different pattern language, and the group protocol
    `consumer` uses the broker's. So we match them here and pass only names to the client.
    """

    def __init__(self, asking: Asking, names: frozenset[str], pattern: str | None, max_age: float) -> None:
        """Look up *names* and topics that match *pattern*, every *max_age* seconds."""
        self._asking = asking
        self._names = names
        self._pattern = re.compile(pattern) if pattern is not None else None
        self._max_age = max_age
        self._looked_at = 0.0
        self._subscribed: frozenset[str] = frozenset()

    async def exist(self) -> bool:
        """Whether any subscribed topic exists."""
        for name in self._subscribed - {_NO_TOPIC}:
            if await self._asking.transport.partitions(name):
                return True
        return False

    async def look_up(self) -> frozenset[str]:
        """Look up the topics to subscribe to.

        Raises:
            TransportError: The brokers did not answer.
        """
        self._looked_at = time.monotonic()
        names = self._names
        if self._pattern is not None:
            names |= {name for name in await self._asking.transport.topics() if self._pattern.fullmatch(name)}
        self._subscribed = names or frozenset([_NO_TOPIC])
        return self._subscribed

    async def changed(self) -> frozenset[str] | None:
        """Look up the topics again if it is time; return them if they have changed, else None."""
        if self._pattern is None or time.monotonic() < self._looked_at + self._max_age:
            return None
        before = self._subscribed
        names = await self.look_up()
        return names if names != before else None
