"""The dashboard of an app: shows its activity, explains why a partition is stuck, and with a token allows actions.

It is one page with three scripts and one stylesheet. `page.js` reads `history.json` once and then polls
`dashboard.json`. All its URLs are relative, so it works below any path. Nothing is loaded from other sites.

| path | response |
| --- | --- |
| `/` | the dashboard; with `page.js`, `elements.js`, `dead_letters.js`, `page.css` and `icon.svg` |
| `/dashboard.json` | its data: `statistics`, `diagnosis`, `workload`, `actions` and `at` |
| `/members.json` | with *members*: the statistics of each process of the group, or why it does not answer |
| `/dead-letters.json`, `/dead-letters/…` | dead letters and parked records; see `aioshard.web.dead_letters` |
| `/history.json` | `history`: what `App.history()` returns, one object per sample, oldest first |
| `/actions` | POST: its actions, as described in `aioshard.web.actions`; this path exists only with a token |

`statistics` and `diagnosis` are `App.statistics()` and `App.diagnose()`. Of the partitions in `diagnosis`, only those
that are waiting or stuck are included, the worst first, at most `MOST_DIAGNOSED`; its `left_out` is the number of
further ones. `workload` is `App.workload()`, None while the app is not running. `actions` says whether a client with
the token can perform actions; `at` is the time of the snapshot, in seconds since the epoch.
"""

import dataclasses
import json
import socket
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from aioshard.app import App
from aioshard.dead_letters.edits import Transform
from aioshard.observe import PartitionStatistics
from aioshard.web.actions import action_route
from aioshard.web.authorization import Authorization
from aioshard.web.dead_letters import DeadLetterRoutes
from aioshard.web.server import NOT_FOUND, SAFE, Json, routes_in_threads

MOST_DIAGNOSED = 100
"""Maximum number of diagnosed partitions."""
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores proxies of the environment: the processes are nearby."""
_PARTITION_FIELDS = [field.name for field in dataclasses.fields(PartitionStatistics)]
_STATIC = Path(__file__).with_name("static")
_FILES = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/elements.js": ("elements.js", "text/javascript"),
    "/dead_letters.js": ("dead_letters.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


def dashboard(
    app: App, *, token: str | None = None, members: Sequence[str] = (), transforms: Sequence[Transform] = ()
) -> Starlette:
    """Return the dashboard as a separate application, to be mounted in FastAPI or Starlette.

    Args:
        app: The app to show; it may run in another event loop than the dashboard.
        token: Allows anyone who has it to act; at least 16 characters. With None the dashboard is read-only.
        members: Base URLs of the health servers of all processes of the group, which are then shown too. A host name
            stands for all of its addresses, such as those of a headless service.
        transforms: Functions that change dead letters before they are tried or sent back, as `--transform` of
            `aioshard dlt replay` takes them. A request can name these and no others.

    Raises:
        SettingsError: The token is too short, or cannot be sent in a header. Or transforms have no or equal names.

    Example:
        >>> from starlette.applications import Starlette
        >>> from aioshard import App
        >>> shard_app = App("billing", bootstrap_servers="localhost:9092", auto_offset_reset="earliest")
        >>> web = Starlette(lifespan=shard_app.lifespan)
        >>> web.mount("/aioshard", dashboard(shard_app))  # the dashboard is at /aioshard/
    """
    routes = dashboard_routes(app, token=token, members=members, transforms=transforms)
    return Starlette(routes=routes, exception_handlers=NOT_FOUND)


def dashboard_routes(
    app: App, *, token: str | None = None, members: Sequence[str] = (), transforms: Sequence[Transform] = ()
) -> list[BaseRoute]:
    """Return the routes of the dashboard, to be served with others.

    Args:
        app: As in `dashboard`.
        token: As in `dashboard`.
        members: As in `dashboard`.
        transforms: As in `dashboard`.

    Raises:
        SettingsError: As for `dashboard`.
    """

    def dashboard_json(_: Request) -> Response:
        content = snapshot(app, actions=token is not None)
        return Json({**content, "group": bool(members)}, headers=SAFE)

    def history_json(_: Request) -> Response:
        samples = [sample._asdict() for sample in app.history()]
        return Json({"history": samples}, headers=SAFE)

    def members_json(_: Request) -> Response:
        urls = [address for url in members for address in addresses_of(url)]
        with ThreadPoolExecutor(max(len(urls), 1)) as pool:
            return Json({"members": list(pool.map(ask, urls))}, headers=SAFE)

    routes: list[BaseRoute] = []
    for path, (name, media_type) in _FILES.items():
        content = (_STATIC / name).read_bytes()
        routes.append(Route(path, Response(content, media_type=media_type, headers=SAFE), methods=["GET"]))
    # In a thread: with a thousand partitions it takes long enough to block the event loop noticeably.
    routes += routes_in_threads({"/dashboard.json": dashboard_json, "/history.json": history_json}, threads=1)
    if members:
        routes += routes_in_threads({"/members.json": members_json}, threads=1)
    authorization = None if token is None else Authorization(token)
    routes += DeadLetterRoutes(app, authorization, transforms).routes()
    if authorization is not None:
        routes.append(action_route(app, authorization))
    return routes


def addresses_of(url: str) -> list[str]:
    """Return the URL with each address of its host; the URL itself if there is none, or if TLS needs the name.

    Example:
        >>> addresses_of("http://127.0.0.1:8080")
        ['http://127.0.0.1:8080']
    """
    try:
        parts = urlsplit(url)
        if parts.scheme != "http":
            return [url]
        addresses = socket.getaddrinfo(parts.hostname or url, parts.port or 80, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return [url]
    # With both families, IPv4: the processes are the same.
    first_family = min(addresses)[0]
    hosts = sorted({str(address[0]) for family, *_, address in addresses if family == first_family})
    shown_hosts = [f"[{host}]" if ":" in host else host for host in hosts]
    return [f"http://{host}:{parts.port or 80}{parts.path.rstrip('/')}" for host in shown_hosts]


def ask(url: str) -> dict[str, Any]:
    """Return the statistics of a process, or why it does not answer."""
    try:
        with _OPENER.open(f"{url}/statistics.json", timeout=2.0) as response:
            return {"url": url, "statistics": json.load(response)}
    except (OSError, ValueError, HTTPException) as error:
        return {"url": url, "error": str(error).removeprefix("<urlopen error ").removesuffix(">")}


def snapshot(app: App, *, actions: bool = False) -> dict[str, Any]:
    """Return the data of the dashboard, ready for JSON; safe from any thread.

    Args:
        app: The app to show.
        actions: Whether actions are available.
    """
    statistics = app.statistics()
    diagnosis = app.diagnose()
    workload = app.workload()
    # `asdict` copies deeply, which takes most of the time with many partitions, and these are flat.
    partitions = [{name: getattr(partition, name) for name in _PARTITION_FIELDS} for partition in statistics.partitions]
    delayed = [partition for partition in diagnosis.partitions if partition.verdict in ("stuck", "waiting")]
    worst_first = sorted(delayed, key=lambda partition: (partition.verdict != "stuck", -(partition.since or 0.0)))
    shown_diagnosis = dataclasses.replace(diagnosis, partitions=tuple(worst_first[:MOST_DIAGNOSED]))
    return {
        "statistics": {**dataclasses.replace(statistics, partitions=()).asdict(), "partitions": partitions},
        "diagnosis": {**shown_diagnosis.asdict(), "left_out": max(len(delayed) - MOST_DIAGNOSED, 0)},
        "workload": None if workload is None else workload.asdict(),
        "actions": actions,
        "at": time.time(),
    }
