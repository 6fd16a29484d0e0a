"""The workers of a handler, whose number may change while they work."""

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
    """Workers of one handler: as many as its concurrency, plus those that end after their current run.

    Invariants:
        * A retiring worker stays in `workers` until its run has ended: a drain waits for it like for any other.
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
        """Adopt the initial workers of a handler.

        Args:
            workers: Initial workers; the list changes in place after `start`.
            hire: Creates another worker with the given name.
            feed: Source of their records.
            resized: Called with each new concurrency.
            handler: Name of the handler; set in the context of each worker's task, like the group.
            group: Id of the consumer group.
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
        """Number of workers without those that retire. Safe from any thread."""
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
        """Change the number of workers: start more, or let some end, idle ones first and immediately.

        No run is interrupted. The remaining workers serve all shards.

        Args:
            concurrency: Wanted number of workers, at least 1.
            name: Name of the handler, for the names of new workers.
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
                shards.wake()  # all idle workers: one already woken for a record may be among those that end
        self._feed.serve(concurrency)
        if self._resized is not None:
            self._resized(concurrency)
