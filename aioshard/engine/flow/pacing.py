"""Shards whose runs start no faster than rate limits allow; handlers without limits have none of this."""

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
"""Seconds that a drain waits for the records of one limited key; what would take longer is run again elsewhere."""
_AHEAD = 10.0
"""Seconds in which a limited handler may start what it has queued: more would only wait in memory, and grow old."""


class Pace:
    """The rate limits of one handler: tokens for all its runs together, and for those of each shard key.

    Shared by the handler's shards. Whoever finds no token is called when there is one: of several shards those
    first that have waited longest. One timer serves all that wait for a token of the handler.
    """

    def __init__(self, limit: RateLimit | None, key_limit: RateLimit | None, clock: Callable[[], float]) -> None:
        """Make it with all tokens there are.

        Args:
            limit: Of all runs.
            key_limit: Of the runs of each shard key; of each fixed shard.
            clock: Loop time.
        """
        self.limit = limit
        self.key_limit = key_limit
        self._clock = clock
        self._bucket = None if limit is None else TokenBucket(limit)
        self._keys = None if key_limit is None else KeyedTokenBuckets(key_limit)
        self._refused: dict[Callable[[], None], None] = {}
        """Whom to call, in order."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def ahead(self) -> int | None:
        """How many runs the handler can start soon; None where it has no limit."""
        return None if self.limit is None else max(int(self.limit.per_second * _AHEAD), self.limit.at_once)

    def due(self) -> float:
        """Seconds until a run may start, as far as the handler's limit goes; 0 when one may. Safe from any thread."""
        return 0.0 if self._bucket is None else self._bucket.due(self._clock())

    def key_due(self, key: Hashable) -> float:
        """Seconds until a run of a shard key may start, as far as the limit of keys goes. Safe from any thread.

        Records that ask for no order have no key, and no such limit.
        """
        return 0.0 if self._keys is None or key is None else self._keys.due(key, self._clock())

    def allows(self, otherwise: Callable[[], None]) -> bool:
        """Whether a run may start, as far as the handler's limit goes; else *otherwise* is called when one may."""
        due = self.due()
        if not due:
            return True
        self._refused[otherwise] = None
        self._wait(due)
        return False

    def take(self, key: Hashable) -> None:
        """A run starts for which there are tokens."""
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
            self._wait(due)  # the next one at once: the first may have nothing to start any more


class _Paced(Shards):
    """Wakes no worker while there is no token, and only as many as there are tokens for."""

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

    Without a token of the handler nothing starts. A delivery whose key has no token keeps its shard, as one that
    waits for its next attempt does; its neighbours go on. Both limits hold while a partition drains.

    Invariants:
        * A delivery that `take` gives, to run its handler, has taken its tokens.
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
                return delivery  # a detour is no run of the handler
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
        """How much of each key a drain waits for."""
        drain = epoch.drain
        return Counter() if drain is None else Counter(delivery.key for delivery in drain.pending.values())

    def _drains_soon(self, delivery: Delivery, pending: Counter[Hashable]) -> bool:
        """Whether what a drain waits for in the shard of a limited delivery can start within a short time."""
        assert self.pace.key_limit is not None  # noqa: S101 - or it would not be limited
        behind = max(pending[delivery.key] - 1, 0)
        return self.pace.key_due(delivery.key) + behind / self.pace.key_limit.per_second <= _PATIENCE

    # What `Shards` does, with those -------------------------------------------------

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
    """Shards for batches with a limit on how many runs start; a batch is one run."""

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
