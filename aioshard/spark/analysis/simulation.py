"""One member of a group as an event simulation: what the engine would have done with other numbers.

Follows the engine where it decides: `aioshard.core.flow` and `aioshard.engine.admission` (how much of a partition is
taken in), `aioshard.engine.feed` (how much is wanted), `aioshard.engine.shards` (oldest head record first; a fixed
shard's queue is bounded, and the partition that feeds it waits while it is full). Time is in whole microseconds, so
nothing is rounded: the same work gives the same result everywhere. No clock, no Spark, no randomness.

What it leaves out: the processor's time, retries and their delays, time-outs, batches, rate limits, bytes, and the
smaller share of a partition whose oldest record is in hand for longer than `stuck_after`.
"""

import heapq
from array import array
from collections import deque
from typing import NamedTuple

from aioshard.core.flow import Usage, room_for
from aioshard.core.key_hash import shard_of_hash

__all__ = ["NO_KEY", "Engine", "Runs", "Work", "fixed_shards", "simulate"]

NO_KEY = -(1 << 63)
"""In place of a shard key's hash: the record asks for no order."""

_UNBOUNDED = 1 << 62
_CHUNKS = 4
_POLL_TIMEOUT = 1_000_000
_ENOUGH = 1_000
_ENOUGH_PER_WORKER = 4
_ARRIVALS_FIRST = -1


class Work(NamedTuple):
    """Records that can be fetched, in the order of their offsets within each partition.

    All four have one length.
    """

    partition: "array[int]"
    """From 0."""
    available: "array[int]"
    """When the record can be fetched, in microseconds from the start."""
    service: "array[int]"
    """How long its run occupies a worker, in microseconds."""
    key: "array[int]"
    """`key_hash` of its shard key, or `NO_KEY`."""

    @property
    def partitions(self) -> int:
        """How many there are."""
        return max(self.partition, default=-1) + 1


class Engine(NamedTuple):
    """What of a member's configuration counts."""

    shards: int
    """Fixed ones; 0 is on demand."""
    workers: int
    """With fixed shards, as many as there are of those."""
    max_buffered_records: int
    records_per_poll: int = 500
    """How many records the client hands out at once."""

    @property
    def depth(self) -> int:
        """How many records a fixed shard queues."""
        return max(self.max_buffered_records // self.shards, 1)


class Runs(NamedTuple):
    """What became of each record of a `Work`, in its order; microseconds from the start, -1 for never."""

    arrived: "array[int]"
    started: "array[int]"
    finished: "array[int]"


def simulate(work: Work, engine: Engine, until: int | None = None) -> Runs:
    """Process *work* with *engine*.

    Args:
        work: What there is.
        engine: What processes it.
        until: When the member dies, in microseconds; what has not finished by then never does.

    Example:
        >>> slow = Work(array("q", [0] * 3), array("q", [0] * 3), array("q", [5, 5, 5]), array("q", [1, 2, 1]))
        >>> list(simulate(slow, Engine(shards=0, workers=2, max_buffered_records=100)).finished)
        [5, 5, 10]
    """
    member = _FixedShards(work, engine) if engine.shards else _OnDemand(work, engine)
    member.run(_UNBOUNDED if until is None else until)
    return Runs(member.arrived, member.started, member.finished)


class _Member:
    """The pump of one member and its clock; how records reach workers is the subclasses'."""

    def __init__(self, work: Work, engine: Engine) -> None:
        count = len(work.partition)
        self.work = work
        self.arrived = array("q", [-1]) * count
        self.started = array("q", [-1]) * count
        self.finished = array("q", [-1]) * count
        self.enough = max(_ENOUGH, _ENOUGH_PER_WORKER * engine.workers)
        self.on_idle = False
        """Whether the pump is woken when a worker finds nothing to do."""
        self._records_per_poll = engine.records_per_poll
        self._bounds = Usage(engine.max_buffered_records, _UNBOUNDED)
        self._logs: list[list[int]] = [[] for _ in range(work.partitions)]
        for record, partition in enumerate(work.partition):
            self._logs[partition].append(record)
        self._next = [0] * len(self._logs)
        self._ready: dict[int, None] = {}
        """Partitions of which something can be fetched, those whose turn it is first."""
        self._held = [0] * len(self._logs)
        self._total = 0
        self._events: list[tuple[int, int, int]] = []
        self._begun = 0
        self._countdown = 0
        self._wake = False
        self._arrives = False
        self._look_at = _POLL_TIMEOUT
        """When the pump looks although nobody has woken it."""

    # What the subclasses do -------------------------------------------------------------

    def wanted(self) -> int:
        """How many more records are wanted."""
        raise NotImplementedError

    def feed(self, partition: int, records: list[int], now: int) -> None:
        """Give records that were taken in to the shards."""
        raise NotImplementedError

    def ended(self, record: int, now: int) -> None:
        """A run ended: its worker goes on."""
        raise NotImplementedError

    # The clock --------------------------------------------------------------------------

    def run(self, until: int) -> None:
        """Process everything that happens up to *until*."""
        events, partition_of, held = self._events, self.work.partition, self._held
        for partition in range(len(self._logs)):
            self._await_next(partition)
        while events and events[0][0] <= until:
            if self._ready and self._look_at < events[0][0]:
                self._pump(self._look_at)
                continue
            now, order, what = heapq.heappop(events)
            if order == _ARRIVALS_FIRST:
                self._ready[what] = None
                self._arrives = True
            else:
                self._total -= 1
                held[partition_of[what]] -= 1
                self._countdown -= 1
                if not self._countdown:
                    self._wake = True
                self.ended(what, now)
            if (self._wake or self._arrives) and not (events and events[0][0] == now):
                self._pump(now)
        for record, finish in enumerate(self.finished):
            if finish > until:
                self.finished[record] = -1

    def start(self, record: int, now: int) -> None:
        """Run a record; its shard and a worker are free."""
        self.started[record] = now
        self.finished[record] = finish = now + self.work.service[record]
        self._begun += 1  # runs that end together end in the order in which they began
        heapq.heappush(self._events, (finish, self._begun, record))

    def found_nothing(self) -> None:
        """A worker found nothing to do."""
        if self.on_idle:
            self.on_idle = False
            self._wake = True

    def _await_next(self, partition: int) -> None:
        log, position = self._logs[partition], self._next[partition]
        if position < len(log):
            heapq.heappush(self._events, (self.work.available[log[position]], _ARRIVALS_FIRST, partition))

    # The pump ---------------------------------------------------------------------------

    def _pump(self, now: int) -> None:
        """Take in what there is room for; see `aioshard.kafka.intake` and `aioshard.engine.admission`."""
        if self._wake or now >= self._look_at:
            self._look_at = now + _POLL_TIMEOUT
        self._wake = self._arrives = False
        while taken := self._poll(now):
            self._look_at = now + _POLL_TIMEOUT
            for partition, records in taken:
                self._total += len(records)
                self._held[partition] += len(records)
                for record in records:
                    self.arrived[record] = now
            for partition, records in taken:
                self.feed(partition, records, now)

    def _poll(self, now: int) -> list[tuple[int, list[int]]]:
        """One look at all partitions; what is taken of one counts against the others, and each has its turn."""
        taken: list[tuple[int, list[int]]] = []
        found = most = 0
        for partition in tuple(self._ready):
            allowed = min(self._allowance(partition), self._records_per_poll)
            most = max(most, allowed)
            if allowed > found:
                records = self._take(partition, allowed - found, now)
                taken.append((partition, records))
                found += len(records)
            if found and found >= most:
                break
        return taken

    def _take(self, partition: int, limit: int, now: int) -> list[int]:
        """Take what is there; a partition that has more goes last the next time."""
        log, first, available = self._logs[partition], self._next[partition], self.work.available
        end = first + 1
        last = min(len(log), first + limit)
        while end < last and available[log[end]] <= now:
            end += 1
        self._next[partition] = end
        del self._ready[partition]
        if end < len(log) and available[log[end]] <= now:
            self._ready[partition] = None
        else:
            self._await_next(partition)
        return log[first:end]

    def _allowance(self, partition: int) -> int:
        bounds, held = self._bounds, self._held[partition]
        room = room_for(bounds, Usage(self._total, 0), Usage(held, 0), stuck=False).records
        if held and room < bounds.records // (_CHUNKS * (len(self._logs) + 1)):
            room = 0
        if not room:
            self._look_again_after(self._total // 10)
            return 0
        wanted = self.wanted()
        if wanted <= 0:
            self.on_idle = True
            self._look_again_after(self.enough // 2 - wanted)
            return 0
        return min(room, wanted)

    def _look_again_after(self, completions: int) -> None:
        after = max(completions, 1)
        self._countdown = min(after, self._countdown) if self._countdown > 0 else after


class _OnDemand(_Member):
    """Shards on demand: the oldest record whose key is not occupied starts first."""

    def __init__(self, work: Work, engine: Engine) -> None:
        super().__init__(work, engine)
        self._idle = engine.workers
        self._arrivals: deque[int] = deque()
        self._occupied: dict[int, deque[int] | None] = {}

    def wanted(self) -> int:
        """No more than keeps the workers busy; what waits behind an occupied key does not count."""
        return self.enough - len(self._arrivals)

    def feed(self, partition: int, records: list[int], now: int) -> None:  # noqa: ARG002 - as the other kind of shards
        """Queue in arrival order; idle workers look."""
        self._arrivals.extend(records)
        while self._idle and self._start_oldest(now):
            self._idle -= 1

    def ended(self, record: int, now: int) -> None:
        """The worker goes on with what waits behind the record, else with the oldest."""
        key = self.work.key[record]
        if key != NO_KEY:
            waiting = self._occupied[key]
            if waiting:
                self.start(waiting.popleft(), now)
                return
            del self._occupied[key]
        if not self._start_oldest(now):
            self._idle += 1
            self.found_nothing()

    def _start_oldest(self, now: int) -> bool:
        arrivals, occupied, keys = self._arrivals, self._occupied, self.work.key
        while arrivals:
            record = arrivals.popleft()
            key = keys[record]
            if key == NO_KEY:
                self.start(record, now)
                return True
            if key not in occupied:
                occupied[key] = None
                self.start(record, now)
                return True
            waiting = occupied[key]
            if waiting is None:
                occupied[key] = waiting = deque()
            waiting.append(record)
        return False


class _FixedShards(_Member):
    """Fixed shards: each has a worker and a bounded queue; a partition waits with all it has while one is full."""

    def __init__(self, work: Work, engine: Engine) -> None:
        super().__init__(work, engine)
        self._depth = engine.depth
        self._shards = fixed_shards(work, engine.shards)
        self._queues: list[deque[int]] = [deque() for _ in range(engine.shards)]
        self._busy = [False] * engine.shards
        self._feeders: list[deque[int]] = [deque() for _ in range(engine.shards)]
        self._unfed: list[deque[int]] = [deque() for _ in self._logs]

    def wanted(self) -> int:
        """What one shard has is of no use to the others, so there is always more wanted."""
        return self.enough

    def feed(self, partition: int, records: list[int], now: int) -> None:
        """Queue in order, and wait where a queue is full."""
        unfed = self._unfed[partition]
        waits = bool(unfed)
        unfed.extend(records)
        if not waits:
            self._feed_on(partition, now)

    def ended(self, record: int, now: int) -> None:
        """The shard goes on with its queue, and whoever waits to feed it with what it has."""
        shard = self._shards[record]
        self._busy[shard] = False
        self._serve(shard, now)
        if not self._busy[shard]:
            self.found_nothing()

    def _serve(self, shard: int, now: int) -> None:
        queue = self._queues[shard]
        if self._busy[shard] or not queue:
            return
        self._busy[shard] = True
        self.start(queue.popleft(), now)
        if self._feeders[shard]:
            self._feed_on(self._feeders[shard].popleft(), now)

    def _feed_on(self, partition: int, now: int) -> None:
        unfed = self._unfed[partition]
        while unfed:
            shard = self._shards[unfed[0]]
            queue = self._queues[shard]
            if len(queue) >= self._depth:
                self._feeders[shard].append(partition)
                return
            queue.append(unfed.popleft())
            self._serve(shard, now)


def fixed_shards(work: Work, shards: int) -> list[int]:
    """Which of *shards* fixed shards serves each record; those without a key take turns, in the order of *work*."""
    turn = 0
    numbers: list[int] = []
    for key in work.key:
        if key == NO_KEY:
            turn = (turn + 1) % shards
            numbers.append(turn)
        else:
            numbers.append(shard_of_hash(key, shards))
    return numbers
