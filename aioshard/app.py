"""The app: turns handlers, settings and a client into a running engine."""

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack, cast

from aioshard.attempts import InProcesses, Provided, State, with_attempts
from aioshard.core.options import Park
from aioshard.core.text import encodable, message_of
from aioshard.dependencies import Overrides
from aioshard.engine.control import (
    SeekTo,
    answered,
    assigned_partitions,
    caught_up,
    handler_name,
    open_partition,
    pause,
    release,
    release_parked,
    resume,
    seek,
    set_topics,
    stop_run,
)
from aioshard.engine.explain.diagnosis import diagnose, explain
from aioshard.engine.guard import Guard
from aioshard.engine.handler import Adapt, Handler, Observe
from aioshard.engine.monitor import Monitor
from aioshard.engine.recoveries import skipping
from aioshard.engine.runtime import Engine
from aioshard.engine.statistics import statistics
from aioshard.engine.tasks import outlast
from aioshard.engine.timing import precise
from aioshard.engine.unawaited import AwaitedCall
from aioshard.engine.watch import Watch
from aioshard.engine.workload import workload
from aioshard.errors import GroupHasMembersError, HandlerError, NotDrainedError, SettingsError, StateError
from aioshard.functions import name_of
from aioshard.loops import loop_factory, tuned_gc
from aioshard.observe import Diagnosis, Sample, Statistics, Workload
from aioshard.ports import (
    Clients,
    Message,
    Partitioner,
    Producer,
    ProducerFactory,
    Publish,
    SideTopics,
    SideTopicsFactory,
    TransportFactory,
)
from aioshard.records import PartitionInfo, TopicPartition
from aioshard.router import Router, overridden, process_call, with_side_topic
from aioshard.schema_registry.formats import RegistryFormat
from aioshard.schema_registry.registries import Registries
from aioshard.serde.payloads import Headers, message
from aioshard.signals import Signals

if TYPE_CHECKING:
    from aioshard.processes import Processes
    from aioshard.settings import Settings, SettingsDict
    from aioshard.telemetry.journal import Journal
    from aioshard.telemetry.tracing import Tracing

logger = logging.getLogger("aioshard.app")

T = TypeVar("T")
Resources = Callable[["App[Any]"], AbstractAsyncContextManager[State]]

_RUN_AHEAD = 0.005
"""Seconds for which workers of a backfill may run ahead: no heartbeat waits for them. Each turn of the event loop also
polls the client, which costs as much as ten quick records."""
_ANSWER_TIMEOUT = 10.0


_INTERCEPTING: contextvars.ContextVar[Publish | None] = contextvars.ContextVar("aioshard intercepting", default=None)
"""Where `App.publish` sends messages of a dry run."""


@contextlib.contextmanager
def intercept_publishing(publish: Publish) -> Iterator[None]:
    """Pass messages of `App.publish` to *publish*, of this task and of all tasks that it starts within the context."""
    token = _INTERCEPTING.set(publish)
    try:
        yield
    finally:
        _INTERCEPTING.reset(token)


class App(Router, Generic[State]):
    """A member of a consumer group with its handlers.

    Run it with `run` (blocks), `serve` (inside a running event loop), `async with app:` or, in FastAPI, with
    `lifespan=app.lifespan`. Each app runs only once at a time; you can start it again after it has stopped.

    Call coroutines in the app's event loop. You can call the other methods from any thread; they return when the
    engine has acted. In another thread they raise `TimeoutError` if the event loop is blocked for 10 s; the engine may
    still act later.

    Example:
        >>> from aioshard import App, Record
        >>> app = App("billing", bootstrap_servers="localhost:9092", auto_offset_reset="earliest")
        >>> @app.consume("orders", concurrency=256)
        ... async def on_order(record: Record) -> None: ...
        >>> [handler.name for handler in app.handlers]
        ['on_order']
    """

    def __init__(
        self,
        group_id: str,
        *,
        settings: "Settings | None" = None,
        resources: Resources[State] | None = None,
        **overrides: "Unpack[SettingsDict]",
    ) -> None:
        """Create an app; nothing connects yet.

        Args:
            group_id: The consumer group.
            settings: Used instead of `AIOSHARD_*` variables and defaults.
            resources: An async context manager that is open while handlers run; the value it yields is
                `Context.state`.
            overrides: Settings by name, such as `bootstrap_servers`; they take precedence over *settings* and the
                environment.

        Raises:
            SettingsError: If *group_id* is empty or cannot be encoded, or a setting is unknown, outside its range, or
                contradicts another.
        """
        super().__init__()
        if not str(group_id or "").strip():
            raise SettingsError(f"App({group_id!r}): expected a group id, such as App('billing')")
        if encodable(str(group_id)) != str(group_id):
            raise SettingsError(f"App({group_id!r}): expected a group id that UTF-8 can encode, such as App('billing')")
        self.group_id = group_id
        if overrides.get("bootstrap_servers", "") is None:
            del overrides["bootstrap_servers"]
        from aioshard.settings import Settings  # noqa: PLC0415 - pydantic is imported on use

        self._settings = Settings(**overrides) if settings is None else _with_overrides(settings, overrides)
        self._resources = resources
        self.tracing: Tracing | None = None
        """Set by `traced_by`; used from the next start on."""
        # Set while the app runs, or from its last run.
        self._engine: Engine | None = None
        self._watch: Watch | None = None
        self._monitor: Monitor | None = None
        self._exit: contextlib.AsyncExitStack | None = None
        """Set from before the resources are opened until they are closed."""
        self._state: Any = None
        self._overrides: Overrides = {}
        self._journal: Journal | None = None
        self._processes: Processes | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._draining: asyncio.Task[None] | None = None
        """The task that ends the engine; set from the start of the drain until the app has ended."""
        self._last_statistics = Statistics(
            state="stopped",
            group_id=group_id,
            member_id=None,
            rebalances=0,
            commits=0,
            commit_failures=0,
            replayed=0,
            already_done=0,
            buffered_records=0,
            buffered_bytes=0,
            client_losses=0,
            trouble=None,
            partitions=(),
            handlers=(),
        )
        """The statistics at the end of the last run."""
        self._run_by_started = False
        """Whether `started` runs the app: entering the app then joins that run."""

    @property
    def settings(self) -> "Settings":
        """The settings in effect."""
        return self._settings

    @property
    def handlers(self) -> tuple[Handler, ...]:
        """The registered handlers, in order."""
        return tuple(self)

    def configure(self, **overrides: "Unpack[SettingsDict]") -> None:
        """Change settings by name before the app is started.

        Raises:
            SettingsError: As in the constructor.
            StateError: If the app is running.
        """
        self._check_open("configure()")
        self._settings = _with_overrides(self._settings, overrides)

    def check(self) -> None:
        """Refuse handlers and settings that do not fit together, as the start does, and an app without handlers.

        Raises:
            HandlerError: The app has no handlers, a handler's batches wait for `stuck_after` or longer, or worker
                processes cannot import a handler.
            SettingsError: The partitions in `assign` do not match the handlers, or `resources` is not an async context
                manager.
        """
        if not self._handlers:
            raise HandlerError(f"app {self.group_id!r} has no handlers: decorate a function with @app.consume('topic')")
        self._check_handlers()

    def _check_handlers(self) -> None:
        """Refuse what `check` refuses, except that there are no handlers."""
        if self._resources is not None:
            _check_resources(self._resources)
        self._overridden()
        for handler in self:
            if handler.run_in == "process":
                process_call(handler)
            batch = handler.batch
            stuck_after = self._settings.stuck_after
            if batch is not None and batch.linger >= stuck_after:
                raise HandlerError(
                    f"handler {handler.name!r} lets batches wait for linger={batch.linger:g} s, but a record counts as "
                    f"stuck after stuck_after={stuck_after:g} s: lower linger, or raise stuck_after"
                )
        if self._settings.assign is not None:
            self._check_assign(self._settings.assign.keys())

    def _check_assign(self, assigned: Collection[str]) -> None:
        """Refuse a manual assignment that does not match the handlers."""
        for handler in self:
            if handler.pattern is not None or isinstance(handler.on_failure, Park):
                option = "a pattern" if handler.pattern is not None else "on_failure=Park(…)"
                raise SettingsError(
                    f"handler {handler.name!r} has {option}, which needs a consumer group: remove it, or remove assign"
                )
        handled = {topic for handler in self for topic in handler.topics}
        for topic in sorted(handled ^ set(assigned)):
            problem = "has no partitions in assign" if topic in handled else "is in assign, but no handler consumes it"
            raise SettingsError(f"topic {topic!r} {problem}: name exactly the topics of the handlers in assign")

    def _completed(self, handler: Handler) -> Handler:
        return with_side_topic(handler, self.group_id)

    def include_router(self, router: Router) -> None:
        """Add the handlers of another module.

        Raises:
            HandlerError: If a topic already has a handler. Nothing is added then.
            StateError: If the app is running.
        """
        before = list(self._handlers)
        try:
            for handler in router:
                self._add(handler._replace(middleware=(self._middleware, *handler.middleware)))
        except HandlerError:
            self._handlers = before
            raise

    @contextlib.contextmanager
    def override_dependencies(self, overrides: Overrides) -> Iterator[None]:
        """Replace dependencies of handlers in each run of the app that starts within this context: for tests.

        Args:
            overrides: Functions that handlers depend on, each with the function that replaces it. That one may have
                other parameters and dependencies.

        Raises:
            HandlerError: No handler depends on a function, or one that replaces it cannot be called.
            StateError: The app is running.

        Example:
            >>> from typing import Annotated
            >>> from fast_depends import Depends
            >>> from aioshard import App, Record
            >>> from aioshard.testing import TestClient, run
            >>> def get_rate() -> float:
            ...     raise ConnectionError("no network in tests")
            >>> app = App("billing")
            >>> @app.consume("orders")
            ... async def on_order(record: Record, rate: Annotated[float, Depends(get_rate)]) -> None:
            ...     print(rate)
            >>> async def test() -> None:
            ...     async with TestClient(app) as client:
            ...         await client.publish("orders", b"")
            ...         await client.settle()
            >>> with app.override_dependencies({get_rate: lambda: 1.25}):
            ...     run(test())
            1.25
        """
        self._check_open("override_dependencies()")
        before = self._overrides
        self._overrides = {**before, **overrides}
        try:
            self._overridden()
            yield
        finally:
            self._overrides = before

    def _overridden(self) -> list[Handler]:
        """Return the handlers with the functions that replace dependencies.

        Raises:
            HandlerError: As for `override_dependencies`.
        """
        if not self._overrides:
            return list(self)
        injected = [handler.dependencies for handler in self if handler.dependencies is not None]
        known = {dependency.function for dependencies in injected for dependency in dependencies.calls}
        for function in self._overrides:
            if function not in known:
                raise HandlerError(
                    f"override_dependencies() names {name_of(function)}, which no handler depends on: name the "
                    "function that is in Depends(…), after all handlers are registered"
                )
        return [overridden(handler, self._overrides) for handler in self]

    def _check_open(self, what: str) -> None:
        if self._engine is not None:
            raise StateError(f"{what} came too late, because app {self.group_id!r} is running: do it before the start")

    @property
    def state(self) -> State:
        """The value that the app's `resources` yielded, like `Context.state`; None while the app is not running."""
        return cast("State", self._state)

    def traced_by(self, tracing: "Tracing | None") -> None:
        """Trace the app from the next start on; for `aioshard.telemetry.tracing.trace`.

        Raises:
            StateError: The app is running.
        """
        self._check_open("trace()")
        self.tracing = tracing

    # Run ----------------------------------------------------------------------------------

    def run(self, *, until_caught_up: bool = False) -> None:
        """Run until SIGINT or SIGTERM; blocks. Uses uvloop if it is installed.

        The first signal drains and commits, a second one ends the process immediately with exit code 130.

        Args:
            until_caught_up: Process up to the ends of the partitions as seen at the start, then return.

        Raises:
            AioshardError: As for `serve`.
        """
        runner = asyncio.Runner(loop_factory=loop_factory())
        with Signals() as signals:
            try:
                runner.run(self.serve_until_signal(signals, until_caught_up=until_caught_up))
            except NotDrainedError:
                raise  # closing the event loop would wait for the handler that did not end
            except BaseException:
                runner.close()
                raise
            runner.close()

    async def serve_until_signal(self, signals: Signals, *, until_caught_up: bool = False) -> None:
        """Serve until the first signal, or until `serve` returns; raise as `serve` does.

        Args:
            signals: The open handlers of this process.
            until_caught_up: As for `serve`.
        """
        tuning = tuned_gc() if self.settings.tune_gc else contextlib.nullcontext()
        serving = asyncio.create_task(self._serve(tuning, until_caught_up=until_caught_up), name="serve")

        def end() -> None:
            if self.statistics().state in {"running", "draining"}:
                self.stop()
            else:
                serving.cancel()  # nothing is consumed during the start, which may wait long for a broker

        signals.on_first(end)
        await asyncio.wait([serving])
        if not serving.cancelled():
            serving.result()

    async def serve(self, *, until_caught_up: bool = False) -> None:
        """Consume until `stop` is called or the task is cancelled; then drain and commit.

        Args:
            until_caught_up: Process up to the ends of the partitions as seen at the start, then return.

        Raises:
            StartError: The app could not start within `start_timeout`, or was refused.
            NotDrainedError: Records were still in flight after `shutdown_timeout`, finished records are not committed,
                or a dead letter could not be written.
            HaltedError: With *until_caught_up*, halted records block the end.
            AioshardError: Any other error that makes consuming impossible.
        """
        await self._serve(contextlib.nullcontext(), until_caught_up=until_caught_up)

    async def _serve(self, while_running: AbstractContextManager[None], *, until_caught_up: bool) -> None:
        self.check()
        async with self:
            engine = self._engine
            stop = self._stop
            assert engine is not None  # noqa: S101 - created at the start, like the next one
            assert stop is not None  # noqa: S101
            tasks: list[asyncio.Task[Any]] = [asyncio.create_task(stop.wait(), name="stop")]
            if until_caught_up:
                tasks.append(asyncio.create_task(caught_up(engine), name="caught up"))
            try:
                with while_running:
                    done, _ = await asyncio.wait({engine.failed, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            for future in done:
                future.result()
        if engine.failed.done() and isinstance(failure := engine.failed.exception(), GroupHasMembersError):
            raise failure  # the last commit, after stop(), was refused

    def stop(self) -> None:
        """Request `run` or `serve` to drain, commit and end; return immediately. Safe from any thread.

        Before the start and after the end it does nothing. During the start it takes effect once the app runs: cancel
        the task to end a start that waits for a broker. If you use the app as a context, leave the context instead.
        """
        loop = self._loop
        stop = self._stop
        if loop is not None and stop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    async def drain(self) -> None:
        """Finish the records in flight, commit and leave the group, but keep resources open: for a `preStop` hook.

        The other members get the partitions immediately (with `group_instance_id`, when the successor joins). The app
        is not ready from the start of the drain. Resources stay open, and `publish` works, until the app is ended,
        which then does not have to wait. All calls, and the end of the app, wait for the same drain and have the
        same result. Before the start and after the end it does nothing.

        You can await it in any event loop, and cancelling a call does not end the drain. A handler that awaits it would
        wait for itself: call `stop` there, or drain in a separate task.

        Raises:
            NotDrainedError: Records were still in flight after `shutdown_timeout`; they were cancelled and stay
                uncommitted.
        """
        engine = self._engine
        loop = self._loop
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

        An app without handlers joins no group and connects with its first `publish`.

        Raises:
            StartError: As for `serve`.
        """
        if not self._run_by_started:
            from aioshard.kafka.clients import kafka_clients  # noqa: PLC0415 - the client is imported on use

            await self._start(kafka_clients(self.settings, self.group_id))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Drain and commit within `shutdown_timeout`, then close the client and the resources."""
        if not self._run_by_started:
            await self._end()

    @contextlib.asynccontextmanager
    async def lifespan(self, asgi_app: object, *, stop_server: bool = False) -> AsyncIterator[None]:  # noqa: ARG002 - servers pass it
        """Run the app during the lifespan of an ASGI app: `FastAPI(lifespan=app.lifespan)`.

        Startup returns once the first assignment is complete; shutdown drains and commits. The server keeps handling
        signals. Within a lifespan of your own, use `async with app:` or `async with app.lifespan(api):`.

        Args:
            asgi_app: Passed by the server; not used.
            stop_server: If the app fails, send SIGTERM to this process, which the server handles: it finishes the
                requests in flight, and the process ends. Without it the server continues, and `/livez` and `/readyz`
                return 503.
        """
        async with self:
            failed = self.running_engine().failed
            if stop_server:
                failed.add_done_callback(_stop_server)
            try:
                yield
            finally:
                failed.remove_done_callback(_stop_server)

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
        now: Callable[[], float] = time.time,
    ) -> AsyncIterator[Self]:
        """Run like `async with app:`, but with another client: of the in-memory broker, or of a backfill.

        Args:
            make_transport: Creates the client.
            make_producer: Without it, nothing can be published.
            make_side_topics: Without it, nothing can be parked.
            adapt: Replaces each handler for this run.
            observe: Receives the outcome of each record.
            replay: Value of `Context.replay`.
            now: Returns the time on the clock of the records' timestamps, in seconds since the Unix epoch.
        """
        clients = Clients(make_transport, make_producer or _NoProducer, make_side_topics or _no_side_topics, now=now)
        await self._start(clients, adapt=adapt, observe=observe, replay=replay)
        self._run_by_started = True
        try:
            yield self
        finally:
            self._run_by_started = False
            await self._end()

    async def _start(
        self, clients: Clients, *, adapt: Adapt | None = None, observe: Observe | None = None, replay: bool = False
    ) -> None:
        if self._exit is not None:
            raise StateError(f"app {self.group_id!r} is already running: an app runs once at a time")
        self._check_handlers()
        self._warn_of_timeouts()
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._exit = contextlib.AsyncExitStack()
        if self.tracing is not None and not replay:
            clients, adapt = self.tracing.wrap(clients, adapt, self.group_id, self.settings)
        try:
            # `_end` closes all of this in the reverse order.
            runs = {} if replay else await self._start_processes()
            if observe is None:
                observe = await self._open_journal()
            producer = self._open_producer(clients)
            await self._open_resources()
            exactly_once = self.settings.processing_guarantee == "exactly_once" and not replay
            registries = Registries()
            self._exit.push_async_callback(registries.close)
            provided = Provided(lambda: self._state, producer.publish, replay, exactly_once, clients.around, registries)
            handlers = self._runnable_handlers(provided, runs)
            if replay:
                handlers = [handler.for_history() for handler in handlers]
            self._engine = Engine(
                self.group_id,
                self.settings,
                handlers if adapt is None else [adapt(handler) for handler in handlers],
                clients._replace(side_topics=lambda: self._closing(clients.side_topics())),
                producer,
                observe=observe,
                rebalanced=None if self._journal is None else self._journal.rebalanced,
                exactly_once=exactly_once,
                awaits_topics=not replay,
                run_ahead=_RUN_AHEAD if replay else 0.0,
                processes=self._processes,
                registries=registries,
            )
            await self._start_engine(self._engine, replay=replay)
        except BaseException:
            with contextlib.suppress(Exception):
                await self._end()
            raise

    def _warn_of_timeouts(self) -> None:
        """Log timeouts that do not fit each other."""
        from aioshard.settings import timeout_warnings  # noqa: PLC0415 - pydantic is imported on use

        for sentence in timeout_warnings(self.settings, [(handler.name, handler.timeout) for handler in self]):
            logger.warning("%s", sentence)

    async def _open_journal(self) -> Observe | None:
        """Open the journal if one is set; return the function that writes outcomes to it."""
        settings = self.settings
        if self._exit is None or settings.journal is None:
            return None
        from aioshard.telemetry.journal import Journal  # noqa: PLC0415 - pyarrow is imported on use

        journal = await Journal.open(settings.journal, self.group_id, show_keys=settings.show_keys)
        self._exit.push_async_callback(journal.close)
        self._journal = journal
        return journal.observe

    def _open_producer(self, clients: Clients) -> Producer:
        assert self._exit is not None  # noqa: S101 - the app is starting
        producer = clients.producer()
        self._exit.push_async_callback(producer.close)
        return producer

    async def _open_resources(self) -> None:
        assert self._exit is not None  # noqa: S101 - the app is starting
        if self._resources is not None:
            self._state = await self._exit.enter_async_context(_opened(self._resources, self))

    def _runnable_handlers(self, provided: Provided, runs: Mapping[int, InProcesses]) -> list[Handler]:
        """Return the handlers with the functions that run their attempts; *runs* has those of worker processes."""
        return [with_attempts(handler, provided, runs.get(number)) for number, handler in enumerate(self._overridden())]

    async def _start_engine(self, engine: Engine, *, replay: bool) -> None:
        """Start the engine and its watch; return once the first assignment is complete."""
        is_real_time = precise(asyncio.get_running_loop().time) is time.monotonic
        self._watch = Watch(engine, watch_loop=is_real_time and not replay)
        self._monitor = Monitor(self._watch)
        await engine.start(self._monitor.run())
        engine.failed.add_done_callback(self._log_failure)

    def _log_failure(self, failed: asyncio.Future[None]) -> None:
        logger.critical("app %r has failed and no longer consumes: %s", self.group_id, _reason_of(failed))

    async def _start_processes(self) -> dict[int, InProcesses]:
        """Start worker processes if a handler needs them; return an `InProcesses` for each such handler."""
        calls = {number: process_call(handler) for number, handler in enumerate(self) if handler.run_in == "process"}
        if not calls or self._exit is None:
            return {}
        from aioshard.processes import Processes  # noqa: PLC0415 - imported on use

        count = self.settings.processes or (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
        pool = self._processes = await self._exit.enter_async_context(Processes(calls, count))
        return {number: InProcesses(count, functools.partial(pool.run, number)) for number in calls}

    async def _end(self) -> None:
        engine = self._engine
        stack = self._exit
        try:
            if engine is not None:
                # A cancellation here cuts the drain short.
                await outlast(self._drained(engine), cut_short=True)
        finally:
            if self._watch is not None:
                with Guard().watching("the app that ends"):
                    self._last_statistics = statistics(self._watch)
            self._engine = self._watch = self._monitor = None
            try:
                if stack is not None:
                    await stack.aclose()
            finally:
                if engine is not None:
                    self._last_statistics = self._with_journal(self._last_statistics)
                self._exit = self._state = self._journal = self._draining = self._processes = None

    def _closing(self, side_topics: SideTopics) -> SideTopics:
        assert self._exit is not None  # noqa: S101 - the app is starting
        self._exit.push_async_callback(side_topics.close)
        return side_topics

    # Control ------------------------------------------------------------------------------

    def publish(
        self,
        topic: str,
        value: object,
        *,
        key: bytes | str | None = None,
        headers: Headers = (),
        partition: int | None = None,
        partitioner: Partitioner = "key",
        format: RegistryFormat | None = None,  # noqa: A002 - the name that users expect
    ) -> Coroutine[Any, Any, int]:
        """Publish with the app's idempotent producer; return once the brokers have acknowledged (`acks=all`).

        It also works after the app has drained, until it ends: requests in flight in a web server may need it. The run
        of a handler that drops the call without awaiting it fails.

        Args:
            topic: Destination topic.
            value: Bytes; a string, in UTF-8; None for a tombstone; anything else as JSON: pydantic models,
                dataclasses, msgspec structs, dicts, lists, numbers, dates and other types that pydantic serializes.
            key: Bytes or a string.
            headers: A mapping, or pairs of name and content; a name is text, or bytes in UTF-8.
            partition: Overrides the partitioner.
            partitioner: `"key"` chooses the partition by the key, as Java's partitioner does, and sends messages
                without a key round robin. `"round_robin"` ignores keys: frequent keys spread evenly, but order per key
                is lost.
            format: Encodes the value with a schema of a schema registry: `Avro`, `JsonSchema` or `Protobuf`.

        Returns:
            The offset; -1 if the brokers had stored the message before and no longer know where.

        Raises:
            MessageError: The value cannot be encoded as JSON or in *format*, or the message is otherwise invalid.
            RegistryUnavailableError: The schema registry of *format* does not answer.
            StateError: The app is not running, or runs in another event loop.
            TransportError: The message was not acknowledged; subclasses include `AuthorizationError` and
                `MessageTooLargeError`.
        """
        content = value if format is None else None
        outgoing = message(topic, content, key=key, headers=headers, partition=partition, partitioner=partitioner)
        return self._publish(AwaitedCall("app.publish", topic), outgoing, value, format)

    async def _publish(
        self, call: AwaitedCall, outgoing: Message, value: object, value_format: RegistryFormat | None
    ) -> int:
        call.begin()
        if (intercepting := _INTERCEPTING.get()) is not None:
            return await intercepting(outgoing)
        if self._engine is None:
            raise StateError(f"app {self.group_id!r} is not running")
        self._check_loop()
        engine = self._engine
        if value_format is not None:
            content = await engine.registries.encode(value_format, outgoing.topic, value)
            outgoing = outgoing._replace(value=content)
        return await engine.producer.publish(outgoing)

    def retry_now(self, topic: str, partition: int, offset: int) -> None:
        """Retry a record now that is halted or waits for its next attempt; it gets all its attempts again.

        Raises:
            StateError: The app is not running, or the record is not waiting in this process.
        """
        self._do(lambda engine: release(engine, TopicPartition(topic, partition), offset, None))

    def skip(self, topic: str, partition: int, offset: int) -> None:
        """Complete a halted record without processing it: its shard resumes, and its offset can be committed.

        Raises:
            StateError: As for `retry_now`.
        """
        self._do(
            lambda engine: release(
                engine, TopicPartition(topic, partition), offset, skipping("the application asked for it")
            )
        )

    def cancel_run(self, topic: str, partition: int, offset: int) -> None:
        """Cancel the current attempt of a record, as its `timeout` would; retries and `on_failure` follow as usual.

        Of a batch, the whole attempt fails. A worker process is killed and replaced. A thread cannot be stopped: its
        key waits until the thread ends.

        Raises:
            StateError: The app is not running, or the record is not in flight in this process.
        """
        self._do(lambda engine: stop_run(engine, TopicPartition(topic, partition), offset))

    def release_parked(self, topic: str, partition: int, offset: int) -> None:
        """Retry a parked record now, followed in order by the records parked behind it under the same key.

        `aioshard park release` requests the same from outside, and stores the request if no member owns the partition.

        Args:
            topic: Topic that the record came from, not the one where it is parked.
            partition: Partition number in that topic.
            offset: Offset of any parked record of the key.

        Raises:
            StateError: The app is not running, or the record is not parked in this process.
        """
        self._do(lambda engine: release_parked(engine, TopicPartition(topic, partition), offset))

    def pause(self, topic: str, partition: int | None = None, *, why: str = "the application asked for it") -> None:
        """Pause a partition, or all partitions of a topic: no record starts, while those in flight continue.

        Fetching stops too. The pause lasts until `resume`, even if the partition is revoked and comes back.

        Args:
            topic: A topic that the app consumes.
            partition: Partition number; None means every partition that this process owns now.
            why: Shown by `explain` and in the statistics.

        Raises:
            StateError: The app is not running, or does not own such a partition now.
        """
        self._do(lambda engine: pause(engine, assigned_partitions(engine, topic, partition), why))

    def resume(self, topic: str, partition: int | None = None) -> None:
        """Undo `pause`; None resumes every paused partition of the topic.

        Raises:
            StateError: The app is not running.
        """

        def act(engine: Engine) -> None:
            if partition is not None:
                resume(engine, [TopicPartition(topic, partition)])
            else:
                resume(engine, [p for p in engine.pauses if isinstance(p, TopicPartition) and p.topic == topic])

        self._do(act)

    def pause_handler(self, name: str, *, why: str = "the application asked for it") -> None:
        """Pause everything that the handler of that name consumes, now and later; see `pause`.

        Raises:
            StateError: The app is not running, or has no such handler.
        """
        self._do(lambda engine: pause(engine, [handler_name(engine, name)], why))

    def resume_handler(self, name: str) -> None:
        """Undo `pause_handler`.

        Raises:
            StateError: As for `pause_handler`.
        """
        self._do(lambda engine: resume(engine, [handler_name(engine, name)]))

    def subscribe(self, handler: str, *topics: str) -> None:
        """Let a handler of the running app consume more topics.

        The group rebalances; partitions of the new topics come with the next assignment. The app keeps the topics if it
        is started again; other processes of the group do not get them.

        Args:
            handler: Name of the handler.
            topics: Topic names.

        Raises:
            HandlerError: A topic is invalid, or conflicts with another topic or handler.
            StateError: The app is not running, has no such handler, or `assign` fixes its partitions; or another
                handler of this process has read a topic.
            ClientLostError: The client is being replaced. Nothing has changed; try again.
        """
        self._do(lambda engine: self._set_topics(engine, handler, lambda now: (*now, *topics)))

    def unsubscribe(self, handler: str, *topics: str) -> None:
        """Let a handler of the running app stop consuming topics; it keeps at least one, or its pattern.

        The group rebalances: the partitions of the topics are drained and committed when they are revoked.

        Raises:
            HandlerError: No topic would be left; `pause_handler` is for that.
            StateError: As for `subscribe`.
            ClientLostError: As for `subscribe`.
        """
        self._do(lambda engine: self._set_topics(engine, handler, lambda now: (t for t in now if t not in topics)))

    def _set_topics(self, engine: Engine, name: str, change: Callable[[Sequence[str]], Iterable[str]]) -> None:
        if self.settings.assign is not None:
            raise StateError("the setting assign fixes the partitions: the topics of a handler cannot change")
        number = [handler.name for handler in self].index(handler_name(engine, name))
        handler = self._handlers[number]
        changed = self._with_topics(handler, tuple(dict.fromkeys(change(handler.topics))))
        set_topics(engine, engine.handlers[number], changed.topics)
        self._handlers[number] = changed

    async def seek(self, topic: str, partition: int, to: SeekTo) -> int:
        """Move an assigned partition to another position; return once it has resumed there.

        No new records of the partition start, those in flight have `drain_timeout` to end, and their completions are
        committed. Then the new position is committed, before any record from there is delivered. Earlier completions
        do not carry over: records from the new position on are processed again even if they were stored as finished,
        and those before it are skipped. Other partitions continue throughout.

        The new position survives a rebalance as long as the partition stays with this process, and also a cancelled
        call. To seek the partition of a running handler, call this in a separate task: the drain waits for the handler.

        Args:
            topic: A topic that the app consumes.
            partition: Partition number.
            to: An offset; a datetime with a time zone, or seconds since the epoch as a float, for the first record at
                or after that time (the end of the log if there is none); `"beginning"` or `"end"` of the log.

        Returns:
            The offset. If retention passes it before the partition resumes, the partition resumes at the start of its
            log.

        Raises:
            StateError: The app is not running, runs in another event loop, or does not own the partition now; the
                offset is outside the log; another seek is in progress; or the partition was assigned to another member
                before the seek was done. With exactly-once processing, also if outputs of finished records that the
                seek would skip could not be published: they run again.
            TransportError: The brokers did not report the position.
        """
        return await seek(self._engine_here(), TopicPartition(topic, partition), to)

    def assignment(self) -> tuple[TopicPartition, ...]:
        """Return the partitions that this process owns now, sorted, except those being revoked.

        Raises:
            StateError: The app is not running.
        """

        def open_partitions(engine: Engine) -> tuple[TopicPartition, ...]:
            return tuple(sorted(owned.topic_partition for owned in engine.rebalance.partitions if owned.is_open))

        return self._do(open_partitions)

    def position(self, topic: str, partition: int) -> int:
        """Return the next offset to read of an assigned partition; earlier records may still be incomplete.

        Raises:
            StateError: The app is not running, or does not own the partition now.
        """
        return self._do(lambda engine: open_partition(engine, TopicPartition(topic, partition)).tracker.position)

    async def committed(self, topic: str, partition: int) -> int | None:
        """Query the brokers for the group's committed offset of a partition, assigned or not; None if there is none.

        Raises:
            StateError: The app is not running, or runs in another event loop.
            TransportError: The brokers did not report it.
        """
        engine = self._engine_here()
        topic_partition = TopicPartition(topic, partition)
        request = engine.client.get().committed([topic_partition])
        commit = (await answered(engine, request, f"what is committed on {topic_partition}"))[topic_partition]
        return None if commit is None else commit.offset

    async def partitions(self, topic: str) -> tuple[PartitionInfo, ...]:
        """Return the partitions of a topic with their leader and replicas, in order; empty if it does not exist.

        The topic is not created. Leaders and replicas come from the client's latest metadata.

        Raises:
            StateError: The app is not running, or runs in another event loop.
            TransportError: The brokers did not report them.
        """
        engine = self._engine_here()
        request = engine.client.get().partitions(topic)
        infos = await answered(engine, request, f"the partitions of topic {topic!r}")
        return tuple(info for _, info in sorted(infos.items()))

    async def topics(self) -> tuple[str, ...]:
        """Return the names of all topics visible to this user, sorted, without Kafka's internal topics.

        Raises:
            StateError: The app is not running, or runs in another event loop.
            TransportError: The brokers did not report them.
        """
        engine = self._engine_here()
        return tuple(sorted(await answered(engine, engine.client.get().topics(), "the topics")))

    def _engine_here(self) -> Engine:
        """Return the engine to a coroutine; refuse callers in another event loop."""
        engine = self.running_engine()
        self._check_loop()
        return engine

    def _check_loop(self) -> None:
        """Raise if the caller's event loop is not the app's."""
        if asyncio.get_running_loop() is not self._loop:
            raise StateError(
                f"app {self.group_id!r} runs in another event loop: call this method there, or from here with "
                "asyncio.run_coroutine_threadsafe(…, loop)"
            )

    def _do(self, act: Callable[[Engine], T]) -> T:
        """Act on the engine in its event loop, from any thread."""
        engine = self.running_engine()
        loop = self._loop
        assert loop is not None  # noqa: S101 - set before the engine
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:  # a thread without an event loop
            here = None
        if here is loop:
            return act(engine)

        async def act_there() -> T:
            return act(engine)

        return asyncio.run_coroutine_threadsafe(act_there(), loop).result(_ANSWER_TIMEOUT)

    def running_engine(self) -> Engine:
        """Return the engine, for other parts of this package.

        Raises:
            StateError: The app is not running.
        """
        if self._engine is None or self._has_drained:
            state = "is not running" if self._engine is None else "has drained: start it again to consume"
            raise StateError(f"app {self.group_id!r} {state}")
        return self._engine

    async def run_in_loop(self, coroutine: Coroutine[Any, Any, T], name: str) -> T:
        """Run a coroutine of another part of this package in the app's event loop, from any event loop.

        A cancellation of the caller cancels it; if it ends with an error then, the error is logged.

        Args:
            coroutine: It may use the app's resources.
            name: The name of the task, if one is needed.

        Raises:
            StateError: The app is not running.
        """
        try:
            self.running_engine()
        except StateError:
            coroutine.close()
            raise
        loop = self._loop
        assert loop is not None  # noqa: S101 - set before the engine
        if asyncio.get_running_loop() is loop:
            return await coroutine

        async def run_there() -> T:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 - in a coroutine
            task.set_name(name)
            try:
                return await coroutine
            except Exception as error:
                if not task.cancelling():
                    raise
                logger.warning("%s was cancelled and has ended with an error: %s", name, error)
                raise asyncio.CancelledError from error  # nobody waits for the error any more

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run_there(), loop))

    @property
    def _has_drained(self) -> bool:
        return self._draining is not None and self._draining.done()

    # Inspection ---------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Return a frozen snapshot of the app's activity; safe to call from any thread.

        After the app has ended, it returns the last state.
        """
        watch = self._watch
        return self._last_statistics if watch is None else self._with_journal(statistics(watch))

    def _with_journal(self, current: Statistics) -> Statistics:
        journal = self._journal
        return current if journal is None else dataclasses.replace(current, journal=journal.statistics())

    def explain(self) -> str:
        """Explain in sentences why each partition does not advance; safe to call from any thread."""
        watch = self._watch
        if watch is None:
            return "The app is not running.\n"
        return "The app has drained and no longer consumes.\n" if self._has_drained else explain(watch)

    def diagnose(self) -> Diagnosis:
        """Return the data behind `explain`: findings and oldest records with their stacks; safe from any thread."""
        watch = self._watch
        if watch is None:
            return Diagnosis(state=self.statistics().state, findings=(), partitions=(), outliving=())
        return diagnose(watch)

    def workload(self) -> Workload | None:
        """Return current runs, deep shards, and failed and parked records; safe from any thread.

        It contains only the worst few of each kind. None while the app is not running.
        """
        watch = self._watch
        return None if watch is None else workload(watch)

    def history(self) -> tuple[Sample, ...]:
        """Return the figures that the dashboard plots: every 5 s for the last hour, oldest first.

        Empty while the app is not running. Safe from any thread.
        """
        monitor = self._monitor
        return () if monitor is None else tuple(monitor.history)


def _check_resources(resources: Callable[..., object]) -> None:
    """Refuse a function that cannot be called with the app, or certainly returns no async context manager."""
    if isinstance(resources, AbstractAsyncContextManager):
        raise SettingsError(
            "resources= was given a context manager: expected the function that makes it, without calling it, as "
            "in resources=resources"
        )
    if inspect.isasyncgenfunction(resources) or inspect.isgeneratorfunction(resources):
        raise _no_context_manager(resources, "it yields")
    if inspect.iscoroutinefunction(resources):
        raise _no_context_manager(resources, "it is a coroutine function")
    try:
        inspect.signature(resources).bind(None)
    except TypeError as error:
        raise _no_context_manager(resources, f"called with the app: {error}") from None
    except ValueError:
        return  # some built-in functions have no signature


def _opened(resources: Resources[Any], app: App[Any]) -> AbstractAsyncContextManager[Any]:
    opened = resources(app)
    if not isinstance(opened, AbstractAsyncContextManager):
        raise _no_context_manager(resources, f"it returned {type(opened).__name__}")
    return opened


def _no_context_manager(resources: Callable[..., object], found: str) -> SettingsError:
    return SettingsError(
        f"resources={name_of(resources)} was refused ({found}): expected a function of the app that returns an async "
        "context manager; write an 'async def' that yields once, and decorate it with @contextlib.asynccontextmanager"
    )


def _with_overrides(settings: "Settings", overrides: Mapping[str, object]) -> "Settings":
    return settings.replace(**overrides) if overrides else settings


class _NoProducer:
    """Stands in for the producer of an app that was started without one."""

    trouble: str | None = None

    async def publish(self, message: Message) -> int:
        raise StateError(f"nothing can be published to topic {message.topic!r}: the app was started without a producer")

    async def close(self) -> None:
        """Do nothing: no connection was opened."""


def _no_side_topics() -> SideTopics:
    raise StateError("nothing can be parked: the app was started without a reader of side topics")


def _reason_of(failed: asyncio.Future[None]) -> str | None:
    """Return why an app has failed, in its own words."""
    error = failed.exception()
    return None if error is None else message_of(error)


def _stop_server(_: asyncio.Future[None]) -> None:
    """Send SIGTERM to this process, as an operator would: every server handles it as a graceful shutdown."""
    if signal.getsignal(signal.SIGTERM) in {signal.SIG_DFL, None}:
        # SIGTERM would kill the process with requests in flight: in a test, or if a thread runs the server.
        logger.error("the server is not stopped: nothing in this process handles SIGTERM")
        return
    logger.error("the app has failed: stopping the server (SIGTERM)")
    os.kill(os.getpid(), signal.SIGTERM)
