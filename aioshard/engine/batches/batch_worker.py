"""Workers that run the handler for a batch of records and settle the outcome of each record."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from aioshard.engine.batches.batch_shards import BatchShards
from aioshard.engine.batches.delivery_batch import DeliveryBatch
from aioshard.engine.epoch import Delivery, Gate
from aioshard.engine.failing.settling import Settlement
from aioshard.engine.outcomes import Detour, Outcome
from aioshard.engine.timing import waited
from aioshard.engine.worker import RUN_AHEAD, Asked, Divert, Worker
from aioshard.errors import BatchError, CancelledRunError, HandlerError, SwallowedCancellationError
from aioshard.records import Record

__all__ = ["BatchWorker", "InvokeBatch"]

InvokeBatch = Callable[[DeliveryBatch], Awaitable[object]]
"""Runs one attempt of a batch."""


class BatchWorker(Worker):
    """Runs the handler for one batch at a time.

    A run that returns completes all records of its batch. A run that raises `BatchError` completes all records that
    the error does not name. Any other exception is one failed attempt of all records: they run again in smaller
    batches. A record is given up only when it fails alone in its batch; otherwise any record may be to blame.

    A delivery that takes a detour (a dead letter, a skip) comes alone; see `BatchShards`.
    """

    def __init__(
        self,
        name: str,
        shards: BatchShards,
        *,
        invoke: InvokeBatch,
        settlement: Settlement,
        clock: Callable[[], float],
        timeout: float | None = None,
        divert: Divert | None = None,
        read: Callable[[Record], Any] | None = None,
    ) -> None:
        """Create a worker; `run` is its task.

        Args:
            name: Name in logs and explanations.
            shards: Shards to serve.
            invoke: Runs an attempt.
            settlement: Handles failed attempts.
            clock: Returns the loop time.
            timeout: Seconds that an attempt of a whole batch may take; checked from outside through `overdue`.
            divert: Inspects each delivery before it starts; None if nothing can be diverted before it has failed.
            read: Converts a record for the handler, and raises if it cannot; None if records are not converted.
        """
        super().__init__(name, settlement=settlement, clock=clock, timeout=timeout)
        self._shards = shards
        self._invoke = invoke
        self._divert = divert
        self._read = read
        self._batch: DeliveryBatch | None = None

    @property
    def deliveries(self) -> Sequence[Delivery]:
        """Deliveries that the worker runs now."""
        batch = self._batch
        return () if batch is None else batch.deliveries

    async def run(self) -> None:
        """Serve until cancelled or retired."""
        self._task = asyncio.current_task()
        shards = self._shards
        ahead = 0
        while not self.asked:  # between two runs, only `retire` can set it
            batch = shards.take_batch()
            if batch is None:
                await shards.wait()
                continue
            if self._divert is not None:
                self._divert_some(batch, self._divert)
            if self._read is not None:
                self._read_all(batch, self._read)
            ahead += len(batch.deliveries)
            if batch.deliveries:
                await self._run(batch)
            else:
                shards.end(batch)
            if ahead >= RUN_AHEAD:
                ahead = 0
                await self._let_the_loop_turn()

    async def _let_the_loop_turn(self) -> None:
        """Yield to the event loop between two batches, for handlers that never suspend."""
        self._shards.yielding += 1
        try:
            await asyncio.sleep(0)
        finally:
            self._shards.yielding -= 1

    def _divert_some(self, batch: DeliveryBatch, divert: Divert) -> None:
        for delivery in batch.deliveries:
            divert(delivery)
        if len(batch.deliveries) > 1 and any(delivery.detour is not None for delivery in batch.deliveries):
            self._shards.cut(batch, lambda delivery: delivery.detour is not None)

    def _read_all(self, batch: DeliveryBatch, read: Callable[[Record], Any]) -> None:
        """Convert the records for the handler; a record that cannot be converted runs alone, and fails then."""
        if batch.deliveries and batch.deliveries[0].detour is not None:
            return
        payloads: dict[Delivery, object] = {}
        for delivery in batch.deliveries:
            try:
                payloads[delivery] = read(delivery.record)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # noqa: BLE001, S112 - raised again, and judged, when it runs
                continue
        if len(payloads) < len(batch.deliveries):
            if len(batch.deliveries) == 1:
                return
            self._shards.cut(batch, lambda delivery: delivery not in payloads)
        batch.payloads = [payloads[delivery] for delivery in batch.deliveries]

    async def _run(self, batch: DeliveryBatch) -> None:
        """Run the handler for a batch, or the detour of a delivery that is alone, and settle the outcome."""
        head = batch.deliveries[0]
        if head.detour is not None and not self._settlement.begin_detour(head):
            for delivery in self._ended(batch, (head,)):
                self._settlement.hold_back(delivery, self._shards)
            return
        self._batch, self.delivery, self.started = batch, head, self._clock()
        self._start(batch)
        outcome = Outcome.PROCESSED
        try:
            if head.detour is not None:
                outcome = await self._take_detour(head, head.detour)
            else:
                self.running = running = self._invoke(batch)
                await running
        except BaseException as error:  # noqa: BLE001 - _judge tells cancellation and exit apart
            self._ended_badly(batch, error)
            return
        asked = self.asked & (Asked.INTERRUPT | Asked.TIME_OUT)
        if asked:
            self._swallowed(batch, asked)
            return
        self._forget_what_the_handler_asked()
        if head.detour is not None:
            head.outcome = outcome
        else:
            head.epoch.counts.durations.add(max(self._clock() - self.started, 0.0))
        self._ended(batch, (), outcome)

    async def _take_detour(self, delivery: Delivery, detour: Detour) -> Outcome:
        succeeded = False
        try:
            self.running = taken = detour.take(delivery)
            outcome = await taken
            succeeded = True
        finally:
            self._settlement.end_detour(delivery, succeeded=succeeded)
        return outcome

    def _start(self, batch: DeliveryBatch) -> None:
        """Record that the deliveries of a batch start."""
        runs = batch.deliveries[0].detour is None
        if runs:
            waited(batch.deliveries[0], self.started)
        for delivery in batch.deliveries:
            epoch = delivery.epoch
            if delivery.offset > epoch.highest_started:  # noqa: PLR1730 - max() costs a call per record
                epoch.highest_started = delivery.offset
            delivery.starts += runs
        if runs and not batch.plain:
            for delivery in batch.deliveries:
                self._settlement.counters.replayed += delivery.cancelled
                delivery.cancelled = False
                delivery.aside = delivery.then is not None

    # Outcomes ---------------------------------------------------------------------

    def _ended(
        self, batch: DeliveryBatch, failed: Collection[Delivery], outcome: Outcome = Outcome.PROCESSED
    ) -> list[Delivery]:
        """Complete the deliveries of a batch that have not failed, and let its shards resume.

        Returns:
            Those of *failed* that hold their shards; the caller must decide about them.
        """
        self._batch = self.delivery = self.running = None
        left: list[Delivery] = []
        if batch.plain and not failed and outcome is Outcome.PROCESSED:
            _processed(batch.deliveries)  # most batches need nothing else
        else:
            for delivery in batch.deliveries:
                if delivery in failed or (delivery.then is not None and delivery.detour is None):
                    if delivery.epoch.gate is not Gate.ENDED:
                        left.append(delivery)
                elif delivery.epoch.complete(delivery):
                    delivery.epoch.counts.count(outcome)
        heads = self._shards.end(batch, left)
        for delivery in left:
            if delivery not in failed and delivery.then is not None:
                delivery.divert(delivery.then)
        for delivery in heads:
            if delivery not in failed:
                self._shards.go_on(delivery)
        return [delivery for delivery in heads if delivery in failed]

    def _ended_badly(self, batch: DeliveryBatch, error: BaseException) -> None:
        """Settle a batch whose run raised.

        Raises:
            BaseException: *error* itself, if the worker is being cancelled or the interpreter is exiting.
        """
        ending = self._judge(error)
        if ending.failure is None:
            self._put_back(batch, interrupted=ending.interrupted)
            if ending.fatal:
                raise error
            return
        if batch.deliveries[0].detour is None:
            self._note_failed(batch.deliveries[0])
        if isinstance(ending.failure, BatchError) and batch.deliveries[0].detour is None:
            self._failed_in_part(batch, ending.failure)
        else:
            self._failed(batch, ending.failure)

    def _put_back(self, batch: DeliveryBatch, *, interrupted: bool) -> None:
        self._batch = self.delivery = self.running = None
        if interrupted:
            for delivery in batch.deliveries:
                delivery.cancelled = delivery.aside = True
        self._shards.put_back(batch)

    def _swallowed(self, batch: DeliveryBatch, asked: int) -> None:
        """Settle a batch whose handler returned although its run was cancelled: nothing is complete (I8)."""
        ending = self._take_back_requests()
        if asked & Asked.INTERRUPT:
            self._settlement.outlived(batch, batch.deliveries)
            self._put_back(batch, interrupted=True)
        else:
            error = SwallowedCancellationError(self.timeout or 0.0)
            self._note_failed(batch.deliveries[0])
            if len(batch.deliveries) > 1:
                self._failed(batch, error)
            else:
                for delivery in self._ended(batch, batch.deliveries):
                    self._settlement.swallowed(delivery, error, self._shards)
        if ending:
            raise asyncio.CancelledError

    def _failed(self, batch: DeliveryBatch, error: BaseException) -> None:
        """Settle a failed attempt of the whole batch; unless it has one delivery, any of them may be to blame."""
        if len(batch.deliveries) == 1:
            self._settle(batch, {batch.deliveries[0]: error})
            return
        alive = [delivery for delivery in batch.deliveries if delivery.epoch.gate is not Gate.ENDED]
        heads = self._ended(batch, frozenset(batch.deliveries))
        if alive:
            self._settlement.failed_together(alive, heads, error, self._shards)

    def _failed_in_part(self, batch: DeliveryBatch, error: BatchError) -> None:
        """Settle the deliveries that the handler has named as failed; the rest is complete."""
        by_place = {(*d.record.topic_partition, d.record.offset): d for d in batch.deliveries}
        failed: dict[Delivery, BaseException] = {}
        for record, reason in error.errors.items():
            delivery = by_place.get((*record.topic_partition, record.offset))
            if delivery is None:
                message = (
                    f"BatchError names {record.topic}/{record.partition}/{record.offset}, which is not in its batch of "
                    f"{len(by_place)} record(s): name records of the list that the handler was given"
                )
                self._failed(batch, HandlerError(message))
                return
            failed[delivery] = CancelledRunError() if isinstance(reason, asyncio.CancelledError) else reason
        self._settle(batch, failed)

    def _settle(self, batch: DeliveryBatch, failed: Mapping[Delivery, BaseException]) -> None:
        """Settle each of *failed* by itself; the rest is complete.

        Of each shard, only the first failed delivery is settled now. Those behind it run again after it, regardless
        of their own errors: the first failure may have caused them.
        """
        heads = dict.fromkeys(self._ended(batch, failed))
        for delivery, error in failed.items():
            if delivery not in heads and delivery.epoch.gate is not Gate.ENDED:
                self._settlement.failed_behind(delivery, error)
        for delivery in heads:
            if self._settlement.failed(delivery, failed[delivery], self._shards):
                self._shards.go_on(delivery)


def _processed(deliveries: Sequence[Delivery]) -> None:
    """Complete and count the deliveries that a handler has processed."""
    for delivery in deliveries:
        epoch = delivery.epoch
        if epoch.complete(delivery):
            epoch.counts.processed += 1
