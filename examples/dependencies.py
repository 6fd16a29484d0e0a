"""A transaction for each attempt: opened before the handler, then committed, or rolled back if the handler fails."""

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Annotated

from fast_depends import Depends

from aioshard import App, Context, Record, Retry

app = App("ledger", bootstrap_servers="localhost:9092", auto_offset_reset="earliest")


def transaction() -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect("ledger.db")) as database:
        database.execute("CREATE TABLE IF NOT EXISTS payments (id TEXT PRIMARY KEY, customer TEXT, amount INTEGER)")
        with database:  # commits, or rolls back if the handler raises
            yield database


class Ledger:
    def __init__(self, database: Annotated[sqlite3.Connection, Depends(transaction)], context: Context) -> None:
        self._database = database
        self._id = context.idempotency_key  # a record may be delivered again after a crash

    def book(self, customer: str, amount: int) -> None:
        self._database.execute(
            "INSERT INTO payments VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (self._id, customer, amount)
        )
        if amount < 0:
            raise ValueError(f"{amount} is not a payment")


# A plain handler runs in a thread; its plain dependencies run in the same one, as sqlite3 demands.
@app.consume("payments", concurrency=1, retry=Retry(attempts=1), on_failure="skip")
def on_payment(record: Record, ledger: Annotated[Ledger, Depends(Ledger)]) -> None:
    ledger.book((record.key or b"").decode(), int(record.value or b"0"))


if __name__ == "__main__":
    app.run()
