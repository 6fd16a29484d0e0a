"""`assert_idempotent`: non-idempotent handlers fail with the first prefix that shows it; others pass."""

import asyncio
import contextlib
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from aioshard import App, Batch, BatchContext, Context, Record, Retry
from aioshard.testing import InMemoryBroker, assert_idempotent, run

Totals = dict[bytes, int]

IN_EITHER_LOOP = pytest.mark.parametrize("run_it", [run, asyncio.run], ids=["virtual time", "real time"])
RunIt = Callable[[Coroutine[Any, Any, None]], None]


def history_of(*records: tuple[bytes | None, bytes], partitions: int = 1) -> list[Record]:
    """Records of the topic orders, as key and value."""
    broker = InMemoryBroker(partitions=partitions, clock=lambda: 1_700_000_000.0)
    return [broker.publish("orders", value, key=key) for key, value in records]


ORDERS = history_of((b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"b", b"4"))


def difference(app: App, totals: Totals, history: list[Record] = ORDERS, **options: Any) -> str:
    """Return the report about a handler that is not idempotent."""
    with pytest.raises(AssertionError) as caught:
        run(assert_idempotent(app, history, reset=totals.clear, effects=lambda: totals, **options))
    return str(caught.value)


# Handlers that are not idempotent ------------------------------------------------------------


def test_a_non_idempotent_sum_is_reported_with_records_and_both_effects() -> None:
    app, totals = App("billing"), Totals()

    @app.consume("orders")
    async def on_order(record: Record) -> None:
        totals[record.key or b""] = totals.get(record.key or b"", 0) + int(record.value or b"")

    assert difference(app, totals) == (
        "the effects differ after a crash when 1 of 4 records had run: the handler is not idempotent\n"
        "  ran before:  orders/0/0 key=b'a' value=b'1'\n"
        "  ran after:   orders/0/0 key=b'a' value=b'1'\n"
        "               orders/0/1 key=b'b' value=b'2'\n"
        "               orders/0/2 key=b'a' value=b'3'\n"
        "               orders/0/3 key=b'b' value=b'4'\n"
        "  effects of a clean run:\n"
        "    {b'a': 4, b'b': 6}\n"
        "  effects with the crash:\n"
        "    {b'a': 5, b'b': 6}"
    )


def test_remembering_only_the_last_record_is_detected() -> None:
    """Repeating the last record only would not show it, nor would any crash after the first."""
    app, totals = App("billing"), Totals()

    @app.consume("orders", shard_by="partition")
    async def on_order(record: Record) -> None:
        if totals.get(b"last") != record.offset:
            totals[b"last"] = record.offset
            totals[b"sum"] = totals.get(b"sum", 0) + int(record.value or b"")

    said = difference(app, totals)

    assert "when 2 of 4 records had run" in said
    assert re.search(r"ran before:  orders/0/0 .*\n +orders/0/1 .*\n  ran after:   orders/0/0 ", said)


def test_resetting_at_the_first_record_is_detected() -> None:
    """Repeating from the first record on rebuilds everything, and shows nothing."""
    app, totals = App("billing"), Totals()

    @app.consume("orders", shard_by="partition")
    async def on_order(record: Record) -> None:
        if record.offset == 0:
            totals.clear()
        totals[b"sum"] = totals.get(b"sum", 0) + int(record.value or b"")

    said = difference(app, totals)

    assert "when 2 of 4 records had run" in said
    assert "ran after:   orders/0/1 " in said


def test_an_inbox_in_a_separate_transaction_is_detected() -> None:
    app, totals = App("billing"), Totals()
    inbox = set[str]()

    def reset() -> None:
        totals.clear()
        inbox.clear()

    @app.consume("orders")
    async def on_order(record: Record, context: Context) -> None:
        if context.idempotency_key in inbox:
            return
        inbox.add(context.idempotency_key)
        await asyncio.sleep(0.1)
        totals[record.key or b""] = totals.get(record.key or b"", 0) + int(record.value or b"")

    with pytest.raises(AssertionError) as caught:
        run(assert_idempotent(app, ORDERS, reset=reset, effects=lambda: totals))
    run(assert_idempotent(app, ORDERS, reset=reset, effects=lambda: totals, interrupt=False))

    said = str(caught.value)
    assert said.startswith("the effects differ after a crash in the middle of record 1 of 4: ")
    assert "  ran before:  nothing\n  interrupted: orders/0/0 key=b'a' value=b'1'\n" in said
    assert re.search(
        r"    at await number 1, \w+/test_idempotence\.py:\d+ in on_order > \w+/tasks\.py:\d+ in sleep\n", said
    )
    assert said.endswith("    {b'a': 4, b'b': 6}\n  effects with the crash:\n    {b'a': 3, b'b': 6}")


def test_a_non_idempotent_plain_function_is_detected() -> None:
    app, totals = App("billing"), Totals()

    @app.consume("orders")
    def on_order(record: Record) -> None:
        totals[record.key or b""] = totals.get(record.key or b"", 0) + int(record.value or b"")

    assert "when 1 of 4 records had run" in difference(app, totals)


def test_state_in_app_resources_is_lost_in_a_crash() -> None:
    totals = Totals()

    @contextlib.asynccontextmanager
    async def resources(_: App) -> AsyncIterator[set[str]]:
        yield set()

    app = App("billing", resources=resources)

    @app.consume("orders")
    async def on_order(record: Record, context: Context) -> None:
        if context.idempotency_key not in context.state:
            context.state.add(context.idempotency_key)
            totals[record.key or b""] = totals.get(record.key or b"", 0) + int(record.value or b"")

    assert "when 1 of 4 records had run" in difference(app, totals)


# Handlers that are ---------------------------------------------------------------------------


@IN_EITHER_LOOP
def test_setting_a_value_by_key_passes(run_it: RunIt) -> None:
    app, totals = App("billing"), Totals()
    runs = 0

    @app.consume("orders")
    async def on_order(record: Record) -> None:
        nonlocal runs
        runs += 1
        await asyncio.sleep(0)
        totals[record.key or b""] = int(record.value or b"")

    run_it(assert_idempotent(app, ORDERS, reset=totals.clear, effects=lambda: totals, timeout=60.0))

    # Two clean runs; after each prefix of k records from each of k offsets; twice each record for its one await.
    clean, crashed = 2 * 4, sum(4 + repeated for ran in range(1, 5) for repeated in range(1, ran + 1))
    interrupted = sum(ran + (4 - ran + 1) for ran in range(1, 5)) + sum(range(1, 5))
    assert runs == clean + crashed + interrupted


@IN_EITHER_LOOP
def test_a_version_check_passes_in_a_thread_with_resources(run_it: RunIt, tmp_path: Path) -> None:
    file = tmp_path / "prices.db"

    @contextlib.asynccontextmanager
    async def resources(_: App) -> AsyncIterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(file, check_same_thread=False)) as database:
            database.execute("CREATE TABLE IF NOT EXISTS sums (key BLOB PRIMARY KEY, sum INTEGER, version INTEGER)")
            yield database

    app = App("billing", resources=resources)

    @app.consume("orders", concurrency=1)
    def on_order(record: Record, context: Context) -> None:
        with context.state as database:
            database.execute("INSERT INTO sums VALUES (?, 0, -1) ON CONFLICT DO NOTHING", (record.key,))
            database.execute(
                "UPDATE sums SET sum = sum + ?, version = ? WHERE key = ? AND version < ?",
                (int(record.value or b""), record.offset, record.key, record.offset),
            )

    async def effects() -> list[tuple[bytes, int]]:
        with contextlib.closing(sqlite3.connect(file)) as database:
            return database.execute("SELECT key, sum FROM sums ORDER BY key").fetchall() if file.stat().st_size else []

    run_it(assert_idempotent(app, ORDERS, reset=lambda: file.unlink(missing_ok=True), effects=effects, timeout=60.0))
    assert asyncio.run(effects()) == [(b"a", 4), (b"b", 6)]


def test_batches_are_replayed_and_interrupted_too() -> None:
    app, totals, inbox = App("billing"), Totals(), set[str]()

    def reset() -> None:
        totals.clear()
        inbox.clear()

    @app.consume("orders", batch=Batch(max_records=3, linger=0.0))
    async def on_orders(records: list[Record], context: BatchContext) -> None:
        for record in records:
            if (key := context.idempotency_key(record)) in inbox:
                continue
            if whole:
                await asyncio.sleep(0)
            inbox.add(key)
            if not whole:
                await asyncio.sleep(0)
            totals[record.key or b""] = totals.get(record.key or b"", 0) + int(record.value or b"")

    whole = True
    run(assert_idempotent(app, ORDERS, reset=reset, effects=lambda: totals))
    whole = False
    with pytest.raises(AssertionError, match="in the middle of record 1 of 4"):
        run(assert_idempotent(app, ORDERS, reset=reset, effects=lambda: totals))


async def test_it_runs_inside_the_loop_of_a_test() -> None:
    app, seen = App("billing"), set[bytes | None]()

    @app.consume("orders")
    async def on_order(record: Record) -> None:
        seen.add(record.value)

    async def reset() -> None:
        seen.clear()

    await assert_idempotent(app, ORDERS, reset=reset, effects=lambda: seen, timeout=60.0)
    assert len(seen) == 4


def test_records_are_replayed_unchanged_in_key_order_and_with_gaps() -> None:
    app = App("billing")
    kept: list[Record] = []
    clean: list[Record] = []

    @app.consume("orders", pattern="refunds-.*", concurrency=8)
    async def on_record(record: Record) -> None:
        await asyncio.sleep(0.1 if record.offset % 2 else 0.2)
        kept.append(record)

    history = [
        Record("orders", 2, 41_000_000, b"a", b"1", (("trace", b"x"),), 1_600_000_000.5),
        Record("refunds-eu", 0, 7, b"a", b"2", (), 1_600_000_001.0),
        Record("orders", 2, 41_000_007, b"a", None, (), 1_600_000_002.0),
        Record("orders", 0, 0, None, b"4", (), 1_600_000_003.0),
    ]

    def effects() -> list[Record]:
        clean.extend(kept if len(clean) < len(history) else [])
        return sorted(set(kept))

    run(assert_idempotent(app, history, reset=kept.clear, effects=effects))

    assert sorted(clean) == sorted(history)
    assert [record.offset for record in clean if record.key == b"a" and record.topic == "orders"] == [
        41_000_000,
        41_000_007,
    ]


def test_a_failed_attempt_is_retried() -> None:
    app, totals = App("billing"), Totals()
    failed = set[int]()

    def reset() -> None:
        totals.clear()
        failed.clear()

    @app.consume("orders", retry=Retry(attempts=3, initial=30.0))
    async def on_order(record: Record) -> None:
        if record.offset not in failed:
            failed.add(record.offset)
            raise ConnectionError("try again")
        totals[record.key or b""] = int(record.value or b"")

    run(assert_idempotent(app, ORDERS, reset=reset, effects=lambda: totals, interrupt=False))


def test_a_handlers_cleanup_runs_for_a_crash_at_each_await() -> None:
    app, totals = App("billing"), Totals()
    cancelled: list[str] = []

    @app.consume("orders")
    async def on_order(record: Record) -> None:
        position = "first"
        try:
            await asyncio.sleep(0.1)
            position = "second"
            async with asyncio.timeout(1.0):
                await asyncio.to_thread(int, 1)
        except asyncio.CancelledError:
            cancelled.append(position)
            await asyncio.sleep(0.1)
            raise
        totals[record.key or b""] = int(record.value or b"")

    run(assert_idempotent(app, ORDERS[:1], reset=totals.clear, effects=lambda: totals))

    assert cancelled == ["first", "second"]


def test_the_app_is_unchanged_afterwards() -> None:
    app, totals = App("billing", commit_interval=3.0), Totals()

    @app.consume("orders")
    async def on_order(record: Record) -> None:
        await asyncio.sleep(0)
        totals[record.key or b""] = int(record.value or b"")

    before = app.handlers
    run(assert_idempotent(app, ORDERS, reset=totals.clear, effects=lambda: totals))

    assert app.handlers == before
    assert app.settings.commit_interval == 3.0
    assert app.settings.auto_offset_reset is None


# Tests that would prove nothing --------------------------------------------------------------


def noting(totals: Totals) -> App:
    app = App("billing")

    @app.consume("orders")
    async def on_order(record: Record) -> None:
        totals[record.key or b""] = totals.get(record.key or b"", 0) + int(record.value or b"")

    return app


def test_effects_that_never_change_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"effects\(\) does not see what the handlers do.*\n  effects:\n    \[\]"):
        run(assert_idempotent(noting({}), ORDERS, reset=lambda: None, effects=list))


def test_an_empty_history_is_refused() -> None:
    with pytest.raises(AssertionError, match="the history has no visible effects: it is empty"):
        run(assert_idempotent(noting({}), [], reset=lambda: None, effects=list))


def test_a_reset_that_leaves_effects_behind_is_refused() -> None:
    totals = Totals()

    with pytest.raises(AssertionError, match=r"two clean runs have different effects: reset\(\) does not restore"):
        run(assert_idempotent(noting(totals), ORDERS, reset=lambda: None, effects=lambda: totals))


def test_effects_that_cannot_be_copied_are_refused() -> None:
    generator = (number for number in range(3))

    with pytest.raises(TypeError, match="generator"):
        run(assert_idempotent(noting({}), ORDERS, reset=lambda: None, effects=lambda: generator))


@pytest.mark.parametrize(
    ("history", "sentence"),
    [
        (ORDERS[::-1], r"orders/0 is at 4: offset 2 cannot be appended"),
        (ORDERS[:1] * 2, r"orders/0 is at 1: offset 0 cannot be appended"),
        (
            [ORDERS[0]._replace(topic="refunds")],
            r"refunds/0/0 belongs to a topic that no handler of app 'billing' consumes",
        ),
    ],
    ids=["backwards", "twice", "another topic"],
)
def test_an_unreplayable_history_is_refused(history: list[Record], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        run(assert_idempotent(noting({}), history, reset=lambda: None, effects=list))


def test_a_failing_handler_ends_the_replay_and_names_the_run() -> None:
    app, totals = App("billing"), Totals()
    runs = 0

    @app.consume("orders", retry=Retry(attempts=1))
    async def on_order(record: Record) -> None:
        nonlocal runs
        runs += 1
        totals[record.key or b""] = int(record.value or b"")
        if runs > 10:
            raise ValueError("no such customer")

    with pytest.raises(TimeoutError, match="no such customer") as caught:
        run(assert_idempotent(app, ORDERS, reset=totals.clear, effects=lambda: totals, interrupt=False))

    assert caught.value.__notes__ == ["this was after a crash after 1 of 4 records"]
