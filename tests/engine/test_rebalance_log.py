"""The rebalance report: cause, phases, records in flight, kept and revoked partitions."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aioshard import App, Record
from aioshard.engine.rebalance_log import RebalanceLog
from aioshard.errors import NotDrainedError
from aioshard.observe import RebalanceReport
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryTransport, run
from tests.engine.live_apps import until

TAKES = 0.5


class Member:
    """An app with four partitions, whose handler takes half a second, or longer than a drain may."""

    def __init__(
        self,
        broker: InMemoryBroker,
        *,
        takes: float = TAKES,
        transport: type[InMemoryTransport] = InMemoryTransport,
        **latency: float,
    ) -> None:
        self.app = App("group", auto_offset_reset="earliest", drain_timeout=2.0, commit_timeout=1.0)
        self.broker = broker
        self.transport = transport
        self.transports: list[InMemoryTransport] = []
        self.latency = latency
        self.running = 0

        @self.app.consume("orders")
        async def handle(record: Record) -> None:  # noqa: ARG001
            self.running += 1
            try:
                await asyncio.sleep(takes)
            finally:
                self.running -= 1

    @asynccontextmanager
    async def started(self) -> AsyncIterator[App]:
        def latency(operation: str) -> float:
            return self.latency.get(operation.replace(" ", "_"), 0.0)

        def connect() -> InMemoryTransport:
            self.transports.append(self.transport(self.broker, "group", latency=latency))
            return self.transports[-1]

        async with self.app.started(connect):
            yield self.app

    @property
    def reports(self) -> tuple[RebalanceReport, ...]:
        return self.app.statistics().rebalance_reports


class Incremental(InMemoryTransport):
    """Revoke some of the assigned partitions, as an incremental rebalance does."""

    async def take_away(self, *partitions: TopicPartition) -> None:
        self.pause(partitions)
        assert self._listener is not None
        await self._listener.revoked(partitions)


def publish(broker: InMemoryBroker, count: int) -> None:
    for number in range(count):
        broker.publish("orders", b"", key=b"%d" % number, partition=number % 4)


def scenario(test: Callable[[InMemoryBroker], Any]) -> None:
    async def live() -> None:
        broker = InMemoryBroker(partitions=4, clock=lambda: 0.0)
        broker.create_topic("orders", 4)
        await test(broker)

    run(live())


def phases(report: RebalanceReport) -> float:
    return report.drain_seconds + report.commit_seconds + report.join_seconds + report.resume_seconds


def test_the_first_assignment_has_its_own_report() -> None:
    async def test(broker: InMemoryBroker) -> None:
        member = Member(broker, log_ranges=0.2)
        async with member.started():
            (report,) = member.reports

        assert (report.number, report.phase, report.assigned, report.kept) == (1, "over", 4, 0)
        assert "joined" in report.cause
        assert report.resume_seconds == pytest.approx(0.2, abs=0.05)
        assert report.seconds == pytest.approx(phases(report))

    scenario(test)


def test_a_rebalance_that_keeps_every_partition_is_reported() -> None:
    async def test(broker: InMemoryBroker) -> None:
        publish(broker, 40)
        member = Member(broker, commit=0.1)
        async with member.started() as app:
            await until(lambda: member.running > 10)
            broker.group("group").rebalance()
            await until(lambda: app.statistics().rebalances == 2 and member.reports[-1].phase == "over")

        report = member.reports[1]
        assert report.in_flight > 10
        assert (report.revoked, report.assigned, report.kept, report.dropped) == (4, 4, 4, 0)
        assert (report.drained, report.cancelled, report.replayed) == (report.in_flight, 0, 0)
        assert 0 < report.drain_seconds <= TAKES + 0.1
        assert report.commit_seconds == pytest.approx(0.1, abs=0.02)
        assert report.seconds == pytest.approx(phases(report))

    scenario(test)


def test_revoked_and_kept_partitions_are_counted_separately() -> None:
    async def test(broker: InMemoryBroker) -> None:
        publish(broker, 8)
        member = Member(broker, transport=Incremental)
        async with member.started():
            await until(lambda: member.running == 8)
            (transport,) = member.transports
            assert isinstance(transport, Incremental)
            await transport.take_away(TopicPartition("orders", 1))
            await until(lambda: member.reports[-1].phase == "over")
            report = member.reports[-1]

        assert (report.number, report.revoked, report.assigned, report.kept) == (2, 1, 3, 3)
        assert (report.in_flight, report.drained, report.cancelled) == (2, 2, 0)

    scenario(test)


def test_runs_of_revoked_partitions_that_outlast_the_drain_are_counted() -> None:
    async def test(broker: InMemoryBroker) -> None:
        publish(broker, 8)
        member = Member(broker, takes=3.0, transport=Incremental)
        async with member.started():
            await until(lambda: member.running == 8)
            (transport,) = member.transports
            assert isinstance(transport, Incremental)
            await transport.take_away(TopicPartition("orders", 1), TopicPartition("orders", 2))
            report = member.reports[-1]
            assert (report.revoked, report.in_flight, report.drained, report.cancelled) == (2, 4, 0, 4)
            await until(lambda: member.running == 4)

    scenario(test)


def test_runs_that_outlast_the_drain_are_cancelled_and_counted() -> None:
    async def test(broker: InMemoryBroker) -> None:
        publish(broker, 8)
        member = Member(broker, takes=30.0)
        async with member.started() as app:
            await until(lambda: member.running == 8)
            broker.group("group").rebalance()
            await until(lambda: app.statistics().rebalances == 2 and member.reports[-1].phase == "over")
            report = member.reports[1]
            assert (report.in_flight, report.drained, report.cancelled) == (8, 0, 8)
            assert report.drain_seconds == pytest.approx(2.0, abs=0.1)
            assert report.kept == 4
            await until(lambda: member.running == 8)
            assert member.reports[1].replayed == app.statistics().replayed == 8

    with pytest.raises(NotDrainedError):
        scenario(test)


def test_partitions_that_go_to_another_member_are_not_kept() -> None:
    async def test(broker: InMemoryBroker) -> None:
        publish(broker, 40)
        one, two = Member(broker), Member(broker)
        async with one.started():
            await until(lambda: one.running > 0)
            async with two.started():
                await until(lambda: one.reports[-1].phase == "over" and one.reports[-1].number == 2)
                report = one.reports[-1]
                assert (report.revoked, report.assigned, report.kept) == (4, 2, 2)
                assert "have changed" in report.cause

    scenario(test)


def test_a_dropped_member_is_reported() -> None:
    async def test(broker: InMemoryBroker) -> None:
        publish(broker, 40)
        member = Member(broker)
        async with member.started():
            await until(lambda: member.running > 0)
            broker.group("group").lose()
            await until(lambda: len(member.reports) > 1 and member.reports[-1].phase == "over")
            report = member.reports[-1]

        assert "membership" in report.cause
        assert (report.kept, report.drained, report.drain_seconds) == (0, 0, 0.0)
        assert report.dropped > 0

    scenario(test)


def test_a_rebalance_in_progress_reports_its_phase() -> None:
    async def test(broker: InMemoryBroker) -> None:
        publish(broker, 8)
        member = Member(broker, takes=1.0)
        async with member.started() as app:
            await until(lambda: member.running == 8)
            broker.group("group").rebalance()
            await until(lambda: member.reports[-1].phase == "drain")
            await asyncio.sleep(0.2)
            assert member.reports[-1].drain_seconds >= 0.2
            assert "being finished" in app.explain()
            await until(lambda: member.reports[-1].phase == "over")

    scenario(test)


def test_a_rebalance_ends_when_the_app_stops() -> None:
    async def test(broker: InMemoryBroker) -> None:
        publish(broker, 8)
        member = Member(broker, takes=1.0)
        async with member.started() as app:
            await until(lambda: member.running == 8)
            broker.group("group").rebalance()
            await until(lambda: member.reports[-1].phase == "drain")
        stopped = app.statistics().rebalance_seconds
        assert stopped > 0
        await asyncio.sleep(60.0)
        assert app.statistics().rebalance_seconds == stopped

    scenario(test)


def test_the_latest_twenty_rebalances_are_kept() -> None:
    log = RebalanceLog(lambda: 0.0, [])
    for _ in range(50):
        log.revoked(1, 0, lost=False)
        log.enter("join")
        log.assigned(1, 0, 1)
        log.resumed()

    assert [report.number for report in log.reports()] == list(range(31, 51))
    assert log.doing() is None
