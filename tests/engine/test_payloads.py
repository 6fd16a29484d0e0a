"""Typed payloads: an undecodable record fails once and delays no other."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from aioshard import App, Batch, BatchContext, BatchError, Context, DeadLetter, Park, Record, Retry
from aioshard.errors import DecodeError
from aioshard.testing import InMemoryBroker, TestClient, run
from tests.engine.live_apps import until


@dataclasses.dataclass
class Order:
    customer: str
    number: int


BAD = b"no order"


class World:
    """An app, and the payloads that its handler received."""

    def __init__(self, **settings: Any) -> None:
        self.broker = InMemoryBroker(partitions=1)
        self.app = App("group", commit_interval=0.1, **settings)
        self.given: list[Any] = []

    async def publish(self, client: TestClient, *, bad: set[int], count: int = 20, keys: int = 5) -> None:
        for number in range(count):
            key = f"k{number % keys}"
            value = BAD if number in bad else {"customer": key, "number": number}
            await client.publish("orders", value, key=key, partition=0)

    def numbers(self) -> list[int]:
        return [order.number for order in self.given]

    def of_key(self, key: str) -> list[int]:
        return [order.number for order in self.given if order.customer == key]


def consume(world: World, *, bad: set[int], **loads: int) -> Sequence[Record]:
    """Run until all is done; returns the dead letters."""

    async def test() -> Sequence[Record]:
        async with TestClient(world.app, broker=world.broker) as client:
            await world.publish(client, bad=bad, **loads)
            await client.settle(60.0)
            statistics = world.app.statistics()
            assert statistics.handlers[0].retried == 0
            assert world.broker.committed("group", "orders", 0) == loads.get("count", 20)
            return client.records("orders.dlt")

    return run(test())


def test_a_handler_gets_objects_and_undecodable_records_are_not_retried() -> None:
    world = World()

    @world.app.consume("orders", on_failure=DeadLetter("orders.dlt"))
    async def handle(order: Order, context: Context) -> None:
        assert context.record.offset == order.number
        assert context.attempt == 1
        world.given.append(order)

    dead_letters = consume(world, bad={3, 8})

    assert sorted(world.numbers()) == [number for number in range(20) if number not in {3, 8}]
    assert world.of_key("k3") == [13, 18]
    assert [dead_letter.value for dead_letter in dead_letters] == [BAD, BAD]
    assert dict(dead_letters[0].headers)["aioshard.error"] == b"DecodeError"
    assert dict(dead_letters[0].headers)["aioshard.attempts"] == b"1"


def test_handlers_without_context_and_in_threads_get_objects_too() -> None:
    world = World()

    @world.app.consume("orders", on_failure=DeadLetter("orders.dlt"))
    async def handle(order: Order) -> None:
        world.given.append(order)

    assert len(consume(world, bad={3})) == 1

    other = World()

    @other.app.consume("orders", on_failure=DeadLetter("orders.dlt"))
    def handle_there(order: Order) -> None:
        other.given.append(order)

    async def test() -> None:
        async with TestClient(other.app, broker=other.broker) as client:
            await other.publish(client, bad={3})
            await client.settle(30.0)

    asyncio.run(test())  # threads know no virtual time

    assert sorted(world.numbers()) == sorted(other.numbers()) == [n for n in range(20) if n != 3]


@pytest.mark.parametrize("linger", [0.0, 0.5])
@pytest.mark.parametrize("bad", [{0}, {7}, {2, 7, 12}, set(range(20)), {0, 19}])
def test_only_the_undecodable_record_of_a_batch_fails(bad: set[int], linger: float) -> None:
    """No other of its batch is tried again, no key is reordered, and the handler never sees it."""
    world = World()
    attempts: set[int] = set()

    policy = DeadLetter("orders.dlt", breaker=None)

    @world.app.consume("orders", batch=Batch(max_records=10, linger=linger), on_failure=policy)
    async def handle(orders: list[Order], context: BatchContext) -> None:
        attempts.add(context.attempt)
        assert orders
        world.given.extend(orders)

    dead_letters = consume(world, bad=bad)

    assert sorted(world.numbers()) == [number for number in range(20) if number not in bad]
    for key in range(5):
        assert world.of_key(f"k{key}") == sorted(world.of_key(f"k{key}"))
    assert len(dead_letters) == len(bad)
    assert attempts <= {1}


def test_a_batch_handler_names_failed_objects_and_knows_the_keys() -> None:
    """Though it gets objects, which do not say where they are from."""
    world = World()

    @world.app.consume("orders", batch=Batch(max_records=50, linger=0.2), on_failure=DeadLetter("orders.dlt"))
    async def handle(orders: list[Order], context: BatchContext) -> None:
        by_record = dict(zip(context.records, orders, strict=True))
        assert all((record.key or b"").decode() == order.customer for record, order in by_record.items())
        assert all(context.idempotency_key(record) == f"orders/0/{order.number}" for record, order in by_record.items())
        failed = {record: PermissionError() for record, order in by_record.items() if order.number == 9}
        world.given.extend(order for record, order in by_record.items() if record not in failed)
        if failed:
            raise BatchError(failed)

    async def test() -> None:
        async with TestClient(world.app, broker=world.broker) as client:
            await world.publish(client, bad={3})
            await client.settle(60.0)
            dead_letters = {dict(dead_letter.headers)["aioshard.error"] for dead_letter in client.records("orders.dlt")}
            assert dead_letters == {b"DecodeError", b"PermissionError"}

    run(test())
    assert sorted(world.numbers()) == [number for number in range(20) if number not in {3, 9}]


class Exotic(BaseException):
    """As libraries raise to get past `except Exception`."""


@pytest.mark.parametrize(
    ("error", "name"), [(Exotic, b"Exotic"), (asyncio.CancelledError, b"CancelledRunError")], ids=["own", "cancelled"]
)
def test_any_decoder_exception_fails_only_its_record_of_a_batch(error: type[BaseException], name: bytes) -> None:
    world = World()

    def decode(record: Record) -> Order:
        if record.value == BAD:
            raise error
        return Order((record.key or b"").decode(), record.offset)

    @world.app.consume(
        "orders",
        decode=decode,
        batch=Batch(max_records=50, linger=0.2),
        retry=Retry(attempts=1),
        on_failure=DeadLetter("orders.dlt"),
    )
    async def handle(orders: list[Order]) -> None:
        world.given.extend(orders)

    (dead_letter,) = consume(world, bad={7})

    assert dict(dead_letter.headers)["aioshard.error"] == name
    assert sorted(world.numbers()) == [number for number in range(20) if number != 7]


def test_tombstones_in_a_batch_are_none_if_accepted() -> None:
    world = World()
    seen: list[Order | None] = []

    @world.app.consume("orders", batch=Batch(max_records=3, linger=0.2))
    async def handle(orders: list[Order | None]) -> None:
        seen.extend(orders)

    async def test() -> None:
        async with TestClient(world.app, broker=world.broker) as client:
            for value in ({"customer": "a", "number": 1}, None, None):
                await client.publish("orders", value, key="a", partition=0)
            await client.settle(60.0)

    run(test())
    assert seen == [Order("a", 1), None, None]


def test_a_slow_async_decoder_is_cancelled_with_its_attempt() -> None:
    world = World()

    async def decode(record: Record) -> Order:
        if record.offset == 1:
            await asyncio.sleep(3600)
        return Order("a", record.offset)

    @world.app.consume(
        "orders", decode=decode, timeout=1.0, retry=Retry(attempts=2), on_failure=DeadLetter("orders.dlt")
    )
    async def handle(order: Order) -> None:
        world.given.append(order)

    async def test() -> None:
        async with TestClient(world.app, broker=world.broker) as client:
            await world.publish(client, bad=set(), count=3, keys=1)
            await client.settle(60.0)
            (dead_letter,) = client.records("orders.dlt")
            assert dict(dead_letter.headers)["aioshard.error"] == b"AttemptTimeoutError"
            assert dict(dead_letter.headers)["aioshard.attempts"] == b"2"

    run(test())
    assert world.numbers() == [0, 2]


def test_a_batch_without_decodable_records_does_not_run() -> None:
    """Else what waits for its batch to fill would wait for it to make room."""
    world = World(max_buffered_records=10)

    @world.app.consume("orders", batch=Batch(max_records=50, linger=20.0), on_failure=DeadLetter("orders.dlt"))
    async def handle(orders: list[Order]) -> None:
        world.given.extend(orders)

    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with TestClient(world.app, broker=world.broker) as client:
            await world.publish(client, bad=set(range(10)), count=10, keys=10)
            await client.settle(60.0)
            began = loop.time()
            await world.publish(client, bad=set(), count=10)
            await until(lambda: len(world.given) == 10, 60.0)
            assert loop.time() - began < 10.0

    run(test())


def test_a_failed_record_is_not_decoded_again_for_its_dead_letter() -> None:
    world = World()
    read: list[int] = []

    def decode(record: Record) -> Order:
        read.append(record.offset)
        return Order("a", int(record.value or b""))

    @world.app.consume(
        "orders", decode=decode, batch=Batch(max_records=10, linger=0.2), on_failure=DeadLetter("orders.dlt")
    )
    async def handle(orders: list[Order]) -> None: ...

    async def test() -> None:
        async with TestClient(world.app, broker=world.broker) as client:
            for value in ("1", "x"):
                await client.publish("orders", value, key=value, partition=0)
            await client.settle(60.0)

    run(test())
    assert read.count(0) == 1
    assert read.count(1) == 3  # in its batch, alone, and where it fails


def test_a_halted_record_of_a_batch_holds_back_its_key() -> None:
    world = World()

    @world.app.consume("orders", batch=Batch(max_records=50, linger=0.2))
    async def handle(orders: list[Order]) -> None:
        world.given.extend(orders)

    async def test() -> None:
        async with TestClient(world.app, broker=world.broker) as client:
            await world.publish(client, bad={7})
            await until(lambda: world.app.statistics().handlers[0].halted)
            assert sorted(world.numbers()) == [n for n in range(20) if n not in {7, 12, 17}]
            world.app.skip("orders", 0, 7)
            await client.settle(30.0)
            assert world.of_key("k2") == [2, 12, 17]

    run(test())


def test_a_parked_record_of_a_batch_parks_its_key() -> None:
    world = World()
    seen: list[int] = []

    async def handle(orders: list[Order]) -> None:
        seen.extend(order.number for order in orders)

    app = App("group", commit_interval=0.1)
    app.consume("orders", batch=Batch(max_records=50, linger=0.2), on_failure=Park("parked", delay=5.0))(handle)

    async def test() -> None:
        async with TestClient(app, broker=world.broker) as client:
            await world.publish(client, bad={7})
            await client.settle(30.0)
            assert sorted(seen) == [n for n in range(20) if n not in {7, 12, 17}]
            assert app.statistics().handlers[0].parked == 3

    run(test())


def test_an_unresponsive_schema_registry_is_asked_again() -> None:
    world = World()
    asked: list[int] = []

    async def decode(record: Record) -> Order:
        asked.append(record.offset)
        if asked.count(record.offset) < 3:
            raise ConnectionError("no registry")
        if record.value == BAD:
            raise DecodeError("no schema")
        return Order(str(record.key), record.offset)

    @world.app.consume("orders", decode=decode, retry=Retry(attempts=3), on_failure=DeadLetter("orders.dlt"))
    async def handle(order: Order) -> None:
        world.given.append(order)

    async def test() -> None:
        async with TestClient(world.app, broker=world.broker) as client:
            await world.publish(client, bad={3}, count=5)
            await client.settle(60.0)
            assert len(client.records("orders.dlt")) == 1

    run(test())
    assert sorted(world.numbers()) == [0, 1, 2, 4]
    assert all(asked.count(offset) == 3 for offset in range(5))


@pytest.mark.parametrize("on_failure", ["halt", DeadLetter("orders.dlt")], ids=["halt", "dead letter"])
def test_an_undecodable_payload_is_logged_without_internal_traceback(
    on_failure: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """No line of it would be the user's; if the user's function has decoded, it is shown."""
    world = World()

    def decode(_: Record) -> Order:
        raise DecodeError("no schema")

    @world.app.consume("orders", on_failure=on_failure)
    async def handle(order: Order) -> None: ...

    @world.app.consume("refunds", decode=decode, on_failure=on_failure)
    async def handle_too(order: Order) -> None: ...

    async def test() -> None:
        async with TestClient(world.app, broker=world.broker) as client:
            await client.publish("orders", BAD)
            await client.publish("refunds", BAD)
            await until(lambda: sum("failed after 1 attempt" in line.getMessage() for line in caplog.records) == 2)

    run(test())
    shown = {line.getMessage().split()[1]: line.exc_info for line in caplog.records if "1 attempt" in line.getMessage()}
    assert shown["orders/0/0"] is None
    assert shown["refunds/0/0"] is not None
