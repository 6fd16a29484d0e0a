"""Intake is limited to what workers need soon: buffered records cost memory and replays."""

import asyncio

from aioshard import App, Record
from aioshard.testing import InMemoryBroker, TestClient, run

ENOUGH = 1_000


def filled(keys: list[bytes], partitions: int = 1) -> InMemoryBroker:
    broker = InMemoryBroker(clock=lambda: 0.0)
    broker.create_topic("orders", partitions)
    for number, key in enumerate(keys):
        broker.publish("orders", b"%d" % number, key=key, partition=number % partitions)
    return broker


def test_busy_workers_leave_the_buffer_unfilled_until_they_continue() -> None:
    app = App("demand", auto_offset_reset="earliest")
    release = asyncio.Event()
    done: set[bytes | None] = set()

    @app.consume("orders", concurrency=4)
    async def handle(record: Record) -> None:
        await release.wait()
        done.add(record.value)

    async def test() -> None:
        broker = filled([b"%d" % number for number in range(4_000)], partitions=2)
        async with TestClient(app, broker=broker) as client:
            await asyncio.sleep(10.0)
            statistics = app.statistics()
            assert ENOUGH <= statistics.buffered_records <= ENOUGH + 4
            assert "enough queued" in str(statistics.partitions[0].paused)
            release.set()
            await client.settle()
            assert len(done) == 4_000
            assert app.statistics().partitions[0].paused is None

    run(test())


def test_records_behind_a_hot_key_do_not_crowd_out_other_keys() -> None:
    app = App("demand", auto_offset_reset="earliest", shutdown_timeout=1.0)
    release = asyncio.Event()
    done: list[bytes | None] = []

    @app.consume("orders", concurrency=2)
    async def handle(record: Record) -> None:
        if record.key == b"hot":
            await release.wait()
        done.append(record.value)

    async def test() -> None:
        async with TestClient(app, broker=filled([b"hot"] * 3 * ENOUGH + [b"other"])) as client:
            await asyncio.sleep(0.5)
            assert done == [b"%d" % (3 * ENOUGH)]
            release.set()
            await client.settle()
            assert len(done) == 3 * ENOUGH + 1

    run(test())


def test_workers_never_wait_for_a_poll_timeout() -> None:
    """A wake-up that is lost would cost the second after which the pump looks again by itself."""
    app = App("demand", auto_offset_reset="earliest")
    all_done = asyncio.Event()
    done = 0

    @app.consume("orders", concurrency=8)
    async def handle(_record: Record) -> None:
        nonlocal done
        await asyncio.sleep(0.001)
        done += 1
        if done == 4 * ENOUGH:
            all_done.set()

    async def test() -> None:
        keys = [b"%d" % (number % 50) for number in range(4 * ENOUGH)]
        async with TestClient(app, broker=filled(keys, partitions=4)):
            started = asyncio.get_running_loop().time()
            await all_done.wait()
            assert asyncio.get_running_loop().time() - started < 0.6

    run(test())
