"""The record that a piece of code runs for, found out when somebody asks."""

import asyncio
import contextvars
import threading
import time
from typing import NamedTuple

from aioshard.core.shown_keys import shown
from aioshard.engine.batches.batch_worker import BatchWorker
from aioshard.engine.insight.stack import stack_of, waits_for
from aioshard.engine.serving import Serving, serving

__all__ = ["CurrentRecord", "current_record"]


class CurrentRecord(NamedTuple):
    """The record that a handler runs for."""

    topic: str
    partition: int
    offset: int
    key: str | None
    """`#` and a hash, by which this process names the same key everywhere; None without a key."""
    attempt: int
    """Counted from 1."""
    handler: str
    group: str
    records: int | None = None
    """How many records the batch has of which this is the first; None where the handler takes single records."""


_FOUND: contextvars.ContextVar[CurrentRecord | None] = contextvars.ContextVar("aioshard record")
"""In the context of a task or thread that a handler has started: what it was started for."""
_PATIENCE = 20
"""Looks, a millisecond apart, at a run that is still on its way to wait for the thread that it has just started."""


def current_record() -> CurrentRecord | None:
    """The record that the handler which calls this runs for; None outside of handlers.

    Tasks and threads that the handler waits for have it too: `asyncio.TaskGroup`, `gather`, `wait_for`,
    `asyncio.to_thread`. One that it does not wait for at the time of the first call has none, because it may outlive
    the run, and its worker has another record then.

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
    at = serving()
    if at is None:
        return None
    if at.is_here:
        return _record_of(at)
    try:
        return _FOUND.get()
    except LookupError:
        pass
    delivery, task = at.worker.delivery, _task()
    found = None
    if delivery is not None and (_waits_for_thread(at) if task is None else waits_for(at.worker.running, task)):
        found = _record_of(at)
        if at.worker.delivery is not delivery:  # the worker went on meanwhile
            found = None
    if found is not None or task is None:
        _FOUND.set(found)
    return found


def _task() -> "asyncio.Task[object] | None":
    """The task that asks; None in a thread without a loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _waits_for_thread(at: Serving) -> bool:
    """Whether the run waits for the calling thread, which may be quicker than who has started it."""
    ident = threading.get_ident()
    for _ in range(_PATIENCE):
        if waits_for(at.worker.running, ident):
            return True
        if not stack_of(at.worker.running).executing:
            return False
        time.sleep(0.001)
    return False


def _record_of(at: Serving) -> CurrentRecord | None:
    worker = at.worker
    delivery = worker.delivery
    if delivery is None:
        return None
    record = delivery.record
    return CurrentRecord(
        record.topic,
        record.partition,
        record.offset,
        shown(record.key, show_keys=False),
        delivery.failures + 1 if delivery.detour is None else max(delivery.failures, 1),
        at.handler,
        at.group,
        len(worker.deliveries) if isinstance(worker, BatchWorker) else None,
    )
