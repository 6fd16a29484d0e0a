"""The record that the calling code runs for: looked up in the context of the worker's task, at no cost per record."""

import asyncio
import contextvars
from typing import NamedTuple

from aioshard.core.sharding import shown
from aioshard.engine.stack import waits_for
from aioshard.engine.worker import SERVING, BatchWorker, Worker


class CurrentRecord(NamedTuple):
    """Record that a handler is processing."""

    topic: str
    partition: int
    offset: int
    key: str | None
    """`#` and a hash, which is the same for a key everywhere in this process; None without a key."""
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
    `gather`, `wait_for`. A task that the handler is not waiting for at its first call gets None, and so does a thread
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
    worker, task = SERVING.get(None), _current_task()
    if worker is None:
        return None
    if task is worker.task:
        return _record_of(worker)
    try:
        return _STARTED_FOR.get()
    except LookupError:
        if task is None:
            return None
        record = _record_of(worker) if waits_for(worker.running, task) else None
        _STARTED_FOR.set(record)
        return record


def begin_thread() -> None:
    """Remember the record in the context of the thread in which a plain handler begins."""
    worker = SERVING.get(None)
    if worker is not None:
        _STARTED_FOR.set(_record_of(worker))


def _current_task() -> "asyncio.Task[object] | None":
    """Return the calling task; None in a thread without an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _record_of(worker: Worker) -> CurrentRecord | None:
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
        worker.failures.log.handler,
        worker.failures.log.group,
        len(worker.deliveries) if isinstance(worker, BatchWorker) else None,
    )
