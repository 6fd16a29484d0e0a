"""A partition that stands still says so in the log, by itself (I11)."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from aioshard import App, Record, Retry
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.watch import SinceWatch, StuckWatch
from aioshard.testing import TestClient, run
from tests.engine.deliveries import add, make_epoch

# In a running app


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
            assert "stuck" not in caplog.text
            await asyncio.sleep(10.0)
            assert caplog.text.count("stuck: ") == 1, "once, and not again at each check"
            released.set()
            await asyncio.sleep(10.0)

    with caplog.at_level(logging.WARNING, "aioshard"):
        run(test())

    line = next(text for text in caplog.messages if text.startswith("stuck: "))
    assert "orders/0 has not advanced for 25.0 s" in line
    assert "the oldest is offset 1 (key b'k', attempt 1 of 5)" in line
    assert "test_watch.py:" in line
    assert "Stack, innermost last: " in line
    assert "in Event.wait" in line, "the whole stack"
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

    line = next(text for text in caplog.messages if text.startswith("stuck: "))
    assert "orders/2" in line
    assert "LookupError: no such customer" in line
    assert "b'k'" not in line, "keys may be personal data"
    assert "(key #" in line


def test_what_makes_almost_everything_wait_is_named_before_it_is_stuck(caplog: pytest.LogCaptureFixture) -> None:
    app = App("watched", stuck_after=60.0, show_keys=True, drain_timeout=1.0, shutdown_timeout=2.0)
    released = asyncio.Event()

    @app.consume("orders")
    async def handle(record: Record) -> None:
        if record.value == b"hang":
            await released.wait()

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", "hang", key="k", partition=0)
            await client.publish("orders", "hang", key="k", partition=1)
            for number in range(200):
                await client.publish("orders", "fine", key=f"k{number}", partition=0)
            for number in range(50):
                await client.publish("orders", "fine", key=f"k{number}", partition=1)
            await asyncio.sleep(29.0)
            assert not caplog.messages, "what is slow for a moment is not worth a line"
            await asyncio.sleep(20.0)
            released.set()
            await asyncio.sleep(20.0)

    with caplog.at_level(logging.WARNING, "aioshard"):
        run(test())

    held_up, goes_on = caplog.messages
    assert held_up.startswith("almost everything waits for one record: orders/0 has not advanced")
    assert "200 of the 201 offsets from there on wait for that record." in held_up
    assert "test_watch.py:" in held_up
    assert goes_on == "orders/0 goes on: record orders/0/0 is not in the way any more"


# The watch by itself


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_watch(
    epoch: Epoch, clock: Clock, behind: Callable[[Delivery], int] = lambda _: 0, stuck_after: float = 100.0
) -> StuckWatch:
    return StuckWatch(lambda: [epoch], lambda _: "described", behind, stuck_after, clock)


def reports(watch: StuckWatch, caplog: pytest.LogCaptureFixture, checks: int = 3) -> list[str]:
    """What the log has after so many checks, without the part that describes."""
    caplog.clear()
    for _ in range(checks):
        watch.check()
    return [text.partition(":")[0] for text in caplog.messages]


def test_what_waits_in_the_shard_of_the_oldest_record_counts_as_held_up(caplog: pytest.LogCaptureFixture) -> None:
    epoch, _ = make_epoch(["k"] * 100)

    assert reports(make_watch(epoch, Clock(), lambda _: 89), caplog) == []
    assert reports(make_watch(epoch, Clock(), lambda _: 91), caplog) == ["almost everything waits for one record"]


@pytest.mark.parametrize(("done", "told"), [(179, 0), (181, 1)])
def test_more_than_nine_tenths_are_almost_everything(caplog: pytest.LogCaptureFixture, done: int, told: int) -> None:
    epoch, deliveries = make_epoch(range(200))
    for delivery in deliveries[-done:]:
        epoch.complete(delivery)

    assert len(reports(make_watch(epoch, Clock()), caplog)) == told


def test_a_small_window_is_not_worth_a_line(caplog: pytest.LogCaptureFixture) -> None:
    epoch, deliveries = make_epoch(range(99))
    for delivery in deliveries[1:]:
        epoch.complete(delivery)

    assert reports(make_watch(epoch, Clock()), caplog) == []


def test_a_partition_that_is_paused_waits_for_no_record(caplog: pytest.LogCaptureFixture) -> None:
    epoch, deliveries = make_epoch(range(200))
    for delivery in deliveries[1:]:
        epoch.complete(delivery)
    epoch.pause("application", "asked for")
    assert epoch.gate is Gate.PAUSED

    assert reports(make_watch(epoch, Clock()), caplog) == []


def test_an_oldest_record_that_changes_holds_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    epoch, deliveries = make_epoch(range(400))
    for delivery in deliveries[20:]:
        epoch.complete(delivery)
    watch = make_watch(epoch, Clock())

    for delivery in deliveries[:20]:
        assert reports(watch, caplog, checks=2) == []
        epoch.complete(delivery)


def test_an_episode_has_one_line_when_it_begins_and_one_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    epoch, deliveries = make_epoch(range(200))
    for delivery in deliveries[2:]:
        epoch.complete(delivery)
    watch = make_watch(epoch, clock)

    assert reports(watch, caplog, checks=10) == ["almost everything waits for one record"]
    clock.now = 101.0
    assert reports(watch, caplog, checks=10) == ["stuck"]
    epoch.complete(deliveries[0])
    assert reports(watch, caplog, checks=1) == ["orders/0 goes on"], "the next one is as old, and may end at once"
    assert reports(watch, caplog, checks=1) == ["stuck"]
    epoch.complete(deliveries[1])
    assert reports(watch, caplog, checks=10) == ["orders/0 goes on"]
    add(epoch, range(5), arrived=101.0)
    assert reports(watch, caplog, checks=10) == []


def test_an_epoch_that_ended_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    epoch, _ = make_epoch(["k"])
    epochs = [epoch]
    watch = StuckWatch(lambda: epochs, lambda _: "described", lambda _: 0, 1.0, clock)
    clock.now = 2.0
    assert reports(watch, caplog) == ["stuck"]

    epochs.clear()

    assert reports(watch, caplog) == []


# Since when


def test_since_when_something_is_so() -> None:
    clock, facts = Clock(), dict[str, object]()
    watch = SinceWatch(facts.items, clock)

    def at(now: float) -> None:
        clock.now = now
        watch.check()

    assert watch.looked_at is None
    facts["a"] = 1
    at(10.0)
    assert watch.of("a", 1) == 10.0
    assert watch.of("a", 2) is None
    assert watch.of("b", 1) is None
    facts["b"] = "x"
    at(11.0)
    assert (watch.of("a", 1), watch.of("b", "x")) == (10.0, 11.0)
    facts["a"] = 2
    at(12.0)
    assert (watch.of("a", 1), watch.of("a", 2), watch.of("b", "x")) == (None, 12.0, 11.0)
    del facts["b"]
    at(13.0)
    facts["b"] = "x"
    at(14.0)
    assert watch.of("b", "x") == 14.0, "it was not so in between"
    assert watch.looked_at == 14.0
