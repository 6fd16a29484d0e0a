"""What an operator may do from the page, and who may: parsed, checked and written to the log.

`POST actions` takes one JSON object. The token comes in `Authorization: Bearer …`, never in the address.

| `action` | with |
| --- | --- |
| `pause`, `resume` | `topic`, `partition` |
| `pause_handler`, `resume_handler` | `handler` |
| `set_concurrency` | `handler`, `concurrency` |
| `retry_now`, `skip`, `release_parked` | `topic`, `partition`, `offset` |
| `check` | nothing: whether the token is right |

Each may have `worker`, the process that is meant among several.
"""

import dataclasses
import hmac
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import anyio

from aioshard.errors import AioshardError, MissingExtraError, SettingsError

try:
    from starlette.requests import ClientDisconnect, Request
except ImportError as error:
    raise MissingExtraError("the page", "web") from error

__all__ = [
    "SHORTEST_TOKEN",
    "Action",
    "Controlled",
    "Guard",
    "RefusedError",
    "body_of",
    "check_token",
    "parse",
    "perform",
]

logger = logging.getLogger("aioshard.web.audit")

SHORTEST_TOKEN = 16
"""Characters of a token; a shorter one can be guessed."""
LARGEST_BODY = 4096
"""Bytes of a request."""
_BODY_TIMEOUT = 5.0
_MOST_REFUSED = 20
_REFUSED_WITHIN = 60.0
"""So many refused requests are logged in so many seconds, so that nobody fills the log."""
_WHY = "an operator asked for it on the page"

_PARTITION: Mapping[str, type] = {"topic": str, "partition": int}
_RECORD: Mapping[str, type] = {**_PARTITION, "offset": int}
_FIELDS: Mapping[str, Mapping[str, type]] = {
    "pause": _PARTITION,
    "resume": _PARTITION,
    "pause_handler": {"handler": str},
    "resume_handler": {"handler": str},
    "set_concurrency": {"handler": str, "concurrency": int},
    "retry_now": _RECORD,
    "skip": _RECORD,
    "release_parked": _RECORD,
    "check": {},
}
_KINDS = {str: "a text", int: "a whole number that is not negative"}


class RefusedError(Exception):
    """A request is refused.

    Attributes:
        status: Of the answer.
        sentence: What was found, and what was expected.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


class Controlled(Protocol):
    """An app, as far as operators act on it; all of it from any thread."""

    def pause(self, topic: str, partition: int | None = None, *, why: str = ...) -> None:
        """See `App.pause`."""

    def resume(self, topic: str, partition: int | None = None) -> None:
        """See `App.resume`."""

    def pause_handler(self, name: str, *, why: str = ...) -> None:
        """See `App.pause_handler`."""

    def resume_handler(self, name: str) -> None:
        """See `App.resume_handler`."""

    def set_concurrency(self, handler: str, concurrency: int) -> None:
        """See `App.set_concurrency`."""

    def retry_now(self, topic: str, partition: int, offset: int) -> None:
        """See `App.retry_now`."""

    def skip(self, topic: str, partition: int, offset: int) -> None:
        """See `App.skip`."""

    def release_parked(self, topic: str, partition: int, offset: int) -> None:
        """See `App.release_parked`."""


# What is asked --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """Something that an operator asks for.

    Attributes:
        name: As in the table above.
        arguments: Of the names that belong to it.
        worker: Which process is meant; None where there is only one.
    """

    name: str
    arguments: Mapping[str, Any]
    worker: str | None = None

    def __str__(self) -> str:
        """For the log: in one line, whatever somebody put into it."""
        worker = {} if self.worker is None else {"worker": self.worker}
        return " ".join(
            [self.name, *(f"{name}={json.dumps(one)}" for name, one in {**self.arguments, **worker}.items())]
        )


def parse(body: bytes) -> Action:
    """Read an action.

    Args:
        body: JSON.

    Raises:
        RefusedError: It is none.

    Example:
        >>> str(parse(b'{"action": "pause", "topic": "orders", "partition": 3}'))
        'pause topic="orders" partition=3'
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise RefusedError(400, 'the body is no JSON: expected an object such as {"action": "check"}') from None
    if not isinstance(asked, dict):
        raise RefusedError(422, 'the body is no JSON object: expected one such as {"action": "check"}')
    name = asked.pop("action", None)
    fields = _FIELDS.get(name) if isinstance(name, str) else None
    if not isinstance(name, str) or fields is None:
        raise RefusedError(422, f'"action" is none that there is: expected one of {", ".join(_FIELDS)}')
    if any(isinstance(value, str) and not _is_text(value) for value in asked.values()):
        raise RefusedError(422, f"{name} was given half of a surrogate pair, which is no character: expected text")
    worker = asked.pop("worker", None)
    if worker is not None and not isinstance(worker, str):
        raise RefusedError(422, '"worker" is no text: expected the name of a process, as processes.json has it')
    if unknown := [repr(one)[:80] for one in asked if one not in fields]:
        expected = ", ".join(f'"{one}"' for one in fields) or "nothing"
        raise RefusedError(422, f"{name} does not take {', '.join(unknown[:5])}: expected {expected}")
    for field, kind in fields.items():
        value = asked.get(field)
        if type(value) is not kind or (type(value) is int and value < 0):
            raise RefusedError(422, f'{name} needs "{field}", {_KINDS[kind]}')
    return Action(name, {field: asked[field] for field in fields}, worker)


def _is_text(value: str) -> bool:
    """Whether UTF-8 has it: JSON can also write halves of surrogate pairs, which no answer could repeat."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def perform(app: Controlled, action: Action) -> str:
    """Do it; returns when the app has.

    Args:
        app: Of this process; called from any thread but that of its event loop.
        action: What to do.

    Returns:
        A sentence that says what was done.

    Raises:
        RefusedError: The app refused it, with its own sentence.
    """
    try:
        return _VERBS[action.name](app, **action.arguments)
    except AioshardError as error:
        raise RefusedError(409, str(error)) from None
    except TimeoutError:
        sentence = "the app did not answer in time, since something holds its event loop; it may do it later"
        raise RefusedError(504, sentence) from None


def _pause(app: Controlled, topic: str, partition: int) -> str:
    app.pause(topic, partition, why=_WHY)
    return f"{topic}/{partition} is paused"


def _resume(app: Controlled, topic: str, partition: int) -> str:
    app.resume(topic, partition)
    return f"{topic}/{partition} goes on"


def _pause_handler(app: Controlled, handler: str) -> str:
    app.pause_handler(handler, why=_WHY)
    return f"handler {handler} is paused"


def _resume_handler(app: Controlled, handler: str) -> str:
    app.resume_handler(handler)
    return f"handler {handler} goes on"


def _set_concurrency(app: Controlled, handler: str, concurrency: int) -> str:
    app.set_concurrency(handler, concurrency)
    return f"handler {handler} has {concurrency} worker(s) from now on"


def _retry_now(app: Controlled, topic: str, partition: int, offset: int) -> str:
    app.retry_now(topic, partition, offset)
    return f"record {topic}/{partition}/{offset} runs again"


def _skip(app: Controlled, topic: str, partition: int, offset: int) -> str:
    app.skip(topic, partition, offset)
    return f"record {topic}/{partition}/{offset} is skipped"


def _release_parked(app: Controlled, topic: str, partition: int, offset: int) -> str:
    app.release_parked(topic, partition, offset)
    return f"record {topic}/{partition}/{offset}, and what is parked behind it, runs again"


def _check(_: Controlled) -> str:
    return "the token is right"


_VERBS: Mapping[str, Callable[..., str]] = {
    "pause": _pause,
    "resume": _resume,
    "pause_handler": _pause_handler,
    "resume_handler": _resume_handler,
    "set_concurrency": _set_concurrency,
    "retry_now": _retry_now,
    "skip": _skip,
    "release_parked": _release_parked,
    "check": _check,
}


# Who may ask ----------------------------------------------------------------------------


def check_token(token: str) -> str:
    """A token that an operator has set, without the space around it.

    Raises:
        SettingsError: It is too short, or cannot be sent in a header.
    """
    token = token.strip()
    if len(token) < SHORTEST_TOKEN:
        raise SettingsError(
            f"the token of the page has {len(token)} characters: expected at least {SHORTEST_TOKEN}, such as "
            "`openssl rand -hex 24` prints"
        )
    if not all("!" <= character <= "~" for character in token):
        raise SettingsError(
            "the token of the page has a character that no header takes: expected ASCII letters, digits and signs, "
            "without spaces"
        )
    return token


class Guard:
    """Says who may act, and writes into the log what was asked, by whom, and what came of it.

    The logger is `aioshard.web.audit`; the token is in none of its lines.
    """

    def __init__(self, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Make a guard.

        Args:
            token: What the operator has set.
            clock: Seconds, for how much is logged.

        Raises:
            SettingsError: As `check_token`.
        """
        self._token = check_token(token).encode()
        self._clock = clock
        self._logged_since = -_REFUSED_WITHIN
        self._logged = 0
        self._not_logged = 0

    def check(self, request: Request) -> None:
        """Let a request pass that has the token, and does not come from another site's page.

        Raises:
            RefusedError: It does not pass.
        """
        own = _place(f"{request.url.scheme}://{request.headers.get('host', '')}")
        if any(_place(origin) != own for origin in request.headers.getlist("origin")):
            raise RefusedError(403, "the request comes from a page of another site: use the app's own page")
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not given:
            raise RefusedError(401, "the token is missing: expected the header Authorization: Bearer TOKEN")
        if not hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._token):
            raise RefusedError(401, "the token is wrong: it is the one that the operator of the app has set")
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise RefusedError(415, "the body is not declared as JSON: expected Content-Type: application/json")

    def done(self, request: Request, action: Action, sentence: str) -> None:
        """Log what was done."""
        logger.warning("%s by %s: %s", action, _address(request), sentence)

    def refused(self, request: Request, what: Action | None, refusal: RefusedError) -> None:
        """Log what was refused, unless that was logged often enough of late."""
        now = self._clock()
        if now - self._logged_since >= _REFUSED_WITHIN:
            if self._not_logged:
                logger.warning("%d more refused request(s) are not in the log", self._not_logged)
            self._logged_since, self._logged, self._not_logged = now, 0, 0
        if self._logged >= _MOST_REFUSED:
            self._not_logged += 1
            return
        self._logged += 1
        asked = "a request" if what is None else str(what)
        logger.warning("%s by %s was refused (%d): %s", asked, _address(request), refusal.status, refusal.sentence)


def _place(origin: str) -> tuple[str, str]:
    """Host and port of an origin, the port also where it goes without saying; the scheme does not count.

    A proxy in front may speak TLS to the browser and none to us.
    """
    scheme, separator, place = origin.strip().lower().partition("://")
    host, colon, port = place.rpartition(":")
    if not separator or not place:
        return "no origin", origin
    if not colon or not port.isdigit():
        return place, ""
    return host, "" if port == {"http": "80", "https": "443"}.get(scheme) else port


def _address(request: Request) -> str:
    return "an unknown address" if request.client is None else f"{request.client.host}:{request.client.port}"


async def body_of(request: Request) -> bytes:
    """The body, which is not read further than it may be long.

    Raises:
        RefusedError: It is longer, or does not come.
    """
    too_large = RefusedError(413, f"the body is larger than {LARGEST_BODY} bytes: no action is")
    length = request.headers.get("content-length", "")
    if length.isdigit() and len(length) < 20 and int(length) > LARGEST_BODY:  # noqa: PLR2004 - digits of any length
        raise too_large
    body = bytearray()
    try:
        with anyio.fail_after(_BODY_TIMEOUT):
            async for chunk in request.stream():
                body += chunk
                if len(body) > LARGEST_BODY:
                    raise too_large
    except TimeoutError:
        raise RefusedError(408, f"the body did not come within {_BODY_TIMEOUT:g} s") from None
    except ClientDisconnect:
        raise RefusedError(400, "the connection was closed before the whole body had come") from None
    return bytes(body)
