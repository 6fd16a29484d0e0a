"""Topics are subscribed and unsubscribed while the app runs."""

import asyncio

import pytest

from aioshard import App, Park, Record
from aioshard.errors import HandlerError, StateError
from aioshard.testing import TestClient


class Shop:
    """An app with two handlers, and the topic and value of each processed record."""

    def __init__(self) -> None:
        self.app = App("shop", drain_timeout=5.0)
        self.done: list[tuple[str, str, bytes | None]] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.waits = asyncio.Event()

        @self.app.consume("orders", publish_to="done")
        async def on_order(record: Record) -> None:
            self.waits.set()
            await self.hold.wait()
            self.done.append(("on_order", record.topic, record.value))

        @self.app.consume("refunds", on_failure=Park("parked", delay=1.0))
        async def on_refund(record: Record) -> None:
            self.done.append(("on_refund", record.topic, record.value))


async def test_subscribed_topics_are_consumed_and_unsubscribed_ones_are_not() -> None:
    shop = Shop()
    async with TestClient(shop.app) as client:
        await client.publish("orders.eu", "early")
        shop.app.subscribe("on_order", "orders.eu")
        await client.settle()
        assert shop.done == [("on_order", "orders.eu", b"early")]

        shop.app.unsubscribe("on_order", "orders.eu")
        await client.settle()
        await client.publish("orders.eu", "later")
        await client.publish("orders", "still")
        await client.settle()
        assert shop.done[1:] == [("on_order", "orders", b"still")]
        assert {partition.topic for partition in shop.app.assignment()} == {"orders", "refunds"}

        shop.app.subscribe("on_order", "orders.eu")
        await client.settle()
        assert shop.done[2:] == [("on_order", "orders.eu", b"later")], "it resumes at its commit"


async def test_running_records_are_drained_and_committed_at_unsubscribe() -> None:
    shop = Shop()
    async with TestClient(shop.app) as client:
        shop.app.subscribe("on_order", "orders.eu")
        await client.settle()
        shop.hold.clear()
        await client.publish("orders.eu", "x", partition=0)
        await shop.waits.wait()

        shop.app.unsubscribe("on_order", "orders.eu")
        shop.app.explain()
        await asyncio.sleep(0)
        shop.hold.set()
        await client.settle()

        assert shop.done == [("on_order", "orders.eu", b"x")]
        assert client.committed("orders.eu", 0) == 1


@pytest.mark.parametrize(
    ("handler", "add", "error", "sentence"),
    [
        ("nobody", "x", StateError, "unknown handler 'nobody'"),
        ("on_order", "refunds", HandlerError, "belongs to handler 'on_refund'"),
        ("on_order", "done", HandlerError, "publishes to topic 'done'"),
        ("on_order", "no topic", HandlerError, "'no topic' is not a topic name"),
        ("on_order", "parked", HandlerError, "parked"),
        ("on_refund", "parked", HandlerError, "the handler itself consumes"),
    ],
)
async def test_a_refused_topic_changes_nothing(handler: str, add: str, error: type[Exception], sentence: str) -> None:
    shop = Shop()
    async with TestClient(shop.app) as client:
        with pytest.raises(error, match=sentence):
            shop.app.subscribe(handler, add)
        await client.settle()

        assert {partition.topic for partition in shop.app.assignment()} == {"orders", "refunds"}
        assert client.group.generation == 1


async def test_a_handler_keeps_a_topic() -> None:
    shop = Shop()
    async with TestClient(shop.app):
        with pytest.raises(HandlerError, match="pause_handler"):
            shop.app.unsubscribe("on_order", "orders")


async def test_a_topic_does_not_move_to_another_handler_of_a_running_app() -> None:
    shop = Shop()
    async with TestClient(shop.app) as client:
        shop.app.subscribe("on_order", "orders.eu")
        await client.settle()
        shop.app.unsubscribe("on_order", "orders.eu")

        with pytest.raises(StateError, match="was read by handler 'on_order'"):
            shop.app.subscribe("on_refund", "orders.eu")


async def test_a_restarted_app_keeps_its_topics() -> None:
    shop = Shop()
    async with TestClient(shop.app):
        shop.app.subscribe("on_order", "orders.eu")
    async with TestClient(shop.app) as client:
        await client.publish("orders.eu", "x")
        await client.settle()

    assert shop.done == [("on_order", "orders.eu", b"x")]


def test_an_app_that_is_not_running_refuses_to_subscribe() -> None:
    with pytest.raises(StateError, match="is not running"):
        Shop().app.subscribe("on_order", "x")
