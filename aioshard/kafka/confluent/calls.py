"""What others want the client to do: queued, and done by whoever may call it now."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

__all__ = ["Calls"]

Call = Callable[[], Awaitable[None]]


class Calls:
    """A queue of calls to the client, one at a time.

    The client serves one caller at a time, and one of its calls may last as long as a rebalance. So nobody calls it
    but the task that owns it, and, while that waits inside of a read, the callback that it waits for.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Call, asyncio.Future[None]]] = deque()
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

    async def serve(self) -> None:
        """Do what waits. To be called by whoever may call the client."""
        while self._waiting:
            call, done = self._waiting.popleft()
            if done.done():
                continue  # nobody waits for it any more
            try:
                await call()
            except asyncio.CancelledError:
                done.cancel()
                raise
            except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(None)

    async def serve_until(self, task: "asyncio.Task[None]") -> None:
        """Do what comes until *task* has ended; raises what that raised."""
        try:
            while not task.done():
                self._arrived.clear()
                await self.serve()
                arrived = asyncio.ensure_future(self._arrived.wait())
                try:
                    await asyncio.wait({task, arrived}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    arrived.cancel()
        finally:
            if not task.done():
                task.cancel()
        await task

    def close(self, error: Exception) -> None:
        """From now on everybody gets *error*."""
        self._closed = error
        for _, done in self._waiting:
            if not done.done():
                done.set_exception(error)
                done.exception()  # who waits gets it; that nobody does is no error
        self._waiting.clear()
