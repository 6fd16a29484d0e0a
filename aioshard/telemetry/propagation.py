"""Trace context in record headers: read tolerantly, and written to published messages."""

import logging
from collections.abc import Sequence

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter, Setter

from aioshard.ports import Message

__all__ = ["Headers", "Propagation"]

logger = logging.getLogger("aioshard.telemetry.tracing")

Headers = Sequence[tuple[str, bytes | None]]

_LONGEST = 8 * 1024
"""Maximum bytes of a header that is read; W3C baggage, the longest of them, may be this long."""


class _Reading(Getter[Headers]):
    """Headers for a propagator: the last one of a name counts; it is treated as missing if it is not valid text."""

    def get(self, carrier: Headers, key: str) -> list[str] | None:
        for name, content in reversed(carrier):
            if name == key:
                if content is None or len(content) > _LONGEST:
                    return None
                try:
                    return [content.decode()]
                except UnicodeDecodeError:
                    return None
        return None

    def keys(self, carrier: Headers) -> list[str]:
        return [name for name, _ in carrier]


class _Writing(Setter[list[tuple[str, bytes | None]]]):
    def set(self, carrier: list[tuple[str, bytes | None]], key: str, value: str) -> None:
        carrier.append((key, value.encode()))


_READING, _WRITING = _Reading(), _Writing()


class Propagation:
    """Reads and writes headers with the propagator of the process (`OTEL_PROPAGATORS`).

    Invariants:
        * Invalid headers never cause an error.
        * An existing header of a message is not replaced.
    """

    def __init__(self) -> None:
        self._told = False

    def extract(self, headers: Headers) -> Context:
        """Return the context from the headers, on top of an empty one."""
        try:
            return propagate.extract(headers, Context(), _READING)
        except Exception as error:  # noqa: BLE001 - propagators and headers may come from third parties
            self._tell("the trace context of a record cannot be read", error)
            return Context()

    def origin(self, headers: Headers) -> trace.SpanContext | None:
        """Return the span in which a message was created, or None if its headers do not name one."""
        if not headers:
            return None
        found = trace.get_current_span(self.extract(headers)).get_span_context()
        return found if found.is_valid else None

    def inject(self, message: Message, context: Context) -> Message:
        """Return the message with *context* added to its own headers."""
        added: list[tuple[str, bytes | None]] = []
        try:
            propagate.inject(added, context, _WRITING)
        except Exception as error:  # noqa: BLE001 - as in `extract`
            self._tell("a trace context cannot be written to what is published", error)
            return message
        given = {name for name, _ in message.headers}
        added = [header for header in added if header[0] not in given]
        return message._replace(headers=(*message.headers, *added)) if added else message

    def _tell(self, what: str, error: Exception) -> None:
        if not self._told:
            self._told = True
            logger.warning("%s; this is told once", what, exc_info=error)
