"""Failure policies: the outcome of a record without attempts left, and its effect on others."""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from aioshard import App, Batch, CircuitBreaker, Context, DeadLetter, Park, Record, Retry
from aioshard.errors import MessageError, MessageTooLargeError, StateError
from aioshard.observe import Workload
from aioshard.serde.payloads import message
from aioshard.serde.side_records import read_dead_letter
from aioshard.testing import TestClient, run
from tests.engine.live_apps import until

ONCE = Retry(attempts=1)


async def publish_numbered(client: TestClient, count: int, keys: int = 10, partition: int = 0) -> None:
    for number in range(count):
        await client.publish("orders", str(number), key=f"k{number % keys}", partition=partition)


def workload_of(app: App) -> Workload:
    workload = app.workload()
    assert workload is not None
    return workload


def handler_statistics(app: App) -> Any:
    return app.statistics().handlers[0]


def test_a_skipped_record_is_complete_and_counted() -> None:
    app = App("failure-policy")
    seen: list[int] = []

    @app.consume("orders", retry=Retry(attempts=3, initial=0.01), on_failure="skip")
    async def handle(record: Record) -> None:
        seen.append(record.offset)
        if record.offset == 2:
            raise ValueError("poison")

    async def test() -> None:
        async with TestClient(app) as client:
            await publish_numbered(client, 5, keys=1)
            await client.settle()
            assert client.committed("orders", 0) == 5
            statistics = handler_statistics(app)
            assert (statistics.skipped, statistics.processed, statistics.retried) == (1, 4, 2)

    run(test())
    assert seen == [0, 1, 2, 2, 2, 3, 4]


def test_a_dead_letter_has_the_record_and_the_reason() -> None:
    app = App("failure-policy")

    @app.consume("orders", retry=Retry(attempts=2, initial=0.01), on_failure=DeadLetter("orders.dlt"))
    async def handle(record: Record) -> None:
        if record.value == b"bad":
            raise ValueError("no such order")

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"good", key=b"k", partition=0)
            sent = await client.publish("orders", b"bad", key=b"k", partition=0, headers=[("trace", b"7"), ("x", None)])
            await client.settle()
            (letter,) = client.records("orders.dlt")
            assert (letter.key, letter.value, letter.timestamp) == (b"k", b"bad", sent.timestamp)
            read = read_dead_letter(letter)
            assert read is not None
            assert read.original == sent
            assert read.failure._replace(failed_at=0.0) == (
                "failure-policy",
                "handle",
                2,
                "ValueError",
                "no such order",
                0.0,
            )
            assert handler_statistics(app).dead_lettered == 1

    run(test())


def test_nothing_is_committed_past_an_unacknowledged_dead_letter() -> None:
    app = App("failure-policy", commit_interval=0.1)

    @app.consume("orders", retry=ONCE, on_failure=DeadLetter("orders.dlt"))
    async def handle(record: Record) -> None:
        if record.offset == 1:
            raise ValueError("poison")

    async def test() -> None:
        async with TestClient(app) as client:
            broker = client.broker
            broker.fail_publishes("orders.dlt", MessageTooLargeError("the message is too large"))
            await publish_numbered(client, 1)
            await until(lambda: client.committed("orders", 0) == 1)
            await publish_numbered(client, 5)
            await asyncio.sleep(20.0)
            assert client.committed("orders", 0) == 1
            explained = app.explain()
            assert "dead letter is" in explained
            assert "orders.dlt" in explained
            broker.fail_publishes("orders.dlt", None)
            await client.settle(timeout=30.0)
            assert client.committed("orders", 0) == 6
            assert len(client.records("orders.dlt")) == 1

    run(test())


def test_the_records_of_a_key_wait_for_its_dead_letter() -> None:
    """Order: what comes after the failed record runs when it is complete, not before."""
    app = App("failure-policy")
    log: list[str] = []

    @app.consume("orders", retry=Retry(attempts=3, initial=1.0, jitter=0.0), on_failure=DeadLetter("orders.dlt"))
    async def handle(record: Record) -> None:
        log.append(f"{(record.key or b'').decode()}:{record.offset}")
        if record.offset == 0:
            raise ValueError("poison")

    async def test() -> None:
        async with TestClient(app) as client:
            await publish_numbered(client, 6, keys=2)
            await client.settle(timeout=30.0)

    run(test())
    assert log == ["k0:0", "k1:1", "k1:3", "k1:5", "k0:0", "k0:0", "k0:2", "k0:4"]


def test_a_revoke_waits_for_a_dead_letter_in_flight() -> None:
    """The worker that had the record sends its dead letter, so a drain waits for it: no second letter."""
    app = App("failure-policy", drain_timeout=5.0)

    @app.consume("orders", retry=ONCE, on_failure=DeadLetter("orders.dlt"))
    async def handle(record: Record) -> None:
        raise ValueError(record.offset)

    async def test() -> None:
        async with TestClient(app) as client:
            for number in range(4):
                await client.publish("orders", b"", key=str(number), partition=0)
            await asyncio.sleep(0)
            await client.revoke("orders", 0)
            await client.assign("orders", 0)
            await client.settle(timeout=30.0)
            offsets = [letter.original.offset for r in client.records("orders.dlt") if (letter := read_dead_letter(r))]
            assert sorted(offsets) == [0, 1, 2, 3]

    run(test())


# The circuit breaker -----------------------------------------------------------------------------------


def test_an_outage_diverts_few_records_and_recovers_by_itself() -> None:
    app = App("failure-policy", commit_interval=0.1)
    down = True
    done: list[int] = []

    @app.consume(
        "orders",
        concurrency=16,
        retry=Retry(attempts=3, initial=0.05, maximum=0.2),
        on_failure=DeadLetter("orders.dlt", breaker=CircuitBreaker(minimum=6)),
    )
    async def handle(record: Record) -> None:
        await asyncio.sleep(0.005)
        if down:
            raise ConnectionError("the back end is down")
        done.append(record.offset)

    async def test() -> None:
        nonlocal down
        async with TestClient(app) as client:
            for number in range(2_000):
                await client.publish("orders", b"", key=f"k{number % 200}", partition=number % 4)
            await asyncio.sleep(30.0)
            diverted = len(client.records("orders.dlt"))
            assert 0 < diverted <= 6 + 16, "at least the minimum, and those that ran then"
            statistics = app.statistics()
            assert all("circuit breaker of handler handle is open" in (p.paused or "") for p in statistics.partitions)
            assert "ConnectionError: the back end is down" in app.explain()
            down = False
            began = asyncio.get_running_loop().time()
            await client.settle(timeout=60.0)
            assert asyncio.get_running_loop().time() - began < 12.0
            assert len(client.records("orders.dlt")) == diverted
            assert len(done) == 2_000 - diverted
            assert len(set(done)) <= 500

    run(test())


def test_a_partition_probes_with_one_record_at_a_time() -> None:
    app = App("failure-policy")
    at_once: list[int] = []
    running = 0

    @app.consume("orders", retry=ONCE, concurrency=32, on_failure=DeadLetter("d", breaker=CircuitBreaker(minimum=2)))
    async def handle(record: Record) -> None:
        nonlocal running
        running += 1
        at_once.append(running)
        try:
            await asyncio.sleep(0.2)
            raise ConnectionError(record.offset)
        finally:
            running -= 1

    async def test() -> None:
        async with TestClient(app) as client:
            for number in range(100):
                await client.publish("orders", b"", key=str(number), partition=0)
            await asyncio.sleep(5.0)
            before = len(at_once)
            at_once.clear()
            await asyncio.sleep(60.0)
            assert before >= 32
            assert set(at_once) == {1}
            assert 8 <= len(at_once) <= 20

    run(test())


@pytest.mark.parametrize("every", [50, 20, 5])
def test_poison_messages_among_good_records_go_to_the_dead_letters(
    every: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its retries end long after the good records, which are quick: then nothing but failures ends."""
    app = App("failure-policy")
    done: set[int] = set()

    @app.consume("orders", retry=Retry(attempts=3, initial=1.0), on_failure=DeadLetter("d"))
    async def handle(record: Record) -> None:
        if record.offset % every == 0:
            raise ValueError(record.offset)
        done.add(record.offset)

    async def test() -> None:
        async with TestClient(app) as client:
            began = asyncio.get_running_loop().time()
            for number in range(1_000):
                await client.publish("orders", b"", key=str(number), partition=0)
            await client.settle(timeout=30.0)
            assert asyncio.get_running_loop().time() - began < 6.0
            assert (len(done), len(client.records("d"))) == (1_000 - 1_000 // every, 1_000 // every)

    run(test())
    assert not [record for record in caplog.records if getattr(record, "event", "") == "breaker_opened"]


def test_a_wrong_schema_opens_the_circuit_breaker_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    app = App("failure-policy")

    @app.consume("orders", on_failure=DeadLetter("d"))
    async def handle(number: int) -> None: ...

    async def test() -> None:
        async with TestClient(app) as client:
            for number in range(500):
                await client.publish("orders", b"text", key=str(number), partition=number % 4)
            await asyncio.sleep(60.0)
            assert len(client.records("d")) == 19
            paused = app.statistics().partitions[0].paused or ""
            assert "20 records failed" in paused
            assert "20 of them with DecodeError" in paused
            app.stop()

    run(test())
    events = [getattr(record, "event", "") for record in caplog.records if record.levelname == "WARNING"]
    assert events.count("breaker_opened") == 1


def test_fast_failures_do_not_open_the_circuit_breaker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One of five cannot be decoded, which takes no time; all others still run when a hundred of those have failed."""
    app = App("billing")

    @app.consume("orders", concurrency=600, retry=ONCE, shard_by="record", on_failure=DeadLetter("dead"))
    async def handle(number: int) -> None:
        await asyncio.sleep(1.0 + number / 1e6)

    async def test() -> None:
        async with TestClient(app) as client:
            for number in range(500):
                await client.publish("orders", "?" if number % 5 == 0 else str(number), partition=0)
                await asyncio.sleep(1e-4)
            await client.settle(60)

    run(test())

    assert handler_statistics(app).dead_lettered == 100
    assert not [line for line in caplog.records if getattr(line, "event", "") == "breaker_opened"]


def test_one_success_closes_the_circuit_breaker_for_all_partitions(caplog: pytest.LogCaptureFixture) -> None:
    app = App("failure-policy")
    down = True

    @app.consume("orders", retry=ONCE, on_failure=DeadLetter("d"))
    async def handle(record: Record) -> None:
        if down:
            raise ConnectionError(record.offset)

    async def test() -> None:
        nonlocal down
        async with TestClient(app) as client:
            for number in range(400):
                await client.publish("orders", b"", key=str(number), partition=number % 4)
            await asyncio.sleep(30.0)
            down = False
            await client.settle(timeout=15.0)
            assert len(client.records("d")) == 19

    run(test())
    events = [getattr(record, "event", "") for record in caplog.records]
    assert (events.count("breaker_opened"), events.count("breaker_closed")) == (1, 1)


def test_a_circuit_breaker_pause_survives_rebalances() -> None:
    app = App("failure-policy", drain_timeout=2.0)
    down = True
    done: Counter[int] = Counter()

    @app.consume("orders", retry=ONCE, on_failure=DeadLetter("d", breaker=CircuitBreaker(minimum=2)))
    async def handle(record: Record) -> None:
        if down:
            raise ConnectionError
        done[record.offset] += 1

    async def test() -> None:
        nonlocal down
        async with TestClient(app) as client:
            await publish_numbered(client, 60)
            await asyncio.sleep(2.0)
            for _ in range(3):
                client.group.rebalance()
                await asyncio.sleep(3.0)
                assert "circuit breaker" in (app.statistics().partitions[0].paused or "")
            down = False
            await client.settle(timeout=30.0)
            assert len(client.records("d")) == 1
            assert len(done) == 59
            assert set(done.values()) == {1}

    run(test())


# Halted records, released --------------------------------------------------------------------


def halting_app(broken: set[int], log: list[int]) -> App:
    app = App("failure-policy", commit_interval=0.1)

    @app.consume("orders", retry=ONCE)
    async def handle(record: Record) -> None:
        log.append(record.offset)
        if record.offset in broken:
            raise ValueError("poison")

    return app


def test_a_stop_says_which_failed_records_stay_uncommitted(caplog: pytest.LogCaptureFixture) -> None:
    app = halting_app({1}, [])

    async def test() -> None:
        async with TestClient(app) as client:
            await publish_numbered(client, 4, keys=1)
            await until(lambda: handler_statistics(app).halted == 1)

    run(test())
    (left,) = (record for record in caplog.records if getattr(record, "event", "") == "failed_uncommitted")
    assert left.records == 1  # type: ignore[attr-defined]
    assert "orders/0/1" in left.getMessage()


def test_a_halted_record_is_released_by_retrying_it() -> None:
    broken, log = {1}, []  # type: ignore[var-annotated]
    app = halting_app(broken, log)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish_numbered(client, 4, keys=1)
            await until(lambda: handler_statistics(app).halted == 1)
            with pytest.raises(StateError, match="explain"):
                app.retry_now("orders", 0, 0)
            with pytest.raises(StateError, match="needs no release"):
                app.retry_now("orders", 0, 2)
            with pytest.raises(StateError, match="not assigned"):
                app.retry_now("orders", 77, 0)
            app.retry_now("orders", 0, 1)
            await until(lambda: handler_statistics(app).halted == 1 and log.count(1) == 2)
            broken.clear()
            app.retry_now("orders", 0, 1)
            await client.settle()

    run(test())
    assert log == [0, 1, 1, 1, 2, 3]


def test_a_halted_record_is_released_by_skipping_it_from_a_thread() -> None:
    log: list[int] = []
    app = halting_app({1}, log)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish_numbered(client, 4, keys=1)
            async with asyncio.timeout(10):
                while handler_statistics(app).halted != 1:  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.01)
            await asyncio.to_thread(app.skip, "orders", 0, 1)
            await client.settle()
            assert handler_statistics(app).skipped == 1
            assert client.committed("orders", 0) == 4

    asyncio.run(test())
    assert log == [0, 1, 2, 3]


# Timeouts ------------------------------------------------------------------------------------


def test_an_attempt_that_times_out_fails_and_its_worker_continues() -> None:
    app = App("failure-policy")
    deadlines: list[float] = []
    slow = {(0, 1), (0, 2)}
    log: list[tuple[int, int]] = []

    @app.consume("orders", concurrency=1, timeout=2.0, retry=Retry(attempts=3, initial=0.1, jitter=0.0))
    async def handle(record: Record, context: Context) -> None:
        log.append((record.offset, context.attempt))
        assert context.deadline is not None
        deadlines.append(context.deadline - asyncio.get_running_loop().time())
        if (record.offset, context.attempt) in slow:
            await asyncio.sleep(1_000.0)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish_numbered(client, 3, keys=3)
            began = asyncio.get_running_loop().time()
            await client.settle(timeout=30.0)
            assert 4.0 < asyncio.get_running_loop().time() - began < 6.0

    run(test())
    assert log == [(0, 1), (1, 1), (2, 1), (0, 2), (0, 3)]
    assert deadlines == pytest.approx([2.0] * 5)


def test_a_timeout_uses_up_attempts_like_any_failure() -> None:
    app = App("failure-policy")

    @app.consume("orders", timeout=0.5, retry=Retry(attempts=2, initial=0.1), on_failure=DeadLetter("d"))
    async def handle(record: Record) -> None:  # noqa: ARG001 - hangs whatever comes
        await asyncio.Event().wait()

    async def test() -> None:
        async with TestClient(app) as client:
            await publish_numbered(client, 1)
            await client.settle(timeout=30.0)
            (letter,) = client.records("d")
            read = read_dead_letter(letter)
            assert read is not None
            assert (read.failure.error, read.failure.attempts) == ("AttemptTimeoutError", 2)

    run(test())


def test_a_handler_that_swallows_its_timeout_is_reported_and_halts(caplog: pytest.LogCaptureFixture) -> None:
    app = App("failure-policy")
    go_on = asyncio.Event
    release: list[asyncio.Event] = []
    log: list[int] = []

    @app.consume("orders", concurrency=2, timeout=1.0, on_failure="skip")
    async def handle(record: Record) -> None:
        log.append(record.offset)
        if record.offset == 0:
            event = go_on()
            release.append(event)
            with contextlib.suppress(asyncio.CancelledError):
                await event.wait()
            await event.wait()

    async def test() -> None:
        async with TestClient(app) as client:
            await publish_numbered(client, 4, keys=2)
            await asyncio.sleep(5.0)
            assert handler_statistics(app).outliving == ("orders/0/0",)
            assert "orders/0/0" in caplog.text
            assert "does not end" in caplog.text
            assert log == [0, 1, 3]
            release[0].set()
            await until(lambda: handler_statistics(app).halted == 1)
            assert log == [0, 1, 3]
            assert "swallowed" in app.explain()
            app.skip("orders", 0, 0)
            await client.settle()

    run(test())
    assert log == [0, 1, 3, 2]


# Pausing -----------------------------------------------------------------------------------------


MISNAMED = b"\xff\xfe".decode("utf-8", "surrogateescape")


async def publish_with_a_misnamed_header(client: TestClient, keys: Sequence[bytes] = (b"a", b"a", b"a")) -> None:
    """Three records, the second of which has a header name that is not UTF-8."""
    for number, key in enumerate(keys):
        headers = ((MISNAMED, b"1"), ("trace", b"2")) if number == 1 else ()
        client.broker.log("orders", 0).append(Record("orders", 0, number, key, b"%d" % number, headers, 0.0))


@pytest.mark.parametrize("policy", ["skip", DeadLetter("dead", breaker=None), Park("parked", delay=3600.0)])
@pytest.mark.parametrize("batch", [None, Batch(max_records=10, linger=0.0)])
@pytest.mark.parametrize("takes", [Record, bytes])
def test_a_record_whose_header_name_is_not_utf_8_fails_alone(policy: Any, batch: Batch | None, takes: Any) -> None:
    app = App("policies")
    seen: list[bytes | None] = []

    async def on_order(order: Any) -> None:
        orders = order if isinstance(order, list) else [order]
        seen.extend(order.value if isinstance(order, Record) else order for order in orders)

    on_order.__annotations__["order"] = takes if batch is None else list[takes]
    app.consume("orders", on_failure=policy, batch=batch)(on_order)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish_with_a_misnamed_header(client, (b"a", b"b", b"c"))
            await client.settle()
            assert client.committed("orders", 0) == 3
            statistics = handler_statistics(app)
            outcomes = statistics.skipped, statistics.dead_lettered, statistics.parked
            assert (statistics.processed, statistics.retried, sum(outcomes)) == (2, 0, 1)
            for letter in client.records("dead"):
                read = read_dead_letter(letter)
                assert read is not None
                assert (read.failure.error, read.failure.attempts) == ("DecodeError", 1)
                assert read.original.headers == (("\\xff\\xfe", b"1"), ("trace", b"2"))

    run(test())
    assert sorted(map(bytes, filter(None, seen))) == [b"0", b"2"]


def test_a_record_with_a_header_name_that_is_not_utf_8_halts_however_often_it_is_retried() -> None:
    app = App("policies")
    seen: list[int] = []

    @app.consume("orders")
    async def on_order(record: Record) -> None:
        seen.append(record.offset)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish_with_a_misnamed_header(client)
            await until(lambda: handler_statistics(app).halted == 1)
            app.retry_now("orders", 0, 1)
            await until(lambda: handler_statistics(app).halted == 1)
            assert (client.committed("orders", 0), seen) == (1, [0])
            assert "DecodeError" in app.explain()
            app.skip("orders", 0, 1)
            await client.settle()
            assert client.committed("orders", 0) == 3

    run(test())
    assert seen == [0, 2]


def test_a_parked_record_with_a_header_name_that_is_not_utf_8_fails_again() -> None:
    app = App("policies")
    seen: list[int] = []

    @app.consume("orders", on_failure=Park("parked", delay=1.0, attempts=2))
    async def on_order(record: Record) -> None:
        seen.append(record.offset)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish_with_a_misnamed_header(client, (b"a", b"b", b"c"))
            await until(lambda: [key.retries for key in workload_of(app).parked] == [2])
            assert sorted(seen) == [0, 2]

    run(test())


def test_the_application_pauses_and_resumes_a_partition() -> None:
    app = App("failure-policy", drain_timeout=2.0)
    log: list[tuple[int, int]] = []

    @app.consume("orders")
    async def handle(record: Record) -> None:
        log.append((record.partition, record.offset))

    async def test() -> None:
        async with TestClient(app) as client:
            await publish_numbered(client, 3, partition=0)
            await client.settle()
            app.pause("orders", 0, why="the ledger is being moved")
            await publish_numbered(client, 3, partition=0)
            await publish_numbered(client, 3, partition=1)
            await until(lambda: client.committed("orders", 1) == 3)
            client.group.rebalance()
            await asyncio.sleep(5.0)
            await client.revoke("orders", 0)
            await client.assign("orders", 0)
            await asyncio.sleep(5.0)
            assert client.committed("orders", 0) == 3
            assert app.statistics().partitions[0].paused == "the ledger is being moved"
            app.resume("orders", 0)
            await client.settle()

    run(test())
    assert [offset for partition, offset in log if partition == 0] == [0, 1, 2, 3, 4, 5]


def test_the_application_pauses_and_resumes_a_handler() -> None:
    app = App("failure-policy")
    log: list[str] = []

    @app.consume("orders", "returns")
    async def handle(record: Record) -> None:
        log.append(record.topic)

    @app.consume("payments")
    async def pay(record: Record) -> None:
        log.append(record.topic)

    async def test() -> None:
        async with TestClient(app) as client:
            for topic in ("orders", "returns", "payments"):
                await client.publish(topic, b"", partition=0)
            await client.settle()
            with pytest.raises(StateError, match="handle, pay"):
                app.pause_handler("nobody")
            app.pause_handler("handle")
            app.pause("orders", 0)
            for topic in ("orders", "returns", "payments"):
                await client.publish(topic, b"", partition=0)
            await until(lambda: log.count("payments") == 2)
            app.resume_handler("handle")
            await until(lambda: log.count("returns") == 2)
            assert log.count("orders") == 1
            app.resume("orders")
            await client.settle()

    run(test())


def test_a_running_record_continues_while_its_partition_is_paused() -> None:
    app = App("failure-policy")
    finish: list[asyncio.Event] = []
    log: list[int] = []

    @app.consume("orders", concurrency=1)
    async def handle(record: Record) -> None:
        if record.offset == 0:
            finish.append(asyncio.Event())
            await finish[0].wait()
        log.append(record.offset)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish_numbered(client, 5, keys=2)
            await until(lambda: bool(finish))
            app.pause("orders")
            finish[0].set()
            await until(lambda: client.committed("orders", 0) == 1)
            await asyncio.sleep(5.0)
            assert log == [0]
            app.resume("orders")
            await client.settle()

    run(test())
    assert log[0] == 0
    assert sorted(log) == [0, 1, 2, 3, 4]


# Errors before the handler sees a record -------------------------------------------------------


@pytest.mark.parametrize("shards", [None, 3])
def test_a_sharding_function_that_raises_diverts_its_record(shards: int | None) -> None:
    app = App("failure-policy")
    log: list[int] = []

    def shard_by(record: Record) -> bytes | None:
        if record.offset == 1:
            raise KeyError("no tenant")
        return record.key

    @app.consume("orders", shard_by=shard_by, shards=shards, on_failure=DeadLetter("d"))
    async def handle(record: Record) -> None:
        log.append(record.offset)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish_numbered(client, 4)
            await client.settle(timeout=10.0)
            (letter,) = client.records("d")
            read = read_dead_letter(letter)
            assert read is not None
            assert (read.original.offset, read.failure.error) == (1, "KeyError")

    run(test())
    assert sorted(log) == [0, 2, 3]


def publishing(publish: Callable[[App, Context], Coroutine[Any, Any, int]]) -> Sequence[Record]:
    app = App("failure-policy")

    @app.consume("orders")
    async def handle(record: Record, context: Context) -> None:  # noqa: ARG001 - the context is what is tested
        assert await publish(app, context) >= 0

    async def test() -> Sequence[Record]:
        async with TestClient(app) as client:
            await publish_numbered(client, 1)
            await client.settle()
            return client.records("invoices")

    return run(test())


def test_a_handler_publishes_through_its_context() -> None:
    (record,) = publishing(lambda _, context: context.publish("invoices", {"n": 1}, key="a", headers=[("h", "v")]))
    assert (record.key, record.value, record.headers) == (b"a", b'{"n":1}', (("h", b"v"),))


def test_a_handler_publishes_through_its_app() -> None:
    (record,) = publishing(lambda app, _: app.publish("invoices", None, key=b"a", partition=2))
    assert (record.key, record.value, record.partition) == (b"a", None, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"topic": 3}, "3 is not a topic name"),
        ({"topic": ""}, "'' is not a topic name"),
        ({"topic": "invoices", "headers": ["trace"]}, re.escape("headers=['trace'] was refused")),
        ({"topic": "invoices", "headers": ["id"]}, re.escape("headers=['id'] was refused")),
        ({"topic": "invoices", "headers": [("a", "b", "c")]}, "was refused: expected a mapping, or pairs"),
        ({"topic": "invoices", "headers": 7}, "headers=7 was refused"),
        ({"topic": "invoices", "headers": {7: "b"}}, "header name of type int was refused"),
        ({"topic": "invoices", "headers": [("x-\ud83d", "1")]}, "Kafka stores names in UTF-8"),
        ({"topic": "invoices", "headers": [(b"\xff", "1")]}, "Kafka stores names in UTF-8"),
        ({"topic": "invoices", "headers": {"trace": 7}}, "'trace' with a content of type int was refused"),
        ({"topic": "invoices", "headers": {"trace": "\ud83d"}}, "expected text that UTF-8 can represent"),
        ({"topic": "invoices", "key": "\ud83d"}, "expected text that UTF-8 can represent"),
    ],
)
def test_an_invalid_message_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(MessageError, match=said):
        message(value=b"", **arguments)


async def test_publishing_is_refused_while_the_app_is_not_running() -> None:
    app = App("failure-policy")
    with pytest.raises(StateError, match="is not running"):
        await app.publish("invoices", b"")
