"""The record that the calling code runs for: looked up in the context of the worker's task, at no cost per record."""

import asyncio
import contextvars
from collections.abc import Callable
from typing import NamedTuple

from aioshard.core.sharding import shown
from aioshard.engine.stack import waits_for
from aioshard.engine.worker import BatchWorker, Worker


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
        return _current_task() is self.task


_SERVING: contextvars.ContextVar[Serving] = contextvars.ContextVar("aioshard serving")


def serving() -> Serving | None:
    """The worker in whose context, or in a copy of it, this code runs; None outside of all workers."""
    return _SERVING.get(None)


class CurrentRecord(NamedTuple):
    """Record that a handler is processing."""

    topic: str
    partition: int
    offset: int
    key: str | None
    """`#` and a hash, which names the same key everywhere in this process; None without a key."""
    attempt: int
    """Counted from 1."""
    handler: str
    group: str
    records: int | None = None
    """Number of records in the batch, of which this is the first; None if the handler takes single records."""


_STARTED_FOR: contextvars.ContextVar[CurrentRecord | None] = contextvars.ContextVar("aioshard record")
"""In the context of a task started by a handler, or of a plain handler's thread: the record it was started for."""


def current_record() -> CurrentRecord | None:
    """Return the record that the calling handler is processing; None outside of handlers.

    This also works in the thread of a plain handler, and in tasks that the handler waits for: `asyncio.TaskGroup`,
    `gather`, `wait_for`. A task that the handler does not wait for at the first call gets None, and so does a thread
    that the handler has started: they may outlive the run, and the worker may have another record by then.

    Example:
        >>> import asyncio
        >>> from aioshard import App, Record
        >>> from aioshard.testing import TestClient, run
        >>> app = App("billing")
        >>> @app.consume("orders")
        ... async def on_order(record: Record) -> None:
        ...     print(current_record()[:3], current_record().attempt, current_record().handler)
        >>> async def test() -> None:
        ...     async with TestClient(app) as client:
        ...         await client.publish("orders", "book", partition=2)
        ...         await client.settle()
        >>> run(test())
        ('orders', 2, 0) 1 on_order
    """
    current = serving()
    if current is None:
        return None
    if current.is_here:
        return _record_of(current)
    try:
        return _STARTED_FOR.get()
    except LookupError:
        task = _current_task()
        if task is None:
            return None
        record = _record_of(current) if waits_for(current.worker.running, task) else None
        _STARTED_FOR.set(record)
        return record


def begin_thread() -> None:
    """Remember the record in the context of the thread that a plain handler begins in."""
    current = serving()
    if current is not None:
        _STARTED_FOR.set(_record_of(current))


def _current_task() -> "asyncio.Task[object] | None":
    """Return the calling task; None in a thread without an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _record_of(current: Serving) -> CurrentRecord | None:
    worker = current.worker
    delivery = worker.delivery
    if delivery is None:
        return None
    record = delivery.record
    return CurrentRecord(
        record.topic,
        record.partition,
        record.offset,
        shown(record.key, show_keys=False),
        delivery.failures + 1 if delivery.recovery is None else max(delivery.failures, 1),
        current.handler,
        current.group,
        len(worker.deliveries) if isinstance(worker, BatchWorker) else None,
    )
