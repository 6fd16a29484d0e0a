"""Worker processes of an app: each runs one call at a time, and is killed to cancel a call.

* Not `anyio.to_process`: its processes start with the first call, react to SIGTERM, outlive a parent that was killed,
  and a crash names neither signal nor exit code. `multiprocessing` starts a resource tracker, and imports the main
  module again: an unguarded `uvicorn.run` would start a second server.
* A new interpreter, not `fork`: forking a program with an event loop and threads is not safe.
* No call is queued in a process. A second call there would save 3 % of a run of 2 ms, but could not be cancelled alone:
  a revoked partition would have to wait for the call before it, or kill that one too.
* `PR_SET_PDEATHSIG`, not a thread that waits for the end of the app: a computation may hold the interpreter lock.
"""

import asyncio
import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import connection, spawn
from typing import Any, Self

from aioshard.errors import AttemptTimeoutError, BatchError, ProcessError, StartError, StateError

_HEADER = 4
"""Bytes of the length before each message, as in `multiprocessing.connection`."""
_IGNORED = signal.SIGINT, signal.SIGTERM
"""Signals that a terminal and systemd send to all processes of an app; the app itself drains."""
_calls: dict[int | None, Callable[[Any, Any], object]] = {}
"""In a worker process: the functions that it can run, by number."""


class Processes:
    """The worker processes of a running app: they run while the context is open.

    Invariants:
        * Once a call has ended, in any way, no process runs it any more.
    """

    def __init__(self, calls: Mapping[int, bytes], count: int) -> None:
        """Prepare the processes; entering the context starts them.

        Args:
            calls: For each number that `run` takes, a pickled function that returns the function to run.
            count: Number of processes.

        Raises:
            StateError: This is a worker process: it imports a module that starts an app.
        """
        if _calls:
            raise StateError(
                "a worker process imports the main module, which starts the app again: start it only in the main "
                "process, as in  if __name__ == '__main__': app.run()"
            )
        # Only functions of the main module need its import, which may have side effects.
        main = spawn.get_preparation_data("") if any(b"__main__" in call for call in calls.values()) else {}
        self._setup = _message(None, {name: main[name] for name in main if name.startswith("init_main")}, calls)
        self._count = count
        self._processes: list[_Process] = []
        self._idle: asyncio.LifoQueue[_Process] = asyncio.LifoQueue()

    async def __aenter__(self) -> Self:
        """Start the processes; return once all of them have imported the handlers.

        Raises:
            StartError: A process could not import them.
        """
        try:
            self._processes += [_Process(self._setup) for _ in range(self._count)]
            for process in self._processes:
                await process.start()
                self._idle.put_nowait(process)
        except BaseException:
            self._kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let idle processes exit for at most a second, and kill the rest."""
        idle = [self._idle.get_nowait() for _ in range(self._idle.qsize())]
        idle = [process for process in idle if process.alive]
        try:
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(1.0):
                    for process in idle:
                        process.writer.write_eof()
                    for process in idle:
                        await process.ended()
        finally:
            self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    async def run(self, number: int, argument: object, context: object, timeout: float | None) -> object:
        """Run a call in an idle process; wait for one if necessary.

        Args:
            number: The number of the call.
            argument: Its first argument.
            context: Its second argument.
            timeout: Seconds that the call may take; the wait for a process does not count.

        Raises:
            AttemptTimeoutError: The call took longer. Its process was killed.
            ProcessError: The process ended during the call.
            BaseException: Any exception of the call.
        """
        message = _message(number, argument, context)
        process = await self._idle.get()
        try:
            if not process.alive:
                process.kill()
                process.spawn()
                await process.start()
            async with asyncio.timeout(timeout):
                response = await process.request(message)
        except TimeoutError:
            raise AttemptTimeoutError(timeout or 0.0) from None
        finally:
            self._idle.put_nowait(process)
        return _result(response)


class _Process:
    """A worker process, which can be started again after it has ended."""

    def __init__(self, setup: bytes) -> None:
        self._setup = setup
        self.spawn()

    @property
    def alive(self) -> bool:
        """Whether it has been started and has not ended."""
        return self.writer is not None and self._popen.poll() is None

    def spawn(self) -> None:
        """Start the process; it begins to import the handlers."""
        self.writer: Any = None
        self._socket, child_socket = socket.socketpair()
        code = f"import sys; sys.path[:] = {[*map(str, sys.path)]}; from aioshard.processes import serve; serve()"
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)  # until `serve` ignores them
        try:
            with child_socket:
                self._popen = subprocess.Popen([sys.executable, "-c", code], stdin=child_socket.fileno())  # noqa: S603
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        self._socket.sendall(self._setup)

    async def start(self) -> None:
        """Return once it has imported the handlers.

        Raises:
            StartError: It could not import them.
        """
        self._reader, self.writer = await asyncio.open_unix_connection(sock=self._socket)
        try:
            _result(await self.request(b""))
        except Exception as error:
            self.kill()
            raise StartError(f"a worker process did not start: {type(error).__name__}: {error}") from error

    async def request(self, message: bytes) -> bytes:
        """Send a message and return the response; a cancellation kills the process.

        Raises:
            ProcessError: The process has ended.
        """
        self.writer.write(message)
        try:
            return await self._reader.readexactly(int.from_bytes(await self._reader.readexactly(_HEADER)))
        except (EOFError, OSError):
            code = self.kill()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise ProcessError(f"the worker process {self._popen.pid} {how} during the run") from None
        except asyncio.CancelledError:
            self._popen.kill()
            try:
                await self.ended()
            finally:
                self.kill()
            raise

    async def ended(self) -> None:
        """Wait until the process ends: nothing else closes its end of the socket."""
        with contextlib.suppress(OSError):
            await self._reader.read()

    def kill(self) -> int:
        """Kill it if it has not ended, and release it; return its exit code."""
        self._popen.kill()
        (self.writer or self._socket).close()
        return self._popen.wait()


def _message(*values: object) -> bytes:
    data = pickle.dumps(values)
    return len(data).to_bytes(_HEADER) + data


def _result(response: bytes) -> object:
    error, result = pickle.loads(response)  # noqa: S301 - from our own process
    if error is not None:
        raise error from None  # its note has the traceback
    return result


# In the worker process ----------------------------------------------------------------


def serve() -> None:
    """Run calls until the app ends; the socket to it is standard input."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: works even if a run holds the interpreter lock
    # Only the end of the process closes *kept*: when the app sees that, the exit code is known.
    kept = os.dup(0)
    app = connection.Connection(os.dup(kept))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def leave() -> None:
        app.close()
        os.close(kept)

    os.register_at_fork(after_in_child=leave)  # a process that the handler forks may live longer
    _calls[None] = _set_up
    with contextlib.suppress(EOFError):
        while True:
            number, argument, context = app.recv()
            app.send_bytes(_response(number, argument, context))


def _set_up(main: dict[str, Any], calls: Mapping[int, bytes]) -> None:
    spawn.prepare(main)
    _calls.update({number: pickle.loads(call)() for number, call in calls.items()})  # noqa: S301 - from the app


def _response(number: int | None, argument: object, context: object) -> bytes:
    try:
        return pickle.dumps((None, _calls[number](argument, context)))
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - of the user's handler
        return pickle.dumps((_portable(error), None))


def _portable(error: BaseException) -> BaseException:
    """Return the exception with its traceback as a note, or another one that describes it if pickle refuses it."""
    summary = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, BatchError):
        error = BatchError({record: _portable(reason) for record, reason in error.errors.items()})
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - of the user's class
        return ProcessError(f"the handler raised {summary}")
    return error
