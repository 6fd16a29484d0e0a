"""A consumer inside a FastAPI application: `uvicorn fastapi_app:api`.

The server accepts requests once the group has assigned partitions. When it stops, the app finishes the records in
flight and commits them, for up to `shutdown_timeout` (25 s). Do not kill the server before that.
"""

from fastapi import FastAPI

from aioshard import App, Record
from aioshard.web import health_routes

app = App("billing", bootstrap_servers="localhost:9092", auto_offset_reset="earliest")
balances: dict[str, int] = {}


@app.consume("payments", shard_by="key", concurrency=100)
async def on_payment(record: Record) -> None:
    if record.key is not None and record.value is not None:
        customer = record.key.decode()
        balances[customer] = balances.get(customer, 0) + int(record.value)


# /livez, /readyz, /metrics, /statistics.json and /explain, next to your own routes
api = FastAPI(lifespan=app.lifespan, routes=health_routes(app))


@api.get("/balances/{customer}")
async def balance(customer: str) -> int:
    return balances.get(customer, 0)
