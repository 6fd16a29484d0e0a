"""Records enter the bounded buffer: allowances, waiters for room, and freed bytes."""

import asyncio

from aioshard.core.flow import Usage, minimum
from aioshard.engine.buffer import Buffer
from aioshard.engine.outcomes import Block
from aioshard.ports import NOTHING, FetchedBatch, Oversized
from aioshard.records import Record
from aioshard.testing import run
from tests.engine.deliveries import WokenClient, add, make_buffer, make_intake, make_partition
from tests.engine.live_apps import until

HALTED = Block(halted=True, error="ValueError", since=0.0)


def test_nothing_is_fetched_for_a_partition_whose_gate_is_closed() -> None:
    buffer = make_buffer()
    partition, _ = make_partition([], buffer=buffer)
    intake = make_intake(partition, buffer=buffer)
    assert intake.allowance(partition.topic_partition).records
    partition.close()
    assert intake.allowance(partition.topic_partition) == NOTHING


def test_evicted_records_are_refetched_up_to_the_minimum_of_a_stuck_partition() -> None:
    buffer = make_buffer()
    partition, deliveries = make_partition(["a"] * 5, buffer=buffer)
    intake = make_intake(partition, buffer=buffer)
    partition.evict(deliveries[3:])
    assert intake.allowance(partition.topic_partition) == NOTHING, "the client has not seeked to them"
    partition.fetching_again = True
    assert intake.allowance(partition.topic_partition).records
    deliveries[0].block = HALTED
    assert intake.allowance(partition.topic_partition).records == minimum(buffer.bounds).records - 3


def test_a_record_larger_than_the_buffer_does_not_wait_for_stuck_records() -> None:
    """Otherwise it would wait forever."""
    buffer = make_buffer(size=1_000)
    stuck, deliveries = make_partition(["a"], buffer=buffer)
    partition, _ = make_partition([], partition=1, buffer=buffer)
    intake = make_intake(stuck, partition, buffer=buffer)
    intake.keep_room_for(Oversized(partition.topic_partition, 5_000), partition)
    assert intake.allowance(partition.topic_partition) == NOTHING, "the buffered record may soon be complete"
    deliveries[0].block = HALTED
    assert intake.allowance(partition.topic_partition).alone


def test_a_bound_of_one_admits_one_record() -> None:
    buffer = make_buffer(records=1)
    partition, _ = make_partition([], buffer=buffer)
    assert make_intake(partition, buffer=buffer).allowance(partition.topic_partition).records == 1


def test_waiters_for_room_wake_when_records_complete_or_an_epoch_ends() -> None:
    client = WokenClient()
    buffer = Buffer(Usage(100, 10_000), client)
    first, deliveries = make_partition([None] * 20, buffer=buffer)
    buffer.arm()
    first.complete(deliveries[0])
    assert client.wakes == 0
    for delivery in deliveries[1:3]:
        first.complete(delivery)
    assert client.wakes == 1, "a tenth of the buffered records is complete"
    first.end()
    assert client.wakes == 2


def test_completed_records_free_their_bytes() -> None:
    buffer = make_buffer()
    partition, _ = make_partition([], buffer=buffer)
    deliveries = add(partition, [None] * 3, size=7)
    assert (buffer.records, buffer.bytes, partition.buffered_bytes) == (3, 21, 21)
    for left, delivery in zip((2, 1, 0), deliveries, strict=True):
        partition.complete(delivery)
        assert (buffer.records, buffer.bytes, partition.buffered_bytes) == (left, 7 * left, 7 * left)


def test_records_of_a_closed_partition_are_not_admitted() -> None:
    buffer = make_buffer()
    closed, _ = make_partition([], buffer=buffer)
    partition, _ = make_partition([], partition=1, buffer=buffer)
    closed.close()

    class Client:
        """Returns a record of each partition, once."""

        polled = 0

        async def poll(self, _allowance: object, _timeout: float) -> list[FetchedBatch]:
            self.polled += 1
            if self.polled > 1:
                await asyncio.Event().wait()
            names = closed.topic_partition, partition.topic_partition
            return [FetchedBatch(name, [Record(*name, 0, None, b"", (), 0.0)], [1], 1) for name in names]

    async def test() -> None:
        client = Client()
        intake = make_intake(closed, partition, buffer=buffer)
        pump = asyncio.create_task(intake.run(client), name="pump")  # type: ignore[arg-type]
        await until(lambda: client.polled == 2)
        pump.cancel()
        await asyncio.wait([pump])

    run(test())
    assert (len(closed.tracker), closed.tracker.position) == (0, 0)
    assert (len(partition.tracker), partition.tracker.position, buffer.records) == (1, 1, 1)


def test_a_later_wake_request_does_not_delay_an_earlier_one() -> None:
    client = WokenClient()
    buffer = Buffer(Usage(1_000, 1_000_000), client)
    buffer.take_in(10, 100)
    buffer.arm(2)
    buffer.arm(100)

    buffer.release(10)
    assert client.wakes == 0
    for _ in range(2):
        buffer.release(10)
    assert client.wakes == 1
