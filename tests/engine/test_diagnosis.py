"""Why a partition does not advance: every cause with its record, duration and fix (I11)."""

import asyncio
import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aioshard import App, Batch, CircuitBreaker, Context, DeadLetter, Park, Record, Retry, TopicPartition
from aioshard.engine.explain.causes import HandlerSnapshot
from aioshard.errors import ConnectError, MessageTooLargeError, TransportError
from aioshard.observe import IncompleteRecord, PartitionDiagnosis
from aioshard.testing import InMemoryBroker, InMemoryTransport, TestClient, VirtualTimeLoop, run
from tests.engine.live_apps import engine_of, until, watch_of

ONCE = Retry(attempts=1)
THIS_FILE = Path(__file__).name


def make_app(**settings: Any) -> App:
    """An app that gives up soon on hanging runs."""
    return App("diagnosed", **{"drain_timeout": 0.5, "shutdown_timeout": 1.0, "show_keys": True, **settings})


def line_of(mark: str) -> int:
    """The line of this file that ends with the comment *mark*."""
    (line,) = [n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith(f"  # {mark}")]
    return line


def partition_of(app: App, number: int = 0) -> PartitionDiagnosis:
    (found,) = [partition for partition in app.diagnose().partitions if partition.partition == number]
    if isinstance(asyncio.get_running_loop(), VirtualTimeLoop):  # otherwise time has passed meanwhile
        text = app.explain()
        assert found.sentence in text
        advice = [
            finding.what_to_do
            for finding in (found.head, *found.findings)
            if finding is not None and finding.what_to_do
        ]
        assert found.verdict == "advancing" or all(f"What to do: {sentence}." in text for sentence in advice)
    return found


def head_of(app: App, number: int = 0) -> IncompleteRecord:
    head = partition_of(app, number).head
    assert head is not None
    return head


def follow_advice(app: App, advice: str | None, call: str) -> None:
    """Follow an advice with the very call that it shows."""
    (found,) = [
        call_text
        for call_text in re.findall(r"app\.\w+\([^)]*\)", advice or "")
        if call_text.startswith(f"app.{call}(")
    ]
    eval(found, {"app": app})


@contextlib.asynccontextmanager
async def client_of(app: App, **options: Any) -> AsyncIterator[TestClient]:
    """Run the app; a run that hangs when the test is over does not fail its stop."""
    client = TestClient(app, **options)
    async with client:
        yield client


class Hanging:
    """A handler that hangs on records whose value begins with "hang", until released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def __call__(self, record: Record) -> None:
        if (record.value or b"").startswith(b"hang"):
            await self.released.wait()  # hangs here


# Handlers that do not end


def test_a_hanging_handler_is_named_with_its_await() -> None:
    app, hanging = make_app(), Hanging()

    @app.consume("orders")
    async def handle(record: Record) -> None:
        await hanging(record)  # calls what hangs

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "fine", key="a", partition=2)
            await client.publish("orders", "hang", key="b", partition=2)
            for number in range(9):
                await client.publish("orders", "fine", key=f"c{number}", partition=2)
            for _ in range(5):
                await client.publish("orders", "fine", key="b", partition=2)
            await asyncio.sleep(7.0)
            partition, head = partition_of(app, 2), head_of(app, 2)
            assert partition.verdict == "waiting"
            assert partition.since == pytest.approx(7.0, abs=0.1)
            assert (partition.window, partition.behind) == (15, 14), "9 are done, 5 are in its shard"
            assert "14 of the 15 offsets from there on wait for that record." in app.explain()
            assert (head.topic, head.partition, head.offset, head.key) == ("orders", 2, 1, "b'b'")
            assert (head.state, head.attempt, head.attempts) == ("in_flight", 1, 5)
            assert head.age == head.since == pytest.approx(7.0, abs=0.1)
            assert head.stack is not None
            assert [frame.line for frame in head.stack.frames if frame.own] == [
                line_of("calls what hangs"),
                line_of("hangs here"),
            ]
            assert (
                f"has been in handler handle for 7.0 s, at {__file__}:{line_of('hangs here')} in Hanging" in head.reason
            )
            assert "waiting in asyncio.locks.Event.wait" in head.reason
            assert "timeout=" in str(head.what_to_do)
            assert f"Stack, innermost last: {__file__}:{line_of('calls what hangs')} in " in app.explain()
            hanging.released.set()
            await client.settle()

    run(test())


def test_a_hanging_handler_with_a_timeout_needs_no_action() -> None:
    app, hanging = make_app(), Hanging()
    app.consume("orders", timeout=30.0)(hanging)

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "hang", partition=0)
            await asyncio.sleep(10.0)
            assert "the attempt times out in 20.0 s" in str(head_of(app).what_to_do)
            hanging.released.set()

    run(test())


def test_a_run_that_swallows_its_timeout_is_named_with_its_await() -> None:
    app = make_app()
    released = asyncio.Event()

    @app.consume("orders", timeout=2.0)
    async def handle(_: Record) -> None:
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await released.wait()  # swallows

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "x", partition=0)
            await asyncio.sleep(10.0)
            head = head_of(app)
            assert head.state == "outliving"
            assert f"{THIS_FILE}:{line_of('swallows')}" in head.reason
            assert re.search(r"was cancelled [678]\.\d s ago because its attempt exceeded timeout=2 s", head.reason)
            assert "let CancelledError propagate" in str(head.what_to_do)
            assert [run.offset for run in app.diagnose().outliving] == [0]
            assert "but still runs for 10.0 s" in app.explain()
            released.set()
            await asyncio.sleep(1.0)
            assert head_of(app).state == "halted", "its effects are unknown"
            follow_advice(app, head_of(app).what_to_do, "skip")
            await client.settle()

    run(test())


def test_a_run_of_a_lost_partition_is_named() -> None:
    app, hanging = make_app(), Hanging()

    @app.consume("orders")
    async def handle(record: Record) -> None:
        while not hanging.released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await hanging(record)

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "hang", key="k", partition=0)
            await asyncio.sleep(1.0)
            await client.revoke("orders", 0)
            await asyncio.sleep(3.0)
            (outliving,) = app.diagnose().outliving
            assert "because its partition was revoked" in outliving.reason
            await client.publish("orders", "waits", key="k", partition=1)
            await asyncio.sleep(2.0)
            head = head_of(app, 1)
            assert head.state == "behind"
            assert "behind record orders/0/0 of another partition (key b'k'), which was cancelled" in head.reason
            assert f"{THIS_FILE}:{line_of('hangs here')}" in head.reason
            hanging.released.set()
            await asyncio.sleep(1.0)

    run(test())


async def test_a_thread_that_does_not_end_is_inspected() -> None:
    app, broker = make_app(auto_offset_reset="earliest"), InMemoryBroker(partitions=1)
    began, release = threading.Event(), threading.Event()

    @app.consume("orders", timeout=0.3)
    def handle(_: Record) -> None:
        began.set()
        release.wait(20.0)  # hangs in its thread

    broker.publish("orders", b"x", key=b"k")
    async with app.started(lambda: InMemoryTransport(broker, "diagnosed")):
        try:
            await until(began.is_set, 10.0)
            head = head_of(app)
            assert head.state == "in_flight"
            place = f"{__file__}:{line_of('hangs in its thread')} in "
            assert f", at {place}" in head.reason
            assert " in thread " in head.reason
            assert head.reason.endswith("in threading.Event.wait")
            await until(lambda: head_of(app).state == "outliving", 10.0)
            assert place in head_of(app).reason
            assert "a thread cannot be stopped" in str(head_of(app).what_to_do)
        finally:
            release.set()
        await until(lambda: broker.committed("diagnosed", "orders", 0) == 1, 10.0)


# Failures


def test_a_record_waiting_for_its_next_attempt_is_explained() -> None:
    app = make_app()
    fails = True

    @app.consume("orders", retry=Retry(attempts=7, initial=20.0, maximum=90.0, jitter=0.0))
    async def handle(_: Record) -> None:
        if fails:
            raise LookupError("no such customer")

    async def test() -> None:
        nonlocal fails
        async with client_of(app) as client:
            await client.publish("orders", "x", partition=0)
            await asyncio.sleep(26.0)
            head = head_of(app)
            assert (head.state, head.attempt, head.attempts) == ("retrying", 3, 7)
            assert head.since == pytest.approx(6.0, abs=0.1)
            assert head.reason == (
                "it waits for its next attempt, number 3 of 7, in 34.0 s; the last one failed 6.0 s ago with "
                "LookupError: no such customer"
            )
            fails = False
            follow_advice(app, head.what_to_do, "retry_now")
            await client.settle(timeout=1.0)

    run(test())


@pytest.mark.parametrize("call", ["retry_now", "skip"])
def test_a_halted_record_is_released_by_the_suggested_call(call: str) -> None:
    app = make_app()
    fails = True

    @app.consume("orders", retry=ONCE)
    async def handle(_: Record) -> None:
        if fails:
            raise LookupError("no such customer")

    async def test() -> None:
        nonlocal fails
        async with client_of(app) as client:
            await client.publish("orders", "x", key="k", partition=3)
            await asyncio.sleep(4.0)
            partition, head = partition_of(app, 3), head_of(app, 3)
            assert partition.verdict == "stuck"
            assert (head.state, head.attempt, head.attempts) == ("halted", 1, 1)
            assert "halted 4.0 s ago after 1 attempt (LookupError: no such customer)" in head.reason
            assert partition.sentence.count("attempt") == 1  # it may have halted before the last of those it would get
            fails = False
            follow_advice(app, head.what_to_do, call)
            await client.settle()
            assert app.statistics().handlers[0].skipped == (call == "skip")

    run(test())


def test_halted_records_behind_the_oldest_are_named_too() -> None:
    app = make_app()

    @app.consume("orders", retry=ONCE)
    async def handle(record: Record) -> None:
        if record.key != b"good":
            raise LookupError(f"customer {record.offset} is unknown")

    async def test() -> None:
        async with client_of(app) as client:
            for key in ("a", "good", "b", "c"):
                await client.publish("orders", "x", key=key, partition=3)
            await asyncio.sleep(4.0)
            expected = "  2 records behind it halted with LookupError: customer 2 is unknown: offset 2, 3.\n"
            assert expected in app.explain()
            (halted,) = partition_of(app, 3).findings
            assert (halted.error, halted.offsets, halted.records) == ("LookupError: customer 2 is unknown", (2, 3), 2)
            app.skip("orders", 3, 0)
            app.skip("orders", 3, 2)
            await asyncio.sleep(1.0)
            assert "behind it halted" not in app.explain()
            app.skip("orders", 3, 3)
            await client.settle()

    run(test())


def test_an_unwritable_dead_letter_is_explained() -> None:
    app = make_app()

    @app.consume("orders", retry=ONCE, on_failure=DeadLetter("orders.dlt"))
    async def handle(_: Record) -> None:
        raise ValueError("poison")

    async def test() -> None:
        async with client_of(app) as client:
            client.broker.fail_publishes("orders.dlt", MessageTooLargeError("the message is too large"))
            await client.publish("orders", "x", partition=0)
            await asyncio.sleep(15.0)
            head = head_of(app)
            assert head.state == "recovery"
            assert "its dead letter is written to orders.dlt: the message is too large" in head.reason
            assert re.search(r"failed \d\.\d s ago: .*; the next try is in \d\.\d s", head.reason)
            follow_advice(app, head.what_to_do, "skip")
            await client.settle()

    run(test())


def test_an_unacknowledged_dead_letter_is_explained() -> None:
    app = make_app()

    @app.consume("orders", retry=ONCE, on_failure=DeadLetter("orders.dlt"))
    async def handle(_: Record) -> None:
        client.broker.available = False
        raise ValueError("poison")

    client = TestClient(app)

    async def test() -> None:
        async with client:
            await client.publish("orders", "x", partition=0)
            await asyncio.sleep(5.0)
            head = head_of(app)
            assert head.state == "recovery"
            assert "is being recovered for 5.0 s: its dead letter is written to orders.dlt" in head.reason
            assert any("in-memory broker" in finding.sentence for finding in app.diagnose().findings)
            client.broker.available = True
            await client.settle()

    run(test())


def test_an_open_circuit_breaker_is_explained() -> None:
    app = make_app()
    down = True

    @app.consume("orders", retry=ONCE, on_failure=DeadLetter("orders.dlt", breaker=CircuitBreaker(minimum=3)))
    async def handle(_: Record) -> None:
        if down:
            raise ConnectionError("the ledger is away")

    async def test() -> None:
        nonlocal down
        async with client_of(app) as client:
            for number in range(9):
                await client.publish("orders", "x", key=str(number), partition=0)
            await asyncio.sleep(10.0)
            partition = partition_of(app)
            (finding,) = partition.findings
            assert finding.kind == "paused"
            assert finding.since == pytest.approx(10.0, abs=1.1)
            assert re.match(
                r"paused for (9|10)\.\d s: the circuit breaker of handler handle is open: 3 records", finding.sentence
            )
            assert "failed with ConnectionError: the ledger is away" in str(finding.what_to_do)
            assert partition.head is not None
            assert partition.head.state in ("held", "recovery", "in_flight")
            down = False
            await client.settle(timeout=20.0)
            assert partition_of(app).findings == ()

    run(test())


def test_a_hanging_parked_record_is_named_while_its_partition_advances() -> None:
    app, hanging = make_app(), Hanging()

    @app.consume("orders", retry=ONCE, on_failure=Park("orders.parked", delay=5.0))
    async def handle(record: Record) -> None:
        if not app.statistics().handlers[0].parked:
            raise ValueError("not yet")
        await hanging(record)

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "hang", key="k", partition=0)
            await asyncio.sleep(15.0)
            partition = partition_of(app)
            (finding,) = partition.findings
            assert partition.verdict == "up to date"
            assert "record orders/0/0, which was parked and is run again, has been in handler" in finding.sentence
            assert f"{THIS_FILE}:{line_of('hangs here')}" in finding.sentence
            hanging.released.set()
            await client.settle()

    run(test())


# Waiting for others


def test_a_record_blocked_by_another_partition_names_the_blocking_record() -> None:
    """With a function as `shard_by` a shard spans partitions."""
    app, hanging = make_app(), Hanging()
    app.consume("orders", shard_by=lambda record: record.value.split()[1])(hanging)  # type: ignore[union-attr]

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "hang customer-7", key="a", partition=1)
            await asyncio.sleep(1.0)
            await client.publish("orders", "fine customer-7", key="b", partition=2)
            await asyncio.sleep(3.0)
            head = head_of(app, 2)
            assert (head.state, head.key, head.shard) == ("behind", "b'b'", "b'customer-7'")
            assert head.reason.startswith(
                "it waits in its shard behind record orders/1/0 of another partition (key b'a'), which "
                f"has been in handler Hanging for 4.0 s, at {__file__}:{line_of('hangs here')}"
            )
            assert head.stack is not None
            assert partition_of(app, 1).behind == 0, "what waits for it is of another partition"
            assert partition_of(app, 2).behind == 0
            hanging.released.set()
            await client.settle()

    run(test())


def test_a_record_behind_a_halted_one_says_how_to_release_it() -> None:
    app = make_app()

    @app.consume("orders", retry=ONCE)
    async def handle(record: Record) -> None:
        if record.partition == 1:
            raise ValueError("broken")

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "x", key="k", partition=1)
            await asyncio.sleep(1.0)
            await client.publish("orders", "x", key="k", partition=2)
            await asyncio.sleep(2.0)
            head = head_of(app, 2)
            assert head.reason.startswith(
                "it cannot run because record orders/1/0 of another partition (key b'k') halted 3.0 s ago after "
                "1 attempt (ValueError: broken)"
            )
            assert (head.error, head.waits_for) == ("ValueError: broken", "orders/1/0")
            follow_advice(app, head.what_to_do, "skip")
            await client.settle()

    run(test())


def test_a_record_without_a_free_worker_is_explained() -> None:
    app, hanging = make_app(), Hanging()
    app.consume("orders", concurrency=3)(hanging)

    async def test() -> None:
        async with client_of(app) as client:
            for number in range(2):
                await client.publish("orders", "hang", key=f"a{number}", partition=0)
            await client.publish("orders", "hang", key="b", partition=3)
            await asyncio.sleep(2.0)
            await client.publish("orders", "fine", key="c", partition=1)
            await asyncio.sleep(4.0)
            head = head_of(app, 1)
            assert head.state == "queued"
            assert head.since == pytest.approx(4.0, abs=0.1)
            assert head.reason.startswith(
                "it waits for its turn: all 3 workers of handler Hanging are busy; the longest run is "
                "that of record orders/0/0, for 6.0 s, at "
            )
            assert f"{THIS_FILE}:{line_of('hangs here')}" in head.reason
            assert "raise concurrency= to run more of them concurrently" in str(head.what_to_do)
            hanging.released.set()
            await client.settle()

    run(test())


def test_a_fixed_shard_is_named_by_number_and_occupying_record() -> None:
    app, hanging = make_app(max_buffered_records=20), Hanging()
    app.consume("orders", shards=1)(hanging)

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "hang", key="a", partition=0)
            await asyncio.sleep(1.0)
            for number in range(30):
                await client.publish("orders", "fine", key=f"b{number}", partition=1)
            await asyncio.sleep(3.0)
            head = head_of(app, 1)
            assert (head.state, head.shard) == ("behind", "0")
            assert "behind record orders/0/0 of another partition" in head.reason
            hanging.released.set()
            await client.settle()

    run(test())


def test_filling_and_running_batches_are_explained() -> None:
    app = make_app()
    released = asyncio.Event()

    @app.consume("orders", batch=Batch(max_records=3, linger=20.0))
    async def handle(_: list[Record]) -> None:
        await released.wait()  # the batch hangs

    async def test() -> None:
        async with client_of(app) as client:
            for number in range(2):
                await client.publish("orders", "x", key=str(number), partition=0)
            await asyncio.sleep(5.0)
            head = head_of(app)
            assert head.state == "collecting"
            assert head.reason == "it waits for its batch to fill: 2 of 3 records, linger=20 s"
            await client.publish("orders", "x", key="2", partition=0)
            await asyncio.sleep(5.0)
            head = head_of(app)
            assert head.state == "in_flight"
            assert "in handler handle in a batch of 3 records for 5.0 s" in head.reason
            assert f"{THIS_FILE}:{line_of('the batch hangs')}" in head.reason
            released.set()
            await client.settle()

    run(test())


# Limits


def test_an_application_pause_names_owner_reason_time_and_resume_call() -> None:
    app = make_app()

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "x", partition=0)
            await client.publish("orders", "x", partition=1)
            await client.settle()
            await asyncio.sleep(50.0)
            app.pause("orders", 1, why="the ledger is being moved")
            app.pause_handler("handle", why="maintenance")
            await client.publish("orders", "x", partition=1)
            await asyncio.sleep(30.0)
            finding, other = partition_of(app, 1).findings
            assert (finding.kind, other.kind) == ("paused", "paused")
            assert finding.since == pytest.approx(30.0, abs=1.1)
            assert re.fullmatch(
                r"paused by the application for (29|30)\.\d s: the ledger is being moved", finding.sentence
            )
            assert (
                "has no record in flight at position 1, committed 1, of a log that ends at 2"
                in partition_of(app, 1).sentence
            )
            assert [finding.sentence for finding in partition_of(app, 2).findings] == [other.sentence]
            assert other.sentence.endswith("s: maintenance")
            follow_advice(app, finding.what_to_do, "resume")
            follow_advice(app, other.what_to_do, "resume_handler")
            await client.settle()

    run(test())


def test_a_record_of_a_paused_partition_is_explained_by_the_pause() -> None:
    app = make_app()
    first = asyncio.Event()

    @app.consume("orders")
    async def handle(_: Record) -> None:
        await first.wait()

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "x", key="k", partition=0)
            await client.publish("orders", "x", key="k", partition=0)
            await asyncio.sleep(1.0)
            app.pause("orders", 0)
            first.set()
            await asyncio.sleep(5.0)
            partition, head = partition_of(app), head_of(app)
            assert (head.offset, head.state) == (1, "held")
            assert head.reason == "it may not start: its partition is paused"
            assert partition.verdict == "waiting"
            assert partition.findings[0].sentence in app.explain().replace("Paused", "paused")
            app.resume("orders", 0)
            await client.settle()

    run(test())


def test_a_full_buffer_is_explained() -> None:
    app, hanging = make_app(max_buffered_records=50), Hanging()
    app.consume("orders", shard_by="partition")(hanging)

    async def test() -> None:
        async with client_of(app) as client:
            for number in range(200):
                await client.publish("orders", "hang", key=str(number), partition=number % 2)
            await asyncio.sleep(20.0)
            (finding,) = partition_of(app).findings
            assert finding.kind == "no room"
            assert finding.since == pytest.approx(20.0, abs=1.1)
            assert re.match(
                r"nothing more is taken in for \d+\.\d s: the buffer is full: \d+ of 50 records and \d+ of \d+ bytes",
                finding.sentence,
            )
            assert "raise max_buffered_records" in str(finding.what_to_do)
            assert head_of(app).state == "in_flight"
            hanging.released.set()
            await client.settle()

    run(test())


def test_a_record_waiting_for_room_and_its_followers_are_explained() -> None:
    app, hanging = make_app(max_buffered_bytes=24_000), Hanging()
    app.consume("orders")(hanging)

    async def test() -> None:
        broker = InMemoryBroker(partitions=2, clock=lambda: 0.0)
        async with client_of(app, broker=broker) as client:
            await client.publish("orders", "hang", partition=1)
            await asyncio.sleep(1.0)
            await client.publish("orders", b"x" * 30_000, partition=0)
            await client.publish("orders", b"small", partition=1)
            await asyncio.sleep(2.0)
            (own,), (others,) = partition_of(app, 0).findings, partition_of(app, 1).findings
            assert re.search(r"its next record, of \d+ bytes, waits for room", own.sentence)
            assert re.search(r"a record of orders/0, of \d+ bytes, waits for room", others.sentence)
            assert partition_of(app, 0).head is None
            assert "raise max_buffered_bytes" in str(own.what_to_do)
            hanging.released.set()
            await client.settle()

    run(test())


def test_a_stuck_partition_reports_its_minimum_and_its_evicted_records() -> None:
    app, hanging = make_app(max_buffered_records=1_000, stuck_after=5.0), Hanging()
    app.consume("orders", shard_by="partition")(hanging)

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "hang", partition=0)
            for number in range(900):
                await client.publish("orders", "hang" if number == 200 else "fine", partition=0)
            await asyncio.sleep(20.0)
            partition = partition_of(app)
            assert partition.verdict == "stuck"
            (finding,) = partition.findings
            assert "it cannot advance past record orders/0/0 and already holds 10 records" in finding.sentence
            assert finding.what_to_do is not None
            engine = engine_of(app)
            shed = engine.rebalance.partitions[TopicPartition("orders", 0)].evicted
            evicted = HandlerSnapshot(engine.handlers[0], watch_of(app)).describe(shed[max(shed)])
            assert evicted.state == "evicted"
            assert "evicted to make room for others" in evicted.reason
            assert partition.behind == partition.window - 1
            hanging.released.set()
            await client.settle(timeout=30.0)

    run(test())


# The broker's side


def test_unacknowledged_commits_are_explained() -> None:
    app = make_app()

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "x", partition=0)
            await client.settle()
            for _ in range(500):
                client.fail_next_commit(TransportError("the coordinator is loading"))
            await client.publish("orders", "x", partition=0)
            await asyncio.sleep(8.0)
            partition = partition_of(app)
            (finding,) = partition.findings
            assert (partition.verdict, finding.kind) == ("waiting", "commit")
            assert finding.since == pytest.approx(8.0, abs=0.2)
            assert "records are complete up to offset 2 but not committed (committed: 1)" in finding.sentence
            assert re.search(r"acknowledged for (7\.9|8\.0) s: the coordinator is loading", finding.sentence)
            await client.settle(timeout=60.0)

    run(test())


def test_an_unreadable_partition_is_explained() -> None:
    app = make_app()

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "x", partition=0)
            await client.settle()
            client.broker.fail_fetches("orders", 0, TransportError("the batch at offset 1 is damaged"))
            await client.publish("orders", "x", partition=0)
            await asyncio.sleep(8.0)
            partition = partition_of(app)
            (finding,) = partition.findings
            assert (partition.verdict, finding.kind) == ("waiting", "unreadable")
            assert re.fullmatch(r"it cannot be read: the batch at offset 1 is damaged \(for [78] s\)", finding.sentence)
            client.broker.fail_fetches("orders", 0, None)
            await client.settle(timeout=20.0)

    run(test())


def test_unreadable_parked_records_are_explained() -> None:
    app = make_app()

    @app.consume("orders", on_failure=Park("orders.parked"))
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "x", partition=0)
            await client.settle()
            client.broker.fail_fetches("orders.parked", 0, TransportError("access was refused"))
            await asyncio.sleep(10.0)
            (finding,) = app.diagnose().findings
            assert finding.kind == "parking"
            assert finding.sentence == (
                "the records that handler handle parked in orders.parked cannot be read or written: access was refused"
            )
            assert partition_of(app).verdict == "up to date"
            client.broker.fail_fetches("orders.parked", 0, None)

    run(test())


class Silent(InMemoryTransport):
    """A client that knows of more than it brings."""

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        return 10 if topic_partition.partition == 0 else super().end_offset(topic_partition)


def test_a_partition_that_delivers_nothing_is_explained() -> None:
    app = make_app(auto_offset_reset="earliest")
    broker = InMemoryBroker(partitions=2, clock=lambda: 0.0)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        broker.publish("orders", b"x", partition=0)
        async with app.started(lambda: Silent(broker, "diagnosed")):
            await asyncio.sleep(4.0)
            assert partition_of(app).verdict == "advancing"
            await asyncio.sleep(16.0)
            partition = partition_of(app)
            (finding,) = partition.findings
            assert (partition.verdict, finding.kind) == ("waiting", "nothing comes")
            assert finding.since == pytest.approx(20.0, abs=1.1)
            assert "no record has arrived for" in partition.sentence
            assert "although its log ends at 10 and there is room" in partition.sentence
            assert partition_of(app, 1).findings == ()

    run(test())


def test_an_open_transaction_is_explained() -> None:
    app = make_app(auto_offset_reset="earliest")
    broker = InMemoryBroker(partitions=2, clock=lambda: 0.0)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        log = broker.log("orders", 0)
        broker.publish("orders", b"x", partition=0)
        log.begin_transaction()
        for _ in range(3):
            broker.publish("orders", b"x", partition=0)
        async with app.started(lambda: InMemoryTransport(broker, "diagnosed")):
            await asyncio.sleep(40.0)
            (finding,) = partition_of(app).findings
            assert (finding.kind, app.statistics().partitions[0].held_back) == ("transaction", 3)
            assert finding.since == pytest.approx(30.0, abs=2.0)
            assert partition_of(app, 1).findings == ()
            log.end_transaction(commit=True)
            await asyncio.sleep(20.0)
            assert (partition_of(app).findings, app.statistics().partitions[0].held_back) == ((), 0)

    run(test())


def test_short_transactions_are_not_taken_for_a_long_one() -> None:
    """A busy transactional producer always has one open, and each ends within a moment."""
    app = make_app(auto_offset_reset="earliest")
    broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def produce() -> None:
        log = broker.log("orders", 0)
        while True:
            log.begin_transaction()
            broker.publish("orders", b"x", partition=0)
            await asyncio.sleep(0.5)
            log.end_transaction(commit=True)

    async def test() -> None:
        producing = asyncio.create_task(produce(), name="produce")
        async with app.started(lambda: InMemoryTransport(broker, "diagnosed")):
            for _ in range(600):
                await asyncio.sleep(0.1)
                assert (partition_of(app).findings, app.statistics().partitions[0].held_back) == ((), 0)
        producing.cancel()

    run(test())


def test_a_position_outside_the_log_is_explained() -> None:
    app = make_app()

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "x", partition=0)
            await client.settle()
            engine_of(app).rebalance.partitions[TopicPartition("orders", 0)].outside_log = 1
            (finding,) = partition_of(app).findings
            assert finding.sentence == "its position 1 is not in the log; the new position is being looked up"

    run(test())


def test_unresponsive_brokers_are_explained() -> None:
    app = make_app()

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "x", partition=0)
            await client.settle()
            client.broker.available = False
            await asyncio.sleep(30.0)
            trouble = [finding for finding in app.diagnose().findings if finding.kind == "trouble"]
            assert len(trouble) == 1
            assert "Trouble: " in app.explain()
            client.broker.available = True
            await asyncio.sleep(30.0)
            assert app.diagnose().findings == ()

    run(test())


def test_a_partition_being_revoked_names_the_runs_it_waits_for() -> None:
    app, hanging = make_app(drain_timeout=20.0), Hanging()
    app.consume("orders")(hanging)

    async def test() -> None:
        async with client_of(app) as client:
            for number in range(5):
                await client.publish("orders", "hang", key=str(number), partition=0)
            await client.publish("orders", "fine", key="0", partition=0)
            await asyncio.sleep(2.0)
            revoking = asyncio.create_task(client.revoke("orders", 0))
            await asyncio.sleep(6.0)
            partition = partition_of(app)
            (finding,) = partition.findings
            assert finding.kind == "rebalancing"
            assert finding.since is not None
            assert 4.0 <= finding.since <= 6.0
            assert "waits for 5 records to end first: orders/0/0, orders/0/1, orders/0/2, ..." in finding.sentence
            assert "Context.revoked" in str(finding.what_to_do)
            assert head_of(app).state == "in_flight"
            assert [finding.kind for finding in app.diagnose().findings] == ["rebalancing"]
            hanging.released.set()
            await revoking

    run(test())


def test_a_stopping_app_names_the_runs_it_waits_for() -> None:
    app, hanging = make_app(shutdown_timeout=20.0, drain_timeout=20.0), Hanging()
    app.consume("orders")(hanging)
    explanation = ""

    async def test() -> None:
        nonlocal explanation
        async with client_of(app) as client:
            await client.publish("orders", "hang", partition=0)
            await asyncio.sleep(1.0)
            told_of = asyncio.create_task(tell())
        await told_of

    async def tell() -> None:
        nonlocal explanation
        await asyncio.sleep(5.0)
        explanation = app.explain()
        hanging.released.set()

    run(test())
    assert "The app is draining." in explanation
    assert re.search(
        r"The app is draining for [45]\.\d s, and waits for 1 record to end first: orders/0/0", explanation
    )


def test_an_unknown_position_is_explained() -> None:
    app = make_app()

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "x", partition=0)
            await client.settle()
            await client.revoke("orders", 0)
            for _ in range(2_000):
                client.fail_next_commit(ConnectError("the coordinator is away"))
            client.group.commit_from_outside({TopicPartition("orders", 0): None})
            await client.assign("orders", 0)
            await asyncio.sleep(12.0)
            finding = next(finding for finding in app.diagnose().findings if finding.kind == "rebalancing")
            assert "the start position is not known yet" in finding.sentence
            assert "the coordinator is away" in finding.sentence
            assert finding.since == pytest.approx(12.0, abs=1.1)

    run(test())


# Nothing to report


def test_a_fully_committed_partition_is_up_to_date() -> None:
    app = make_app()

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with client_of(app) as client:
            for _ in range(3):
                await client.publish("orders", "x", partition=0)
            await client.settle()
            await asyncio.sleep(100.0)
            partition = partition_of(app)
            assert (partition.verdict, partition.head, partition.findings) == ("up to date", None, ())
            assert "orders/0 is up to date: everything up to offset 3 is done and committed." in app.explain()
            assert "What to do" not in app.explain()

    run(test())


def test_a_partition_with_new_records_is_advancing() -> None:
    app, hanging = make_app(), Hanging()
    app.consume("orders")(hanging)

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "hang", partition=0)
            await asyncio.sleep(0.5)
            assert partition_of(app).verdict == "advancing"
            assert partition_of(app).since is None
            assert "orders/0 advances: 1 record incomplete" in app.explain()
            assert "What to do" not in app.explain()
            hanging.released.set()

    run(test())


def test_a_slow_partition_is_not_stuck_while_it_advances(caplog: pytest.LogCaptureFixture) -> None:
    """A record that waited long behind another does not block once it reaches the front."""
    app, hanging = make_app(stuck_after=10.0), Hanging()

    @app.consume("orders", shard_by="partition")
    async def handle(record: Record) -> None:
        await hanging(record)
        await asyncio.sleep(0.4)

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "hang", partition=0)
            for _ in range(40):
                await client.publish("orders", "fine", partition=0)
            await asyncio.sleep(15.0)
            assert partition_of(app).verdict == "stuck"
            hanging.released.set()
            await asyncio.sleep(10.3)
            partition, head = partition_of(app), head_of(app)
            assert head.age > 20.0
            assert partition.verdict == "advancing"
            await client.settle(timeout=30.0)

    run(test())
    assert [text.partition(":")[0] for text in caplog.messages if "evicted" not in text] == [
        "stuck",
        "orders/0 advances again",
    ]


def test_an_app_that_is_not_running_says_so() -> None:
    app = make_app()
    app.consume("orders")(Hanging())

    assert app.explain() == "The app is not running.\n"
    assert app.diagnose().partitions == ()
    assert app.diagnose().state == "stopped"


# Keys


class Customer:
    """A shard key of the application that must not be asked how it looks."""

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Customer)

    def __repr__(self) -> str:
        raise AssertionError


def test_hidden_keys_are_shown_as_hashes_of_this_process() -> None:
    app, hanging = make_app(show_keys=False), Hanging()
    app.consume("orders", shard_by=lambda _: Customer())(hanging)

    async def test() -> None:
        async with client_of(app) as client:
            for partition, key in enumerate(["alice", "bob", "alice"]):
                await client.publish("orders", "hang", key=key, partition=partition)
            await client.publish("orders", "hang", partition=3)
            await asyncio.sleep(3.0)
            keys = [head_of(app, number).key for number in range(4)]
            assert keys[0] == keys[2] != keys[1]
            assert re.fullmatch(r"#[0-9a-f]{8}", str(keys[0]))
            assert keys[3] is None
            assert head_of(app).shard == "of type Customer"
            assert "alice" not in app.explain()
            assert "alice" not in json.dumps(app.diagnose().asdict())
            hanging.released.set()
            await client.settle()

    run(test())


# From other threads


def test_a_blocked_event_loop_is_explained_from_another_thread() -> None:
    app, broker = make_app(auto_offset_reset="earliest"), InMemoryBroker(partitions=1)
    explanations: list[str] = []
    blocked, over = threading.Event(), threading.Event()

    def blocks() -> None:
        blocked.set()
        over.wait(30.0)  # blocks the loop

    @app.consume("orders")
    async def handle(_: Record) -> None:
        blocks()

    def ask() -> None:
        blocked.wait(20.0)
        end = time.monotonic() + 20.0
        while time.monotonic() < end:
            explanations.append(app.explain())
            if "has been blocked" in explanations[-1]:
                break
            time.sleep(0.1)
        over.set()

    async def main() -> None:
        broker.publish("orders", b"x", key=b"k")
        async with app.started(lambda: InMemoryTransport(broker, "diagnosed")):
            await broker.until(lambda: broker.committed("diagnosed", "orders", 0) == 1)

    thread = threading.Thread(target=ask)
    thread.start()
    asyncio.run(main())
    thread.join()

    assert re.search(r"The event loop has been blocked for [1-4]\.\d s", explanations[-1])
    assert f"{__file__}:{line_of('blocks the loop')} in " in explanations[-1]
    assert "which blocks in threading.Event.wait without an await" in explanations[-1]
    assert "asyncio.to_thread" in explanations[-1]


def test_a_thread_can_diagnose_continuously_while_records_flow() -> None:
    app = make_app(auto_offset_reset="earliest", max_buffered_records=500)
    broker = InMemoryBroker(partitions=4)
    failures: list[BaseException] = []
    asked = 0
    over = threading.Event()

    @app.consume("orders", concurrency=32, retry=Retry(attempts=3, initial=0.001))
    async def handle(record: Record, context: Context) -> None:
        if record.offset % 7 == 0 and context.attempt == 1:
            raise ValueError("once")
        if record.offset % 3 == 0:
            await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0.0001))

    def ask() -> None:
        nonlocal asked
        try:
            while not over.is_set():
                app.explain()
                json.dumps(app.diagnose().asdict())
                asked += 1
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    async def main() -> None:
        for number in range(6_000):
            broker.publish("orders", b"x", key=b"k%d" % (number % 200), partition=number % 4)
        async with app.started(lambda: InMemoryTransport(broker, "diagnosed")):
            for _ in range(3):
                await broker.until(lambda: all(broker.committed("diagnosed", "orders", n) == 1_500 for n in range(4)))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        asyncio.run(main())
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)

    assert not failures
    assert asked > 20


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            'relation "orders" does not exist\nLINE 1: INSERT INTO orders\n                    ^',
            "exist LINE 1: INSERT INTO orders ^);",
        ),
        ("", "(LookupError);"),
    ],
    ids=["several lines", "none"],
)
def test_an_exception_message_is_shown_on_one_line(message: str, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()

    @app.consume("orders", retry=ONCE)
    async def handle(_: Record) -> None:
        raise LookupError(message)

    async def test() -> None:
        async with client_of(app) as client:
            await client.publish("orders", "x", partition=3)
            await asyncio.sleep(1.0)
            assert shown in head_of(app, 3).reason

    run(test())
    (halted,) = (line for line in caplog.records if " and halts (" in line.getMessage())
    assert "\n" not in halted.getMessage()
