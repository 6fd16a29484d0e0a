"""Replays read the side topic about once, in any order, and keep few of the records that they read."""

import asyncio
from collections.abc import Sequence

import pytest

from aioshard import App, Park, Record, Retry
from aioshard.core.flow import NONE, Usage
from aioshard.core.parking import NEVER, ParkedEntry
from aioshard.engine.buffer import Buffer
from aioshard.engine.epoch import Epoch
from aioshard.engine.parked_partition import ParkedPartition
from aioshard.engine.read_ahead import ReadAhead
from aioshard.ports import record_size
from aioshard.records import TopicPartition
from aioshard.serde.side_records import Coordinates, Failure, release
from aioshard.testing import InMemoryBroker, InMemoryProducer, InMemorySideTopics, TestClient, run
from tests.engine.deliveries import WokenClient

PARKED = "orders.parked"
KEYS = 300


@pytest.mark.parametrize(
    ("order", "pause"),
    [(range(KEYS), 0.05), (range(KEYS - 1, -1, -1), 0.0)],
    ids=["one by one", "all backwards"],
)
def test_released_keys_are_read_in_bulk(monkeypatch: pytest.MonkeyPatch, order: range, pause: float) -> None:
    """One read brings a megabyte of the side topic: to decode it for each record holds up everything else."""
    app = App("cache", commit_interval=0.1)
    broken = True
    done: list[int] = []
    reads: list[int] = []
    read = InMemorySideTopics.read

    async def counted(
        self: InMemorySideTopics, topic_partition: TopicPartition, offset: int, max_bytes: int | None = None
    ) -> Sequence[Record]:
        reads.append(offset)
        return await read(self, topic_partition, offset, max_bytes)

    monkeypatch.setattr(InMemorySideTopics, "read", counted)

    @app.consume("orders", retry=Retry(attempts=1), concurrency=8, on_failure=Park(PARKED, delay=100_000.0))
    async def handle(record: Record) -> None:
        await asyncio.sleep(0.01)
        if broken:
            raise ValueError
        done.append(record.offset)

    async def test() -> None:
        nonlocal broken
        broker = InMemoryBroker(partitions=1)
        async with TestClient(app, broker=broker) as client:
            for number in range(2 * KEYS):
                await client.publish("orders", b"", key=str(number % KEYS), partition=0)
            await client.settle(timeout=100.0)
            broken = False
            reads.clear()
            producer = InMemoryProducer(broker)
            for number in order:
                await producer.publish(release(PARKED, Coordinates("orders", 0, number)))
                await asyncio.sleep(pause)
            async with asyncio.timeout(200.0):
                while len(done) < 2 * KEYS:  # noqa: ASYNC110 - virtual time, and nothing tells
                    await asyncio.sleep(0.1)
            await producer.close()

    run(test())

    assert len(reads) < 20
    assert all(done.index(number) < done.index(number + KEYS) for number in range(KEYS))


SIZE = record_size(b"", b"x" * 100, ())
ROOM = Usage(100, 100 * SIZE)


class Kept:
    """Records that were read ahead, with parked entries of which each has a key of its own."""

    def __init__(self) -> None:
        self.client = WokenClient()
        self.buffer = Buffer(Usage(1_000, 1_000_000), self.client)
        epoch = Epoch(TopicPartition("orders", 0), 1, 1_000, self.buffer)
        self.parked = ParkedPartition(
            epoch, PARKED, 1, buffer=self.buffer, identity=lambda record: record.key, exactly_once=False
        )
        self.read_ahead = ReadAhead(self.parked, self.buffer)

    def park(self, *stored_at: int, due: float) -> None:
        failure = Failure("g", "h", 1, "ValueError", "no", 0.0)
        for at in stored_at:
            entry = ParkedEntry(at, f"{at}", generation=1, stored_at=at, due=due, retries=0)
            self.parked.add(entry, failure)

    def store(self, *stored_at: int, share: Usage = ROOM, value: bytes | None = b"x" * 100) -> None:
        """Read records, of which those that are due by 10 run soon."""
        records = [Record(PARKED, 0, at, b"", value, (), 0.0) for at in stored_at]
        self.read_ahead.store(records, share, until=10.0, now=7.0)

    def take(self, *stored_at: int) -> list[int]:
        """Take records; return which ones were there."""
        entries = [self.parked.keys.get(at) for at in stored_at]
        taken = [self.read_ahead.take(entry) for entry in entries if entry is not None]
        return [record.offset for record in taken if record is not None]

    def check(self, records: int) -> None:
        """Check that a number of records are kept, and that they count in the buffer."""
        assert self.read_ahead.held == Usage(records, records * SIZE)
        assert (self.buffer.records, self.buffer.bytes) == self.read_ahead.held


def test_each_record_that_was_read_ahead_is_taken_once() -> None:
    kept = Kept()
    kept.park(0, 1, due=5.0)
    kept.store(0, 1)
    kept.check(2)
    assert kept.read_ahead.read_at == 7.0
    assert kept.take(1, 1) == [1]
    kept.check(1)


def test_records_that_run_soon_are_kept_first() -> None:
    kept = Kept()
    kept.park(0, 3, 4, due=5.0)
    kept.park(1, 2, due=NEVER)
    kept.store(0, 1, 2, 3, 4, share=Usage(3, 100 * SIZE))
    kept.check(3)
    assert kept.take(0, 1, 2, 3, 4) == [0, 3, 4]


def test_neighbors_of_records_that_run_soon_are_kept_if_there_is_room() -> None:
    """Operators release them one after the other."""
    kept = Kept()
    kept.park(0, 3, due=5.0)
    kept.park(1, 2, due=NEVER)
    kept.store(0, 1, 2, 3, share=Usage(3, 100 * SIZE))
    assert kept.take(0, 1, 2, 3) == [0, 1, 3]


def test_a_read_keeps_no_more_bytes_than_its_share() -> None:
    kept = Kept()
    kept.park(0, 1, 2, due=5.0)
    kept.store(0, 1, 2, share=Usage(100, 2 * SIZE))
    kept.check(2)


def test_the_first_record_of_a_read_is_kept_without_room() -> None:
    """It was read because it is due."""
    kept = Kept()
    kept.park(0, 1, due=5.0)
    kept.store(0, 1, share=NONE)
    kept.check(1)
    assert kept.take(0) == [0]


def test_a_read_keeps_what_still_runs_soon_and_drops_the_rest() -> None:
    """Otherwise records that nobody needs would fill the room, a few more with each read."""
    kept = Kept()
    kept.park(0, 1, 7, due=5.0)
    kept.park(2, 3, due=NEVER)
    kept.store(0, 1, 2, 3)
    kept.check(4)
    kept.store(7)
    kept.check(3)
    assert kept.client.wakes == 1, "there is room for the intake"
    assert kept.take(0, 1, 2, 3, 7) == [0, 1, 7]


def test_a_record_that_is_read_again_counts_once() -> None:
    kept = Kept()
    kept.park(0, 1, due=5.0)
    kept.store(0, 1)
    kept.store(0, 1)
    kept.check(2)


def test_tombstones_are_not_kept() -> None:
    kept = Kept()
    kept.park(0, due=5.0)
    kept.store(0, 1, 2, value=None)
    assert kept.read_ahead.held.records == 1


def test_records_that_were_read_ahead_leave_the_buffer_at_the_end() -> None:
    kept = Kept()
    kept.park(0, 1, due=5.0)
    kept.store(0, 1)
    kept.read_ahead.clear()
    kept.check(0)
    assert kept.client.wakes == 1
    assert kept.take(0, 1) == []


def test_a_read_asks_for_as_many_bytes_as_its_records_had_last_time() -> None:
    kept = Kept()
    usual = kept.read_ahead.bytes_for(1_000)
    kept.store(0, 1)
    assert kept.read_ahead.bytes_for(1_000) == 1_000 * SIZE < usual
    assert kept.read_ahead.bytes_for(1) > SIZE, "smaller reads cost more than they save"
