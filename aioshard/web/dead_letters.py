"""Dead letters and parked records on the dashboard: list them, see why they failed, try their handlers, send them back.

All paths are POST with one JSON object, except the first. Those marked with T need the token, and exist only if the
dashboard has one. Values and headers of records are shown only with the token and `show_payloads`, keys only with
`show_keys`; a filter by something that is hidden is refused, because it would reveal it.

| path | takes | response |
| --- | --- | --- |
| `dead-letters.json` | GET | `topics` of the app's handlers, `transforms`, and whether payloads and keys can be shown |
| `dead-letters/page` | `topic`, filters, `cursor`, `size` | `letters`, newest first, and the next page's `cursor` |
| `dead-letters/letter` T | `topic`, `partition`, `offset` | one dead letter in full, and as its handler decodes it |
| `dead-letters/count` T | `topic`, filters | a job that counts by error, handler and topic |
| `dead-letters/try` T | `topic`, `partition`, `offset`; `value` or `transform` | a job that runs the handler on one |
| `dead-letters/send` T | `topic`, filters, `at`, `again`; `value` or `transform` | a job that finds what to send |
| `dead-letters/confirm` T | `job` | sends the dead letters that the job has found |
| `dead-letters/stop` T | `job` | ends a job early |
| `dead-letters/jobs` T | nothing | the latest job of each kind |
| `dead-letters/parked` | `topic`, filters | the parked keys of a topic, the one that waits longest first |
| `dead-letters/release` T | `topic`, `source`, `partition`, `offset` | requests that a parked key runs again |
| `dead-letters/drop` T | the same | discards one parked record; those behind it continue without it |

Only dead letters of the app's own group are shown and sent. Each request and job opens its connections and closes
them when it has ended. At most one client at a time reads pages, one single dead letters, and one parked keys.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, NonNegativeInt, model_validator
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from aioshard.app import App
from aioshard.core.options import DeadLetter, Park
from aioshard.core.sharding import shown
from aioshard.dead_letters.dead_letter import StoredDeadLetter
from aioshard.dead_letters.decoding import Decoded, decode
from aioshard.dead_letters.edits import Transform, with_value
from aioshard.dead_letters.filters import Filters, HeaderFilter
from aioshard.dead_letters.pages import cursor_as_text, read_cursor, read_page
from aioshard.dead_letters.parked import ParkedKey, ParkedTopic, drop_records, key_as_object, release_keys
from aioshard.errors import AioshardError, SettingsError, StateError, TransportError
from aioshard.kafka.publisher import Publisher
from aioshard.kafka.side_topics import opened_topic
from aioshard.serde.side_records import Coordinates
from aioshard.web.authorization import (
    Authorization,
    RefusedError,
    body_of,
    check_json,
    parsed,
    refusal,
    sender,
)
from aioshard.web.jobs import Change, Counting, Job, Jobs, Sending, Trying, find_dead_letter, indented, opened
from aioshard.web.server import SAFE, Json

MOST_SELECTED = 1_000
"""Maximum number of dead letters that a request can name one by one."""
MOST_PARKED = 100_000
"""Maximum number of parked records that are kept in memory while a topic is read."""
PARKED_KEYS = 100
"""Maximum number of parked keys in a response."""
_TIMEOUT = 30.0
"""Seconds for reading a page, a dead letter or the parked keys."""
_SMALL_BODY = 64 * 1024
_LARGE_BODY = 16 * 1024 * 1024
"""Maximum bytes of a request that may have the new value of a record."""


# Requests -----------------------------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Nothing(_Strict):
    """A request without arguments."""


class TopicRequest(_Strict):
    """A request about the records of a topic that match filters."""

    topic: str
    handler: str | None = None
    error: str | None = None
    source: str | None = None
    """Topic of the original records."""
    key: str | None = None
    header: str | None = None
    """`name=value` or `name`."""
    text: str | None = None
    since: float | None = None
    """Seconds since the epoch, as `until`."""
    until: float | None = None
    done: bool | None = None

    def filters(self, group: str) -> Filters:
        """Return the filters, for the records of a group."""
        return Filters(
            group=group,
            handler=self.handler,
            error=self.error,
            source=self.source,
            key=self.key,
            headers=() if self.header is None else (HeaderFilter.parse(self.header),),
            text=self.text,
            since=self.since,
            until=self.until,
            done=self.done,
        )


class PageRequest(TopicRequest):
    """A request for a page of dead letters."""

    cursor: str | None = None
    size: int = Field(50, ge=1, le=200)


class NamedPosition(_Strict):
    """The position of a dead letter in its topic."""

    partition: NonNegativeInt
    offset: NonNegativeInt


class DeadLetterRequest(NamedPosition):
    """A request for one dead letter."""

    topic: str


class Binary(_Strict):
    """A value that is not text."""

    base64: Base64Bytes


class _Changing(_Strict):
    value: str | Binary | None = None
    """The new value; None leaves it as it is."""
    transform: str | None = None
    """`module:function`, one of those that the application allows."""

    @model_validator(mode="after")
    def _check_change(self) -> Self:
        if self.value is not None and self.transform is not None:
            raise ValueError("value and transform exclude each other: give one of them")
        return self


class TryRequest(DeadLetterRequest, _Changing):
    """A request for a dry run."""


class SendRequest(TopicRequest, _Changing):
    """A request to send dead letters back."""

    at: tuple[NamedPosition, ...] = Field((), max_length=MOST_SELECTED)
    """Positions of the dead letters; empty means all that match."""
    again: bool = False
    """Whether to include those that are done."""

    @model_validator(mode="after")
    def _check_value(self) -> Self:
        if self.value is not None and len(self.at) != 1:
            raise ValueError("value is for one dead letter: name it with at")
        return self


class JobRequest(_Strict):
    """A request about a job."""

    job: int


class ParkedRequest(DeadLetterRequest):
    """A request about a parked record; partition and offset are those in its own topic."""

    source: str


# Routes -------------------------------------------------------------------------------


class Caller(NamedTuple):
    """The sender of a request."""

    name: str
    """For the audit log."""
    trusted: bool
    """Whether it has the token."""


Model = TypeVar("Model", bound=BaseModel)


class DeadLetterRoutes:
    """Answers the requests about the dead letters and parked records of one app."""

    def __init__(self, app: App, authorization: Authorization | None, transforms: Sequence[Transform] = ()) -> None:
        """Create the routes.

        Args:
            app: The app.
            authorization: Checks the token; with None nobody can act.
            transforms: The functions that a request may name.

        Raises:
            SettingsError: Two transforms have the same name, or one has no name.
        """
        self._app = app
        self._authorization = authorization
        self._transforms = _named(transforms)
        self._jobs = Jobs()

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        routes: list[BaseRoute] = [Route("/dead-letters.json", self._describe, methods=["GET"])]
        routes += [
            self._route("page", PageRequest, self._page, open_to_all=True),
            self._route("parked", TopicRequest, self._list_parked, open_to_all=True),
        ]
        if self._authorization is not None:
            routes += [
                self._route("letter", DeadLetterRequest, self._dead_letter),
                self._route("count", TopicRequest, self._count),
                self._route("try", TryRequest, self._try),
                self._route("send", SendRequest, self._send),
                self._route("confirm", JobRequest, self._confirm),
                self._route("stop", JobRequest, self._stop),
                self._route("jobs", Nothing, self._list_jobs),
                self._route("release", ParkedRequest, self._release),
                self._route("drop", ParkedRequest, self._drop),
            ]
        return routes

    def _route(
        self,
        name: str,
        model: type[Model],
        answer: Callable[[Model, Caller], Awaitable[Mapping[str, Any]]],
        *,
        open_to_all: bool = False,
    ) -> Route:
        most = _LARGE_BODY if issubclass(model, _Changing) else _SMALL_BODY

        async def endpoint(request: Request) -> Response:
            try:
                caller = self._caller(request, open_to_all=open_to_all)
                body = parsed(model, await body_of(request, most), "request")
                content = await self._answered(answer(body, caller))
            except RefusedError as refused:
                if self._authorization is None:
                    return refusal(refused)
                return self._authorization.refusal(request, f"dead-letters/{name}", refused)
            except ClientDisconnect:
                return Response(status_code=400)
            return Json(content, headers=SAFE)

        return Route(f"/dead-letters/{name}", endpoint, methods=["POST"])

    def _caller(self, request: Request, *, open_to_all: bool) -> Caller:
        if self._authorization is not None and not (open_to_all and "authorization" not in request.headers):
            self._authorization.check(request)
            return Caller(sender(request), trusted=True)
        check_json(request)
        return Caller(sender(request), trusted=False)

    async def _answered(self, answer: Awaitable[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return a response.

        Raises:
            RefusedError: There is none; it has the sentence of the app or of the brokers.
        """
        try:
            async with asyncio.timeout(_TIMEOUT):
                return await answer
        except TransportError as error:
            raise RefusedError(502, str(error)) from None
        except AioshardError as error:
            raise RefusedError(409, str(error)) from None
        except TimeoutError:
            raise RefusedError(504, f"the brokers took longer than {_TIMEOUT:g} s") from None

    # Reading --------------------------------------------------------------------------

    async def _describe(self, _: Request) -> Response:
        settings = self._app.settings
        topics = [{"topic": topic, "parked": False, "handlers": names} for topic, names in self._topics(DeadLetter)]
        topics += [{"topic": topic, "parked": True, "handlers": names} for topic, names in self._topics(Park)]
        content = {
            "topics": topics,
            "transforms": sorted(self._transforms),
            "show_payloads": settings.show_payloads,
            "show_keys": settings.show_keys,
        }
        return Json(content, headers=SAFE)

    def _topics(self, policy: type[DeadLetter | Park]) -> list[tuple[str, list[str]]]:
        handlers: dict[str, list[str]] = {}
        for handler in self._app.handlers:
            if isinstance(handler.on_failure, policy):
                handlers.setdefault(handler.on_failure.topic, []).append(handler.name)
        return sorted(handlers.items())

    def _check_topic(self, topic: str, policy: type[DeadLetter | Park] = DeadLetter) -> None:
        known = [name for name, _ in self._topics(policy)]
        if topic not in known:
            kind = "dead letters" if policy is DeadLetter else "parked records"
            listed = ", ".join(known) or "none"
            raise RefusedError(404, f"{topic!a} is not a topic for {kind} of this app: expected {listed}")

    def _filters(self, request: TopicRequest, caller: Caller) -> Filters:
        """Return the filters of a request.

        Raises:
            RefusedError: One of them would reveal what is hidden.
        """
        if (request.text is not None or request.header is not None) and not self._shows_payloads(caller):
            raise RefusedError(403, "filters by text and header need the token and the setting show_payloads")
        if (request.text is not None or request.key is not None) and not self._app.settings.show_keys:
            raise RefusedError(403, "filters by text and key need the setting show_keys: they tell about keys")
        return request.filters(self._app.group_id)

    def _shows_payloads(self, caller: Caller) -> bool:
        return caller.trusted and self._app.settings.show_payloads

    async def _page(self, request: PageRequest, caller: Caller) -> Mapping[str, Any]:
        self._check_topic(request.topic)
        filters = self._filters(request, caller)
        try:
            cursor = None if request.cursor is None else read_cursor(request.cursor)
        except ValueError as error:
            raise RefusedError(422, f"not a valid request: {ascii(str(error))[1:-1]} at cursor") from None
        with self._jobs.only_one("a page of dead letters"):
            async with opened(self._app, request.topic) as (dead_letter_topic, progress_known):
                page = await read_page(dead_letter_topic, filters, cursor=cursor, size=request.size)
        return {
            "letters": [self._summary(dead_letter, progress_known=progress_known) for dead_letter in page.dead_letters],
            "cursor": None if page.cursor is None else cursor_as_text(page.cursor),
        }

    def _summary(self, dead_letter: StoredDeadLetter, *, progress_known: bool) -> dict[str, Any]:
        """Return a dead letter for a list: without value and headers."""
        content = dead_letter.as_object(payload=False)
        original = dead_letter.original
        content["record"]["key"] = shown(original.key, show_keys=self._app.settings.show_keys)
        content["size"] = None if original.value is None else len(original.value)
        content["message"] = dead_letter.failure.message  # as in the findings
        content["replayed"] = dead_letter.done if progress_known else None
        return content

    async def _dead_letter(self, request: DeadLetterRequest, caller: Caller) -> Mapping[str, Any]:
        self._check_topic(request.topic)
        with self._jobs.only_one("a dead letter"):
            dead_letter = await find_dead_letter(self._app, request.topic, request.partition, request.offset)
            value = await self._decoded(dead_letter)
        content = self._summary(dead_letter, progress_known=True)
        payload = self._shows_payloads(caller)
        content["hidden"] = not payload
        if payload:
            record = dead_letter.as_object()["record"]
            content["record"] |= {"value": record["value"], "headers": record["headers"]}
        shown_value = value.as_object(payload=payload)
        return {**content, "decoded": {**shown_value, "text": indented(shown_value["value"])}}

    async def _decoded(self, dead_letter: StoredDeadLetter) -> Decoded:
        """Decode in the event loop of the app, where the clients of decoders are; here if it does not run."""
        try:
            (value,) = await self._app.run_in_loop(decode(self._app, [dead_letter]), "decode a dead letter")
        except StateError:
            (value,) = await decode(self._app, [dead_letter])
        return value

    # Jobs -----------------------------------------------------------------------------

    async def _list_jobs(self, _: Nothing, __: Caller) -> Mapping[str, Any]:
        return self._jobs.as_object()

    def _started(self, job: Job) -> Mapping[str, Any]:
        self._jobs.start(job)
        return job.as_object()

    async def _count(self, request: TopicRequest, caller: Caller) -> Mapping[str, Any]:
        self._check_topic(request.topic)
        return self._started(Counting(self._app, request.topic, caller.name, self._filters(request, caller)))

    async def _try(self, request: TryRequest, caller: Caller) -> Mapping[str, Any]:
        self._check_topic(request.topic)
        self._app.running_engine()
        position = (request.partition, request.offset)
        return self._started(Trying(self._app, request.topic, caller.name, position, self._change(request)))

    async def _send(self, request: SendRequest, caller: Caller) -> Mapping[str, Any]:
        self._check_topic(request.topic)
        at = frozenset(Coordinates(request.topic, position.partition, position.offset) for position in request.at)
        filters = self._filters(request, caller)._replace(at=at)
        change = self._change(request)
        return self._started(Sending(self._app, request.topic, caller.name, filters, change, again=request.again))

    def _change(self, request: _Changing) -> Change:
        if request.value is not None:
            value = request.value
            return Change(with_value(value.encode() if isinstance(value, str) else value.base64), "a new value")
        if request.transform is None:
            return Change()
        transform = self._transforms.get(request.transform)
        if transform is None:
            listed = ", ".join(sorted(self._transforms)) or "none"
            raise RefusedError(
                403, f"transform {request.transform!a} is not one that the application allows: it allows {listed}"
            )
        return Change(transform, request.transform)

    async def _confirm(self, request: JobRequest, caller: Caller) -> Mapping[str, Any]:
        return self._jobs.confirm(request.job, caller.name).as_object()

    async def _stop(self, request: JobRequest, caller: Caller) -> Mapping[str, Any]:
        return self._jobs.stop(request.job, caller.name).as_object()

    # Parked records -------------------------------------------------------------------

    async def _list_parked(self, request: TopicRequest, caller: Caller) -> Mapping[str, Any]:
        parked, is_complete = await self._read_parked(request.topic, self._filters(request, caller))
        keys = parked.keys()
        return {
            "keys": [self._parked_key(parked, key) for key in keys[:PARKED_KEYS]],
            "total": len(keys),
            "records": sum(map(len, keys)),
            "complete": is_complete,
        }

    async def _read_parked(self, topic: str, filters: Filters) -> tuple[ParkedTopic, bool]:
        """Read a topic of parked records; return also whether it was read to its end."""
        self._check_topic(topic, Park)
        parked = ParkedTopic(filters)
        with self._jobs.only_one("parked records"):
            async with opened_topic(self._app.settings, topic) as (_, reader):
                async for records in reader.read():
                    for record in records:
                        parked.add(record)
                    if len(parked.records) > MOST_PARKED:
                        return parked, False
        return parked, True

    def _parked_key(self, parked: ParkedTopic, key: ParkedKey) -> dict[str, Any]:
        content = key_as_object(parked, key)
        content["key"] = shown(key[0].original.key, show_keys=self._app.settings.show_keys)
        content["offsets"] = [record.coordinates.offset for record in key[:1]]
        return {**content, "records": len(key)}

    async def _find_parked(self, request: ParkedRequest) -> ParkedTopic:
        at = Coordinates(request.source, request.partition, request.offset)
        parked, _ = await self._read_parked(request.topic, Filters(group=self._app.group_id, records=(at,)))
        if not parked.selected():
            raise RefusedError(404, f"{str(at)!a} is not parked in {request.topic} any more: it may have run again")
        return parked

    async def _release(self, request: ParkedRequest, caller: Caller) -> Mapping[str, Any]:
        parked = await self._find_parked(request)
        async with Publisher(self._app.settings) as publisher:
            await release_keys(publisher, request.topic, parked.keys(), who=caller.name)
        return {"done": "the member that owns the partition will run the key again"}

    async def _drop(self, request: ParkedRequest, caller: Caller) -> Mapping[str, Any]:
        parked = await self._find_parked(request)
        async with Publisher(self._app.settings) as publisher:
            await drop_records(publisher, parked, request.topic, who=caller.name)
        return {"done": "the parked record was dropped"}


def _named(transforms: Sequence[Transform]) -> dict[str, Transform]:
    named: dict[str, Transform] = {}
    for transform in transforms:
        try:
            name = f"{transform.__module__}:{transform.__qualname__}"
        except AttributeError:
            raise SettingsError(
                f"transform {transform!r} has no name: expected functions of a module, such as fixes.add_currency"
            ) from None
        if name in named:
            raise SettingsError(f"two transforms are called {name}: rename one of them")
        named[name] = transform
    return named
