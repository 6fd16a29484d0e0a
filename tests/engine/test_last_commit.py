"""Stopping while commits are not acknowledged, for a while or permanently."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aioshard import App, Record
from aioshard.errors import ClientLostError, GroupHasMembersError, NotDrainedError
from aioshard.records import TopicPartition
from aioshard.testing import TestClient, run
from tests.engine.live_apps import publish, until

RECORDS = 12
PARTITIONS = 3
SHUTDOWN_TIMEOUT = 25.0
EXACTLY_ONCE: dict[str, Any] = {"processing_guarantee": "exactly_once"}


def events(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {getattr(record, "event", "") for record in caplog.records}


def processed(app: App) -> int:
    return sum(handler.processed for handler in app.statistics().handlers)


class Stop:
    """Stops an app while its records run, which they do for half a second, and times it."""

    def __init__(self, **settings: Any) -> None:
        self.app = App("stopping", shutdown_timeout=SHUTDOWN_TIMEOUT, **settings)
        self.client = TestClient(self.app)
        self.started = 0
        self.seconds = 0.0
        self.error: NotDrainedError | None = None
        self.is_prepared = False

        @self.app.consume("orders")
        async def handle(record: Record) -> None:  # noqa: ARG001
            self.started += 1
            await asyncio.sleep(0.5)

    def bring_brokers_back(self) -> None:
        self.client.broker.available = True

    def run(self, before: Callable[[], object]) -> None:
        async def act() -> None:
            before()

        self.run_after(act)

    def run_after(self, before: Callable[[], Awaitable[object]]) -> None:
        async def test() -> None:
            try:
                async with self.client:
                    await publish(self.client, RECORDS, partitions=PARTITIONS)
                    await until(lambda: self.started == RECORDS)
                    await before()
                    self.is_prepared = True
                    self.seconds = -asyncio.get_running_loop().time()
            except NotDrainedError as error:
                self.error = error
            self.seconds += asyncio.get_running_loop().time()

        run(test())
        assert self.is_prepared, "the error of the stop hides that of the preparation"

    @property
    def has_epochs(self) -> bool:
        """Whether a partition with records is ours."""
        return any(partition.partition < PARTITIONS for partition in self.app.statistics().partitions)

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


def test_an_outage_that_outlasts_the_app_is_not_reported_as_over(caplog: pytest.LogCaptureFixture) -> None:
    """A client that is being closed sees no outage any more; the brokers are still away."""
    stop = Stop()
    stop.client = TestClient(stop.app, latency=lambda operation: 4.0 if operation == "close" else 0.0)

    async def before() -> None:
        stop.client.broker.available = False
        await until(lambda: "trouble" in events(caplog))

    stop.run_after(before)

    assert stop.error is not None
    assert "trouble_over" not in events(caplog)


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


@pytest.mark.parametrize("lose", ["member", "client", "transaction"])
def test_finished_records_of_an_ended_epoch_are_reported(lose: str) -> None:
    """Nothing is in flight when the app stops: the epochs have ended, and new ones cannot begin yet."""
    stop = Stop(**EXACTLY_ONCE if lose == "transaction" else {})
    broker = stop.client.broker

    async def before() -> None:
        broker.available = False
        await until(lambda: processed(stop.app) == RECORDS)
        if lose == "member":
            stop.client.group.lose()
        elif lose == "client":
            broker.fail_next_poll(ClientLostError("gone"))
        await until(lambda: not stop.has_epochs)

    stop.run_after(before)

    assert stop.error is not None
    assert stop.error.records == ()
    assert stop.error.uncommitted == {"orders/0": 4, "orders/1": 4, "orders/2": 4}
    assert stop.committed == 0
    assert stop.seconds < SHUTDOWN_TIMEOUT / 2, "the stop does not wait"


@pytest.mark.parametrize("settings", [{}, EXACTLY_ONCE], ids=["at-least-once", "exactly-once"])
def test_records_that_ran_again_after_an_ended_epoch_are_not_reported(settings: dict[str, Any]) -> None:
    stop = Stop(**settings)
    broker = stop.client.broker

    async def before() -> None:
        broker.available = False
        await until(lambda: processed(stop.app) == RECORDS)
        broker.fail_next_poll(ClientLostError("gone"))
        await until(lambda: not stop.has_epochs)
        broker.available = True
        await until(lambda: stop.committed == RECORDS)

    stop.run_after(before)

    assert stop.error is None


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "deleted by retention"])
def test_records_of_an_ended_epoch_are_reported_until_they_have_run_again(is_kept: bool) -> None:
    stop = Stop()
    broker = stop.client.broker

    async def before() -> None:
        broker.available = False
        await until(lambda: processed(stop.app) == RECORDS)
        broker.fail_next_poll(ClientLostError("gone"))
        await until(lambda: not stop.has_epochs)
        stop.app.pause_handler("handle")
        for partition in range(PARTITIONS):
            if not is_kept:
                broker.log("orders", partition).truncate_before(4)
        broker.available = True
        await until(lambda: stop.has_epochs and stop.app.statistics().trouble is None)
        await asyncio.sleep(5.0)

    stop.run_after(before)

    if is_kept:
        assert stop.error is not None
        assert stop.error.uncommitted == {"orders/0": 4, "orders/1": 4, "orders/2": 4}
    else:
        assert stop.error is None


def test_records_of_an_ended_epoch_are_reported_although_the_next_epoch_ends_too() -> None:
    stop = Stop()
    broker = stop.client.broker

    async def lose_client() -> None:
        broker.fail_next_poll(ClientLostError("gone"))
        await until(lambda: not stop.has_epochs)
        broker.available = True
        await until(lambda: stop.has_epochs and stop.app.statistics().trouble is None)

    async def before() -> None:
        broker.available = False
        await until(lambda: processed(stop.app) == RECORDS)
        stop.app.pause_handler("handle")
        for _ in range(2):
            await lose_client()

    stop.run_after(before)

    assert stop.error is not None
    assert stop.error.uncommitted == {"orders/0": 4, "orders/1": 4, "orders/2": 4}


@pytest.mark.parametrize("settings", [{}, EXACTLY_ONCE], ids=["at-least-once", "exactly-once"])
def test_records_that_another_member_has_got_are_not_reported(settings: dict[str, Any]) -> None:
    """The rebalance has reported them: they are not ours to commit when the app stops."""
    stop = Stop(**settings)
    broker, group = stop.client.broker, stop.client.group

    async def before() -> None:
        broker.available = False
        await until(lambda: processed(stop.app) == RECORDS)
        broker.fail_next_poll(ClientLostError("gone"))
        await until(lambda: not stop.has_epochs)
        group.revoke(*(TopicPartition("orders", partition) for partition in range(PARTITIONS)))
        broker.available = True
        await until(lambda: group.members and not group.rebalancing)

    stop.run_after(before)

    assert stop.error is None


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

    logged = [record for record in caplog.records if getattr(record, "event", None) == "uncommitted"]
    assert [record.__dict__["records"] for record in logged] == ([] if available else [RECORDS])


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
