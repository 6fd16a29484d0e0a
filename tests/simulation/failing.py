"""Worlds with exhausted attempts: the effect of each policy, checked after every step."""

import asyncio
import contextlib
from typing import Any

from aioshard import CircuitBreaker, Context, DeadLetter, Growing, Park, ParkLater, Record, Retry
from aioshard.core.options import OnFailure
from aioshard.errors import StateError, TransportError
from aioshard.records import TopicPartition
from aioshard.serde.side_records import ParkedRecord, Removed, StorageKey, read_dead_letter, read_parked, release
from tests.simulation.world import GROUP, TOPIC, Process, World

SIDE = "side"
TIMEOUT = 1.5

POLICIES: dict[str, OnFailure] = {
    "halt": "halt",
    "skip": "skip",
    "dead letter": DeadLetter(SIDE, breaker=None),
    "breaker": DeadLetter(SIDE, breaker=CircuitBreaker(failure_rate=0.2, window=10, minimum=2)),
    "park": Park(SIDE, delay=1.0),
    "park for good": Park(SIDE, delay=0.5, attempts=1),
    "park later": Park(SIDE, delay=Growing(0.3, factor=3.0, maximum=3.0)),
}


class FailingWorld(World):
    """A world whose handlers have two attempts, time out, and continue as their policy says."""

    def __init__(self, seed: int, policy: str, **options: Any) -> None:
        super().__init__(seed, **options)
        self.policy = policy
        self.failed: set[tuple[TopicPartition, int]] = set()
        self.side_records: dict[StorageKey, int] = {}
        """Parked records: their key in the side topic, and their offset."""
        self.ever_sent: set[tuple[TopicPartition, int]] = set()
        """Every record that was ever in the side topic."""
        self._read: dict[int, int] = {}

    def consume_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "retry": Retry(attempts=2, initial=0.05, maximum=1.0),
            "on_failure": POLICIES[self.policy],
            "timeout": TIMEOUT,
        }
        if "concurrency" in self.shards:
            options["concurrency"] = self.rng.choice([2, 4, 16])  # failing keys hold a share of them
        return options

    async def handle(self, process: Process, record: Record, context: Context) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            await super().handle(process, record, context)
        except BaseException as error:
            if isinstance(error, Exception) or clock() - began >= TIMEOUT:
                self.failed.add((record.topic_partition, record.offset))
            if isinstance(error, Exception):
                raise self.failure_for(error) from error
            raise

    def failure_for(self, error: Exception) -> Exception:
        """Return the exception of a failed run: the handler may choose when the record runs again."""
        if self.policy != "park later" or self.rng.random() < 0.3:
            return error
        return ParkLater(self.rng.choice([0.0, 0.3, 2.5]))

    # Invariants -------------------------------------------------------------------------

    def read_side(self) -> None:
        """Remember the new records of the side topic."""
        if SIDE not in self.broker.topics():
            return
        for partition in range(self.broker.topics()[SIDE]):
            log = self.broker.log(SIDE, partition)
            begin = self._read.get(partition, 0)
            if log.end > begin:
                for record in log.read(begin, log.end):
                    self._note(record)
                self._read[partition] = log.end

    def _note(self, record: Record) -> None:
        letter = read_dead_letter(record)
        if letter is not None:
            self.ever_sent.add((letter.original.topic_partition, letter.original.offset))
            return
        match read_parked(record):
            case ParkedRecord() as parked:
                self.side_records[parked.storage_key] = record.offset
                self.ever_sent.add((parked.original.topic_partition, parked.original.offset))
            case Removed(gone):
                self.side_records.pop(gone, None)

    def is_terminal(self, topic_partition: TopicPartition, offset: int) -> bool:
        """Not processed, and never to be processed."""
        record_id = (topic_partition, offset)
        if self.policy == "skip":
            return record_id in self.failed
        if self.policy in {"dead letter", "breaker"}:
            self.read_side()
            return record_id in self.ever_sent
        return False

    def runs_again(self, topic_partition: TopicPartition, offset: int) -> bool:
        return self.policy.startswith("park") and self.may_be_passed(topic_partition, offset)

    def may_be_passed(self, topic_partition: TopicPartition, offset: int) -> bool:
        if self.policy.startswith("park"):
            self.read_side()
            return (topic_partition, offset) in self.ever_sent
        return self.is_terminal(topic_partition, offset)

    # Events -----------------------------------------------------------------------------

    async def something_happens(self) -> None:
        match self.rng.randrange(12):
            case 0:
                error = self.rng.choice([TransportError("the side topic says no"), None])
                self.broker.fail_publishes(SIDE, error, stored=self.rng.random() < 0.5)
            case 1 if self.living:
                self._pause_or_resume(self.rng.choice(self.living))
            case 2 if self.policy.startswith("park"):
                self._request_releases()
            case 3 if self.policy.startswith("park"):
                self.read_side()
                if SIDE in self.broker.topics():
                    self.broker.log(SIDE, self.rng.randrange(self.broker.topics()[SIDE])).compact()
            case _:
                await super().something_happens()

    def _pause_or_resume(self, process: Process) -> None:
        partition = self.rng.randrange(3)
        act = self.rng.choice([process.app.pause, process.app.resume])
        with contextlib.suppress(StateError):  # it does not run, or has no such partition
            act(TOPIC, partition)

    def _request_releases(self) -> None:
        self.read_side()
        for storage_key in sorted(self.side_records):
            if self.rng.random() < 0.5:
                message = release(SIDE, storage_key.coordinates)
                self.broker.publish(SIDE, message.value, key=message.key, partition=message.partition)

    async def calm_down(self) -> None:
        self.broker.fail_publishes(SIDE, None)
        await super().calm_down()

    def release_all(self) -> None:
        """An operator resumes what is paused, retries what is halted, and releases what is parked."""
        for process in self.living:
            engine = process.engine
            if engine is None:
                continue
            for name in list(engine.pauses):
                assert isinstance(name, TopicPartition)
                process.app.resume(name.topic, name.partition)
            for handler in engine.handlers:
                for shards in handler.sharder.shards:
                    for delivery in shards.halted:
                        process.app.retry_now(TOPIC, delivery.record.partition, delivery.record.offset)
        if self.policy == "park for good":
            self._request_releases()

    @property
    def left_parked(self) -> list[StorageKey]:
        """Return the records that still have to leave the side topic, sorted; those without a leader cannot."""
        self.read_side()
        if not self.policy.startswith("park"):
            return []
        return sorted(
            storage_key
            for storage_key in self.side_records
            if TopicPartition(*storage_key.coordinates[:2]) not in self.broker.leaderless
        )

    def finished(self) -> bool:
        return super().finished() and not self.left_parked

    def describe(self) -> str:
        lines = [super().describe()]
        for storage_key in self.left_parked:
            stored_in = TopicPartition(SIDE, storage_key.coordinates.partition)
            stored_at = self.side_records[storage_key]
            (record,) = self.broker.log(*stored_in).read(stored_at, stored_at + 1)
            parked = read_parked(record)
            assert isinstance(parked, ParkedRecord)
            original = parked.original
            done = original.offset in self.done[original.topic_partition]
            lines.append(
                f"{storage_key} is left in {stored_in} at {stored_at}: key {original.key!r}, due {parked.due}, retries "
                f"{parked.retries}, {'done' if done else 'not done'}; the partition is that of "
                f"{self.broker.group(GROUP).owner(original.topic_partition)}, {self._known_of(storage_key)}"
            )
        return "\n".join(lines)

    def _known_of(self, storage_key: StorageKey) -> str:
        """Return the view of the living processes."""
        lots = [
            (process, lot)
            for process in self.living
            if process.engine is not None
            for handler in process.engine.handlers
            if handler.parking is not None
            for lot in handler.parking.partitions
            if lot.source.topic_partition == (storage_key.coordinates.topic, storage_key.coordinates.partition)
        ]
        known = [
            f"process {process.number} (generation {lot.generation}) knows of that of generation {entry.generation}"
            for process, lot in lots
            if (entry := lot.keys.get(storage_key.coordinates.offset)) is not None
        ]
        return (
            ", ".join(known) or f"and no process of {[process.number for process, _ in lots]} that has it knows of it"
        )
