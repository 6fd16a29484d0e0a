"""Faults around parked keys: operator actions, side-topic failures, pauses."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest

from aioshard import App, Batch, Park, Record, Retry
from aioshard.engine import parking
from aioshard.engine.epoch import Epoch
from aioshard.errors import NotDrainedError, SideTopicError, TransportError
from aioshard.ports import Message
from aioshard.records import TopicPartition
from aioshard.serde.side_records import (
    Coordinates,
    Failure,
    ParkedRecord,
    ReleaseRequest,
    park,
    read_parked,
    release,
    tombstone,
)
from aioshard.testing import InMemoryBroker, InMemoryProducer, InMemorySideTopics, TestClient, run
from tests.engine.live_apps import engine_of, until

PARKED = "orders.parked"
ONCE = Retry(attempts=1)


class Ledger:
    """A handler that fails for the keys that are broken, and notes what it has processed and when it ran."""

    def __init__(
        self,
        *,
        takes: float = 0.01,
        delay: float = 10.0,
        attempts: int | None = None,
        retry: Retry = ONCE,
        **settings: Any,
    ) -> None:
        self.broken = {b"k"}
        self.done: defaultdict[bytes, list[int]] = defaultdict(list)
        self.runs: list[tuple[float, int]] = []
        self.app = App("parking", commit_interval=0.1, drain_timeout=2.0, **settings)

        @self.app.consume("orders", retry=retry, on_failure=Park(PARKED, delay=delay, attempts=attempts))
        async def handle(record: Record) -> None:
            key = record.key or b""
            self.runs.append((asyncio.get_running_loop().time(), record.offset))
            await asyncio.sleep(takes)
            if key in self.broken:
                raise ConnectionError("the account is locked")
            self.done[key].append(record.offset)


def storage_keys(broker: InMemoryBroker) -> set[str]:
    """Under which keys of the side topic something is parked."""
    found: dict[str, bool] = {}
    for record in sorted(broker.records(PARKED), key=lambda r: (r.partition, r.offset)):
        if not (record.key or b"").startswith(b"release"):
            found[(record.key or b"").decode()] = isinstance(read_parked(record), ParkedRecord)
    return {storage_key for storage_key, there in found.items() if there}


def drop(broker: InMemoryBroker, offset: int) -> None:
    """As an operator does it."""
    (storage_key,) = [
        parked.storage_key
        for record in broker.records(PARKED)
        if isinstance(parked := read_parked(record), ParkedRecord) and parked.coordinates.offset == offset
    ][-1:]
    message = tombstone(PARKED, storage_key)
    broker.publish(PARKED, message.value, key=message.key, partition=message.partition)


def request(broker: InMemoryBroker, offset: int, partition: int = 0) -> None:
    message = release(PARKED, Coordinates("orders", partition, offset))
    broker.publish(PARKED, message.value, key=message.key, partition=message.partition)


def test_a_record_dropped_during_its_replay_is_not_parked_again() -> None:
    ledger = Ledger(takes=3.0, delay=5.0)

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await until(lambda: len(ledger.runs) == 2)
            drop(client.broker, 0)
            await asyncio.sleep(60.0)
            assert len(ledger.runs) == 2
            assert storage_keys(client.broker) == set()
            assert sum(record.value is not None for record in client.records(PARKED)) == 1

    run(test())


class HeldFollower(InMemorySideTopics):
    """The reader that follows the side topics is late, as long as a test says."""

    may_poll = asyncio.Event()

    async def poll(self, timeout: float) -> Sequence[Record]:
        await self.may_poll.wait()
        return await super().poll(timeout)


@pytest.mark.parametrize("is_late", [False, True], ids=["seen before", "seen with"])
def test_a_record_dropped_while_a_transaction_parks_it_again_stays_dropped(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy that the transaction brings comes after the drop: the next owner would run it."""
    ledger = Ledger(delay=5.0, processing_guarantee="exactly_once")
    monkeypatch.setattr("aioshard.testing.client.InMemorySideTopics", HeldFollower)

    async def test() -> None:
        monkeypatch.setattr(HeldFollower, "may_poll", asyncio.Event())
        HeldFollower.may_poll.set()
        broker = InMemoryBroker(partitions=1)
        async with TestClient(ledger.app, broker=broker) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await until(lambda: len(storage_keys(broker)) == 1)
            committer = engine_of(ledger.app).committer
            committer._interval = 1_000.0
            await until(lambda: len(ledger.runs) == 2)
            await asyncio.sleep(1.0)
            assert len(broker.records(PARKED)) == 1, "it is parked again by a transaction that has not begun"
            if is_late:
                HeldFollower.may_poll.clear()
                await asyncio.sleep(2.0)
            drop(broker, 0)
            await asyncio.sleep(1.0)
            committer._interval = 0.01
            committer._wake()
            await until(lambda: sum(record.value is not None for record in broker.records(PARKED)) == 2)
            HeldFollower.may_poll.set()
            await until(lambda: not storage_keys(broker), timeout=60.0)
            await asyncio.sleep(60.0)
            assert storage_keys(broker) == set()
        async with TestClient(ledger.app, broker=broker):
            await asyncio.sleep(60.0)

    run(test())
    assert len(ledger.runs) == 2


def answers(broker: InMemoryBroker) -> int:
    """How many releases are answered."""
    return sum(
        read_parked(record) == ReleaseRequest(Coordinates("orders", 0, 0), answered=True)
        for record in broker.records(PARKED)
    )


@pytest.mark.parametrize("recovers", [True, False])
def test_with_exactly_once_a_release_is_answered_by_the_transaction_of_its_run(recovers: bool) -> None:
    """If the process ends before that, the next owner has to repeat the run."""
    ledger = Ledger(delay=1_000.0, processing_guarantee="exactly_once")

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await until(lambda: len(storage_keys(client.broker)) == 1)
            committer = engine_of(ledger.app).committer
            committer._interval = 1_000.0
            if recovers:
                ledger.broken.clear()
            request(client.broker, 0)
            await until(lambda: len(ledger.runs) == 2)
            await asyncio.sleep(2.0)
            assert not answers(client.broker)
            committer._interval = 0.01
            committer._wake()
            await until(lambda: bool(answers(client.broker)))
            assert len(storage_keys(client.broker)) == (0 if recovers else 1)
            assert answers(client.broker) == 1

    run(test())


def test_a_late_reader_of_the_side_topic_does_not_delay_parked_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The acknowledgment says where the copy is that is read next."""
    ledger = Ledger(delay=5.0)
    monkeypatch.setattr("aioshard.testing.client.InMemorySideTopics", HeldFollower)

    async def test() -> None:
        monkeypatch.setattr(HeldFollower, "may_poll", asyncio.Event())
        async with TestClient(ledger.app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await asyncio.sleep(21.0)
            assert len(ledger.runs) == 5
            client.broker.log(PARKED, 0).compact()
            await asyncio.sleep(5.0)
            assert len(ledger.runs) == 6
            await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle()
            ledger.broken.clear()
            await until(lambda: ledger.done[b"k"] == [0, 1], timeout=6.0)

    run(test())


def test_a_record_of_an_earlier_owner_is_parked_once_and_then_removed() -> None:
    """Under another key of the side topic it would be parked twice, and one copy would stay."""
    ledger = Ledger(delay=5.0)

    async def test() -> None:
        broker = InMemoryBroker(partitions=1)
        async with TestClient(ledger.app, broker=broker) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle()
        async with TestClient(ledger.app, broker=broker):
            await until(lambda: len(ledger.runs) == 2)
            await asyncio.sleep(1.0)
            assert storage_keys(broker) == {"orders/0/0@1"}
            ledger.broken.clear()
            await until(lambda: ledger.done[b"k"] == [0])
            await until(lambda: storage_keys(broker) == set(), timeout=5.0)

    run(test())


def test_a_record_whose_transaction_has_not_ended_does_not_keep_the_loop_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is due, and cannot be read yet."""
    ledger = Ledger(delay=5.0, processing_guarantee="exactly_once")
    waits: list[float] = []
    wait_for_at_most = anyio.move_on_after

    def counted(delay: float) -> anyio.CancelScope:
        waits.append(delay)
        return wait_for_at_most(delay)

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            await client.settle()
            engine_of(ledger.app).committer._interval = 1_000.0
            await client.publish("orders", b"", key=b"k", partition=0)
            await until(lambda: len(ledger.runs) == 1)
            with monkeypatch.context() as patched:
                patched.setattr(anyio, "move_on_after", counted)
                await asyncio.sleep(50.0)
            assert len(ledger.runs) == 1
            engine_of(ledger.app).committer._interval = 0.01

    run(test())
    assert 0 < len(waits) < 100


def test_a_record_that_cannot_be_parked_can_be_skipped() -> None:
    ledger = Ledger()

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            client.broker.fail_publishes(PARKED, TransportError("no"))
            for _ in range(2):
                await client.publish("orders", b"", key=b"k", partition=0)
            await asyncio.sleep(15.0)
            ledger.broken.clear()
            ledger.app.skip("orders", 0, 0)
            await client.settle()
            assert ledger.done[b"k"] == [1]
            assert client.committed("orders", 0) == 2

    run(test())


@pytest.mark.parametrize("generations", [(1, 0), (0, 1)], ids=["late", "in time"])
def test_a_record_stored_under_two_generations_runs_once(generations: tuple[int, int]) -> None:
    """A process that had lost the partition wrote it too, and its new owner ended before it could answer that."""
    ledger = Ledger(delay=1_000.0)
    ledger.broken.clear()

    async def test() -> None:
        broker = InMemoryBroker(partitions=1)
        broker.create_topic("orders", 1)
        broker.create_topic(PARKED, 1)
        record, *_ = [broker.publish("orders", b"", key=b"k", partition=0) for _ in range(3)]
        for generation in generations:
            failure = Failure("parking", "handle", 1, "E", "", 0.0)
            message = park(PARKED, record, failure, generation=generation, due=0.0)
            broker.publish(PARKED, message.value, key=message.key, headers=message.headers, partition=0)
        broker.group("parking").commit_from_outside({TopicPartition("orders", 0): 1})
        for _ in range(2):
            async with TestClient(ledger.app, broker=broker) as client:
                await client.settle()
                await asyncio.sleep(60.0)
                assert storage_keys(broker) == set()
            broker.log(PARKED, 0).compact()
        assert ledger.done[b"k"] == [0, 1, 2]

    run(test())


def test_exhausted_attempts_stay_exhausted_after_a_restart() -> None:
    ledger = Ledger(delay=5.0, attempts=2)

    async def test() -> None:
        broker = InMemoryBroker(partitions=1)
        for _ in range(2):
            async with TestClient(ledger.app, broker=broker) as client:
                if not ledger.runs:
                    await client.publish("orders", b"", key=b"k", partition=0)
                await client.settle()
                await asyncio.sleep(100.0)
                assert len(ledger.runs) == 1 + 2
        assert storage_keys(broker) == {"orders/0/0@1"}

    run(test())


def test_the_next_owner_performs_an_unfinished_release() -> None:
    ledger = Ledger(delay=5.0, attempts=1)

    async def test() -> None:
        broker = InMemoryBroker(partitions=1)
        async with TestClient(ledger.app, broker=broker) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await asyncio.sleep(60.0)
            assert len(ledger.runs) == 2
            ledger.app.pause("orders", 0)
            request(broker, 0)
            await asyncio.sleep(10.0)
        ledger.broken.clear()
        async with TestClient(ledger.app, broker=broker) as client:
            await until(lambda: ledger.done[b"k"] == [0])
            await until(lambda: broker.records(PARKED)[-1].key == b"release/orders/0/0")
        assert broker.records(PARKED)[-1].value is None

    run(test())


def test_a_record_waiting_to_be_parked_runs_once_its_key_is_unparked() -> None:
    ledger = Ledger(delay=1_000.0)

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle()
            client.broker.fail_publishes(PARKED, TransportError("no"))
            ledger.broken.clear()
            await client.publish("orders", b"", key=b"k", partition=0)
            await asyncio.sleep(5.0)
            assert len(ledger.runs) == 1
            drop(client.broker, 0)
            await client.settle(timeout=60.0)
            assert ledger.done[b"k"] == [1]

    run(test())


def test_parked_records_of_a_paused_partition_do_not_run() -> None:
    ledger = Ledger(delay=5.0)

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle()
            ledger.app.pause("orders", 0)
            await asyncio.sleep(20.0)
            client.group.rebalance()
            await asyncio.sleep(20.0)
            await client.revoke("orders", 0)
            await client.assign("orders", 0)
            await asyncio.sleep(20.0)
            assert len(ledger.runs) == 1
            ledger.broken.clear()
            ledger.app.resume("orders", 0)
            await until(lambda: ledger.done[b"k"] == [0], timeout=2.0)

    run(test())


def test_retries_of_parked_records_are_paused_too() -> None:
    ledger = Ledger(delay=5.0, retry=Retry(attempts=3, initial=3.0, jitter=0.0))

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle(timeout=60.0)
            await until(lambda: len(ledger.runs) == 4)
            await asyncio.sleep(1.0)
            ledger.app.pause("orders", 0)
            await asyncio.sleep(60.0)
            assert len(ledger.runs) == 4
            ledger.broken.clear()
            ledger.app.resume("orders", 0)
            await until(lambda: ledger.done[b"k"] == [0], timeout=10.0)

    run(test())


def test_a_revoke_waits_for_replays_and_none_runs_twice() -> None:
    ledger = Ledger(takes=1.0, delay=5.0)

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle()
            ledger.broken.clear()
            await until(lambda: len(ledger.runs) == 2)
            await client.revoke("orders", 0)
            assert ledger.done[b"k"] == [0]
            assert storage_keys(client.broker) == set()
            await client.assign("orders", 0)
            await asyncio.sleep(30.0)
            assert len(ledger.runs) == 2

    run(test())


def test_a_revoke_waits_until_replays_that_have_succeeded_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch succeeds at once, and its records are removed from the side topic one after the other."""
    publish = InMemoryProducer.publish

    async def slow(self: InMemoryProducer, message: Message) -> int:
        await asyncio.sleep(0.02)
        return await publish(self, message)

    monkeypatch.setattr(InMemoryProducer, "publish", slow)
    is_broken = True
    done: list[int] = []
    app = App("parking", commit_interval=0.1, drain_timeout=20.0)

    @app.consume(
        "orders",
        concurrency=1,
        batch=Batch(max_records=100),
        retry=ONCE,
        on_failure=Park(PARKED, delay=60.0),
    )
    async def handle(records: list[Record]) -> None:
        if is_broken:
            raise ConnectionError
        done.extend(record.offset for record in records)

    async def test() -> None:
        nonlocal is_broken
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            for number in range(20):
                await client.publish("orders", b"", key=str(number), partition=0)
            await client.settle(timeout=100.0)
            is_broken = False
            await until(lambda: done, look_every=0.001)
            await client.revoke("orders", 0)
            assert len(storage_keys(client.broker)) == 20 - len(done)
            await client.assign("orders", 0)
            await until(lambda: len(done) >= 20)

    run(test())
    assert sorted(done) == list(range(20))


def test_waiting_replays_are_dropped_with_their_partition() -> None:
    ledger = Ledger(delay=5.0, retry=Retry(attempts=3, initial=3.0, jitter=0.0))

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle(timeout=60.0)
            await until(lambda: len(ledger.runs) == 4)
            await asyncio.sleep(1.0)
            parking = engine_of(ledger.app).handlers[0].parking
            assert parking is not None
            await client.revoke("orders", 0)
            assert parking._side.position(TopicPartition(PARKED, 0)) == 0, "it is not followed any more"
            await asyncio.sleep(60.0)
            assert len(ledger.runs) == 4, "it is another member's now"
            ledger.broken.clear()
            await client.assign("orders", 0)
            await until(lambda: ledger.done[b"k"] == [0], timeout=30.0)
            assert app_is_empty(ledger.app)

    run(test())


def app_is_empty(app: App) -> bool:
    statistics = app.statistics()
    return statistics.buffered_records == 0 and statistics.handlers[0].shards == 0


def test_due_records_of_a_paused_partition_do_not_keep_the_loop_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(delay=5.0)
    waits: list[float] = []
    wait_for_at_most = anyio.move_on_after

    def counted(delay: float) -> anyio.CancelScope:
        waits.append(delay)
        return wait_for_at_most(delay)

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle()
            ledger.app.pause("orders", 0)
            with monkeypatch.context() as patched:
                patched.setattr(anyio, "move_on_after", counted)
                await asyncio.sleep(100.0)

    run(test())
    assert 0 < len(waits) < 20


class SlowReads(InMemorySideTopics):
    """Reads, beside following, take as long as they do when a broker is slow."""

    seconds = 5.0

    async def read(
        self, topic_partition: TopicPartition, offset: int, max_bytes: int | None = None
    ) -> Sequence[Record]:
        await asyncio.sleep(self.seconds)
        return await super().read(topic_partition, offset, max_bytes)


def test_a_key_released_during_its_fetch_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(takes=8.0, delay=10.0)
    monkeypatch.setattr("aioshard.testing.client.InMemorySideTopics", SlowReads)

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle(timeout=20.0)
            ledger.broken.clear()
            await asyncio.sleep(12.0)
            assert len(ledger.runs) == 1, "it is being fetched"
            request(client.broker, 0)
            await asyncio.sleep(60.0)
            assert ledger.done[b"k"] == [0]
            assert storage_keys(client.broker) == set()

    run(test())


def test_a_record_may_be_dropped_and_compacted_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(delay=10.0)
    monkeypatch.setattr("aioshard.testing.client.InMemorySideTopics", SlowReads)

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle(timeout=20.0)
            await asyncio.sleep(12.0)
            drop(client.broker, 0)
            client.broker.log(PARKED, 0).compact()
            await asyncio.sleep(10.0)
            assert len(ledger.runs) == 1
            parking = engine_of(ledger.app).handlers[0].parking
            assert parking is not None
            assert parking.trouble is None

    run(test())


class OneUnwritable(InMemoryProducer):
    """Of one side partition nothing is acknowledged."""

    unwritable = False

    async def publish(self, message: Message) -> int:
        if self.unwritable and (message.topic, message.partition) == (PARKED, 0):
            raise TransportError("nobody leads it")
        return await super().publish(message)


def test_an_unwritable_side_partition_does_not_delay_releases_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = Ledger(delay=1_000_000.0)
    ledger.broken = {b"k0", b"k1"}
    monkeypatch.setattr("aioshard.testing.client.InMemoryProducer", OneUnwritable)

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            for partition in (0, 1):
                await client.publish("orders", b"", key=f"k{partition}", partition=partition)
            await client.settle()
            ledger.broken.clear()
            monkeypatch.setattr(OneUnwritable, "unwritable", True)
            for offset in (0, 7):  # a record that is not parked gets an answer immediately
                request(client.broker, offset)
            await asyncio.sleep(5.0)
            engine = ledger.app._engine
            assert engine is not None
            parked = engine.handlers[0].parking
            assert parked is not None
            assert parked.trouble == "nobody leads it"
            request(client.broker, 0, partition=1)
            await until(lambda: ledger.done[b"k1"] == [0], timeout=5.0)
            monkeypatch.setattr(OneUnwritable, "unwritable", False)
            await until(lambda: storage_keys(client.broker) == set(), timeout=60.0)
            await until(lambda: parked.trouble is None, timeout=5.0)

    run(test())


def test_an_answer_that_could_not_be_written_ends_with_its_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next owner answers."""
    ledger = Ledger(delay=1_000_000.0)
    monkeypatch.setattr("aioshard.testing.client.InMemoryProducer", OneUnwritable)

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle()
            monkeypatch.setattr(OneUnwritable, "unwritable", True)
            request(client.broker, 7)
            await asyncio.sleep(5.0)
            await client.revoke("orders", 0)
            monkeypatch.setattr(OneUnwritable, "unwritable", False)
            await asyncio.sleep(5.0)
            assert client.records(PARKED)[-1].value == b"1"
            parking = engine_of(ledger.app).handlers[0].parking
            assert parking is not None
            assert parking.trouble is None

    run(test())


def test_a_side_topic_that_cannot_be_followed_is_reported_until_it_can() -> None:
    ledger = Ledger(delay=1_000_000.0)

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle()
            parking = engine_of(ledger.app).handlers[0].parking
            assert parking is not None
            client.broker.fail_fetches(PARKED, 0, TransportError("the disk is on fire"))
            await asyncio.sleep(10.0)
            assert parking.trouble == "the disk is on fire"
            client.broker.fail_fetches(PARKED, 0, None)
            await asyncio.sleep(10.0)
            assert parking.trouble is None

    run(test())


def test_a_side_topic_must_have_as_many_partitions_as_a_topic_that_has_grown() -> None:
    ledger = Ledger()

    async def test() -> None:
        async with TestClient(ledger.app, broker=InMemoryBroker(partitions=2)) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle()
            parking = engine_of(ledger.app).handlers[0].parking
            assert parking is not None
            epoch = Epoch(TopicPartition("orders", 2), 1, 0, engine_of(ledger.app).buffer)
            with pytest.raises(SideTopicError, match="has 2 partitions and needs 3"):
                await parking.restore(epoch, 3, 1)

    run(test())


def test_a_parked_record_is_released_in_its_own_partition() -> None:
    ledger = Ledger(delay=1_000_000.0)

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            for partition in (0, 1):
                await client.publish("orders", b"", key=b"k", partition=partition)
            await client.settle()
            ledger.app.release_parked("orders", 1, 0)
            await until(lambda: len(ledger.runs) == 3, timeout=1.0)
            parking = engine_of(ledger.app).handlers[0].parking
            assert parking is not None
            retries = {
                parked.topic_partition.partition: [entry.retries for entry in parked.keys]
                for parked in parking.partitions
                if parked.keys.keys
            }
            assert retries == {0: [0], 1: [1]}

    run(test())


class Meddled(InMemorySideTopics):
    """Something is written while what is parked is read, and those who follow see it before that is over."""

    meddle: Callable[[], None] | None = None

    async def read(
        self, topic_partition: TopicPartition, offset: int, max_bytes: int | None = None
    ) -> Sequence[Record]:
        found = await super().read(topic_partition, offset, max_bytes)
        if found and self.meddle is not None:
            type(self).meddle, meddle = None, self.meddle
            meddle()
            await asyncio.sleep(1.0)
        return found


def test_records_dropped_during_a_restore_stay_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioshard.testing.client.InMemorySideTopics", Meddled)

    async def test() -> None:
        broker = InMemoryBroker()
        async with TestClient(Ledger().app, broker=broker) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle()
        ledger = Ledger()
        monkeypatch.setattr(Meddled, "meddle", staticmethod(lambda: drop(broker, 0)))
        async with TestClient(ledger.app, broker=broker):
            await asyncio.sleep(60.0)
        assert Meddled.meddle is None
        assert ledger.runs == []

    run(test())


class OneUnreadable(InMemorySideTopics):
    """One partition has no leader: it takes a while until that is known."""

    unreadable = True

    async def read(
        self, topic_partition: TopicPartition, offset: int, max_bytes: int | None = None
    ) -> Sequence[Record]:
        if self.unreadable and topic_partition.partition == 0:
            await asyncio.sleep(3.0)
            raise TransportError("nobody leads it")
        return await super().read(topic_partition, offset, max_bytes)


def test_an_unreadable_side_partition_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(delay=5.0)
    ledger.broken = {f"{number}".encode() for number in range(100)}
    monkeypatch.setattr("aioshard.testing.client.InMemorySideTopics", OneUnreadable)

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            for number in range(20):
                await client.publish("orders", b"", key=f"{number}", partition=number // 10)
            await client.settle()
            ledger.broken.clear()
            await until(lambda: len(ledger.done) == 10, timeout=60.0)
            monkeypatch.setattr(OneUnreadable, "unreadable", False)
            await until(lambda: len(ledger.done) == 20, timeout=60.0)

    run(test())


def test_parking_stops_at_the_limit_of_tracked_records(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(delay=1_000.0)
    monkeypatch.setattr(parking, "_MOST_PARKED", 3)

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            for _ in range(5):
                await client.publish("orders", b"", key=b"k", partition=0)
            await asyncio.sleep(30.0)
            assert client.committed("orders", 0) == 3
            assert "release or drop some" in ledger.app.explain()
            drop(client.broker, 0)
            await until(lambda: client.committed("orders", 0) == 4)
            drop(client.broker, 1)
            await until(lambda: client.committed("orders", 0) == 5)

    run(test())


@pytest.mark.parametrize(
    "options",
    [{}, {"shards": 2}, {"batch": Batch(max_records=10)}, {"batch": Batch(max_records=10), "shards": 2}],
    ids=str,
)
def test_a_key_with_as_many_records_as_are_tracked_continues_once_its_handler_succeeds(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next record cannot be parked, and must not keep those that are parked from running again."""
    monkeypatch.setattr(parking, "_MOST_PARKED", 3)
    is_broken = True
    done: list[int] = []
    app = App("parking", commit_interval=0.1)

    async def handle(records: list[Record]) -> None:
        if is_broken:
            raise ConnectionError
        done.extend(record.offset for record in records)

    async def handle_one(record: Record) -> None:
        await handle([record])

    consume = app.consume("orders", retry=ONCE, on_failure=Park(PARKED, delay=5.0), **options)
    consume(handle if "batch" in options else handle_one)

    async def test() -> None:
        nonlocal is_broken
        async with TestClient(app) as client:
            for _ in range(8):
                await client.publish("orders", b"", key=b"k", partition=0)
            await asyncio.sleep(30.0)
            assert client.committed("orders", 0) == 3
            is_broken = False
            await client.settle(timeout=120.0)
            await until(lambda: not storage_keys(client.broker))

    run(test())
    assert done == list(range(8))


def test_a_record_that_cannot_be_parked_lets_those_of_other_partitions_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One fixed shard: as long as one parked record waits there, no other one is queued."""
    monkeypatch.setattr(parking, "_MOST_PARKED", 1)
    is_broken = True
    done: list[bytes] = []
    app = App("parking", commit_interval=0.1)

    @app.consume("orders", shards=1, retry=ONCE, on_failure=Park(PARKED, delay=5.0))
    async def handle(record: Record) -> None:
        if is_broken:
            raise ConnectionError
        done.append(record.key or b"")

    async def test() -> None:
        nonlocal is_broken
        async with TestClient(app) as client:
            for key, partition in ((b"first", 1), (b"second", 0), (b"not parked", 0)):
                await client.publish("orders", b"", key=key, partition=partition)
                await asyncio.sleep(1.0)
            is_broken = False
            await client.settle(timeout=60.0)
            await until(lambda: not storage_keys(client.broker))

    run(test())
    assert sorted(done) == [b"first", b"not parked", b"second"]


def test_a_stop_names_a_parked_record_that_succeeded_and_could_not_be_removed() -> None:
    """It stays in the side topic, so the next start runs it again."""
    ledger = Ledger(delay=5.0)

    async def test() -> None:
        async with TestClient(ledger.app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await until(lambda: bool(storage_keys(client.broker)))
            ledger.broken.clear()
            client.broker.fail_publishes(PARKED, TransportError("the topic is gone"))
            await until(lambda: ledger.done[b"k"] == [0])
            await until(lambda: "the topic is gone" in ledger.app.explain())

    with pytest.raises(NotDrainedError) as error:
        run(test())
    assert error.value.uncommitted == {}
    assert list(error.value.unrecovered) == ["orders/0/0"]
    assert "the topic is gone" in error.value.unrecovered["orders/0/0"]
