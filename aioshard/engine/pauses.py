"""The partitions that the application has paused."""

from collections.abc import Collection, ItemsView, Iterator

from aioshard.engine.handler_set import HandlerSet
from aioshard.engine.partition import Partition
from aioshard.records import TopicPartition

APPLICATION = "application"
"""Key in `Epoch.pauses` of a pause that the application requested."""


class Pauses:
    """Partitions and handler names that the application paused, each with the reason as a sentence.

    They last across rebalances: each new epoch takes them over. Owned by the event loop; safe to read from any thread.
    """

    def __init__(self, handlers: HandlerSet) -> None:
        """Start without a pause; *handlers* say which handler a partition belongs to."""
        self._handlers = handlers
        self._reasons: dict[TopicPartition | str, str] = {}

    def __iter__(self) -> Iterator[TopicPartition | str]:
        return iter(tuple(self._reasons))

    def items(self) -> ItemsView[TopicPartition | str, str]:
        """Return what is paused, each with the reason."""
        return dict(self._reasons).items()

    def get(self, paused: TopicPartition | str) -> str | None:
        """Return why exactly this partition, or the handler of this name, is paused; None if it is not."""
        return self._reasons.get(paused)

    def of(self, name: TopicPartition) -> str | None:
        """Return why a partition or its handler is paused; None if neither is."""
        return self.get(name) or self.get(self._handlers.of(name.topic).spec.name)

    def add(self, what: Collection[TopicPartition | str], why: str) -> None:
        """Pause these partitions and handlers for a reason."""
        self._reasons.update(dict.fromkeys(what, why))

    def remove(self, what: Collection[TopicPartition | str]) -> None:
        """End the pauses of these partitions and handlers."""
        for paused in what:
            self._reasons.pop(paused, None)

    def pass_on(self, partition: Partition) -> None:
        """Pause a partition whose epoch begins, if it or its handler is paused."""
        why = self.of(partition.topic_partition)
        if why is not None:
            partition.pause(APPLICATION, why)
