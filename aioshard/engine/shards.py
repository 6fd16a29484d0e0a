"""The shards of one handler: which delivery starts next, and what waits behind which."""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence

from aioshard.engine.arrivals import Arrivals, BoundedArrivals
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.outcomes import Block

__all__ = ["Shards"]


class Shards:
    """Shards on demand, served oldest head record first, by any number of workers.

    Deliveries wait in arrival order. A worker that is free takes the first one whose shard is not
    occupied; one whose shard is, it moves behind the record that occupies it. A worker that ends a run goes on
    with what waits in the same shard: that was passed over before, so it is older than everything that
    has not been looked at. So the oldest head starts first without a heap, in constant time, however
    many shards there are. Only deliveries that come back (after a retry, or a rebalance) need sorting.

    With a *bound* this is one fixed shard: a bounded queue, and the single key that all its
    deliveries carry is occupied as long as its worker is busy.

    Owned by the event loop: workers call `take`, `next_after` and what follows a failure, fetch tasks
    `put`, the rebalance `reopen` and `purge`.

    Invariants:
        * Of one shard key at most one delivery runs, and none that arrived later has started (I4).
        * A key is in `_occupied` iff a delivery of it runs, waits for a retry, is halted, or is about to
          go on.
        * A delivery is in exactly one place: arrivals, front, behind an occupied key, returning, blocked,
          held (its gate is closed, it owns no shard), or with a worker.
    """

    def __init__(self, bound: int | None = None) -> None:
        self._arrivals: Arrivals = deque() if bound is None else BoundedArrivals(bound)
        self._bounded = self._arrivals if isinstance(self._arrivals, BoundedArrivals) else None
        self._front: deque[Delivery] = deque()
        self._occupied: dict[Hashable, deque[Delivery] | None] = {}
        self._returning: list[tuple[float, int, Delivery]] = []
        self._blocked: dict[Delivery, asyncio.TimerHandle | None] = {}
        self._held: dict[Epoch, list[Delivery]] = {}
        self._closed: set[Epoch] = set()
        self._tie_break = itertools.count()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._waking = False
        self._burst = 1
        self.yielding = 0
        """Workers that let the loop turn although they have more to do."""
        self.on_idle: Callable[[], None] | None = None
        """Called once, when a worker finds nothing to do."""

    def __len__(self) -> int:
        """How many shards are occupied."""
        return len(self._occupied)

    # Feeding ------------------------------------------------------------------

    async def put(self, deliveries: Sequence[Delivery]) -> None:
        """Queue deliveries in order; a bounded shard makes its feeder wait while it is full."""
        if self._bounded is None:
            self._arrivals.extend(deliveries)
            self.notify()
            return
        for delivery in deliveries:
            await self._bounded.queue.put(delivery)
            self.notify()

    def put_first(self, deliveries: Sequence[Delivery]) -> None:
        """Queue deliveries before everything that no worker has looked at, whatever the bound."""
        self._front.extendleft(reversed(deliveries))
        self.notify()

    # Serving ------------------------------------------------------------------

    def take(self) -> Delivery | None:
        """The delivery to run next, or None when nothing may start now."""
        if self._returning and (delivery := self._take_returning()) is not None:
            return delivery
        if self._bounded is not None and self._occupied:
            return None
        front, arrivals, occupied = self._front, self._arrivals, self._occupied
        while True:
            if front:
                delivery = front.popleft()
            elif arrivals:
                delivery = arrivals.popleft()
            else:
                return None
            epoch = delivery.epoch
            if epoch.gate and not epoch.may_start(delivery):
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
        """A run ended for good: the next delivery for the same worker, its own shard first."""
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
        """A delivery leaves its shard: the shard goes on with the first one behind it that may start."""
        key = delivery.key
        if key is None:
            return
        waiting = self._occupied[key]
        while waiting:
            following = waiting.popleft()
            epoch = following.epoch
            if not epoch.gate or epoch.may_start(following):
                self._return(following)
                return
            self._hold(following)
        del self._occupied[key]
        self.notify()  # a fixed shard may have others queued

    def _return(self, delivery: Delivery) -> None:
        """Let a delivery that owns its shard start as soon as a worker is free."""
        heapq.heappush(self._returning, (delivery.arrived, next(self._tie_break), delivery))
        self.notify()

    def _hold(self, delivery: Delivery) -> None:
        """Set a delivery aside, without a shard, until its epoch's gate opens; forget it if that has ended."""
        if delivery.epoch.gate is not Gate.ENDED:
            self._held.setdefault(delivery.epoch, []).append(delivery)

    def _take_returning(self) -> Delivery | None:
        while self._returning:
            delivery = heapq.heappop(self._returning)[2]
            if not delivery.epoch.gate or delivery.epoch.may_start(delivery):
                return delivery
            delivery.epoch.block(delivery.key)
            self._hold(delivery)
            self.release(delivery)
        return None

    # Failing ------------------------------------------------------------------

    def again(self, delivery: Delivery) -> None:
        """A run was cancelled, or its next attempt is due: it runs again, first in its shard, if it may."""
        epoch = delivery.epoch
        if not epoch.gate or (epoch.gate is Gate.PAUSED and epoch.may_start(delivery)):
            self._return(delivery)
        else:
            epoch.settle(delivery)
            epoch.block(delivery.key)  # what is behind it in its partition must not overtake it
            self._hold(delivery)
            self.release(delivery)

    def retry(self, delivery: Delivery, block: Block, delay: float) -> None:
        """A run failed: its shard waits for *delay* seconds, its neighbours do not."""
        self._block(delivery, block, asyncio.get_running_loop().call_later(delay, self._due, delivery))

    def halt(self, delivery: Delivery, block: Block) -> None:
        """A record's attempts are used up: it keeps its shard until its epoch ends, or somebody releases it."""
        self._block(delivery, block, None)

    def unblock(self, delivery: Delivery) -> bool:
        """Let a delivery that is halted, or waits for its next attempt, run now; returns whether it was one."""
        if delivery not in self._blocked:
            return False
        timer = self._blocked[delivery]
        if timer is not None:
            timer.cancel()
        self._due(delivery)
        return True

    def _block(self, delivery: Delivery, block: Block, timer: asyncio.TimerHandle | None) -> None:
        delivery.block = block
        self._blocked[delivery] = timer
        delivery.epoch.settle(delivery)
        for epoch in self._closed:
            epoch.block(delivery.key)

    def _due(self, delivery: Delivery) -> None:
        del self._blocked[delivery]
        delivery.block = None
        self.again(delivery)

    @property
    def halted(self) -> list[Delivery]:
        """The deliveries that hold their shard because their attempts are used up."""
        return [d for d in tuple(self._blocked) if d.block is not None and d.block.halted]

    @property
    def at_rest(self) -> bool:
        """Whether nothing will start unless something arrives: what is left is halted, or behind it."""
        return not self._has_work and not self.yielding and not self._held and len(self.halted) == len(self._blocked)

    # For explanations, from any thread ------------------------------------------

    @property
    def owning(self) -> list[Delivery]:
        """The deliveries that occupy a shard and are in no worker's hands: blocked, or about to go on."""
        return [*tuple(self._blocked), *(delivery for *_, delivery in tuple(self._returning))]

    @property
    def blocked(self) -> list[Delivery]:
        """The deliveries that are halted, or wait for their next attempt."""
        return list(self._blocked)

    @property
    def depth(self) -> int:
        """How many deliveries wait in the fullest shard; of a fixed shard, in it. Safe from any thread."""
        if self._bounded is not None:
            return self.unseen
        return max((len(waiting) for waiting in tuple(self._occupied.values()) if waiting), default=0)

    def depths(self) -> list[tuple[int, Hashable]]:
        """How many deliveries wait behind each key that is occupied, and the key."""
        return [(len(waiting) if waiting else 0, key) for key, waiting in tuple(self._occupied.items())]

    def behind(self, delivery: Delivery) -> int:
        """How many deliveries of its partition wait in the shard of one; of a fixed shard, of whichever partition."""
        if self._bounded is not None:
            return self.unseen
        return sum(1 for waiting in tuple(self._occupied.get(delivery.key) or ()) if waiting.epoch is delivery.epoch)

    def due(self, delivery: Delivery) -> float | None:
        """Loop time of the next attempt of a delivery; None when it waits for none."""
        timer = self._blocked.get(delivery)
        return None if timer is None else timer.when()

    # Probing --------------------------------------------------------------------

    def probe(self, epoch: Epoch) -> Delivery | None:
        """Let one delivery of a paused epoch start, rather one that has not failed yet; the oldest of its shard.

        Returns:
            It, or None when there is none.
        """
        heads: dict[Hashable, Delivery] = {}
        for delivery in sorted(self._held.get(epoch, ()), key=lambda held: held.offset):
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
        """The gate of *epoch* has closed: tell it which shards will not go on while it drains."""
        self._closed.add(epoch)
        for delivery in self._held.get(epoch, ()):
            epoch.settle(delivery)
        for delivery in self._blocked:
            epoch.block(delivery.key)
            if delivery.epoch is epoch:
                epoch.settle(delivery)

    def reopen(self, epoch: Epoch) -> None:
        """Put back what was set aside while the gate of *epoch* was closed, before all that came later."""
        self._closed.discard(epoch)
        held = self._held.pop(epoch, [])
        for key in {delivery.key for delivery in held}:
            # What is set aside leaves its shard, which may have gone on with another partition; what is younger waits
            # there still, and must come after it.
            waiting = self._occupied.get(key)
            if waiting:
                held += [delivery for delivery in waiting if delivery.epoch is epoch]
                self._occupied[key] = deque(delivery for delivery in waiting if delivery.epoch is not epoch)
        # Sorted, because what waited in a shard is older than what was met in the arrivals before it.
        self._front.extendleft(sorted(held, key=lambda delivery: delivery.offset, reverse=True))
        self.notify()

    def purge(self, epoch: Epoch) -> None:
        """Forget the deliveries of an epoch that ended, except those that still run."""
        self._closed.discard(epoch)
        self._held.pop(epoch, None)
        self._remove(lambda delivery: delivery.epoch is epoch)
        for delivery in [d for d in self._blocked if d.epoch is epoch]:
            timer = self._blocked.pop(delivery)
            if timer is not None:
                timer.cancel()
            self.release(delivery)
        self.notify()

    def give_back(self, epoch: Epoch, first: int) -> list[Delivery]:
        """Remove and return what is queued of an epoch that is open or paused, from offset *first* on."""
        removed = self._remove(lambda delivery: delivery.epoch is epoch and delivery.offset >= first)
        if epoch in self._held:
            removed += [delivery for delivery in self._held[epoch] if delivery.offset >= first]
            self._held[epoch] = [delivery for delivery in self._held[epoch] if delivery.offset < first]
        return removed

    def _remove(self, unwanted: Callable[[Delivery], bool]) -> list[Delivery]:
        """Take queued deliveries out, wherever they wait in order."""
        removed: list[Delivery] = []

        def kept(deliveries: Iterable[Delivery]) -> deque[Delivery]:
            rest: deque[Delivery] = deque()
            for delivery in deliveries:
                (removed if unwanted(delivery) else rest).append(delivery)
            return rest

        self._front = kept(self._front)
        for key, waiting in self._occupied.items():
            if waiting:
                self._occupied[key] = kept(waiting)
        if isinstance(self._arrivals, deque):
            self._arrivals = kept(self._arrivals)
        else:
            # Through the queue's own methods, so that a feeder that waits for room is woken.
            self._front.extend(kept([self._arrivals.popleft() for _ in range(len(self._arrivals))]))
        return removed

    # Waking workers -----------------------------------------------------------

    def notify(self) -> None:
        """Wake a worker if one is idle and something may start; more follow while handlers suspend.

        One worker runs ahead. Only when the loop turns and nobody is running ahead any more, because
        its handler waits for something, the next ones are woken, twice as many each time. A handler that
        never suspends so costs no wake-ups, and one that does fills all workers within a few turns.
        """
        if self._idle and not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._wake_workers)

    def _wake_workers(self) -> None:
        self._waking = False
        if not self._idle or not self._has_work:
            self._burst = 1
            return
        if self.yielding:
            self._burst = 1
        else:
            self.wake(self._burst)
            self._burst *= 2
        self.notify()

    @property
    def _has_work(self) -> bool:
        if self._returning:
            return True
        # A fixed shard whose head is blocked starts nothing, whatever waits behind it.
        return bool(self._front or self._arrivals) and not (self._bounded is not None and self._occupied)

    @property
    def unseen(self) -> int:
        """How many deliveries no worker has looked at yet."""
        return len(self._front) + len(self._arrivals)

    def wake(self, workers: int | None = None) -> None:
        """Wake so many idle workers, or all of them, to look at what there is and what is asked of them."""
        for _ in range(len(self._idle) if workers is None else min(workers, len(self._idle))):
            idle = self._idle.popleft()
            if not idle.done():
                idle.set_result(None)

    async def wait(self) -> None:
        """Wait until `take` may have something."""
        if self.on_idle is not None and not self._has_work:
            on_idle, self.on_idle = self.on_idle, None
            on_idle()
        idle = asyncio.get_running_loop().create_future()
        self._idle.append(idle)
        try:
            await idle
        except BaseException:
            if idle in self._idle:
                self._idle.remove(idle)
            else:
                self.notify()  # woken and cancelled at once: hand the turn on
            raise
