"""Shards that start runs only as a limit allows: a rate limit, the number of worker processes, or of workers."""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from aioshard.core.options import Batch
from aioshard.engine.batch_shards import BatchShards
from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.limits import Alarm, KeyLimit, SharedLimit
from aioshard.engine.shards import DeliveryBatch, Shards


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
        self._refused: Callable[[], bool] | None = None
        """Called when a slot becomes free."""

    @property
    def holders(self) -> tuple[Hashable, ...]:
        """The workers that hold a slot. Safe from any thread."""
        return tuple(self._holders)

    def allows(self, otherwise: Callable[[], bool]) -> bool:
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

    def __init__(self, rate: SharedLimit | None, slots: ProcessSlots | None) -> None:
        """Combine the limits; the attempts themselves take and release the slots."""
        self._rate = rate
        self._slots = slots

    def allow(self, otherwise: Callable[[], bool]) -> bool:
        """Return whether a run may start now; if not, *otherwise* is called when it may."""
        slots, rate = self._slots, self._rate
        if slots is not None and not slots.allows(otherwise):
            return False
        return rate is None or rate.allows(otherwise)

    def spend(self, shards: Callable[[], bool]) -> None:
        """Spend the token of a run that starts now; *shards* is what they have passed to `allow`."""
        if self._rate is not None:
            self._rate.take(shards)

    def put_back(self, delivery: Delivery) -> None:
        """Return the token of a run that does not start."""
        if self._rate is not None:
            self._rate.put_back(delivery)


_Tokens = TypeVar("_Tokens", StartLimits, KeyLimit)


class _TokenShards(Shards, Generic[_Tokens]):
    """Shards in which a delivery that `take` returns for a run of the handler has spent a token."""

    def __init__(self, tokens: _Tokens, bound: int | None, allows: Callable[[Callable[[], bool]], bool] | None) -> None:
        """Make shards that return the token of a run which does not start; see `Shards` for the rest."""
        super().__init__(bound, allows)
        self._tokens: _Tokens = tokens

    def admits(self, delivery: Delivery) -> bool:
        """See `Shards.admits`."""
        admitted = super().admits(delivery)
        if not admitted:
            self._tokens.put_back(delivery)
        return admitted

    def next_after(self, delivery: Delivery) -> Delivery | None:
        """See `Shards.next_after`."""
        self.release(delivery)
        return self.take()

    def defer(self, batch: DeliveryBatch) -> None:
        """See `Shards.defer`."""
        delivery = batch.deliveries[0]
        if delivery.recovery is None:
            self._tokens.put_back(delivery)
        super().defer(batch)


class LimitedShards(_TokenShards[StartLimits]):
    """Shards whose runs start only when the limits allow it."""

    def __init__(self, limits: StartLimits, bound: int | None) -> None:
        super().__init__(limits, bound, limits.allow)

    def take(self) -> Delivery | None:
        """See `Shards.take`."""
        if not self._has_work or self._has_surplus or not self._tokens.allow(self.notify):
            return None
        delivery = super().take()
        if delivery is not None and delivery.recovery is None:
            self._tokens.spend(self.notify)
        return delivery


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
            self._limits.spend(self.notify)
        return batch

    def defer(self, batch: DeliveryBatch) -> None:
        """See `Shards.defer`."""
        if batch.deliveries[0].recovery is None:
            self._limits.put_back(batch.deliveries[0])
        super().defer(batch)


class KeyLimitedShards(_TokenShards[KeyLimit]):
    """Shards on demand in which the runs of each key start only as the limit of that key allows it.

    Invariants:
        * A delivery that waits for a token occupies its shard and no worker; other shards do not wait.
        * One timer serves all of them.
    """

    def __init__(self, limit: KeyLimit, slots: ProcessSlots | None) -> None:
        super().__init__(limit, None, None if slots is None else slots.allows)
        self._slots = slots
        self._limited: dict[Delivery, float] = {}
        """The deliveries that wait for a token, each with the loop time at which there should be one."""
        self._limited_keys: set[Hashable] = set()
        """Their keys."""
        self._schedule: list[tuple[float, int, Delivery]] = []
        """The same as a heap; it may also have deliveries that wait no longer, until they would have been due."""
        self._order = itertools.count()
        self._alarm = Alarm(self._resume_due)

    def take(self) -> Delivery | None:
        """See `Shards.take`."""
        slots = self._slots
        if self._has_surplus:
            return None
        if slots is not None and not (self._has_work and slots.allows(self.notify)):
            return None
        while (delivery := super().take()) is not None:
            due = 0.0 if delivery.recovery is not None else self._tokens.take(delivery)
            if not due:
                return delivery
            self._wait_for_token(delivery, due)
        return None

    # Waiting --------------------------------------------------------------------

    def _wait_for_token(self, delivery: Delivery, seconds: float) -> None:
        due = asyncio.get_running_loop().time() + seconds
        self._limited[delivery] = due
        self._limited_keys.add(delivery.key)
        heapq.heappush(self._schedule, (due, next(self._order), delivery))
        self._tokens.add_waiting(1)
        self._alarm.ring_at(due)

    def _resume_due(self) -> None:
        """Let the deliveries whose tokens are due start."""
        now = asyncio.get_running_loop().time()
        schedule = self._schedule
        while schedule and schedule[0][0] <= now:
            due, _, delivery = heapq.heappop(schedule)
            if self._limited.get(delivery) == due:
                self._stop_waiting(delivery)
                self._return(delivery)
        if schedule:
            self._alarm.ring_at(schedule[0][0])

    def _stop_waiting(self, delivery: Delivery) -> None:
        del self._limited[delivery]
        self._limited_keys.discard(delivery.key)
        self._tokens.add_waiting(-1)

    def is_waiting(self, delivery: Delivery) -> bool:
        """See `Shards.is_waiting`; includes those that wait for a token of their key."""
        return super().is_waiting(delivery) or (delivery.key is not None and delivery.key in self._limited_keys)

    def token_due(self, delivery: Delivery) -> float | None:
        """Return the loop time at which the key of a delivery should have a token; None if it does not wait for one.

        Safe from any thread.
        """
        return self._limited.get(delivery)

    # Rebalancing and eviction ---------------------------------------------------

    def purge(self, epoch: Epoch) -> None:
        """See `Shards.purge`."""
        super().purge(epoch)
        for delivery in [waiting for waiting in self._limited if waiting.epoch is epoch]:
            self._stop_waiting(delivery)
            self.release(delivery)

    def evict(self, epoch: Epoch, first: int) -> list[Delivery]:
        """See `Shards.evict`; it includes deliveries that wait for a token of their key."""
        removed = super().evict(epoch, first)
        for delivery in [waiting for waiting in self._limited if waiting.epoch is epoch and waiting.offset >= first]:
            self._stop_waiting(delivery)
            self.release(delivery)
            removed.append(delivery)
        return removed

    @property
    def at_rest(self) -> bool:
        """See `Shards.at_rest`."""
        return not self._limited and super().at_rest

    @property
    def owning(self) -> list[Delivery]:
        """See `Shards.owning`; includes deliveries that wait for a token of their key."""
        return super().owning + list(self._limited)
