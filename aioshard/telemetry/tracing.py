"""OpenTelemetry spans for attempts, commits and published messages; see docs/tracing.md.

An app without tracing pays nothing per record: `trace` only wraps the attempts and the clients when the app starts.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from aioshard.engine.handler import Adapt, HandlerSpec
from aioshard.errors import MissingExtraError
from aioshard.ports import Clients

try:
    from opentelemetry import trace as api
except ImportError as error:
    raise MissingExtraError("tracing", "otel") from error

from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider

from aioshard.telemetry.conventions import SCHEMA_URL
from aioshard.telemetry.metering import Metering
from aioshard.telemetry.spans import About, Spans
from aioshard.telemetry.versions import version

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["Traceable", "Tracing", "trace", "warn_of_no_provider"]

logger = logging.getLogger("aioshard.telemetry.tracing")


class Traceable(Protocol):
    """An object that can be traced: an `App`."""

    def traced_by(self, tracing: "Tracing | None") -> None:
        """Trace the app from its next start; None turns tracing off."""


def trace(
    app: Traceable,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    parent: bool = False,
) -> None:
    """Trace an app from its next start; another call replaces the earlier one.

    Backfills on Spark are not traced, because they repeat earlier processing.

    Args:
        app: The app.
        tracer_provider: Destination of the spans; by default the provider of the process when the app starts.
        meter_provider: Destination of the metrics of OpenTelemetry's conventions; None measures nothing.
        parent: True to make the span named in a record's headers the parent of its attempts, so that they are in the
            producer's trace. The span is linked either way. Batches are only linked.

    Raises:
        MissingExtraError: On import of this module; OpenTelemetry's API is not installed.
        StateError: The app is running.

    Example:
        >>> from aioshard import App
        >>> app = App("billing", bootstrap_servers="localhost:9092")
        >>> trace(app, parent=True)
    """
    app.traced_by(Tracing(tracer_provider, meter_provider, parent=parent))


def warn_of_no_provider() -> None:
    """Log a warning if the process has no tracer provider, so that spans are lost."""
    if isinstance(api.get_tracer_provider(), api.ProxyTracerProvider):
        logger.warning(
            "spans go nowhere: the process has no tracer provider; start it with opentelemetry-instrument, which is in "
            "the package opentelemetry-distro, or call opentelemetry.trace.set_tracer_provider() in the app's module"
        )


class Tracing:
    """The tracing configuration of an app."""

    def __init__(
        self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None, *, parent: bool
    ) -> None:
        """See `trace`."""
        self._tracer_provider = tracer_provider
        self._meter_provider = meter_provider
        self._parent = parent

    def around(
        self, clients: Clients, adapt: Adapt | None, group_id: str, settings: "Settings"
    ) -> tuple[Clients, Adapt]:
        """Return the clients and the handler adapter of a run with tracing added."""
        provider = self._tracer_provider or api.get_tracer_provider()
        tracer = provider.get_tracer("aioshard", version(), SCHEMA_URL)
        metering = None if self._meter_provider is None else Metering(self._meter_provider, version())
        spans = Spans(tracer, metering, _about(group_id, settings), parent=self._parent)
        traced = clients._replace(
            transport=lambda: spans.transport(clients.transport()),
            producer=lambda: spans.producer(clients.producer()),
        )
        return traced, _after(adapt, spans.attempts)


def _after(adapt: Adapt | None, then: Callable[[HandlerSpec], HandlerSpec]) -> Adapt:
    return then if adapt is None else lambda spec: then(adapt(spec))


def _about(group_id: str, settings: "Settings") -> About:
    return About(
        group=group_id,
        client_id=settings.client_id or "aioshard",
        server=_only(settings.bootstrap_servers),
        show_keys=settings.show_keys,
        commit_timeout=settings.commit_timeout,
    )


def _only(servers: str | None) -> tuple[str, int] | None:
    """Return host and port if a single broker is named: of several, the one that answers is unknown here."""
    host, _, port = (servers or "").strip().rpartition(":")
    return (host.strip("[]"), int(port)) if "," not in host and port.isdigit() else None
