"""Log output for the command line: text to read, or one JSON object per line; and which record a line is about.

Only a program may configure logging, so only the command line calls `configure`; the library never does.
`RecordFilter` is for whoever configures logging otherwise.
"""

import copy
import json
import logging
import logging.config
import math
import sys
import time
from pathlib import Path
from typing import Any, Literal, TextIO

from aioshard.engine.insight.doctor import CurrentRecord, current_record
from aioshard.errors import SettingsError

__all__ = [
    "REPEAT_INTERVAL",
    "CurrentRecord",
    "JsonFormatter",
    "LogFormat",
    "RecordFilter",
    "TextFormatter",
    "configure",
    "configure_from",
    "current_record",
]

LogFormat = Literal["text", "json"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_IDENTITY = frozenset(CurrentRecord._fields)
_BESIDE = frozenset({"worker", "trace_id", "span_id"})
_QUIET = ("aiokafka", "kafka", "uvicorn", "asyncio", "opentelemetry", "httpx", "watchfiles")
"""Loggers of libraries, whose INFO is our DEBUG: that of httpx is a line for each request, so for each record."""

REPEAT_INTERVAL = 30.0
"""Seconds in which a library's sentence is shown once."""
_REMEMBERED = 1_000
"""Bound of the sentences remembered for that."""


def configure(level: str = "info", style: LogFormat = "text", stream: TextIO | None = None) -> logging.Handler:
    """Send every log record of *level* and above to *stream* (standard error when None).

    Args:
        level: A level's name in any case. Unless it is DEBUG, the Kafka client, the web server and httpx are
            heard from WARNING on only, and what they repeat is counted instead of shown.
        style: How a line looks.
        stream: Where lines go.

    Returns:
        The handler, which the caller may remove again.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    handler = _Aggregating(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    handler.addFilter(RecordFilter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(number)
    for name in _QUIET:
        logging.getLogger(name).setLevel(number if number <= logging.DEBUG else max(number, logging.WARNING))
    logging.captureWarnings(capture=True)
    return handler


def configure_from(file: str) -> None:
    """Configure logging with the user's own file, and nothing else.

    Args:
        file: What `logging.config.dictConfig` takes, as JSON, where the name ends with `.json`; else what
            `logging.config.fileConfig` takes.

    Raises:
        SettingsError: The file cannot be read, or does not say what logging expects.
    """
    path = Path(file)
    try:
        if path.suffix.lower() == ".json":
            # Loggers exist by now: what the file does not say is to be heard, not silent.
            logging.config.dictConfig({"disable_existing_loggers": False, **json.loads(path.read_text("utf-8"))})
        else:
            with path.open(encoding="utf-8"):
                logging.config.fileConfig(path, disable_existing_loggers=False, encoding="utf-8")
    except Exception as error:  # the file names code of anybody
        kind = "JSON for logging.config.dictConfig" if path.suffix.lower() == ".json" else "an ini file of logging"
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        message = f"the log configuration {file} cannot be used: {error}{cause}; expected {kind}"
        raise SettingsError(message) from error


class RecordFilter(logging.Filter):
    """Gives every line that a handler logs the record that it runs for, and the span; add it to a logging handler.

    The fields are those of `CurrentRecord`, and `trace_id` and `span_id` while a span of OpenTelemetry is active. A
    line that names a topic, or any other of them, itself is about that, and gets none of the record's.

    Example:
        >>> import logging, sys
        >>> handler = logging.StreamHandler(sys.stdout)
        >>> handler.addFilter(RecordFilter())
        >>> handler.setFormatter(logging.Formatter("%(topic)s %(message)s", defaults={"topic": "-"}))
        >>> handler.handle(logging.makeLogRecord({"msg": "outside of handlers"}))
        - outside of handlers
        True
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add what is known; keeps every line."""
        given = vars(record)
        if not given.keys() & _IDENTITY:
            found = current_record()
            if found is not None:
                given.update((name, value) for name, value in found._asdict().items() if value is not None)
        if "trace_id" not in given:
            given.update(_span())
        return True


def _span() -> dict[str, str]:
    """The active span, where anybody uses OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


class _Aggregating(logging.StreamHandler[TextIO]):
    """Shows what a library says again and again once per interval, with the number of times.

    Without its broker the Kafka client alone writes fifty lines a second.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._said: dict[tuple[str, str], tuple[float, int]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, unless it repeats what was just written."""
        if record.levelno < logging.WARNING or record.name.partition(".")[0] not in _QUIET:
            super().emit(record)
            return
        key = record.name, record.getMessage()
        since, times = self._said.get(key, (-math.inf, 0))
        if record.created - since < REPEAT_INTERVAL:
            self._said[key] = since, times + 1
            return
        if len(self._said) >= _REMEMBERED:
            self._said.clear()
        self._said[key] = record.created, 0
        if times:
            record = copy.copy(record)  # other handlers get what was said
            record.msg = f"{key[1]} (and {times} times more in {record.created - since:.0f} s)"
            record.args = None
        super().emit(record)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What a log call passed as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 WARNING aioshard.engine: sentence [topic=orders partition=3]`."""

    def __init__(self) -> None:
        super().__init__("{asctime}.{msecs:03.0f} {levelname} {name}: {message}", "%Y-%m-%d %H:%M:%S", style="{")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name is logging's)
        """The line without a traceback, with the record's extra fields at its end."""
        line = super().formatMessage(record)
        fields = _fields(record)
        if "event" in fields:  # our own line, whose sentence says what its fields do
            fields = {name: value for name, value in fields.items() if name in _BESIDE}
        if not fields:
            return line
        return f"{line} [{' '.join(f'{name}={value}' for name, value in fields.items())}]"


class JsonFormatter(logging.Formatter):
    """One JSON object per log record: time (UTC), level, logger, message, extra fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The object as one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line = {**line, **_fields(record), **line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        # Whatever a log call passes must not break the line.
        return json.dumps(line, default=str)
