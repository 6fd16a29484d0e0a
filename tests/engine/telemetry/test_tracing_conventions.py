"""Spans use exactly the names of the OpenTelemetry semantic conventions."""

import ast
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from opentelemetry.semconv.schemas import Schemas

from aioshard import App, Context, Record, Retry
from aioshard.telemetry.tracing import ATTRIBUTES, SCHEMA_URL, trace
from aioshard.testing import InMemoryBroker, TestClient, run
from tests.engine.telemetry.traces import TRACEPARENT, Spans

PACKAGE = vars(messaging_attributes) | vars(error_attributes) | vars(server_attributes)
CONVENTIONAL = [name for name in ATTRIBUTES if not name.startswith("aioshard.")]


def as_constant(name: str) -> str:
    """The name of the constant that the package has for an attribute."""
    return name.replace(".", "_").upper()


def described(module: Any) -> dict[str, str]:
    """Return the package's description of each name."""
    body = ast.parse(Path(module.__file__).read_text()).body
    found = {}
    for node, following in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            found[node.target.id] = ast.literal_eval(following.value)
    return found


@pytest.mark.parametrize("name", CONVENTIONAL)
def test_attribute_names_match_the_semantic_conventions(name: str) -> None:
    assert PACKAGE[as_constant(name)] == name


@pytest.mark.parametrize("name", [name for name in CONVENTIONAL if name.startswith("messaging.")])
def test_no_attribute_is_deprecated(name: str) -> None:
    text = described(messaging_attributes)[as_constant(name)]

    assert "Deprecated" not in text


def test_the_check_for_deprecated_attributes_can_fail() -> None:
    assert "Deprecated" in described(messaging_attributes)["MESSAGING_KAFKA_MESSAGE_OFFSET"]


def test_the_schema_is_the_newest_in_the_package() -> None:
    assert SCHEMA_URL == list(Schemas)[-1].value == Schemas.V1_44_0.value


def test_operation_types_match_the_semantic_conventions() -> None:
    values = {operation.value for operation in messaging_attributes.MessagingOperationTypeValues}

    assert {"process", "send"} <= values
    assert "kafka" in {system.value for system in messaging_attributes.MessagingSystemValues}


# Exported spans ----------------------------------------------------------------------------


class Measured:
    """An app whose spans are collected, after a few records."""

    def __init__(self) -> None:
        self.spans = Spans()
        self.broker = InMemoryBroker(partitions=1)
        self.app = App("billing", bootstrap_servers="kafka.example:9092", show_keys=True)
        trace(self.app, tracer_provider=self.spans.provider)

    def consume(self, *values: object) -> None:
        async def scenario() -> None:
            async with TestClient(self.app, broker=self.broker) as client:
                for value in values:
                    await client.publish("orders", value, key="alice", headers=[TRACEPARENT])
                await client.settle(60.0)

        run(scenario())


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


def test_spans_have_only_attributes_of_the_conventions(measured: Measured) -> None:
    written = {
        name for kind in ("process", "send") for span in measured.spans.of(kind) for name in span.attributes or ()
    }

    assert written <= {value for value in PACKAGE.values() if isinstance(value, str)} | {"aioshard.attempt"}
    assert {"messaging.kafka.offset", "error.type", "messaging.kafka.message.key"} <= written


@pytest.mark.parametrize("operation", ["process", "send"])
def test_a_span_has_the_attributes_listed_for_its_kind(measured: Measured, operation: str) -> None:
    written = {name for span in measured.spans.of(operation) for name in span.attributes or ()}

    assert written <= {name for name, (spans, _) in ATTRIBUTES.items() if operation in spans.split(", ")}


def test_attribute_values_have_the_types_of_the_conventions(measured: Measured) -> None:
    types: Mapping[str, type] = {
        "messaging.kafka.offset": int,
        "server.port": int,
        "aioshard.attempt": int,
        "messaging.kafka.message.tombstone": bool,
    }
    for kind in ("process", "send"):
        for span in measured.spans.of(kind):
            for name, value in (span.attributes or {}).items():
                assert type(value) is types.get(name, str), name
