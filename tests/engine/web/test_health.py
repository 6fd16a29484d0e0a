"""Health: responses in each state, and the server for them."""

import asyncio
import dataclasses
import json
import subprocess
import sys

import httpx
import prometheus_client
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette

from aioshard import App, Record, Retry
from aioshard.observe import (
    AppState,
    Diagnosis,
    Finding,
    Frame,
    IncompleteRecord,
    PartitionDiagnosis,
    Stack,
    Statistics,
)
from aioshard.telemetry.metrics import AppCollector
from aioshard.testing import TestClient, run
from aioshard.web.health import findings, health_routes
from tests.engine.live_apps import until
from tests.support.fake_app import HANDLER, STATISTICS, FakeApp

HEAD = IncompleteRecord(
    handler="on_order",
    topic="orders",
    partition=3,
    offset=101,
    key="#1f2e3d4c",
    shard=None,
    age=61.0,
    attempt=1,
    attempts=5,
    state="in_flight",
    since=61.0,
    reason="it has been in handler handle for 61.0 s",
    what_to_do="see why",
    stack=Stack(
        frames=(Frame("/shop/handlers.py", 7, "on_order", own=True),),
        place=Frame("/shop/handlers.py", 7, "on_order", own=True),
        waits_in="asyncio.Future",
        executing=False,
        thread=None,
    ),
    due=None,
    error=None,
    waiting=0,
    worker="on_order worker 0",
    records=1,
)
DIAGNOSED = PartitionDiagnosis(
    topic="orders",
    partition=3,
    verdict="waiting",
    since=3.0,
    sentence="orders/3 has not advanced for 61.0 s: it has been in handler handle",
    head=HEAD,
    findings=(),
    window=19,
    behind=0,
)
DIAGNOSIS = Diagnosis(state="running", findings=(), partitions=(DIAGNOSED,), outliving=())


def app_with(statistics: Statistics = STATISTICS, diagnosis: Diagnosis = DIAGNOSIS) -> FakeApp:
    return FakeApp(statistics, diagnosis, "orders/3 waits for record 101 (key #1f2e)")


def client_of(app: App) -> httpx.AsyncClient:
    """A client of the routes without a server."""
    transport = httpx.ASGITransport(app=Starlette(routes=health_routes(app)))
    return httpx.AsyncClient(transport=transport, base_url="http://app")


# Routes


@pytest.mark.parametrize(
    ("state", "live", "ready"),
    [
        ("starting", 200, 503),
        ("running", 200, 200),
        ("draining", 200, 503),
        ("stopped", 200, 503),
        ("failed", 503, 503),
    ],
)
async def test_every_state_has_its_health_status(state: AppState, live: int, ready: int) -> None:
    cures = ("the app has failed: the brokers are away",) if state == "failed" else ()
    async with client_of(app_with(dataclasses.replace(STATISTICS, state=state, restart_cures=cures))) as client:
        for path, expected in (("/livez", live), ("/readyz", ready)):
            response = await client.get(path)
            assert response.status_code == expected, path
            body = response.json()
            assert body["state"] == state
            assert body["status"] == ("ok" if expected == 200 else "unavailable")
            assert bool(body["reasons"]) == (expected == 503), "a refusal says why, an approval has no reasons"


async def test_an_outage_or_rebalance_is_reported_but_keeps_both_statuses() -> None:
    rebalancing = dataclasses.replace(STATISTICS, member_id=None, partitions=())
    findings = (
        Finding("trouble", "no broker answers for 8 s", None, None),
        Finding("nothing assigned", "", None, None),
    )
    diagnosis = dataclasses.replace(DIAGNOSIS, findings=findings, partitions=())
    async with client_of(app_with(rebalancing, diagnosis)) as client:
        for path in ("/livez", "/readyz"):
            response = await client.get(path)
            assert response.status_code == 200
            assert response.json()["findings"] == ["no broker answers for 8 s"]


async def test_a_hanging_start_names_its_cause() -> None:
    starting = dataclasses.replace(STATISTICS, state="starting", trouble="connection refused by 127.0.0.1:1")
    async with client_of(app_with(starting)) as client:
        response = await client.get("/readyz")
        assert response.json()["reasons"] == ["the group has not been joined yet: connection refused by 127.0.0.1:1"]


async def test_statistics_explanation_and_metrics_are_served() -> None:
    async with client_of(app_with()) as client:
        assert (await client.get("/statistics.json")).json() == json.loads(json.dumps(STATISTICS.asdict()))
        explanation = await client.get("/explain")
        assert explanation.text == "orders/3 waits for record 101 (key #1f2e)"
        assert explanation.headers["content-type"].startswith("text/plain")
        metrics = await client.get("/metrics")
        assert 'aioshard_partition_lag_records{group="billing",partition="3",topic="orders"} 50.0' in metrics.text
        assert metrics.headers["content-type"].startswith("text/plain")
        accepting = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert accepting.headers["content-type"].startswith("application/openmetrics-text")
        assert accepting.text.endswith("# EOF\n")


async def test_a_custom_registry_serves_its_own_metrics_too() -> None:
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Counter("orders_paid", "The user's own.", registry=registry).inc()
    app = app_with()
    AppCollector(app, registry=registry)
    transport = httpx.ASGITransport(app=Starlette(routes=health_routes(app, registry=registry)))
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        text = (await client.get("/metrics")).text
    assert "orders_paid_total 1.0" in text
    assert "aioshard_commits_total" in text


async def test_the_routes_work_in_a_fastapi_application() -> None:
    application = FastAPI(routes=health_routes(app_with()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=application), base_url="http://app") as client:
        assert (await client.get("/readyz")).status_code == 200


SURROGATE = b"caf\xe9.txt".decode("utf-8", "surrogateescape")
"""A file name that is not UTF-8, as Python returns it: its lone surrogate cannot be encoded."""


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/statistics.json", "/explain", "/explain?format=json"])
async def test_text_that_cannot_be_encoded_breaks_no_response(path: str) -> None:
    stuck = dataclasses.replace(DIAGNOSED, verdict="stuck", sentence=f"orders/3: cannot open {SURROGATE}")
    statistics = dataclasses.replace(STATISTICS, trouble=SURROGATE)
    app = FakeApp(statistics, dataclasses.replace(DIAGNOSIS, partitions=(stuck,)), stuck.sentence)
    async with client_of(app) as client:
        response = await client.get(path)

    assert response.status_code == 200
    assert r"caf\udce9.txt" in response.text


async def test_one_halted_record_with_such_an_error_leaves_the_process_healthy() -> None:
    app = App("billing", shutdown_timeout=2.0)

    async def on_order(_: Record) -> None:
        raise OSError(f"cannot open {SURROGATE}")

    on_order.__name__ = f"on_{SURROGATE}"
    app.consume("orders", retry=Retry(attempts=1))(on_order)

    async with TestClient(app) as broker, client_of(app) as client:
        await broker.publish("orders", b"", key=b"k", partition=0)
        await until(lambda: app.statistics().handlers[0].halted == 1)
        for path in ("/livez", "/readyz", "/statistics.json", "/explain", "/explain?format=json", "/metrics"):
            response = await client.get(path)
            assert response.status_code == 200, path
            assert r"caf\udce9.txt" in response.text.replace("\\\\", "\\"), path
        found = (await client.get("/explain?format=json")).json()["partitions"][0]
        assert found["head"]["error"] == r"OSError: cannot open caf\udce9.txt"


class Undiagnosed(FakeApp):
    """An app whose diagnosis fails."""

    def diagnose(self) -> Diagnosis:
        raise RuntimeError("a method of the application")


@pytest.mark.parametrize(("state", "status"), [("running", 200), ("failed", 503)])
async def test_a_failed_diagnosis_does_not_change_the_status(
    state: AppState, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    cures = ("the app has failed",) if state == "failed" else ()
    app = Undiagnosed(dataclasses.replace(STATISTICS, state=state, restart_cures=cures), DIAGNOSIS, "")
    async with client_of(app) as client:
        responses = [await client.get("/livez") for _ in range(3)]

    assert {response.status_code for response in responses} == {status}
    assert responses[0].json()["findings"] == ["the app could not be diagnosed; the log says why"]
    assert len(caplog.records) == 1


# Why it does not advance


@pytest.mark.parametrize(
    ("query", "accept", "for_programs"),
    [
        ("", "*/*", False),
        ("", "text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("", "application/json", True),
        ("?format=json", "*/*", True),
        ("?format=text", "application/json", False),
    ],
)
async def test_the_explanation_is_available_as_json(query: str, accept: str, *, for_programs: bool) -> None:
    async with client_of(app_with()) as client:
        response = await client.get(f"/explain{query}", headers={"accept": accept})
    if not for_programs:
        assert response.text.startswith("orders/3 waits")
        return
    found = response.json()
    assert found["state"] == "running"
    (partition,) = found["partitions"]
    assert (partition["verdict"], partition["head"]["offset"], partition["head"]["key"]) == (
        "waiting",
        101,
        "#1f2e3d4c",
    )
    assert partition["head"]["stack"]["frames"] == [
        {"file": "/shop/handlers.py", "line": 7, "function": "on_order", "own": True}
    ]


def test_a_real_app_reports_where_it_hangs() -> None:
    app = App("billing", stuck_after=5.0, drain_timeout=0.5, shutdown_timeout=1.0)
    released = asyncio.Event()

    @app.consume("orders")
    async def on_order(_: Record) -> None:
        await released.wait()

    async def test() -> None:
        async with TestClient(app) as kafka, client_of(app) as client:
            await kafka.publish("orders", "book", key="alice", partition=1)
            await asyncio.sleep(8.0)
            found = (await client.get("/explain", params={"format": "json"})).json()["partitions"][1]
            assert (found["verdict"], found["head"]["offset"], found["head"]["state"]) == ("stuck", 0, "in_flight")
            assert found["head"]["stack"]["frames"][0]["file"] == __file__
            ready = await client.get("/readyz")
            assert ready.status_code == 200
            (finding,) = ready.json()["findings"]
            assert finding == found["sentence"]
            assert finding in (await client.get("/explain")).text
            assert "alice" not in finding
            released.set()
            await kafka.settle()

    run(test())


def test_a_healthy_app_has_no_findings() -> None:
    idle = Finding("nothing assigned", "no partition is assigned to this process", None, None)

    assert findings(STATISTICS, DIAGNOSIS) == []
    assert findings(STATISTICS, dataclasses.replace(DIAGNOSIS, findings=(idle,))) == []


def test_findings_name_partition_record_limit_and_handler() -> None:
    limit = Finding("no room", "nothing more is taken in for 4.0 s: the buffer is full", 4.0, "raise it")
    commit = Finding("commit", "what is done is not committed", 4.0, None)
    stuck = dataclasses.replace(DIAGNOSED, verdict="stuck", findings=(limit, commit))
    refused = Finding("trouble", "access refused", None, None)
    diagnosis = dataclasses.replace(DIAGNOSIS, findings=(refused,), partitions=(stuck,))
    handler = dataclasses.replace(HANDLER, halted=2, outliving=("orders/3/101",))
    troubled = dataclasses.replace(STATISTICS, handlers=(handler,), trouble="access refused")

    assert findings(troubled, diagnosis) == [
        "access refused",
        "orders/3 has not advanced for 61.0 s: it has been in handler handle",
        "orders/3: nothing more is taken in for 4.0 s: the buffer is full",
        "handler on_order has 2 halted records; /explain names them",
        "handler on_order still runs for orders/3/101 although the run was cancelled or its partition was revoked",
    ]


@pytest.mark.parametrize("missing", ["uvicorn", "starlette"])
def test_without_the_extra_the_error_names_it(missing: str) -> None:
    script = f"""
import sys
sys.modules[{missing!r}] = None
from aioshard.errors import MissingExtraError
try:
    import aioshard.web.health
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install 'aioshard[web]'" in done.stdout
