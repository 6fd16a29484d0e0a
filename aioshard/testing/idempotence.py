"""Check that handlers are idempotent: records that run again after a crash have the same effects as a single run."""

import asyncio
import copy
import functools
import inspect
import itertools
import pprint
import textwrap
import types
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import anyio

from aioshard.app import App
from aioshard.engine.handler import Handler
from aioshard.engine.stack import waiting_place
from aioshard.errors import ClientLostError
from aioshard.kafka.memory.broker import InMemoryBroker
from aioshard.records import Record
from aioshard.serde.side_records import Coordinates
from aioshard.testing.client import TestClient, changed_settings

T = TypeVar("T")

_SPEED = 100.0
"""Divides the delays of retries."""
_COMMIT_INTERVAL = 1e-6
"""Tiny, because each of hundreds of runs waits for a commit."""


class Interruption:
    """Suspends the next run of a handler at its await number *number* until the worker cancels it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.place: str | None = None
        """Where the run was interrupted; None until then."""
        self.over = asyncio.Event()
        """Set once the run has ended: the worker cancels an interrupted one because its client is gone."""
        self.report: Callable[[], None] | None = None
        """Set it to interrupt the next run; called then."""

    def adapt(self, handler: Handler) -> Handler:
        """Return the handler with interruptible runs; a handler in a thread or process is returned unchanged."""
        return handler.through(self._interruptible) if handler.run_in == "loop" else handler

    def _interruptible(self, attempt: Callable[[T], Awaitable[object]]) -> Callable[[T], Awaitable[object]]:
        async def run(argument: T) -> object:
            report = self.report
            self.report = None
            if report is None:
                return await attempt(argument)
            try:
                return await self._interrupted(attempt(argument), report)
            finally:
                self.over.set()

        return run

    @types.coroutine
    def _interrupted(self, run: Any, report: Callable[[], None]) -> Generator[Any, Any, Any]:
        """Step through *run* from await to await, and suspend it at the chosen one."""
        step: Callable[[], Any] = functools.partial(run.send, None)
        for number in itertools.count(1):
            try:
                waits_for = step()
            except StopIteration as end:
                return end.value
            step = functools.partial(run.send, None)
            try:
                if number == self.number:
                    self.place = waiting_place(run)
                    report()
                    try:
                        yield from asyncio.get_running_loop().create_future()  # until the worker cancels the run
                    finally:
                        if waits_for is not None:
                            waits_for.cancel()  # as the cancellation of a task does
                yield waits_for
            except BaseException as error:  # noqa: BLE001 - any error is passed to the handler
                step = functools.partial(run.throw, error)


async def assert_idempotent(
    app: App,
    history: Iterable[Record],
    *,
    reset: Callable[[], object],
    effects: Callable[[], object],
    interrupt: bool = True,
    timeout: float = 5.0,
) -> None:
    """Crash after every prefix of *history*, redeliver the uncommitted records, and compare the effects.

    The app runs on the in-memory broker as in a `TestClient`: its handlers, its `resources`, order per shard key,
    concurrency across keys. It first runs the whole history once: that is the clean run. Then, for each number of
    records that a crash may follow, and each offset that may have been committed by then, the world is reset, the app
    runs that prefix, restarts, and receives everything from the committed offset on. With *interrupt*, `async def`
    handlers are also cancelled in the middle of a record, at each of their awaits in turn, as when a run outlasts a
    rebalance.

    Keep the history short: a dozen records with a few keys show as much as a thousand, and the number of runs
    grows with the square. In `aioshard.testing.run`, waiting takes no time.

    State in the process survives a simulated crash. Keep caches and connections in `resources`, which are opened
    again after it; a set of seen records in a global variable would hide what a restart repeats.

    Args:
        app: An app that is not running. Its settings and handlers are restored afterwards.
        history: Records that the app's handlers take, those of a partition in offset order; create them with
            `InMemoryBroker.publish`, or read them from a topic. Partitions, offsets and timestamps are kept.
        reset: Restores the world to its state before the first record; called before the app starts. May be
            `async def`.
        effects: Returns the effects of the handlers on the world, as plain values that can be copied and compared
            with `==`; called after the app has stopped. May be `async def`.
        interrupt: Whether to crash in the middle of records too.
        timeout: Seconds that any run may take to process and commit its records.

    Raises:
        AssertionError: The effects differ. The message names the first prefix after which they do, the records that
            ran before and after the crash, and both effects. It is also raised if the test proves nothing: *history* is
            empty, no effects are visible, or two clean runs have different ones.
        ValueError: *history* is out of order, or contains a record that no handler takes.
        TypeError: The effects cannot be copied.
        TimeoutError: A run did not finish, for example because a handler fails or hangs.

    Example:
        >>> from aioshard import App, Record
        >>> from aioshard.testing import InMemoryBroker, assert_idempotent, run
        >>> app, paid = App("billing"), []
        >>> @app.consume("orders")
        ... async def on_order(record: Record) -> None:
        ...     paid.append(record.value)
        >>> broker = InMemoryBroker()
        >>> history = [broker.publish("orders", value, key=b"alice") for value in (b"book", b"pen")]
        >>> run(assert_idempotent(app, history, reset=paid.clear, effects=lambda: paid))
        Traceback (most recent call last):
        AssertionError: the effects differ after a crash when 1 of 2 records had run: the handler is not idempotent
          ran before:  orders/3/0 key=b'alice' value=b'book'
          ran after:   orders/3/0 key=b'alice' value=b'book'
                       orders/3/1 key=b'alice' value=b'pen'
          effects of a clean run:
            [b'book', b'pen']
          effects with the crash:
            [b'book', b'book', b'pen']
        >>> paid = set()
        >>> @app.consume("refunds")
        ... async def on_refund(record: Record) -> None:
        ...     paid.add((record.key, record.value))  # the second time changes nothing
        >>> history = [broker.publish("refunds", value, key=b"alice") for value in (b"book", b"pen")]
        >>> run(assert_idempotent(app, history, reset=lambda: paid.clear(), effects=lambda: paid))
    """
    trial = _Trial(app, tuple(history), reset, effects, timeout)
    with changed_settings(app, commit_interval=_COMMIT_INTERVAL, journal=None):
        clean = await trial.clean_effects()
        for ran in range(1, len(trial.history) + 1):
            for number in itertools.count(1) if interrupt else ():
                if not await trial.compare(clean, ran, ran - 1, Interruption(number)):
                    break
            # From the shortest repetition to the longest, so that the first failure is the smallest example.
            for committed in reversed(range(ran)):
                await trial.compare(clean, ran, committed)


class _Trial(NamedTuple):
    """The app, its history and its effects, run repeatedly from the beginning."""

    app: App
    history: Sequence[Record]
    reset: Callable[[], object]
    effects: Callable[[], object]
    timeout: float

    async def clean_effects(self) -> Any:
        """Return the effects of a run without a crash; make sure that a comparison with them proves something.

        Raises:
            AssertionError: The effects of the history are not visible, or differ from run to run.
            ValueError: The history cannot be replayed.
        """
        for record in self.history:
            if not any(handler.takes(record.topic) for handler in self.app.handlers):
                raise ValueError(
                    f"{Coordinates.of(record)} belongs to a topic that no handler of app {self.app.group_id!r} consumes"
                )
        await self._reset_world()
        untouched = await self._copied_effects()
        clean = await self._clean_run()
        if clean == untouched:
            raise AssertionError(
                "the history has no visible effects: it is empty, the handlers change nothing, or effects() does not "
                f"see what the handlers do\n  effects:\n{_shown(clean)}"
            )
        again = await self._clean_run()
        if again != clean:
            raise AssertionError(
                "two clean runs have different effects: reset() does not restore everything, or the effects contain "
                "times, random values, or the order in which records of different keys ran\n"
                f"  effects of the first run:\n{_shown(clean)}\n  effects of the second run:\n{_shown(again)}"
            )
        return clean

    async def _clean_run(self) -> Any:
        await self._run_app(await self._reset_world(), self.history, "in the run without a crash")
        return await self._copied_effects()

    async def compare(self, clean: Any, ran: int, committed: int, interruption: Interruption | None = None) -> bool:
        """Crash and restart, and compare the final effects with those of a clean run.

        Args:
            clean: Effects of a clean run.
            ran: Number of records that start before the crash.
            committed: Number of records that are committed before the crash.
            interruption: Where to crash in the middle of the last record; by default all records end before the crash.

        Returns:
            Whether the app crashed: False if the record ended before the chosen await.
        """
        broker = await self._reset_world()
        crash = f"a crash after {ran} of {len(self.history)} records"
        await self._run_app(broker, self.history[:ran], f"before {crash}", interruption)
        if interruption is not None and interruption.place is None:
            return False
        # Stopping the app committed the completed records; undo that, because the crash came before.
        broker.group(self.app.group_id).commit_from_outside(
            {record.topic_partition: record.offset for record in reversed(self.history[committed:])}
        )
        await self._run_app(broker, self.history[ran:], f"after {crash}")
        effects = await self._copied_effects()
        if effects != clean:
            raise AssertionError(self._describe_difference(ran, committed, interruption, clean, effects))
        return True

    async def _run_app(
        self,
        broker: InMemoryBroker,
        records: Sequence[Record],
        when: str,
        interruption: Interruption | None = None,
    ) -> None:
        """Run the app once, delivering these records in addition to the uncommitted ones."""
        try:
            async with TestClient(
                self.app,
                broker=broker,
                speed=_SPEED,
                adapt=None if interruption is None else interruption.adapt,
            ) as client:
                if interruption is None:
                    broker.restore(records)
                    await client.settle(self.timeout)
                else:
                    await self._interrupt_last(client, records, interruption)
        except Exception as error:
            error.add_note(f"this was {when}")
            raise

    async def _interrupt_last(self, client: TestClient, records: Sequence[Record], interruption: Interruption) -> None:
        client.broker.restore(records[:-1])
        await client.settle(self.timeout)
        with anyio.CancelScope() as settling:
            interruption.report = settling.cancel
            client.broker.restore(records[-1:])
            await client.settle(self.timeout)
        if interruption.place is not None:
            client.transports[-1].kill(ClientLostError("assert_idempotent ends it in the middle of a record"))
            await interruption.over.wait()

    async def _reset_world(self) -> InMemoryBroker:
        """Reset the effects, and return a broker without records."""
        broker = InMemoryBroker()
        for topic in {record.topic for record in self.history}:
            broker.create_topic(topic, 1 + max(record.partition for record in self.history if record.topic == topic))
        await _awaited(self.reset())
        return broker

    async def _copied_effects(self) -> Any:
        """Copy the effects: the next run may change the returned object."""
        return copy.deepcopy(await _awaited(self.effects()))

    def _describe_difference(
        self, ran: int, committed: int, interruption: Interruption | None, clean: Any, effects: Any
    ) -> str:
        if interruption is None:
            when = f"when {ran} of {len(self.history)} records had run"
            before = self.history[:ran]
            interrupted = ""
        else:
            when = f"in the middle of record {ran} of {len(self.history)}"
            before = self.history[: ran - 1]
            interrupted = (
                f"  interrupted: {_listed(self.history[ran - 1 : ran])}\n"
                f"    at await number {interruption.number}, {interruption.place}\n"
            )
        return (
            f"the effects differ after a crash {when}: the handler is not idempotent\n"
            f"  ran before:  {_listed(before)}\n"
            f"{interrupted}"
            f"  ran after:   {_listed(self.history[committed:])}\n"
            f"  effects of a clean run:\n{_shown(clean)}\n"
            f"  effects with the crash:\n{_shown(effects)}"
        )


async def _awaited(result: object) -> Any:
    return await result if inspect.isawaitable(result) else result


def _listed(records: Sequence[Record]) -> str:
    """Format one line per record; a long value is cut off."""
    lines = [f"{Coordinates.of(record)} key={record.key!r} value={record.value!r:.80}" for record in records]
    return ("\n" + " " * 15).join(lines) or "nothing"


def _shown(effects: Any) -> str:
    return textwrap.indent(pprint.pformat(effects, width=100), "    ")
