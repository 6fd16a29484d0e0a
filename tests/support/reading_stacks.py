"""Threads read the stacks of short-lived coroutines during constant garbage collection.

It is a separate process, because a failure there crashes or hangs the process.
"""

import asyncio
import gc
import os
import sys
import threading
import time
import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any

from aioshard.engine.stack import stack_above, stack_of, waits_for
from tests.support.queries import Queries

WORKERS = 16
READERS = 3


class InACycle:
    """Garbage that only the collector finds, and whose end runs code, so that other threads get their turn."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        sum(range(50))


class Worker:
    def __init__(self) -> None:
        self.running: Coroutine[Any, Any, None] | None = None

    async def work(self, end: float) -> None:
        number = 0
        while time.monotonic() < end:
            number += 1
            self.running = handle(number)
            await self.running
            self.running = None


async def handle(number: int) -> None:
    InACycle()
    descend(number % 10)
    if number % 3:
        await asyncio.sleep(0)
    else:
        await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0.0001))


def descend(levels: int) -> None:
    if levels:
        descend(levels - 1)


def reading(workers: list[Worker]) -> Queries:
    """Threads that read where the workers stand, and the loop."""
    loop_thread, task = threading.get_ident(), asyncio.current_task()
    assert task is not None

    def read() -> None:
        for worker in workers:
            stack_of(worker.running)
            waits_for(worker.running, task)
        stack_above(loop_thread, None)

    return Queries(*[read] * READERS)


async def read_stacks(seconds: float) -> Queries:
    workers = [Worker() for _ in range(WORKERS)]
    end = time.monotonic() + seconds
    async with reading(workers) as queries:
        await asyncio.gather(*(worker.work(end) for worker in workers))
    return queries


async def fork_meanwhile(times: int) -> Queries:
    """Children of a process whose stacks are being read can read stacks and collect garbage too."""
    async with reading([Worker()]) as queries:
        for _ in range(times):
            child = os.fork()
            if child == 0:
                stack_above(threading.get_ident(), None)
                os._exit(0 if gc.isenabled() else 1)
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            assert status == 0, status
    return queries


class Asked:
    """Reads the stack of what asks for its property.

    The interpreter tries to specialize each place that gets it, and fails; what it counts there has had every value
    after a few thousand reads.
    """

    def __init__(self) -> None:
        self.of: object = None
        self.times = 0

    @property
    def now(self) -> None:
        self.times += 1
        stack_of(self.of)


async def coroutine(asked: Asked, times: int) -> None:
    for _ in range(times):
        asked.now  # noqa: B018 - reads


@types.coroutine
def generator(asked: Asked, times: int) -> Generator[None, None, None]:
    for _ in range(times):
        asked.now  # noqa: B018 - reads
    yield


async def async_generator(asked: Asked, times: int) -> AsyncGenerator[None, None]:
    for _ in range(times):
        asked.now  # noqa: B018 - reads
    yield


async def read_oneself(times: int) -> Queries:
    """Stacks of running code are read at every state of the interpreter's counters."""
    queries = Queries()
    kinds: tuple[Callable[[Asked, int], Any], ...] = (coroutine, generator, async_generator)
    for number, kind in enumerate(kinds):
        asked = Asked()
        asked.of = awaited = kind(asked, times)
        await (anext(awaited) if kind is async_generator else awaited)
        queries.asked[number] = asked.times
    return queries


def main() -> None:
    """Arguments: `read` and seconds, or `fork` or `oneself` and how often.

    Prints how often each thread, or each kind of coroutine, has read everything.
    """
    sys.setswitchinterval(5e-5)
    gc.set_threshold(20, 3, 3)
    run = {"read": read_stacks, "fork": fork_meanwhile, "oneself": read_oneself}[sys.argv[1]]
    queries = asyncio.run(run(int(sys.argv[2])))
    assert queries.failures == []
    assert gc.isenabled()
    print(*queries.asked.values())


if __name__ == "__main__":
    main()
