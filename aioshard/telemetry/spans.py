"""The spans of an app: attempts, commits and published messages."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Tracer,
    get_current_span,
    set_span_in_context,
)

from aioshard.core.recourse import Park
from aioshard.engine.batches.batch_worker import InvokeBatch
from aioshard.engine.batches.delivery_batch import DeliveryBatch
from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import HandlerSpec
from aioshard.engine.serving import serving
from aioshard.engine.worker import Asked, Invoke
from aioshard.errors import AttemptTimeoutError
from aioshard.ports import Committed, Membership, Message, Producer, Transport
from aioshard.records import Record, TopicPartition
from aioshard.telemetry.conventions import Attribute
from aioshard.telemetry.metering import Metering
from aioshard.telemetry.operations import NOWHERE, Attributes, Operation, Plan, error_type
from aioshard.telemetry.propagation import Propagation

__all__ = ["About", "Spans"]

_TIMED_OUT = f"{AttemptTimeoutError.__module__}.{AttemptTimeoutError.__qualname__}"


class About(NamedTuple):
    """The facts that all spans of a run share."""

    group: str
    client_id: str
    server: tuple[str, int] | None
    """The broker, if the settings name a single one."""
    show_keys: bool
    commit_timeout: float


class Spans:
    """Creates the spans of one run of an app by wrapping its handlers and its clients.

    Owned by the event loop, like the objects it wraps.
    """

    def __init__(self, tracer: Tracer, metering: Metering | None, about: About, *, parent: bool) -> None:
        """Prepare the common attributes of the spans.

        Args:
            tracer: A tracer of the chosen provider.
            metering: The instruments, if metrics were requested.
            about: The facts that all spans share.
            parent: True to make the span in a record's headers the parent of its attempts, in addition to linking it.
        """
        self._tracer = tracer
        self._metering = metering
        self._about = about
        self._parent = parent
        self._propagation = Propagation()
        self._parked: set[str] = set()
        """Topics that handlers park records in."""
        self._places: dict[tuple[str, int], Attributes] = {}
        common: Attributes = {
            Attribute.MESSAGING_SYSTEM: "kafka",
            Attribute.MESSAGING_CLIENT_ID: about.client_id,
        }
        if about.server is not None:
            common[Attribute.SERVER_ADDRESS], common[Attribute.SERVER_PORT] = about.server
        consuming = common | {Attribute.MESSAGING_CONSUMER_GROUP_NAME: about.group}
        self._processing = consuming | _operation("process", "process")
        self._settling = consuming | _operation("commit", "settle")
        self._sending = common | _operation("send", "send")

    # Attempts -----------------------------------------------------------------------

    def attempts(self, spec: HandlerSpec) -> HandlerSpec:
        """Return the handler with a span around each attempt."""
        if isinstance(spec.on_failure, Park):
            self._parked.add(spec.on_failure.topic)
        batched = spec.batched
        if batched is not None:
            return spec._replace(batched=batched._replace(invoke=self._of_batches(batched.invoke)))
        return spec._replace(call=None, invoke=self._of_records(spec.attempt))

    def _of_records(self, attempt: Invoke) -> Invoke:
        async def run(delivery: Delivery) -> object:
            first = delivery.starts == 1
            operation = Operation(
                self._tracer,
                self._of_record(delivery),
                measure=None if self._metering is None else self._processed(int(first)),
                name_error=_name_failure,
            )
            try:
                with operation:
                    return await attempt(delivery)
            except Exception:
                delivery.failed_span = operation.span.get_span_context()
                raise

        return run

    def _of_batches(self, attempt: InvokeBatch) -> InvokeBatch:
        async def run(batch: DeliveryBatch) -> object:
            first = sum(delivery.starts == 1 for delivery in batch.deliveries)
            operation = Operation(
                self._tracer,
                self._of_batch(batch.deliveries),
                measure=None if self._metering is None else self._processed(first),
                name_error=_name_failure,
            )
            try:
                with operation:
                    return await attempt(batch)
            except Exception:
                span = operation.span.get_span_context()
                for delivery in batch.deliveries:
                    delivery.failed_span = span
                raise

        return run

    def _processed(self, first: int) -> Callable[[float, Attributes], None]:
        metering = self._metering
        assert metering is not None  # noqa: S101 - callers check it
        return lambda seconds, about: metering.processed(seconds, first, about)

    def _of_record(self, delivery: Delivery) -> Plan:
        record = delivery.record
        attributes = self._place(record) | {Attribute.MESSAGING_KAFKA_OFFSET: record.offset}
        self._describe(attributes, record.key, record.value)
        if delivery.failures:
            attributes[Attribute.AIOSHARD_ATTEMPT] = delivery.failures + 1
        name = f"process {record.topic}"
        if not record.headers:
            return Plan(name, SpanKind.CONSUMER, attributes)
        carried = self._propagation.extract(record.headers)
        origin = get_current_span(carried).get_span_context()
        if not origin.is_valid:
            return Plan(name, SpanKind.CONSUMER, attributes, carried=carried)
        parent = carried if self._parent else NOWHERE
        return Plan(name, SpanKind.CONSUMER, attributes, parent, (Link(origin),), carried)

    def _of_batch(self, deliveries: Sequence[Delivery]) -> Plan:
        attributes = self._processing | self._common(delivery.record.topic_partition for delivery in deliveries)
        attributes[Attribute.MESSAGING_BATCH_MESSAGE_COUNT] = len(deliveries)
        if deliveries[0].failures:
            attributes[Attribute.AIOSHARD_ATTEMPT] = deliveries[0].failures + 1
        links = []
        for delivery in deliveries:
            record = delivery.record
            origin = self._propagation.origin(record.headers)
            if origin is not None:
                place: Attributes = {
                    Attribute.MESSAGING_DESTINATION_PARTITION_ID: str(record.partition),
                    Attribute.MESSAGING_KAFKA_OFFSET: record.offset,
                }
                links.append(Link(origin, place))
        return Plan(_name("process", attributes), SpanKind.CONSUMER, attributes, links=links)

    def _place(self, record: Record) -> Attributes:
        """Return the attributes that all records of a partition share."""
        key = record.topic, record.partition
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = self._processing | self._common([record.topic_partition])
        return found

    def _common(self, places: Iterable[TopicPartition]) -> Attributes:
        """Return the topic and the partition, each only if it is the same for all places."""
        distinct = set(places)
        if len({place.topic for place in distinct}) != 1:
            return {}
        place = next(iter(distinct))
        found: Attributes = {Attribute.MESSAGING_DESTINATION_NAME: place.topic}
        if len(distinct) == 1:
            found[Attribute.MESSAGING_DESTINATION_PARTITION_ID] = str(place.partition)
        return found

    def _describe(self, attributes: Attributes, key: bytes | None, value: bytes | None) -> None:
        if value is None:
            attributes[Attribute.MESSAGING_KAFKA_MESSAGE_TOMBSTONE] = True
        if key is not None and self._about.show_keys:
            with contextlib.suppress(UnicodeDecodeError):  # a key that is not text gets no attribute
                attributes[Attribute.MESSAGING_KAFKA_MESSAGE_KEY] = key.decode()

    # Commits ------------------------------------------------------------------------

    def transport(self, transport: Transport) -> Transport:
        """Return the client with a span around each commit request."""
        traced: Any = _TracedTransport(transport, self._commit)
        found: Transport = traced
        return found

    async def _commit(
        self, transport: Transport, offsets: Mapping[TopicPartition, Committed], membership: Membership
    ) -> None:
        attributes = self._settling | self._common(offsets)
        began = time.monotonic()

        def name_error(error: BaseException) -> str:
            late = time.monotonic() - began >= self._about.commit_timeout
            return "TimeoutError" if late and isinstance(error, asyncio.CancelledError) else error_type(error)

        with Operation(
            self._tracer,
            Plan(_name("commit", attributes), SpanKind.CLIENT, attributes),
            measure=None if self._metering is None else self._metering.committed,
            name_error=name_error,
        ):
            await transport.commit(offsets, membership)

    # Publishing ------------------------------------------------------------------------

    def producer(self, producer: Producer) -> Producer:
        """Return the producer with a span around each message."""
        return _TracedProducer(producer, self._publish)

    async def _publish(self, producer: Producer, message: Message) -> int:
        attributes = self._sending | {Attribute.MESSAGING_DESTINATION_NAME: message.topic}
        if message.partition is not None:
            attributes[Attribute.MESSAGING_DESTINATION_PARTITION_ID] = str(message.partition)
        self._describe(attributes, message.key, message.value)
        origin = self._propagation.origin(message.headers)
        ours, parent = self._detour(message)
        plan = Plan(
            f"send {message.topic}",
            SpanKind.PRODUCER,
            attributes,
            parent,
            () if origin is None else (Link(origin),),
            carried=parent,
        )
        measure = None if self._metering is None else self._metering.sent
        with Operation(self._tracer, plan, measure=measure) as operation:
            if origin is None and not ours:
                message = self._propagation.inject(message, operation.context)
            offset = await producer.publish(message)
            operation.span.set_attribute(Attribute.MESSAGING_KAFKA_OFFSET, offset)
            return offset

    def _detour(self, message: Message) -> tuple[bool, Context | None]:
        """Return whether the engine, not the application, publishes a message, and the parent of its span.

        A dead letter or a parked record keeps the headers of its record, and belongs to the attempt that failed.
        """
        at = serving()
        delivery = at.worker.delivery if at is not None and at.is_here else None
        if delivery is not None and delivery.detour is not None:
            return True, _inside(delivery.failed_span)
        return (True, NOWHERE) if message.topic in self._parked else (False, None)


def _operation(name: str, kind: str) -> Attributes:
    return {Attribute.MESSAGING_OPERATION_NAME: name, Attribute.MESSAGING_OPERATION_TYPE: kind}


def _name(operation: str, attributes: Attributes) -> str:
    topic = attributes.get(Attribute.MESSAGING_DESTINATION_NAME)
    return operation if topic is None else f"{operation} {topic}"


def _inside(span: object) -> Context:
    if isinstance(span, SpanContext) and span.is_valid:
        return set_span_in_context(NonRecordingSpan(span), NOWHERE)
    return NOWHERE


def _name_failure(error: BaseException) -> str:
    """Return the error name of a failed attempt; a timeout shows up as a cancellation."""
    at = serving()
    if isinstance(error, asyncio.CancelledError) and at is not None and at.worker.asked & Asked.TIME_OUT:
        return _TIMED_OUT
    return error_type(error)


class _TracedTransport:
    """Wraps a client and traces its commits."""

    def __init__(
        self,
        transport: Transport,
        commit: Callable[[Transport, Mapping[TopicPartition, Committed], Membership], Any],
    ) -> None:
        self._transport = transport
        self._commit = commit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def commit(self, offsets: Mapping[TopicPartition, Committed], membership: Membership) -> None:
        """See `Transport.commit`."""
        await self._commit(self._transport, offsets, membership)


class _TracedProducer:
    """Wraps a producer and traces its messages."""

    def __init__(self, producer: Producer, publish: Callable[[Producer, Message], Any]) -> None:
        self._producer = producer
        self._publish = publish

    @property
    def trouble(self) -> str | None:
        """See `Producer.trouble`."""
        return self._producer.trouble

    async def publish(self, message: Message) -> int:
        """See `Producer.publish`."""
        offset: int = await self._publish(self._producer, message)
        return offset

    async def close(self) -> None:
        """See `Producer.close`."""
        await self._producer.close()
