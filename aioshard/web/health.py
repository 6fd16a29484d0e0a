"""Health, statistics and metrics over HTTP: routes for any Starlette app, and a small server.

| path | answer |
| --- | --- |
| `/livez` | 503 only if a restart would help; see `Statistics.restart_cures` |
| `/readyz` | 200 from the first join of the group, or `ready_timeout`, until draining or failed |
| `/statistics.json` | `app.statistics()` |
| `/explain` | `app.explain()`, text; with `?format=json` or `Accept: application/json`, `app.diagnose()` |
| `/metrics` | Prometheus |

The first two return a JSON object: `status`, `state`, `reasons` (why the status is not 200) and `findings` (problems
that an operator should know about although the status is 200).
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from prometheus_client import CollectorRegistry

from aioshard.app import App
from aioshard.errors import MissingExtraError
from aioshard.observe import Diagnosis, Statistics
from aioshard.telemetry.exposition import encode
from aioshard.telemetry.metrics import AppCollector

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import BaseRoute, Route

    from aioshard.web.answers import MISSING, SAFE, Threads, probe_answer, wants_json
    from aioshard.web.serving import PortError, serve_in_thread
except ImportError as error:
    raise MissingExtraError("the health server", "web") from error

__all__ = ["PortError", "findings", "health_routes", "serve_health"]

_OF_ALL = ("commit", "draining", "rebalancing")
"""Kinds of findings that concern all partitions, and are reported once."""


# Content of the answers ----------------------------------------------------------------


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
    reasons = list(statistics.restart_cures)
    if statistics.state == "failed" and not reasons:
        reasons = [f"the app has failed: {statistics.trouble or 'the log says why'}"]
    return reasons


def _not_ready(statistics: Statistics) -> list[str]:
    match statistics.state:
        case "running":
            return []
        case "failed":
            return _not_alive(statistics)
        case "starting" if statistics.ready_anyway:
            return []
        case "starting":
            return ["the group has not been joined yet" + (f": {statistics.trouble}" if statistics.trouble else "")]
        case "draining":
            return ["the app is stopping: what runs is finished, nothing new is taken in"]
        case "stopped":
            return ["the app is stopped"]


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
    answers = _Answers(app, registry)
    threads = Threads()

    def in_thread(compute: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await threads.run(compute, request)

        return answer

    return [
        Route("/livez", in_thread(answers.livez)),
        Route("/readyz", in_thread(answers.readyz)),
        Route("/statistics.json", in_thread(answers.statistics)),
        Route("/explain", in_thread(answers.explain)),
        Route("/metrics", in_thread(answers.metrics)),
    ]


class _Answers:
    """The responses of the routes; computed in any thread."""

    def __init__(self, app: App, registry: CollectorRegistry) -> None:
        self._app = app
        self._registry = registry

    def livez(self, _: Request) -> Response:
        statistics = self._app.statistics()
        return self._answer(statistics, _not_alive(statistics))

    def readyz(self, _: Request) -> Response:
        statistics = self._app.statistics()
        return self._answer(statistics, _not_ready(statistics))

    def _answer(self, statistics: Statistics, reasons: list[str]) -> Response:
        return probe_answer(statistics.state, reasons, findings(statistics, self._app.diagnose()))

    def statistics(self, _: Request) -> Response:
        return JSONResponse(self._app.statistics().asdict(), headers=SAFE)

    def explain(self, request: Request) -> Response:
        if wants_json(request):
            return JSONResponse(self._app.diagnose().asdict(), headers=SAFE)
        return PlainTextResponse(self._app.explain(), headers=SAFE)

    def metrics(self, request: Request) -> Response:
        page, content_type = encode(self._registry, request.headers.get("accept", ""))
        return Response(page, headers={**SAFE, "content-type": content_type})


# Server -------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serve_health(
    app: App,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    uds: str | None = None,
    registry: CollectorRegistry | None = None,
    routes: Sequence[BaseRoute] = (),
) -> AsyncIterator[tuple[str, int]]:
    """Serve the health routes while the context is open, in a thread with its own event loop.

    So probes, scrapes and explanations are answered even while the app's event loop is blocked, and never block it.

    Args:
        app: The app to observe, from that thread.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        uds: Path of a Unix socket to listen on, in place of host and port.
        registry: Source of `/metrics`, as in `health_routes`; its collectors are called in that thread.
        routes: Additional routes, which take precedence. Their endpoints run in that thread's event loop: do not await
            methods there that are bound to the app's own event loop, such as `App.publish`.

    Yields:
        The address and port of the server, or the path and 0; it accepts connections from here on.

    Raises:
        PortError: The address is in use or does not belong to this host.
    """
    application = Starlette(routes=[*routes, *health_routes(app, registry=registry)], exception_handlers=MISSING)
    async with serve_in_thread(application, host=host, port=port, uds=uds) as bound:
        yield bound
