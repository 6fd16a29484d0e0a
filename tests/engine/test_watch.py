"""A partition that stands still says so in the log, by itself (I11)."""

import asyncio
import logging

import pytest

from aioshard import App, Record, Retry
from aioshard.testing import TestClient, run


def test_a_record_that_hangs_is_named_in_the_log_with_the_line_it_hangs_in(caplog: pytest.LogCaptureFixture) -> None:
    app = App("watched", stuck_after=20.0, show_keys=True, drain_timeout=1.0, shutdown_timeout=2.0)
    released = asyncio.Event()

    @app.consume("orders")
    async def handle(record: Record) -> None:
        if record.value == b"hang":
            await released.wait()

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", "fine", key="other", partition=0)
            await client.publish("orders", "hang", key="k", partition=0)
            await asyncio.sleep(19.0)
            assert "does not advance" not in caplog.text
            await asyncio.sleep(10.0)
            assert caplog.text.count("does not advance") == 1, "once, and not again at each check"
            released.set()
            await asyncio.sleep(10.0)

    with caplog.at_level(logging.WARNING, "aioshard"):
        run(test())

    line = next(text for text in caplog.messages if "does not advance" in text)
    assert "orders/0" in line
    assert "offset 1 (key b'k'" in line
    assert "test_watch.py:" in line
    assert "orders/0 goes on" in caplog.text


def test_a_halted_record_is_named_at_the_next_check(caplog: pytest.LogCaptureFixture) -> None:
    app = App("watched", stuck_after=20.0, shutdown_timeout=2.0)

    @app.consume("orders", retry=Retry(attempts=1))
    async def handle(_: Record) -> None:
        message = "no such customer"
        raise LookupError(message)

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", "fails", key="k", partition=2)
            await asyncio.sleep(6.0)
            statistics = app.statistics()
            assert statistics.handlers[0].halted == 1
            assert "halted" in app.explain()

    with caplog.at_level(logging.WARNING, "aioshard"):
        run(test())

    line = next(text for text in caplog.messages if "does not advance" in text)
    assert "orders/2" in line
    assert "LookupError: no such customer" in line
    assert "hidden" in line, "keys may be personal data"
