"""Log output for the command line, as text or as one JSON object per line, with the record that a line is about.

Only a program may configure logging: the command line calls `configure`, the library never does. Use `RecordFilter` if
you configure logging yourself.
"""

import json
import logging
import math
import sys
import time
from typing import Any, Literal, TextIO

from aioshard.core.text import encodable
from aioshard.engine.current_record import CurrentRecord, current_record

LogFormat = Literal["text", "json"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_IDENTITY = frozenset(CurrentRecord._fields)
_SHOWN_WITH_EVENT = frozenset({"worker", "trace_id", "span_id"})
_QUIET = ("aiokafka", "kafka", "uvicorn", "asyncio", "opentelemetry", "httpx", "watchfiles")
"""Library loggers whose INFO is aioshard's DEBUG; httpx logs a line per request, and so one per record."""

REPEAT_INTERVAL = 30.0
"""Seconds within which a library's message is shown only once."""
_REMEMBERED = 1_000
"""Maximum number of messages remembered for that."""


def configure(level: str = "info", style: LogFormat = "text", stream: TextIO | None = None) -> logging.Handler:
    """Send every log record of *level* and above to *stream* (standard error if None).

    Args:
        level: Name of a level, in any case. Unless it is DEBUG, the Kafka client, the web server and httpx only log
            from WARNING, and their repeated warnings are left out.
        style: Format of a line.
        stream: Destination of the lines.

    Returns:
        The handler, which you may remove again.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    handler.addFilter(_NoRepeats())
    handler.addFilter(RecordFilter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(number)
    for name in _QUIET:
        logging.getLogger(name).setLevel(number if number <= logging.DEBUG else max(number, logging.WARNING))
    logging.captureWarnings(capture=True)
    return handler


class RecordFilter(logging.Filter):
    """Adds the current record and span to every line that a handler logs; attach it to a logging handler.

    The fields are those of `CurrentRecord`, plus `trace_id` and `span_id` while an OpenTelemetry span is active. A line
    that already has a field of a record, such as a topic, is about that record: it gets no field of the current one.
    A field that is None, such as a default of your log record factory, counts as missing.

    Example:
        >>> import logging, sys
        >>> handler = logging.StreamHandler(sys.stdout)
        >>> handler.addFilter(RecordFilter())
        >>> handler.setFormatter(logging.Formatter("%(topic)s %(message)s", defaults={"topic": "-"}))
        >>> _ = handler.handle(logging.makeLogRecord({"msg": "outside of handlers"}))
        - outside of handlers
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the known fields; never drop a line."""
        fields = vars(record)
        is_about_a_record = any(fields.get(name) is not None for name in _IDENTITY)
        if not is_about_a_record and (current := current_record()) is not None:
            fields.update((name, value) for name, value in current._asdict().items() if value is not None)
        if fields.get("trace_id") is None:
            fields.update(_span())
        return True


def _span() -> dict[str, str]:
    """Return the active span's ids, if the process uses OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    context = trace and trace.get_current_span().get_span_context()
    if not context or not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


class _NoRepeats(logging.Filter):
    """Drops a library's repeated message for a while; without its broker, the Kafka client writes fifty a second."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a record that repeats a recent one."""
        if record.levelno < logging.WARNING or record.name.partition(".")[0] not in _QUIET:
            return True
        key = record.name, record.getMessage()
        if record.created - self._shown.get(key, -math.inf) < REPEAT_INTERVAL:
            return False
        if len(self._shown) >= _REMEMBERED:
            self._shown.clear()
        self._shown[key] = record.created
        return True


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields that a log call passed as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class TextFormatter(logging.Formatter):
    """Text lines: `2026-01-31 12:00:00.123 WARNING aioshard.engine: sentence [topic=orders partition=3]`."""

    def __init__(self) -> None:
        super().__init__("{asctime}.{msecs:03.0f} {levelname} {name}: {message}", "%Y-%m-%d %H:%M:%S", style="{")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line with its traceback; text that no stream can encode is escaped."""
        return encodable(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name is logging's)
        """Return the line without a traceback, with the record's extra fields at its end."""
        line = super().formatMessage(record)
        fields = _fields(record)
        if "event" in fields and record.name.partition(".")[0] == "aioshard":
            # Its sentence already contains its fields.
            fields = {name: value for name, value in fields.items() if name in _SHOWN_WITH_EVENT}
        if not fields:
            return line
        return f"{line} [{' '.join(f'{name}={value}' for name, value in fields.items())}]"


class JsonFormatter(logging.Formatter):
    """One JSON object per log record: time (UTC), level, logger, message, extra fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object as one line."""
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line = {**line, **_fields(record), **line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        # Values that a log call passes must not break the line.
        return json.dumps(line, default=str)
