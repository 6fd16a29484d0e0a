"""The decorator refuses invalid handlers immediately and then registers nothing."""

import dataclasses
import functools
import threading
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any

import pydantic
import pytest

from aioshard import App, Batch, BatchContext, Context, DeadLetter, Park, Record, Router
from aioshard.errors import DecodeError, HandlerError


async def on_record(record: Record) -> None: ...


async def with_context(record: Record, context: Context) -> None: ...


async def without_annotations(record, context) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001


async def with_an_object_of_its_own(record: Record, cache: dict[str, int] | None = None) -> None: ...


async def with_a_context_by_default(record: Record, context: Context | None = None) -> None: ...


def in_a_thread(record: Record) -> None: ...


class Callback:
    async def __call__(self, record: Record) -> None: ...


@pytest.mark.parametrize(
    ("function", "takes_context", "run_in"),
    [
        (on_record, False, "loop"),
        (with_context, True, "loop"),
        (without_annotations, True, "loop"),
        (with_an_object_of_its_own, False, "loop"),
        (with_a_context_by_default, True, "loop"),
        (in_a_thread, False, "thread"),
        (Callback(), False, "loop"),
        (functools.partial(with_a_context_by_default, context=None), False, "loop"),
    ],
    # An object's own text has its address in it, which differs between the processes of a parallel run.
    ids=["record", "context", "bare", "own object", "context by default", "thread", "callable object", "partial"],
)
def test_a_handler_is_called_as_its_signature_asks(
    function: Callable[..., Any], run_in: str, *, takes_context: bool
) -> None:
    handlers = Router()

    assert handlers.consume("orders")(function) is function

    (registration,) = handlers
    assert (registration.takes_context, registration.run_in) == (takes_context, run_in)


@dataclasses.dataclass
class Order:
    """A payload type."""

    number: int


async def on_orders(orders: list[Order]) -> None: ...


async def on_an_order(order: "Order | None") -> None: ...


async def on_a_record_by_name(record: "UnknownHere.Record") -> None: ...  # type: ignore[name-defined] # noqa: F821


def decoded(record: Record) -> Order:
    return Order(record.offset)


async def decoded_slowly(record: Record) -> Order:
    return Order(record.offset)


@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        (on_record, {}, None),
        (on_an_order, {}, Order(7)),
        (functools.partial(on_an_order), {}, Order(7)),
        (on_orders, {"batch": Batch()}, Order(7)),
        (on_record, {"decode": decoded}, Order(41)),
        (on_a_record_by_name, {"decode": decoded}, Order(41)),
        (on_orders, {"decode": decoded, "batch": Batch()}, Order(41)),
    ],
    ids=["record", "payload", "partial", "batch", "decoded", "decoded by name", "decoded batch"],
)
def test_handler_arguments_are_resolved_at_registration(function: Any, options: Any, expected: object) -> None:
    handlers = Router()
    handlers.consume("orders", **options)(function)
    (registration,) = handlers

    payload = registration.payload

    if expected is None:
        assert payload is None
    else:
        assert payload is not None
        assert payload.read(Record("orders", 0, 41, None, b'{"number": 7}', (), 0.0)) == expected


class Service:
    """An object whose methods are handlers."""

    async def on_order(self, order: Order, context: Context) -> None: ...


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def inner(*given: Any) -> object:
        return await function(*given)

    return inner


@wrapped
async def on_a_wrapped_order(order: "Order") -> None: ...


async def on_some_orders(orders: "Annotated[list[Order], 'some']") -> None: ...


async def on_a_collection(orders: Collection[Order]) -> None: ...


async def on_orders_by_name(orders: list["Order"]) -> None: ...


async def on_a_typed_list(orders: typing.List[Order]) -> None: ...  # noqa: UP006 - the older form


async def with_a_codec(codec: str, order: Order) -> None: ...


@pytest.mark.parametrize(
    ("function", "name", "options"),
    [
        (Service().on_order, "on_order", {}),
        (functools.partial(Service().on_order), "on_order", {}),
        (functools.partial(with_a_codec, "utf-8"), "with_a_codec", {}),
        (on_a_wrapped_order, "on_a_wrapped_order", {}),
        (on_some_orders, "on_some_orders", {"batch": Batch()}),
        (on_a_collection, "on_a_collection", {"batch": Batch()}),
        (on_orders_by_name, "on_orders_by_name", {"batch": Batch()}),
        (on_a_typed_list, "on_a_typed_list", {"batch": Batch()}),
    ],
    ids=["method", "partial of a method", "partial", "wrapped", "annotated", "collection", "by name", "typed list"],
)
def test_name_and_payload_type_are_found_for_every_kind_of_handler(function: Any, name: str, options: Any) -> None:
    handlers = Router()
    handlers.consume("orders", **options)(function)
    (registration,) = handlers

    assert registration.name == name
    assert registration.payload is not None
    assert registration.payload.type is Order


ELSEWHERE = """
from __future__ import annotations
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aioshard
    from aioshard import Record, Context, BatchContext
    from shop import Order

def wrapped(function):
    @functools.wraps(function)
    async def inner(*given):
        return await function(*given)
    return inner

async def on_record(record: Record, context: Context) -> None: ...
async def on_a_record(record: aioshard.Record) -> None: ...
async def on_records(records: list[Record], context: BatchContext) -> None: ...
async def on_some(records: list[aioshard.Record]) -> None: ...
async def on_any(records: list[Any]) -> None: ...
async def on_order(order: Order) -> None: ...
async def on_orders(orders: list[Order]) -> None: ...
async def on_half(order: "dict[") -> None: ...
"""


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, Any]:
    """A module in which names of annotations are there for type checkers only."""
    module: dict[str, Any] = {"__name__": "elsewhere"}
    exec(ELSEWHERE, module)
    return module


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("on_record", {}),
        ("on_a_record", {}),
        ("on_records", {"batch": Batch()}),
        ("on_some", {"batch": Batch()}),
        ("on_any", {"batch": Batch()}),
    ],
)
def test_a_record_annotation_need_not_exist_at_runtime(elsewhere: dict[str, Any], name: str, options: Any) -> None:
    handlers = Router()
    handlers.consume("orders", **options)(elsewhere[name])
    (registration,) = handlers

    assert registration.payload is None


@pytest.mark.parametrize(("name", "options"), [("on_order", {}), ("on_orders", {"batch": Batch()}), ("on_half", {})])
def test_a_payload_annotation_must_exist_at_runtime(elsewhere: dict[str, Any], name: str, options: Any) -> None:
    with pytest.raises(HandlerError, match=f"handler '{name}' takes orders?: .*, and this name does not exist when"):
        Router().consume("orders", **options)(elsewhere[name])


def test_a_decorated_function_is_resolved_in_its_own_module(
    elsewhere: dict[str, Any],
) -> None:
    handlers = Router()
    handlers.consume("orders")(elsewhere["wrapped"](on_an_order))
    (registration,) = handlers

    assert registration.payload is not None
    assert registration.payload.type == Order | None


async def on_few(number: "Annotated[int, pydantic.Field(lt=3)]") -> None: ...


async def on_a_list(numbers: list[int]) -> None: ...


def test_annotation_constraints_hold_and_a_list_can_be_one_value() -> None:
    handlers = Router()
    handlers.consume("few")(on_few)
    handlers.consume("lists")(on_a_list)
    few, lists = (registration.payload for registration in handlers)
    assert few is not None
    assert lists is not None

    assert lists.read(Record("lists", 0, 41, None, b"[7]", (), 0.0)) == [7]
    with pytest.raises(DecodeError, match="less than 3"):
        few.read(Record("few", 0, 41, None, b"3", (), 0.0))


async def on_records(records: list[Record]) -> None: ...


async def on_a_sequence(records: Sequence[Record], context: BatchContext) -> None: ...


async def on_a_bare_list(records: list, context) -> None: ...  # type: ignore[no-untyped-def, type-arg]  # noqa: ANN001


async def with_a_cache_of_its_own(records: list[Record], cache: dict[str, int] | None = None) -> None: ...


def batches_in_a_thread(records: list[Record]) -> None: ...


@pytest.mark.parametrize(
    ("function", "takes_context", "run_in"),
    [
        (on_records, False, "loop"),
        (on_a_sequence, True, "loop"),
        (on_a_bare_list, True, "loop"),
        (with_a_cache_of_its_own, False, "loop"),
        (without_annotations, True, "loop"),
        (batches_in_a_thread, False, "thread"),
    ],
)
def test_a_batch_handler_is_called_as_its_signature_asks(
    function: Callable[..., Any], run_in: str, *, takes_context: bool
) -> None:
    handlers = Router()

    handlers.consume("orders", batch=Batch())(function)

    (registration,) = handlers
    assert (registration.takes_context, registration.run_in) == (takes_context, run_in)
    assert registration.batch == Batch()


async def records_with_a_context(records: list[Record], context: Context) -> None: ...


async def record_with_a_batch_context(record: Record, context: BatchContext) -> None: ...


async def takes_payloads(orders: list[Order]) -> None: ...


async def takes_one_payload(order: Order) -> None: ...


async def takes_a_tuple(orders: tuple[Order, ...]) -> None: ...


async def takes_perhaps_a_list(orders: list[Order] | None) -> None: ...


async def takes_missing_ones(orders: list["Missing"]) -> None: ...  # type: ignore[name-defined] # noqa: F821


class Opaque:
    """Nothing that a value could be decoded to."""


async def takes_what_cannot_be_decoded(orders: list[Opaque]) -> None: ...


@pytest.mark.parametrize(
    ("function", "batch", "sentence"),
    [
        (on_record, Batch(), "takes record: Record and was given batch=…, so it is called with a list"),
        (
            on_records,
            None,
            "consume() was given no batch, so it is called with one record at a time: add batch=Batch()",
        ),
        (records_with_a_context, Batch(), "takes context: Context as its second parameter: expected a BatchContext"),
        (record_with_a_batch_context, None, "takes context: BatchContext as its second parameter: expected a Context"),
        (takes_one_payload, Batch(), "so it is called with a list: annotate it with list[…], or leave batch out"),
        (takes_a_tuple, Batch(), "takes orders: tuple[Order, ...] and was given batch=…, so it is called with a list"),
        (takes_perhaps_a_list, Batch(), "annotate it with list[…], or leave batch out"),
        (
            takes_missing_ones,
            Batch(),
            "which values cannot be decoded into (name 'Missing' is not defined)",
        ),
        (takes_what_cannot_be_decoded, Batch(), "takes Opaque, which values cannot be decoded into"),
    ],
)
def test_a_handler_with_the_wrong_signature_is_refused(function: Any, batch: Any, sentence: str) -> None:
    handlers = Router()

    with pytest.raises(HandlerError) as refused:
        handlers.consume("orders", batch=batch)(function)

    assert sentence in str(refused.value)
    assert list(handlers) == []


async def no_parameter() -> None: ...


async def one_too_many(record: Record, context: Context, more: int) -> None: ...


async def wraps_without_saying_so(*args: Any, **kwargs: Any) -> Any: ...


async def a_foreign_second(record: Record, database: dict[str, int]) -> None: ...


async def yields(record: Record) -> Any:
    yield record


async def takes_what_no_name_is_for(order: "Missing") -> None: ...  # type: ignore[name-defined] # noqa: F821


async def takes_the_context_first(context: Context, record: Record) -> None: ...


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (no_parameter, "takes (no parameter)"),
        (one_too_many, "expected the record and, optionally, a Context"),
        (wraps_without_saying_so, "functools.wraps"),
        (
            a_foreign_second,
            "'a_foreign_second' takes database: dict[str, int] as its second parameter: expected a Context",
        ),
        (yields, "without yield"),
        (
            takes_what_no_name_is_for,
            "takes order: Missing, and this name does not exist when the handler",
        ),
        (takes_the_context_first, "takes a Context first: expected the record, then a context"),
        ("orders", "decorates a function, not 'orders'"),
        (int, "handler 'int' was refused (no signature found for builtin type <class 'int'>)"),
        pytest.param(functools.partial(one_too_many), "handler 'one_too_many' takes (record: ", id="partial"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_function_that_cannot_be_called_with_a_record_is_refused(function: Any, sentence: str) -> None:
    handlers = Router()

    with pytest.raises(HandlerError) as refused:
        handlers.consume("orders")(function)

    assert sentence in str(refused.value)
    assert list(handlers) == []


@pytest.mark.parametrize(
    ("topics", "options", "sentence"),
    [
        ((), {}, "name at least one topic"),
        ((on_record,), {}, "not @app.consume"),
        (("a topic",), {}, "'a topic' is not a topic name"),
        (("..",), {}, "'..' is not a topic name"),
        ((3,), {}, "3 is not a topic name"),
        ((), {"pattern": "("}, "is not a regular expression"),
        ((), {"pattern": "(?i)orders"}, "can be combined with others"),
        (("orders",), {"shards": 4, "concurrency": 8}, "both given"),
        (("orders",), {"concurrency": 0}, "concurrency=0 was refused"),
        (("orders",), {"shards": True}, "shards=True was refused"),
        (("orders",), {"shard_queue_size": 8}, "and shards as well"),
        (("orders",), {"shards": 4, "shard_queue_size": 0}, "shard_queue_size=0 was refused"),
        (("orders",), {"shard_by": "keys"}, "shard_by='keys' is not known"),
        (("orders",), {"batch": 500}, "batch=500 was refused: expected Batch(max_records="),
        (("orders",), {"decode": "utf-8"}, "decode='utf-8' was refused: expected a function that takes a Record"),
        (
            ("orders",),
            {"decode": functools.partial(decoded, Record("orders", 0, 0, None, b"", (), 0.0))},
            "decode=decoded was refused (too many",
        ),
        (("orders",), {"decode": lambda: 1}, "decode=<lambda> was refused (too many positional arguments)"),
        (("orders",), {"decode": decoded_slowly, "batch": Batch()}, "use a plain function, or take list[Record]"),
        (("orders",), {"retry": 3}, "retry=3 was refused: expected Retry(attempts="),
        (("orders",), {"on_failure": Park("orders")}, "to a topic that the handler itself consumes"),
        ((), {"pattern": "orders.*", "on_failure": DeadLetter("orders.dlt")}, "narrow the pattern"),
        ((), {"pattern": "orders.*", "on_failure": Park("orders.parked")}, "narrow the pattern"),
    ],
)
def test_an_impossible_option_is_refused(topics: Any, options: Any, sentence: str) -> None:
    with pytest.raises(HandlerError) as refused:
        Router().consume(*topics, **options)

    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("topics", "options"),
    [
        (("orders.parked",), {}),
        ((), {"pattern": ".*parked"}),
        (("clicks",), {"on_failure": DeadLetter("orders.parked")}),
    ],
)
@pytest.mark.parametrize("order", [1, -1], ids=["before", "after"])
def test_a_park_topic_is_for_parked_records_only(topics: Any, options: Any, order: int) -> None:
    handlers = Router()
    first, second = [
        handlers.consume("orders", on_failure=Park("orders.parked")),
        handlers.consume(*topics, **options),
    ][::order]
    first(on_record if order > 0 else in_a_thread)

    with pytest.raises(HandlerError, match=r"topic 'orders.parked', which handler .* uses too"):
        second(in_a_thread if order > 0 else on_record)


def test_handlers_may_share_a_park_or_dead_letter_topic() -> None:
    handlers = Router()

    handlers.consume("orders", on_failure=Park("parked"))(on_record)
    handlers.consume("clicks", on_failure=Park("parked"))(in_a_thread)
    handlers.consume("views", on_failure=DeadLetter("dlt"))(on_record)
    handlers.consume("dlt")(on_record)

    assert len(list(handlers)) == 4


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (("orders", None), ("orders", None), "topic 'orders'"),
        (("orders", None), ("clicks", "ord.*"), "topic 'orders'"),
        (("clicks", "ord.*"), ("orders", None), "topic 'orders'"),
        (("clicks", "ord.*"), ("views", "ord.*"), "pattern 'ord.*'"),
    ],
)
def test_a_topic_belongs_to_one_handler(
    first: tuple[str, str | None], second: tuple[str, str | None], shared: str
) -> None:
    handlers = Router()
    handlers.consume(first[0], pattern=first[1])(on_record)

    with pytest.raises(HandlerError, match="a topic has one handler") as refused:
        handlers.consume(second[0], pattern=second[1])(with_context)

    assert shared in str(refused.value)
    assert [registration.name for registration in handlers] == ["on_record"]


def test_a_key_is_one_shard_only_within_its_topic() -> None:
    handlers = Router()
    handlers.consume("orders", "returns")(on_record)
    (registration,) = handlers
    shard_key = registration.shard_key

    keys = {shard_key(Record(topic, 0, 0, b"customer-1", None, (), 0.0)) for topic in ("orders", "returns")}

    assert len(keys) == 2


# Placement of handlers ------------------------------------------------------------------


def computes(record: Record) -> None: ...


def decodes_plainly(record: Record) -> bytes | None:
    return record.value


async def decodes_later(record: Record) -> bytes | None:
    return record.value


def _local_function() -> Callable[[Record], None]:
    def local(record: Record) -> None: ...

    return local


def _takes_local_type() -> Callable[..., None]:
    @dataclasses.dataclass
    class Local:
        total: int

    def takes_local(order: Local) -> None: ...

    takes_local.__qualname__ = "takes_local"
    return takes_local


class Locked:
    """An object that pickle refuses."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, record: Record) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "sentence"),
    [
        (computes, {"run_in": "cpu"}, "was given run_in='cpu': expected 'thread' or 'process'"),
        (computes, {"run_in": "loop"}, "handler 'computes' is a plain 'def' and was given run_in='loop'"),
        (on_record, {"run_in": "thread"}, "handler 'on_record' is an 'async def' and was given run_in='thread'"),
        (on_record, {"run_in": "process"}, "handler 'on_record' is an 'async def' and was given run_in='process'"),
        (computes, {"run_in": "process", "decode": decodes_later}, "decode=… is an async function"),
        (
            lambda _: None,
            {"run_in": "process"},
            "handler '<lambda>' was given run_in='process' and cannot be sent",
        ),
        (_local_function(), {"run_in": "process"}, "define the function, its payload's type and decode=… by 'def'"),
        (_takes_local_type(), {"run_in": "process"}, "handler 'takes_local' was given run_in='process' and cannot be"),
        (computes, {"run_in": "process", "decode": lambda record: record.value}, "cannot be sent to a worker process"),
        (Locked(), {"run_in": "process"}, "cannot pickle '_thread.lock' object"),
        (functools.partial(Locked()), {"run_in": "process"}, "cannot pickle '_thread.lock' object"),
    ],
    ids=[
        *("unknown", "def in loop", "async in thread", "async in process", "async decode", "lambda", "local function"),
        *("local type", "lambda decodes", "object", "partial"),
    ],
)
def test_an_invalid_run_in_is_refused(function: Any, options: Any, sentence: str) -> None:
    handlers = Router()

    with pytest.raises(HandlerError) as refused:
        handlers.consume("orders", **options)(function)

    assert sentence in str(refused.value)
    assert list(handlers) == []


@pytest.mark.parametrize(
    ("function", "run_in", "expected"),
    [
        (on_record, None, "loop"),
        (on_record, "loop", "loop"),
        (computes, None, "thread"),
        (computes, "thread", "thread"),
        (computes, "process", "process"),
    ],
)
def test_a_handler_runs_according_to_its_kind_or_run_in(function: Any, run_in: Any, expected: str) -> None:
    handlers = Router()
    handlers.consume("orders", run_in=run_in, decode=None if run_in is None else decodes_plainly)(function)

    (registration,) = handlers
    assert registration.run_in == expected


def hidden(record: Record) -> None: ...


def test_the_check_refuses_a_function_shadowed_by_another() -> None:
    """Another decorator has replaced it since: a worker process would import that one."""
    app = App("billing")
    app.consume("orders", run_in="process")(hidden)
    replaced = globals()["hidden"]
    try:
        globals()["hidden"] = computes
        with pytest.raises(HandlerError, match=r"handler 'hidden' .* it's not the same object"):
            app.check()
    finally:
        globals()["hidden"] = replaced
    app.check()
