"""Cancels a coroutine at each of its awaits in turn, as SIGINT may at any moment."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple
from unittest.mock import patch

_DEADLINE = 10.0
"""Seconds that any run may take."""


class Sweep(NamedTuple):
    """The outcome of the runs."""

    awaits: int
    """The number of awaits at which the coroutine waited without a cancellation."""
    lost: list[str]
    """Lost cancellations: the frames of the coroutine, and the result."""


def cancel_at_each_await(make: Callable[[], Coroutine[Any, Any, object]]) -> Sweep:
    """Run a coroutine again and again, each time in a new loop, and cancel its task once.

    Two moments of each await: when the task begins to wait, and when what it waits for has come but the task does not
    run yet. To be called where no event loop runs.

    Args:
        make: Makes the coroutine; does the same each time, about.
    """
    awaits = _Run(make, -1, done=False).awaits
    lost = []
    for number in range(1, awaits + 1):
        for done in (False, True):
            run = _Run(make, number, done=done)
            if run.cancelled_at is not None and run.became != "cancelled":
                lost.append(f"{run.cancelled_at}: {run.became}")
    return Sweep(awaits, lost)


class _Run:
    """One run, and its result."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, object]], number: int, *, done: bool) -> None:
        self.awaits = 0
        self.cancelled_at: str | None = None
        self._number = number
        self._done = done
        self._task: Any = None
        self._waits_for: Any = None
        run_handle = asyncio.Handle._run

        def watched(handle: asyncio.Handle) -> None:
            self._look()  # also where an earlier handle made something done that this one wakes the task for
            run_handle(handle)
            self._look()

        with (
            patch.object(asyncio.Handle, "_run", watched),
            asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner,
        ):
            self.became = runner.run(self._run(make))

    async def _run(self, make: Callable[[], Coroutine[Any, Any, object]]) -> str:
        task = self._task = asyncio.create_task(make(), name="cancelled at each await")
        done, _ = await asyncio.wait([task], timeout=_DEADLINE)
        if not done:
            return f"nothing within {_DEADLINE:g} s"
        if task.cancelled():
            return "cancelled"
        return repr(task.exception() or task.result())

    def _look(self) -> None:
        task = self._task
        if task is None or task.done() or self.cancelled_at is not None:
            return
        waits_for = task._fut_waiter
        if waits_for is None:
            return
        if waits_for is not self._waits_for:
            self._waits_for = waits_for
            self.awaits += 1
        if self.awaits == self._number and waits_for.done() >= self._done:
            self.cancelled_at = _place(task.get_coro())
            task.cancel()


def _place(coroutine: Any) -> str:
    frames = []
    while (frame := getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)) is not None:
        frames.append(f"{frame.f_code.co_qualname} line {frame.f_lineno}")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return " > ".join(frames)
