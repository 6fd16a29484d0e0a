"""Workers: coroutines that take deliveries, run the handler, and pass failed attempts to the failure handler."""

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Final, cast

from aioshard.engine.batch_shards import BatchShards
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.failures import FailureHandler
from aioshard.engine.outcomes import Outcome
from aioshard.engine.shards import DeliveryBatch, Shards
from aioshard.engine.timing import AT_ONCE, RunTimes, waited
from aioshard.errors import (
    AttemptTimeoutError,
    BatchError,
    CancelledRunError,
    HandlerError,
    SwallowedCancellationError,
)
from aioshard.records import Record

Divert = Callable[[Delivery], None]
"""Inspects each delivery before it starts, and may assign it a recovery."""

RUN_AHEAD: Final = 128
"""Number of records that workers process without yielding to the event loop, if handlers never suspend.

Heartbeats and other tasks wait for that many handler runs."""

_EXITS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class Asked:
    """Requests to the current run of a worker, as bits; 0 means none: the hot path checks both with one test.

    Plain integers: testing an `enum.Flag` costs a call per record.
    """

    NOTHING: Final = 0
    INTERRUPT: Final = 1
    """End the run; the record stays incomplete."""
    TIME_OUT: Final = 2
    """End the run; the attempt has failed."""


SERVING: contextvars.ContextVar["Worker"] = contextvars.ContextVar("aioshard serving")
"""The worker whose task this is. Tasks and threads that a handler starts copy it, and may outlive the run."""


class Worker(ABC):
    """Coroutine that serves the shards of a handler.

    Cancelling the run (`interrupt`, `time_out`) does not cancel the worker: the handler sees a `CancelledError`, the
    record stays incomplete (I8), and the worker lives on. A handler that swallows the cancellation keeps its worker
    and its shard until it returns, and its result is ignored.

    `_run` and the methods below it handle everything except the plain success of a single record.

    Invariants:
        * A record completes only if its handler returned and its run had not been cancelled.
        * While `delivery` is set, its shard key is occupied.
    """

    task: asyncio.Task[Any]
    """Runs `run`; set by the code that starts it."""

    def __init__(
        self,
        name: str,
        shards: Shards,
        *,
        invoke: Callable[[Any], Awaitable[object]],
        failures: FailureHandler,
        clock: Callable[[], float],
        call: Callable[[Record], Awaitable[object]] | None = None,
        timeout: float | None = None,
        divert: Divert | None = None,
        read: Callable[[Record], Any] | None = None,
    ) -> None:
        """Create a worker; start `run` as its `task`.

        Args:
            name: Name in logs and explanations.
            shards: Shards to serve.
            invoke: Runs one attempt: of a delivery, or of a batch.
            failures: Handles failed attempts.
            clock: Returns the loop time.
            call: The handler itself if it takes only the record, which saves a call.
            timeout: Seconds that an attempt may take; checked from outside through `overdue`.
            divert: Inspects each delivery first; None if nothing can be diverted before it has failed.
            read: Converts a record of a batch before the attempt, and raises if it cannot; None without conversion.
        """
        self.name = name
        self.delivery: Delivery | None = None
        """The delivery it runs; the first one of a batch."""
        self.running: Awaitable[object] | None = None
        """The awaitable of the current run; shows where a handler hangs."""
        self.started = 0.0
        """Loop time at which the current attempt began."""
        self.asked: int = Asked.NOTHING
        """Pending requests to the current run; see `Asked`."""
        self.timeout = timeout
        self._batch: DeliveryBatch | None = None
        self._shards = shards
        self._invoke = invoke
        self._call = call
        self._read = read
        self.failures = failures
        self._clock = clock
        self._divert = divert
        self._times = RunTimes()
        self._cancelling_before = 0
        self._requests = 0

    @abstractmethod
    async def run(self) -> None:
        """Serve until cancelled."""

    @abstractmethod
    def _attempt(self, batch: DeliveryBatch) -> Awaitable[object]:
        """Run the handler for a batch."""

    @property
    def deliveries(self) -> Sequence[Delivery]:
        """Deliveries that the worker runs now."""
        batch, delivery = self._batch, self.delivery
        if batch is not None:
            return [*batch.deliveries, *batch.left_out]
        return () if delivery is None else (delivery,)

    # Requests -------------------------------------------------------------------------

    @property
    def cancelled(self) -> bool:
        """Whether the current run was cancelled but has not ended."""
        return self.delivery is not None and bool(self.asked)

    def interrupt(self) -> None:
        """Cancel the current run; its record stays incomplete. Does nothing between runs."""
        self._request_end(Asked.INTERRUPT)

    def overdue(self, now: float) -> bool:
        """Return whether the handler has exceeded its timeout and was not cancelled yet."""
        delivery = self.delivery
        return (
            self.timeout is not None
            and delivery is not None
            and delivery.recovery is None
            and not self.asked
            and now - self.started > self.timeout
        )

    def time_out(self) -> None:
        """Cancel the current run; its attempt has failed."""
        self._request_end(Asked.TIME_OUT)

    def _request_end(self, request: int) -> None:
        if self.delivery is None or self.asked & request:
            return
        if not self._requests:
            self._cancelling_before = self.task.cancelling()
        self.asked |= request
        self._requests += 1
        self.task.cancel()

    def _undo_requests(self) -> bool:
        """Undo the requested cancellations; return whether the worker itself is being cancelled as well."""
        self.asked = Asked.NOTHING
        for _ in range(self._requests):
            self.task.uncancel()
        self._requests = 0
        worker_ends = self.task.cancelling() > self._cancelling_before
        if not worker_ends:
            self._clear_handler_cancellations()
        return worker_ends

    def _clear_handler_cancellations(self) -> None:
        """Undo cancellations that a handler requested for its task and left pending, as old timeout libraries do.

        Otherwise the next `CancelledError` that a handler raises would look like a cancellation of the worker.
        """
        while self.task.cancelling():
            self.task.uncancel()

    # Runs -----------------------------------------------------------------------------

    async def _run(self, batch: DeliveryBatch) -> None:
        """Run the handler for a batch, or the recovery of a delivery that is alone, and handle the outcome."""
        head = batch.deliveries[0]
        recovery = head.recovery
        if recovery is not None and not self.failures.may_recover():
            for delivery in self._ended(batch, (head,)):
                self.failures.hold_back(delivery, self._shards)
            return
        self._batch, self.delivery, self.started = batch, head, self._clock()
        self._start(batch)
        outcome = Outcome.PROCESSED
        try:
            if recovery is None:
                self.running = running = self._attempt(batch)
                await running
            else:
                self.running = recovering = self.failures.recover(head, recovery)
                outcome = await recovering
            if self.asked:
                raise SwallowedCancellationError(self.timeout or 0.0)  # noqa: TRY301 - handled like what a run raises
        except BaseException as error:  # noqa: BLE001 - _handle_error tells cancellation and exit apart
            self._handle_error(batch, error)
            return
        self._clear_handler_cancellations()
        if recovery is not None:
            head.outcome = outcome
        else:
            RunTimes.alone(head.epoch.counts, max(self._clock() - self.started, 0.0))
        self._ended(batch, (), outcome)

    def _start(self, batch: DeliveryBatch) -> None:
        """Record that the deliveries of a batch start."""
        runs = batch.deliveries[0].recovery is None
        if runs:
            waited(batch.deliveries[0], self.started)
        for delivery in batch.deliveries:
            epoch = delivery.epoch
            if delivery.offset > epoch.highest_started:  # noqa: PLR1730 - max() costs a call per record
                epoch.highest_started = delivery.offset
            delivery.starts += runs
        if runs and not batch.plain:
            for delivery in batch.deliveries:
                self.failures.counters.replayed += delivery.cancelled
                delivery.cancelled = False
                delivery.aside = delivery.then is not None

    async def _yield_to_loop(self) -> None:
        """Yield to the event loop between two runs, for handlers that never suspend."""
        self._shards.yielding += 1
        try:
            await asyncio.sleep(0)
        finally:
            self._shards.yielding -= 1

    # Outcomes -------------------------------------------------------------------------

    def _ended(
        self, batch: DeliveryBatch, failed: Collection[Delivery] = (), outcome: Outcome = Outcome.PROCESSED
    ) -> list[Delivery]:
        """Complete the deliveries of a batch that have not failed, and let its shards resume.

        Returns:
            Those of *failed* that hold their shards; the caller must decide about them.
        """
        self._batch = self.delivery = self.running = None
        left = _complete(batch, failed, outcome)
        left_out = [delivery for delivery in batch.left_out if delivery.epoch.gate is not Gate.ENDED]
        heads = self._shards.end(batch, [*left, *left_out])
        for delivery in left:
            if delivery not in failed and delivery.then is not None:
                delivery.divert(delivery.then)
        for delivery in heads:
            if delivery not in failed:
                self._shards.resume(delivery)
        return [delivery for delivery in heads if delivery in failed]

    def _handle_error(self, batch: DeliveryBatch, error: BaseException) -> None:
        """Handle a batch whose run raised, or returned although it was cancelled: nothing of it is complete (I8).

        Args:
            batch: The batch.
            error: Exception that the run raised; a `SwallowedCancellationError` if it returned.

        Raises:
            BaseException: The worker is being cancelled, or the interpreter is exiting.
        """
        asked = self.asked
        swallowed = isinstance(error, SwallowedCancellationError)
        cancelled = isinstance(error, asyncio.CancelledError)
        worker_ends = self._undo_requests() if asked else cancelled and bool(self.task.cancelling())
        worker_ends |= isinstance(error, _EXITS)
        if worker_ends or asked & Asked.INTERRUPT:
            if swallowed:
                self.failures.outlived(batch, error)
            self._batch = self.delivery = self.running = None
            if asked:
                for delivery in batch.deliveries:
                    delivery.cancelled = delivery.aside = True
            self._shards.put_back(batch)
            if worker_ends:
                raise asyncio.CancelledError if swallowed else error
            return
        self._clear_handler_cancellations()
        if asked and not swallowed:
            error = AttemptTimeoutError(self.timeout or 0.0)
        elif cancelled:
            error = CancelledRunError()
        if batch.deliveries[0].recovery is None:
            batch.deliveries[0].epoch.counts.durations.add(max(self._clock() - self.started, 0.0))
        self._failed(batch, error)

    def _failed(self, batch: DeliveryBatch, error: BaseException) -> None:
        """Handle a failed attempt of the whole batch; unless it has one delivery, any of them may be to blame."""
        if len(batch.deliveries) == 1:
            self._failed_each(batch, {batch.deliveries[0]: error})
            return
        alive = [delivery for delivery in batch.deliveries if delivery.epoch.gate is not Gate.ENDED]
        heads = self._ended(batch, frozenset(batch.deliveries))
        if alive:
            self.failures.failed_together(alive, heads, error, self._shards)

    def _failed_each(self, batch: DeliveryBatch, failed: Mapping[Delivery, BaseException]) -> None:
        """Handle each of *failed* by itself; the rest is complete.

        Of each shard, only the first failed delivery is handled now. Those behind it run again after it, regardless
        of their own errors: the first failure may have caused them.
        """
        heads = dict.fromkeys(self._ended(batch, failed))
        for delivery, error in failed.items():
            if delivery not in heads and delivery.epoch.gate is not Gate.ENDED:
                self.failures.failed_behind(delivery, error)
        for delivery in heads:
            if self.failures.failed(delivery, failed[delivery], self._shards):
                self._shards.resume(delivery)


def _complete(batch: DeliveryBatch, failed: Collection[Delivery], outcome: Outcome) -> list[Delivery]:
    """Complete the deliveries of a batch that have not failed; return the others, without those of ended epochs."""
    left: list[Delivery] = []
    if batch.plain and not failed and outcome is Outcome.PROCESSED:
        for delivery in batch.deliveries:  # most batches need nothing else
            epoch = delivery.epoch
            if epoch.complete(delivery):
                epoch.counts.processed += 1
        return left
    for delivery in batch.deliveries:
        if delivery in failed or (delivery.then is not None and delivery.recovery is None):
            if delivery.epoch.gate is not Gate.ENDED:
                left.append(delivery)
        elif delivery.epoch.complete(delivery):
            delivery.epoch.counts.count(outcome)
    return left


class RecordWorker(Worker):
    """Runs the handler for one record at a time."""

    async def run(self) -> None:  # noqa: C901, PLR0915 - the hot path: no calls
        """Serve until cancelled."""
        SERVING.set(self)
        shards, call, invoke, clock, divert = self._shards, self._call, self._invoke, self._clock, self._divert
        take, next_after, times = shards.take, shards.next_after, self._times
        cancelling = self.task.cancelling
        ahead, due = 0, AT_ONCE
        epoch: Epoch | None = None
        delivery = take()
        while True:
            if delivery is None:
                due = times.close(epoch, self.started, clock())
                await shards.wait()
                delivery = take()
                continue
            if divert is not None:
                divert(delivery)
            if delivery.aside:
                due = times.close(epoch, self.started, clock())
                await self._run(DeliveryBatch.of_one(delivery))
                delivery = take()
                continue
            now = clock()
            if now >= due:
                due = times.turn(epoch, self.started, now, delivery)
            epoch = delivery.epoch
            if delivery.offset > epoch.highest_started:  # noqa: PLR1730 - max() costs a call per record
                epoch.highest_started = delivery.offset
            delivery.starts += 1
            self.delivery = delivery
            self.started = now
            try:
                self.running = running = call(delivery.record) if call is not None else invoke(delivery)
                await running
                if self.asked:
                    raise SwallowedCancellationError(self.timeout or 0.0)  # noqa: TRY301 - as in `_run`
            except BaseException as error:  # noqa: BLE001 - _handle_error tells cancellation and exit apart
                due = times.cut(now)
                self._handle_error(DeliveryBatch.of_one(delivery), error)
                delivery = take()
                continue
            if cancelling():
                self._clear_handler_cancellations()
            self.delivery = self.running = None
            if epoch.complete(delivery):
                epoch.counts.processed += 1
            ahead += 1
            if ahead < RUN_AHEAD:
                delivery = next_after(delivery)
                continue
            ahead = 0
            shards.release(delivery)
            due = times.close(epoch, self.started, clock())
            await self._yield_to_loop()
            delivery = take()

    def _attempt(self, batch: DeliveryBatch) -> Awaitable[object]:
        return self._invoke(batch.deliveries[0])


class BatchWorker(Worker):
    """Runs the handler for one batch at a time.

    A run that returns completes all records of its batch. After a `BatchError`, the records that it names have failed,
    those behind them in their shards run again, and the others are complete. Any other exception is one failed attempt
    of all records: they run again in smaller batches, because any of them may be to blame. A record is given up only
    when a `BatchError` names it, or when it fails alone in its batch.

    A delivery that takes a recovery (a dead letter, a skip) comes alone; see `BatchShards`.
    """

    async def run(self) -> None:
        """Serve until cancelled."""
        SERVING.set(self)
        shards = cast("BatchShards", self._shards)
        ahead = 0
        while True:
            batch = shards.take_batch()
            if batch is None:
                await shards.wait()
                continue
            ahead += len(batch.deliveries)
            if self._divert is not None or self._read is not None:
                self._prepare(batch)
            if batch.deliveries:
                await self._run(batch)
            else:
                self._ended(batch)
            if ahead >= RUN_AHEAD:
                ahead = 0
                await self._yield_to_loop()

    def _attempt(self, batch: DeliveryBatch) -> Awaitable[object]:
        return self._invoke(batch)

    def _prepare(self, batch: DeliveryBatch) -> None:
        """Convert the records for the handler, and leave deliveries that are not ready out of the run.

        These are diverted deliveries, records that cannot be converted (they will fail in a run of their own), and the
        deliveries behind them in their shards. Raising a `BatchError` instead would complete records behind a bad one
        of the same key; failing the whole batch would cost every other record an attempt.
        """
        ready: list[Delivery] = []
        payloads: list[object] = []
        left_out: list[Delivery] = []
        blocked: set[Hashable] = set()
        for delivery in batch.deliveries:
            if self._divert is not None:
                self._divert(delivery)
            is_ready = delivery.recovery is None and delivery.key not in blocked
            if is_ready and self._read is not None:
                try:
                    payloads.append(self._read(delivery.record))
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException:  # noqa: BLE001 - raised again, and handled, when the record runs alone
                    is_ready, delivery.alone = False, True
            if is_ready:
                ready.append(delivery)
            else:
                left_out.append(delivery)
                if delivery.key is not None:
                    blocked.add(delivery.key)
        if len(batch.deliveries) > 1:
            batch.deliveries, batch.left_out = ready, left_out
        if ready and self._read is not None:
            batch.payloads = payloads

    def _failed(self, batch: DeliveryBatch, error: BaseException) -> None:
        if not isinstance(error, BatchError) or batch.deliveries[0].recovery is not None:
            super()._failed(batch, error)
            return
        by_coordinates = {(*d.record.topic_partition, d.record.offset): d for d in batch.deliveries}
        failed: dict[Delivery, BaseException] = {}
        for record, reason in error.errors.items():
            delivery = by_coordinates.get((*record.topic_partition, record.offset))
            if delivery is None:
                message = (
                    f"BatchError names {record.topic}/{record.partition}/{record.offset}, which is not among the "
                    f"{len(by_coordinates)} records of its batch: use records of the list that the handler received"
                )
                super()._failed(batch, HandlerError(message))
                return
            failed[delivery] = CancelledRunError() if isinstance(reason, asyncio.CancelledError) else reason
        self._failed_each(batch, failed)
