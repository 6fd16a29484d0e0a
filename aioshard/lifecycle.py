"""Start and stop an app: run, serve, use as a context, drain and commit."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from aioshard.attempts import Provided
from aioshard.clients import kafka_clients, with_producer_or_none
from aioshard.controls import Controls
from aioshard.embedding import Lifespan, embedded
from aioshard.engine.catching_up import caught_up
from aioshard.engine.epoch import Epoch
from aioshard.engine.handler import Adapt
from aioshard.engine.insight.snapshot import explain_partition, statistics
from aioshard.engine.insight.stack import find_holder
from aioshard.engine.observed import Observe
from aioshard.engine.runtime import Engine
from aioshard.engine.tasks import outlast
from aioshard.errors import HandlerError, NotDrainedError, StateError
from aioshard.handlers import Handlers
from aioshard.loops import in_real_time, loop_factory
from aioshard.ports import (
    Clients,
    GroupHasMembersError,
    ProducerFactory,
    SideTopics,
    SideTopicsFactory,
    TransportFactory,
)

if TYPE_CHECKING:
    from aioshard.telemetry.tracing import Tracing

__all__ = ["Lifecycle"]

logger = logging.getLogger("aioshard.app")


class Lifecycle(Handlers, Controls):
    """The part of an app that starts it, waits, and ends it; it can only be started once at a time."""

    def __init__(self, resources: Callable[[Any], AbstractAsyncContextManager[Any]] | None) -> None:
        """Create an app that is not running yet.

        Args:
            resources: Called with the app; open from before its handlers run until the last of them has ended.
        """
        super().__init__()
        self._resources = resources
        self._tracing: Tracing | None = None
        self._stop: asyncio.Event | None = None
        self._state: Any = None
        self._exit: contextlib.AsyncExitStack | None = None
        """Set from before the resources are opened until they are closed."""
        self._lent = False
        """Whether a test client runs the app: entering the app then uses that run."""

    @property
    def state(self) -> Any:
        """The value that the app's `resources` yielded, like `Context.state`; None while the app is not running."""
        return self._state

    @property
    def is_traced(self) -> bool:
        """Whether the app creates spans when it runs."""
        return self._tracing is not None

    def traced_by(self, tracing: "Tracing | None") -> None:
        """Trace the app from the next start on; for `aioshard.telemetry.tracing.trace`.

        Raises:
            StateError: The app is running.
        """
        if self._engine is not None:
            raise StateError(f"app {self.group_id!r} runs: trace it before it is started")
        self._tracing = tracing

    @abstractmethod
    def check(self) -> None:
        """Reject handlers and settings that do not fit together; starting the app also calls it."""

    def run(self, *, until_caught_up: bool = False) -> None:
        """Run until SIGINT or SIGTERM; blocks. Uses uvloop if it is installed.

        The first signal drains and commits, a second one ends the process immediately with exit code 130. While a
        handler blocks the event loop, neither is noticed; `aioshard run` notices both.

        Args:
            until_caught_up: Process up to the ends of the partitions as seen at the start, then return.

        Raises:
            AioshardError: As for `serve`.
        """
        runner = asyncio.Runner(loop_factory=loop_factory())
        try:
            runner.run(self._serve_with_signals(until_caught_up=until_caught_up))
        except NotDrainedError:
            raise  # closing the event loop would wait for the handler that did not end
        except BaseException:
            runner.close()
            raise
        runner.close()

    async def _serve_with_signals(self, *, until_caught_up: bool) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        asked = False

        def on_signal() -> None:
            nonlocal asked
            if asked:
                os._exit(130)
            asked = True
            if self.statistics().state == "starting" and task is not None:
                task.cancel()  # nothing to drain yet
            self.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, on_signal)
        try:
            await self.serve(until_caught_up=until_caught_up)
        except asyncio.CancelledError:
            if not asked:
                raise

    async def serve(self, *, until_caught_up: bool = False) -> None:
        """Consume until `stop` is called or the task is cancelled; then drain and commit.

        Args:
            until_caught_up: Process up to the ends of the partitions as seen at the start, then return.

        Raises:
            StartError: The app could not start within `start_timeout`, or was refused.
            NotDrainedError: Records were still running after `shutdown_timeout`.
            HaltedError: With *until_caught_up*, halted records block the end.
            AioshardError: Any other error that makes consuming impossible.
        """
        async with self:
            engine, stop = self._engine, self._stop
            assert engine is not None  # noqa: S101 - created at the start, like the next one
            assert stop is not None  # noqa: S101
            tasks: list[asyncio.Task[Any]] = [asyncio.create_task(stop.wait(), name="stop")]
            if until_caught_up:
                tasks.append(asyncio.create_task(caught_up(engine), name="caught up"))
            try:
                done, _ = await asyncio.wait({engine.failed, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            for future in done:
                future.result()
        if engine.failed.done() and isinstance(refused := engine.failed.exception(), GroupHasMembersError):
            raise refused  # it was the last commit that was refused, after the call of stop

    def stop(self) -> None:
        """Request `run` or `serve` to drain, commit and end; return immediately. Safe from any thread.

        Before the start and after the end it does nothing. If you use the app as a context, leave the context instead.
        """
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    async def drain(self) -> None:
        """Finish running records, commit and leave the group, but keep resources open: for a `preStop` hook.

        The other members get the partitions immediately (with `group_instance_id`, when the successor joins). The app
        is not ready from the start of the drain. Resources stay open, and `publish` works, until the app is ended,
        which then has nothing more to wait for. All calls, and the end of the app, wait for the same drain and have the
        same result. Before the start and after the end it does nothing.

        You can await it in any event loop, and cancelling a call does not end the drain. A handler that awaits it would
        wait for itself: call `stop` there, or drain in a separate task.

        Raises:
            NotDrainedError: Records were still running after `shutdown_timeout`; they were cancelled and stay
                uncommitted.
        """
        engine, loop = self._engine, self._loop
        if engine is None or loop is None or loop.is_closed():
            return
        if loop is not asyncio.get_running_loop():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.drain(), loop))
            return
        await asyncio.shield(self._drained(engine))

    def _drained(self, engine: Engine) -> asyncio.Task[None]:
        """Return the single task that ends the engine."""
        if self._draining is None:
            engine.be_draining()
            self._draining = asyncio.create_task(engine.stop(), name="drain")
        return self._draining

    async def __aenter__(self) -> Self:
        """Start the app; return once the first assignment is complete.

        Raises:
            StartError: As for `serve`.
        """
        if not self._lent:
            await self._start(kafka_clients(self.settings, self.group_id))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Drain and commit within `shutdown_timeout`, then close the client and the resources."""
        if not self._lent:
            await self._end()

    def lifespan(self, asgi_app: object) -> AbstractAsyncContextManager[Any]:
        """Return the lifespan of an ASGI app: `FastAPI(lifespan=app.lifespan)`.

        Startup returns once the first assignment is complete; shutdown drains and commits. The server keeps handling
        signals.
        """
        return self.embed()(asgi_app)

    def embed(self, lifespan: Callable[[Any], Any] | None = None, *, stop_server: bool = False) -> Lifespan:
        """Return a lifespan in which the app runs: `FastAPI(lifespan=app.embed(lifespan))`.

        Args:
            lifespan: Your own lifespan, around the app: its resources stay open until the last handler has ended, and
                the value that it yields is the state of the requests.
            stop_server: If the app fails, send SIGTERM to this process, which the server handles: it finishes the
                requests in flight, and the process ends. Without it the server continues, and `/livez` and `/readyz`
                return 503.

        Raises:
            HandlerError: *lifespan* is not a valid lifespan.

        Example:
            >>> import asyncio, contextlib
            >>> from aioshard import App
            >>> from aioshard.testing import TestClient
            >>> app = App("billing")
            >>> @app.consume("orders")
            ... async def on_order(record): ...
            >>> @contextlib.asynccontextmanager
            ... async def lifespan(api):
            ...     yield {"greeting": "hello"}
            >>> async def serve() -> None:
            ...     async with TestClient(app), app.embed(lifespan)(None) as state:
            ...         print(state, app.statistics().state)
            >>> asyncio.run(serve())
            {'greeting': 'hello'} running
        """

        def failing() -> asyncio.Future[None]:
            assert self._engine is not None  # noqa: S101 - the app has been entered
            return self._engine.failed

        return embedded(self, lifespan, failing if stop_server else None)

    @contextlib.asynccontextmanager
    async def started(
        self,
        make_transport: TransportFactory,
        make_producer: ProducerFactory | None = None,
        make_side_topics: SideTopicsFactory | None = None,
        *,
        adapt: Adapt | None = None,
        observe: Observe | None = None,
        replay: bool = False,
    ) -> AsyncIterator[Self]:
        """Run like `async with app:`, but with another client: the test kit's in-memory broker, or a backfill.

        Args:
            make_transport: Creates the client.
            make_producer: Without it, nothing can be published.
            make_side_topics: Without it, nothing can be parked.
            adapt: Replaces each handler for this run.
            observe: Receives the outcome of each record.
            replay: Value of `Context.replay`.
        """
        clients = with_producer_or_none(make_transport, make_producer, make_side_topics)
        await self._start(clients, adapt=adapt, observe=observe, replay=replay)
        self._lent = True
        try:
            yield self
        finally:
            self._lent = False
            await self._end()

    async def _start(
        self, clients: Clients, *, adapt: Adapt | None = None, observe: Observe | None = None, replay: bool = False
    ) -> None:
        if self._exit is not None:
            message = f"app {self.group_id!r} is already running: an app runs once at a time"
            raise StateError(message)
        if not self._registrations:
            message = f"app {self.group_id!r} has no handlers: decorate a function with @app.consume('topic')"
            raise HandlerError(message)
        self.check()
        self._warn()
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._exit = contextlib.AsyncExitStack()
        if self._tracing is not None and not replay:
            clients, adapt = self._tracing.around(clients, adapt, self.group_id, self.settings)
        try:
            if observe is None and self.settings.journal is not None:
                observe = await self._open_journal(self.settings.journal, self._exit)
            producer = clients.producer()
            self._exit.push_async_callback(producer.close)
            if self._resources is not None:
                self._state = await self._exit.enter_async_context(self._resources(self))
            specs = [handler.spec(Provided(lambda: self._state, producer.publish, replay)) for handler in self]
            self._engine = Engine(
                self.group_id,
                self.settings,
                specs if adapt is None else [adapt(spec) for spec in specs],
                clients._replace(side_topics=lambda: self._closing(clients.side_topics())),
                producer,
                describe=self._describe,
                find_holder=find_holder,
                watch_loop=not replay and in_real_time(self._loop),
                observe=observe,
            )
            if self._journal is not None:
                self._journal.attach(self._engine, tuple(self))
            await self._engine.start()
            self._engine.failed.add_done_callback(self._has_failed)
        except BaseException:
            await self._end(quietly=True)
            raise

    def _has_failed(self, failed: asyncio.Future[None]) -> None:
        logger.critical("app %r has failed and consumes nothing more: %s", self.group_id, failed.exception())

    async def _open_journal(self, directory: str, exit_stack: contextlib.AsyncExitStack) -> Observe:
        from aioshard.telemetry.journal import Journal  # noqa: PLC0415 - pyarrow is imported on use

        self._journal = await Journal.open(directory, self.group_id, show_keys=self.settings.show_keys)
        exit_stack.push_async_callback(self._journal.close)
        return self._journal.observe

    def _warn(self) -> None:
        from aioshard.settings import timeout_warnings  # noqa: PLC0415 - pydantic is imported on use

        for sentence in timeout_warnings(self.settings, [(handler.name, handler.timeout) for handler in self]):
            logger.warning("%s", sentence)

    async def _end(self, *, quietly: bool = False) -> None:
        engine, stack = self._engine, self._exit
        try:
            if engine is not None:
                # A cancellation here cuts the drain short.
                await outlast(self._drained(engine), cut_short=True)
        except Exception:
            if not quietly:
                raise
        finally:
            if engine is not None:
                self._last = statistics(engine, self.group_id, self.settings.client)
            self._engine = None
            try:
                if stack is not None:
                    await stack.aclose()
            finally:
                if self._journal is not None and engine is not None and self._last is not None:
                    self._last = dataclasses.replace(self._last, journal=self._journal.statistics())
                self._exit = self._state = self._journal = self._draining = None

    def _describe(self, engine: Engine, epoch: Epoch) -> str:
        return explain_partition(engine, epoch, show_keys=self.settings.show_keys)

    def _closing(self, side_topics: SideTopics) -> SideTopics:
        assert self._exit is not None  # noqa: S101 - the app is starting
        self._exit.push_async_callback(side_topics.close)
        return side_topics
