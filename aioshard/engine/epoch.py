"""The records of one uninterrupted ownership of a partition: which are incomplete, and which may start."""

import asyncio
import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from aioshard.core.finished_offsets import Run, beyond, joined
from aioshard.core.flow import Usage
from aioshard.core.offsets import OffsetTracker
from aioshard.core.publishing import Coverage, Span
from aioshard.core.sharding import ShardKey
from aioshard.core.text import message_of
from aioshard.engine.buffer import Buffer
from aioshard.engine.counts import TopicCounts
from aioshard.engine.outcomes import PROCESSED, Block, FailedAttempt, Outcome, Recovery
from aioshard.errors import DecodeError, MessageRefusedError
from aioshard.ports import FetchedBatch, Message, record_size
from aioshard.records import Record, TopicPartition


class Gate(enum.IntEnum):
    """Whether records of an epoch may start. OPEN is 0, so the hot path can test `if epoch.gate`."""

    OPEN = 0
    PAUSED = 1
    """Ours, but only a probe or a recovery may start: the application paused it, or a circuit breaker is open."""
    CLOSED = 2
    """The partition was revoked or is not resolved yet: only records that a drain waits for may start."""
    ENDED = 3
    """The ownership has ended: completions are ignored."""


class MeasuredRun(NamedTuple):
    """An attempt of the handler, measured because outcomes are observed."""

    began: float
    """In loop time, as `ended`."""
    ended: float
    result: Any  # mypyc finds no `object` in the annotations of a named tuple
    """The value that the handler returned."""

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.ended - self.began


class Delivery:
    """A record on its way through the engine.

    Belongs to its epoch: an outcome that arrives after the epoch has ended changes nothing (I5).
    """

    __slots__ = (
        "__dict__",
        "arrived",
        "aside",
        "epoch",
        "key",
        "offset",
        "outgoing",
        "record",
        "run",
        "size",
        "starts",
    )

    # State of an unusual course, which only the methods below change: class attributes cost nothing per record.
    failures: int = 0
    """How many attempts have failed; cancelled runs do not count."""
    failure: FailedAttempt | None = None
    """The latest failed attempt."""
    postponed: int = 0
    """How often it could not run because of a schema registry; no attempt was used."""
    successes_before: int = 0
    """How many records of its handler had succeeded when it first failed."""
    recovery: Recovery | None = None
    """Taken instead of the next run."""
    then: Recovery | None = None
    """Taken after the handler has succeeded, before the record is complete."""
    recovery_failures: int = 0
    """How often the recovery has failed."""
    recovery_error: str | None = None
    """Why it failed last, or was held back; None before that."""
    refusal: DecodeError | MessageRefusedError | None = None
    """The error with which its next run fails, without running anything; see `refuse`."""
    cancelled: bool = False
    """Whether its latest run was cancelled, so that the next one counts as a replay."""
    alone: bool = False
    """Whether it must not be batched with others."""
    is_failing: bool = False
    """Whether the latest run of its key had failed when this was set; see `Shards.admits`."""

    block: Block | None = None
    """Why it holds its shard without running; `Shards` sets it."""
    outcome: Outcome = PROCESSED
    """How it ended, once it has."""
    batch_offsets: Sequence[int] = ()
    """Offsets of the records of its batch, if `outgoing` has the messages of several."""

    def __init__(self, record: Record, epoch: "Epoch", key: ShardKey, size: int, arrived: float) -> None:
        self.record = record
        self.offset = record.offset
        self.epoch = epoch
        self.key = key
        self.size = size
        self.arrived = arrived
        self.aside = False
        """Whether its next run is not simply an attempt of the handler: a worker must look at its state first.

        A slot: Python 3.11 looks up defaults of the class slowly, and this is read once per record."""
        self.starts = 0
        """How often a worker has started it."""
        self.outgoing: Sequence[Message] = ()
        """With exactly-once processing, the messages that become visible with its completion.

        A slot: otherwise each record would get a dictionary, which the garbage collector visits."""

    run: tuple[float, float, object]
    """The fields of `MeasuredRun` for the latest attempt, as a plain tuple that costs little per record.

    Missing before the first attempt, and always without an observer; see `measured_run`."""

    failed_span: object = None
    """Identifies the span of the latest failed attempt, if attempts are traced."""

    def __repr__(self) -> str:
        """`topic/partition/offset`, the form in statistics and messages."""
        return f"{self.record.topic}/{self.record.partition}/{self.record.offset}"

    def measured_run(self) -> MeasuredRun | None:
        """Return the latest attempt; None before the first one, and without an observer."""
        run = getattr(self, "run", None)
        return None if run is None else MeasuredRun(*run)

    @property
    def may_start(self) -> bool:
        """Whether it may start now: freely, for a drain, as the probe or for a recovery."""
        return not self.epoch.gate or self.epoch.may_start(self)

    @property
    def may_run_again(self) -> bool:
        """Whether it may start now after a run that was cancelled or failed: a drain does not wait for another one."""
        return self.epoch.gate is not Gate.CLOSED and self.may_start

    # Transitions ------------------------------------------------------------------

    def begin_attempt(self) -> bool:
        """Begin an attempt of the handler; return whether it replays a run that was cancelled."""
        replays = self.cancelled
        self.cancelled = False
        self._update_aside()
        return replays

    def cancel(self) -> None:
        """End the run without a result: the next one replays it."""
        self.cancelled = True
        self.aside = True

    def fail(self, error: BaseException, succeeded: int) -> FailedAttempt:
        """End an attempt with an error.

        Args:
            error: The exception.
            succeeded: How many records of its handler have succeeded so far.
        """
        if not self.failures:
            self.successes_before = succeeded
        self.failures += 1
        self.mark_failing()
        self.failure = FailedAttempt(type(error).__name__, message_of(error), self.failures)
        return self.failure

    def postpone(self) -> int:
        """End a run that was not an attempt; return how often that has happened."""
        self.postponed += 1
        self.mark_failing()
        return self.postponed

    def mark_failing(self) -> None:
        """Let a worker ask its shards first whether it may run: the latest run of its key failed."""
        self.is_failing = True
        self.aside = True

    def fail_recovery(self, reason: str | None) -> int:
        """End a recovery with an error; return how often it has failed.

        Args:
            reason: Why it failed; None if it only waits for something else.
        """
        self.recovery_failures += 1
        self.recovery_error = reason
        return self.recovery_failures

    def delay_recovery(self, reason: str) -> None:
        """Note why a recovery that has not failed yet does not begin."""
        if self.recovery_error is None:
            self.recovery_error = reason

    def divert(self, recovery: Recovery) -> None:
        """Make the next worker take *recovery* instead of running the handler."""
        self.recovery = recovery
        self.recovery_failures = 0
        self.recovery_error = None
        self.aside = True

    def withdraw_recovery(self) -> None:
        """Make the next worker run the handler after all; it has not failed."""
        self.recovery = None

    def finish_with(self, recovery: Recovery) -> None:
        """Take *recovery* once the handler has succeeded: only then is the record complete."""
        self.then = recovery
        self.aside = True

    def isolate(self) -> None:
        """Never run it in a batch with others."""
        self.alone = True

    def refuse(self, error: DecodeError | MessageRefusedError) -> None:
        """Make the next run fail with *error*, without running anything.

        A `DecodeError` lasts: every attempt fails with it, and recoveries run as usual. A refused message fails only
        one run, be it an attempt or a recovery: the next one may publish something else.
        """
        self.refusal = error
        self.alone = True
        self.aside = True

    def raise_refusal(self) -> None:
        """Raise the error of `refuse` if it applies to the run that begins now."""
        refusal = self.refusal
        if isinstance(refusal, MessageRefusedError):
            self.refusal = None
            raise refusal from None
        if refusal is not None and self.recovery is None:
            raise refusal from None

    def release(self, recovery: Recovery | None) -> None:
        """Begin again with all attempts, or with *recovery*, because an operator wants it."""
        self.failures = 0
        self.postponed = 0
        self.recovery_failures = 0
        self.recovery_error = None
        self.recovery = recovery
        self._update_aside()

    def resume_after(self, past: "PastFailures") -> None:
        """Continue where the delivery of the same record in the last epoch ended."""
        self.failures = past.failures
        self.failure = past.failure
        if past.recovery is not None:
            self.divert(past.recovery)
            self.recovery_failures = past.recovery_failures

    def fail_with_batch(self, error: MessageRefusedError) -> None:
        """Count a run of its batch as a failed attempt: it runs again, in a smaller batch."""
        self.fail(error, 0)
        self.aside = True

    def drop_messages(self) -> None:
        """Forget the messages of a run that does not count."""
        self.outgoing = ()
        self.batch_offsets = ()

    def _update_aside(self) -> None:
        self.aside = (
            self.cancelled
            or self.is_failing
            or self.recovery is not None
            or self.then is not None
            or self.refusal is not None
        )


class PastFailures(NamedTuple):
    """The failures of a record that then completed."""

    failures: int
    failure: FailedAttempt
    recovery: Recovery | None
    """The recovery that completed it; None for its handler."""
    recovery_failures: int


class Outputs(NamedTuple):
    """The messages of one run for a transaction that covers its records, and how these records ended.

    One waits per record until its transaction ends, so it refers to as few objects as possible: the garbage collector
    visits them all.
    """

    messages: Sequence[Message]
    size: int
    """Bytes, as the buffer counts them."""
    offset: int
    """Offset of the record, or of the first one of its batch."""
    batch_offsets: Sequence[int] = ()
    """Offsets of all records of its batch, if it is one of several."""
    past: PastFailures | None = None
    """None if no attempt had failed."""

    @property
    def offsets(self) -> Sequence[int]:
        """Offset of the record, or of all records of its batch."""
        return self.batch_offsets or (self.offset,)

    @property
    def span(self) -> Span:
        """The records that must be covered together."""
        return Span(min(self.offsets), max(self.offsets))

    @classmethod
    def of(cls, delivery: Delivery) -> "Outputs":
        """Return the messages of a delivery that has just completed."""
        size = 0
        for message in delivery.outgoing:
            size += record_size(message.key, message.value, message.headers)
        past = None
        if delivery.failure is not None:
            # After a success, `then` completes a replay: the messages are also those of its handler.
            recovery = None if delivery.recovery is delivery.then else delivery.recovery
            past = PastFailures(delivery.failures, delivery.failure, recovery, delivery.recovery_failures)
        return cls(delivery.outgoing, size, delivery.record.offset, delivery.batch_offsets, past)


class Refused(NamedTuple):
    """Why a record that had completed runs again in the next epoch of its partition: a message cannot be written."""

    error: MessageRefusedError
    ended: Outputs

    def pass_on(self, delivery: Delivery) -> None:
        """Make the new delivery of the record continue where the one before had ended."""
        past = self.ended.past
        if past is not None:
            delivery.resume_after(past)
        if self.ended.batch_offsets:  # any of them may be to blame: they run again in smaller batches
            delivery.fail_with_batch(self.error)
        else:
            delivery.refuse(self.error)


class Rerun(NamedTuple):
    """Which records of a partition this process had started when its last epoch ended, for counting replays."""

    highest_started: int
    never_started: frozenset[int]

    def counts(self, record: Record) -> bool:
        """Whether *record* already ran in this process."""
        return record.offset <= self.highest_started and record.offset not in self.never_started


class Epoch:
    """The records of one uninterrupted ownership of a partition; continuing in place keeps the epoch.

    `Partition` is the epoch of a partition of the group; the parked records of a partition that run again have an
    epoch of their own. Owned by the event loop. Workers call `complete`, the rebalance moves the gate. No method
    awaits.

    Invariants:
        * `buffered_bytes` is the sum of the sizes of the incomplete records that are not evicted.
        * A record of this epoch starts freely only while the gate is open. While it is paused, only the probe and
          deliveries with a recovery start; while it is closed, only those that the drain waits for.
        * After `end`, nothing changes any more.
    """

    __slots__ = (
        "_buffer",
        "_waiter",
        "buffered_bytes",
        "counts",
        "drained",
        "evicted",
        "fetching_again",
        "finished_ahead",
        "gate",
        "highest_started",
        "is_seekable",
        "number",
        "pauses",
        "pending",
        "probe",
        "probe_room",
        "probed",
        "refused",
        "replays",
        "revoked",
        "topic_partition",
        "tracker",
        "unsent",
        "unsent_bytes",
    )

    def __init__(
        self,
        topic_partition: TopicPartition,
        number: int,
        start: int,
        buffer: Buffer,
        counts: TopicCounts | None = None,
    ) -> None:
        self.topic_partition = topic_partition
        self.counts = TopicCounts() if counts is None else counts
        """Counts of its topic, shared by all partitions of the topic and kept across epochs."""
        self.number = number
        self.tracker: OffsetTracker[Delivery] = OffsetTracker(start)
        self.gate = Gate.CLOSED
        self.highest_started = -1
        self.buffered_bytes = 0
        self.finished_ahead: tuple[Run, ...] = ()
        """Completions read from a commit when the epoch began and not passed yet; those records do not run again."""
        self.replays: Epoch | None = None
        """Epoch of the parked records of the partition that run again; opens, closes and ends with this one."""
        self.evicted: dict[int, Delivery] = {}
        """Queued deliveries whose records were evicted to make room, by offset; incomplete, and fetched again later."""
        self.fetching_again = False
        """Whether the client was sent back to the first evicted record and has not reached our position again."""
        self.is_seekable = True
        """Whether the client can seek backwards; otherwise nothing is evicted."""
        self.unsent: list[Outputs] = []
        """With exactly-once processing, the messages of completed records that are in no transaction yet."""
        self.unsent_bytes = 0
        """Size of these messages, and of those in a transaction that has not ended."""
        self.refused: dict[int, Refused] = {}
        """Records with a message that cannot be written, by offset; the next epoch takes over those not committed."""
        self.pending: dict[int, Delivery] = {}
        """Deliveries that the drain still waits for, by offset."""
        self.drained = asyncio.Event()
        """Set while no drain waits for anything."""
        self.drained.set()
        self.revoked = asyncio.Event()
        """Set while the partition is being revoked; handlers see it as `Context.revoked`."""
        self.pauses: dict[str, str] = {}
        """Pauses by owner, each with the reason as a sentence; the partition resumes when none is left."""
        self.probe: Delivery | None = None
        """The one delivery that may start while the partition is paused."""
        self.probed: Callable[[bool], None] | None = None
        """Called with whether the probe was processed."""
        self.probe_room = 0
        """How many more records a paused partition takes in, to have a probe among them that has not failed yet."""
        self._waiter: asyncio.Future[None] | None = None
        """See `wake`."""
        self._buffer = buffer

    @property
    def epochs(self) -> list["Epoch"]:
        """The epoch, followed by that of the partition's replays if it has one."""
        return [self] if self.replays is None else [self, self.replays]

    @property
    def held_usage(self) -> Usage:
        """Buffer usage of the partition."""
        return Usage(len(self.tracker) - len(self.evicted), self.buffered_bytes)

    def stuck(self, now: float, stuck_after: float) -> bool:
        """Whether the partition cannot advance: its oldest record is halted, overdue or cannot be fetched again yet."""
        oldest = self.tracker.oldest
        # 1. Nothing is incomplete.
        if oldest is None:
            return False
        # 2. It was evicted: it is fetched again as soon as the gate opens.
        if oldest.offset in self.evicted:
            return not self.is_open
        # 3. It is halted.
        if oldest.block is not None and oldest.block.halted:
            return True
        # 4. It may be overdue.
        return now - oldest.arrived > stuck_after

    def take_in(self, batch: FetchedBatch, deliveries: list[Delivery]) -> None:
        """Track a whole batch and the position captured with it in one step (I10).

        Raises:
            OffsetRegressionError: The client went back; see `OffsetTracker.track`.
        """
        self.tracker.track([delivery.offset for delivery in deliveries], deliveries, batch.next_offset)
        size = sum(batch.sizes)
        self.buffered_bytes += size
        self.probe_room = max(self.probe_room - len(deliveries), 0)
        self._buffer.take_in(len(deliveries), size)
        if not deliveries:
            self._advanced()

    # Eviction --------------------------------------------------------------------

    def first_to_evict(self, least: Usage) -> int:
        """First offset to evict so that a partition that cannot advance keeps no more than *least*."""
        size = 0
        for records, delivery in enumerate(self.tracker.values(), 1):
            size += delivery.size
            if records > least.records or size > least.bytes:
                return delivery.offset
        return self.tracker.position

    def evict(self, deliveries: Iterable[Delivery]) -> None:
        """Drop the payloads of queued deliveries; their offsets stay incomplete, so nothing is committed past them."""
        for delivery in deliveries:
            if delivery is self.probe:  # another probe must be found, or nothing would ever test the partition again
                self._end_probe(processed=False)
            self.fetching_again = False
            self.evicted[delivery.offset] = delivery
            delivery.record = delivery.record._replace(value=None, headers=())
            self.buffered_bytes -= delivery.size
            self._buffer.release(delivery.size)

    def readmit(self, batch: FetchedBatch, now: float) -> list[Delivery]:
        """Return the evicted deliveries that a batch brings back, in order; new records are left out.

        Evicted offsets that are no longer in the log (compacted, or deleted by retention) complete: they are holes
        now (I10).
        """
        readmitted = []
        for record, size in zip(batch.records, batch.sizes, strict=True):
            delivery = self.evicted.pop(record.offset, None)
            if delivery is not None:
                delivery.record = record
                delivery.size = size
                delivery.arrived = now
                self.buffered_bytes += size
                self._buffer.take_in(1, size)
                readmitted.append(delivery)
        for offset in [offset for offset in self.evicted if offset < batch.next_offset]:
            del self.evicted[offset]
            if self.tracker.complete(offset):
                self._advanced()
        if batch.next_offset >= self.tracker.position:
            self.fetching_again = False
        return readmitted

    # Completions beyond the committable offset ------------------------------------------

    def finished(self) -> list[Run]:
        """Records beyond the committable offset that a later owner need not run again; ascending."""
        finished = self.tracker.finished()
        ahead = beyond(self.finished_ahead, self.tracker.position)
        return joined([*finished, *ahead]) if ahead else finished

    # Ending -------------------------------------------------------------------------

    def complete(self, delivery: Delivery) -> bool:
        """Record that a delivery reached its final outcome; return False if the epoch has ended (I5)."""
        if self.gate:
            if self.gate is Gate.ENDED:
                return False
            self.settle(delivery, processed=delivery.recovery is None)
        size = delivery.size
        self.buffered_bytes -= size
        buffer = self._buffer
        buffer.records -= 1  # inlined `Buffer.release`
        buffer.bytes -= size
        buffer.countdown -= 1
        if not buffer.countdown:
            buffer.wake()
        tracker = self.tracker
        offset = delivery.offset
        del tracker.incomplete[offset]  # inlined `OffsetTracker.complete`
        if offset == tracker.watched:
            self._advanced()
        return True

    def send_later(self, outputs: Outputs) -> None:
        """Add the messages of records that have just completed to those of a transaction that covers the records."""
        self.unsent.append(outputs)
        self.unsent_bytes += outputs.size
        self._buffer.hold(outputs.size)

    def fail_refused(self, deliveries: Iterable[Delivery]) -> None:
        """Make the records with a message that cannot be written fail when they run; they have just arrived again."""
        if self.refused:
            for delivery in deliveries:
                refused = self.refused.get(delivery.record.offset)
                if refused is not None:
                    refused.pass_on(delivery)

    def take_unsent(self, coverage: Coverage) -> list[Outputs]:
        """Return the messages of a transaction that begins now; those of records that it does not cover stay."""
        unsent = self.unsent
        if coverage.is_whole:
            self.unsent = []
            return unsent
        taken: list[Outputs] = []
        left: list[Outputs] = []
        for outputs in unsent:
            if coverage.covers(outputs.span):
                taken.append(outputs)
            else:
                left.append(outputs)
        self.unsent = left
        return taken

    def put_back(self, taken: list[Outputs]) -> None:
        """Take back the messages of a refused transaction; does nothing if the epoch has ended."""
        if self.gate is not Gate.ENDED:
            self.unsent = taken + self.unsent

    def sent(self, size: int) -> None:
        """Subtract the messages of a transaction that has ended; does nothing if the epoch has ended."""
        size = min(size, self.unsent_bytes)
        if size:
            self.unsent_bytes -= size
            self._buffer.let_go(size)

    def _advanced(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def wake(self, waiter: asyncio.Future[None]) -> None:
        """Resolve *waiter* when the record that is now the oldest incomplete one completes; it replaces the one before.

        With nothing incomplete, it is resolved when the position moves. Any number of epochs may share one future.
        """
        self.tracker.watch()
        self._waiter = waiter

    # The gate -----------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the partition is certain to be ours; it may be paused."""
        return self.gate <= Gate.PAUSED

    def pause(self, who: str, why: str) -> None:
        """Start no records until *who* resumes; those that run continue. *why* is a sentence."""
        self.pauses[who] = why
        if self.gate is Gate.OPEN:
            self.gate = Gate.PAUSED

    def resume(self, who: str) -> bool:
        """Remove the pause of *who*.

        Returns:
            Whether that opened the gate; `Shards.reopen` then queues the deliveries that were set aside.
        """
        self.pauses.pop(who, None)
        if self.pauses or self.gate is not Gate.PAUSED:
            return False
        self.gate = Gate.OPEN
        return True

    def close(self, running: Collection[Delivery] = (), *, below: bool = False) -> None:
        """Start no new records, and drain those that must end so that the next owner runs no record twice.

        These are the running records: the commit lists what has finished beyond the oldest incomplete record. A failed
        record does not delay the drain, nor do the records behind it in its shard: only another attempt could complete
        them.

        Args:
            running: All deliveries that workers run now, of any partition.
            below: Also drain every queued record below the highest started offset, because the commit cannot list
                the records that have finished beyond the oldest incomplete one. A paused partition never does.
        """
        highest = self.highest_started if below and self.gate is not Gate.PAUSED else -1
        due = [d for d in self.tracker.values() if d in running or d.offset <= highest]
        self.gate = Gate.CLOSED
        self.pending = {d.offset: d for d in due if d.offset not in self.evicted}
        self.drained.clear()
        self.revoked.set()
        self._check_drained()

    def may_start(self, delivery: Delivery) -> bool:
        """Whether a record may start although the gate is not open: for a drain, as the probe or for a recovery."""
        if self.gate is Gate.PAUSED:
            return delivery is self.probe or delivery.recovery is not None
        return self.gate is Gate.CLOSED and delivery.offset in self.pending

    def settle(self, delivery: Delivery, *, processed: bool = False) -> None:
        """Tell the drain and the probe that a run of a record has ended, successfully or not."""
        if delivery is self.probe:
            self._end_probe(processed=processed)
        self.pending.pop(delivery.offset, None)
        self._check_drained()

    def _end_probe(self, *, processed: bool) -> None:
        self.probe = None
        if self.probed is not None:
            self.probed(processed)

    def block(self, key: ShardKey) -> None:
        """Tell the drain not to wait for a shard that is blocked for now."""
        if key is not None:
            self.pending = {offset: pending for offset, pending in self.pending.items() if pending.key != key}
            self._check_drained()

    def _check_drained(self) -> None:
        if not self.pending:
            self.drained.set()

    def stop_draining(self) -> list[Delivery]:
        """Give up on the rest of the drain; return the deliveries that were still due."""
        pending = list(self.pending.values())
        self.pending = {}
        self._check_drained()
        return pending

    def open(self) -> None:
        """Let records start unless the partition is paused; `Shards.reopen` queues deliveries that were set aside."""
        self.gate = Gate.PAUSED if self.pauses else Gate.OPEN
        self.pending = {}
        self.drained.set()
        self.revoked.clear()

    def end(self) -> Rerun:
        """End the ownership: incomplete records leave the buffer and never complete here."""
        deliveries = self.tracker.values()
        never_started = frozenset(d.offset for d in deliveries if d.starts == 0 and d.offset <= self.highest_started)
        self.gate = Gate.ENDED
        self.probe = None
        self.revoked.set()
        self._buffer.drop(*self.held_usage)
        self.buffered_bytes = 0
        self.stop_draining()
        self._advanced()
        # A run that outlives the epoch refers to it; the deliveries queued behind it must not stay in memory as long.
        self.tracker = OffsetTracker(self.tracker.position)
        self.evicted.clear()
        self.unsent = []
        self.sent(self.unsent_bytes)
        return Rerun(self.highest_started, never_started)
