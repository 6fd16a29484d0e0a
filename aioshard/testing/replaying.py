"""Replays: what a crash makes run again must leave what a single run leaves."""

import contextlib
import copy
import dataclasses
import inspect
import pprint
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from aioshard.app import App
from aioshard.errors import ClientLostError
from aioshard.records import Record, TopicPartition
from aioshard.serde.side_records import Coordinates
from aioshard.testing.broker import InMemoryBroker
from aioshard.testing.client import TestClient
from aioshard.testing.interrupting import Interruption

__all__ = ["replay_prefixes"]

_SPEED = 100.0
"""A handler that asks for another attempt need not make the test wait for it."""
_COMMIT_INTERVAL = 1e-6
_SHOWN_BYTES = 60


async def replay_prefixes(
    app: App,
    history: Iterable[Record],
    *,
    reset: Callable[[], object],
    effects: Callable[[], object],
    interrupt: bool = True,
    timeout: float = 5.0,
) -> None:
    """Crash after every prefix of *history*, deliver again what was not committed, and compare the effects.

    The app runs on the in-memory broker as it does in a `TestClient`: its handlers, its `resources`, order per
    shard key, other keys at the same time. First it runs the whole history once: that is the clean run. Then, for
    each number of records that a crash may come after and each offset that may have been committed by then, the
    world is made anew, the app runs that prefix, starts again, and is given everything from the committed offset
    on. With *interrupt*, handlers that are `async def` are also cancelled in the middle of a record, at each of
    their awaits in turn, as when a run outlasts a rebalance.

    Keep the history short: a dozen records with a few keys show what a thousand would, and the number of runs
    grows with the square. Time is that of the event loop: in `aioshard.testing.run` none passes.

    What lives in the process outlives a crash that is only played. Keep caches and connections in `resources`,
    which are opened anew after it; a set of seen records in a global variable would hide what a restart repeats.

    Args:
        app: Must not run. Its settings and handlers are as they were again afterwards.
        history: Records that the app's handlers take, those of a partition in offset order; made with
            `InMemoryBroker.publish`, or read from a topic. Partitions, offsets and timestamps are kept.
        reset: Makes the world as it was before the first record; called before the app starts. May be `async def`.
        effects: Returns what the handlers have done to the world, as plain values that can be copied and compared
            with `==`; called after the app has stopped. May be `async def`.
        interrupt: Whether to crash in the middle of records too.
        timeout: Seconds that any run may take to process and commit what it was given.

    Raises:
        AssertionError: The effects differ. The message names the first prefix after which they do, the records that
            ran before and after the crash, and both effects. Or the test proves nothing: no effects are
            visible, or two clean runs have different ones.
        ValueError: *history* is empty, out of order, or holds a record that no handler takes.
        TimeoutError: A run did not come to its end, such as when a handler fails or hangs.

    Example:
        >>> from aioshard import App, Record
        >>> from aioshard.testing import InMemoryBroker, replay_prefixes, run
        >>> app, paid = App("billing"), []
        >>> @app.consume("orders")
        ... async def on_order(record: Record) -> None:
        ...     paid.append(record.value)
        >>> broker = InMemoryBroker()
        >>> history = [broker.publish("orders", value, key=b"alice") for value in (b"book", b"pen")]
        >>> run(replay_prefixes(app, history, reset=paid.clear, effects=lambda: paid))
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
        >>> run(replay_prefixes(app, history, reset=lambda: paid.clear(), effects=lambda: paid))
    """
    world = _World(app, tuple(history), reset, effects, timeout)
    world.check()
    with _commits_at_once(app):
        clean = await world.clean_effects()
        for ran in range(1, len(world.history) + 1):
            if interrupt:
                await world.compare_interrupted(ran, clean)
            # From the shortest repetition to the longest: the first that fails shows the least.
            for again in reversed(range(ran)):
                await world.compare(_Crash(ran, again), clean)


@dataclasses.dataclass(frozen=True, slots=True)
class _Crash:
    """What had happened when the app went away."""

    ran: int
    """How many records had begun; all had ended, but for the last one where `place` says so."""
    again: int
    """How many had been committed: the rest runs again."""
    place: str | None = None
    """Where the last one was interrupted."""


class _World:
    """The app, its history and what its handlers do, again and again from the beginning."""

    def __init__(
        self,
        app: App,
        history: Sequence[Record],
        reset: Callable[[], object],
        effects: Callable[[], object],
        timeout: float,
    ) -> None:
        self.history = history
        self._app = app
        self._reset = reset
        self._effects = effects
        self._timeout = timeout

    def check(self) -> None:
        """Refuse a history that cannot be replayed."""
        if not self.history:
            message = "the history is empty: give replay_prefixes some records"
            raise ValueError(message)
        ends: dict[TopicPartition, int] = {}
        for record in self.history:
            if not any(registration.takes(record.topic) for registration in self._app.handlers):
                message = f"{Coordinates.of(record)} is of a topic that no handler of app {self._app.group_id!r} takes"
                raise ValueError(message)
            end = ends.get(record.topic_partition, 0)
            if record.offset < end:
                message = (
                    f"{Coordinates.of(record)} is out of order: the history has offset {end - 1} of its partition "
                    "before it, and a log only grows"
                )
                raise ValueError(message)
            ends[record.topic_partition] = record.offset + 1

    # Runs ------------------------------------------------------------------------------

    async def clean_effects(self) -> Any:
        """What a run without a crash leaves; makes sure that comparing with it proves something."""
        await _awaited(self._reset())
        untouched = await self._snapshot()
        clean = await self._clean_run()
        if clean == untouched:
            message = (
                "the effects of the whole history are those of none: effects() does not see what the handlers do, or "
                f"the history leaves nothing behind\n  effects:\n{_shown(clean)}"
            )
            raise AssertionError(message)
        again = await self._clean_run()
        if again != clean:
            message = (
                "two clean runs have different effects: reset() leaves something behind, or the effects hold times, "
                "chance, or the order in which records of different keys ran\n"
                f"  effects of the first run:\n{_shown(clean)}\n  effects of the second run:\n{_shown(again)}"
            )
            raise AssertionError(message)
        return clean

    async def _clean_run(self) -> Any:
        broker = self._empty_broker()
        await _awaited(self._reset())
        with _noted("this was in the run without a crash"):
            await self._live(broker, self.history)
        return await self._snapshot()

    async def compare(self, crash: _Crash, clean: Any) -> None:
        """Crash between two records."""
        broker = self._empty_broker()
        await _awaited(self._reset())
        with _noted(f"this was before a crash after {crash.ran} of {len(self.history)} records"):
            await self._live(broker, self.history[: crash.ran])
        await self._recover(broker, crash, clean)

    async def compare_interrupted(self, ran: int, clean: Any) -> None:
        """Crash in the middle of record number *ran*, at each of its awaits."""
        for number in range(1, 1_000_000):
            broker = self._empty_broker()
            await _awaited(self._reset())
            interruption = Interruption(number)
            with _noted(f"this was when record {ran} was interrupted at its await number {number}"):
                await self._live_until(broker, ran, interruption)
            if interruption.place is None:
                return
            crash = _Crash(ran, ran - 1, f"await number {number}, {interruption.place}")
            await self._recover(broker, crash, clean)

    async def _recover(self, broker: InMemoryBroker, crash: _Crash, clean: Any) -> None:
        """Start again after a crash, and compare what is there at the end."""
        # What had run was committed when the app stopped: the crash came before that.
        broker.group(self._app.group_id).commit_from_outside(self._first_offsets(crash.again))
        with _noted(f"this was after a crash after {crash.ran} of {len(self.history)} records"):
            await self._live(broker, self.history[crash.ran :])
        effects = await self._snapshot()
        if effects != clean:
            raise AssertionError(self._difference(crash, clean, effects))

    async def _live(self, broker: InMemoryBroker, records: Sequence[Record]) -> None:
        """One life of the app, in which it is given these records beside what it has not committed."""
        async with TestClient(self._app, broker=broker, speed=_SPEED) as client:
            _append(broker, records)
            await client.settle(self._timeout)

    async def _live_until(self, broker: InMemoryBroker, ran: int, interruption: Interruption) -> None:
        """One life of the app that ends in the middle of record number *ran*, unless that ends before."""
        client = TestClient(self._app, broker=broker, speed=_SPEED, adapt=interruption.stand_between)
        async with client:
            _append(broker, self.history[: ran - 1])
            await client.settle(self._timeout)
            interruption.armed = True
            _append(broker, self.history[ran - 1 : ran])
            if await interruption.comes_before(client.settle(self._timeout)):
                client.transports[-1].kill(ClientLostError("replay_prefixes ends it in the middle of a record"))
                await interruption.over.wait()

    def _empty_broker(self) -> InMemoryBroker:
        broker = InMemoryBroker()
        for topic in {record.topic for record in self.history}:
            broker.create_topic(topic, 1 + max(one.partition for one in self.history if one.topic == topic))
        return broker

    def _first_offsets(self, index: int) -> Mapping[TopicPartition, int]:
        """The offset from which each partition is read when the records before *index* are committed."""
        offsets: dict[TopicPartition, int] = {}
        for record in self.history[index:]:
            offsets.setdefault(record.topic_partition, record.offset)
        return offsets

    async def _snapshot(self) -> Any:
        """A copy: what is returned may be the very thing that the next run changes."""
        found = await _awaited(self._effects())
        try:
            return copy.deepcopy(found)
        except Exception as error:
            message = (
                f"effects() returned {type(found).__name__}, which cannot be copied ({error}): return plain values"
            )
            raise TypeError(message) from error

    # What it says ----------------------------------------------------------------------

    def _difference(self, crash: _Crash, clean: Any, effects: Any) -> str:
        total = len(self.history)
        if crash.place is None:
            lines = [f"the effects differ after a crash when {crash.ran} of {total} records had run"]
            before = self.history[: crash.ran]
        else:
            lines = [f"the effects differ after a crash in the middle of record {crash.ran} of {total}"]
            before = self.history[: crash.ran - 1]
        lines[0] += ": the handler is not idempotent"
        lines += _listed("ran before: ", before)
        if crash.place is not None:
            lines += _listed("interrupted:", self.history[crash.ran - 1 : crash.ran])
            lines.append(f"    at {crash.place}")
        lines += _listed("ran after:  ", self.history[crash.again :])
        lines += ["  effects of a clean run:", _shown(clean), "  effects with the crash:", _shown(effects)]
        return "\n".join(lines)


@contextlib.contextmanager
def _commits_at_once(app: App) -> Iterator[None]:
    """Hundreds of runs would wait for the interval otherwise, each of them, and write a journal."""
    before = {name: getattr(app.settings, name) for name in ("commit_interval", "journal")}
    app.configure(commit_interval=_COMMIT_INTERVAL, journal=None)
    try:
        yield
    finally:
        app.configure(**before)


def _append(broker: InMemoryBroker, records: Iterable[Record]) -> None:
    """Put records where they were."""
    for record in records:
        broker.restore(record)


async def _awaited(result: object) -> Any:
    return await result if inspect.isawaitable(result) else result


@contextlib.contextmanager
def _noted(note: str) -> Iterator[None]:
    """Say in which of many runs something was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def _listed(title: str, records: Sequence[Record]) -> list[str]:
    """A line for each record, the first with the title."""
    lines = [f"  {title} nothing" if not records else ""]
    for number, record in enumerate(records):
        line = f"  {title if number == 0 else ' ' * len(title)} {Coordinates.of(record)} key={record.key!r}"
        lines.append(f"{line} value={_shortened(record.value)}")
    return [line for line in lines if line]


def _shortened(value: bytes | None) -> str:
    if value is None or len(value) <= _SHOWN_BYTES:
        return repr(value)
    return f"{value[:_SHOWN_BYTES]!r}… ({len(value)} bytes)"


def _shown(effects: Any) -> str:
    return "\n".join(f"    {line}" for line in pprint.pformat(effects, width=100).splitlines())
