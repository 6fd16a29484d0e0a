"""Shards that start runs no faster than rate limits allow; handlers without limits do not use them."""

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable

from aioshard.core.batching import Batch
from aioshard.core.pace import KeyedTokenBuckets, RateLimit, TokenBucket
from aioshard.engine.batches.batch_shards import BatchShards
from aioshard.engine.batches.delivery_batch import DeliveryBatch
from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.shards import Shards

__all__ = ["Pace", "PacedBatchShards", "PacedShards"]

_PATIENCE = 5.0
"""Seconds that a drain waits for the records of one rate-limited key; records that need longer run again elsewhere."""
_AHEAD = 10.0
"""Seconds of work that a rate-limited handler may queue: more would only wait in memory and grow old."""


class Pace:
    """Rate limits of one handler: tokens for all its runs together, and for the runs of each shard key.

    Shared by the handler's shards. Shards that find no token are called back when there is one, the longest waiting
    first. A single timer serves all shards that wait for a token of the handler.
    """

    def __init__(self, limit: RateLimit | None, key_limit: RateLimit | None, clock: Callable[[], float]) -> None:
        """Start with all tokens available.

        Args:
            limit: Limit of all runs together.
            key_limit: Limit of the runs of each shard key, or of each fixed shard.
            clock: Returns the loop time.
        """
        self.limit = limit
        self.key_limit = key_limit
        self._clock = clock
        self._bucket = None if limit is None else TokenBucket(limit)
        self._keys = None if key_limit is None else KeyedTokenBuckets(key_limit)
        self._refused: dict[Callable[[], None], None] = {}
        """Callbacks of waiting shards, in order."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def ahead(self) -> int | None:
        """Number of runs that the handler can start soon; None if it has no limit."""
        return None if self.limit is None else max(int(self.limit.per_second * _AHEAD), self.limit.at_once)

    def due(self) -> float:
        """Return the seconds until the handler's limit allows a run, or 0 if it does now. Safe from any thread."""
        return 0.0 if self._bucket is None else self._bucket.due(self._clock())

    def key_due(self, key: Hashable) -> float:
        """Return the seconds until the key limit allows a run of a shard key. Safe from any thread.

        Records without an order have no key, so this limit does not apply to them.
        """
        return 0.0 if self._keys is None or key is None else self._keys.due(key, self._clock())

    def allows(self, otherwise: Callable[[], None]) -> bool:
        """Return whether the handler's limit allows a run now; if not, *otherwise* is called when it does."""
        due = self.due()
        if not due:
            return True
        self._refused[otherwise] = None
        self._wait(due)
        return False

    def take(self, key: Hashable) -> None:
        """Spend the tokens of a run that starts now."""
        now = self._clock()
        if self._bucket is not None:
            self._bucket.take(now)
        if self._keys is not None and key is not None:
            self._keys.take(key, now)

    def _wait(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._call_next)

    def _call_next(self) -> None:
        self._timer = None
        due = self.due()
        if not due and self._refused:
            first = next(iter(self._refused))
            del self._refused[first]
            first()
        if self._refused:
            self._wait(due)  # right away if a token was due: the first may have nothing left to start


class _Paced(Shards):
    """Shards that wake workers only while tokens are available, and only as many as there are tokens."""

    pace: Pace

    def notify(self) -> None:
        """See `Shards.notify`."""
        if self._has_work and self._idle and self.pace.allows(self.notify):
            super().notify()

    def _wake_workers(self) -> None:
        if self.pace.limit is not None:
            self._burst = 1
        super()._wake_workers()


class PacedShards(_Paced):
    """Shards with rate limits.

    Nothing starts without a token of the handler. A delivery whose key has no token keeps its shard, like one that
    waits for its next attempt; other shards continue. Both limits also hold while a partition drains.

    Invariants:
        * A delivery that `take` returns for a handler run has spent its tokens.
    """

    def __init__(self, pace: Pace, bound: int | None = None) -> None:
        super().__init__(bound)
        self.pace = pace
        self._limited: dict[Delivery, asyncio.TimerHandle] = {}

    def take(self) -> Delivery | None:
        """See `Shards.take`."""
        while self._has_work and self.pace.allows(self.notify):
            delivery = super().take()
            if delivery is None or delivery.detour is not None:
                return delivery  # a detour does not run the handler
            seconds = self.pace.key_due(delivery.key)
            if not seconds:
                self.pace.take(delivery.key)
                return delivery
            self._limit(delivery, seconds)
        return None

    def next_after(self, delivery: Delivery) -> Delivery | None:
        """See `Shards.next_after`."""
        self.release(delivery)
        return self.take()

    # Keys without a token ---------------------------------------------------------

    def _limit(self, delivery: Delivery, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        delivery.limited_since = loop.time()
        self._limited[delivery] = loop.call_later(seconds, self._token_due, delivery)
        epoch = delivery.epoch
        if epoch.drain is not None and not self._drains_soon(delivery, self._pending(epoch)):
            epoch.block(delivery.key)

    def _token_due(self, delivery: Delivery) -> None:
        del self._limited[delivery]
        delivery.limited_since = None
        self._return(delivery)

    @staticmethod
    def _pending(epoch: Epoch) -> Counter[Hashable]:
        """Count the deliveries of each key that a drain waits for."""
        drain = epoch.drain
        return Counter() if drain is None else Counter(delivery.key for delivery in drain.pending.values())

    def _drains_soon(self, delivery: Delivery, pending: Counter[Hashable]) -> bool:
        """Return whether all that a drain waits for in a limited delivery's shard can start within `_PATIENCE`."""
        assert self.pace.key_limit is not None  # noqa: S101 - otherwise it would not be limited
        behind = max(pending[delivery.key] - 1, 0)
        return self.pace.key_due(delivery.key) + behind / self.pace.key_limit.per_second <= _PATIENCE

    # Overrides of `Shards` for limited deliveries -----------------------------------

    def close(self, epoch: Epoch) -> None:
        """See `Shards.close`."""
        super().close(epoch)
        if self._limited:
            pending = self._pending(epoch)
            for delivery in self._limited:
                if not self._drains_soon(delivery, pending):
                    epoch.block(delivery.key)

    def purge(self, epoch: Epoch) -> None:
        """See `Shards.purge`."""
        super().purge(epoch)
        for delivery in [limited for limited in self._limited if limited.epoch is epoch]:
            self._limited.pop(delivery).cancel()
            self.release(delivery)

    @property
    def owning(self) -> list[Delivery]:
        """See `Shards.owning`."""
        return [*super().owning, *tuple(self._limited)]

    @property
    def at_rest(self) -> bool:
        """See `Shards.at_rest`."""
        return not self._limited and super().at_rest


class PacedBatchShards(_Paced, BatchShards):
    """Batch shards that limit the rate of runs; a batch is one run."""

    def __init__(self, pace: Pace, batch: Batch, attempts: int, bound: int | None = None) -> None:
        super().__init__(batch, attempts, bound)
        self.pace = pace

    def take_batch(self) -> DeliveryBatch | None:
        """See `BatchShards.take_batch`."""
        if not self._has_work or not self.pace.allows(self.notify):
            return None
        batch = super().take_batch()
        if batch is not None and batch.deliveries[0].detour is None:
            self.pace.take(None)
        return batch
