"""Writes to dead-letter and side topics hold no worker of the handler, and keep the order of each key."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aioshard import App, DeadLetter, Park, Record, Retry
from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.explain.causes import HandlerSnapshot
from aioshard.engine.shards import Shards
from aioshard.ports import FetchedBatch, Message
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryProducer, TestClient, run
from tests.engine.deliveries import make_buffer
from tests.engine.live_apps import engine_of, until, watch_of

SIDE = "orders.side"
POLICIES: list[Any] = [DeadLetter(SIDE, breaker=None), Park(SIDE, delay=30.0)]


class Ledger:
    """A handler that fails for keys that begin with `bad`; notes what has run, in order."""

    def __init__(self) -> None:
        self.healed = False
        self.done: defaultdict[bytes, list[int]] = defaultdict(list)
        self.running: set[bytes] = set()

    def app(self, policy: Any, **options: Any) -> App:
        app = App("shop", commit_interval=0.1)

        @app.consume("orders", retry=Retry(attempts=1), on_failure=policy, **options)
        async def handle(record: Record) -> None:
            key = record.key or b""
            task = asyncio.current_task()
            assert task is not None
            assert "recovery" not in task.get_name(), "those workers only write"
            assert key not in self.running, "I4: two records of one key at once"
            self.running.add(key)
            try:
                await asyncio.sleep(0.01)
                if key.startswith(b"bad") and not self.healed:
                    raise ConnectionError
                self.done[key].append(record.offset)
            finally:
                self.running.discard(key)

        return app

    def count(self, prefix: bytes) -> int:
        return sum(len(offsets) for key, offsets in self.done.items() if key.startswith(prefix))

    def in_order(self) -> bool:
        return all(offsets == sorted(set(offsets)) for offsets in self.done.values())


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let each write to the side topic take a number of seconds."""
    publish: Callable[..., Awaitable[int]] = InMemoryProducer.publish
    seconds = 0.0

    async def slow(self: InMemoryProducer, message: Message) -> int:
        if message.topic == SIDE:
            await asyncio.sleep(seconds)
        return await publish(self, message)

    monkeypatch.setattr(InMemoryProducer, "publish", slow)

    def take(duration: float) -> None:
        nonlocal seconds
        seconds = duration

    return take


@pytest.mark.parametrize("policy", POLICIES, ids=["dead letter", "park"])
@pytest.mark.parametrize("options", [{"concurrency": 4}, {"concurrency": 1}], ids=str)
def test_healthy_keys_do_not_wait_for_writes(
    slow_writes: Callable[[float], None], policy: Any, options: dict[str, Any]
) -> None:
    """Ten failing keys, whose writes take 50 s each, and more of them than recovery workers."""
    ledger = Ledger()
    slow_writes(50.0)
    app = ledger.app(policy, **options)

    async def test() -> None:
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            for key in range(10):
                await client.publish("orders", b"", key=f"bad{key}", partition=0)
            for key in range(100):
                await client.publish("orders", b"", key=f"good{key}", partition=0)
            await until(lambda: ledger.count(b"good") == 100, timeout=20.0)
            statistics = app.statistics().handlers[0]
            assert statistics.busy == 0, "of the handler's workers"
            states = [part.head.state for part in app.diagnose().partitions if part.head is not None]
            assert states == ["recovery"]
            waiting = engine_of(app).handlers[0].shards[0].handed_over
            assert len(waiting) == 10 - max(options["concurrency"] // 2, 1)
            described = HandlerSnapshot(engine_of(app).handlers[0], watch_of(app)).describe(waiting[0])
            assert described.state == "recovery"
            assert SIDE in described.reason
            assert client.committed("orders", 0) in (0, None)
            slow_writes(0.0)
            await client.settle(timeout=1_000.0)

    run(test())
    assert ledger.in_order()


def test_later_records_of_a_key_wait_until_the_write_is_acknowledged(slow_writes: Callable[[float], None]) -> None:
    """They would be processed before their key counts as parked."""
    ledger = Ledger()
    slow_writes(5.0)

    async def test() -> None:
        async with TestClient(ledger.app(POLICIES[1]), broker=InMemoryBroker(partitions=1)) as client:
            await client.publish("orders", b"", key="bad", partition=0)
            await asyncio.sleep(1.0)
            ledger.healed = True
            for _ in range(5):
                await client.publish("orders", b"", key="bad", partition=0)
            await asyncio.sleep(2.0)
            assert ledger.done == {}
            slow_writes(0.0)
            await until(lambda: ledger.count(b"bad") == 6)

    run(test())
    assert ledger.done == {b"bad": [0, 1, 2, 3, 4, 5]}


@pytest.mark.parametrize("policy", POLICIES, ids=["dead letter", "park"])
def test_a_drain_waits_for_writes_that_are_about_to_begin(slow_writes: Callable[[float], None], policy: Any) -> None:
    """More failed records than recovery workers: none runs again after a clean stop."""
    runs: defaultdict[int, int] = defaultdict(int)
    app = App("shop", commit_interval=0.1, drain_timeout=20.0, shutdown_timeout=40.0)

    @app.consume("orders", retry=Retry(attempts=1), concurrency=8, on_failure=policy)
    async def handle(record: Record) -> None:
        runs[record.offset] += 1
        await asyncio.sleep(0.01)
        raise ConnectionError

    async def test() -> None:
        broker = InMemoryBroker(partitions=1)
        slow_writes(0.5)
        async with TestClient(app, broker=broker) as client:
            for key in range(16):
                await client.publish("orders", b"", key=f"bad{key}", partition=0)
            await until(lambda: len(runs) == 16)
            assert len(engine_of(app).handlers[0].shards[0].handed_over) > 4
        async with TestClient(app, broker=broker) as client:
            await client.settle()

    run(test())
    assert set(runs.values()) == {1}


def test_a_revoked_partition_leaves_no_shard_occupied(slow_writes: Callable[[float], None]) -> None:
    """Its writes hang; the partition comes back, and its records run again."""
    ledger = Ledger()
    app = ledger.app(POLICIES[0], concurrency=2)
    app.configure(drain_timeout=1.0)

    async def test() -> None:
        slow_writes(10_000.0)
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            for key in range(20):
                await client.publish("orders", b"", key=f"bad{key}", partition=0)
            await asyncio.sleep(5.0)
            assert engine_of(app).handlers[0].shards[0].handed_over
            await client.revoke("orders", 0)
            await asyncio.sleep(5.0)
            assert not engine_of(app).handlers[0].shards[0].handed_over
            slow_writes(0.0)
            ledger.healed = True
            await client.assign("orders", 0)
            await until(lambda: ledger.count(b"bad") == 20, timeout=60.0)
            await client.settle()

    run(test())
    assert ledger.in_order()


@pytest.mark.parametrize("shards", [1, 3])
def test_fixed_shards_have_one_each(slow_writes: Callable[[float], None], shards: int) -> None:
    ledger = Ledger()
    slow_writes(0.5)

    async def test() -> None:
        async with TestClient(ledger.app(POLICIES[1], shards=shards), broker=InMemoryBroker(partitions=2)) as client:
            for number in range(40):
                await client.publish("orders", b"", key=f"{'bad' if number % 4 else 'good'}{number % 8}")
            await client.settle(timeout=200.0)
            ledger.healed = True
            await until(lambda: sum(map(len, ledger.done.values())) == 40)

    run(test())


def test_a_record_is_not_parked_behind_a_key_that_is_no_longer_parked(
    slow_writes: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The key was dropped while the record waited for a recovery worker: its handler runs."""
    ledger = Ledger()

    async def test() -> None:
        broker = InMemoryBroker(partitions=1)
        async with TestClient(ledger.app(POLICIES[1], concurrency=2), broker=broker) as client:
            await client.publish("orders", b"", key="bad0", partition=0)
            await client.settle()
            slow_writes(5.0)
            await client.publish("orders", b"", key="bad1", partition=0)
            await asyncio.sleep(1.0)
            await client.publish("orders", b"", key="bad0", partition=0)
            await asyncio.sleep(1.0)
            ledger.healed = True
            (parked,) = broker.records(SIDE)
            broker.publish(SIDE, None, key=parked.key, partition=0)
            await until(lambda: ledger.done[b"bad0"] == [2], timeout=10.0)
            slow_writes(0.0)
            await until(lambda: ledger.done[b"bad1"] == [1])

    run(test())
    assert not [record for record in caplog.records if getattr(record, "event", "") == "recovery_failed"]


def test_a_delivery_of_an_ended_epoch_frees_its_shard_although_no_recovery_worker_is_free() -> None:
    """The same key in two partitions, as with a sharding function: the other partition continues."""
    buffer = make_buffer(100, 10**6)
    epochs = [Epoch(TopicPartition("orders", number), number, 0, buffer) for number in range(2)]
    deliveries: list[Delivery] = []
    for epoch in epochs:
        record = Record(*epoch.topic_partition, 0, None, None, (), 0.0)
        deliveries.append(Delivery(record, epoch, "key", 1, 0.0))
        epoch.take_in(FetchedBatch(epoch.topic_partition, [record], [1], 1), deliveries[-1:])
        epoch.open()

    async def test() -> None:
        shards = Shards()
        await shards.put(deliveries)
        assert shards.take() is deliveries[0]
        assert shards.take() is None
        shards.hand_over(deliveries[0])
        epochs[0].end()
        shards.purge(epochs[0])
        assert shards.handed_over == []
        assert shards.take() is deliveries[1]

    run(test())


def test_a_delivery_that_may_not_start_any_more_leaves_its_shard() -> None:
    buffer = make_buffer(100, 10**6)
    epoch = Epoch(TopicPartition("orders", 0), 0, 0, buffer)
    record = Record(*epoch.topic_partition, 0, None, None, (), 0.0)
    delivery = Delivery(record, epoch, "key", 1, 0.0)
    epoch.take_in(FetchedBatch(epoch.topic_partition, [record], [1], 1), [delivery])
    epoch.open()

    async def test() -> None:
        shards = Shards()
        await shards.put([delivery])
        assert shards.take() is delivery
        shards.hand_over(delivery)
        epoch.close()
        shards.close(epoch)
        assert shards.take_handed_over() is None
        epoch.open()
        shards.reopen(epoch)
        assert shards.take() is delivery

    run(test())


def test_a_recovery_worker_that_ends_when_it_is_woken_wakes_another_one() -> None:
    buffer = make_buffer(100, 10**6)
    epoch = Epoch(TopicPartition("orders", 0), 0, 0, buffer)
    delivery = Delivery(Record("orders", 0, 0, None, None, (), 0.0), epoch, "key", 1, 0.0)

    async def test() -> None:
        shards = Shards()
        first, second = [asyncio.create_task(shards.wait_for_handed_over()) for _ in range(2)]
        await asyncio.sleep(0)
        shards.hand_over(delivery)
        first.cancel()
        async with asyncio.timeout(1.0):
            await second
        assert first.cancelled()

    run(test())
