"""Replays of parked records: many come back with few reads, and they hold up neither each other nor other keys."""

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from aioshard import App, Batch, Limit, Park, Record, Retry, RetryLater
from aioshard.core.fairness import most_failing_runs
from aioshard.core.flow import Usage
from aioshard.core.sharding import fixed_shard
from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.shards import Shards
from aioshard.errors import TransportError
from aioshard.ports import UNKNOWN_OFFSET
from aioshard.records import TopicPartition
from aioshard.serde.side_records import Removed, read_parked
from aioshard.testing import InMemoryBroker, InMemorySideTopics, TestClient, run
from tests.engine.deliveries import make_buffer
from tests.engine.live_apps import engine_of, until

PARKED = "orders.parked"


class Outage:
    """A handler that takes a while, and fails for keys that begin with `bad` until it is over."""

    def __init__(self, *, seconds: float = 0.01) -> None:
        self.is_over = False
        self.seconds = seconds
        self.done: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
        self.running: set[bytes] = set()
        self.most_bad = 0
        """Maximum number of concurrent runs of parked keys since the outage is over."""
        self.wait_in_memory: set[bytes] = set()
        """Keys that are retried in memory, an hour later."""
        self.outlives: set[bytes] = set()
        """Keys whose runs hang, and return when they are cancelled."""

    def app(self, *, concurrency: int | None = 10, delay: float = 30.0, **options: Any) -> App:
        app = App("shop", commit_interval=0.1)

        @app.consume(
            "orders",
            concurrency=concurrency,
            retry=Retry(attempts=1 if not self.wait_in_memory else 2),
            on_failure=Park(PARKED, delay=delay),
            **options,
        )
        async def handle(record: Record) -> None:
            key = record.key or b""
            assert key not in self.running, "I4: two records of one key at once"
            self.running.add(key)
            try:
                if self.is_over:
                    self.most_bad = max(self.most_bad, sum(running.startswith(b"bad") for running in self.running))
                if key in self.outlives:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.Event().wait()
                    return
                await asyncio.sleep(self.seconds)
                if key.startswith(b"bad") and not self.is_over:
                    raise ConnectionError
                if key in self.wait_in_memory:
                    self.wait_in_memory.discard(key)
                    raise RetryLater(3_600.0)
                self.done[key].append((record.partition, record.offset))
            finally:
                self.running.discard(key)

        return app

    def count(self, prefix: bytes) -> int:
        return sum(len(places) for key, places in self.done.items() if key.startswith(prefix))

    def in_order(self) -> bool:
        return all(places == sorted(set(places)) for places in self.done.values())


async def publish(client: TestClient, keys: int, records: int, *, prefix: str = "bad", partitions: int = 1) -> None:
    """A number of records of each key; each key is in one partition."""
    for _ in range(records):
        for key in range(keys):
            await client.publish("orders", b"x" * 50, key=f"{prefix}{key}", partition=key % partitions)


def of_one_shard(number: int, shards: int, prefix: str) -> Iterator[str]:
    """Keys of one of a number of fixed shards."""
    names = (f"{prefix}{each}" for each in itertools.count())
    return (name for name in names if fixed_shard(name.encode(), shards, 0) == number)


def nothing_is_parked(broker: InMemoryBroker) -> bool:
    left: set[object] = set()
    for record in broker.records(PARKED):
        match read_parked(record):
            case Removed(storage_key):
                left.discard(storage_key)
            case None:
                pass
            case parked:
                left.add(getattr(parked, "storage_key", None))
    return not left


def test_chains_of_many_keys_are_read_in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next records of all keys that run are kept, although the keys alternate, and not those far behind."""
    outage = Outage()
    read = InMemorySideTopics.read
    returned: list[int] = []

    async def counted(
        self: InMemorySideTopics, topic_partition: TopicPartition, offset: int, max_bytes: int | None = None
    ) -> Sequence[Record]:
        records = await read(self, topic_partition, offset, max_bytes)
        returned.append(len(records))
        return records

    monkeypatch.setattr(InMemorySideTopics, "read", counted)

    async def test() -> None:
        broker = InMemoryBroker(partitions=8)
        async with TestClient(outage.app(concurrency=40), broker=broker) as client:
            await publish(client, 80, 30, partitions=8)
            # The first record of each key fails again, and is stored behind others of its key.
            await asyncio.sleep(40.0)
            await publish(client, 80, 20, partitions=8)
            await client.settle(timeout=100.0)
            outage.is_over = True
            returned.clear()
            await until(lambda: outage.count(b"bad") == 4_000)
            await until(lambda: nothing_is_parked(broker))

    run(test())
    assert outage.in_order()
    assert len(returned) < 150, "4,000 records"
    assert sum(returned) < 16_000, "each is decoded a few times at most"


def test_replays_take_a_share_of_the_workers_while_others_wait() -> None:
    outage = Outage(seconds=0.1)

    async def test() -> None:
        broker = InMemoryBroker(partitions=2)
        async with TestClient(outage.app(concurrency=20, delay=60.0), broker=broker) as client:
            await publish(client, 100, 2, partitions=2)
            await client.settle(timeout=100.0)
            outage.is_over = True
            await asyncio.sleep(40.0)
            await publish(client, 8_000, 1, prefix="good", partitions=2)
            began = outage.count(b"good")
            await until(lambda: outage.count(b"bad") >= 100, look_every=0.1)
            assert outage.most_bad <= most_failing_runs(20, others_wait=True) == 4
            # A tenth of a second each: the others have 16 of the 20 workers.
            assert outage.count(b"good") - began > 3 * 100
            await until(lambda: outage.count(b"bad") == 200)

    run(test())
    assert outage.in_order()


def test_replays_use_the_workers_that_nothing_else_needs() -> None:
    outage = Outage(seconds=0.1)

    async def test() -> None:
        async with TestClient(outage.app(concurrency=20), broker=InMemoryBroker(partitions=1)) as client:
            await publish(client, 100, 1)
            await client.settle(timeout=100.0)
            outage.is_over = True
            await until(lambda: outage.count(b"bad") == 100)
            assert outage.most_bad == 20

    run(test())


def test_replays_that_wait_for_their_next_attempt_hold_up_no_others() -> None:
    """They hold no worker, maybe for an hour."""
    outage = Outage(seconds=0.1)
    outage.wait_in_memory.update(f"bad{number}".encode() for number in range(50))

    async def test() -> None:
        async with TestClient(outage.app(concurrency=10), broker=InMemoryBroker(partitions=1)) as client:
            await publish(client, 100, 1)
            await client.settle(timeout=100.0)
            await asyncio.sleep(20.0)
            outage.is_over = True
            await publish(client, 5_000, 1, prefix="good")
            await until(lambda: outage.count(b"bad") == 50, timeout=30.0)
            assert outage.count(b"good") < 5_000, "no worker was ever idle"
            await until(lambda: outage.count(b"bad") == 100, timeout=4_000.0, look_every=1.0)

    run(test())


def test_replays_in_flight_hold_at_most_a_tenth_of_the_buffer() -> None:
    """Also those that wait in memory for their next attempt."""
    outage = Outage()
    outage.wait_in_memory.update(f"bad{number}".encode() for number in range(50))
    app = outage.app(concurrency=10, delay=30.0)
    app.configure(max_buffered_records=200)

    async def test() -> None:
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            await publish(client, 50, 1)
            await client.settle(timeout=100.0)
            outage.is_over = True
            await until(lambda: len(outage.wait_in_memory) <= 30)
            await asyncio.sleep(10.0)
            assert len(outage.wait_in_memory) == 30

    run(test())


@pytest.mark.parametrize(("size", "most"), [(90_000, 3), (400_000, 1)], ids=["small", "larger than the buffer"])
def test_replays_do_not_exceed_the_bytes_of_the_buffer(size: int, most: int) -> None:
    outage = Outage(seconds=1.0)
    app = outage.app(concurrency=10, delay=30.0)
    app.configure(max_buffered_bytes=300_000)

    async def test() -> None:
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            for key in range(10):
                await client.publish("orders", b"x" * size, key=f"bad{key}", partition=0)
            await client.settle(timeout=100.0)
            outage.is_over = True
            await until(lambda: outage.count(b"bad") == 10)

    run(test())
    assert outage.most_bad == most


def test_parked_records_of_a_batch_handler_run_in_batches() -> None:
    """At most 16 at a time if it has one worker: the others stay in the side topic."""
    app = App("shop", commit_interval=0.1)
    is_broken = True
    sizes: list[int] = []

    @app.consume(
        "orders",
        concurrency=1,
        batch=Batch(max_records=100, linger=0.1),
        retry=Retry(attempts=1),
        on_failure=Park(PARKED, delay=30.0),
    )
    async def handle(records: list[Record]) -> None:
        if is_broken:
            raise ConnectionError
        sizes.append(len(records))

    async def test() -> None:
        nonlocal is_broken
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            await publish(client, 50, 1)
            await client.settle(timeout=100.0)
            is_broken = False
            await until(lambda: sum(sizes) == 50)

    run(test())
    assert max(sizes) == 16


def test_a_partition_that_answers_slowly_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    outage = Outage()
    read = InMemorySideTopics.read
    reading: set[TopicPartition] = set()

    async def slow(
        self: InMemorySideTopics, topic_partition: TopicPartition, offset: int, max_bytes: int | None = None
    ) -> Sequence[Record]:
        assert topic_partition not in reading, "it is being read"
        reading.add(topic_partition)
        try:
            if topic_partition.partition == 0 and outage.is_over:
                await asyncio.sleep(100.0)
            return await read(self, topic_partition, offset, max_bytes)
        finally:
            reading.discard(topic_partition)

    monkeypatch.setattr(InMemorySideTopics, "read", slow)

    async def test() -> None:
        async with TestClient(outage.app(delay=10.0), broker=InMemoryBroker(partitions=2)) as client:
            for partition in range(2):
                for key in range(15):
                    await client.publish("orders", b"", key=f"bad{partition}-{key}", partition=partition)
                await client.settle()
                await asyncio.sleep(3.0)
            outage.is_over = True
            await until(lambda: outage.count(b"bad") == 15, timeout=30.0)
            assert {partition for places in outage.done.values() for partition, _ in places} == {1}
            await until(lambda: outage.count(b"bad") == 30, timeout=400.0)

    run(test())
    assert outage.in_order()


async def release_one_of_many(outage: Outage, client: TestClient, app: App) -> None:
    """Let one of 50 parked keys run, whose neighbours are read with it and stay parked."""
    await publish(client, 50, 2)
    await client.settle(timeout=100.0)
    outage.is_over = True
    app.release_parked("orders", 0, 0)
    await until(lambda: outage.count(b"bad") == 2, timeout=1.0)


def test_records_that_were_read_and_are_not_needed_give_their_room_back() -> None:
    """One key is released; its neighbours were read too, and wait for a day."""
    outage = Outage()
    app = outage.app(delay=86_400.0)

    async def test() -> None:
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            await release_one_of_many(outage, client, app)
            parking = engine_of(app).handlers[0].parking
            assert parking is not None
            assert parking.replays.read_ahead.records > 0
            assert engine_of(app).buffer.records == parking.replays.read_ahead.records
            await asyncio.sleep(100.0)
            assert parking.replays.read_ahead.records == 0
            assert engine_of(app).buffer.records == 0
            assert engine_of(app).buffer.bytes == 0

    run(test())


def test_records_that_were_read_leave_the_buffer_with_their_partition() -> None:
    outage = Outage()
    app = outage.app(delay=86_400.0)

    async def test() -> None:
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            await release_one_of_many(outage, client, app)
            assert engine_of(app).buffer.records > 0
            await client.revoke("orders", 0)
            assert (engine_of(app).buffer.records, engine_of(app).buffer.bytes) == (0, 0)

    run(test())


def test_records_that_are_read_ahead_leave_room_for_others() -> None:
    """They hold a tenth of the buffer, in equal parts for all partitions, and never more than is left of it."""
    outage = Outage()
    app = outage.app(delay=86_400.0)
    app.configure(max_buffered_records=1_000, max_buffered_bytes=1_000_000)

    async def test() -> None:
        async with TestClient(app, broker=InMemoryBroker(partitions=2)) as client:
            await publish(client, 1, 1)
            await client.settle()
            parking = engine_of(app).handlers[0].parking
            assert parking is not None
            read_ahead, *_ = parking.replays._read_ahead.values()
            assert parking.replays._share(read_ahead) == Usage(100, 100_000)
            await publish(client, 4, 1, partitions=2)
            await client.settle()
            assert parking.replays._share(read_ahead) == Usage(50, 50_000)
            buffer = engine_of(app).buffer
            buffer.take_in(997, 999_900)
            assert parking.replays._share(read_ahead) == Usage(3, 100)
            buffer.drop(997, 999_900)

    run(test())


async def end_when_all_are_parked(client: TestClient, outage: Outage) -> None:
    """End an outage, before the parked keys are due."""
    await client.settle(timeout=100.0)
    outage.is_over = True
    await asyncio.sleep(40.0)


async def check_turns(client: TestClient, outage: Outage) -> None:
    """Check that other records run while the parked ones come back: neither kind waits for all of the other."""
    await until(lambda: outage.count(b"bad") >= 1)
    before = outage.count(b"good")
    await until(lambda: outage.count(b"bad") == 100)
    assert 50 < outage.count(b"good") - before < 500
    await client.settle(timeout=200.0)


def test_replays_take_turns_with_the_other_records_of_a_fixed_shard() -> None:
    """All records are in one of ten shards, and the workers of the others are idle."""
    outage = Outage(seconds=0.1)

    async def test() -> None:
        app = outage.app(concurrency=None, shards=10, delay=60.0)
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            for key in itertools.islice(of_one_shard(3, 10, "bad"), 50):
                for _ in range(2):
                    await client.publish("orders", b"", key=key, partition=0)
            await end_when_all_are_parked(client, outage)
            for key in itertools.islice(of_one_shard(3, 10, "good"), 1_000):
                await client.publish("orders", b"", key=key, partition=0)
            await check_turns(client, outage)

    run(test())
    assert outage.in_order()


def test_replays_take_turns_with_the_other_records_of_a_single_worker() -> None:
    outage = Outage(seconds=0.1)

    async def test() -> None:
        async with TestClient(outage.app(concurrency=1, delay=60.0), broker=InMemoryBroker(partitions=1)) as client:
            await publish(client, 50, 2)
            await end_when_all_are_parked(client, outage)
            await publish(client, 1_000, 1, prefix="good")
            await check_turns(client, outage)

    run(test())
    assert outage.in_order()


def test_keys_that_wait_for_a_token_hold_up_no_others() -> None:
    """They hold no worker, for ten minutes."""
    outage = Outage(seconds=0.1)

    async def test() -> None:
        app = outage.app(delay=5.0, limit=Limit("bank", per_second=1 / 600, burst=2, per="key"))
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            await publish(client, 10, 1)
            await asyncio.sleep(11.0)
            await publish(client, 2, 1, prefix="bad again")
            await asyncio.sleep(1.0)
            outage.is_over = True
            await publish(client, 5_000, 1, prefix="good")
            await until(lambda: outage.count(b"bad again") == 2, timeout=30.0)
            assert outage.count(b"good") < 5_000, "no worker was ever idle"
            assert outage.count(b"bad") == 2
            handler = engine_of(app).handlers[0]
            assert handler.parking is not None
            replays = [replay for parked in handler.parking.partitions for replay in parked.tracker.values()]
            assert sum(map(handler.shards[0].is_waiting, replays)) == 10
            await until(lambda: outage.count(b"bad") == 12, timeout=1_000.0)
            assert not any(map(handler.shards[0].is_waiting, replays))

    run(test())


def test_a_halted_shard_holds_up_no_parked_keys_of_other_shards() -> None:
    outage = Outage()
    app = outage.app(concurrency=None, shards=4, delay=20.0, timeout=1.0)

    async def test() -> None:
        outage.outlives.add(b"hangs")
        halted = fixed_shard(b"hangs", 4, 0)
        async with TestClient(app, broker=InMemoryBroker(partitions=4)) as client:
            for number in range(4):
                for key in itertools.islice(of_one_shard(number, 4, "bad"), 3):
                    await client.publish("orders", b"", key=key, partition=number)
            await client.settle()
            outage.is_over = True
            await client.publish("orders", b"", key=b"hangs", partition=halted)
            await asyncio.sleep(5.0)
            assert app.statistics().handlers[0].halted == 1
            for number in {0, 1, 2, 3} - {halted}:
                for key in itertools.islice(of_one_shard(number, 4, "good"), 3_000):
                    await client.publish("orders", b"", key=key, partition=number)
            await until(lambda: outage.count(b"bad") == 9, timeout=25.0)
            assert outage.count(b"good") < 9_000, "no worker was ever idle"
            app.skip("orders", halted, 3)
            await until(lambda: outage.count(b"bad") == 12)

    run(test())


def test_many_due_keys_of_one_shard_do_not_hide_those_of_others() -> None:
    outage = Outage(seconds=0.001)

    async def test() -> None:
        app = outage.app(concurrency=None, shards=2, delay=20.0)
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            for key in itertools.islice(of_one_shard(0, 2, "bad-a"), 150):
                await client.publish("orders", b"", key=key, partition=0)
            await client.settle()
            for key in itertools.islice(of_one_shard(1, 2, "bad-b"), 2):
                await client.publish("orders", b"", key=key, partition=0)
            await client.settle()
            outage.is_over = True
            outage.seconds = 1.0
            await until(lambda: outage.count(b"bad-b") == 2)
            assert outage.count(b"bad-a") < 20
            await until(lambda: outage.count(b"bad-a") == 150)

    run(test())


def test_partitions_take_turns() -> None:
    """One has a long backlog of parked keys, and all workers are busy with other records."""
    outage = Outage(seconds=0.1)

    async def test() -> None:
        broker = InMemoryBroker(partitions=2)
        async with TestClient(outage.app(concurrency=5, delay=60.0), broker=broker) as client:
            for partition, keys in enumerate((100, 5)):
                for key in range(keys):
                    await client.publish("orders", b"", key=f"bad{partition}-{key}", partition=partition)
            await client.settle(timeout=100.0)
            outage.is_over = True
            await asyncio.sleep(40.0)
            await publish(client, 3_000, 1, prefix="good", partitions=2)
            await until(lambda: outage.count(b"bad1") == 5)
            assert outage.count(b"bad0") < 50
            await client.settle(timeout=100.0)

    run(test())


def test_few_partitions_are_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read brings up to a megabyte."""
    outage = Outage()
    read = InMemorySideTopics.read
    reading = 0
    most = 0

    async def slow(
        self: InMemorySideTopics, topic_partition: TopicPartition, offset: int, max_bytes: int | None = None
    ) -> Sequence[Record]:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        try:
            await asyncio.sleep(0.5)
            return await read(self, topic_partition, offset, max_bytes)
        finally:
            reading -= 1

    async def test() -> None:
        async with TestClient(outage.app(), broker=InMemoryBroker(partitions=16)) as client:
            await publish(client, 16, 1, partitions=16)
            await client.settle()
            outage.is_over = True
            monkeypatch.setattr(InMemorySideTopics, "read", slow)
            await until(lambda: outage.count(b"bad") == 16)

    run(test())
    assert most == 4


def test_a_record_of_a_fixed_shard_keeps_its_delay_although_parked_records_wait() -> None:
    """Only a record that cannot be parked lets them run first."""
    outage = Outage()
    outage.wait_in_memory.add(b"slow")

    async def test() -> None:
        clock = asyncio.get_running_loop().time
        async with TestClient(outage.app(concurrency=None, shards=1), broker=InMemoryBroker(partitions=1)) as client:
            await client.publish("orders", b"", key="bad", partition=0)
            await client.settle()
            outage.is_over = True
            outage.seconds = 40.0
            began = clock()
            await client.publish("orders", b"", key="slow", partition=0)
            await until(lambda: outage.count(b"slow") == 1, timeout=5_000.0)
            assert clock() - began > 3_600.0
            await until(lambda: outage.count(b"bad") == 1)

    run(test())


def test_a_partition_that_cannot_be_read_is_tried_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    outage = Outage()
    app = outage.app(delay=5.0)
    tries = 0

    async def refused(*_: object) -> Sequence[Record]:
        nonlocal tries
        tries += 1
        raise TransportError("nobody leads it")

    async def test() -> None:
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            await publish(client, 3, 1)
            await client.settle()
            outage.is_over = True
            with monkeypatch.context() as patch:
                patch.setattr(InMemorySideTopics, "read", refused)
                await asyncio.sleep(15.0)
                assert 5 <= tries <= 12
                parking = engine_of(app).handlers[0].parking
                assert parking is not None
                assert parking.trouble == "nobody leads it"
                await client.revoke("orders", 0)
                assert parking.replays._unreadable == {}, "nothing of a partition that has ended stays in memory"
            await client.assign("orders", 0)
            await until(lambda: outage.count(b"bad") == 3, timeout=10.0)

    run(test())


@pytest.mark.parametrize("fails", [False, True])
def test_a_read_that_ends_after_its_partition_leaves_nothing(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    outage = Outage()
    app = outage.app(delay=5.0)
    read = InMemorySideTopics.read
    is_reading = False

    async def slow(
        self: InMemorySideTopics, topic_partition: TopicPartition, offset: int, max_bytes: int | None = None
    ) -> Sequence[Record]:
        nonlocal is_reading
        is_reading = True
        await asyncio.sleep(10.0)
        is_reading = False
        if fails:
            raise TransportError("nobody leads it")
        return await read(self, topic_partition, offset, max_bytes)

    async def test() -> None:
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            await publish(client, 3, 1)
            await client.settle()
            monkeypatch.setattr(InMemorySideTopics, "read", slow)
            await until(lambda: is_reading)
            await client.revoke("orders", 0)
            await until(lambda: not is_reading)
            await asyncio.sleep(1.0)
            parking = engine_of(app).handlers[0].parking
            assert parking is not None
            assert parking.replays._unreadable == {}
            assert (engine_of(app).buffer.records, engine_of(app).buffer.bytes) == (0, 0)

    run(test())


@pytest.mark.parametrize("change", ["not due", "written again", "revoked"])
def test_nothing_is_read_of_a_record_that_changes_before_its_read_begins(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read is a task: an operator may drop the record, or the partition may end, before it begins."""
    outage = Outage()
    app = outage.app(delay=5.0)
    reads: list[object] = []

    async def counted(*arguments: object) -> Sequence[Record]:
        reads.append(arguments)
        return ()

    async def test() -> None:
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            await publish(client, 1, 1)
            await client.settle()
            parking = engine_of(app).handlers[0].parking
            assert parking is not None
            (parked,) = parking.partitions
            (entry,) = parked.keys
            if change == "written again":
                entry.stored_at = UNKNOWN_OFFSET
            if change == "revoked":
                await client.revoke("orders", 0)
            if change != "not due":
                parked.keys.release(entry.key)
            with monkeypatch.context() as patch:
                patch.setattr(InMemorySideTopics, "read", counted)
                await parking.replays._read(parked)
            assert reads == []

    run(test())


def test_a_paused_partition_is_not_read() -> None:
    outage = Outage()
    app = outage.app(delay=5.0)

    async def test() -> None:
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            await publish(client, 3, 1)
            await client.settle()
            outage.is_over = True
            app.pause("orders")
            await asyncio.sleep(10.0)
            assert engine_of(app).buffer.records == 0
            app.resume("orders")
            await until(lambda: outage.count(b"bad") == 3, timeout=10.0)

    run(test())


def test_a_record_that_was_deleted_from_the_side_topic_is_named() -> None:
    """By something other than compaction. Its key waits, and others run again."""
    outage = Outage()
    app = outage.app(delay=5.0)

    async def test() -> None:
        broker = InMemoryBroker(partitions=1)
        async with TestClient(app, broker=broker) as client:
            await publish(client, 3, 1)
            await client.settle()
            outage.is_over = True
            broker.log(PARKED, 0).truncate_before(2)
            await until(lambda: outage.count(b"bad") == 1, timeout=10.0)
            await asyncio.sleep(5.0)
            parking = engine_of(app).handlers[0].parking
            assert parking is not None
            assert "orders/0/0 is not in orders.parked/0 at offset 0" in str(parking.trouble)
            assert outage.count(b"bad") == 1

    run(test())


def test_another_record_in_the_place_of_a_parked_one_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the side topic was created anew, or has lost its last records."""
    outage = Outage()
    app = outage.app(delay=5.0)
    read = InMemorySideTopics.read

    async def shifted(
        self: InMemorySideTopics, topic_partition: TopicPartition, offset: int, max_bytes: int | None = None
    ) -> Sequence[Record]:
        records = await read(self, topic_partition, offset + 1, max_bytes)
        return [record._replace(offset=record.offset - 1) for record in records]

    async def test() -> None:
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            await publish(client, 2, 1)
            await client.settle()
            outage.is_over = True
            with monkeypatch.context() as patch:
                patch.setattr(InMemorySideTopics, "read", shifted)
                await asyncio.sleep(20.0)
            assert outage.count(b"bad") == 0
            parking = engine_of(app).handlers[0].parking
            assert parking is not None
            assert "orders/0/0 is not in orders.parked/0 at offset 0" in str(parking.trouble)
            await until(lambda: outage.count(b"bad") == 2, timeout=10.0)
            assert parking.trouble is None

    run(test())


def test_spare_workers_are_those_that_may_run_and_are_not_needed() -> None:
    async def test() -> None:
        shards = Shards()
        idle = [asyncio.create_task(shards.wait()) for _ in range(4)]
        await asyncio.sleep(0)
        assert shards.spare_workers == 4
        shards.limit_workers(3, 4)
        assert shards.spare_workers == 3
        epoch = Epoch(TopicPartition("orders", 0), 0, 0, make_buffer(100, 10**6))
        epoch.open()
        await shards.put([Delivery(Record("orders", 0, 0, None, None, (), 0.0), epoch, "key", 1, 0.0)])
        assert shards.spare_workers == 2
        for task in idle:
            task.cancel()

    run(test())
