"""The actions that an operator can take on the dashboard, with authorization and an audit log.

`POST actions` takes one JSON object. The token is sent in `Authorization: Bearer …`, never in the URL.

| `action` | with |
| --- | --- |
| `pause`, `resume` | `topic`, `partition` |
| `pause_handler`, `resume_handler` | `handler` |
| `cancel_run`, `retry_now`, `skip`, `release_parked` | `topic`, `partition`, `offset` |
| `check` | nothing: checks the token |
"""

import collections
import hmac
import json
import logging
import time
from typing import Self

import anyio.to_thread
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from aioshard.app import App
from aioshard.errors import AioshardError, SettingsError
from aioshard.web.server import SAFE, Json

logger = logging.getLogger("aioshard.web.audit")

SHORTEST_TOKEN = 16
"""Minimum length of a token; a shorter one can be guessed."""
_THREADS = 4
_MOST_REFUSED = 20
_REFUSED_PERIOD = 60.0
"""At most this many refused requests are logged in this many seconds, so that nobody can flood the log."""
_BEARER = {"www-authenticate": "Bearer"}
"""Header of a response that asks for the token."""


class ActionRefusedError(HTTPException):
    """A request is refused, with the HTTP status and the sentence of the response."""


# Actions ------------------------------------------------------------------------------------

_RECORD = ("topic", "partition", "offset")
_ACTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "pause": (("topic", "partition"), "{topic}/{partition} is paused"),
    "resume": (("topic", "partition"), "{topic}/{partition} is resumed"),
    "pause_handler": (("handler",), "handler {handler} is paused"),
    "resume_handler": (("handler",), "handler {handler} is resumed"),
    "cancel_run": (_RECORD, "the run of record {topic}/{partition}/{offset} is cancelled"),
    "retry_now": (_RECORD, "record {topic}/{partition}/{offset} runs again"),
    "skip": (_RECORD, "record {topic}/{partition}/{offset} is skipped"),
    "release_parked": (_RECORD, "record {topic}/{partition}/{offset} and the records parked behind it run again"),
    "check": ((), "the token is correct"),
}
"""Each action, which is the name of a method of `App`, with its arguments and the sentence that reports it."""


class Action(BaseModel):
    """A request of an operator; it has the arguments of its action and no others."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    action: str
    topic: str = ""
    partition: NonNegativeInt = 0
    offset: NonNegativeInt = 0
    handler: str = ""

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        if self.action not in _ACTIONS:
            raise ValueError(f"unknown action; expected one of {', '.join(_ACTIONS)}")
        names, _ = _ACTIONS[self.action]
        if self.model_fields_set != {"action", *names}:
            raise ValueError(f"{self.action} takes {', '.join(names) or 'nothing else'}")
        return self

    def arguments(self) -> dict[str, str | int]:
        """Return the arguments of the action, in the order of the method of `App`."""
        return {name: getattr(self, name) for name in _ACTIONS[self.action][0]}

    def __str__(self) -> str:
        """Format for the log: always a single line, because JSON escapes the values."""
        return " ".join([self.action, *(f"{name}={json.dumps(value)}" for name, value in self.arguments().items())])


def parse(body: bytes) -> Action:
    """Read an action.

    Args:
        body: JSON.

    Raises:
        ActionRefusedError: The body is not a valid action.

    Example:
        >>> str(parse(b'{"action": "pause", "topic": "orders", "partition": 3}'))
        'pause topic="orders" partition=3'
    """
    try:
        return Action.model_validate_json(body)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_context=False, include_input=False)[0]
        # Message and location may contain text from the request: escape them, so that the log entry stays on one line.
        fault = str(first["msg"])
        if first["loc"]:
            fault += " at " + ".".join(map(str, first["loc"]))
        status = 400 if first["type"] == "json_invalid" else 422
        raise ActionRefusedError(status, f"not a valid action: {ascii(fault)[1:-1]}") from None


def perform(app: App, action: Action) -> str:
    """Perform an action; return once the app has done it.

    Args:
        app: App in this process; call from any thread except that of its event loop.
        action: The action to perform.

    Returns:
        A sentence that says what was done.

    Raises:
        ActionRefusedError: The app refused it; carries the app's own message.
    """
    arguments = action.arguments()
    sentence = _ACTIONS[action.action][1]
    why = {"why": "requested by an operator on the dashboard"} if action.action in ("pause", "pause_handler") else {}
    try:
        if action.action != "check":
            getattr(app, action.action)(*arguments.values(), **why)
    except AioshardError as refused:
        raise ActionRefusedError(409, str(refused)) from None
    except TimeoutError:
        raise ActionRefusedError(
            504, "the app did not answer in time because its event loop is blocked; it may act later"
        ) from None
    return sentence.format(**arguments)


# Authorization ------------------------------------------------------------------------------


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


def _check_request(request: Request, token: str) -> None:
    """Accept a request that has the token and does not come from another site's page.

    Raises:
        ActionRefusedError: The request is not accepted.
    """
    # Only host and port count: a proxy in front may speak TLS to the browser and plain HTTP to us.
    own = request.headers.get("host", "").lower()
    if any(not own or origin.lower().partition("://")[2] != own for origin in request.headers.getlist("origin")):
        raise ActionRefusedError(403, "the request comes from a page of another site: use the app's own dashboard")
    kind, _, secret = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not secret:
        raise ActionRefusedError(401, "the token is missing: expected the header Authorization: Bearer TOKEN", _BEARER)
    if not hmac.compare_digest(secret.strip().encode("latin-1", "replace"), token.encode()):
        raise ActionRefusedError(
            401, "the token is wrong: expected the one that the operator of the app has set", _BEARER
        )
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ActionRefusedError(415, "the body is not declared as JSON: expected Content-Type: application/json")


def action_route(app: App, token: str) -> Route:
    """Return the route that performs actions.

    Args:
        app: The app; its event loop may be that of the route.
        token: The token that allows them.

    Raises:
        SettingsError: As for `check_token`.
    """
    expected = check_token(token)
    limiter = anyio.CapacityLimiter(_THREADS)
    refused: collections.deque[float] = collections.deque(maxlen=_MOST_REFUSED)
    """Times of the refused requests that were logged last."""

    # The log has every request with its sender and result; the token never appears in it.
    async def act(request: Request) -> Response:
        action: Action | None = None
        client = "an unknown address" if request.client is None else f"{request.client.host}:{request.client.port}"
        try:
            _check_request(request, expected)
            action = parse(await request.body())  # the token was checked before
            sentence = await anyio.to_thread.run_sync(perform, app, action, limiter=limiter)
        except ActionRefusedError as refusal:
            now = time.monotonic()
            if len(refused) < _MOST_REFUSED or now - refused[0] >= _REFUSED_PERIOD:
                refused.append(now)
                what = action or "a request"
                status = refusal.status_code
                logger.warning("%s by %s was refused (%d): %s", what, client, status, refusal.detail)
            # Closed, because the unread rest of its body must not be taken for a request.
            headers = {**SAFE, "connection": "close", **(refusal.headers or {})}
            return Json({"error": refusal.detail}, refusal.status_code, headers)
        except ClientDisconnect:
            return Response(status_code=400)
        logger.warning("%s by %s: %s", action, client, sentence)
        return Json({"done": sentence}, headers=SAFE)

    return Route("/actions", act, methods=["POST"])
