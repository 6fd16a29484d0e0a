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
"""Seconds; a client tries to read a partition that cannot be read about every second."""


class Gate(enum.IntEnum):
    """Whether records of an epoch may start. Open is 0: the hot path asks `if epoch.gate`."""

    OPEN = 0
    PAUSED = 1
    """Ours, and nothing starts but a probe: the application asked for it, or a diversion budget is spent."""
    CLOSED = 2
    """Revoked, or not resolved yet: only what a drain needs may start."""
    ENDED = 3
    """The ownership is over: completions are ignored."""


class Delivery(Untroubled):
    """A record on its way through the engine.

    Belongs to its epoch: an outcome that comes after the epoch ended changes nothing (I5).
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
        """Whether a worker has to look at `cancelled` or `detour` before it runs the handler."""
        self.starts = 0
        """How often a worker has started it."""

    run: tuple[float, float, object]
    """Of its latest attempt, where outcomes are observed: begin and end in loop time, and what the handler returned.

    Missing before the first one, and always where nobody observes."""

    failed_span: object = None
    """Of its latest failed attempt, where attempts are traced: what names its span."""

    def __repr__(self) -> str:
        """`topic/partition/offset`, as statistics and messages name a record."""
        return f"{self.record.topic}/{self.record.partition}/{self.record.offset}"

    def divert(self, detour: Detour) -> None:
        """Have the next worker take *detour* in place of running the handler."""
        self.detour = detour
        self.detours = 0
        self.aside = True


class Rerun(NamedTuple):
    """What of a partition this process had started when its last epoch ended, to count replays."""

    highest_started: int
    never_started: frozenset[int]

    def counts(self, record: Record) -> bool:
        """Whether *record* ran here before."""
        return record.offset <= self.highest_started and record.offset not in self.never_started


class Epoch:
    """One uninterrupted ownership of a partition; continuing in place keeps it.

    Owned by the event loop. `take_in` is called by the pump, `complete` by workers, the gate by the
    rebalance. Nothing here awaits.

    Invariants:
        * `buffered_bytes` is the sum of the sizes of the incomplete records.
        * A record of this epoch starts only while the gate is open; while it is paused, when it is the probe;
          or, while it is closed, when the drain waits for it.
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
        """What happens to the records of its topic; of all its partitions, and across epochs."""
        self.number = number
        self.tracker: OffsetTracker[Delivery] = OffsetTracker(start)
        self.gate = Gate.CLOSED
        self.highest_started = -1
        self.buffered_bytes = 0
        self.acknowledged: int | None = None
        """The committed offset as last acknowledged to us; None while there is none."""
        self.mark = CommitMetadata()
        """What our commits of this partition carry beside what is finished; see `aioshard.core.ownership`."""
        self.inherited: tuple[Run, ...] = ()
        """What a commit had noted as finished when the epoch began, as far as it is not passed: it is not run again."""
        self.note_length = 0
        """How many characters were stored with the committed offset when it was last acknowledged."""
        self.noted = 0
        """How many records had completed when what is finished was last noted, or there was nothing to note."""
        self.uncommitted = 0
        """How many records had finished without an acknowledged commit when the committer had to let go of it."""
        self.rerun: Rerun | None = None
        self.trouble: str | None = None
        """Why the partition could not be read when the client last said so; see `fault`."""
        self._trouble_since = self._trouble_at = 0.0
        self.outside_log: int | None = None
        """The position that the log does not have, while it is being found out where to go on."""
        self.shed: dict[int, Delivery] = {}
        """Queued deliveries whose records were given back to make room; incomplete, and fetched again later."""
        self.fetching_again = False
        """Whether the client was sent back to the first of them, and has not come to our position again."""
        self.one_way = False
        """Whether the client cannot be sent back: nothing is given back then."""
        self.drain: DrainPlan[Delivery] | None = None
        self.drained: asyncio.Event | None = None
        self.revoked = asyncio.Event()
        """Set while the partition is being taken away; handlers see it as `Context.revoked`."""
        self.pauses: dict[str, str] = {}
        """Who has paused the partition, and why in a sentence; it goes on when nobody has."""
        self.probe: Delivery | None = None
        """The one delivery that may start while the partition is paused."""
        self.probed: Callable[[bool], None] | None = None
        """Told whether the probe was processed."""
        self.probe_room = 0
        """How many more records a paused partition takes in, so that there is one to probe with that has not failed."""
        self._frontier: asyncio.Future[None] | None = None
        self._buffer = buffer

    @property
    def held_usage(self) -> Usage:
        """What the partition holds of the buffer."""
        return Usage(len(self.tracker) - len(self.shed), self.buffered_bytes)

    def stuck(self, now: float, stuck_after: float) -> bool:
        """Whether the partition cannot advance: its oldest record is halted or overdue."""
        oldest = self.tracker.oldest
        if oldest is None or oldest.offset in self.shed:
            return False
        since = oldest.arrived if oldest.limited_since is None else oldest.limited_since
        return (oldest.block is not None and oldest.block.halted) or now - since > stuck_after

    def fault(self, now: float) -> str | None:
        """Why the partition cannot be read now; what the client has not repeated for a while is over."""
        if self.trouble is None or now - self._trouble_at > _FAULT_LASTS:
            return None
        return f"{self.trouble} (for {now - self._trouble_since:.0f} s)"

    def note_fault(self, trouble: str, now: float) -> bool:
        """Take note that the partition cannot be read; returns whether that is new."""
        lasts = self.fault(now) is not None
        if not lasts:
            self._trouble_since = now
        new = not lasts or trouble != self.trouble
        self.trouble, self._trouble_at = trouble, now
        return new

    def take_in(self, batch: FetchedBatch, deliveries: list[Delivery]) -> None:
        """Track a whole batch, with the position captured with it, in one step (I10).

        Raises:
            OffsetRegressionError: If the client went back; see `OffsetTracker.track`.
        """
        self.tracker.track([delivery.offset for delivery in deliveries], deliveries, batch.next_offset)
        size = sum(batch.sizes)
        self.buffered_bytes += size
        self.probe_room = max(self.probe_room - len(deliveries), 0)
        self._buffer.take_in(len(deliveries), size)
        if not deliveries:
            self._advanced()

    # Giving back -----------------------------------------------------------------

    def shed_from(self, least: Usage) -> int:
        """The first offset that is too much for a partition that cannot advance."""
        size = 0
        for records, delivery in enumerate(self.tracker.values(), 1):
            size += delivery.size
            if records > least.records or size > least.bytes:
                return delivery.offset
        return self.tracker.position

    def give_back(self, deliveries: Iterable[Delivery]) -> None:
        """Drop the payloads of queued deliveries; their offsets stay incomplete: nothing is committed past them."""
        for delivery in deliveries:
            if delivery is self.probe:  # another one has to be found, or nothing would try the partition any more
                self._end_probe(processed=False)
            self.fetching_again = False
            self.shed[delivery.offset] = delivery
            delivery.record = delivery.record._replace(value=None, headers=())
            self.buffered_bytes -= delivery.size
            self._buffer.release(delivery.size)

    def take_back(self, batch: FetchedBatch, now: float) -> list[Delivery]:
        """The deliveries of a batch that was fetched again, in order, those of new records not among them.

        Offsets that were given back and are not in the log any more (compacted, or deleted by retention)
        complete: they are holes now (I10).
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

    # What is finished beyond the committable offset -------------------------------------

    def finished(self) -> list[Run]:
        """What whoever goes on from the committable offset need not run again; ascending."""
        runs = self.tracker.finished()
        for run in beyond(self.inherited, self.tracker.position):
            if runs and runs[-1].end == run.start:
                runs[-1] = Run(runs[-1].start, run.end)
            else:
                runs.append(run)
        return runs

    # Ending -------------------------------------------------------------------------

    def complete(self, delivery: Delivery) -> bool:
        """Take note that a record reached a terminal outcome; False when the epoch has ended (I5)."""
        if self.gate:
            if self.gate is Gate.ENDED:
                return False
            self.settle(delivery, processed=delivery.detour is None)
        size = delivery.size
        self.buffered_bytes -= size
        buffer = self._buffer
        buffer.records -= 1  # as `Buffer.release`, without the call
        buffer.bytes -= size
        buffer.countdown -= 1
        if not buffer.countdown:
            buffer.wake()
        tracker, offset = self.tracker, delivery.offset
        del tracker.incomplete[offset]  # as `OffsetTracker.complete`, without the call
        if offset == tracker.watched:
            self._advanced()
        return True

    def _advanced(self) -> None:
        if self._frontier is not None and not self._frontier.done():
            self._frontier.set_result(None)

    def frontier(self) -> asyncio.Future[None]:
        """A future that resolves when the oldest record that is now incomplete completes.

        With nothing incomplete it resolves when the position moves. One per wait, not per record.
        """
        self.tracker.watch()
        self._frontier = asyncio.get_running_loop().create_future()
        return self._frontier

    # The gate -----------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the partition is ours for certain; it may be paused."""
        return self.gate <= Gate.PAUSED

    def pause(self, who: str, why: str) -> None:
        """Let nothing start until *who* resumes; what runs goes on. *why* is a sentence."""
        self.pauses[who] = why
        if self.gate is Gate.OPEN:
            self.gate = Gate.PAUSED

    def resume(self, who: str) -> bool:
        """Take back a pause.

        Returns:
            Whether the gate has opened by that; `Shards.reopen` then puts back what was set aside.
        """
        self.pauses.pop(who, None)
        if self.pauses or self.gate is not Gate.PAUSED:
            return False
        self.gate = Gate.OPEN
        return True

    def close(self, running: Collection[Delivery] = ()) -> None:
        """Let nothing new start, and plan what must end before the partition is handed over.

        Args:
            running: What workers run now, of whichever partition. A paused partition waits for that alone.
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
        """Whether a record may start although the gate is not open: a drain waits for it, or it is the probe."""
        if self.gate is Gate.PAUSED:
            return delivery is self.probe or delivery.detour is not None
        return self.gate is Gate.CLOSED and self.drain is not None and delivery.offset in self.drain.pending

    def settle(self, delivery: Delivery, *, processed: bool = False) -> None:
        """A run of a record has ended, well or not: a drain does not wait for it any more."""
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
        """A shard does not go on for now: a drain does not wait for what is in it."""
        if self.drain is not None:
            self.drain.block(key)
            self._check_drained()

    def _check_drained(self) -> None:
        if self.drain is not None and self.drain.done and self.drained is not None:
            self.drained.set()

    def stop_draining(self) -> list[Delivery]:
        """Give up on what has not ended: the deliveries that were still due."""
        late = list(self.drain.pending.values()) if self.drain is not None else []
        if self.drain is not None:
            self.drain.pending.clear()
            self._check_drained()
        return late

    def open(self) -> None:
        """Let records start, unless somebody has paused the partition; `Shards.reopen` puts back what was set aside."""
        self.gate = Gate.PAUSED if self.pauses else Gate.OPEN
        self.drain = self.drained = self.outside_log = None
        self.revoked.clear()

    def end(self) -> Rerun:
        """End the ownership: what is incomplete is dropped from the count and never completes here."""
        started = self.tracker.values()
        never = frozenset(d.offset for d in started if d.starts == 0 and d.offset <= self.highest_started)
        self.gate = Gate.ENDED
        self.probe = None
        self.revoked.set()
        self._buffer.drop(*self.held_usage)
        self.buffered_bytes = 0
        self.stop_draining()
        self._advanced()
        # A run that outlives the epoch refers to it; what was queued behind it is not to stay in memory as long.
        self.tracker = OffsetTracker(self.tracker.position)
        self.shed.clear()
        return Rerun(self.highest_started, never)
