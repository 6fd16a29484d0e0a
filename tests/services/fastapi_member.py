"""A FastAPI app that records its runs: `uvicorn tests.services.fastapi_member:api`.

The environment chooses its behavior: `MEMBER` is a JSON object with `group`, `topic`, `seconds` (of a run),
`notes` (a file: a line at the begin and at the end of each run) and `stop_server`.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request

from aioshard import App, Record
from aioshard.errors import StateError
from aioshard.web.health import drain_route, health_routes

member = json.loads(os.environ["MEMBER"])
notes = os.open(member["notes"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
app = App(member["group"], auto_offset_reset="earliest")


@app.consume(member["topic"], shard_by="record", concurrency=4)
async def handle(record: Record) -> None:
    record_id = f"{record.partition}/{record.offset}"
    os.write(notes, f"began {record_id}\n".encode())
    await asyncio.sleep(member["seconds"])
    os.write(notes, f"ended {record_id}\n".encode())


@contextlib.asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, str]]:
    print("opened", flush=True)
    async with app.lifespan(api, stop_server=member.get("stop_server", False)):
        yield {"greeting": "hello"}
    print(f"closed after the app was {app.statistics().state}", flush=True)


api = FastAPI(
    lifespan=lifespan,
    routes=[*health_routes(app), drain_route(app)],
)


@api.get("/greeting")
async def greet(request: Request, seconds: float = 0.0) -> str:
    await asyncio.sleep(seconds)
    greeting: str = request.state.greeting
    return greeting


@api.post("/fail")
async def fail() -> None:
    """As if access had been taken away for good."""
    app.running_engine().lifecycle.fail(StateError("access was taken away"))
