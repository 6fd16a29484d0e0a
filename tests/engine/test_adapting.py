"""Adaptive concurrency in a running engine; the algorithm itself is tested in tests/simulation."""

import asyncio
import statistics
from collections import deque
from typing import Any

import pytest

from aioshard import Adaptive, App, Batch, BatchError, Record, Retry
from aioshard.errors import HandlerError
from aioshard.testing import TestClient, run

SERVICE = 0.2


class BackEnd:
    """Serves so many calls at a time; the others wait in line."""

    def __init__(self, servers: int) -> None:
        self.servers = servers
        self.served = 0
        self._busy = 0
        self._line: deque[asyncio.Future[None]] = deque()

    async def call(self) -> None:
        if self._busy >= self.servers or self._line:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._line.append(turn)
            await turn
        else:
            self._busy += 1
        try:
            await asyncio.sleep(SERVICE)
            self.served += 1
        finally:
            self._busy -= 1
            while self._line and self._busy < self.servers:
                turn = self._line.popleft()
                if not turn.done():
                    self._busy += 1
                    turn.set_result(None)


def concurrency_of(app: App) -> int:
    (handler,) = app.statistics().handlers
    return handler.concurrency


async def backlog(client: TestClient, count: int) -> None:
    for _ in range(count):
        await client.publish("orders", b"", partition=0)


async def limits(app: App, seconds: int) -> list[int]:
    """The concurrency at each second of a time."""
    seen = []
    for _ in range(seconds):
        await asyncio.sleep(1.0)
        seen.append(concurrency_of(app))
    return seen


def test_it_finds_what_the_back_end_bears_and_follows_it_up_and_down() -> None:
    app = App("adapting")
    back_ends: list[BackEnd] = []

    @app.consume("orders", concurrency=Adaptive(1, 128))
    async def handle(record: Record) -> None:  # noqa: ARG001
        await back_ends[0].call()

    async def test() -> None:
        back_end = BackEnd(12)
        back_ends.append(back_end)
        async with TestClient(app) as client:
            await backlog(client, 9_500)
            for servers in (12, 4, 24):
                back_end.servers = servers
                await asyncio.sleep(20.0)
                before = back_end.served
                seen = await limits(app, 24)
                assert 0.85 * servers <= statistics.median(seen) <= servers * 1.35 + 1
                assert back_end.served - before >= 0.88 * 24 * servers / SERVICE

    run(test())


@pytest.mark.parametrize("how", ["with a context", "in batches"])
def test_every_kind_of_handler_may_have_it(how: str) -> None:
    app = App("adapting")
    back_ends: list[BackEnd] = []
    giving_up: dict[str, Any] = {"retry": Retry(attempts=1), "on_failure": "skip", "timeout": 5.0}

    if how == "in batches":

        @app.consume("orders", concurrency=Adaptive(2, 64), batch=Batch(max_records=5, linger=0.0), **giving_up)
        async def handle_batch(records: list[Record]) -> None:
            await back_ends[0].call()
            if records[0].offset % 7 == 0:
                raise BatchError({records[0]: ValueError()})

    else:

        @app.consume("orders", concurrency=Adaptive(2, 64), **giving_up)
        async def handle(record: Record, context: object) -> None:  # noqa: ARG001
            await back_ends[0].call()
            if record.offset % 7 == 0:
                raise ValueError

    async def test() -> None:
        back_ends.append(BackEnd(16))
        async with TestClient(app) as client:
            await backlog(client, 12_000 if how == "in batches" else 3_500)
            await asyncio.sleep(12.0)
            seen = await limits(app, 12)
            assert 12 <= statistics.median(seen) <= 26

    run(test())


def test_attempts_that_time_out_are_slow() -> None:
    """The back end hangs: no run ever succeeds, and fewer try."""
    app = App("adapting")
    hangs = asyncio.Event()

    @app.consume(
        "orders", concurrency=Adaptive(1, 64), timeout=1.0, retry=Retry(attempts=100, initial=0.1, maximum=0.1)
    )
    async def handle(record: Record) -> None:  # noqa: ARG001
        await asyncio.sleep(3600.0 if hangs.is_set() else 0.05)

    async def test() -> None:
        async with TestClient(app) as client:
            await backlog(client, 10_000)
            await asyncio.sleep(3.0)
            assert concurrency_of(app) >= 40
            hangs.set()
            await asyncio.sleep(10.0)
            assert concurrency_of(app) <= 16
            hangs.clear()

    run(test())


def test_it_says_that_the_concurrency_adapts() -> None:
    app = App("adapting")
    back_ends: list[BackEnd] = []

    @app.consume("orders", concurrency=Adaptive(1, 64))
    async def handle(record: Record) -> None:  # noqa: ARG001
        await back_ends[0].call()

    async def test() -> None:
        back_ends.append(BackEnd(4))
        async with TestClient(app) as client:
            for number in range(400):
                await client.publish("orders", b"", key=b"k", partition=0)
                await client.publish("orders", b"", partition=1 + number % 3)
            await asyncio.sleep(10.05)  # in the middle of runs, not where they end
            assert (
                "the concurrency adapts to the latency of what the handler calls (Adaptive(minimum=1" in app.explain()
            )

    run(test())


def test_nobody_else_may_set_it() -> None:
    app = App("adapting")

    @app.consume("orders", concurrency=Adaptive(1, 64))
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with TestClient(app):
            with pytest.raises(HandlerError, match="changes by itself"):
                app.set_concurrency("handle", 3)

    run(test())


def test_fixed_shards_cannot_have_it() -> None:
    with pytest.raises(HandlerError, match=r"shards=4 and concurrency=Adaptive\(.*were both given"):
        App("adapting").consume("orders", shards=4, concurrency=Adaptive(1, 64))
