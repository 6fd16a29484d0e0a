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

from aioshard.engine.insight.stack import stack_above, stack_of, waits_for

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


class Readers:
    def __init__(self, workers: list[Worker]) -> None:
        self.over = threading.Event()
        self.read = 0
        self._workers = workers
        self._loop_thread = threading.get_ident()
        self._task = asyncio.current_task()
        self._threads = [threading.Thread(target=self._ask) for _ in range(READERS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    async def end(self) -> None:
        self.over.set()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _ask(self) -> None:
        assert self._task is not None
        while not self.over.is_set():
            for worker in self._workers:
                self.read += len(stack_of(worker.running).frames)
                waits_for(worker.running, self._task)
            stack_above(self._loop_thread, None)


async def read_stacks(seconds: float) -> int:
    """How many frames were read in this time."""
    workers = [Worker() for _ in range(WORKERS)]
    readers = Readers(workers)
    end = time.monotonic() + seconds
    readers.start()
    await asyncio.gather(*(worker.work(end) for worker in workers))
    await readers.end()
    return readers.read


async def fork_meanwhile(times: int) -> None:
    """Children of a process whose stacks are being read can read stacks and collect garbage too."""
    workers = [Worker()]
    readers = Readers(workers)
    readers.start()
    for _ in range(times):
        child = os.fork()
        if child == 0:
            stack_above(threading.get_ident(), None)
            os._exit(0 if gc.isenabled() else 1)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert status == 0, status
    await readers.end()


def main() -> None:
    sys.setswitchinterval(5e-5)
    gc.set_threshold(20, 3, 3)
    match sys.argv[1]:
        case "read":
            read = asyncio.run(read_stacks(float(sys.argv[2])))
        case _:
            asyncio.run(fork_meanwhile(int(sys.argv[2])))
            read = 0
    assert gc.isenabled()
    print(read)


if __name__ == "__main__":
    main()
