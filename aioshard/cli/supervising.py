"""`aioshard run --workers N`: processes that each run the app, and one that consumes nothing and keeps them running."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from aioshard.app import App
from aioshard.cli.exit_codes import CRASHED, DATA_LOST, INTERRUPTED, NOT_DRAINED, REFUSED, UNHEALTHY
from aioshard.cli.run_options import WORKER_VARIABLE, RunOptions
from aioshard.cli.running import Signals, base_url, ends_at_once
from aioshard.cli.tether import MARGIN, Child, Ending
from aioshard.errors import AioshardError
from aioshard.web.workers import WorkerState

__all__ = ["Supervisor", "run_workers"]

logger = logging.getLogger("aioshard.cli")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a worker is started again; each time twice as many."""
_LASTING = 60.0
"""Seconds after which a worker's end is no more taken for a start that failed."""
_REMOVES_WITHIN = 20.0
_LOOKS_EVERY = 5.0
_LOOKS_WITHIN = 2.0
_MISSES = 3
"""So many looks one after the other find it dead before a worker is restarted for that."""
_LONGEST_PATH = 90
"""Of a directory for sockets: their paths may have about a hundred characters."""

_MEANINGS = {
    0: "ended by itself",
    CRASHED: "crashed",
    REFUSED: "was refused",
    UNHEALTHY: "found records in its way that have halted",
    NOT_DRAINED: "was not drained in time",
    DATA_LOST: "missed records that are not in the log any more",
    INTERRUPTED: "left at a second signal",
}


@contextlib.contextmanager
def _private_directory() -> Iterator[Path]:
    """A directory for sockets that only this user can enter; it is gone afterwards."""
    short = len(tempfile.gettempdir()) <= _LONGEST_PATH
    with tempfile.TemporaryDirectory(prefix="aioshard-", dir=None if short else "/tmp") as made:  # noqa: S108 - mode 0700
        yield Path(made)


class _Worker:
    """One place for a process, which others follow when it ends."""

    def __init__(self, number: int, socket: str) -> None:
        self.name = str(number)
        self.socket = socket
        self.child: Child | None = None
        self.restarts = 0
        self.trouble: str | None = None
        self.code = 0
        """What the last process of it counts for in the exit code of the whole."""
        self.short = 0
        """How many processes one after the other have ended soon."""
        self.killed_at = -float("inf")

    @property
    def state(self) -> WorkerState:
        child = self.child
        return WorkerState(self.name, None if child is None else child.pid, self.socket, self.restarts, self.trouble)


class _Life(NamedTuple):
    """What became of one process."""

    ending: Ending
    seconds: float
    overdue: bool
    """Whether it was killed, since it had not drained."""
    member: str
    """The id of the member of the group that it was; empty where it was none."""


class Supervisor:
    """Keeps the workers running until a signal, or until one of them cannot be helped by starting it again.

    Invariants:
        * A process that has ended is followed by another, after a pause that grows while they end soon.
        * No worker outlives this process by more than a drain.
    """

    def __init__(self, app: App, options: RunOptions, signals: Signals, sockets: Path | None) -> None:
        """Make one; nothing is started yet.

        Args:
            app: For its names and time-outs; it does not run here.
            options: What was asked for.
            signals: Of this process.
            sockets: Directory in which workers answer; None where nobody asks them.
        """
        self.group_id = app.group_id
        self._settings = app.settings
        self._drains_within = app.settings.shutdown_timeout + MARGIN
        self._arguments = options.arguments()
        self._signals = signals
        self._sockets = sockets
        self._asks = sockets is not None
        self._once = options.until_caught_up
        self._workers = [
            _Worker(number, "" if sockets is None else str(sockets / f"{number}.sock"))
            for number in range(options.workers or 1)
        ]
        self._stopping = asyncio.Event()
        self._removing: set[asyncio.Task[None]] = set()

    # For the health server, from its thread -------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether it is to end."""
        return self._stopping.is_set()

    def workers(self) -> tuple[WorkerState, ...]:
        """The workers, in order."""
        return tuple(worker.state for worker in self._workers)

    # Supervising ----------------------------------------------------------------------

    async def supervise(self) -> int:
        """Run the workers to their end; the worst of their exit codes."""
        self._signals.before_leaving = self._abandon
        self._signals.on_first(self._stopping.set)
        async with asyncio.TaskGroup() as removals:
            async with asyncio.TaskGroup() as keepers:
                for worker in self._workers:
                    keepers.create_task(self._keep(worker, removals), name=f"worker {worker.name}")
            for removal in self._removing:
                removal.cancel()
        return max(worker.code for worker in self._workers)

    def told(self) -> list[dict[str, Any]]:
        """How the workers ended, for JSON."""
        return [
            {"worker": worker.name, "exit_code": worker.code, "restarts": worker.restarts} for worker in self._workers
        ]

    def _abandon(self) -> None:
        """Leave nothing behind: this process ends at once, and closes no context."""
        for worker in self._workers:
            if worker.child is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.child.pid, signal.SIGKILL)
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)

    async def _keep(self, worker: _Worker, removals: asyncio.TaskGroup) -> None:
        while not self._stopping.is_set():
            life = await self._live(worker)
            worker.code = _counts_for(life, asked=self._stopping.is_set())
            if self._stopping.is_set():
                self._tell_end(worker, life)
                return
            if self._once and worker.code in {0, UNHEALTHY}:
                worker.trouble = None
                logger.info("worker %s has caught up and ended with %d", worker.name, worker.code)
                return
            if self._is_hopeless(worker, life):
                logger.error("worker %s %s: starting it again would not help, all end", worker.name, _told(life))
                self._stopping.set()
                return
            if life.member and self._settings.group_instance_id is None:
                removal = removals.create_task(self._remove(life.member), name=f"removal of worker {worker.name}")
                self._removing.add(removal)
                removal.add_done_callback(self._removing.discard)
            await self._pause(worker, life)

    async def _remove(self, member: str) -> None:
        """Have a member leave whose process is gone: the others need not wait until its session is over."""
        from aioshard.kafka.groups import GroupBrokers  # noqa: PLC0415 - imported on use

        try:
            async with asyncio.timeout(_REMOVES_WITHIN), GroupBrokers(self._settings) as brokers:
                removed = await brokers.remove_member(self.group_id, member)
        except (AioshardError, TimeoutError) as error:
            logger.warning(
                "the group waits until the session of member %s is over: %s", member, str(error) or "no answer"
            )
        else:
            logger.log(logging.INFO if removed else logging.DEBUG, "member %s was taken out of the group", member)

    def _tell_end(self, worker: _Worker, life: _Life) -> None:
        if life.overdue:
            logger.error("worker %s did not end within %g s and was killed", worker.name, self._drains_within)
        elif life.ending.code:
            logger.warning("worker %s %s", worker.name, _told(life))

    def _is_hopeless(self, worker: _Worker, life: _Life) -> bool:
        """Whether another process would end in the same way."""
        if life.ending.code < 0:
            worker.killed_at = time.monotonic()
        if life.ending.error == "InstanceIdTakenError":
            # The brokers may keep the id of a member that was killed until its session is over.
            return time.monotonic() - worker.killed_at > 2 * self._settings.session_timeout
        return life.ending.code == REFUSED

    async def _pause(self, worker: _Worker, life: _Life) -> None:
        worker.short = 0 if life.seconds >= _LASTING else worker.short + 1
        pause = min(_FIRST_PAUSE * 2 ** max(worker.short - 1, 0), _LONGEST_PAUSE)
        worker.restarts += 1
        worker.trouble = f"{_told(life)}; it is started again (number {worker.restarts})"
        logger.warning(
            "worker %s %s; it is started again in %g s, for the %d. time",
            *(worker.name, _told(life), pause, worker.restarts),
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._stopping.wait()
                worker.code = 0  # it was not running when the end was asked for

    async def _live(self, worker: _Worker) -> _Life:
        """Start one process and wait for its end, which is asked for when all shall end or it is dead while it runs."""
        began = time.monotonic()
        arguments = [*self._arguments, *(["--health-socket", worker.socket] if self._asks else [])]
        try:
            worker.child = child = await Child.start(arguments, {WORKER_VARIABLE: worker.name}, aside=True)
        except OSError as error:
            refused = Ending(CRASHED, type(error).__name__, f"no process could be started: {error.strerror}")
            return _Life(refused, 0.0, overdue=False, member="")
        logger.info("worker %s is process %d", worker.name, child.pid)
        ended = asyncio.create_task(child.ended(), name=f"end of worker {worker.name}")
        others: list[asyncio.Task[Any]] = [asyncio.create_task(self._stopping.wait(), name="stop")]
        if self._asks:
            others.append(asyncio.create_task(self._watch(worker), name=f"watch of worker {worker.name}"))
        overdue = False
        try:
            await asyncio.wait([ended, *others], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                child.drain()
                await asyncio.wait([ended], timeout=self._drains_within)
            if not ended.done():
                overdue = True
                child.kill()
            return _Life(await ended, time.monotonic() - began, overdue, child.member)
        finally:
            worker.child = None
            for task in (ended, *others):
                task.cancel()
            await asyncio.wait([ended, *others])

    async def _watch(self, worker: _Worker) -> None:
        """Return when the worker says for some time, or shows by its silence, that a restart would cure it."""
        from aioshard.web.asking import NoAnswerError, ask_worker  # noqa: PLC0415 (needs the extra `web`)

        misses, answered = 0, False
        while True:
            await asyncio.sleep(_LOOKS_EVERY)
            try:
                answer = await ask_worker(worker.socket, "/livez", within=_LOOKS_WITHIN)
            except NoAnswerError as error:
                why = f"does not answer: {error}"
                misses += answered  # before the first answer its modules are imported
            else:
                answered = True
                worker.trouble = None
                why = _reasons(answer.body)
                misses = misses + 1 if answer.status != 200 else 0  # noqa: PLR2004 - HTTP's
            if misses >= _MISSES:
                logger.error("worker %s %s; it is drained, ended and started again", worker.name, why)
                return


def _reasons(body: bytes) -> str:
    with contextlib.suppress(ValueError, AttributeError):
        return "; ".join(json.loads(body).get("reasons", ()))
    return "does not answer as a worker does"


def _counts_for(life: _Life, *, asked: bool) -> int:
    """The exit code that the end of a process stands for; *asked* is whether all were to end."""
    if life.overdue:
        return NOT_DRAINED
    if asked and life.ending.code == -signal.SIGTERM and not life.member:
        return 0  # sent to all of them, it met one that could not hear it yet: nothing ran in it
    return life.ending.code if life.ending.code >= 0 else CRASHED


def _told(life: _Life) -> str:
    """What became of a process, as the rest of a sentence about it."""
    ending = life.ending
    if life.overdue:
        return "did not end in time when it was to, and was killed"
    if ending.code < 0:
        name = signal.Signals(-ending.code).name
        hint = ", maybe since memory was short" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    meaning = f"{_MEANINGS.get(ending.code, 'ended')} (exit code {ending.code})"
    return f"{meaning}: {ending.message}" if ending.message else meaning


@contextlib.asynccontextmanager
async def _served(supervisor: Supervisor, options: RunOptions) -> AsyncIterator[None]:
    """The health server of a supervisor, while the context is open; nothing without a port."""
    if not options.answers:
        yield
        return
    from aioshard.web.serving import serve_in_thread  # noqa: PLC0415 (needs the extra `web`)
    from aioshard.web.supervised import supervised_application  # noqa: PLC0415
    from aioshard.web.supervised_page import supervised_page  # noqa: PLC0415

    page = options.page()
    routes = [] if page is None else supervised_page(supervisor, token=page.token)
    application = supervised_application(supervisor, routes)
    async with serve_in_thread(application, host=options.host, port=options.health_port or 0) as (address, bound):
        logger.info("health server listens on %s", base_url(address, bound))
        if page is not None:
            logger.info("the page is at %s/", base_url(address, bound))
        yield


def run_workers(options: RunOptions) -> int:
    """Run the app in as many processes as were asked for, to their end.

    Raises:
        AioshardError: The app, its settings or the port were refused; no worker was started then.
        ClickException: There is no such app.
    """
    signals = Signals()
    with ends_at_once():
        app = options.app()  # imported here only so that what is wrong with it is told once
        app.settings.require_bootstrap_servers()
        app.check()

    async def supervise(sockets: Path | None) -> int:
        supervisor = Supervisor(app, options, signals, sockets)
        async with _served(supervisor, options):
            code = await supervisor.supervise()
        if options.as_json:
            body = {
                "exit_code": code,
                "signal": signals.received or None,
                "workers": supervisor.told(),
            }
            click.echo(json.dumps(body))
        return code

    # Not uvloop: it does not start processes away from the terminal.
    with contextlib.ExitStack() as stack, signals, asyncio.Runner() as runner:
        sockets = stack.enter_context(_private_directory()) if options.answers else None
        return runner.run(supervise(sockets))
