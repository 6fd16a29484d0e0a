"""The dashboard: its content and its protection against other sites."""

import asyncio
import importlib
import json
import logging
import re
from collections.abc import AsyncIterator
from itertools import starmap
from pathlib import Path
from typing import cast

import httpx
import pytest
from fastapi import FastAPI

from aioshard import App, Record, Retry
from aioshard.engine import monitor
from aioshard.observe import Diagnosis, PartitionDiagnosis, Verdict
from aioshard.testing import InMemoryBroker, TestClient
from aioshard.web import PollFilter
from aioshard.web.page import MOST_DIAGNOSED, dashboard, snapshot
from tests.engine.live_apps import until
from tests.support import browsing

SCRIPTS = ["/page.js", "/elements.js", "/dead_letters.js"]
PATHS = ["/", *SCRIPTS, "/page.css", "/icon.svg", "/dashboard.json", "/history.json", "/dead-letters.json"]
STATIC = Path(importlib.import_module("aioshard.web.page").__file__ or "").with_name("static")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=dashboard(App("billing")))
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as made:
        yield made


async def served(app: App, path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=dashboard(app)), base_url="http://app") as client:
        return await client.get(path)


# The access log ---------------------------------------------------------------------------


async def test_polls_can_be_kept_out_of_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    web = FastAPI()
    web.mount("/aioshard", dashboard(App("billing"), token="correct-horse-battery"))
    web.get("/dashboard.json")(lambda: "of the application itself")
    access, polls = logging.getLogger("uvicorn.access"), PollFilter("/aioshard")
    caplog.set_level(logging.INFO, access.name)
    access.addFilter(polls)
    try:
        async with browsing.served(web) as address, httpx.AsyncClient(base_url=address) as client:
            for path in ("/aioshard/", "/aioshard/dashboard.json", "/dashboard.json", "/aioshard/dashboard.json/x"):
                await client.get(path)
            await client.post("/aioshard/dashboard.json")
            await client.post("/aioshard/dead-letters/jobs", json={})
            authorization = {"authorization": "Bearer correct-horse-battery"}
            await client.post("/aioshard/dead-letters/jobs", json={}, headers=authorization)
    finally:
        access.removeFilter(polls)

    lines = [line.getMessage().partition(" - ")[2] for line in caplog.records if line.name == access.name]
    assert lines == [
        '"GET /aioshard/ HTTP/1.1" 200',
        '"GET /dashboard.json HTTP/1.1" 200',
        '"GET /aioshard/dashboard.json/x HTTP/1.1" 404',
        '"POST /aioshard/dashboard.json HTTP/1.1" 405',
        '"POST /aioshard/dead-letters/jobs HTTP/1.1" 401',
    ]


# Served files -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_the_dashboard_is_isolated_from_other_sites(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)

    assert answer.status_code == 200
    policy = dict(directive.split(" ", 1) for directive in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert answer.headers["x-frame-options"] == "DENY"
    assert not {"set-cookie", "access-control-allow-origin"} & set(answer.headers)


@pytest.mark.parametrize("show_keys", [False, True])
async def test_text_that_cannot_be_encoded_breaks_no_data(show_keys: bool) -> None:
    app = App("billing", show_keys=show_keys, shutdown_timeout=2.0)

    @app.consume("orders", shard_by=lambda _: "\udce9", retry=Retry(attempts=1))
    async def handle(_: Record) -> None:
        raise OSError("cannot open caf\udce9.txt")

    async with TestClient(app) as broker:
        await broker.publish("orders", b"", partition=0)
        await until(lambda: app.statistics().handlers[0].halted == 1)
        app.pause("orders", 0, why="see caf\udce9.txt")
        response = await served(app, "/dashboard.json")

    assert response.status_code == 200
    (failed,) = response.json()["workload"]["failed"]
    assert failed["error"] == r"OSError: cannot open caf\udce9.txt"
    (pause,) = response.json()["workload"]["pauses"]
    assert pause["why"] == r"see caf\udce9.txt"


def test_the_dashboard_needs_no_external_or_inline_resources() -> None:
    html = (STATIC / "index.html").read_text()
    script = "".join((STATIC / name.removeprefix("/")).read_text() for name in SCRIPTS)

    addresses = re.findall(r'(?:src|href)="([^"#][^"]*)"', html)
    assert sorted(set(addresses)) == ["explain", "icon.svg", "page.css", "page.js"], "relative, and ours"
    assert set(re.findall(r'from "([^"]*)"', script)) == {"./elements.js", "./dead_letters.js"}
    assert not re.search(r"<script(?! src)|<style|\sstyle=|\son\w+=|javascript:", html)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html + script + (STATIC / "page.css").read_text())
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|localStorage", script)


def test_the_dashboard_is_small() -> None:
    assert sum(file.stat().st_size for file in STATIC.iterdir()) < 130_000


async def test_the_dashboard_works_under_any_path() -> None:
    api = FastAPI()
    api.mount("/ops/aioshard", dashboard(App("billing")))
    transport = httpx.ASGITransport(app=api)
    async with httpx.AsyncClient(transport=transport, base_url="http://app", follow_redirects=True) as client:
        found = await client.get("/ops/aioshard")
        assert found.url.path == "/ops/aioshard/", "otherwise its relative addresses would not resolve"
        assert "<title>aioshard</title>" in found.text
        for path in PATHS:
            assert (await client.get(f"/ops/aioshard{path}")).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/%2e%2e/dashboard.py",
        "/..%2fdashboard.py",
        "/static/page.js",
        "/page.js/",
        "http://app//page.js",
        "/dashboard.py",
        "/index.html",
        "/page.js%00",
        "/dashboard.json/../actions",
        "/<script>",
        "/" + "x" * 5_000,
        "/actions",
    ],
    ids=str,
)
async def test_odd_paths_are_not_found(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)

    assert answer.status_code in {307, 404}
    if answer.status_code == 404:
        assert answer.json() == {"error": "this path does not exist"}
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", PATHS)
async def test_the_dashboard_is_read_only(client: httpx.AsyncClient, path: str) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert (await client.request(method, path)).status_code == 405


# Displayed data ---------------------------------------------------------------------------


async def test_an_app_that_is_not_running_is_shown_too(client: httpx.AsyncClient) -> None:
    found = (await client.get("/dashboard.json")).json()

    assert found["workload"] is None
    assert found["statistics"]["state"] == "stopped"
    assert found["diagnosis"]["partitions"] == []
    assert found["actions"] is False


async def test_the_snapshot_has_no_record_values() -> None:
    app = App("billing")
    over = asyncio.Event()

    @app.consume("orders", concurrency=2)
    async def on_order(record: Record) -> None:
        if record.key == b"stuck":
            await over.wait()

    async with TestClient(app) as client:
        await client.publish("orders", b"a secret value", key="stuck", partition=0)
        await client.publish("orders", b"a secret value", key="stuck", partition=0)
        await until(lambda: snapshot(app)["diagnosis"]["partitions"])
        shown = snapshot(app)
        expected = app.statistics().asdict()
        text = json.dumps(shown)
        over.set()

    (found,) = shown["diagnosis"]["partitions"]
    assert (found["topic"], found["partition"], found["verdict"]) == ("orders", 0, "waiting")
    assert shown["statistics"].keys() == expected.keys()
    assert [partition.keys() for partition in shown["statistics"]["partitions"]] == [
        partition.keys() for partition in expected["partitions"]
    ]
    assert shown["workload"]["workers"][0]["key"] == found["head"]["key"]
    assert "secret" not in text
    assert '"stuck"' not in text


async def test_history_is_recorded_without_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "HISTORY_STEP", 0.0)
    app = App("billing", stuck_after=0.04)  # it is looked at every 0.01 s

    @app.consume("orders")
    async def on_order(_: Record) -> None:
        pass

    async with TestClient(app) as client:
        for _ in range(3):
            await client.publish("orders", b"", key="customer-1", partition=0)
        await until(lambda: [sample.lag for sample in app.history()[-1:]] == [0] and app.history()[-1].processed == 3)
        shown = (await served(app, "/history.json")).json()["history"]

    assert [sample["at"] for sample in shown] == sorted(sample["at"] for sample in shown)
    assert (shown[0]["processed"], shown[-1]["processed"], shown[-1]["oldest_age"]) == (0, 3, 0.0)
    assert sum(shown[-1]["durations"]) == 3
    assert app.history() == ()


async def test_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App("billing")

    @app.consume("orders")
    async def on_order(_: Record) -> None:
        pass

    async with TestClient(app):
        monitoring = app._monitor
        assert monitoring is not None
        monitoring.check()
        assert len(app.history()) == 1, "one each 5 s"
        monkeypatch.setattr(monitor, "HISTORY_STEP", 0.0)
        for _ in range(800):
            monitoring.check()
        assert len(app.history()) == 720


async def test_explanations_are_bounded() -> None:
    app = App("billing")
    over = asyncio.Event()
    partitions = MOST_DIAGNOSED + 20

    @app.consume("orders", concurrency=4)
    async def on_order(_: Record) -> None:
        await over.wait()

    async with TestClient(app, broker=InMemoryBroker(partitions=partitions)) as client:
        for partition in range(partitions):
            await client.publish("orders", b"", key=str(partition), partition=partition)
        await until(lambda: snapshot(app)["diagnosis"]["left_out"] == 20)
        shown = snapshot(app)
        over.set()

    assert len(shown["diagnosis"]["partitions"]) == MOST_DIAGNOSED
    assert shown["diagnosis"]["left_out"] == 20


class Standing(App):
    """An app with the diagnosis that the test gives it."""

    def diagnose(self) -> Diagnosis:
        found = (("waiting", 3.0), ("up to date", None), ("stuck", 1.0), ("waiting", 9.0), ("advancing", None))
        verdicts = cast("list[tuple[Verdict, float | None]]", found)
        return Diagnosis("running", (), tuple(starmap(self._partition, enumerate(verdicts))), ())

    def _partition(self, number: int, standing: tuple[Verdict, float | None]) -> PartitionDiagnosis:
        verdict, since = standing
        return PartitionDiagnosis("orders", number, verdict, since, "a sentence", None, (), 0, 0)


def test_the_worst_partition_comes_first_and_advancing_ones_are_omitted() -> None:
    shown = snapshot(Standing("billing"))

    assert [(partition["partition"], partition["verdict"]) for partition in shown["diagnosis"]["partitions"]] == [
        (2, "stuck"),
        (3, "waiting"),
        (0, "waiting"),
    ]
    assert shown["diagnosis"]["left_out"] == 0


def test_the_module_docstring_describes_the_snapshot() -> None:
    described = set(re.findall(r"`(\w+)`", importlib.import_module("aioshard.web.page").__doc__ or ""))

    assert snapshot(App("billing")).keys() <= described
