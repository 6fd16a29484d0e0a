"""Health, statistics and metrics over HTTP: routes for any Starlette app, and a small server of our own.

| path | answer |
| --- | --- |
| `/livez` | 503 only for what a restart cures: the app has failed. That the event loop runs, the answer proves |
| `/readyz` | 200 from the first join of the group until draining or failed; a rebalance or an outage keeps it |
| `/statistics.json` | `app.statistics()` |
| `/explain` | `app.explain()`, text; with `?format=json` or `Accept: application/json`, `app.diagnose()` |
| `/metrics` | Prometheus |

The first two carry a JSON object: `status`, `state`, `reasons` (why not 200) and `findings` (what an
operator should know although the status is 200).
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from aioshard.errors import AioshardError, MissingExtraError
from aioshard.observe import Diagnosis, Statistics
from aioshard.telemetry.metrics import AppCollector, Observed

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import BaseRoute, Route
except ImportError as error:
    raise MissingExtraError("the health server", "web") from error

__all__ = ["Explained", "PortError", "findings", "health_routes", "serve_health"]

_FRESH = {"cache-control": "no-store"}
_OF_ALL = ("commit", "draining", "rebalancing")
"""Kinds of findings that concern all partitions, and are told once."""
_STOPS_WITHIN = 1
"""Seconds that requests in progress get when the server stops."""


class PortError(AioshardError):
    """The address of the health server cannot be used."""


class Explained(Observed, Protocol):
    """An app, as far as the health routes need it."""

    def explain(self) -> str:
        """Why each partition does not advance."""

    def diagnose(self) -> Diagnosis:
        """The same, for programs."""


# What the answers say -----------------------------------------------------------------


def findings(statistics: Statistics, diagnosis: Diagnosis) -> list[str]:
    """Sentences about what does not move, though a restart would not help.

    Args:
        statistics: What happens.
        diagnosis: Why it does not, of about the same moment.
    """
    sentences = [finding.sentence for finding in diagnosis.findings if finding.kind != "nothing assigned"]
    for partition in diagnosis.partitions:
        # What is merely slow is no finding: it is stuck when it lasts, or something else is in the way.
        if partition.verdict == "stuck":
            sentences.append(partition.sentence)
        name = f"{partition.topic}/{partition.partition}"
        sentences += [f"{name}: {one.sentence}" for one in partition.findings if one.kind not in _OF_ALL]
    for handler in statistics.handlers:
        if handler.halted:
            sentences.append(f"handler {handler.name} has {handler.halted} halted record(s); /explain names them")
        if handler.outliving:
            sentences.append(
                f"handler {handler.name} still runs for {', '.join(handler.outliving[:10])} although the run was "
                "cancelled or its partition is gone"
            )
    return sentences


def _not_alive(statistics: Statistics) -> list[str]:
    if statistics.state == "failed":
        return [f"the app has failed: {statistics.trouble or 'the log says why'}"]
    return []


def _not_ready(statistics: Statistics) -> list[str]:
    match statistics.state:
        case "running":
            return []
        case "failed":
            return _not_alive(statistics)
        case "starting":
            return ["the group has not been joined yet" + (f": {statistics.trouble}" if statistics.trouble else "")]
        case "draining":
            return ["the app is stopping: what runs is finished, nothing new is taken in"]
        case "stopped":
            return ["the app is stopped"]


# Routes -------------------------------------------------------------------------------


def health_routes(app: Explained, *, registry: CollectorRegistry | None = None) -> list[BaseRoute]:
    """The routes, to be mounted in any Starlette or FastAPI application.

    Args:
        app: What is asked; any number of times, from the event loop.
        registry: What `/metrics` shows; None is a registry with the app's metrics alone. Give
            `prometheus_client.REGISTRY`, with an `AppCollector` registered there, to have the
            process's and the handlers' own metrics on the same page.

    In FastAPI: `FastAPI(lifespan=app.lifespan, routes=health_routes(app))`; under a prefix:
    `Mount("/aioshard", routes=health_routes(app))`.
    """
    if registry is None:
        registry = CollectorRegistry()
        AppCollector(app, registry=registry)
    shown = registry

    def answer(statistics: Statistics, reasons: list[str]) -> Response:
        body = {
            "status": "unavailable" if reasons else "ok",
            "state": statistics.state,
            "reasons": reasons,
            "findings": findings(statistics, app.diagnose()),
        }
        return JSONResponse(body, status_code=503 if reasons else 200, headers=_FRESH)

    async def livez(_: Request) -> Response:
        statistics = app.statistics()
        return answer(statistics, _not_alive(statistics))

    async def readyz(_: Request) -> Response:
        statistics = app.statistics()
        return answer(statistics, _not_ready(statistics))

    async def statistics_json(_: Request) -> Response:
        return JSONResponse(app.statistics().asdict(), headers=_FRESH)

    async def explain(request: Request) -> Response:
        if _wants_json(request):
            return JSONResponse(app.diagnose().asdict(), headers=_FRESH)
        return PlainTextResponse(app.explain(), headers=_FRESH)

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(shown), headers={"content-type": content_type})

    return [
        Route("/livez", livez),
        Route("/readyz", readyz),
        Route("/statistics.json", statistics_json),
        Route("/explain", explain),
        Route("/metrics", metrics),
    ]


def _wants_json(request: Request) -> bool:
    asked = request.query_params.get("format")
    return asked == "json" if asked is not None else "application/json" in request.headers.get("accept", "")


# Server -------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """A server that leaves the process's signals alone: whoever runs the app owns them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serve_health(
    app: Explained, *, host: str, port: int, registry: CollectorRegistry | None = None
) -> AsyncIterator[tuple[str, int]]:
    """Serve the health routes in this event loop while the context is open.

    Args:
        app: What is asked.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        registry: What `/metrics` shows, as in `health_routes`.

    Yields:
        The address and port that are listened on; connections are accepted from here on.

    Raises:
        PortError: The address is in use or is not ours.
    """
    listener = _listen(host, port)
    config = uvicorn.Config(
        Starlette(routes=health_routes(app, registry=registry)),
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_STOPS_WITHIN,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="health server")
    try:
        address, bound, *_ = listener.getsockname()
        yield address, bound
    finally:
        server.should_exit = True
        await serving
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # Listening before the server runs: a probe that comes early waits for its answer.
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise PortError(
            f"the health server cannot listen on {host}:{port}: {error.strerror or error}; "
            "choose another --health-port (0 takes a free one) or --host"
        ) from None
