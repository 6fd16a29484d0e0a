"""The workload as the dashboard and the terminal show it; releasing parked keys."""

import asyncio
from typing import Any

import pytest

from aioshard import App, Batch, DeadLetter, Park, Record, Retry
from aioshard.core.sharding import shown
from aioshard.errors import StateError
from aioshard.observe import Workload
from aioshard.testing import TestClient, run
from tests.engine.live_apps import engine_of, until


def workload_of(app: App) -> Workload:
    found = app.workload()
    assert found is not None
    return found


def test_an_app_that_is_not_running_has_no_workload() -> None:
    assert App("idle").workload() is None


def test_a_worker_is_shown_with_its_record_and_its_await() -> None:
    app = App("workload", show_keys=True)
    over = asyncio.Event()

    @app.consume("orders", concurrency=2)
    async def on_order(_: Record) -> None:
        await over.wait()

    async def scenario() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"", key="a", partition=3)
            await until(lambda: workload_of(app).busy)
            await asyncio.sleep(5)
            (one,) = workload_of(app).workers
            assert (one.handler, one.topic, one.partition, one.offset, one.records) == ("on_order", "orders", 3, 0, 1)
            assert one.key == "b'a'"
            assert one.state == "in_flight"
            assert one.since == pytest.approx(5, abs=0.2)
            assert one.stack is not None
            assert one.stack.place is not None
            assert "test_workload.py:" in str(one.stack.place)
            assert str(one.stack.place).endswith("on_order")
            over.set()

    run(scenario())


def test_the_deepest_shards_come_first_with_their_blocker() -> None:
    app = App("workload")
    over = asyncio.Event()

    @app.consume("orders", concurrency=8, retry=Retry(attempts=1))
    async def on_order(record: Record) -> None:
        if record.value == b"halts":
            raise ValueError(record.offset)
        await over.wait()

    async def scenario() -> None:
        async with TestClient(app) as client:
            for key, depth, value in (("cold", 1, b""), ("warm", 3, b""), ("hot", 6, b"halts")):
                for _ in range(depth):
                    await client.publish("orders", value, key=key, partition=0)
            await until(lambda: workload_of(app).deep == 2 and workload_of(app).failing)
            hot, warm = workload_of(app).shards
            assert (hot.waiting, hot.state, hot.offset) == (5, "halted", 4)
            assert (warm.waiting, warm.state, warm.offset) == (2, "in_flight", 1)
            assert hot.key != warm.key
            assert hot.key == workload_of(app).failed[0].key, "the same key has the same name"
            over.set()

    run(scenario())


def test_fixed_shards_are_shown_by_their_number() -> None:
    app = App("workload")
    over = asyncio.Event()

    @app.consume("orders", shards=1)
    async def on_order(_: Record) -> None:
        await over.wait()

    async def scenario() -> None:
        async with TestClient(app) as client:
            for number in range(5):
                await client.publish("orders", b"", key=str(number), partition=0)
            await until(lambda: workload_of(app).deep)
            (hot,) = workload_of(app).shards
            assert (hot.shard, hot.waiting, hot.state) == ("0", 4, "in_flight")
            (handler,) = app.statistics().handlers
            assert (handler.shards, handler.queued) == (1, 4)
            over.set()

    run(scenario())


def test_a_batch_is_one_run_of_many_records() -> None:
    app = App("workload")
    over = asyncio.Event()

    @app.consume("orders", batch=Batch(max_records=10, linger=0.01), concurrency=1)
    async def on_orders(_: list[Record]) -> None:
        await over.wait()

    async def scenario() -> None:
        async with TestClient(app) as client:
            for number in range(4):
                await client.publish("orders", b"", key=str(number), partition=0)
            await until(lambda: workload_of(app).busy)
            (one,) = workload_of(app).workers
            assert (one.offset, one.records) == (0, 4)
            over.set()

    run(scenario())


def test_failed_records_are_shown_with_halted_ones_first() -> None:
    app = App("workload")

    @app.consume("orders", retry=Retry(attempts=2, initial=20.0, jitter=0.0))
    async def on_order(_: Record) -> None:
        raise ValueError("no such order")

    @app.consume("clicks", retry=Retry(attempts=1), on_failure=DeadLetter("clicks.dlt"))
    async def on_click(_: Record) -> None: ...

    async def scenario() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"", key="a", partition=0)
            await until(lambda: workload_of(app).failing)
            (retrying,) = workload_of(app).failed
            assert (retrying.state, retrying.attempt, retrying.attempts) == ("retrying", 2, 2)
            assert retrying.error == "ValueError: no such order"
            assert retrying.due == pytest.approx(20, abs=1)
            await asyncio.sleep(25)
            await client.publish("orders", b"", key="b", partition=1)
            await until(lambda: workload_of(app).failing == 2, timeout=10)
            halted, retrying = workload_of(app).failed
            assert (halted.state, halted.partition, halted.attempt, halted.due) == ("halted", 0, 2, None)
            assert (retrying.state, retrying.partition) == ("retrying", 1)
            policies = [(handler.name, handler.on_failure) for handler in app.statistics().handlers]
            assert policies == [("on_order", "halt"), ("on_click", "dead letters to clicks.dlt")]
            app.skip("orders", 0, 0)
            app.skip("orders", 1, 0)

    run(scenario())


def test_manual_pauses_are_shown() -> None:
    app = App("workload")

    @app.consume("orders")
    async def on_order(_: Record) -> None: ...

    async def scenario() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"", partition=2)
            await client.settle()
            app.pause("orders", 2, why="the ledger is down")
            app.pause_handler("on_order")
            partition, handler = workload_of(app).pauses
            assert (partition.topic, partition.partition, partition.why) == ("orders", 2, "the ledger is down")
            assert (handler.topic, handler.handler) == (None, "on_order")

    run(scenario())


def test_every_list_is_bounded_and_counted() -> None:
    app = App("workload")
    over = asyncio.Event()

    @app.consume("orders", concurrency=200)
    async def on_order(_: Record) -> None:
        await over.wait()

    async def scenario() -> None:
        async with TestClient(app) as client:
            for number in [*range(80), *range(80), 79]:
                await client.publish("orders", b"", key=str(number), partition=0)
            await until(lambda: workload_of(app).deep == 80, timeout=10)
            await until(lambda: [shard.waiting for shard in workload_of(app).shards[:2]] == [2, 1], timeout=10)
            found = workload_of(app)
            assert (found.busy, len(found.workers), len(found.shards)) == (80, 50, 50)
            over.set()

    run(scenario())


# Parked keys --------------------------------------------------------------------------------


def parking(broken: set[bytes], done: list[tuple[bytes, int]], **options: Any) -> App:
    app = App("workload")

    @app.consume("orders", retry=Retry(attempts=1), on_failure=Park("orders.parked", delay=3600.0), **options)
    async def on_order(record: Record) -> None:
        key = record.key or b""
        if key in broken:
            raise ConnectionError("the account is locked")
        done.append((key, record.offset))

    return app


@pytest.mark.parametrize("options", [{}, {"shards": 2}], ids=["on demand", "fixed"])
def test_a_parked_key_is_shown_and_runs_once_released(options: dict[str, Any]) -> None:
    broken, done = {b"a"}, list[tuple[bytes, int]]()
    app = parking(broken, done, **options)

    async def scenario() -> None:
        async with TestClient(app) as client:
            for key in ("a", "b", "a"):
                await client.publish("orders", b"", key=key, partition=1)
            await client.settle()
            (parked,) = workload_of(app).parked
            assert (parked.topic, parked.partition, parked.offset) == ("orders", 1, 0)
            assert parked.stored_in == "orders.parked"
            assert parked.error == "ConnectionError: the account is locked"
            assert parked.key == shown(b"a", show_keys=False), "named as everywhere else"
            assert not parked.in_flight
            assert workload_of(app).parked_keys == 1
            assert [handler.on_failure for handler in app.statistics().handlers] == ["parks in orders.parked"]

            broken.clear()
            app.release_parked("orders", 1, 2)  # any record of the key
            await until(lambda: len(done) == 3, timeout=60)
            assert done == [(b"b", 1), (b"a", 0), (b"a", 2)], "in order"
            await client.settle()
            assert workload_of(app).parked_keys == 0

    run(scenario())


def test_an_unparked_key_cannot_be_released() -> None:
    app = parking(set(), [])

    @app.consume("clicks")
    async def on_click(_: Record) -> None: ...

    async def scenario() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"", key="a", partition=1)
            await client.publish("clicks", b"", key="a", partition=1)
            await client.settle()
            for topic in ("orders", "clicks"):
                with pytest.raises(StateError, match=f"record {topic}/1/0 is not parked"):
                    app.release_parked(topic, 1, 0)
            with pytest.raises(StateError, match="orders/99 is not assigned to this process"):
                app.release_parked("orders", 99, 0)
            assert engine_of(app).state == "running"

    run(scenario())


async def test_the_workload_can_be_read_while_the_event_loop_runs() -> None:
    """From another thread, thousands of times, while everything in it changes."""
    app = App("workload")

    @app.consume("orders", concurrency=64, retry=Retry(attempts=2, initial=0.01))
    async def on_order(record: Record) -> None:
        await asyncio.sleep(0)
        if record.offset % 7 == 0:
            raise ValueError("again")

    stopped = False

    def look() -> int:
        looks = 0
        while not stopped:
            workload_of(app)
            looks += 1
        return looks

    async with TestClient(app) as client:
        await client.publish("orders", b"", key="first", partition=0)
        looking = asyncio.create_task(asyncio.to_thread(look), name="look")
        for number in range(3_000):
            await client.publish("orders", b"", key=str(number % 90), partition=number % 4)
            if number % 100 == 0:
                await asyncio.sleep(0.005)
        stopped = True
        assert await looking > 20
        for partition in app.statistics().partitions:
            for failure in workload_of(app).failed:
                if failure.partition == partition.partition and failure.state == "halted":
                    app.skip("orders", failure.partition, failure.offset)
