"""An order service in one process: an HTTP API that publishes orders, and a consumer that books them in PostgreSQL.

Orders are accepted as soon as the brokers have them, and booked exactly once, in order per customer. README.md says
how to run it.

Needs `fastapi`, `uvicorn` and `psycopg[binary,pool]`.
"""

import contextlib
import functools
import os
import uuid
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool
from pydantic import BaseModel, Field
from starlette.routing import Mount

from aioshard import App, Context
from aioshard.web import dashboard, drain_route, health_routes

DATABASE = os.environ.get("DATABASE_URL", "postgresql://localhost/orders")
CONCURRENCY = 16  # concurrent runs of the handler; each uses one connection
FOR_REQUESTS = 4  # additional connections, so that requests do not wait during a backlog
STANDSTILL = 30  # seconds until the server ends an idle transaction: its process may be gone

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
CREATE TABLE IF NOT EXISTS orders (
    id uuid PRIMARY KEY,
    customer text NOT NULL,
    article text NOT NULL,
    amount numeric NOT NULL
);
CREATE TABLE IF NOT EXISTS customers (
    id text PRIMARY KEY,
    orders integer NOT NULL DEFAULT 0,
    spent numeric NOT NULL DEFAULT 0
);
"""


class NewOrder(BaseModel):
    customer: str = Field(min_length=1, max_length=100)
    article: str = Field(min_length=1, max_length=100)
    amount: Decimal = Field(gt=0, max_digits=12, decimal_places=2)


class Order(NewOrder):
    id: uuid.UUID


# The consumer -------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def resources(_: App) -> AsyncIterator[AsyncConnectionPool]:
    """Keep the pool open until the last handler has ended; it is Context.state in handlers, app.state in requests."""
    options = {"options": f"-c idle_in_transaction_session_timeout={STANDSTILL}s"}
    size = CONCURRENCY + FOR_REQUESTS
    async with AsyncConnectionPool(DATABASE, kwargs=options, min_size=2, max_size=size, open=False) as pool:
        async with pool.connection() as connection:
            await connection.execute(SCHEMA)
        yield pool


# The addresses of the brokers come from the environment: AIOSHARD_BOOTSTRAP_SERVERS.
app = App("order-service", auto_offset_reset="earliest", resources=resources)


@app.consume("orders", shard_by="key", concurrency=CONCURRENCY, timeout=20)
async def on_order(order: Order, context: Context) -> None:
    record, pool = context.record, context.state
    async with pool.connection() as connection:  # one transaction: all of it or nothing
        noted = await connection.execute(
            "INSERT INTO inbox VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING",
            (context.idempotency_key, record.topic, record.partition, record.offset),
        )
        if noted.rowcount == 0:
            return  # already booked: a process was killed after this commit and before that of the offset
        booked = await connection.execute(
            "INSERT INTO orders VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING",
            (order.id, order.customer, order.article, order.amount),
        )
        if booked.rowcount == 0:
            return  # two records of one order: the client got no response and sent it again
        await connection.execute(
            "INSERT INTO customers VALUES (%s, 1, %s) ON CONFLICT (id) DO UPDATE"
            " SET orders = customers.orders + 1, spent = customers.spent + excluded.spent",
            (order.customer, order.amount),
        )


# The API ------------------------------------------------------------------------------

# When the app fails, the server stops, so that Kubernetes or another supervisor restarts it.
# Do not expose /internal through an ingress.
api = FastAPI(
    title="Orders",
    lifespan=functools.partial(app.lifespan, stop_server=True),
    routes=[
        Mount("/internal", routes=[*health_routes(app), drain_route(app), Mount("/dashboard", dashboard(app))]),
    ],
)


def pool_of_app() -> AsyncConnectionPool:
    pool: AsyncConnectionPool = app.state
    return pool


Pool = Annotated[AsyncConnectionPool, Depends(pool_of_app)]


@api.put("/orders/{order_id}", status_code=202)
async def create_order(order_id: uuid.UUID, new: NewOrder) -> Order:
    """Accept an order once the brokers have acknowledged it. The client chooses the id, so that it can retry."""
    order = Order(id=order_id, **new.model_dump())
    await app.publish("orders", order.model_dump(mode="json"), key=order.customer)
    return order


@api.get("/orders/{order_id}")
async def show_order(order_id: uuid.UUID, pool: Pool) -> Order:
    async with pool.connection() as connection, connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute("SELECT id, customer, article, amount FROM orders WHERE id = %s", (order_id,))
        found = await cursor.fetchone()
    if found is None:
        raise HTTPException(404, "not booked yet, or never ordered")
    return Order(**found)


@api.get("/customers/{customer}")
async def show_customer(customer: str, pool: Pool) -> dict[str, Decimal]:
    async with pool.connection() as connection:
        found = await connection.execute("SELECT orders, spent FROM customers WHERE id = %s", (customer,))
        orders, spent = await found.fetchone() or (0, 0)
    return {"orders": orders, "spent": spent}
