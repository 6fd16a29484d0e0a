"""What others want the client to do: queued, and done by whoever may call it now."""

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["Calls", "resolve"]

Call = Callable[[], Coroutine[Any, Any, None]]


class Calls:
    """A queue of calls to the client, one at a time.

    The client serves one caller at a time, and one of its calls may last as long as a rebalance. So nobody calls it
    but the task that owns it, and, while that waits inside of a read, the callback that it waits for.

    Invariants:
        * Who asked is never cancelled by that: a call that was begun goes on when nobody serves any more, because its
          thread does; what becomes of it is told to who asked.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Call, asyncio.Future[None]]] = deque()
        self._begun: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Event()
        self._closed: Exception | None = None

    @property
    def waiting(self) -> bool:
        """Whether something is to be done."""
        return bool(self._waiting)

    async def call(self, call: Call) -> None:
        """Have *call* done, and wait for it; it is not begun when this was cancelled before.

        Raises:
            Exception: What *call* raised, or what `close` was given.
        """
        if self._closed is not None:
            raise self._closed
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, done))
        self._arrived.set()
        await done

    def first(self, call: Call) -> None:
        """Have *call* done before everything that waits; does not wait for it."""
        self._waiting.appendleft((call, asyncio.get_running_loop().create_future()))

    async def serve(self) -> None:
        """Do what waits. To be called by whoever may call the client."""
        while self._waiting:
            call, done = self._waiting.popleft()
            if done.done():
                continue  # nobody waits for it any more
            begun = asyncio.create_task(call(), name="a call to the client")
            self._begun.add(begun)
            begun.add_done_callback(functools.partial(self._ended, done))
            await asyncio.wait([begun])

    def _ended(self, done: asyncio.Future[None], begun: asyncio.Task[None]) -> None:
        self._begun.discard(begun)
        error = self._closed if begun.cancelled() else begun.exception()
        if done.done():
            return  # nobody waits for it any more
        if error is not None:
            done.set_exception(error)
            done.exception()  # who waits gets it; that nobody does is no error
        elif begun.cancelled():
            done.cancel()
        else:
            done.set_result(None)

    async def serve_until(self, task: "asyncio.Task[None]") -> None:
        """Do what comes until *task* has ended; raises what that raised."""
        while not task.done():
            self._arrived.clear()
            # Not awaited for itself: what hangs must not keep us longer than *task*, which has a deadline.
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
        """From now on everybody gets *error*."""
        self._closed = error
        for _, done in self._waiting:
            if not done.done():
                done.set_exception(error)
                done.exception()  # who waits gets it; that nobody does is no error
        self._waiting.clear()
        for begun in self._begun:
            begun.cancel()


def resolve(future: "asyncio.Future[None]") -> None:
    """End the waiting for something, unless it has ended."""
    if not future.done():
        future.set_result(None)
