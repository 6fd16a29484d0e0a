"""Dependencies of handlers are opened before an attempt and closed after it, however it ends."""

import asyncio
import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

import fastapi
import pytest
from fast_depends import Depends

from aioshard import App, Batch, BatchContext, BatchError, CallNext, Context, Record, Retry
from aioshard.testing import TestClient, run

ONCE = Retry(attempts=1)


def make_app(**options: Any) -> App:
    return App("depends", auto_offset_reset="earliest", **options)


def process(app: App, *values: bytes, halts: bool = False) -> str:
    """Publish records to partition 0 of topic orders, each with its own key; return what the app explains."""

    async def test() -> str:
        async with TestClient(app) as client:
            for value in values or (b"7",):
                await client.publish("orders", value, key=value, partition=0)
            with pytest.raises(TimeoutError) if halts else contextlib.nullcontext():
                await client.settle()
            return app.explain()

    return run(test())


def fail_record(app: App, dependency: Callable[..., Any], *, in_thread: bool) -> str:
    """Run a handler that depends on something and fails; return the explanation of the app."""
    if in_thread:

        @app.consume("orders", retry=ONCE)
        def handle(record: Record, value: Annotated[str, Depends(dependency)]) -> None:
            raise LookupError("no customer")
    else:

        @app.consume("orders", retry=ONCE)
        async def handle_on_loop(record: Record, value: Annotated[str, Depends(dependency)]) -> None:
            raise LookupError("no customer")

    return process(app, halts=True)


class Events(list[str]):
    """The events, in order."""

    def generator(self, name: str) -> Callable[[], AsyncIterator[str]]:
        """Return an async dependency that notes its steps, and the error that it sees."""

        async def opened() -> AsyncIterator[str]:
            self.append(f"open {name}")
            try:
                yield name
            except BaseException as error:
                self.append(f"{name} saw {type(error).__name__}")
                raise
            finally:
                self.append(f"close {name}")

        return opened

    def plain_generator(self, name: str) -> Callable[[], Iterator[str]]:
        """Return a plain dependency that notes its steps, and the error that it sees."""

        def opened() -> Iterator[str]:
            self.append(f"open {name}")
            try:
                yield name
            except BaseException as error:
                self.append(f"{name} saw {type(error).__name__}")
                raise
            finally:
                self.append(f"close {name}")

        return opened


# Values -------------------------------------------------------------------------------


def test_a_default_and_an_annotation_inject_the_value() -> None:
    app = make_app()
    received: list[object] = []

    async def get_session() -> str:
        return "session"

    def get_number() -> int:
        return 3

    @app.consume("orders")
    async def handle(
        record: Record, number: Annotated[int, Depends(get_number)], session: str = Depends(get_session)
    ) -> None:
        received.append((record.value, number, session))

    process(app)

    assert received == [(b"7", 3, "session")]


def test_markers_of_fastapi_inject_too() -> None:
    app = make_app()
    received: list[object] = []

    @dataclasses.dataclass
    class Repository:
        context: Context

    def name(repository: Annotated[Repository, fastapi.Depends()]) -> str:
        return repository.context.idempotency_key

    @app.consume("orders")
    async def handle(record: Record, name: str = fastapi.Depends(name)) -> None:
        received.append(name)

    process(app)

    assert received == ["orders/0/0"]


@dataclasses.dataclass
class Order:
    """A payload."""

    total: int


@dataclasses.dataclass
class Pool:
    """The value of the resources."""

    name: str


@contextlib.asynccontextmanager
async def resources(_: App) -> AsyncIterator[Pool]:
    yield Pool("pool")


async def everything(order: Order, record: Record, context: Context[Pool], limit: int = 10) -> tuple[object, ...]:
    return order, record.offset, context.state.name, context.attempt, limit


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_a_dependency_takes_what_a_handler_takes(kind: str) -> None:
    app = make_app(resources=resources)
    received: list[object] = []

    if kind == "async":

        @app.consume("orders")
        async def handle(order: Order, taken: Annotated[Any, Depends(everything)], context: Context) -> None:
            received.append((context.attempt, taken))
    else:

        @app.consume("orders")
        def handle_in_thread(order: Order, taken: Annotated[Any, Depends(everything)], context: Context) -> None:
            received.append((context.attempt, taken))

    process(app, b'{"total": 3}')

    assert received == [(1, (Order(3), 0, "pool", 1, 10))]


@pytest.mark.parametrize("middleware", [False, True], ids=["bare", "in middleware"])
def test_a_dependency_of_a_batch_takes_the_batch(*, middleware: bool) -> None:
    app = make_app(resources=resources)
    received: list[object] = []

    if middleware:

        @app.middleware
        async def around(records: Any, context: Any, call_next: CallNext) -> object:
            return await call_next(records, context)

    def totals(orders: list[Order], records: list[Record], context: BatchContext[Pool]) -> tuple[object, ...]:
        offsets = [record.offset for record in records]
        return [order.total for order in orders], offsets, context.state.name

    @app.consume("orders", batch=Batch(max_records=2, linger=0.1))
    async def handle(orders: list[Order], taken: Annotated[object, Depends(totals)]) -> None:
        received.append(taken)

    process(app, b'{"total": 1}', b'{"total": 2}')

    assert received == [([1, 2], [0, 1], "pool")]


def test_a_dependency_sees_the_record_that_a_middleware_passes_on() -> None:
    app = make_app()
    received: list[object] = []

    @app.middleware
    async def unpacked(record: Record, context: Context, call_next: CallNext) -> object:
        return await call_next(record._replace(value=b'{"total": 9}'), context)

    async def taken(order: Order, record: Record) -> tuple[int, bytes | None]:
        return order.total, record.value

    @app.consume("orders")
    async def handle(order: Order, taken: Annotated[object, Depends(taken)]) -> None:
        received.append(taken)

    process(app)

    assert received == [(9, b'{"total": 9}')]


def test_parameters_of_the_same_name_do_not_mix() -> None:
    app = make_app()
    received: list[object] = []

    def for_reading() -> str:
        return "reading"

    def for_writing() -> str:
        return "writing"

    def repository(session: Annotated[str, Depends(for_writing)]) -> str:
        return session

    @app.consume("orders")
    async def handle(
        record: Record, session: Annotated[str, Depends(for_reading)], repository: Annotated[str, Depends(repository)]
    ) -> None:
        received.append((session, repository))

    process(app)

    assert received == [("reading", "writing")]


def test_a_dependency_runs_once_per_attempt_unless_its_cache_is_off() -> None:
    app = make_app()
    received: list[object] = []
    numbers = iter(range(10))

    def number() -> int:
        return next(numbers)

    def nested(number: Annotated[int, Depends(number)]) -> int:
        return number

    @app.consume("orders", retry=Retry(attempts=2, initial=0.0))
    async def handle(
        record: Record,
        first: Annotated[int, Depends(number)],
        again: Annotated[int, Depends(nested)],
        own: Annotated[int, Depends(number, use_cache=False)],
    ) -> None:
        received.append((first, again, own))
        if len(received) == 1:
            raise ValueError

    process(app)

    assert received == [(0, 0, 1), (2, 2, 3)]


# Where they run -----------------------------------------------------------------------


def test_a_plain_handler_and_its_plain_dependencies_share_a_thread() -> None:
    """A connection of sqlite3, for example, works only in the thread that opened it."""
    app = make_app()
    threads: list[int] = []

    def connection() -> Iterator[int]:
        threads.append(threading.get_ident())
        yield 1
        threads.append(threading.get_ident())

    @app.consume("orders")
    def handle(record: Record, connection: Annotated[int, Depends(connection)]) -> None:
        threads.append(threading.get_ident())

    process(app)

    assert len(threads) == 3
    assert set(threads) == {threads[0]}
    assert threads[0] != threading.get_ident()


def test_a_plain_dependency_of_an_async_handler_does_not_block_the_event_loop() -> None:
    app = make_app()
    threads: list[tuple[str, int]] = []

    def connection() -> Iterator[int]:
        threads.append(("open", threading.get_ident()))
        yield 1
        threads.append(("close", threading.get_ident()))

    @app.consume("orders")
    async def handle(record: Record, connection: Annotated[int, Depends(connection)]) -> None:
        threads.append(("run", threading.get_ident()))

    process(app)

    assert [step for step, _ in threads] == ["open", "run", "close"]
    assert [thread == threading.get_ident() for _, thread in threads] == [False, True, False]


def test_a_plain_handler_may_depend_on_async_functions() -> None:
    app = make_app()
    received: list[object] = []
    events = Events()

    @app.consume("orders")
    def handle(record: Record, name: Annotated[str, Depends(events.generator("session"))]) -> None:
        received.append((name, threading.get_ident() != threading.main_thread().ident))

    process(app)

    assert received == [("session", True)]
    assert events == ["open session", "close session"]


@pytest.mark.parametrize("in_thread", [False, True], ids=["handler on the loop", "handler in a thread"])
def test_an_async_decoder_comes_before_the_dependencies(*, in_thread: bool) -> None:
    app = make_app()
    received: list[object] = []

    async def decode(record: Record) -> Order:
        await asyncio.sleep(0)
        return Order(int(record.value or b""))

    def doubled(order: Order) -> int:
        return 2 * order.total

    if in_thread:

        @app.consume("orders", decode=decode)
        def handle(order: Order, double: Annotated[int, Depends(doubled)]) -> None:
            received.append((order.total, double))
    else:

        @app.consume("orders", decode=decode)
        async def handle_on_loop(order: Order, double: Annotated[int, Depends(doubled)]) -> None:
            received.append((order.total, double))

    process(app)

    assert received == [(7, 14)]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("in_thread", [False, True], ids=["handler on the loop", "handler in a thread"])
def test_a_dependency_that_forgets_an_await_fails_the_attempt(*, in_thread: bool) -> None:
    app = make_app()
    received: list[object] = []

    async def get_number() -> int:
        return 3

    def wrapper() -> object:
        return get_number()

    if in_thread:

        @app.consume("orders", retry=ONCE)
        def handle(record: Record, number: Annotated[object, Depends(wrapper)]) -> None:
            received.append(number)
    else:

        @app.consume("orders", retry=ONCE)
        async def handle_on_loop(record: Record, number: Annotated[object, Depends(wrapper)]) -> None:
            received.append(number)

    explained = process(app, halts=True)

    assert received == []
    assert "dependency 'wrapper' returned a coroutine" in explained


# The end of an attempt ----------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
@pytest.mark.parametrize("in_thread", [False, True], ids=["handler on the loop", "handler in a thread"])
def test_dependencies_are_closed_in_reverse_order(*, plain: bool, in_thread: bool) -> None:
    app, events = make_app(), Events()
    outer = events.plain_generator("outer") if plain else events.generator("outer")

    async def inner(outer: Annotated[str, Depends(outer)]) -> AsyncIterator[str]:
        events.append(f"open inner of {outer}")
        yield "inner"
        events.append("close inner")

    def plain_inner(outer: Annotated[str, Depends(outer)]) -> Iterator[str]:
        events.append(f"open inner of {outer}")
        yield "inner"
        events.append("close inner")

    dependency = plain_inner if plain else inner

    if in_thread:

        @app.consume("orders")
        def handle(record: Record, value: Annotated[str, Depends(dependency)]) -> None:
            events.append(f"run with {value}")
    else:

        @app.consume("orders")
        async def handle_on_loop(record: Record, value: Annotated[str, Depends(dependency)]) -> None:
            events.append(f"run with {value}")

    process(app)

    assert events == ["open outer", "open inner of outer", "run with inner", "close inner", "close outer"]


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
@pytest.mark.parametrize("in_thread", [False, True], ids=["handler on the loop", "handler in a thread"])
def test_a_dependency_sees_the_error_of_the_handler(*, plain: bool, in_thread: bool) -> None:
    app, events = make_app(), Events()
    dependency = events.plain_generator("session") if plain else events.generator("session")

    explained = fail_record(app, dependency, in_thread=in_thread)

    assert events == ["open session", "session saw LookupError", "close session"]
    assert "no customer" in explained


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
@pytest.mark.parametrize("in_thread", [False, True], ids=["handler on the loop", "handler in a thread"])
def test_a_dependency_cannot_swallow_the_error(*, plain: bool, in_thread: bool) -> None:
    """Otherwise the record would be complete, and the dependency outside would commit."""
    app, events = make_app(), Events()
    outer = events.plain_generator("outer") if plain else events.generator("outer")

    async def swallowing(outer: Annotated[str, Depends(outer)]) -> AsyncIterator[str]:
        with contextlib.suppress(BaseException):
            yield outer

    def swallowing_plainly(outer: Annotated[str, Depends(outer)]) -> Iterator[str]:
        with contextlib.suppress(BaseException):
            yield outer

    dependency = swallowing_plainly if plain else swallowing

    explained = fail_record(app, dependency, in_thread=in_thread)

    assert events == ["open outer", "outer saw LookupError", "close outer"]
    assert "no customer" in explained


@pytest.mark.parametrize("in_thread", [False, True], ids=["handler on the loop", "handler in a thread"])
def test_a_dependency_of_a_partly_failed_batch_sees_a_success(*, in_thread: bool) -> None:
    """The other records of the batch are complete, so what was done for them must stay."""
    app, events = make_app(), Events()
    dependency = events.plain_generator("session") if in_thread else events.generator("session")

    def fail_second(records: list[Record]) -> None:
        if len(records) > 1:
            raise BatchError({records[1]: LookupError("no customer")})

    if in_thread:

        @app.consume("orders", batch=Batch(max_records=2, linger=0.1), retry=ONCE)
        def handle(records: list[Record], session: Annotated[str, Depends(dependency)]) -> None:
            fail_second(records)
    else:

        @app.consume("orders", batch=Batch(max_records=2, linger=0.1), retry=ONCE)
        async def handle_on_loop(records: list[Record], session: Annotated[str, Depends(dependency)]) -> None:
            fail_second(records)

    explained = process(app, b"1", b"2", halts=True)

    assert events == ["open session", "close session"]
    assert "no customer" in explained
    assert app.statistics().handlers[0].processed == 1


@pytest.mark.parametrize("in_thread", [False, True], ids=["loop", "thread"])
def test_a_batch_error_of_a_record_is_seen(in_thread: bool) -> None:
    """The record has failed, so nothing of it may be kept."""
    app, events = make_app(), Events()
    dependency = events.plain_generator("session") if in_thread else events.generator("session")

    def fail(record: Record) -> None:
        raise BatchError({record: LookupError("no customer")})

    if in_thread:

        @app.consume("orders", retry=ONCE)
        def handle(record: Record, session: Annotated[str, Depends(dependency)]) -> None:
            fail(record)
    else:

        @app.consume("orders", retry=ONCE)
        async def handle_on_loop(record: Record, session: Annotated[str, Depends(dependency)]) -> None:
            fail(record)

    process(app, halts=True)

    assert events == ["open session", "session saw BatchError", "close session"]


def test_a_forgotten_await_is_seen() -> None:
    app, events = make_app(), Events()

    async def work() -> None: ...

    @app.consume("orders", retry=ONCE)
    async def handle(record: Record, session: Annotated[str, Depends(events.generator("session"))]) -> object:
        return work()

    process(app, halts=True)

    assert events == ["open session", "session saw HandlerError", "close session"]


def test_a_plain_handler_stays_in_the_thread_of_its_plain_dependencies() -> None:
    """Some connections work in one thread only."""
    app = make_app()
    opened_here = contextvars.ContextVar("opened here", default=False)
    received: list[bool] = []

    def connect() -> None:
        opened_here.set(True)  # each use of a thread has a context of its own

    @app.consume("orders", retry=ONCE)
    def handle(record: Record, connection: Annotated[None, Depends(connect)]) -> None:
        received.append(opened_here.get())

    process(app)

    assert received == [True]


def test_an_error_while_closing_fails_the_attempt() -> None:
    app = make_app()
    published: list[Record] = []
    attempts: list[int] = []

    async def transaction(context: Context) -> AsyncIterator[None]:
        yield
        attempts.append(context.attempt)
        if context.attempt == 1:
            raise ConnectionError("commit failed")

    @app.consume("orders", retry=Retry(attempts=2, initial=0.0), publish_to="copies")
    async def handle(record: Record, transaction: Annotated[None, Depends(transaction)]) -> bytes | None:
        return record.value

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"7")
            await client.settle()
            published.extend(client.records("copies"))

    run(test())

    assert attempts == [1, 2]
    assert len(published) == 1


def test_a_failing_dependency_fails_the_attempt_and_closes_those_before_it() -> None:
    app, events = make_app(), Events()

    async def failing(session: Annotated[str, Depends(events.generator("session"))]) -> None:
        raise ConnectionError("no database")

    @app.consume("orders", retry=ONCE)
    async def handle(record: Record, broken: Annotated[None, Depends(failing)]) -> None:
        events.append("run")

    explained = process(app, halts=True)

    assert events == ["open session", "session saw ConnectionError", "close session"]
    assert "no database" in explained


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
def test_a_timeout_closes_dependencies(*, plain: bool) -> None:
    app, events = make_app(), Events()
    dependency = events.plain_generator("session") if plain else events.generator("session")

    @app.consume("orders", retry=ONCE, timeout=1.0)
    async def handle(record: Record, session: Annotated[str, Depends(dependency)]) -> None:
        await asyncio.sleep(3600.0)

    explained = process(app, halts=True)

    assert events == ["open session", "session saw CancelledError", "close session"]
    assert "timeout" in explained


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
def test_a_revoked_partition_closes_dependencies_and_completes_nothing(*, plain: bool) -> None:
    app, events = make_app(drain_timeout=1.0), Events()
    dependency = events.plain_generator("session") if plain else events.generator("session")

    async def swallowing(session: Annotated[str, Depends(dependency)]) -> AsyncIterator[None]:
        with contextlib.suppress(BaseException):
            yield

    @app.consume("orders")
    async def handle(record: Record, value: Annotated[None, Depends(swallowing)]) -> None:
        began.set()
        await asyncio.sleep(3600.0)

    began = asyncio.Event()

    async def test() -> int | None:
        async with TestClient(app) as client:
            await client.publish("orders", b"7", partition=0)
            await began.wait()
            await client.revoke("orders", 0)
            return client.committed("orders", 0)

    assert not run(test())
    assert events == ["open session", "session saw CancelledError", "close session"]


async def test_a_plain_generator_that_opens_while_it_is_cancelled_is_closed() -> None:
    """Its thread cannot be stopped, so it opens although nobody waits for it any more."""
    app, events = make_app(), Events()
    opening, proceed = threading.Event(), threading.Event()

    def slow() -> Iterator[None]:
        opening.set()
        proceed.wait(10.0)
        events.append("open")
        try:
            yield
        finally:
            events.append("close")

    @app.consume("orders", retry=ONCE)
    async def handle(record: Record, value: Annotated[None, Depends(slow)]) -> None:
        events.append("run")

    async with TestClient(app) as client:
        await client.publish("orders", b"7", partition=0)
        assert await asyncio.to_thread(opening.wait, 10.0)
        app.cancel_run("orders", 0, 0)
        await asyncio.sleep(0)  # the cancellation arrives
        proceed.set()
        async with asyncio.timeout(10.0):
            while not app.statistics().handlers[0].halted:  # noqa: ASYNC110 - a thread has no event of this loop
                await asyncio.sleep(0.01)

    assert events == ["open", "close"]


# Overrides ----------------------------------------------------------------------------


def get_session() -> str:
    raise AssertionError("a real session")


def get_repository(session: Annotated[str, Depends(get_session)]) -> str:
    return f"repository of {session}"


def overridden_app(received: list[str]) -> App:
    app = make_app()

    @app.consume("orders")
    async def handle(record: Record, repository: Annotated[str, Depends(get_repository)]) -> None:
        received.append(repository)

    return app


async def fake_session(record: Record) -> AsyncIterator[str]:
    yield f"fake session {record.offset}"


def test_the_test_kit_overrides_dependencies() -> None:
    received: list[str] = []
    app = overridden_app(received)

    async def test() -> None:
        async with TestClient(app, overrides={get_session: fake_session}) as client:
            await client.publish("orders", b"7", partition=0)
            await client.settle()

    run(test())
    explained = process(app, halts=True)

    assert received == ["repository of fake session 0"]
    assert "a real session" in explained


def test_an_app_overrides_dependencies_even_if_a_test_fails() -> None:
    received: list[str] = []
    app = overridden_app(received)

    def test() -> None:
        with app.override_dependencies({get_session: lambda: "outer"}):
            with app.override_dependencies({get_session: lambda: "inner"}):
                process(app)
            process(app)
            raise LookupError

    with pytest.raises(LookupError):
        test()
    process(app, halts=True)

    assert received == ["repository of inner", "repository of outer"]


# The cost -----------------------------------------------------------------------------


def test_a_handler_without_dependencies_is_called_directly() -> None:
    app = make_app()

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    @app.consume("payments")
    async def with_session(record: Record, session: Annotated[str, Depends(fake_session)]) -> None: ...

    async def test() -> None:
        async with TestClient(app):
            plain, injected = app.running_engine().handlers
            assert plain.spec.call is handle
            assert injected.spec.call is None

    run(test())
