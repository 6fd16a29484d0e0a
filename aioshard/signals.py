"""Signals of a long-running program: the first one requests a graceful shutdown, the second one exits."""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, NoReturn, Self

logger = logging.getLogger("aioshard.signals")

INTERRUPTED: Final = 130
"""Exit code of a program that a second signal ended."""


class Signals:
    """Handles SIGINT and SIGTERM while the context is open: the first requests a shutdown, the second exits.

    The handlers are Python's, not the event loop's, so they also run while a record's handler blocks the loop. Only the
    main thread can handle signals: in another one, the context does nothing.
    """

    def __init__(
        self, announcement: str = "draining and committing", action: Callable[[], object] | None = None
    ) -> None:
        """Prepare the handlers.

        Args:
            announcement: Printed on standard error at the first signal.
            action: Called at the first signal. Without one, the first signal exits with code 0; see `on_first`.
        """
        self.received: str | None = None
        """Name of the first signal; empty if the shutdown was requested without a signal, None before the request."""
        self.before_exit: Callable[[], object] = lambda: None
        """Called at the second signal."""
        self._announcement = announcement
        self._action = action
        self._signalled = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        with contextlib.suppress(ValueError):  # not in the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def on_first(self, action: Callable[[], None]) -> None:
        """Call *action* in the running loop at the first signal."""
        self._action = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, action)

    def request_drain(self) -> None:
        """Act as on a first signal, from any thread; a real signal that follows does not count as the second."""
        if self.received is None:
            logger.info("draining and committing: requested by the parent process, or the parent has ended")
            self._request("")

    def _receive(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._signalled:
            _announce(f"{name} again: exiting now; unfinished records are not committed")
            self.before_exit()
            exit_now(INTERRUPTED)
        self._signalled = True
        if self.received is None:
            _announce(f"{name}: {self._announcement}; a second signal ends it immediately")
            self._request(name)

    def _request(self, received: str) -> None:
        self.received = received
        if self._action is None:
            exit_now(0)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run has already ended
            self._action()


def _announce(sentence: str) -> None:
    """Write to standard error; neither with logging nor with print, which the signal may have interrupted."""
    with contextlib.suppress(OSError):  # its reader has ended: the shutdown matters more
        os.write(2, f"{sentence}\n".encode())


def exit_now(code: int) -> NoReturn:
    """End the process without waiting for threads or tasks that still run."""
    for stream in (sys.stdout, sys.stderr):
        # A signal may have interrupted a write to the same stream.
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            stream.flush()
    os._exit(code)
