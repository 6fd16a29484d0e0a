"""`aioshard run --workers` and `--reload`: run the app in child processes and restart them.

A pair of sockets connects each child with its parent. To request a drain, the parent shuts down its side for writing;
its death does the same. So a drain is requested once, even if signals reach the processes too, and no child outlives
its parent. Once a second the child reports its member id and whether a restart would help.

Signals do not work for this: systemd and terminals signal every process, and a child exits at the second signal without
a drain. Nor does `PR_SET_PDEATHSIG`: it exists on Linux only, and depends on a thread of the parent.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from aioshard.app import App
from aioshard.cli.output import CRASHED, NOT_DRAINED, UNHEALTHY, WRONG_USAGE
from aioshard.errors import MissingExtraError, MissingTopicError, signal_name
from aioshard.kafka.admin import KafkaAdmin
from aioshard.signals import Signals, exit_now

logger = logging.getLogger("aioshard.cli")

WORKER_VARIABLE = "AIOSHARD_WORKER"
"""Environment variable with the number of a worker, from 0; only workers have it."""
MARGIN = 10.0
"""Seconds beyond `shutdown_timeout` after which a child that should have ended is killed."""

_REPORT_INTERVAL = 1.0
_UNHEALTHY_AFTER = 15.0
"""Seconds without a good report after which a worker is restarted."""
_IMPORT_TIMEOUT = 60.0
_LAST_REPORT_TIMEOUT = 1.0
_LONGEST_MESSAGE = 8 * 1024
_FIRST_PAUSE = 0.5
"""Seconds before a worker is restarted, doubled each time it ends early."""
_LONGEST_PAUSE = 30.0
"""The most that this grows to."""
_EARLY = 60.0
"""Seconds of running after which a worker's end does not count as early."""
_REMOVE_TIMEOUT = 5.0


# In the child -------------------------------------------------------------------------------


class Parent:
    """The process that started this one.

    Args:
        fd: This process's end of the pair of sockets.
    """

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # noqa: FBT003 - positional only
        self._socket = socket.socket(fileno=fd)
        self._socket.settimeout(_REPORT_INTERVAL)
        self.app: App | None = None
        """The app to report on, once it is imported."""

    def watch(self, drain: Callable[[], None]) -> None:
        """Start the thread that reports and waits for the parent; it also works while the event loop is blocked.

        Args:
            drain: Called once, in that thread, when the parent requests it or ends. The process then exits after
                `shutdown_timeout` and a margin at the latest.
        """
        threading.Thread(target=self._watch, args=(drain,), name="parent", daemon=True).start()

    def _watch(self, drain: Callable[[], None]) -> None:
        while not self._is_closed():
            # An error must not end the thread; the parent restarts a worker that stops reporting.
            with contextlib.suppress(Exception):
                statistics = None if self.app is None else self.app.statistics()
                if statistics is None:
                    self._send()
                else:
                    self._send(member=statistics.member_id, problems=statistics.restart_cures)
        drain()
        timeout = _IMPORT_TIMEOUT if self.app is None else self.app.settings.shutdown_timeout
        time.sleep(timeout + MARGIN)
        exit_now(NOT_DRAINED)

    def _is_closed(self) -> bool:
        try:
            return self._socket.recv(1) == b""
        except TimeoutError:
            return False
        except OSError:
            return True

    def report_error(self, error: Exception) -> None:
        """Report why this process ends."""
        self._send(error=type(error).__name__, message=str(error)[:_LONGEST_MESSAGE])

    def _send(self, **report: object) -> None:
        with contextlib.suppress(OSError):  # the parent has ended
            self._socket.sendall(json.dumps(report).encode() + b"\n")


# In the parent ------------------------------------------------------------------------------


class Ending(NamedTuple):
    """How a child ended."""

    code: int
    """Its exit code, or the negative number of the signal that killed it."""
    error: str = ""
    """Class name of the error that it reported."""
    message: str = ""
    member: str = ""
    """Its last member id in the group."""
    seconds: float = 0.0
    """Seconds that it ran."""
    overdue: bool = False
    """Whether it was killed because it did not drain in time."""

    def __str__(self) -> str:
        """Describe it, as the rest of a sentence about the process."""
        if self.overdue:
            return "did not drain in time and was killed"
        if self.code < 0:
            name = signal_name(-self.code)
            hint = ", perhaps because memory ran out" if name == "SIGKILL" else ""
            return f"was killed by {name}{hint}"
        reason = f": {self.message}" if self.message else ""
        return f"ended with exit code {self.code}{reason}"


class Child:
    """An `aioshard run` that this process started. Owned by one event loop."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = process.pid
        self.problems: Sequence[str] = ()
        """The latest reasons why a restart would help."""
        self.healthy_at = float("inf")
        """When it last reported no problems; infinite before the first report, while it imports its modules."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._reported: dict[str, str] = {}
        self._began = time.monotonic()
        self._listening = asyncio.create_task(self._listen(), name=f"reports of process {process.pid}")

    @classmethod
    async def start(cls, arguments: Sequence[str], variables: Mapping[str, str], *, background: bool = False) -> Self:
        """Start `aioshard run`.

        Args:
            arguments: Arguments after `run`.
            variables: Additional environment variables.
            background: Whether to detach it from the terminal: no Ctrl-C and no input.

        Raises:
            OSError: The system cannot start a process.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "aioshard", "run", "--parent", str(theirs.fileno()), *arguments),
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL if background else None,
                    pass_fds=[theirs.fileno()],
                    process_group=0 if background else None,
                )
        except BaseException:
            ours.close()
            raise
        return cls(process, *await asyncio.open_unix_connection(sock=ours))

    async def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while line := await self._reader.readline():
                report = json.loads(line)
                if (member := report.get("member")) and member != self._reported.get("member"):
                    logger.info("process %d is member %s", self.pid, member)
                self._reported |= {name: value for name, value in report.items() if name != "problems" and value}
                self.problems = report.get("problems", ())
                if not self.problems:
                    self.healthy_at = time.monotonic()

    async def run_until(self, *requests: asyncio.Task[Any], drain_timeout: float) -> Ending:
        """Wait for its end; drain it when one of the requests is done, and kill it if that takes too long."""
        ended = asyncio.create_task(self._process.wait(), name=f"end of process {self.pid}")
        await asyncio.wait([ended, *requests], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            self._writer.write_eof()
            await asyncio.wait([ended], timeout=drain_timeout)
        if overdue := not ended.done():
            self.kill()
        code = await ended
        # Its reports have arrived. The end of the stream may not come while its own children hold the socket.
        await asyncio.wait([self._listening], timeout=_LAST_REPORT_TIMEOUT)
        self._listening.cancel()
        self._writer.close()
        return Ending(code, seconds=time.monotonic() - self._began, overdue=overdue, **self._reported)

    def kill(self) -> None:
        """Kill it; safe in a signal handler."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


# Several workers ----------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Worker:
    """A slot for a process: when one ends, another is started."""

    number: int
    child: Child | None = None
    restarts: int = 0
    exit_code: int = 0
    """Contribution of the latest process to the exit code of the command."""
    early_ends: int = 0
    """Number of processes in a row that ended early."""
    killed_at: float = -float("inf")


class Supervisor:
    """Keeps workers running until a signal, or until one of them fails in a way that a restart would not fix.

    Invariants:
        * A process that has ended is replaced, after a pause that grows while processes end early.
        * No worker outlives this process by more than a drain.
    """

    def __init__(self, app: App, arguments: Sequence[str], count: int, *, until_caught_up: bool = False) -> None:
        """Create a supervisor; no process is started yet.

        Args:
            app: Provides the settings; it does not run in this process.
            arguments: Arguments of the workers after `run`.
            count: Number of workers.
            until_caught_up: Whether a worker that has caught up is not restarted.
        """
        self.workers = [Worker(number) for number in range(count)]
        self._app = app
        self._drain_timeout = app.settings.shutdown_timeout + MARGIN
        self._arguments = arguments
        self._until_caught_up = until_caught_up
        self._stopping = asyncio.Event()

    async def run(self, signals: Signals) -> int:
        """Run the workers until they have ended; return the worst of their exit codes."""
        signals.before_exit = self._kill_all
        signals.on_first(self._stopping.set)
        async with asyncio.TaskGroup() as group:
            for worker in self.workers:
                group.create_task(self._keep_running(worker), name=f"worker {worker.number}")
        return max(worker.exit_code for worker in self.workers)

    def _kill_all(self) -> None:
        for worker in self.workers:
            if worker.child is not None:
                worker.child.kill()

    async def _keep_running(self, worker: Worker) -> None:
        while not self._stopping.is_set():
            ending = await self._run_once(worker)
            worker.exit_code = _exit_code(ending, requested=self._stopping.is_set())
            if self._stopping.is_set():
                if worker.exit_code:
                    logger.warning("worker %d %s", worker.number, ending)
                return
            has_caught_up = worker.exit_code in {0, UNHEALTHY} and ending.error != MissingTopicError.__name__
            if self._until_caught_up and has_caught_up:
                logger.info("worker %d has caught up (exit code %d)", worker.number, worker.exit_code)
                return
            if self._is_permanent(worker, ending):
                logger.error("worker %d %s; a restart would not help: stopping all workers", worker.number, ending)
                self._stopping.set()
                return
            if ending.member and self._app.settings.group_instance_id is None:
                await self._remove(ending.member)
            await self._pause(worker, ending)

    async def _run_once(self, worker: Worker) -> Ending:
        """Run one process until it ends; drain it when all workers shall stop, or when it is unhealthy."""
        try:
            child = await Child.start(self._arguments, {WORKER_VARIABLE: str(worker.number)}, background=True)
        except OSError as error:
            return Ending(CRASHED, message=f"no process could be started: {error.strerror}")
        logger.info("worker %d is process %d", worker.number, child.pid)
        worker.child = child
        requests = [
            asyncio.create_task(self._stopping.wait(), name="stop"),
            asyncio.create_task(self._unhealthy(worker.number, child), name=f"health of worker {worker.number}"),
        ]
        try:
            return await child.run_until(*requests, drain_timeout=self._drain_timeout)
        finally:
            worker.child = None
            for request in requests:
                request.cancel()

    async def _unhealthy(self, number: int, child: Child) -> None:
        """Return when the child has reported for some time that a restart would help, or has reported nothing."""
        while (seconds := time.monotonic() - child.healthy_at) < _UNHEALTHY_AFTER:  # noqa: ASYNC110 - silence has no event
            await asyncio.sleep(_REPORT_INTERVAL)
        problems = "; ".join(child.problems) or f"it has not reported for {seconds:.0f} s"
        logger.error("worker %d is unhealthy and is drained and restarted: %s", number, problems)

    def _is_permanent(self, worker: Worker, ending: Ending) -> bool:
        """Return whether a new process would end in the same way."""
        if ending.code < 0:
            worker.killed_at = time.monotonic()
        if ending.error == "InstanceIdTakenError":
            # The brokers may keep the id of a killed member until its session expires.
            return time.monotonic() - worker.killed_at > 2 * self._app.settings.session_timeout
        return ending.code == WRONG_USAGE

    async def _remove(self, member: str) -> None:
        """Remove a dead member from the group, so that the others need not wait until its session expires."""
        try:
            async with asyncio.timeout(_REMOVE_TIMEOUT), KafkaAdmin(self._app.settings) as brokers:
                await brokers.remove_member(self._app.group_id, member)
        except Exception as error:  # noqa: BLE001 - the other workers must not end because of it
            logger.warning(
                "member %s stays in the group until its session expires: %s", member, str(error) or "no answer"
            )
        else:
            logger.info("member %s was removed from the group", member)

    async def _pause(self, worker: Worker, ending: Ending) -> None:
        worker.early_ends = 0 if ending.seconds >= _EARLY else worker.early_ends + 1
        pause = min(_FIRST_PAUSE * 2 ** max(worker.early_ends - 1, 0), _LONGEST_PAUSE)
        worker.restarts += 1
        logger.warning("worker %d %s; restarting in %g s (restart %d)", worker.number, ending, pause, worker.restarts)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), pause)
            worker.exit_code = 0  # it was not running when the stop was requested


def _exit_code(ending: Ending, *, requested: bool) -> int:
    """Return the exit code that a process contributes; *requested* says whether all were asked to end."""
    if ending.overdue:
        return NOT_DRAINED
    if requested and ending.code == -signal.SIGTERM and not ending.member:
        return 0  # the signal reached a process before it could handle it: nothing was running there
    return ending.code if ending.code >= 0 else CRASHED


# Reload -------------------------------------------------------------------------------------


async def run_reloading(arguments: Sequence[str], directory: str, signals: Signals) -> int:
    """Run the app in a child until a signal, and restart it after each change of a Python file.

    Args:
        arguments: Arguments of the child after `run`.
        directory: Directory to watch.
        signals: Signals of this process.

    Returns:
        The exit code: 4 if the app did not drain in time at the end, otherwise 0.

    Raises:
        MissingExtraError: watchfiles is not installed.
    """
    try:
        from watchfiles import PythonFilter, awatch  # noqa: PLC0415 - needs the extra `reload`
    except ImportError as error:
        raise MissingExtraError("--reload", "reload") from error
    stopping = asyncio.Event()
    signals.on_first(stopping.set)
    changes = awatch(directory, watch_filter=PythonFilter(), stop_event=stopping)

    async def next_change() -> list[str]:
        """Return the names of the changed files; empty once the command is stopping."""
        async for change in changes:
            return sorted({Path(path).name for _, path in change})
        return []

    logger.info("watching %s for changes; Ctrl-C ends", directory)
    while True:
        change = asyncio.create_task(next_change(), name="wait for a change")
        # No .pyc files: an edit within the same second that keeps the size would not invalidate them.
        child = await Child.start(arguments, {"PYTHONDONTWRITEBYTECODE": "1"})
        signals.before_exit = child.kill
        ending = await child.run_until(change, drain_timeout=_IMPORT_TIMEOUT + MARGIN)
        if not change.done():
            logger.warning("the app %s; waiting for a change", ending)
        if not (names := await change):
            return NOT_DRAINED if ending.code == NOT_DRAINED else 0
        logger.info("%s changed: restarting", ", ".join(names))
