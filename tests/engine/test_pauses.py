"""Pauses: when they end, which records may still run, and the order afterwards."""

import pytest

from aioshard import App, DeadLetter, Record, Retry
from aioshard.engine.epoch import Gate
from aioshard.engine.outcomes import Block
from aioshard.engine.shards import Shards
from aioshard.errors import TransportError
from aioshard.testing import TestClient, run
from tests.engine.deliveries import add, make_epoch, start
from tests.engine.live_apps import until


def test_a_pause_ends_when_every_owner_has_resumed() -> None:
    epoch, _ = make_epoch(["k"])
    epoch.pause("the application", "the ledger is being moved")
    epoch.pause("a failure policy", "the ledger is down")

    assert not epoch.resume("the application")
    assert epoch.resume("a failure policy")
    assert epoch.gate is Gate.OPEN


def test_a_drain_of_a_paused_partition_waits_only_for_running_records() -> None:
    epoch, (first, _, other) = make_epoch(["a", "a", "b"])
    epoch.highest_started = other.offset
    epoch.pause("the application", "the ledger is being moved")

    epoch.close(running=[first, other])

    assert list(epoch.pending.values()) == [first, other], "the second cannot start, so nothing may wait for it"


def test_held_records_start_before_later_arrivals() -> None:
    """A purge moves the queue of a fixed shard to its front."""

    async def test() -> None:
        shards = Shards(bound=10)
        epoch, held = make_epoch(["k"])
        gone, _ = make_epoch([], partition=1)
        epoch.pause("the application", "the ledger is being moved")
        await shards.put(held)
        assert shards.take() is None
        await shards.put(add(epoch, ["k"]))
        shards.purge(gone)
        epoch.resume("the application")
        shards.reopen(epoch)
        first = start(shards.take())
        assert first is held[0]
        epoch.complete(first)
        assert start(shards.next_after(first)).offset == 1

    run(test())


def test_a_probe_that_fails_is_followed_by_another() -> None:
    async def test() -> None:
        shards = Shards()
        epoch, (bad, good) = make_epoch(["a", "b"])
        results: list[bool] = []
        epoch.pause("a failure policy", "the ledger is down")
        epoch.probed = results.append
        await shards.put([bad, good])
        assert shards.take() is None
        assert shards.probe(epoch) is start(shards.take()) is bad
        shards.block(bad, Block(halted=True, error="ValueError", since=0.0))
        assert results == [False]
        assert shards.probe(epoch) is start(shards.take()) is good
        epoch.complete(good)
        assert results == [False, True]

    run(test())


def test_a_pending_dead_letter_is_written_during_a_pause(caplog: pytest.LogCaptureFixture) -> None:
    app = App("pauses")

    @app.consume("orders", retry=Retry(attempts=1), on_failure=DeadLetter("d"))
    async def handle(record: Record) -> None:
        raise ValueError(record.offset)

    async def test() -> None:
        async with TestClient(app) as client:
            client.broker.fail_publishes("d", TransportError("no"))
            await client.publish("orders", b"", key=b"k", partition=0)
            await until(lambda: any(getattr(line, "event", "") == "recovery_failed" for line in caplog.records))
            app.pause("orders", 0)
            client.broker.fail_publishes("d", None)
            await until(lambda: client.committed("orders", 0) == 1)
            assert len(client.records("d")) == 1
            assert app.statistics().partitions[0].paused is not None

    run(test())


@pytest.mark.parametrize("why", ["", "the ledger is being moved"])
@pytest.mark.parametrize("whole_handler", [False, True], ids=["partition", "handler"])
async def test_a_pause_outlasts_a_rebalance_whatever_its_reason(why: str, whole_handler: bool) -> None:
    app = App("pauses")
    ran: list[int] = []

    @app.consume("orders")
    async def handle(record: Record) -> None:
        ran.append(record.partition)

    async with TestClient(app) as client:
        if whole_handler:
            app.pause_handler("handle", why=why)
        else:
            app.pause("orders", 0, why=why)
        await client.publish("orders", b"", partition=0)
        before = app.statistics().rebalances
        await client.revoke("orders", 0)
        await client.assign("orders", 0)
        await until(lambda: app.statistics().rebalances > before and len(app.assignment()) == 4)
        (row,) = (row for row in app.statistics().partitions if row.partition == 0)
        assert row.paused == (why or "no reason was given")
        (pause,) = (finding for finding in app.diagnose().partitions[0].findings if finding.kind == "paused")
        assert pause.sentence.endswith(row.paused)
        assert ran == []
        if whole_handler:
            app.resume_handler("handle")
        else:
            app.resume("orders", 0)
        await client.settle()

    assert ran == [0]
