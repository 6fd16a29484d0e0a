"""The workers of a handler, of which there may be more or fewer while they work."""

import asyncio
import functools
import itertools
from collections.abc import Callable

from aioshard.engine.feed import Feed
from aioshard.engine.serving import Serving
from aioshard.engine.tasks import TaskSet
from aioshard.engine.worker import Worker

__all__ = ["Staff"]


class Staff:
    """The workers of one handler: as many as its concurrency, and those that end after their current run.

    Invariants:
        * A worker that retires stays in `workers` until its run has ended: a drain waits for it like for any other.
    """

    def __init__(
        self,
        workers: list[Worker],
        hire: Callable[[str], Worker],
        feed: Feed,
        resized: Callable[[int], None] | None = None,
        *,
        handler: str,
        group: str,
    ) -> None:
        """Take over the workers that a handler begins with.

        Args:
            workers: Changed in place, from `start` on.
            hire: Makes another one of the given name.
            feed: Where they get their records from.
            resized: Told of each new concurrency.
            handler: Its name; the context of each worker's task has it, as it has that of the group.
            group: The group's id.
        """
        self.workers = workers
        self._hire = hire
        self._feed = feed
        self._resized = resized
        self._handler = handler
        self._group = group
        self._tasks: TaskSet | None = None
        self._running: dict[Worker, asyncio.Task[object]] = {}
        self._numbers = itertools.count(len(workers))

    @property
    def concurrency(self) -> int:
        """How many workers there are, without those that retire. Safe from any thread."""
        return sum(not worker.retires for worker in tuple(self.workers))

    def start(self, tasks: TaskSet) -> None:
        """Start all workers as tasks of *tasks*."""
        self._tasks = tasks
        for worker in self.workers:
            self._begin(worker)

    def _begin(self, worker: Worker) -> None:
        assert self._tasks is not None  # noqa: S101 - set by start
        start = functools.partial(self._tasks.start, worker.run(), worker.name, lasts=True)
        task = Serving(worker, self._handler, self._group).start(start)
        self._running[worker] = task
        task.add_done_callback(functools.partial(self._ended, worker))

    def _ended(self, worker: Worker, _: asyncio.Task[object]) -> None:
        del self._running[worker]
        if worker.retires:
            self.workers.remove(worker)

    def change(self, concurrency: int, name: str) -> None:
        """Have *concurrency* workers: start more, or let some end, the idle ones first and at once.

        No run is interrupted. The shards are served by whichever workers there are.

        Args:
            concurrency: At least 1.
            name: Of the handler, for the names of new workers.
        """
        staying = [worker for worker in self.workers if not worker.retires]
        missing = concurrency - len(staying)
        for worker in [one for one in self.workers if one.retires and not self._running[one].done()][: max(missing, 0)]:
            worker.stay()
            missing -= 1
        for _ in range(missing):
            worker = self._hire(f"{name} worker {next(self._numbers)}")
            self.workers.append(worker)
            self._begin(worker)
        if missing < 0:
            for worker in sorted(staying, key=lambda one: bool(one.deliveries))[:-missing]:
                worker.retire()
            for shards in self._feed.shards:
                shards.wake()  # all idle ones: one that was woken for a record may be among those that end
        self._feed.serve(concurrency)
        if self._resized is not None:
            self._resized(concurrency)
