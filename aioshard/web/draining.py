"""A route that drains the app, for the `preStop` hook of Kubernetes and other graceful shutdowns."""

import asyncio
import math

from aioshard.app import App
from aioshard.errors import MissingExtraError, NotDrainedError

try:
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from aioshard.web.answers import SAFE
except ImportError as error:
    raise MissingExtraError("the drain route", "web") from error

__all__ = ["drain_route"]

_LONGEST_WAIT = 600.0
_SIGNS_OF_A_BROWSER = ("origin", "sec-fetch-site")


def drain_route(app: App, path: str = "/drain") -> Route:
    """Create a route that drains the app, for use next to `health_routes`.

    GET and POST call `App.drain` and respond when it has ended: 200, or 503 with the runs that had not finished.
    `/readyz` returns 503 from the start of the drain. With `?wait=5` the response comes after 5 s at the earliest, so
    that clients of `/readyz` have noticed before the process is told to end.

    GET has an effect because an `httpGet` hook of Kubernetes cannot do anything else. So any client that reaches the
    route can take the process out of its group: therefore it is not one of the health routes, and an ingress should
    not expose it. HEAD, and requests that identify themselves as coming from a browser, are refused.

    Args:
        app: The app, in its own event loop, regardless of which one serves the route.
        path: Path of the route.

    In FastAPI: `FastAPI(lifespan=app.lifespan, routes=[*health_routes(app), drain_route(app)])`.
    """

    async def drain(request: Request) -> Response:
        if request.method == "HEAD" or any(sign in request.headers for sign in _SIGNS_OF_A_BROWSER):
            return _answer(app, 403, ["GET or POST was expected, from a hook or a command and not from a browser"])
        text = request.query_params.get("wait", "0")
        wait = _seconds(text)
        if wait is None:
            return _answer(app, 400, [f"wait={text!r}: seconds were expected, from 0 to {_LONGEST_WAIT:g}"])
        clock = asyncio.get_running_loop().time
        until = clock() + wait
        reasons = []
        try:
            await app.drain()
        except NotDrainedError as late:
            reasons = [str(late)]
        await asyncio.sleep(max(until - clock(), 0.0))
        return _answer(app, 503 if reasons else 200, reasons)

    return Route(path, drain, methods=["GET", "POST"])


def _seconds(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) and 0 <= found <= _LONGEST_WAIT else None


def _answer(app: App, status: int, reasons: list[str]) -> Response:
    body = {"status": "unavailable" if reasons else "ok", "state": app.statistics().state, "reasons": reasons}
    return JSONResponse(body, status_code=status, headers=SAFE)
