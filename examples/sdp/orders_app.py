"""The same app as in production: `aioshard run orders_app:app`."""

import json

from aioshard import App, DeadLetter, Record

app = App("orders")


@app.consume("orders", concurrency=64, on_failure=DeadLetter("orders.dead", breaker=None))
async def on_order(record: Record) -> dict[str, object]:
    """Price an order. The return value becomes the column `result` of its outcome row, as JSON."""
    order = json.loads(record.value or b"")
    return {"customer": order["customer"], "total": order["price"] * order["pieces"]}
