"""The whole group on one dashboard: reachable and unreachable processes."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, expect

from aioshard import App, Record
from aioshard.testing import InMemoryBroker, TestClient
from aioshard.web import dashboard, serve_health
from aioshard.web.page import addresses_of, ask
from tests.support.browsing import Watched, served


def make_app() -> App:
    app = App("billing", auto_offset_reset="earliest")

    @app.consume("orders", concurrency=7)
    async def on_order(record: Record) -> None: ...

    return app


@contextlib.asynccontextmanager
async def group() -> AsyncIterator[tuple[str, list[str]]]:
    """Three apps of a group on ports of their own, and an address where nobody listens.

    Yields:
        The address of a dashboard of all of them, and the base URLs in the order of their ports.
    """
    broker = InMemoryBroker(partitions=6)
    broker.create_topic("orders", 6)
    async with contextlib.AsyncExitStack() as stack:
        gone = stack.enter_context(socket.socket())
        gone.bind(("127.0.0.1", 0))
        urls = [f"http://127.0.0.1:{gone.getsockname()[1]}"]
        apps = [make_app() for _ in range(3)]
        for app in apps:
            await stack.enter_async_context(TestClient(app, broker=broker))
            host, port = await stack.enter_async_context(serve_health(app, host="127.0.0.1", port=0))
            urls.append(f"http://{host}:{port}")
        for number in range(30):
            broker.publish("orders", b"{}", partition=number % 6)
        yield await stack.enter_async_context(served(dashboard(apps[0], members=urls))), urls


async def test_all_processes_of_a_group_are_queried() -> None:
    async with group() as (address, (gone, *urls)), httpx.AsyncClient(base_url=address) as client:
        assert (await client.get("/dashboard.json")).json()["group"] is True
        members = {found["url"]: found for found in (await client.get("/members.json")).json()["members"]}
    assert members.keys() == {gone, *urls}
    assert "refused" in members[gone]["error"]
    owned = [len(members[url]["statistics"]["partitions"]) for url in urls]
    assert sum(owned) == 6


async def test_without_members_the_path_does_not_exist() -> None:
    app = make_app()
    async with TestClient(app), served(dashboard(app)) as address, httpx.AsyncClient(base_url=address) as client:
        assert (await client.get("/dashboard.json")).json()["group"] is False
        assert (await client.get("/members.json")).status_code == 404


def test_a_host_name_is_expanded_to_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::2", 8080, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.2", 8080)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 8080)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert addresses_of("http://billing-headless:8080") == ["http://10.0.0.1:8080", "http://10.0.0.2:8080"]
    assert addresses_of("http://billing-headless:8080/health/")[0] == "http://10.0.0.1:8080/health"
    assert addresses_of("https://billing:8443") == ["https://billing:8443"]
    del found[1:]
    assert addresses_of("http://billing-headless:8080/") == ["http://[fd00::2]:8080"]


def test_a_name_that_does_not_resolve_is_shown_as_it_is() -> None:
    url = "http://no-such-host.invalid:8080"
    assert addresses_of(url) == [url]
    assert ask(url)["error"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[::1", "no url"])
def test_an_invalid_url_is_shown_with_the_reason(url: str) -> None:
    assert addresses_of(url) == [url]
    assert ask(url)["error"]


async def test_a_response_that_is_not_http_is_shown_with_the_reason() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        assert (await asyncio.to_thread(ask, f"http://127.0.0.1:{port}"))["error"]


async def test_a_url_that_is_not_a_health_server_is_shown_as_such() -> None:
    app = make_app()
    async with TestClient(app), served(dashboard(app)) as address:
        assert "404" in (await asyncio.to_thread(ask, address))["error"]


@pytest.mark.chaos
async def test_one_dashboard_shows_three_processes(browser: Browser) -> None:
    async with group() as (address, (gone, *urls)):
        watched = Watched(await browser.new_page(viewport={"width": 1280, "height": 900}), f"{address}/")
        page = watched.page
        await page.goto(watched.address)
        await expect(page.locator("#members-count")).to_contain_text("3 of 4 processes answer", timeout=15_000)
        for url in urls:
            row = watched.row("members", url)
            await expect(row).to_contain_text("running")
            await expect(row.get_by_role("link")).to_have_attribute("href", f"{url}/")
            await expect(row).to_contain_text("0 of 7")
        await expect(watched.row("members", gone)).to_contain_text("no answer")
        await expect(watched.row("members", gone)).to_contain_text("refused")
        assert watched.troubles == []
