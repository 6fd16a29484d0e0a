"""Responses shared by the routes of a single process and those of several."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from aioshard.errors import MissingExtraError

try:
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
except ImportError as error:
    raise MissingExtraError("the health server", "web") from error

__all__ = ["MISSING", "SAFE", "Threads", "probe_answer", "wants_json"]

SAFE = {
    "cache-control": "no-store",
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""Headers of every response: it must not be cached, and pages of other sites must not get it."""


async def _missing(_: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    sentence = "there is nothing at this path" if status == 404 else "this path does not take that method"  # noqa: PLR2004
    headers = {**SAFE, **(getattr(error, "headers", None) or {})}
    return JSONResponse({"error": sentence}, status_code=status, headers=headers)


MISSING = {404: _missing, 405: _missing}
"""Exception handlers of an application, for unknown paths and methods."""

_THREADS = 4
"""Number of responses computed concurrently: a slow scrape must not delay a probe."""

T = TypeVar("T")


class Threads:
    """Dedicated threads for some routes: those of the application may all be busy just when you need a diagnosis."""

    def __init__(self) -> None:
        """Create the pool; threads start on use."""
        self._limiter = anyio.CapacityLimiter(_THREADS)

    async def run(self, function: Callable[..., T], *given: Any) -> T:
        """Call *function* in one of the threads, so that the serving event loop, perhaps the app's, is not blocked."""
        return await anyio.to_thread.run_sync(function, *given, limiter=self._limiter)


def probe_answer(state: str, reasons: Sequence[str], findings: Sequence[str]) -> Response:
    """Build the response to a probe: 200, or 503 if there are reasons.

    Args:
        state: State of the app.
        reasons: Why the probe fails.
        findings: Problems that an operator should know about even if the probe succeeds.
    """
    status = "unavailable" if reasons else "ok"
    body = {"status": status, "state": state, "reasons": list(reasons), "findings": list(findings)}
    return JSONResponse(body, status_code=503 if reasons else 200, headers=SAFE)


def wants_json(request: Request) -> bool:
    """Whether the client wants JSON instead of text: by `?format=json`, otherwise by the header `Accept`."""
    asked = request.query_params.get("format")
    return asked == "json" if asked is not None else "application/json" in request.headers.get("accept", "")
