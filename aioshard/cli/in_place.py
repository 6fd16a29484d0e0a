"""Dead letters processed in this process, by the handlers of an app that consumes nothing meanwhile."""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

import click

from aioshard.app import App
from aioshard.cli.letters import Letter, Outcome
from aioshard.core.recourse import DeadLetter
from aioshard.engine.batches.delivery_batch import DeliveryBatch
from aioshard.engine.epoch import Delivery
from aioshard.engine.failing.recourse import Publish
from aioshard.engine.handler import HandlerSpec
from aioshard.errors import AioshardError, BatchError
from aioshard.handlers import Registration
from aioshard.kafka.producer import KafkaProducer
from aioshard.ports import Message, Producer
from aioshard.records import Record
from aioshard.serde.side_records import Coordinates, read_dead_letter
from aioshard.testing import InMemoryBroker, InMemorySideTopics
from aioshard.testing.transport import InMemoryTransport

__all__ = ["SwallowedError", "ThroughHandlers", "WaitsBehindError"]

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
        producer = _CatchingProducer(KafkaProducer(app.settings), run)
        transport = functools.partial(InMemoryTransport, broker, app.group_id, isolation_level="read_committed")
        with _adapted(app, run):
            async with app.started(transport, lambda: producer, lambda: InMemorySideTopics(broker)):
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
        if any((spec.name, key) in self._blocked for record in records if (key := _key(spec, record)) is not None):
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

    def failed(self, message: Message) -> None:
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
            if spec.takes(record.topic) and (key := _key(spec, record)) is not None:
                self._blocked.add((spec.name, key))
        self._outcome.failed[at] = why
        self._end(at)

    def _end(self, at: Coordinates) -> None:
        if at not in self._left:
            return
        self._left.discard(at)
        if at not in self._outcome.failed:
            self._outcome.done.append(self._letters[at])
        if not self._left:
            self._all_ended.set()


def _key(spec: HandlerSpec, record: Record) -> Hashable:
    """The shard key of a record; None where it asks for no order, or its sharding function fails."""
    try:
        key = spec.shard_key(record)
        hash(key)
    except Exception:  # noqa: BLE001 - the user's function; its failure is that of the record
        return None
    return key


class _Guarded:
    """A `Registration` in all but one: a `_Run` watches the attempts of its handler."""

    def __init__(self, registration: Registration, run: _Run) -> None:
        self._registration = registration
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registration, name)

    def spec(self, state: Callable[[], Any], publish: Publish) -> HandlerSpec:
        """As `Registration.spec`."""
        spec = self._registration.spec(state, publish)
        run = self._run
        given_up: Any = spec.retry.give_up_on  # one class is taken as well as several
        retry = dataclasses.replace(
            spec.retry, give_up_on=(*(given_up if isinstance(given_up, tuple) else (given_up,)), WaitsBehindError)
        )

        def invoke(delivery: Delivery) -> Awaitable[object]:
            return run.attempt(spec, [delivery.record], functools.partial(_attempt_of(spec), delivery))

        guarded = spec._replace(
            retry=retry, on_failure=DeadLetter(_CAUGHT, budget=None), call=None, invoke=invoke, batched=None
        )
        batched = spec.batched
        if batched is not None:

            def invoke_batch(batch: DeliveryBatch) -> Awaitable[object]:
                records = [delivery.record for delivery in batch.deliveries]
                return run.attempt(spec, records, functools.partial(batched.invoke, batch))

            guarded = guarded._replace(invoke=None, batched=batched._replace(invoke=invoke_batch))
        run.specs.append(guarded)
        return guarded


def _attempt_of(spec: HandlerSpec) -> Callable[[Delivery], Awaitable[object]]:
    """What runs one attempt of a handler that takes single records."""
    call, invoke = spec.call, spec.invoke
    if call is not None:
        return lambda delivery: call(delivery.record)
    assert invoke is not None  # noqa: S101 - else it takes batches
    return invoke


class _CatchingProducer:
    """Publishes what handlers send, and hands what has failed to a `_Run`."""

    def __init__(self, producer: Producer, run: _Run) -> None:
        self._producer = producer
        self._run = run

    @property
    def trouble(self) -> str | None:
        """See `Producer.trouble`."""
        return self._producer.trouble

    async def publish(self, message: Message) -> int:
        """See `Producer.publish`."""
        if message.topic == _CAUGHT:
            self._run.failed(message)
            return 0
        return await self._producer.publish(message)

    async def close(self) -> None:
        """See `Producer.close`."""
        await self._producer.close()


@contextlib.contextmanager
def _adapted(app: App, run: _Run) -> Iterator[None]:
    """Let *run* watch the handlers of an app, which then begins at the earliest record."""
    reset, registrations = app.settings.auto_offset_reset, app._registrations  # noqa: SLF001 - one command's business
    guarded: list[Any] = [_Guarded(registration, run) for registration in registrations]
    app.configure(auto_offset_reset="earliest")
    app._registrations = guarded  # noqa: SLF001
    try:
        yield
    finally:
        app._registrations = registrations  # noqa: SLF001
        app.configure(auto_offset_reset=reset)
