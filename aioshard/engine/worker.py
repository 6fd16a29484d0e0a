"""Workers: coroutines that take deliveries, run the handler, and pass failed attempts to the failure handler."""

import asyncio
import contextlib
import contextvars
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

from aioshard.engine.batch_shards import BatchShards
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.failures import FailureHandler
from aioshard.engine.lease import Lease
from aioshard.engine.outcomes import Outcome
from aioshard.engine.shards import DeliveryBatch, Shards
from aioshard.engine.timing import AT_ONCE, QUICK, RunTimes, waited
from aioshard.errors import (
    AioshardError,
    AttemptTimeoutError,
    BatchError,
    CancelledRunError,
    HandlerError,
    InterruptedRunError,
    SchemaNotLoadedError,
    StoppedRunError,
    SwallowedCancellationError,
)
from aioshard.records import Record
from aioshard.schema_registry.registries import Registries

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
    STOP: Final = 4
    """End the run because an operator wants it; the attempt has failed."""
    CANCEL: Final = INTERRUPT | TIME_OUT | STOP
    REFUSE: Final = 8
    """Fail the attempt even if it returns a result, without cancelling it."""


SERVING: contextvars.ContextVar["Worker"] = contextvars.ContextVar("aioshard serving")
"""The worker whose task this is. Tasks and threads that a handler starts copy it, and may outlive the run."""


def refuse_awaitable(result: object, advice: str) -> None:
    """Fail the attempt if its result is an awaitable: nothing awaits it, so its code may not have run.

    Args:
        result: The result of a handler.
        advice: Ends the sentence of the error.

    Raises:
        HandlerError: It is one.
    """
    if not inspect.isawaitable(result):
        return
    if inspect.iscoroutine(result):
        result.close()
    raise HandlerError(f"the handler returned {type(result).__name__}, which is never awaited: {advice}")


AWAIT_IT = "write 'return await …', in the handler and in every function that wraps it"


class Worker(ABC):
    """Coroutine that serves the shards of a handler.

    Cancelling the run (`interrupt`, `time_out`) does not cancel the worker: the handler sees a `CancelledError`, the
    record stays incomplete (I8), and the worker lives on. A handler that swallows the cancellation keeps its worker
    and its shard until it returns, and its result is ignored.

    `_run` and the methods below it handle everything except the plain success of a single record.

    Invariants:
        * A record completes only if its handler returned and its run had not been cancelled.
        * A run, of the handler or a recovery, begins only while our partitions are ours by the clock.
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
        lease: Lease,
        clock: Callable[[], float],
        call: Callable[[Record], Awaitable[object]] | None = None,
        timeout: float | None = None,
        divert: Divert | None = None,
        read: Callable[[Record], Any] | None = None,
        is_observed: bool = False,
        run_ahead: float = 0.0,
        registries: Registries | None = None,
        hands_over: bool = False,
    ) -> None:
        """Create a worker; start `run` as its `task`.

        Args:
            name: Name in logs and explanations.
            shards: Shards to serve.
            invoke: Runs one attempt: of a delivery, or of a batch.
            failures: Handles failed attempts.
            lease: Says whether our partitions are still ours.
            clock: Returns the loop time.
            call: The handler itself if it takes only the record, which saves a call.
            timeout: Seconds that an attempt may take; checked from outside through `overdue`.
            divert: Inspects each delivery first; None if nothing can be diverted before it has failed.
            read: Converts a record of a batch before the attempt, and raises if it cannot; None without conversion.
            is_observed: Whether to store the times and the result of each attempt in its deliveries.
            run_ahead: Seconds for which it may run ahead after `RUN_AHEAD` records, without yielding to the event loop.
            registries: The schema registries of the app, for values that its handler publishes.
            hands_over: Whether recovery workers take the recoveries.
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
        self.waits_for: str | None = None
        """The thing that the attempt awaits before its handler runs, in words; its timeout does not count then."""
        self.abandoned = False
        """Whether the app has stopped, so that the worker ends although a run may outlive it."""
        self.timeout = timeout
        self.registries = registries
        self.lease = lease
        self._batch: DeliveryBatch | None = None
        self._shards = shards
        self._invoke = invoke
        self._call = call
        self._read = read
        self._is_observed = is_observed
        self._run_ahead = run_ahead
        self._hands_over = hands_over
        self.failures = failures
        self._clock = clock
        self._divert = divert
        self._times = RunTimes()
        self._refusal: HandlerError | None = None
        """Why the current run has failed although it may return; set with `Asked.REFUSE`."""
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
        batch = self._batch
        delivery = self.delivery
        if batch is not None:
            return [*batch.deliveries, *batch.left_out]
        return () if delivery is None else (delivery,)

    # Requests -------------------------------------------------------------------------

    @property
    def cancelled(self) -> bool:
        """Whether the current run was cancelled but has not ended."""
        return self.delivery is not None and bool(self.asked & Asked.CANCEL)

    def outlives(self, delivery: Delivery) -> bool:
        """Whether the run of a delivery was cancelled, or its partition is gone, although it has not ended."""
        return self.cancelled or delivery.epoch.gate is Gate.ENDED

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
            and self.waits_for is None
            and not self.cancelled
            and now - self.started > self.timeout
        )

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Exclude a wait from the timeout and the duration of the current attempt.

        Args:
            what: The awaited thing, in words.
        """
        began = self._clock()
        self.waits_for = what
        try:
            yield
        finally:
            self.waits_for = None
            self.started += self._clock() - began

    def time_out(self) -> None:
        """Cancel the current run because of its timeout; its attempt has failed."""
        self._request_end(Asked.TIME_OUT)

    def stop_run(self) -> None:
        """Cancel the current run because an operator wants it; its attempt has failed."""
        self._request_end(Asked.STOP)

    def refuse(self, delivery: Delivery, starts: int, error: HandlerError) -> None:
        """Fail the current run of *delivery* with *error*, even if it returns; the first error counts.

        Does nothing if that run has ended, also while its recovery runs.
        """
        is_current = self.delivery is delivery and delivery.starts == starts and delivery.recovery is None
        if is_current and not self.asked & Asked.REFUSE:
            self.asked |= Asked.REFUSE
            self._refusal = error

    def _request_end(self, request: int) -> None:
        if self.delivery is None or self.asked & request:
            return
        if not self._requests:
            self._cancelling_before = self.task.cancelling()
        self.asked |= request
        self._requests += 1
        self.task.cancel()

    def _refused(self) -> BaseException:
        """Return why the run does not count although it returned."""
        if self.asked == Asked.REFUSE and self._refusal is not None:
            return self._refusal
        return SwallowedCancellationError(str(self._failure_of(self.asked)))

    def _unless_refused(self, error: BaseException) -> BaseException:
        """Return the error of the run; a refusal replaces a `BatchError`, because then no record is complete."""
        refusal = self._refusal
        return error if refusal is None or not isinstance(error, BatchError) else refusal

    def _failure_of(self, asked: int) -> AioshardError:
        """Return the error of an attempt whose run was cancelled for this reason."""
        if asked & Asked.TIME_OUT:
            return AttemptTimeoutError(self.timeout or 0.0)
        if asked & Asked.STOP:
            return StoppedRunError()
        return InterruptedRunError()

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
        now = self._clock()
        # 1. Other members may own our partitions by now.
        if now >= self.lease.due and not self.lease.lasts(now):
            self._shards.defer(batch)
            await self.lease.wait()
            return
        # 2. It takes a recovery, and too many others run that fail or are slow.
        if recovery is not None and not self.failures.may_recover():
            for delivery in self._ended(batch, (head,)):
                self.failures.hold_back(delivery, recovery, self._shards)
            return
        # 3. Its key fails, and enough others run that do.
        if recovery is None and head.is_failing and not self._shards.admits(head):
            return
        self._batch = batch
        self.delivery = head
        self.started = now
        self._start(batch)
        outcome = Outcome.PROCESSED
        try:
            head.raise_refusal()
            # 4. It is an attempt of the handler.
            if recovery is None:
                self.running = running = self._observe(batch) if self._is_observed else self._attempt(batch)
                returned = await running
                if returned is not None:
                    refuse_awaitable(returned, AWAIT_IT)
            # 5. It is a recovery.
            else:
                self.running = recovering = self.failures.recover(head, recovery)
                outcome = await recovering
            if self.asked:
                raise self._refused()  # noqa: TRY301 - handled like what a run raises
        except BaseException as error:  # noqa: BLE001 - _handle_error tells cancellation and exit apart
            self._handle_error(batch, error)
            return
        self._clear_handler_cancellations()
        if recovery is None:
            RunTimes.alone(head.epoch.counts, max(self._clock() - self.started, 0.0))
        else:
            head.outcome = outcome
        self._ended(batch, (), outcome)

    async def _observe(self, batch: DeliveryBatch) -> object:
        """Run the handler for a batch; store the times and the result in its deliveries, however it ends."""
        began = self._clock()
        result: object = None
        try:
            result = await self._attempt(batch)
        finally:
            run = (began, self._clock(), result)
            for delivery in batch.deliveries:
                delivery.run = run
        return result

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
                delivery.epoch.counts.replayed += delivery.begin_attempt()

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
            Those of *failed* that hold their shards, until `FailureHandler` has decided about them.
        """
        self._end_run()
        left = _complete(batch, failed, outcome)
        left += [delivery for delivery in batch.left_out if delivery.epoch.gate is not Gate.ENDED]
        undecided: list[Delivery] = []
        for head in self._shards.end(batch, left):
            if head in failed:
                undecided.append(head)
            else:
                self._shards.resume(head)
        return undecided

    def _end_run(self) -> None:
        self._batch = None
        self.delivery = None
        self.running = None

    def _handle_error(self, batch: DeliveryBatch, error: BaseException) -> None:
        """Handle a batch whose run raised, or returned although it was cancelled: nothing of it is complete (I8).

        Args:
            batch: The batch.
            error: Exception that the run raised; a `SwallowedCancellationError` if it returned.

        Raises:
            BaseException: The worker is being cancelled, or the interpreter is exiting.
        """
        error = self._unless_refused(error)
        asked = self.asked & Asked.CANCEL
        self.asked = asked
        self._refusal = None
        swallowed = isinstance(error, SwallowedCancellationError)
        worker_ends = self._worker_ends(error, asked)
        # 1. The attempt does not count: the worker ends, or the run was interrupted. Its records run again.
        if worker_ends or asked & Asked.INTERRUPT:
            if swallowed:
                self.failures.log.outlived(batch)
            self._end_run()
            if asked:
                for delivery in batch.deliveries:
                    delivery.cancel()
            self._shards.put_back(batch)
            if worker_ends:
                raise self._ending(error, swallowed=swallowed)
            return
        self._clear_handler_cancellations()
        # 2. It ended because its timeout or an operator cancelled it.
        if asked and not swallowed:
            error = self._failure_of(asked)
        # 3. Nobody cancelled it: the handler awaited something that was cancelled.
        elif isinstance(error, asyncio.CancelledError):
            error = CancelledRunError()
        # 4. Otherwise the error is that of the handler, or says that it returned after its cancellation.
        if batch.deliveries[0].recovery is None:
            batch.deliveries[0].epoch.counts.durations.add(max(self._clock() - self.started, 0.0))
        self._failed(batch, error)

    def _worker_ends(self, error: BaseException, asked: int) -> bool:
        """Undo the requested cancellations; return whether the worker ends with the run."""
        # 1. The run was cancelled on request; the worker may be cancelled as well.
        if asked:
            if self._undo_requests():
                return True
        # 2. The worker is being cancelled, and the handler has passed that on.
        elif isinstance(error, asyncio.CancelledError) and self.task.cancelling():
            return True
        # 3. The interpreter is exiting, or the app has stopped without waiting for the run.
        return isinstance(error, _EXITS) or self.abandoned

    def _ending(self, error: BaseException, *, swallowed: bool) -> BaseException:
        """Return the exception with which the worker ends."""
        if swallowed or (self.abandoned and not isinstance(error, _EXITS)):
            return asyncio.CancelledError()
        return error

    def _failed(self, batch: DeliveryBatch, error: BaseException) -> None:
        """Handle a failed attempt of the whole batch; unless it has one delivery, any of them may be to blame."""
        if len(batch.deliveries) == 1 or self.failures.parks(error):
            self._failed_each(batch, dict.fromkeys(batch.deliveries, error))
            return
        alive = [delivery for delivery in batch.deliveries if delivery.epoch.gate is not Gate.ENDED]
        heads = self._ended(batch, frozenset(batch.deliveries))
        if alive:
            self.failures.handle_failed_batch(alive, heads, error, self._shards)

    def _failed_each(self, batch: DeliveryBatch, failed: Mapping[Delivery, BaseException]) -> None:
        """Handle each of *failed* by itself; the rest is complete.

        Of each shard, only the first failed delivery is handled now. Those behind it run again after it, regardless
        of their own errors, because the first failure may have caused them; those that are to be parked do not.
        """
        heads = dict.fromkeys(self._ended(batch, failed))
        for delivery, error in failed.items():
            if delivery not in heads and delivery.epoch.gate is not Gate.ENDED:
                self.failures.count_failed_behind(delivery, error)
        for delivery in heads:
            self.failures.handle_failed(delivery, failed[delivery], self._shards)


def _complete(batch: DeliveryBatch, failed: Collection[Delivery], outcome: Outcome) -> list[Delivery]:
    """Complete the deliveries of a batch that have not failed; return the others, without those of ended epochs."""
    left: list[Delivery] = []
    # Most batches need nothing else.
    if batch.plain and not failed and outcome is Outcome.PROCESSED:
        for delivery in batch.deliveries:
            epoch = delivery.epoch
            if epoch.complete(delivery):
                epoch.counts.processed += 1
        return left
    for delivery in batch.deliveries:
        epoch = delivery.epoch
        # 1. It has failed.
        if delivery in failed:
            if epoch.gate is not Gate.ENDED:
                left.append(delivery)
        # 2. Its handler has succeeded, and it is complete after one more step.
        elif delivery.then is not None and delivery.recovery is None:
            if epoch.gate is not Gate.ENDED:
                delivery.divert(delivery.then)
                left.append(delivery)
        # 3. It is complete.
        elif epoch.complete(delivery):
            epoch.counts.count(outcome)
    return left


class RecordWorker(Worker):
    """Runs the handler for one record at a time."""

    async def run(self) -> None:  # noqa: C901, PLR0912, PLR0915 - the hot path: no calls
        """Serve until cancelled."""
        SERVING.set(self)
        # Local names: looking up an attribute costs time for each record.
        shards = self._shards
        call = self._call
        invoke = self._invoke
        clock = self._clock
        divert = self._divert
        lease = self.lease
        is_observed = self._is_observed
        take = shards.take
        next_after = shards.next_after
        times = self._times
        cancelling = self.task.cancelling
        ahead = 0
        yielded = clock()
        due = AT_ONCE
        epoch: Epoch | None = None
        delivery = take()
        while True:
            # 1. Nothing may start now.
            if delivery is None:
                due = times.close(epoch, self.started, clock())
                await shards.wait()
                delivery = take()
                continue
            if divert is not None:
                divert(delivery)
            # 2. Its next run is not simply an attempt of the handler.
            if delivery.aside:
                due = times.close(epoch, self.started, clock())
                if delivery.recovery is not None and self._hands_over:
                    shards.hand_over(delivery)
                else:
                    await self._run(DeliveryBatch.of_one(delivery))
                ahead += 1
                if ahead >= RUN_AHEAD:
                    ahead = 0
                    await self._yield_to_loop()
                    yielded = clock()
                delivery = take()
                continue
            now = clock()
            # 3. Other members may own our partitions by now.
            if now >= lease.due and not lease.lasts(now):
                due = times.close(epoch, self.started, now)
                shards.defer(DeliveryBatch.of_one(delivery))
                await lease.wait()
                delivery = take()
                continue
            # 4. It is an attempt. The runs before it are accounted for, at most once in 5 ms.
            if now >= due:
                started = self.started
                if due != started + QUICK or epoch is None:
                    due = times.turn(epoch, started, now, delivery)
                else:
                    # They are one slow run. Every run comes here if handlers wait, so `RunTimes.turn` is inlined, with
                    # `Histogram.add` twice: calling it would cost 0.15 µs per record, a twelfth of the worker's time.
                    counts = epoch.counts
                    counts.timed += 1
                    seconds = now - started
                    durations = counts.durations
                    if durations.above < seconds <= durations.up_to:
                        durations.buckets[durations.latest] += 1
                        durations.total += seconds
                    else:
                        durations.add(seconds)
                    times.counts = counts = delivery.epoch.counts
                    times.since = now
                    due = now + QUICK
                    if now >= counts.next_waited:
                        waited(delivery, now)
            epoch = delivery.epoch
            if delivery.offset > epoch.highest_started:  # noqa: PLR1730 - max() costs a call per record
                epoch.highest_started = delivery.offset
            delivery.starts += 1
            self.delivery = delivery
            self.started = now
            try:
                self.running = running = call(delivery.record) if call is not None else invoke(delivery)
                returned = await running
                if returned is not None:
                    refuse_awaitable(returned, AWAIT_IT)
                if self.asked:
                    raise self._refused()  # noqa: TRY301 - as in `_run`
            except BaseException as error:  # noqa: BLE001 - _handle_error tells cancellation and exit apart
                if is_observed:
                    delivery.run = (now, clock(), None)
                due = times.cut(now)
                self._handle_error(DeliveryBatch.of_one(delivery), error)
                delivery = take()
                continue
            if cancelling():
                self._clear_handler_cancellations()
            self.delivery = None
            self.running = None
            if is_observed:  # as `_observe` does, without another coroutine per record
                delivery.run = (now, clock(), returned)
            if epoch.complete(delivery):
                epoch.counts.processed += 1
            # 5. It has succeeded, and the worker may continue, with the same shard first.
            ahead += 1
            if ahead < RUN_AHEAD:
                delivery = next_after(delivery)
                continue
            ahead = 0
            now = clock()
            if now - yielded < self._run_ahead:
                delivery = next_after(delivery)
                continue
            # 6. The same, but heartbeats and other tasks have waited long enough.
            shards.release(delivery)
            due = times.close(epoch, self.started, now)
            await self._yield_to_loop()
            yielded = clock()
            delivery = take()

    def _attempt(self, batch: DeliveryBatch) -> Awaitable[object]:
        return self._invoke(batch.deliveries[0])


class RecoveryWorker(Worker):
    """Takes the recoveries of a handler of single records, which a worker has handed over with their shards.

    A write to another topic takes as long as the brokers need to acknowledge it; no worker of the handler waits for
    that.
    """

    async def run(self) -> None:
        """Serve until cancelled."""
        SERVING.set(self)
        shards = self._shards
        ahead = 0
        while True:
            # In a transaction, a write does not wait for its acknowledgement.
            if ahead >= RUN_AHEAD:
                ahead = 0
                await asyncio.sleep(0)
            delivery = shards.take_handed_over()
            if delivery is None:
                await shards.wait_for_handed_over()
                continue
            ahead += 1
            if self._divert is not None:
                self._divert(delivery)
            # Its key is no longer parked: a worker of the handler takes it.
            if delivery.recovery is None:
                shards.resume(delivery)
            else:
                await self._run(DeliveryBatch.of_one(delivery))

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

    _decodes_in_run = False
    """Whether the attempt converts the records of its batch, because a schema is not known yet."""

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
        self._decodes_in_run = False
        left_out: list[Delivery] = []
        blocked: set[Hashable] = set()
        for delivery in batch.deliveries:
            if self._divert is not None:
                self._divert(delivery)
            if delivery.key not in blocked and self._is_ready(delivery, payloads):
                ready.append(delivery)
            else:
                left_out.append(delivery)
                if delivery.key is not None:
                    blocked.add(delivery.key)
        # A delivery that is alone needs no other run: its recovery begins, or its attempt fails as the conversion did.
        if len(batch.deliveries) > 1:
            batch.deliveries = ready
            batch.left_out = left_out
        if ready and self._read is not None and not self._decodes_in_run:
            batch.payloads = payloads

    def _is_ready(self, delivery: Delivery, payloads: list[object]) -> bool:
        """Append the converted record of a delivery to *payloads*; return whether the delivery is part of the run."""
        # 1. It takes a recovery.
        if delivery.recovery is not None:
            return False
        # 2. The handler takes the record itself.
        if self._read is None:
            return True
        # 3. The handler takes what the record is converted to.
        try:
            payloads.append(self._read(delivery.record))
        except (KeyboardInterrupt, SystemExit):
            raise
        except SchemaNotLoadedError:
            self._decodes_in_run = True  # an attempt can wait for the schema, which other batches then know
            return True
        except BaseException:  # noqa: BLE001 - raised again, and handled, when the record runs alone
            delivery.isolate()
            return False
        return True

    def _failed(self, batch: DeliveryBatch, error: BaseException) -> None:
        if not isinstance(error, BatchError) or batch.deliveries[0].recovery is not None:
            super()._failed(batch, error)
            return
        by_coordinates = {
            (*delivery.record.topic_partition, delivery.record.offset): delivery for delivery in batch.deliveries
        }
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
