"""Observation of record outcomes at the moment of completion: for the journal, and for Spark.

Costs nothing without an observer: the engine then uses plain epochs and attempts.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import Handler
from aioshard.engine.partition import Partition
from aioshard.engine.timing import precise

Completed = Callable[[Delivery], None]
"""Called with each complete delivery; its `outcome`, `run`, `failures` and `failure` say how it ended.

Runs in the event loop for each record, so it must be quick. It must neither raise nor keep the delivery.
"""

Observe = Callable[[Handler], Completed]
"""Returns the callback for the deliveries of a handler; called once per epoch."""


class ObservedPartition(Partition):
    """A partition that reports the outcomes of its deliveries to `completed`."""

    completed: Completed

    def complete(self, delivery: Delivery) -> bool:
        """See `Epoch.complete`."""
        if not Partition.complete(self, delivery):  # super() would make an object per record
            return False
        self.completed(delivery)
        return True


def timed(spec: Handler, clock: Callable[[], float]) -> Handler:
    """The same handler, with attempts that store their times and their result in the delivery."""
    clock, is_batch = precise(clock), spec.batch is not None

    def wrap(attempt: Callable[[Any], Awaitable[object]]) -> Callable[[Any], Awaitable[object]]:
        async def run(argument: Any) -> object:
            began = clock()
            result: object = None
            try:
                result = await attempt(argument)
            finally:
                times = (began, clock(), result)
                for delivery in argument.deliveries if is_batch else (argument,):
                    delivery.run = times
            return result

        return run

    return spec.through(wrap)
