"""Batch handlers: which records are batched, in which order, and the outcome of each record."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from aioshard import App, Batch, BatchContext, BatchError, DeadLetter, Park, Record, Retry
from aioshard.engine.control import caught_up
from aioshard.errors import HandlerError
from aioshard.testing import InMemoryBroker, TestClient, run

Handle = Callable[[list[Record]], Awaitable[None]]


class Clicks:
    """An app with one batch handler that notes what it is given, and when."""

    def __init__(self, handle: Handle | None = None, *, settings: dict[str, Any] | None = None, **options: Any) -> None:
        self.app = App("batches", **(settings or {}))
        self.batches: list[list[Record]] = []
        self.times: list[float] = []
        options.setdefault("retry", Retry(attempts=4, initial=0.1, jitter=0.0))

        @self.app.consume("clicks", **options)
        async def on_clicks(records: list[Record]) -> None:
            self.batches.append(list(records))
            self.times.append(asyncio.get_running_loop().time())
            if handle is not None:
                await handle(records)

    @property
    def offsets(self) -> list[list[int]]:
        return [[record.offset for record in batch] for batch in self.batches]

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]

    @property
    def runs(self) -> list[int]:
        return [offset for batch in self.offsets for offset in batch]


async def publish(client: TestClient, keys: Sequence[str | None], values: Sequence[object] = ()) -> None:
    """One record for each key, all in partition 0; without a value each has its key's."""
    for number, key in enumerate(keys):
        value = values[number] if values else key or ""
        await client.publish("clicks", value, key=key, partition=0)


async def sleep_a_second(_records: list[Record]) -> None:
    await asyncio.sleep(1.0)


def consume(clicks: Clicks, keys: Sequence[str | None], values: Sequence[object] = (), timeout: float = 60.0) -> None:
    """Run the app until everything is complete."""

    async def test() -> None:
        async with TestClient(clicks.app) as client:
            await publish(client, keys, values)
            await client.settle(timeout)

    run(test())


# Filling batches ----------------------------------------------------------------------


def test_a_full_batch_starts_at_once_and_the_rest_after_linger() -> None:
    clicks = Clicks(batch=Batch(max_records=4, linger=2.0))

    consume(clicks, "abcdefghij")

    assert clicks.sizes == [4, 4, 2]
    assert clicks.times == pytest.approx([0.0, 0.0, 2.0], abs=0.1)


def test_without_linger_a_batch_takes_the_waiting_records() -> None:
    clicks = Clicks(sleep_a_second, batch=Batch(max_records=100, linger=0), concurrency=1)

    async def test() -> None:
        async with TestClient(clicks.app) as client:
            await publish(client, "a")
            await asyncio.sleep(0.5)
            await publish(client, "bcd")
            await client.settle()

    run(test())

    assert clicks.offsets == [[0], [1, 2, 3]]


def test_records_that_waited_for_a_worker_do_not_linger() -> None:
    clicks = Clicks(sleep_a_second, batch=Batch(max_records=2, linger=0.5), concurrency=1)

    consume(clicks, "abc")

    assert clicks.times == pytest.approx([0.0, 1.0], abs=0.1)


def test_idle_workers_fill_one_batch() -> None:
    clicks = Clicks(batch=Batch(max_records=100, linger=1.0), concurrency=64)

    async def test() -> None:
        async with TestClient(clicks.app) as client:
            for number in range(20):
                await publish(client, [str(number)])
                await asyncio.sleep(0.02)
            await client.settle()

    run(test())

    assert clicks.sizes == [20]


def test_a_batch_exceeds_its_bytes_only_for_a_single_large_record() -> None:
    clicks = Clicks(batch=Batch(max_records=100, linger=0.1, max_bytes=1_000))

    consume(clicks, [None] * 6, ["x" * size for size in (400, 400, 400, 5_000, 300, 300)])

    assert clicks.offsets == [[0, 1], [2], [3], [4, 5]]


def test_records_of_a_key_stay_in_order_within_and_across_batches() -> None:
    running: set[str] = set()

    async def handle(records: list[Record]) -> None:
        keys = {str(record.key) for record in records}
        assert not keys & running, "two batches have a key at the same time"
        running.update(keys)
        await asyncio.sleep(0.3)
        running.difference_update(keys)

    clicks = Clicks(handle, batch=Batch(max_records=7, linger=0.05), concurrency=8)
    keys = [str(number % 5) for number in range(100)]

    consume(clicks, keys)

    for key in set(keys):
        own = [r.offset for batch in clicks.batches for r in batch if r.key == key.encode()]
        assert own == sorted(own)
        assert len(own) == 20
    assert max(clicks.sizes) == 7


def test_a_hot_key_fills_whole_batches() -> None:
    clicks = Clicks(sleep_a_second, batch=Batch(max_records=10, linger=0.05), concurrency=8)

    consume(clicks, ["hot"] * 40)

    assert clicks.offsets == [list(range(first, first + 10)) for first in (0, 10, 20, 30)]


def test_each_fixed_shard_fills_its_own_batches() -> None:
    clicks = Clicks(sleep_a_second, batch=Batch(max_records=5, linger=0.1), shards=2)

    consume(clicks, [str(number) for number in range(30)])

    assert sorted(clicks.runs) == list(range(30))
    assert max(clicks.sizes) == 5
    of_shards = [{record.key for record in batch} for batch in clicks.batches]
    first = set().union(*(keys for keys in of_shards if keys & of_shards[0]))
    assert all(keys <= first or not keys & first for keys in of_shards)


def test_a_plain_function_receives_batches_in_a_thread() -> None:
    app = App("batches")
    seen: list[int] = []

    @app.consume("clicks", batch=Batch(max_records=10, linger=0.01))
    def on_clicks(records: list[Record], context: BatchContext) -> None:
        time.sleep(0.01)
        seen.extend(record.offset + 1000 * (context.attempt - 1) for record in records)
        if len(seen) == 3:
            raise BatchError({records[1]: ValueError("again")})

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, "abc")
            await client.settle()

    run(test())

    assert seen == [0, 1, 2, 1001]


def test_a_handler_that_never_suspends_does_not_block_the_event_loop() -> None:
    turns = 0
    turns_at_end: list[int] = []

    async def handle(records: list[Record]) -> None:
        if records[-1].offset == 4_999:
            turns_at_end.append(turns)

    clicks = Clicks(handle, batch=Batch(max_records=10, linger=0.0))

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def test() -> None:
        broker = InMemoryBroker(partitions=1)
        for _ in range(5_000):
            broker.publish("clicks", b"")
        async with TestClient(clicks.app, broker=broker) as client:
            turning = asyncio.create_task(turn())
            await client.settle()
            turning.cancel()

    run(test())

    assert turns_at_end > [20]


def test_a_batch_does_not_wait_for_records_that_do_not_fit_the_buffer() -> None:
    """A buffer that is smaller than a batch: without that rule it would be emptied once in a linger."""
    clicks = Clicks(batch=Batch(max_records=500, linger=50.0), settings={"max_buffered_records": 40})

    consume(clicks, [str(number) for number in range(300)], timeout=200.0)

    assert clicks.times[-1] < 60.0  # the last ones have nothing that holds them up, and wait for more
    assert clicks.times[-2] < 5.0


def test_until_caught_up_waits_for_lingering_batches() -> None:
    clicks = Clicks(batch=Batch(max_records=500, linger=5.0))

    async def test() -> None:
        broker = InMemoryBroker(partitions=1)
        for _ in range(3):
            broker.publish("clicks", b"")
        async with TestClient(clicks.app, broker=broker):
            engine = clicks.app._engine
            assert engine is not None
            await asyncio.wait_for(caught_up(engine), 20.0)

    run(test())

    assert clicks.offsets == [[0, 1, 2]]


def test_a_record_waiting_for_its_batch_is_explained() -> None:
    clicks = Clicks(batch=Batch(max_records=500, linger=5.0))

    async def test() -> None:
        async with TestClient(clicks.app) as client:
            await publish(client, "abc")
            await asyncio.sleep(1.0)
            assert "waits for its batch to fill: 3 of 500 records, linger=5 s" in clicks.app.explain()

    run(test())


def test_a_linger_as_long_as_stuck_after_is_refused() -> None:
    clicks = Clicks(batch=Batch(linger=10.0), settings={"stuck_after": 8.0})

    async def test() -> None:
        async with TestClient(clicks.app):
            pass

    with pytest.raises(HandlerError, match=r"'on_clicks' lets batches wait for linger=10 s.*stuck_after=8 s"):
        run(test())


def test_the_speed_of_a_test_client_applies_to_linger_too() -> None:
    clicks = Clicks(batch=Batch(max_records=500, linger=50.0))

    async def test() -> None:
        async with TestClient(clicks.app, speed=100.0) as client:
            await publish(client, "abc")
            await client.settle()

    run(test())

    assert clicks.times == pytest.approx([0.5], abs=0.1)
    assert clicks.app.handlers[0].batch == Batch(max_records=500, linger=50.0)


# Outcome of each record ---------------------------------------------------------------


def test_named_records_run_again_and_the_rest_completes() -> None:
    failed: list[int] = []

    async def handle(records: list[Record]) -> None:
        errors = {record: ValueError("not yet") for record in records if record.offset in (1, 3)}
        errors = {record: error for record, error in errors.items() if failed.count(record.offset) < 2}
        failed.extend(record.offset for record in errors)
        if errors:
            raise BatchError(errors)

    clicks = Clicks(handle, batch=Batch(max_records=10, linger=0.01))

    consume(clicks, "abcdef")

    assert clicks.offsets[0] == [0, 1, 2, 3, 4, 5]
    assert sorted(clicks.runs[6:]) == [1, 1, 3, 3]
    (handler,) = clicks.app.statistics().handlers
    assert (handler.processed, handler.retried, handler.halted) == (6, 4, 0)


def test_failed_records_of_a_key_run_again_in_order_without_the_others() -> None:
    async def handle(records: list[Record]) -> None:
        if len(records) == 4:
            # The second one has no other attempt, if it were for its error alone.
            raise BatchError({records[0]: ValueError(), records[2]: TypeError()})

    retry = Retry(attempts=4, initial=0.1, jitter=0.0, give_up_on=(TypeError,))
    clicks = Clicks(handle, batch=Batch(max_records=4, linger=0.01), retry=retry)

    consume(clicks, "aaaa")

    assert clicks.offsets == [[0, 1, 2, 3], [0], [2]]
    assert clicks.app.statistics().handlers[0].processed == 4


def test_a_record_without_attempts_left_is_diverted_and_its_shard_continues() -> None:
    async def handle(records: list[Record]) -> None:
        poison = {record: ValueError("bad") for record in records if record.value == b"bad"}
        if poison:
            raise BatchError(poison)

    clicks = Clicks(
        handle,
        batch=Batch(max_records=4, linger=0.01),
        retry=Retry(attempts=1),
        on_failure=DeadLetter("clicks.dlt", breaker=None),
    )

    async def test() -> None:
        async with TestClient(clicks.app) as client:
            await publish(client, "aaaabbbb", ["", "bad", "", "bad", "", "", "bad", ""])
            await client.settle()
            assert [record.value for record in client.records("clicks.dlt")] == [b"bad"] * 3

    run(test())

    (handler,) = clicks.app.statistics().handlers
    assert (handler.processed, handler.dead_lettered) == (5, 3)
    assert clicks.runs.count(3) == 2, "it ran again: the one before it in its shard had failed, too"


@pytest.mark.parametrize(
    ("retry", "most_runs"),
    [
        (Retry(attempts=5, initial=0.01), 40),
        (Retry(attempts=1), 510),
        (Retry(attempts=5, give_up_on=(ValueError,)), 40),
    ],
    ids=["retried", "one attempt", "given up on"],
)
def test_only_the_poison_record_of_a_batch_of_500_is_diverted(retry: Retry, most_runs: int) -> None:
    async def handle(records: list[Record]) -> None:
        if any(record.value == b"poison" for record in records):
            raise ValueError("which of them it is remains unsaid")

    clicks = Clicks(handle, batch=Batch(), retry=retry, on_failure=DeadLetter("clicks.dlt"))
    values = ["fine"] * 500
    values[321] = "poison"

    async def test() -> None:
        broker = InMemoryBroker(partitions=1)
        for number, value in enumerate(values):
            broker.publish("clicks", value.encode(), key=b"%d" % (number % 400))
        async with TestClient(clicks.app, broker=broker) as client:
            await client.settle(60.0)
            assert [record.value for record in client.records("clicks.dlt")] == [b"poison"]

    run(test())

    (handler,) = clicks.app.statistics().handlers
    assert (handler.processed, handler.dead_lettered) == (499, 1)
    assert clicks.sizes[0] == 500
    assert len(clicks.batches) <= most_runs
    assert clicks.runs.count(321) <= retry.attempts + 1


def test_records_that_failed_together_keep_their_order() -> None:
    async def handle(_records: list[Record]) -> None:
        if len(clicks.batches) <= 2:
            raise OSError("the database is away")

    clicks = Clicks(handle, batch=Batch(max_records=64, linger=0.01))

    consume(clicks, "abcd" * 16)

    done = [record for batch in clicks.batches[2:] for record in batch]
    assert sorted(record.offset for record in done) >= list(range(64))
    for key in (b"a", b"b", b"c", b"d"):
        own = [record.offset for record in done if record.key == key]
        assert own == sorted(own)
    assert clicks.app.statistics().handlers[0].processed == 64


def test_a_batch_error_naming_foreign_records_fails_the_whole_batch() -> None:
    stranger = Record("clicks", 3, 77, None, None, (), 0.0)

    async def handle(records: list[Record]) -> None:
        if len(clicks.batches) == 1:
            raise BatchError({records[0]: ValueError(), stranger: ValueError()})
        if len(clicks.batches) < 4:
            raise ValueError

    clicks = Clicks(handle, batch=Batch(max_records=3, linger=0.01))

    async def test() -> None:
        async with TestClient(clicks.app) as client:
            await publish(client, "abc")
            await asyncio.sleep(0.05)
            assert "BatchError names clicks/3/77, which is not among the 3 records of its batch" in clicks.app.explain()
            await client.settle()

    run(test())

    assert clicks.offsets[0] == [0, 1, 2]
    assert clicks.app.statistics().handlers[0].processed == 3


def test_a_batch_that_times_out_halts_the_one_record_that_hangs() -> None:
    async def handle(records: list[Record]) -> None:
        if any(record.value == b"hang" for record in records):
            await asyncio.sleep(1000.0)

    clicks = Clicks(handle, batch=Batch(max_records=50, linger=0.01), timeout=1.0)

    async def test() -> None:
        async with TestClient(clicks.app) as client:
            await publish(client, [str(number) for number in range(50)], ["hang" if n == 20 else "" for n in range(50)])
            await asyncio.sleep(60.0)
            assert "AttemptTimeoutError" in clicks.app.explain()
            (handler,) = clicks.app.statistics().handlers
            assert (handler.processed, handler.halted, handler.busy) == (49, 1, 0)

    run(test())


def test_a_batch_that_swallows_its_timeout_is_not_halted_for_one_record() -> None:
    async def handle(records: list[Record]) -> None:
        if any(record.value == b"hang" for record in records):
            try:
                await asyncio.sleep(1000.0)
            except asyncio.CancelledError:
                await asyncio.sleep(1.0)

    clicks = Clicks(handle, batch=Batch(max_records=50, linger=0.01), timeout=1.0)

    async def test() -> None:
        async with TestClient(clicks.app) as client:
            await publish(client, [str(number) for number in range(50)], ["hang" if n == 20 else "" for n in range(50)])
            await asyncio.sleep(60.0)
            assert "swallowed the cancellation" in clicks.app.explain()
            (handler,) = clicks.app.statistics().handlers
            assert (handler.processed, handler.halted, handler.busy) == (49, 1, 0)

    run(test())


def test_a_cancelled_error_in_a_batch_error_fails_only_the_named_record() -> None:
    async def handle(records: list[Record]) -> None:
        if len(clicks.batches) == 1:
            raise BatchError({records[0]: asyncio.CancelledError()})

    clicks = Clicks(handle, batch=Batch(max_records=2, linger=0.01))

    consume(clicks, "ab")

    assert clicks.offsets == [[0, 1], [0]]


def test_a_parked_key_leaves_the_batches_and_returns_in_them() -> None:
    async def handle(records: list[Record]) -> None:
        now = asyncio.get_running_loop().time()
        if now < 5.0 and (bad := [record for record in records if record.key == b"bad"]):
            raise BatchError({record: ValueError() for record in bad})

    clicks = Clicks(
        handle,
        batch=Batch(max_records=8, linger=0.05),
        retry=Retry(attempts=1),
        on_failure=Park("clicks.parked", delay=6.0),
    )

    async def test() -> None:
        async with TestClient(clicks.app) as client:
            await publish(client, ["bad", "a", "bad", "b"])
            await asyncio.sleep(1.0)
            await publish(client, ["c", "bad", "d"])
            await asyncio.sleep(1.0)
            assert client.committed("clicks", 0) == 7
            assert clicks.app.statistics().handlers[0].parked == 3
            await asyncio.sleep(30.0)

    run(test())

    bad = [record.offset for batch in clicks.batches for record in batch if record.key == b"bad"]
    assert bad[-3:] == [0, 2, 5]
    assert bad.count(5) == 1, "its key was parked: it was not run before"
    assert clicks.app.statistics().handlers[0].processed == 7


# Context of a handler -----------------------------------------------------------------


def test_a_batch_context_has_attempt_deadline_and_publish() -> None:
    app = App("batches")
    seen: list[tuple[int, list[str]]] = []

    @app.consume("clicks", batch=Batch(max_records=2, linger=0.01), timeout=7.0)
    async def on_clicks(records: list[Record], context: BatchContext) -> None:
        seen.append((context.attempt, [context.idempotency_key(record) for record in records]))
        assert context.deadline == asyncio.get_running_loop().time() + 7.0
        assert not context.revoked.is_set()
        assert not context.replay
        await context.publish("sums", str(len(records)))
        if context.attempt == 1:
            raise BatchError({records[1]: ValueError()})

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, "ab")
            await client.settle()
            assert [record.value for record in client.records("sums")] == [b"2", b"1"]

    run(test())

    assert seen == [(1, ["clicks/0/0", "clicks/0/1"]), (2, ["clicks/0/1"])]


def test_a_parked_record_left_out_of_a_batch_does_not_count_as_processed() -> None:
    """It waits in its fixed shard behind one that cannot be decoded, and both are due at the same time."""
    app = App("batches")
    done: list[dict[str, int]] = []
    broken = True

    @app.consume("orders", shards=1, batch=Batch(linger=0.0), retry=Retry(attempts=1), on_failure=Park("parked", 5.0))
    async def handle(orders: list[dict[str, int]]) -> None:
        if broken:
            raise ConnectionError
        done.extend(orders)

    async def test() -> None:
        nonlocal broken
        async with TestClient(app) as client:
            await client.publish("orders", b"{", key=b"a", partition=0)
            await client.publish("orders", b'{"total": 7}', key=b"b", partition=0)
            await client.settle()
            broken = False
            await asyncio.sleep(60.0)

    run(test())

    assert done == [{"total": 7}]
