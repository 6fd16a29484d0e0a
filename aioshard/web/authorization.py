"""The token that allows a client to act: the dashboard itself or a program, but no page of another site.

The token is sent in `Authorization: Bearer …`, never in the URL.
"""

import collections
import hmac
import time
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from aioshard.dead_letters.audit import logger
from aioshard.errors import SettingsError
from aioshard.web.server import SAFE, Json

SHORTEST_TOKEN = 16
"""Minimum length of a token; a shorter one can be guessed."""
_MOST_REFUSED = 20
_REFUSED_PERIOD = 60.0
"""At most this many refused requests are logged in this many seconds, so that nobody can flood the log."""
_BEARER = {"www-authenticate": "Bearer"}
"""Header of a response that asks for the token."""

Body = TypeVar("Body", bound=BaseModel)


class RefusedError(HTTPException):
    """A request is refused, with the HTTP status and the sentence of the response."""


def check_token(token: str) -> str:
    """Return a token set by an operator, without surrounding white space.

    Raises:
        SettingsError: The token is too short, or cannot be sent in a header.
    """
    token = token.strip()
    if len(token) < SHORTEST_TOKEN:
        raise SettingsError(
            f"the token of the dashboard has {len(token)} characters: expected at least {SHORTEST_TOKEN}, such as "
            "`openssl rand -hex 24` prints"
        )
    if not all("!" <= character <= "~" for character in token):
        raise SettingsError(
            "the token of the dashboard cannot be sent in a header: expected ASCII letters, digits and signs, "
            "without spaces"
        )
    return token


class Authorization:
    """Accepts the requests that have the token, and logs those that are refused."""

    def __init__(self, token: str) -> None:
        """Accept a token.

        Raises:
            SettingsError: As for `check_token`.
        """
        self._token = check_token(token)
        self._refused: collections.deque[float] = collections.deque(maxlen=_MOST_REFUSED)
        """Times of the refused requests that were logged last."""

    def check(self, request: Request) -> None:
        """Accept a request that has the token and does not come from another site's page.

        Raises:
            RefusedError: The request is not accepted.
        """
        # Only host and port count: a proxy in front may speak TLS to the browser and plain HTTP to us.
        own = request.headers.get("host", "").lower()
        if any(not own or origin.lower().partition("://")[2] != own for origin in request.headers.getlist("origin")):
            raise RefusedError(403, "the request comes from a page of another site: use the app's own dashboard")
        kind, _, secret = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not secret:
            raise RefusedError(401, "the token is missing: expected the header Authorization: Bearer TOKEN", _BEARER)
        if not hmac.compare_digest(secret.strip().encode("latin-1", "replace"), self._token.encode()):
            raise RefusedError(
                401, "the token is wrong: expected the one that the operator of the app has set", _BEARER
            )
        check_json(request)

    def refusal(self, request: Request, subject: object, refused: RefusedError) -> Response:
        """Return the response to a request that is refused, and log it; the token never appears in the log.

        Args:
            request: The request.
            subject: The action that was requested, on one line.
            refused: Why it is refused.
        """
        now = time.monotonic()
        if len(self._refused) < _MOST_REFUSED or now - self._refused[0] >= _REFUSED_PERIOD:
            self._refused.append(now)
            status = refused.status_code
            logger.warning("%s by %s was refused (%d): %s", subject, sender(request), status, refused.detail)
        return refusal(refused)


def check_json(request: Request) -> None:
    """Accept a request with JSON.

    Raises:
        RefusedError: The body is not declared as JSON, so a form of another site's page may have sent it.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RefusedError(415, "the body is not declared as JSON: expected Content-Type: application/json")


def refusal(refused: RefusedError) -> Response:
    """Return the response to a request that is refused."""
    # Closed, because the unread rest of its body must not be taken for a request.
    headers = {**SAFE, "connection": "close", **(refused.headers or {})}
    return Json({"error": refused.detail}, refused.status_code, headers)


def sender(request: Request) -> str:
    """Return the address of the client, for the log."""
    return "an unknown address" if request.client is None else f"{request.client.host}:{request.client.port}"


def parsed(model: type[Body], body: bytes, name: str) -> Body:
    """Read the body of a request.

    Args:
        model: The type of the request.
        body: JSON.
        name: How the error calls it, such as `action`.

    Raises:
        RefusedError: The body is something else.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_context=False, include_input=False)[0]
        # Message and location may contain text from the request: escape them, so that the log entry stays on one line.
        fault = str(first["msg"])
        if first["loc"]:
            fault += " at " + ".".join(map(str, first["loc"]))
        status = 400 if first["type"] == "json_invalid" else 422
        raise RefusedError(status, f"not a valid {name}: {ascii(fault)[1:-1]}") from None


async def body_of(request: Request, most: int) -> bytes:
    """Return the body of a request.

    Args:
        request: The request.
        most: Maximum size, in bytes.

    Raises:
        RefusedError: It is larger.
        ClientDisconnect: The client has not sent all of it.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise RefusedError(413, f"the body has more than {most:,} bytes, which is the maximum of this request")
    return bytes(body)
