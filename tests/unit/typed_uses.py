"""Right and wrong uses; `test_types.py` compares what type checkers report with the lines marked as wrong."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

import fastapi
from fast_depends import Depends

from aioshard import App, Batch, BatchContext, CallNext, Context, DeadLetter, Message, Record, Retry, Router, message


class Pool:
    """The value that the app's `resources` yield."""

    async def fetch(self, query: str) -> list[int]:
        """Run a query."""
        return [len(query)]


@dataclass
class Order:
    """A payload."""

    total: int


# Settings

app = App("billing", bootstrap_servers="localhost:9092", commit_interval=0.5, drain_timeout=None)
App("billing", bootstrap_servers=["one:9092", "two:9092"], assign={"orders": range(3)}, assignor="lag")
App("billing", bootstrap_server="localhost:9092")  # wrong: no such setting
App("billing", commit_interval="soon")  # wrong: not a number
App("billing", group_protocol="newest")  # wrong: not a protocol
App()  # wrong: no group
app.configure(max_buffered_records=1_000)
app.configure(max_buffered_record=1_000)  # wrong: no such setting


@asynccontextmanager
async def resources(app: App) -> AsyncIterator[Pool]:
    """Open what handlers use."""
    yield Pool()


with_pool = App("billing", resources=resources)


async def uses_state() -> None:
    """Use the state of an app with its type."""
    await with_pool.state.fetch("select 1")
    await with_pool.state.fetch(1)  # wrong: not a query
    await app.state.anything()


async def publishes_with_headers(names: dict[str, str]) -> None:
    """Publish with headers of each accepted form."""
    await app.publish("orders", b"", headers={"id": "7"})
    await app.publish("orders", b"", headers=names)
    await app.publish("orders", b"", headers={b"id": b"7", b"trace": None})
    await app.publish("orders", b"", headers=[("id", "7"), (b"trace", None)])
    await app.publish("orders", b"", headers={"id": 7})  # wrong: not a content


def any_app(app: App) -> App:
    """Take an app with any state."""
    return app


any_app(with_pool)


# Handlers


@app.consume("records", retry=Retry(attempts=3), on_failure=DeadLetter("records.dlt"))
async def on_record(record: Record) -> None:
    """Take the record."""


@app.consume("with-context")
async def with_context(record: Record, context: Context) -> None:
    """Use any state."""
    await context.state.anything()


@app.consume("with-state")
async def with_state(record: Record, context: Context[Pool]) -> None:
    """Use the state with its type."""
    await context.state.fetch("select 1")
    await context.state.fetch(1)  # wrong: not a query
    await context.state.execute("select 1")  # wrong: no such method


@app.consume("orders", publish_to="invoices")
async def on_order(order: Order, context: Context[Pool]) -> Order | None:
    """Publish what is returned."""
    await context.publish("audit", order, key="k", partitioner="round_robin")
    await context.publish("audit", order, partitioner="random")  # wrong: no such partitioner
    return order


@app.consume("several", publish_to="invoices")
def several(order: Order) -> list[Message]:
    """Publish each message."""
    return [message("invoices", order, key=str(order.total))]


@app.consume("batches", batch=Batch(max_records=10))
async def on_batch(records: list[Record], context: BatchContext[Pool]) -> None:
    """Take a batch."""
    await context.state.fetch(str(len(context.records)))


cache: dict[str, int] = {}


@app.consume("own-parameter")
async def own_parameter(record: Record, cache: dict[str, int] = cache) -> None:
    """Take an extra parameter with a default."""


@app.consume("nothing")  # wrong: no record
async def nothing() -> None:
    """Take nothing."""


@app.consume("orders", concurency=3)  # wrong: no such option
async def misspelt(record: Record) -> None:
    """Have a misspelt option."""


@app.consume("orders", timeout="5s")  # wrong: not a number
async def late(record: Record) -> None:
    """Have a timeout that is text."""


# Dependencies


def get_pool(record: Record, context: Context[Pool]) -> Pool:
    """Take what a handler takes."""
    return context.state


@app.consume("annotated")
async def annotated(record: Record, pool: Annotated[Pool, Depends(get_pool)], context: Context[Pool]) -> None:
    """Take a dependency."""
    await pool.fetch("select 1")
    await pool.fetch(1)  # wrong: not a query


@app.consume("by-default")
def by_default(
    record: Record,
    *,
    pool: Pool = Depends(get_pool),  # noqa: B008
    other: Pool = fastapi.Depends(get_pool),  # noqa: B008
) -> None:
    """Take dependencies as defaults."""
    pool.execute("select 1")  # wrong: no such method


@app.consume("batch-dependency", batch=Batch())
async def batch_dependency(records: list[Record], *, pool: Annotated[Pool, fastapi.Depends(get_pool)]) -> None:
    """Take a dependency with a batch."""


app.override_dependencies({get_pool: Pool})
app.override_dependencies({get_pool: Pool()})  # wrong: not a function


# Routers and middleware

router = Router()


@router.consume("clicks")
async def on_click(record: Record) -> None:
    """Belong to a router."""


app.include_router(router)
app.include_router(app.handlers)  # wrong: not a router


@router.middleware
async def right(record: Record, context: Context, call_next: CallNext) -> object:
    """Run around each attempt."""
    return await call_next(record, context)


@router.middleware
async def incomplete(record: Record, context: Context, call_next: CallNext) -> object:
    """Forget the context."""
    return await call_next(record)  # wrong: no context
