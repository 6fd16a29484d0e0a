"""The route for a `preStop` hook."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette

from aioshard import App, Record
from aioshard.errors import NotDrainedError
from aioshard.testing import TestClient
from aioshard.web.health import drain_route, health_routes, serve_health


class Shop:
    """An app with one record in progress, which ends when it may."""

    def __init__(self, shutdown_timeout: float = 25.0) -> None:
        self.app = App("billing", shutdown_timeout=shutdown_timeout)
        self.runs = asyncio.Event()
        self.may_end = asyncio.Event()
        routes = [*health_routes(self.app), drain_route(self.app)]
        transport = httpx.ASGITransport(Starlette(routes=routes))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://app")

        @self.app.consume("orders")
        async def handle(record: Record) -> None:  # noqa: ARG001
            self.runs.set()
            await self.may_end.wait()

    async def open(self) -> AsyncIterator["Shop"]:
        async with TestClient(self.app) as self.kafka, self.http:
            await self.kafka.publish("orders", b"", partition=0)
            await self.runs.wait()
            yield self


@pytest.fixture
async def shop() -> AsyncIterator[Shop]:
    async for shop in Shop().open():
        yield shop
        shop.may_end.set()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_the_response_comes_after_the_commit_while_readiness_is_false(shop: Shop, method: str) -> None:
    assert (await shop.http.get("/readyz")).status_code == 200
    asked = asyncio.create_task(shop.http.request(method, "/drain"))
    while shop.app.statistics().state == "running":  # noqa: ASYNC110 - the next step of the loop is meant
        await asyncio.sleep(0)

    assert (await shop.http.get("/readyz")).status_code == 503
    assert (await shop.http.get("/livez")).status_code == 200
    assert not asked.done()
    shop.may_end.set()
    answer = await asked

    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "state": "stopped", "reasons": []})
    assert shop.kafka.committed("orders", 0) == 1
    assert (await shop.http.get("/readyz")).status_code == 503
    assert (await shop.http.get("/livez")).status_code == 200
    assert (await shop.http.request(method, "/drain")).status_code == 200, "it may be asked again"


async def test_the_response_waits_as_long_as_requested(shop: Shop) -> None:
    shop.may_end.set()
    began = time.monotonic()

    assert (await shop.http.get("/drain?wait=0.3")).status_code == 200

    assert 0.3 <= time.monotonic() - began < 2


async def test_an_abandoned_request_leaves_only_the_drain(shop: Shop) -> None:
    before = asyncio.all_tasks()
    asked = asyncio.create_task(shop.http.get("/drain?wait=600"))
    while shop.app.statistics().state == "running":  # noqa: ASYNC110 - the next step of the loop is meant
        await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait([asked])

    assert {task.get_name() for task in asyncio.all_tasks() - before} == {"drain"}


async def test_runs_that_outlast_the_drain_give_503_and_are_named() -> None:
    shop = Shop(shutdown_timeout=0.3)
    answers: list[httpx.Response] = []
    with contextlib.suppress(NotDrainedError):  # the end of the app has the same result
        async for _ in shop.open():
            answers.append(await shop.http.get("/drain"))  # noqa: PERF401 - what follows may raise

    assert answers[0].status_code == 503
    assert "orders/0/0" in answers[0].json()["reasons"][0]


@pytest.mark.parametrize("wait", ["-1", "nan", "inf", "601", "soon", ""])
async def test_an_invalid_wait_is_refused_and_drains_nothing(shop: Shop, wait: str) -> None:
    answer = await shop.http.get("/drain", params={"wait": wait})

    assert answer.status_code == 400
    assert answer.json()["reasons"] == [f"wait={wait!r} is not a number of seconds from 0 to 600"]
    assert shop.app.statistics().state == "running"


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("HEAD", {}, 403),
        ("GET", {"sec-fetch-site": "cross-site"}, 403),
        ("POST", {"origin": "https://elsewhere.example"}, 403),
        ("PUT", {}, 405),
        ("DELETE", {}, 405),
    ],
)
async def test_requests_of_browsers_and_other_methods_drain_nothing(
    shop: Shop, method: str, headers: dict[str, str], status: int
) -> None:
    answer = await shop.http.request(method, "/drain", headers=headers)

    assert answer.status_code == status
    assert shop.app.statistics().state == "running"


async def test_the_drain_is_served_from_another_thread(shop: Shop) -> None:
    """By the health server, whose event loop is not the app's."""
    shop.may_end.set()
    async with (
        serve_health(shop.app, routes=[drain_route(shop.app)]) as (host, port),
        httpx.AsyncClient(base_url=f"http://{host}:{port}") as http,
    ):
        assert (await http.post("/drain")).json()["state"] == "stopped"
        assert (await http.get("/readyz")).status_code == 503
    assert shop.kafka.committed("orders", 0) == 1
