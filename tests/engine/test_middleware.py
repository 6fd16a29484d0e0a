"""Middleware around every attempt: order, changes and exceptions."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aioshard import App, Batch, BatchContext, Context, DeadLetter, Record, Retry, Router
from aioshard.errors import HandlerError, StateError
from aioshard.testing import InMemoryBroker, TestClient, run
from tests.engine.live_apps import until

Next = Callable[[Any, Any], Awaitable[object]]


@dataclasses.dataclass
class Order:
    number: int


class World:
    """An app on one partition, and what happened in it."""

    def __init__(self, **settings: Any) -> None:
        self.broker = InMemoryBroker(partitions=1)
        self.app = App("group", commit_interval=0.1, **settings)
        self.seen: list[object] = []

    def noting(self, name: str) -> Callable[[Any, Any, Next], Awaitable[object]]:
        async def around(record: Any, context: Any, call_next: Next) -> object:
            self.seen.append(f"{name} in")
            try:
                return await call_next(record, context)
            finally:
                self.seen.append(f"{name} out")

        return around

    def consume(self, *values: object) -> None:
        async def test() -> None:
            async with TestClient(self.app, broker=self.broker) as client:
                for value in values:
                    await client.publish("orders", value, key="k", partition=0)
                await client.settle(60.0)

        run(test())


def test_app_middleware_is_outermost_in_registration_order() -> None:
    world = World()
    handlers = Router()
    handlers.middleware(world.noting("of the set"))

    @handlers.consume("orders")
    async def handle(record: Record) -> None:
        world.seen.append(record.offset)

    world.app.middleware(world.noting("first"))
    world.app.include_router(handlers)
    world.app.middleware(world.noting("second"))

    world.consume("one")

    assert world.seen == [
        "first in",
        "second in",
        "of the set in",
        0,
        "of the set out",
        "second out",
        "first out",
    ]


def test_app_handlers_run_app_middleware_once() -> None:
    world = World()

    @world.app.consume("orders")
    async def handle(record: Record, context: Context) -> None:
        world.seen.append((record.offset, context.attempt))

    world.app.middleware(world.noting("it"))

    world.consume("one")

    assert world.seen == ["it in", (0, 1), "it out"]


def test_the_handler_gets_the_record_and_context_passed_by_middleware() -> None:
    world = World()

    @world.app.middleware
    async def change(record: Record, context: Context, call_next: Next) -> object:
        number = int(record.value or b"")
        return await call_next(
            record._replace(value=b'{"number": %d}' % (2 * number)), dataclasses.replace(context, state="s")
        )

    @world.app.consume("orders")
    async def handle(order: Order, context: Context) -> None:
        world.seen.append((order.number, context.state, context.record.value))

    world.consume("7", "8")

    assert world.seen == [(14, "s", b"7"), (16, "s", b"8")]


def test_a_raising_middleware_fails_the_attempt_and_a_suppressing_one_does_not() -> None:
    world = World()

    @world.app.middleware
    async def guard(record: Record, context: Context, call_next: Next) -> object:
        if record.value == b"refused":
            raise PermissionError("not today")
        try:
            return await call_next(record, context)
        except LookupError:
            return None

    @world.app.consume("orders", retry=Retry(attempts=2, initial=0.01), on_failure=DeadLetter("orders.dlt"))
    async def handle(record: Record, context: Context) -> None:
        world.seen.append((record.value, context.attempt))
        if record.value == b"unknown":
            raise LookupError

    world.consume("refused", "unknown", "fine")

    assert world.seen == [(b"unknown", 1), (b"fine", 1)]
    (letter,) = world.broker.records("orders.dlt")
    assert letter.value == b"refused"
    assert dict(letter.headers)["aioshard.attempts"] == b"2"


def test_a_timeout_passes_through_middleware() -> None:
    world = World()

    @world.app.middleware
    async def around(record: Record, context: Context, call_next: Next) -> object:
        try:
            return await call_next(record, context)
        except asyncio.CancelledError:
            world.seen.append("cancelled")
            raise

    @world.app.consume("orders", timeout=1.0, retry=Retry(attempts=1), on_failure="skip")
    async def handle(_: Record) -> None:
        await asyncio.sleep(3600)

    world.consume("one")

    assert world.seen == ["cancelled"]


def test_batch_middleware_can_change_records_before_decoding() -> None:
    world = World()

    @world.app.middleware
    async def around(records: list[Record], context: BatchContext, call_next: Next) -> object:
        world.seen.append(len(records))
        return await call_next([record._replace(value=b'{"number": 1}') for record in records], context)

    @world.app.consume("orders", batch=Batch(max_records=10, linger=0.1))
    async def handle(orders: list[Order]) -> None:
        world.seen.append(orders)

    world.consume("a", "b", "c")

    assert world.seen == [3, [Order(1)] * 3]


async def test_middleware_of_a_threaded_handler_runs_on_the_event_loop() -> None:
    world = World()
    world.app.middleware(world.noting("it"))

    @world.app.consume("orders")
    def handle(order: Order, context: Context) -> None:
        world.seen.append((order.number, context.attempt))

    async with TestClient(world.app, broker=world.broker) as client:
        await client.publish("orders", {"number": 3}, partition=0)
        await until(lambda: len(world.seen) == 3, 10.0, look_every=0.01)

    assert world.seen == ["it in", (3, 1), "it out"]


async def not_awaited(record: Record, context: Context, call_next: Next) -> None:
    call_next(record, context)


async def handed_back(record: Record, context: Context, call_next: Next) -> object:
    return call_next(record, context)


@pytest.mark.parametrize("around", [not_awaited, handed_back])
@pytest.mark.parametrize("batch", [None, Batch(linger=0.1)], ids=["records", "batches"])
def test_a_handler_that_middleware_does_not_await_fails(around: Any, batch: Batch | None) -> None:
    world = World()
    world.app.middleware(world.noting("it"))
    world.app.middleware(around)

    @world.app.consume("orders", batch=batch, retry=Retry(attempts=1), on_failure=DeadLetter("orders.dlt"))
    async def handle(given: Any) -> None:
        world.seen.append(given)

    world.consume("one")

    assert world.seen == ["it in", "it out"]
    (letter,) = world.broker.records("orders.dlt")
    said = (dict(letter.headers)["aioshard.message"] or b"").decode()
    assert said == (
        f"middleware '{around.__name__}' returned before the handler had ended: await the result of call_next, as in "
        "'return await call_next(record, context)'"
    )


def test_a_handler_still_running_in_a_task_fails() -> None:
    world = World()
    tasks: list[Any] = []

    @world.app.middleware
    async def around(record: Record, context: Context, call_next: Next) -> None:
        tasks.append(asyncio.ensure_future(call_next(record, context)))
        await asyncio.sleep(0.1)

    @world.app.consume("orders", retry=Retry(attempts=1), on_failure=DeadLetter("orders.dlt"))
    async def handle(record: Record) -> None:
        await asyncio.sleep(1.0)
        world.seen.append(record.offset)

    async def test() -> None:
        async with TestClient(world.app, broker=world.broker) as client:
            await client.publish("orders", "one", partition=0)
            await client.settle(60.0)
            await asyncio.gather(*tasks)

    run(test())

    assert world.seen == [0]  # what runs is left alone
    assert len(world.broker.records("orders.dlt")) == 1


def test_middleware_can_skip_the_handler_or_call_it_twice() -> None:
    world = World()

    @world.app.middleware
    async def around(record: Record, context: Context, call_next: Next) -> None:
        for _ in range(int(record.value or b"")):
            await call_next(record, context)

    @world.app.consume("orders")
    async def handle(record: Record) -> None:
        world.seen.append(record.value)

    world.consume("0", "1", "2")

    assert world.seen == [b"1", b"2", b"2"]
    assert world.broker.committed("group", "orders", 0) == 3


class Exotic(BaseException):
    """As libraries raise to get past `except Exception`."""


@pytest.mark.parametrize(
    ("error", "name"),
    [(Exotic(), b"Exotic"), (asyncio.CancelledError(), b"CancelledRunError")],
    ids=["own", "cancelled"],
)
@pytest.mark.parametrize("batch", [None, Batch(linger=0.1)], ids=["records", "batches"])
def test_any_middleware_exception_is_a_failure_and_keeps_the_worker(
    error: BaseException, name: bytes, batch: Batch | None
) -> None:
    world = World()

    @world.app.middleware
    async def around(given: Any, context: Any, call_next: Next) -> object:
        first = given[0] if isinstance(given, list) else given
        if first.value == b"bad":
            raise error
        return await call_next(given, context)

    @world.app.consume(
        "orders", concurrency=1, batch=batch, retry=Retry(attempts=1), on_failure=DeadLetter("orders.dlt")
    )
    async def handle(given: Any) -> None:
        world.seen.extend(given if batch else [given])

    world.consume("bad", "good")

    assert [record.value for record in world.seen] == [b"good"]  # type: ignore[attr-defined]
    (letter,) = world.broker.records("orders.dlt")
    assert dict(letter.headers)["aioshard.error"] == name


def test_an_undecodable_record_fails_alone_inside_batch_middleware() -> None:
    world = World()
    world.app.middleware(world.noting("it"))
    done: list[int] = []

    @world.app.consume("orders", batch=Batch(max_records=8, linger=0.1), on_failure=DeadLetter("orders.dlt"))
    async def handle(orders: list[Order], context: BatchContext) -> None:
        assert [record.value for record in context.records] == [b'{"number":%d}' % order.number for order in orders]
        done.extend(order.number for order in orders)

    world.consume(*({"number": number} if number != 3 else "bad" for number in range(8)))

    assert sorted(done) == [0, 1, 2, 4, 5, 6, 7]
    assert [letter.value for letter in world.broker.records("orders.dlt")] == [b"bad"]


def test_middleware_and_handler_see_the_timeout() -> None:
    world = World()

    @world.app.middleware
    async def around(given: Any, context: Any, call_next: Next) -> object:
        world.seen.append(round(context.deadline - asyncio.get_running_loop().time(), 3))
        return await call_next(given, context)

    @world.app.consume("orders", timeout=7.0)
    async def handle(_: Record) -> None: ...

    @world.app.consume("clicks", timeout=8.0, batch=Batch())
    async def handle_many(_: list[Record]) -> None: ...

    async def test() -> None:
        async with TestClient(world.app, broker=world.broker) as client:
            for topic in ("orders", "clicks"):
                await client.publish(topic, "one")
                await client.settle(60.0)

    run(test())

    assert world.seen == [7.0, 8.0]


def test_the_decorated_function_is_unchanged() -> None:
    around = World().noting("it")

    assert App("group").middleware(around) is around


def plain(record: Record, context: Context, call_next: Next) -> None: ...


async def of_two(record: Record, context: Context) -> None: ...


@pytest.mark.parametrize("around", [plain, of_two, "text"], ids=["plain", "of two", "text"])
def test_invalid_middleware_is_refused(around: Any) -> None:
    with pytest.raises(HandlerError, match=r"was refused.*expected an 'async def' of \(record, context, call_next\)"):
        App("group").middleware(around)


def test_middleware_is_refused_while_the_app_runs() -> None:
    async def test() -> None:
        world = World()
        world.app.consume("orders")(of_one)
        async with TestClient(world.app, broker=world.broker):
            with pytest.raises(StateError, match="middleware 'around' came too late"):
                world.app.middleware(world.noting("it"))

    run(test())


async def of_one(record: Record) -> None: ...
