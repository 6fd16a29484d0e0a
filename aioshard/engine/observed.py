"""What became of each record, told at the moment when it is complete: for the journal, and for Spark.

Costs nothing where nobody observes: the epochs and the attempts of an engine are others then.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from aioshard.engine.batches.delivery_batch import DeliveryBatch
from aioshard.engine.buffer import Buffer
from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.handler import HandlerSpec
from aioshard.records import TopicPartition

__all__ = ["Observe", "ObservedEpoch", "noted"]

T = TypeVar("T")

Observe = Callable[[HandlerSpec, Delivery], None]
"""Told of each delivery that is complete: `outcome`, `run`, `failures` and `failure` say how it came to that.

Called in the event loop for each record, so it has to be quick; it must not raise, nor keep the delivery.
"""


class ObservedEpoch(Epoch):
    """An epoch that tells what becomes of its deliveries."""

    def __init__(
        self,
        topic_partition: TopicPartition,
        number: int,
        start: int,
        buffer: Buffer,
        *,
        completed: Callable[[Delivery], None],
    ) -> None:
        super().__init__(topic_partition, number, start, buffer)
        self._completed = completed

    def complete(self, delivery: Delivery) -> bool:
        """See `Epoch.complete`."""
        if not super().complete(delivery):
            return False
        self._completed(delivery)
        return True


def noted(spec: HandlerSpec, clock: Callable[[], float]) -> HandlerSpec:
    """The same handler; each of its attempts leaves a note of its times and its result with the delivery."""

    def wrap(attempt: Callable[[T], Awaitable[object]]) -> Callable[[T], Awaitable[object]]:
        async def run(given: T) -> object:
            began = clock()
            result: object = None
            try:
                result = await attempt(given)
            finally:
                note = (began, clock(), result)
                if isinstance(given, Delivery):
                    given.run = note
                elif isinstance(given, DeliveryBatch):
                    for delivery in given.deliveries:
                        delivery.run = note
            return result

        return run

    return spec.through(wrap)
