"""The actions that an operator can take on the dashboard, with an audit log.

`POST actions` takes one JSON object, and needs the token; see `aioshard.web.authorization`.

| `action` | with |
| --- | --- |
| `pause`, `resume` | `topic`, `partition` |
| `pause_handler`, `resume_handler` | `handler` |
| `cancel_run`, `retry_now`, `skip`, `release_parked` | `topic`, `partition`, `offset` |
| `check` | nothing: checks the token |
"""

import json
from typing import Self

import anyio.to_thread
from pydantic import BaseModel, ConfigDict, NonNegativeInt, model_validator
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from aioshard.app import App
from aioshard.dead_letters.audit import logger
from aioshard.errors import AioshardError
from aioshard.web.authorization import Authorization, RefusedError, parsed, sender
from aioshard.web.server import SAFE, Json

_THREADS = 4


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
        RefusedError: The body is not a valid action.

    Example:
        >>> str(parse(b'{"action": "pause", "topic": "orders", "partition": 3}'))
        'pause topic="orders" partition=3'
    """
    return parsed(Action, body, "action")


def perform(app: App, action: Action) -> str:
    """Perform an action; return once the app has done it.

    Args:
        app: App in this process; call from any thread except that of its event loop.
        action: The action to perform.

    Returns:
        A sentence that says what was done.

    Raises:
        RefusedError: The app refused it; carries the app's own message.
    """
    arguments = action.arguments()
    sentence = _ACTIONS[action.action][1]
    why = {"why": "requested by an operator on the dashboard"} if action.action in ("pause", "pause_handler") else {}
    try:
        if action.action != "check":
            getattr(app, action.action)(*arguments.values(), **why)
    except AioshardError as refused:
        raise RefusedError(409, str(refused)) from None
    except TimeoutError:
        raise RefusedError(
            504, "the app did not answer in time because its event loop is blocked; it may act later"
        ) from None
    return sentence.format(**arguments)


def action_route(app: App, authorization: Authorization) -> Route:
    """Return the route that performs actions.

    Args:
        app: The app; its event loop may be that of the route.
        authorization: Checks the token.
    """
    limiter = anyio.CapacityLimiter(_THREADS)

    # The log has every request with its sender and result; the token never appears in it.
    async def act(request: Request) -> Response:
        action: Action | None = None
        try:
            authorization.check(request)
            action = parse(await request.body())  # the token was checked before
            sentence = await anyio.to_thread.run_sync(perform, app, action, limiter=limiter)
        except RefusedError as refused:
            return authorization.refusal(request, action or "a request", refused)
        except ClientDisconnect:
            return Response(status_code=400)
        logger.warning("%s by %s: %s", action, sender(request), sentence)
        return Json({"done": sentence}, headers=SAFE)

    return Route("/actions", act, methods=["POST"])
