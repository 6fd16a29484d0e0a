"""`App.cancel_run`: an operator ends a run that is stuck, and its attempt has failed."""

import asyncio
import threading

import pytest

from aioshard import App, Batch, Record, Retry
from aioshard.errors import StateError
from aioshard.testing import TestClient, run
from tests.engine.live_apps import until


def make_app() -> App:
    return App("runs", auto_offset_reset="earliest")


def test_a_cancelled_run_has_failed_and_is_retried() -> None:
    app = make_app()
    attempts: list[int] = []

    @app.consume("orders", retry=Retry(attempts=2, initial=0.1))
    async def handle(record: Record) -> None:
        attempts.append(record.offset)
        if len(attempts) == 1:
            await asyncio.Event().wait()

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"", partition=0)
            await until(lambda: attempts)
            with pytest.raises(StateError, match="cancel_run"):
                app.skip("orders", 0, 0)
            app.cancel_run("orders", 0, 0)
            await client.settle()
            statistics = app.statistics()
            assert (statistics.handlers[0].retried, statistics.handlers[0].processed) == (1, 1)
            assert statistics.replayed == 0, "no rebalance has cancelled the run"

    run(test())
    assert attempts == [0, 0]


def test_the_failure_policy_applies_and_the_cause_is_named() -> None:
    app = make_app()
    runs: list[int] = []

    @app.consume("orders", retry=Retry(attempts=1))
    async def handle(record: Record) -> None:
        runs.append(record.offset)
        await asyncio.Event().wait()

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"", partition=0)
            await until(lambda: runs)
            app.cancel_run("orders", 0, 0)
            await until(lambda: app.statistics().handlers[0].halted)
            error = app.diagnose().partitions[0].head
            assert error is not None
            assert error.error is not None
            assert "StoppedRunError" in error.error
            assert "timeout" not in error.error
            with pytest.raises(StateError, match="not in flight"):
                app.cancel_run("orders", 0, 0)
            app.skip("orders", 0, 0)
            await client.settle()

    run(test())


def test_a_batch_fails_as_a_whole() -> None:
    app = make_app()
    batches: list[int] = []

    @app.consume("orders", batch=Batch(max_records=2, linger=1.0), retry=Retry(attempts=2, initial=0.1))
    async def handle(records: list[Record]) -> None:
        batches.append(len(records))
        if len(batches) == 1:
            await asyncio.Event().wait()

    async def test() -> None:
        async with TestClient(app) as client:
            for _ in range(2):
                await client.publish("orders", b"", partition=0)
            await until(lambda: batches)
            app.cancel_run("orders", 0, 1)
            await client.settle(30.0)
            assert app.statistics().handlers[0].processed == 2

    run(test())
    assert batches[0] == 2


def test_a_swallowed_cancellation_names_the_request() -> None:
    app = make_app()
    runs: list[int] = []

    @app.consume("orders", retry=Retry(attempts=1))
    async def handle(record: Record) -> None:
        runs.append(record.offset)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"", partition=0)
            await until(lambda: runs)
            app.cancel_run("orders", 0, 0)
            await until(lambda: app.statistics().handlers[0].halted)
            assert "cancel_run; the handler swallowed the cancellation" in app.explain()
            app.skip("orders", 0, 0)
            await client.settle()

    run(test())


async def test_the_key_of_a_thread_waits_until_it_ends() -> None:
    """A thread cannot be stopped (I4)."""
    app = make_app()
    release = threading.Event()
    runs: list[int] = []

    @app.consume("orders", retry=Retry(attempts=1), on_failure="skip")
    def handle(record: Record) -> None:
        runs.append(record.offset)
        if record.offset == 0:
            release.wait(60.0)

    async with TestClient(app) as client:
        for _ in range(2):
            await client.publish("orders", b"", key=b"k", partition=0)
        await until(lambda: runs)
        app.cancel_run("orders", 0, 0)
        await until(lambda: app.statistics().handlers[0].outliving or "cancel_run" in app.explain())
        assert runs == [0]
        release.set()
        await client.settle()

    assert runs == [0, 1]
