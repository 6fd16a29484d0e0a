"""A program's log record factory may set any attribute; aioshard's own lines neither raise nor replace it."""

import ast
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aioshard
from aioshard import App, Record, Retry
from aioshard.telemetry.logs import RecordFilter
from aioshard.testing import TestClient, run

FIELDS = ("event", "topic", "partition", "offset", "key", "handler", "group", "attempt", "error", "records", "why")


@pytest.fixture
def set_by_the_factory() -> Iterator[dict[str, object]]:
    """Attributes that every log record has from its factory."""
    attributes: dict[str, object] = {}
    before = logging.getLogRecordFactory()

    def factory(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = before(*arguments, **options)
        vars(record).update(attributes)
        return record

    logging.setLogRecordFactory(factory)
    yield attributes
    logging.setLogRecordFactory(before)


def fail_once_and_log(app: App) -> None:
    """Run an app whose first record fails, and whose handler logs a line."""

    @app.consume("orders", retry=Retry(attempts=2, initial=0.01), on_failure="skip")
    async def on_order(record: Record) -> None:
        logging.getLogger("shop").warning("charging")
        if record.value == b"bad":
            raise ValueError("declined")

    async def scenario() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"bad", key=b"k", partition=0)
            await client.publish("orders", b"good", key=b"k", partition=0)
            await client.settle(60)

    run(scenario())
    (handler,) = app.statistics().handlers
    assert (app.statistics().state, handler.processed, handler.skipped) == ("stopped", 1, 1)


def line_of(caplog: pytest.LogCaptureFixture, name: str, field: str, value: object) -> logging.LogRecord:
    """The first line of a logger that has the value."""
    return next(line for line in caplog.records if line.name == name and getattr(line, field, None) == value)


def test_an_attribute_that_is_taken_is_kept_and_the_field_gets_a_prefix(
    set_by_the_factory: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    set_by_the_factory.update(dict.fromkeys(FIELDS, "web"))
    caplog.set_level(logging.DEBUG)
    fail_once_and_log(App("billing"))

    line: Any = line_of(caplog, "aioshard.engine.failures", "aioshard_event", "retry")
    assert {name: getattr(line, name) for name in FIELDS} == dict.fromkeys(FIELDS, "web")
    assert (line.aioshard_topic, line.aioshard_partition, line.aioshard_offset) == ("orders", 0, 0)
    assert (line.aioshard_handler, line.aioshard_error) == ("on_order", "ValueError")


def test_an_attribute_that_is_none_is_filled_in(
    set_by_the_factory: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    set_by_the_factory.update(dict.fromkeys(FIELDS))
    caplog.set_level(logging.DEBUG)
    with caplog.filtering(RecordFilter()):
        fail_once_and_log(App("billing"))

    own: Any = line_of(caplog, "aioshard.engine.failures", "event", "retry")
    assert (own.topic, own.partition, own.offset, own.handler, own.error) == ("orders", 0, 0, "on_order", "ValueError")
    handlers: Any = line_of(caplog, "shop", "attempt", 2)
    assert (handlers.topic, handlers.offset, handlers.handler) == ("orders", 0, "on_order")


def test_every_line_with_fields_is_written_by_a_logger_that_cannot_raise() -> None:
    package = Path(aioshard.__file__).parent
    plain = [
        path.name
        for path in package.rglob("*.py")
        if "logger = logging.getLogger(" in path.read_text() and _has_fields(ast.parse(path.read_text()))
    ]
    assert plain == [], "use aioshard.log_fields.get_logger"


def _has_fields(module: ast.Module) -> bool:
    calls = (node for node in ast.walk(module) if isinstance(node, ast.Call))
    return any(
        keyword.arg == "extra" and ast.unparse(call.func).startswith("logger.")
        for call in calls
        for keyword in call.keywords
    )
