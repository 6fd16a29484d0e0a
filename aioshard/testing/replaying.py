"""Replays: check that records repeated after a crash have the same effects as a single run."""

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
"""Speeds up retries, so that the test need not wait for them."""
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
    """Crash after every prefix of *history*, redeliver the uncommitted records, and compare the effects.

    The app runs on the in-memory broker as in a `TestClient`: its handlers, its `resources`, order per shard key,
    concurrency across keys. It first runs the whole history once: that is the clean run. Then, for each number of
    records that a crash may follow, and each offset that may have been committed by then, the world is reset, the app
    runs that prefix, restarts, and receives everything from the committed offset on. With *interrupt*, `async def`
    handlers are also cancelled in the middle of a record, at each of their awaits in turn, as when a run outlasts a
    rebalance.

    Keep the history short: a dozen records with a few keys show as much as a thousand, and the number of runs
    grows with the square. Time is that of the event loop: in `aioshard.testing.run` none passes.

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
            ran before and after the crash, and both effects. It is also raised if the test proves nothing: no effects
            are visible, or two clean runs have different ones.
        ValueError: *history* is empty, out of order, or contains a record that no handler takes.
        TimeoutError: A run did not finish, for example because a handler fails or hangs.

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
            # From the shortest repetition to the longest, so that the first failure is the smallest.
            for again in reversed(range(ran)):
                await world.compare(_Crash(ran, again), clean)


@dataclasses.dataclass(frozen=True, slots=True)
class _Crash:
    """The state at the moment of the crash."""

    ran: int
    """Number of records started; all had ended, except the last one if `place` is set."""
    again: int
    """Number of records committed: the rest run again."""
    place: str | None = None
    """Where the last record was interrupted."""


class _World:
    """The app, its history and its effects, run repeatedly from the beginning."""

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
        """Reject a history that cannot be replayed."""
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
        """Return the effects of a run without a crash; make sure that a comparison with them proves something."""
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
        """Restart after a crash and compare the final effects."""
        # Stopping the app committed the completed records; undo that, because the crash came before.
        broker.group(self._app.group_id).commit_from_outside(self._first_offsets(crash.again))
        with _noted(f"this was after a crash after {crash.ran} of {len(self.history)} records"):
            await self._live(broker, self.history[crash.ran :])
        effects = await self._snapshot()
        if effects != clean:
            raise AssertionError(self._difference(crash, clean, effects))

    async def _live(self, broker: InMemoryBroker, records: Sequence[Record]) -> None:
        """Run the app once, delivering these records in addition to the uncommitted ones."""
        async with TestClient(self._app, broker=broker, speed=_SPEED) as client:
            _append(broker, records)
            await client.settle(self._timeout)

    async def _live_until(self, broker: InMemoryBroker, ran: int, interruption: Interruption) -> None:
        """Run the app until it is interrupted in the middle of record number *ran*, or that record completes."""
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
        """Return the offset at which each partition resumes if the records before *index* are committed."""
        offsets: dict[TopicPartition, int] = {}
        for record in self.history[index:]:
            offsets.setdefault(record.topic_partition, record.offset)
        return offsets

    async def _snapshot(self) -> Any:
        """Copy the effects: the next run may change the returned object."""
        found = await _awaited(self._effects())
        try:
            return copy.deepcopy(found)
        except Exception as error:
            message = (
                f"effects() returned {type(found).__name__}, which cannot be copied ({error}): return plain values"
            )
            raise TypeError(message) from error

    # Messages --------------------------------------------------------------------------

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
    """Commit almost immediately and write no journal: hundreds of runs would otherwise wait for the interval."""
    before = {name: getattr(app.settings, name) for name in ("commit_interval", "journal")}
    app.configure(commit_interval=_COMMIT_INTERVAL, journal=None)
    try:
        yield
    finally:
        app.configure(**before)


def _append(broker: InMemoryBroker, records: Iterable[Record]) -> None:
    """Append records at their original offsets."""
    for record in records:
        broker.restore(record)


async def _awaited(result: object) -> Any:
    return await result if inspect.isawaitable(result) else result


@contextlib.contextmanager
def _noted(note: str) -> Iterator[None]:
    """Add a note to exceptions that says in which of many runs they were raised."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def _listed(title: str, records: Sequence[Record]) -> list[str]:
    """Format one line per record, the first with the title."""
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
