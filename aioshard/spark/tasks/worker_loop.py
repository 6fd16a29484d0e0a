"""An event loop in a separate thread, one per Spark worker process."""

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
    """Runs the coroutines that Spark tasks submit. The tasks of one worker run one after another.

    Spark reuses its workers, so the event loop outlives a task; nothing that a task started on it may.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = loop_factory()()
        self.left = False
        """True if a coroutine did not end; the next task then gets a new event loop."""
        threading.Thread(target=self._serve, name="aioshard event loop", daemon=True).start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Submitted[T]":
        """Run a coroutine on the loop; `worker_loop().submit(coroutine).result()` waits for its result."""
        return Submitted(self, coroutine)


class Submitted(Generic[T]):
    """A coroutine running in the event loop of another thread; a thread can wait for it."""

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
            self._ended.set()  # a cancelled `Future` is done immediately, but its coroutine is not

    @property
    def done(self) -> bool:
        """Whether the coroutine has ended."""
        return self._ended.is_set()

    def result(self) -> T:
        """Wait for the coroutine; return its result or raise its error."""
        return self._future.result()

    def give_up(self, timeout: float) -> None:
        """Cancel the coroutine and wait for its end; abandon the event loop if it does not end within *timeout*."""
        self._future.cancel()
        self._loop.left = self._loop.left or not self._ended.wait(timeout)


_COLLECT_AFTER = 100_000, 20, 20
"""Thresholds of the garbage collector. Thousands of records and rows are alive at the same time in a task. With the
default first threshold of 700, repeated scans of them cost almost as much as everything else together."""

_current: WorkerLoop | None = None
"""Created with the first task: threads do not survive the fork that precedes it."""


def worker_loop() -> WorkerLoop:
    """Return the event loop of this process."""
    global _current  # noqa: PLW0603 - a worker process keeps one for its lifetime
    if _current is None or _current.left or _current.pid != os.getpid():
        _current = WorkerLoop()
        silence_client()
        gc.freeze()
        gc.set_threshold(*_COLLECT_AFTER)
    return _current
