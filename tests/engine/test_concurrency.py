"""The number of workers changes while they work."""

import asyncio
import random
import threading
from collections import defaultdict

import anyio.to_thread
import pytest

from aioshard import App, Batch, Record, Retry
from aioshard.errors import HandlerError, StateError
from aioshard.testing import TestClient, run
from tests.engine.running import publish, workers


class Load:
    """Counts what runs at the same time."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.started: dict[bytes | None, list[int]] = defaultdict(list)
        self.running: set[bytes | None] = set()

    async def take(self, record: Record, seconds: float = 1.0) -> None:
        assert record.key not in self.running or record.key is None
        self.running.add(record.key)
        self.started[record.key].append(record.offset)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.now -= 1
            self.running.discard(record.key)


def concurrency_of(app: App) -> int:
    (handler,) = app.statistics().handlers
    return handler.concurrency


def test_more_workers_begin_at_once() -> None:
    app, load = App("concurrency"), Load()

    @app.consume("orders", concurrency=1)
    async def handle(record: Record) -> None:
        await load.take(record)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 100)
            await asyncio.sleep(1.5)
            assert load.most == 1
            app.set_concurrency("handle", 20)
            await asyncio.sleep(0.1)
            assert load.now == 20
            assert concurrency_of(app) == 20
            await client.settle(timeout=30.0)

    run(test())


def test_fewer_workers_interrupt_nothing() -> None:
    app, load = App("concurrency"), Load()
    cancelled: list[int] = []

    @app.consume("orders", concurrency=10)
    async def handle(record: Record) -> None:
        try:
            await load.take(record)
        except asyncio.CancelledError:
            cancelled.append(record.offset)
            raise

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 40)
            await asyncio.sleep(0.5)
            assert load.now == 10
            app.set_concurrency("handle", 2)
            assert concurrency_of(app) == 2
            assert load.now == 10
            await asyncio.sleep(1.0)
            assert load.now == 2
            load.most = 0
            await client.settle(timeout=30.0)
            assert load.most == 2

    run(test())
    assert cancelled == []


def test_idle_workers_end_at_once_and_no_record_is_left_waiting() -> None:
    app, load = App("concurrency"), Load()

    @app.consume("orders", concurrency=50)
    async def handle(record: Record) -> None:
        await load.take(record)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 1)
            await asyncio.sleep(0.5)
            app.set_concurrency("handle", 1)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(workers()) == 1, "the one that is busy stays"
            await publish(client, 3)
            await client.settle(timeout=10.0)

    run(test())
    assert load.most == 1


def test_workers_that_were_to_end_stay_when_they_are_wanted_again() -> None:
    app, load = App("concurrency"), Load()

    @app.consume("orders", concurrency=8)
    async def handle(record: Record) -> None:
        await load.take(record)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 40)
            await asyncio.sleep(0.5)
            app.set_concurrency("handle", 1)
            app.set_concurrency("handle", 6)
            assert len(workers()) == 8
            await asyncio.sleep(1.0)
            assert load.now == 6
            await client.settle(timeout=30.0)

    run(test())


@pytest.mark.parametrize("ends", ["raises", "times out"])
def test_a_worker_ends_after_a_run_that_failed(ends: str) -> None:
    app = App("concurrency")
    runs: list[int] = []

    @app.consume("orders", concurrency=3, timeout=2.0, retry=Retry(attempts=2, initial=5.0, jitter=0.0))
    async def handle(record: Record) -> None:
        runs.append(record.offset)
        await asyncio.sleep(1.0 if ends == "raises" or runs.count(record.offset) > 1 else 60.0)
        if runs.count(record.offset) == 1:
            raise ValueError

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 3)
            await asyncio.sleep(0.5)
            app.set_concurrency("handle", 1)
            await asyncio.sleep(2.5)
            assert len(workers()) == 1
            await client.settle(timeout=60.0)

    run(test())
    assert sorted(runs) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("seed", range(20))
def test_order_is_kept_and_nothing_is_lost_while_it_changes_and_partitions_come_and_go(seed: int) -> None:
    """I4 while the concurrency goes 1 → 64 → 2, with rebalances in between.

    A single worker may have 200 records to end that 64 have left behind: that takes longer than a drain has by default.
    """
    app, load = App("concurrency", drain_timeout=60, rebalance_timeout=120), Load()
    chance = random.Random(seed)
    done: dict[bytes, list[int]] = defaultdict(list)

    @app.consume("orders", concurrency=1)
    async def handle(record: Record) -> None:
        await load.take(record, chance.choice([0.0, 0.01, 0.2]))
        assert record.key is not None
        done[record.key].append(record.offset)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 600, keys=30)
            for concurrency in (64, 2, 7, 1, 64, 2):
                app.set_concurrency("handle", concurrency)
                await asyncio.sleep(chance.random() / 2)
                if chance.random() < 0.5:
                    await client.revoke("orders", 0)
                    await asyncio.sleep(chance.random() / 10)
                    await client.assign("orders", 0)
            await client.settle(timeout=60.0)
            assert client.committed("orders", 0) == 600

    run(test(), seed=seed)
    assert set(done) == {str(number).encode() for number in range(30)}
    for key, offsets in done.items():
        assert offsets == [offset for offset in range(600) if str(offset % 30).encode() == key]
        assert load.started[key] == offsets


def test_while_a_partition_drains_a_worker_that_is_to_end_is_waited_for() -> None:
    app, load = App("concurrency"), Load()

    @app.consume("orders", concurrency=4)
    async def handle(record: Record) -> None:
        await load.take(record)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 4)
            await asyncio.sleep(0.5)
            app.set_concurrency("handle", 1)
            await client.revoke("orders", 0)
            assert client.committed("orders", 0) == 4

    run(test())


def test_batches_follow() -> None:
    app = App("concurrency")
    running: list[int] = [0, 0]

    @app.consume("orders", concurrency=1, batch=Batch(max_records=5, linger=0.1))
    async def handle(records: list[Record]) -> None:  # noqa: ARG001
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(1.0)
        running[0] -= 1

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 100)
            await asyncio.sleep(0.5)
            assert running == [1, 1]
            app.set_concurrency("handle", 6)
            await asyncio.sleep(0.1)
            assert running[0] == 6
            app.set_concurrency("handle", 2)
            await asyncio.sleep(1.5)
            assert running[0] == 2
            await client.settle(timeout=60.0)

    run(test())


def test_threads_follow() -> None:
    app = App("concurrency")
    gate = threading.Event()
    came = threading.Semaphore(0)

    @app.consume("orders", concurrency=1)
    def handle(record: Record) -> None:  # noqa: ARG001
        came.release()
        gate.wait(10.0)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 6)
            await anyio.to_thread.run_sync(came.acquire)
            app.set_concurrency("handle", 5)
            for _ in range(4):
                await anyio.to_thread.run_sync(came.acquire)
            assert not came.acquire(blocking=False)
            gate.set()
            await client.settle(timeout=10.0)

    run(test())


def test_it_can_be_asked_from_another_thread() -> None:
    app = App("concurrency")

    @app.consume("orders", concurrency=1)
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with TestClient(app):
            await asyncio.to_thread(app.set_concurrency, "handle", 12)
            assert concurrency_of(app) == 12

    run(test())


def test_what_cannot_be_changed_is_refused() -> None:
    app = App("concurrency")

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    @app.consume("fixed", shards=3)
    async def fixed(record: Record) -> None: ...

    with pytest.raises(StateError, match="is not running"):
        app.set_concurrency("handle", 3)

    async def test() -> None:
        async with TestClient(app):
            for number in (0, -1, 2.0, True, "3", 10_001):
                with pytest.raises(HandlerError, match="whole number from 1 to 10000"):
                    app.set_concurrency("handle", number)  # type: ignore[arg-type]
            with pytest.raises(HandlerError, match="shards=3, each with one worker"):
                app.set_concurrency("fixed", 4)
            with pytest.raises(StateError, match="unknown handler 'nobody'"):
                app.set_concurrency("nobody", 4)

    run(test())
