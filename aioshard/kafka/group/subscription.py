"""The topics that a member subscribes to, and follows."""

import asyncio
import logging
import re
from collections.abc import Collection
from typing import Final

from aioshard.errors import TransportError
from aioshard.kafka.errors import request_error
from aioshard.kafka.fetcher import Fetcher
from aioshard.kafka.group.classic_driver import ClassicDriver
from aioshard.kafka.group.consumer_driver import ConsumerDriver
from aioshard.kafka.queries import Queries
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.errors import WireError

logger = logging.getLogger("aioshard.kafka.group")

_RETRY_PAUSE: Final = 1.0
"""Seconds between two look-ups of topics while the brokers do not list them."""


class Subscription:
    """Keeps the group informed about the topics that we want.

    Patterns are those of Python, which the engine uses too; the brokers have another language.
    """

    def __init__(
        self, group_id: str, cluster: Cluster, queries: Queries, fetcher: Fetcher, *, metadata_max_age: float
    ) -> None:
        """Subscribe to nothing.

        Args:
            group_id: The group.
            cluster: The cluster, whose metadata of our topics is kept up to date.
            queries: Lists the topics of the cluster.
            fetcher: The assigned partitions; their topics are followed too.
            metadata_max_age: Seconds between two searches for topics that match the pattern, or are allowed by now.
        """
        self.topics: frozenset[str] = frozenset()
        """The topics by name, as the engine wants them."""
        self.pattern: re.Pattern[str] | None = None
        """The pattern for others; it matches whole names."""
        self.known: frozenset[str] = frozenset()
        """The topics that the group knows from us."""
        self.changed = asyncio.Event()
        """Set when the topics have to be looked up again."""
        self.driver: ClassicDriver | ConsumerDriver | None = None
        """The member that subscribes; None before it begins."""
        self._group_id = group_id
        self._cluster = cluster
        self._queries = queries
        self._fetcher = fetcher
        self._max_age = metadata_max_age

    def replace(self, topics: Collection[str]) -> None:
        """Want other topics by name; `run` looks them up."""
        self.topics = frozenset(topics)
        self.changed.set()

    async def look_up(self) -> None:
        """Look up the topics for the first time, before the member begins.

        Raises:
            TransportError: The brokers did not list the topics.
        """
        self.known = await self._wanted()

    async def run(self) -> None:
        """Tell the group when we subscribe to other topics, or other topics match our pattern, until cancelled."""
        is_failing = False
        while True:
            has_to_look = self.pattern is not None or not self.topics <= self.known
            try:
                async with asyncio.timeout(self._max_age if has_to_look else None):
                    await self.changed.wait()
            except TimeoutError:
                logger.debug("looking for topics that match the pattern, or are allowed by now")
            self.changed.clear()
            try:
                wanted = await self._wanted()
            except TransportError as error:
                level = logging.DEBUG if is_failing else logging.INFO
                logger.log(level, "the topics to subscribe to are unknown, and are looked up again: %s", error)
                is_failing = True
                await asyncio.sleep(_RETRY_PAUSE)
                self.changed.set()
                continue
            if is_failing:
                is_failing = False
                logger.info("the topics to subscribe to are known again")
            if wanted != self.known:
                self.known = wanted
                if self.driver is not None:
                    self.driver.subscribe(wanted)

    async def _wanted(self) -> frozenset[str]:
        """Look up the topics to subscribe to, and follow them.

        Brokers refuse all heartbeats of a member that names a topic which it may not see, so those are left out.

        Raises:
            TransportError: The brokers did not list the topics.
        """
        topics = self.topics
        if self.pattern is not None:
            topics |= {name for name in await self._queries.topics() if self.pattern.fullmatch(name)}
        assigned = {partition.topic for partition in self._fetcher.partitions}
        watched = frozenset[str]() if self.driver is None else self.driver.watched
        self._cluster.follow_only(topics | assigned | watched)
        try:
            await self._cluster.look_up(topics)
        except WireError as error:
            raise request_error(error.cause, "describe the topics", self._group_id) from error
        return topics - self._cluster.metadata.denied
