"""Divides the rate limits of a consumer group among its members, by the partitions that each of them owns."""

from collections.abc import Iterable

import anyio

from aioshard.core.limits import share_of
from aioshard.engine.handler import ActiveHandler
from aioshard.engine.handler_set import HandlerSet
from aioshard.engine.limits import SharedLimit
from aioshard.engine.partition import Partition
from aioshard.errors import AuthorizationError
from aioshard.ports import Transport
from aioshard.records import TopicPartition


class GroupShares:
    """The share of each limit of the group that this member may use.

    It is the number of its partitions, of all topics of the handlers that share the limit, divided by the number of
    all partitions of these topics. A partition has one owner, so the shares of all members add up to at most 1.

    Invariants:
        * A partition counts only while runs of its records may start: from its opening to the end of its drain.
    """

    def __init__(self, handlers: HandlerSet) -> None:
        """Start without shares."""
        self._handlers: dict[SharedLimit, list[ActiveHandler]] = {}
        """The handlers that share each limit of the group."""
        for handler in handlers:
            limit = handler.limit
            if isinstance(limit, SharedLimit) and limit.limit.per == "group":
                self._handlers.setdefault(limit, []).append(handler)
        self._sizes: dict[str, int] = {}
        """Number of partitions of each of their topics."""

    @property
    def are_needed(self) -> bool:
        """Whether a handler has a limit of the group."""
        return bool(self._handlers)

    async def look_up(self, transport: Transport, timeout: float) -> None:
        """Find out how many partitions the topics have, from the metadata of the client.

        Raises:
            TransportError: The client does not know.
            TimeoutError: It did not find out within *timeout* seconds.
        """
        sizes = {}
        with anyio.fail_after(timeout):
            for topic in await self._topics(transport):
                try:
                    sizes[topic] = len(await transport.partitions(topic))
                except AuthorizationError:  # a topic that is denied must not hold back the others
                    sizes[topic] = self._sizes.get(topic, 0)
        self._sizes = sizes

    async def _topics(self, transport: Transport) -> list[str]:
        """Return the topics of the limits, in order; only a pattern needs a request to find them."""
        specs = [handler.spec for handlers in self._handlers.values() for handler in handlers]
        topics = {topic for spec in specs for topic in spec.topics}
        if any(spec.pattern is not None for spec in specs):
            topics.update(topic for topic in await transport.topics() if any(spec.takes(topic) for spec in specs))
        return sorted(topics)

    def divide(self, partitions: Iterable[Partition]) -> None:
        """Use the shares that follow from the partitions of this process; called after each change of them."""
        if not self._handlers:
            return
        owned: dict[object, list[TopicPartition]] = {}
        for partition in partitions:
            if partition.may_start_runs:
                owned.setdefault(partition.sharder, []).append(partition.topic_partition)
        for limit, handlers in self._handlers.items():
            ours = [name for handler in handlers for name in owned.get(handler.sharder, ())]
            sizes = {
                topic: size
                for topic, size in self._sizes.items()
                if any(handler.spec.takes(topic) for handler in handlers)
            }
            limit.use_share(share_of(ours, sizes))
            for handler in handlers:
                handler.sharder.queue_ahead(limit.ahead)
