"""`on_failure=Park(...)`: failed records and what follows them under their key wait in a side topic."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import anyio

from aioshard.core.parking import NEVER
from aioshard.core.recourse import Park
from aioshard.core.sharding import ShardKey, fixed_shard
from aioshard.engine.buffer import Buffer
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.failing.parked import Lot, Replay, of_a_fixed_shard
from aioshard.engine.failing.recourse import Publish, failure_of
from aioshard.engine.failing.retrieval import Retrieval
from aioshard.engine.failing.settling import Verdict
from aioshard.engine.log_fields import partition_fields
from aioshard.engine.outcomes import Detour, Outcome
from aioshard.engine.shards import Shards
from aioshard.errors import SideTopicError, TransportError
from aioshard.ports import Message, SideTopics, record_size
from aioshard.records import Record, TopicPartition
from aioshard.serde.side_records import Failure, park

__all__ = ["Parking"]

logger = logging.getLogger("aioshard.engine.parking")

_POLL_TIMEOUT = 1.0
_BACKOFF = 1.0
_MOST_PARKED = 100_000
"""Parked records of one partition; each costs memory here, so that more are refused until some are gone."""
_LONGEST_WAIT = 60.0
_SHELF_LASTS = 1.0
"""Seconds without anything due after which what was read is not kept any more."""


class Parking:
    """The parked records of one handler, over all partitions that are ours.

    Workers ask `divert` before they start a delivery, and `decide` when its attempts are used up. The feed tells
    when a partition comes, closes, opens and ends. Two tasks: `read` follows the side topic, `replay` runs again what
    is due. Owned by the event loop.

    Invariants:
        * While a key is parked, nothing of it starts but its first parked record (I4).
        * A record that is parked is complete when the brokers have acknowledged that (I2), and one that was run
          again is taken out of the side topic before the next one of its key starts.
    """

    def __init__(
        self,
        policy: Park,
        *,
        group: str,
        handler: str,
        shards: Sequence[Shards],
        shard_key: Callable[[Record], ShardKey],
        fixed: bool,
        workers: int,
        publish: Publish,
        side_topics: SideTopics,
        buffer: Buffer,
        clock: Callable[[], float],
    ) -> None:
        """Make the parking of one handler; `read` and `replay` are its tasks.

        Args:
            policy: Topic, delay and attempts.
            group: Named in the headers of what is parked, as is the handler.
            handler: The handler's name.
            shards: Of the handler.
            shard_key: From a record to its shard key.
            fixed: Whether they are fixed: deliveries carry a shard's number as key then.
            workers: How many serve the shards.
            publish: Writes to the side topic.
            side_topics: Reads it; closed by whoever gives it.
            buffer: What is held of all partitions.
            clock: Loop time.
        """
        self.policy = policy
        self.trouble: str | None = None
        """Why the side topic cannot be read now."""
        self._group = group
        self._handler = handler
        self._shards = shards
        self._shard_key = of_a_fixed_shard(shard_key, len(shards)) if fixed else shard_key
        self._fixed = fixed
        self._at_once = max(2 * workers, 16)
        self._publish = publish
        self._side = side_topics
        self._buffer = buffer
        self._clock = clock
        self._lots: dict[Epoch, Lot] = {}
        self._ensured = 0
        self._retrieval = Retrieval(side_topics)
        self._refused: set[Message] = set()
        """Answers that could not be written, and are tried again."""
        self._due = asyncio.Event()
        self._epoch_time = time.time() - clock()
        self._behind = Detour(f"its key is parked, and it is written to {policy.topic} behind it", self._park_behind)
        self._first = Detour(f"it is parked in {policy.topic}", self._park)
        self._again = Detour(f"it is parked in {policy.topic} again", self._park_again)
        self.drop = Detour(f"it is taken out of {policy.topic} without being processed", self._drop)
        """For a record that is run again, and halted, when somebody gives it up."""
        self._finished = Detour(f"it is taken out of {policy.topic}, its run succeeded", self._remove)

    def _now(self) -> float:
        """Seconds since the epoch by the loop's clock, which virtual time moves too."""
        return self._epoch_time + self._clock()

    @property
    def lots(self) -> Collection[Lot]:
        """One for each partition that is ours."""
        return self._lots.values()

    # Workers ------------------------------------------------------------------------

    def divert(self, delivery: Delivery) -> None:
        """Give a delivery a detour when its key is parked, and take it back when that is over."""
        lot = self._lots.get(delivery.epoch)
        if lot is None or isinstance(delivery, Replay):
            return
        if delivery.detour is self._behind:
            if lot.identity(delivery.record) not in lot.keys:
                delivery.detour = None
        elif delivery.detour is None and lot.keys.keys and lot.identity(delivery.record) in lot.keys:
            delivery.divert(self._behind)

    def decide(self, delivery: Delivery) -> Verdict:
        """See `Recourse.decide`."""
        return self._again if isinstance(delivery, Replay) else self._first

    def release(self, lot: Lot, offset: int) -> bool:
        """Run the key of a parked record again now, unless that is being done; returns whether there is such a record.

        Nothing is written: where the partition goes away before that, the request is forgotten.
        """
        entry = lot.keys.get(offset)
        if entry is not None:
            lot.release(entry.key)
            self._due.set()
        return entry is not None

    async def _park(self, delivery: Delivery) -> Outcome:
        failure = failure_of(delivery, self._group, self._handler)
        return await self._store(delivery, failure, self._now() + self.policy.delay)

    async def _park_behind(self, delivery: Delivery) -> Outcome:
        lot = self._lots[delivery.epoch]
        key = lot.identity(delivery.record)
        head = lot.keys.head(key)
        assert head is not None  # noqa: S101 - `divert` has just looked
        return await self._store(delivery, lot.failures[key], head.due)

    async def _store(self, delivery: Delivery, failure: Failure, due: float) -> Outcome:
        lot = self._lots[delivery.epoch]
        if len(lot.keys) >= _MOST_PARKED:
            raise SideTopicError(
                f"{len(lot.keys)} records of {delivery.epoch.topic_partition} are parked, the most that a process "
                "keeps track of: release or drop some"
            )
        record = delivery.record
        lot.writing.add(record.offset)
        try:
            message = park(self.policy.topic, record, failure, generation=lot.generation, due=due)
            stored_at = await self._publish(message)
        finally:
            lot.writing.discard(record.offset)
        lot.add(lot.entry(record, lot.generation, stored_at, due, 0), failure)
        self._due.set()
        return Outcome.PARKED

    async def _park_again(self, delivery: Delivery) -> Outcome:
        assert isinstance(delivery, Replay)  # noqa: S101 - decided so
        lot, entry = delivery.lot, delivery.entry
        replays = entry.replays + 1
        over = self.policy.attempts is not None and replays >= self.policy.attempts
        due = NEVER if over else self._now() + self.policy.delay
        failure = failure_of(delivery, self._group, self._handler)
        if lot.keys.get(entry.offset) is None:
            return Outcome.RETURNED  # somebody dropped it
        lot.writing.add(entry.offset)
        try:
            message = park(
                self.policy.topic,
                delivery.record,
                failure,
                generation=entry.generation,
                due=due,
                replays=replays,
            )
            entry.stored_at = await self._publish(message)
        finally:
            lot.writing.discard(entry.offset)
        entry.replays, entry.due = replays, due
        if lot.keys.get(entry.offset) is entry:  # nobody has dropped it meanwhile
            lot.failures[entry.key] = failure
            lot.keys.postpone(entry.key, due)
        self._due.set()
        return Outcome.RETURNED

    async def _remove(self, delivery: Delivery) -> Outcome:
        assert isinstance(delivery, Replay)  # noqa: S101 - decided so
        lot = delivery.lot
        await self._publish(lot.tombstone(lot.place(delivery.entry)))
        lot.remove(delivery.entry.offset)
        self._due.set()
        return Outcome.PROCESSED

    async def _drop(self, delivery: Delivery) -> Outcome:
        await self._remove(delivery)
        return Outcome.SKIPPED

    # Partitions ---------------------------------------------------------------------

    async def restore(self, epoch: Epoch, partitions: int, generation: int) -> bool:
        """Find out what of a partition is parked, before anything of it is handed out.

        Args:
            epoch: New, and closed.
            partitions: How many the topic has.
            generation: Of the group, in which the partition became ours.

        Returns:
            Whether some was parked under a later generation, and is left alone until `believe`.

        Raises:
            TransportError: That cannot be found out now.
        """
        if partitions > self._ensured:
            await self._side.ensure(self.policy.topic, partitions)
            self._ensured = partitions
        stored_in = TopicPartition(self.policy.topic, epoch.topic_partition.partition)
        lot = Lot(epoch, stored_in, generation, buffer=self._buffer, shard_key=self._shard_key)
        self._lots[epoch] = lot
        self._watch()
        await self._read_all(lot)
        await asyncio.gather(*(self._publish(message) for message in lot.finish_restoring()))
        if lot.keys.keys:
            fields = partition_fields("parked", epoch.topic_partition, records=len(lot.keys), keys=lot.keys.keys)
            message = "%s: %d record(s) of %d key(s) are parked in %s"
            logger.info(message, epoch.topic_partition, len(lot.keys), lot.keys.keys, self.policy.topic, extra=fields)
        return lot.in_doubt

    def believe(self, epoch: Epoch) -> None:
        """The brokers have taken a commit of ours since `restore`: nobody has the partition after us."""
        lot = self._lots.get(epoch)
        if lot is not None and lot.in_doubt:
            message = (
                "%s: %d record(s) in %s were parked under a later generation than that of group %r now, which began "
                "anew since then (it was deleted, or its offsets have expired): they are ours too"
            )
            records = lot.believe()
            fields = partition_fields("parked", epoch.topic_partition, records=records, group=self._group)
            logger.warning(message, epoch.topic_partition, records, self.policy.topic, self._group, extra=fields)

    def _watch(self) -> None:
        self._side.watch(list(dict.fromkeys(lot.stored_in for lot in self._lots.values())))

    async def _read_all(self, lot: Lot) -> None:
        """Read a side partition from its start, until nothing lies between that and what `read` follows."""
        at = 0
        while True:
            end = await self._side.end(lot.stored_in)
            while at < end and (records := await self._side.read(lot.stored_in, at)):
                for record in records:
                    group = lot.restore(record)
                    if group not in (None, self._group):
                        raise SideTopicError(
                            f"{lot.stored_in} holds records that group {group!r} has parked, and group {self._group!r} "
                            "would overwrite them: give each group a topic of its own"
                        )
                at = records[-1].offset + 1
            if self._side.position(lot.stored_in) <= max(at, end):
                lot.read_to = max(at, end)
                return

    def side_of(self, epoch: Epoch) -> Epoch | None:
        """The epoch of what is run again of a partition."""
        lot = self._lots.get(epoch)
        return lot.replays if lot is not None else None

    def close(self, epoch: Epoch, running: Collection[Delivery]) -> None:
        """The gate of a partition has closed."""
        lot = self._lots.get(epoch)
        if lot is not None:
            lot.close(set(running))
            for shards in self._shards:
                shards.close(lot.replays)

    def reopen(self, epoch: Epoch) -> None:
        """The gate of a partition has opened."""
        lot = self._lots.get(epoch)
        if lot is not None:
            if epoch.is_open and not lot.replays.is_open:
                lot.open()
            for shards in self._shards:
                shards.reopen(lot.replays)
            self._due.set()

    def purge(self, epoch: Epoch) -> None:
        """The epoch of a partition has ended."""
        lot = self._lots.pop(epoch, None)
        if lot is not None:
            lot.end()
            for shards in self._shards:
                shards.purge(lot.replays)
            self._watch()
            self._due.set()

    # Tasks --------------------------------------------------------------------------

    async def read(self) -> None:
        """Follow the side topic until cancelled: what is parked, dropped, and asked to be released."""
        async with asyncio.TaskGroup() as answering:
            while True:
                try:
                    records = await self._side.poll(_POLL_TIMEOUT)
                    answers = [answer for record in records for answer in self._read(record)]
                    answers += [(lot, message) for lot in self.lots for message in lot.stale()]
                    for lot, message in answers:
                        # One partition that cannot be written keeps none of the others from being followed.
                        answering.create_task(self._answer(lot, message), name=f"answer in {lot.stored_in}")
                    if not self._refused:
                        self.trouble = self._retrieval.trouble()
                except TransportError as error:
                    if self.trouble is None:
                        fields = {"event": "trouble", "topic": (topic := self.policy.topic)}
                        logger.error("topic %s cannot be read or answered: %s", topic, error, extra=fields)  # noqa: TRY400
                    self.trouble = str(error)
                    await asyncio.sleep(_BACKOFF)

    def _read(self, record: Record) -> Iterator[tuple[Lot, Message]]:
        for lot in self.lots:
            if lot.stored_in == record.topic_partition and (answer := lot.read(record)) is not None:
                yield lot, answer
        self._due.set()

    async def _answer(self, lot: Lot, message: Message) -> None:
        try:
            while lot.replays.gate is not Gate.ENDED:
                try:
                    await self._publish(message)
                except TransportError as error:
                    self._refused.add(message)
                    self.trouble = str(error)
                    await asyncio.sleep(_BACKOFF)
                else:
                    return
        finally:
            self._refused.discard(message)

    async def replay(self) -> None:
        """Run again what is due, until cancelled."""
        while True:
            self._due.clear()
            for lot in list(self._lots.values()):
                await self._replay_due(lot)
            wait = self._until_due()
            with anyio.move_on_after(min(wait, _SHELF_LASTS) if self._retrieval.holds_some else wait) as waited:
                await self._due.wait()
            if waited.cancelled_caught:
                self._retrieval.forget()

    def _until_due(self) -> float:
        dues = [due for lot in self._lots.values() if lot.may_replay and (due := lot.keys.next_due) is not None]
        running = sum(len(lot.replays.tracker) for lot in self._lots.values())
        if not dues or running >= self._at_once:
            return _LONGEST_WAIT  # what ends wakes us
        return min(max(min(dues) - self._now(), 0.01), _LONGEST_WAIT)

    async def _replay_due(self, lot: Lot) -> None:
        while lot.may_replay:
            if sum(len(other.replays.tracker) for other in self._lots.values()) >= self._at_once:
                return
            entry = lot.keys.take_due(self._now())
            if entry is None:
                return
            record = await self._retrieval.fetch(lot, entry)
            if lot.keys.get(entry.offset) is not entry:
                continue
            if record is None or not lot.replays.is_open or not self._fits(record):
                lot.keys.postpone(entry.key, self._now() + _BACKOFF)
                return  # each of its keys may take as long, and other partitions are not to wait for all of them
            key = lot.identity(record)
            number = fixed_shard(key, len(self._shards), entry.offset) if self._fixed else 0
            replay = lot.replay(entry, record, number if self._fixed else key, self._clock())
            replay.then, replay.aside = self._finished, True
            self._shards[number].put_first([replay])

    def _fits(self, record: Record) -> bool:
        """Whether there is room for a record, or nothing of ours that it could wait for."""
        buffer = self._buffer
        size = record_size(record.key, record.value, record.headers)
        return buffer.bytes + size <= buffer.bounds.bytes or not any(len(lot.replays.tracker) for lot in self.lots)
