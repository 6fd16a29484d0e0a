"""One log line with structured fields per state change, and none per record."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aioshard import App, Batch, DeadLetter, Park, Record, Retry
from aioshard.engine.committer import Committer
from aioshard.errors import CommitError, ConnectError
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, TestClient, run
from tests.engine.deliveries import make_buffer
from tests.engine.live_apps import until

ONCE = Retry(attempts=1)

Act = Callable[["World", TestClient], Awaitable[object]]


class World:
    """An app on two partitions whose log is looked at."""

    def __init__(self, caplog: pytest.LogCaptureFixture, **settings: Any) -> None:
        caplog.set_level(logging.INFO, "aioshard")
        self._caplog = caplog
        self.app = App("billing", **({"commit_interval": 0.1, "stuck_after": 4.0} | settings))
        self.gate = asyncio.Event()

    def lines(self, event: str) -> list[dict[str, Any]]:
        """The fields of the lines about something that has happened."""
        standard = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "event"}
        records = [vars(record) for record in self._caplog.records if getattr(record, "event", None) == event]
        return [{name: value for name, value in fields.items() if name not in standard} for fields in records]

    def run(self, act: Act) -> None:
        async def scenario() -> None:
            async with TestClient(self.app, broker=InMemoryBroker(partitions=2)) as client:
                await act(self, client)

        run(scenario())


async def nothing(_: Record) -> None:
    pass


@pytest.fixture
def world(caplog: pytest.LogCaptureFixture) -> World:
    return World(caplog)


async def settle(_: World, client: TestClient) -> None:
    for number in range(50):
        await client.publish("orders", "{}", partition=number % 2)
    await client.settle(60)


def test_the_start_and_the_end_of_an_app_are_logged(world: World) -> None:
    world.app.consume("orders")(nothing)

    world.run(settle)

    assert world.lines("running") == [{"group": "billing", "partitions": 2}]
    assert world.lines("draining") == [{"group": "billing", "in_flight": 0}]
    assert world.lines("stopped") == [{"group": "billing"}]


def test_every_assigned_partition_has_a_log_line_with_its_state(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "aioshard")
    world.app.consume("orders")(nothing)

    async def act(world: World, client: TestClient) -> None:
        await settle(world, client)
        await client.revoke("orders", 1)
        await client.assign("orders", 1)
        await until(lambda: len([line for line in world.lines("assigned") if line["partition"] == 1]) == 2)

    world.run(act)

    at_first = {line["partition"]: line for line in world.lines("assigned")[:2]}
    assert at_first[0] == {
        "topic": "orders",
        "partition": 0,
        "epoch": at_first[0]["epoch"],
        "committed": 0,
        "position": 0,
        "incomplete": 0,
        "started": 0,
        "finished": 0,
        "group": "billing",
    }
    again = [line for line in world.lines("assigned") if line["partition"] == 1][-1]
    assert (again["committed"], again["position"]) == (25, 25)
    assert len(world.lines("rebalanced")) >= 2
    assert world.lines("revoked")[0]["partitions"] == 2
    assert [line["partition"] for line in world.lines("epoch_ended") if line["dropped"] == 0][:1] == [1]


@pytest.mark.chaos
def test_the_log_of_a_whole_day_stays_readable(caplog: pytest.LogCaptureFixture) -> None:
    """A start, two rebalances, 500 failures of three kinds, an outage of 10 s, a stop; each cause is logged once."""
    partitions = 60
    app = App("billing", auto_offset_reset="earliest")
    caplog.set_level(logging.INFO, "aioshard")

    @app.consume("orders", retry=Retry(attempts=2, initial=1.0), on_failure=DeadLetter("orders.dlt", breaker=None))
    async def handle(record: Record) -> None:
        number = int(record.value or b"")
        if number % 4 == 0:
            raise ValueError(f"{number} is a multiple of 4")
        if number % 4 == 1:
            dict[int, str]()[number]
        if number % 8 == 2:
            await missing(number)

    async def missing(number: int) -> None:
        raise ConnectionError(f"{number} was not found")

    async def scenario() -> None:
        async with TestClient(app, broker=InMemoryBroker(partitions=partitions)) as client:
            for number in range(800):
                await client.publish("orders", str(number), partition=number % partitions)
            await client.settle(600)
            for _ in range(2):
                client.group.rebalance()
                await until(lambda: client.group.rebalancing)
                await until(lambda: not client.group.rebalancing)
                await client.settle(600)
            client.broker.available = False
            client.broker.fail_next_poll(ConnectError("the broker is away"))
            await asyncio.sleep(10.0)
            client.broker.available = True
            await client.publish("orders", "3")
            await client.settle(600)
            assert app.statistics().handlers[0].dead_lettered == 500
            assert app.statistics().rebalances >= 3
            await asyncio.sleep(120.0)

    run(scenario())

    lines = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert len(lines) < 60, "\n".join(record.getMessage() for record in lines)
    traced = [record.exc_info[0] for record in lines if record.exc_info]
    assert sorted(kind.__name__ for kind in traced if kind) == ["ConnectionError", "KeyError", "ValueError"]
    by_event = {getattr(record, "event", None): record for record in lines}
    assert {"running", "rebalanced", "diverted", "retry", "draining", "stopped"} <= by_event.keys()
    assert sum(vars(record).get("repeats", 0) for record in lines if vars(record).get("event") == "diverted") == 500 - 3


def test_one_log_line_counts_the_halted_records(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aioshard")
    app = App("billing", auto_offset_reset="earliest", stuck_after=1000.0)

    @app.consume("orders", retry=ONCE)
    async def handle(record: Record) -> None:
        raise ValueError(record.value)

    async def scenario() -> None:
        async with TestClient(app) as client:
            for number in range(190):
                await client.publish("orders", "x", key=str(number))
            await asyncio.sleep(130.0)

    run(scenario())

    halted = [record for record in caplog.records if getattr(record, "event", None) == "halted"]
    assert [getattr(record, "repeats", None) for record in halted] == [None, 189]
    assert [record.levelno for record in halted] == [logging.ERROR] * 2
    assert [bool(record.exc_info) for record in halted] == [True, False]


def test_the_result_of_a_drain_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    world = World(caplog, drain_timeout=0.5)
    caplog.set_level(logging.DEBUG, "aioshard")

    @world.app.consume("orders")
    async def handle(_: Record) -> None:
        await world.gate.wait()

    async def act(world: World, client: TestClient) -> None:
        await client.publish("orders", "{}", partition=1)
        await until(lambda: world.app.statistics().handlers[0].busy == 1)
        await client.revoke("orders", 1)
        world.gate.set()

    world.run(act)

    assert world.lines("revoked")[0] == {"partitions": 2, "in_flight": 1}
    assert world.lines("drained")[0] == {"drained": 0, "cancelled": 1}


def test_pauses_and_seeks_of_the_application_are_logged(world: World) -> None:
    @world.app.consume("orders")
    async def handle(_: Record) -> None: ...

    async def act(world: World, _: TestClient) -> None:
        world.app.pause("orders", 1, why="the ledger is being migrated")
        world.app.resume("orders", 1)
        await world.app.seek("orders", 0, "beginning")

    world.run(act)

    partition = {"topic": "orders", "partition": 1}
    assert world.lines("paused") == [partition | {"why": "the ledger is being migrated"}]
    assert world.lines("resumed") == [partition]
    assert world.lines("seek") == [{"topic": "orders", "partition": 0, "offset": 0}]


def test_a_retried_halted_and_released_record_is_logged(world: World) -> None:
    @world.app.consume("orders", retry=Retry(attempts=2, initial=0.01))
    async def handle(_: Record) -> None:
        raise LookupError("no such customer")

    async def act(world: World, client: TestClient) -> None:
        await client.publish("orders", "{}", partition=1, key="alice")
        await until(lambda: world.lines("stuck"))
        world.app.skip("orders", 1, 0)
        await until(lambda: world.lines("advances_again"))
        await client.settle(60)

    world.run(act)

    key = world.lines("halted")[0]["key"]
    record = {"topic": "orders", "partition": 1, "offset": 0, "key": key}
    ours = {"handler": "handle", "group": "billing"}
    assert key.startswith("#")
    assert world.lines("retry") == [record | ours | {"attempt": 1, "error": "LookupError"}]
    assert world.lines("halted") == [record | ours | {"attempt": 2, "error": "LookupError"}]
    assert world.lines("stuck") == world.lines("released") == world.lines("advances_again") == [record]


def test_a_dead_lettered_record_is_logged(world: World) -> None:
    @world.app.consume("orders", retry=ONCE, on_failure=DeadLetter("orders.dlt"))
    async def handle(_: Record) -> None:
        raise LookupError("no such customer")

    async def act(_: World, client: TestClient) -> None:
        await client.publish("orders", "{}", partition=1)
        await client.settle(60)

    world.run(act)

    (line,) = world.lines("diverted")
    assert (line["offset"], line["attempt"], line["error"], line["handler"]) == (0, 1, "LookupError", "handle")


def test_refused_commits_and_their_recovery_are_logged(world: World) -> None:
    world.app.consume("orders")(nothing)

    async def act(world: World, client: TestClient) -> None:
        client.fail_next_commit(CommitError("the coordinator moves"))
        await settle(world, client)

    world.run(act)

    assert world.lines("commit_failed") == [{"failures": 1}]
    assert world.lines("commit_recovered") == [{}]


def test_a_lost_client_and_its_replacement_are_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "aioshard")
    world.app.consume("orders")(nothing)

    async def act(world: World, client: TestClient) -> None:
        client.transports[-1].kill()
        await until(lambda: world.lines("client_rebuilt"))
        await settle(world, client)

    world.run(act)

    assert world.lines("client_lost") == world.lines("client_rebuilt") == [{"group": "billing"}]
    assert {line["partition"] for line in world.lines("epoch_ended")[:2]} == {0, 1}


def test_a_run_that_outlives_its_timeout_is_logged(world: World) -> None:
    @world.app.consume("orders", timeout=0.5, retry=ONCE, on_failure="skip")
    async def handle(_: Record) -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            await world.gate.wait()
            raise

    async def act(world: World, client: TestClient) -> None:
        await client.publish("orders", "{}", partition=1)
        await until(lambda: world.lines("outlives_timeout"))
        world.gate.set()
        await client.settle(60)

    world.run(act)

    assert world.lines("outlives_timeout") == [{"topic": "orders", "partition": 1, "offset": 0}]


def test_a_batch_that_swallows_its_cancellation_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    world = World(caplog, drain_timeout=0.5)

    @world.app.consume("orders", batch=Batch(max_records=2, linger=1.0))
    async def handle(_: list[Record]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)

    async def act(world: World, client: TestClient) -> None:
        for key in ("alice", "bob"):
            await client.publish("orders", "{}", partition=1, key=key)
        await until(lambda: world.app.statistics().handlers[0].busy == 1)
        await client.revoke("orders", 1)

    world.run(act)

    (line,) = world.lines("swallowed")
    assert (line["topic"], line["partition"], line["offset"], line["records"]) == ("orders", 1, 0, 2)
    assert (line["handler"], line["group"]) == ("handle", "billing")


def test_parked_records_of_an_assigned_partition_are_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "aioshard")

    @world.app.consume("orders", retry=ONCE, on_failure=Park("orders.parked"))
    async def handle(_: Record) -> None:
        raise LookupError("no such customer")

    async def act(world: World, client: TestClient) -> None:
        for _number in range(3):
            await client.publish("orders", "{}", partition=1, key="alice")
        await client.settle(60)
        await client.revoke("orders", 1)
        await client.assign("orders", 1)
        await until(lambda: world.lines("parked"))

    world.run(act)

    assert world.lines("parked") == [{"topic": "orders", "partition": 1, "records": 3, "keys": 1}]


def test_a_committed_offset_outside_the_log_is_logged(world: World) -> None:
    world.app.consume("orders")(nothing)

    async def act(_: World, client: TestClient) -> None:
        await client.revoke("orders", 1)
        client.group.commit_from_outside({TopicPartition("orders", 1): 50}, metadata="another program's")
        await client.assign("orders", 1)
        await until(lambda: world.lines("out_of_range"))

    world.run(act)

    place = {"topic": "orders", "partition": 1, "offset": 50}
    assert world.lines("out_of_range") == [place | {"position": 0}]
    assert world.lines("commit_metadata_unused") == [place | {"why": "another program wrote it"}]


def test_a_broker_that_rejects_long_metadata_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    world = World(caplog)
    Committer(make_buffer(), lambda: 0.0, interval=1.0, timeout=5.0)._shorten(3000)

    (line,) = world.lines("commit_metadata_shortened")
    assert (line["refused"], line["tried"]) == (3000, 1500)


def test_when_a_closing_loop_cancels_all_tasks_one_crash_is_logged(world: World) -> None:
    world.app.consume("orders", concurrency=8)(nothing)

    async def act(world: World, _: TestClient) -> None:
        for task in asyncio.all_tasks():
            if "worker" in task.get_name():
                task.cancel()
        await until(lambda: world.app.statistics().state == "failed")

    world.run(act)

    assert len(world.lines("crashed")) == 1


def test_successful_records_are_not_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.app.consume("orders")(nothing)
    said = []

    async def act(world: World, client: TestClient) -> None:
        await settle(world, client)
        before = len(caplog.records)
        await settle(world, client)
        said.append(len(caplog.records) - before)

    world.run(act)

    assert said == [0]
