"""Rate limits of each key: a key that waits holds no worker and holds back no other key."""

import asyncio
import random
from typing import Any

import pytest

from aioshard import App, Batch, DeadLetter, Limit, Park, Record, Retry
from aioshard.engine.control import caught_up
from aioshard.engine.pacing import KeyLimitedShards
from aioshard.errors import HaltedError, HandlerError
from aioshard.testing import InMemoryBroker, TestClient, run
from tests.engine.live_apps import engine_of, publish, until
from tests.engine.starts import Starts, keeps, move_a_partition


def test_each_key_starts_exactly_as_often_as_its_limit_allows() -> None:
    app, starts, limit = App("paced"), Starts(), Limit("tenant", 2.0, burst=3, per="key")

    @app.consume("orders", concurrency=2, limit=limit)
    async def handle(record: Record) -> None:
        starts.note(record)
        await asyncio.sleep(0.01)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 1_000, keys=10)
            await client.settle(timeout=120.0)

    run(test())
    assert len(starts.of_key) == 10
    for key, times in starts.of_key.items():
        assert keeps(limit, times)
        assert times[-1] - times[0] == pytest.approx((100 - 3) / 2.0, rel=0.02)
        assert starts.offsets[key] == sorted(starts.offsets[key])


def test_a_key_that_waits_holds_no_worker_and_no_other_key() -> None:
    app, starts = App("paced"), Starts()

    @app.consume("orders", concurrency=1, limit=Limit("tenant", 0.1, burst=1, per="key"))
    async def handle(record: Record) -> None:
        starts.note(record)

    async def test() -> None:
        async with TestClient(app) as client:
            for _ in range(5):
                await client.publish("orders", b"", key=b"hot", partition=0)
            await asyncio.sleep(1.0)
            for number in range(100):
                await client.publish("orders", b"", key=b"%d" % number, partition=0)
            await asyncio.sleep(1.0)
            assert len(starts.all) == 101
            assert app.statistics().handlers[0].busy == 0
            await client.settle(timeout=60.0)

    run(test())
    assert starts.of_key[b"hot"] == pytest.approx([starts.of_key[b"hot"][0] + 10.0 * n for n in range(5)], abs=0.01)


def test_records_without_a_key_are_not_limited() -> None:
    app, starts = App("paced"), Starts()

    @app.consume("orders", limit=Limit("tenant", 0.01, burst=1, per="key"))
    async def handle(record: Record) -> None:
        starts.note(record)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 50)
            await client.settle(timeout=1.0)

    run(test())
    assert len(starts.all) == 50


def test_handlers_share_the_limit_of_a_key_and_a_function_of_the_record_defines_it() -> None:
    app, starts, limit = App("paced"), Starts(), Limit("tenant", 5.0, burst=1, per="key")

    def tenant(record: Record) -> bytes:
        return (record.key or b"").partition(b"-")[0]

    @app.consume("orders", shard_by=tenant, limit=limit)
    async def on_order(record: Record) -> None:
        starts.note(record)

    @app.consume("refunds", "returns", limit=limit)
    async def on_refund(record: Record) -> None:
        starts.note(record)

    async def test() -> None:
        async with TestClient(app) as client:
            for number in range(40):
                await client.publish("orders", b"", key=b"a-%d" % number)
                await client.publish("refunds", b"", key=b"a")
                await client.publish("returns", b"", key=b"a")
            await client.settle(timeout=60.0)

    run(test())
    assert keeps(limit, starts.all), "all of them are tenant a"
    assert starts.all[-1] - starts.all[0] == pytest.approx(119 / 5.0, rel=0.02)


def test_retries_and_their_delays_count_for_the_key() -> None:
    app, starts, limit = App("paced"), Starts(), Limit("tenant", 1.0, burst=1, per="key")

    @app.consume("orders", limit=limit, retry=Retry(attempts=4, initial=0.1, maximum=0.1), on_failure="skip")
    async def handle(record: Record) -> None:
        starts.note(record)
        raise ValueError

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 6, keys=2)
            await client.settle(timeout=60.0)

    run(test())
    for times in starts.of_key.values():
        assert len(times) == 12
        assert keeps(limit, times)
        assert times[-1] - times[0] == pytest.approx(11.0, rel=0.02)


@pytest.mark.parametrize("policy", ["skip", DeadLetter("dlt"), Park("parked", delay=1.0)])
def test_recoveries_spend_no_tokens_of_a_key(policy: Any) -> None:
    app, starts = App("paced"), Starts()

    @app.consume("orders", limit=Limit("tenant", 0.1, burst=2, per="key"), retry=Retry(attempts=1), on_failure=policy)
    async def handle(record: Record) -> None:
        starts.note(record)
        if len(starts.all) == 1:
            raise ValueError

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 2, keys=1)
            await until(lambda: len(starts.all) == 2, look_every=0.01)

    run(test())
    assert starts.all[1] - starts.all[0] < 5.0, "the next token would have come after 10 s"


def test_ten_thousand_keys_need_memory_only_while_they_have_not_all_their_tokens() -> None:
    app, starts = App("paced"), Starts()
    limit = Limit("tenant", 1.0, burst=5, per="key")
    most = 0

    @app.consume("orders", concurrency=8, limit=limit)
    async def handle(record: Record) -> None:
        nonlocal most
        starts.note(record)
        most = max(most, app.statistics().limits[0].keys or 0)

    async def test() -> None:
        nonlocal most
        async with TestClient(app) as client:
            for second in range(100):
                for number in range(100):
                    await client.publish("orders", b"", key=b"%d" % (100 * second + number))
                await asyncio.sleep(1.0)
            await client.settle()

    run(test())
    assert len(starts.of_key) == 10_000
    assert most <= 3 * 100


def test_ten_thousand_keys_that_wait_need_one_timer() -> None:
    app, starts = App("paced", max_buffered_records=20_000), Starts()

    @app.consume("orders", concurrency=8, limit=Limit("tenant", 0.5, burst=1, per="key"))
    async def handle(record: Record) -> None:
        starts.note(record)

    async def test() -> None:
        async with TestClient(app) as client:
            for _ in range(2):
                for number in range(10_000):
                    await client.publish("orders", b"", key=b"%d" % number)
            await until(lambda: app.statistics().limits[0].waiting == 10_000)
            timers = [handle for handle in asyncio.get_running_loop()._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
            assert len(timers) < 100
            await client.settle(timeout=60.0)
            assert app.statistics().limits[0].waiting == 0

    run(test())
    assert len(starts.all) == 20_000
    assert all(second - first >= 2.0 - 1e-6 for first, second in starts.of_key.values())


def test_a_record_that_waits_for_its_key_is_explained() -> None:
    app = App("paced")

    @app.consume("orders", limit=Limit("tenant", 0.1, burst=1, per="key"))
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 3, keys=1)
            await asyncio.sleep(2.0)
            (head,) = [partition.head for partition in app.diagnose().partitions if partition.head is not None]
            assert (head.state, head.offset, head.waiting) == ("limited", 1, 1)
            assert "'tenant'" in head.reason
            assert "0.1 per second" in head.reason
            assert "in 8 s" in head.reason
            (limit,) = app.statistics().limits
            assert (limit.waiting, limit.tokens, limit.due) == (1, None, None)
            assert limit.waiting_seconds == pytest.approx(2.0, abs=0.01)

    run(test())


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"shards": 4}, "shards=4"),
        ({"shard_by": "partition"}, "shard_by='partition'"),
        ({"shard_by": "record"}, "shard_by='record'"),
        ({"batch": Batch()}, "batch="),
    ],
)
def test_a_limit_of_keys_is_refused_where_other_keys_would_wait(options: dict[str, Any], found: str) -> None:
    with pytest.raises(HandlerError, match=f"per='key'.*{found}.* were both given"):
        App("paced").consume("orders", limit=Limit("tenant", 1.0, per="key"), **options)


def test_an_app_that_ends_when_it_has_caught_up_waits_for_its_keys() -> None:
    app, starts = App("paced", auto_offset_reset="earliest"), Starts()

    @app.consume("orders", limit=Limit("tenant", 0.1, burst=1, per="key"))
    async def handle(record: Record) -> None:
        starts.note(record)

    async def test() -> None:
        client = TestClient(app)
        client.broker.create_topic("orders", 1)
        await publish(client, 3, keys=1)
        async with client:
            await caught_up(engine_of(app))

    run(test())
    assert len(starts.all) == 3


def test_a_halted_key_ends_such_an_app_only_after_the_keys_that_wait() -> None:
    app, starts = App("paced", auto_offset_reset="earliest"), Starts()

    @app.consume("orders", limit=Limit("tenant", 0.1, burst=1, per="key"), retry=Retry(attempts=1))
    async def handle(record: Record) -> None:
        starts.note(record)
        if record.key == b"bad":
            raise ValueError

    async def test() -> None:
        client = TestClient(app)
        client.broker.create_topic("orders", 1)
        for key in (b"bad", b"slow", b"slow"):
            await client.publish("orders", b"", key=key)
        async with client:
            with pytest.raises(HaltedError):
                await caught_up(engine_of(app))

    run(test())
    assert len(starts.of_key[b"slow"]) == 2


# While partitions come and go ------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_limits_and_order_hold_and_nothing_is_lost_or_repeated_across_rebalances(seed: int) -> None:
    app, starts = App("paced"), Starts()
    chance = random.Random(seed)
    limit = Limit("tenant", 10.0, burst=2, per="key")

    @app.consume("orders", limit=limit, concurrency=chance.choice([1, 3, 20]))
    async def handle(record: Record) -> None:
        starts.note(record)
        await asyncio.sleep(chance.choice([0.0, 0.02]))

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 300, keys=20, partitions=2)
            await move_a_partition(client, chance)
            await client.settle(timeout=120.0)

    run(test(), seed=seed)
    assert all(keeps(limit, times) for times in starts.of_key.values())
    assert all(offsets == sorted(set(offsets)) for offsets in starts.offsets.values())
    assert len(starts.all) == 300


def test_a_partition_that_leaves_takes_the_records_that_wait_for_their_keys_along() -> None:
    app, starts = App("paced"), Starts()

    @app.consume("orders", limit=Limit("tenant", 0.001, burst=1, per="key"))
    async def handle(record: Record) -> None:
        starts.note(record)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 40, keys=20)
            await until(lambda: app.statistics().limits[0].waiting == 20)
            await client.revoke("orders", 0)
            await until(lambda: app.statistics().limits[0].waiting == 0)
            (shards,) = engine_of(app).handlers[0].shards
            assert isinstance(shards, KeyLimitedShards)
            assert len(shards) == 0
            await client.assign("orders", 0)
            await until(lambda: app.statistics().limits[0].waiting == 20)

    run(test())
    assert len(starts.all) == 20


def test_keys_that_wait_leave_room_for_other_partitions() -> None:
    """A partition that cannot advance keeps only a minimum, even if each of its records waits for another key."""
    app = App("paced", max_buffered_records=200, stuck_after=2.0)
    starts = Starts()

    @app.consume("orders", limit=Limit("tenant", 0.001, burst=1, per="key"))
    async def handle(record: Record) -> None:
        starts.note(record)

    async def test() -> None:
        broker = InMemoryBroker()
        async with TestClient(app, broker=broker) as client:
            for _ in range(2):
                for number in range(300):
                    await client.publish("orders", b"", key=b"%d" % number, partition=0)
            await asyncio.sleep(10.0)
            for number in range(150):
                await client.publish("orders", b"", key=b"other-%d" % number, partition=1)
            await until(lambda: client.committed("orders", 1) == 150, timeout=20.0)
            waiting = app.statistics().partitions[0]
            assert waiting.buffered_records <= 5

    run(test())
