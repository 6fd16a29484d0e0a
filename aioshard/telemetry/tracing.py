"""OpenTelemetry spans for attempts and published messages; see docs/tracing.md.

An app without tracing pays nothing per record: `trace` only wraps the attempts and the clients when the app starts.
"""

import asyncio
import contextlib
import functools
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, cast

from aioshard.core.options import Park
from aioshard.core.text import encodable, message_of
from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import Adapt, Handler
from aioshard.engine.worker import SERVING, Asked
from aioshard.errors import AttemptTimeoutError, MissingExtraError, StoppedRunError
from aioshard.ports import Clients, Message, Producer, Publish
from aioshard.records import Record, TopicPartition
from aioshard.settings import Settings
from aioshard.telemetry.versions import version

try:
    from opentelemetry import context, propagate
    from opentelemetry.trace import (
        INVALID_SPAN,
        Link,
        NonRecordingSpan,
        Span,
        SpanContext,
        SpanKind,
        Status,
        StatusCode,
        Tracer,
        TracerProvider,
        get_current_span,
        get_tracer_provider,
        set_span_in_context,
    )
except ImportError as error:
    raise MissingExtraError("tracing", "otel") from error

logger = logging.getLogger("aioshard.telemetry.tracing")

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"


TOPIC: Final = "messaging.destination.name"
PARTITION: Final = "messaging.destination.partition.id"
OFFSET: Final = "messaging.kafka.offset"
ERROR_TYPE: Final = "error.type"

ATTRIBUTES: Final = {
    "messaging.system": ("process, send", "`kafka`."),
    "messaging.operation.name": ("process, send", "`process` or `send`."),
    "messaging.operation.type": ("process, send", "`process` or `send`."),
    TOPIC: ("process, send", "The topic; absent for a batch with several."),
    PARTITION: (
        "process, commit, send",
        "The partition, as text; absent for several, and for a message whose key chooses it.",
    ),
    "messaging.consumer.group.name": ("process", "The group id."),
    "messaging.client.id": ("process, send", "The setting `client_id`."),
    "messaging.batch.message_count": (
        "process",
        "Number of records in the batch; absent for a handler of single records.",
    ),
    OFFSET: (
        "process, send",
        "The offset of a single record; a batch has one in each link. Absent for sent messages with exactly once.",
    ),
    "messaging.kafka.message.key": (
        "process, send",
        "The key of a single record, if `show_keys` allows it and it is UTF-8.",
    ),
    "messaging.kafka.message.tombstone": ("process, send", "True for a tombstone, otherwise absent."),
    ERROR_TYPE: ("process, send", "Class of the exception, if it failed."),
    "server.address": ("process, send", "Host of `bootstrap_servers`, if that names a single broker."),
    "server.port": ("process, send", "Port of that broker."),
    "aioshard.attempt": ("process", "Number of the attempt, from the second on."),
}
"""The spans that have each attribute, and its meaning; only the last one is not from the conventions."""

Attributes = dict[str, str | int | bool]
"""Attributes of a span."""

NOWHERE = context.Context()
"""A context without a span: a span started in it is the root of a trace.

Workers copy the context in which the app starts. A span that is current there, such as that of an import or a request,
would otherwise be the parent of every record for days."""


@functools.cache  # so that each problem is logged once
def _log_once(problem: str) -> None:
    logger.warning("%s; this is logged once", problem, exc_info=True)  # noqa: LOG014 - called in exception handlers


def error_type(error: BaseException) -> str:
    """Return the name of an exception's class, with its module unless it is built in.

    The timeout of an attempt, and a requested end, show up as a cancellation.

    Example:
        >>> error_type(ValueError("no")), error_type(asyncio.CancelledError())
        ('ValueError', 'asyncio.exceptions.CancelledError')
    """
    worker = SERVING.get(None)
    asked = Asked.NOTHING
    if worker is not None and isinstance(error, asyncio.CancelledError):
        asked = worker.asked
    kind = type(error)
    if asked & Asked.TIME_OUT:
        kind = AttemptTimeoutError
    elif asked & Asked.STOP:
        kind = StoppedRunError
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


Headers = Sequence[tuple[str, bytes | None]]

_LONGEST = 8 * 1024
"""Maximum bytes of a header that is read; W3C baggage, the longest of them, may be this long."""


def _texts_of(headers: Headers) -> dict[str, str]:
    """Return the last header of each name, unless it is too long or not text."""
    texts = {}
    for name, content in dict(headers).items():
        if content is not None and len(content) <= _LONGEST:
            with contextlib.suppress(UnicodeDecodeError):
                texts[name] = content.decode()
    return texts


# Trace context is read and written with the propagator of the process (`OTEL_PROPAGATORS`). Invalid headers never cause
# an error, and an existing header of a message is not replaced.


def extract_context(headers: Headers) -> context.Context:
    """Return the context from the headers, on top of an empty one."""
    try:
        return propagate.extract(_texts_of(headers), context.Context())
    except Exception:  # noqa: BLE001 - propagators and headers may come from third parties
        _log_once("the trace context of a record cannot be read")
        return context.Context()


def origin_of(headers: Headers) -> SpanContext | None:
    """Return the span in which a message was created, or None if its headers do not name one."""
    if not headers:
        return None
    span_context = get_current_span(extract_context(headers)).get_span_context()
    return span_context if span_context.is_valid else None


def _add_current_context(message: Message) -> Message:
    """Return the message with the current context added to its own headers."""
    added: dict[str, str] = {}
    try:
        propagate.inject(added)
    except Exception:  # noqa: BLE001 - as in `extract_context`
        _log_once("a trace context cannot be added to a message")
        return message
    own = dict(message.headers)
    headers = tuple((name, text.encode()) for name, text in added.items() if name not in own)
    return message._replace(headers=(*message.headers, *headers)) if headers else message


class Spans:
    """Creates the spans of one run of an app by wrapping its handlers and its clients.

    Owned by the event loop, like the objects it wraps.
    """

    def __init__(self, tracer: Tracer, group_id: str, settings: Settings, *, parent: bool) -> None:
        """Prepare the common attributes of the spans.

        Args:
            tracer: A tracer of the chosen provider.
            group_id: The consumer group.
            settings: The settings of the run.
            parent: True to make the span in a record's headers the parent of its attempts, in addition to linking it.
        """
        self._tracer = tracer
        self._settings = settings
        self._parent = parent
        self._parked: set[str] = set()
        """Topics that handlers park records in."""
        common: Attributes = {"messaging.system": "kafka", "messaging.client.id": settings.client_id or "aioshard"}
        host, _, port = (settings.bootstrap_servers or "").strip().rpartition(":")
        if "," not in host and port.isdigit():  # with several, the one that answers is not known here
            common["server.address"] = host.strip("[]")
            common["server.port"] = int(port)
        self._processing = common | {"messaging.consumer.group.name": group_id} | _operation("process")
        self._sending = common | _operation("send")

    @contextlib.contextmanager
    def _span(
        self,
        operation: str,
        attributes: Attributes,
        *,
        parent: context.Context | None = NOWHERE,
        links: Sequence[Link] = (),
        carried: context.Context | None = NOWHERE,
    ) -> Iterator[Span]:
        """Keep a span current inside a `with` block.

        Errors of a sampler, a processor or an exporter never reach the code inside.

        Args:
            operation: `process` or `send`.
            attributes: Visible to samplers; `error.type` is added on failure.
            parent: None for the context in which the code runs.
            links: Links to other spans.
            carried: Context for the code inside, in addition to the span, such as baggage. None keeps its own context.
        """
        span: Span = INVALID_SPAN
        began = time.time_ns()
        closed = False
        try:
            span = self._tracer.start_span(
                f"{operation} {attributes[TOPIC]}" if TOPIC in attributes else operation,
                context=parent,
                kind=SpanKind.PRODUCER if operation == "send" else SpanKind.CONSUMER,
                attributes=attributes,
                links=links,
                start_time=began,
                record_exception=False,
                set_status_on_exception=False,
            )
        except Exception:  # noqa: BLE001 - samplers and processors may be third-party code
            _log_once(_SDK_FAILED)
        token = context.attach(set_span_in_context(span, carried))
        try:
            yield span
        except BaseException as error:
            closed = isinstance(error, GeneratorExit)  # a coroutine may be closed in another context
            attributes[ERROR_TYPE] = name = error_type(error)
            if span.is_recording():
                _describe_failure(span, error, name)
            raise
        finally:
            if not closed:
                context.detach(token)
            try:
                span.end(max(time.time_ns(), began))
            except Exception:  # noqa: BLE001 - as above
                _log_once(_SDK_FAILED)

    # Attempts -----------------------------------------------------------------------

    def attempts(self, spec: Handler) -> Handler:
        """Return the handler with a span around each attempt.

        One span over all attempts of a record would include the waits, and never end while the record is halted.
        """
        if isinstance(spec.on_failure, Park):
            self._parked.add(spec.on_failure.topic)
        attempt = spec.attempt
        is_batch = spec.batch is not None

        async def run(work: Any) -> object:
            deliveries: Sequence[Delivery] = work.deliveries if is_batch else (work,)
            span: Span = INVALID_SPAN
            try:
                with self._batch_span(deliveries) if is_batch else self._record_span(work) as span:
                    return await attempt(work)
            except Exception:
                for delivery in deliveries:
                    delivery.failed_span = span.get_span_context()
                raise

        return spec._replace(call=None, invoke=run)

    def _processing_of(self, delivery: Delivery) -> Attributes:
        """Return the attributes of every attempt."""
        return self._processing | ({"aioshard.attempt": delivery.failures + 1} if delivery.failures else {})

    def _record_span(self, delivery: Delivery) -> contextlib.AbstractContextManager[Span]:
        record = delivery.record
        attributes = self._processing_of(delivery) | _position_of(record) | {TOPIC: record.topic}
        self._describe(attributes, record.key, record.value)
        carried = extract_context(record.headers) if record.headers else NOWHERE
        origin = get_current_span(carried).get_span_context()
        return self._span(
            "process",
            attributes,
            parent=carried if self._parent and origin.is_valid else NOWHERE,
            links=(Link(origin),) if origin.is_valid else (),
            carried=carried,
        )

    def _batch_span(self, deliveries: Sequence[Delivery]) -> contextlib.AbstractContextManager[Span]:
        records = [delivery.record for delivery in deliveries]
        attributes = self._processing_of(deliveries[0]) | self._destination(
            {record.topic_partition for record in records}
        )
        attributes["messaging.batch.message_count"] = len(records)
        origins = [(origin_of(record.headers), record) for record in records]
        return self._span(
            "process",
            attributes,
            links=[Link(origin, _position_of(record)) for origin, record in origins if origin is not None],
        )

    def _destination(self, partitions: Collection[TopicPartition]) -> Attributes:
        """Return the topic, if *partitions* have the same one, and the partition, if there is only one."""
        topic, partition = next(iter(partitions))
        attributes: Attributes = {TOPIC: topic} if all(other.topic == topic for other in partitions) else {}
        return attributes | ({PARTITION: str(partition)} if len(partitions) == 1 else {})

    def _describe(self, attributes: Attributes, key: bytes | None, value: bytes | None) -> None:
        if value is None:
            attributes["messaging.kafka.message.tombstone"] = True
        if key is not None and self._settings.show_keys:
            with contextlib.suppress(UnicodeDecodeError):  # a key that is not text gets no attribute
                attributes["messaging.kafka.message.key"] = key.decode()

    # Publishing ------------------------------------------------------------------------

    def producer(self, producer: Producer) -> Producer:
        """Return the producer with a span around each message."""
        return cast(Producer, _TracedProducer(producer, self.around(producer.publish)))

    def around(self, publish: Publish) -> Publish:
        """Return a function that publishes with a span around each message."""
        return functools.partial(self._publish, publish)

    async def _publish(self, publish: Publish, message: Message) -> int:
        attributes = self._sending | {TOPIC: message.topic}
        if message.partition is not None:
            attributes[PARTITION] = str(message.partition)
        self._describe(attributes, message.key, message.value)
        origin = origin_of(message.headers)
        ours, parent = self._side_message(message)
        with self._span(
            "send", attributes, parent=parent, links=() if origin is None else (Link(origin),), carried=parent
        ) as span:
            if origin is None and not ours:
                message = _add_current_context(message)
            offset = await publish(message)
            if offset >= 0:
                span.set_attribute(OFFSET, offset)
            return offset

    def _side_message(self, message: Message) -> tuple[bool, context.Context | None]:
        """Return whether the engine, not the application, publishes a message, and the parent of its span.

        A dead letter or a parked record keeps the headers of its record, and belongs to the attempt that failed.
        """
        worker = SERVING.get(None)
        delivery = worker.delivery if worker is not None and worker.task is asyncio.current_task() else None
        if delivery is not None and delivery.recovery is not None:
            failed = delivery.failed_span
            if isinstance(failed, SpanContext) and failed.is_valid:
                return True, set_span_in_context(NonRecordingSpan(failed), NOWHERE)
            return True, NOWHERE
        return (True, NOWHERE) if message.topic in self._parked else (False, None)


_SDK_FAILED = "the OpenTelemetry SDK raised an error, so spans may be missing"


def _describe_failure(span: Span, error: BaseException, name: str) -> None:
    try:
        span.set_attribute(ERROR_TYPE, name)
        if isinstance(error, asyncio.CancelledError):
            span.set_status(Status(StatusCode.ERROR, "cancelled"))
        else:
            message = message_of(error)
            span.set_status(Status(StatusCode.ERROR, message))
            # Not `record_exception`: it raises if the exception cannot produce its message, and an exporter drops a
            # whole request of spans if one has text that UTF-8 cannot encode.
            span.add_event(
                "exception",
                {
                    "exception.type": name,
                    "exception.message": message,
                    "exception.stacktrace": encodable("".join(traceback.format_exception(error))),
                    "exception.escaped": "False",
                },
            )
    except Exception:  # noqa: BLE001 - spans may be third-party code, and the SDK calls the user's methods
        _log_once(_SDK_FAILED)


def _operation(name: str) -> Attributes:
    return {"messaging.operation.name": name, "messaging.operation.type": name}


def _position_of(record: Record) -> Attributes:
    return {PARTITION: str(record.partition), OFFSET: record.offset}


class _TracedProducer:
    """A producer with another `publish`."""

    def __init__(self, producer: Producer, publish: Callable[[Message], Awaitable[int]]) -> None:
        self._producer = producer
        self.publish = publish

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)


class Traceable(Protocol):
    """An object that can be traced: an `App`."""

    def traced_by(self, tracing: "Tracing | None") -> None:
        """Trace the app from its next start; None turns tracing off."""


def trace(
    app: Traceable,
    *,
    tracer_provider: TracerProvider | None = None,
    parent: bool = False,
) -> None:
    """Trace an app from its next start; another call replaces the earlier one.

    Backfills on Spark are not traced, because they repeat earlier processing.

    Args:
        app: The app.
        tracer_provider: Destination of the spans; by default the provider of the process when the app starts.
        parent: True to make the span named in a record's headers the parent of its attempts, so that they are in the
            producer's trace. The span is linked either way. Batches are only linked.

    Raises:
        MissingExtraError: On import of this module; OpenTelemetry's API is not installed.
        StateError: The app is running.

    Example:
        >>> from aioshard import App
        >>> app = App("billing", bootstrap_servers="localhost:9092")
        >>> trace(app, parent=True)
    """
    app.traced_by(Tracing(tracer_provider, parent))


class Tracing(NamedTuple):
    """The tracing configuration of an app; see `trace`."""

    tracer_provider: TracerProvider | None
    parent: bool

    def wrap(self, clients: Clients, adapt: Adapt | None, group_id: str, settings: Settings) -> tuple[Clients, Adapt]:
        """Return the clients and the handler adapter of a run with tracing added."""
        tracer = (self.tracer_provider or get_tracer_provider()).get_tracer("aioshard", version(), SCHEMA_URL)
        spans = Spans(tracer, group_id, settings, parent=self.parent)
        traced = clients._replace(producer=lambda: spans.producer(clients.producer()), around=spans.around)
        if adapt is None:
            return traced, spans.attempts
        return traced, lambda spec: spans.attempts(adapt(spec))
