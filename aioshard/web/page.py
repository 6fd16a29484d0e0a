"""The dashboard of an app: shows its activity, explains why a partition is stuck, and with a token allows actions.

It is one page, one script and one stylesheet; the script polls `processes.json` and keeps the history of its graphs.
All its URLs are relative, so it works below any path. Nothing is loaded from other sites.

| path | answer |
| --- | --- |
| `/` | the dashboard; with `page.js`, `page.css` and `icon.svg` |
| `/processes.json` | its data, as described in `aioshard.web.processes` |
| `/actions` | POST: its actions, as described in `aioshard.web.actions`; this path exists only with a token |
"""

import asyncio
import functools
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from aioshard.app import App
from aioshard.errors import MissingExtraError
from aioshard.web.actions import Action, RefusedError, parse, perform
from aioshard.web.answers import MISSING, SAFE, Threads
from aioshard.web.guard import Guard, body_of
from aioshard.web.processes import document, process

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import BaseRoute, Route
except ImportError as error:
    raise MissingExtraError("the page", "web") from error

__all__ = ["Source", "dashboard", "page_routes", "routes_of"]

_STATIC = Path(__file__).with_name("static")
_FILES = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_LASTS = 0.5
"""Seconds for which several dashboards get the same response: each snapshot costs the app's process time."""


class Source(NamedTuple):
    """Data and actions of a dashboard: from one app, or from several processes."""

    look: Callable[[], Awaitable[dict[str, Any]]]
    """Builds `processes.json`."""
    act: Callable[[Action], Awaitable[str]]
    """Performs an action and returns a sentence that says what was done; raises `RefusedError`."""


def dashboard(app: App, *, token: str | None = None) -> Starlette:
    """Return the dashboard as a separate application, to be mounted in FastAPI or Starlette.

    Args:
        app: The app to show; it may run in another event loop than the dashboard.
        token: Allows anyone who has it to act; at least 16 characters. With None the dashboard is read-only.

    Raises:
        SettingsError: The token is too short, or cannot be sent in a header.

    Example:
        >>> from starlette.applications import Starlette
        >>> from aioshard import App
        >>> shard_app = App("billing", bootstrap_servers="localhost:9092", auto_offset_reset="earliest")
        >>> web = Starlette(lifespan=shard_app.lifespan)
        >>> web.mount("/aioshard", dashboard(shard_app))  # the page is at /aioshard/
    """
    return Starlette(routes=page_routes(app, token=token), exception_handlers=MISSING)


def page_routes(app: App, *, token: str | None = None) -> list[BaseRoute]:
    """Return the routes of the dashboard, to be served with others.

    Args:
        app: As in `dashboard`.
        token: As in `dashboard`.

    Raises:
        SettingsError: As for `dashboard`.
    """
    threads = Threads()

    async def look() -> dict[str, Any]:
        # In a thread: with a thousand partitions it takes long enough to block the event loop noticeably.
        shown = await threads.run(process, app)
        return document([shown], actions=token is not None)

    async def act(action: Action) -> str:
        if action.worker is not None:
            raise RefusedError(409, 'there is only one process: leave "worker" out')
        return await threads.run(perform, app, action)

    return routes_of(Source(look, act), token=token)


def routes_of(source: Source, *, token: str | None = None) -> list[BaseRoute]:
    """Return the routes of a dashboard that shows *source*; for the rest see `page_routes`."""
    threads = Threads()
    latest = _Latest(source.look, threads)

    async def processes(_: Request) -> Response:
        return Response(await latest.body(), media_type="application/json", headers=SAFE)

    routes = [
        Route(path, functools.partial(_file, _STATIC / name, media_type)) for path, (name, media_type) in _FILES.items()
    ]
    routes.append(Route("/processes.json", processes))
    if token is not None:
        guard = Guard(token)
        routes.append(Route("/actions", functools.partial(_act, source, guard), methods=["POST"]))
    return [*routes]


class _Latest:
    """The latest `processes.json`, shared by requests that arrive within a moment."""

    def __init__(self, look: Callable[[], Awaitable[dict[str, Any]]], threads: Threads) -> None:
        self._look = look
        self._threads = threads
        self._turn = asyncio.Lock()
        self._at = float("-inf")
        self._body = b""

    async def body(self) -> bytes:
        """Return it as JSON; concurrent requests wait for the same result."""
        async with self._turn:
            if time.monotonic() - self._at >= _LASTS:
                found = await self._look()
                self._body = await self._threads.run(_as_json, found)
                self._at = time.monotonic()
            return self._body


def _as_json(found: dict[str, Any]) -> bytes:
    return json.dumps(found, separators=(",", ":")).encode()


async def _file(path: Path, media_type: str, _: Request) -> Response:
    return Response(_content(path), media_type=media_type, headers=SAFE)


@functools.cache
def _content(path: Path) -> bytes:
    return path.read_bytes()


async def _act(source: Source, guard: Guard, request: Request) -> Response:
    action: Action | None = None
    try:
        guard.check(request)
        action = parse(await body_of(request))
        sentence = await source.act(action)
    except RefusedError as refusal:
        guard.refused(request, action, refusal)
        headers = {**SAFE, "connection": "close"}  # the unread rest of its body must not be taken for a request
        if refusal.status == 401:  # noqa: PLR2004 - Unauthorized
            headers["www-authenticate"] = "Bearer"
        return JSONResponse({"error": refusal.sentence}, status_code=refusal.status, headers=headers)
    guard.done(request, action, sentence)
    return JSONResponse({"done": sentence}, headers=SAFE)
