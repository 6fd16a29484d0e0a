"""An event loop in a thread of its own, one per worker process of Spark."""

import asyncio
import concurrent.futures
import gc
import os
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from aioshard.kafka.connecting import silence_client
from aioshard.loops import loop_factory

__all__ = ["Submitted", "WorkerLoop", "worker_loop"]

T = TypeVar("T")


class WorkerLoop:
    """Runs what a task of Spark submits. Tasks of one worker come one after the other.

    Spark reuses its workers, so the loop outlives the task; nothing that a task began on it may.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = loop_factory()()
        self.left = False
        """Whether something on it did not end: the next task takes another one."""
        threading.Thread(target=self._serve, name="aioshard event loop", daemon=True).start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Submitted[T]":
        """Run a coroutine there; `worker_loop().submit(coroutine).result()` waits for what it returns."""
        return Submitted(self, coroutine)


class Submitted(Generic[T]):
    """A coroutine on its way through a loop of another thread; may be awaited by a thread."""

    def __init__(self, loop: WorkerLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._ended = threading.Event()
        self._future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(
            self._until_the_end(coroutine), loop.loop
        )

    async def _until_the_end(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return await coroutine
        finally:
            self._ended.set()  # a cancelled `Future` is done at once, what it runs is not

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    def result(self) -> T:
        """Wait for the end; returns what it returned, and raises what it raised."""
        return self._future.result()

    def give_up(self, timeout: float) -> None:
        """Cancel it, and wait until it has ended; a loop that it keeps is left to it."""
        self._future.cancel()
        self._loop.left = self._loop.left or not self._ended.wait(timeout)


_COLLECT_AFTER = 100_000, 20, 20
"""Thresholds of the garbage collector. Thousands of records and rows are alive at once in a task, and with its first
threshold of 700 it would look through them again and again: that costs almost as much as everything else together."""

_current: WorkerLoop | None = None
"""Made with the first task: threads do not survive the fork that comes before it."""


def worker_loop() -> WorkerLoop:
    """The loop of this process."""
    global _current  # noqa: PLW0603 - a worker process has one, as long as it lives
    if _current is None or _current.left or _current.pid != os.getpid():
        _current = WorkerLoop()
        silence_client()
        gc.freeze()
        gc.set_threshold(*_COLLECT_AFTER)
    return _current
