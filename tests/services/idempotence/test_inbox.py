"""The inbox examples on SQLite and PostgreSQL: repeated, late and concurrent deliveries count once."""

import asyncio
import contextlib
import inspect
from collections.abc import Callable

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool

from aioshard import App, Record
from aioshard.testing import InMemoryBroker, TestClient, assert_idempotent
from examples import inbox_postgresql
from tests.services.idempotence.stores import Customer, PostgresqlStore, Store, app_of, expected, order

PATIENCE = 60.0
"""Seconds: time is real here, and a machine may be busy."""


def publish(broker: InMemoryBroker, count: int, customers: int) -> list[Record]:
    return [
        broker.publish("orders", order(number + 1, f"street {number}"), key=b"customer-%d" % (number % customers))
        for number in range(count)
    ]


async def test_a_crash_at_any_await_leaves_the_effects_of_a_single_run(store: Store) -> None:
    history = publish(InMemoryBroker(partitions=1), count=3, customers=2)

    await assert_idempotent(
        app_of(store, "customers"), history, reset=store.reset, effects=store.customers, timeout=PATIENCE
    )

    assert store.customers() == expected(history)


async def test_a_record_in_flight_in_two_processes_counts_once(store: Store) -> None:
    """As when a partition has moved on while its old owner was only slow."""
    broker = InMemoryBroker()
    old, new = app_of(store, "old"), app_of(store, "new")

    async with TestClient(old, broker=broker) as one, TestClient(new, broker=broker) as other:
        records = publish(broker, count=100, customers=10)
        await asyncio.gather(one.settle(PATIENCE), other.settle(PATIENCE))

    assert store.customers() == expected(records)
    assert [app.statistics().handlers[0].processed for app in (old, new)] == [100, 100]


async def test_late_redeliveries_change_nothing(store: Store) -> None:
    async with TestClient(app_of(store, "customers")) as client:
        records = publish(client.broker, count=40, customers=4)
        await client.settle(PATIENCE)
        before = store.customers()
        client.group.commit_from_outside(dict.fromkeys(client.group.subscribed(), 0))
        client.group.lose()
        await client.settle(PATIENCE)
        assert client.app.statistics().handlers[0].processed == 80

    assert store.customers() == before == expected(records)


async def test_a_late_older_record_adds_to_the_sum_and_does_not_overwrite(store: Store) -> None:
    async with TestClient(app_of(store, "customers")) as client:
        client.broker.log("orders", 0).skip(1)
        await client.publish("orders", order(5, "new street"), key="alice", partition=0)
        await client.settle(PATIENCE)
    late = InMemoryBroker()
    async with TestClient(app_of(store, "late"), broker=late) as client:
        await client.publish("orders", order(3, "old street"), key="alice", partition=0)
        await client.settle(PATIENCE)

    assert store.customers() == {"alice": Customer(spent=8, address="new street", version=1)}
    assert store.inbox() == {"orders/0/0", "orders/0/1"}


async def test_without_its_inbox_row_a_late_record_is_added_again(store: Store) -> None:
    """Deleting too early adds up twice; the version check still protects the address."""
    async with TestClient(app_of(store, "customers")) as client:
        for amount, address in ((3, "old street"), (5, "new street")):
            await client.publish("orders", order(amount, address), key="alice", partition=0)
        await client.settle(PATIENCE)
        store.empty_inbox()
        client.broker.log("orders", 0).delete(1)  # only the older one comes again
        client.group.commit_from_outside(dict.fromkeys(client.group.subscribed(), 0))
        client.group.lose()
        await client.settle(PATIENCE)

    assert store.customers() == {"alice": Customer(spent=11, address="new street", version=1)}


TOO_LARGE = order(2**70, "street")
"""No column takes it, so its transaction fails in the middle."""


async def test_an_order_that_fails_midway_leaves_nothing_behind(store: Store) -> None:
    """Its row in the inbox has to go too, or the order would count as done."""
    app = app_of(store, "customers")
    async with TestClient(app, speed=1000) as client:
        await client.publish("orders", TOO_LARGE, key="alice", partition=0)
        await client.publish("orders", order(3, "street"), key="ben", partition=0)
        await until(lambda: outcomes(app) == (1, 1))

    assert set(store.customers()) == {"ben"}
    assert store.inbox() == {"orders/0/1"}


async def test_a_row_is_deleted_once_it_is_committed_and_old(store: Store) -> None:
    app = app_of(store, "customers")

    async def clean() -> int:
        found = store.example.clean(app, app._state) if isinstance(store, PostgresqlStore) else store.example.clean(app)
        deleted: int = await found if inspect.isawaitable(found) else found
        return deleted

    async with TestClient(app, speed=1000) as client:
        for partition, value in ((0, order(1, "a")), (0, TOO_LARGE), (0, order(2, "b")), (1, order(3, "c"))):
            await client.publish("orders", value, key=value, partition=partition)
        await until(lambda: outcomes(app) == (3, 1) and committed(app)[:2] == [1, 1])
        before = store.inbox()
        assert await clean() == 0, "they are young: a run that outlives its partition may still come"
        store.age_inbox()
        assert await clean() == 2

    assert before == {"orders/0/0", "orders/0/2", "orders/1/0"}
    assert store.inbox() == {"orders/0/2"}, "it is not committed, and comes again"


def committed(app: App) -> list[int | None]:
    return [partition.committed for partition in app.statistics().partitions]


def outcomes(app: App) -> tuple[int, int]:
    """How many records are processed and how many are halted."""
    (handler,) = app.statistics().handlers
    return handler.processed, handler.halted


# On PostgreSQL -------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["commit", "rollback"])
async def test_a_record_waits_for_its_other_run_to_end(postgresql_url: str, outcome: str) -> None:
    store = PostgresqlStore(postgresql_url)
    app = app_of(store, "customers")
    async with TestClient(app) as client, await psycopg.AsyncConnection.connect(postgresql_url) as other:
        await other.execute("INSERT INTO inbox VALUES ('orders/0/0', 'orders', 0, 0)")
        await client.publish("orders", order(3, "street"), key="alice", partition=0)
        await until(lambda: waits_for_a_lock(postgresql_url))
        await (other.commit() if outcome == "commit" else other.rollback())
        await client.settle(PATIENCE)

    assert store.customers() == ({} if outcome == "commit" else {"alice": Customer(3, "street", 0)})


async def test_a_stalled_transaction_does_not_block_its_record_forever(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine of the old owner is gone, and the server does not know."""
    monkeypatch.setattr(inbox_postgresql, "STANDSTILL", 1)
    store = PostgresqlStore(postgresql_url)
    gone = contextlib.suppress(psycopg.errors.IdleInTransactionSessionTimeout, psycopg.OperationalError)

    async with TestClient(app_of(store, "customers")) as client:
        pool: AsyncConnectionPool = client.app._state
        with gone:
            async with pool.connection() as old:
                await old.execute("INSERT INTO inbox VALUES ('orders/0/0', 'orders', 0, 0)")
                await client.publish("orders", order(3, "street"), key="alice", partition=0)
                await client.settle(PATIENCE)
                assert store.customers() == {"alice": Customer(3, "street", 0)}


def waits_for_a_lock(url: str) -> bool:
    with psycopg.connect(url) as connection:
        return bool(connection.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchall())


async def until(condition: Callable[[], bool]) -> None:
    """Poll for a condition in a database or in the statistics."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - hence there is no event
            await asyncio.sleep(0.01)
