"""A tracer provider whose spans tests can inspect, and the trace context of an outside producer."""

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331


def traceparent(span: int = SPAN_ID) -> tuple[str, bytes]:
    return "traceparent", f"00-{TRACE_ID:032x}-{span:016x}-01".encode()


TRACEPARENT = traceparent()


class Spans:
    """The finished spans."""

    def __init__(self, **options: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False, **options)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def of(self, operation: str) -> list[ReadableSpan]:
        """The finished spans of an operation, in the order of their ends."""
        return [span for span in self._exporter.get_finished_spans() if span.name.split()[0] == operation]

    def one(self, operation: str) -> ReadableSpan:
        (span,) = self.of(operation)
        return span


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else int(span.parent.span_id)
