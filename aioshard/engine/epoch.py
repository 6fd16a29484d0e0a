"""One uninterrupted ownership of a partition, and the deliveries of its records."""

import asyncio
import enum
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.drain import DrainPlan
from aioshard.core.finished_offsets import Run, beyond
from aioshard.core.flow import Usage
from aioshard.core.offsets import OffsetTracker
from aioshard.core.sharding import ShardKey
from aioshard.engine.buffer import Buffer
from aioshard.engine.counts import TopicCounts
from aioshard.engine.outcomes import Detour, Untroubled
from aioshard.ports import FetchedBatch
from aioshard.records import Record, TopicPartition

__all__ = ["Delivery", "Epoch", "Gate", "Rerun"]

_FAULT_LASTS = 5.0
"""Seconds; a client tries to read an unreadable partition about once per second."""


class Gate(enum.IntEnum):
    """Whether records of an epoch may start. OPEN is 0, so the hot path can test `if epoch.gate`."""

    OPEN = 0
    PAUSED = 1
    """Ours, but only a probe or a detour may start: the application paused it, or a diversion budget is spent."""
    CLOSED = 2
    """The partition was revoked or is not resolved yet: only records that a drain waits for may start."""
    ENDED = 3
    """The ownership has ended: completions are ignored."""


class Delivery(Untroubled):
    """A record on its way through the engine.

    Belongs to its epoch: an outcome that arrives after the epoch has ended changes nothing (I5).
    """

    __slots__ = ("__dict__", "arrived", "aside", "epoch", "key", "offset", "record", "run", "size", "starts")

    def __init__(self, record: Record, epoch: "Epoch", key: ShardKey, size: int, arrived: float) -> None:
        self.record = record
        self.offset = record.offset
        self.epoch = epoch
        self.key = key
        self.size = size
        self.arrived = arrived
        self.aside = False
        """Whether a worker must check `cancelled` or `detour` before it runs the handler."""
        self.starts = 0
        """How often a worker has started it."""

    run: tuple[float, float, object]
    """Start and end in loop time, and the handler's result, of the latest attempt, if outcomes are observed.

    Missing before the first attempt, and always without an observer."""

    failed_span: object = None
    """Identifies the span of the latest failed attempt, if attempts are traced."""

    def __repr__(self) -> str:
        """`topic/partition/offset`, the form in statistics and messages."""
        return f"{self.record.topic}/{self.record.partition}/{self.record.offset}"

    def divert(self, detour: Detour) -> None:
        """Make the next worker take *detour* instead of running the handler."""
        self.detour = detour
        self.detours = 0
        self.aside = True


class Rerun(NamedTuple):
    """Which records of a partition this process had started when its last epoch ended, for counting replays."""

    highest_started: int
    never_started: frozenset[int]

    def counts(self, record: Record) -> bool:
        """Whether *record* already ran in this process."""
        return record.offset <= self.highest_started and record.offset not in self.never_started


class Epoch:
    """One uninterrupted ownership of a partition; continuing in place keeps the epoch.

    Owned by the event loop. The pump calls `take_in`, workers call `complete`, the rebalance moves the gate. No method
    awaits.

    Invariants:
        * `buffered_bytes` is the sum of the sizes of the incomplete records that are not evicted.
        * A record of this epoch starts freely only while the gate is open. While it is paused, only the probe and
          deliveries with a detour start; while it is closed, only those that the drain waits for.
        * After `end`, nothing changes any more.
    """

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
        self.acknowledged: int | None = None
        """The committed offset that was last acknowledged to us; None without one."""
        self.mark = CommitMetadata()
        """First-commit marker that our commits carry besides the completions; see `aioshard.core.ownership`."""
        self.inherited: tuple[Run, ...] = ()
        """Completions read from a commit when the epoch began and not passed yet; those records do not run again."""
        self.note_length = 0
        """Length in characters of the metadata in the last acknowledged commit."""
        self.noted = 0
        """How many records had completed as of the last acknowledged commit."""
        self.uncommitted = 0
        """How many records had finished without an acknowledged commit when the committer disowned the epoch."""
        self.rerun: Rerun | None = None
        self.trouble: str | None = None
        """Why the partition could not be read when the client last reported it; see `fault`."""
        self._trouble_since = self._trouble_at = 0.0
        self.outside_log: int | None = None
        """A position that is not in the log, while the rebalance finds out where to resume; otherwise None."""
        self.shed: dict[int, Delivery] = {}
        """Queued deliveries whose records were evicted to make room, by offset; incomplete, and fetched again later."""
        self.fetching_again = False
        """Whether the client was sent back to the first evicted record and has not reached our position again."""
        self.one_way = False
        """Whether the client cannot seek backwards: nothing is evicted then."""
        self.drain: DrainPlan[Delivery] | None = None
        self.drained: asyncio.Event | None = None
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
        self._frontier: asyncio.Future[None] | None = None
        self._buffer = buffer

    @property
    def held_usage(self) -> Usage:
        """Buffer usage of the partition."""
        return Usage(len(self.tracker) - len(self.shed), self.buffered_bytes)

    def stuck(self, now: float, stuck_after: float) -> bool:
        """Whether the partition cannot advance: its oldest record is halted or overdue."""
        oldest = self.tracker.oldest
        if oldest is None or oldest.offset in self.shed:
            return False
        since = oldest.arrived if oldest.limited_since is None else oldest.limited_since
        return (oldest.block is not None and oldest.block.halted) or now - since > stuck_after

    def fault(self, now: float) -> str | None:
        """Why the partition cannot be read now; a fault ends when the client has not repeated it for a while."""
        if self.trouble is None or now - self._trouble_at > _FAULT_LASTS:
            return None
        return f"{self.trouble} (for {now - self._trouble_since:.0f} s)"

    def note_fault(self, trouble: str, now: float) -> bool:
        """Record that the partition cannot be read; return whether that is new."""
        lasts = self.fault(now) is not None
        if not lasts:
            self._trouble_since = now
        new = not lasts or trouble != self.trouble
        self.trouble, self._trouble_at = trouble, now
        return new

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

    def shed_from(self, least: Usage) -> int:
        """First offset to evict so that a partition that cannot advance keeps no more than *least*."""
        size = 0
        for records, delivery in enumerate(self.tracker.values(), 1):
            size += delivery.size
            if records > least.records or size > least.bytes:
                return delivery.offset
        return self.tracker.position

    def give_back(self, deliveries: Iterable[Delivery]) -> None:
        """Drop the payloads of queued deliveries; their offsets stay incomplete, so nothing is committed past them."""
        for delivery in deliveries:
            if delivery is self.probe:  # another probe must be found, or nothing would ever test the partition again
                self._end_probe(processed=False)
            self.fetching_again = False
            self.shed[delivery.offset] = delivery
            delivery.record = delivery.record._replace(value=None, headers=())
            self.buffered_bytes -= delivery.size
            self._buffer.release(delivery.size)

    def take_back(self, batch: FetchedBatch, now: float) -> list[Delivery]:
        """Return the evicted deliveries that a batch brings back, in order; new records are left out.

        Evicted offsets that are no longer in the log (compacted, or deleted by retention) complete: they are holes
        now (I10).
        """
        back = []
        for record, size in zip(batch.records, batch.sizes, strict=True):
            delivery = self.shed.pop(record.offset, None)
            if delivery is not None:
                delivery.record, delivery.size, delivery.arrived = record, size, now
                self.buffered_bytes += size
                self._buffer.take_in(1, size)
                back.append(delivery)
        for offset in [offset for offset in self.shed if offset < batch.next_offset]:
            del self.shed[offset]
            if self.tracker.complete(offset):
                self._advanced()
        if batch.next_offset >= self.tracker.position:
            self.fetching_again = False
        return back

    # Completions beyond the committable offset ------------------------------------------

    def finished(self) -> list[Run]:
        """Records beyond the committable offset that a later owner need not run again; ascending."""
        runs = self.tracker.finished()
        for run in beyond(self.inherited, self.tracker.position):
            if runs and runs[-1].end == run.start:
                runs[-1] = Run(runs[-1].start, run.end)
            else:
                runs.append(run)
        return runs

    # Ending -------------------------------------------------------------------------

    def complete(self, delivery: Delivery) -> bool:
        """Record that a delivery reached its final outcome; return False if the epoch has ended (I5)."""
        if self.gate:
            if self.gate is Gate.ENDED:
                return False
            self.settle(delivery, processed=delivery.detour is None)
        size = delivery.size
        self.buffered_bytes -= size
        buffer = self._buffer
        buffer.records -= 1  # inlined `Buffer.release`
        buffer.bytes -= size
        buffer.countdown -= 1
        if not buffer.countdown:
            buffer.wake()
        tracker, offset = self.tracker, delivery.offset
        del tracker.incomplete[offset]  # inlined `OffsetTracker.complete`
        if offset == tracker.watched:
            self._advanced()
        return True

    def _advanced(self) -> None:
        if self._frontier is not None and not self._frontier.done():
            self._frontier.set_result(None)

    def frontier(self) -> asyncio.Future[None]:
        """A future that is done when the record that is now the oldest incomplete one completes.

        With nothing incomplete, it is done when the position moves. It costs one future per wait, not per record.
        """
        self.tracker.watch()
        self._frontier = asyncio.get_running_loop().create_future()
        return self._frontier

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

    def close(self, running: Collection[Delivery] = ()) -> None:
        """Start no new records, and plan which ones must end before the partition is handed over.

        Args:
            running: All deliveries that workers run now, of any partition. A paused partition waits only for its own.
        """
        queued: Iterable[Delivery] = (d for d in self.tracker.values() if d.offset not in self.shed)
        if self.gate is Gate.PAUSED:
            queued = [delivery for delivery in queued if delivery in running]
        self.gate = Gate.CLOSED
        self.drain = DrainPlan(queued, self.highest_started)
        self.drained = asyncio.Event()
        self.revoked.set()
        self._check_drained()

    def may_start(self, delivery: Delivery) -> bool:
        """Whether a record may start although the gate is not open: for a drain, as the probe or for a detour."""
        if self.gate is Gate.PAUSED:
            return delivery is self.probe or delivery.detour is not None
        return self.gate is Gate.CLOSED and self.drain is not None and delivery.offset in self.drain.pending

    def settle(self, delivery: Delivery, *, processed: bool = False) -> None:
        """Tell the drain and the probe that a run of a record has ended, successfully or not."""
        if delivery is self.probe:
            self._end_probe(processed=processed)
        if self.drain is not None:
            self.drain.settle(delivery)
            self._check_drained()

    def _end_probe(self, *, processed: bool) -> None:
        self.probe = None
        if self.probed is not None:
            self.probed(processed)

    def block(self, key: ShardKey) -> None:
        """Tell the drain not to wait for a shard that is blocked for now."""
        if self.drain is not None:
            self.drain.block(key)
            self._check_drained()

    def _check_drained(self) -> None:
        if self.drain is not None and self.drain.done and self.drained is not None:
            self.drained.set()

    def stop_draining(self) -> list[Delivery]:
        """Give up on the rest of the drain; return the deliveries that were still due."""
        late = list(self.drain.pending.values()) if self.drain is not None else []
        if self.drain is not None:
            self.drain.pending.clear()
            self._check_drained()
        return late

    def open(self) -> None:
        """Let records start unless the partition is paused; `Shards.reopen` queues deliveries that were set aside."""
        self.gate = Gate.PAUSED if self.pauses else Gate.OPEN
        self.drain = self.drained = self.outside_log = None
        self.revoked.clear()

    def end(self) -> Rerun:
        """End the ownership: incomplete records leave the buffer and never complete here."""
        started = self.tracker.values()
        never = frozenset(d.offset for d in started if d.starts == 0 and d.offset <= self.highest_started)
        self.gate = Gate.ENDED
        self.probe = None
        self.revoked.set()
        self._buffer.drop(*self.held_usage)
        self.buffered_bytes = 0
        self.stop_draining()
        self._advanced()
        # A run that outlives the epoch refers to it; the deliveries queued behind it must not stay in memory as long.
        self.tracker = OffsetTracker(self.tracker.position)
        self.shed.clear()
        return Rerun(self.highest_started, never)
