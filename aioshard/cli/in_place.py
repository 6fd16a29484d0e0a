"""Dead letters processed in this process, by the handlers of an app that consumes nothing meanwhile."""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import click

from aioshard.app import App
from aioshard.cli.letters import Letter, Outcome
from aioshard.core.recourse import DeadLetter
from aioshard.core.sharding import identity
from aioshard.engine.handler import HandlerSpec, records_of
from aioshard.errors import AioshardError, BatchError
from aioshard.kafka.producer import KafkaProducer
from aioshard.ports import Message
from aioshard.records import Record
from aioshard.serde.side_records import Coordinates, read_dead_letter
from aioshard.testing import InMemoryBroker, InMemorySideTopics
from aioshard.testing.transport import InMemoryTransport

__all__ = ["SwallowedError", "ThroughHandlers", "WaitsBehindError"]

T = TypeVar("T")

_CAUGHT = "aioshard.failed-in-place"
"""Topic that failed records would be sent to. None is: they are dead letters already."""
_LOOKS = 1.0
"""Seconds after which it is asked whether the app still runs."""


class WaitsBehindError(AioshardError):
    """An older dead letter of the same key has failed: this one comes after it."""

    def __init__(self) -> None:
        super().__init__("it waits behind an older dead letter of its key, which failed")


class SwallowedError(AioshardError):
    """A run was cancelled and returned all the same: nobody knows what it did."""

    def __init__(self) -> None:
        super().__init__("its handler was cancelled by its time-out, and returned instead of ending")


class ThroughHandlers:
    """Runs an app on dead letters as if they had just been read; implements `Destination`. Used by one command.

    The app is the real one, with its retries, time-outs, batches, limits and resources; what its handlers publish is
    published. Only what it reads comes from here, and what becomes of a record whose attempts are used up: it stays
    the dead letter that it is.

    Invariants:
        * Those of one shard key run in the order of their offsets; behind one that failed, none runs.
    """

    verb = "processed"
    most_records = 10_000
    most_bytes = 64 * 1024 * 1024

    def __init__(self, app: App) -> None:
        """Make a destination.

        Args:
            app: Its handlers and settings are as they were again afterwards.
        """
        self._app = app
        self._blocked: set[tuple[str, Hashable]] = set()
        """Handler and shard key of what failed, in any part."""

    async def check(self, letters: Sequence[Letter]) -> None:
        """See `Destination.check`.

        Raises:
            UsageError: A dead letter belongs to no handler of the app.
        """
        for letter in letters:
            topic = letter.original.topic
            if not any(registration.takes(topic) for registration in self._app.handlers):
                raise click.UsageError(
                    f"the app has no handler for topic {topic!r}, which the dead letter {letter.at} came from: leave "
                    "such dead letters out with --topic or --handler"
                )

    async def process(self, letters: Sequence[Letter], outcome: Outcome) -> None:
        """See `Destination.process`.

        Raises:
            AioshardError: The app could not start, or cannot go on.
        """
        run = _Run(letters, outcome, self._blocked)
        app = self._app
        broker = _filled(letters)
        transport = functools.partial(InMemoryTransport, broker, app.group_id, isolation_level="read_committed")
        with _from_the_earliest(app):
            async with app.started(
                transport,
                lambda: KafkaProducer(app.settings),
                lambda: InMemorySideTopics(broker),
                adapt=run.guarded,
            ):
                while not await run.ended(_LOOKS):
                    if app.statistics().state == "failed":
                        raise AioshardError(f"the app cannot go on: {app.statistics().trouble or 'see the log'}")


def _filled(letters: Sequence[Letter]) -> InMemoryBroker:
    """A broker that has the records at their own offsets, and nothing else."""
    broker = InMemoryBroker(partitions=1)
    partitions: dict[str, int] = {}
    for letter in letters:
        topic, partition = letter.original.topic, letter.original.partition
        partitions[topic] = max(partitions.get(topic, 1), partition + 1)
    for topic, count in partitions.items():
        broker.create_topic(topic, count)
    for letter in letters:
        broker.restore(letter.original)
    return broker


class _Run:
    """One run of the app over some dead letters: what has become of each."""

    def __init__(self, letters: Sequence[Letter], outcome: Outcome, blocked: set[tuple[str, Hashable]]) -> None:
        self._letters = {Coordinates.of(letter.original): letter for letter in letters}
        self._outcome = outcome
        self._blocked = blocked
        self._left = set(self._letters)
        self._all_ended = asyncio.Event()
        self.specs: list[HandlerSpec] = []

    async def ended(self, timeout: float) -> bool:
        """Whether every dead letter has succeeded or failed; waits for *timeout* seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._all_ended.wait()
        return not self._left

    async def attempt(self, spec: HandlerSpec, records: Sequence[Record], run: Callable[[], Awaitable[object]]) -> None:
        """One attempt of a handler at some records."""
        if any(
            (spec.name, key) in self._blocked
            for record in records
            if (key := identity(spec.shard_key, record)) is not None
        ):
            raise WaitsBehindError
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a worker is one
        try:
            await run()
        except BatchError as error:
            self._succeeded(set(map(Coordinates.of, records)), besides=set(map(Coordinates.of, error.errors)))
            raise
        if task.cancelling():
            raise SwallowedError
        self._succeeded(map(Coordinates.of, records))

    def _succeeded(self, records: Iterable[Coordinates], besides: Collection[Coordinates] = ()) -> None:
        known = set(records)
        # A handler that names what it was not given has failed altogether.
        if known.issuperset(besides):
            for at in known.difference(besides):
                self._end(at)

    def guarded(self, spec: HandlerSpec) -> HandlerSpec:
        """The same handler, its attempts watched; those records at which they are used up come to `failed`."""
        given_up: Any = spec.retry.give_up_on  # one class is taken as well as several
        retry = dataclasses.replace(
            spec.retry, give_up_on=(*(given_up if isinstance(given_up, tuple) else (given_up,)), WaitsBehindError)
        )

        def wrap(attempt: Callable[[T], Awaitable[object]]) -> Callable[[T], Awaitable[object]]:
            return lambda given: self.attempt(spec, records_of(given), functools.partial(attempt, given))

        self.specs.append(spec)
        policy = DeadLetter(_CAUGHT, budget=None)
        return spec.through(wrap)._replace(retry=retry, on_failure=policy, letters=self.failed)

    async def failed(self, message: Message) -> int:
        """The attempts at a record are used up; *message* would be its dead letter."""
        read = read_dead_letter(Record(message.topic, 0, 0, message.key, message.value, message.headers, 0.0))
        assert read is not None  # noqa: S101 - it has just been made
        record, failure = read
        at = Coordinates.of(record)
        if failure.error == WaitsBehindError.__name__:
            why = failure.message
        else:
            why = f"{failure.error}: {failure.message} ({failure.attempts} attempt(s))"
        for spec in self.specs:
            if spec.takes(record.topic) and (key := identity(spec.shard_key, record)) is not None:
                self._blocked.add((spec.name, key))
        self._outcome.failed[at] = why
        self._end(at)
        return 0

    def _end(self, at: Coordinates) -> None:
        if at not in self._left:
            return
        self._left.discard(at)
        if at not in self._outcome.failed:
            self._outcome.done.append(self._letters[at])
        if not self._left:
            self._all_ended.set()


@contextlib.contextmanager
def _from_the_earliest(app: App) -> Iterator[None]:
    """Let an app begin at the earliest record; its journal is for what it consumes."""
    before = {name: getattr(app.settings, name) for name in ("auto_offset_reset", "journal")}
    app.configure(auto_offset_reset="earliest", journal=None)
    try:
        yield
    finally:
        app.configure(**before)
