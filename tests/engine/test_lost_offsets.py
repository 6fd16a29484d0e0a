"""The cluster loses records that the group has read: each of the others runs once, and what is gone is named (I1)."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from aioshard import App, Record
from aioshard.core.finished_offsets import Run
from aioshard.errors import ClientLostError, CommitError, LogTruncatedError, NotDrainedError, StateError
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryTransport, run
from tests.engine.live_apps import engine_of, until
from tests.engine.test_takeover import Deployment

TP = TopicPartition("orders", 0)


class UndecidedTransport(InMemoryTransport):
    """Does not learn where leader epochs end until the test lets it."""

    is_undecided = True

    async def truncations(self, commits: Mapping[TopicPartition, Committed]) -> Mapping[TopicPartition, int | None]:
        return {} if self.is_undecided else await super().truncations(commits)


async def committed(world: Deployment, offset: int) -> None:
    await until(lambda: world.broker.committed("group", "orders", 0) == offset)


@pytest.mark.parametrize("written", [3, 20], ids=["shorter", "longer"])
@pytest.mark.parametrize("policy", ["earliest", "latest"])
def test_a_running_app_goes_on_where_the_log_parts(policy: Literal["earliest", "latest"], written: int) -> None:
    """Also where the new log has outgrown the position."""

    async def test() -> None:
        world = Deployment()
        world.publish(10)
        world.broker.group("group").commit_from_outside({TP: 0})
        async with world.owner(policy) as app:
            await committed(world, 10)
            world.ran.clear()
            world.broker.log(*TP).truncate_from(6)
            world.publish(written)
            await committed(world, 6 + written)
            assert app.statistics().lost_offsets == 4
        assert sorted(world.ran) == list(range(6, 6 + written))

    run(test())


@pytest.mark.parametrize("written", [3, 20], ids=["shorter", "longer"])
@pytest.mark.parametrize("policy", ["earliest", "latest"])
def test_the_next_owner_goes_on_where_the_log_parts(policy: Literal["earliest", "latest"], written: int) -> None:
    """Nobody reads when the log is cut off: only the epoch beside the commit tells."""

    async def test() -> None:
        world = Deployment()
        world.publish(10)
        world.broker.group("group").commit_from_outside({TP: 0})
        async with world.owner(policy):
            await committed(world, 10)
        world.ran.clear()
        world.broker.log(*TP).truncate_from(6)
        world.publish(written)
        async with world.owner(policy) as app:
            await committed(world, 6 + written)
            assert app.statistics().lost_offsets == 4
        assert sorted(world.ran) == list(range(6, 6 + written))

    run(test())


def test_nothing_is_read_before_the_leader_has_said_what_its_log_has() -> None:
    async def test() -> None:
        world = Deployment()
        world.publish(10)
        async with world.owner():
            pass
        world.ran.clear()
        world.broker.log(*TP).truncate_from(6)
        world.publish(20)
        transport = UndecidedTransport(world.broker, "group")
        async with world.app().started(lambda: transport) as app:
            await until(lambda: str(TP) in str(app.statistics().trouble))
            assert world.ran == []
            transport.is_undecided = False
            await committed(world, 26)
        assert sorted(world.ran) == list(range(6, 26))

    run(test())


def test_a_running_app_that_may_not_choose_a_position_ends() -> None:
    async def test() -> None:
        world = Deployment()
        world.publish(10)
        world.broker.group("group").commit_from_outside({TP: 0})
        async with world.owner("error") as app:
            world.broker.log(*TP).truncate_from(6)
            await until(lambda: app.statistics().state == "failed")
            assert "the cluster has lost offsets 6 to 9 of orders/0" in app.explain()
        assert sorted(world.ran) == list(range(10))

    run(test())


def test_an_app_that_may_not_choose_a_position_does_not_start() -> None:
    async def test() -> None:
        world = Deployment()
        world.publish(10)
        world.broker.group("group").commit_from_outside({TP: 0})
        async with world.owner("error"):
            pass
        world.broker.log(*TP).truncate_from(6)
        with pytest.raises(LogTruncatedError) as raised:
            async with world.owner("error"):
                pass
        assert (raised.value.resumes_at, raised.value.position) == (6, 10)

    run(test())


def test_a_loss_skips_no_record_that_did_not_finish() -> None:
    """One before the cut runs longer than the drain, one after it while the log is cut off."""

    async def test() -> None:
        world = Deployment()
        world.publish(10)
        app = App("group", auto_offset_reset="earliest", commit_interval=0.1, drain_timeout=1.0)
        hanging = {2, 8}

        @app.consume("orders")
        async def handle(record: Record) -> None:
            if record.offset in hanging:
                await asyncio.sleep(3.0)
            world.ran.append(record.offset)

        async with app.started(lambda: InMemoryTransport(world.broker, "group")):
            await until(lambda: len(world.ran) == 8)
            world.broker.log(*TP).truncate_from(6)
            hanging.clear()
            world.publish(5)
            await committed(world, 11)
        counts = Counter(world.ran)
        assert counts[2] == 1, "it was cancelled, and ran again"
        assert all(counts[offset] >= 1 for offset in (0, 1, 3, 4, 5))
        assert [counts[offset] for offset in (6, 7, 9)] == [2, 2, 2], "the lost one and the new one"
        assert counts[8] == 1, "the lost one was cancelled"
        assert counts[10] == 1

    run(test())


def test_a_seek_during_the_drain_after_a_loss_is_refused_with_the_loss() -> None:
    async def test() -> None:
        world = Deployment()
        world.publish(10)
        app = App("group", auto_offset_reset="earliest", drain_timeout=5.0)

        @app.consume("orders")
        async def handle(_: Record) -> None:
            await asyncio.sleep(3.0)

        async with app.started(lambda: InMemoryTransport(world.broker, "group")):
            rebalance = engine_of(app).rebalance
            world.broker.log(*TP).truncate_from(6)
            world.publish(5)
            await until(lambda: TP in rebalance.seeks)
            with pytest.raises(StateError, match="the cluster has lost") as refused:
                await app.seek(*TP, 0)
            assert "that seek" not in str(refused.value), "the application has not sought"

            await until(lambda: TP not in rebalance.seeks)
            assert await app.seek(*TP, 0) == 0

    run(test())


@pytest.mark.parametrize("event", ["revoked", "lost", "client lost"])
def test_a_loss_skips_no_record_when_the_partition_leaves_before_its_drain_ends(event: str) -> None:
    """The next owner begins at the commit, which must not list what is lost as finished."""

    async def test() -> None:
        world = Deployment()
        world.publish(10)
        app = App("group", auto_offset_reset="earliest", commit_interval=0.1, drain_timeout=5.0)
        hanging = {2}

        @app.consume("orders")
        async def handle(record: Record) -> None:
            if record.offset in hanging:
                await asyncio.sleep(1_000.0)
            world.ran.append(record.offset)

        async with app.started(lambda: InMemoryTransport(world.broker, "group")):
            await until(lambda: len(world.ran) == 9)
            await asyncio.sleep(0.5)
            world.broker.log(*TP).truncate_from(6)
            world.publish(10)
            await until(lambda: engine_of(app).rebalance.seeks)
            await asyncio.sleep(0.5)
            hanging.clear()
            match event:
                case "revoked":
                    world.broker.group("group").rebalance()
                case "lost":
                    world.broker.group("group").lose()
                case _:
                    world.broker.fail_next_poll(ClientLostError("it died"))
            await committed(world, 16)
            assert app.statistics().lost_offsets == 4
        counts = Counter(world.ran)
        assert counts[2] == 1, "it was cancelled, and ran again"
        assert [counts[offset] for offset in (0, 1, 3, 4, 5)] == [1] * 5, "the commit lists them"
        assert [counts[offset] for offset in range(6, 16)] == [2] * 4 + [1] * 6, "the lost ones and the new ones"

    run(test())


def test_the_next_owner_skips_nothing_that_has_the_offset_of_a_finished_record_that_is_lost() -> None:
    """The commit is before the loss, and its text lists offsets beyond it."""

    async def test() -> None:
        world = Deployment()
        world.publish(10)
        app = App("group", auto_offset_reset="earliest", commit_interval=0.1, shutdown_timeout=1.0)

        @app.consume("orders")
        async def handle(record: Record) -> None:
            if record.offset == 2:
                await asyncio.sleep(1_000.0)
            world.ran.append(record.offset)

        with contextlib.suppress(NotDrainedError):
            async with app.started(lambda: InMemoryTransport(world.broker, "group")):
                await until(lambda: len(world.ran) == 9)
                await asyncio.sleep(0.5)
        assert world.commit_metadata.finished == (Run(3, 10),)
        world.ran.clear()
        world.broker.log(*TP).truncate_from(6)
        world.publish(20)
        async with world.owner():
            await committed(world, 26)
        assert sorted(world.ran) == [2, *range(6, 26)]

    run(test())


class Forgetful(InMemoryTransport):
    """A client whose first commits are not stored."""

    attempts = 0

    async def commit(self, *commit: Any) -> None:
        Forgetful.attempts += 1
        if Forgetful.attempts <= 20:
            raise CommitError("no time")
        await super().commit(*commit)


def test_a_loss_is_counted_once_however_often_the_next_owner_tries() -> None:
    async def test() -> None:
        world = Deployment()
        world.publish(10)
        async with world.owner():
            await committed(world, 10)
        world.broker.log(*TP).truncate_from(6)
        world.publish(20)
        app = App("group", auto_offset_reset="earliest", commit_interval=0.1, commit_timeout=1.0)

        @app.consume("orders")
        async def handle(record: Record) -> None:
            world.ran.append(record.offset)

        async with app.started(lambda: Forgetful(world.broker, "group")):
            await committed(world, 26)
            assert engine_of(app).rebalance._epochs > 1, "it had to begin again"
            assert app.statistics().lost_offsets == 4

    run(test())


def test_a_loss_during_a_drain_is_noticed_afterwards() -> None:
    async def test() -> None:
        world = Deployment()
        world.publish(10)
        world.broker.group("group").commit_from_outside({TP: 0})
        async with world.owner("earliest") as app:
            await committed(world, 10)
            world.ran.clear()
            seeking = asyncio.create_task(app.seek("orders", 0, 8))
            await asyncio.sleep(0)
            world.broker.log(*TP).truncate_from(6)
            world.publish(8)
            await seeking
            await committed(world, 14)
        assert set(world.ran) >= set(range(8, 14))

    run(test())
