"""The record that a piece of code runs for, found out when somebody asks."""

import asyncio
import contextvars
import threading
from typing import NamedTuple

from aioshard.engine.batches.batch_worker import BatchWorker
from aioshard.engine.insight.keys import shown
from aioshard.engine.insight.stack import waits_for
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


_FOUND: contextvars.ContextVar[CurrentRecord] = contextvars.ContextVar("aioshard record")
"""In the context of a task or thread that a handler has started: what it was started for."""


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
    found = _FOUND.get(None)
    if found is None:
        found = _started_for(at)
        if found is not None:
            _FOUND.set(found)
    return found


def _started_for(at: Serving) -> CurrentRecord | None:
    """The record of the run that waits for the calling task or thread; looked at twice, as a worker may go on."""
    delivery = at.worker.delivery
    if delivery is None or not waits_for(at.worker.running, _here()):
        return None
    found = _record_of(at)
    return found if at.worker.delivery is delivery else None


def _here() -> "asyncio.Task[object] | int":
    """The task that asks, or the thread."""
    try:
        return asyncio.current_task() or threading.get_ident()
    except RuntimeError:
        return threading.get_ident()


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
