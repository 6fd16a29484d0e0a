"""Rate limits of handlers."""

import asyncio
import random
from typing import Any

import pytest

from aioshard import App, Batch, Limit, Record, Retry, Router
from aioshard.errors import HandlerError
from aioshard.testing import InMemoryBroker, TestClient, run
from tests.engine.live_apps import publish
from tests.engine.starts import Starts, keeps, move_a_partition


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


# Shared limits ------------------------------------------------------------------------


def test_handlers_with_an_equal_limit_share_it_fairly() -> None:
    app = App("paced")
    orders, refunds = Starts(), Starts()

    @app.consume("orders", limit=Limit("stripe", 20.0, burst=4))
    async def on_order(record: Record) -> None:
        orders.note(record)

    @app.consume("refunds", concurrency=2, limit=Limit("stripe", 20.0, burst=4))
    async def on_refund(record: Record) -> None:
        refunds.note(record)
        await asyncio.sleep(0.01)

    async def test() -> None:
        async with TestClient(app) as client:
            for topic in ("orders", "refunds"):
                for number in range(2_000):
                    await client.publish(topic, b"", key=b"%d" % (number % 50))
            await asyncio.sleep(60.0)

    run(test())
    together = sorted(orders.all + refunds.all)
    assert keeps(Limit("stripe", 20.0, burst=4), together)
    assert len(together) == pytest.approx(4 + 60 * 20, abs=25)
    assert len(orders.all) == pytest.approx(len(refunds.all), rel=0.1)


def test_a_quiet_handler_leaves_a_shared_limit_to_the_other() -> None:
    app, starts = App("paced"), Starts()

    @app.consume("orders", limit=Limit("stripe", 20.0, burst=1))
    async def on_order(record: Record) -> None:
        starts.note(record)

    @app.consume("refunds", limit=Limit("stripe", 20.0, burst=1))
    async def on_refund(record: Record) -> None:
        starts.note(record)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 1_200, keys=50)
            await client.settle(timeout=70.0)

    run(test())
    assert starts.all[-1] - starts.all[0] == pytest.approx(1_199 / 20, rel=0.02)


def test_each_app_has_its_own_tokens() -> None:
    starts = {"one": Starts(), "two": Starts()}

    def make(group: str) -> App:
        app = App(group)

        @app.consume("orders", limit=Limit("stripe", 10.0, burst=1))
        async def handle(record: Record) -> None:
            starts[group].note(record)

        return app

    async def test() -> None:
        broker = InMemoryBroker()
        async with TestClient(make("one"), broker=broker) as client, TestClient(make("two"), broker=broker):
            await publish(client, 100)
            await asyncio.sleep(12.0)

    run(test())
    for times in starts.values():
        assert len(times.all) == 100
        assert keeps(Limit("stripe", 10.0, burst=1), times.all)


def test_two_limits_with_one_name_are_refused_when_they_are_registered() -> None:
    app, router = App("paced"), Router()
    app.consume("orders", limit=Limit("stripe", 10.0))(_handle)
    router.consume("refunds", limit=Limit("stripe", 20.0))(_handle)

    with pytest.raises(HandlerError, match=r"share a limit by its name"):
        app.consume("payments", limit=Limit("stripe", 10.0, per="group"))(_handle)
    with pytest.raises(HandlerError, match=r"share a limit by its name"):
        app.include_router(router)
    app.consume("payments", limit=Limit("stripe", 10.0))(_handle)
    assert [handler.topics for handler in app.handlers] == [("orders",), ("payments",)]


async def _handle(record: Record) -> None: ...


def test_statistics_show_tokens_and_waits_of_a_limit() -> None:
    app = App("paced")

    @app.consume("orders", limit=Limit("stripe", 2.0, burst=3))
    async def on_order(record: Record) -> None: ...

    @app.consume("refunds", limit=Limit("stripe", 2.0, burst=3))
    async def on_refund(record: Record) -> None: ...

    async def test() -> None:
        async with TestClient(app) as client:
            (limit,) = app.statistics().limits
            assert (limit.name, limit.per, limit.per_second, limit.burst) == ("stripe", "process", 2.0, 3)
            assert limit.handlers == ("on_order", "on_refund")
            assert (limit.tokens, limit.due, limit.starts, limit.waiting) == (3.0, 0.0, 0, 0)
            await publish(client, 20, keys=20)
            await asyncio.sleep(2.25)
            (limit,) = app.statistics().limits
            assert limit.tokens == pytest.approx(0.5, abs=0.01)
            assert limit.due == pytest.approx(0.25, abs=0.01)
            assert (limit.starts, limit.waiting) == (7, 1)
            assert limit.waiting_seconds == pytest.approx(2.25, abs=0.02)
            await client.settle(timeout=30.0)
            await asyncio.sleep(60.0)
            (limit,) = app.statistics().limits
            assert (limit.tokens, limit.starts, limit.waiting) == (3.0, 20, 0)
            assert limit.waiting_seconds == pytest.approx(17 / 2, abs=0.02)

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
            await move_a_partition(client, chance)
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
