"""A stuck partition is reported in the log without being asked (I11)."""

import asyncio
import logging
import re
from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import pytest

from aioshard import App, Record, Retry
from aioshard.engine.epoch import Gate
from aioshard.engine.monitor import Monitor
from aioshard.engine.partition import Partition
from aioshard.engine.trouble import Trouble
from aioshard.engine.watch import Watch
from aioshard.observe import Sample
from aioshard.testing import TestClient, run
from aioshard.web.health import findings
from tests.engine.deliveries import add, make_partition, no_handlers

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


# The monitor by itself


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Described(Monitor):
    """Describes no partition in detail, and fails where a test wants it to."""

    undescribed: Partition | None = None
    samples = True

    def _describe(self, partition: Partition) -> str:
        if partition is self.undescribed:
            raise RuntimeError("a method of the application")
        return "described"

    def _sample(self) -> Sample:
        if not self.samples:
            raise RuntimeError("a method of the application")
        return Sample(at=0.0, processed=0, lag=None, oldest_age=0.0, durations=())


def make_monitor(*partitions: Partition, behind: int = 0) -> Described:
    """A monitor of these partitions, with `stuck_after` of 100 s."""
    sharder = SimpleNamespace(shards_of=lambda _: SimpleNamespace(behind=lambda _: behind))
    handlers: Any = no_handlers()
    handlers.of = lambda _: SimpleNamespace(sharder=sharder)
    clock = Clock()
    engine = SimpleNamespace(
        clock=clock,
        settings=SimpleNamespace(stuck_after=100.0, fetch_max_wait=0.1, commit_timeout=5.0, commit_interval=1.0),
        rebalance=SimpleNamespace(partitions=list(partitions), opened=asyncio.Event()),
        intake=SimpleNamespace(turns=0),
        handlers=handlers,
        lags=dict,
        committer=SimpleNamespace(turns=0, owns=False),
        trouble=Trouble(clock),
        standstill=None,
        client=SimpleNamespace(transport=object()),
        pauses={},
    )
    return Described(Watch(engine, watch_loop=False))  # type: ignore[arg-type]


def reports(monitor: Described, caplog: pytest.LogCaptureFixture, checks: int = 3, every: float = 25.0) -> list[str]:
    """Return the log after the checks, without the descriptive part."""
    caplog.clear()
    for _ in range(checks):
        look(monitor, every)
    return [text.partition(":")[0] for text in caplog.messages]


def look(monitor: Described, after: float) -> None:
    clock = monitor.watch.engine.clock
    assert isinstance(clock, Clock)
    clock.now += after
    monitor.watch.engine.intake.turns += 1
    monitor.check()


@pytest.mark.parametrize(("behind", "warnings"), [(89, 0), (91, 1)])
def test_records_in_the_shard_of_the_oldest_one_count_as_held_up(
    caplog: pytest.LogCaptureFixture, behind: int, warnings: int
) -> None:
    partition, _ = make_partition(["k"] * 100)

    assert (
        reports(make_monitor(partition, behind=behind), caplog) == ["almost everything waits for one record"] * warnings
    )


@pytest.mark.parametrize(("done", "warnings"), [(179, 0), (181, 1)])
def test_almost_everything_means_more_than_nine_tenths(
    caplog: pytest.LogCaptureFixture, done: int, warnings: int
) -> None:
    partition, deliveries = make_partition(range(200))
    for delivery in deliveries[-done:]:
        partition.complete(delivery)

    assert len(reports(make_monitor(partition), caplog)) == warnings


def test_a_small_window_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    partition, deliveries = make_partition(range(99))
    for delivery in deliveries[1:]:
        partition.complete(delivery)

    assert reports(make_monitor(partition), caplog) == []


def test_a_paused_partition_is_not_held_up_by_a_record(caplog: pytest.LogCaptureFixture) -> None:
    partition, deliveries = make_partition(range(200))
    for delivery in deliveries[1:]:
        partition.complete(delivery)
    partition.pause("application", "asked for")
    assert partition.gate is Gate.PAUSED

    assert reports(make_monitor(partition), caplog) == []


def test_a_changing_oldest_record_holds_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    partition, deliveries = make_partition(range(400))
    for delivery in deliveries[20:]:
        partition.complete(delivery)
    monitor = make_monitor(partition)

    for delivery in deliveries[:20]:
        assert reports(monitor, caplog, checks=2, every=10.0) == []
        partition.complete(delivery)


def test_an_episode_is_logged_once_at_its_start_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    partition, deliveries = make_partition(range(200))
    for delivery in deliveries[2:]:
        partition.complete(delivery)
    monitor = make_monitor(partition)

    assert reports(monitor, caplog, checks=10, every=10.0) == ["almost everything waits for one record"]
    assert reports(monitor, caplog, checks=10, every=10.0) == ["stuck"]
    partition.complete(deliveries[0])
    assert reports(monitor, caplog, checks=1) == ["orders/0 advances again"], (
        "the next one is as old, and may end immediately"
    )
    assert reports(monitor, caplog, checks=1) == ["stuck"]
    partition.complete(deliveries[1])
    assert reports(monitor, caplog, checks=10) == ["orders/0 advances again"]
    add(partition, range(5), arrived=monitor.watch.engine.clock())
    assert reports(monitor, caplog, checks=4) == []


def test_an_ended_epoch_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    partition, _ = make_partition(["k"])
    monitor = make_monitor(partition)
    assert reports(monitor, caplog, checks=10) == ["stuck"]

    partitions: Any = monitor.watch.engine.rebalance.partitions
    partitions.clear()

    assert reports(monitor, caplog) == []


# Observation never ends the app


def test_a_partition_that_cannot_be_described_is_logged_once_and_the_others_are_watched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, _ = make_partition(["k"])
    fine, _ = make_partition(["k"], partition=1)

    monitor = make_monitor(broken, fine)
    monitor.undescribed = broken

    assert reports(monitor, caplog, checks=10) == [
        "a partition cannot be observed now, and the app continues; this is logged once",
        "stuck",
    ]


def test_a_history_that_cannot_be_sampled_leaves_the_other_checks_alone(caplog: pytest.LogCaptureFixture) -> None:
    partition, _ = make_partition(["k"])

    monitor = make_monitor(partition)
    monitor.samples = False

    assert sorted(reports(monitor, caplog, checks=10)) == [
        "stuck",
        "the history cannot be observed now, and the app continues; this is logged once",
    ]
    assert not monitor.history


class FlakyKey:
    """A shard key whose methods raise once `raises` is set."""

    raises = False

    def __hash__(self) -> int:
        if self.raises:
            raise RuntimeError("hash")
        return 7

    def __eq__(self, other: object) -> bool:
        if self.raises:
            raise RuntimeError("eq")
        return self is other

    def __repr__(self) -> str:
        raise RuntimeError("repr")


class Text(str):
    """Text with another `repr`."""

    __slots__ = ()

    def __repr__(self) -> str:
        raise RuntimeError("repr")


SHARD_KEYS: dict[str, Hashable] = {
    "huge": 10**5_000,
    "huge in a tuple": ("tenant", 10**5_000),
    "surrogate": "\udce9",
    "own text": Text("a"),
    "flaky": FlakyKey(),
}


@pytest.mark.parametrize("show_keys", [False, True])
@pytest.mark.parametrize("key", SHARD_KEYS.values(), ids=SHARD_KEYS)
def test_a_shard_key_that_cannot_be_shown_breaks_no_observation(
    key: Hashable, show_keys: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = App("watched", stuck_after=4.0, show_keys=show_keys, drain_timeout=1.0, shutdown_timeout=2.0)
    hangs = asyncio.Event()

    @app.consume("orders", shard_by=lambda _: key)
    async def handle(record: Record) -> None:
        if record.value == b"hang":
            await hangs.wait()

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", "hang", partition=0)
            await client.publish("orders", "waits", partition=0)
            await asyncio.sleep(1.0)
            with monkeypatch.context() as broken:
                broken.setattr(FlakyKey, "raises", True)
                await asyncio.sleep(20.0)
                statistics, diagnosis, workload = app.statistics(), app.diagnose(), app.workload()
                assert findings(statistics, diagnosis)
                assert "orders/0 has not advanced" in app.explain()
            assert statistics.state == "running"
            assert [(p.verdict, p.head.offset) for p in diagnosis.partitions if p.head is not None] == [("stuck", 0)]
            assert workload is not None
            assert workload.busy == 1
            hangs.set()
            await client.settle()
            assert app.statistics().handlers[0].processed == 2

    run(test())

    assert "stuck: orders/0 has not advanced" in caplog.text


# Since when


def test_a_condition_lasts_since_it_was_first_seen() -> None:
    monitor = make_monitor()
    pauses: Any = monitor.watch.engine.pauses

    def lasts(name: str, why: str) -> float | None:
        return monitor.watch.lasts(("application", name), why)

    pauses["a"] = "1"
    look(monitor, 10.0)
    assert (lasts("a", "1"), lasts("a", "2"), lasts("b", "1")) == (0.0, None, None)
    pauses["b"] = "x"
    look(monitor, 1.0)
    assert (lasts("a", "1"), lasts("b", "x")) == (1.0, 0.0)
    pauses["a"] = "2"
    look(monitor, 1.0)
    assert (lasts("a", "1"), lasts("a", "2"), lasts("b", "x")) == (None, 0.0, 1.0)
    del pauses["b"]
    look(monitor, 1.0)
    pauses["b"] = "x"
    look(monitor, 1.0)
    assert lasts("b", "x") == 0.0, "it was not so in between"
