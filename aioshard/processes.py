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
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from multiprocessing import connection, spawn
from typing import Any, NamedTuple, Self

from aioshard.errors import AttemptTimeoutError, BatchError, ProcessError, StartError, StateError, signal_name
from aioshard.log_fields import get_logger

logger = get_logger("aioshard.processes")

_HEADER = 4
"""Bytes of the length before each message, as in `multiprocessing.connection`."""
_IGNORED = signal.SIGINT, signal.SIGTERM
"""Signals that a terminal and systemd send to all processes of an app; the app itself drains."""
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 10.0
"""Seconds between attempts to start a process: the first pause, which doubles, and the longest."""
_SLOW_START = 30.0
"""Seconds after which a process that is still starting is reported."""
_calls: dict[int | None, Callable[[Any, Any], object]] = {}
"""In a worker process: the functions that it can run, by number."""


class Processes:
    """The worker processes of a running app: they run while the context is open.

    A process that has ended is started again when the next call would take it. Until it runs, calls take other
    processes or wait: a process that cannot start is not the failure of a record.

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
        self._restarts: dict[_Process, _Restart] = {}
        """Processes that are being started again; no call can use them."""

    @property
    def trouble(self) -> str | None:
        """Say which processes do not start, and why; None if there are none. May be called from any thread."""
        now = time.monotonic()
        lasting = [restart for restart in tuple(self._restarts.values()) if restart.failed or restart.lasts(now)]
        if not lasting:
            return None
        seconds = now - min(restart.since for restart in lasting)
        reasons = [restart.failed for restart in lasting if restart.failed]
        why = reasons[0] if reasons else "they still import the handlers"
        return f"{len(lasting)} of {self._count} worker processes do not start, for {seconds:.0f} s now: {why}"

    async def __aenter__(self) -> Self:
        """Start the processes; return once all of them have imported the handlers.

        Raises:
            StartError: A process could not be started, or could not import them.
        """
        try:
            for _ in range(self._count):
                process = _Process(self._setup)
                self._processes.append(process)
                process.spawn()
            for process in self._processes:
                await process.start()
                self._idle.put_nowait(process)
        except BaseException:
            self._kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let idle processes exit for at most a second, and kill the rest."""
        starting = [restart.task for restart in self._restarts.values() if restart.task is not None]
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
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

    async def run(
        self,
        number: int,
        argument: object,
        context: object,
        *,
        timeout: float | None,
        until_ours: Callable[[], Awaitable[None]],
    ) -> object:
        """Run a call in an idle process; wait for one if necessary.

        Args:
            number: The number of the call.
            argument: Its first argument.
            context: Its second argument.
            timeout: Seconds that the call may take; the waits before it do not count.
            until_ours: Waits until the partitions of the records are ours: other members may own them by the time when
                a process is idle.

        Raises:
            AttemptTimeoutError: The call took longer. Its process was killed.
            ProcessError: The process ended during the call.
            BaseException: Any exception of the call.
        """
        message = _message(number, argument, context)
        process = await self._idle.get()
        while not process.alive:
            restart = self._restarts[process] = _Restart(time.monotonic())
            restart.task = asyncio.create_task(self._start_again(process, restart), name="worker process starts")
            process = await self._idle.get()
        try:
            await until_ours()
            async with asyncio.timeout(timeout):
                response = await process.request(message)
            if response is None:
                raise ProcessError(f"the worker process {process.pid} {process.kill()} during the run")
        except TimeoutError:
            raise AttemptTimeoutError(timeout or 0.0) from None
        finally:
            self._idle.put_nowait(process)
        return _result(response)

    async def _start_again(self, process: "_Process", restart: "_Restart") -> None:
        """Start a process that has ended, however often it takes, and let calls use it again."""
        pause = _FIRST_PAUSE
        while True:
            try:
                process.kill()
                process.spawn()
                await process.start()
            except Exception as error:  # noqa: BLE001 - otherwise the process would be missing silently
                restart.report(str(error), pause)
            else:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        restart.end()
        del self._restarts[process]
        self._idle.put_nowait(process)


class _Restart:
    """The start of a process that has ended."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.failed = ""
        """Why the last attempt failed, if one has."""
        self.task: asyncio.Task[None] | None = None

    def lasts(self, now: float) -> bool:
        """Whether it takes so long that it must be reported."""
        return now - self.since > _SLOW_START

    def report(self, why: str, pause: float) -> None:
        """Record a failed attempt; log it unless it failed in the same way before."""
        if why != self.failed:
            message = "%s; the app tries again, first in %.1f s; no attempt of a record was used for it"
            logger.error(message, why, pause, extra={"event": "process_not_started"})
        self.failed = why

    def end(self) -> None:
        """Log that it has succeeded, if an attempt had failed."""
        if self.failed:
            lasted = time.monotonic() - self.since
            logger.warning("a worker process has started after %.1f s", lasted, extra={"event": "process_started"})


class _Process:
    """A worker process, which can be started again after it has ended."""

    def __init__(self, setup: bytes) -> None:
        self._setup = setup
        self._socket: socket.socket | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self.writer: Any = None

    @property
    def alive(self) -> bool:
        """Whether it has been started and has not ended."""
        return self.writer is not None and self._popen is not None and self._popen.poll() is None

    @property
    def pid(self) -> int | None:
        """Its process id; None before its first start."""
        return None if self._popen is None else self._popen.pid

    def spawn(self) -> None:
        """Start the process; it begins to import the handlers.

        Raises:
            StartError: The system refuses another process, or the process ended at once.
        """
        code = f"import sys; sys.path[:] = {[*map(str, sys.path)]}; from aioshard.processes import serve; serve()"
        try:
            self._socket, child_socket = socket.socketpair()
            unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)  # until `serve` ignores them
            try:
                with child_socket:
                    self._popen = subprocess.Popen([sys.executable, "-c", code], stdin=child_socket.fileno())  # noqa: S603
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            self._socket.sendall(self._setup)
        except (OSError, subprocess.SubprocessError) as error:
            raise self._start_error(f"{type(error).__name__}: {error}") from error

    async def start(self) -> None:
        """Return once it has imported the handlers.

        Raises:
            StartError: It could not import them.
        """
        self._reader, self.writer = await asyncio.open_unix_connection(sock=self._socket)
        try:
            response = await self.request(b"")
            if response is not None:
                _result(response)
                return
        except Exception as error:
            raise self._start_error(f"{type(error).__name__}: {error}") from error
        raise self._start_error(f"it {self.kill()}")

    def _start_error(self, why: str) -> StartError:
        self.kill()
        return StartError(f"a worker process did not start: {why}")

    async def request(self, message: bytes) -> bytes | None:
        """Send a message and return the response, None if the process has ended; a cancellation kills the process."""
        self.writer.write(message)
        try:
            return await self._reader.readexactly(int.from_bytes(await self._reader.readexactly(_HEADER)))
        except (EOFError, OSError):
            return None
        except asyncio.CancelledError:
            if self._popen is not None:
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

    def kill(self) -> str:
        """Kill it if it has not ended, and release it; return how it ended."""
        if self.writer is not None:
            self.writer.close()
        elif self._socket is not None:
            self._socket.close()
        self.writer = self._socket = None
        if self._popen is None:
            return "was not started"
        self._popen.kill()
        code = self._popen.wait()
        if code < 0:
            return f"was killed by {signal_name(-code)}"
        return f"ended with exit code {code}"


class _Raised(NamedTuple):
    """The exception of a run, on its way to the app."""

    summary: str
    """Its class and message, if it cannot be unpickled."""
    pickled: bytes


def _message(*values: object) -> bytes:
    data = pickle.dumps(values)
    return len(data).to_bytes(_HEADER) + data


def _result(response: bytes) -> object:
    try:
        raised, result = pickle.loads(response)  # noqa: S301 - from our own process
    except Exception as error:
        raise ProcessError(f"the app cannot unpickle what the handler returned ({_summary(error)})") from error
    if raised is None:
        return result
    exception = _unpickled(raised.pickled)
    if exception is None:
        exception = _undescribed(raised.summary)
    raise exception from None  # its note has the traceback


def _unpickled(pickled: bytes) -> BaseException | None:
    """Return the exception; None if the user's class refuses it, or makes something else."""
    try:
        error = pickle.loads(pickled)  # noqa: S301 - from our own process
    except Exception:  # noqa: BLE001 - of the user's class
        return None
    return error if isinstance(error, Exception | asyncio.CancelledError) else None


def _undescribed(summary: str) -> ProcessError:
    return ProcessError(f"the handler raised {summary}")


def _summary(error: BaseException) -> str:
    """Return the class and message of an exception; its class alone if it cannot be shown."""
    try:
        return "".join(traceback.format_exception_only(error)).strip()
    except Exception:  # noqa: BLE001 - of the user's class
        return type(error).__qualname__


# In the worker process ----------------------------------------------------------------


def serve() -> None:
    """Run calls until the app ends; the socket to it is standard input."""
    # Not SIG_IGN: the programs that a handler starts would inherit it, and could not be terminated.
    before = {number: signal.signal(number, _ignore) for number in _IGNORED}
    for number in _IGNORED:
        signal.siginterrupt(number, False)  # noqa: FBT003 - a system call of the handler does not notice either
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: works even if a run holds the interpreter lock
    # Only the end of the process closes *kept*: when the app sees that, the exit code is known.
    kept = os.dup(0)
    app = connection.Connection(os.dup(kept))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def leave() -> None:
        """Make a process that the handler forks an ordinary one: it can be terminated, and may live longer."""
        app.close()
        os.close(kept)
        for number, handler in before.items():
            signal.signal(number, handler)

    os.register_at_fork(after_in_child=leave)
    _calls[None] = _set_up
    with contextlib.suppress(EOFError):
        while True:
            number, argument, context = app.recv()
            app.send_bytes(_response(number, argument, context))


def _ignore(*_: object) -> None:
    """Do nothing about a signal."""


def _set_up(main: dict[str, Any], calls: Mapping[int, bytes]) -> None:
    spawn.prepare(main)
    _calls.update({number: pickle.loads(call)() for number, call in calls.items()})  # noqa: S301 - from the app


def _response(number: int | None, argument: object, context: object) -> bytes:
    try:
        return pickle.dumps((None, _calls[number](argument, context)))
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - of the user's handler
        return pickle.dumps((_Raised(_summary(error), _pickled(error)), None))


def _pickled(error: BaseException) -> bytes:
    """Pickle an exception, with its traceback as a note; or another one that describes it, if that is not possible."""
    summary = _summary(error)
    try:
        noted = _with_traceback(error)
    except Exception:  # noqa: BLE001 - of the user's class
        return pickle.dumps(_undescribed(summary))
    for pickler in (pickle.Pickler, _ErrorPickler):
        data = io.BytesIO()
        try:
            pickler(data).dump(noted)
        except Exception:  # noqa: BLE001, S112 - of the user's class
            continue
        if _unpickled(data.getvalue()) is not None:
            return data.getvalue()
    return pickle.dumps(_undescribed(summary))


def _with_traceback(error: BaseException) -> BaseException:
    """Return the exception with its traceback as a note; the reasons of a `BatchError` get theirs too."""
    text = "".join(traceback.format_exception(error))
    notes = [*getattr(error, "__notes__", ()), text]
    if isinstance(error, BatchError):
        error = BatchError({record: pickle.loads(_pickled(reason)) for record, reason in error.errors.items()})  # noqa: S301
    # Not `add_note`: an exception may refuse it, as that of a frozen dataclass does.
    object.__setattr__(error, "__notes__", notes)
    return error


class _ErrorPickler(pickle.Pickler):
    """Pickles exceptions by what they hold instead of by a call of their class, which may need other arguments."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how to make an exception again; anything else is pickled as usual."""
        if not isinstance(obj, BaseException):
            return NotImplemented
        state = {name: getattr(obj, name) for name in _slots_of(type(obj)) if hasattr(obj, name)}
        return _make_error, (type(obj), obj.args, state | vars(obj))


def _slots_of(kind: type) -> list[str]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return names


def _make_error(kind: type[BaseException], arguments: tuple[object, ...], state: Mapping[str, object]) -> BaseException:
    error = kind.__new__(kind, *arguments)
    for name, value in {"args": arguments, **state}.items():
        object.__setattr__(error, name, value)  # its own `__setattr__` may refuse
    return error
