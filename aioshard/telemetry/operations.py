"""An operation with a span: its outcome goes to the span and to the metrics."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from opentelemetry import context as contexts
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from aioshard.telemetry.conventions import Attribute

__all__ = ["NOWHERE", "Attributes", "Operation", "Plan", "error_type"]

logger = logging.getLogger("aioshard.telemetry.tracing")

Attributes = dict[str, str | int | bool]
"""Attributes of a span; metrics use some of them."""

NOWHERE = Context()
"""A context without a span: a span started in it is the root of a trace."""


class Plan(NamedTuple):
    """The properties of a span before it starts."""

    name: str
    kind: SpanKind
    attributes: Attributes
    """Visible to samplers; `error.type` is added on failure."""
    parent: Context | None = NOWHERE
    """None: the context in which the code runs."""
    links: Sequence[Link] = ()
    carried: Context | None = NOWHERE
    """Context for the code inside, in addition to the span, such as baggage. None: keep its own context."""


class Operation:
    """A span that is current within a `with` block.

    Invariants:
        * Errors of a sampler, a processor or an exporter never reach the code inside.
    """

    __slots__ = ("_began", "_measure", "_name_error", "_plan", "_token", "_tracer", "context", "span")

    told = False
    """Whether an error of an SDK has already been logged."""

    def __init__(
        self,
        tracer: Tracer,
        plan: Plan,
        *,
        measure: Callable[[float, Attributes], None] | None = None,
        name_error: Callable[[BaseException], str] | None = None,
    ) -> None:
        """Create an operation; it begins with the `with` block.

        Args:
            tracer: Creates the span.
            plan: Properties of the span.
            measure: Called with the duration in seconds and the attributes at the end.
            name_error: Returns the name of an error; by default the name of its class.
        """
        self._tracer = tracer
        self._plan = plan
        self._measure = measure
        self._name_error = name_error or error_type
        self.span: Span = INVALID_SPAN
        self.context = NOWHERE

    def __enter__(self) -> Self:
        self._began = time.time_ns()
        name, kind, attributes, parent, links, carried = self._plan
        try:
            self.span = self._tracer.start_span(
                name,
                context=parent,
                kind=kind,
                attributes=attributes,
                links=links,
                start_time=self._began,
                record_exception=False,
                set_status_on_exception=False,
            )
        except Exception as failure:  # noqa: BLE001 - samplers and processors may be third-party code
            _tell(failure)
        self.context = set_span_in_context(self.span, carried)
        self._token = contexts.attach(self.context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, GeneratorExit):  # a coroutine may be closed in another context
            contexts.detach(self._token)
        ended = max(time.time_ns(), self._began)
        try:
            if error is not None:
                self._failed(error)
            self.span.end(ended)
            if self._measure is not None:
                self._measure((ended - self._began) / 1e9, self._plan.attributes)
        except Exception as failure:  # noqa: BLE001 - as above
            _tell(failure)

    def _failed(self, error: BaseException) -> None:
        span = self.span
        named = self._plan.attributes[Attribute.ERROR_TYPE] = self._name_error(error)
        if not span.is_recording():
            return
        span.set_attribute(Attribute.ERROR_TYPE, named)
        if isinstance(error, asyncio.CancelledError):
            span.set_status(Status(StatusCode.ERROR, "cancelled"))
            return
        try:
            message = str(error)
        except Exception:  # noqa: BLE001 - the user's code
            span.set_status(Status(StatusCode.ERROR, "its message cannot be shown"))
            return
        span.set_status(Status(StatusCode.ERROR, message))
        span.record_exception(error)


def _tell(failure: Exception) -> None:
    if not Operation.told:
        Operation.told = True
        logger.warning("the OpenTelemetry SDK raised, and spans may be missing; this is told once", exc_info=failure)


def error_type(error: BaseException) -> str:
    """Return the name of an exception's class, with its module unless it is built in.

    Example:
        >>> error_type(ValueError("no")), error_type(asyncio.CancelledError())
        ('ValueError', 'asyncio.exceptions.CancelledError')
    """
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
