"""The sharder of a handler: gives each record its shard key, and queues it in its shard."""

from collections import deque
from collections.abc import Callable, Collection

from aioshard.core.sharding import ShardKey, check_usable, fixed_shard
from aioshard.core.text import message_of
from aioshard.engine.batch_shards import BatchShards
from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.failures import FailureHandler
from aioshard.engine.freshness import Latest
from aioshard.engine.log_fields import record_fields
from aioshard.engine.parking import Parking
from aioshard.engine.shards import Shards
from aioshard.log_fields import get_logger
from aioshard.records import Record

logger = get_logger("aioshard.engine.sharder")

_ENOUGH = 1_000
_ENOUGH_PER_WORKER = 4
_ENOUGH_BATCHES = 2
"""Records that a handler wants queued: in total, per worker, and in batches. They last until the next poll."""


class Sharder:
    """Spreads the records of a handler over its shards, by its sharding function."""

    def __init__(
        self,
        shard_key: Callable[[Record], ShardKey],
        shards: list[Shards],
        *,
        fixed: bool,
        workers: int,
        failures: FailureHandler,
        at_once: int = 1,
        ahead: int | None = None,
        builtin_key: bool = False,
        parking: Parking | None = None,
        latest: Latest | None = None,
    ) -> None:
        """Make a sharder.

        Args:
            shard_key: Returns the shard key of a record.
            shards: One that serves all keys on demand, or N fixed ones.
            fixed: Whether the shards are fixed: a record's shard is then the hash of its key.
            workers: How many workers serve them.
            failures: Handles the deliveries for which the sharding function failed.
            at_once: Maximum number of records in one run.
            ahead: How many runs may start soon, if there is a rate limit.
            builtin_key: Whether the sharding function is built in: it neither raises nor returns an unhashable key.
            parking: Parked records of the handler; None if its failure policy does not park.
            latest: Told which deliveries are queued, if only the newest of each key runs.
        """
        self.shards = shards
        self.parking = parking
        self._latest = latest
        self._shard_key = shard_key
        self._fixed = fixed
        self._failures = failures
        self._builtin_key = builtin_key
        self._turn = 0
        self._at_once = at_once
        self._enough_without_limit = max(_ENOUGH, _ENOUGH_PER_WORKER * workers, _ENOUGH_BATCHES * at_once)
        self._enough = self._enough_without_limit
        if ahead is not None:
            self.queue_ahead(ahead)
        self._batched = [part for part in shards if isinstance(part, BatchShards)]

    @property
    def wanted(self) -> int:
        """How many more records are wanted, so that the workers have enough to choose from.

        Records that wait behind an occupied shard do not count, so a hot key leaves room for the others. Fixed shards
        always want more: records of one are of no use to the others.
        """
        return self._enough if self._fixed else self._enough - self.shards[0].unseen

    def queue_ahead(self, runs: int) -> None:
        """Want no more records than so many *runs* take, because a rate limit lets no more start soon."""
        self._enough = min(self._enough_without_limit, runs * self._at_once)

    def when_wanted(self, wake: Callable[[], None]) -> int:
        """Arrange for *wake* to be called once when a worker is idle.

        Returns:
            Number of completions after which more records are wanted at the latest.
        """
        self.shards[0].when_idle(wake)
        return self._enough // 2 - self.wanted

    def no_room(self) -> None:
        """Flush batches still filling: nothing else can be taken in now."""
        for shards in self._batched:
            shards.no_room()

    async def put(self, deliveries: list[Delivery], waiting: deque[Delivery]) -> None:
        """Give each delivery its shard key and queue it; waits only for a fixed shard that is full.

        Args:
            deliveries: The deliveries, in order.
            waiting: Receives the deliveries of fixed shards and keeps those that are not queued yet; the caller may
                remove some.
        """
        shard_key = self._shard_key
        if self._builtin_key and not self._fixed:
            for delivery in deliveries:
                delivery.key = shard_key(delivery.record)
            await self._queue(deliveries)
            return
        unkeyed: list[tuple[Delivery, Exception]] = []
        for delivery in deliveries:
            try:
                key = shard_key(delivery.record)
                delivery.key = self.number_of(key)
                check_usable(key)
            except Exception as error:  # noqa: BLE001 - the user's function; only the record fails
                unkeyed.append((delivery, error))
        if unkeyed:
            deliveries = self._fail_unkeyed(deliveries, unkeyed)
        if not self._fixed:
            await self._queue(deliveries)
            return
        waiting.extend(deliveries)
        while waiting:
            delivery = waiting[0]
            number = delivery.key
            assert isinstance(number, int)  # noqa: S101 - set above
            await self.shards[number].put((delivery,))
            if waiting and waiting[0] is delivery:
                waiting.popleft()
            else:  # evicted while it waited for room: it must not start before the ones evicted with it
                self.shards[number].evict(delivery.epoch, delivery.offset)

    async def _queue(self, deliveries: list[Delivery]) -> None:
        if self._latest is not None:
            self._latest.add(deliveries)
        await self.shards[0].put(deliveries)

    def number_of(self, key: ShardKey) -> ShardKey:
        """The key of a delivery with this shard key: the number of its fixed shard, or the shard key itself."""
        if not self._fixed:
            return key
        if key is None:
            self._turn += 1
        return fixed_shard(key, len(self.shards), self._turn)

    def _fail_unkeyed(self, deliveries: list[Delivery], unkeyed: list[tuple[Delivery, Exception]]) -> list[Delivery]:
        """Fail the deliveries without a shard key and return the rest: no retry helps, as they cannot run in order."""
        for delivery, error in unkeyed:
            delivery.key = None
            fields = record_fields("no_shard_key", delivery, error=type(error).__name__)
            message = "the sharding function failed for record %r: %s"
            logger.error(message, delivery, message_of(error), exc_info=error, extra=fields)
            self._failures.handle_failed(delivery, error, self.shards[0], keyed=False)
        failed = {delivery for delivery, _ in unkeyed}
        return [delivery for delivery in deliveries if delivery not in failed]

    def close(self, epoch: Epoch, in_flight: Collection[Delivery] = (), *, below: bool = False) -> None:
        """Close the gate of an epoch, and of the parked records that run again: a drain begins.

        Args:
            epoch: The epoch of a partition.
            in_flight: All deliveries that workers run now.
            below: See `Epoch.close`.
        """
        for part in epoch.epochs:
            part.close(in_flight, below=below)
            for shards in self.shards:
                shards.close(part)

    def purge(self, epoch: Epoch) -> None:
        """Forget the deliveries of an epoch that ended."""
        if self.parking is not None:
            self.parking.forget(epoch)
        if self._latest is not None:
            self._latest.forget(epoch)
        for part in epoch.epochs:
            for shards in self.shards:
                shards.purge(part)

    def evict(self, epoch: Epoch, first: int) -> list[Delivery]:
        """Remove and return the queued deliveries of an epoch from offset *first* on."""
        return [delivery for shards in self.shards for delivery in shards.evict(epoch, first)]

    def shards_of(self, delivery: Delivery) -> Shards:
        """The fixed shard of a delivery; without fixed shards, the one object that serves all keys."""
        key = delivery.key
        return self.shards[key] if self._fixed and isinstance(key, int) else self.shards[0]

    def reopen(self, epoch: Epoch) -> None:
        """Resume the deliveries of an epoch whose gate has opened."""
        for part in epoch.epochs:
            for shards in self.shards:
                shards.reopen(part)
        if self.parking is not None:
            self.parking.replays.wake()
