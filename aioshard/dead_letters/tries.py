"""Dry runs: handlers really run on dead letters, but nothing is published and nothing is stored."""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final, NamedTuple

from aioshard.app import App, intercept_publishing
from aioshard.core.options import Retry
from aioshard.core.text import as_json_value
from aioshard.dead_letters.dead_letter import StoredDeadLetter
from aioshard.dead_letters.decoding import value_as_object
from aioshard.dead_letters.edits import Transform, edit
from aioshard.dead_letters.processing import distinct, run_in_memory, shard_of
from aioshard.dead_letters.results import Failed, WorkItem
from aioshard.engine.current_record import current_record
from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import Handler
from aioshard.errors import MessageError, StateError
from aioshard.ports import UNKNOWN_OFFSET, Message
from aioshard.records import Record
from aioshard.serde.payloads import unwritable
from aioshard.serde.side_records import Coordinates

_FOR_TRIALS: Final[dict[str, Any]] = {
    "auto_offset_reset": "earliest",
    "journal": None,
    "processing_guarantee": "at_least_once",
}
"""Settings of an app that runs on dead letters from memory."""
_STOP_TIMEOUT = 2.0
"""Seconds that handlers get to end when a dry run next to a running app is stopped: nothing of it is kept."""


class Tried(NamedTuple):
    """A dead letter on which its handler has run."""

    dead_letter: StoredDeadLetter
    record: Record
    """The record that the handler got."""
    error: str | None = None
    """Why the run has failed, or the transform; None if the handler has succeeded."""
    left_alone: bool = False
    """Whether the transform left it alone, so that nothing ran."""
    result: object = None
    """The handler's result."""
    seconds: float | None = None
    """Duration of the run; None if nothing ran."""
    messages: Sequence[Message] = ()
    """The messages that the run would have published."""

    @property
    def is_edited(self) -> bool:
        """Whether a transform has changed the record."""
        return self.record is not self.dead_letter.original

    @property
    def succeeded(self) -> bool:
        """Whether the handler has run without an error."""
        return self.error is None and not self.left_alone

    def as_object(self, *, payload: bool = True) -> dict[str, Any]:
        """Return the result for JSON.

        Args:
            payload: Whether to include the value, the result, the messages and the text of the error.
        """
        content: dict[str, Any] = {
            "dead_letter": str(self.dead_letter.at),
            "record": str(self.dead_letter.source),
            "handler": self.dead_letter.failure.handler,
            "succeeded": self.succeeded,
            "left": self.left_alone,
            "seconds": self.seconds,
            "edited": self.is_edited,
        }
        if not payload:
            error = self.error
            return {
                **content,
                "error": None if error is None else error.partition(":")[0],
                "messages": len(self.messages),
            }
        return {
            **content,
            "error": self.error,
            "value": as_json_value(self.record.value),
            "result": value_as_object(self.result),
            "messages": list(map(message_as_object, self.messages)),
        }


class Trial(NamedTuple):
    """The results of a dry run."""

    tried: Sequence[Tried]
    """In the order of the records."""
    unattributed: Sequence[Message]
    """Messages of tasks and threads that a handler had started and did not wait for."""


async def try_dead_letters(
    app: App,
    dead_letters: Iterable[StoredDeadLetter],
    *,
    transform: Transform | None = None,
    stop: asyncio.Event | None = None,
) -> Trial:
    """Run the handlers of an app on dead letters, each once, and collect the messages instead of publishing them.

    Handlers run with the app's resources, dependencies, middleware and timeouts. An app that runs in this process is
    not disturbed: its resources are used. One that does not run is started for this and ended. Nothing is retried,
    later records of a key run also after a failure, and batches have one record. Nothing is committed, and all dead
    letters stay as they are. Other effects of a handler are real, such as requests, writes to a database, and messages
    that another task of the running app publishes for it.

    Args:
        app: The app.
        dead_letters: Dead letters of its group.
        transform: Changes the records before.
        stop: Ends it early; the rest is left out.

    Raises:
        HandlerError: The app has no handler for a dead letter. Nothing has run.
        AioshardError: The app cannot start.
    """
    tried: list[Tried] = []
    items: list[WorkItem] = []
    for dead_letter in sorted(dead_letters, key=lambda dead_letter: dead_letter.source):
        item = WorkItem(dead_letter, dead_letter.original, [dead_letter.position])
        match await edit(item, transform):
            case WorkItem() as edited:
                shard_of(app, edited)
                items.append(edited)
            case Failed(reason=reason):
                tried.append(Tried(dead_letter, dead_letter.original, error=reason))
            case None:
                tried.append(Tried(dead_letter, dead_letter.original, left_alone=True))
    collector = _Collector()
    for group in distinct(items):
        if stop is not None and stop.is_set():
            break
        tried += await _run(app, group, collector, stop or asyncio.Event())
    return Trial(sorted(tried, key=_source_of), collector.unattributed)


def _source_of(tried: Tried) -> Coordinates:
    return tried.dead_letter.source


async def _run(app: App, items: Sequence[WorkItem], collector: "_Collector", stop: asyncio.Event) -> list[Tried]:
    """Run the handlers on different records."""
    remaining = {item.dead_letter.source: item for item in items}
    tried: list[Tried] = []

    def completed(delivery: Delivery) -> None:
        source = Coordinates.of(delivery.record)
        item = remaining.pop(source)
        run = delivery.measured_run()
        tried.append(
            Tried(
                item.dead_letter,
                item.record,
                error=None if delivery.failure is None else str(delivery.failure),
                result=None if run is None else run.result,
                seconds=None if run is None else run.seconds,
            )
        )

    async with _trial_of(app) as trial:
        with intercept_publishing(collector.publish):
            await run_in_memory(
                trial,
                [item.record for item in items],
                make_producer=lambda: collector,
                adapt=_once,
                completed=completed,
                stop=stop,
            )
    return [run._replace(messages=collector.of(run.dead_letter.source)) for run in tried]


def _once(handler: Handler) -> Handler:
    """Return the handler without retries, and with a failure policy that completes each record."""
    batch = None if handler.batch is None else dataclasses.replace(handler.batch, max_records=1, linger=0.0)
    return handler.for_history()._replace(on_failure="skip", retry=Retry(attempts=1), shards=None, batch=batch)


@contextlib.asynccontextmanager
async def _trial_of(app: App) -> AsyncIterator[App]:
    """Return an app to run: *app* itself, or one with its handlers and its open resources if it runs already."""
    settings = app.settings
    if _is_running(app):
        timeout = min(settings.shutdown_timeout, _STOP_TIMEOUT)
        beside = settings.replace(assign=None, shutdown_timeout=timeout, **_FOR_TRIALS)
        trial: App = App(app.group_id, settings=beside, resources=functools.partial(_open_state, app))
        trial.include_router(app)
        yield trial
        return
    before = {name: getattr(settings, name) for name in _FOR_TRIALS}
    app.configure(**_FOR_TRIALS)
    try:
        yield app
    finally:
        app.configure(**before)


def _is_running(app: App) -> bool:
    try:
        app.running_engine()
    except StateError:
        return False
    return True


@contextlib.asynccontextmanager
async def _open_state(app: App, _: App) -> AsyncIterator[Any]:
    yield app.state


class _Collector:
    """Takes messages in place of a producer, and knows for which record a handler has published each."""

    trouble: str | None = None

    def __init__(self) -> None:
        self.unattributed: list[Message] = []
        self._by_source: dict[Coordinates, list[Message]] = {}

    async def publish(self, message: Message) -> int:
        """Keep a message.

        Raises:
            MessageError: No broker can be sent the message.
        """
        why = unwritable(message)
        if why is not None:
            raise MessageError(f"a message for topic {message.topic!r} was refused: {why}")
        current = current_record()
        messages = self.unattributed
        if current is not None:
            source = Coordinates(current.topic, current.partition, current.offset)
            messages = self._by_source.setdefault(source, [])
        messages.append(message)
        return UNKNOWN_OFFSET

    def of(self, source: Coordinates) -> Sequence[Message]:
        """Return the messages of the run for a record, and forget them."""
        return self._by_source.pop(source, ())

    async def close(self) -> None:
        """Do nothing: no connection was opened."""


def message_as_object(message: Message) -> dict[str, Any]:
    """Return a message that was not published for JSON."""
    return {
        "topic": message.topic,
        "partition": message.partition,
        "key": as_json_value(message.key),
        "value": as_json_value(message.value),
        "headers": [[name, as_json_value(value)] for name, value in message.headers],
    }
