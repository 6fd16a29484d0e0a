"""The names of spans and metrics are those of the conventions' own package, and only those."""

import ast
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.semconv._incubating.metrics import messaging_metrics
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from opentelemetry.semconv.schemas import Schemas

from aioshard import App, Batch, BatchContext, Context, Record, Retry
from aioshard.core.histogram import DURATION_BOUNDS
from aioshard.telemetry.tracing import ATTRIBUTES, METRICS, SCHEMA_URL, trace
from aioshard.testing import InMemoryBroker, TestClient, run
from tests.telemetry.traces import TRACEPARENT, Spans

PACKAGE = vars(messaging_attributes) | vars(error_attributes) | vars(server_attributes)
CONVENTIONAL = [name for name in ATTRIBUTES if not name.startswith("aioshard.")]


def as_constant(name: str) -> str:
    """The name of the constant that the package has for an attribute or a metric."""
    return name.replace(".", "_").upper()


def described(module: Any) -> dict[str, str]:
    """What the package writes below each name."""
    body = ast.parse(Path(module.__file__).read_text()).body
    found = {}
    for node, following in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            found[node.target.id] = ast.literal_eval(following.value)
    return found


@pytest.mark.parametrize("name", CONVENTIONAL)
def test_an_attribute_is_that_of_the_package(name: str) -> None:
    assert PACKAGE[as_constant(name)] == name


@pytest.mark.parametrize("name", [name for name in CONVENTIONAL if name.startswith("messaging.")])
def test_no_attribute_is_deprecated(name: str) -> None:
    text = described(messaging_attributes)[as_constant(name)]

    assert "Deprecated" not in text


def test_the_check_for_deprecated_ones_can_fail() -> None:
    assert "Deprecated" in described(messaging_attributes)["MESSAGING_KAFKA_MESSAGE_OFFSET"]


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_that_of_the_package(name: str) -> None:
    assert vars(messaging_metrics)[as_constant(name)] == name


def test_the_schema_is_the_newest_that_the_package_knows() -> None:
    assert SCHEMA_URL == list(Schemas)[-1].value == Schemas.V1_44_0.value


def test_buckets_are_those_that_the_conventions_advise() -> None:
    """Written down here once more: the package does not have them."""
    assert DURATION_BOUNDS == (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)


def test_values_of_the_operation_type_are_those_of_the_package() -> None:
    values = {one.value for one in messaging_attributes.MessagingOperationTypeValues}

    assert {"process", "settle", "send"} <= values
    assert "kafka" in {one.value for one in messaging_attributes.MessagingSystemValues}


# What comes out ----------------------------------------------------------------------------


class Measured:
    """An app whose spans and metrics are collected, after a few records."""

    def __init__(self) -> None:
        self.spans = Spans()
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader], shutdown_on_exit=False)
        self.broker = InMemoryBroker(partitions=1)
        self.app = App("billing", bootstrap_servers="kafka.example:9092", show_keys=True)
        trace(self.app, tracer_provider=self.spans.provider, meter_provider=self.provider)

    def consume(self, *values: object) -> None:
        async def scenario() -> None:
            async with TestClient(self.app, broker=self.broker) as client:
                for value in values:
                    await client.publish("orders", value, key="alice", headers=[TRACEPARENT])
                await client.settle(60.0)

        run(scenario())
        self.provider.force_flush()

    def metrics(self) -> dict[str, Any]:
        data = self.reader.get_metrics_data()
        assert data is not None
        (of_resource,) = data.resource_metrics
        (of_scope,) = of_resource.scope_metrics
        assert of_scope.schema_url == SCHEMA_URL
        return {metric.name: metric for metric in of_scope.metrics}


@pytest.fixture(scope="module")
def measured() -> Measured:
    measured = Measured()

    @measured.app.consume("orders", retry=Retry(attempts=2, initial=0.01), on_failure="skip")
    async def handle(record: Record, context: Context) -> None:
        await context.publish("invoices", None, key=record.key, partition=0)
        if record.value == b"bad":
            raise ValueError("no")

    measured.consume("good", "bad", None)
    return measured


def test_no_span_has_an_attribute_that_no_convention_names(measured: Measured) -> None:
    written = {
        name
        for kind in ("process", "commit", "send")
        for span in measured.spans.of(kind)
        for name in span.attributes or ()
    }

    assert written <= {value for value in PACKAGE.values() if isinstance(value, str)} | {"aioshard.attempt"}
    assert {"messaging.kafka.offset", "error.type", "messaging.kafka.message.key"} <= written


@pytest.mark.parametrize("operation", ["process", "commit", "send"])
def test_a_span_has_what_the_table_says_of_its_kind(measured: Measured, operation: str) -> None:
    written = {name for span in measured.spans.of(operation) for name in span.attributes or ()}

    assert written <= {name for name, (spans, _) in ATTRIBUTES.items() if operation in spans.split(", ")}


def test_the_values_have_the_types_of_the_conventions(measured: Measured) -> None:
    types: Mapping[str, type] = {
        "messaging.kafka.offset": int,
        "server.port": int,
        "aioshard.attempt": int,
        "messaging.kafka.message.tombstone": bool,
    }
    for kind in ("process", "commit", "send"):
        for span in measured.spans.of(kind):
            for name, value in (span.attributes or {}).items():
                assert type(value) is types.get(name, str), name


def test_the_metrics_are_those_of_the_conventions(measured: Measured) -> None:
    found = measured.metrics()

    assert {name: (metric.unit, metric.description) for name, metric in found.items()} == {
        name: (unit, meaning) for name, (_, unit, meaning) in METRICS.items()
    }


def test_attempts_are_measured_as_their_spans_are(measured: Measured) -> None:
    metric = measured.metrics()["messaging.process.duration"]
    points: list[HistogramDataPoint] = list(metric.data.data_points)
    spans = measured.spans.of("process")

    assert len(spans) == sum(point.count for point in points) == 4
    lasted = sum((span.end_time or 0) - (span.start_time or 0) for span in spans) / 1e9
    assert sum(point.sum for point in points) == pytest.approx(lasted)
    assert {tuple(point.explicit_bounds) for point in points} == {DURATION_BOUNDS}
    by_error = {dict(point.attributes or {}).get("error.type"): point.count for point in points}
    assert by_error == {None: 2, "ValueError": 2}
    assert {frozenset(dict(point.attributes or {})) - {"error.type"} for point in points} == {
        frozenset(
            {
                "messaging.system",
                "messaging.operation.name",
                "messaging.destination.name",
                "messaging.destination.partition.id",
                "messaging.consumer.group.name",
                "server.address",
                "server.port",
            }
        )
    }


def test_a_record_counts_as_consumed_once_however_often_it_is_tried(measured: Measured) -> None:
    (point,) = measured.metrics()["messaging.client.consumed.messages"].data.data_points

    assert point.value == 3


def test_what_is_published_and_committed_is_measured(measured: Measured) -> None:
    found = measured.metrics()
    operations = {
        dict(point.attributes)["messaging.operation.name"]: (point.count, dict(point.attributes))
        for point in found["messaging.client.operation.duration"].data.data_points
        if "messaging.destination.partition.id" in point.attributes
    }
    (sent,) = found["messaging.client.sent.messages"].data.data_points

    assert set(operations) == {"commit", "send"}
    assert operations["send"][0] == sent.value == 4
    assert operations["commit"][1]["messaging.operation.type"] == "settle"


def test_records_of_a_batch_are_counted_each() -> None:
    measured = Measured()

    @measured.app.consume("orders", batch=Batch(2, linger=1.0), retry=Retry(attempts=2, initial=0.01))
    async def handle(_: list[Record], context: BatchContext) -> None:
        if context.attempt == 1:
            raise ValueError("no")

    measured.consume("one", "two")

    (consumed,) = measured.metrics()["messaging.client.consumed.messages"].data.data_points
    assert consumed.value == 2
