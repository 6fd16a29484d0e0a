"""The cost of tracing: CPU per record of an app on the in-memory broker whose handler does nothing.

`python -m benchmarks.tracing` prints a table. Each row is measured in a separate process and is the minimum of several
rounds, because the load of the machine only adds to it.
"""

import asyncio
import subprocess
import sys
import time

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import NoOpTracerProvider
from opentelemetry.trace import TracerProvider as AnyProvider

from aioshard import App, Record
from aioshard.telemetry.tracing import trace
from aioshard.testing import TestClient

RECORDS, ROUNDS = 10_000, 15
HEADERS = (("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"),)
ROWS = ["not traced", "a provider that does nothing", "the SDK, not sampled", "the SDK, sampled"]


class Nowhere(SpanExporter):
    """Drops all spans."""

    def export(self, _: object) -> SpanExportResult:
        """See `SpanExporter`."""
        return SpanExportResult.SUCCESS


def provider(row: str) -> AnyProvider:
    """Return the tracer provider of a row."""
    if row == ROWS[1]:
        return NoOpTracerProvider()
    if row == ROWS[2]:
        return TracerProvider(sampler=ParentBased(ALWAYS_OFF))
    sampled = TracerProvider()
    sampled.add_span_processor(BatchSpanProcessor(Nowhere(), max_queue_size=10 * RECORDS))
    return sampled


async def measure(row: str, headers: tuple[tuple[str, bytes], ...]) -> float:
    """Return the microseconds of CPU per record, from a full topic to the last commit."""
    app = App("tracing")

    @app.consume("orders")
    async def handle(_: Record) -> None: ...

    if row != ROWS[0]:
        trace(app, tracer_provider=provider(row))
    rounds = []
    async with TestClient(app) as client:
        for _ in range(ROUNDS):
            for number in range(RECORDS):
                client.broker.publish("orders", b"{}", key=b"%d" % (number % 1_000), headers=headers)
            began = time.process_time()
            await client.settle(60)
            rounds.append((time.process_time() - began) / RECORDS * 1e6)
    return min(rounds)


def main() -> None:
    """Print the table, or in one of its processes the measurement."""
    if len(sys.argv) > 2:
        print(asyncio.run(measure(sys.argv[1], HEADERS if sys.argv[2] == "headers" else ())))
        return
    print("| | µs per record | with a trace context in its headers |\n| --- | --- | --- |")
    for row in ROWS:
        figures = [
            float(
                subprocess.run([sys.executable, __file__, row, kind], capture_output=True, text=True, check=True).stdout
            )
            for kind in ("bare", "headers")
        ]
        print(f"| {row} | {figures[0]:.1f} | {figures[1]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
