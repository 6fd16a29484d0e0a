"""Observation of record outcomes at the moment of completion: for the journal, and for Spark.

Costs nothing without an observer: the engine then uses plain epochs and attempts.
"""

import time
from collections.abc import Awaitable, Callable

from aioshard.engine.batches.batch_worker import InvokeBatch
from aioshard.engine.batches.delivery_batch import DeliveryBatch
from aioshard.engine.buffer import Buffer
from aioshard.engine.counts import TopicCounts
from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.handler import HandlerSpec
from aioshard.engine.worker import Invoke
from aioshard.records import Record, TopicPartition

__all__ = ["Completed", "Observe", "ObservedEpoch", "noted"]

_THE_SAME = 0.01

Completed = Callable[[Delivery], None]
"""Called with each complete delivery; its `outcome`, `run`, `failures` and `failure` say how it ended.

Runs in the event loop for each record, so it must be quick. It must neither raise nor keep the delivery.
"""

Observe = Callable[[HandlerSpec], Completed]
"""Returns the callback for the deliveries of a handler; called once per epoch."""


class ObservedEpoch(Epoch):
    """An epoch that reports the outcomes of its deliveries."""

    def __init__(
        self,
        topic_partition: TopicPartition,
        number: int,
        start: int,
        buffer: Buffer,
        counts: TopicCounts,
        *,
        completed: Completed,
    ) -> None:
        super().__init__(topic_partition, number, start, buffer, counts)
        self._completed = completed

    def complete(self, delivery: Delivery) -> bool:
        """See `Epoch.complete`."""
        if not Epoch.complete(self, delivery):  # super() would make an object per record
            return False
        self._completed(delivery)
        return True


def noted(spec: HandlerSpec, clock: Callable[[], float]) -> HandlerSpec:
    """The same handler, with attempts that store their times and their result in the delivery."""
    if abs(time.monotonic() - clock()) < _THE_SAME:
        clock = time.monotonic  # uvloop's clock counts whole milliseconds
    if spec.batched is not None:
        return spec._replace(batched=spec.batched._replace(invoke=_noted_batch(spec.batched.invoke, clock)))
    if spec.call is not None:
        return spec._replace(call=None, invoke=_noted_call(spec.call, clock))
    return spec._replace(call=None, invoke=_noted_record(spec.attempt, clock))


def _noted_call(call: Callable[[Record], Awaitable[object]], clock: Callable[[], float]) -> Invoke:
    """Do the same as `_noted_record`, with one call less."""

    async def run(delivery: Delivery) -> object:
        began = clock()
        try:
            result = await call(delivery.record)
        except BaseException:
            delivery.run = (began, clock(), None)
            raise
        delivery.run = (began, clock(), result)
        return result

    return run


def _noted_record(attempt: Invoke, clock: Callable[[], float]) -> Invoke:
    async def run(delivery: Delivery) -> object:
        began = clock()
        try:
            result = await attempt(delivery)
        except BaseException:
            delivery.run = (began, clock(), None)
            raise
        delivery.run = (began, clock(), result)
        return result

    return run


def _noted_batch(attempt: InvokeBatch, clock: Callable[[], float]) -> InvokeBatch:
    async def run(batch: DeliveryBatch) -> object:
        began = clock()
        result: object = None
        try:
            result = await attempt(batch)
        finally:
            note = (began, clock(), result)
            for delivery in batch.deliveries:
                delivery.run = note
        return result

    return run
