"""One invoice for each order, exactly once: invoices and offsets become visible in one transaction.

Readers of `invoices` must use `isolation_level="read_committed"`, which is the default of aioshard.
"""

import dataclasses

from aioshard import App, Context, DeadLetter, Retry


@dataclasses.dataclass
class Order:
    id: str
    customer: str
    amount: int


app = App(
    "invoicing",
    processing_guarantee="exactly_once",
    bootstrap_servers="localhost:9092",
    auto_offset_reset="earliest",
)


@app.consume(
    "orders",
    shard_by="key",
    concurrency=64,
    retry=Retry(attempts=3, give_up_on=(ValueError,)),
    on_failure=DeadLetter("orders.dlt"),
)
async def on_order(order: Order, context: Context) -> None:
    invoice = {"order": order.id, "customer": order.customer, "total": order.amount}
    # Accepted, and visible once the transaction with this order's offset is committed. If the run fails, it is dropped.
    await context.publish("invoices", invoice, key=context.record.key)
    if order.amount <= 0:
        raise ValueError(f"order {order.id} has the amount {order.amount}")  # only its dead letter is visible


if __name__ == "__main__":
    app.run()
