"""Loggers that add fields to log lines, also if the log records of a program have attributes with the same names."""

import logging
from collections.abc import MutableMapping
from typing import Any

_FIELDS = "_aioshard_fields"
"""Attribute of a log record under which its fields travel to the filter of the logger."""
_PREFIX = "aioshard_"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class FieldLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose `extra` never raises.

    `logging` refuses an extra field with the name of an attribute that the record has. A log record factory of the
    program may set any name, such as `topic` or `handler`, and the app must not crash because of its own log line.
    """

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Hide the fields from the check of `logging`; `_show_fields` makes attributes of them."""
        fields = kwargs.get("extra")
        if fields:
            kwargs["extra"] = {_FIELDS: fields}
        return msg, kwargs


def get_logger(name: str) -> FieldLogger:
    """Return the logger of a module.

    Example:
        >>> get_logger("aioshard.engine.control").name
        'aioshard.engine.control'
    """
    logger = logging.getLogger(name)
    logger.addFilter(_show_fields)
    return FieldLogger(logger, None)


def _show_fields(record: logging.LogRecord) -> bool:
    """Make attributes of the fields of a log call."""
    add_fields(record, vars(record).pop(_FIELDS, {}))
    return True


def add_fields(record: logging.LogRecord, fields: dict[str, Any]) -> None:
    """Add fields to a log record; a name that is taken gets the prefix `aioshard_`.

    An attribute that is None is free: it is a default of the program, for lines without that field.

    Example:
        >>> record = logging.makeLogRecord({"handler": "web", "topic": None})
        >>> add_fields(record, {"handler": "on_order", "topic": "orders"})
        >>> record.handler, record.aioshard_handler, record.topic
        ('web', 'on_order', 'orders')
    """
    attributes = vars(record)
    for name, value in fields.items():
        is_taken = name in _STANDARD or attributes.get(name) is not None
        attributes[_PREFIX + name if is_taken else name] = value
