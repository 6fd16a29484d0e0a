"""Shards that start runs only as a limit allows: a rate limit, the number of worker processes, or of workers."""

import asyncio
import math
from collections.abc import Callable, Hashable

from aioshard.core.options import Batch, RateLimit
from aioshard.engine.batch_shards import BatchShards
from aioshard.engine.epoch import Delivery
from aioshard.engine.shards import DeliveryBatch, Shards

_AHEAD = 10.0
"""Seconds of work that a rate-limited handler may queue: more would only wait in memory and grow old."""


class TokenBucket:
    """The tokens of one rate limit: each start takes one, and tokens return at the limit's rate.

    It counts tokens since it was last full instead of adding fractions to a level, so it never drifts, however long
    it is used. It has no clock: times are seconds on a monotonic clock of the caller.

    Invariants:
        * In any t seconds at most `at_once + per_second * t` calls of `take` return true.
        * No token is lost: a caller that takes each one as soon as it is due gets exactly `per_second` tokens.
        * `take(now)` returns true if and only if `due(now)` is 0.
    """

    __slots__ = ("_burst", "_full_at", "_rate", "_taken")

    def __init__(self, limit: RateLimit) -> None:
        self._rate = limit.per_second
        self._burst = limit.at_once
        self._full_at = -math.inf
        """When the bucket was last observed full."""
        self._taken = 0
        """Number of tokens taken since then."""

    def take(self, now: float) -> bool:
        """Take a token if one is available; return whether it was."""
        if self._full(now):
            self._full_at = now
            self._taken = 1
            return True
        if now < self._due_at():
            return False
        self._taken += 1
        return True

    def put_back(self) -> None:
        """Return the token that `take` has just taken, which was not needed."""
        self._taken -= 1

    def due(self, now: float) -> float:
        """Return the seconds until a token is available; 0 if there is one now."""
        return 0.0 if self._full(now) else max(self._due_at() - now, 0.0)

    def _full(self, now: float) -> bool:
        return now >= self._full_at + self._taken / self._rate

    def _due_at(self) -> float:
        return self._full_at + (self._taken + 1 - self._burst) / self._rate


class Pace:
    """The rate limit of one handler, shared by all its shards.

    Shards that find no token are called back when there is one, the longest waiting first. A single timer serves all
    of them.
    """

    def __init__(self, limit: RateLimit, clock: Callable[[], float]) -> None:
        """Start with all tokens available; *clock* returns the loop time."""
        self.limit = limit
        self._clock = clock
        self._bucket = TokenBucket(limit)
        self._refused: dict[Callable[[], None], None] = {}
        """Callbacks of waiting shards, in order."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def ahead(self) -> int:
        """Number of runs that the handler can start soon."""
        return max(int(self.limit.per_second * _AHEAD), self.limit.at_once)

    def due(self) -> float:
        """Return the seconds until the limit allows a run, or 0 if it does now. Safe from any thread."""
        return self._bucket.due(self._clock())

    def allows(self, otherwise: Callable[[], None]) -> bool:
        """Return whether the limit allows a run now; if not, *otherwise* is called when it does."""
        due = self.due()
        if due:
            self._refused[otherwise] = None
            self._wait(due)
        return not due

    def take(self) -> None:
        """Spend the token of a run that starts now."""
        self._bucket.take(self._clock())

    def put_back(self) -> None:
        """Return the token of a run that does not start."""
        self._bucket.put_back()

    def _wait(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._call_next)

    def _call_next(self) -> None:
        self._timer = None
        due = self.due()
        if not due and self._refused:
            callback = next(iter(self._refused))
            del self._refused[callback]
            callback()
        if self._refused:
            self._wait(due)  # right away if a token was due: the first may have nothing left to start


class ProcessSlots:
    """How many runs of one handler may need a worker process at the same time.

    A run holds a slot from its start until the process has returned its result, but not while the result is published.
    So a record that waits for a process has not started, and a drain does not wait for it.

    Invariants:
        * A worker holds at most one slot.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._holders: set[Hashable] = set()
        self._refused: Callable[[], None] | None = None
        """Called when a slot becomes free."""

    @property
    def holders(self) -> tuple[Hashable, ...]:
        """The workers that hold a slot. Safe from any thread."""
        return tuple(self._holders)

    def allows(self, otherwise: Callable[[], None]) -> bool:
        """Return whether a slot is free; if not, *otherwise* is called when one is."""
        is_free = len(self._holders) < self.number
        if not is_free:
            self._refused = otherwise
        return is_free

    def take(self, worker: Hashable) -> None:
        """Take a slot for the run that starts now."""
        self._holders.add(worker)

    def release(self, worker: Hashable) -> None:
        """Release the slot of a worker, if it holds one."""
        self._holders.discard(worker)
        refused = self._refused
        if refused is not None and len(self._holders) < self.number:
            self._refused = None
            refused()


class StartLimits:
    """The limits on the starts of a handler's runs; they also hold while a partition drains.

    A recovery waits for them too, but uses up nothing.
    """

    def __init__(self, pace: Pace | None, slots: ProcessSlots | None) -> None:
        """Combine the limits; the attempts themselves take and release the slots."""
        self._pace = pace
        self._slots = slots

    def allow(self, otherwise: Callable[[], None]) -> bool:
        """Return whether a run may start now; if not, *otherwise* is called when it may."""
        slots, pace = self._slots, self._pace
        if slots is not None and not slots.allows(otherwise):
            return False
        return pace is None or pace.allows(otherwise)

    def spend(self) -> None:
        """Spend the token of a run that starts now."""
        if self._pace is not None:
            self._pace.take()

    def put_back(self) -> None:
        """Return the token of a run that does not start."""
        if self._pace is not None:
            self._pace.put_back()


class LimitedShards(Shards):
    """Shards whose runs start only when the limits allow it.

    Invariants:
        * A delivery that `take` returns for a handler run has spent its token.
    """

    def __init__(self, limits: StartLimits, bound: int | None) -> None:
        super().__init__(bound, limits.allow)
        self._limits = limits

    def take(self) -> Delivery | None:
        """See `Shards.take`."""
        if not self._has_work or self._has_surplus or not self._limits.allow(self.notify):
            return None
        delivery = super().take()
        if delivery is not None and delivery.recovery is None:
            self._limits.spend()
        return delivery

    def admits(self, delivery: Delivery) -> bool:
        """See `Shards.admits`."""
        admitted = super().admits(delivery)
        if not admitted:
            self._limits.put_back()
        return admitted

    def next_after(self, delivery: Delivery) -> Delivery | None:
        """See `Shards.next_after`."""
        self.release(delivery)
        return self.take()

    def defer(self, batch: DeliveryBatch) -> None:
        """See `Shards.defer`."""
        if batch.deliveries[0].recovery is None:
            self._limits.put_back()
        super().defer(batch)


class LimitedBatchShards(BatchShards):
    """Batch shards whose runs start only when the limits allow it; a batch is one run."""

    def __init__(
        self, limits: StartLimits, batch: Batch, attempts: int, bound: int | None, *, per_epoch: bool = False
    ) -> None:
        super().__init__(batch, attempts, bound, limits.allow, per_epoch=per_epoch)
        self._limits = limits

    def take_batch(self) -> DeliveryBatch | None:
        """See `BatchShards.take_batch`."""
        if not self._has_work or self._has_surplus or not self._limits.allow(self.notify):
            return None
        batch = super().take_batch()
        if batch is not None and batch.deliveries[0].recovery is None:
            self._limits.spend()
        return batch

    def defer(self, batch: DeliveryBatch) -> None:
        """See `Shards.defer`."""
        if batch.deliveries[0].recovery is None:
            self._limits.put_back()
        super().defer(batch)
