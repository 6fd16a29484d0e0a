"""Async calls belong to the app's event loop, of any kind; calls from another loop are refused."""

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable

import pytest

from aioshard import App, Record
from aioshard.errors import StateError
from aioshard.testing import TestClient

CALLS: dict[str, Callable[[App], Awaitable[object]]] = {
    "publish": lambda app: app.publish("orders", b"x"),
    "seek": lambda app: app.seek("orders", 0, 0),
    "committed": lambda app: app.committed("orders", 0),
    "partitions": lambda app: app.partitions("orders"),
    "topics": lambda app: app.topics(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_call_from_another_event_loop_is_refused_and_does_nothing(
    call: Callable[[App], Awaitable[object]],
) -> None:
    app = App("orders")

    @app.consume("orders")
    async def handle(record: Record) -> None:
        """Nothing to be done."""

    def elsewhere() -> object:
        async def called() -> object:
            return await call(app)

        return asyncio.run(called())

    async with TestClient(app) as client:
        with pytest.raises(StateError, match="another event loop"):
            await asyncio.to_thread(elsewhere)
        assert client.records("orders") == []
        await call(app)


async def test_an_error_after_a_cancellation_from_another_loop_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    app = App("orders")
    loop = asyncio.get_running_loop()
    began = asyncio.Event()
    ended = asyncio.Event()
    unhandled: list[str] = []
    loop.set_exception_handler(lambda _, context: unhandled.append(context["message"]))

    @app.consume("orders")
    async def handle(record: Record) -> None:
        """Nothing to be done."""

    async def fails_when_cancelled() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
            raise OSError("no connection")

    def elsewhere() -> None:
        async def called() -> None:
            calling = asyncio.create_task(app.run_in_loop(fails_when_cancelled(), "look"))
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(began.wait(), loop))
            calling.cancel()
            await asyncio.wait([calling])
            assert calling.cancelled()
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ended.wait(), loop))

        asyncio.run(called())

    async with TestClient(app):
        await asyncio.to_thread(elsewhere)
        await asyncio.sleep(0)
        gc.collect()  # reports the errors of tasks that nobody has looked at
    assert unhandled == []
    assert [entry.levelname for entry in caplog.records if "no connection" in entry.message] == ["WARNING"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks are new in Python 3.12")
async def test_an_app_runs_in_a_loop_with_eager_tasks() -> None:
    app = App("orders")
    handled: list[int] = []

    @app.consume("orders")
    async def handle(record: Record) -> None:
        handled.append(record.offset)

    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
    async with TestClient(app) as client:
        for _ in range(3):
            await client.publish("orders", b"x", partition=0)
        await client.settle()

    assert handled == [0, 1, 2]
