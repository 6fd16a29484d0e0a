"""Returned results are published before their record completes; values of `publish`."""

import asyncio
import dataclasses
import datetime as dt
import json
from collections.abc import Sequence
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

from aioshard import App, Batch, CallNext, Context, DeadLetter, Message, Record, Retry, message
from aioshard.errors import HandlerError, MessageError, TransportError
from aioshard.testing import InMemoryBroker, TestClient, run

ONCE = Retry(attempts=1)


@dataclasses.dataclass
class Invoice:
    total: int


class Model(pydantic.BaseModel):
    at: dt.date


class Row(TypedDict):
    total: int


class Struct(msgspec.Struct):
    total: int


VALUES: list[tuple[object, object]] = [
    (Invoice(3), {"total": 3}),
    (Model(at=dt.date(2026, 1, 31)), {"at": "2026-01-31"}),
    (Row(total=3), {"total": 3}),
    (Struct(3), {"total": 3}),
    ({"invoices": [Invoice(1), Struct(2)]}, {"invoices": [{"total": 1}, {"total": 2}]}),
    ([1, None, 2.5], [1, None, 2.5]),
]


def published(app: App, *values: object, key: str | None = "k", **settings: Any) -> Sequence[Record]:
    async def test() -> Sequence[Record]:
        app.configure(auto_offset_reset="earliest", **settings)
        async with TestClient(app, broker=InMemoryBroker(partitions=2)) as client:
            for value in values:
                await client.publish("orders", value, key=key, partition=0)
            await client.settle(60)
            return client.records("invoices") if "invoices" in client.broker.topics() else ()

    return run(test())


@pytest.mark.parametrize(("value", "expected"), VALUES)
def test_publish_writes_what_consume_reads(value: object, expected: object) -> None:
    app = App("billing")

    @app.consume("orders", retry=ONCE)
    async def handle(_: Record, context: Context) -> None:
        await context.publish("invoices", value)

    (found,) = published(app, "x")
    assert json.loads(found.value or b"") == expected


@pytest.mark.parametrize("value", [object(), {1, object()}, {"x": object()}, Exception("x")])
def test_unsupported_values_are_refused_with_their_type(value: object) -> None:
    with pytest.raises(MessageError, match=f"{type(value).__name__} was not published.*encode anything else yourself"):
        message("invoices", value)


def test_a_returned_value_is_published_with_the_key_of_its_record() -> None:
    app = App("billing")

    @app.consume("orders", publish_to="invoices")
    async def handle(total: int) -> Invoice | None:
        return Invoice(total) if total else None

    found = published(app, 3, 0, 4)
    assert [(record.key, record.value) for record in found] == [(b"k", b'{"total":3}'), (b"k", b'{"total":4}')]


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_messages_name_their_own_topics_and_keys(kind: type) -> None:
    app = App("billing")

    @app.consume("orders", publish_to="elsewhere")
    def handle(total: int) -> object:
        return kind([message("invoices", Invoice(amount), key=str(amount)) for amount in range(total)])

    assert [(record.key, record.value) for record in published(app, 2, 0)] == [
        (b"0", b'{"total":0}'),
        (b"1", b'{"total":1}'),
    ]


def test_a_message_or_a_list_of_values_can_be_returned() -> None:
    app = App("billing")

    @app.consume("orders", publish_to="invoices")
    async def handle(total: int) -> Message | list[int]:
        return message("invoices", None, key="gone") if total == 1 else [total]

    assert [(record.key, record.value) for record in published(app, 1, 2)] == [(b"gone", None), (b"k", b"[2]")]


def test_the_result_after_middleware_is_published() -> None:
    app = App("billing")

    @app.middleware
    async def doubled(record: Record, context: Context, call_next: CallNext) -> object:
        return 2 * int(str(await call_next(record, context)))

    @app.consume("orders", publish_to="invoices")
    async def handle(total: int) -> int:
        return total

    assert [record.value for record in published(app, 21)] == [b"42"]


def test_an_unpublishable_result_fails_its_record() -> None:
    app = App("billing")
    attempts = []

    @app.consume("orders", publish_to="invoices", retry=Retry(attempts=2, initial=0.1), on_failure=DeadLetter("dead"))
    async def handle(total: int) -> object:
        attempts.append(total)
        return object()

    assert published(app, 3) == ()
    assert attempts == [3, 3]
    assert app.statistics().handlers[0].dead_lettered == 1


def test_a_record_is_complete_only_once_its_result_is_acknowledged() -> None:
    app = App("billing", auto_offset_reset="earliest")

    @app.consume("orders", publish_to="invoices", retry=Retry(attempts=5, initial=1.0))
    async def handle(total: int) -> int:
        return total

    async def test() -> None:
        async with TestClient(app) as client:
            client.broker.fail_publishes("invoices", TransportError("no"))
            await client.publish("orders", 3, partition=0)
            await asyncio.sleep(0.5)
            assert client.committed("orders", 0) in {0, None}
            client.broker.fail_publishes("invoices", None)
            await client.settle(60)
            assert client.committed("orders", 0) == 1

    run(test())


def test_with_exactly_once_the_result_is_visible_with_the_offset() -> None:
    app = App("billing", processing_guarantee="exactly_once")

    @app.consume("orders", publish_to="invoices", retry=Retry(attempts=2, initial=0.1))
    async def handle(_: Record, context: Context) -> int:
        return context.attempt

    assert [record.value for record in published(app, "x")] == [b"1"]


def test_messages_with_a_key_use_round_robin_on_request() -> None:
    app = App("billing")

    @app.consume("orders")
    async def handle(_: Record, context: Context) -> None:
        await context.publish("invoices", "x", key="k", partitioner="round_robin")

    assert sorted(record.partition for record in published(app, *range(10))) == [0] * 5 + [1] * 5


@pytest.mark.parametrize("options", [{"publish_to": "or ders"}, {"publish_to": "orders"}, {"publish_to": 3}])
def test_invalid_target_topics_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(HandlerError, match=f"publish_to={options['publish_to']!r} was refused"):
        App("billing").consume("orders", **options)


def test_a_batch_result_has_no_key() -> None:
    with pytest.raises(HandlerError, match=r"publish_to='invoices' was refused.*context\.publish"):
        App("billing").consume("orders", publish_to="invoices", batch=Batch())


def test_an_unknown_partitioner_is_refused() -> None:
    with pytest.raises(MessageError, match="partitioner='random' was refused"):
        message("invoices", "x", partitioner="random")  # type: ignore[arg-type]


def test_an_unknown_option_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(HandlerError, match=r"no option 'concurency'.*'concurrency'.*pattern, .*publish_to"):
        App("billing").consume("orders", concurency=3)  # type: ignore[arg-type]
    with pytest.raises(HandlerError, match=r"no option 'xyz'.*pattern, .*publish_to"):
        App("billing").consume("orders", xyz=3)  # type: ignore[arg-type]
