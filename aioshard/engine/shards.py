"""The shards of one handler: which delivery starts next, and which ones wait behind it."""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

from aioshard.core.fairness import MOST_FAILING_KEYS, most_failing_runs
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.outcomes import Block
from aioshard.engine.parked_partition import Replay
from aioshard.ports import RECORD_OVERHEAD
from aioshard.records import Record


class DeliveryBatch:
    """Deliveries that go to the handler together; those of one shard are in order.

    Invariants:
        * The batch occupies the shards in `keys`: no other delivery of them runs.
        * All its deliveries have failed equally often, so the batch has a single attempt number.
    """

    __slots__ = (
        "deliveries",
        "full",
        "keys",
        "left_out",
        "limit",
        "overdue",
        "payloads",
        "plain",
        "revoked",
        "ripe_at",
        "size",
        "timer",
    )

    def __init__(self, limit: int, ripe_at: float) -> None:
        self.deliveries: list[Delivery] = []
        """The deliveries that go to the handler."""
        self.left_out: list[Delivery] = []
        """Deliveries of its shards that turned out not to be ready; they follow `deliveries` when the run has ended."""
        self.keys: dict[Hashable, Delivery] = {}
        """The shard keys, each with its first delivery."""
        self.limit = limit
        """Maximum number of deliveries."""
        self.size = 0
        """Bytes of keys, values and headers."""
        self.ripe_at = ripe_at
        """Loop time at which it stops waiting for more deliveries."""
        self.full = False
        self.overdue = False
        """Whether it has waited as long as it may."""
        self.plain = True
        """Whether none of the deliveries was cancelled before or takes a recovery, now or later."""
        self.payloads: list[object] | None = None
        """The converted records for the handler; None if they are not converted before the run."""
        self.timer: asyncio.TimerHandle | None = None
        """Set while it waits for more deliveries."""
        self.revoked = asyncio.Event()
        """Set when one of its partitions is revoked while it runs."""

    @classmethod
    def of_one(cls, delivery: Delivery) -> "DeliveryBatch":
        """Return the batch of a single delivery, which occupies its shard."""
        batch = cls(1, 0.0)
        batch.add(delivery, 0)
        if delivery.key is not None:
            batch.keys[delivery.key] = delivery
        return batch

    def __repr__(self) -> str:
        """Name in messages: the first record and the number of others."""
        first, *others = self.deliveries
        return f"{first!r} and {len(others)} more" if others else repr(first)

    @property
    def records(self) -> list[Record]:
        """Records of its deliveries, in order; a new list each time."""
        return [delivery.record for delivery in self.deliveries]

    def add(self, delivery: Delivery, max_bytes: int) -> None:
        """Append a delivery that has no shard, or whose shard the batch occupies."""
        self.deliveries.append(delivery)
        self.size += delivery.size - RECORD_OVERHEAD
        if delivery.aside:
            self.plain = False
        if len(self.deliveries) >= self.limit or self.size >= max_bytes:
            self.full = True

    def has_room_for(self, delivery: Delivery, max_bytes: int) -> bool:
        """Return whether one more delivery fits; the first always does."""
        fits = not self.deliveries or self.size + delivery.size - RECORD_OVERHEAD <= max_bytes
        return fits and not self.full


class _NextAttempt(NamedTuple):
    """When a failed delivery runs again."""

    due: float
    """Loop time."""
    timer: asyncio.Handle
    """Not always an `asyncio.TimerHandle`: uvloop's handle of a delay that rounds to 0 ms knows no time."""


class BoundedArrivals(asyncio.Queue[Delivery]):
    """Bounded queue of a fixed shard."""

    def __len__(self) -> int:
        return self.qsize()

    def popleft(self) -> Delivery:
        """Remove and return the oldest delivery."""
        return self.get_nowait()


class Shards:
    """Shards created on demand. Any number of workers serve them, oldest head record first.

    Deliveries wait in arrival order. A free worker takes the first delivery whose shard is not occupied. On the way
    it moves each delivery of an occupied shard behind the record that occupies it. A worker that finishes a run
    continues with the next delivery of the same shard. That one was passed over before, so it is older than all
    deliveries that no worker has looked at. The oldest head therefore starts first without a heap, in constant time,
    however many shards there are. Only deliveries that come back (after a retry or a rebalance) need sorting.

    With a *bound*, this is one fixed shard: a bounded queue. All its deliveries carry the same key, which is occupied
    while its worker is busy.

    Owned by the event loop: workers call `take`, `next_after` and the methods for failures, sharding tasks call `put`,
    and the rebalance calls `reopen` and `purge`.

    Invariants:
        * At most one delivery per shard key runs, and no later arrival of that key has started (I4).
        * A key is in `_occupied` iff one of its deliveries is running, waiting for a retry, halted or about to resume.
        * A delivery is in exactly one place: arrivals, front, behind an occupied key, returning, restrained, blocked,
          held (its gate is not open, and it owns no shard), handed over, or with a worker.
        * While other deliveries may start, at most `FAILING_SHARE` of the workers begin runs of failing keys.
    """

    def __init__(self, bound: int | None = None, allows: Callable[[Callable[[], bool]], bool] | None = None) -> None:
        """Create the shards.

        Args:
            bound: For one fixed shard: the capacity of its queue.
            allows: With limits: returns whether a worker may be woken now; if not, calls its argument when it may.
        """
        self._arrivals: deque[Delivery] | BoundedArrivals = deque() if bound is None else BoundedArrivals(bound)
        self._is_fixed = bound is not None
        self._front: deque[Delivery] = deque()
        self._occupied: dict[Hashable, deque[Delivery] | None] = {}
        self._returning: list[tuple[float, int, Delivery]] = []
        self._blocked: dict[Delivery, _NextAttempt | None] = {}
        self._blocked_keys: set[Hashable] = set()
        """Keys of the deliveries in `_blocked`."""
        self._held: dict[Epoch, list[Delivery]] = {}
        self._closed: set[Epoch] = set()
        self._tie_break = itertools.count()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._waking = False
        self._burst = 1
        self._allows = allows
        self._workers = 1
        """Number of workers that may run."""
        self._reserve = 0
        """Number of workers that stay idle, because the concurrency is limited."""
        self._failing_keys: dict[Hashable, None] = {}
        """Keys whose latest run failed, oldest first."""
        self._failing_runs: set[Delivery] = set()
        """Deliveries of failing keys that workers run now."""
        self._restrained: list[tuple[float, int, Delivery]] = []
        """Deliveries of failing keys that own their shards and wait until fewer of them run, oldest first."""
        self._handed_over: deque[Delivery] = deque()
        """Deliveries that own their shards and wait for a recovery worker, in the order in which they came."""
        self._idle_recovering: deque[asyncio.Future[None]] = deque()
        """Recovery workers that wait for one of them."""
        self.yielding = 0
        """Number of workers that are yielding to the event loop although they have more to do."""
        self._on_idle: Callable[[], None] | None = None
        """See `when_idle`."""

    def __len__(self) -> int:
        """Number of occupied shards."""
        return len(self._occupied)

    # Feeding ------------------------------------------------------------------

    async def put(self, deliveries: Sequence[Delivery]) -> None:
        """Queue deliveries in order; wait while a bounded shard is full."""
        arrivals = self._arrivals
        if isinstance(arrivals, deque):
            if self._failing_keys:
                self._mark_failing(deliveries)
            arrivals.extend(deliveries)
            self.notify()
            return
        for delivery in deliveries:
            await arrivals.put(delivery)
            self.notify()

    def put_first(self, deliveries: Sequence[Delivery]) -> None:
        """Queue deliveries ahead of all that no worker has looked at, even beyond the bound."""
        self._front.extendleft(reversed(deliveries))
        self.notify()

    def put_second(self, delivery: Delivery) -> None:
        """Queue a delivery ahead of all that no worker has looked at, except for the first one of them."""
        if not self._front and self._arrivals:
            self._front.append(self._arrivals.popleft())
        self._front.insert(1, delivery)
        self.notify()

    # Serving ------------------------------------------------------------------

    def take(self) -> Delivery | None:
        """Return the delivery to run next, or None if nothing may start now."""
        if self._returning and (delivery := self._take_returning()) is not None:
            return delivery
        if self._is_fixed and self._occupied:
            return None
        front, arrivals, occupied = self._front, self._arrivals, self._occupied
        while True:
            if front:
                delivery = front.popleft()
            elif arrivals:
                delivery = arrivals.popleft()
            else:
                return self._take_restrained() if self._restrained else None
            if delivery.epoch.gate and not self._may_start(delivery):
                self._hold(delivery)
                continue
            key = delivery.key
            if key is None:
                return delivery
            if key not in occupied:
                occupied[key] = None
                return delivery
            waiting = occupied[key]
            if waiting is None:
                occupied[key] = waiting = deque()
            waiting.append(delivery)

    def next_after(self, delivery: Delivery) -> Delivery | None:
        """Return a worker's next delivery after a run ended for good; the shard of that run comes first."""
        key = delivery.key
        if key is not None:
            waiting = self._occupied[key]
            if not waiting:
                del self._occupied[key]
            elif self._returning or waiting[0].epoch.gate:
                self.release(delivery)
            else:
                return waiting.popleft()
        return self.take()

    def release(self, delivery: Delivery) -> None:
        """Release a delivery's shard; it resumes with the first delivery behind it that may start."""
        key = delivery.key
        if key is None:
            return
        waiting = self._occupied[key]
        while waiting:
            successor = waiting.popleft()
            if not successor.epoch.gate or self._may_start(successor):
                if self._failing_keys:
                    self._mark_failing((successor,))
                self._return(successor)
                return
            self._hold(successor)
        del self._occupied[key]
        self.notify()  # a fixed shard may have others queued

    def _may_start(self, delivery: Delivery) -> bool:
        """Return whether a delivery may start although the gate of its epoch is not open.

        A recovery may start during a pause, but not before a record of its key that is held until the pause ends.
        """
        return delivery.epoch.may_start(delivery) and not (
            delivery.epoch.gate is Gate.PAUSED
            and delivery.key is not None
            and any(d.key == delivery.key and d.offset < delivery.offset for d in self._held.get(delivery.epoch, ()))
        )

    def _return(self, delivery: Delivery) -> None:
        """Let a delivery that owns its shard start as soon as a worker is free."""
        heapq.heappush(self._returning, (delivery.arrived, next(self._tie_break), delivery))
        self.notify()

    def _hold(self, delivery: Delivery) -> None:
        """Hold a delivery, without a shard, until its epoch's gate opens; drop it if the epoch has ended.

        If it kept its shard, a record behind it could wait for it while the drain of another partition waits for that
        record: a key is one shard across partitions.
        """
        if delivery.epoch.gate is not Gate.ENDED:
            self._held.setdefault(delivery.epoch, []).append(delivery)

    def _take_returning(self) -> Delivery | None:
        while self._returning:
            delivery = heapq.heappop(self._returning)[2]
            if delivery.may_start:
                return delivery
            self._leave_shard(delivery)
        return None

    def _leave_shard(self, delivery: Delivery) -> None:
        """Hold a delivery that owns its shard and may not start, and let the shard resume without it."""
        delivery.epoch.block(delivery.key)
        self._hold(delivery)
        self.release(delivery)

    # Recovering ---------------------------------------------------------------

    def hand_over(self, delivery: Delivery) -> None:
        """Pass a delivery that takes a recovery, with its shard, from a worker to a recovery worker."""
        self._handed_over.append(delivery)
        self._wake_recovering()

    def take_handed_over(self) -> Delivery | None:
        """Return the delivery whose recovery begins next; None if there is none."""
        while self._handed_over:
            delivery = self._handed_over.popleft()
            if delivery.may_start:
                return delivery
            self._leave_shard(delivery)
        return None

    @property
    def handed_over(self) -> list[Delivery]:
        """Deliveries that wait for a recovery worker. Safe from any thread."""
        return list(self._handed_over)

    def _wake_recovering(self) -> None:
        while self._idle_recovering:
            idle = self._idle_recovering.popleft()
            if not idle.done():
                idle.set_result(None)
                return

    async def wait_for_handed_over(self) -> None:
        """Wait until `take_handed_over` may return a delivery."""
        idle = asyncio.get_running_loop().create_future()
        self._idle_recovering.append(idle)
        try:
            await idle
        except BaseException:
            if idle in self._idle_recovering:
                self._idle_recovering.remove(idle)
            elif self._handed_over:
                self._wake_recovering()  # woken and cancelled at the same time: wake another one
            raise

    def _leave_handed_over(self) -> None:
        """Let the shards of deliveries that may not start any more resume without them."""
        waiting = self._handed_over
        self._handed_over = deque()
        for delivery in waiting:
            if delivery.may_start:
                self._handed_over.append(delivery)
            else:
                self._leave_shard(delivery)

    # Failing keys -------------------------------------------------------------

    def note_failed(self, delivery: Delivery) -> None:
        """Note that the latest run of a delivery's key failed, until one succeeds."""
        key = delivery.key
        if key is None or key in self._failing_keys:
            return
        if len(self._failing_keys) >= MOST_FAILING_KEYS:
            del self._failing_keys[next(iter(self._failing_keys))]
        self._failing_keys[key] = None
        for queue in (self._front, self._arrivals):
            if isinstance(queue, deque):
                self._mark_failing(queue)

    def _mark_failing(self, deliveries: Iterable[Delivery]) -> None:
        """Let workers ask `admits` before they run a delivery of a failing key."""
        failing = self._failing_keys
        for delivery in deliveries:
            if delivery.key in failing:
                delivery.mark_failing()

    def admits(self, delivery: Delivery) -> bool:
        """Return whether a delivery whose key may be failing may run now; if not, it waits with its shard."""
        if delivery.key is not None and delivery.key not in self._failing_keys:
            return True
        others_wait = bool(self._returning or self.unseen)
        if len(self._failing_runs) >= most_failing_runs(self._workers, others_wait=others_wait):
            heapq.heappush(self._restrained, (delivery.arrived, next(self._tie_break), delivery))
            return False
        self._failing_runs.add(delivery)
        return True

    def _take_restrained(self) -> Delivery | None:
        """Return the oldest delivery of a failing key if one more may run, as nothing else waits."""
        while self._may_take_restrained:
            delivery = heapq.heappop(self._restrained)[2]
            if delivery.may_start:
                return delivery
            self._leave_shard(delivery)
        return None

    @property
    def _may_take_restrained(self) -> bool:
        most = most_failing_runs(self._workers, others_wait=False)
        return bool(self._restrained) and len(self._failing_runs) < most

    def is_restrained(self, delivery: Delivery) -> bool:
        """Whether a delivery waits because its key fails. Safe from any thread."""
        return any(waiting is delivery for *_, waiting in tuple(self._restrained))

    def _end_failing(self, batch: DeliveryBatch, left: Collection[Delivery]) -> None:
        """Note how runs of failing keys ended, and let the oldest ones that wait take their places."""
        for delivery in self._failing_runs.intersection(batch.deliveries):
            self._failing_runs.discard(delivery)
            if delivery not in left and delivery.recovery is None:
                self._failing_keys.pop(delivery.key, None)
            if self._restrained:
                heapq.heappush(self._returning, heapq.heappop(self._restrained))

    def _unrestrain(self) -> None:
        """Look at all deliveries of failing keys again, because some may not start any more."""
        for entry in self._restrained:
            heapq.heappush(self._returning, entry)
        self._restrained.clear()

    # Ending -------------------------------------------------------------------

    def end(self, batch: DeliveryBatch, left: Sequence[Delivery] = ()) -> list[Delivery]:
        """Release the shards of a batch whose run has ended.

        Args:
            batch: The deliveries that ran together.
            left: Its deliveries that are not finished, in batch order, without those of ended epochs.

        Returns:
            Those of *left* that keep their shards: the caller passes each one to `resume`, or to `FailureHandler` if
            it has failed. The rest of *left* waits behind them.
        """
        heads: list[Delivery] = []
        behind: dict[Hashable, list[Delivery]] = {}
        for delivery in left:
            key = delivery.key
            # 1. It has no shard, so nothing waits behind it.
            if key is None:
                heads.append(delivery)
            # 2. It is the first of its shard that is left.
            elif key not in behind:
                heads.append(delivery)
                behind[key] = []
            # 3. It waits behind that one: a drain waits neither for it nor for later records of its key.
            else:
                behind[key].append(delivery)
                delivery.epoch.settle(delivery)
                delivery.epoch.block(key)
        if self._failing_runs:
            self._end_failing(batch, left)
        occupied = self._occupied
        for key, first in batch.keys.items():
            if key in behind:
                self._put_behind(key, behind[key])
            elif occupied[key]:
                self.release(first)
            else:
                del occupied[key]
        self.notify()
        return heads

    def _put_behind(self, key: Hashable, deliveries: list[Delivery]) -> None:
        """Queue deliveries behind the one that occupies *key*, ahead of those already waiting there."""
        if deliveries:
            waiting = self._occupied[key]
            if waiting is None:
                self._occupied[key] = waiting = deque()
            waiting.extendleft(reversed(deliveries))

    def _queue_first(self, deliveries: list[Delivery], keys: Collection[Hashable]) -> None:
        """Requeue deliveries ahead of everything else and free their shards; deliveries waiting there follow."""
        for key in keys:
            deliveries += self._occupied.pop(key) or ()
        self.put_first(deliveries)

    def resume(self, delivery: Delivery) -> None:
        """Queue a delivery that holds its shard for its next run; a drain that waits for it keeps waiting."""
        if delivery.may_start:
            self._return(delivery)
        else:
            self.hold(delivery)

    def defer(self, batch: DeliveryBatch) -> None:
        """Queue the deliveries of a batch that was just taken, and may not start now; none counts as started."""
        for head in self.end(batch, [*batch.deliveries, *batch.left_out]):
            self.resume(head)

    def put_back(self, batch: DeliveryBatch) -> None:
        """Requeue the deliveries of a cancelled batch ahead of everything else; hold those that may not start."""
        if self._failing_runs:
            self._end_failing(batch, batch.deliveries)
        requeued: list[Delivery] = []
        for delivery in (*batch.deliveries, *batch.left_out):
            if delivery.may_run_again:
                requeued.append(delivery)
            else:
                self._hold_after_run(delivery)
        self._queue_first(requeued, batch.keys)

    # Failing ------------------------------------------------------------------

    def again(self, delivery: Delivery) -> None:
        """Run a delivery again, first in its shard, if it may start: it was cancelled, or its next attempt is due."""
        if delivery.may_run_again:
            self._return(delivery)
        else:
            self.hold(delivery)

    def hold(self, delivery: Delivery) -> None:
        """Release the shard of a delivery that may not start, and hold it until the gate of its epoch opens."""
        self._hold_after_run(delivery)
        self.release(delivery)

    def _hold_after_run(self, delivery: Delivery) -> None:
        """Hold a delivery that has run; in a drain, later records of its shard and partition must not overtake it."""
        delivery.epoch.settle(delivery)
        delivery.epoch.block(delivery.key)
        self._hold(delivery)

    def block(self, delivery: Delivery, block: Block, delay: float | None = None) -> None:
        """Let a failed delivery keep its shard for *delay* seconds, then run it again; other shards do not wait.

        Without a delay it keeps its shard until its epoch ends or it is released.
        """
        delivery.block = block
        self._blocked[delivery] = None if delay is None else self._unblock_after(delivery, delay)
        self._blocked_keys.add(delivery.key)
        delivery.epoch.settle(delivery)
        for epoch in self._closed:
            epoch.block(delivery.key)

    def _unblock_after(self, delivery: Delivery, delay: float) -> _NextAttempt:
        loop = asyncio.get_running_loop()
        return _NextAttempt(loop.time() + delay, loop.call_later(delay, self.unblock, delivery))

    def unblock(self, delivery: Delivery) -> None:
        """Run a halted delivery, or one that waits for its next attempt, now; do nothing for any other delivery."""
        if delivery in self._blocked:
            self._forget_block(delivery)
            delivery.block = None
            self.again(delivery)

    def _forget_block(self, delivery: Delivery) -> None:
        next_attempt = self._blocked.pop(delivery)
        self._blocked_keys.discard(delivery.key)
        if next_attempt is not None:
            next_attempt.timer.cancel()

    def give_way(self, delivery: Delivery) -> bool:
        """Queue a delivery that holds its shard, and cannot be parked, behind a parked record that runs again there.

        Otherwise each could wait for the other: no more records can be parked until that one succeeds.

        Returns:
            Whether there is one, which runs now; if not, nothing has changed.
        """
        if isinstance(delivery, Replay):
            return False
        queues = [self._occupied.get(delivery.key)]
        if self._is_fixed:
            queues.append(self._front)
        for queue in queues:
            replay = next((waiting for waiting in queue or () if isinstance(waiting, Replay)), None)
            if queue is None or replay is None:
                continue
            queue.remove(replay)
            self._put_behind(delivery.key, [delivery])
            # A drain does not wait for the delivery, which has failed.
            delivery.epoch.settle(delivery)
            delivery.epoch.block(delivery.key)
            self._return(replay)
            return True
        return False

    def is_waiting(self, delivery: Delivery) -> bool:
        """Whether a delivery, or the one that occupies its shard, waits for something that takes no worker."""
        return delivery.block is not None or (delivery.key is not None and delivery.key in self._blocked_keys)

    @property
    def halted(self) -> list[Delivery]:
        """Deliveries that hold their shard because their attempts are exhausted."""
        return [d for d in tuple(self._blocked) if d.block is not None and d.block.halted]

    @property
    def at_rest(self) -> bool:
        """Whether nothing will start until something arrives: all that is left is halted or behind a halted record."""
        if self._has_work or self.yielding or self._held or self._handed_over:
            return False
        return len(self.halted) == len(self._blocked)

    # Explanations; safe from any thread -----------------------------------------

    @property
    def owning(self) -> list[Delivery]:
        """Deliveries that occupy a shard without a worker running them: blocked, handed over, or about to resume."""
        waiting = (*tuple(self._returning), *tuple(self._restrained))
        return [*tuple(self._blocked), *tuple(self._handed_over), *(delivery for *_, delivery in waiting)]

    @property
    def blocked(self) -> list[Delivery]:
        """Deliveries that are halted or wait for their next attempt."""
        return list(self._blocked)

    @property
    def depth(self) -> int:
        """Number of deliveries waiting in the fullest shard, or in this fixed shard. Safe from any thread."""
        return self.unseen if self._is_fixed else max((depth for depth, _ in self.depths()), default=0)

    def depths(self) -> list[tuple[int, Hashable]]:
        """Return the number of deliveries waiting behind each occupied key, with the key."""
        return [(len(waiting) if waiting else 0, key) for key, waiting in tuple(self._occupied.items())]

    def behind(self, delivery: Delivery) -> int:
        """Count the deliveries of the same partition waiting in its shard; in a fixed shard, of all partitions."""
        if self._is_fixed:
            return self.unseen
        return sum(1 for waiting in tuple(self._occupied.get(delivery.key) or ()) if waiting.epoch is delivery.epoch)

    def due(self, delivery: Delivery) -> float | None:
        """Return the loop time of a delivery's next attempt, or None if none is scheduled."""
        next_attempt = self._blocked.get(delivery)
        return None if next_attempt is None else next_attempt.due

    # Probing --------------------------------------------------------------------

    def probe(self, epoch: Epoch) -> Delivery | None:
        """Start one delivery of a paused epoch: the oldest of its shard, preferably one that has not failed yet.

        Returns:
            The delivery, or None if there is none.
        """
        heads: dict[Hashable, Delivery] = {}
        for delivery in sorted(self._held.get(epoch, ()), key=lambda delivery: delivery.offset):
            heads.setdefault(delivery if delivery.key is None else delivery.key, delivery)
        free = [d for d in heads.values() if d.key is None or d.key not in self._occupied]
        if free:
            probe = min(free, key=lambda head: (head.failures, head.offset))
            self._held[epoch].remove(probe)
            if probe.key is not None:
                self._occupied[probe.key] = None
            epoch.probe = probe
            self._return(probe)
            return probe
        waiting = [d for d in self._blocked if d.epoch is epoch and d.block is not None and not d.block.halted]
        if not waiting:
            return None
        epoch.probe = probe = min(waiting, key=lambda blocked: blocked.offset)
        self.unblock(probe)
        return probe

    # Rebalancing --------------------------------------------------------------

    def close(self, epoch: Epoch) -> None:
        """Report to *epoch*, whose gate has closed, which shards will not resume while it drains."""
        self._closed.add(epoch)
        self._unrestrain()
        for delivery in self._held.get(epoch, ()):
            epoch.settle(delivery)
        for delivery in self._blocked:
            epoch.block(delivery.key)
            if delivery.epoch is epoch:
                epoch.settle(delivery)

    def reopen(self, epoch: Epoch) -> None:
        """Requeue the deliveries held while the gate of *epoch* was not open, ahead of all that came later."""
        self._closed.discard(epoch)
        deliveries = self._held.pop(epoch, [])
        for key in {delivery.key for delivery in deliveries}:
            # A held delivery has left its shard, which may have continued with another partition. Younger deliveries
            # still wait there and must come after it.
            waiting = self._occupied.get(key)
            if waiting:
                deliveries += [delivery for delivery in waiting if delivery.epoch is epoch]
                self._occupied[key] = deque(delivery for delivery in waiting if delivery.epoch is not epoch)
        # Sort: a delivery that waited in a shard may be older than one held earlier, straight from the arrivals.
        self._front.extendleft(sorted(deliveries, key=lambda delivery: delivery.offset, reverse=True))
        self.notify()

    def purge(self, epoch: Epoch) -> None:
        """Drop the deliveries of an ended epoch, except those still running."""
        self._closed.discard(epoch)
        self._held.pop(epoch, None)
        self._unrestrain()
        self._leave_handed_over()
        self._remove(lambda delivery: delivery.epoch is epoch)
        for delivery in [d for d in self._blocked if d.epoch is epoch]:
            self._forget_block(delivery)
            self.release(delivery)
        self.notify()

    def evict(self, epoch: Epoch, first: int) -> list[Delivery]:
        """Remove and return the queued deliveries of an open or paused epoch, from offset *first* on."""
        removed = self._remove(lambda delivery: delivery.epoch is epoch and delivery.offset >= first)
        if epoch in self._held:
            removed += [delivery for delivery in self._held[epoch] if delivery.offset >= first]
            self._held[epoch] = [delivery for delivery in self._held[epoch] if delivery.offset < first]
        return removed

    def _remove(self, unwanted: Callable[[Delivery], bool]) -> list[Delivery]:
        """Remove unwanted deliveries from all queues, and return them."""
        removed: list[Delivery] = []

        def keep(deliveries: Iterable[Delivery]) -> deque[Delivery]:
            rest: deque[Delivery] = deque()
            for delivery in deliveries:
                (removed if unwanted(delivery) else rest).append(delivery)
            return rest

        self._front = keep(self._front)
        for key, waiting in self._occupied.items():
            if waiting:
                self._occupied[key] = keep(waiting)
        if isinstance(self._arrivals, deque):
            self._arrivals = keep(self._arrivals)
        else:
            # Use the queue's own methods, so that a sharding task that waits for room wakes up.
            self._front.extend(keep([self._arrivals.popleft() for _ in range(len(self._arrivals))]))
        return removed

    # Waking workers -----------------------------------------------------------

    def notify(self) -> bool:
        """Wake a worker if one is idle and something may start; more follow while handlers suspend.

        One worker runs ahead. More are woken only when it stops running ahead because its handler suspends, so that
        the event loop runs again; each time, twice as many, but no more than there are deliveries. A handler that
        never suspends costs no wake-ups, and one that does fills all workers within a few iterations of the event
        loop.

        Returns:
            Whether a worker is being woken.
        """
        if self._can_wake and not self._waking:
            allows = self._allows
            if allows is None or (self._has_work and allows(self.notify)):
                self._waking = True
                asyncio.get_running_loop().call_soon(self._wake_workers)
        return self._waking

    def _wake_workers(self) -> None:
        self._waking = False
        if not self._can_wake or not self._has_work:
            self._burst = 1
            return
        if self.yielding:
            self._burst = 1
        else:
            for _ in range(min(self._burst, len(self._idle), self._most_starts)):
                idle = self._idle.popleft()
                if not idle.done():
                    idle.set_result(None)
            self._burst *= 2 if self._allows is None else 1
        self.notify()

    def limit_workers(self, allowed: int, existing: int) -> None:
        """Let only a number of the existing workers run; busy ones end their runs first.

        Fewer than all are possible with `LimitedShards` and `LimitedBatchShards`.
        """
        self._workers = allowed
        self._reserve = existing - allowed
        self.notify()

    @property
    def allowed_workers(self) -> int:
        """Number of workers that may run."""
        return self._workers

    @property
    def spare_workers(self) -> int:
        """Number of idle workers that no delivery waits for."""
        return max(len(self._idle) - self._reserve - self.unseen - len(self._returning), 0)

    @property
    def _can_wake(self) -> bool:
        """Whether a worker is idle and may be woken."""
        return len(self._idle) > self._reserve

    @property
    def _has_surplus(self) -> bool:
        """Whether more workers are busy than the limit allows."""
        return len(self._idle) < self._reserve

    @property
    def _has_work(self) -> bool:
        if self._returning:
            return True
        # A fixed shard whose head is blocked starts nothing, even if deliveries wait behind it.
        if (self._front or self._arrivals) and not (self._is_fixed and self._occupied):
            return True
        return self._may_take_restrained

    @property
    def _most_starts(self) -> int:
        """Upper bound of the runs that may start now; at least 1 if there is work."""
        return len(self._returning) + len(self._restrained) + self.unseen

    @property
    def unseen(self) -> int:
        """Number of deliveries that no worker has looked at yet."""
        return len(self._front) + len(self._arrivals)

    def when_idle(self, call: Callable[[], None]) -> None:
        """Arrange for *call* to be called once when a worker finds nothing to do; it replaces an earlier one."""
        self._on_idle = call

    async def wait(self) -> None:
        """Wait until `take` may return a delivery."""
        on_idle = self._on_idle
        if on_idle is not None and not self._has_work:
            self._on_idle = None
            on_idle()
        idle = asyncio.get_running_loop().create_future()
        self._idle.append(idle)
        try:
            await idle
        except BaseException:
            if idle in self._idle:
                self._idle.remove(idle)
            else:
                self.notify()  # woken and cancelled at the same time: wake another worker
            raise
