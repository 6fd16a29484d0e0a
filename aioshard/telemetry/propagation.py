"""Trace context in the headers of records: read whatever they hold, written to what is published."""

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
"""Bytes of a header that is looked at; W3C's baggage, the longest of them, may be as long."""


class _Reading(Getter[Headers]):
    """Headers as a propagator reads them: the last of a name counts, and one that cannot be text is none."""

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
    """Reads and writes with the propagator that the process has chosen (`OTEL_PROPAGATORS`).

    Invariants:
        * Headers fail nothing, whatever is in them.
        * A header that a message has already is not replaced.
    """

    def __init__(self) -> None:
        self._told = False

    def extract(self, headers: Headers) -> Context:
        """What the headers say, in an otherwise empty context."""
        try:
            return propagate.extract(headers, Context(), _READING)
        except Exception as error:  # noqa: BLE001 - a propagator may be anybody's, and the headers too
            self._tell("the trace context of a record cannot be read", error)
            return Context()

    def origin(self, headers: Headers) -> trace.SpanContext | None:
        """The span in which a message was made; None where its headers name none."""
        if not headers:
            return None
        found = trace.get_current_span(self.extract(headers)).get_span_context()
        return found if found.is_valid else None

    def inject(self, message: Message, context: Context) -> Message:
        """The message with *context* in its headers, beside those that whoever made it has given it."""
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
