"""Worlds with batch handlers: every record must end as it would alone."""

from typing import Any

from aioshard import App, Batch, BatchContext, BatchError, Record
from aioshard.ports import record_size
from aioshard.records import TopicPartition
from tests.simulation.failing import FailingWorld
from tests.simulation.world import GROUP, SETTINGS, TOPIC, Process, World

_OVERHEAD = record_size(None, None, ())


class BatchProcess(Process):
    """One member with a handler of batches."""

    world: "BatchWorld"

    def _app(self) -> App:
        app = App(GROUP, **SETTINGS | {"auto_offset_reset": self.world.reset} | dict(self.world.settings))
        options = self.world.shards | self.world.consume_options()

        @app.consume(TOPIC, shard_by=self.world.shard_by, batch=self.world.batch, **options)
        async def handle(records: list[Record], context: BatchContext) -> None:
            await self.world.handle_batch(self, records, context)

        return app


class BatchWorld(World):
    """Batches of a size and a patience that chance decides; they fail whole, or in part."""

    def __init__(self, seed: int, *args: Any, **options: Any) -> None:
        super().__init__(seed, *args, **options)
        self.batch = Batch(
            max_records=self.rng.choice([1, 3, 8, 50]),
            linger=self.rng.choice([0, 0.01, 0.3, 1.5]),
            max_bytes=self.rng.choice([300, 2_000, 1 << 20]),
        )
        self.largest = 0

    def start_process(self) -> None:
        self._number += 1
        self.processes.append(BatchProcess(self, self._number))

    async def handle_batch(self, process: Process, records: list[Record], context: BatchContext) -> None:
        """As `World.handle`, for several records together."""
        self.runs += len(records)
        self.largest = max(self.largest, len(records))
        self._check_size(records, context)
        self._check_starts(process, records)
        running = {record.key: record for record in records if record.key is not None}
        process.running |= running
        try:
            if await self._work(process, *records) and process.alive:
                self._name_some(records)
        except BatchError as error:
            self.failed_in(list(error.errors))
            raise
        except BaseException:
            self.failed_in(records)  # a cancellation may be that of a timeout
            raise
        finally:
            for key, record in running.items():
                if process.running.get(key) is record:
                    del process.running[key]

    def failed_in(self, records: list[Record]) -> None:
        """An attempt of these has failed."""

    def _name_some(self, records: list[Record]) -> None:
        """The work is done, but for some of them, maybe."""
        failed: dict[Record, BaseException] = {}
        if not self.calm and not self.clean and self.rng.random() < 0.3:
            failed = {record: ValueError("a record that fails") for record in records if self.rng.random() < 0.3}
        for record in records:
            if record not in failed:
                self.done[record.topic_partition].add(record.offset)
        if failed:
            raise BatchError(failed)

    def _check_size(self, records: list[Record], context: BatchContext) -> None:
        size = sum(record_size(record.key, record.value, record.headers) - _OVERHEAD for record in records)
        if not 0 < len(records) <= self.batch.max_records:
            self._breach(f"a batch of {len(records)} records, of {self.batch.max_records} at most")
        if len(records) > 1 and size > self.batch.max_bytes:
            self._breach(f"a batch of {size} bytes, of {self.batch.max_bytes} at most")
        if context.attempt > 1 and len(records) > max(self.batch.max_records // 8, 1):
            self._breach(f"{len(records)} records that failed together come together again")

    def _check_starts(self, process: Process, records: list[Record]) -> None:
        """As `World._check_start`; what comes before a record in its batch need not be done."""
        before: set[tuple[TopicPartition, int]] = set()
        keys = set()
        for record in records:
            key, tp = record.key, record.topic_partition
            if key is not None:
                self._check_other_processes(process, record)
                other = process.running.get(key)
                if other is not None and key not in keys:
                    self._breach(f"I4: {record.offset} starts while {other} of its key runs in {process.number}")
                keys.add(key)
                for offset in self.of_key[tp, key]:
                    if offset >= record.offset:
                        break
                    if offset not in self.done[tp] and (tp, offset) not in before and not self.is_terminal(tp, offset):
                        self._breach(f"I4: {tp} {record.offset} starts before {offset} of its key was done")
            before.add((tp, record.offset))


class FailingBatchWorld(BatchWorld, FailingWorld):
    """As `FailingWorld`, with batches."""

    async def handle_batch(self, process: Process, records: list[Record], context: BatchContext) -> None:
        try:
            await super().handle_batch(process, records, context)
        except BatchError as error:
            raise BatchError(
                {record: self.failure_for(why) for record, why in error.errors.items() if isinstance(why, Exception)}
            ) from error
        except Exception as error:
            raise self.failure_for(error) from error

    def failed_in(self, records: list[Record]) -> None:
        self.failed.update((record.topic_partition, record.offset) for record in records)
