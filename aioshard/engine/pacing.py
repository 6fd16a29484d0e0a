"""Shards that start runs no faster than a rate limit allows; handlers without a limit do not use them."""

import asyncio
from collections.abc import Callable

from aioshard.core.options import Batch, RateLimit, TokenBucket
from aioshard.engine.batch_shards import BatchShards
from aioshard.engine.epoch import Delivery
from aioshard.engine.shards import DeliveryBatch, Shards

_AHEAD = 10.0
"""Seconds of work that a rate-limited handler may queue: more would only wait in memory and grow old."""


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


class PacedShards(Shards):
    """Shards with a rate limit, which also holds while a partition drains. Recoveries spend no tokens.

    Invariants:
        * A delivery that `take` returns for a handler run has spent its token.
    """

    def __init__(self, pace: Pace, bound: int | None) -> None:
        super().__init__(bound, pace.allows)
        self.pace = pace

    def take(self) -> Delivery | None:
        """See `Shards.take`."""
        if not self._has_work or not self.pace.allows(self.notify):
            return None
        delivery = super().take()
        if delivery is not None and delivery.recovery is None:
            self.pace.take()
        return delivery

    def next_after(self, delivery: Delivery) -> Delivery | None:
        """See `Shards.next_after`."""
        self.release(delivery)
        return self.take()


class PacedBatchShards(BatchShards):
    """Batch shards that limit the rate of runs; a batch is one run."""

    def __init__(self, pace: Pace, batch: Batch, attempts: int, bound: int | None, *, per_epoch: bool = False) -> None:
        super().__init__(batch, attempts, bound, pace.allows, per_epoch=per_epoch)
        self.pace = pace

    def take_batch(self) -> DeliveryBatch | None:
        """See `BatchShards.take_batch`."""
        if not self._has_work or not self.pace.allows(self.notify):
            return None
        batch = super().take_batch()
        if batch is not None and batch.deliveries[0].recovery is None:
            self.pace.take()
        return batch
