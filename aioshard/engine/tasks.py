"""A group of named tasks that can be closed even if one of them does not end."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from aioshard.errors import TaskCancelledError


async def finish(coroutine: Coroutine[Any, Any, object], name: str) -> None:
    """Run *coroutine* to its end even if the caller is cancelled meanwhile; the cancellation is raised afterwards.

    For cleanup that has its own time limit: closing connections, ending tasks.
    """
    await outlast(asyncio.get_running_loop().create_task(coroutine, name=name))


async def outlast(task: asyncio.Task[Any], *, cut_short: bool = False) -> None:
    """Wait until *task* ends even if the caller is cancelled meanwhile; the cancellation is raised afterwards.

    Args:
        task: Its exception is raised, unless the caller was cancelled.
        cut_short: Whether each cancellation of the caller also cancels *task*, whose exception is then dropped.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
            if cut_short:
                task.cancel()
    if cancelled is None:
        task.result()
        return
    if cut_short and not task.cancelled():
        task.exception()  # otherwise asyncio logs that it was never retrieved
    raise cancelled


def _is_eager(factory: object) -> bool:
    """Return whether tasks of a task factory begin inside the call that creates them, as Python 3.12 offers."""
    eager = getattr(asyncio, "eager_task_factory", None)
    return eager is not None and getattr(factory, "__code__", None) is eager.__code__


class TaskSet:
    """The named tasks of one owner; crashes are reported, and closing has a deadline.

    `asyncio.TaskGroup` waits forever for a task that ignores its cancellation. A handler may do just that, and the
    process must still be able to drain, commit and name the record that hangs.

    Owned by its creator. A task that raises reports its error to *crashed* once. A cancelled task has not crashed,
    unless it was started with `lasts`.
    """

    def __init__(self, crashed: Callable[[str, BaseException], None]) -> None:
        """Make an empty group.

        Args:
            crashed: Called with the task's name and its error when a task raises.
        """
        self._tasks: dict[asyncio.Task[Any], bool] = {}
        """The tasks that have not ended, each with whether a cancellation from elsewhere counts as a crash."""
        self._crashed = crashed
        self._closing = False

    def start(self, coroutine: Coroutine[Any, Any, object], name: str, *, lasts: bool = False) -> asyncio.Task[Any]:
        """Run *coroutine* as a task of this group.

        Args:
            coroutine: The coroutine to run.
            name: Shown in logs and in lists of the event loop's tasks.
            lasts: Whether only this group may end it: a cancellation from elsewhere then counts as a crash.
        """
        loop = asyncio.get_running_loop()
        if _is_eager(loop.get_task_factory()):
            # The caller has to store the task before it begins.
            task = asyncio.Task(coroutine, loop=loop, name=name)
        else:
            task = loop.create_task(coroutine, name=name)
        self._tasks[task] = lasts
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        lasts = self._tasks.pop(task)
        if task.cancelled():
            if lasts and not self._closing:
                self._crashed(task.get_name(), TaskCancelledError(task.get_name()))
        elif (error := task.exception()) is not None:
            self._crashed(task.get_name(), error)

    async def close(self, timeout: float) -> None:
        """Cancel every task and wait up to *timeout* seconds for them to end."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)

    def dismiss(self, task: asyncio.Task[Any]) -> None:
        """Cancel one task, even one that lasts, without waiting for it."""
        if task in self._tasks:
            self._tasks[task] = False
        task.cancel()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tasks that have not ended."""
        return tuple(task.get_name() for task in tuple(self._tasks))
