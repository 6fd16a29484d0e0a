"""Repeated log lines of the Kafka clients: counted instead of written, wherever an app runs.

Without its broker, a client library may log up to a hundred errors a second. A program that embeds an app configures
its logging itself, so the limit has to be at the clients' loggers.
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from aioshard.log_fields import get_logger
from aioshard.records import counted

logger = get_logger("aioshard.engine.client_log")

_CLIENTS = ("aiokafka", "aioshard.kafka.confluent.librdkafka")
"""The loggers of the clients; those below belong to them, too."""
_PREFIXES = tuple(f"{name}." for name in _CLIENTS)
_OVER_AFTER = 10.0
"""Seconds without a line after which an outage is over; every client retries more often."""
_SUMMARY_INTERVAL = 60.0
"""Seconds between two lines about an outage that lasts."""
_MOST_KINDS = 50
"""Maximum number of different lines that are written in one outage."""
_NUMBERS = re.compile(r"\d+")


class _Outage(NamedTuple):
    """The lines of one outage: written and withheld."""

    began: float
    latest: float
    """Time of the latest line."""
    summarized: float
    """Time of the last summary, or of the beginning."""
    kinds: frozenset[str]
    """The lines that were written, without their numbers."""
    withheld: int = 0
    withheld_since: int = 0
    """The part of `withheld` that no summary has mentioned."""
    text: str = ""
    """The latest line that was withheld."""


class ClientLog(logging.Filter):
    """Filter that writes each warning of a client once per outage, and counts the rest.

    Lines that differ only in numbers, such as ports and offsets, are the same. An outage begins with a line, and is
    over when the client has logged nothing for a while; `report` logs both that and how many lines were withheld. It
    changes no level and no handler. A logger that the program has set to DEBUG is left alone, and so are lines below
    WARNING. Several apps may run in one process: the filter is there while any of them runs.
    """

    def __init__(self) -> None:
        """Create a filter that is not attached."""
        super().__init__()
        self._lock = threading.RLock()
        """Held for all that follows: any thread may log, and so may a finalizer that runs while the lock is held."""
        self._apps = 0
        """How many running apps use the filter."""
        self._attached: set[logging.Logger] = set()
        self._outage: _Outage | None = None

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Limit the clients' lines while an app runs; import the client before."""
        with self._lock:
            self._apps += 1
            for client in _loggers():
                client.addFilter(self)
                self._attached.add(client)
        try:
            yield
        finally:
            with self._lock:
                self._apps -= 1
                is_last = self._apps == 0
                for client in self._attached if is_last else ():
                    client.removeFilter(self)
                if is_last:
                    self._attached.clear()
            if is_last:
                self.report(is_over=True)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is written."""
        if record.levelno < logging.WARNING or _is_verbose(record.name):
            return True
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 - the handlers of `logging` report it, and the client continues
            return True
        kind = f"{record.name} {_NUMBERS.sub('0', text)} {record.exc_info[0] if record.exc_info else ''}"
        now = time.monotonic()
        with self._lock:
            outage = self._outage or _Outage(began=now, latest=now, summarized=now, kinds=frozenset())
            is_new = kind not in outage.kinds and len(outage.kinds) < _MOST_KINDS
            if is_new:
                self._outage = outage._replace(latest=now, kinds=outage.kinds | {kind})
            else:
                self._outage = outage._replace(
                    latest=now, withheld=outage.withheld + 1, withheld_since=outage.withheld_since + 1, text=text
                )
        return is_new

    def report(self, *, is_over: bool = False) -> None:
        """Log that an outage is over, or once a minute that it lasts; call this regularly.

        Args:
            is_over: Whether the outage is over even if the client has just logged a line.
        """
        now = time.monotonic()
        with self._lock:
            outage = self._outage
            if outage is None:
                return
            is_over = is_over or now - outage.latest >= _OVER_AFTER
            if not is_over and (now - outage.summarized < _SUMMARY_INTERVAL or not outage.withheld_since):
                return
            self._outage = None if is_over else outage._replace(summarized=now, withheld_since=0)
        if is_over and outage.withheld:
            logger.warning(
                "the Kafka client has stopped repeating errors after %.0f s: %s withheld",
                outage.latest - outage.began,
                _were(outage.withheld),
                extra={"event": "client_repeats_over", "withheld": outage.withheld},
            )
        elif not is_over:
            logger.warning(
                "the Kafka client repeats its errors: %s withheld in %.0f s, the latest is: %s",
                _were(outage.withheld_since),
                now - outage.summarized,
                outage.text,
                extra={"event": "client_repeats", "withheld": outage.withheld_since},
            )


CLIENT_LOG = ClientLog()
"""The filter of the process; loggers belong to the process, too."""


def silence_clients() -> None:
    """Hide the clients' log lines if no logging is configured: the errors of commands and tasks say what went wrong."""
    for name in _CLIENTS:
        logging.getLogger(name).addHandler(logging.NullHandler())


def _loggers() -> Iterator[logging.Logger]:
    """Yield the loggers of the clients, which their modules create when they are imported."""
    for name, known in tuple(logging.root.manager.loggerDict.items()):
        if isinstance(known, logging.Logger) and f"{name}.".startswith(_PREFIXES):
            yield known


def _is_verbose(name: str) -> bool:
    """Return whether the program has set a logger of a client, or one above it except the root, to DEBUG."""
    current: logging.Logger | None = logging.getLogger(name)
    while current is not None and current is not logging.root:
        if current.level:
            return current.level <= logging.DEBUG
        current = current.parent
    return False


def _were(lines: int) -> str:
    return f"{counted(lines, 'line')} like those above {'was' if lines == 1 else 'were'}"
