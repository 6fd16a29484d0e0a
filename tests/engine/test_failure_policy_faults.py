"""Failure policies with several faults at the same time, and with operator actions in between."""

import asyncio

from aioshard import App, CircuitBreaker, DeadLetter, Limit, Park, Record, Retry
from aioshard.engine.counts import Counters
from aioshard.engine.epoch import Delivery
from aioshard.engine.failures import FailureHandler
from aioshard.engine.outcomes import Outcome, Recovery
from aioshard.engine.recoveries import skipping
from aioshard.engine.shards import Shards
from aioshard.errors import TransportError
from aioshard.testing import InMemoryBroker, InMemoryProducer, InMemoryTransport, TestClient, run
from tests.engine.deliveries import make_epoch
from tests.engine.live_apps import until

ONCE = Retry(attempts=1)


def test_a_record_without_a_shard_key_never_runs_with_an_open_circuit_breaker() -> None:
    app = App("failure-policy", commit_interval=0.1)
    ran: list[int] = []

    def shard_by(record: Record) -> bytes | None:
        if record.offset < 3:
            raise KeyError("no tenant")
        return record.key

    policy = DeadLetter("d", breaker=CircuitBreaker(minimum=1))

    @app.consume("orders", shard_by=shard_by, retry=ONCE, on_failure=policy)
    async def handle(record: Record) -> None:
        ran.append(record.offset)

    async def test() -> None:
        async with TestClient(app) as client:
            for _ in range(3):
                await client.publish("orders", b"", key=b"k", partition=0)
            await asyncio.sleep(60.0)
            assert (ran, len(client.records("d"))) == ([], 0)
            for _ in range(7):  # one of them is tried, and succeeds
                await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle(timeout=20.0)
            assert len(client.records("d")) == 3

    run(test())
    assert ran == list(range(3, 10))


def test_a_record_that_waits_for_the_circuit_breaker_does_not_make_a_stop_fail() -> None:
    """Nothing has failed to be written: it runs at the next start."""
    app = App("failure-policy", commit_interval=0.1)

    def shard_by(_: Record) -> bytes | None:
        raise KeyError("no tenant")

    @app.consume("orders", shard_by=shard_by, retry=ONCE, on_failure=DeadLetter("d", breaker=CircuitBreaker(minimum=1)))
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await until(lambda: "the circuit breaker" in app.explain())
            await asyncio.sleep(5.0)
            assert not client.records("d")

    run(test())


def test_a_record_without_a_shard_key_has_one_dead_letter_after_failed_writes() -> None:
    app = App("failure-policy", commit_interval=0.1)

    def shard_by(record: Record) -> bytes | None:
        if record.offset < 2:
            raise KeyError("no tenant")
        return record.key

    policy = DeadLetter("d")

    @app.consume("orders", shard_by=shard_by, retry=ONCE, on_failure=policy)
    async def handle(record: Record) -> None:
        """Succeeds."""

    async def test() -> None:
        async with TestClient(app) as client:
            client.broker.fail_publishes("d", TransportError("no"))
            for _ in range(4):
                await client.publish("orders", b"", key=b"k", partition=0)
            await asyncio.sleep(60.0)
            client.broker.fail_publishes("d", None)
            await client.settle(timeout=30.0)
            assert len(client.records("d")) == 2

    run(test())


def test_a_probe_does_not_run_in_a_partition_paused_by_the_application() -> None:
    app = App("failure-policy", commit_interval=0.1)
    ran: list[int] = []
    down = True

    @app.consume("orders", retry=ONCE, on_failure=DeadLetter("d", breaker=CircuitBreaker(minimum=2)))
    async def handle(record: Record) -> None:
        ran.append(record.offset)
        if down:
            raise ConnectionError

    async def test() -> None:
        nonlocal down
        async with TestClient(app) as client:
            for number in range(10):
                await client.publish("orders", b"", key=f"{number}", partition=0)
            await until(lambda: "circuit breaker" in app.explain())
            app.pause("orders", 0)
            await asyncio.sleep(0.1)
            before = list(ran)
            await asyncio.sleep(60.0)
            assert ran == before
            down = False
            app.resume("orders", 0)
            await client.settle(timeout=20.0)

    run(test())


def test_a_released_record_gets_all_its_attempts_again() -> None:
    app = App("failure-policy", commit_interval=0.1)
    ran: list[int] = []

    @app.consume("orders", retry=Retry(attempts=3, initial=0.1))
    async def handle(record: Record) -> None:
        ran.append(record.offset)
        raise ValueError

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await until(lambda: app.statistics().handlers[0].halted == 1)
            assert len(ran) == 3
            app.retry_now("orders", 0, 0)
            await asyncio.sleep(10.0)
            assert len(ran) == 6

    run(test())


def test_a_hanging_replay_of_a_parked_record_is_released_by_its_offset() -> None:
    """It swallows its timeout, so it halts; skipping it takes it out of the side topic."""
    app = App("failure-policy", commit_interval=0.1)
    phase = "broken"
    done: list[int] = []

    @app.consume("orders", timeout=1.0, retry=ONCE, on_failure=Park("parked", delay=5.0))
    async def handle(record: Record) -> None:
        if phase == "broken":
            raise ValueError
        if phase == "hangs":
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                return
        done.append(record.offset)

    async def test() -> None:
        nonlocal phase
        async with TestClient(app) as client:
            for key in ("a", "b"):
                await client.publish("orders", b"", key=key, partition=0)
            await client.settle()
            phase = "hangs"
            await until(lambda: app.statistics().handlers[0].halted == 2)
            phase = "well"
            app.skip("orders", 0, 1)
            await asyncio.sleep(1.0)
            assert [record.key for record in client.records("parked") if record.value is None] == [b"orders/0/1@1"]
            assert app.statistics().handlers[0].skipped == 1
            app.retry_now("orders", 0, 0)
            await asyncio.sleep(20.0)
            assert len(client.records("parked")) == 4

    run(test())
    assert done == [0]


def test_a_slow_dead_letter_write_is_not_a_timed_out_attempt() -> None:
    app = App("failure-policy", commit_interval=0.1)
    ran: list[int] = []

    async def test() -> None:
        broker = InMemoryBroker()

        @app.consume("orders", timeout=0.5, retry=Retry(attempts=2, initial=0.1), on_failure=DeadLetter("d"))
        async def handle(record: Record) -> None:
            ran.append(record.offset)
            broker.available = len(ran) == 1
            raise ValueError

        async with TestClient(app, broker=broker) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await until(lambda: len(ran) == 2)
            await asyncio.sleep(10.0)
            broker.available = True
            await client.settle(timeout=30.0)
            assert len(client.records("d")) == 1, "a write that is cancelled is stored all the same"

    run(test())
    assert ran == [0, 0]


def test_a_retried_dead_letter_uses_no_rate_limit_token() -> None:
    app = App("failure-policy", commit_interval=0.1)
    started: list[float] = []

    @app.consume("orders", limit=Limit("pace", 1.0, burst=1), retry=ONCE, on_failure=DeadLetter("d"))
    async def handle(record: Record) -> None:
        started.append(asyncio.get_running_loop().time())
        if record.offset == 0:
            raise ValueError

    async def test() -> None:
        async with TestClient(app) as client:
            client.broker.fail_publishes("d", TransportError("no"))
            for number in range(21):
                await client.publish("orders", b"", key=f"{number}", partition=0)
            await until(lambda: len(started) == 21)
            client.broker.fail_publishes("d", None)
            await client.settle(timeout=60.0)

    run(test())
    assert started[-1] - started[0] < 20.5


async def _hang(_: Delivery) -> Outcome:
    await asyncio.Event().wait()
    return Outcome.SKIPPED


def test_failing_or_slow_recoveries_get_half_of_the_workers() -> None:
    async def test() -> None:
        shards = Shards()
        now = asyncio.get_running_loop().time
        failures = FailureHandler(ONCE, None, shards=[shards], counters=Counters(), clock=now, workers=4)
        _, (failing, good, *hanging) = make_epoch([None] * 4)
        hang = Recovery("it hangs", _hang)
        running = [asyncio.create_task(failures.recover(delivery, hang), name=f"{delivery}") for delivery in hanging]
        await asyncio.sleep(0.5)
        assert failures.may_recover(), "they are not slow yet"

        failing.divert(hang)
        failures.handle_failed(failing, TransportError("no"), shards)
        assert not failures.may_recover(), "one has failed"

        await failures.recover(good, skipping("the test says so"))
        assert failures.may_recover(), "one has succeeded"

        await asyncio.sleep(1.0)
        assert not failures.may_recover(), "they are slow"
        running.pop().cancel()
        await asyncio.sleep(0.1)
        assert failures.may_recover(), "half of the workers may still recover"
        running.pop().cancel()

    run(test())


def test_a_recovery_that_is_held_back_keeps_its_own_error() -> None:
    async def test() -> None:
        shards = Shards()
        now = asyncio.get_running_loop().time
        failures = FailureHandler(ONCE, None, shards=[shards], counters=Counters(), clock=now, workers=4)
        _, (tried, new) = make_epoch([None] * 2)
        hang = Recovery("it hangs", _hang)
        for delivery in (tried, new):
            delivery.divert(hang)
        failures.handle_failed(tried, TransportError("no such topic"), shards)

        for delivery in (tried, new):
            failures.hold_back(delivery, hang, shards)

        assert tried.recovery_error == "no such topic"
        assert new.recovery_error is not None

    run(test())


def test_hanging_dead_letters_leave_workers_for_good_records() -> None:
    app = App("failure-policy", commit_interval=0.1, auto_offset_reset="earliest", shutdown_timeout=2.0)
    done: list[int] = []

    @app.consume("orders", concurrency=4, retry=ONCE, on_failure=DeadLetter("d"))
    async def handle(record: Record) -> None:
        if record.value == b"bad":
            raise ValueError
        done.append(record.offset)

    async def test() -> None:
        broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
        stored_after = 20.0
        async with app.started(
            lambda: InMemoryTransport(broker, "failure-policy"),
            lambda: InMemoryProducer(broker, latency=lambda: stored_after),
        ):
            broker.publish("orders", b"bad", key=b"first")
            await asyncio.sleep(2.0)
            for number in range(10):
                broker.publish("orders", b"bad", key=b"bad %d" % number)
            for number in range(10):
                broker.publish("orders", b"", key=b"good %d" % number)
            await until(lambda: len(done) == 10, timeout=5.0)
            stored_after = 0.0
            await until(lambda: broker.committed("failure-policy", "orders", 0) == 21)

    run(test())
