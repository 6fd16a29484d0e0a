"""Avro with a schema registry: orders in, invoices out, both with registered schemas.

The registry's address is in `REGISTRY_URL`; user and password may be part of it. Register the schema of the invoices
under the subject `invoices-value` first, in a pipeline for example: the app registers nothing by itself.
"""

import os
from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel

from aioshard import App, DeadLetter
from aioshard.schema_registry import Avro, SchemaRegistry

registry = SchemaRegistry(os.environ.get("REGISTRY_URL", "http://localhost:8081"))


class Order(BaseModel):
    id: str
    customer: str
    amount: Decimal


class Invoice(BaseModel):
    order: str
    customer: str
    total: Decimal


app = App("invoicing", bootstrap_servers="localhost:9092", auto_offset_reset="earliest")


# While the registry does not answer, orders wait. Only orders that cannot be decoded become dead letters.
@app.consume("orders", publish_to="invoices", on_failure=DeadLetter("orders.dlt"))
async def on_order(order: Annotated[Order, Avro(registry)]) -> Annotated[Invoice, Avro(registry)]:
    return Invoice(order=order.id, customer=order.customer, total=order.amount)


if __name__ == "__main__":
    app.run()
