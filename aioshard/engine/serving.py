"""Finds the worker that code runs for: the context of its task names it once, at no cost per record."""

import asyncio
import contextvars
from collections.abc import Callable

from aioshard.engine.worker import Worker

__all__ = ["Serving", "serving"]


class Serving:
    """A worker, as the context of its task names it.

    Tasks and threads that a handler starts have a copy of that context, and may outlive the run that started them.
    """

    __slots__ = ("group", "handler", "task", "worker")

    def __init__(self, worker: Worker, handler: str, group: str) -> None:
        """Name *worker* with its handler and its group."""
        self.worker = worker
        self.handler = handler
        self.group = group
        self.task: asyncio.Task[object] | None = None
        """The worker's task."""

    def start(self, start: Callable[[], asyncio.Task[object]]) -> asyncio.Task[object]:
        """Make the worker's task with *start*, in a context that names the worker."""
        context = contextvars.copy_context()
        context.run(_SERVING.set, self)
        self.task = context.run(start)
        return self.task

    @property
    def is_here(self) -> bool:
        """Whether this code runs in the worker's own task, not in a task or thread that a handler has started."""
        try:
            return asyncio.current_task() is self.task
        except RuntimeError:  # a thread without an event loop
            return False


_SERVING: contextvars.ContextVar[Serving] = contextvars.ContextVar("aioshard serving")


def serving() -> Serving | None:
    """The worker in whose context, or in a copy of it, this code runs; None outside of all workers."""
    return _SERVING.get(None)
