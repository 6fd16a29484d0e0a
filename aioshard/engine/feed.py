"""Where the records of a handler go: its sharding function and its shards."""

import logging
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from aioshard.core.sharding import ShardKey, check_usable, fixed_shard
from aioshard.engine.batches.batch_shards import BatchShards
from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.log_fields import record_fields
from aioshard.engine.shards import Shards
from aioshard.records import Record

__all__ = ["Aside", "Feed"]

logger = logging.getLogger("aioshard.engine.fetcher")

_ENOUGH = 1_000
_ENOUGH_PER_WORKER = 4
_ENOUGH_BATCHES = 2
"""A handler wants so many records queued, and no more: enough to keep its workers busy until the pump comes again."""


class Aside(Protocol):
    """What of a handler's partitions is kept elsewhere, and is processed by the same shards: parked records."""

    async def restore(self, epoch: Epoch, partitions: int, generation: int) -> bool:
        """Find out what there is of a partition, before anything of it is handed out."""

    def believe(self, epoch: Epoch) -> None:
        """What was left alone, because it may be of a later owner, is ours: there is none."""

    def side_of(self, epoch: Epoch) -> Epoch | None:
        """The epoch of what is processed of it, which opens, closes and ends with the partition's."""

    def close(self, epoch: Epoch, running: Collection[Delivery]) -> None:
        """The gate of a partition has closed."""

    def reopen(self, epoch: Epoch) -> None:
        """The gate of a partition has opened."""

    def purge(self, epoch: Epoch) -> None:
        """The epoch of a partition has ended."""


class Feed:
    """Where the records of a handler go: its sharding function and its shards."""

    def __init__(
        self,
        shard_key: Callable[[Record], ShardKey],
        shards: list[Shards],
        *,
        fixed: bool,
        workers: int,
        unkeyed: Callable[[Delivery, Exception, Shards], None],
        at_once: int = 1,
        ahead: int | None = None,
        sure: bool = False,
        aside: Aside | None = None,
    ) -> None:
        """Make a feed.

        Args:
            shard_key: From a record to its shard key.
            shards: One that serves all keys on demand, or N fixed ones.
            fixed: Whether they are fixed: a record's shard is the hash of its key then.
            workers: How many serve them.
            unkeyed: Told about a delivery for which the sharding function failed.
            at_once: How many records one of them runs at once, at most.
            ahead: How many runs may start soon, where a rate limit says so.
            sure: Whether the sharding function is ours: it neither raises nor gives what has no hash.
            aside: What of the partitions is kept elsewhere.
        """
        self.shards = shards
        self._aside = aside
        self._shard_key = shard_key
        self._fixed = fixed
        self._unkeyed = unkeyed
        self._sure = sure
        self._turn = 0
        self._at_once = at_once
        self._ahead = ahead
        self._enough = 0
        self.serve(workers)
        self._batched = [part for part in shards if isinstance(part, BatchShards)]

    def serve(self, workers: int) -> None:
        """So many workers serve the shards from now on."""
        self._enough = max(_ENOUGH, _ENOUGH_PER_WORKER * workers, _ENOUGH_BATCHES * self._at_once)
        if self._ahead is not None:
            self._enough = min(self._enough, self._ahead * self._at_once)

    @property
    def wanted(self) -> int:
        """How many more records are wanted, so that the workers have enough to choose from.

        What waits behind an occupied shard is not counted, so a hot key leaves the others room. Fixed shards
        always want more: what one of them has is of no use to the others.
        """
        return self._enough if self._fixed else self._enough - self.shards[0].unseen

    def when_wanted(self, wake: Callable[[], None]) -> int:
        """Have *wake* called when a worker finds nothing to do.

        Returns:
            After how many completions at the latest more is wanted.
        """
        self.shards[0].on_idle = wake
        return self._enough // 2 - self.wanted

    def no_room(self) -> None:
        """Nothing more finds room now: batches that are being formed do not wait for more."""
        for shards in self._batched:
            shards.no_room()

    async def put(self, deliveries: list[Delivery], waiting: deque[Delivery]) -> None:
        """Give each delivery its shard key and queue it; waits only where a fixed shard is full.

        Args:
            deliveries: In order.
            waiting: Takes up those of fixed shards, and keeps the ones that are not queued yet.
        """
        shard_key = self._shard_key
        if self._sure and not self._fixed:
            for delivery in deliveries:
                delivery.key = shard_key(delivery.record)
            await self.shards[0].put(deliveries)
            return
        broken: list[tuple[Delivery, Exception]] = []
        for delivery in deliveries:
            try:
                key = shard_key(delivery.record)
                delivery.key = self.number_of(key)
                check_usable(key)
            except Exception as error:  # noqa: BLE001 - the user's function; the record fails, nothing else
                broken.append((delivery, error))
        if broken:
            deliveries = self._without(deliveries, broken)
        if not self._fixed:
            await self.shards[0].put(deliveries)
            return
        waiting.extend(deliveries)
        await self.put_waiting(waiting)

    async def put_waiting(self, waiting: deque[Delivery]) -> None:
        """Queue what waits for fixed shards; when it is cancelled, the first one has not been queued."""
        while waiting:
            number = waiting[0].key
            assert isinstance(number, int)  # noqa: S101 - set by put
            await self.shards[number].put((waiting[0],))
            waiting.popleft()

    def number_of(self, key: ShardKey) -> ShardKey:
        """What a delivery of a shard key carries as key: the number of a fixed shard, or the key itself."""
        if not self._fixed:
            return key
        if key is None:
            self._turn += 1
        return fixed_shard(key, len(self.shards), self._turn)

    def _without(self, deliveries: list[Delivery], broken: list[tuple[Delivery, Exception]]) -> list[Delivery]:
        """Records without a shard key cannot run in order: each has failed, and no other attempt makes sense."""
        for delivery, error in broken:
            delivery.key = None
            fields = record_fields("no_shard_key", delivery, error=type(error).__name__)
            message = "the sharding function failed for record %r: %s"
            logger.error(message, delivery, error, exc_info=error, extra=fields)
            self._unkeyed(delivery, error, self.shards[0])
        without = {delivery for delivery, _ in broken}
        return [delivery for delivery in deliveries if delivery not in without]

    def close(self, epoch: Epoch, running: Collection[Delivery] = ()) -> None:
        """Close the gate of an epoch: nothing new of it starts, and its drain begins; see `Epoch.close`."""
        epoch.close(running)
        for shards in self.shards:
            shards.close(epoch)
        if self._aside is not None:
            self._aside.close(epoch, running)

    async def restore(self, epoch: Epoch, partitions: int, generation: int) -> bool:
        """Find out what of a partition is kept elsewhere, before anything of it is handed out.

        Args:
            epoch: New, and closed.
            partitions: How many its topic has.
            generation: Of the group, in which the partition became ours.

        Returns:
            Whether some of it is of a later generation: ours only if the brokers take a commit of ours (`believe`).

        Raises:
            TransportError: That cannot be found out now.
        """
        return self._aside is not None and await self._aside.restore(epoch, partitions, generation)

    def believe(self, epoch: Epoch) -> None:
        """The brokers have taken a commit of ours since `restore`."""
        if self._aside is not None:
            self._aside.believe(epoch)

    def with_side(self, epoch: Epoch) -> list[Epoch]:
        """An epoch, and that of what is kept elsewhere of its partition."""
        side = self._aside.side_of(epoch) if self._aside is not None else None
        return [epoch] if side is None else [epoch, side]

    def purge(self, epoch: Epoch) -> None:
        """Forget the deliveries of an epoch that ended."""
        for shards in self.shards:
            shards.purge(epoch)
        if self._aside is not None:
            self._aside.purge(epoch)

    def give_back(self, epoch: Epoch, first: int) -> list[Delivery]:
        """Remove and return what is queued of an epoch from offset *first* on."""
        return [delivery for shards in self.shards for delivery in shards.give_back(epoch, first)]

    def shards_of(self, delivery: Delivery) -> Shards:
        """Where a delivery is, of the fixed shards; without such, the one that serves all keys."""
        key = delivery.key
        return self.shards[key] if self._fixed and isinstance(key, int) else self.shards[0]

    def unblock(self, delivery: Delivery) -> None:
        """Let a delivery run that is halted or waits for its next attempt."""
        any(shards.unblock(delivery) for shards in self.shards)

    def reopen(self, epoch: Epoch) -> None:
        """Go on with the deliveries of an epoch whose gate has opened."""
        for shards in self.shards:
            shards.reopen(epoch)
        if self._aside is not None:
            self._aside.reopen(epoch)
