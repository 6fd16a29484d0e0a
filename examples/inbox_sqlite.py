"""Every order has its effects exactly once, on SQLite: inbox, version check and commutative update together.

A record may be delivered again after a crash. One transaction writes its changes and its row in the inbox: either both
exist, or neither.
"""

import asyncio
import contextlib
import json
import logging
import sqlite3
import time
from collections.abc import AsyncIterator

from aioshard import App, Context, Record

DATABASE = "customers.db"
KEPT = 3_600.0  # seconds: longer than any run of a handler, even in a process that the group has declared dead

logger = logging.getLogger("customers")

SCHEMA = """
CREATE TABLE IF NOT EXISTS inbox (
    key TEXT PRIMARY KEY,
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL,
    record_offset INTEGER NOT NULL,
    handled_at REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS inbox_by_age ON inbox (handled_at);
CREATE TABLE IF NOT EXISTS customers (
    id TEXT PRIMARY KEY,
    spent INTEGER NOT NULL DEFAULT 0,
    address TEXT,
    version INTEGER NOT NULL DEFAULT -1
);
"""


@contextlib.asynccontextmanager
async def resources(app: App) -> AsyncIterator[sqlite3.Connection]:
    # The handler runs in a thread, one at a time. `timeout` waits for another process that is writing.
    with contextlib.closing(sqlite3.connect(DATABASE, timeout=30, check_same_thread=False)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.executescript(SCHEMA)
        cleaning = asyncio.create_task(clean_regularly(app), name="clean the inbox")
        try:
            yield database
        finally:
            cleaning.cancel()
            await asyncio.wait([cleaning])


app = App("customers", bootstrap_servers="localhost:9092", auto_offset_reset="earliest", resources=resources)


@app.consume("orders", shard_by="key", concurrency=1)  # SQLite has one writer at a time, so more would only wait
def on_order(record: Record, context: Context) -> None:
    order = json.loads(record.value or b"")
    values = {
        "key": context.idempotency_key,
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "now": time.time(),
        "customer": (record.key or b"").decode(),
        "amount": order["amount"],
        "address": order["address"],
    }
    database: sqlite3.Connection = context.state
    with database:  # one transaction: committed at the end, rolled back on an exception
        noted = database.execute(
            "INSERT INTO inbox VALUES (:key, :topic, :partition, :offset, :now) ON CONFLICT DO NOTHING", values
        )
        if noted.rowcount == 0:
            return  # already handled
        database.execute("INSERT INTO customers (id) VALUES (:customer) ON CONFLICT DO NOTHING", values)
        # Commutative: the sum is the same in any order. Adding is not idempotent, so it needs the inbox.
        database.execute("UPDATE customers SET spent = spent + :amount WHERE id = :customer", values)
        # The newest address wins: an older record that arrives late finds a newer version and changes nothing.
        database.execute(
            "UPDATE customers SET address = :address, version = :offset WHERE id = :customer AND version < :offset",
            values,
        )


def clean(app: App) -> int:
    """Delete the rows of records that cannot be delivered again: committed, and handled some time ago."""
    deleted = 0
    with contextlib.closing(sqlite3.connect(DATABASE, timeout=30)) as database, database:
        for partition in app.statistics().partitions:
            deleted += database.execute(
                "DELETE FROM inbox WHERE handled_at < ? AND topic = ? AND partition = ? AND record_offset < ?",
                (time.time() - KEPT, partition.topic, partition.partition, partition.committed),
            ).rowcount
    return deleted


async def clean_regularly(app: App) -> None:
    while True:
        await asyncio.sleep(60)
        try:
            await asyncio.to_thread(clean, app)
        except sqlite3.Error:
            logger.exception("the inbox could not be cleaned; trying again in a minute")


if __name__ == "__main__":
    app.run()
