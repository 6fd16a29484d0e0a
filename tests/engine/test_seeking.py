"""A seek moves a partition and discards stored completions."""

import asyncio
import datetime as dt
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aioshard import App, Batch, Record
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.engine.control import caught_up
from aioshard.errors import ClientLostError, CommitError, CommitRefusedError, StateError, TransportError
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, TestClient, run
from tests.engine.live_apps import engine_of, until

TP = TopicPartition("orders", 0)
OTHER = TopicPartition("orders", 1)


class World:
    """An app on two partitions; records of the offsets in `hanging` run until they are let go."""

    def __init__(self, records: int = 100, *, batch: Batch | None = None, **settings: Any) -> None:
        self.now = 0.0
        self.broker = InMemoryBroker(partitions=2, clock=lambda: self.now)
        for number in range(records):
            self.now = float(1000 + number)
            self.broker.publish("orders", b"", key=b"%d" % number, partition=0)
        self.app = App("group", drain_timeout=2.0, shutdown_timeout=3.0, commit_interval=0.2, **settings)
        self.hanging: set[int] = set()
        self.release = asyncio.Event()
        self.runs: list[int] = []
        self.done: list[int] = []
        self.committed_at: dict[int, int | None] = {}

        if batch is None:

            @self.app.consume("orders", concurrency=20)
            async def handle(record: Record) -> None:
                await self.handle(record)
        else:

            @self.app.consume("orders", concurrency=20, batch=batch)
            async def handle_batch(records: list[Record]) -> None:
                for record in records:
                    await self.handle(record)

    async def handle(self, record: Record) -> None:
        if record.partition:
            return
        self.runs.append(record.offset)
        self.committed_at.setdefault(record.offset, self.broker.committed("group", *TP))
        await asyncio.sleep(0.01)
        if record.offset in self.hanging:
            await self.release.wait()
        self.done.append(record.offset)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[TestClient]:
        async with TestClient(self.app, broker=self.broker) as client:
            yield client

    @asynccontextmanager
    async def running_with_one_hanging(self) -> AsyncIterator[TestClient]:
        """As `running`, from when everything but record 3 is done."""
        self.hanging = {3}
        async with self.running() as client:
            await until(lambda: len(self.done) == 99)
            yield client

    async def settled(self, client: TestClient) -> None:
        await client.settle(60.0)

    def forget(self) -> None:
        self.runs.clear()
        self.done.clear()
        self.committed_at.clear()

    @property
    def commit_metadata(self) -> CommitMetadata:
        found = self.broker.group("group").committed(TP)
        assert found is not None
        return CommitMetadata.read(found.metadata, found.offset)


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        ("beginning", 0),
        (40, 40),
        (100, 100),
        (dt.datetime.fromtimestamp(1060, dt.UTC), 60),
        (1060.5, 61),
        (5e9, 100),
        ("end", 100),
    ],
)
def test_a_seek_resumes_there_and_reprocesses_the_records_after_it(to: Any, expected: int) -> None:
    async def test() -> None:
        world = World()
        async with world.running() as client:
            await world.settled(client)
            world.forget()

            assert await world.app.seek("orders", 0, to) == expected

            await world.settled(client)
            assert sorted(world.done) == list(range(expected, 100))
            assert world.app.position("orders", 0) == 100

    run(test())


def test_the_new_position_is_committed_before_its_first_record_is_delivered() -> None:
    async def test() -> None:
        world = World()
        async with world.running() as client:
            await world.settled(client)
            world.forget()
            for _ in range(3):
                world.broker.fail_next_commit(CommitError("the coordinator is moving"))

            await world.app.seek("orders", 0, 7)
            await world.settled(client)

            assert world.committed_at[7] == 7
            assert world.done[0] == 7
            assert len(world.done) == 93

    run(test())


def test_records_in_flight_are_drained_before_their_replay() -> None:
    async def test() -> None:
        world = World()
        world.hanging = {3, 30}
        async with world.running() as client:
            await until(lambda: len(world.done) == 98)

            seeking = asyncio.create_task(world.app.seek("orders", 0, "beginning"))
            await asyncio.sleep(0.5)
            assert not seeking.done()
            assert len(world.runs) == 100
            world.release.set()
            await seeking

            assert world.committed_at.keys() == set(range(100))
            assert sorted(world.done[:100]) == list(range(100))
            await world.settled(client)
            assert sorted(world.done[100:]) == list(range(100))

    run(test())


def test_runs_that_outlast_a_seek_are_cancelled_and_ignored() -> None:
    async def test() -> None:
        world = World()
        async with world.running_with_one_hanging() as client:
            started = asyncio.get_running_loop().time()

            await world.app.seek("orders", 0, 50)

            assert 2.0 <= asyncio.get_running_loop().time() - started < 2.5
            world.release.set()
            await world.settled(client)
            assert 3 not in world.done
            assert client.committed("orders", 0) == 100

    run(test())


@pytest.mark.parametrize("to", [0, 3], ids=["lower", "the-committed-offset-itself"])
def test_a_seek_discards_stored_completions(to: int) -> None:
    async def test() -> None:
        world = World()
        world.hanging = {3}
        async with world.running() as client:
            await until(lambda: bool(world.broker.committed("group", *TP)) and bool(world.commit_metadata.finished))
            await until(lambda: len(world.done) == 99)
            await asyncio.sleep(1.0)
            assert world.broker.committed("group", *TP) == 3
            assert world.commit_metadata.finished
            world.forget()
            world.hanging = {to}

            await world.app.seek("orders", 0, to)

            found = world.broker.group("group").committed(TP)
            assert found is not None
            assert CommitMetadata.read(found.metadata, found.offset).finished == ()
            await until(lambda: len(world.done) == 99 - to)
            world.release.set()
            await world.settled(client)
            assert sorted(world.done) == list(range(to, 100))

    run(test())


def test_other_partitions_continue_during_a_seek() -> None:
    async def test() -> None:
        world = World()
        async with world.running_with_one_hanging() as client:
            seeking = asyncio.create_task(world.app.seek("orders", 0, "end"))
            await asyncio.sleep(0.1)

            world.broker.publish("orders", b"", partition=1)
            await until(lambda: client.committed("orders", 1) == 1)

            assert not seeking.done()
            world.release.set()
            assert await seeking == 100

    run(test())


@pytest.mark.parametrize("when", [0.0, 0.05, 1.0, 2.0, 2.02])
def test_a_seek_survives_a_rebalance_that_keeps_the_partition(when: float) -> None:
    async def test() -> None:
        world = World()
        async with world.running_with_one_hanging() as client:
            world.forget()

            seeking = asyncio.create_task(world.app.seek("orders", 0, "beginning"))
            await asyncio.sleep(when)
            world.broker.group("group").rebalance()
            assert await seeking == 0
            world.release.set()

            await world.settled(client)
            assert {*world.done} == set(range(100))
            assert all(request.owned for request in world.broker.commits)

    run(test())


def test_an_incremental_assignment_does_not_cut_the_drain_of_a_seek_short() -> None:
    """As of clients whose rebalances are incremental: kept partitions are not revoked, and are in the assignment."""

    async def test() -> None:
        world = World()
        async with world.running_with_one_hanging() as client:
            seeking = asyncio.create_task(world.app.seek("orders", 0, "beginning"))
            await asyncio.sleep(0.1)

            engine = engine_of(world.app)
            engine.rebalance.assigned([TP, OTHER], engine.client.get().membership())
            await asyncio.sleep(0.5)
            assert not seeking.done()
            world.release.set()
            await seeking

            await world.settled(client)
            assert world.done.count(3) == 2

    run(test())


@pytest.mark.parametrize("when", [0.0, 0.05, 1.0, 2.0])
def test_a_partition_revoked_meanwhile_is_not_sought(when: float) -> None:
    async def test() -> None:
        world = World()
        async with world.running_with_one_hanging() as client:
            seeking = asyncio.create_task(world.app.seek("orders", 0, "beginning"))
            await asyncio.sleep(when)
            await client.revoke("orders", 0)

            with pytest.raises(StateError, match="assigned it to another member"):
                await seeking
            assert world.broker.committed("group", *TP) in (0, 3)
            world.release.set()

    run(test())


def test_a_seek_survives_the_loss_of_the_client() -> None:
    async def test() -> None:
        world = World()
        async with world.running_with_one_hanging() as client:
            world.forget()

            seeking = asyncio.create_task(world.app.seek("orders", 0, "beginning"))
            await asyncio.sleep(0.1)
            client.transports[-1].kill(ClientLostError("gone"))

            assert await seeking == 0
            world.release.set()
            await world.settled(client)
            assert {*world.done} == set(range(100))

    run(test())


def test_a_seek_in_a_stopping_app_fails_and_keeps_the_position() -> None:
    async def test() -> None:
        world = World()
        world.hanging = {3}
        async with world.running():
            await until(lambda: len(world.done) == 99)
            seeking = asyncio.create_task(world.app.seek("orders", 0, "beginning"))
            await asyncio.sleep(0.1)
            world.release.set()
            world.hanging.clear()
        with pytest.raises(StateError, match="the app stopped"):
            await seeking
        assert world.broker.committed("group", *TP) == 100

    run(test())


def test_cancelling_the_call_does_not_undo_the_seek() -> None:
    async def test() -> None:
        world = World()
        async with world.running() as client:
            await world.settled(client)
            world.forget()
            seeking = asyncio.create_task(world.app.seek("orders", 0, "beginning"))
            await until(lambda: world.app.assignment() == (OTHER,), look_every=0.0)
            seeking.cancel()

            await until(lambda: len(world.done) == 100)
            await world.settled(client)

    run(test())


def test_a_seek_keeps_pauses_and_batches() -> None:
    async def test() -> None:
        world = World(batch=Batch(10, linger=0.1))
        async with world.running() as client:
            await world.settled(client)
            world.forget()
            world.app.pause("orders", 0)

            await world.app.seek("orders", 0, 20)
            await asyncio.sleep(5.0)
            assert not world.runs
            world.app.resume("orders", 0)

            await world.settled(client)
            assert sorted(world.done) == list(range(20, 100))

    run(test())


@pytest.mark.parametrize(
    ("to", "why"),
    [
        (101, "its log is from 0 to 100"),
        (-1, "its log is from 0 to 100"),
        (True, "expected an offset"),
        ("latest", "expected an offset"),
        (float("nan"), "expected an offset"),
        (dt.datetime(2026, 1, 1), "with its time zone"),  # noqa: DTZ001 - that is what is refused
    ],
)
def test_an_invalid_seek_target_is_refused_without_effect(to: Any, why: str) -> None:
    async def test() -> None:
        world = World()
        async with world.running() as client:
            await world.settled(client)
            before = world.app.statistics().partitions
            with pytest.raises(StateError, match=why):
                await world.app.seek("orders", 0, to)
            assert [partition.epoch for partition in world.app.statistics().partitions] == [
                partition.epoch for partition in before
            ]

    run(test())


def test_a_seek_that_cannot_be_served_is_refused() -> None:
    async def test() -> None:
        world = World()
        with pytest.raises(StateError, match="is not running"):
            await world.app.seek("orders", 0, 0)
        world.hanging = {3}
        async with world.running():
            with pytest.raises(StateError, match="orders/7 is not assigned to this process"):
                await world.app.seek("orders", 7, 0)
            await until(lambda: len(world.done) == 99)
            first = asyncio.create_task(world.app.seek("orders", 0, 5))
            await asyncio.sleep(0.1)
            with pytest.raises(StateError, match="is moving to offset 5"):
                await world.app.seek("orders", 0, 6)
            await first
            world.broker.available = False
            with pytest.raises(TransportError):
                await world.app.seek("orders", 0, 6)
            world.broker.available = True
            world.release.set()

    run(test())


def test_of_two_concurrent_seeks_one_is_refused() -> None:
    async def test() -> None:
        world = World()
        async with world.running() as client:
            await world.settled(client)
            ended = await asyncio.gather(*(world.app.seek("orders", 0, to) for to in (10, 20)), return_exceptions=True)
            assert ended[0] == 10
            assert isinstance(ended[1], StateError)
            await world.settled(client)

    run(test())


def test_the_app_reports_assignment_and_position() -> None:
    async def test() -> None:
        world = World()
        async with world.running() as client:
            await world.settled(client)
            app = world.app
            assert app.assignment() == (TP, OTHER)
            assert app.position("orders", 0) == 100
            assert await app.committed("orders", 0) == 100
            assert await app.committed("payments", 0) is None
            assert [info.partition for info in await app.partitions("orders")] == [0, 1]
            assert await app.partitions("nowhere") == ()
            assert await app.topics() == ("orders",)
            with pytest.raises(StateError, match="not assigned"):
                app.position("orders", 5)

    run(test())


@pytest.mark.parametrize("seed", range(30))
def test_seeks_hold_among_rebalances_losses_and_refused_commits(seed: int) -> None:
    """After each one that returned, everything behind it is processed again, and no commit passes what was not."""

    async def test() -> None:
        chance = random.Random(seed)
        world = World(60)
        async with world.running() as client:

            async def seek(to: int) -> int:
                await world.app.seek("orders", 0, to)
                world.forget()  # a handler takes time: none that has started from there is done
                return len(world.broker.commits)

            for _ in range(6):
                world.hanging = set(chance.sample(range(60), 2))
                world.release = asyncio.Event()
                to = chance.randrange(61)
                await asyncio.sleep(chance.choice([0.0, 0.01, 0.1, 1.0]))
                seeking = asyncio.create_task(seek(to))
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(chance.choice([0.0, 0.001, 0.01, 0.5, 2.0]))
                    trouble(world, client, chance.randrange(4))
                try:
                    commits = await seeking
                except (StateError, TransportError):
                    continue  # it was being handed over, or no client was running, when it was requested
                world.hanging.clear()
                world.release.set()
                await world.settled(client)
                assert set(range(to, 60)) <= set(world.done)
                sent = [request for request in world.broker.commits[commits:] if request.applied]
                offsets = [request.offsets[TP].offset for request in sent if TP in request.offsets]
                assert offsets == sorted(offsets)
                assert all(request.owned for request in sent)
            world.hanging.clear()
            world.release.set()
            await world.settled(client)

    run(test())


def trouble(world: World, client: TestClient, which: int) -> None:
    match which:
        case 0:
            world.broker.group("group").rebalance()
        case 1:
            world.broker.group("group").lose()
        case 2:
            world.broker.fail_next_commit(CommitRefusedError("the generation is over"))
        case _:
            client.transports[-1].kill(ClientLostError("gone"))


def test_until_caught_up_waits_for_a_seek() -> None:
    async def test() -> None:
        world = World()
        async with world.running_with_one_hanging() as client:
            engine = engine_of(world.app)
            seeking = asyncio.create_task(world.app.seek("orders", 0, "beginning"))
            await until(lambda: engine.rebalance.seeks, look_every=0.001)
            for _ in range(3):
                world.broker.fail_next_commit(CommitError("the coordinator is moving"))
            world.hanging.clear()
            world.release.set()
            await until(lambda: len(world.done) == 100, look_every=0.001)
            world.forget()

            await caught_up(engine)  # all is done up to the end, and on its way back

            assert sorted(world.done) == list(range(100))
            await seeking
            await world.settled(client)

    run(test())
