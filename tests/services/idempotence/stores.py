"""The databases of the inbox examples, as tests read them."""

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import psycopg

from aioshard import App, Record
from examples import inbox_postgresql, inbox_sqlite

QUERY = "SELECT id, spent, address, version FROM customers ORDER BY id"


class Customer(NamedTuple):
    """The effects of the orders of one customer."""

    spent: int
    address: str
    version: int
    """The offset that the address is from."""


class Store(Protocol):
    """An example with its database."""

    address: str
    """Finds the store again in another process; see `store_at`."""

    @property
    def example(self) -> ModuleType:
        """Its module; it writes to the store that was made last."""

    def customers(self) -> dict[str, Customer]:
        """Return the stored customers; none before the first start."""

    def inbox(self) -> set[str]:
        """The keys of the inbox."""

    def age_inbox(self) -> None:
        """Lets every row of the inbox look two hours old."""

    def empty_inbox(self) -> None:
        """Deletes every row of the inbox."""

    def reset(self) -> None:
        """Removes everything, the tables included."""


class SqliteStore:
    """A file."""

    def __init__(self, address: str) -> None:
        self.address = inbox_sqlite.DATABASE = address
        self.example: ModuleType = inbox_sqlite

    def customers(self) -> dict[str, Customer]:
        return {name: Customer(*rest) for name, *rest in self._execute(QUERY)}

    def inbox(self) -> set[str]:
        return {key for (key,) in self._execute("SELECT key FROM inbox")}

    def age_inbox(self) -> None:
        self._execute("UPDATE inbox SET handled_at = handled_at - 7200")

    def empty_inbox(self) -> None:
        self._execute("DELETE FROM inbox")

    def reset(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            Path(self.address + suffix).unlink(missing_ok=True)

    def _execute(self, statement: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self.address, timeout=30)) as database, database:
            if not database.execute("SELECT 1 FROM sqlite_master").fetchall():
                return []
            return database.execute(statement).fetchall()


class PostgresqlStore:
    """A database of a server."""

    def __init__(self, address: str) -> None:
        self.address = inbox_postgresql.DATABASE = address
        self.example: ModuleType = inbox_postgresql

    def customers(self) -> dict[str, Customer]:
        return {name: Customer(*rest) for name, *rest in self._execute(QUERY.encode())}

    def inbox(self) -> set[str]:
        return {key for (key,) in self._execute(b"SELECT key FROM inbox")}

    def age_inbox(self) -> None:
        self._execute(b"UPDATE inbox SET handled_at = handled_at - interval '2 hours'")

    def empty_inbox(self) -> None:
        self._execute(b"DELETE FROM inbox")

    def reset(self) -> None:
        self._execute(b"DROP TABLE IF EXISTS inbox, customers")

    def _execute(self, statement: bytes) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.address) as connection:
            try:
                done = connection.execute(statement)
            except psycopg.errors.UndefinedTable:
                return []
            return done.fetchall() if done.description else []


def store_at(address: str) -> Store:
    """The store of an address."""
    return PostgresqlStore(address) if address.startswith("postgresql:") else SqliteStore(address)


def app_of(store: Store, group: str, topic: str = "orders", **settings: Any) -> App:
    """An app of a group of one's own, with the handler of the example."""
    (handler,) = store.example.app.handlers
    app = App(group, resources=store.example.resources, **settings)
    app.consume(topic, shard_by=handler.shard_by, concurrency=handler.concurrency)(handler.function)
    return app


def order(amount: int, address: str) -> bytes:
    """The value of a record."""
    return json.dumps({"amount": amount, "address": address}).encode()


def expected(records: Iterable[Record]) -> Mapping[str, Customer]:
    """Return the effects of records that are handled once each, in order per customer."""
    customers: dict[str, Customer] = {}
    for record in sorted(records, key=lambda one: one.offset):
        customer, found = (record.key or b"").decode(), json.loads(record.value or b"")
        before = customers.get(customer, Customer(0, "", -1))
        customers[customer] = Customer(before.spent + found["amount"], found["address"], record.offset)
    return customers
