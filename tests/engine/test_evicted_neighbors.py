"""Records evicted by a partition that cannot advance are refetched up to its minimum."""

import asyncio

from aioshard import App, Record, Retry
from aioshard.testing import InMemoryBroker, TestClient, run

RECORDS = 900


def test_evicted_neighbours_of_a_halted_record_are_processed() -> None:
    """A bad record stops only its key: others continue within the minimum of the partition."""
    app = App("memory", max_buffered_records=1000, shutdown_timeout=2.0)
    broken = True
    runs: list[int] = []

    @app.consume("orders", retry=Retry(attempts=1), concurrency=8)
    async def handle(record: Record) -> None:
        await asyncio.sleep(0.02)
        if broken and record.key == b"broken":
            raise ValueError
        runs.append(record.offset)

    async def test() -> None:
        nonlocal broken
        broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
        for number in range(RECORDS):
            key = b"broken" if number % 200 == 0 else b"k%d" % (number % 50)
            broker.publish("orders", b"", key=key)
        async with TestClient(app, broker=broker) as client:
            most_back = held_now = 0
            async with asyncio.timeout(120.0):
                while len(runs) < RECORDS - 5:
                    await asyncio.sleep(0.1)
                    (partition,) = app.statistics().partitions
                    most_back = max(most_back, partition.incomplete - partition.buffered_records)
                    held_now = partition.buffered_records
            assert most_back > 100, "nothing was given back: the test shows nothing"
            assert held_now <= 20
            assert broker.committed("memory", "orders", 0) in (0, None)
            broken = False
            app.retry_now("orders", 0, 0)
            await client.settle(timeout=60.0)

    run(test())

    assert sorted(runs) == list(range(RECORDS)), "each record once"
    by_key = [offset for offset in runs if offset % 200 == 0]
    assert by_key == sorted(by_key)
