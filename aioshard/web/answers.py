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

__all__ = ["FRESH", "Threads", "probe_answer", "wants_json"]

FRESH = {"cache-control": "no-store"}
"""Headers of what is true only now."""

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
    return JSONResponse(body, status_code=503 if reasons else 200, headers=FRESH)


def wants_json(request: Request) -> bool:
    """Whether JSON is asked for rather than text: by `?format=json`, or else by the header `Accept`."""
    asked = request.query_params.get("format")
    return asked == "json" if asked is not None else "application/json" in request.headers.get("accept", "")
