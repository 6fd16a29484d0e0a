"""Every failure situation and what each health surface reports, one row each."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aioshard import App, DeadLetter, Record, Retry
from aioshard.errors import InstanceIdTakenError, NotDrainedError
from aioshard.ports import Committed, Membership, Message
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryProducer, InMemoryTransport, TestClient, run
from aioshard.web.health import serve_health
from aioshard.web.page import dashboard_routes
from tests.engine.live_apps import until, watch_of
from tests.support.kafka import KafkaBroker

STUCK_AFTER = 5.0


@dataclasses.dataclass
class Found:
    """The reports during a situation."""

    live: int
    ready: int
    live_body: dict[str, Any]
    ready_body: dict[str, Any]
    metrics: str
    diagnosis: dict[str, Any]
    explanation: str
    page: dict[str, Any]
    """The process that the page shows."""

    def sample(self, name: str, **labels: str) -> float | None:
        values = [
            sample.value
            for family in text_string_to_metric_families(self.metrics)
            for sample in family.samples
            if sample.name == f"aioshard_{name}" and labels.items() <= sample.labels.items()
        ]
        return max(values, default=None)


def findings_of(diagnosis: dict[str, Any]) -> list[str]:
    """The sentences of a diagnosis, those of each partition and of the record in front of it among them."""
    sentences = [finding["sentence"] for finding in diagnosis["findings"]]
    for partition in diagnosis["partitions"]:
        sentences += [partition["sentence"], *(finding["sentence"] for finding in partition["findings"])]
    return sentences


def ask(address: str) -> Found:
    """Ask everything, from any thread."""
    with httpx.Client(base_url=address, timeout=20.0) as client:
        live, ready = client.get("/livez"), client.get("/readyz")
        return Found(
            live.status_code,
            ready.status_code,
            live.json(),
            ready.json(),
            client.get("/metrics").text,
            client.get("/explain", params={"format": "json"}).json(),
            client.get("/explain").text,
            client.get("/dashboard.json").json(),
        )


class Scene:
    """One app with its health server, in one situation."""

    def __init__(self) -> None:
        self.broker = InMemoryBroker(partitions=1)
        self.found: Found | None = None
        self.released = asyncio.Event()

    def app(self, **settings: Any) -> App:
        defaults: dict[str, Any] = {
            "auto_offset_reset": "earliest",
            "stuck_after": STUCK_AFTER,
            "drain_timeout": 1.0,
            "shutdown_timeout": 3.0,
            "heartbeat_interval": 0.5,
        }
        return App("billing", **(defaults | settings))

    @contextlib.asynccontextmanager
    async def client(self, app: App) -> AsyncIterator[TestClient]:
        async with TestClient(app, broker=self.broker) as client:
            yield client

    async def look(self, app: App) -> None:
        """Ask everything now."""
        async with serve_health(app, routes=dashboard_routes(app)) as (host, port):
            self.found = await asyncio.to_thread(ask, f"http://{host}:{port}")


Situation = Callable[[Scene], AbstractAsyncContextManager[None]]
Sample = tuple[str, dict[str, str], Callable[[float], bool]]


def consumes(app: App, scene: Scene, *, topic: str = "orders", attempts: int = 1) -> None:
    @app.consume(topic, retry=Retry(attempts=attempts))
    async def handle(record: Record) -> None:
        if record.value == b"hang":
            await scene.released.wait()
        if record.value == b"fail":
            message = "no such customer"
            raise LookupError(message)


# The event loop


@contextlib.asynccontextmanager
async def _blocked(scene: Scene, at_least: float) -> AsyncIterator[None]:
    app = scene.app(rebalance_timeout=1.5, drain_timeout=0.5)
    over = threading.Event()

    @app.consume("orders")
    async def handle(_: Record) -> None:
        over.wait(20.0)

    def look(address: str) -> None:
        end = time.monotonic() + 15.0
        while time.monotonic() < end and standing() < at_least:
            time.sleep(0.02)
        scene.found = ask(address)
        over.set()

    def standing() -> float:
        watch = watch_of(app).loop
        assert watch is not None
        return watch.standing()

    async with scene.client(app) as client, serve_health(app, routes=dashboard_routes(app)) as (host, port):
        looking = threading.Thread(target=look, args=(f"http://{host}:{port}",))
        looking.start()
        await client.publish("orders", "x", partition=0)
        await client.settle(20.0)
        await asyncio.to_thread(looking.join)
        yield


def a_loop_that_is_blocked_for_longer_than_a_rebalance(scene: Scene) -> AbstractAsyncContextManager[None]:
    return _blocked(scene, 1.6)


def a_loop_that_is_blocked_for_a_moment(scene: Scene) -> AbstractAsyncContextManager[None]:
    return _blocked(scene, 1.05)


# Tasks that have ended, or hang


class Silent(InMemoryTransport):
    """A client of which some calls do not come back when a test says so."""

    hangs: str | None = None

    async def _hang(self) -> None:
        while Silent.hangs is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1.0)

    async def poll(self, *given: Any) -> Any:
        if Silent.hangs == "poll":
            await self._hang()
        return await super().poll(*given)

    async def commit(
        self,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: object = None,  # noqa: ARG002
    ) -> None:
        if Silent.hangs == "commit":
            await self._hang()
        await super().commit(offsets, membership)


@contextlib.asynccontextmanager
async def _hangs(scene: Scene, call: str, *, during_an_outage: bool = False) -> AsyncIterator[None]:
    app = scene.app()
    consumes(app, scene)
    async with app.started(lambda: Silent(scene.broker, "billing")):
        scene.broker.publish("orders", b"x", partition=0)
        await asyncio.sleep(3.0)
        Silent.hangs = call
        try:
            scene.broker.publish("orders", b"x", partition=0)
            scene.broker.available = not during_an_outage
            await asyncio.sleep(45.0)
            await scene.look(app)
            if during_an_outage:
                scene.broker.available = True
                await asyncio.sleep(5.0)
                assert app.statistics().restart_cures == (), "the wait for the brokers has restarted its time"
        finally:
            Silent.hangs = None
        await asyncio.sleep(5.0)
        assert app.statistics().restart_cures == (), "it is over"
        yield


def a_fetcher_that_hangs(scene: Scene) -> AbstractAsyncContextManager[None]:
    return _hangs(scene, "poll")


def a_commit_coordinator_that_hangs(scene: Scene) -> AbstractAsyncContextManager[None]:
    return _hangs(scene, "commit")


def a_fetcher_that_waits_for_brokers_that_are_away(scene: Scene) -> AbstractAsyncContextManager[None]:
    return _hangs(scene, "poll", during_an_outage=True)


@contextlib.asynccontextmanager
async def _dies(scene: Scene, name: str) -> AsyncIterator[None]:
    app = scene.app()
    consumes(app, scene)
    async with scene.client(app) as client:
        await client.publish("orders", "x", partition=0)
        await client.settle()
        next(task for task in asyncio.all_tasks() if task.get_name() == name).cancel()
        await asyncio.sleep(2.0)
        await scene.look(app)
        yield


def a_fetcher_that_died(scene: Scene) -> AbstractAsyncContextManager[None]:
    return _dies(scene, "client")


def a_fetch_task_that_died(scene: Scene) -> AbstractAsyncContextManager[None]:
    return _dies(scene, "shard orders/0")


def a_commit_coordinator_that_died(scene: Scene) -> AbstractAsyncContextManager[None]:
    return _dies(scene, "commit coordinator")


@contextlib.asynccontextmanager
async def an_app_that_has_failed(scene: Scene) -> AsyncIterator[None]:
    app = scene.app()
    consumes(app, scene)
    async with scene.client(app):
        scene.broker.fail_next_poll(InstanceIdTakenError("billing", "pod-1", 45.0, persists=True))
        await asyncio.sleep(2.0)
        await scene.look(app)
        yield


# Records


@contextlib.asynccontextmanager
async def _in_the_way(scene: Scene, value: str, **settings: Any) -> AsyncIterator[None]:
    app = scene.app(**settings)
    consumes(app, scene)
    async with scene.client(app) as client:
        await client.publish("orders", value, key="alice", partition=0)
        await asyncio.sleep(5 * STUCK_AFTER)
        await scene.look(app)
        scene.released.set()
        yield


def a_key_that_is_stuck(scene: Scene) -> AbstractAsyncContextManager[None]:
    return _in_the_way(scene, "hang")


def a_halted_record(scene: Scene) -> AbstractAsyncContextManager[None]:
    return _in_the_way(scene, "fail")


class NeverAcknowledged(InMemoryProducer):
    """A producer that waits for its brokers."""

    async def publish(self, message: Message) -> int:
        await asyncio.sleep(1_000.0)
        return await super().publish(message)


@contextlib.asynccontextmanager
async def a_dead_letter_that_is_not_acknowledged(scene: Scene) -> AsyncIterator[None]:
    app = scene.app()

    @app.consume("orders", retry=Retry(attempts=1), on_failure=DeadLetter("orders.dlt"))
    async def handle(_: Record) -> None:
        message = "no such customer"
        raise LookupError(message)

    make_transport = functools.partial(InMemoryTransport, scene.broker, "billing")
    with contextlib.suppress(NotDrainedError):
        async with app.started(make_transport, lambda: NeverAcknowledged(scene.broker)):
            scene.broker.publish("orders", b"x", partition=0)
            await asyncio.sleep(5 * STUCK_AFTER)
            await scene.look(app)
    yield


# The group and its brokers


@contextlib.asynccontextmanager
async def a_rebalance(scene: Scene) -> AsyncIterator[None]:
    app = scene.app(drain_timeout=10.0)
    consumes(app, scene)
    async with scene.client(app) as client:
        await client.publish("orders", "hang", partition=0)
        await asyncio.sleep(1.0)
        revoking = asyncio.create_task(client.revoke("orders", 0))
        await asyncio.sleep(2.0)
        await scene.look(app)
        scene.released.set()
        await revoking
        yield


@contextlib.asynccontextmanager
async def an_empty_assignment(scene: Scene) -> AsyncIterator[None]:
    first, second = scene.app(), scene.app()
    consumes(first, scene)
    consumes(second, scene)
    scene.broker.publish("orders", b"x", partition=0)
    async with scene.client(first), scene.client(second):
        await asyncio.sleep(2.0)
        idle = next(app for app in (first, second) if not app.statistics().partitions)
        await scene.look(idle)
        yield


@contextlib.asynccontextmanager
async def _degraded(scene: Scene, after: float) -> AsyncIterator[None]:
    app = scene.app(start_timeout=None)
    consumes(app, scene)
    scene.broker.available = False
    async with scene.client(app):
        await asyncio.sleep(after)
        await scene.look(app)
        scene.broker.available = True
        yield


def a_start_without_brokers(scene: Scene) -> AbstractAsyncContextManager[None]:
    return _degraded(scene, 60.0)


@contextlib.asynccontextmanager
async def a_pod_that_is_drained(scene: Scene) -> AsyncIterator[None]:
    app = scene.app(shutdown_timeout=20.0, drain_timeout=15.0)
    consumes(app, scene)
    async with scene.client(app) as client:
        await client.publish("orders", "hang", partition=0)
        await asyncio.sleep(1.0)
        draining = asyncio.create_task(app.drain())
        await asyncio.sleep(2.0)
        await scene.look(app)
        scene.released.set()
        await draining
        yield


@contextlib.asynccontextmanager
async def a_pod_that_has_stopped(scene: Scene) -> AsyncIterator[None]:
    app = scene.app()
    consumes(app, scene)
    async with scene.client(app) as client:
        await client.publish("orders", "x", partition=0)
    await scene.look(app)
    yield


def is_1(value: float) -> bool:
    return value == 1.0


def is_0(value: float) -> bool:
    return value == 0.0


TROUBLE: Sample = ("trouble", {}, is_1)
FAILED: Sample = ("engine_state", {"state": "failed"}, is_1)


@dataclasses.dataclass(frozen=True)
class Row:
    """The expected reports of a situation. Texts are patterns to search in the reports."""

    situation: Situation
    live: Literal[200, 503]
    ready: Literal[200, 503]
    log: str
    sample: Sample
    finding: str | None
    """Of `/explain` and the page; None where an app that does not run tells nothing."""
    why_not_live: str | None = None
    body: str | None = None
    """Of `/readyz`, where it is not the finding; empty where it has neither reasons nor findings."""
    in_real_time: bool = False


CRASHED = r"the task '{}' of the engine crashed; the app stops"
HANDLER = r"handler handle blocks without an await, with record orders/0/0, at .*test_health_table.py:\d+"
OVERDUE: Sample = ("oldest_incomplete_record_age_seconds", {"topic": "orders"}, lambda age: age > STUCK_AFTER)
HALTED: Sample = ("halted_records", {"handler": "handle"}, is_1)
NO_BROKER = "the in-memory broker is not available"

ROWS = [
    Row(
        a_loop_that_is_blocked_for_longer_than_a_rebalance,
        live=503,
        ready=200,
        log=f"the event loop has been blocked for .* s: {HANDLER}",
        sample=TROUBLE,
        finding=f"the event loop has been blocked for .* s: {HANDLER}",
        why_not_live=f"{HANDLER}.*that is longer than rebalance_timeout=1.5 s",
        in_real_time=True,
    ),
    Row(
        a_loop_that_is_blocked_for_a_moment,
        live=200,
        ready=200,
        log=f"the event loop runs again after .* s: {HANDLER}",
        sample=TROUBLE,
        finding=f"the event loop has been blocked for 1.* s: {HANDLER}",
        in_real_time=True,
    ),
    Row(
        a_fetcher_that_hangs,
        live=503,
        ready=200,
        log="the intake hangs: .* for 30 s, although the brokers answer",
        sample=TROUBLE,
        finding="the intake hangs",
        why_not_live="the intake hangs",
    ),
    Row(
        a_fetcher_that_waits_for_brokers_that_are_away,
        live=200,
        ready=200,
        log=NO_BROKER,
        sample=TROUBLE,
        finding=NO_BROKER,
    ),
    Row(
        a_commit_coordinator_that_hangs,
        live=503,
        ready=200,
        log="the commit coordinator hangs: no commit has ended for 30 s",
        sample=TROUBLE,
        finding="the commit coordinator hangs",
        why_not_live="the commit coordinator hangs",
    ),
    Row(
        a_fetcher_that_died,
        live=503,
        ready=503,
        log=CRASHED.format("client"),
        sample=FAILED,
        finding="the app has failed: the task 'client' was cancelled",
        why_not_live="the app has failed: the task 'client' was cancelled",
    ),
    Row(
        a_fetch_task_that_died,
        live=503,
        ready=503,
        log=CRASHED.format("shard orders/0"),
        sample=FAILED,
        finding="the app has failed: the task 'shard orders/0' was cancelled",
        why_not_live="the app has failed: the task 'shard orders/0' was cancelled",
    ),
    Row(
        a_commit_coordinator_that_died,
        live=503,
        ready=503,
        log=CRASHED.format("commit coordinator"),
        sample=FAILED,
        finding="the app has failed: the task 'commit coordinator' was cancelled",
        why_not_live="the app has failed: the task 'commit coordinator' was cancelled",
    ),
    Row(
        an_app_that_has_failed,
        live=503,
        ready=503,
        log="app 'billing' has failed and no longer consumes: another process has joined",
        sample=FAILED,
        finding="the app has failed: another process has joined group 'billing' with our group_instance_id='pod-1'",
        why_not_live="the app has failed: another process has joined",
    ),
    Row(
        a_key_that_is_stuck,
        live=200,
        ready=200,
        log="stuck: orders/0 has not advanced",
        sample=OVERDUE,
        finding=r"orders/0 has not advanced for 25.* it has been in handler handle for 25.* at .*table.py:\d+",
    ),
    Row(
        a_halted_record,
        live=200,
        ready=200,
        log="stuck: orders/0 has not advanced .*halted",
        sample=HALTED,
        finding="orders/0 has not advanced .* halted 25.* s ago after 1 attempt.*LookupError",
    ),
    Row(
        a_dead_letter_that_is_not_acknowledged,
        live=200,
        ready=200,
        log="stuck: orders/0 has not advanced",
        sample=OVERDUE,
        finding="orders/0 has not advanced for 25.* it is being recovered for 25.* s: .*orders.dlt",
    ),
    Row(
        a_rebalance,
        live=200,
        ready=200,
        log="rebalance 2 is over .*: generation 2, seconds",
        sample=("rebalances_total", {}, lambda count: count >= 1),
        body="the group is rebalancing",
        finding="the partition is being revoked for .* waits for 1 record.* to end first: orders/0/0",
    ),
    Row(
        an_empty_assignment,
        live=200,
        ready=200,
        log="rebalance 1 is over .* assigned 0",
        sample=("assigned_partitions", {}, is_0),
        finding="no partition is assigned to this process",
        body="",
    ),
    Row(
        a_start_without_brokers,
        live=200,
        ready=503,
        log=f"the Kafka client could not start; a new one is created in .* s: .*{NO_BROKER}",
        sample=TROUBLE,
        finding=f"no Kafka client for .* s: .*{NO_BROKER}",
    ),
    Row(
        a_pod_that_is_drained,
        live=200,
        ready=503,
        log="draining: nothing new is taken in",
        sample=("engine_state", {"state": "draining"}, is_1),
        body="the app is draining: it finishes the records in flight and starts no others",
        finding="the app is draining for .* and waits for 1 record.* to end first: orders/0/0",
    ),
    Row(
        a_pod_that_has_stopped,
        live=200,
        ready=503,
        log="draining: nothing new is taken in",
        sample=("engine_state", {"state": "stopped"}, is_1),
        finding=None,
        body="the app is stopped",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.situation.__name__)
def test_every_situation_is_reported_as_documented(row: Row, caplog: pytest.LogCaptureFixture) -> None:
    found: Found | None = None

    async def test() -> None:
        nonlocal found
        scene = Scene()
        with contextlib.suppress(InstanceIdTakenError):
            async with row.situation(scene):
                found = scene.found

    with caplog.at_level(logging.INFO, "aioshard"):
        if row.in_real_time:
            asyncio.run(test())
        else:
            run(test())

    assert found is not None
    check(row, found, caplog.messages)


def check(row: Row, found: Found, logged: Collection[str]) -> None:
    assert (found.live, found.ready) == (row.live, row.ready), (found.live_body, found.ready_body)
    assert found.live_body["status"] == ("ok" if row.live == 200 else "unavailable")
    for status, body in ((found.live, found.live_body), (found.ready, found.ready_body)):
        assert bool(body["reasons"]) == (status == 503), "a refusal says why, an approval has no reasons"
    if row.why_not_live is not None:
        assert any(re.search(row.why_not_live, reason) for reason in found.live_body["reasons"]), found.live_body
    assert any(re.search(row.log, line, re.DOTALL) for line in logged), "\n".join(logged)
    name, labels, promised = row.sample
    value = found.sample(name, **labels)
    assert value is not None, found.metrics
    assert promised(value), (name, value)
    if row.finding is not None:
        for report in (found.diagnosis, found.page["diagnosis"]):
            sentences = findings_of(report)
            assert any(re.search(row.finding, sentence, re.DOTALL) for sentence in sentences), sentences
        # In the text a sentence begins with a capital letter.
        assert re.search(row.finding, found.explanation, re.DOTALL | re.IGNORECASE), found.explanation
    assert found.page["statistics"]["state"] == found.live_body["state"]
    pattern = row.finding if row.body is None else row.body
    reasons = found.ready_body["reasons"] + found.ready_body["findings"]
    if pattern:
        assert any(re.search(pattern, reason, re.DOTALL) for reason in reasons), found.ready_body
    else:
        assert reasons == []


@pytest.mark.chaos
async def test_a_lost_broker_is_reported_as_documented(
    own_kafka: KafkaBroker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    row = Row(
        lambda _: contextlib.nullcontext(),
        live=200,
        ready=200,
        log="no connection to a broker of .* is open",
        sample=TROUBLE,
        finding="no connection to a broker of .* is open; the client keeps trying",
    )
    scene = Scene()
    app = scene.app(bootstrap_servers=own_kafka.bootstrap, session_timeout=6.0)
    consumes(app, scene, topic=topic)
    await own_kafka.create_topic(topic, 2)
    with caplog.at_level(logging.INFO, "aioshard"):
        async with app:
            await scene.look(app)
            assert scene.found is not None
            assert (scene.found.live, scene.found.ready) == (200, 200)
            assert scene.found.sample("trouble") == 0.0
            await own_kafka.stop()
            await until(lambda: app.statistics().trouble, 30.0)
            await scene.look(app)
            check(row, scene.found, caplog.messages)
            await own_kafka.start()
            # A broker that was away for longer than the session rebalances the group when it is back.
            await until(lambda: app.statistics().trouble is None and len(app.statistics().partitions) == 2, 60.0)
            await scene.look(app)
            assert (scene.found.live, scene.found.ready) == (200, 200)
            assert scene.found.live_body["findings"] == []
