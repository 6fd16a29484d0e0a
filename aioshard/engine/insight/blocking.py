"""Who holds the event loop: which handler, with which record, at which line."""

import asyncio
from collections.abc import Iterator

from aioshard.engine.insight.stack import stack_above, waits_for
from aioshard.engine.loop_watch import Holder, LoopWatch
from aioshard.engine.runtime import Engine
from aioshard.engine.worker import Worker

__all__ = ["find_holder"]

_IDLE = Holder(
    "no Python code runs in it; a call of a C library holds it, or other threads or processes leave it no time", None
)


def find_holder(engine: Engine, watch: LoopWatch) -> Holder:
    """What executes in the thread of an engine's event loop; safe from any thread.

    Args:
        engine: Whose handlers may hold it; anything else in the process may do so too.
        watch: Knows the loop.
    """
    thread = watch.thread
    stack = None if thread is None else stack_above(thread, watch.runner)
    place = None if stack is None else stack.place
    if stack is None or place is None:
        return _IDLE
    called = f" in {stack.waits_in}" if place.own and stack.waits_in is not None else ""
    where, code = f"at {place}{called}", f"{place.file} {place.function}"
    task = asyncio.current_task(watch.loop)
    if task is not None:
        ours = next((one for one in _busy(engine) if one[1].name == task.get_name()), None)
        # Else one that waits for a task of its own making, or has named its own.
        ours = ours or next((one for one in _busy(engine) if waits_for(one[1].running, task)), None)
        if ours is not None:
            name, worker = ours
            sentence = f"handler {name} computes or blocks without an await, with {_records(worker)}, {where}"
            return Holder(sentence, f"{name} {code}")
    who = "a callback" if task is None else f"task {task.get_name()!r}"
    return Holder(f"{who}, which is no handler, computes or blocks without an await, {where}", code)


def _records(worker: Worker) -> str:
    deliveries = tuple(worker.deliveries)
    if not deliveries:
        return "a record that it has just ended"
    more = f" and {len(deliveries) - 1} more of its batch" if len(deliveries) > 1 else ""
    return f"record {deliveries[0]!r}{more}"


def _busy(engine: Engine) -> Iterator[tuple[str, Worker]]:
    for running in engine.handlers:
        for worker in tuple(running.workers):
            if worker.deliveries:
                yield running.spec.name, worker
