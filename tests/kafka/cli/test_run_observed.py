"""`aioshard run` with tracing and logs: spans and the record of each log line."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.brokers import SharedKafka
from tests.support.subprocesses import CommandProcess

SOURCE = """
import logging, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from aioshard import App, Record
from aioshard.telemetry.tracing import trace as trace_app

provider = TracerProvider()
line = lambda span: span.to_json(indent=None) + "\\n"
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=sys.stdout, formatter=line)))
trace.set_tracer_provider(provider)
app = App({group!r}, bootstrap_servers={bootstrap!r}, auto_offset_reset="earliest")
trace_app(app)

@app.consume({topic!r})
def handle(record: Record) -> None:
    logging.getLogger("shop").info("charged")
"""

Start = Callable[..., Awaitable[CommandProcess]]


@pytest.fixture
async def start(tmp_path: Path, group: str, topic: str) -> AsyncIterator[Start]:
    """Starts `aioshard run` with these options; the process is gone when the test ends."""
    begun: list[CommandProcess] = []

    async def started(bootstrap: str, *arguments: str) -> CommandProcess:
        source = SOURCE.format(group=group, topic=topic, bootstrap=bootstrap)
        (tmp_path / "service.py").write_text(source)
        begun.append(await CommandProcess.start(tmp_path, "run", "service:app", *arguments))
        return begun[-1]

    yield started
    for running in begun:
        await running.kill()


async def test_spans_and_log_lines_of_a_handler_name_the_same_record(
    kafka: SharedKafka, start: Start, group: str, topic: str
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(b"alice", b"v")], partition=0)

    app = await start(kafka.bootstrap, "--until-caught-up", "--log-format", "json")

    assert await app.ends() == 0
    spans = [json.loads(line) for line in app.output.splitlines() if line.startswith("{")]
    (process,) = (span for span in spans if span["name"] == f"process {topic}")
    lines = [json.loads(line) for line in app.errors.splitlines() if line.startswith("{")]
    (charged,) = (line for line in lines if line["logger"] == "shop")
    assert (charged["topic"], charged["partition"], charged["offset"]) == (topic, 0, 0)
    assert (charged["handler"], charged["group"], charged["attempt"]) == ("handle", group, 1)
    assert "0x" + charged["span_id"] == process["context"]["span_id"]
    assert {"running", "rebalanced", "draining", "stopped"} <= {line.get("event") for line in lines}
