"""Parked keys stay in order, are durable, and affect no other key."""

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from aioshard import App, Park, Record, Retry
from aioshard.errors import CommitRefusedError, StartError, TransportError
from aioshard.records import TopicPartition
from aioshard.serde.side_records import (
    Coordinates,
    Failure,
    ParkedRecord,
    Removed,
    park,
    read_parked,
    release,
    tombstone,
)
from aioshard.testing import InMemoryBroker, InMemoryProducer, InMemorySideTopics, TestClient, run
from tests.engine.live_apps import until

PARKED = "orders.parked"


class Ledger:
    """Handlers that fail for the keys that are broken, and note what they have processed."""

    def __init__(self) -> None:
        self.broken: set[bytes] = set()
        self.done: defaultdict[bytes, list[int]] = defaultdict(list)
        self.runs: defaultdict[bytes, int] = defaultdict(int)
        self.running: set[bytes] = set()

    def app(self, group: str = "parking", *, delay: float = 10.0, attempts: int | None = None, **options: Any) -> App:
        app = App(group, commit_interval=0.1, drain_timeout=2.0)

        @app.consume(
            "orders",
            retry=Retry(attempts=2, initial=0.05),
            on_failure=Park(PARKED, delay=delay, attempts=attempts),
            **options,
        )
        async def handle(record: Record) -> None:
            key = record.key or b"-"
            assert key == b"-" or key not in self.running, "two of one key concurrently"
            self.running.add(key)
            self.runs[key] += 1
            try:
                await asyncio.sleep(0.01)
                if key in self.broken:
                    raise ConnectionError("the account is locked")
                self.done[key].append(record.offset)
            finally:
                self.running.discard(key)

        return app

    def in_order(self) -> bool:
        return all(offsets == sorted(set(offsets)) for key, offsets in self.done.items() if key != b"-")


def parked_now(broker: InMemoryBroker) -> dict[Coordinates, ParkedRecord]:
    found: dict[Coordinates, ParkedRecord] = {}
    for record in sorted(broker.records(PARKED), key=lambda r: (r.partition, r.offset)):
        read = read_parked(record)
        if isinstance(read, ParkedRecord):
            found[read.coordinates] = read
        elif isinstance(read, Removed):
            found.pop(read.coordinates, None)
    return found


async def publish(client: TestClient, count: int, *, keys: int = 5, partition: int = 0) -> None:
    for number in range(count):
        await client.publish("orders", str(number), key=f"k{number % keys}", partition=partition)


@pytest.mark.parametrize("options", [{}, {"shards": 3}, {"concurrency": 1}], ids=str)
def test_a_key_is_parked_with_its_followers_and_resumes_in_order(options: dict[str, Any]) -> None:
    ledger = Ledger()
    ledger.broken.add(b"k1")
    app = ledger.app(**options)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 50)
            await client.settle()
            assert client.committed("orders", 0) == 50
            assert ledger.runs[b"k1"] == 2
            assert [c.offset for c in sorted(parked_now(client.broker))] == list(range(1, 50, 5))
            assert all(len(ledger.done[f"k{n}".encode()]) == 10 for n in (0, 2, 3, 4))
            await asyncio.sleep(25.0)
            assert ledger.runs[b"k1"] == 6
            ledger.broken.clear()
            await publish(client, 50)
            await until(lambda: not parked_now(client.broker))
            await client.settle()
            assert ledger.done[b"k1"] == list(range(1, 100, 5))
            assert app.statistics().handlers[0].parked >= 10

    run(test())
    assert ledger.in_order()


def test_a_parked_key_has_its_reason_and_time() -> None:
    ledger = Ledger()
    ledger.broken.add(b"k0")
    app = ledger.app()

    async def test() -> None:
        async with TestClient(app) as client:
            sent = await client.publish("orders", None, key=b"k0", partition=2, headers=[("trace", b"7")])
            await client.settle()
            (found,) = parked_now(client.broker).values()
            assert found.original == sent
            assert (found.failure.error, found.failure.attempts, found.retries) == ("ConnectionError", 2, 0)
            await until(lambda: parked_now(client.broker)[found.coordinates].retries == 2)
            assert client.records(PARKED)[0].partition == 2

    run(test())


def test_a_key_without_attempts_left_waits_for_its_release() -> None:
    ledger = Ledger()
    ledger.broken.add(b"k0")
    app = ledger.app(delay=5.0, attempts=2)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 3, keys=1)
            await client.settle()
            await asyncio.sleep(500.0)
            assert ledger.runs[b"k0"] == 2 + 2 * 2
            ledger.broken.clear()
            producer = InMemoryProducer(client.broker)
            await producer.publish(release(PARKED, Coordinates("orders", 0, 2)))
            await until(lambda: ledger.done[b"k0"] == [0, 1, 2])
            await until(lambda: client.records(PARKED)[-1].value is None)
            await producer.close()

    run(test())


def test_a_dropped_record_is_gone_and_the_next_one_is_tried() -> None:
    ledger = Ledger()
    ledger.broken.add(b"k0")
    app = ledger.app(delay=1_000.0)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 3, keys=1)
            await client.settle()
            ledger.broken.clear()
            producer = InMemoryProducer(client.broker)
            first = parked_now(client.broker)[Coordinates("orders", 0, 0)]
            await producer.publish(tombstone(PARKED, first.storage_key))
            await until(lambda: ledger.done[b"k0"] == [1, 2])
            await producer.close()

    run(test())


def test_parked_keys_survive_a_restart_and_a_move_to_another_member() -> None:
    ledger = Ledger()
    ledger.broken.update({b"k0", b"k3"})

    async def test() -> None:
        broker = InMemoryBroker()
        async with TestClient(ledger.app(delay=30.0), broker=broker) as client:
            await publish(client, 40)
            await client.settle()
        assert len(parked_now(broker)) == 16
        broker.log(PARKED, 0).compact()
        ledger.broken.discard(b"k3")
        async with TestClient(ledger.app(delay=30.0), broker=broker) as client:
            await publish(client, 40)
            await client.settle()
            assert ledger.done[b"k3"] == []
            await until(lambda: len(ledger.done[b"k3"]) == 16)
            await client.revoke("orders", 0)
            ledger.broken.clear()
            await asyncio.sleep(100.0)
            assert ledger.done[b"k0"] == []
            await client.assign("orders", 0)
            await until(lambda: len(ledger.done[b"k0"]) == 16)

    run(test())
    assert ledger.in_order()
    assert sum(map(len, ledger.done.values())) == 80


def test_a_rebalance_in_place_keeps_parked_keys_and_waits_for_replays() -> None:
    ledger = Ledger()
    ledger.broken.add(b"k0")
    app = ledger.app(delay=3.0)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 20, keys=2)
            await client.settle()
            for round_ in range(20):
                client.group.rebalance()
                await asyncio.sleep(0.7)
                await publish(client, 2, keys=2)
                if round_ == 12:
                    ledger.broken.clear()
            await until(lambda: not parked_now(client.broker))
            await client.settle()
            assert app.statistics().replayed == 0

    run(test())
    assert ledger.in_order()
    assert sum(map(len, ledger.done.values())) == 60


def test_a_release_during_a_rebalance_is_not_lost() -> None:
    ledger = Ledger()
    ledger.broken.add(b"k0")

    async def test() -> None:
        broker = InMemoryBroker()
        async with TestClient(ledger.app(delay=10_000.0), broker=broker) as client:
            await publish(client, 4, keys=1)
            await client.settle()
            await client.revoke("orders", 0)
            ledger.broken.clear()
            producer = InMemoryProducer(broker)
            await producer.publish(release(PARKED, Coordinates("orders", 0, 0)))
            await client.assign("orders", 0)
            await until(lambda: ledger.done[b"k0"] == [0, 1, 2, 3])
            await producer.close()

    run(test())


def test_an_unwritable_park_topic_blocks_only_its_key() -> None:
    ledger = Ledger()
    ledger.broken.add(b"k0")
    app = ledger.app()

    async def test() -> None:
        async with TestClient(app) as client:
            client.broker.fail_publishes(PARKED, TransportError("no"))
            await publish(client, 20)
            await until(lambda: sum(map(len, ledger.done.values())) == 16)
            await asyncio.sleep(30.0)
            assert client.committed("orders", 0) in (0, None)
            assert "parked in orders.parked" in app.explain()
            client.broker.fail_publishes(PARKED, None)
            await client.settle(timeout=30.0)
            ledger.broken.clear()
            await until(lambda: len(ledger.done[b"k0"]) == 4)

    run(test())
    assert ledger.in_order()


def test_an_unreadable_park_topic_keeps_the_partition_closed_and_is_reported() -> None:
    ledger = Ledger()
    app = ledger.app()
    app.configure(start_timeout=None)

    async def test() -> None:
        broker = InMemoryBroker()
        broker.create_topic(PARKED)
        broker.publish(PARKED, b"noise", key=b"noise", partition=0)
        broker.fail_fetches(PARKED, 0, TransportError("the disk is on fire"))
        client = TestClient(app, broker=broker)
        broker.publish("orders", b"", key=b"k0", partition=0)
        async with client:
            await asyncio.sleep(30.0)
            assert not ledger.done
            assert "the disk is on fire" in str(app.statistics().trouble)
            broker.fail_fetches(PARKED, 0, None)
            await client.settle(timeout=60.0)

    run(test())


def test_records_parked_by_a_stale_member_do_not_run_again() -> None:
    """A process that was frozen parks a record that the new owner has processed long ago."""
    ledger = Ledger()

    async def test() -> None:
        broker = InMemoryBroker()
        async with TestClient(ledger.app(delay=5.0), broker=broker) as client:
            await publish(client, 10, keys=2)
            await client.settle()
            late = broker.records("orders", 0)[4]
            producer = InMemoryProducer(broker)
            await producer.publish(park(PARKED, late, Failure("g", "h", 1, "E", "", 0.0), generation=0, due=0.0))
            await until(lambda: not parked_now(broker))
            await asyncio.sleep(30.0)
            assert ledger.done[b"k0"] == [0, 2, 4, 6, 8]
            await producer.close()

    run(test())


def test_two_groups_do_not_share_a_park_topic() -> None:
    """The keys of the side topic do not name the group: each would overwrite what the other has parked."""
    ledger = Ledger()
    ledger.broken.add(b"k0")
    other = ledger.app("another", delay=1_000.0)
    other.configure(start_timeout=5.0)

    async def test() -> None:
        broker = InMemoryBroker()
        async with TestClient(ledger.app(delay=1_000.0), broker=broker) as client:
            await publish(client, 4, keys=1)
            await client.settle()
        with pytest.raises(StartError, match="'parking' has parked, and group 'another' would overwrite"):
            async with TestClient(other, broker=broker):
                pass

    run(test())


def test_a_redelivered_record_is_not_parked_twice() -> None:
    """A crash between the acknowledgement of the park and the commit: the record comes by itself."""
    ledger = Ledger()
    ledger.broken.add(b"k0")

    async def test() -> None:
        broker = InMemoryBroker()
        async with TestClient(ledger.app(delay=5.0), broker=broker) as client:
            await publish(client, 6, keys=1)
            await client.settle()
        broker.group("parking").commit_from_outside({TopicPartition("orders", 0): 3})
        ledger.broken.clear()
        async with TestClient(ledger.app(delay=5.0), broker=broker) as client:
            await until(lambda: not parked_now(broker))
            await client.settle()

    run(test())
    assert ledger.done[b"k0"] == [0, 1, 2, 3, 4, 5]


def test_records_without_a_key_are_parked_alone() -> None:
    ledger = Ledger()
    ledger.broken.add(b"-")
    app = ledger.app(delay=3.0)

    async def test() -> None:
        async with TestClient(app) as client:
            for _ in range(5):
                await client.publish("orders", b"", partition=0)
            await client.settle()
            assert ledger.runs[b"-"] == 10
            ledger.broken.clear()
            await until(lambda: sorted(ledger.done[b"-"]) == [0, 1, 2, 3, 4])
            await until(lambda: not parked_now(client.broker))

    run(test())


def test_two_topics_share_a_park_topic() -> None:
    app = App("parking", commit_interval=0.1)
    broken = True
    done: list[str] = []

    @app.consume("orders", "returns", retry=Retry(attempts=1), on_failure=Park(PARKED, delay=3.0))
    async def handle(record: Record) -> None:
        if broken:
            raise ValueError
        done.append(f"{record.topic}/{record.offset}")

    async def test() -> None:
        nonlocal broken
        async with TestClient(app) as client:
            for topic in ("orders", "returns"):
                for _ in range(3):
                    await client.publish(topic, b"", key=b"k", partition=1)
            await client.settle()
            client.group.rebalance()
            await asyncio.sleep(2.0)
            broken = False
            await until(lambda: len(done) == 6)
            await until(lambda: not parked_now(client.broker))

    run(test())
    assert [line for line in done if "orders" in line] == ["orders/0", "orders/1", "orders/2"]
    assert [line for line in done if "returns" in line] == ["returns/0", "returns/1", "returns/2"]


def test_many_parked_keys_resume() -> None:
    ledger = Ledger()
    app = ledger.app(delay=5.0)

    async def test() -> None:
        broker = InMemoryBroker(partitions=2)
        async with TestClient(app, broker=broker) as client:
            ledger.broken.update(f"k{number}".encode() for number in range(500))
            for number in range(1_000):
                await client.publish("orders", b"", key=f"k{number % 500}", partition=number % 2)
            await client.settle(timeout=100.0)
            assert client.committed("orders", 0) == 500
            ledger.broken.clear()
            await until(lambda: sum(map(len, ledger.done.values())) == 1_000)
            await until(lambda: not parked_now(broker))

    run(test())
    assert ledger.in_order()


def test_the_reader_of_side_topics_is_closed_with_the_app() -> None:
    ledger = Ledger()
    made: list[InMemorySideTopics] = []

    async def test() -> None:
        broker = InMemoryBroker()
        client = TestClient(ledger.app(), broker=broker)

        def make() -> InMemorySideTopics:
            made.append(InMemorySideTopics(broker))
            return made[-1]

        async with client.app.started(client._make_transport, lambda: InMemoryProducer(broker), make):
            pass

    with pytest.raises(Exception, match="auto_offset_reset"):
        run(test())
    assert made[0]._closed


def test_a_deleted_parked_record_is_named() -> None:
    """Its key waits for it and is reported (I11); dropping it lets the key resume."""
    ledger = Ledger()
    ledger.broken.add(b"k0")
    app = ledger.app(delay=5.0)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 3, keys=1)
            await client.settle()
            ledger.broken.clear()
            first = parked_now(client.broker)[Coordinates("orders", 0, 0)]
            client.broker.log(PARKED, 0).truncate_before(1)
            await asyncio.sleep(30.0)
            assert "parked record orders/0/0 is not in orders.parked/0" in app.explain()
            assert not ledger.done
            producer = InMemoryProducer(client.broker)
            await producer.publish(tombstone(PARKED, first.storage_key))
            await until(lambda: ledger.done[b"k0"] == [1, 2])
            await asyncio.sleep(5.0)
            assert "is not in orders.parked/0" not in app.explain()
            await producer.close()

    run(test())


def old_life(broker: InMemoryBroker, *offsets: int) -> None:
    """Park records in partition 0 from a time when the group had a far higher generation than now."""
    broker.create_topic("orders", 1)
    broker.create_topic(PARKED, 1)
    for _ in range(3):
        broker.publish("orders", b"", key=b"new", partition=0)
    for offset in offsets:
        record = Record("orders", 0, offset, b"old", b"", (), 0.0)
        message = park(PARKED, record, Failure("parking", "handle", 2, "E", "", 0.0), generation=900, due=0.0)
        broker.publish(PARKED, message.value, key=message.key, headers=message.headers, partition=0)


def test_records_parked_before_a_group_reset_are_replayed() -> None:
    """Brokers forget a group that was away for long, and its generations start again at 1."""

    async def test() -> None:
        broker, ledger = InMemoryBroker(partitions=1), Ledger()
        old_life(broker, 0, 1)
        broker.group("parking").commit_from_outside({TopicPartition("orders", 0): 2})
        async with TestClient(ledger.app(), broker=broker):
            await until(lambda: not parked_now(broker))
        assert ledger.done == {b"old": [0, 1], b"new": [2]}

    run(test())


def test_the_park_topic_is_unchanged_until_a_commit_proves_ownership() -> None:
    """A process that was frozen reads it too, before it learns that the group has moved on."""

    async def test() -> None:
        broker, ledger = InMemoryBroker(partitions=1), Ledger()
        old_life(broker, 0, 1)
        broker.group("parking").commit_from_outside({TopicPartition("orders", 0): 2})
        for _ in range(5):
            broker.fail_next_commit(CommitRefusedError("the generation is over"))
        app = ledger.app()

        async def live() -> None:
            async with TestClient(app, broker=broker):
                await until(lambda: not parked_now(broker))

        living = asyncio.create_task(live())
        await until(lambda: app.statistics().commit_failures == 3, look_every=0.001)
        assert ledger.runs == {}
        assert len(parked_now(broker)) == 2
        await living
        assert ledger.done[b"old"] == [0, 1]

    run(test())
