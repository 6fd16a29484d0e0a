"""Stopping while commits are not acknowledged, for a while or permanently."""

import asyncio
from collections.abc import Callable

import pytest

from aioshard import App, Record
from aioshard.errors import ClientLostError, NotDrainedError
from aioshard.ports import GroupHasMembersError
from aioshard.records import TopicPartition
from aioshard.testing import TestClient, run
from tests.engine.running import publish, until

RECORDS = 12
PARTITIONS = 3
SHUTDOWN_TIMEOUT = 25.0


class Stop:
    """Stops an app while its records run, which they do for half a second, and times it."""

    def __init__(self) -> None:
        self.app = App("stopping", shutdown_timeout=SHUTDOWN_TIMEOUT)
        self.client = TestClient(self.app)
        self.started = 0
        self.seconds = 0.0
        self.error: NotDrainedError | None = None

        @self.app.consume("orders")
        async def handle(record: Record) -> None:  # noqa: ARG001
            self.started += 1
            await asyncio.sleep(0.5)

    def bring_brokers_back(self) -> None:
        self.client.broker.available = True

    def run(self, before: Callable[[], object]) -> None:
        async def test() -> None:
            try:
                async with self.client:
                    await publish(self.client, RECORDS, partitions=PARTITIONS)
                    await until(lambda: self.started == RECORDS)
                    before()
                    self.seconds = -asyncio.get_running_loop().time()
            except NotDrainedError as error:
                self.error = error
            self.seconds += asyncio.get_running_loop().time()

        run(test())

    @property
    def committed(self) -> int:
        return sum(self.client.committed("orders", partition) or 0 for partition in range(PARTITIONS))


def test_the_last_commit_survives_a_short_broker_outage() -> None:
    stop = Stop()

    def before() -> None:
        stop.client.broker.available = False
        asyncio.get_running_loop().call_later(8.0, stop.bring_brokers_back)

    stop.run(before)

    assert stop.error is None
    assert stop.committed == RECORDS
    assert 8.0 <= stop.seconds < 9.0


def test_a_failed_last_commit_raises_and_names_the_partitions() -> None:
    stop = Stop()
    stop.run(lambda: setattr(stop.client.broker, "available", False))

    assert stop.error is not None
    assert stop.error.records == ()
    assert stop.error.uncommitted == {"orders/0": 4, "orders/1": 4, "orders/2": 4}
    assert "orders/1" in str(stop.error)
    assert SHUTDOWN_TIMEOUT - 2.0 <= stop.seconds <= SHUTDOWN_TIMEOUT


def test_an_unanswered_commit_leaves_time_for_the_next_ones() -> None:
    """Each request has `commit_timeout`: the fifth second is not the last."""
    stop = Stop()
    answers: list[float] = []

    def latency(operation: str) -> float:
        return answers.pop() if operation == "commit" and answers else 0.0

    stop.client = TestClient(stop.app, latency=latency)
    stop.run(lambda: answers.extend([1_000.0, 1_000.0]))

    assert stop.error is None
    assert stop.committed == RECORDS
    assert not answers


@pytest.mark.parametrize("lose", ["member", "client"])
def test_finished_records_lost_with_the_membership_are_reported(lose: str) -> None:
    stop = Stop()

    def before() -> None:
        loop = asyncio.get_running_loop()
        broker = stop.client.broker
        broker.available = False
        if lose == "member":
            loop.call_later(3.0, stop.client.group.lose)
        else:
            loop.call_later(3.0, broker.fail_next_poll, ClientLostError("gone"))
        loop.call_later(6.0, stop.bring_brokers_back)

    stop.run(before)

    assert stop.error is not None
    assert sum(stop.error.uncommitted.values()) == RECORDS
    assert stop.committed == 0, "what is not ours any more is not committed"


def test_records_committed_by_a_rebalance_are_not_reported() -> None:
    stop = Stop()
    stop.run(lambda: stop.client.group.revoke(TopicPartition("orders", 1)))

    assert stop.error is None
    assert stop.committed == RECORDS


@pytest.mark.parametrize("available", [True, False])
def test_a_rebalance_reports_finished_but_uncommitted_records(
    available: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stop = Stop()

    async def test() -> None:
        async with stop.client as client:
            await publish(client, RECORDS, partitions=PARTITIONS)
            await until(lambda: stop.started == RECORDS)
            client.broker.available = available
            client.group.revoke(TopicPartition("orders", 1))
            await until(lambda: not client.group.rebalancing)
            client.broker.available = True
            await until(lambda: client.committed("orders", 0) == RECORDS / PARTITIONS)

    run(test())

    told = [record for record in caplog.records if getattr(record, "event", None) == "uncommitted"]
    assert [record.__dict__["records"] for record in told] == ([] if available else [RECORDS])


def test_an_app_refused_because_of_group_members_raises_that_reason() -> None:
    """The reason is worth more than its consequence."""
    stop = Stop()
    stop.run(lambda: stop.client.broker.fail_next_commit(GroupHasMembersError("the group has members")))

    assert stop.error is None


def test_until_caught_up_raises_when_the_last_commit_fails() -> None:
    app = App("stopping", shutdown_timeout=5.0)
    client = TestClient(app)

    @app.consume("orders")
    async def handle(record: Record) -> None:  # noqa: ARG001
        client.broker.available = False

    async def test() -> None:
        async with client:
            await publish(client, 1)
            await app.serve(until_caught_up=True)

    with pytest.raises(NotDrainedError, match="orders/0"):
        run(test())
