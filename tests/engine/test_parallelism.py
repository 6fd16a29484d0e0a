"""Processing time in virtual time: shards, not partitions, determine the parallelism."""

import asyncio
import random
from collections import defaultdict

import pytest

from aioshard import App, Record
from aioshard.core.sharding import shard_number
from aioshard.testing import InMemoryBroker, TestClient, run

SLACK = 0.05
"""Seconds that the first poll and the wake-ups of workers take, in addition to the handlers."""


def seconds_of(app: App, topic: str, *, partitions: int, records: int) -> float:
    """Process records with distinct keys that are in the log already, spread evenly over the partitions."""

    async def work() -> float:
        broker = InMemoryBroker(partitions=partitions)
        for number in range(records):
            broker.publish(topic, b"", key=b"%d" % number, partition=number % partitions)
        async with TestClient(app, broker=broker) as client:
            clock = asyncio.get_running_loop().time
            began = clock()
            await client.settle(1_000.0)
            return clock() - began

    return run(work())


def drawn(record: Record, below: int) -> int:
    return random.Random(f"{record.partition}/{record.offset}").randrange(below)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [32, 320])
def test_ten_times_the_concurrency_takes_a_tenth_of_the_time(shards: int) -> None:
    """At 0 to 19 ms a record, 9.5 on average, 32 queues do 3,368 records/s at most; the fullest one is the last."""
    app = App("queues")
    work: defaultdict[int, float] = defaultdict(float)

    @app.consume("clicks", shards=shards)
    async def on_click(record: Record) -> None:
        seconds = drawn(record, 20) / 1000
        work[shard_number(record.key or b"", shards)] += seconds
        await asyncio.sleep(seconds)

    took = seconds_of(app, "clicks", partitions=32, records=6_400)

    assert sum(work.values()) == pytest.approx(6_400 * 0.0095, rel=0.03)
    longest = max(work.values())
    assert longest <= took <= longest + SLACK
    assert longest < 2 * sum(work.values()) / shards + 0.1


@pytest.mark.parametrize("concurrency", [1, 10, 100])
def test_sleeping_records_take_their_sum_per_worker_or_the_longest_sleep(concurrency: int) -> None:
    """One at a time takes the sum, 7.5 minutes; ten in parallel a tenth of it; all in parallel take the longest one."""
    app, work = App("tasks"), []

    @app.consume("tasks", concurrency=concurrency)
    async def on_task(record: Record) -> None:
        work.append(drawn(record, 10))
        await asyncio.sleep(work[-1])

    took = seconds_of(app, "tasks", partitions=1, records=100)

    assert sum(work) > 300
    least = max(sum(work) / concurrency, *work)
    assert least <= took <= least + (max(work) if 1 < concurrency < 100 else 0.0) + SLACK
