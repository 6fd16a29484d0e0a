"""Every file in `examples` runs and works as described."""

import ast
import asyncio
import contextlib
import importlib.util
import json
import re
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psycopg
import pyarrow.dataset
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from aioshard import App, HandlerStatistics, Record
from aioshard.core.sharding import shard_number
from aioshard.schema_registry import Avro
from aioshard.schema_registry.framing import frame_of
from aioshard.testing import InMemoryBroker, TestClient, assert_idempotent, run
from aioshard.web.server import serve_in_thread
from tests.support.kafka import KafkaBroker
from tests.support.paths import PROJECT
from tests.support.subprocesses import run_module

EXAMPLES = PROJECT / "examples"
DEADLINE = 40.0


def load(name: str) -> ModuleType:
    """A fresh module of an example."""
    spec = importlib.util.spec_from_file_location(f"example_{Path(name).stem}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested_here() -> None:
    tests = [node.name for node in ast.parse(Path(__file__).read_text()).body if hasattr(node, "name")]

    for example in (*EXAMPLES.glob("*.py"), EXAMPLES / "order_service"):
        assert any(example.stem in test for test in tests), f"{example.name} is not tested"


async def test_quickstart_prints_every_order_on_a_real_broker(own_kafka: KafkaBroker) -> None:
    await own_kafka.create_topic("orders", partitions=4)
    await own_kafka.produce("orders", [(b"customer-%d" % (number % 7), b"{}") for number in range(100)])
    arguments = ["run", "quickstart:app", "--app-dir", str(EXAMPLES), "--until-caught-up"]

    output = await run_module("aioshard", *arguments, "--bootstrap-servers", own_kafka.bootstrap)

    assert len(output.splitlines()) == 100
    assert sum((await own_kafka.committed("billing", "orders")).values()) == 100


@pytest.mark.chaos
async def test_fastapi_app_consumes_between_startup_and_shutdown(own_kafka: KafkaBroker) -> None:
    example = load("fastapi_app")
    app: App = example.app
    app.configure(bootstrap_servers=own_kafka.bootstrap)
    await own_kafka.create_topic("payments", partitions=2)
    await own_kafka.produce("payments", [(b"alice", b"3"), (b"ben", b"5"), (b"alice", b"4")])

    async with (
        example.api.router.lifespan_context(example.api),
        httpx.AsyncClient(transport=httpx.ASGITransport(example.api), base_url="http://example") as client,
        asyncio.timeout(DEADLINE),
    ):
        assert (await client.get("/readyz")).status_code == 200
        await own_kafka.wait_for_lag("billing", "payments")
        assert (await client.get("/balances/alice")).json() == 7
        assert (await client.get("/balances/ben")).json() == 5
        assert "aioshard_records_processed_total" in (await client.get("/metrics")).text

    assert app.statistics().state == "stopped"


async def test_order_service_books_each_order_once_and_answers_while_it_drains(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its restart under load is in tests/guarantees/test_embedded_restart.py."""
    monkeypatch.setenv("DATABASE_URL", postgresql_url)
    example = load("order_service/service")
    orders = [f"/orders/{uuid.UUID(int=number)}" for number in range(5)]

    async with (
        TestClient(example.app) as kafka,
        example.api.router.lifespan_context(example.api),
        httpx.AsyncClient(transport=httpx.ASGITransport(example.api), base_url="http://example") as client,
    ):
        bodies = [{"customer": "alice", "article": "book", "amount": "2.50"} for _ in orders]
        for order, body in zip([*orders, orders[0]], [*bodies, bodies[0]], strict=True):
            assert (await client.put(order, json=body)).status_code == 202
        await kafka.settle()
        kafka.group.commit_from_outside(dict.fromkeys(kafka.group.subscribed(), 0))
        kafka.group.lose()  # everything is delivered again
        await kafka.settle()

        assert (await client.get("/customers/alice")).json() == {"orders": "5", "spent": "12.50"}
        assert (await client.get(orders[3])).json()["article"] == "book"
        assert (await client.get(f"/orders/{uuid.UUID(int=9)}")).status_code == 404
        assert (await client.put(orders[0], json={**bodies[0], "amount": 0})).status_code == 422
        for path in ("livez", "readyz", "metrics", "dashboard/", "dashboard/dashboard.json"):
            assert (await client.get(f"/internal/{path}")).status_code == 200, path
        assert (await client.get("/internal/dashboard")).headers["location"].endswith("/internal/dashboard/")
        assert (await client.get("/internal/drain")).json()["state"] == "stopped"
        assert (await client.get("/internal/readyz")).status_code == 503
        assert (await client.put(orders[0], json=bodies[0])).status_code == 202
        assert (await client.get("/customers/alice")).status_code == 200


class FakeModel:
    """An API like OpenAI's that fails as the text of a review says, and counts."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.times: list[float] = []
        self.most_at_once = 0
        self._now = 0

    async def complete(self, request: Request) -> Response:
        """Answers a call."""
        text = (await request.json())["messages"][1]["content"]
        self.calls[text] += 1
        self.times.append(time.monotonic())
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        await asyncio.sleep(0.2 if "slow" in text else 0.02)
        self._now -= 1
        if "bad" in text or (found := re.search(r"(\d+) until call (\d+)", text)) is None:
            status = 400 if "bad" in text else 200
        else:
            status = int(found[1]) if self.calls[text] < int(found[2]) else 200
        content = "Hm?" if "odd" in text and self.calls[text] == 1 else "Positive."
        return JSONResponse({"choices": [{"message": {"content": content}}]}, status_code=status)


async def test_llm_fanout_keeps_the_rate_retries_and_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel()
    trouble = {"429 until call 2": 2, "500 until call 3": 3, "503 until call 99": 6, "bad": 1, "odd": 2, "slow": 1}
    texts = [*trouble, *(f"good and slow {number}" for number in range(60))]
    routes = [Route("/v1/chat/completions", model.complete, methods=["POST"])]

    async with serve_in_thread(Starlette(routes=routes), host="127.0.0.1", port=0) as (host, port):
        monkeypatch.setenv("LLM_API", f"http://{host}:{port}/v1")
        example = load("llm_fanout")
        async with TestClient(example.app, speed=50) as kafka:
            for text in texts:
                await kafka.publish("reviews", {"id": text, "text": text}, key="one customer")
            await kafka.settle(timeout=30)
            classified = [json.loads(record.value or b"") for record in kafka.records("reviews.classified")]
            dead_letters = [json.loads(record.value or b"")["id"] for record in kafka.records("reviews.dlt")]

    assert {text: model.calls[text] for text in trouble} == trouble
    assert sorted(dead_letters) == ["503 until call 99", "bad"]
    assert sorted(review["id"] for review in classified) == sorted(set(texts) - set(dead_letters))
    assert {review["class"] for review in classified} == {"positive"}
    assert model.most_at_once > 4, "one call after the other"
    seconds = model.times[-1] - model.times[0]
    assert len(model.times) <= 5 + example.PER_SECOND * (seconds + 0.2), "faster than the API allows"


def test_resources_are_open_while_handlers_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = load("resources")
    payments: list[tuple[str, int]] = []

    async def scenario() -> None:
        async with TestClient(example.app) as client:
            for amount in range(20):
                await client.publish("payments", str(amount), key=f"customer {amount % 3}")
            await client.settle()
            client.group.commit_from_outside(dict.fromkeys(client.group.subscribed(), 0))
            client.group.lose()  # everything is delivered again
            await client.settle()
            assert example.app.statistics().replayed == 20
            database = example.app._state
            payments.extend(database.execute("SELECT customer, amount FROM payments ORDER BY amount"))

    run(scenario())
    assert payments == [(f"customer {amount % 3}", amount) for amount in range(20)]
    assert (tmp_path / "ledger.db").exists()


def test_dependencies_commit_with_the_handler_or_roll_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = load("dependencies")

    async def scenario() -> int:
        async with TestClient(example.app) as client:
            for amount in (3, -4, 5):
                await client.publish("payments", str(amount), key="alice")
            await client.settle()
            statistics: HandlerStatistics = example.app.statistics().handlers[0]
            return statistics.skipped

    assert run(scenario()) == 1
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
        booked = database.execute("SELECT customer, amount FROM payments ORDER BY amount").fetchall()
    assert booked == [("alice", 3), ("alice", 5)]


def test_dependencies_are_replaced_in_a_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = load("dependencies")
    booked: list[tuple[str, int]] = []

    class FakeLedger:
        def book(self, customer: str, amount: int) -> None:
            booked.append((customer, amount))

    async def scenario() -> None:
        async with TestClient(example.app, overrides={example.Ledger: FakeLedger}) as client:
            await client.publish("payments", "3", key="alice")
            await client.settle()

    run(scenario())
    assert booked == [("alice", 3)]
    assert list(tmp_path.iterdir()) == []


ORDERS = [(b"alice", 3, "old street"), (b"ben", 4, "square"), (b"alice", 5, "new street")]


def orders() -> list[Record]:
    broker = InMemoryBroker(partitions=1)
    values = [(key, json.dumps({"amount": amount, "address": address})) for key, amount, address in ORDERS]
    return [broker.publish("orders", value.encode(), key=key) for key, value in values]


def test_inbox_sqlite_applies_each_order_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of it is shown in tests/services/idempotence."""
    monkeypatch.chdir(tmp_path)
    example = load("inbox_sqlite")
    file = tmp_path / example.DATABASE

    def customers() -> list[tuple[str, int, str]]:
        if not file.exists():
            return []
        with contextlib.closing(sqlite3.connect(file)) as database:
            return database.execute("SELECT id, spent, address FROM customers ORDER BY id").fetchall()

    def reset() -> None:
        for left in tmp_path.iterdir():
            left.unlink()

    run(assert_idempotent(example.app, orders(), reset=reset, effects=customers))
    assert customers() == [("alice", 8, "new street"), ("ben", 4, "square")]


async def test_inbox_postgresql_applies_each_order_once(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of it is shown in tests/services/idempotence."""
    monkeypatch.setenv("DATABASE_URL", postgresql_url)
    example = load("inbox_postgresql")

    async with TestClient(example.app) as client:
        for record in orders():
            client.broker.publish("orders", record.value, key=record.key)
        await client.settle()

    with psycopg.connect(postgresql_url) as connection:
        found = connection.execute("SELECT id, spent, address FROM customers ORDER BY id").fetchall()
    assert found == [("alice", 8, "new street"), ("ben", 4, "square")]


async def test_orders_to_invoices_gives_each_order_one_invoice_or_dead_letter() -> None:
    """Processes that are killed are in tests/guarantees."""
    example = load("orders_to_invoices")
    orders: list[dict[str, Any]] = [
        {"id": f"{number}", "customer": "alice", "amount": number % 10} for number in range(50)
    ]

    async with TestClient(example.app) as client:
        for order in orders:
            await client.publish("orders", order, key=f"customer {order['id']}")
        await client.settle()
        client.group.rebalance()
        await client.settle()
        invoices = [json.loads(record.value or b"")["order"] for record in client.records("invoices")]
        dead_letters = [json.loads(record.value or b"")["id"] for record in client.records("orders.dlt")]

    assert sorted(invoices) == sorted(order["id"] for order in orders if order["amount"])
    assert sorted(dead_letters) == sorted(order["id"] for order in orders if not order["amount"])


async def test_avro_invoices_are_written_with_the_registered_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_URL", f"mock://{uuid.uuid4().hex}")
    example = load("avro_invoices")
    money = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
    texts = [{"name": name, "type": "string"} for name in ("id", "order", "customer")]
    order = {"type": "record", "name": "Order", "fields": [texts[0], texts[2], {"name": "amount", "type": money}]}
    invoice = {"type": "record", "name": "Invoice", "fields": [*texts[1:], {"name": "total", "type": money}]}
    orders = Avro(example.registry, schema=json.dumps(order), auto_register=True)
    invoices = Avro(example.registry, schema=json.dumps(invoice), auto_register=True)

    async with TestClient(example.app) as client:
        first = {"order": "0", "customer": "ben", "total": Decimal("1.00")}
        await client.publish("invoices", first, format=invoices)  # registers the schema
        await client.publish("orders", {"id": "1", "customer": "alice", "amount": Decimal("7.50")}, format=orders)
        await client.publish("orders", b"not Avro")
        await client.settle()
        registered, written = client.records("invoices")
        dead_letters = client.records("orders.dlt")

    assert frame_of(written).schema == frame_of(registered).schema
    assert frame_of(written).content == b"\x021\x0aalice\x04\x02\xee"
    assert len(dead_letters) == 1


def test_fixed_shards_keep_separate_caches() -> None:
    example = load("fixed_shards")
    looked_up: list[bytes] = []
    look_up: Callable[[bytes], Awaitable[str]] = example.look_up

    async def counted(key: bytes) -> str:
        looked_up.append(key)
        return await look_up(key)

    vars(example)["look_up"] = counted

    async def scenario() -> None:
        async with TestClient(example.app) as client:
            for number in range(200):
                await client.publish("prices", "1", key=f"k{number % 25}")
            await client.publish("prices", "1")
            await client.settle()

    run(scenario())
    assert len(looked_up) == len(set(looked_up)) == 25
    for number, cache in enumerate(example.caches):
        assert all(shard_number(key, example.SHARDS) == number for key in cache)


async def test_plain_def_runs_in_threads() -> None:
    example = load("plain_def")
    async with TestClient(example.app) as client:
        sent: list[Record] = [await client.publish("images", b"", partition=0) for _ in range(40)]
        await client.settle()

    assert sorted(example.made) == [record.offset for record in sent]


def test_the_tests_of_testing_a_handler_pass() -> None:
    example = load("testing_a_handler")
    tests = [test for name, test in vars(example).items() if name.startswith("test_")]

    assert len(tests) == 3
    for test in tests:
        example.payments.available = True
        example.payments.charged.clear()
        test()


async def test_flight_delays_distinguishes_cancelled_from_punctual_flights() -> None:
    """Over history it runs in `tests/spark/test_flights.py`."""
    example = load("flight_delays")
    async with TestClient(example.app) as client:
        await client.publish("flights", b'{"number": 1, "departure_delay": null}', key=b"N1", partition=0)
        await client.settle()
        assert client.committed("flights", 0) == 1
    found = [example.delay_class(delay) for delay in (None, -3, 15, 16, 120, 121)]
    assert found == ["cancelled", "on time", "on time", "late", "late", "very late"]


def test_flights_lines_are_readable_by_flight_delays(capsys: pytest.CaptureFixture[str]) -> None:
    load("flights_lines").main(2_000)

    flights = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [flight["number"] for flight in flights] == list(range(2_000))
    assert (flights[0]["aircraft"], flights[0]["departure_delay"]) == ("N14228", 2)
    assert any(flight["aircraft"] is None for flight in flights)


async def test_flights_journal_has_a_row_for_each_flight(tmp_path: Path) -> None:
    """The reports in the documentation are made of it."""
    example = load("flights_journal")
    await example.main(str(tmp_path), 500)

    assert pyarrow.dataset.dataset(tmp_path).count_rows() == 500
