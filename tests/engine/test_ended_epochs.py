"""Ended epochs leave nothing behind."""

import asyncio
import gc

from aioshard import App, Record
from aioshard.core.flow import Usage
from aioshard.engine.buffer import Buffer
from aioshard.engine.counts import TopicCounts
from aioshard.engine.epoch import Delivery
from aioshard.engine.parking import ParkedPartition
from aioshard.engine.partition import ObservedPartition
from aioshard.ports import Message
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryTransport, run
from tests.engine.deliveries import add, make_buffer, make_epoch, make_feed


def test_a_run_that_outlives_its_epoch_retains_only_its_own_record() -> None:
    """Else each time that the group drops us the whole buffer stays in memory, uncounted (I6)."""
    app = App("memory", auto_offset_reset="earliest", max_buffered_records=1000, shutdown_timeout=2.0)
    release = asyncio.Event()

    @app.consume("orders")
    async def handle(record: Record) -> None:  # noqa: ARG001
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async def test() -> None:
        broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
        for _ in range(600):
            broker.publish("orders", b"", key=b"hot")
        async with app.started(lambda: InMemoryTransport(broker, "memory")):
            await asyncio.sleep(5.0)
            broker.group("memory").lose()
            await asyncio.sleep(5.0)
            statistics = app.statistics()
            assert statistics.handlers[0].outliving == ("orders/0/0",)
            assert "Record orders/0/0 was cancelled" in app.explain()
            gc.collect()
            alive = [
                one
                for one in gc.get_objects()
                if isinstance(one, Delivery) and one.epoch.topic_partition[0] == "orders"
            ]
            release.set()
            await asyncio.sleep(1.0)
            assert len(alive) == statistics.buffered_records + 1

    run(test())


def test_only_records_that_had_started_count_as_replayed() -> None:
    epoch, (complete, waiting, running) = make_epoch(["a", "b", "c"])
    (beyond,) = add(epoch, ["d"])
    for delivery in (complete, running):
        delivery.starts = 1
        epoch.highest_started = delivery.offset
    epoch.complete(complete)

    rerun = epoch.end()

    assert [rerun.counts(delivery.record) for delivery in (complete, waiting, running, beyond)] == [
        True,
        False,
        True,
        False,
    ]


def test_messages_of_an_ended_epoch_leave_the_buffer_once() -> None:
    """Its transaction ends after it, and must not make room that another partition uses."""
    buffer = make_buffer()
    epoch, _ = make_epoch([], buffer=buffer)
    other, _ = make_epoch([], partition=1, buffer=buffer)
    for one in (epoch, other):
        one.send_later([Message("out", b"x" * 100)])
    held, in_transaction = other.unsent_bytes, epoch.unsent_bytes
    epoch.take_unsent()
    epoch.send_later([Message("out", b"y" * 100)])
    assert (buffer.bytes, buffer.unsent) == (3 * held, 3 * held)

    epoch.end()

    assert (buffer.bytes, buffer.unsent, epoch.unsent, epoch.unsent_bytes) == (held, held, [], 0)
    epoch.sent(in_transaction)
    assert (buffer.bytes, buffer.unsent, epoch.unsent_bytes) == (held, held, 0)
    other.take_unsent()
    other.sent(held)
    assert (buffer.bytes, buffer.unsent, buffer.records) == (0, 0, 0)


def test_an_ended_epoch_accepts_no_returned_messages() -> None:
    epoch, _ = make_epoch([])
    epoch.send_later([Message("out", b"")])
    messages, _ = epoch.take_unsent()
    epoch.end()
    epoch.put_back(messages)
    assert epoch.unsent == []


def test_a_run_that_outlives_its_epoch_publishes_nothing() -> None:
    """Its record runs again in the next epoch, and publishes there."""
    buffer = make_buffer()
    epoch = ObservedPartition(
        TopicPartition("orders", 0), 1, 0, buffer=buffer, counts=TopicCounts(), feed=make_feed(), clock=lambda: 0.0
    )
    epoch.completed = None
    epoch.open()
    first, second = add(epoch, ["a", "b"])
    first.outgoing = second.outgoing = [Message("out", b"")]
    assert epoch.complete(first)
    assert len(epoch.unsent) == 1
    epoch.end()
    assert not epoch.complete(second)
    assert (epoch.unsent, buffer.bytes) == ([], 0)


def test_a_replay_of_an_ended_partition_publishes_nothing() -> None:
    buffer = make_buffer()
    source, _ = make_epoch([], buffer=buffer)
    replays = ParkedPartition(source, "parked", 1, buffer=buffer, identity=lambda _: None, exactly_once=True)
    replays.open()
    deliveries = add(replays, ["a", "b"])
    for delivery in deliveries:
        delivery.outgoing = [Message("out", b"")]
    assert replays.complete(deliveries[0])
    assert len(source.unsent) == 1
    replays.end()
    assert not replays.complete(deliveries[1])
    assert len(source.unsent) == 1


def test_messages_filling_a_quarter_of_the_buffer_start_a_transaction() -> None:
    asked: list[str] = []
    buffer = Buffer(Usage(10, 400), lambda: asked.append("room"))
    buffer.hurry = lambda: asked.append("hurry")
    buffer.hold(100)
    assert asked == []
    buffer.hold(1)
    assert asked == ["hurry"]
    buffer.let_go(100)
    assert (asked, buffer.bytes, buffer.unsent) == (["hurry", "room"], 1, 1)
    buffer.hold(99)
    assert asked == ["hurry", "room"], "what has ended does not count"
