"""`aioshard record`: one record of a running process."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette

from aioshard.web.actions import action_route
from aioshard.web.authorization import Authorization
from aioshard.web.health import health_routes
from aioshard.web.server import NOT_FOUND
from tests.engine.web.test_actions import TOKEN, FakeApp
from tests.support.browsing import served

Aioshard = Callable[..., Awaitable[Any]]


@pytest.mark.parametrize(("command", "method"), [("retry", "retry_now"), ("skip", "skip"), ("cancel", "cancel_run")])
async def test_each_command_reaches_the_app(
    aioshard: Aioshard, monkeypatch: pytest.MonkeyPatch, command: str, method: str
) -> None:
    monkeypatch.setenv("AIOSHARD_WEB_TOKEN", TOKEN)
    app = FakeApp()
    async with served(Starlette(routes=[action_route(app, Authorization(TOKEN))])) as url:
        ended = await aioshard("record", command, url, "orders/3/101", "--json")

    assert ended.code == 0, ended.errors
    assert app.calls == [(method, "orders", 3, 101)]
    assert "orders/3/101" in json.loads(ended.output)["done"]


async def test_a_refusal_is_passed_on(aioshard: Aioshard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHARD_WEB_TOKEN", "another-token-than-that")
    async with served(Starlette(routes=[action_route(FakeApp(), Authorization(TOKEN))])) as url:
        ended = await aioshard("record", "skip", url, "orders/3/101")

    assert ended.code == 3
    assert "the token is wrong" in ended.errors


async def test_a_process_without_actions_is_explained(aioshard: Aioshard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHARD_WEB_TOKEN", TOKEN)
    async with served(Starlette(routes=health_routes(FakeApp()), exception_handlers=NOT_FOUND)) as url:
        ended = await aioshard("record", "skip", url, "orders/3/101")

    assert ended.code == 3
    assert "--web" in ended.errors


async def test_the_token_must_be_set(aioshard: Aioshard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOSHARD_WEB_TOKEN", raising=False)

    ended = await aioshard("record", "skip", "http://127.0.0.1:1", "orders/3/101")

    assert ended.code == 2
    assert "AIOSHARD_WEB_TOKEN" in ended.errors
