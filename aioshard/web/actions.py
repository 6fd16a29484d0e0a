"""Parse and perform the actions that an operator can take on the dashboard. `aioshard.web.guard` decides who may.

`POST actions` takes one JSON object. The token is sent in `Authorization: Bearer …`, never in the URL.

| `action` | with |
| --- | --- |
| `pause`, `resume` | `topic`, `partition` |
| `pause_handler`, `resume_handler` | `handler` |
| `set_concurrency` | `handler`, `concurrency` |
| `retry_now`, `skip`, `release_parked` | `topic`, `partition`, `offset` |
| `check` | nothing: checks the token |

With several processes, each action may also name its process in `worker`.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from aioshard.app import App
from aioshard.errors import AioshardError

__all__ = ["Action", "RefusedError", "parse", "perform"]

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
        status: HTTP status of the response.
        sentence: A message with the actual and the expected value.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """An action requested by an operator.

    Attributes:
        name: As in the table above.
        arguments: Values by field name.
        worker: The process to act in; None if there is only one.
    """

    name: str
    arguments: Mapping[str, Any]
    worker: str | None = None

    def __str__(self) -> str:
        """Format for the log: always a single line, because JSON escapes the values."""
        worker = {} if self.worker is None else {"worker": self.worker}
        return " ".join(
            [self.name, *(f"{name}={json.dumps(one)}" for name, one in {**self.arguments, **worker}.items())]
        )


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
    """Whether UTF-8 can encode it: JSON can contain lone surrogates, which no response could repeat."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


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
    try:
        return _VERBS[action.name](app, **action.arguments)
    except AioshardError as error:
        raise RefusedError(409, str(error)) from None
    except TimeoutError:
        sentence = "the app did not answer in time, since something holds its event loop; it may do it later"
        raise RefusedError(504, sentence) from None


def _pause(app: App, topic: str, partition: int) -> str:
    app.pause(topic, partition, why=_WHY)
    return f"{topic}/{partition} is paused"


def _resume(app: App, topic: str, partition: int) -> str:
    app.resume(topic, partition)
    return f"{topic}/{partition} goes on"


def _pause_handler(app: App, handler: str) -> str:
    app.pause_handler(handler, why=_WHY)
    return f"handler {handler} is paused"


def _resume_handler(app: App, handler: str) -> str:
    app.resume_handler(handler)
    return f"handler {handler} goes on"


def _set_concurrency(app: App, handler: str, concurrency: int) -> str:
    app.set_concurrency(handler, concurrency)
    return f"handler {handler} has {concurrency} worker(s) from now on"


def _retry_now(app: App, topic: str, partition: int, offset: int) -> str:
    app.retry_now(topic, partition, offset)
    return f"record {topic}/{partition}/{offset} runs again"


def _skip(app: App, topic: str, partition: int, offset: int) -> str:
    app.skip(topic, partition, offset)
    return f"record {topic}/{partition}/{offset} is skipped"


def _release_parked(app: App, topic: str, partition: int, offset: int) -> str:
    app.release_parked(topic, partition, offset)
    return f"record {topic}/{partition}/{offset}, and what is parked behind it, runs again"


def _check(_: App) -> str:
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
