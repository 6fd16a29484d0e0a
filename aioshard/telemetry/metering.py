"""OpenTelemetry's messaging metrics, for use instead of Prometheus' or in addition to them."""

from opentelemetry.metrics import Counter, Histogram, MeterProvider

from aioshard.core.histogram import DURATION_BOUNDS
from aioshard.telemetry.conventions import METRICS, SCHEMA_URL, Attribute, Metric
from aioshard.telemetry.operations import Attributes

__all__ = ["Metering"]

_OF_METRICS = frozenset(
    {
        Attribute.MESSAGING_SYSTEM,
        Attribute.MESSAGING_OPERATION_NAME,
        Attribute.MESSAGING_DESTINATION_NAME,
        Attribute.MESSAGING_DESTINATION_PARTITION_ID,
        Attribute.MESSAGING_CONSUMER_GROUP_NAME,
        Attribute.ERROR_TYPE,
        Attribute.SERVER_ADDRESS,
        Attribute.SERVER_PORT,
    }
)
"""Span attributes with few distinct values, as the conventions require for metrics."""


class Metering:
    """The four instruments of the messaging conventions, in a meter of the given provider."""

    def __init__(self, provider: MeterProvider, version: str) -> None:
        """Create the instruments; *version* is the version of this package."""
        meter = provider.get_meter("aioshard", version, schema_url=SCHEMA_URL)

        def histogram(name: str) -> Histogram:
            _, unit, meaning = METRICS[name]
            return meter.create_histogram(name, unit, meaning, explicit_bucket_boundaries_advisory=DURATION_BOUNDS)

        def counter(name: str) -> Counter:
            _, unit, meaning = METRICS[name]
            return meter.create_counter(name, unit, meaning)

        self._processing = histogram(Metric.MESSAGING_PROCESS_DURATION)
        self._operations = histogram(Metric.MESSAGING_CLIENT_OPERATION_DURATION)
        self._consumed = counter(Metric.MESSAGING_CLIENT_CONSUMED_MESSAGES)
        self._sent = counter(Metric.MESSAGING_CLIENT_SENT_MESSAGES)

    def processed(self, seconds: float, records: int, about: Attributes) -> None:
        """Record the end of an attempt, with the number of *records* it delivered to the handler for the first time."""
        kept = _kept(about)
        self._processing.record(seconds, kept)
        if records:
            kept.pop(Attribute.ERROR_TYPE, None)  # they were delivered, even if the handler failed
            self._consumed.add(records, kept)

    def committed(self, seconds: float, about: Attributes) -> None:
        """Record the end of a commit request, successful or not."""
        self._operations.record(seconds, _kept(about, Attribute.MESSAGING_OPERATION_TYPE))

    def sent(self, seconds: float, about: Attributes) -> None:
        """Record the end of publishing a message, successful or not."""
        self._operations.record(seconds, _kept(about, Attribute.MESSAGING_OPERATION_TYPE))
        self._sent.add(1, _kept(about))


def _kept(about: Attributes, *others: str) -> Attributes:
    return {name: value for name, value in about.items() if name in _OF_METRICS or name in others}
