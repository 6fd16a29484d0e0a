"""A connection for all handlers: opened before the first record, closed after the last one."""

import contextlib
import sqlite3
from collections.abc import AsyncIterator

from aioshard import App, Context, Record


@contextlib.asynccontextmanager
async def resources(_: App) -> AsyncIterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect("ledger.db")) as database:
        database.execute("CREATE TABLE IF NOT EXISTS payments (id TEXT PRIMARY KEY, customer TEXT, amount INTEGER)")
        yield database  # becomes Context.state


app = App("ledger", bootstrap_servers="localhost:9092", auto_offset_reset="earliest", resources=resources)


@app.consume("payments", shard_by="key", concurrency=64)
async def on_payment(record: Record, context: Context) -> None:
    database: sqlite3.Connection = context.state
    # A record may be delivered again after a crash. Its idempotency key in the table makes that harmless.
    with database:
        database.execute(
            "INSERT INTO payments VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            (context.idempotency_key, (record.key or b"").decode(), int(record.value or b"0")),
        )


if __name__ == "__main__":
    app.run()
