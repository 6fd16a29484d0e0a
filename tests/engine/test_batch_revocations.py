"""Batches of partitions that are revoked, paused or lost: nothing waits for a batch to fill or runs twice."""

import asyncio
from collections.abc import Sequence

import pytest

from aioshard import App, Batch, BatchContext, Record, Retry
from aioshard.core.sharding import ShardKey
from aioshard.testing import TestClient, run

DRAIN = 6.0
LINGER = 3.0


class Member:
    """An app whose batches linger for long, and whose handler takes *seconds*."""

    def __init__(self, seconds: float = 0.0, **options: object) -> None:
        self.app = App("handed over", drain_timeout=DRAIN, shutdown_timeout=20.0)
        self.runs: list[tuple[int, int]] = []
        self.batches: list[list[tuple[int, int]]] = []
        self.revoked: list[bool] = []
        self.seconds = seconds

        @self.app.consume("clicks", **({"batch": Batch(max_records=100, linger=LINGER)} | options))  # type: ignore[arg-type]
        async def on_clicks(records: list[Record], context: BatchContext) -> None:
            self.batches.append([(record.partition, record.offset) for record in records])
            self.runs += self.batches[-1]
            try:
                await asyncio.sleep(self.seconds)
            finally:
                self.revoked.append(context.revoked.is_set())


async def publish(client: TestClient, keys: Sequence[str], partition: int = 0) -> None:
    for key in keys:
        await client.publish("clicks", "", key=key, partition=partition)


def store_no_texts(app: App) -> None:
    """As with brokers that refuse them: a commit cannot list what has finished beyond it."""
    app.running_engine().committer.metadata_limit = 0


async def seconds_of_a_revoke(client: TestClient, partition: int = 0) -> float:
    clock = asyncio.get_running_loop().time
    began = clock()
    await client.revoke("clicks", partition)
    return clock() - began


def test_a_filling_batch_does_not_delay_a_revoke_and_runs_once() -> None:
    member = Member()

    async def test() -> None:
        async with TestClient(member.app) as client:
            await publish(client, "abc")
            await publish(client, "d", partition=1)
            await asyncio.sleep(1.0)
            assert await seconds_of_a_revoke(client) < 0.5
            assert member.runs == []
            await asyncio.sleep(LINGER)
            assert member.runs == [(1, 0)]
            await client.assign("clicks", 0)
            await client.settle(30.0)

    run(test())

    assert sorted(member.runs) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert member.app.statistics().replayed == 0


def test_a_drain_does_not_wait_for_records_behind_a_busy_shard() -> None:
    """One after it in its partition has run, and the commit says so: the next owner runs only what is left."""
    member = Member(seconds=1.0, batch=Batch(max_records=2, linger=LINGER))

    async def test() -> None:
        async with TestClient(member.app) as client:
            await publish(client, ["k", "x"])  # runs, for a second
            await asyncio.sleep(0.5)
            await publish(client, ["k", "y", "z"])  # the first waits for its key, the others run
            await asyncio.sleep(0.1)
            assert await seconds_of_a_revoke(client) == pytest.approx(0.9, abs=0.05)
            assert member.batches == [[(0, 0), (0, 1)], [(0, 3), (0, 4)]]
            assert client.committed("clicks", 0) == 2
            await client.assign("clicks", 0)
            await client.settle(30.0)

    run(test())

    assert member.batches[2:] == [[(0, 2)]]
    assert member.app.statistics().replayed == 0


def test_a_drain_starts_a_filling_batch_that_it_needs() -> None:
    """Its shard was busy with another record, and one after it in its partition has run."""
    member = Member(seconds=1.0, batch=Batch(max_records=2, linger=LINGER))

    async def test() -> None:
        async with TestClient(member.app) as client:
            store_no_texts(member.app)
            await publish(client, ["k", "x"])  # runs, for a second
            await asyncio.sleep(0.5)
            await publish(client, ["k", "y", "z"])  # the first waits for its key, the others run
            await asyncio.sleep(0.6)
            assert member.batches == [[(0, 0), (0, 1)], [(0, 3), (0, 4)]]
            assert await seconds_of_a_revoke(client) < 1.5
            assert member.runs[-1] == (0, 2)
            assert client.committed("clicks", 0) == 5
            await client.assign("clicks", 0)
            await client.settle(30.0)

    run(test())

    assert len(member.runs) == 5


def test_a_drain_starts_a_filling_batch_behind_another_partitions_record() -> None:
    """The shard is that of a customer, whose records are in two partitions."""

    def by_key(record: Record) -> ShardKey:
        return record.key

    member = Member(seconds=1.0, shard_by=by_key, batch=Batch(max_records=3, linger=LINGER))

    async def test() -> None:
        async with TestClient(member.app) as client:
            store_no_texts(member.app)
            await publish(client, ["k", "x", "y"])  # runs, for a second
            await asyncio.sleep(0.5)
            await publish(client, "k", partition=1)
            await asyncio.sleep(0.1)
            await publish(client, ["k", "p", "q", "r"])
            await asyncio.sleep(0.6)
            assert member.batches[1:] == [[(0, 4), (0, 5), (0, 6)]]
            assert await seconds_of_a_revoke(client) < 2.1
            assert member.batches[2:] == [[(0, 3)]]
            await client.assign("clicks", 0)
            await client.settle(30.0)

    run(test())

    assert len(member.runs) == 8


def test_a_drain_waits_for_a_running_batch_and_reports_it() -> None:
    member = Member(seconds=4.0, batch=Batch(max_records=3, linger=0.0))

    async def test() -> None:
        async with TestClient(member.app) as client:
            await publish(client, "ab")
            await publish(client, "c", partition=1)
            await asyncio.sleep(1.0)
            assert 2.5 < await seconds_of_a_revoke(client, partition=1) < 3.5
            assert client.committed("clicks", 1) == 1
            await client.assign("clicks", 1)
            await client.settle(30.0)

    run(test())

    assert sorted(member.runs) == [(0, 0), (0, 1), (1, 0)]
    assert True in member.revoked


def test_a_batch_that_outlasts_the_drain_is_cancelled_and_reruns_in_order() -> None:
    member = Member(seconds=50.0, batch=Batch(max_records=4, linger=0.0))

    async def test() -> None:
        async with TestClient(member.app) as client:
            await publish(client, "aabb")
            await asyncio.sleep(1.0)
            assert DRAIN - 0.1 < await seconds_of_a_revoke(client) < DRAIN + 1.0
            member.seconds = 0.1
            await client.assign("clicks", 0)
            await client.settle(30.0)

    run(test())

    assert member.runs == [(0, 0), (0, 1), (0, 2), (0, 3)] * 2
    assert member.app.statistics().replayed == 4


def test_a_lost_partition_ends_its_batch_and_the_other_records_rerun() -> None:
    member = Member(seconds=50.0, batch=Batch(max_records=4, linger=0.0))

    async def test() -> None:
        async with TestClient(member.app) as client:
            await publish(client, "ab")
            await publish(client, "c", partition=1)
            await asyncio.sleep(1.0)
            member.seconds = 0.1
            client.group.lose()
            await client.settle(60.0)

    run(test())

    assert sorted(set(member.runs)) == [(0, 0), (0, 1), (1, 0)]
    assert member.app.statistics().handlers[0].processed == 3


def test_paused_records_in_a_filling_batch_wait_until_resumed() -> None:
    member = Member()

    async def test() -> None:
        async with TestClient(member.app) as client:
            await publish(client, "aab")
            await publish(client, "c", partition=1)
            await asyncio.sleep(1.0)
            member.app.pause("clicks", 0)
            await asyncio.sleep(2 * LINGER)
            assert member.runs == [(1, 0)]
            member.app.resume("clicks", 0)
            await client.settle(30.0)

    run(test())

    assert member.runs[1:] == [(0, 0), (0, 1), (0, 2)]


def test_an_app_that_stops_does_not_wait_for_a_batch_to_fill() -> None:
    member = Member()

    async def test() -> float:
        async with TestClient(member.app) as client:
            await publish(client, "abc")
            await asyncio.sleep(0.1)
            began = asyncio.get_running_loop().time()
        return asyncio.get_running_loop().time() - began

    assert run(test()) < 0.5
    assert member.runs == []


def test_evicted_records_leave_a_filling_batch() -> None:
    """I6: a partition that cannot advance keeps its minimum, also while records wait for a batch to fill."""
    app = App("handed over", max_buffered_records=200, stuck_after=100.0)
    options = {"retry": Retry(attempts=1), "batch": Batch(max_records=100, linger=50.0)}

    @app.consume("clicks", **options)  # type: ignore[arg-type]
    async def on_clicks(records: list[Record]) -> None:
        if records[0].offset == 0:
            raise ValueError

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, ["first"])
            await asyncio.sleep(60.0)
            assert app.statistics().handlers[0].halted == 1
            await publish(client, [str(number) for number in range(90)])
            await asyncio.sleep(0.6)
            held = next(
                partition for partition in app.statistics().partitions if partition.partition == 0
            ).buffered_records
            assert held <= 4
            app.skip("clicks", 0, 0)
            await client.settle(200.0)

    run(test())

    assert app.statistics().handlers[0].processed == 90


@pytest.mark.parametrize("when", [0.0, 0.5, 1.5])
def test_a_batch_that_fails_during_a_revoke_is_not_lost(when: float) -> None:
    app = App("handed over", drain_timeout=DRAIN)
    runs: list[tuple[int, int]] = []

    @app.consume("clicks", batch=Batch(max_records=6, linger=0.1), retry=Retry(attempts=9, initial=0.5, jitter=0.0))
    async def on_clicks(records: list[Record]) -> None:
        await asyncio.sleep(0.4)
        runs.extend((record.partition, record.offset) for record in records)
        if len(runs) <= 12:
            raise OSError("the database is away")

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, "aabbcc")
            await publish(client, "abc", partition=1)
            await asyncio.sleep(when)
            assert await seconds_of_a_revoke(client) < 1.0
            await asyncio.sleep(1.0)
            await client.assign("clicks", 0)
            await client.settle(60.0)
            assert client.committed("clicks", 0) == 6
            assert client.committed("clicks", 1) == 3

    run(test())

    done = runs[12:]
    for partition, key in [(0, (0, 1)), (0, (2, 3)), (0, (4, 5))]:
        own = [offset for number, offset in done if number == partition and offset in key]
        assert own == sorted(own)


def test_revoked_is_set_for_a_batch_that_starts_during_a_revoke() -> None:
    member = Member(seconds=1.0, batch=Batch(max_records=2, linger=LINGER))

    async def test() -> None:
        async with TestClient(member.app) as client:
            store_no_texts(member.app)
            await publish(client, ["k", "x"])
            await asyncio.sleep(0.5)
            await publish(client, ["k", "y", "z"])
            await asyncio.sleep(0.1)
            await client.revoke("clicks", 0)

    run(test())

    assert member.batches[-1] == [(0, 2)]
    assert member.revoked[-1]
