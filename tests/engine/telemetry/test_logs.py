"""Log output of the command line."""

import asyncio
import io
import json
import logging
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aioshard import App, Batch, BatchContext, Record, Retry
from aioshard.engine.current_record import current_record
from aioshard.records import TopicPartition
from aioshard.telemetry.logs import REPEAT_INTERVAL, LogFormat, _NoRepeats, configure
from aioshard.telemetry.tracing import trace
from aioshard.testing import InMemoryBroker, TestClient, run
from tests.engine.telemetry.traces import Spans, span_id

QUIET = ("aiokafka", "kafka", "uvicorn", "asyncio", "opentelemetry", "httpx", "watchfiles")
Configure = Callable[[str, LogFormat], io.StringIO]


@pytest.fixture
def configured() -> Iterator[Configure]:
    """`configure` on a separate stream, undone afterwards."""
    root = logging.getLogger()
    level = root.level
    quiet = {name: logging.getLogger(name).level for name in QUIET}
    handlers: list[logging.Handler] = []

    def start(name: str, style: LogFormat) -> io.StringIO:
        stream = io.StringIO()
        handlers.append(configure(name, style, stream))
        return stream

    yield start
    for handler in handlers:
        root.removeHandler(handler)
    root.setLevel(level)
    for name, number in quiet.items():
        logging.getLogger(name).setLevel(number)
    logging.captureWarnings(capture=False)


def test_text_is_one_readable_line_with_the_extra_fields(configured: Configure) -> None:
    stream = configured("info", "text")
    logging.getLogger("aioshard.engine").warning(
        "partition %s waits", "orders/3", extra={"topic": "orders", "offset": 7}
    )
    line = stream.getvalue()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} WARNING aioshard\.engine: partition orders/3 waits "
        r"\[topic=orders offset=7\]\n",
        line,
    )


@pytest.mark.parametrize("style", ["text", "json"])
def test_text_that_cannot_be_encoded_is_escaped(configured: Configure, style: LogFormat) -> None:
    stream = configured("info", style)
    error = OSError("cannot open caf\udce9.txt")
    logging.getLogger("aioshard.engine").error("%s", error, exc_info=error, extra={"file": "caf\udce9.txt"})
    assert stream.getvalue().encode().count(rb"caf\udce9.txt") == 3, "in the sentence, the field and the traceback"


def test_json_is_one_object_per_line_whatever_is_logged(configured: Configure) -> None:
    stream = configured("info", "json")
    logger = logging.getLogger("aioshard.engine")
    logger.info("two\nlines", extra={"topic": "orders", "what": object()})
    try:
        raise ValueError("wrong")  # noqa: TRY301
    except ValueError:
        logger.exception("it broke")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["message"] == "two\nlines"
    assert (first["level"], first["logger"], first["topic"]) == ("INFO", "aioshard.engine", "orders")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert "ValueError: wrong" in second["exception"]


def test_an_extra_field_cannot_replace_the_message(configured: Configure) -> None:
    stream = configured("info", "json")
    logging.getLogger("aioshard").info("sentence", extra={"level": "mine"})
    assert json.loads(stream.getvalue())["level"] == "INFO"


@pytest.mark.parametrize(
    ("level", "heard"),
    [
        ("warning", {"ours warning", "client warning"}),
        ("info", {"ours info", "ours warning", "client warning"}),
        ("debug", {"ours debug", "ours info", "ours warning", "client info", "client warning"}),
        ("error", set()),
    ],
)
def test_the_client_logs_less_than_aioshard(configured: Configure, level: str, heard: set[str]) -> None:
    stream = configured(level, "json")
    ours, client = logging.getLogger("aioshard.engine"), logging.getLogger("aiokafka.consumer")
    ours.debug("ours debug")
    ours.info("ours info")
    ours.warning("ours warning")
    client.info("client info")
    client.warning("client warning")
    assert {json.loads(line)["message"] for line in stream.getvalue().splitlines()} == heard


@pytest.mark.parametrize("name", QUIET)
def test_libraries_that_log_each_record_are_limited_to_warnings(configured: Configure, name: str) -> None:
    stream = configured("info", "text")
    logging.getLogger(name).info("one more")
    logging.getLogger(name).warning("one too many")
    assert [line.rpartition(": ")[2] for line in stream.getvalue().splitlines()] == ["one too many"]


def test_repeated_client_messages_are_left_out(configured: Configure) -> None:
    """Fifty lines a second for the same outage would hide everything else, and fill a disk."""
    stream = configured("info", "text")
    client = logging.getLogger("aiokafka.consumer.fetcher")

    def say(text: str, at: float) -> None:
        record = client.makeRecord(client.name, logging.ERROR, "", 0, "cannot reach %s", (text,), None)
        record.created = at
        client.handle(record)

    for number in range(100):
        say("broker 1", at=1_000.0 + number / 100)
    say("broker 2", at=1_001.0)
    say("broker 1", at=1_000.0 + REPEAT_INTERVAL)
    said = [line.partition(": ")[2] for line in stream.getvalue().splitlines()]
    assert said == ["cannot reach broker 1", "cannot reach broker 2", "cannot reach broker 1"]


def test_only_a_few_messages_of_a_library_are_remembered(
    configured: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may name an offset or a port each time."""
    monkeypatch.setattr("aioshard.telemetry.logs._REMEMBERED", 10)
    stream = configured("info", "text")
    (repeats,) = [
        log_filter
        for handler in logging.getLogger().handlers
        for log_filter in handler.filters
        if isinstance(log_filter, _NoRepeats)
    ]
    for number in range(95):
        logging.getLogger("aiokafka.conn").warning("no answer at port %d", number)
        assert len(repeats._shown) <= 10
    assert len(stream.getvalue().splitlines()) == 95


def test_messages_of_aioshard_are_never_suppressed(configured: Configure) -> None:
    stream = configured("info", "text")
    for _ in range(3):
        logging.getLogger("aioshard.engine").warning("partition orders/3 waits")
    assert len(stream.getvalue().splitlines()) == 3


def test_warnings_become_log_records(configured: Configure) -> None:
    stream = configured("info", "json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)
        warnings.warn("old ways", stacklevel=1)
    assert "old ways" in json.loads(stream.getvalue())["message"]


def test_importing_the_module_configures_nothing() -> None:
    script = "import logging, aioshard.telemetry.logs as _; print(logging.getLogger().handlers)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Which record a line is about -------------------------------------------------------------


def logged(stream: io.StringIO, message: str) -> list[dict[str, Any]]:
    """The lines with this message, without what every line has."""
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    standard = ("time", "level", "logger", "message")
    return [{k: v for k, v in line.items() if k not in standard} for line in lines if line["message"] == message]


def consume(app: App, *values: str, until_settled: float = 60.0) -> None:
    async def scenario() -> None:
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            for value in values:
                await client.publish("orders", value, key="alice")
            await client.settle(until_settled)

    run(scenario())


USERS = logging.getLogger("shop")


@pytest.mark.parametrize("kind", ["async", "plain", "task group", "gather", "nested"])
def test_a_handlers_log_line_names_its_record(configured: Configure, kind: str) -> None:
    """Also in tasks and threads that the handler awaits, while many runs are in flight."""
    stream = configured("info", "json")
    app = App("billing")

    def say(record: Record) -> None:
        USERS.info("at %d", record.offset)

    async def say_soon(record: Record) -> None:
        await asyncio.sleep(0.01 * (3 - record.offset % 3))
        say(record)

    async def handle(record: Record) -> None:
        match kind:
            case "async":
                await say_soon(record)
            case "task group":
                async with asyncio.TaskGroup() as group:
                    group.create_task(say_soon(record))
            case "gather":
                await asyncio.gather(say_soon(record), asyncio.sleep(0.02))
            case "nested":
                await asyncio.wait_for(asyncio.gather(asyncio.create_task(say_soon(record))), 5)

    app.consume("orders", shard_by="record")(say if kind == "plain" else handle)
    consume(app, *"123456")

    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    said = {line["message"]: line for line in lines if line["logger"] == "shop"}
    assert len(said) == 6
    for offset in range(6):
        line = said[f"at {offset}"]
        key = line.pop("key")
        assert re.fullmatch("#[0-9a-f]{8}", key)
        assert line == line | {
            "topic": "orders",
            "partition": 0,
            "offset": offset,
            "attempt": 1,
            "handler": "say" if kind == "plain" else "handle",
            "group": "billing",
        }


def test_a_handlers_text_line_names_its_record_too(configured: Configure) -> None:
    stream = configured("info", "text")
    app = App("billing")

    @app.consume("orders")
    async def handle(_: Record) -> None:
        USERS.info("paid")

    consume(app, "1")

    (line,) = (line for line in stream.getvalue().splitlines() if "paid" in line)
    assert re.search(
        r"INFO shop: paid \[topic=orders partition=0 offset=0 key=#\w{8} attempt=1 handler=handle group=billing\]$",
        line,
    )


def test_extra_fields_do_not_repeat_the_message(configured: Configure) -> None:
    stream = configured("info", "text")
    logging.getLogger("aioshard.engine").warning(
        "orders/3 is paused", extra={"event": "paused", "topic": "orders", "partition": 3, "worker": "1"}
    )

    assert stream.getvalue().endswith("orders/3 is paused [worker=1]\n")


def test_a_log_line_has_the_attempt_and_the_batch_size(configured: Configure) -> None:
    stream = configured("info", "json")
    app = App("billing")

    @app.consume("orders", batch=Batch(2, linger=1.0), retry=Retry(attempts=2, initial=0.01))
    async def handle(_: list[Record], context: BatchContext) -> None:
        USERS.info("paid")
        if context.attempt == 1:
            raise ValueError("no")

    consume(app, "1", "2")

    assert [(line["offset"], line["attempt"], line["records"]) for line in logged(stream, "paid")] == [
        (0, 1, 2),
        (0, 2, 1),
        (1, 2, 1),
    ]


def test_a_task_left_behind_by_a_handler_never_logs_another_record(configured: Configure) -> None:
    stream = configured("info", "json")
    app = App("billing")
    left: list[asyncio.Task[None]] = []

    async def later(offset: int) -> None:
        await asyncio.sleep(0)
        USERS.info("left behind by %d", offset)
        await asyncio.sleep(0.01)
        USERS.info("left behind by %d", offset)

    @app.consume("orders", concurrency=1)
    async def handle(record: Record) -> None:
        left.append(asyncio.create_task(later(record.offset)))
        if record.offset % 2:
            await asyncio.sleep(0.005)

    consume(app, *"123456")

    for offset in range(6):
        lines = logged(stream, f"left behind by {offset}")
        assert len(lines) == 2
        assert all(line.get("offset", offset) == offset for line in lines)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks are new in Python 3.12")
def test_an_eager_task_logs_the_record_of_its_handler(configured: Configure) -> None:
    """It begins inside the handler's own call, before the handler can wait for it."""
    stream = configured("info", "json")
    app = App("billing")

    async def log_twice(offset: int) -> None:
        USERS.info("eagerly by %d", offset)
        await asyncio.sleep(0.01)
        USERS.info("eagerly by %d", offset)

    @app.consume("orders", shard_by="record")
    async def handle(record: Record) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.Task(log_twice(record.offset), loop=loop, eager_start=True)  # type: ignore[call-arg]

    consume(app, *"123")

    for offset in range(3):
        assert [line.get("offset") for line in logged(stream, f"eagerly by {offset}")] == [offset, offset]


def test_a_task_that_outlives_its_run_still_logs_its_own_record(configured: Configure) -> None:
    stream = configured("info", "json")
    app = App("billing")
    left: list[asyncio.Task[None]] = []

    async def task(offset: int) -> None:
        USERS.info("by %d", offset)
        await asyncio.sleep(0.05)
        USERS.info("by %d", offset)

    @app.consume("orders", concurrency=1)
    async def handle(record: Record) -> None:
        left.append(asyncio.create_task(task(record.offset)))
        await asyncio.wait(left[-1:], timeout=0.01)

    async def scenario() -> None:
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            for value in "123":
                await client.publish("orders", value)
            await client.settle()
            await asyncio.wait(left)

    run(scenario())

    for offset in range(3):
        assert [line["offset"] for line in logged(stream, f"by {offset}")] == [offset, offset]


def test_a_thread_that_outlives_its_run_never_logs_another_record(configured: Configure) -> None:
    stream = configured("info", "json")
    app = App("billing", bootstrap_servers="nowhere:1")
    resume, logged_late = threading.Event(), threading.Event()

    def slowly() -> None:
        resume.wait(10)
        USERS.info("outlived")
        logged_late.set()

    @app.consume("orders", concurrency=1, on_failure="skip", retry=Retry(attempts=1))
    async def handle(record: Record) -> None:
        if record.offset == 0:
            await asyncio.wait_for(asyncio.to_thread(slowly), 0.01)
        else:
            resume.set()
            await asyncio.get_running_loop().run_in_executor(None, logged_late.wait, 10)

    consume(app, "1", "2")

    assert logged(stream, "outlived") == [{}]


def test_log_lines_outside_handlers_name_no_record(configured: Configure) -> None:
    stream = configured("info", "json")
    USERS.info("outside")

    assert current_record() is None
    assert logged(stream, "outside") == [{}]


def test_a_topic_in_the_extra_fields_replaces_the_record(configured: Configure) -> None:
    stream = configured("info", "json")
    app = App("billing")

    @app.consume("orders")
    async def handle(_: Record) -> None:
        USERS.info("paused", extra={"topic": "refunds"})

    consume(app, "1")

    assert logged(stream, "paused") == [{"topic": "refunds"}]


def test_logs_and_explanations_use_the_same_key_hash(configured: Configure) -> None:
    stream = configured("info", "json")
    app = App("billing")
    found: list[str | None] = []

    @app.consume("orders")
    async def handle(_: Record) -> None:
        USERS.info("paid")
        head = app.diagnose().partitions[0].head
        assert head is not None
        found.append(head.key)

    consume(app, "1")

    assert [line["key"] for line in logged(stream, "paid")] == found


def test_a_log_line_has_the_active_span(configured: Configure) -> None:
    stream = configured("info", "json")
    spans = Spans()
    app = App("billing")
    trace(app, tracer_provider=spans.provider)

    @app.consume("orders")
    async def handle(_: Record) -> None:
        USERS.info("paid")

    consume(app, "1")

    (line,) = logged(stream, "paid")
    span = spans.one("process")
    assert span.context is not None
    assert (line["trace_id"], line["span_id"]) == (f"{span.context.trace_id:032x}", f"{span_id(span):016x}")


def test_an_engine_log_line_names_its_event_and_subject(configured: Configure) -> None:
    stream = configured("info", "json")
    app = App("billing", auto_offset_reset="earliest")

    @app.consume("orders")
    async def handle(_: Record) -> None: ...

    async def scenario() -> None:
        broker = InMemoryBroker(partitions=1)
        broker.create_topic("orders")
        broker.group("billing").commit_from_outside({TopicPartition("orders", 0): 50})
        async with TestClient(app, broker=broker) as client:
            await client.settle(60.0)

    run(scenario())

    (line,) = logged(stream, "committed offset 50 of orders/0 is outside its log; resuming at 0")
    assert line == {"event": "out_of_range", "topic": "orders", "partition": 0, "offset": 50, "position": 0}


# The user's own configuration --------------------------------------------------------------


def test_logging_configured_by_the_app_module_replaces_that_of_the_command() -> None:
    given = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"mine": {"format": "MINE %(message)s -"}},
        "filters": {"record": {"()": "aioshard.telemetry.logs.RecordFilter"}},
        "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "mine", "filters": ["record"]}},
        "root": {"level": "WARNING", "handlers": ["out"]},
    }
    script = (
        "import json, logging.config, sys, aioshard.app\nfrom aioshard.telemetry.logs import configure\n"
        "configure()\nlogging.config.dictConfig(json.loads(sys.argv[1]))\n"
        "logging.getLogger('aioshard.engine').info('quiet')\nlogging.getLogger('aioshard.engine').warning('heard')\n"
    )

    done = subprocess.run([sys.executable, "-c", script, json.dumps(given)], capture_output=True, text=True, check=True)

    assert done.stderr == "MINE heard -\n"
