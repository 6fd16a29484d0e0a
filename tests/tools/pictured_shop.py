"""The app in the pictures of the documentation: some records hang, fail, or are parked."""

import asyncio
import random

from aioshard import App, Batch, DeadLetter, Park, Record, Retry

app = App("billing", stuck_after=20.0, shutdown_timeout=1.0)


class NoSuchCustomerError(LookupError):
    pass


class Gateway:
    async def charge(self, record: Record) -> None:
        if record.value == b"never answered":
            await asyncio.Event().wait()
        await asyncio.sleep(random.uniform(0.01, 0.16))


gateway = Gateway()


@app.consume("orders", concurrency=48, retry=Retry(attempts=3, initial=0.2))
async def on_order(record: Record) -> None:
    if record.value == b"no customer":
        raise NoSuchCustomerError("customer 4711 is not in the ledger")
    await gateway.charge(record)


@app.consume("invoices", concurrency=16, retry=Retry(attempts=2, initial=0.1), on_failure=Park("invoices.parked", 300))
async def on_invoice(record: Record) -> None:
    await asyncio.sleep(0.05)
    if record.value == b"locked":
        raise TimeoutError("the account is locked")


@app.consume("clicks", batch=Batch(max_records=200, linger=0.2), concurrency=4, on_failure=DeadLetter("clicks.dlt"))
async def on_clicks(records: list[Record]) -> None:
    await asyncio.sleep(0.1)
    if any(record.value == b"broken" for record in records):
        raise ValueError("not a click")
