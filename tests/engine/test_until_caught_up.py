"""Consuming to the end: up to the ends that were seen first, however long it takes."""

import asyncio

from aioshard import App, Record
from aioshard.engine.runtime import Engine
from aioshard.records import TopicPartition
from aioshard.testing import TestClient, run


def test_the_ends_stay_where_they_were_when_the_group_rebalances() -> None:
    """What is published meanwhile would else have the run go on for as long as somebody publishes."""
    gate = asyncio.Event()
    app = App("billing")

    @app.consume("orders")
    async def on_order(_: Record) -> None:
        await gate.wait()

    async def scenario() -> None:
        client = TestClient(app)
        client.broker.create_topic("orders", 1)
        await client.publish("orders", b"first")
        async with client:
            engine = app._engine
            assert isinstance(engine, Engine)
            await client.publish("orders", b"later")
            catching_up = asyncio.create_task(engine.caught_up())
            await asyncio.sleep(1)
            assert not catching_up.done()

            client.group.lose()
            await client.broker.until(lambda: bool(client.group.members) and not client.group.rebalancing)
            await client.publish("orders", b"last")
            assert engine.rebalance.ends == {TopicPartition("orders", 0): 1}

            gate.set()
            await catching_up

    run(scenario())


def test_a_topic_that_is_made_anew_has_its_new_end() -> None:
    app = App("billing")

    @app.consume("orders")
    async def on_order(_: Record) -> None: ...

    async def scenario() -> None:
        client = TestClient(app)
        client.broker.create_topic("orders", 1)
        for _ in range(3):
            await client.publish("orders", b"old")
        async with client:
            engine = app._engine
            assert isinstance(engine, Engine)
            await client.settle()
            client.broker.recreate("orders")
            await client.publish("orders", b"new")
            client.group.lose()
            await client.settle()

            assert engine.rebalance.ends == {TopicPartition("orders", 0): 1}
            await engine.caught_up()

    run(scenario())
