"""Health, statistics and metrics over HTTP: routes for any Starlette app, and a small server.

| path | response |
| --- | --- |
| `/livez` | 503 only if a restart would help; see `Statistics.restart_cures` |
| `/readyz` | 200 from the first join of the group until draining or failed |
| `/statistics.json` | `app.statistics()` |
| `/explain` | `app.explain()`, text; with `?format=json` or `Accept: application/json`, `app.diagnose()` |
| `/metrics` | Prometheus |

The first two return a JSON object: `status`, `state`, `reasons` (why the status is not 200) and `findings` (problems
that an operator should know about although the status is 200).
"""

import asyncio
import contextlib
import functools
import math
from collections.abc import AsyncIterator, Callable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from aioshard.app import App
from aioshard.core.text import encodable
from aioshard.engine.guard import Guard
from aioshard.errors import NotDrainedError
from aioshard.observe import AppState, Diagnosis, Statistics
from aioshard.records import counted
from aioshard.telemetry.metrics import AppCollector
from aioshard.web.server import NOT_FOUND, SAFE, Json, routes_in_threads, serve_in_thread

_THREADS = 4
"""Number of responses computed at the same time: a slow scrape must not delay a probe."""
_APP_WIDE = ("commit", "draining", "rebalancing")
"""Kinds of findings that concern all partitions, and are reported once."""
_MAX_WAIT = 600.0


# Content of the responses --------------------------------------------------------------


def findings(statistics: Statistics, diagnosis: Diagnosis) -> list[str]:
    """Describe problems that a restart would not fix.

    Args:
        statistics: Statistics of the app.
        diagnosis: Diagnosis of the app at about the same moment.
    """
    sentences = [finding.sentence for finding in diagnosis.findings if finding.kind != "nothing assigned"]
    for partition in diagnosis.partitions:
        # Slowness alone does not count: if it lasts, the partition is stuck, or another finding explains it.
        if partition.verdict == "stuck":
            sentences.append(partition.sentence)
        name = f"{partition.topic}/{partition.partition}"
        sentences += [f"{name}: {finding.sentence}" for finding in partition.findings if finding.kind not in _APP_WIDE]
    sentences += [
        f"handler {handler.name} has {counted(handler.halted, 'halted record')}; /explain names them"
        for handler in statistics.handlers
        if handler.halted
    ]
    sentences += [
        f"handler {handler.name} still runs for {', '.join(handler.outliving[:10])} although the run was cancelled or "
        "its partition was revoked"
        for handler in statistics.handlers
        if handler.outliving
    ]
    return sentences


def _not_ready(statistics: Statistics) -> Sequence[str]:
    trouble = f": {statistics.trouble}" if statistics.trouble else ""
    reasons: dict[AppState, Sequence[str]] = {
        "running": [],
        "failed": statistics.restart_cures,
        "starting": [f"the group has not been joined yet{trouble}"],
        "draining": ["the app is draining: it finishes the records in flight and starts no others"],
        "stopped": ["the app is stopped"],
    }
    return reasons[statistics.state]


# Routes -------------------------------------------------------------------------------


def health_routes(app: App, *, registry: CollectorRegistry | None = None) -> list[BaseRoute]:
    """Return the health routes, to be mounted in any Starlette or FastAPI application.

    Every response is computed in a worker thread, so the serving event loop, which may be that of the app, is not
    blocked.

    Args:
        app: The app to observe; you can call this several times, from any thread.
        registry: Source of `/metrics`; None uses a registry with the app's metrics alone. Pass
            `prometheus_client.REGISTRY`, with an `AppCollector` registered there, to get the process's and the
            handlers' own metrics on the same page.

    In FastAPI: `FastAPI(lifespan=app.lifespan, routes=health_routes(app))`; under a prefix:
    `Mount("/aioshard", routes=health_routes(app))`.
    """
    if registry is None:
        registry = CollectorRegistry()
        AppCollector(app, registry=registry)

    guard = Guard()

    def findings_of(statistics: Statistics) -> list[str]:
        with guard.watching("the app"):
            return findings(statistics, app.diagnose())
        return ["the app could not be diagnosed; the log says why"]  # a restart would not help against that

    def probe(reasons_of: Callable[[Statistics], Sequence[str]], _: Request) -> Response:
        statistics = app.statistics()
        reasons = reasons_of(statistics)
        status, code = ("unavailable", 503) if reasons else ("ok", 200)
        return Json(
            {
                "status": status,
                "state": statistics.state,
                "reasons": reasons,
                "findings": findings_of(statistics),
            },
            code,
            SAFE,
        )

    def explain(request: Request) -> Response:
        default = "json" if "application/json" in request.headers.get("accept", "") else "text"
        if request.query_params.get("format", default) == "json":
            return Json(app.diagnose().asdict(), headers=SAFE)
        return PlainTextResponse(encodable(app.explain()), headers=SAFE)

    def metrics(request: Request) -> Response:
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(registry), headers={**SAFE, "content-type": content_type})

    return routes_in_threads(
        {
            "/livez": functools.partial(probe, lambda statistics: statistics.restart_cures),
            "/readyz": functools.partial(probe, _not_ready),
            "/statistics.json": lambda _: Json(app.statistics().asdict(), headers=SAFE),
            "/explain": explain,
            "/metrics": metrics,
        },
        threads=_THREADS,
    )


def drain_route(app: App, path: str = "/drain") -> Route:
    """Create a route that drains the app, for the `preStop` hook of Kubernetes; use it next to `health_routes`.

    GET and POST call `App.drain` and respond when it has ended: 200, or 503 with the runs that had not finished.
    `/readyz` returns 503 from the start of the drain. With `?wait=5` the response comes after 5 s at the earliest, so
    that clients of `/readyz` have noticed before the process is stopped.

    GET has an effect because an `httpGet` hook of Kubernetes cannot do anything else. So any client that reaches the
    route can take the process out of its group: therefore it is not one of the health routes, and an ingress should
    not expose it. HEAD, and requests that identify themselves as coming from a browser, are refused.

    Args:
        app: The app, in its own event loop, regardless of which one serves the route.
        path: Path of the route.

    In FastAPI: `FastAPI(lifespan=app.lifespan, routes=[*health_routes(app), drain_route(app)])`.
    """

    def response(status: int, *reasons: str) -> Response:
        return Json(
            {"status": "unavailable" if reasons else "ok", "state": app.statistics().state, "reasons": reasons},
            status,
            SAFE,
        )

    async def drain(request: Request) -> Response:
        if request.method == "HEAD" or any(name in request.headers for name in ("origin", "sec-fetch-site")):
            return response(403, "use GET or POST, from a hook or a command and not from a browser")
        text = request.query_params.get("wait", "0")
        try:
            wait = float(text)
        except ValueError:
            wait = math.nan
        if not 0 <= wait <= _MAX_WAIT:
            return response(400, f"wait={text!r} is not a number of seconds from 0 to {_MAX_WAIT:g}")
        clock = asyncio.get_running_loop().time
        earliest = clock() + wait
        reasons = []
        try:
            await app.drain()
        except NotDrainedError as error:
            reasons.append(str(error))
        await asyncio.sleep(max(earliest - clock(), 0.0))
        return response(503 if reasons else 200, *reasons)

    return Route(path, drain, methods=["GET", "POST"])


# Server -------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serve_health(
    app: App,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    registry: CollectorRegistry | None = None,
    routes: Sequence[BaseRoute] = (),
) -> AsyncIterator[tuple[str, int]]:
    """Serve the health routes while the context is open, in a thread with its own event loop.

    Probes, scrapes and explanations are answered even while the app's event loop is blocked, and never block it.

    Args:
        app: The app to observe, from that thread.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        registry: Source of `/metrics`, as in `health_routes`; its collectors are called in that thread.
        routes: Additional routes, which take precedence. Their endpoints run in that thread's event loop: do not await
            methods there that are bound to the app's own event loop, such as `App.publish`.

    Yields:
        The address and port of the server; it accepts connections from here on.

    Raises:
        PortError: The address is in use or does not belong to this host.
    """
    application = Starlette(routes=[*routes, *health_routes(app, registry=registry)], exception_handlers=NOT_FOUND)
    async with serve_in_thread(application, host=host, port=port) as bound:
        yield bound
