"""Some partitions are revoked and the others stay: `assigned` is called for news only, and the others still open.

The client here takes single partitions away, as one with incremental rebalances does.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aioshard import App, Record
from aioshard.engine.rebalance import Rebalance
from aioshard.errors import OffsetRegressionError, StateError
from aioshard.kafka.memory.transport import _Assigned
from aioshard.ports import NOT_A_MEMBER, GroupListener, Membership
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryTransport, Operation, run
from tests.engine.live_apps import engine_of, until

GOING, STAYING, OTHER = (TopicPartition("orders", number) for number in range(3))
DRAIN = 8.0
"""Seconds that the drain of a revoked partition may take."""


class Incremental(InMemoryTransport):
    """A client that loses single partitions, and whose generation may rise without an assignment."""

    @property
    def listener(self) -> GroupListener:
        assert self._listener is not None
        return self._listener

    async def take_away(self, *partitions: TopicPartition) -> None:
        """Let the engine release partitions; it does not hear of the others."""
        self.pause(partitions)
        await self.listener.revoked(partitions)
        for partition in partitions:
            del self._assigned[partition]

    def raise_generation(self) -> None:
        """Rebalance the group without a change for this member."""
        self._group.generation += 1
        self._membership = self._membership._replace(generation=self._group.generation)


class Shop:
    """An app that reads three partitions with 5 records each."""

    def __init__(self, **latency: float) -> None:
        self.latency = {operation.replace("_", " "): seconds for operation, seconds in latency.items()}
        self.broker = InMemoryBroker(partitions=3, clock=lambda: 0.0)
        self.broker.create_topic("orders", 3)
        self.app = App(
            "billing", auto_offset_reset="earliest", drain_timeout=DRAIN, commit_timeout=1.0, start_timeout=None
        )
        self.assign: dict[str, list[int]] | None = None
        self.seen: list[tuple[int, int]] = []
        self.hangs: frozenset[TopicPartition] = frozenset()
        """Partitions whose records run until `release` is set."""
        self.release = asyncio.Event()
        self.transports: list[Incremental] = []

        @self.app.consume("orders")
        async def handle(record: Record) -> None:
            self.seen.append((record.partition, record.offset))
            if record.topic_partition in self.hangs:
                await self.release.wait()

        for number in range(15):
            self.broker.publish("orders", b"", key=b"%d" % number, partition=number % 3)

    def connect(self) -> Incremental:
        def latency(operation: Operation) -> float:
            return self.latency.get(operation, 0.0)

        self.transports.append(Incremental(self.broker, "billing", latency=latency, assign=self.assign))
        return self.transports[-1]

    @property
    def transport(self) -> Incremental:
        return self.transports[-1]

    @property
    def rebalance(self) -> Rebalance:
        return engine_of(self.app).rebalance

    def revoke(self, *partitions: TopicPartition) -> asyncio.Task[None]:
        return asyncio.create_task(self.transport.take_away(*partitions), name="revoke")

    def seen_of(self, partition: TopicPartition) -> list[int]:
        return [offset for number, offset in self.seen if number == partition.partition]

    async def until_opening(self) -> None:
        await until(lambda: self.transports and self.transport.assigned)

    async def until_all_read(self, *partitions: TopicPartition) -> None:
        await until(lambda: all(self.seen_of(partition) == [*range(5)] for partition in partitions), timeout=30.0)

    async def reopen(self, partition: TopicPartition, *, takes: float) -> None:
        """Let a partition open again, whose look-up takes some seconds."""
        self.latency["log ranges"] = takes
        self.rebalance.reset_position(self.rebalance.partitions[partition], OffsetRegressionError(1, 2))
        await asyncio.sleep(0.1)
        assert partition not in {owned.topic_partition for owned in self.rebalance.partitions}


def scenario(test: Callable[[Shop], Awaitable[Any]], *, manually: bool = False, **latency: float) -> None:
    async def live() -> None:
        shop = Shop(**latency)
        if manually:
            shop.assign = {"orders": [0, 1, 2]}
        async with shop.app.started(shop.connect):
            await shop.until_opening()
            await test(shop)

    run(live())


# The others open --------------------------------------------------------------------------


def test_partitions_open_that_were_being_looked_up() -> None:
    async def test(shop: Shop) -> None:
        await shop.revoke(GOING)
        await shop.until_all_read(STAYING, OTHER)
        assert shop.rebalance.all_resumed
        assert shop.seen_of(GOING) == []

    scenario(test, committed=1.0)


def test_partitions_open_while_the_revoked_one_is_drained() -> None:
    async def test(shop: Shop) -> None:
        await shop.until_all_read(GOING, STAYING, OTHER)
        shop.hangs = frozenset({GOING})
        shop.broker.publish("orders", b"", partition=0)
        await until(lambda: len(shop.seen_of(GOING)) == 6)
        await shop.reopen(STAYING, takes=1.0)

        revoking = shop.revoke(GOING)
        shop.broker.publish("orders", b"", partition=1)
        await until(lambda: 5 in shop.seen_of(STAYING), timeout=DRAIN / 2)
        assert not revoking.done()
        assert not shop.rebalance.opened.is_set(), "a partition is still being released"
        assert shop.app.statistics().rebalance_reports[-1].phase == "drain"

        shop.release.set()
        await revoking
        assert shop.rebalance.all_resumed
        assert shop.app.statistics().rebalance_reports[-1].phase == "over"

    scenario(test)


def test_the_rebalance_lasts_until_the_others_are_open() -> None:
    async def test(shop: Shop) -> None:
        await shop.until_all_read(GOING, STAYING, OTHER)
        await shop.reopen(STAYING, takes=1.0)
        await shop.revoke(GOING)
        assert not shop.rebalance.opened.is_set()
        await until(shop.rebalance.opened.is_set, timeout=5.0)
        assert {owned.topic_partition for owned in shop.rebalance.partitions} == {STAYING, OTHER}

    scenario(test)


def test_partitions_open_whose_look_up_has_failed() -> None:
    async def test(shop: Shop) -> None:
        shop.broker.available = False
        await until(lambda: shop.rebalance.trouble)
        await shop.revoke(GOING)
        assert set(shop.rebalance.unresolved) == {STAYING, OTHER}
        shop.broker.available = True
        await shop.until_all_read(STAYING, OTHER)

    scenario(test, committed=1.0)


@pytest.mark.parametrize("during_the_drain", [True, False])
def test_a_partition_opens_that_waits_for_its_leader(during_the_drain: bool) -> None:
    async def test(shop: Shop) -> None:
        shop.broker.set_leader("orders", 1, available=False)
        await until(lambda: len(shop.seen_of(GOING)) == 5 and STAYING in shop.rebalance.unresolved)
        shop.hangs = frozenset({GOING})
        shop.broker.publish("orders", b"", partition=0)
        await until(lambda: len(shop.seen_of(GOING)) == 6)

        revoking = shop.revoke(GOING)
        for _ in range(20):
            await asyncio.sleep(0.1)
            assert set(shop.rebalance.unresolved) == {STAYING}, "it still waits"
        if not during_the_drain:
            shop.release.set()
            await revoking
            report = shop.app.statistics().rebalance_reports[-1]
            assert (report.revoked, report.assigned, report.kept) == (1, 2, 1)
        shop.broker.set_leader("orders", 1, available=True)
        await shop.until_all_read(STAYING)
        assert revoking.done() is not during_the_drain
        shop.release.set()
        await revoking

    scenario(test, committed=0.2)


@pytest.mark.parametrize("when", [0.0, 0.5, 1.5])
def test_a_seek_ends_that_was_being_looked_up(when: float) -> None:
    async def test(shop: Shop) -> None:
        await shop.until_all_read(GOING, STAYING, OTHER)
        shop.latency |= {"log ranges": 1.0, "committed": 1.0}
        seeking = asyncio.create_task(shop.app.seek("orders", 1, 2), name="seek")
        await until(lambda: STAYING in shop.rebalance.seeks)
        await asyncio.sleep(when)
        await shop.revoke(GOING)
        assert await asyncio.wait_for(seeking, 10.0) == 2
        await until(lambda: shop.seen_of(STAYING) == [*range(5), 2, 3, 4])

    scenario(test)


def test_nobody_waits_for_a_seek_of_a_revoked_partition() -> None:
    async def test(shop: Shop) -> None:
        await shop.until_all_read(GOING, STAYING, OTHER)
        shop.latency |= {"log ranges": 1.0}
        seeking = asyncio.create_task(shop.app.seek("orders", 0, 2), name="seek")
        await until(lambda: GOING in shop.rebalance.seeks)
        await shop.revoke(GOING)
        with pytest.raises(StateError, match="assigned it to another member"):
            await asyncio.wait_for(seeking, 1.0)
        assert shop.rebalance.all_resumed

    scenario(test)


def test_open_partitions_are_not_disturbed() -> None:
    async def test(shop: Shop) -> None:
        await shop.until_all_read(GOING, STAYING, OTHER)
        shop.hangs = frozenset({GOING, STAYING})
        for number in range(2):
            shop.broker.publish("orders", b"", partition=number)
        await until(lambda: len(shop.seen) == 17)
        before = {owned.topic_partition: owned.number for owned in shop.rebalance.partitions}

        revoking = shop.revoke(GOING)
        shop.broker.publish("orders", b"", partition=2)
        await until(lambda: 5 in shop.seen_of(OTHER))
        assert not revoking.done()
        shop.release.set()
        await revoking

        after = {owned.topic_partition: owned.number for owned in shop.rebalance.partitions}
        assert after == {name: before[name] for name in (STAYING, OTHER)}
        assert shop.seen_of(STAYING) == [*range(6)]

    scenario(test)


# The released partitions ------------------------------------------------------------------


def test_a_released_partition_is_forgotten_with_its_queued_records() -> None:
    async def test(shop: Shop) -> None:
        shop.hangs = frozenset({GOING})
        for _ in range(50):
            shop.broker.publish("orders", b"", key=b"one", partition=0)
        await shop.until_all_read(STAYING, OTHER)
        await until(lambda: engine_of(shop.app).buffer.records > 10)

        revoking = shop.revoke(GOING)
        await asyncio.sleep(0.1)
        shop.release.set()
        await revoking

        assert {owned.topic_partition for owned in shop.rebalance.partitions} == {STAYING, OTHER}
        await until(lambda: engine_of(shop.app).buffer.records == 0)
        assert shop.broker.committed("billing", *GOING) == len(shop.seen_of(GOING))

    scenario(test)


def test_a_member_that_has_released_everything_waits_for_an_assignment() -> None:
    async def test(shop: Shop) -> None:
        await shop.until_all_read(GOING, STAYING, OTHER)
        await shop.revoke(GOING, STAYING, OTHER)
        await asyncio.sleep(5.0)
        assert not shop.rebalance.opened.is_set()
        assert shop.app.statistics().rebalance_reports[-1].phase == "join"

        shop.transport.listener.assigned((), shop.transport.membership())
        await until(lambda: shop.rebalance.all_resumed)
        assert not len(shop.rebalance.partitions)

    scenario(test)


def test_a_loss_during_the_drain_ends_it() -> None:
    async def test(shop: Shop) -> None:
        await shop.until_all_read(GOING, STAYING, OTHER)
        shop.hangs = frozenset({GOING})
        shop.broker.publish("orders", b"", partition=0)
        await until(lambda: len(shop.seen_of(GOING)) == 6)
        revoking = shop.revoke(GOING)
        await asyncio.sleep(0.1)
        assert not revoking.done()
        shop.transport.listener.lost([GOING, STAYING, OTHER])
        await asyncio.wait_for(revoking, 2.0)
        assert not len(shop.rebalance.partitions)
        assert not shop.rebalance.opened.is_set()

    scenario(test)


# News, and no news ---------------------------------------------------------------------


def test_partitions_open_although_their_generation_rises() -> None:
    async def test(shop: Shop) -> None:
        await asyncio.sleep(0.1)
        shop.transport.raise_generation()
        await shop.until_all_read(GOING, STAYING, OTHER)
        assert shop.rebalance.all_resumed

    scenario(test, committed=0.4, log_ranges=0.4, commit=0.4)


@pytest.mark.parametrize("membership", [Membership("another", 9), NOT_A_MEMBER])
def test_nothing_opens_under_another_membership(membership: Membership) -> None:
    """The engine has not heard of the loss yet."""

    async def test(shop: Shop) -> None:
        await asyncio.sleep(0.1)
        shop.transport._membership = membership
        await asyncio.sleep(5.0)
        assert not len(shop.rebalance.partitions)
        assert not shop.rebalance.opened.is_set()

    scenario(test, committed=0.4)


def test_nothing_opens_after_a_client_with_manual_assignment_has_ended() -> None:
    """Neither it nor a client without a membership has a member id."""

    async def test(shop: Shop) -> None:
        shop.broker.group("billing").commit_from_outside(dict.fromkeys([GOING, STAYING, OTHER], 0))
        shop.transport._membership = NOT_A_MEMBER
        await asyncio.sleep(5.0)
        assert not shop.rebalance.opened.is_set()

    scenario(test, manually=True, committed=0.4)


def test_a_partition_opens_that_comes_back_under_the_same_membership() -> None:
    async def test(shop: Shop) -> None:
        await shop.until_all_read(GOING, STAYING, OTHER)
        await shop.revoke(GOING)
        await until(lambda: shop.rebalance.all_resumed)
        shop.transport._assigned[GOING] = _Assigned()
        shop.transport.listener.assigned(shop.transport.assigned, shop.transport.membership())
        shop.broker.publish("orders", b"", partition=0)
        await until(lambda: shop.seen_of(GOING) == [*range(6)], timeout=10.0)

    scenario(test)


def test_an_assignment_with_a_newer_generation_is_news() -> None:
    async def test(shop: Shop) -> None:
        await shop.until_all_read(GOING, STAYING, OTHER)
        shop.transport.raise_generation()
        shop.transport.listener.assigned(shop.transport.assigned, shop.transport.membership())
        await until(lambda: shop.rebalance.all_resumed)
        report = shop.app.statistics().rebalance_reports[-1]
        assert (shop.app.statistics().rebalances, report.kept) == (2, 3)
        assert report.generation == shop.transport.membership().generation

    scenario(test)


def test_a_client_that_is_lost_during_a_drain_leaves_nothing_behind() -> None:
    async def test(shop: Shop) -> None:
        await shop.until_all_read(GOING, STAYING, OTHER)
        shop.hangs = frozenset({GOING})
        shop.broker.publish("orders", b"", partition=0)
        await until(lambda: len(shop.seen_of(GOING)) == 6)
        revoking = shop.revoke(GOING)
        await asyncio.sleep(0.1)
        shop.hangs = frozenset()
        shop.transport.kill()
        await asyncio.wait([revoking], timeout=5.0)
        await until(lambda: len(shop.transports) == 2 and shop.rebalance.all_resumed)
        assert shop.app.statistics().rebalances == 2

    scenario(test)


def test_commits_carry_a_generation_that_has_risen() -> None:
    async def test(shop: Shop) -> None:
        await shop.until_all_read(GOING, STAYING, OTHER)
        shop.transport.raise_generation()
        shop.broker.publish("orders", b"", partition=1)
        await until(lambda: shop.broker.committed("billing", *STAYING) == 6, timeout=10.0)
        assert shop.broker.commits[-1].membership == shop.transport.membership()

    scenario(test)


def test_partitions_that_come_back_continue_in_place_although_their_generation_has_risen() -> None:
    async def test(shop: Shop) -> None:
        await shop.until_all_read(GOING, STAYING, OTHER)
        await until(lambda: shop.broker.committed("billing", *OTHER) == 5)
        before = {owned.topic_partition: owned.number for owned in shop.rebalance.partitions}
        shop.transport.raise_generation()
        shop.broker.group("billing").rebalance()
        await until(lambda: shop.app.statistics().rebalances == 2 and shop.rebalance.all_resumed)
        assert {owned.topic_partition: owned.number for owned in shop.rebalance.partitions} == before

    scenario(test)


def test_a_repeated_assignment_changes_nothing() -> None:
    async def test(shop: Shop) -> None:
        await shop.until_all_read(GOING, STAYING, OTHER)
        before = shop.app.statistics()
        shop.transport.listener.assigned(shop.transport.assigned, shop.transport.membership())
        assert shop.rebalance.opened.is_set()
        await asyncio.sleep(5.0)
        after = shop.app.statistics()
        assert (after.rebalances, after.rebalance_reports) == (before.rebalances, before.rebalance_reports)

    scenario(test)


def test_partitions_that_are_not_open_yet_do_not_count_as_kept() -> None:
    async def test(shop: Shop) -> None:
        await until(lambda: len(shop.rebalance.partitions) == 3)
        assert not any(partition.is_open for partition in shop.rebalance.partitions)
        await shop.revoke(GOING)
        report = shop.app.statistics().rebalance_reports[-1]
        assert (report.assigned, report.kept) == (2, 0)

    scenario(test, commit=0.5)


def test_each_revocation_counts_as_one_rebalance() -> None:
    async def test(shop: Shop) -> None:
        await shop.until_all_read(GOING, STAYING, OTHER)
        await shop.revoke(GOING)
        await shop.revoke(STAYING)
        await until(lambda: shop.rebalance.all_resumed)
        statistics = shop.app.statistics()
        assert statistics.rebalances == 3
        assert [(report.revoked, report.assigned, report.kept) for report in statistics.rebalance_reports] == [
            (0, 3, 0),
            (1, 2, 2),
            (1, 1, 1),
        ]

    scenario(test)
