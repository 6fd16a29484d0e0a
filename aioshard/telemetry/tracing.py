"""Spans of OpenTelemetry for attempts, commits and what is published; see docs/tracing.md.

Where an app is not traced, nothing of this is on the way of a record: `trace` has it put around the attempts and the
clients when the app starts.
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
    """What can be traced: an `App`."""

    def traced_by(self, tracing: "Tracing | None") -> None:
        """From the next start on, be traced so; None is not at all."""


def trace(
    app: Traceable,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    parent: bool = False,
) -> None:
    """Trace an app from its next start on; called again, it replaces what was asked for before.

    Runs over history on Spark are not traced: they repeat what was.

    Args:
        app: The app.
        tracer_provider: Where spans go; without it, to the provider of the process at the time of the start.
        meter_provider: Where the metrics of OpenTelemetry's conventions go; None measures nothing.
        parent: Make the span that is named in a record's headers the parent of its attempts, so that they are in the
            producer's trace. It is linked either way. Batches are only linked.

    Raises:
        MissingExtraError: On import of this module; OpenTelemetry's API is not installed.
        StateError: The app runs.

    Example:
        >>> from aioshard import App
        >>> app = App("billing", bootstrap_servers="localhost:9092")
        >>> trace(app, parent=True)
    """
    app.traced_by(Tracing(tracer_provider, meter_provider, parent=parent))


def warn_of_no_provider() -> None:
    """Say so in the log where the process has no tracer provider, so that spans go nowhere."""
    if isinstance(api.get_tracer_provider(), api.ProxyTracerProvider):
        logger.warning(
            "spans go nowhere: the process has no tracer provider; start it with opentelemetry-instrument, which is in "
            "the package opentelemetry-distro, or call opentelemetry.trace.set_tracer_provider() in the app's module"
        )


class Tracing:
    """How an app is traced."""

    def __init__(
        self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None, *, parent: bool
    ) -> None:
        """As `trace`."""
        self._tracer_provider = tracer_provider
        self._meter_provider = meter_provider
        self._parent = parent

    def around(
        self, clients: Clients, adapt: Adapt | None, group_id: str, settings: "Settings"
    ) -> tuple[Clients, Adapt]:
        """The clients and the handlers of a run, traced."""
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
    """Host and port where a single broker is named: of several, nobody knows here which one answers."""
    host, _, port = (servers or "").strip().rpartition(":")
    return (host.strip("[]"), int(port)) if "," not in host and port.isdigit() else None
