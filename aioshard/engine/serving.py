"""Which worker a piece of code runs for: the context of its task names it, once, which costs a record nothing."""

import asyncio
import contextvars
from collections.abc import Callable

from aioshard.engine.worker import Worker

__all__ = ["Serving", "serving"]


class Serving:
    """A worker at work, as the context of its task names it.

    Tasks and threads that a handler starts have a copy of that context, and may outlive the run that started them.
    """

    __slots__ = ("group", "handler", "task", "worker")

    def __init__(self, worker: Worker, handler: str, group: str) -> None:
        """Make what names *worker*, of the handler and the group with these names."""
        self.worker = worker
        self.handler = handler
        self.group = group
        self.task: asyncio.Task[object] | None = None
        """The worker's."""

    def start(self, start: Callable[[], asyncio.Task[object]]) -> asyncio.Task[object]:
        """Have *start* make the worker's task, in a context that names it."""
        context = contextvars.copy_context()
        context.run(_SERVING.set, self)
        self.task = context.run(start)
        return self.task

    @property
    def is_here(self) -> bool:
        """Whether this code runs in the worker's own task, and not in what a handler has started."""
        try:
            return asyncio.current_task() is self.task
        except RuntimeError:  # a thread without a loop
            return False


_SERVING: contextvars.ContextVar[Serving] = contextvars.ContextVar("aioshard serving")


def serving() -> Serving | None:
    """The worker in whose context this code runs, or in a copy of it."""
    return _SERVING.get(None)
