"""Every order has its effects exactly once, on PostgreSQL: inbox, version check and commutative update together.

A record may be delivered again after a crash, or by two processes at the same time. One transaction writes its changes
and its row in the inbox: either both exist, or neither.

Needs `psycopg[binary,pool]`.
"""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator

import psycopg
from psycopg_pool import AsyncConnectionPool

from aioshard import App, Context, Record

DATABASE = os.environ.get("DATABASE_URL", "postgresql://localhost/customers")
CONNECTIONS = 16
STANDSTILL = 30  # seconds until the server ends an idle transaction: its process may be gone
KEPT = 3_600  # seconds: longer than any run of a handler, even in a process that the group has declared dead

logger = logging.getLogger("customers")

# The lock is for processes that start at the same time. In production, let a migration create the tables.
SCHEMA = """
SELECT pg_advisory_xact_lock(1);
CREATE TABLE IF NOT EXISTS inbox (
    key text PRIMARY KEY,
    topic text NOT NULL,
    partition integer NOT NULL,
    record_offset bigint NOT NULL,
    handled_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS inbox_by_age ON inbox (handled_at);
CREATE TABLE IF NOT EXISTS customers (
    id text PRIMARY KEY,
    spent bigint NOT NULL DEFAULT 0,
    address text,
    version bigint NOT NULL DEFAULT -1
);
"""


@contextlib.asynccontextmanager
async def resources(app: App) -> AsyncIterator[AsyncConnectionPool]:
    options = {"options": f"-c idle_in_transaction_session_timeout={STANDSTILL}s"}
    async with AsyncConnectionPool(DATABASE, kwargs=options, min_size=1, max_size=CONNECTIONS, open=False) as pool:
        async with pool.connection() as connection:
            await connection.execute(SCHEMA)
        cleaning = asyncio.create_task(clean_regularly(app, pool), name="clean the inbox")
        try:
            yield pool
        finally:
            cleaning.cancel()
            await asyncio.wait([cleaning])


app = App("customers", bootstrap_servers="localhost:9092", auto_offset_reset="earliest", resources=resources)


@app.consume("orders", shard_by="key", concurrency=CONNECTIONS)
async def on_order(record: Record, context: Context) -> None:
    order = json.loads(record.value or b"")
    values = {
        "key": context.idempotency_key,
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "customer": (record.key or b"").decode(),
        "amount": order["amount"],
        "address": order["address"],
    }
    pool: AsyncConnectionPool = context.state
    async with pool.connection() as connection:  # one transaction: committed at the end, rolled back on an exception
        # If another process is handling this record, this statement waits for its transaction to end.
        noted = await connection.execute(
            "INSERT INTO inbox VALUES (%(key)s, %(topic)s, %(partition)s, %(offset)s) ON CONFLICT DO NOTHING", values
        )
        if noted.rowcount == 0:
            return  # already handled
        await connection.execute("INSERT INTO customers (id) VALUES (%(customer)s) ON CONFLICT DO NOTHING", values)
        # Commutative: the sum is the same in any order. Adding is not idempotent, so it needs the inbox.
        await connection.execute("UPDATE customers SET spent = spent + %(amount)s WHERE id = %(customer)s", values)
        # The newest address wins: an older record that arrives late finds a newer version and changes nothing.
        await connection.execute(
            "UPDATE customers SET address = %(address)s, version = %(offset)s"
            " WHERE id = %(customer)s AND version < %(offset)s",
            values,
        )


async def clean(app: App, pool: AsyncConnectionPool) -> int:
    """Delete the rows of records that cannot be delivered again: committed, and handled some time ago."""
    deleted = 0
    async with pool.connection() as connection:
        for partition in app.statistics().partitions:
            done = await connection.execute(
                "DELETE FROM inbox WHERE handled_at < now() - make_interval(secs => %s)"
                " AND topic = %s AND partition = %s AND record_offset < %s",
                (KEPT, partition.topic, partition.partition, partition.committed),
            )
            deleted += done.rowcount
    return deleted


async def clean_regularly(app: App, pool: AsyncConnectionPool) -> None:
    while True:
        await asyncio.sleep(60)
        try:
            await clean(app, pool)
        except psycopg.Error:
            logger.exception("the inbox could not be cleaned; trying again in a minute")


if __name__ == "__main__":
    app.run()
