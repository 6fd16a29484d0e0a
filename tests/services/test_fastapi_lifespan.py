"""The lifespan of an app in FastAPI and Starlette, without a server: open resources and refusals."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette

from aioshard import App, Record
from aioshard.errors import StateError
from aioshard.kafka.memory.producer import InMemoryProducer
from aioshard.kafka.memory.side_topics import InMemorySideTopics
from aioshard.ports import Clients
from aioshard.testing import InMemoryBroker, InMemoryTransport, TestClient
from aioshard.web.health import health_routes
from tests.engine.live_apps import engine_of


class Shop:
    """An app that says what happens, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.app = App("billing", auto_offset_reset="earliest", resources=self.resources)

        @self.app.consume("orders")
        async def handle(record: Record) -> None: ...

    @contextlib.asynccontextmanager
    async def resources(self, _: App) -> AsyncIterator[str]:
        self.said.append("resources")
        yield "pool"
        self.said.append("no resources")

    @contextlib.asynccontextmanager
    async def lifespan(self, asgi_app: object) -> AsyncIterator[dict[str, str]]:
        self.said.append(f"{type(asgi_app).__name__} begins")
        yield {"greeting": "hello"}
        self.said.append("ends")


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Shop:
    """Its app starts by itself, on a broker in memory."""
    broker = InMemoryBroker()
    clients = Clients(
        lambda: InMemoryTransport(broker, "billing"),
        lambda: InMemoryProducer(broker),
        lambda: InMemorySideTopics(broker),
    )
    monkeypatch.setattr("aioshard.kafka.clients.kafka_clients", lambda *_: clients)
    return Shop()


def client_of(api: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://app")


@pytest.mark.parametrize("framework", [FastAPI, Starlette])
async def test_app_lifespan_sets_readiness(shop: Shop, framework: type[Starlette]) -> None:
    api = framework(lifespan=shop.app.lifespan, routes=health_routes(shop.app))

    async with client_of(api) as client:
        assert (await client.get("/readyz")).status_code == 503
        async with api.router.lifespan_context(api) as state:
            assert state is None
            assert (await client.get("/readyz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
    assert shop.said == ["resources", "no resources"]


@pytest.mark.parametrize("enter", [lambda app: app, lambda app: app.lifespan(None)], ids=["app", "lifespan"])
async def test_the_app_runs_inside_a_custom_lifespan(enter: Callable[[App], Any], shop: Shop) -> None:
    @contextlib.asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[Any]:
        async with shop.lifespan(api) as state, enter(shop.app):
            yield state

    api = FastAPI(lifespan=lifespan)
    async with api.router.lifespan_context(api) as state:
        assert state == {"greeting": "hello"}

    assert shop.said == ["FastAPI begins", "resources", "no resources", "ends"]


async def test_a_custom_lifespan_ends_cleanly_if_the_app_does_not_start(shop: Shop) -> None:
    async with shop.app:
        with pytest.raises(StateError, match="already running"):
            async with shop.lifespan(FastAPI()), shop.app.lifespan(None):
                raise AssertionError

    assert shop.said == ["resources", "FastAPI begins", "no resources"]


async def test_a_test_client_runs_the_app_and_the_lifespan_uses_it() -> None:
    shop = Shop()

    @contextlib.asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[Any]:
        async with shop.lifespan(api) as state, shop.app:
            yield state

    api = FastAPI(lifespan=lifespan)

    @api.get("/greeting")
    async def greet() -> str:
        await shop.app.publish("orders", b"")
        return str(shop.app.state)

    async with TestClient(shop.app) as kafka, api.router.lifespan_context(api), client_of(api) as client:
        assert (await client.get("/greeting")).json() == "pool"
        await kafka.settle()
    assert shop.said == ["resources", "FastAPI begins", "ends", "no resources"]


@pytest.mark.parametrize("stop_server", [False, True])
async def test_a_failure_stops_a_server_only_on_request(shop: Shop, stop_server: bool) -> None:
    signaled = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signaled.set)
    try:
        async with shop.app.lifespan(None, stop_server=stop_server):
            engine_of(shop.app).lifecycle.fail(StateError("access was taken away"))
            if stop_server:
                async with asyncio.timeout(5):
                    await signaled.wait()
            await asyncio.sleep(0.05)
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)

    assert signaled.is_set() == stop_server


async def test_a_process_without_a_sigterm_handler_is_not_stopped(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with caplog.at_level(logging.ERROR):
        async with shop.app.lifespan(None, stop_server=True):
            engine_of(shop.app).lifecycle.fail(StateError("access was taken away"))
            await asyncio.sleep(0.05)

    assert "the server is not stopped: nothing in this process handles SIGTERM" in caplog.messages


async def test_a_stopping_server_gets_no_second_signal(shop: Shop) -> None:
    signals: list[int] = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: signals.append(1))
    try:
        async with shop.app.lifespan(None, stop_server=True):
            engine = engine_of(shop.app)
        engine.lifecycle.fail(StateError("the last commit was refused"))
        await asyncio.sleep(0.05)
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)

    assert signals == []
