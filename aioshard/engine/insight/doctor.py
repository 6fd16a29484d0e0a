"""Explains why partitions do not advance: the oldest record, the limits around it, since when, and what to do."""

import asyncio
import bisect
import contextvars
import functools
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from aioshard.core.shown_keys import is_plain, shown
from aioshard.engine.batches.batch_shards import BatchShards
from aioshard.engine.batches.batch_worker import BatchWorker
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.handler import Running
from aioshard.engine.insight.stack import stack_of, waits_for
from aioshard.engine.outcomes import Block
from aioshard.engine.rebalance import APPLICATION
from aioshard.engine.runtime import Engine
from aioshard.engine.serving import Serving, serving
from aioshard.engine.watch import SinceWatch
from aioshard.engine.worker import Asked, Worker
from aioshard.observe import Diagnosis, Finding, HeadOfLine, HeadState, PartitionDiagnosis, Stack, Verdict
from aioshard.records import TopicPartition

__all__ = [
    "Cause",
    "CurrentRecord",
    "Ward",
    "current_record",
    "diagnose",
    "diagnose_partition",
    "for_seconds",
    "in_words",
    "line_of",
    "of_the_process",
    "ready_anyway",
    "restart_cures",
    "stack_in_words",
    "trouble_of",
]

_CHAIN = 3
"""Maximum number of records named in a chain that wait for each other."""


def for_seconds(since: float | None) -> str:
    """Return `" for 1.5 s"`, or an empty string if the duration is unknown."""
    return "" if since is None else f" for {max(since, 0.0):.1f} s"


class Cause(NamedTuple):
    """Reason why a record is incomplete."""

    state: HeadState
    since: float | None
    """Duration in seconds."""
    reason: str
    """Sentence without a subject: it follows the record's name."""
    what_to_do: str | None = None
    stack: Stack | None = None


class Ward:
    """Snapshot of one handler's deliveries: which worker runs each of them, and which ones occupy shards."""

    def __init__(self, running: Running, since: SinceWatch, now: float, *, show_keys: bool) -> None:
        """Take the snapshot; safe from any thread.

        Args:
            running: The handler.
            since: Knows since when conditions last.
            now: Loop time.
            show_keys: Whether record keys may be shown.
        """
        self.running = running
        self._since = since
        self._now = now
        self._show_keys = show_keys
        self._workers: dict[Delivery, Worker] = {}
        for worker in tuple(running.workers):
            for delivery in tuple(worker.deliveries):
                self._workers[delivery] = worker
        owning = [delivery for shards in running.feed.shards for delivery in shards.owning]
        self._owners: dict[Hashable, Delivery] = {
            delivery.key: delivery for delivery in (*owning, *self._workers) if delivery.key is not None
        }

    def find_outliving(self) -> list[HeadOfLine]:
        """Return the runs that were cancelled or lost their partition, but have not ended; the first of each batch."""
        firsts: dict[Worker, Delivery] = {}
        for delivery, worker in self._workers.items():
            if worker.cancelled or delivery.epoch.gate is Gate.ENDED:
                firsts.setdefault(worker, delivery)
        return [self.describe(delivery) for delivery in firsts.values()]

    def describe(self, delivery: Delivery) -> HeadOfLine:
        """Return everything known about an incomplete record."""
        cause = self.cause_of(delivery)
        block = delivery.block
        over = delivery.detour is not None or (block is not None and block.halted)
        record = delivery.record
        return HeadOfLine(
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            key=self._shown(record.key),
            shard=self.shard_of(delivery),
            age=max(self._now - delivery.arrived, 0.0),
            attempt=min(max(delivery.failures, 1) if over else delivery.failures + 1, self.running.spec.retry.attempts),
            attempts=self.running.spec.retry.attempts,
            state=cause.state,
            since=cause.since,
            reason=f"it {cause.reason}",
            what_to_do=cause.what_to_do,
            stack=cause.stack,
        )

    def owner(self, key: Hashable) -> Delivery | None:
        """Return the delivery that occupies a shard; None while that is changing."""
        return self._owners.get(key)

    def behind(self, delivery: Delivery) -> int:
        """Count the deliveries waiting in a shard behind the delivery that occupies it; 0 for other deliveries."""
        if delivery.key is None or self._owners.get(delivery.key) is not delivery:
            return 0
        return self.running.feed.shards_of(delivery).behind(delivery)

    # Causes ---------------------------------------------------------------------------

    def cause_of(self, delivery: Delivery, depth: int = 0) -> Cause:
        """Find out why a delivery is incomplete."""
        worker, epoch = self._workers.get(delivery), delivery.epoch
        if worker is not None:
            return self._in_hand(delivery, worker)
        if delivery.offset in epoch.shed:
            again = "is being fetched again" if epoch.fetching_again else "is fetched again soon"
            room = "had to give its room to others while its partition stood still"
            return Cause("given back", None, f"{room}, and {again}")
        if delivery.block is not None:
            return self._blocked(delivery, delivery.block)
        if delivery.limited_since is not None:
            return self._limited(delivery, delivery.limited_since)
        if epoch.gate and not epoch.may_start(delivery):
            return self._held(epoch)
        return self._in_line(delivery, depth)

    def _in_line(self, delivery: Delivery, depth: int) -> Cause:
        shards = self.running.feed.shards_of(delivery)
        position = shards.position_of(delivery) if isinstance(shards, BatchShards) else None
        if position is not None:
            return Cause("collecting", self._now - delivery.arrived, position.removeprefix("it "))
        owner = None if delivery.key is None else self._owners.get(delivery.key)
        if owner is not None and owner is not delivery:
            return self._behind(delivery, owner, depth)
        return self._queued(delivery)

    def _in_hand(self, delivery: Delivery, worker: Worker) -> Cause:
        ran = self._now - worker.started
        stack = stack_of(worker.running)
        name = self.running.spec.name
        batch = f" in a batch of {len(worker.deliveries)} records" if len(worker.deliveries) > 1 else ""
        if delivery not in worker.deliveries:
            # Seen from another thread, where the stack may already be that of the next run.
            return Cause("running", 0.0, f"has just been run by handler {name}")
        if worker.cancelled or delivery.epoch.gate is Gate.ENDED:
            return self._outliving(worker, ran, stack)
        if delivery.detour is not None:
            failed = f" ({delivery.detours} time(s) that failed)" if delivery.detours else ""
            advice = "see why that does not end: whether the brokers answer" if ran > 1 else None
            return Cause("detour", ran, f"is in work{for_seconds(ran)}: {delivery.detour.purpose}{failed}", advice)
        reason = f"has been running in handler {name}{batch}{for_seconds(ran)}{_place(stack)}"
        return Cause("running", ran, reason, self._advice_for_run(worker, ran, stack), stack)

    def _advice_for_run(self, worker: Worker, ran: float, stack: Stack) -> str:
        if stack.executing and stack.thread is None:
            return (
                "nothing else runs meanwhile: compute or block in a thread, with a plain 'def' handler or "
                "asyncio.to_thread"
            )
        if worker.timeout is not None and worker.timeout > ran:
            return f"wait: its attempt times out in {worker.timeout - ran:.1f} s and has failed then"
        return "find out what it waits for there; with timeout= on the handler such an attempt ends, and has failed"

    def _outliving(self, worker: Worker, ran: float, stack: Stack) -> Cause:
        asked = self._since.of(worker, worker.started)
        why = (
            f"its attempt took longer than timeout={worker.timeout:g} s"
            if worker.asked & Asked.TIME_OUT and worker.timeout is not None
            else "its partition was taken away, or the app stops"
        )
        reason = (
            f"was cancelled or is no longer ours and still runs{for_seconds(ran)}{_place(stack)}; it was told to end "
            f"{'' if asked is None else f'{self._now - asked:.1f} s ago '}because {why}, and its shard waits for it"
        )
        advice = (
            "a thread cannot be stopped: give what it calls a time-out of its own"
            if stack.thread is not None
            else "let CancelledError pass: a bare 'except', 'except BaseException' or a shield around there keeps it"
        )
        return Cause("outliving", ran, reason, f"{advice}; a restart of the process ends it", stack)

    def _blocked(self, delivery: Delivery, block: Block) -> Cause:
        ago = self._now - block.since
        call = f"({delivery.record.topic!r}, {delivery.record.partition}, {delivery.record.offset})"
        if block.halted:
            reason = (
                f"halted {ago:.1f} s ago after {delivery.failures} attempt(s) with {block.error}; nothing is committed "
                "past it and its shard waits"
            )
            advice = (
                f"mend the cause, then app.retry_now{call}; or app.skip{call} completes it without processing; or mend "
                "the handler and deploy: it runs again"
            )
            return Cause("halted", ago, reason, advice)
        due = self.running.feed.shards_of(delivery).due(delivery)
        soon = "soon" if due is None else f"in {max(due - self._now, 0.0):.1f} s"
        if delivery.detour is not None:
            reason = f"is incomplete because this failed {ago:.1f} s ago: {block.error}; it is done again {soon}"
            advice = (
                f"see that the topic exists, may be written to, and takes a record of this size; or app.skip{call} "
                "gives the record up"
            )
            return Cause("detour", ago, reason, advice)
        reason = (
            f"waits for its next attempt, number {delivery.failures + 1} of {self.running.spec.retry.attempts}, "
            f"{soon}; the last one failed {ago:.1f} s ago with {block.error}"
        )
        return Cause("retrying", ago, reason, f"nothing if that passes by itself; app.retry_now{call} runs it at once")

    def _limited(self, delivery: Delivery, since: float) -> Cause:
        pace = self.running.pace
        assert pace is not None  # noqa: S101 - otherwise nothing would be limited
        waited, due = self._now - since, pace.key_due(delivery.key)
        reason = (
            f"waits for the rate limit of its key, key_rate_limit={pace.key_limit}{for_seconds(waited)}, {_in(due)}"
        )
        return Cause("limited", waited, reason, "nothing, if that rate is meant; else raise key_rate_limit=")

    def _held(self, epoch: Epoch) -> Cause:
        if epoch.gate is Gate.PAUSED:
            return Cause("held", None, "may not start: its partition is paused")
        return Cause("held", None, "may not start: its partition is being taken away, or is not ours for certain yet")

    def _behind(self, delivery: Delivery, owner: Delivery, depth: int) -> Cause:
        other = owner.record.topic_partition != delivery.record.topic_partition
        whose = " of another partition" if other else ""
        key = self._shown(owner.record.key)
        named = f"record {owner!r}{whose}" + ("" if key is None else f" (key {key})")
        if depth >= _CHAIN:
            return Cause("behind", None, f"waits in its shard behind {named}")
        cause = self.cause_of(owner, depth + 1)
        return Cause("behind", None, f"waits in its shard behind {named}, which {cause.reason}", *cause[3:])

    def _queued(self, delivery: Delivery) -> Cause:
        waited = self._now - delivery.arrived
        count = self.running.staff.concurrency
        pace = self.running.pace
        if pace is not None and (due := pace.due()) and (len(self._busy) < count or not self._busy):
            reason = f"waits for the rate limit of its handler, rate_limit={pace.limit}; the next run starts {_in(due)}"
            return Cause("limited", waited, reason, "nothing, if that rate is meant; else raise rate_limit=")
        if len(self._busy) < count or not self._busy:
            return Cause("queued", waited, "waits for its turn, and starts next")
        name = self.running.spec.name
        reason, stack = self._longest_run
        older = bisect.bisect_right(self._arrivals, delivery.arrived)
        return Cause(
            "queued",
            waited,
            f"waits for its turn: all {count} workers of handler {name} are busy, {older} of them with records that "
            f"came in before it; {reason}",
            self._advice_for_more(count),
            stack,
        )

    def _advice_for_more(self, count: int) -> str:
        adapting, spec = self.running.adapting, self.running.spec
        if adapting is not None:
            return f"nothing, if what the handler calls bears no more: its concurrency follows that ({adapting})"
        if spec.shards is not None:
            return "more shards= spread them over more workers; or see why the runs take as long"
        return (
            f"app.set_concurrency({spec.name!r}, {2 * count}) lets more of them run, if what they call bears that; or "
            "see why the runs take as long"
        )

    # State of all workers; computed once, because many records may wait for one of them.

    @functools.cached_property
    def _busy(self) -> list[Worker]:
        return list(dict.fromkeys(self._workers.values()))

    @functools.cached_property
    def _arrivals(self) -> list[float]:
        """Arrival time of one record of each busy worker, sorted."""
        return sorted({worker: delivery.arrived for delivery, worker in self._workers.items()}.values())

    @functools.cached_property
    def _longest_run(self) -> tuple[str, Stack]:
        longest = min(self._busy, key=lambda worker: worker.started)
        ran, stack = self._now - longest.started, stack_of(longest.running)
        record = next(delivery for delivery, worker in self._workers.items() if worker is longest)
        return f"the longest run is that of record {record!r},{for_seconds(ran)}{_place(stack)}", stack

    # Keys ---------------------------------------------------------------------------------

    def _shown(self, value: object) -> str | None:
        return shown(value, show_keys=self._show_keys)

    def key_of(self, delivery: Delivery) -> str | None:
        """Return the displayed key of a delivery's record."""
        return self._shown(delivery.record.key)

    def shard_of(self, delivery: Delivery) -> str | None:
        """Return the displayed shard of a delivery; None if it has none or it is the record key."""
        key, record = delivery.key, delivery.record
        if key is None or self.running.spec.shards is not None:
            return None if key is None else str(key)
        if is_plain(key):
            if key in (record.key, (record.topic, record.key)):
                return None
            if key == tuple(record.topic_partition):
                return str(record.topic_partition)
        return self._shown(key)


def _in(seconds: float) -> str:
    return f"in {seconds:.3g} s"


# Stacks in words --------------------------------------------------------------------------


def _place(stack: Stack) -> str:
    """Format a stack as `, at file:line in function, waiting in ...`."""
    place = stack.place
    if place is None:
        return ""
    innermost = stack
    while len(innermost.tasks) == 1 and not innermost.more_tasks and innermost.tasks[0].place is not None:
        innermost = innermost.tasks[0]
    thread = f" in thread {innermost.thread}" if innermost.thread is not None else ""
    words = f"{thread}, at {place}"
    if innermost.executing:
        called = f" in {innermost.waits_in}" if innermost.waits_in is not None else ""
        return f"{words}{called}" if thread else f"{words}, which computes or blocks{called} without an await"
    if len(innermost.tasks) > 1:
        named = [str(one.place) for one in innermost.tasks if one.place is not None]
        others = len(innermost.tasks) + innermost.more_tasks
        words += f", waiting for {others} tasks" + (f", one of them at {named[0]}" if named else "")
    elif innermost.waits_in is not None:
        words += f", waiting in {innermost.waits_in}"
    return words


def stack_in_words(stack: Stack) -> str:
    """Format a whole stack on one line, innermost last; empty if nothing is known."""
    frames = " > ".join(map(str, stack.frames))
    inside = [stack_in_words(task) for task in stack.tasks]
    if stack.more_tasks:
        inside.append(f"{stack.more_tasks} more")
    if not inside:
        return frames
    return f"{frames} > [{'] and ['.join(inside)}]" if len(inside) > 1 else f"{frames} > {inside[0]}"


_TURNS_WITHIN = 3.0
"""Seconds without a sample after which the event loop is reported as blocked; used if no `LoopWatch` runs."""


def restart_cures(engine: Engine, now: float) -> Iterator[str]:
    """Yield the reasons why a restart would help; none if it would not. Safe from any thread.

    Partitions stuck because of their data or of unavailable brokers are not among them: they would be stuck again
    after a restart.

    Args:
        engine: The engine.
        now: Loop time.
    """
    watch, limit = engine.loop_watch, engine.settings.session_timeout
    if watch is not None and watch.standing() > limit and (blocked := watch.blocked()) is not None:
        yield f"{blocked}; that is longer than session_timeout={limit:g} s"
    if engine.state == "failed":
        yield _failed(engine)
    if engine.state not in ("starting", "running"):
        return
    hangs = engine.liveness.watch.sentence(now)
    if hangs is not None:
        yield hangs
    for worker in engine.liveness.overdue():
        for delivery in tuple(worker.deliveries)[:1]:
            yield (
                f"record {delivery!r} has been running{for_seconds(now - worker.started)}, longer than "
                f"stuck_after={engine.settings.stuck_after:g} s, and restart_when_stuck is set"
            )


def ready_anyway(engine: Engine, now: float) -> bool:
    """Return whether `ready_timeout` has passed before the first join; safe from any thread."""
    timeout = engine.settings.ready_timeout
    return engine.state == "starting" and timeout is not None and now - engine.started_at >= timeout


def of_the_process(engine: Engine, now: float) -> Iterator[Finding]:
    """Yield the problems of the process itself, apart from brokers and records; safe from any thread."""
    blocked = _blocked(engine, now)
    if blocked is not None:
        advice = "compute or block in a thread, with a plain 'def' handler or asyncio.to_thread"
        yield Finding("event loop", f"{blocked}; nothing else runs meanwhile", None, advice)
    if engine.state == "failed":
        yield Finding("failed", _failed(engine), None, "mend what that says; a restart of the process starts anew")
    hangs = engine.liveness.watch.sentence(now)
    if hangs is not None:
        yield Finding("hung", hangs, None, "a restart of the process cures it, and /livez asks for one")


def _blocked(engine: Engine, now: float) -> str | None:
    watch, looked = engine.loop_watch, engine.since.looked_at
    if watch is not None:
        return watch.blocked()
    if looked is None or now - looked <= _TURNS_WITHIN:
        return None
    return f"the event loop has not turned for {now - looked:.1f} s: something computes or blocks without an await"


def _failed(engine: Engine) -> str:
    error = engine.failed.exception() if engine.failed.done() else None
    return f"the app has failed: {error or 'the log says why'}"


_MOMENT = 1.0
"""Seconds after which the oldest record of a partition is reported as holding it back."""
_SLOW_FETCH = 5.0
"""Seconds without a record, although there are more, after which that is reported."""
_PARKED = "parked"
"""Kind of finding about a parked record, which does not hold its partition back."""
_HALTED = "halted"
"""Kind of finding about halted records behind the oldest record, which do not hold their partition back yet."""
_NAMED = 3
"""Maximum number of records named when a drain waits for several."""
_NAMED_HALTED = 10
"""Maximum number of halted records named; larger, because each must be released individually."""


def diagnose(engine: Engine, *, show_keys: bool) -> Diagnosis:
    """Explain why each partition does not advance; safe to call from any thread.

    Args:
        engine: The running engine.
        show_keys: Whether record keys may be shown; they may be personal data.
    """
    now = engine.clock()
    wards = {id(running): _ward(engine, running, now, show_keys=show_keys) for running in engine.handlers}
    partitions = [
        _examine(engine, epoch, now, wards[id(engine.handler_of(epoch.topic_partition.topic))])
        for epoch in sorted(engine.rebalance.epochs, key=lambda epoch: epoch.topic_partition)
    ]
    return Diagnosis(
        state=engine.state,
        findings=tuple(_general(engine, now)),
        partitions=tuple(partitions),
        outliving=tuple(run for ward in wards.values() for run in ward.find_outliving()),
    )


def diagnose_partition(engine: Engine, epoch: Epoch, *, show_keys: bool) -> PartitionDiagnosis:
    """Explain why one partition does not advance; see `diagnose`."""
    now = engine.clock()
    running = engine.handler_of(epoch.topic_partition.topic)
    return _examine(engine, epoch, now, _ward(engine, running, now, show_keys=show_keys))


def _ward(engine: Engine, running: Running, now: float, *, show_keys: bool) -> Ward:
    return Ward(running, engine.since, now, show_keys=show_keys)


# All partitions ----------------------------------------------------------------------------


def trouble_of(engine: Engine, now: float) -> str | None:
    """Describe a problem beyond single partitions, and its duration; None if all is well."""
    if engine.trouble is not None:
        return f"no Kafka client for {now - engine.trouble_since:.0f} s: {engine.trouble}"
    standstill = engine.standstill.sentence(now)
    if standstill is not None:
        return standstill
    if engine.producer.trouble is not None:
        return engine.producer.trouble
    committer = engine.committer
    if committer.trouble is not None:
        return f"commits have not been acknowledged for {now - committer.trouble_since:.0f} s: {committer.trouble}"
    return None


def _general(engine: Engine, now: float) -> Iterator[Finding]:
    yield from of_the_process(engine, now)
    trouble = trouble_of(engine, now)
    if trouble is not None:
        yield Finding("trouble", trouble, None, "see that the brokers answer and allow what is asked; we go on trying")
    for running in engine.handlers:
        if running.parking is not None and running.parking.trouble is not None:
            topic, name = running.parking.policy.topic, running.spec.name
            sentence = (
                f"what handler {name} has parked in {topic} cannot be read or answered: {running.parking.trouble}"
            )
            yield Finding("parking", sentence, None, f"see that topic {topic} exists, and may be read and written")
    if engine.state in ("starting", "running") and not engine.rebalance.settled.is_set():
        since = _seconds(engine.since.of("settled", fact=False), now)
        doing = engine.rebalance.log.doing()
        what = f"the group is rebalancing: {doing}" if doing else "the group is rebalancing"
        if (reason := engine.rebalance.trouble) is not None:
            what = f"where to resume is not known yet: {reason}"
        yield Finding("rebalancing", f"{what}{for_seconds(since)}", since, None)
    elif not engine.rebalance.epochs:
        yield Finding("nothing assigned", "no partition is assigned to this process", None, None)


# One partition -----------------------------------------------------------------------------


def _examine(engine: Engine, epoch: Epoch, now: float, ward: Ward) -> PartitionDiagnosis:
    tracker = epoch.tracker
    oldest = tracker.oldest
    head = None if oldest is None else ward.describe(oldest)
    committable = tracker.position if oldest is None else oldest.offset
    findings = tuple(_findings(engine, epoch, head, now, ward))
    standing = _standing(engine, epoch, committable, head, now)
    verdict = _verdict(engine, epoch, head, findings, standing=standing, now=now)
    since = standing if verdict in ("waiting", "stuck") else None
    window = tracker.position - committable
    behind = 0
    if oldest is not None:
        waiting = ward.behind(oldest) + len(epoch.shed)
        behind = max(window - len(tracker), 0) + min(waiting, len(tracker) - 1)
    return PartitionDiagnosis(
        topic=epoch.topic_partition.topic,
        partition=epoch.topic_partition.partition,
        verdict=verdict,
        since=since,
        sentence=_sentence_of_none(engine, epoch, verdict, findings)
        if head is None
        else _sentence(epoch, head, verdict, since),
        head=head,
        findings=findings,
        window=window,
        behind=behind,
    )


def _standing(engine: Engine, epoch: Epoch, committable: int, head: HeadOfLine | None, now: float) -> float | None:
    """Return for how many seconds the partition has not advanced; None if that is unknown."""
    noted = engine.since.of(("committable", epoch.topic_partition), committable)
    moved = _seconds(engine.since.looked_at if noted is None else noted, now)
    if head is None:
        return moved
    # Not simply its age: it may have waited behind slower records. Sampled times are a moment late.
    return head.age if moved is None or (noted is not None and moved > head.age - 2 * _MOMENT) else min(moved, head.age)


def _seconds(at: float | None, now: float) -> float | None:
    return None if at is None else max(now - at, 0.0)


def _verdict(
    engine: Engine,
    epoch: Epoch,
    head: HeadOfLine | None,
    findings: Sequence[Finding],
    *,
    standing: float | None,
    now: float,
) -> Verdict:
    limit = engine.settings.stuck_after
    lasts = standing is not None and standing > limit
    if head is not None and epoch.stuck(now, limit) and (lasts or head.state == "halted"):
        return "stuck"
    if any(finding.kind not in (_PARKED, _HALTED) for finding in findings):
        return "waiting"
    if head is not None:
        waits = head.state in ("outliving", "retrying", "halted", "given back", "held")
        return "waiting" if waits or standing is None or standing >= _MOMENT else "advancing"
    end = engine.log_ends.of(epoch)
    up_to_date = epoch.acknowledged == epoch.tracker.position and (end is None or end <= epoch.tracker.position)
    return "up to date" if up_to_date else "advancing"


def _sentence(epoch: Epoch, head: HeadOfLine, verdict: Verdict, since: float | None) -> str:
    verb = "advances" if verdict == "advancing" else f"has not advanced{for_seconds(since)}"
    key = "" if head.key is None else f"key {head.key}, "
    shard = "" if head.shard is None else f"shard {head.shard}, "
    # For a halted record, the reason gives the number of attempts; it may have been given up before the last one.
    attempt = "" if head.state == "halted" else f"attempt {head.attempt} of {head.attempts}"
    known = f"{key}{shard}{attempt}".removesuffix(", ")
    return (
        f"{epoch.topic_partition} {verb}: {len(epoch.tracker)} record(s) incomplete, the oldest is offset "
        f"{head.offset}{f' ({known})' if known else ''}, in hand for {head.age:.1f} s; "
        f"{head.reason}"
    )


def _sentence_of_none(engine: Engine, epoch: Epoch, verdict: Verdict, findings: Sequence[Finding]) -> str:
    name, position = epoch.topic_partition, epoch.tracker.position
    if verdict == "up to date":
        return f"{name} is up to date: everything up to offset {position} is done and committed"
    end = engine.log_ends.of(epoch)
    there_is = f", of a log that ends at {end}" if end is not None and end > position else ""
    why = f": {findings[0].sentence}" if findings else ""
    return f"{name} has nothing in hand at position {position}, committed {epoch.acknowledged}{there_is}{why}"


# Findings besides the oldest record ---------------------------------------------------------


def _findings(engine: Engine, epoch: Epoch, head: HeadOfLine | None, now: float, ward: Ward) -> Iterator[Finding]:
    if epoch.gate is Gate.PAUSED:
        yield from _pauses(engine, epoch, now)
    elif epoch.gate is not Gate.OPEN:
        yield _closed(engine, epoch, now)
    fault = epoch.fault(now)
    if fault is not None:
        sentence = f"it cannot be read: {fault}"
        yield Finding(
            "unreadable", sentence, None, "we go on trying; what that says has to be mended where the topic is"
        )
    if epoch.outside_log is not None:
        sentence = f"its position {epoch.outside_log} is not in the log; where to go on is being found out"
        yield Finding("outside log", sentence, None, None)
    yield from _run_again(engine, epoch, now, ward)
    yield from _also_halted(engine, epoch)
    if epoch.gate is Gate.OPEN and fault is None:
        yield from _intake(engine, epoch, head, now)
    committer, committable = engine.committer, epoch.tracker.committable
    if committer.trouble is not None and committable != epoch.acknowledged:
        since = now - committer.trouble_since
        sentence = (
            f"what is done up to offset {committable} is not committed (committed: {epoch.acknowledged}); commits have "
            f"not been acknowledged{for_seconds(since)}: {committer.trouble}"
        )
        yield Finding("commit", sentence, since, "we go on trying; see that the brokers answer and allow it")


def _pauses(engine: Engine, epoch: Epoch, now: float) -> Iterator[Finding]:
    name = epoch.topic_partition
    calls: dict[TopicPartition | str, str] = {
        name: f"app.resume({name.topic!r}, {name.partition})",
        (handler := engine.handler_of(name.topic).spec.name): f"app.resume_handler({handler!r})",
    }
    for paused, call in calls.items():
        why = engine.pauses.get(paused)
        if why is not None:
            since = _seconds(engine.since.of(("application", paused), why), now)
            sentence = f"paused by the application{for_seconds(since)}: {why}"
            yield Finding("paused", sentence, since, f"{call} lets it go on")
    for who, why in tuple(epoch.pauses.items()):
        if who == APPLICATION:
            continue
        since = _seconds(engine.since.of(("pause", name, who), why), now)
        oldest = epoch.tracker.oldest
        failed = (
            "" if oldest is None or oldest.failure is None else f" (record {oldest!r} failed with {oldest.failure})"
        )
        probe = epoch.probe
        tried = "" if probe is None else f"; record {probe!r} is being tried"
        advice = f"see what the handler depends on{failed}; it goes on by itself"
        yield Finding("paused", f"paused{for_seconds(since)}: {why}{tried}", since, advice)


def _closed(engine: Engine, epoch: Epoch, now: float) -> Finding:
    since = _seconds(engine.since.of(("gate", epoch.topic_partition), epoch.gate), now)
    epochs = engine.feed_of(epoch.topic_partition.topic).with_side(epoch)
    due = [one for each in epochs if each.drain is not None for one in tuple(each.drain.pending.values())]
    waits = ""
    if due:
        names = ", ".join(repr(delivery) for delivery in due[:_NAMED]) + (", ..." if len(due) > _NAMED else "")
        waits = f", and waits for {len(due)} record(s) to end first: {names}"
    if engine.state == "draining":
        return Finding("draining", f"the app is draining{for_seconds(since)}{waits}", since, None)
    if due:
        advice = "handlers that end soon when Context.revoked is set make rebalances short"
        return Finding("rebalancing", f"the partition is being taken away{for_seconds(since)}{waits}", since, advice)
    reason = engine.rebalance.unsettled.get(epoch.topic_partition)
    what = "the group is rebalancing, or the partition's position is not confirmed yet"
    if reason is not None:
        what = f"where to resume is not known yet: {reason}"
    return Finding("rebalancing", f"{what}{for_seconds(since)}", since, None)


def _run_again(engine: Engine, epoch: Epoch, now: float, ward: Ward) -> Iterator[Finding]:
    """Yield a finding if the oldest replay of a parked record takes long."""
    for side in engine.feed_of(epoch.topic_partition.topic).with_side(epoch)[1:]:
        oldest = side.tracker.oldest
        if oldest is not None and now - oldest.arrived > _MOMENT:
            cause = ward.cause_of(oldest)
            sentence = f"record {oldest!r}, which was parked and is run again, {cause.reason}"
            yield Finding(_PARKED, sentence, now - oldest.arrived, cause.what_to_do)


def _also_halted(engine: Engine, epoch: Epoch) -> Iterator[Finding]:
    """Yield a finding about halted records that will hold the partition back once the oldest record is done."""
    shards = engine.feed_of(epoch.topic_partition.topic).shards
    oldest = epoch.tracker.oldest
    halted = [one for each in shards for one in each.halted if one.epoch is epoch and one is not oldest]
    if halted:
        offsets = sorted(one.offset for one in halted)
        named = ", ".join(map(str, offsets[:_NAMED_HALTED])) + (", ..." if len(offsets) > _NAMED_HALTED else "")
        sentence = f"{len(offsets)} record(s) behind that one halted too: offset {named}"
        yield Finding(_HALTED, sentence, None, None)


def _intake(engine: Engine, epoch: Epoch, head: HeadOfLine | None, now: float) -> Iterator[Finding]:
    """Yield a finding if nothing is taken in although the log has more records."""
    # Use the end offset of the last fetch: a newer one may include records that are just being fetched.
    transport = engine.transport
    position, end = epoch.tracker.position, None if transport is None else transport.end_offset(epoch.topic_partition)
    if end is not None and end <= position and head is None:
        return
    since = _seconds(engine.since.of(("position", epoch.topic_partition), position), now)
    limit = engine.admission.limit(epoch.topic_partition)
    if limit is not None:
        sentence = f"nothing more is taken in{for_seconds(since)}: {limit.reason}"
        yield Finding("no room", sentence, since, limit.what_to_do)
    elif end is not None and head is None and since is not None and since > _SLOW_FETCH:
        sentence = f"nothing has come of it{for_seconds(since)}, though its log goes on to {end} and there is room"
        yield Finding("nothing comes", sentence, since, "see that the leader of the partition answers; we go on asking")


# In words ------------------------------------------------------------------------------------


def in_words(diagnosis: Diagnosis) -> str:
    """Format a whole diagnosis in sentences, partition by partition."""
    lines = [f"The app is {diagnosis.state}."]
    for finding in diagnosis.findings:
        lines.append(f"{'Trouble: ' if finding.kind == 'trouble' else ''}{_as_sentence(finding.sentence)}")
        lines += _advice(finding.what_to_do)
    for partition in diagnosis.partitions:
        lines += _lines_of(partition)
    for run in diagnosis.outliving:
        lines.append(_as_sentence(f"Record {run.topic}/{run.partition}/{run.offset} {run.reason.removeprefix('it ')}"))
        lines += _advice(run.what_to_do)
    return "\n".join(lines) + "\n"


def _lines_of(partition: PartitionDiagnosis) -> list[str]:
    lines = [f"{partition.sentence}."]
    if partition.behind:
        lines.append(f"  {partition.behind} of the {partition.window} offsets from there on wait for that record.")
    head = partition.head
    if head is not None and partition.verdict in ("waiting", "stuck"):
        lines += _advice(head.what_to_do)
        if head.stack is not None and head.stack.frames:
            lines.append(f"  Stack, innermost last: {stack_in_words(head.stack)}")
    for finding in partition.findings:
        if head is not None or finding is not partition.findings[0]:
            lines.append(f"  {_as_sentence(finding.sentence)}")
        lines += _advice(finding.what_to_do)
    return lines


def line_of(partition: PartitionDiagnosis) -> str:
    """Format the diagnosis of a partition on one line, for the log."""
    return " ".join(line.strip() for line in _lines_of(partition))


def _advice(what_to_do: str | None) -> list[str]:
    return [] if what_to_do is None else [f"  What to do: {what_to_do}."]


def _as_sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


class CurrentRecord(NamedTuple):
    """Record that a handler is processing."""

    topic: str
    partition: int
    offset: int
    key: str | None
    """`#` and a hash, which names the same key everywhere in this process; None without a key."""
    attempt: int
    """Counted from 1."""
    handler: str
    group: str
    records: int | None = None
    """Number of records in the batch, of which this is the first; None if the handler takes single records."""


_FOUND: contextvars.ContextVar[CurrentRecord | None] = contextvars.ContextVar("aioshard record")
"""In the context of a task or thread started by a handler: the record it was started for."""
_PATIENCE = 20
"""Number of checks, a millisecond apart, of a run that may not yet wait for the thread it has just started."""


def current_record() -> CurrentRecord | None:
    """Return the record that the calling handler is processing; None outside of handlers.

    This also works in tasks and threads that the handler waits for: `asyncio.TaskGroup`, `gather`, `wait_for`,
    `asyncio.to_thread`. A task or thread that the handler does not wait for at the first call gets None: it may outlive
    the run, and the worker may have another record by then.

    Example:
        >>> import asyncio
        >>> from aioshard import App, Record
        >>> from aioshard.testing import TestClient, run
        >>> app = App("billing")
        >>> @app.consume("orders")
        ... async def on_order(record: Record) -> None:
        ...     print(current_record()[:3], current_record().attempt, current_record().handler)
        >>> async def test() -> None:
        ...     async with TestClient(app) as client:
        ...         await client.publish("orders", "book", partition=2)
        ...         await client.settle()
        >>> run(test())
        ('orders', 2, 0) 1 on_order
    """
    at = serving()
    if at is None:
        return None
    if at.is_here:
        return _record_of(at)
    try:
        return _FOUND.get()
    except LookupError:
        pass
    delivery, task = at.worker.delivery, _task()
    found = None
    if delivery is not None and (_waits_for_thread(at) if task is None else waits_for(at.worker.running, task)):
        found = _record_of(at)
        if at.worker.delivery is not delivery:  # the worker has moved on meanwhile
            found = None
    if found is not None or task is None:
        _FOUND.set(found)
    return found


def _task() -> "asyncio.Task[object] | None":
    """Return the calling task; None in a thread without an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _waits_for_thread(at: Serving) -> bool:
    """Return whether the run waits for the calling thread, which may be ahead of the run that has started it."""
    ident = threading.get_ident()
    for _ in range(_PATIENCE):
        if waits_for(at.worker.running, ident):
            return True
        if not stack_of(at.worker.running).executing:
            return False
        time.sleep(0.001)
    return False


def _record_of(at: Serving) -> CurrentRecord | None:
    worker = at.worker
    delivery = worker.delivery
    if delivery is None:
        return None
    record = delivery.record
    return CurrentRecord(
        record.topic,
        record.partition,
        record.offset,
        shown(record.key, show_keys=False),
        delivery.failures + 1 if delivery.detour is None else max(delivery.failures, 1),
        at.handler,
        at.group,
        len(worker.deliveries) if isinstance(worker, BatchWorker) else None,
    )
