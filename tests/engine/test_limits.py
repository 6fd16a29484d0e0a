"""Rate limits of handlers."""

import asyncio
import itertools
import random
from collections import defaultdict
from typing import Any

import pytest

from aioshard import App, Batch, Limit, Record, Retry
from aioshard.errors import HandlerError
from aioshard.testing import InMemoryBroker, TestClient, run
from tests.engine.live_apps import publish


class Starts:
    """When runs began."""

    def __init__(self) -> None:
        self.all: list[float] = []
        self.offsets: dict[bytes | None, list[int]] = defaultdict(list)

    def note(self, record: Record) -> None:
        now = asyncio.get_running_loop().time()
        self.all.append(now)
        self.offsets[record.key].append(record.offset)


def keeps(limit: Limit, times: list[float]) -> bool:
    """Whether no window of time has more of *times* than the limit allows."""
    return all(
        last - first + 1 <= limit.at_once + limit.per_second * (times[last] - times[first]) + 1e-6
        for first, last in itertools.combinations(range(len(times)), 2)
        if last - first < 300
    )


@pytest.mark.parametrize("seconds", [0.0, 0.003, 0.5])
def test_a_handler_starts_exactly_as_many_runs_as_its_limit_allows(seconds: float) -> None:
    app, starts, limit = App("paced"), Starts(), Limit("pace", 200.0, burst=10)

    @app.consume("orders", concurrency=128, limit=limit)
    async def handle(record: Record) -> None:
        starts.note(record)
        if seconds:
            await asyncio.sleep(seconds)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 1_000, keys=100, partitions=4)
            await client.settle(timeout=60.0)

    run(test())
    assert keeps(limit, starts.all)
    assert starts.all[-1] - starts.all[0] == pytest.approx((1_000 - 10) / 200.0, rel=0.02)


def test_retries_count_against_the_rate_limit() -> None:
    app, starts, limit = App("paced"), Starts(), Limit("pace", 10.0)

    @app.consume("orders", limit=limit, retry=Retry(attempts=3, initial=0.0), on_failure="skip")
    async def handle(record: Record) -> None:
        starts.note(record)
        raise ValueError

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 10)
            await client.settle(timeout=60.0)

    run(test())
    assert len(starts.all) == 30
    assert keeps(limit, starts.all)


def test_fixed_shards_share_the_limit_and_none_starves() -> None:
    app, starts, limit = App("paced"), Starts(), Limit("pace", 100.0, burst=1)

    @app.consume("orders", shards=20, limit=limit)
    async def handle(record: Record) -> None:
        starts.note(record)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 1_000, keys=200)
            await asyncio.sleep(5.0)
            done = [len(offsets) for offsets in starts.offsets.values()]
            assert sum(done) == pytest.approx(500, abs=5)
            assert len(done) >= 100, "a few shards do not take it all"
            await client.settle(timeout=60.0)

    run(test())
    assert keeps(limit, starts.all)


def test_batches_are_counted_as_runs() -> None:
    app, starts, limit = App("paced"), Starts(), Limit("pace", 5.0, burst=1)
    sizes: list[int] = []

    @app.consume("orders", concurrency=8, batch=Batch(max_records=10, linger=0.01), limit=limit)
    async def handle(records: list[Record]) -> None:
        starts.note(records[0])
        sizes.append(len(records))

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 200)
            await client.settle(timeout=60.0)

    run(test())
    assert keeps(limit, starts.all)
    assert sum(sizes) == 200
    assert sizes.count(10) >= 18


def test_intake_is_limited_to_records_that_can_start_soon() -> None:
    app = App("paced")

    @app.consume("orders", limit=Limit("pace", 2.0))
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        broker = InMemoryBroker()
        async with TestClient(app, broker=broker) as client:
            await publish(client, 2_000)
            await asyncio.sleep(3.0)
            assert app.statistics().buffered_records <= 50

    run(test())


# Limits per key ---------------------------------------------------------------------


def test_a_record_waiting_for_the_rate_limit_is_explained() -> None:
    app = App("paced")

    @app.consume("orders", limit=Limit("pace", 0.2, burst=1))
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 3)
            await asyncio.sleep(2.0)
            heads = [partition.head for partition in app.diagnose().partitions]
            (head,) = [head for head in heads if head is not None]
            assert head.state == "limited"
            assert "'pace'" in head.reason
            assert "0.2 per second" in head.reason
            assert "in 3 s" in head.reason
            await client.settle(timeout=60.0)

    run(test())


# While partitions come and go ----------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_limits_and_order_hold_and_nothing_is_lost_or_repeated_across_rebalances(seed: int) -> None:
    app, starts = App("paced"), Starts()
    chance = random.Random(seed)
    limit = Limit("pace", 300.0, burst=5)
    options = {"shards": 10} if seed % 4 == 0 else {"concurrency": chance.choice([1, 5, 12, 20])}

    @app.consume("orders", limit=limit, **options)  # type: ignore[arg-type]
    async def handle(record: Record) -> None:
        starts.note(record)
        await asyncio.sleep(chance.choice([0.0, 0.02]))

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 300, keys=20, partitions=2)
            for _ in range(4):
                await asyncio.sleep(chance.random() / 3)
                await client.revoke("orders", 0)
                await asyncio.sleep(chance.random() / 5)
                await client.assign("orders", 0)
            await client.settle(timeout=120.0)

    run(test(), seed=seed)
    assert keeps(limit, starts.all)
    assert all(offsets == sorted(set(offsets)) for offsets in starts.offsets.values())
    assert len(starts.all) == 300


# Refusals ---------------------------------------------------------------------------------


def test_an_impossible_rate_limit_is_refused() -> None:
    app = App("paced")

    with pytest.raises(HandlerError, match=r"limit=100 was refused: expected Limit"):
        app.consume("orders", limit=100)  # type: ignore[arg-type]


def test_the_option_of_earlier_versions_says_what_to_write_instead() -> None:
    app = App("paced")

    with pytest.raises(HandlerError, match=r"rate_limit.*write limit=Limit\('name', per_second=100"):
        app.consume("orders", rate_limit=100)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [None, Batch(max_records=1)], ids=["records", "batches"])
def test_recoveries_spend_no_tokens(batch: Batch | None) -> None:
    app = App("paced", auto_offset_reset="earliest")
    starts: list[float] = []

    @app.consume("orders", batch=batch, limit=Limit("pace", 0.1, burst=2), retry=Retry(attempts=1), on_failure="skip")
    async def handle(_: Any) -> None:
        starts.append(asyncio.get_running_loop().time())
        if len(starts) == 1:
            raise ValueError("bad")

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle()
            await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle()

    run(test())
    assert starts[1] - starts[0] < 5.0, "the next token would have come after 10 s"
