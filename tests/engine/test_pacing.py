"""Rate limits: of a handler, and of each shard key."""

import asyncio
import itertools
import random
from collections import defaultdict

import pytest

from aioshard import App, Batch, RateLimit, Record, Retry
from aioshard.engine.flow.pacing import Pace, PacedShards
from aioshard.errors import HandlerError
from aioshard.testing import InMemoryBroker, TestClient, run
from tests.engine.deliveries import make_epoch, start
from tests.engine.running import publish


class Starts:
    """When runs began, by key."""

    def __init__(self) -> None:
        self.all: list[float] = []
        self.by_key: dict[bytes | None, list[float]] = defaultdict(list)
        self.offsets: dict[bytes | None, list[int]] = defaultdict(list)

    def note(self, record: Record) -> None:
        now = asyncio.get_running_loop().time()
        self.all.append(now)
        self.by_key[record.key].append(now)
        self.offsets[record.key].append(record.offset)


def keeps(limit: RateLimit, times: list[float]) -> bool:
    """Whether no window of time has more of *times* than the limit allows."""
    return all(
        last - first + 1 <= limit.at_once + limit.per_second * (times[last] - times[first]) + 1e-6
        for first, last in itertools.combinations(range(len(times)), 2)
        if last - first < 300
    )


# Of the handler ---------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, 0.003, 0.5])
def test_a_handler_starts_as_many_runs_as_its_limit_allows_and_not_more(seconds: float) -> None:
    app, starts, limit = App("paced"), Starts(), RateLimit(200.0, burst=10)

    @app.consume("orders", concurrency=128, rate_limit=limit)
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


def test_attempts_count() -> None:
    app, starts, limit = App("paced"), Starts(), RateLimit(10.0)

    @app.consume("orders", rate_limit=limit, retry=Retry(attempts=3, initial=0.0), on_failure="skip")
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


def test_fixed_shards_share_the_limit_of_their_handler_and_none_is_forgotten() -> None:
    app, starts, limit = App("paced"), Starts(), RateLimit(100.0, burst=1)

    @app.consume("orders", shards=20, rate_limit=limit)
    async def handle(record: Record) -> None:
        starts.note(record)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 1_000, keys=200)
            await asyncio.sleep(5.0)
            done = [len(times) for times in starts.by_key.values()]
            assert sum(done) == pytest.approx(500, abs=5)
            assert len(done) >= 100, "a few shards do not take it all"
            await client.settle(timeout=60.0)

    run(test())
    assert keeps(limit, starts.all)


def test_batches_are_counted_as_runs() -> None:
    app, starts, limit = App("paced"), Starts(), RateLimit(5.0, burst=1)
    sizes: list[int] = []

    @app.consume("orders", concurrency=8, batch=Batch(max_records=10, linger=0.01), rate_limit=limit)
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


def test_no_more_is_taken_in_than_can_be_started_soon() -> None:
    app = App("paced")

    @app.consume("orders", rate_limit=RateLimit(2.0))
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        broker = InMemoryBroker()
        async with TestClient(app, broker=broker) as client:
            await publish(client, 2_000)
            await asyncio.sleep(3.0)
            assert app.statistics().buffered_records <= 50

    run(test())


# Of each key ------------------------------------------------------------------------


def test_each_key_has_its_own_limit_and_its_neighbours_do_not_wait() -> None:
    app, starts, limit = App("paced"), Starts(), RateLimit(10.0, burst=1)

    @app.consume("orders", concurrency=8, key_rate_limit=limit)
    async def handle(record: Record) -> None:
        starts.note(record)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 1_000, keys=50, partitions=1)
            await client.settle(timeout=60.0)

    run(test())
    for times in starts.by_key.values():
        assert len(times) == 20
        assert keeps(limit, times)
    assert starts.all[-1] - starts.all[0] == pytest.approx(1.9, rel=0.05), "all keys went on at the same time"
    assert all(offsets == sorted(offsets) for offsets in starts.offsets.values())


def test_records_without_a_key_are_not_limited_by_key() -> None:
    app, starts = App("paced"), Starts()

    @app.consume("orders", key_rate_limit=RateLimit(0.1))
    async def handle(record: Record) -> None:
        starts.note(record)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 100)
            await client.settle(timeout=5.0)

    run(test())
    assert len(starts.all) == 100


def test_a_record_that_waits_for_its_key_has_not_failed_and_is_not_in_the_way() -> None:
    app = App("paced", stuck_after=10.0)

    @app.consume("orders", key_rate_limit=RateLimit(0.2, burst=1))
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with TestClient(app) as client:
            for _ in range(5):
                await client.publish("orders", b"", key=b"hot", partition=0)
            await asyncio.sleep(2.0)
            (handler,) = app.statistics().handlers
            partition = app.statistics().partitions[0]
            assert (handler.processed, handler.retried, handler.halted) == (1, 0, 0)
            assert partition.paused is None
            told = app.explain()
            assert "waits for the rate limit of its key, key_rate_limit=RateLimit(per_second=0.2, burst=1)" in told
            await asyncio.sleep(12.0)
            assert app.statistics().partitions[0].incomplete == 2
            partition_now = app.diagnose().partitions[0]
            assert partition_now.verdict == "waiting"
            assert partition_now.head is not None
            assert partition_now.head.state == "limited"
            assert partition_now.head.age > 10.0
            await client.settle(timeout=60.0)

    run(test())


def test_what_waits_for_the_limit_of_its_handler_says_so() -> None:
    app = App("paced")

    @app.consume("orders", rate_limit=RateLimit(0.2, burst=1))
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 3)
            await asyncio.sleep(2.0)
            assert (
                "waits for the rate limit of its handler, rate_limit=RateLimit(per_second=0.2, burst=1)"
                in app.explain()
            )
            await client.settle(timeout=60.0)

    run(test())


def test_both_limits_hold_together() -> None:
    app, starts = App("paced"), Starts()
    limit, key_limit = RateLimit(50.0, burst=5), RateLimit(5.0, burst=2)

    @app.consume("orders", concurrency=16, rate_limit=limit, key_rate_limit=key_limit)
    async def handle(record: Record) -> None:
        starts.note(record)
        await asyncio.sleep(0.01)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 400, keys=20)
            await client.settle(timeout=60.0)

    run(test())
    assert keeps(limit, starts.all)
    assert all(keeps(key_limit, times) for times in starts.by_key.values())
    assert starts.all[-1] - starts.all[0] <= 1.1 * 400 / 50.0


# While partitions come and go ----------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_limits_and_order_hold_and_nothing_is_lost_or_repeated_across_rebalances(seed: int) -> None:
    app, starts = App("paced"), Starts()
    chance = random.Random(seed)
    limit, key_limit = RateLimit(300.0, burst=5), RateLimit(20.0, burst=1)
    fixed = seed % 4 == 0

    options = {"shards": 10} if fixed else {"concurrency": 12}

    @app.consume("orders", rate_limit=limit, key_rate_limit=key_limit, **options)  # type: ignore[arg-type]
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
                if not fixed:
                    app.set_concurrency(handle, chance.choice([1, 5, 20]))
            await client.settle(timeout=120.0)

    run(test(), seed=seed)
    assert keeps(limit, starts.all)
    if not fixed:
        assert all(keeps(key_limit, times) for times in starts.by_key.values())
    assert all(offsets == sorted(set(offsets)) for offsets in starts.offsets.values())
    assert len(starts.all) == 300


def test_a_drain_waits_for_limited_keys_only_as_long_as_it_is_short() -> None:
    """What is below the highest record that was started is a hole: a second or two are worth it, minutes are not."""

    async def revoke_with(key_limit: RateLimit) -> tuple[float, int | None]:
        app = App("paced")

        @app.consume("orders", key_rate_limit=key_limit)
        async def handle(record: Record) -> None: ...

        async with TestClient(app) as client:
            for key in (b"hot", b"hot", b"hot", b"other"):
                await client.publish("orders", b"", key=key, partition=0)
            await asyncio.sleep(0.1)
            loop = asyncio.get_running_loop()
            began = loop.time()
            await client.revoke("orders", 0)
            return loop.time() - began, client.committed("orders", 0)

    async def test() -> None:
        took, committed = await revoke_with(RateLimit(1.0, burst=1))
        assert 1.0 < took < 2.5
        assert committed == 4
        took, committed = await revoke_with(RateLimit(0.01, burst=1))
        assert took < 0.5
        assert committed == 1

    run(test())


def test_a_partition_that_goes_away_leaves_no_timer_and_frees_its_keys() -> None:
    async def test() -> None:
        pace = Pace(None, RateLimit(0.1, burst=1), asyncio.get_running_loop().time)
        shards = PacedShards(pace)
        epoch, (first, second) = make_epoch(["a", "a"])
        other, (later,) = make_epoch(["a"], partition=1)
        await shards.put([first, second, later])
        assert start(shards.take()) is first
        epoch.complete(first)
        assert shards.next_after(first) is None
        assert shards.owning == [second]
        assert not shards.at_rest
        epoch.end()
        shards.purge(epoch)
        assert shards.take() is None
        await asyncio.sleep(10.1)
        assert start(shards.take()) is later
        other.complete(later)
        assert shards.next_after(later) is None
        assert len(shards) == 0
        assert shards.at_rest

    run(test())


def test_a_partition_whose_oldest_record_waits_for_its_key_is_stuck_only_when_it_waits_long_for_that() -> None:
    """It is old because there is much of its key, and it goes on: its partition keeps its room."""

    async def test() -> None:
        loop = asyncio.get_running_loop()
        shards = PacedShards(Pace(None, RateLimit(0.01, burst=1), loop.time))
        epoch, (first, second) = make_epoch(["a", "a"])
        await shards.put([first, second])
        start(shards.take())
        await asyncio.sleep(50.0)
        epoch.complete(first)
        assert shards.next_after(first) is None
        await asyncio.sleep(20.0)
        assert second.arrived == 0.0
        assert not epoch.stuck(loop.time(), stuck_after=30.0)
        await asyncio.sleep(11.0)
        assert epoch.stuck(loop.time(), stuck_after=30.0)

    run(test())


# Refusals ---------------------------------------------------------------------------------


def test_what_cannot_be_limited_is_refused() -> None:
    app = App("paced")

    with pytest.raises(HandlerError, match=r"rate_limit=100 was refused: expected RateLimit"):
        app.consume("orders", rate_limit=100)  # type: ignore[arg-type]
    with pytest.raises(HandlerError, match="shard_by='record', which has no keys"):
        app.consume("orders", shard_by="record", key_rate_limit=RateLimit(1.0))
    with pytest.raises(HandlerError, match="a batch has records of many keys"):
        app.consume("orders", batch=Batch(), key_rate_limit=RateLimit(1.0))
