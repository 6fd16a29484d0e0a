"""What the routes of one process and those of several have in common: how answers are made, and what they look like."""

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
"""Headers of every answer: it is true only now, and no page of another site may have it."""


async def _missing(_: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    sentence = "there is nothing at this path" if status == 404 else "this path does not take that method"  # noqa: PLR2004
    headers = {**SAFE, **(getattr(error, "headers", None) or {})}
    return JSONResponse({"error": sentence}, status_code=status, headers=headers)


MISSING = {404: _missing, 405: _missing}
"""Exception handlers of an application, for paths and methods that there are not."""

_THREADS = 4
"""Answers that are computed at the same time: a slow scrape must not hold up a probe."""

T = TypeVar("T")


class Threads:
    """Threads of their own for some routes: the application's may all be busy, just when somebody wants to know why."""

    def __init__(self) -> None:
        """Make some; they start when they are used."""
        self._limiter = anyio.CapacityLimiter(_THREADS)

    async def run(self, function: Callable[..., T], *given: Any) -> T:
        """Call *function* in one of them: the event loop that serves, which may be that of the app, is not held."""
        return await anyio.to_thread.run_sync(function, *given, limiter=self._limiter)


def probe_answer(state: str, reasons: Sequence[str], findings: Sequence[str]) -> Response:
    """The answer to a probe: 200, or 503 where there are reasons.

    Args:
        state: Of the app.
        reasons: Why it is not well.
        findings: What an operator should know although it is.
    """
    status = "unavailable" if reasons else "ok"
    body = {"status": status, "state": state, "reasons": list(reasons), "findings": list(findings)}
    return JSONResponse(body, status_code=503 if reasons else 200, headers=SAFE)


def wants_json(request: Request) -> bool:
    """Whether JSON is asked for rather than text: by `?format=json`, or else by the header `Accept`."""
    asked = request.query_params.get("format")
    return asked == "json" if asked is not None else "application/json" in request.headers.get("accept", "")
