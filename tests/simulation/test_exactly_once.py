"""I13: transactions under seeded interleavings, checked after every step as a `read_committed` reader sees them."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from aioshard import BatchContext, Context, DeadLetter, Park, Record, Retry
from aioshard.records import TopicPartition
from aioshard.serde.side_records import ParkedRecord, Removed, StorageKey, read_parked, release
from tests.simulation.batching import BatchWorld
from tests.simulation.seeds import with_seeds
from tests.simulation.world import TOPIC, Process, World, live

OUT, DEAD, SIDE = "out", "dead", "side"
NOWHERE = 77
"""A partition that no topic has."""


class ExactlyOnceWorld(World):
    """Each record produces up to three messages; some fail for good, and get a dead letter instead."""

    settings: Mapping[str, Any] = {
        "processing_guarantee": "exactly_once",
        "session_timeout": 3.0,
    }

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.broker.create_topic(OUT, 3)
        self.broker.create_topic(DEAD, 3)
        self.seen: Counter[tuple[str, int, int, int]] = Counter()
        """How often a reader sees the message of a record: partition, offset and number, -1 for its dead letter."""
        self.order: dict[tuple[int, bytes], list[tuple[int, int]]] = defaultdict(list)
        self._read: dict[tuple[str, int], int] = defaultdict(int)

    def consume_options(self) -> dict[str, Any]:
        return {"retry": Retry(attempts=2, initial=0.05), "on_failure": DeadLetter(DEAD, breaker=None)}

    async def handle(self, process: Process, record: Record, context: Context) -> None:
        await self.publish_outputs(record, context)
        await super().handle(process, record, context)

    async def publish_outputs(self, record: Record, context: Context | BatchContext) -> None:
        for number in range(copies(record)):
            headers = [("of", b"%d %d %d" % (record.partition, record.offset, number))]
            await context.publish(OUT, b"x", key=record.key, headers=headers, partition=record.partition)
        if self.is_refused(record):
            await context.publish(OUT, b"x", partition=NOWHERE)

    async def _work(self, process: Process, *records: Record) -> bool:
        if any(self.fails(record) for record in records):
            raise ValueError("poison")
        return await super()._work(process, *records)

    def fails(self, record: Record) -> bool:
        """Whether an attempt at a record fails."""
        return record.offset % 11 == 5

    def is_refused(self, record: Record) -> bool:
        """Whether a record produces a message that the brokers refuse."""
        return record.offset % 23 == 9

    def is_terminal(self, topic_partition: TopicPartition, offset: int) -> bool:  # noqa: ARG002
        """It may be: a dead letter is complete before it is visible. Messages show the order of the runs."""
        return True

    def may_be_passed(self, topic_partition: TopicPartition, offset: int) -> bool:
        return self.seen[DEAD, topic_partition.partition, offset, -1] > 0

    def check(self) -> None:
        for topic in (OUT, DEAD):
            for partition in range(3):
                log = self.broker.log(topic, partition)
                for record in log.read(self._read[topic, partition], log.stable_end):
                    self._note(record)
                self._read[topic, partition] = log.stable_end
        super().check()

    def _note(self, output: Record) -> None:
        headers = dict(output.headers)
        if output.topic == OUT:
            partition, offset, number = map(int, (headers["of"] or b"").split())
            output_id = OUT, partition, offset, number
            if output.key is not None:
                order = self.order[partition, output.key]
                assert not order or order[-1] < (offset, number), (
                    f"I13: {output_id} of {output.key!r} follows {order[-1]}"
                )
                order.append((offset, number))
        else:
            partition, offset = (int(headers[f"aioshard.{name}"] or b"") for name in ("partition", "offset"))
            output_id = DEAD, partition, offset, -1
        self.seen[output_id] += 1
        assert self.seen[output_id] == 1, f"I13: {output_id} is visible {self.seen[output_id]} times"

    def check_all(self) -> None:
        """At the end, each record has had all its messages or its dead letter."""
        for topic_partition, offsets in self.offsets.items():
            for offset in offsets:
                record = Record(TOPIC, topic_partition.partition, offset, None, None, (), 0.0)
                found = sum(self.seen[OUT, topic_partition.partition, offset, number] for number in range(3))
                dead = self.seen[DEAD, topic_partition.partition, offset, -1]
                processed = (copies(record), 0)
                dead_lettered = (0, 1)
                expected = [dead_lettered] if self.is_refused(record) else [processed, dead_lettered]
                assert (found, dead) in expected, f"I13: {topic_partition} {offset}: {found}, {dead}"

    def _progress_outside(self, withheld: Collection[TopicPartition]) -> None:
        """Nobody outside: what it publishes would be its own affair."""

    def _truncate(self, topic_partition: TopicPartition) -> None:
        """Nothing is deleted: every record has to have its messages."""


def copies(record: Record) -> int:
    """How many messages a record produces."""
    return record.offset % 4 % 3 + (record.offset % 7 == 0)


class ParkingWorld(ExactlyOnceWorld):
    """Failed records are parked, and run again later."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.parked: set[StorageKey] = set()
        """Return the records that a reader of the side topic sees as parked now."""
        self.ever_parked: set[tuple[TopicPartition, int]] = set()

    def consume_options(self) -> dict[str, Any]:
        return {"retry": Retry(attempts=2, initial=0.05), "on_failure": Park(SIDE, delay=0.5)}

    def is_refused(self, record: Record) -> bool:  # noqa: ARG002 - it would be parked without end
        return False

    def fails(self, record: Record) -> bool:
        return not self.calm and record.offset % 5 == 2 and self.rng.random() < 0.8

    def check(self) -> None:
        for partition in range(3 if SIDE in self.broker.topics() else 0):
            log = self.broker.log(SIDE, partition)
            for record in log.read(self._read[SIDE, partition], log.stable_end):
                match read_parked(record):
                    case ParkedRecord() as parked:
                        self.parked.add(parked.storage_key)
                        self.ever_parked.add((parked.original.topic_partition, parked.original.offset))
                    case Removed(gone):
                        self.parked.discard(gone)
            self._read[SIDE, partition] = log.stable_end
        super().check()

    def may_be_passed(self, topic_partition: TopicPartition, offset: int) -> bool:
        return (topic_partition, offset) in self.ever_parked

    def runs_again(self, topic_partition: TopicPartition, offset: int) -> bool:
        return (topic_partition, offset) in self.ever_parked

    async def something_happens(self) -> None:
        match self.rng.randrange(8):
            case 0 if SIDE in self.broker.topics():
                for storage_key in sorted(self.parked):
                    message = release(SIDE, storage_key.coordinates)
                    self.broker.publish(SIDE, message.value, key=message.key, partition=message.partition)
            case 1 if SIDE in self.broker.topics():
                self.broker.log(SIDE, self.rng.randrange(3)).compact()
            case _:
                await super().something_happens()

    def finished(self) -> bool:
        withheld = self.broker.leaderless
        return super().finished() and all(
            TopicPartition(*storage_key.coordinates[:2]) in withheld for storage_key in self.parked
        )


class ExactlyOnceBatchWorld(BatchWorld, ExactlyOnceWorld):
    """Batches publish the messages of all their records; some fail whole, others in part."""

    async def handle_batch(self, process: Process, records: list[Record], context: BatchContext) -> None:
        for record in records:
            await self.publish_outputs(record, context)
        await super().handle_batch(process, records, context)


class ParkingBatchWorld(ExactlyOnceBatchWorld, ParkingWorld):
    """Batches whose failed records are parked."""


WORLDS: list[type[ExactlyOnceWorld]] = [ExactlyOnceWorld, ParkingWorld, ExactlyOnceBatchWorld, ParkingBatchWorld]


@with_seeds(5)
@pytest.mark.parametrize("kind", WORLDS)
def test_a_reader_sees_every_message_exactly_once(kind: type[ExactlyOnceWorld], seeds: range) -> None:
    visible = parked = 0
    for seed in seeds:
        worlds: list[ExactlyOnceWorld] = []

        async def life(seed: int = seed, worlds: list[ExactlyOnceWorld] = worlds) -> None:
            world = kind(seed, fixed_shards=seed % 4 == 2)
            worlds.append(world)
            await world.live_through(25, [0.0, 0.01, 0.1, 0.3, 2.0])

        live(life(), seed=seed, on_step=lambda worlds=worlds: worlds[0].check() if worlds else None)  # type: ignore[misc]
        worlds[0].check_all()
        visible += worlds[0].seen.total()
        parked += len(getattr(worlds[0], "ever_parked", ()))
    assert visible > 0
    assert bool(parked) == issubclass(kind, ParkingWorld)


def test_a_partition_may_end_before_the_read_of_its_parked_records_begins() -> None:
    """Seed 20: it is revoked in the step after the one that decided to read it."""
    worlds: list[ParkingBatchWorld] = []

    async def life() -> None:
        worlds.append(ParkingBatchWorld(20, fixed_shards=False))
        await worlds[0].live_through(25, [0.0, 0.01, 0.1, 0.3, 2.0])

    live(life(), seed=20, on_step=lambda: worlds[0].check() if worlds else None)
    worlds[0].check_all()
