"""Interrupt a run in the middle of a record by cancelling it at one of its awaits, as when it outlasts a rebalance."""

import asyncio
import functools
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any, TypeVar

from aioshard.engine.handler import HandlerSpec

__all__ = ["Interruption"]

T = TypeVar("T")


class Interruption:
    """Cancels the next run of a handler at its await number *number*, once armed."""

    def __init__(self, number: int) -> None:
        self.armed = False
        self.place: str | None = None
        """Where the run was interrupted; None until then."""
        self.over = asyncio.Event()
        """Set once the worker cancels the run, because its client is gone."""
        self._number = number
        self._came = asyncio.Event()

    def stand_between(self, spec: HandlerSpec) -> HandlerSpec:
        """Return the handler with interruptible runs; one that runs in threads is returned unchanged."""

        def wrap(attempt: Callable[[T], Awaitable[object]]) -> Callable[[T], Awaitable[object]]:
            async def run(given: T) -> object:
                if not self.armed:
                    return await attempt(given)
                self.armed = False
                return await self._interrupted(attempt(given))

            return run

        return spec if spec.in_threads else spec.through(wrap)

    async def comes_before(self, other: Coroutine[Any, Any, None]) -> bool:
        """Wait until the run is interrupted or *other* is done; errors of *other* are raised."""
        ended = asyncio.create_task(other, name="replay: the record completes")
        came = asyncio.create_task(self._came.wait(), name="replay: the record is interrupted")
        try:
            await asyncio.wait({ended, came}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()
        finally:
            ended.cancel()
            came.cancel()
            await asyncio.wait({ended, came})
        return self._came.is_set()

    async def _interrupted(self, run: Any) -> Any:
        # In a separate task: cancelling the worker's own task would interfere with the engine.
        task = asyncio.create_task(self._counted(run), name="replay: a run that is interrupted")
        try:
            result = await task
        except (Exception, asyncio.CancelledError):
            if self.place is None:
                raise
            result = None
        if self.place is None:
            return result
        self._came.set()
        try:
            await asyncio.Event().wait()  # neither done nor failed, until the client is gone
        finally:
            self.over.set()

    async def _counted(self, run: Any) -> Any:
        return await self._steps(run)

    @types.coroutine
    def _steps(self, run: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Step through *run* from await to await, and cancel the task at the chosen one."""
        step: Callable[[], Any] = functools.partial(run.send, None)
        awaits = 0
        while True:
            try:
                waits_for = step()
            except StopIteration as end:
                return end.value
            awaits += 1
            if awaits == self._number:
                self.place = _place(run)
                task = asyncio.current_task()
                assert task is not None  # noqa: S101 - this code runs in a task
                task.cancel()
            try:
                value = yield waits_for
            except BaseException as error:  # noqa: BLE001 - any error is passed to the handler
                step = functools.partial(run.throw, error)
            else:
                step = functools.partial(run.send, value)


def _place(run: Coroutine[Any, Any, Any]) -> str:
    """Return where a coroutine is suspended: `file:line in function`, from the handler to the innermost await."""
    places = []
    awaited: Any = run
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        code = frame.f_code
        places.append(f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}")
        awaited = awaited.cr_await
    return " > ".join(places)
