"""Runs the handlers of an app on dead letters, in this process."""

import functools
from collections.abc import Sequence

from aioshard.app import App
from aioshard.core.sharding import identity
from aioshard.dead_letters.letters import Finished, Letter
from aioshard.engine.control import halted_of
from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import Completed
from aioshard.errors import HaltedError, HandlerError
from aioshard.kafka.memory.broker import InMemoryBroker
from aioshard.kafka.memory.side_topics import InMemorySideTopics
from aioshard.kafka.memory.transport import InMemoryTransport
from aioshard.kafka.producer import KafkaProducer
from aioshard.records import Record, counted
from aioshard.serde.side_records import Coordinates

_SHARES = 100
"""A partition with a halted record may hold one share of the bounds of the buffer."""


class ThroughHandlers:
    """Runs the app's handlers on dead letters in this process. Used by one command.

    The app is the real one, with its retries, timeouts, batches, limits and resources, and its messages are
    published. Only its input comes from here, and a record that fails again stays a dead letter.

    Invariants:
        * Dead letters of one shard key run in offset order; after a failure, the later ones do not run.
    """

    verb = "processed"
    most_records = 10_000
    most_bytes = 64 * 1024 * 1024

    def __init__(self, app: App) -> None:
        """Create a destination; *app* starts at the earliest record from now on, and without a journal."""
        # A failed record must not keep the others of its partition from being read.
        app.configure(
            auto_offset_reset="earliest",
            journal=None,
            max_buffered_records=_SHARES * self.most_records,
            max_buffered_bytes=_SHARES * self.most_bytes,
        )
        self._app = app
        self._blocked: set[object] = set()
        """Handlers and shard keys of failed records."""

    async def process(self, letters: Sequence[Letter], finished: Finished) -> None:
        """Process dead letters of different records.

        Raises:
            HandlerError: The app has no handler for a dead letter.
            AioshardError: The app cannot start or continue.
        """
        keys = {letter.source: self._key(letter.original) for letter in letters}
        remaining = {letter.source: letter for letter in letters}
        runnable = [letter.original for letter in letters if keys[letter.source] not in self._blocked]

        def completed(delivery: Delivery) -> None:
            finished(remaining.pop(Coordinates.of(delivery.record)), None)

        if runnable:
            failed = {Coordinates.of(delivery.record): delivery for delivery in await self._run(runnable, completed)}
            for source, delivery in sorted(failed.items()):
                self._blocked.add(keys[source])
                finished(remaining.pop(source), f"{delivery.failure} ({counted(delivery.failures, 'attempt')})")
        for letter in remaining.values():
            finished(letter, "an older dead letter of its key failed")

    async def _run(self, records: Sequence[Record], completed: Completed) -> Sequence[Delivery]:
        """Run the handlers on records, and return those that failed; the later ones of their keys do not run."""
        app = self._app
        broker = InMemoryBroker(partitions=max(record.partition for record in records) + 1)
        broker.restore(records)
        async with app.started(
            functools.partial(InMemoryTransport, broker, app.group_id, isolation_level="read_committed"),
            lambda: KafkaProducer(app.settings),
            lambda: InMemorySideTopics(broker),
            adapt=lambda handler: handler.for_history()._replace(on_failure="halt", shards=None),
            observe=lambda _: completed,
        ):
            try:
                await app.serve(until_caught_up=True)
            except HaltedError:
                return halted_of(app.running_engine())
            return []

    def _key(self, record: Record) -> object:
        """Return the handler and the shard key of a record; the record itself if it has none."""
        for handler in self._app.handlers:
            if handler.takes(record.topic):
                key = identity(handler.shard_key, record)
                return Coordinates.of(record) if key is None else (handler.name, key)
        raise HandlerError(
            f"the app has no handler for topic {record.topic!r}: exclude its dead letters with a filter, such as "
            "--topic or --handler"
        )
