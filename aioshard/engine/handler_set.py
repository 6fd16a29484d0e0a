"""The handlers of a running app: which one a topic belongs to, and which records they run now."""

from collections.abc import Iterator, Sequence

from aioshard.core.options import Park
from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import ActiveHandler, Handler, Resources
from aioshard.engine.worker import Worker
from aioshard.errors import HandlerError


def _parks_in(handler: ActiveHandler, topic: str) -> bool:
    policy = handler.spec.on_failure
    return isinstance(policy, Park) and policy.topic == topic


class HandlerSet:
    """The active handlers of an engine, in the order of their registration.

    Owned by the event loop; iterating, and the figures, are safe from any thread.
    """

    def __init__(self, specs: Sequence[Handler], resources: Resources) -> None:
        """Create the parts of each handler; nothing runs yet."""
        self._handlers = tuple(ActiveHandler(spec, resources) for spec in specs)
        self.workers = [worker for handler in self._handlers for worker in handler.workers]
        """All workers of all handlers."""

    def __iter__(self) -> Iterator[ActiveHandler]:
        return iter(self._handlers)

    def __len__(self) -> int:
        return len(self._handlers)

    def __getitem__(self, number: int) -> ActiveHandler:
        return self._handlers[number]

    def _matching(self, topic: str) -> list[ActiveHandler]:
        matching = [handler for handler in self._handlers if handler.spec.takes(topic)]
        return matching or [handler for handler in self._handlers if topic in handler.counters.topics]

    def takes(self, topic: str) -> bool:
        """Whether a handler takes the records of a topic, or did before it was removed from its subscription."""
        return bool(self._matching(topic))

    def of(self, topic: str) -> ActiveHandler:
        """The handler of a topic that `takes` is true of.

        Raises:
            HandlerError: The patterns of several handlers match the topic, which may have only one handler.
        """
        matching = self._matching(topic)
        first, *others = matching
        if others:
            names = ", ".join(repr(handler.spec.name) for handler in matching)
            raise HandlerError(f"topic {topic!r} belongs to several handlers ({names}): narrow their patterns")
        return first

    def parked_with(self, topic: str) -> set[str]:
        """The topics whose records are parked in the same side topic as those of *topic*; empty if none are."""
        policy = self.of(topic).spec.on_failure
        if not isinstance(policy, Park):
            return set()
        parking = [handler for handler in self._handlers if _parks_in(handler, policy.topic)]
        return {name for handler in parking for name in (*handler.spec.topics, *handler.counters.topics)}

    def subscription(self) -> tuple[list[str], str | None]:
        """The topics and the pattern of all handlers."""
        topics = dict.fromkeys(topic for handler in self._handlers for topic in handler.spec.topics)
        pattern = "|".join(f"(?:{handler.spec.pattern})" for handler in self._handlers if handler.spec.pattern)
        return list(topics), pattern or None

    # In flight --------------------------------------------------------------------------

    def in_flight(self) -> set[Delivery]:
        """All deliveries that workers run now, and those whose recoveries are about to begin."""
        running = {delivery for worker in self.workers for delivery in worker.deliveries}
        for handler in self._handlers:
            for shards in handler.shards:
                running.update(shards.handed_over)
        return running

    def interrupt(self, deliveries: set[Delivery]) -> int:
        """Cancel the runs of these deliveries; they stay incomplete.

        Returns:
            How many of them were in flight.
        """
        interrupted = 0
        for worker in self.workers:
            affected = deliveries.intersection(worker.deliveries)
            if affected:
                interrupted += len(affected)
                worker.interrupt()
        return interrupted

    def busy(self) -> list[tuple[str, Worker]]:
        """The workers that run something, each with the name of its handler. Safe from any thread."""
        return [
            (handler.spec.name, worker) for handler in self._handlers for worker in handler.workers if worker.deliveries
        ]

    @property
    def replayed(self) -> int:
        """How many records this process has run more than once. Safe from any thread."""
        return sum(handler.counters.replayed for handler in self._handlers)
