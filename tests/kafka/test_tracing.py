"""Spans of an app on a real broker: from a traced producer through a failure to its dead letter."""

import asyncio

from aiokafka import AIOKafkaProducer
from opentelemetry import propagate
from opentelemetry.trace import SpanKind

from aioshard import App, Context, DeadLetter, Record, Retry
from aioshard.telemetry.tracing import trace
from tests.engine.telemetry.traces import Spans, parent_of, span_id
from tests.support.brokers import SharedKafka


async def test_a_record_is_followed_from_its_producer_to_its_dead_letter(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    dead_letters, invoices = f"{topic}.dlt", f"{topic}.invoices"
    for name in (topic, dead_letters, invoices):
        await kafka.create_topic(name)
    spans = Spans()
    app = App(group, bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest", commit_interval=0.1)
    trace(app, tracer_provider=spans.provider)
    handled = asyncio.Event()

    @app.consume(topic, retry=Retry(attempts=1), on_failure=DeadLetter(dead_letters))
    async def on_order(record: Record, context: Context) -> None:
        if record.value == b"bad":
            raise LookupError("no such customer")
        await context.publish(invoices, record.value, key=record.key)

    @app.consume(dead_letters)
    async def on_letter(_: Record) -> None:
        handled.set()

    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap)
    await producer.start()
    try:
        for value in (b"good", b"bad"):
            with spans.provider.get_tracer("shop").start_as_current_span("place", kind=SpanKind.PRODUCER):
                carrier: dict[str, str] = {}
                propagate.inject(carrier)
                headers = [(name, content.encode()) for name, content in carrier.items()]
                await producer.send_and_wait(topic, value, key=b"alice", headers=headers)
    finally:
        await producer.stop()
    async with app:
        async with asyncio.timeout(30):
            await handled.wait()

    placed = {span_id(span) for span in spans.of("place")}
    orders = [span for span in spans.of("process") if span.name == f"process {topic}"]
    (dead_letter,) = (span for span in spans.of("process") if span.name == f"process {dead_letters}")
    assert {link.context.span_id for span in orders for link in span.links} == placed
    good, bad = orders
    assert (good.attributes or {})["messaging.kafka.offset"] == 0
    assert (bad.attributes or {})["error.type"] == "LookupError"

    sent = {span.name: span for span in spans.of("send")}
    assert parent_of(sent[f"send {invoices}"]) == span_id(good)
    assert parent_of(sent[f"send {dead_letters}"]) == span_id(bad)
    # A dead letter leads its reader to the producer of the record.
    (origin,) = bad.links
    assert [link.context.span_id for link in dead_letter.links] == [origin.context.span_id]
    assert [link.context.span_id for link in sent[f"send {dead_letters}"].links] == [origin.context.span_id]
