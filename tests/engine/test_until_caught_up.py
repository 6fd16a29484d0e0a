"""Until caught up: consuming up to the ends seen at the start."""

import asyncio

import pytest

from aioshard import App, Record, Retry
from aioshard.engine.control import caught_up, nothing_moves
from aioshard.errors import ClientLostError, HaltedError, OffsetRegressionError
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryTransport, TestClient, run
from tests.engine.live_apps import engine_of


def test_the_target_ends_survive_a_rebalance() -> None:
    """Otherwise records published meanwhile would prolong the run indefinitely."""
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
            engine = engine_of(app)
            await client.publish("orders", b"later")
            catching_up = asyncio.create_task(caught_up(engine))
            await asyncio.sleep(1)
            assert not catching_up.done()

            client.group.lose()
            await client.broker.until(lambda: bool(client.group.members) and not client.group.rebalancing)
            await client.publish("orders", b"last")
            assert engine.rebalance.ends == {TopicPartition("orders", 0): 1}

            gate.set()
            await catching_up

    run(scenario())


def test_a_recreated_topic_has_its_new_end() -> None:
    app = App("billing")

    @app.consume("orders")
    async def on_order(_: Record) -> None: ...

    async def scenario() -> None:
        client = TestClient(app)
        client.broker.create_topic("orders", 1)
        for _ in range(3):
            await client.publish("orders", b"old")
        async with client:
            engine = engine_of(app)
            await client.settle()
            client.broker.recreate("orders")
            await client.publish("orders", b"new")
            client.group.lose()
            await client.settle()

            assert engine.rebalance.ends == {TopicPartition("orders", 0): 1}
            await caught_up(engine)

    run(scenario())


def test_until_caught_up_survives_a_lost_client() -> None:
    """While a new one is built nothing is assigned to us; that does not mean that nothing is left."""
    app = App("billing")
    done: list[int] = []

    @app.consume("orders", concurrency=1)
    async def on_order(record: Record) -> None:
        await asyncio.sleep(1.0)
        done.append(record.offset)

    async def scenario() -> None:
        client = TestClient(app, latency=lambda _: 0.1)
        client.broker.create_topic("orders", 1)
        for _ in range(5):
            await client.publish("orders", b"")
        async with client:
            engine = engine_of(app)
            catching_up = asyncio.create_task(caught_up(engine))
            await asyncio.sleep(1.5)
            client.broker.fail_next_poll(ClientLostError("the client died"))
            await catching_up
            assert app.statistics().client_losses == 1

    run(scenario())

    assert set(done) == set(range(5))


def test_until_caught_up_continues_after_a_rewind() -> None:
    """Its epoch has ended, and its new position is being resolved."""
    app = App("billing")
    done: list[int] = []

    @app.consume("orders", concurrency=1)
    async def on_order(record: Record) -> None:
        await asyncio.sleep(1.0)
        done.append(record.offset)

    async def scenario() -> None:
        client = TestClient(app, latency=lambda _: 0.1)
        client.broker.create_topic("orders", 1)
        for _ in range(5):
            await client.publish("orders", b"")
        async with client:
            engine = engine_of(app)
            catching_up = asyncio.create_task(caught_up(engine))
            await asyncio.sleep(1.5)
            (partition,) = engine.rebalance.partitions
            engine.rebalance.reset_position(partition, OffsetRegressionError(1, 2))
            await catching_up

    run(scenario())

    assert set(done) == set(range(5))


def test_until_caught_up_continues_after_losing_a_partition() -> None:
    app = App("billing")
    done: list[int] = []

    @app.consume("orders", concurrency=1)
    async def on_order(record: Record) -> None:
        await asyncio.sleep(1.0)
        done.append(record.offset)

    async def scenario() -> None:
        client = TestClient(app, latency=lambda _: 0.1)
        client.broker.create_topic("orders", 1)
        for _ in range(5):
            await client.publish("orders", b"")
        async with client:
            engine = engine_of(app)
            catching_up = asyncio.create_task(caught_up(engine))
            await asyncio.sleep(1.5)
            client.group.lose()
            await catching_up

    run(scenario())

    assert set(done) == set(range(5))


@pytest.mark.parametrize("batch", [43, 129])
def test_until_caught_up_runs_everything_else_before_ending_at_a_halt(batch: int) -> None:
    """Including records that a worker or fetch task holds between two iterations of the loop."""
    app = App("billing", auto_offset_reset="earliest", shutdown_timeout=2.0)
    broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
    broker.publish("orders", b"", key=b"bad")
    others = 129
    for number in range(others):
        broker.publish("orders", b"", key=b"%d" % number)
    processed = looked = 0

    @app.consume("orders", concurrency=1, retry=Retry(attempts=1))
    async def on_order(record: Record) -> None:
        nonlocal processed
        if record.key == b"bad":
            raise ValueError
        processed += 1

    def slow_fetcher(broker: InMemoryBroker) -> InMemoryTransport:
        """Large batches come long after the one before is complete."""
        return InMemoryTransport(
            broker,
            "billing",
            max_batch_records=batch,
            latency=lambda operation: 0.2 if operation == "fetch" and batch > 100 else 0.0,
        )

    def look() -> None:
        nonlocal looked
        engine = app._engine
        if engine is not None and app.statistics().handlers[0].halted and nothing_moves(engine):
            assert processed == others
            looked += 1

    async def scenario() -> None:
        async with app.started(lambda: slow_fetcher(broker)):
            engine = engine_of(app)
            with pytest.raises(HaltedError):
                await caught_up(engine)

    run(scenario(), on_step=look)

    assert looked
