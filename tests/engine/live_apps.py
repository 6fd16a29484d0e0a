"""Live apps in tests: publish to them, inspect them, and wait for them."""

import asyncio
from collections.abc import Callable

from aioshard import App
from aioshard.engine.runtime import Engine
from aioshard.engine.watch import Watch
from aioshard.testing import TestClient


async def publish(client: TestClient, count: int, *, keys: int | None = None, partitions: int = 1) -> None:
    """Numbered records to topic orders, in turn to each of the keys and each of the partitions."""
    for number in range(count):
        key = None if keys is None else str(number % keys).encode()
        await client.publish("orders", str(number).encode(), key=key, partition=number % partitions)


async def until(condition: Callable[[], object], timeout: float = 600.0, *, look_every: float = 0.05) -> None:
    """Poll for a condition without an event: in virtual time, or in another thread."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - hence there is no event
            await asyncio.sleep(look_every)


def engine_of(app: App) -> Engine:
    """The engine of an app that runs."""
    engine = app._engine
    assert isinstance(engine, Engine)
    return engine


def watch_of(app: App) -> Watch:
    """The watch of an app that runs."""
    watch = app._watch
    assert isinstance(watch, Watch)
    return watch
