"""`aioshard run --web`: the dashboard next to the health routes, and the token that allows its actions."""

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.subprocesses import CommandProcess

Start = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]

TOKEN = "a-token-of-the-operator"
APP = """
from aioshard import App, Record

app = App("billing", bootstrap_servers="127.0.0.1:1", auto_offset_reset="earliest", start_timeout=None)

@app.consume("orders")
async def on_order(record: Record) -> None: ...

def fixed(record: Record) -> bytes: ...
"""


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts an app that finds no broker, and gives a client of its page."""
    (tmp_path / "shop.py").write_text(APP)

    @contextlib.asynccontextmanager
    async def started(*arguments: str, **variables: str) -> AsyncIterator[httpx.AsyncClient]:
        app = await CommandProcess.start(tmp_path, "run", "shop:app", "--web", *arguments, variables=variables)
        try:
            line = await app.warns("the dashboard is at")
            async with httpx.AsyncClient(base_url=line.split()[-1]) as client:
                yield client
        finally:
            await app.kill()

    return started


def asked(action: str = "check", token: str = TOKEN) -> dict[str, Any]:
    return {"json": {"action": action}, "headers": {"authorization": f"Bearer {token}"}}


async def test_the_dashboard_is_read_only_and_next_to_the_health_routes(start: Start) -> None:
    async with start() as client:
        assert client.base_url.host == "127.0.0.1"
        assert "<title>aioshard</title>" in (await client.get("/")).text
        assert (await client.get("/livez")).status_code == 200
        found = (await client.get("/dashboard.json")).json()
        assert (found["actions"], found["statistics"]["group_id"]) == (False, "billing")
        assert (await client.post("/actions", **asked())).status_code == 404
        rebound = await client.get("/dashboard.json", headers={"host": "elsewhere.example"})
        assert rebound.status_code == 400


async def test_a_token_allows_actions(start: Start) -> None:
    async with start(AIOSHARD_WEB_TOKEN=TOKEN) as client:
        assert (await client.get("/dashboard.json")).json()["actions"] is True
        assert (await client.post("/actions", **asked())).json() == {"done": "the token is correct"}
        assert (await client.post("/actions", **asked(token="another-token-of-the-operator"))).status_code == 401


async def test_a_short_token_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)

    app = await CommandProcess.start(tmp_path, "run", "shop:app", "--web", variables={"AIOSHARD_WEB_TOKEN": "short"})

    assert await app.ends() == 2
    assert "the token of the dashboard has 5 characters" in app.errors


async def test_an_empty_variable_is_not_a_token(start: Start) -> None:
    async with start(AIOSHARD_WEB_TOKEN="") as client:
        assert (await client.get("/dashboard.json")).json()["actions"] is False


async def test_other_processes_are_shown_by_url(start: Start) -> None:
    async with start("--member", "http://127.0.0.1:1/", "--member", "127.0.0.1:2") as client:
        assert (await client.get("/dashboard.json")).json()["group"] is True
        members = (await client.get("/members.json")).json()["members"]
    assert [member["url"] for member in members] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    assert all("refused" in member["error"] for member in members)


async def test_transforms_are_those_of_the_operator(start: Start, tmp_path: Path) -> None:
    async with start("--transform", "shop:fixed") as client:
        assert (await client.get("/dead-letters.json")).json()["transforms"] == ["shop:fixed"]

    (tmp_path / "shop.py").write_text(APP)
    app = await CommandProcess.start(tmp_path, "run", "shop:app", "--web", "--transform", "shop:missing")

    assert await app.ends() == 2
    assert "has no attribute 'missing'" in app.errors
