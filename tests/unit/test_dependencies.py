"""Signatures with dependencies are read, and refused, when a handler is registered."""

import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import dishka
import fastapi
import pytest
from fast_depends import Depends
from fast_depends.library import CustomField
from typing_extensions import TypeAliasType

from aioshard import App, Batch, BatchContext, Context, Record, Router
from aioshard.engine.handler import Dependencies
from aioshard.errors import HandlerError, StateError
from aioshard.testing import TestClient, run


def get_session() -> str:
    return "session"


def dependencies_of(function: Any, **options: Any) -> Dependencies:
    """Register a handler; return its dependencies."""
    handlers = Router()
    handlers.consume("orders", **options)(function)
    (handler,) = handlers
    assert handler.dependencies is not None
    return handler.dependencies


# Signatures ---------------------------------------------------------------------------

Session = Annotated[str, Depends(get_session)]


async def after_the_context(record: Record, context: Context, session: Session) -> None: ...


async def before_the_context(record: Record, session: Session, context: Context) -> None: ...


async def by_name(record: Record, context: Context, *, session: Session, limit: int = 3) -> None: ...


async def by_default(record: Record, context: Context, session: str = Depends(get_session)) -> None: ...


async def without_annotations(record, context, session=Depends(get_session)) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001, B008


SessionAlias = TypeAliasType("SessionAlias", Session)


async def by_alias(record: Record, context: Context, session: SessionAlias) -> None: ...


async def as_text(record: "Record", context: "Context", session: "Session") -> None: ...


@pytest.mark.parametrize(
    "function",
    [after_the_context, before_the_context, by_name, by_default, without_annotations, by_alias, as_text],
    ids=lambda function: function.__name__,
)
def test_a_handler_may_name_dependencies_and_its_context_in_any_form(function: Any) -> None:
    dependencies = dependencies_of(function)

    assert [call.function for call in dependencies.calls] == [get_session]
    assert dependencies.arguments == {"context": 2, "session": 3}


class Service:
    """A dependency in every form that can be called."""

    def __init__(self, record: Record) -> None: ...

    def method(self, record: Record) -> None: ...

    async def __call__(self) -> None:
        """Be called."""


async def coroutine() -> None: ...


async def async_generator() -> AsyncIterator[None]:
    yield


def generator() -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (get_session, "plain"),
        (coroutine, "async"),
        (generator, "generator"),
        (async_generator, "async generator"),
        (Service, "plain"),
        (Service(Record("orders", 0, 0, None, b"", (), 0.0)), "async"),
        (Service(Record("orders", 0, 0, None, b"", (), 0.0)).method, "plain"),
        (functools.partial(coroutine), "async"),
        (functools.partial(generator), "generator"),
        (functools.partial(async_generator), "async generator"),
    ],
    ids=["def", "async def", "generator", "async generator", "class", "object", "method", "partial", "pg", "pag"],
)
def test_a_dependency_may_be_anything_that_can_be_called(function: Any, kind: str) -> None:
    async def handle(record: Record, value: Annotated[object, Depends(function)]) -> None: ...

    (call,) = dependencies_of(handle).calls

    assert call.kind == kind


def test_a_parameter_with_a_default_of_its_own_stays_as_it_is() -> None:
    def limited(limit: int = 3, *names: str, **options: str) -> int:
        return limit

    async def handle(
        record: Record, limit: Annotated[int, Depends(limited)], cache: dict[str, int] | None = None
    ) -> None: ...

    dependencies = dependencies_of(handle)

    assert dependencies.calls[0].arguments == {}
    assert dependencies.arguments == {"limit": 3}


def test_fastapi_infers_the_dependency_from_the_annotation() -> None:
    async def annotated(record: Record, service: Annotated[Service, fastapi.Depends()]) -> None: ...

    async def by_default(record: Record, service: Service = fastapi.Depends()) -> None: ...  # noqa: B008

    for function in (annotated, by_default):
        (call,) = dependencies_of(function).calls
        assert call.function is Service


# Refusals -----------------------------------------------------------------------------


def takes_a_request(request: fastapi.Request) -> None: ...


def takes_a_header(token: str = fastapi.Header()) -> None: ...


def takes_anything(thing) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001


def takes_the_record_by_position(record: Record, /) -> None: ...


def takes_a_batch_context(context: BatchContext) -> None: ...


def takes_what_exists_elsewhere(pool: "Missing") -> None: ...  # type: ignore[name-defined] # noqa: F821


def nested(request: Annotated[None, Depends(takes_a_request)]) -> None: ...


def itself(value: "Annotated[None, Depends(through)]") -> None: ...


def through(value: Annotated[None, Depends(itself)]) -> None: ...


@contextlib.contextmanager
def decorated() -> Iterator[None]:
    yield


@dataclasses.dataclass
class Unhashable:
    """Can be called, but has no hash."""

    def __call__(self) -> None:
        """Be called."""


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (takes_a_request, "'handle' → takes_a_request takes request: starlette.requests.Request"),
        (nested, "'handle' → nested → takes_a_request takes request: "),
        (takes_a_header, "takes_a_header has Header("),
        (takes_anything, "takes_anything takes thing: annotate it with Record, Context or Annotated[…, Depends(…)]"),
        (takes_the_record_by_position, "takes record by position only"),
        (takes_a_batch_context, "takes context: aioshard.attempts.BatchContext"),
        (takes_what_exists_elsewhere, "takes pool: 'Missing', and a name in it does not exist"),
        (itself, "'handle' → itself → through → itself depends on itself"),
        (decorated, "decorated is a generator that is decorated as a context manager: remove the decorator"),
        (Unhashable(), "depends on a Unhashable, which has no hash"),
        (get_session(), "depends on 'session': expected a function or a class"),
        (None, "depends on typing.Any: expected a function"),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_dependency_that_cannot_be_called_is_refused(function: Any, sentence: str) -> None:
    handlers = Router()

    async def handle(record: Record, value: Annotated[Any, Depends(function)]) -> None: ...

    with pytest.raises(HandlerError) as refused:
        handlers.consume("orders")(handle)

    assert sentence in str(refused.value)
    assert list(handlers) == []


class ByName(CustomField):
    """A marker as FastStream's `Context`, which gives a value by its name."""


@pytest.mark.parametrize(
    ("marker", "sentence"),
    [
        (fastapi.Security(get_session), "which aioshard does not understand"),
        (fastapi.Header(), "which aioshard does not understand"),
        (ByName(), "which aioshard does not understand"),
        (Depends(get_session, cast_result=True), "has a marker with cast_result="),
        (fastapi.Depends(get_session, max_concurrency=3), "has a marker with max_concurrency="),
    ],
    ids=["security", "header", "field", "cast", "concurrency"],
)
@pytest.mark.parametrize("form", ["default", "annotation"])
def test_a_marker_that_cannot_be_served_is_refused(marker: Any, sentence: str, form: str) -> None:
    handlers = Router()

    async def by_default(record: Record, value: Any = marker) -> None: ...

    async def annotated(record: Record, value: Annotated[Any, marker] = None) -> None: ...

    with pytest.raises(HandlerError) as refused:
        handlers.consume("orders")(by_default if form == "default" else annotated)

    assert sentence in str(refused.value)
    assert list(handlers) == []


def test_a_marker_of_a_container_is_refused() -> None:
    async def handle(record: Record, service: dishka.FromDishka[Service]) -> None: ...

    with pytest.raises(HandlerError, match="call other containers in a middleware"):
        Router().consume("orders")(handle)


def test_two_markers_of_a_parameter_are_refused() -> None:
    async def handle(record: Record, session: Session = Depends(get_session)) -> None: ...  # noqa: B008

    with pytest.raises(HandlerError, match="has 2 markers at its parameter session"):
        Router().consume("orders")(handle)


def test_a_marker_that_would_be_overlooked_is_refused() -> None:
    async def in_a_union(record: Record, session: Session | None = None) -> None: ...

    async def in_a_list(record: Record, sessions: list[Session]) -> None: ...

    for function in (in_a_union, in_a_list):
        with pytest.raises(HandlerError, match="has a marker within another type"):
            Router().consume("orders")(function)


async def not_importable(record: Record, pool: "Annotated[Missing, Depends(get_session)]" = "") -> None:  # type: ignore[name-defined] # noqa: F821
    ...


def test_a_marker_in_an_annotation_that_cannot_be_resolved_is_refused() -> None:
    with pytest.raises(HandlerError, match="and a name in it does not exist"):
        Router().consume("orders")(not_importable)


def test_a_dependency_in_the_place_of_the_record_is_refused() -> None:
    async def alone(session: str = Depends(get_session)) -> None: ...

    async def first(session: Session, record: Record) -> None: ...

    for function in (alone, first):
        with pytest.raises(HandlerError, match="takes a dependency first: expected the record, then dependencies"):
            Router().consume("orders")(function)


def test_a_dependency_by_position_is_refused() -> None:
    async def handle(record: Record, session: Session, /) -> None: ...

    with pytest.raises(HandlerError, match="takes session by position only"):
        Router().consume("orders")(handle)


def of_records(records: list[Record]) -> int:
    return len(records)


def of_a_record(record: Record) -> int:
    return record.offset


def test_a_dependency_of_a_batch_takes_lists() -> None:
    async def right(records: list[Record], number: Annotated[int, Depends(of_records)]) -> None: ...

    async def wrong(records: list[Record], number: Annotated[int, Depends(of_a_record)]) -> None: ...

    assert dependencies_of(right, batch=Batch()).calls[0].arguments == {"records": 1}
    with pytest.raises(HandlerError, match=r"annotate it with list\[Record\], BatchContext or Annotated"):
        Router().consume("orders", batch=Batch())(wrong)


def in_a_process(record: Record, session: Session) -> None: ...


def test_dependencies_are_refused_in_worker_processes() -> None:
    with pytest.raises(HandlerError, match="run_in='process' and depends on get_session"):
        Router().consume("orders", run_in="process")(in_a_process)


# Overrides ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({generator: get_session}, "names generator, which no handler depends on"),
        ({get_session: takes_a_request}, "takes_a_request takes request"),
        ({get_session: "session"}, "depends on 'session'"),
    ],
    ids=["unused", "not callable with a record", "not a function"],
)
def test_an_override_that_cannot_work_is_refused(overrides: Any, sentence: str) -> None:
    app = App("billing")
    app.consume("orders")(after_the_context)

    async def test() -> None:
        async with TestClient(app, overrides=overrides):
            raise AssertionError("started")

    with pytest.raises(HandlerError) as refused:
        run(test())

    assert sentence in str(refused.value)
    app.check()


def test_a_running_app_refuses_overrides() -> None:
    app = App("billing")
    app.consume("orders")(after_the_context)

    async def test() -> None:
        async with TestClient(app):
            with app.override_dependencies({get_session: get_session}):
                pass

    with pytest.raises(StateError, match="came too late"):
        run(test())


def test_a_dependency_of_an_included_router_is_overridden() -> None:
    app, router = App("billing"), Router()
    received: list[str] = []

    @router.consume("orders")
    async def handle(record: Record, session: Session) -> None:
        received.append(session)

    app.include_router(router)

    async def test() -> None:
        async with TestClient(app, overrides={get_session: lambda: "fake"}) as client:
            await client.publish("orders", b"")
            await client.settle()

    run(test())

    assert received == ["fake"]
