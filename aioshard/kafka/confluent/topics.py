"""Which topics to subscribe to: names, and what a pattern matches, looked up again and again."""

import logging
import re
import time

from aioshard.kafka.confluent.asking import Asking

__all__ = ["Topics"]

logger = logging.getLogger("aioshard.kafka.confluent.topics")

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
        self._missing: frozenset[str] = frozenset()

    @property
    def none_exists(self) -> bool:
        """Whether there is nothing to subscribe to yet."""
        return self._subscribed <= self._missing | {_NO_TOPIC}

    @property
    def trouble(self) -> str | None:
        """A sentence on what is missing, or None."""
        if not self._missing:
            return None
        return f"no such topic, or none that we may see: {', '.join(map(repr, sorted(self._missing)))}"

    async def look_up(self) -> frozenset[str]:
        """What to subscribe to now.

        Raises:
            TransportError: A topic may not be seen, or the brokers did not tell.
        """
        self._looked_at = time.monotonic()
        found = await self._asking.look_up(self._names)
        missing = frozenset(name for name, partitions in found.items() if not partitions)
        for name in sorted(missing - self._missing):
            message = "topic %r does not exist: nothing of it is consumed until a look-up finds it, every %g s"
            logger.warning(message, name, self._max_age)
        for name in sorted(self._missing - missing):
            logger.info("topic %r exists now", name)
        self._missing = missing
        names = self._names
        if self._pattern is not None:
            names |= {name for name in await self._asking.all_topics() if self._pattern.fullmatch(name)}
        self._subscribed = names or frozenset([_NO_TOPIC])
        return self._subscribed

    async def changed(self) -> frozenset[str] | None:
        """What to subscribe to, when it is time to look and that is something else than before; else None."""
        if time.monotonic() < self._looked_at + self._max_age:
            return None
        before = self._subscribed
        names = await self.look_up()
        return names if names != before else None
