"""A stuck partition is reported in the log without being asked (I11)."""

import asyncio
import logging
import re
from types import SimpleNamespace

import pytest

from aioshard import App, Record, Retry
from aioshard.engine.epoch import Gate
from aioshard.engine.partition import Partition
from aioshard.engine.trouble import Trouble
from aioshard.engine.watch import Watch
from aioshard.observe import Sample
from aioshard.testing import TestClient, run
from tests.engine.deliveries import add, make_partition

# In a running app


def test_a_hanging_record_is_logged_with_the_line_it_hangs_in(caplog: pytest.LogCaptureFixture) -> None:
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
    assert re.search(r"orders/0 has not advanced for 2[01]\.\d s", line)
    assert "the oldest is offset 1 (key b'k', attempt 1 of 5)" in line
    assert "test_watch.py:" in line
    assert "Stack, innermost last: " in line
    assert "in Event.wait" in line, "the whole stack"
    assert "orders/0 advances again" in caplog.text


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


def test_a_record_holding_up_almost_everything_is_named_early(caplog: pytest.LogCaptureFixture) -> None:
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

    held_up, advances = caplog.messages
    assert held_up.startswith("almost everything waits for one record: orders/0 has not advanced")
    assert "200 of the 201 offsets from there on wait for that record." in held_up
    assert "test_watch.py:" in held_up
    assert advances == "orders/0 advances again: record orders/0/0 no longer holds it up"


# The watch by itself


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_watch(*epochs: Partition, behind: int = 0) -> Watch:
    """A watch of these epochs, with `stuck_after` of 100 s."""
    feed = SimpleNamespace(shards_of=lambda _: SimpleNamespace(behind=lambda _: behind))
    clock = Clock()
    engine = SimpleNamespace(
        clock=clock,
        settings=SimpleNamespace(stuck_after=100.0, fetch_max_wait=0.1, commit_timeout=5.0, commit_interval=1.0),
        rebalance=SimpleNamespace(epochs=list(epochs), settled=asyncio.Event()),
        intake=SimpleNamespace(turns=0),
        handlers=(),
        lags=dict,
        committer=SimpleNamespace(turns=0, owns=False),
        trouble=Trouble(clock),
        standstill=None,
        handler_of=lambda _: SimpleNamespace(feed=feed),
        pauses={},
        workers=[],
    )
    sample = Sample(at=0.0, processed=0, lag=None, oldest_age=0.0, durations=())
    return Watch(engine, lambda *_: "described", lambda _: sample, watch_loop=False)  # type: ignore[arg-type]


def reports(watch: Watch, caplog: pytest.LogCaptureFixture, checks: int = 3, every: float = 25.0) -> list[str]:
    """Return the log after so many checks, without the descriptive part."""
    caplog.clear()
    for _ in range(checks):
        look(watch, every)
    return [text.partition(":")[0] for text in caplog.messages]


def look(watch: Watch, after: float) -> None:
    clock = watch.engine.clock
    assert isinstance(clock, Clock)
    clock.now += after
    watch.engine.intake.turns += 1
    watch.check()


@pytest.mark.parametrize(("behind", "told"), [(89, 0), (91, 1)])
def test_records_in_the_shard_of_the_oldest_one_count_as_held_up(
    caplog: pytest.LogCaptureFixture, behind: int, told: int
) -> None:
    epoch, _ = make_partition(["k"] * 100)

    assert reports(make_watch(epoch, behind=behind), caplog) == ["almost everything waits for one record"] * told


@pytest.mark.parametrize(("done", "told"), [(179, 0), (181, 1)])
def test_almost_everything_means_more_than_nine_tenths(caplog: pytest.LogCaptureFixture, done: int, told: int) -> None:
    epoch, deliveries = make_partition(range(200))
    for delivery in deliveries[-done:]:
        epoch.complete(delivery)

    assert len(reports(make_watch(epoch), caplog)) == told


def test_a_small_window_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    epoch, deliveries = make_partition(range(99))
    for delivery in deliveries[1:]:
        epoch.complete(delivery)

    assert reports(make_watch(epoch), caplog) == []


def test_a_paused_partition_is_not_held_up_by_a_record(caplog: pytest.LogCaptureFixture) -> None:
    epoch, deliveries = make_partition(range(200))
    for delivery in deliveries[1:]:
        epoch.complete(delivery)
    epoch.pause("application", "asked for")
    assert epoch.gate is Gate.PAUSED

    assert reports(make_watch(epoch), caplog) == []


def test_a_changing_oldest_record_holds_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    epoch, deliveries = make_partition(range(400))
    for delivery in deliveries[20:]:
        epoch.complete(delivery)
    watch = make_watch(epoch)

    for delivery in deliveries[:20]:
        assert reports(watch, caplog, checks=2, every=10.0) == []
        epoch.complete(delivery)


def test_an_episode_is_logged_once_at_its_start_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    epoch, deliveries = make_partition(range(200))
    for delivery in deliveries[2:]:
        epoch.complete(delivery)
    watch = make_watch(epoch)

    assert reports(watch, caplog, checks=10, every=10.0) == ["almost everything waits for one record"]
    assert reports(watch, caplog, checks=10, every=10.0) == ["stuck"]
    epoch.complete(deliveries[0])
    assert reports(watch, caplog, checks=1) == ["orders/0 advances again"], (
        "the next one is as old, and may end at once"
    )
    assert reports(watch, caplog, checks=1) == ["stuck"]
    epoch.complete(deliveries[1])
    assert reports(watch, caplog, checks=10) == ["orders/0 advances again"]
    add(epoch, range(5), arrived=watch.engine.clock())
    assert reports(watch, caplog, checks=4) == []


def test_an_ended_epoch_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    epoch, _ = make_partition(["k"])
    watch = make_watch(epoch)
    assert reports(watch, caplog, checks=10) == ["stuck"]

    watch.engine.rebalance.epochs.clear()

    assert reports(watch, caplog) == []


# Since when


def test_a_condition_lasts_since_it_was_first_seen() -> None:
    watch = make_watch()
    pauses = watch.engine.pauses

    def lasts(name: str, why: str) -> float | None:
        return watch.lasts(("application", name), why)

    pauses["a"] = "1"
    look(watch, 10.0)
    assert (lasts("a", "1"), lasts("a", "2"), lasts("b", "1")) == (0.0, None, None)
    pauses["b"] = "x"
    look(watch, 1.0)
    assert (lasts("a", "1"), lasts("b", "x")) == (1.0, 0.0)
    pauses["a"] = "2"
    look(watch, 1.0)
    assert (lasts("a", "1"), lasts("a", "2"), lasts("b", "x")) == (None, 0.0, 1.0)
    del pauses["b"]
    look(watch, 1.0)
    pauses["b"] = "x"
    look(watch, 1.0)
    assert lasts("b", "x") == 0.0, "it was not so in between"
