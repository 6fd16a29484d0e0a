"""What an incomplete record waits for, in sentences: which one, since when, and what to do."""

import bisect
import functools
from collections.abc import Hashable
from typing import NamedTuple

from aioshard.core.shown_keys import is_plain, shown
from aioshard.engine.batches.batch_shards import BatchShards
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.handler import Running
from aioshard.engine.insight.stack import stack_of
from aioshard.engine.outcomes import Block
from aioshard.engine.watch import SinceWatch
from aioshard.engine.worker import Asked, Worker
from aioshard.observe import HeadOfLine, HeadState, Stack

__all__ = ["Cause", "Ward", "for_seconds", "stack_in_words"]

_CHAIN = 3
"""How many records are named that wait for each other."""


def for_seconds(since: float | None) -> str:
    """`" for 1.5 s"`, or nothing where nobody noted when it began."""
    return "" if since is None else f" for {max(since, 0.0):.1f} s"


class Cause(NamedTuple):
    """What an incomplete record waits for."""

    state: HeadState
    since: float | None
    """Seconds."""
    reason: str
    """Without a subject: it follows the record's name."""
    what_to_do: str | None = None
    stack: Stack | None = None


class Ward:
    """The deliveries of one handler as they are at one moment: who runs what, and what occupies which shard."""

    def __init__(self, running: Running, since: SinceWatch, now: float, *, show_keys: bool) -> None:
        """Look at a handler; safe from any thread.

        Args:
            running: The handler.
            since: What was noted of when things began.
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
        """The runs that were told to end, or whose partition is gone, and have not ended; of a batch, the first."""
        firsts: dict[Worker, Delivery] = {}
        for delivery, worker in self._workers.items():
            if worker.cancelled or delivery.epoch.gate is Gate.ENDED:
                firsts.setdefault(worker, delivery)
        return [self.describe(delivery) for delivery in firsts.values()]

    def describe(self, delivery: Delivery) -> HeadOfLine:
        """All that is known of an incomplete record."""
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
        """The delivery that occupies a shard; None when that is just changing."""
        return self._owners.get(key)

    def behind(self, delivery: Delivery) -> int:
        """How many deliveries wait in the shard of one that occupies it."""
        if delivery.key is None or self._owners.get(delivery.key) is not delivery:
            return 0
        return self.running.feed.shards_of(delivery).behind(delivery)

    # Why it waits ---------------------------------------------------------------------

    def cause_of(self, delivery: Delivery, depth: int = 0) -> Cause:
        """What one delivery waits for."""
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
            # Seen from a thread: the stack may be that of the next run.
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
        assert pace is not None  # noqa: S101 - or nothing would be limited
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

    # What all workers do, for many records that wait for one of them: found out once.

    @functools.cached_property
    def _busy(self) -> list[Worker]:
        return list(dict.fromkeys(self._workers.values()))

    @functools.cached_property
    def _arrivals(self) -> list[float]:
        """When what each busy worker has came in, sorted."""
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
        """The key of its record, as it is shown."""
        return self._shown(delivery.record.key)

    def shard_of(self, delivery: Delivery) -> str | None:
        """Its shard, where that is not its key."""
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
    """`, at file:line in function, waiting in ...`."""
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
    """A whole stack in one line, innermost last; empty when nothing is known."""
    frames = " > ".join(map(str, stack.frames))
    inside = [stack_in_words(task) for task in stack.tasks]
    if stack.more_tasks:
        inside.append(f"{stack.more_tasks} more")
    if not inside:
        return frames
    return f"{frames} > [{'] and ['.join(inside)}]" if len(inside) > 1 else f"{frames} > {inside[0]}"
