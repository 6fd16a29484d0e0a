"""Ended epochs leave nothing behind."""

import asyncio
import gc

from aioshard import App, Record
from aioshard.core.finished_offsets import LAST_OFFSET
from aioshard.core.flow import Usage
from aioshard.core.publishing import Coverage
from aioshard.engine.buffer import Buffer
from aioshard.engine.counts import TopicCounts
from aioshard.engine.epoch import Delivery
from aioshard.engine.parked_partition import ParkedPartition
from aioshard.engine.partition import ObservedPartition
from aioshard.ports import Message
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryTransport, run
from tests.engine.deliveries import WokenClient, add, make_buffer, make_epoch, make_sharder, unsent

WHOLE = Coverage(0, "", (), LAST_OFFSET)
"""Covers everything."""


def test_a_run_that_outlives_its_epoch_retains_only_its_own_record() -> None:
    """Otherwise the whole buffer stays in memory, uncounted, each time that the group drops us (I6)."""
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
                found
                for found in gc.get_objects()
                if isinstance(found, Delivery) and found.epoch.topic_partition[0] == "orders"
            ]
            release.set()
            await asyncio.sleep(1.0)
            assert len(alive) == statistics.buffered_records + 1

    run(test())


def test_only_records_that_had_started_count_as_replayed() -> None:
    epoch, (complete, waiting, in_flight) = make_epoch(["a", "b", "c"])
    (beyond,) = add(epoch, ["d"])
    for delivery in (complete, in_flight):
        delivery.starts = 1
        epoch.highest_started = delivery.offset
    epoch.complete(complete)

    rerun = epoch.end()

    assert [rerun.counts(delivery.record) for delivery in (complete, waiting, in_flight, beyond)] == [
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
    for each in (epoch, other):
        each.send_later(unsent([Message("out", b"x" * 100)]))
    held, in_transaction = other.unsent_bytes, epoch.unsent_bytes
    epoch.take_unsent(WHOLE)
    epoch.send_later(unsent([Message("out", b"y" * 100)]))
    assert (buffer.bytes, buffer.unsent) == (3 * held, 3 * held)

    epoch.end()

    assert (buffer.bytes, buffer.unsent, epoch.unsent, epoch.unsent_bytes) == (held, held, [], 0)
    epoch.sent(in_transaction)
    assert (buffer.bytes, buffer.unsent, epoch.unsent_bytes) == (held, held, 0)
    other.take_unsent(WHOLE)
    other.sent(held)
    assert (buffer.bytes, buffer.unsent, buffer.records) == (0, 0, 0)


def test_an_ended_epoch_accepts_no_returned_messages() -> None:
    epoch, _ = make_epoch([])
    epoch.send_later(unsent([Message("out", b"")]))
    taken = epoch.take_unsent(WHOLE)
    epoch.end()
    epoch.put_back(taken)
    assert epoch.unsent == []


def test_a_run_that_outlives_its_epoch_publishes_nothing() -> None:
    """Its record runs again in the next epoch, and publishes there."""
    buffer = make_buffer()
    partition = ObservedPartition(
        TopicPartition("orders", 0),
        1,
        0,
        buffer=buffer,
        counts=TopicCounts(),
        sharder=make_sharder(),
        clock=lambda: 0.0,
        completed=None,
    )
    partition.open()
    first, second = add(partition, ["a", "b"])
    first.outgoing = second.outgoing = [Message("out", b"")]
    assert partition.complete(first)
    assert len(partition.unsent) == 1
    partition.end()
    assert not partition.complete(second)
    assert (partition.unsent, buffer.bytes) == ([], 0)


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


async def test_messages_filling_a_quarter_of_the_buffer_start_a_transaction() -> None:
    client = WokenClient()
    buffer = Buffer(Usage(10, 400), client)
    crowding = buffer.crowding()
    buffer.hold(100)
    assert not crowding.done()
    buffer.hold(1)
    assert crowding.done()
    assert client.wakes == 0
    buffer.let_go(100)
    assert (client.wakes, buffer.bytes, buffer.unsent) == (1, 1, 1)
    crowding = buffer.crowding()
    buffer.hold(99)
    assert not crowding.done(), "what has ended does not count"
