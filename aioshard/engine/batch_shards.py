"""The shards of a batch handler: which deliveries go to it together, and when."""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from aioshard.core.options import Batch
from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.shards import DeliveryBatch, Shards
from aioshard.ports import RECORD_OVERHEAD

_FRESH = 0
"""Level of deliveries that have not failed."""
_ALONE = -1
"""Level of deliveries that run alone: a recovery, a record that cannot be decoded, or one of the last attempts."""

_Kind = tuple[int, Epoch | None]
"""Equal for all deliveries of a batch: their level and, with exactly-once processing, their epoch."""


class BatchShards(Shards):
    """Shards whose deliveries start in batches; `take_batch` replaces `take`, and `end` replaces `next_after`.

    Batches form here, not in the workers: deliveries in an unfinished batch are queued like any others, so that a
    rebalance or an eviction finds them. At most one batch is forming for each number of failures and, with exactly-once
    processing, each partition. A free worker adds new arrivals to it, and takes it once it is full or has waited long
    enough. So all idle workers fill one batch together.

    Invariants:
        * A delivery in a forming batch occupies its shard and has not started.
        * A forming batch waits for at most `linger`. It does not wait at all while a partition drains or nothing
          else can be taken in.
    """

    def __init__(
        self,
        batch: Batch,
        attempts: int,
        bound: int | None = None,
        allows: Callable[[Callable[[], bool]], bool] | None = None,
        *,
        per_epoch: bool = False,
    ) -> None:
        """Create the shards.

        Args:
            batch: Maximum size of a batch, and how long it waits.
            attempts: Attempts per record; they determine how large a batch may be after failures.
            bound: See `Shards`.
            allows: See `Shards`.
            per_epoch: Whether a batch has deliveries of one epoch only, so that they complete or end together.
        """
        super().__init__(bound, allows)
        self._per_epoch = per_epoch
        self._batch = batch
        self._attempts = attempts
        self._forming: dict[_Kind, DeliveryBatch] = {}
        self._running: set[DeliveryBatch] = set()

    # Forming ------------------------------------------------------------------

    def take_batch(self) -> DeliveryBatch | None:
        """Return the batch to run next, or None if none is ready."""
        while True:
            self._fill()
            kind = self._ready()
            if kind is None:
                self._wait_for_more()
                return None
            deliveries = self._forming[kind].deliveries
            if self._forming[kind].timer is not None and any(
                delivery.epoch.gate and not delivery.epoch.may_start(delivery) for delivery in deliveries
            ):
                self._dissolve()  # a gate closed while it waited
                continue
            batch = self._forming.pop(kind)
            if batch.timer is not None:
                batch.timer.cancel()
            self._wait_for_more()
            self._running.add(batch)
            if self._closed and any(delivery.epoch in self._closed for delivery in batch.deliveries):
                batch.revoked.set()
            return batch

    def _ready(self) -> _Kind | None:
        ready = (kind for kind, batch in self._forming.items() if batch.full or batch.overdue or self._drains)
        return next(ready, None)

    def _wait_for_more(self) -> None:
        loop = asyncio.get_running_loop()
        for batch in self._forming.values():
            if batch.timer is None:
                batch.timer = loop.call_at(batch.ripe_at, self._mark_overdue, batch)

    def _mark_overdue(self, batch: DeliveryBatch) -> None:
        batch.overdue = True
        self.notify()

    @property
    def _drains(self) -> bool:
        """Whether a drain is waiting for records to end: then no batch waits for more."""
        return any(epoch.pending for epoch in self._closed)

    def _fill(self) -> None:
        """Add deliveries that may start to the forming batches, oldest first, until one is full."""
        if (self._returning and not self._fill_with_returning()) or self._is_held_up:
            return
        front, arrivals, occupied = self._front, self._arrivals, self._occupied
        max_bytes, per_epoch = self._batch.max_bytes, self._per_epoch
        owner: Epoch | None = None
        fresh = self._forming.get((_FRESH, owner))
        while front or arrivals:
            delivery = front.popleft() if front else arrivals.popleft()
            epoch = delivery.epoch
            if epoch.gate and not self._may_start(delivery):
                self._hold(delivery)
                continue
            if per_epoch and epoch is not owner:
                owner = epoch
                fresh = self._forming.get((_FRESH, owner))
            key = delivery.key
            if fresh is None or key is None or key in occupied or delivery.starts or delivery.aside:
                kind = self._kind_of(delivery) if delivery.starts or delivery.aside else (_FRESH, owner)
                if not self._place(delivery, kind, self._forming.get(kind)):
                    return
                fresh = self._forming.get((_FRESH, owner))
                continue
            # The common case of `_place`, without its calls.
            size = fresh.size + delivery.size - RECORD_OVERHEAD
            if size > max_bytes or fresh.full:
                fresh.full = True
                front.appendleft(delivery)
                return
            occupied[key] = None
            fresh.keys[key] = delivery
            fresh.deliveries.append(delivery)
            fresh.size = size
            if len(fresh.deliveries) >= fresh.limit:
                fresh.full = True
                return

    def _place(self, delivery: Delivery, kind: _Kind, batch: DeliveryBatch | None) -> bool:
        """Put a delivery into *batch*, into a new batch, or behind its key; return whether to continue filling."""
        key, occupied, max_bytes = delivery.key, self._occupied, self._batch.max_bytes
        if key is not None and key in occupied:
            if batch is None or key not in batch.keys or occupied[key] or not batch.has_room_for(delivery, max_bytes):
                return self._wait_behind(delivery)
        else:
            if batch is None:
                batch = self._begin(kind, delivery)
            elif not batch.has_room_for(delivery, max_bytes):
                batch.full = True
                self._front.appendleft(delivery)
                return False
            if key is not None:
                occupied[key] = None
                batch.keys[key] = delivery
        batch.add(delivery, max_bytes)
        return not batch.full

    @property
    def _is_held_up(self) -> bool:
        """Whether this is a fixed shard whose head is running or blocked."""
        return self._is_fixed and bool(self._occupied) and not self._forming

    def _wait_behind(self, delivery: Delivery) -> bool:
        """Queue a delivery behind the one that occupies its shard; return whether later ones may start before it."""
        if self._is_fixed:
            self._front.appendleft(delivery)
            for batch in self._forming.values():
                batch.full = True  # nothing more can join it
            return False
        waiting = self._occupied[delivery.key]
        if waiting is None:
            self._occupied[delivery.key] = waiting = deque()
        waiting.append(delivery)
        return True

    def _fill_with_returning(self) -> bool:
        """Add returning deliveries, and those behind them, to batches; return False as soon as a batch is full."""
        while (delivery := self._take_returning()) is not None:
            kind = self._kind_of(delivery)
            batch = self._forming.get(kind)
            if batch is None:
                batch = self._begin(kind, delivery)
            elif not batch.has_room_for(delivery, self._batch.max_bytes):
                batch.full = True
                self._return(delivery)
                return False
            batch.add(delivery, self._batch.max_bytes)
            if delivery.key is not None:
                batch.keys[delivery.key] = delivery
                self._add_behind(batch, kind, delivery.key)
            if batch.full:
                return False
        return True

    def _add_behind(self, batch: DeliveryBatch, kind: _Kind, key: Hashable) -> None:
        """Add the deliveries waiting behind *key*, up to the first that does not fit or is of another kind."""
        waiting = self._occupied[key]
        while waiting:
            delivery = waiting[0]
            if delivery.epoch.gate and not delivery.epoch.may_start(delivery):
                self._hold(waiting.popleft())
            elif self._kind_of(delivery) == kind and batch.has_room_for(delivery, self._batch.max_bytes):
                batch.add(waiting.popleft(), self._batch.max_bytes)
            else:
                return

    def _kind_of(self, delivery: Delivery) -> _Kind:
        """Return the kind of a delivery: batches group deliveries that have failed equally often."""
        level = delivery.failures
        alone = delivery.recovery is not None or delivery.alone
        if alone or (level and self._batch.size_after(level, self._attempts) <= 1):
            level = _ALONE
        return level, delivery.epoch if self._per_epoch else None

    def _begin(self, kind: _Kind, first: Delivery) -> DeliveryBatch:
        now, (level, _) = asyncio.get_running_loop().time(), kind
        waits_since = first.arrived if level == _FRESH and not first.starts else now
        limit = 1 if level == _ALONE else self._batch.size_after(level, self._attempts)
        batch = self._forming[kind] = DeliveryBatch(limit, waits_since + self._batch.linger)
        batch.overdue = batch.ripe_at <= now
        return batch

    def _dissolve(self) -> None:
        """Requeue the deliveries of all forming batches, ahead of everything else."""
        if not self._forming:
            return
        batches = list(self._forming.values())
        self._forming.clear()
        for batch in batches:
            if batch.timer is not None:
                batch.timer.cancel()
        self._queue_first(
            [delivery for batch in batches for delivery in batch.deliveries],
            [key for batch in batches for key in batch.keys],
        )

    def no_room(self) -> None:
        """Flush forming batches: nothing else can be taken in now, unless a running batch will make room."""
        if self._forming and not self._running:
            for batch in self._forming.values():
                batch.overdue = True
            self.notify()

    def position_of(self, delivery: Delivery) -> str | None:
        """Return in words what a delivery in a forming batch waits for; None if it is not in one."""
        for batch in tuple(self._forming.values()):
            if delivery in batch.deliveries:
                count = len(batch.deliveries)
                return (
                    f"it waits for its batch to fill: {count} of {batch.limit} records, linger={self._batch.linger:g} s"
                )
        return None

    # Overrides of `Shards` for batches ------------------------------------------

    def note_failed(self, delivery: Delivery) -> None:
        """Forget that a key failed: records of many keys run together."""

    def admits(self, delivery: Delivery) -> bool:  # noqa: ARG002 - the signature of `Shards`
        """See `Shards.admits`."""
        return True

    def end(self, batch: DeliveryBatch, left: Sequence[Delivery] = ()) -> list[Delivery]:
        """See `Shards.end`."""
        self._running.discard(batch)
        return super().end(batch, left)

    def put_back(self, batch: DeliveryBatch) -> None:
        """See `Shards.put_back`."""
        self._running.discard(batch)
        super().put_back(batch)

    def close(self, epoch: Epoch) -> None:
        """See `Shards.close`; forming batches stop waiting, so that they do not delay the drain."""
        super().close(epoch)
        self._set_revoked(epoch)
        self._dissolve()
        self.notify()

    def purge(self, epoch: Epoch) -> None:
        """See `Shards.purge`."""
        self._set_revoked(epoch)
        self._dissolve()
        super().purge(epoch)

    def evict(self, epoch: Epoch, first: int) -> list[Delivery]:
        """See `Shards.evict`; the deliveries of forming batches are requeued first."""
        self._dissolve()
        removed = super().evict(epoch, first)
        self.notify()
        return removed

    def _set_revoked(self, epoch: Epoch) -> None:
        for batch in self._running:
            if any(delivery.epoch is epoch for delivery in batch.deliveries):
                batch.revoked.set()

    @property
    def owning(self) -> list[Delivery]:
        """See `Shards.owning`; includes deliveries that wait for their batch to fill."""
        forming = [first for batch in tuple(self._forming.values()) for first in tuple(batch.keys.values())]
        return super().owning + forming

    @property
    def at_rest(self) -> bool:
        """See `Shards.at_rest`."""
        return not self._forming and super().at_rest

    @property
    def _has_work(self) -> bool:
        if self._returning or (self._forming and self._ready() is not None):
            return True
        return bool(self._front or self._arrivals) and not self._is_held_up

    @property
    def _most_starts(self) -> int:
        return len(self._forming) + super()._most_starts
