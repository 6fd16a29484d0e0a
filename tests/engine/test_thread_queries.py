"""Statistics and explanations are read by other threads while the event loop changes their data."""

import asyncio
import json
import sys
from collections.abc import Iterator

import pytest

from aioshard import App, Batch, Context, DeadLetter, Park, Record, Retry
from aioshard.engine.loop_watch import LoopWatch
from aioshard.testing import TestClient
from tests.engine.live_apps import watch_of
from tests.support.queries import Queries

SECONDS = 4.0
RETRY = Retry(attempts=3, initial=0.001, maximum=0.01)


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


def make_app() -> App:
    app = App(
        "asked",
        auto_offset_reset="earliest",
        max_buffered_records=300,
        stuck_after=0.5,
        commit_interval=0.05,
        drain_timeout=0.5,
        shutdown_timeout=5.0,
    )
    _records_by_themselves(app)
    _others(app)
    return app


def _records_by_themselves(app: App) -> None:
    @app.consume("on-demand", concurrency=32, retry=RETRY, on_failure=DeadLetter("dead-letters"))
    async def on_demand(record: Record, context: Context) -> None:
        if record.offset % 7 == 0 and context.attempt == 1:
            raise ValueError("once")
        if record.offset % 3 == 0:
            await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0.0001))

    @app.consume("fixed", shards=4, retry=RETRY, on_failure="skip")
    async def fixed(record: Record) -> None:
        if record.offset % 11 == 0:
            raise ValueError("always")
        await asyncio.sleep(0)

    @app.consume("halts", retry=Retry(attempts=1))
    async def halts(record: Record) -> None:
        if record.offset % 40 == 0:
            raise ValueError("for good")


def _others(app: App) -> None:
    @app.consume("batches", batch=Batch(max_records=20, linger=0.005), retry=RETRY, on_failure="skip")
    async def batches(records: list[Record]) -> None:
        if any(record.offset % 50 == 0 for record in records):
            raise ValueError("one of them")

    @app.consume("parked", retry=RETRY, on_failure=Park("parking", delay=0.05, attempts=2))
    async def parked(record: Record) -> None:
        if record.offset % 13 == 0:
            raise ValueError("for a while")

    @app.consume("threads", concurrency=4)
    def threads(_: Record) -> None:
        sum(range(2_000))


TOPICS = ("on-demand", "fixed", "batches", "parked", "threads", "halts")


async def use(app: App, client: TestClient) -> None:
    """Have records come, partitions go and come back, and call every control of an app."""
    end = asyncio.get_running_loop().time() + SECONDS
    number = 0
    while asyncio.get_running_loop().time() < end:
        for _ in range(40):
            number += 1
            topic = TOPICS[number % len(TOPICS)]
            await client.publish(topic, "x", key=f"k{number % 97}", partition=number % 4)
        await asyncio.sleep(0.002)
        match number // 40 % 8:
            case 0:
                await client.revoke("on-demand", 1)
                await client.assign("on-demand", 1)
            case 1:
                app.pause_handler("fixed")
            case 2:
                app.resume_handler("fixed")
            case 3:
                app.pause_handler("batches")
            case 4:
                app.resume_handler("batches")
            case 5:
                await client.revoke("parked", 2)
                await client.assign("parked", 2)
            case _:
                pass


@pytest.mark.slow
@pytest.mark.usefixtures("hurried")
async def test_every_query_can_be_called_from_a_thread_at_any_time() -> None:
    app = make_app()
    async with (
        TestClient(app) as client,
        Queries(
            lambda: json.dumps(app.statistics().asdict()),
            lambda: json.dumps(app.diagnose().asdict()),
            app.explain,
            app.workload,
            lambda: loop_watch_of(app).find_code(),
        ) as queries,
    ):
        await use(app, client)
    assert queries.failures == []
    assert all(queries.asked[index] > 50 for index in range(5)), queries.asked


def loop_watch_of(app: App) -> LoopWatch:
    watch = watch_of(app).loop
    assert watch is not None
    return watch
