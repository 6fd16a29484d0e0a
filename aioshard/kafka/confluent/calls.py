"""Queue calls to the client, for the task or callback that may call it to run."""

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["Calls", "resolve"]

Call = Callable[[], Coroutine[Any, Any, None]]


class Calls:
    """A queue of calls to the client, one at a time.

    The client serves one caller at a time, and a call may last as long as a rebalance. So only its owner task calls
    it, and, while that task waits inside a read, the callback that the read waits for.

    Invariants:
        * When serving stops, no caller is cancelled: a started call continues, because its thread does, and its
          caller gets the result.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Call, asyncio.Future[None]]] = deque()
        self._begun: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Event()
        self._closed: Exception | None = None

    @property
    def waiting(self) -> bool:
        """Whether calls are queued."""
        return bool(self._waiting)

    async def call(self, call: Call) -> None:
        """Queue *call* and wait for it; it never starts if the caller is cancelled before.

        Raises:
            Exception: The error that *call* raised, or that was passed to `close`.
        """
        if self._closed is not None:
            raise self._closed
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, done))
        self._arrived.set()
        await done

    def first(self, call: Call) -> None:
        """Queue *call* ahead of all others; does not wait for it."""
        self._waiting.appendleft((call, asyncio.get_running_loop().create_future()))

    async def serve(self) -> None:
        """Run the queued calls. Use it only where the client may be called."""
        while self._waiting:
            call, done = self._waiting.popleft()
            if done.done():
                continue  # nobody waits for it any longer
            begun = asyncio.create_task(call(), name="a call to the client")
            self._begun.add(begun)
            begun.add_done_callback(functools.partial(self._ended, done))
            await asyncio.wait([begun])

    def _ended(self, done: asyncio.Future[None], begun: asyncio.Task[None]) -> None:
        self._begun.discard(begun)
        error = self._closed if begun.cancelled() else begun.exception()
        if done.done():
            return  # nobody waits for it any longer
        if error is not None:
            done.set_exception(error)
            done.exception()  # retrieve it, so that asyncio does not log it if nobody waits
        elif begun.cancelled():
            done.cancel()
        else:
            done.set_result(None)

    async def serve_until(self, task: "asyncio.Task[None]") -> None:
        """Run calls as they arrive until *task* ends; raise its error."""
        while not task.done():
            self._arrived.clear()
            # Do not await `serving`: a hanging call must not hold us longer than *task*, which has a deadline.
            serving = asyncio.create_task(self._serve_arriving(), name="calls while partitions are handed over")
            try:
                await asyncio.wait({task, serving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                serving.cancel()
        await task

    async def _serve_arriving(self) -> None:
        while True:
            await self.serve()
            await self._arrived.wait()
            self._arrived.clear()

    def close(self, error: Exception) -> None:
        """Fail all queued and future calls with *error*."""
        self._closed = error
        for _, done in self._waiting:
            if not done.done():
                done.set_exception(error)
                done.exception()  # retrieve it, so that asyncio does not log it if nobody waits
        self._waiting.clear()
        for begun in self._begun:
            begun.cancel()


def resolve(future: "asyncio.Future[None]") -> None:
    """Resolve a future unless it is done."""
    if not future.done():
        future.set_result(None)
