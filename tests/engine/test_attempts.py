"""Which runs count as attempts, and how failed ones are logged."""

import asyncio
import dataclasses
import logging

import pytest

from aioshard import App, Context, Record, Retry
from aioshard.testing import InMemoryBroker, InMemoryTransport, TestClient, run


def test_a_run_cancelled_by_a_rebalance_is_not_a_failed_attempt() -> None:
    """Else three deploys and one real failure would halt a record; and the run is counted as repeated (I12)."""
    app = App("attempts", auto_offset_reset="earliest", drain_timeout=0.5, shutdown_timeout=2.0)
    attempts: list[int] = []

    @app.consume("orders", retry=Retry(attempts=2, initial=0.1, jitter=0.0))
    async def handle(_: Record, context: Context) -> None:
        attempts.append(context.attempt)
        if len(attempts) <= 3:
            await asyncio.sleep(3600.0)
        if len(attempts) == 4:
            raise ValueError

    async def test() -> None:
        broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
        broker.publish("orders", b"", key=b"k")
        async with app.started(lambda: InMemoryTransport(broker, "attempts")):
            for _ in range(3):
                await asyncio.sleep(2.0)
                broker.group("attempts").rebalance()
            async with asyncio.timeout(30.0):
                await broker.until(lambda: broker.committed("attempts", "orders", 0) == 1)
            assert app.statistics().replayed == 3
            assert app.statistics().handlers[0].retried == 1

    run(test())

    assert attempts == [1, 1, 1, 1, 2]


def test_failures_with_the_same_cause_log_one_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """A backend that is down must not flood the log."""
    app = App("attempts", shutdown_timeout=2.0)
    down = True

    @app.consume("orders", retry=Retry(attempts=50, initial=0.2, maximum=0.2, jitter=0.0))
    async def handle(_: Record) -> None:
        if down:
            raise ConnectionError

    async def test() -> None:
        nonlocal down
        async with TestClient(app) as client:
            for number in range(100):
                await client.publish("orders", b"", key=b"k%d" % number)
            await asyncio.sleep(3.0)
            down = False
            await client.settle(timeout=30.0)

    with caplog.at_level(logging.WARNING, "aioshard"):
        run(test())

    (warning,) = (line for line in caplog.records if getattr(line, "event", None) == "retry")
    assert "ConnectionError" in warning.getMessage()
    assert warning.exc_info


def test_a_topic_that_two_patterns_match_is_refused() -> None:
    app = App("attempts", auto_offset_reset="earliest")

    @app.consume(pattern="order.*")
    async def one(record: Record) -> None: ...

    @app.consume(pattern=".*s")
    async def other(record: Record) -> None: ...

    async def test() -> None:
        broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
        broker.create_topic("orders")
        async with app.started(lambda: InMemoryTransport(broker, "attempts")):
            pass

    with pytest.raises(Exception, match="'orders' belongs to several handlers"):
        run(test())


async def test_a_context_has_all_its_fields_and_is_immutable() -> None:
    app = App("orders")
    contexts: list[Context] = []

    @app.consume("orders", timeout=5.0)
    async def handle(_record: Record, context: Context) -> None:
        contexts.append(context)

    async with TestClient(app) as client:
        await client.publish("orders", b"x", key=b"k")
        await client.settle()
    (context,) = contexts
    values = {field.name: getattr(context, field.name) for field in dataclasses.fields(context)}
    assert dataclasses.replace(context) == context
    assert (values["attempt"], values["record"].value, values["replay"], values["state"]) == (1, b"x", False, None)
    assert isinstance(values["deadline"], float)
    assert isinstance(values["revoked"], asyncio.Event)
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.attempt = 2  # type: ignore[misc]
