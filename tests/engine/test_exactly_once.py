"""Exactly-once processing on the in-memory broker: which messages are published with a completion."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from aioshard import App, Batch, BatchContext, BatchError, Context, DeadLetter, Park, RateLimit, Record, Retry
from aioshard.attempts import Provided, with_attempts
from aioshard.engine.epoch import Delivery, Gate
from aioshard.engine.shards import DeliveryBatch
from aioshard.errors import (
    CommitError,
    CommitRefusedError,
    MessageError,
    MessageTooLargeError,
    SettingsError,
    StateError,
)
from aioshard.observe import TransactionStatistics
from aioshard.ports import Message
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryProducer, InMemoryTransport, TestClient
from tests.engine.deliveries import make_epoch
from tests.engine.running import engine_of

EXACTLY_ONCE: dict[str, Any] = {
    "client": "confluent",
    "processing_guarantee": "exactly_once",
    "auto_offset_reset": "earliest",
    "commit_interval": 0.01,
}
ONCE_MORE = Retry(attempts=2, initial=0.001)


def make_app(**settings: Any) -> App:
    return App("billing", **EXACTLY_ONCE | settings)


@contextlib.asynccontextmanager
async def without_interval(app: App) -> AsyncIterator[TestClient]:
    """Run an app whose transactions need a reason; the interval is no longer the short one of `TestClient`."""
    async with TestClient(app) as client:
        committer = engine_of(app).committer
        committer._interval, committer._last = 3600.0, asyncio.get_running_loop().time()
        yield client


def transactions_of(app: App) -> TransactionStatistics:
    transactions = app.statistics().transactions
    assert transactions is not None
    return transactions


async def until_complete(app: App, records: int) -> None:
    await until(lambda: sum(handler.processed for handler in app.statistics().handlers) == records)


async def until_committed(client: TestClient, offset: int) -> None:
    await until(lambda: client.committed("orders", 0) == offset)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.01)


def values(client: TestClient, topic: str) -> Counter[bytes | None]:
    return Counter(record.value for record in client.records(topic))


async def test_messages_of_a_failed_attempt_are_dropped() -> None:
    app = make_app()

    @app.consume("orders", retry=ONCE_MORE)
    async def on_order(_: Record, context: Context) -> None:
        assert await context.publish("out", b"%d" % context.attempt) == -1
        if context.attempt == 1:
            raise ValueError("again")

    async with TestClient(app) as client:
        await client.publish("orders", b"", partition=0)
        await until_committed(client, 1)
        assert values(client, "out") == {b"2": 1}


async def test_a_dead_letter_replaces_the_messages_of_its_handler() -> None:
    app = make_app()

    @app.consume("orders", retry=ONCE_MORE, on_failure=DeadLetter("dead"))
    async def on_order(_: Record, context: Context) -> None:
        await context.publish("out", b"")
        raise ValueError("always")

    async with TestClient(app) as client:
        await client.publish("orders", b"poison", partition=0)
        await until_committed(client, 1)
        assert (values(client, "out"), values(client, "dead")) == ({}, {b"poison": 1})


async def test_a_dead_letter_too_large_for_a_transaction_keeps_its_record() -> None:
    """The record has the largest size, and its dead letter has headers besides."""
    app = make_app()

    @app.consume("orders", retry=Retry(attempts=1), on_failure=DeadLetter("dead"))
    async def on_order(_: Record) -> None:
        raise ValueError("always")

    async with TestClient(app) as client:
        await client.publish("orders", b"x" * 1_000_000, partition=0)
        await until(lambda: "larger than 1000000 bytes" in app.explain())
        await client.publish("orders", b"small", key=b"k", partition=1)
        await until(lambda: client.committed("orders", 1) == 1)
        assert (values(client, "dead"), client.committed("orders", 0)) == ({b"small": 1}, 0)


@pytest.mark.parametrize("is_stored", [False, True])
async def test_brokers_decide_a_transaction_that_fails_or_times_out(is_stored: bool) -> None:
    app = make_app()
    runs = 0

    @app.consume("orders")
    async def on_order(record: Record, context: Context) -> None:
        nonlocal runs
        runs += 1
        await context.publish("out", record.value)

    async with TestClient(app) as client:
        client.broker.fail_next_commit(CommitError("cut"), applied=is_stored)
        for number in range(5):
            await client.publish("orders", b"%d" % number, partition=0)
        await until_committed(client, 5)
        assert values(client, "out") == {b"%d" % number: 1 for number in range(5)}
        assert is_stored or runs > 5
        assert app.statistics().commit_failures == 1


async def test_a_refused_transaction_is_resent_without_rerunning_handlers() -> None:
    """As in each rebalance: it was made for the generation before, and the partitions stay."""
    app = make_app()
    runs: Counter[bytes | None] = Counter()

    @app.consume("orders")
    async def on_order(record: Record, context: Context) -> None:
        runs[record.value] += 1
        await context.publish("out", record.value, key=b"k")

    async with TestClient(app) as client:
        client.broker.fail_next_commit(CommitRefusedError("the group has rebalanced"))
        client.broker.fail_next_commit(CommitRefusedError("the group has rebalanced"))
        for number in range(50):
            await client.publish("orders", b"%d" % number, partition=0, key=b"k")
            await asyncio.sleep(0.001)
        await until_committed(client, 50)
        assert [record.value for record in client.records("out")] == [b"%d" % number for number in range(50)]
        assert set(runs.values()) == {1}
        assert app.statistics().partitions[0].epoch == 1


async def test_messages_are_visible_only_with_the_offsets() -> None:
    app = make_app()

    @app.consume("orders")
    async def on_order(_: Record, context: Context) -> None:
        await context.publish("out", b"")

    async with without_interval(app) as client:
        await client.publish("orders", b"", partition=0)
        await until_complete(app, 1)
        await asyncio.sleep(0.02)
        assert (client.records("out"), client.committed("orders", 0)) == ([], 0)
        engine_of(app).committer.hurry()
        await client.settle()
        assert client.records("out")


async def test_completions_do_not_make_a_transaction_early() -> None:
    app = make_app(commit_records=1)

    @app.consume("orders")
    async def on_order(_: Record, context: Context) -> None:
        await context.publish("out", b"")

    async with without_interval(app) as client:
        for _ in range(3):
            await client.publish("orders", b"", partition=0)
        await until_complete(app, 3)
        await asyncio.sleep(0.15)
        assert not client.records("out")


async def test_a_message_after_the_end_of_the_run_is_refused() -> None:
    app = make_app()
    contexts: list[Context] = []

    @app.consume("orders")
    async def on_order(_: Record, context: Context) -> None:
        contexts.append(context)

    async with TestClient(app) as client:
        await client.publish("orders", b"", partition=0)
        await client.settle()
        with pytest.raises(StateError):
            await contexts[0].publish("out", b"")


async def test_a_message_too_large_for_a_transaction_fails_the_attempt() -> None:
    app = make_app()
    refused: list[Exception] = []

    @app.consume("orders")
    async def on_order(_: Record, context: Context) -> None:
        try:
            await context.publish("out", b"x" * 1_000_001)
        except MessageTooLargeError as error:
            refused.append(error)

    async with TestClient(app) as client:
        await client.publish("orders", b"", partition=0)
        await client.settle()
    assert len(refused) == 1


async def test_revoked_partitions_publish_before_they_are_released() -> None:
    app = make_app()

    @app.consume("orders")
    async def on_order(_: Record, context: Context) -> None:
        await context.publish("out", b"")

    async with without_interval(app) as client:
        await client.publish("orders", b"", partition=0)
        await until_complete(app, 1)
        assert not client.records("out")
        await client.revoke("orders", 0)
        assert (len(client.records("out")), client.committed("orders", 0)) == (1, 1)


async def test_a_parked_record_publishes_together_with_its_removal() -> None:
    app = make_app()
    runs = 0

    @app.consume("orders", retry=Retry(attempts=1), on_failure=Park("parked", delay=0.01))
    async def on_order(_: Record, context: Context) -> None:
        nonlocal runs
        runs += 1
        await context.publish("out", b"%d" % runs)
        if runs < 3:
            raise ValueError("not yet")

    async with TestClient(app) as client:
        await client.publish("orders", b"", partition=0)
        await until_committed(client, 1)
        await until(lambda: bool(client.records("out")))
        assert values(client, "out") == {b"3": 1}
        assert [record.value is None for record in client.records("parked")] == [False, False, True]


async def test_a_record_is_not_parked_if_its_transaction_fails() -> None:
    app = make_app()
    runs = 0

    @app.consume("orders", retry=Retry(attempts=1), on_failure=Park("parked", delay=60))
    async def on_order(record: Record, context: Context) -> None:
        nonlocal runs
        runs += 1
        await context.publish("out", record.value)
        if runs == 1:
            raise ValueError("not yet")

    async with TestClient(app) as client:
        client.broker.fail_next_commit(CommitError("cut"))
        await client.publish("orders", b"", partition=0)
        await until_committed(client, 1)
        assert (client.records("parked"), len(client.records("out")), runs) == ([], 1, 2)


async def test_parked_records_are_replayed_one_by_one() -> None:
    """Those of a batch would complete one after the other, each with its own tombstone."""
    app = make_app()
    is_broken, batches = True, []

    @app.consume(
        "orders",
        shard_by="key",
        batch=Batch(max_records=4, linger=0.02),
        retry=Retry(attempts=1),
        on_failure=Park("parked", delay=0.1),
    )
    async def on_orders(orders: list[Record], context: BatchContext) -> None:
        if is_broken:
            raise BatchError({order: ValueError("not yet") for order in orders})
        batches.append([order.value for order in orders])
        for order in orders:
            await context.publish("out", order.value)

    async with TestClient(app) as client:
        for number in range(4):
            await client.publish("orders", b"%d" % number, key=b"%d" % number, partition=0)
        await until_committed(client, 4)
        is_broken = False
        await until(lambda: len(client.records("out")) == 4)
        assert sorted(batches) == [[b"%d" % number] for number in range(4)]
        await client.settle()
        assert values(client, "out") == {b"%d" % number: 1 for number in range(4)}
        assert Counter(record.value is None for record in client.records("parked"))[True] == 4


async def test_a_parked_record_is_not_read_before_its_transaction_has_ended() -> None:
    """It waits without an error: where it is stored is not known yet."""
    app = make_app()
    runs = 0

    @app.consume("orders", retry=Retry(attempts=1), on_failure=Park("parked", delay=0.01))
    async def on_order(_: Record) -> None:
        nonlocal runs
        runs += 1
        raise ValueError("not yet")

    async with without_interval(app) as client:
        await client.publish("orders", b"", partition=0)
        await until(lambda: runs == 1)
        await asyncio.sleep(0.05)
        parking = engine_of(app).handlers[0].parking
        assert parking is not None
        assert [entry.stored_at for parked in parking.partitions for entry in parked.keys] == [-1]
        assert (runs, parking.trouble) == (1, None)


async def test_outputs_that_fill_the_buffer_do_not_wait_for_the_interval() -> None:
    app = make_app(max_buffered_bytes=40_000)

    @app.consume("orders", concurrency=4)
    async def on_order(_: Record, context: Context) -> None:
        await context.publish("out", b"x" * 5_000)

    async with without_interval(app) as client:
        for _ in range(40):
            await client.publish("orders", b"x" * 1_000, partition=0)
        await until(lambda: len(client.records("out")) >= 30)
        await until(lambda: transactions_of(app).messages == len(client.records("out")))
        assert app.statistics().commits >= 4


async def test_outputs_count_in_the_buffer_until_their_transaction_has_ended() -> None:
    app = make_app()

    @app.consume("orders")
    async def on_order(_: Record, context: Context) -> None:
        await context.publish("out", b"x" * 5_000)

    async with without_interval(app) as client:
        await client.publish("orders", b"", partition=0)
        await until_complete(app, 1)
        await asyncio.sleep(0.02)
        assert app.statistics().buffered_bytes > 5_000
        assert app.statistics().buffered_records == 0
        engine_of(app).committer.hurry()
        await client.settle()
        assert app.statistics().buffered_bytes == 0


async def test_transactions_are_counted() -> None:
    app = make_app()

    @app.consume("orders")
    async def on_order(record: Record, context: Context) -> None:
        await context.publish("out", record.value)

    async with TestClient(app) as client:
        client.broker.fail_next_commit(CommitRefusedError("fenced"))
        client.broker.fail_next_commit(CommitError("cut"))
        await client.publish("orders", b"", partition=0)
        await until(lambda: bool(client.records("out")))
        await client.settle()
        statistics = app.statistics()
        assert statistics.commit_failures == 2
        assert statistics.transactions == TransactionStatistics(fenced=1, messages=1, open_seconds=None)


async def test_only_epochs_of_a_failed_transaction_restart() -> None:
    """The failure may be known only when the partition has begun again already, or is somebody else's."""
    app = make_app()

    @app.consume("orders")
    async def on_order(record: Record, context: Context) -> None:
        await context.publish("out", record.value)

    async with TestClient(app) as client:
        for partition in range(3):
            await client.publish("orders", b"", partition=partition)
        await client.settle()
        rebalance = engine_of(app).rebalance
        ended, gone, failed = (rebalance.partitions[TopicPartition("orders", partition)] for partition in range(3))
        rebalance.begin_again([ended], "first")
        await until(lambda: rebalance.in_place)
        newer = rebalance.partitions[ended.topic_partition]
        await client.revoke("orders", 1)
        await until(lambda: rebalance.in_place)
        assert rebalance.partitions[ended.topic_partition] is newer
        newer.send_later([Message("out", b"newer")])

        rebalance.begin_again([ended, gone, failed], "late")

        assigned = client.transports[-1]._assigned
        assert (assigned[failed.topic_partition].paused, assigned[newer.topic_partition].paused) == (True, False)
        assert rebalance.partitions[ended.topic_partition] is newer
        assert newer.is_open
        assert failed.gate is Gate.ENDED
        await until(lambda: rebalance.in_place)
        assert rebalance.partitions[ended.topic_partition] is newer
        assert rebalance.partitions[failed.topic_partition] is not failed
        await until(lambda: values(client, "out")[b"newer"] == 1)
        await client.publish("orders", b"read on", partition=0)
        await until(lambda: values(client, "out")[b"read on"] == 1)


@pytest.mark.parametrize("limit", [None, RateLimit(1_000_000.0)])
async def test_a_batch_has_records_of_one_partition(limit: RateLimit | None) -> None:
    """If one of several began again alone, the messages of the batch would be lost or doubled."""
    app = make_app()
    batches: list[set[int]] = []

    @app.consume("orders", shard_by="key", rate_limit=limit, batch=Batch(max_records=8, linger=0.05))
    async def on_orders(orders: list[Record], context: BatchContext) -> None:
        batches.append({order.partition for order in orders})
        for order in orders:
            await context.publish("out", order.value)

    async with TestClient(app) as client:
        for number in range(12):
            await client.publish("orders", b"%d" % number, key=b"%d" % number, partition=number % 2)
        await client.settle()
        assert values(client, "out") == {b"%d" % number: 1 for number in range(12)}
        assert all(len(partitions) == 1 for partitions in batches)
        assert len(batches) < 12


async def test_a_batch_that_has_published_fails_as_a_whole() -> None:
    app = make_app()
    named = False

    @app.consume("orders", batch=Batch(max_records=4, linger=0.05), retry=Retry(attempts=3, initial=0.001))
    async def on_orders(orders: list[Record], context: BatchContext) -> None:
        nonlocal named
        for order in orders:
            await context.publish("out", order.value)
        if not named:
            named = True
            raise BatchError({orders[0]: ValueError("again")})

    async with TestClient(app) as client:
        for number in range(4):
            await client.publish("orders", b"%d" % number, partition=0)
        await client.settle()
        assert values(client, "out") == {b"%d" % number: 1 for number in range(4)}


async def test_messages_of_an_earlier_attempt_do_not_leak_into_another_batch() -> None:
    """That attempt was cancelled and returned all the same, so its messages were there already."""
    app = make_app()
    is_broken = False

    @app.consume("orders", batch=Batch(max_records=4))
    async def on_orders(orders: list[Record], context: BatchContext) -> None:
        for order in orders:
            await context.publish("out", b"%d" % order.offset)
        if is_broken:
            raise ValueError("again")

    (handler,) = app
    attempt: Any = with_attempts(
        handler, Provided(lambda: None, InMemoryProducer(InMemoryBroker()).publish, exactly_once=True)
    ).invoke
    _, deliveries = make_epoch([b"a", b"b"])

    async def attempted(*members: Delivery) -> list[list[bytes | None]]:
        batch = DeliveryBatch(4, 0.0)
        for delivery in members:
            batch.add(delivery, 1 << 20)
        with contextlib.suppress(ValueError):
            await attempt(batch)
        return [[message.value for message in delivery.outgoing] for delivery in deliveries]

    first, second = deliveries
    assert await attempted(first, second) == [[b"0", b"1"], []]
    assert await attempted(second, first) == [[], [b"1", b"0"]]
    is_broken = True
    assert await attempted(first, second) == [[], []]
    is_broken = False
    assert await attempted(second) == [[], [b"1"]]


async def test_a_backfill_publishes_at_once() -> None:
    """It commits nothing for the group, so that no transaction could make its messages visible."""
    app = make_app()
    offsets: list[int] = []

    @app.consume("orders")
    async def on_order(_: Record, context: Context) -> None:
        offsets.append(await context.publish("out", b""))

    broker = InMemoryBroker(partitions=1)
    broker.publish("orders", b"")
    async with app.started(lambda: InMemoryTransport(broker, "billing"), lambda: InMemoryProducer(broker), replay=True):
        await until(lambda: offsets == [0])
        assert app.statistics().transactions is None
    assert len(broker.records("out")) == 1


async def test_messages_of_a_timed_out_attempt_are_not_sent_with_its_dead_letter() -> None:
    """It returned although it was cancelled, so it halts; the operator skips it."""
    app = make_app()

    @app.consume("orders", timeout=0.01)
    async def on_order(_: Record, context: Context) -> None:
        await context.publish("out", b"")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(10)

    async with TestClient(app) as client:
        await client.publish("orders", b"", partition=0)
        async with asyncio.timeout(5):
            while not app.statistics().handlers[0].halted:  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0.01)
        app.skip("orders", 0, 0)
        await until_committed(client, 1)
        assert not client.records("out")


@pytest.mark.parametrize("partition", [-1, 2**31, "0", 1.5])
async def test_publishing_to_an_impossible_partition_fails_the_attempt(partition: Any) -> None:
    app = make_app()
    refused: list[Exception] = []

    @app.consume("orders")
    async def on_order(_: Record, context: Context) -> None:
        try:
            await context.publish("out", b"", partition=partition)
        except MessageError as error:
            refused.append(error)

    async with TestClient(app) as client:
        await client.publish("orders", b"", partition=0)
        await client.settle()
    assert len(refused) == 1


@pytest.mark.parametrize(
    "settings",
    [{"client": "aiokafka"}, {"assign": {"orders": [0]}}, {"transaction_timeout": 25}, {"rebalance_timeout": 33}],
)
def test_settings_that_rule_out_exactly_once_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        make_app(**settings)


def test_the_default_commit_interval_is_shorter_with_exactly_once() -> None:
    without = {name: value for name, value in EXACTLY_ONCE.items() if name != "commit_interval"}
    assert App("billing", **without).settings.commit_interval == 0.1
    assert App("billing").settings.commit_interval == 1.0
