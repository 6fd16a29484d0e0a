"""Spans of an app: names, attributes, parents and links, for any content of the headers."""

import asyncio
import contextlib
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from opentelemetry import baggage, propagate
from opentelemetry import trace as api
from opentelemetry.context import Context as OtelContext
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import SpanKind, StatusCode

from aioshard import App, Batch, BatchError, Context, DeadLetter, Park, Record, Retry
from aioshard.errors import NotDrainedError, StateError
from aioshard.telemetry import tracing
from aioshard.telemetry.tracing import extract_context, trace
from aioshard.testing import InMemoryBroker, TestClient, run
from tests.engine.live_apps import until
from tests.engine.telemetry.traces import SPAN_ID, TRACE_ID, TRACEPARENT, Spans, parent_of, span_id, traceparent

ONCE = Retry(attempts=1)
COMMON = {
    "messaging.system": "kafka",
    "messaging.client.id": "shop-1",
    "server.address": "kafka.example",
    "server.port": 9092,
}
PROCESS = COMMON | {
    "messaging.operation.name": "process",
    "messaging.operation.type": "process",
    "messaging.consumer.group.name": "billing",
    "messaging.destination.name": "orders",
    "messaging.destination.partition.id": "0",
}
SEND = COMMON | {"messaging.operation.name": "send", "messaging.operation.type": "send"}

Message = dict[str, Any]


class Traced:
    """An app on topics of one partition, traced, and its spans."""

    def __init__(self, *, parent: bool = False, sampler: Sampler | None = None, **settings: Any) -> None:
        self.spans = Spans(**({} if sampler is None else {"sampler": sampler}))
        self.broker = InMemoryBroker(partitions=1)
        self.app = App("billing", bootstrap_servers="kafka.example:9092", client_id="shop-1", **settings)
        trace(self.app, tracer_provider=self.spans.provider, parent=parent)

    def consume(self, *messages: Message, act: Callable[[TestClient], Any] | None = None) -> None:
        async def scenario() -> None:
            async with TestClient(self.app, broker=self.broker) as client:
                for message in messages:
                    given: Message = {"topic": "orders", "value": "{}"} | message
                    await client.publish(**given)
                if act is not None:
                    await act(client)
                await client.settle(60.0)

        run(scenario())


async def nothing(record: Record) -> None:
    pass


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def links(span: ReadableSpan) -> list[int]:
    return [int(link.context.span_id) for link in span.links]


# Attempts ---------------------------------------------------------------------------------


def test_an_attempt_starts_its_own_trace_linked_to_the_producer() -> None:
    traced = Traced()
    traced.app.consume("orders")(nothing)

    traced.consume({"key": "alice", "headers": [TRACEPARENT]})

    span = traced.spans.one("process")
    assert (span.name, span.kind, parent_of(span)) == ("process orders", SpanKind.CONSUMER, None)
    assert attributes(span) == PROCESS | {"messaging.kafka.offset": 0}
    assert [(link.context.trace_id, link.context.span_id) for link in span.links] == [(TRACE_ID, SPAN_ID)]
    assert span.status.status_code is StatusCode.UNSET
    assert span.instrumentation_scope is not None
    assert span.instrumentation_scope.name == "aioshard"
    assert span.instrumentation_scope.schema_url == "https://opentelemetry.io/schemas/1.44.0"


def test_the_span_in_the_headers_is_the_parent_on_request() -> None:
    traced = Traced(parent=True)
    traced.app.consume("orders")(nothing)

    traced.consume({"headers": [TRACEPARENT]}, {})

    with_context, without = traced.spans.of("process")
    assert (parent_of(with_context), links(with_context)) == (SPAN_ID, [SPAN_ID])
    assert with_context.context is not None
    assert with_context.context.trace_id == TRACE_ID
    assert (parent_of(without), links(without)) == (None, [])


def test_a_span_active_at_startup_is_not_a_parent() -> None:
    traced = Traced()
    traced.app.consume("orders")(nothing)

    with traced.spans.provider.get_tracer("test").start_as_current_span("startup"):
        traced.consume({})

    assert parent_of(traced.spans.one("process")) is None


def test_samplers_see_the_attributes_when_a_span_starts() -> None:
    seen: list[dict[str, Any]] = []

    class Noting(Sampler):
        def should_sample(self, *arguments: Any, **options: Any) -> SamplingResult:
            seen.append(dict(options.get("attributes") or arguments[4]))
            return SamplingResult(Decision.RECORD_AND_SAMPLE)

        def get_description(self) -> str:
            return "notes"

    traced = Traced(sampler=Noting())
    traced.app.consume("orders")(nothing)

    traced.consume({})

    assert PROCESS | {"messaging.kafka.offset": 0} in seen


def test_keys_are_in_spans_only_if_keys_may_be_shown() -> None:
    hidden, shown = Traced(), Traced(show_keys=True)
    for traced in (hidden, shown):
        traced.app.consume("orders")(nothing)
        traced.consume({"key": "alice"}, {"key": b"\xff"}, {"key": None})

    assert all("messaging.kafka.message.key" not in attributes(span) for span in hidden.spans.of("process"))
    assert [attributes(span).get("messaging.kafka.message.key") for span in shown.spans.of("process")] == [
        "alice",
        None,  # it has no text
        None,
    ]


def test_a_tombstone_is_marked_as_a_tombstone() -> None:
    traced = Traced()
    traced.app.consume("orders")(nothing)

    traced.consume({"value": None, "key": "alice"})

    assert attributes(traced.spans.one("process"))["messaging.kafka.message.tombstone"] is True


@pytest.mark.parametrize("plain", [False, True], ids=["async def", "def"])
def test_spans_of_a_handler_are_children_of_its_attempt(plain: bool) -> None:
    traced = Traced()
    tracer = traced.spans.provider.get_tracer("user")

    def work(_record: Record) -> None:
        with tracer.start_as_current_span("query"):
            pass

    async def await_work(record: Record) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(work, record))

    traced.app.consume("orders")(work if plain else await_work)
    traced.consume({}, {})

    inside = {parent_of(span) for span in traced.spans.of("query")}
    assert inside == {span_id(span) for span in traced.spans.of("process")}
    assert len(inside) == 2


def test_code_between_two_records_is_in_no_span() -> None:
    traced = Traced()
    seen: list[api.Span] = []

    def shard(record: Record) -> bytes | None:
        seen.append(api.get_current_span())
        return record.key

    @traced.app.consume("orders", shard_by=shard)
    async def handle(_record: Record) -> None:
        seen.append(api.get_current_span())

    traced.consume({"key": "a"}, {"key": "b"})

    assert [span.get_span_context().is_valid for span in seen] == [False, False, True, True]


def test_an_attempt_has_the_baggage_of_its_record() -> None:
    traced = Traced()
    seen: list[object] = []

    @traced.app.consume("orders")
    async def handle(_record: Record) -> None:
        seen.append(baggage.get_baggage("tenant"))

    alone, beside = [("baggage", "tenant=acme")], [TRACEPARENT, ("baggage", "tenant=acme")]
    traced.consume({"headers": alone, "key": "a"}, {"key": "a"}, {"headers": beside, "key": "a"})

    assert seen == ["acme", None, "acme"]


def test_existing_baggage_of_a_message_is_left_unchanged() -> None:
    traced = Traced()

    @traced.app.consume("orders")
    async def handle(_record: Record, context: Context) -> None:
        await context.publish("invoices", "{}", headers=[("baggage", "tenant=other")])

    traced.consume({"headers": [("baggage", "tenant=acme")]})

    (invoice,) = traced.broker.records("invoices")
    assert [name for name, _ in invoice.headers] == ["baggage", "traceparent"]
    assert invoice.headers[0] == ("baggage", b"tenant=other")


def test_every_attempt_has_a_span_and_failed_ones_have_the_error() -> None:
    traced = Traced()

    @traced.app.consume("orders", retry=Retry(attempts=2, initial=0.01))
    async def handle(_record: Record, context: Context) -> None:
        if context.attempt == 1:
            raise LookupError("no such customer")

    traced.consume({"headers": [TRACEPARENT]})

    first, second = traced.spans.of("process")
    assert attributes(first) == PROCESS | {"messaging.kafka.offset": 0, "error.type": "LookupError"}
    assert (first.status.status_code, first.status.description) == (StatusCode.ERROR, "no such customer")
    assert [event.name for event in first.events] == ["exception"]
    assert attributes(second) == PROCESS | {"messaging.kafka.offset": 0, "aioshard.attempt": 2}
    assert second.status.status_code is StatusCode.UNSET
    assert links(first) == links(second) == [SPAN_ID]


def test_an_undecodable_payload_is_a_failed_attempt_with_its_error_class() -> None:
    traced = Traced()

    @traced.app.consume("orders", on_failure="skip")
    async def handle(payload: dict[str, int]) -> None: ...

    traced.consume({"value": "not JSON"})

    assert attributes(traced.spans.one("process"))["error.type"] == "aioshard.errors.DecodeError"


def test_an_exception_whose_str_raises_fails_like_any_other() -> None:
    class Mute(Exception):  # noqa: N818 - a name for the attribute
        def __str__(self) -> str:
            raise TypeError("none of your business")

    traced = Traced()

    @traced.app.consume("orders", on_failure="skip", retry=ONCE)
    async def handle(_record: Record) -> None:
        raise Mute

    traced.consume({})

    span = traced.spans.one("process")
    assert attributes(span)["error.type"].endswith("Mute")
    assert (span.status.description or "").startswith("its message cannot be shown")


def test_an_exception_message_that_cannot_be_encoded_is_recorded_with_escapes() -> None:
    """An exporter in Protobuf would drop it together with all other spans of its request."""
    traced = Traced()

    @traced.app.consume("orders", on_failure="skip", retry=ONCE)
    async def handle(_record: Record) -> None:
        raise OSError("cannot open caf\udce9.txt")

    traced.consume({})

    span = traced.spans.one("process")
    (event,) = span.events
    recorded = event.attributes or {}
    assert span.status.description == recorded["exception.message"] == r"cannot open caf\udce9.txt"
    assert recorded["exception.type"] == "OSError"
    assert r"caf\udce9.txt" in str(recorded["exception.stacktrace"]).encode().decode()


def test_a_timeout_is_recorded_as_a_timeout() -> None:
    traced = Traced()

    @traced.app.consume("orders", timeout=1.0, retry=ONCE, on_failure="skip")
    async def handle(_record: Record) -> None:
        await asyncio.sleep(60)

    traced.consume({})

    span = traced.spans.one("process")
    assert attributes(span)["error.type"] == "aioshard.errors.AttemptTimeoutError"
    assert span.status.status_code is StatusCode.ERROR


def test_a_run_cancelled_by_a_rebalance_is_not_followed_by_a_retry() -> None:
    traced = Traced(drain_timeout=1.0)
    began: list[Record] = []

    @traced.app.consume("orders")
    async def handle(record: Record) -> None:
        began.append(record)
        if len(began) == 1:
            await asyncio.sleep(600)

    async def act(client: TestClient) -> None:
        await until(lambda: began)
        await client.revoke("orders", 0)
        await client.assign("orders", 0)

    traced.consume({}, act=act)

    cancelled, again = traced.spans.of("process")
    assert attributes(cancelled)["error.type"] == "asyncio.exceptions.CancelledError"
    assert (cancelled.status.description, cancelled.events) == ("cancelled", ())
    assert "aioshard.attempt" not in attributes(again)


# Batches ----------------------------------------------------------------------------------


def test_a_batch_is_one_span_with_a_link_to_each_record() -> None:
    traced = Traced(parent=True)

    @traced.app.consume("orders", batch=Batch(3, linger=1.0))
    async def handle(records: list[Record]) -> None: ...

    traced.consume(*({"headers": [traceparent(number)] if number != 2 else []} for number in (1, 2, 3)))

    span = traced.spans.one("process")
    assert (span.name, span.kind, parent_of(span)) == ("process orders", SpanKind.CONSUMER, None)
    assert attributes(span) == PROCESS | {"messaging.batch.message_count": 3}
    assert links(span) == [1, 3]
    assert [dict(link.attributes or {})["messaging.kafka.offset"] for link in span.links] == [0, 2]


def test_a_batch_span_has_its_size_and_only_a_common_topic() -> None:
    traced = Traced()

    @traced.app.consume("orders", "refunds", batch=Batch(2, linger=1.0))
    async def handle(records: list[Record]) -> None: ...

    traced.consume({}, {"topic": "refunds"}, {"topic": "refunds"})

    both, alone = traced.spans.of("process")
    assert both.name == "process"
    assert "messaging.destination.name" not in attributes(both)
    assert "messaging.destination.partition.id" not in attributes(both)
    assert attributes(alone)["messaging.batch.message_count"] == 1
    assert attributes(alone)["messaging.destination.name"] == "refunds"


def test_a_dead_letter_of_a_batch_is_a_child_of_the_failed_attempt() -> None:
    traced = Traced()

    @traced.app.consume("orders", batch=Batch(2, linger=1.0), retry=ONCE, on_failure=DeadLetter("orders.dlt"))
    async def handle(records: list[Record]) -> None:
        raise BatchError({records[1]: ValueError("no")})

    traced.consume({}, {"headers": [TRACEPARENT]})

    process, send = traced.spans.one("process"), traced.spans.one("send")
    assert attributes(process)["error.type"] == "aioshard.errors.BatchError"
    assert (send.name, parent_of(send), links(send)) == ("send orders.dlt", span_id(process), [SPAN_ID])


# Publishing -------------------------------------------------------------------------------


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
def test_a_published_message_continues_the_trace_of_its_handler(guarantee: str) -> None:
    traced = Traced(processing_guarantee=guarantee)

    @traced.app.consume("orders")
    async def handle(_record: Record, context: Context) -> None:
        await context.publish("invoices", "{}", key="alice", headers=[("tenant", "acme")], partition=0)

    traced.consume({"headers": [TRACEPARENT]})

    process, send = traced.spans.one("process"), traced.spans.one("send")
    assert (send.name, send.kind, parent_of(send)) == ("send invoices", SpanKind.PRODUCER, span_id(process))
    assert attributes(send) == SEND | {
        "messaging.destination.name": "invoices",
        "messaging.destination.partition.id": "0",
    } | ({"messaging.kafka.offset": 0} if guarantee == "at_least_once" else {})
    (invoice,) = traced.broker.records("invoices")
    tenant, context = invoice.headers
    assert tenant == ("tenant", b"acme")
    assert context[0] == "traceparent"
    assert context[1] is not None
    assert f"{span_id(send):016x}".encode() in context[1]


def test_messages_published_in_a_row_are_sibling_spans() -> None:
    traced = Traced()
    around: list[int] = []

    @traced.app.consume("orders")
    async def handle(_record: Record, context: Context) -> None:
        for topic in ("invoices", "receipts"):
            await context.publish(topic, "{}")
            around.append(api.get_current_span().get_span_context().span_id)

    traced.consume({"topic": "orders", "value": "{}"})

    attempt = span_id(traced.spans.one("process"))
    assert [parent_of(span) for span in traced.spans.of("send")] == [attempt, attempt]
    assert around == [attempt, attempt]


def test_app_publish_is_a_child_of_the_active_span() -> None:
    traced = Traced()
    traced.app.consume("orders")(nothing)

    async def act(_client: TestClient) -> None:
        with traced.spans.provider.get_tracer("web").start_as_current_span("request"):
            await traced.app.publish("invoices", None, key="alice")

    traced.consume(act=act)

    request, send = traced.spans.one("request"), traced.spans.one("send")
    assert parent_of(send) == span_id(request)
    assert attributes(send)["messaging.kafka.message.tombstone"] is True


def test_an_existing_trace_context_of_a_message_is_kept_and_linked() -> None:
    traced = Traced()
    traced.app.consume("orders")(nothing)

    async def act(_client: TestClient) -> None:
        await traced.app.publish("invoices", "{}", headers=[TRACEPARENT])

    traced.consume(act=act)

    assert traced.broker.records("invoices")[0].headers == (TRACEPARENT,)
    assert links(traced.spans.one("send")) == [SPAN_ID]


def test_a_dead_letter_keeps_the_trace_context_of_its_record() -> None:
    traced = Traced()

    @traced.app.consume("orders", retry=Retry(attempts=2, initial=0.01), on_failure=DeadLetter("orders.dlt"))
    async def handle(_record: Record) -> None:
        raise ValueError("no")

    traced.consume({"headers": [TRACEPARENT]}, {})

    with_context, without = traced.broker.records("orders.dlt")
    assert [header for header in with_context.headers if header[0] == "traceparent"] == [TRACEPARENT]
    assert [header for header in without.headers if header[0] == "traceparent"] == []
    last = {attributes(span)["messaging.kafka.offset"]: span for span in traced.spans.of("process")}
    sent = traced.spans.of("send")
    assert {parent_of(span) for span in sent} == {span_id(span) for span in last.values()}
    assert sorted(map(links, sent)) == [[], [SPAN_ID]]


def test_a_parked_record_keeps_its_headers_and_is_traced_when_it_runs_again() -> None:
    traced = Traced()
    tries: list[tuple[tuple[str, bytes | None], ...]] = []

    @traced.app.consume("orders", retry=ONCE, on_failure=Park("orders.parked", delay=1.0))
    async def handle(record: Record) -> None:
        tries.append(record.headers)
        if len(tries) == 1:
            raise ValueError("no")

    async def act(_client: TestClient) -> None:
        await until(lambda: len(tries) == 2 and len(traced.spans.of("send")) == 2)

    traced.consume({"key": "alice", "headers": [TRACEPARENT]}, act=act)

    assert tries == [(TRACEPARENT,), (TRACEPARENT,)]
    failed, again = traced.spans.of("process")
    assert attributes(again) == PROCESS | {"messaging.kafka.offset": 0}
    parked, taken_out = traced.spans.of("send")
    assert (parked.name, parent_of(parked), links(parked)) == ("send orders.parked", span_id(failed), [SPAN_ID])
    assert attributes(taken_out)["messaging.kafka.message.tombstone"] is True
    assert all(name != "traceparent" for name, _ in traced.broker.records("orders.parked")[-1].headers)


def test_messages_to_a_park_topic_get_no_trace_context() -> None:
    """Its readers compare what they find there; and the tasks that write answers run in no span."""
    traced = Traced()
    traced.app.consume("orders", on_failure=Park("orders.parked"))(nothing)

    async def act(_: TestClient) -> None:
        with traced.spans.provider.get_tracer("test").start_as_current_span("outside"):
            await traced.app.publish("orders.parked", None, key="orders/0/7@1", partition=0)

    traced.consume(act=act)

    assert traced.broker.records("orders.parked")[0].headers == ()
    assert parent_of(traced.spans.one("send")) is None


def test_a_failed_publish_has_the_error_in_its_span() -> None:
    traced = Traced()
    traced.app.consume("orders")(nothing)

    async def act(_client: TestClient) -> None:
        with pytest.raises(Exception, match=r"partition"):
            await traced.app.publish("orders", "{}", partition=7)

    traced.consume({}, act=act)

    span = traced.spans.one("send")
    assert attributes(span)["error.type"] == "aioshard.errors.UnknownPartitionError"
    assert span.status.status_code is StatusCode.ERROR


# Headers that fail nothing ---------------------------------------------------------------


class Raising(TextMapPropagator):
    def extract(self, *_: Any, **__: Any) -> OtelContext:
        raise RuntimeError("broken propagator")

    def inject(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("broken propagator")

    @property
    def fields(self) -> set[str]:
        return {"traceparent"}


HOSTILE: dict[str, Sequence[tuple[str, bytes | None]]] = {
    "null": [("traceparent", None)],
    "empty": [("traceparent", b"")],
    "not text": [("traceparent", b"\xff\xfe\x00")],
    "not one": [("traceparent", b"hello")],
    "zeros": [("traceparent", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01")],
    "huge": [("traceparent", b"0" * 1_000_000), ("tracestate", b"a=b," * 500_000), ("baggage", b"a=b," * 500_000)],
    "baggage": [("baggage", b"%zz=%00,=,;;;===,\x00\x01")],
    "state": [("traceparent", TRACEPARENT[1]), ("tracestate", b"=,=,\xff")],
}


@pytest.mark.parametrize("headers", HOSTILE.values(), ids=HOSTILE)
def test_a_record_with_odd_trace_headers_is_processed(headers: Sequence[tuple[str, bytes | None]]) -> None:
    traced = Traced(parent=True)
    seen: list[Record] = []

    @traced.app.consume("orders")
    async def handle(record: Record) -> None:
        seen.append(record)

    traced.consume({"headers": headers})

    assert seen[0].headers == tuple(headers)
    span = traced.spans.one("process")
    assert span.status.status_code is StatusCode.UNSET
    assert links(span) in ([], [SPAN_ID])


def test_overlong_and_binary_headers_never_reach_a_propagator() -> None:
    seen: list[list[str] | None] = []

    class Looking(Raising):
        def extract(self, carrier: Any, context: OtelContext | None = None, getter: Any = None) -> OtelContext:
            seen.extend(getter.get(carrier, name) for name in ("long", "bytes", "null", "missing", "fits"))
            return OtelContext() if context is None else context

    before = propagate.get_global_textmap()
    propagate.set_global_textmap(Looking())
    try:
        extract_context([("long", b"x" * 8193), ("bytes", b"\xff"), ("null", None), ("fits", b"x" * 8192)])
    finally:
        propagate.set_global_textmap(before)

    assert seen == [None, None, None, None, ["x" * 8192]]


def test_the_last_header_with_a_name_wins() -> None:
    traced = Traced()
    traced.app.consume("orders")(nothing)

    traced.consume({"headers": [traceparent(1), traceparent(2)]})

    assert links(traced.spans.one("process")) == [2]


@pytest.fixture
def raising() -> Iterator[None]:
    before = propagate.get_global_textmap()
    propagate.set_global_textmap(Raising())
    yield
    propagate.set_global_textmap(before)


@pytest.mark.usefixtures("raising")
def test_a_propagator_that_raises_breaks_nothing_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    tracing._log_once.cache_clear()
    traced = Traced()
    seen: list[Record] = []

    @traced.app.consume("orders")
    async def handle(record: Record, context: Context) -> None:
        await context.publish("invoices", "{}")
        seen.append(record)

    traced.consume({"headers": [TRACEPARENT]}, {"headers": [TRACEPARENT]})

    assert len(seen) == len(traced.broker.records("invoices")) == 2
    logged = [line.message for line in caplog.records if line.name == "aioshard.telemetry.tracing"]
    assert len(logged) == len(set(logged)) == 2, "reading headers, and adding them"


def test_a_sampler_that_raises_breaks_nothing_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Sampler):
        def should_sample(self, *_: Any, **__: Any) -> SamplingResult:
            raise RuntimeError("broken sampler")

        def get_description(self) -> str:
            return "broken"

    tracing._log_once.cache_clear()
    traced = Traced(sampler=Broken())
    seen: list[Record] = []

    @traced.app.consume("orders")
    async def handle(record: Record) -> None:
        seen.append(record)

    traced.consume({}, {})

    assert len(seen) == 2
    assert len([line for line in caplog.records if line.name == "aioshard.telemetry.tracing"]) == 1


def test_a_span_processor_that_raises_breaks_nothing() -> None:
    class Full(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            raise BufferError(span.name)

    tracing._log_once.cache_clear()
    traced = Traced()
    traced.spans.provider.add_span_processor(Full())
    processed: list[Record] = []

    @traced.app.consume("orders", retry=ONCE)
    async def handle(record: Record) -> None:
        processed.append(record)

    traced.consume({}, {})

    assert [record.offset for record in processed] == [0, 1]
    assert traced.app.statistics().handlers[0].halted == 0


def test_unsampled_records_are_processed_and_published_as_usual() -> None:
    traced = Traced(sampler=ParentBased(ALWAYS_OFF), parent=True)

    @traced.app.consume("orders", retry=Retry(attempts=2, initial=0.01))
    async def handle(_record: Record, context: Context) -> None:
        await context.publish("invoices", "{}")
        if context.attempt == 1:
            raise ValueError("no")

    traced.consume({}, {"headers": [TRACEPARENT]})

    assert len(traced.broker.records("invoices")) == 4
    sampled = traced.spans.of("process")
    assert {parent_of(span) for span in sampled} == {SPAN_ID}  # the producer's decision, where it is the parent
    assert len(sampled) == 2


# Turning it on ---------------------------------------------------------------------------


def test_an_untraced_app_has_no_tracing_overhead() -> None:
    app = App("billing")
    app.consume("orders")(nothing)

    async def scenario() -> None:
        async with TestClient(app):
            (handler,) = app.running_engine().handlers
            assert handler.spec.call is nothing
            assert type(app.running_engine().producer).__module__ == "aioshard.kafka.memory.producer"

    run(scenario())


def test_without_opentelemetry_the_extra_is_named_and_the_rest_works() -> None:
    script = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import aioshard, aioshard.cli.main, aioshard.telemetry.logs\n"
        "from aioshard.errors import MissingExtraError\n"
        "try:\n    import aioshard.telemetry.tracing\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install 'aioshard[otel]'" in done.stdout


def test_a_running_app_cannot_be_instrumented() -> None:
    traced = Traced()
    traced.app.consume("orders")(nothing)

    async def act(_client: TestClient) -> None:
        with pytest.raises(StateError, match="came too late"):
            trace(traced.app)

    traced.consume({}, act=act)


def test_instrumenting_twice_traces_once() -> None:
    traced = Traced()
    trace(traced.app, tracer_provider=traced.spans.provider)
    traced.app.consume("orders")(nothing)

    traced.consume({})

    assert len(traced.spans.of("process")) == 1


def test_a_backfill_is_not_traced() -> None:
    traced = Traced(auto_offset_reset="earliest")
    traced.app.consume("orders")(nothing)

    async def scenario() -> None:
        from aioshard.testing import InMemoryTransport  # noqa: PLC0415

        traced.broker.publish("orders", b"{}")
        async with traced.app.started(lambda: InMemoryTransport(traced.broker, "billing"), replay=True):
            await traced.broker.until(lambda: traced.broker.committed("billing", "orders", 0) == 1)

    run(scenario())
    assert traced.spans.of("process") == []


def test_a_run_closed_in_another_context_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    traced = Traced(shutdown_timeout=0.5, drain_timeout=0.2)
    left: list[object] = []

    @traced.app.consume("orders")
    async def handle(record: Record) -> None:
        left.append(record)
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(600)

    async def scenario() -> None:
        async with TestClient(traced.app, broker=traced.broker) as client:
            await client.publish("orders", "{}")
            await until(lambda: left)
            (handler,) = traced.app.running_engine().handlers
            (left[0],) = (worker.running for worker in handler.workers if worker.running is not None)

    with pytest.raises(NotDrainedError):
        run(scenario())
    left.clear()
    gc.collect()

    assert [line.message for line in caplog.records if line.name.startswith("opentelemetry")] == []
