"""Threads that do not keep a process alive."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

__all__ = ["DaemonThreads"]

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """A few threads for calls that may hang, such as leaving a group whose coordinator is gone.

    `ThreadPoolExecutor` would keep the process alive until the calls return, which may take as long as a session.
    These threads end with the process, or, once they are shut down, after the calls already submitted.
    """

    def __init__(self, most: int, name: str) -> None:
        """Make *most* threads called *name*; they start with the first call."""
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name} {number}", daemon=True) for number in range(most)
        ]
        self._started = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `concurrent.futures.Executor.submit`."""
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - the future passes it on
                future.set_exception(error)
            else:
                future.set_result(result)

        if not self._started:
            self._started = True
            for thread in self._threads:
                thread.start()
        self._work.put(work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after the calls already submitted; does not wait for them."""
        del wait, cancel_futures
        if self._started:
            for _ in self._threads:
                self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
