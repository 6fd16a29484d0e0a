"""Fairness between keys: failing keys leave most workers to the others, and a key that takes all time is named."""

import asyncio
from collections import defaultdict
from typing import Any, cast

import pytest

from aioshard import App, Limit, Record, Retry
from aioshard.core.fairness import MOST_FAILING_KEYS
from aioshard.engine.epoch import Delivery
from aioshard.engine.limits import SharedLimit
from aioshard.engine.outcomes import Recovery
from aioshard.engine.pacing import LimitedShards, StartLimits
from aioshard.engine.shards import DeliveryBatch, Shards
from aioshard.observe import Finding
from aioshard.testing import TestClient, run
from tests.engine.deliveries import add, make_epoch, start
from tests.engine.live_apps import engine_of, publish, until

KEYS = 400
WORKERS = 20
FAST = 0.01
TIMEOUT = 1.0


class Handler:
    """Is quick for most keys and hangs for the others."""

    def __init__(self, failing: int) -> None:
        self.failing = failing
        """Number of keys that fail: the first ones."""
        self.healthy = 0
        """Processed records of the other nine tenths of the keys."""
        self.hanging = 0
        self.offsets: dict[bytes | None, list[int]] = defaultdict(list)

    async def __call__(self, record: Record) -> None:
        key = int(record.key or b"0")
        if key < self.failing:
            self.hanging += 1
            try:
                await asyncio.sleep(3_600.0)
            finally:
                self.hanging -= 1
        await asyncio.sleep(FAST)
        self.offsets[record.key].append(record.offset)
        self.healthy += key >= KEYS // 10


def app_of(handler: Handler, **options: Any) -> App:
    app = App("fair", max_buffered_records=100_000)
    defaults: dict[str, Any] = {"retry": Retry(attempts=4, initial=0.1, maximum=0.1), "on_failure": "skip"}

    @app.consume("orders", concurrency=WORKERS, timeout=TIMEOUT, **(defaults | options))
    async def handle(record: Record) -> None:
        await handler(record)

    return app


def healthy_in_ten_seconds(handler: Handler, **options: Any) -> int:
    """How many records of healthy keys are processed in ten seconds, with a backlog of all keys."""
    app = app_of(handler, **options)
    counts: list[int] = []

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 40_000, keys=KEYS)
            await asyncio.sleep(5.0)
            before = handler.healthy
            for _ in range(100):
                await asyncio.sleep(0.1)
                assert handler.hanging <= 0.3 * WORKERS
            counts.append(handler.healthy - before)

    run(test())
    return counts[0]


@pytest.mark.parametrize(
    "options",
    [{}, {"retry": Retry(attempts=1)}, {"retry": Retry(attempts=1_000, initial=0.1, maximum=0.1)}],
    ids=["given up", "given up immediately", "retried"],
)
def test_healthy_keys_keep_their_rate_while_a_tenth_of_the_keys_times_out(options: dict[str, Any]) -> None:
    undisturbed = healthy_in_ten_seconds(Handler(0), **options)
    disturbed = healthy_in_ten_seconds(Handler(KEYS // 10), **options)

    assert undisturbed >= 0.8 * 10 * WORKERS / FAST * 0.9
    assert disturbed >= 0.85 * undisturbed


def test_failing_keys_use_the_workers_that_nobody_else_needs_but_never_all() -> None:
    """So a record of another key need not wait."""
    handler = Handler(KEYS)
    app = app_of(handler)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 10_000, keys=KEYS)
            await asyncio.sleep(40.5)
            assert handler.hanging == 16
            processed = len(handler.offsets)
            await client.publish("orders", b"", key=b"%d" % (KEYS + 1), partition=0)
            await asyncio.sleep(0.3)
            assert len(handler.offsets) > processed

    run(test())


def test_a_key_that_succeeds_again_is_not_restrained_any_more() -> None:
    handler = Handler(KEYS)
    app = app_of(handler)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 4_000, keys=KEYS)
            await asyncio.sleep(10.0)
            handler.failing = 0
            await client.settle(timeout=60.0)
            (part,) = engine_of(app).handlers[0].shards
            assert not part._restrained
            assert not part._failing_runs
            await publish(client, 4_000, keys=KEYS)
            began = asyncio.get_running_loop().time()
            await client.settle(timeout=60.0)
            assert asyncio.get_running_loop().time() - began <= 1.3 * 4_000 * FAST / WORKERS + 0.2

    run(test())
    assert all(offsets == sorted(offsets) for offsets in handler.offsets.values())


def test_one_worker_serves_failing_keys_too() -> None:
    app = App("fair")
    attempts: list[int] = []

    @app.consume("orders", concurrency=1, retry=Retry(attempts=3, initial=0.1), on_failure="skip")
    async def handle(record: Record) -> None:
        attempts.append(record.offset)
        if record.offset % 2:
            raise ValueError

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 40, keys=4)
            await client.settle(timeout=60.0)

    run(test())
    assert len(attempts) == 20 + 3 * 20


def test_the_explanation_says_that_a_failing_key_waits_for_others() -> None:
    handler = Handler(KEYS // 10)
    app = app_of(handler, retry=Retry(attempts=1_000, initial=0.1, maximum=0.1))

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 40_000, keys=KEYS)
            await asyncio.sleep(5.0)
            await until(lambda: "run records of failing keys" in app.explain(), timeout=5.0)

    run(test())


# Single decisions ---------------------------------------------------------------------


def ten_workers(shards: Shards | None = None) -> Shards:
    """Shards for ten workers: two of them run failing keys while others wait, and eight if nothing else waits."""
    shards = Shards() if shards is None else shards
    shards.limit_workers(10, 10)
    return shards


async def failed(shards: Shards, *deliveries: Delivery) -> None:
    """Let the first attempts of deliveries fail; their next ones are due."""
    await shards.put(deliveries)
    for delivery in deliveries:
        assert start(shards.take()) is delivery
    for delivery in deliveries:
        assert shards.end(DeliveryBatch.of_one(delivery), [delivery]) == [delivery]
        shards.note_failed(delivery)
        delivery.fail(ValueError(), 0)
        shards.again(delivery)


def end(shards: Shards, delivery: Delivery) -> None:
    """End a run with success."""
    delivery.epoch.complete(delivery)
    shards.end(DeliveryBatch.of_one(delivery))


def test_a_failing_key_takes_the_place_of_another_one_ahead_of_records_that_wait() -> None:
    async def test() -> None:
        shards = ten_workers()
        _, (a, b, c, other) = make_epoch(["a", "b", "c", "other"])
        await failed(shards, a, b, c)
        await shards.put([other])
        taken = [start(shards.take()) for _ in range(3)]
        assert [shards.admits(delivery) for delivery in taken] == [True, True, False]
        assert shards.is_restrained(c)
        shards.end(DeliveryBatch.of_one(a), [a])
        a.fail(ValueError(), 0)
        shards.again(a)
        assert shards.take() is c
        assert shards.admits(c), "it takes the place of the first"
        assert shards.take() is a
        assert not shards.admits(a), "it has failed again"

    run(test())


def test_a_success_ends_the_restraint_of_its_key() -> None:
    async def test() -> None:
        shards = ten_workers()
        epoch, (a, b, c, other) = make_epoch(["a", "b", "c", "other"])
        (next_of_a,) = add(epoch, ["a"])
        await failed(shards, a, b, c)
        await shards.put([next_of_a, other])
        assert shards.take() is a
        assert shards.admits(a)
        assert next_of_a.is_failing
        assert shards.take() is b
        assert shards.admits(b)
        end(shards, a)
        assert shards.take() is c
        assert shards.admits(c)
        assert shards.take() is next_of_a
        assert shards.admits(next_of_a), "two others run, but its key does not fail any more"

    run(test())


def test_the_record_behind_one_that_was_given_up_is_restrained_too() -> None:
    async def test() -> None:
        shards = ten_workers()
        _, (first, behind) = make_epoch(["a", "a"])
        await shards.put([first, behind])
        assert start(shards.take()) is first
        assert shards.take() is None
        shards.note_failed(first)
        first.divert(Recovery("skip", cast("Any", None)))
        end(shards, first)
        assert shards.take() is behind
        assert behind.is_failing

    run(test())


@pytest.mark.parametrize("limited", [False, True], ids=["shards", "limited shards"])
def test_restrained_records_run_when_nothing_else_waits(limited: bool) -> None:
    async def test() -> None:
        shards = ten_workers(LimitedShards(StartLimits(None, None), None) if limited else None)
        _, (a, b, c, other) = make_epoch(["a", "b", "c", "other"])
        await failed(shards, a, b, c)
        await shards.put([other])
        admitted = [shards.admits(start(shards.take())) for _ in range(3)]
        assert admitted == [True, True, False]
        assert start(shards.take()) is other
        end(shards, other)
        assert not shards.at_rest
        assert shards.take() is c
        assert shards.admits(c)

    run(test())


@pytest.mark.parametrize("drains", [False, True], ids=["lost", "drained"])
def test_a_restrained_record_of_an_ended_epoch_leaves_its_shard(drains: bool) -> None:
    """Although no worker may run it: another epoch may have the next record of its key."""

    async def test() -> None:
        shards = ten_workers()
        shards.limit_workers(2, 2)
        epoch, (a, b) = make_epoch(["a", "b"])
        _, (next_of_b,) = make_epoch(["b"], partition=1)
        await failed(shards, a, b)
        await shards.put([next_of_b])
        assert [shards.admits(start(shards.take())) for _ in range(2)] == [True, False]
        if drains:
            epoch.close()
            shards.close(epoch)
        epoch.end()
        shards.purge(epoch)
        assert shards.take() is next_of_b

    run(test())


def test_a_record_that_waits_for_fairness_spends_no_token_of_the_rate_limit() -> None:
    async def test() -> None:
        limit = SharedLimit(Limit("slow", per_second=0.001, burst=4), asyncio.get_running_loop().time)
        shards = ten_workers(LimitedShards(StartLimits(limit, None), None))
        _, (a, b, c, other) = make_epoch(["a", "b", "c", "other"])
        await failed(shards, a, b, c)
        for delivery in (a, b, c):
            limit.put_back(delivery)
        await shards.put([other])
        assert [shards.admits(start(shards.take())) for _ in range(3)] == [True, True, False]
        assert [shards.take() is not None for _ in range(4)] == [True, True, False, False]

    run(test())


def test_only_so_many_failing_keys_are_remembered() -> None:
    async def test() -> None:
        shards = ten_workers()
        _, deliveries = make_epoch([f"k{number}" for number in range(MOST_FAILING_KEYS + 1)])
        for delivery in deliveries:
            shards.note_failed(delivery)
        await shards.put(deliveries)
        assert [delivery.is_failing for delivery in deliveries[:2]] == [False, True]

    run(test())


# Keys that take most of the time --------------------------------------------------------


def dominant_keys(app: App) -> list[Finding]:
    return [finding for finding in app.diagnose().findings if finding.kind == "dominant key"]


@pytest.mark.parametrize("shares", [1, 2], ids=["one key", "two keys"])
def test_a_key_that_takes_most_of_the_time_is_named(shares: int) -> None:
    """Two keys that take a half each are fine: they run concurrently."""
    app = App("fair", show_keys=True)

    @app.consume("orders", concurrency=8)
    async def handle(record: Record) -> None:
        await asyncio.sleep(0.5 if (record.key or b"").startswith(b"hot") else 0.005)

    async def test() -> None:
        async with TestClient(app) as client:
            for number in range(1_000):
                key = b"hot-%d" % (number // 2 % shares) if number % 2 else b"%d" % number
                await client.publish("orders", b"", key=key, partition=0)
            await asyncio.sleep(15.0)
            assert dominant_keys(app) == [], "not after a few looks"
            await asyncio.sleep(15.0)
            found = dominant_keys(app)
            if shares == 2:
                assert found == []
            else:
                assert len(found) == 1
                assert "hot-0" in found[0].sentence
                assert "handle" in found[0].sentence
                assert "hot-0" in app.explain()

    run(test())


def test_a_key_without_a_backlog_is_not_named() -> None:
    """It takes all the time, but nothing waits."""
    app = App("fair")

    @app.consume("orders", concurrency=8)
    async def handle(_: Record) -> None:
        await asyncio.sleep(0.99)

    async def test() -> None:
        async with TestClient(app) as client:
            for _ in range(40):
                await client.publish("orders", b"", key=b"k", partition=0)
                await asyncio.sleep(1.0)
            assert dominant_keys(app) == []

    run(test())
