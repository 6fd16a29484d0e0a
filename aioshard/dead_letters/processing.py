"""Runs the handlers of an app on dead letters, in this process."""

import asyncio
import functools
from collections.abc import Sequence

from aioshard.app import App
from aioshard.core.sharding import identity
from aioshard.dead_letters.ledger import Ledger
from aioshard.dead_letters.results import Chunk, WorkItem, positions_of
from aioshard.engine.control import halted_of
from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import Adapt, Completed
from aioshard.engine.tasks import finish
from aioshard.errors import HaltedError, HandlerError
from aioshard.kafka.memory.broker import InMemoryBroker
from aioshard.kafka.memory.side_topics import InMemorySideTopics
from aioshard.kafka.memory.transport import InMemoryTransport
from aioshard.kafka.producer import KafkaProducer
from aioshard.ports import ProducerFactory
from aioshard.records import Record, counted
from aioshard.serde.side_records import Coordinates

_SHARES = 100
"""A partition with a halted record may hold one share of the bounds of the buffer."""


class RunHandlers:
    """Runs the app's handlers on dead letters in this process. Used by one run.

    The app is the real one, with its retries, timeouts, batches, limits and resources, and its messages are
    published. Only its input comes from here, and a record that fails again stays a dead letter.

    Invariants:
        * Dead letters of one shard key run in offset order; after a failure, the later ones do not run.
    """

    name = "process"
    verb = "processed"
    most_records = 10_000
    most_bytes = 64 * 1024 * 1024

    def __init__(self, app: App, stop: asyncio.Event) -> None:
        """Begin a run, which changes settings of *app*: it starts at the earliest record, and without a journal.

        Args:
            app: The app, not running.
            stop: Ends the handlers early, as `App.stop` does: those that run may finish.
        """
        self.app = app
        self._stop = stop
        self._blocked: set[object] = set()
        """Handlers and shard keys of failed records."""

    async def apply(self, chunk: Chunk, ledger: Ledger) -> None:
        """Process the dead letters of a chunk.

        Raises:
            HandlerError: The app has no handler for a dead letter.
            AioshardError: The app cannot start or continue.
        """
        for item in chunk.items:
            shard_of(self.app, item)
        self._configure()
        for items in distinct(chunk.items):
            if not self._stop.is_set():
                await self._process(items, chunk, ledger)

    def _configure(self) -> None:
        # A failed record must not keep the others of its partition from being read. Exactly-once processing would write
        # the messages of handlers into the input, which is in memory.
        self.app.configure(
            auto_offset_reset="earliest",
            journal=None,
            processing_guarantee="at_least_once",
            max_buffered_records=_SHARES * self.most_records,
            max_buffered_bytes=_SHARES * self.most_bytes,
        )

    async def _process(self, items: Sequence[WorkItem], chunk: Chunk, ledger: Ledger) -> None:
        """Process items of a chunk that are records at different positions."""
        keys = {item.dead_letter.source: shard_of(self.app, item) for item in items}
        remaining = {item.dead_letter.source: item for item in items}
        runnable = [item.record for item in items if keys[item.dead_letter.source] not in self._blocked]
        done: list[WorkItem] = []

        def completed(delivery: Delivery) -> None:
            done.append(remaining.pop(Coordinates.of(delivery.record)))

        try:
            if runnable:
                halted = await run_in_memory(
                    self.app,
                    runnable,
                    make_producer=lambda: KafkaProducer(self.app.settings),
                    adapt=lambda handler: handler.for_history()._replace(on_failure="halt", shards=None),
                    completed=completed,
                    stop=self._stop,
                )
                failed = {Coordinates.of(delivery.record): delivery for delivery in halted}
                for source, delivery in sorted(failed.items()):
                    self._blocked.add(keys[source])
                    chunk.fail(remaining.pop(source), f"{delivery.failure} ({counted(delivery.failures, 'attempt')})")
            if not self._stop.is_set():
                for item in remaining.values():
                    chunk.fail(item, "an older dead letter of its key failed")
        finally:
            # Even if interrupted: otherwise the next run would process these again.
            await finish(_store(done, chunk, ledger), "store the progress")


async def _store(done: Sequence[WorkItem], chunk: Chunk, ledger: Ledger) -> None:
    await ledger.store(positions_of(done))
    chunk.finish(done)


async def run_in_memory(
    app: App,
    records: Sequence[Record],
    *,
    make_producer: ProducerFactory,
    adapt: Adapt,
    completed: Completed,
    stop: asyncio.Event,
) -> Sequence[Delivery]:
    """Run the handlers of an app on records at different positions, until they are complete or wait behind halted ones.

    Args:
        app: The app, not running.
        records: Its only input.
        make_producer: Creates the producer of the handlers.
        adapt: Replaces each handler.
        completed: Called with each complete delivery.
        stop: Ends the run early: handlers that run may finish.

    Returns:
        The halted deliveries.
    """
    broker = InMemoryBroker(partitions=max(record.partition for record in records) + 1)
    broker.restore(records)
    async with app.started(
        functools.partial(InMemoryTransport, broker, app.group_id, isolation_level="read_committed"),
        make_producer,
        lambda: InMemorySideTopics(broker),
        adapt=adapt,
        observe=lambda _: completed,
    ):
        stopping = asyncio.create_task(_stop_when(stop, app), name="stop the run when asked to")
        try:
            await app.serve(until_caught_up=True)
        except HaltedError:
            pass
        finally:
            stopping.cancel()
        return halted_of(app.running_engine())


async def _stop_when(stop: asyncio.Event, app: App) -> None:
    await stop.wait()
    app.stop()


def distinct(items: Sequence[WorkItem]) -> list[list[WorkItem]]:
    """Split dead letters into groups, each with at most one of a position.

    A topic that was deleted and created again has had several records at a position.
    """
    groups: list[dict[Coordinates, WorkItem]] = []
    for item in items:
        for group in groups:
            if item.dead_letter.source not in group:
                group[item.dead_letter.source] = item
                break
        else:
            groups.append({item.dead_letter.source: item})
    return [list(group.values()) for group in groups]


def shard_of(app: App, item: WorkItem) -> object:
    """Return the handler and the shard key of a dead letter; its record if it has none.

    Raises:
        HandlerError: The app has no handler for it, or it was edited into a message for another topic.
    """
    record = item.record
    source = item.dead_letter.source
    if record.topic != source.topic or record.partition != source.partition:
        raise HandlerError(
            f"the transform returned a message for {record.topic}/{record.partition} instead of {source}: handlers run "
            "only records at their own position; send it back instead"
        )
    for handler in app.handlers:
        if handler.takes(record.topic):
            key = identity(handler.shard_key, record)
            return Coordinates.of(record) if key is None else (handler.name, key)
    raise HandlerError(
        f"the app has no handler for topic {record.topic!r}: exclude its dead letters with a filter, such as "
        "--topic or --handler"
    )
