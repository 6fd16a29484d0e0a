"""Has threads read the stacks of coroutines that end all the time, in a process that collects garbage all the time.

A process of its own, because what goes wrong there ends a process or makes it hang.
"""

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any

from aioshard.engine.stack import stack_above, stack_of, waits_for
from tests.support.questions import Questions

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


def reading(workers: list[Worker]) -> Questions:
    """Threads that read where the workers stand, and the loop."""
    loop_thread, task = threading.get_ident(), asyncio.current_task()
    assert task is not None

    def read() -> None:
        for worker in workers:
            stack_of(worker.running)
            waits_for(worker.running, task)
        stack_above(loop_thread, None)

    return Questions(*[read] * READERS)


async def read_stacks(seconds: float) -> Questions:
    workers = [Worker() for _ in range(WORKERS)]
    end = time.monotonic() + seconds
    async with reading(workers) as questions:
        await asyncio.gather(*(worker.work(end) for worker in workers))
    return questions


async def fork_meanwhile(times: int) -> Questions:
    """Children of a process whose stacks are being read can read stacks and collect garbage too."""
    async with reading([Worker()]) as questions:
        for _ in range(times):
            child = os.fork()
            if child == 0:
                stack_above(threading.get_ident(), None)
                os._exit(0 if gc.isenabled() else 1)
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            assert status == 0, status
    return questions


def main() -> None:
    """Arguments: `read` and seconds, or `fork` and how often; prints how often each thread has read everything."""
    sys.setswitchinterval(5e-5)
    gc.set_threshold(20, 3, 3)
    run = read_stacks if sys.argv[1] == "read" else fork_meanwhile
    questions = asyncio.run(run(int(sys.argv[2])))
    assert questions.failures == []
    assert gc.isenabled()
    print(*questions.asked.values())


if __name__ == "__main__":
    main()
