"""Records that a handler leaves out: only the newest waiting record of a key runs, and none that is too old."""

import asyncio
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from aioshard import App, Batch, DeadLetter, Park, Record, Retry, RetryLater
from aioshard.engine.worker import RUN_AHEAD
from aioshard.errors import HandlerError
from aioshard.kafka.memory.broker import InMemoryBroker
from aioshard.kafka.memory.transport import InMemoryTransport
from aioshard.observe import HandlerStatistics
from aioshard.serde.side_records import read_dead_letter
from aioshard.testing import TestClient, run
from tests.engine.live_apps import engine_of, until

ONCE = Retry(attempts=1)


def counts_of(app: App) -> dict[str, int]:
    """Return the outcomes of the app's only handler, without zeros."""
    (handler,) = app.statistics().handlers
    return {name: count for name, count in outcomes(handler).items() if count}


def outcomes(handler: HandlerStatistics) -> dict[str, int]:
    names = ("processed", "skipped", "dead_lettered", "parked", "superseded", "expired")
    return {name: getattr(handler, name) for name in names}


async def publish(client: TestClient, *updates: tuple[str, int], partition: int = 0) -> None:
    for key, number in updates:
        await client.publish("prices", str(number), key=key, partition=partition)


class Log:
    """The runs of a handler, in order; each waits until it may end."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, int]] = []
        self.go = asyncio.Event()

    async def run(self, record: Record) -> None:
        self.runs.append(((record.key or b"-").decode(), int(record.value or b"0")))
        await self.go.wait()

    async def until(self, count: int) -> None:
        await until(lambda: len(self.runs) == count, 30.0)


# The newest of each key --------------------------------------------------------------


def test_only_the_newest_waiting_record_of_a_key_runs() -> None:
    app = App("latest")

    async def test() -> None:
        log = Log()
        app.consume("prices", keep="latest", concurrency=4)(log.run)
        async with TestClient(app) as client:
            await publish(client, ("a", 1), ("b", 1))
            await log.until(2)
            await publish(client, ("a", 2), ("a", 3), ("b", 2), ("a", 4))
            await asyncio.sleep(0.5)
            log.go.set()
            await client.settle()
            assert client.committed("prices", 0) == 6
        assert log.runs[:2] == [("a", 1), ("b", 1)]
        assert sorted(log.runs[2:]) == [("a", 4), ("b", 2)]
        assert counts_of(app) == {"processed": 4, "superseded": 2}

    run(test())


def test_records_without_a_key_and_of_other_partitions_all_run() -> None:
    app = App("latest")

    async def test() -> None:
        log = Log()
        app.consume("prices", keep="latest", shard_by=lambda record: record.key and "same", concurrency=2)(log.run)
        async with TestClient(app) as client:
            await publish(client, ("first", 0), partition=3)
            await log.until(1)
            for partition in (0, 1):
                await publish(client, ("k", partition), partition=partition)
            for number in range(2):
                await client.publish("prices", str(number), partition=2)
            await asyncio.sleep(0.5)
            log.go.set()
            await client.settle()
        assert Counter(key for key, _ in log.runs) == {"first": 1, "k": 2, "-": 2}
        assert counts_of(app) == {"processed": 5}

    run(test())


def test_a_record_that_failed_gives_way_to_a_newer_one() -> None:
    app = App("latest")
    runs: list[int] = []

    @app.consume("prices", keep="latest", retry=Retry(attempts=5, initial=10.0, jitter=0.0))
    async def on_price(record: Record) -> None:
        runs.append(record.offset)
        if record.offset == 0:
            raise ValueError("not this one")

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, ("a", 1))
            await until(lambda: runs, 30.0)
            await publish(client, ("a", 2))
            await client.settle(60.0)
            assert client.committed("prices", 0) == 2

    run(test())
    assert runs == [0, 1], "the second attempt of the first record would be out of date"
    assert counts_of(app) == {"processed": 1, "superseded": 1}


def test_a_record_that_failed_runs_again_if_it_is_still_the_newest() -> None:
    app = App("latest")
    runs: list[int] = []

    @app.consume("prices", keep="latest")
    async def on_price(record: Record) -> None:
        runs.append(record.offset)
        if len(runs) < 3:
            raise RetryLater(1.0)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, ("a", 1))
            await client.settle()

    run(test())
    assert runs == [0, 0, 0]
    assert counts_of(app) == {"processed": 1}


def test_a_batch_has_only_the_newest_of_each_key() -> None:
    app = App("latest")
    batches: list[list[tuple[bytes | None, bytes | None]]] = []

    @app.consume("prices", keep="latest", batch=Batch(100, linger=0.2), concurrency=1)
    async def on_prices(records: list[Record]) -> None:
        batches.append([(record.key, record.value) for record in records])

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, *[(f"k{number % 5}", number) for number in range(50)])
            await client.settle()
            assert client.committed("prices", 0) == 50

    run(test())
    seen = [entry for batch in batches for entry in batch]
    newest = {(b"k%d" % (number % 5), b"%d" % number) for number in range(45, 50)}
    assert newest <= set(seen)
    assert all(len({key for key, _ in batch}) == len(batch) for batch in batches), "one record of a key in each batch"
    assert counts_of(app) == {"processed": len(seen), "superseded": 50 - len(seen)}
    assert len(seen) < 25


def test_the_newest_record_runs_after_its_partition_has_moved() -> None:
    app = App("latest")

    async def test() -> None:
        log = Log()
        app.consume("prices", keep="latest", concurrency=1)(log.run)
        async with TestClient(app) as client:
            await publish(client, ("a", 1))
            await log.until(1)
            await publish(client, ("a", 2), ("a", 3), ("b", 1))
            await asyncio.sleep(0.5)
            client.group.lose()
            log.go.set()
            await client.settle()
            assert client.committed("prices", 0) == 4
        assert dict(log.runs) == {"a": 3, "b": 1}, "the last run of each key"

    run(test())


def test_a_superseded_record_is_not_parked_with_its_key() -> None:
    app = App("latest")
    runs: list[int] = []

    @app.consume("prices", keep="latest", retry=ONCE, on_failure=Park("prices.parked", delay=5.0))
    async def on_price(record: Record) -> None:
        runs.append(record.offset)
        if len(runs) == 1:
            raise ValueError("once")

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, ("a", 1))
            await until(lambda: app.statistics().handlers[0].parked, 30.0)
            await publish(client, ("a", 2), ("a", 3))
            await until(lambda: len(runs) == 3, 30.0)
            await client.settle()

    run(test())
    assert runs == [0, 0, 2], "parked records run in order, the newest last"
    assert counts_of(app) == {"parked": 2, "superseded": 1, "processed": 2}


def test_other_tasks_run_while_many_records_are_left_out() -> None:
    app = App("latest")
    turns = 0

    async def test() -> None:
        log = Log()
        app.consume("prices", keep="latest", concurrency=1)(log.run)
        async with TestClient(app) as client:
            await publish(client, ("a", 0))
            await log.until(1)
            await publish(client, *[("a", number) for number in range(1, 2_000)])
            await asyncio.sleep(1.0)

            async def count() -> None:
                nonlocal turns
                while len(log.runs) == 1:
                    turns += 1
                    await asyncio.sleep(0)

            log.go.set()
            await count()

    run(test())
    assert counts_of(app)["superseded"] == 1_998
    assert turns >= 1_998 // RUN_AHEAD


def test_nothing_is_kept_of_records_that_have_ended() -> None:
    app = App("latest")

    async def test() -> None:
        log = Log()
        app.consume("prices", keep="latest", concurrency=1)(log.run)
        async with TestClient(app) as client:
            await publish(client, ("a", 1))
            await log.until(1)
            await publish(client, ("a", 2), ("b", 1))
            await asyncio.sleep(0.5)
            latest = engine_of(app).handlers[0].sharder._latest
            assert latest is not None
            (before,) = latest._newest
            client.group.lose()
            log.go.set()
            await client.settle()
            assert before not in latest._newest

    run(test())


# Too old -----------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [None, Batch(10, linger=0.1)], ids=["records", "batches"])
def test_a_record_that_is_too_old_is_complete_without_a_run(batch: Batch | None) -> None:
    app = App("expiring")
    runs: list[int] = []

    def record_all(argument: Any) -> None:
        records: Sequence[Record] = argument if isinstance(argument, list) else [argument]
        runs.extend(record.offset for record in records)

    async def test() -> None:
        if batch is None:

            @app.consume("prices", max_age=30.0)
            async def on_price(record: Record) -> None:
                record_all(record)
        else:

            @app.consume("prices", max_age=30.0, batch=batch)
            async def on_prices(records: list[Record]) -> None:
                record_all(records)

        client = TestClient(app)
        await client.publish("prices", "old", key="a", partition=0)
        await asyncio.sleep(20.0)
        await client.publish("prices", "young", key="a", partition=0)
        await client.publish("prices", "young", key="b", partition=0)
        await asyncio.sleep(15.0)
        async with client:
            await client.settle()
            assert client.committed("prices", 0) == 3

    run(test())
    assert sorted(runs) == [1, 2]
    assert counts_of(app) == {"processed": 2, "expired": 1}


def test_a_record_expires_while_it_waits_for_its_next_attempt() -> None:
    app = App("expiring")
    runs: list[int] = []

    @app.consume("prices", max_age=30.0, retry=Retry(attempts=100, initial=8.0, factor=1.0, jitter=0.0))
    async def on_price(record: Record) -> None:
        runs.append(record.offset)
        raise ValueError("never")

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, ("a", 1))
            await client.settle(100.0)

    run(test())
    assert runs == [0] * 4, "at 0, 8, 16 and 24 seconds"
    assert counts_of(app) == {"expired": 1}


def test_the_dead_letter_of_an_expired_record_says_why() -> None:
    app = App("expiring")

    @app.consume("prices", max_age=30.0, on_failure=DeadLetter("prices.dlt"))
    async def on_price(_: Record) -> None:
        raise AssertionError("too old")

    async def test() -> None:
        client = TestClient(app)
        for number in range(200):
            await client.publish("prices", str(number), key=f"k{number}", partition=0)
        await asyncio.sleep(40.0)
        async with client:
            await client.settle()
            letters = client.records("prices.dlt")
            failures = {getattr(read_dead_letter(letter), "failure", None) for letter in letters}
            assert len(letters) == 200
            assert {failure and failure.error for failure in failures} == {"RecordExpiredError"}
            assert not [pause for partition in app.statistics().partitions if (pause := partition.paused)]

    run(test())
    assert counts_of(app) == {"dead_lettered": 200}, "no circuit breaker opens: their handler has not failed"


def test_a_parked_record_expires_and_frees_its_key() -> None:
    app = App("expiring")
    runs: list[int] = []

    @app.consume("prices", max_age=30.0, retry=ONCE, on_failure=Park("prices.parked", delay=60.0))
    async def on_price(record: Record) -> None:
        runs.append(record.offset)
        if record.offset == 0:
            raise ValueError("poison")

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, ("a", 1))
            await client.settle()
            assert counts_of(app) == {"parked": 1}
            await asyncio.sleep(90.0)
            await publish(client, ("a", 2))
            await client.settle()
            assert client.records("prices.parked")[-1].value is None, "removed from the topic of parked records"

    run(test())
    assert runs == [0, 1]
    assert counts_of(app) == {"parked": 1, "expired": 1, "processed": 1}


def test_a_record_without_a_timestamp_never_expires() -> None:
    app = App("expiring")
    runs: list[int] = []

    @app.consume("prices", max_age=30.0)
    async def on_price(record: Record) -> None:
        runs.append(record.offset)

    async def test() -> None:
        client = TestClient(app)
        client.broker.publish("prices", b"1", key=b"a", partition=0, timestamp=-0.001)
        async with client:
            await client.settle()

    run(test())
    assert runs == [0]


def test_history_runs_whole() -> None:
    """A replay would leave out nearly everything: all of its records are old, and many are of the same key."""
    app = App("history", auto_offset_reset="earliest")
    runs: list[int] = []

    @app.consume("prices", max_age=30.0, keep="latest", concurrency=1)
    async def on_price(record: Record) -> None:
        runs.append(record.offset)
        await asyncio.sleep(0.1)

    async def test() -> None:
        broker = InMemoryBroker(partitions=1)
        for number in range(5):
            broker.publish("prices", b"%d" % number, key=b"a", timestamp=1.0)
        make_transport = functools.partial(InMemoryTransport, broker, "history", isolation_level="read_committed")
        async with app.started(make_transport, replay=True):
            await until(lambda: broker.committed("history", "prices", 0) == 5, 30.0)

    run(test())
    assert runs == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "options",
    [
        {"keep": "newest"},
        {"max_age": 0},
        {"max_age": "30"},
        {"keep": "latest", "shards": 4},
        {"keep": "latest", "shard_by": "partition"},
        {"keep": "latest", "shard_by": "record"},
    ],
    ids=["keep", "no age", "text", "fixed shards", "a partition", "no order"],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    app = App("freshness")
    with pytest.raises(HandlerError) as refusal:
        app.consume("prices", **options)
    assert all(name in str(refusal.value) for name in options)
