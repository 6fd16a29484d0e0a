"""Why a record is incomplete: which run, record, limit or decision it waits for."""

import contextlib
import functools
import math
from collections.abc import Collection, Hashable
from typing import NamedTuple

from aioshard.core.fairness import most_failing_runs
from aioshard.core.loop_block import LoopBlock
from aioshard.core.sharding import is_plain, shown
from aioshard.engine.batch_shards import BatchShards
from aioshard.engine.epoch import Delivery, Gate
from aioshard.engine.explain.words import arguments_of, blocking_place_of, for_seconds, place_of
from aioshard.engine.handler import ActiveHandler
from aioshard.engine.limits import KeyLimit, SharedLimit
from aioshard.engine.outcomes import Block, Recovery
from aioshard.engine.pacing import KeyLimitedShards
from aioshard.engine.shards import Shards
from aioshard.engine.stack import stack_of
from aioshard.engine.watch import Watch
from aioshard.engine.worker import Asked, Worker
from aioshard.observe import AdaptiveStatistics, IncompleteRecord, RecordState, Stack
from aioshard.records import counted


class Cause(NamedTuple):
    """Reason why a record is incomplete."""

    state: RecordState
    since: float | None
    """Duration in seconds."""
    reason: str
    """Sentence without a subject: it follows the record's name."""
    what_to_do: str | None = None
    stack: Stack | None = None
    owner: Delivery | None = None
    """The record of its shard that it waits for."""


class HandlerSnapshot:
    """Snapshot of one handler's deliveries: which worker runs each of them, and which ones occupy shards."""

    def __init__(self, handler: ActiveHandler, watch: Watch) -> None:
        """Take the snapshot; safe from any thread."""
        engine = watch.engine
        self.handler = handler
        self._spec = handler.spec
        self._watch = watch
        self._now = engine.clock()
        self._show_keys = engine.settings.show_keys
        client = engine.client.transport
        self._is_ours = client is None or client.owned_for > 0.0
        self._slow_join = None if client is None else client.slow_join
        self._workers: dict[Delivery, Worker] = {}
        self.runs: dict[Worker, Delivery] = {}
        """The busy workers, each with the first delivery that it runs."""
        for worker in handler.workers:
            for delivery in tuple(worker.deliveries):
                self._workers[delivery] = worker
                self.runs.setdefault(worker, delivery)
        owning = [delivery for shards in handler.shards for delivery in shards.owning]
        self._owners: dict[Hashable, Delivery] = {}
        """The delivery that occupies each shard; shards that are just changing are missing."""
        for delivery in (*owning, *self._workers):
            if delivery.key is not None:
                with contextlib.suppress(Exception):  # a key of the application, which may raise when it is hashed
                    self._owners[delivery.key] = delivery

    def describe(self, delivery: Delivery) -> IncompleteRecord:
        """Return everything known about an incomplete record."""
        cause = self.cause_of(delivery)
        worker = self._workers.get(delivery)
        record = delivery.record
        return IncompleteRecord(
            handler=self._spec.name,
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            key=self._shown(record.key),
            shard=self._shard_of(delivery),
            age=max(self._now - delivery.arrived, 0.0),
            attempt=self._attempt_of(delivery),
            attempts=self._spec.retry.attempts,
            state=cause.state,
            since=cause.since,
            reason=f"it {cause.reason}",
            what_to_do=cause.what_to_do,
            stack=cause.stack,
            due=self._due_in(delivery),
            error=_error_of(cause.owner or delivery),
            waiting=self._behind(delivery),
            worker=None if worker is None else worker.name,
            records=1 if worker is None else len(worker.deliveries),
            waits_for=None if cause.owner is None else repr(cause.owner),
        )

    # Deliveries and shards --------------------------------------------------------------

    @property
    def outliving(self) -> list[Delivery]:
        """The first delivery of each run that was cancelled, or whose partition is gone, but that has not ended."""
        return [delivery for worker, delivery in self.runs.items() if worker.outlives(delivery)]

    @property
    def blocked(self) -> list[Delivery]:
        """The deliveries that hold their shard without running."""
        return [delivery for shards in self.handler.shards for delivery in shards.blocked]

    @property
    def halted(self) -> list[Delivery]:
        """The deliveries that hold their shard until they are released."""
        return [delivery for shards in self.handler.shards for delivery in shards.halted]

    def depths(self) -> list[tuple[int, Hashable]]:
        """How many deliveries wait in each shard, with the shard's key."""
        shards = self.handler.shards
        if self._spec.shards is not None:
            return [(part.unseen, number) for number, part in enumerate(shards)]
        return shards[0].depths()

    def owner_of(self, key: Hashable) -> Delivery | None:
        """Return the delivery that occupies a shard; None if it is unknown, or if the key raises when it is hashed."""
        if key is None:
            return None
        with contextlib.suppress(Exception):
            return self._owners.get(key)
        return None

    def _shards_of(self, delivery: Delivery) -> Shards:
        return self.handler.sharder.shards_of(delivery)

    def _behind(self, delivery: Delivery) -> int:
        """Count the deliveries waiting in a shard behind the delivery that occupies it; 0 for other deliveries."""
        if self.owner_of(delivery.key) is not delivery:
            return 0
        with contextlib.suppress(Exception):  # as in `owner_of`
            return self._shards_of(delivery).behind(delivery)
        return 0

    def _due_in(self, delivery: Delivery) -> float | None:
        """Return in how many seconds the next attempt begins; None if it is not scheduled."""
        if delivery.block is None:
            return None
        due = self._shards_of(delivery).due(delivery)
        return None if due is None else max(due - self._now, 0.0)

    def _attempt_of(self, delivery: Delivery) -> int:
        """Return the number of the current or next attempt; of the last one if no other follows."""
        block = delivery.block
        is_over = delivery.recovery is not None or (block is not None and block.halted)
        attempt = max(delivery.failures, 1) if is_over else delivery.failures + 1
        return min(attempt, self._spec.retry.attempts)

    def _shown(self, key: object) -> str | None:
        """Format a key: itself with `show_keys`, otherwise its hash."""
        return shown(key, show_keys=self._show_keys)

    def _shard_of(self, delivery: Delivery) -> str | None:
        """Return the displayed shard of a delivery; None if it has none or it is the record key."""
        key = delivery.key
        record = delivery.record
        if key is None:
            return None
        if self._spec.shards is not None:
            return str(key)
        if is_plain(key) and key in (record.key, (record.topic, record.key)):
            return None
        if is_plain(key) and key == tuple(record.topic_partition):
            return str(record.topic_partition)
        return self._shown(key)

    # Causes ---------------------------------------------------------------------------

    def cause_of(self, delivery: Delivery) -> Cause:
        """Find out why a delivery is incomplete."""
        worker = self._workers.get(delivery)
        if worker is not None:
            return self._running_now(delivery, worker)
        epoch = delivery.epoch
        if delivery.offset in epoch.evicted:
            again = "is being fetched again" if epoch.fetching_again else "will be fetched again"
            return Cause(
                "evicted", None, f"was evicted to make room for others while its partition was stuck, and {again}"
            )
        block = delivery.block
        if block is not None:
            return self._blocked(delivery, block)
        if epoch.gate and not epoch.may_start(delivery):
            why = "paused" if epoch.gate is Gate.PAUSED else "being revoked, or is not confirmed yet"
            return Cause("held", None, f"may not start: its partition is {why}")
        if not self._is_ours:
            return self._not_ours()
        return self._in_line(delivery)

    def _not_ours(self) -> Cause:
        """Why nothing starts at all."""
        if self._slow_join is not None:
            why = "the group rebalances for so long that another member may own its partition"
            advice = f"look at the members that have not joined yet: {self._slow_join}"
        else:
            why = "another member may own its partition by now, as far as this process knows"
            advice = "check that the brokers answer: it starts once the group has confirmed that it is still ours"
        return Cause("held", None, f"may not start: {why}", advice)

    # Running

    def _running_now(self, delivery: Delivery, worker: Worker) -> Cause:
        ran = self._now - worker.started
        stack = stack_of(worker.running)
        name = self._spec.name
        deliveries = worker.deliveries
        if delivery not in deliveries:
            # Seen from another thread, where the stack may already be that of the next run.
            return Cause("in_flight", 0.0, f"has just been run by handler {name}")
        if worker.outlives(delivery):
            return self._outliving(worker, ran, stack)
        recovery = delivery.recovery
        if recovery is not None:
            return _recovering(delivery, recovery, ran)
        if worker.waits_for is not None:
            advice = "wait: the request ends by itself, and the record runs again if it fails"
            return Cause("in_flight", ran, f"waits for {worker.waits_for}{for_seconds(ran)}", advice, stack)
        batch = f" in a batch of {len(deliveries)} records" if len(deliveries) > 1 else ""
        in_handler = f"has been in handler {name}{batch}{for_seconds(ran)}"
        block = self._block_by(worker)
        if block is not None:
            advice = f"nothing else can run meanwhile: {block.what_to_do}"
            return Cause("in_flight", ran, f"{in_handler}{blocking_place_of(block)}", advice, stack)
        if worker.timeout is not None and worker.timeout > ran:
            advice = f"wait: the attempt times out in {worker.timeout - ran:.1f} s, and counts as failed then"
        else:
            unknown = "does" if stack.executing else "waits for"
            advice = (
                f"find out what it {unknown} there; app.cancel_run{arguments_of(delivery)} ends this attempt as "
                "failed, and timeout= on the handler would do so always"
            )
        return Cause("in_flight", ran, f"{in_handler}{place_of(stack)}", advice, stack)

    def _block_by(self, worker: Worker) -> LoopBlock | None:
        """Return the block of the event loop if a worker's handler causes it."""
        block = self._watch.blocked
        if block is None or block.code is None or block.code.worker != worker.name:
            return None
        return block

    def _outliving(self, worker: Worker, ran: float, stack: Stack) -> Cause:
        cancelled_for = self._watch.lasts(worker, worker.started)
        ago = "" if cancelled_for is None else f" {cancelled_for:.1f} s ago"
        if worker.asked & Asked.TIME_OUT and worker.timeout is not None:
            why = f"its attempt exceeded timeout={worker.timeout:g} s"
        elif worker.asked & Asked.STOP:
            why = "it was requested by cancel_run"
        else:
            why = "its partition was revoked or the app is stopping"
        reason = f"was cancelled{ago} because {why}, but still runs{for_seconds(ran)}{place_of(stack)}; its shard waits"
        advice = (
            "a thread cannot be stopped: set a timeout on the calls that it makes"
            if stack.thread is not None
            else "let CancelledError propagate: a bare 'except', 'except BaseException' or a shield there suppresses it"
        )
        return Cause("outliving", ran, reason, f"{advice}; a restart of the process ends it", stack)

    # Blocked after a failure

    def _blocked(self, delivery: Delivery, block: Block) -> Cause:
        ago = self._now - block.since
        call = arguments_of(delivery)
        if block.halted:
            return Cause(
                "halted",
                ago,
                f"halted {ago:.1f} s ago after {counted(delivery.failures, 'attempt')} ({block.error}); nothing is "
                "committed past it, and its shard waits",
                f"fix the cause, then call app.retry_now{call}; or call app.skip{call} to complete it without "
                "processing; or deploy a fixed handler, which runs it again",
            )
        due = self._shards_of(delivery).due(delivery)
        soon = "soon" if due is None else f"in {max(due - self._now, 0.0):.1f} s"
        if delivery.recovery is not None:
            return Cause(
                "recovery",
                ago,
                f"is incomplete because this failed {ago:.1f} s ago: {block.error}; the next try is {soon}",
                f"fix that cause; or call app.skip{call} to give the record up",
            )
        if block.postponed:
            return Cause(
                "retrying",
                ago,
                f"could not run {ago:.1f} s ago, which does not count as an attempt: {block.error}; the next try is "
                f"{soon}",
                "check that the schema registry answers and accepts the login; the app keeps trying",
            )
        return Cause(
            "retrying",
            ago,
            f"waits for its next attempt, number {delivery.failures + 1} of {self._spec.retry.attempts}, "
            f"{soon}; the last one failed {ago:.1f} s ago with {block.error}",
            f"nothing if the failure is temporary; app.retry_now{call} runs it now",
        )

    # In line

    def _in_line(self, delivery: Delivery) -> Cause:
        shards = self._shards_of(delivery)
        position = shards.position_of(delivery) if isinstance(shards, BatchShards) else None
        if position is not None:
            return Cause("collecting", self._now - delivery.arrived, position.removeprefix("it "))
        owner = self.owner_of(delivery.key)
        if owner is not None and owner is not delivery:
            return self._waits_behind(delivery, owner)
        limit = self.handler.limit
        token_due = shards.token_due(delivery) if isinstance(shards, KeyLimitedShards) else None
        if limit is not None and token_due is not None:
            return self._limited(limit, max(token_due - self._now, 0.0), self._now - delivery.arrived)
        return self._queued(delivery)

    def _waits_behind(self, delivery: Delivery, owner: Delivery) -> Cause:
        whose = "" if owner.record.topic_partition == delivery.record.topic_partition else " of another partition"
        key = self._shown(owner.record.key)
        with_key = "" if key is None else f" (key {key})"
        named = f"record {owner!r}{whose}{with_key}"
        cause = self.cause_of(owner)
        if cause.state == "halted":
            waits = f"cannot run because {named} {cause.reason}"
        else:
            waits = f"waits in its shard behind {named}, which {cause.reason}"
        return Cause("behind", None, waits, cause.what_to_do, cause.stack, owner)

    def _queued(self, delivery: Delivery) -> Cause:
        waited = self._now - delivery.arrived
        if delivery.recovery is not None:
            why = f"is incomplete until this is done: {delivery.recovery.purpose}; other writes come first"
            return Cause("recovery", waited, why, "wait; if the other writes fail, a finding says why")
        if self._no_start is not None:
            return self._no_start._replace(since=waited)
        if self._shards_of(delivery).is_restrained(delivery):
            return self._restrained(delivery, waited)
        limit = self.handler.limit
        due = limit.due() if isinstance(limit, SharedLimit) else 0.0
        if limit is not None and due:
            return self._limited(limit, due, waited)
        return Cause("queued", waited, "waits for its turn, and starts next")

    def _limited(self, limit: SharedLimit | KeyLimit, due: float, waited: float) -> Cause:
        """Why the rate limit lets no run start; the next one may start in *due* seconds."""
        rate = f"{limit.limit.per_second:g} per second"
        others = [name for name in limit.handlers if name != self._spec.name]
        shared = f", shared with {counted(len(others), 'handler')}: {', '.join(others)}" if others else ""
        match limit.limit.per:
            case "key":
                scope = f"its key may start {rate}"
            case "group":
                share = limit.statistics().share or 0.0
                scope = f"the group may start {rate}, and this process {share:.3g} of them, by its partitions"
            case _:
                scope = f"this process may start {rate}"
        when = "none starts without an open partition" if due == math.inf else f"the next run starts in {due:.3g} s"
        return Cause(
            "limited",
            waited,
            f"waits for limit {limit.limit.name!r} ({scope}{shared}); {when}",
            "nothing if the rate is intended; otherwise raise per_second of the Limit",
        )

    def _restrained(self, delivery: Delivery, waited: float) -> Cause:
        failed = "the record before it in its shard failed"
        if delivery.failure is not None:
            failed = f"its last attempt failed with {delivery.failure}"
        most = most_failing_runs(self.handler.concurrency, others_wait=True)
        return Cause(
            "queued",
            waited,
            f"waits for its turn: {failed}, and while other records wait, at most {most} of the "
            f"{self.handler.concurrency} workers of handler {self._spec.name} run records of failing keys",
            "fix the cause of the failures; a shorter timeout= makes room sooner if the runs hang",
        )

    @functools.cached_property
    def _no_start(self) -> Cause | None:
        """The reason why no run may start: all workers or processes are busy. Once, as many records may wait for it."""
        spec = self._spec
        count = self.handler.concurrency
        if len(self.runs) >= count:
            adaptation = self.handler.adaptation
            if adaptation is not None:
                return self._adaptive_limit(count, adaptation.statistics())
            limit = "concurrency" if spec.shards is None else "shards"
            if spec.run_in == "process" and spec.slots is None:
                limit = "processes"
            reason, stack = self._longest_of(self.runs)
            return Cause(
                "queued",
                None,
                f"waits for its turn: all {count} workers of handler {spec.name} are busy; {reason}",
                f"raise {limit}= to run more of them concurrently, if the systems that they call can take it; or "
                "find out why the runs take so long",
                stack,
            )
        if spec.slots is None:
            return None
        holders = spec.slots.holders
        in_processes = [worker for worker in self.runs if worker in holders]
        if len(in_processes) < spec.slots.number:
            return None
        reason, stack = self._longest_of(in_processes)
        return Cause(
            "queued",
            None,
            f"waits for a worker process: all {spec.slots.number} have a record of handler {spec.name}; {reason}",
            "raise processes= if the machine has more cores; or find out why the runs take so long",
            stack,
        )

    def _adaptive_limit(self, count: int, adaptive: AdaptiveStatistics) -> Cause:
        reason, stack = self._longest_of(self.runs)
        moved = "" if adaptive.since is None else f", {adaptive.before} until {adaptive.since:.1f} s ago"
        advice = "find out why the runs take so long"
        if count == adaptive.maximum:
            advice = f"raise the maximum of concurrency=, if the back end bears more than that; or {advice}"
        return Cause(
            "queued",
            None,
            f"waits for its turn: all {count} runs that the adaptive concurrency of handler {self._spec.name} allows "
            f"now ({adaptive.minimum} to {adaptive.maximum}{moved}) are in flight. It moved last because "
            f"{adaptive.why}; {reason}",
            advice,
            stack,
        )

    def _longest_of(self, workers: Collection[Worker]) -> tuple[str, Stack]:
        """Return the longest run of busy workers in words, with its stack."""
        worker = min(workers, key=lambda busy: busy.started)
        record = self.runs[worker]
        stack = stack_of(worker.running)
        lasts = for_seconds(self._now - worker.started)
        return f"the longest run is that of record {record!r},{lasts}{place_of(stack)}", stack


def _recovering(delivery: Delivery, recovery: Recovery, ran: float) -> Cause:
    doing = f"is being recovered{for_seconds(ran)}: {recovery.purpose}"
    if delivery.recovery_failures and delivery.recovery_error is not None:
        failed = f"the last try (so far {delivery.recovery_failures}) failed"
        return Cause("recovery", ran, f"{doing}; {failed}: {delivery.recovery_error}", "fix that cause")
    advice = "wait: this try has not failed yet, and says why if it does" if ran > 1 else None
    return Cause("recovery", ran, doing, advice)


def _error_of(delivery: Delivery) -> str | None:
    """Return the failure for which a delivery waits, or for which its recovery is tried again now."""
    block = delivery.block
    return delivery.recovery_error if block is None else block.error
