"""After the event loop was blocked, nothing starts before it is certain that the partitions are still ours."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, cast

import pytest
from fast_depends import Depends

from aioshard import App, Batch, Context, DeadLetter, Limit, Park, Record, Retry
from aioshard.engine.current_client import CurrentClient
from aioshard.engine.lease import Lease
from aioshard.ports import Transport
from aioshard.testing import InMemoryTransport, TestClient, VirtualTimeLoop, run
from tests.engine.live_apps import engine_of, publish, until

SESSION = 10.0
RECORDS = 60
KEYS = 6


def now() -> float:
    return asyncio.get_running_loop().time()


def block(seconds: float) -> None:
    """Block the event loop."""
    cast("VirtualTimeLoop", asyncio.get_running_loop()).pass_time(seconds)


class Bench:
    """An app whose handlers report to it."""

    def __init__(self, **settings: Any) -> None:
        self.app = App("leased", **settings)
        self.client = TestClient(self.app)
        self.starts: list[tuple[float, Record]] = []
        self.foreign: list[Record] = []
        """Records that started although another member may have owned them."""

    @property
    def transport(self) -> InMemoryTransport:
        return self.client.transports[-1]

    def start(self, record: Record) -> None:
        self.starts.append((now(), record))
        if self.transport.owned_for <= 0.0:
            self.foreign.append(record)

    def run_out(self, *, after: float = 0.0, renewed_after: float | None = None) -> None:
        """Let the ownership end, and begin again."""
        self.transport.owned_until = now() + after
        if renewed_after is not None:
            asyncio.get_running_loop().call_later(renewed_after, self.renew)

    def renew(self) -> None:
        self.transport.owned_until = now() + 1_000.0

    def offsets_by_key(self) -> dict[tuple[int, bytes | None], list[int]]:
        offsets = defaultdict(list)
        for _, record in self.starts:
            offsets[record.partition, record.key].append(record.offset)
        return offsets


HANDLERS: dict[str, dict[str, Any]] = {
    "records": {"concurrency": 8},
    "one worker": {"concurrency": 1},
    "any order": {"concurrency": 8, "shard_by": "record"},
    "fixed shards": {"shards": 3},
    "limited": {"concurrency": 8, "limit": Limit("pace", 1_000.0, burst=50)},
    "limited keys": {"concurrency": 8, "limit": Limit("tenant", 20.0, burst=2, per="key")},
    "batches": {"concurrency": 4, "batch": Batch(max_records=5, linger=0.01)},
    "limited batches": {"batch": Batch(max_records=5, linger=0.01), "limit": Limit("pace", 1_000.0, burst=50)},
    "batches of fixed shards": {"shards": 3, "batch": Batch(max_records=5, linger=0.01)},
}
each_handler = pytest.mark.parametrize("options", HANDLERS.values(), ids=HANDLERS)


def consume(bench: Bench, options: dict[str, Any], at: Callable[[bytes | None], Awaitable[None]]) -> None:
    """Register a handler that calls *at* with the value of each record."""
    if "batch" in options:

        @bench.app.consume("orders", **options)
        async def handle_batch(records: list[Record]) -> None:
            for record in records:
                bench.start(record)
            for record in records:
                await at(record.value)

        return

    @bench.app.consume("orders", **options)
    async def handle(record: Record) -> None:
        bench.start(record)
        await at(record.value)


@each_handler
def test_nothing_starts_after_a_block_until_the_ownership_is_renewed(options: dict[str, Any]) -> None:
    bench = Bench()
    blocked_until = 0.0

    async def at(value: bytes | None) -> None:
        nonlocal blocked_until
        await asyncio.sleep(0.1)
        if value == b"20":
            bench.run_out(after=SESSION, renewed_after=65.0)
            block(60.0)
            blocked_until = now()

    consume(bench, options, at)

    async def test() -> None:
        async with bench.client as client:
            await publish(client, RECORDS, keys=KEYS, partitions=2)
            await client.settle(timeout=100.0)
            (handler,) = bench.app.statistics().handlers
            assert handler.processed == RECORDS
            assert engine_of(bench.app).handlers.replayed == 0, "none counts as started before"

    run(test())
    assert bench.foreign == []
    assert blocked_until
    first = bench.starts.index(next(start for start in bench.starts if start[0] >= blocked_until))
    assert first < RECORDS - 10, "many were ready"
    assert bench.starts[first][0] >= blocked_until + 5.0
    assert Counter(record.value for _, record in bench.starts) == {b"%d" % number: 1 for number in range(RECORDS)}
    if "shard_by" not in options:
        assert all(offsets == sorted(offsets) for offsets in bench.offsets_by_key().values())


@each_handler
def test_nothing_starts_after_a_block_in_which_the_partitions_were_lost(options: dict[str, Any]) -> None:
    bench = Bench()
    done: set[bytes | None] = set()
    blocked = False

    async def at(value: bytes | None) -> None:
        nonlocal blocked
        await asyncio.sleep(0.1)
        if value == b"20" and not blocked:
            blocked = True
            bench.transport.cut_off()
            asyncio.get_running_loop().call_later(70.0, bench.transport.reconnect)
            block(60.0)
            assert bench.transport.owned_for < 0.0
        done.add(value)

    consume(bench, options, at)

    async def test() -> None:
        async with bench.client as client:
            await publish(client, RECORDS, keys=KEYS, partitions=2)
            await until(lambda: len(done) == RECORDS, timeout=200.0)
            await client.settle(timeout=100.0)
            assert bench.app.statistics().rebalances == 2

    run(test())
    assert bench.foreign == []


def test_a_retry_that_became_due_in_a_block_waits_for_the_ownership() -> None:
    bench = Bench()
    attempts: list[int] = []

    @bench.app.consume("orders", concurrency=4, retry=Retry(attempts=3, initial=5.0, jitter=0.0))
    async def handle(record: Record, context: Context) -> None:
        bench.start(record)
        if record.value == b"0":
            attempts.append(context.attempt)
            if context.attempt == 1:
                raise ValueError
        if record.value == b"1":
            await asyncio.sleep(0.1)
            bench.run_out(after=SESSION, renewed_after=65.0)
            block(60.0)

    async def test() -> None:
        async with bench.client as client:
            await publish(client, 2, keys=2)
            await client.settle(timeout=100.0)
            assert bench.app.statistics().handlers[0].retried == 1

    run(test())
    assert bench.foreign == []
    assert attempts == [1, 2]
    assert bench.starts[-1][0] >= 65.0


def test_a_dead_letter_waits_for_the_ownership() -> None:
    """Another member may process the record."""
    bench = Bench()

    @bench.app.consume("orders", retry=Retry(attempts=1), on_failure=DeadLetter("orders.dlt"))
    async def handle(record: Record) -> None:
        bench.start(record)
        bench.run_out(renewed_after=5.0)
        block(1.0)
        raise ValueError

    async def test() -> None:
        async with bench.client as client:
            await publish(client, 1)
            await until(lambda: bench.starts)
            await asyncio.sleep(2.0)
            assert client.records("orders.dlt") == []
            assert bench.app.statistics().handlers[0].dead_lettered == 0
            await client.settle(timeout=100.0)
            assert len(client.records("orders.dlt")) == 1

    run(test())
    assert bench.foreign == []


def test_a_parked_record_that_became_due_in_a_block_waits_for_the_ownership() -> None:
    bench = Bench()

    @bench.app.consume("orders", concurrency=4, retry=Retry(attempts=1), on_failure=Park("orders.parked", delay=5.0))
    async def handle(record: Record) -> None:
        bench.start(record)
        if record.value == b"0" and len(bench.starts) == 1:
            raise ValueError
        if record.value == b"1":
            await asyncio.sleep(1.0)
            bench.run_out(after=SESSION, renewed_after=65.0)
            block(60.0)

    async def test() -> None:
        async with bench.client as client:
            await publish(client, 1, keys=1)
            await until(lambda: bench.app.statistics().handlers[0].parked)
            await client.publish("orders", b"1", key=b"other", partition=0)
            await until(lambda: len(bench.starts) == 3)
            await client.settle(timeout=100.0)

    run(test())
    assert bench.foreign == []
    assert [record.value for _, record in bench.starts] == [b"0", b"1", b"0"]
    assert bench.starts[-1][0] >= 65.0


def test_a_batch_whose_records_took_long_to_decode_waits_for_the_ownership() -> None:
    bench = Bench()
    decoded = 0

    def decode(record: Record) -> int:
        nonlocal decoded
        decoded += 1
        if decoded == 1:
            bench.run_out(after=0.5, renewed_after=5.0)
            block(1.0)
        if record.offset == 2:
            raise ValueError
        return record.offset

    @bench.app.consume("orders", batch=Batch(max_records=5, linger=0.01), decode=decode, on_failure="skip")
    async def handle(numbers: list[int]) -> None:
        assert bench.transport.owned_for > 0.0
        bench.starts += [(now(), Record("orders", 0, number, None, None, (), 0.0)) for number in numbers]

    async def test() -> None:
        async with bench.client as client:
            await publish(client, 5)
            await client.settle(timeout=100.0)

    run(test())
    assert [record.offset for _, record in bench.starts] == [0, 1, 3, 4]


def test_a_plain_function_does_not_begin_in_its_thread_before_the_ownership_is_renewed() -> None:
    """The event loop may be blocked after the worker has looked, and before the thread begins."""
    bench = Bench()

    @bench.app.middleware
    async def late(record: Record, context: Context, call_next: Callable[..., Awaitable[object]]) -> object:
        bench.run_out(renewed_after=5.0)
        return await call_next(record, context)

    owned: list[bool] = []

    @bench.app.consume("orders")
    def handle(record: Record) -> None:  # noqa: ARG001
        owned.append(bench.transport.owned_for > 0.0)

    async def test() -> None:
        async with bench.client as client:
            await publish(client, 1)
            await client.settle(timeout=100.0)
            assert now() >= 5.0

    run(test())
    assert owned == [True]


@pytest.mark.parametrize(
    "options",
    [{}, {"batch": Batch(max_records=1)}, {"limit": Limit("tenant", 0.01, burst=2, per="key")}],
    ids=["records", "batches", "keys"],
)
def test_a_run_that_waits_for_the_ownership_costs_no_token_of_the_rate_limit(options: dict[str, Any]) -> None:
    bench = Bench()

    async def at(value: bytes | None) -> None:
        if value == b"0":
            bench.run_out(renewed_after=2.0)
            block(1.0)

    consume(bench, {"limit": Limit("pace", 0.01, burst=2)} | options, at)

    async def test() -> None:
        async with bench.client as client:
            await publish(client, 2, keys=1)
            await client.settle(timeout=300.0)

    run(test())
    assert bench.foreign == []
    assert [start for start, _ in bench.starts] == [0.0, pytest.approx(2.0, abs=0.2)]


@pytest.mark.parametrize("options", [{}, {"batch": Batch(max_records=1)}], ids=["records", "batches"])
def test_a_dead_letter_that_waits_for_the_ownership_earns_no_token(options: dict[str, Any]) -> None:
    bench = Bench()

    async def at(value: bytes | None) -> None:
        if value == b"0":
            bench.run_out(renewed_after=2.0)
            block(1.0)
            raise ValueError

    limited = {"limit": Limit("pace", 0.01, burst=2), "retry": Retry(attempts=1), "on_failure": DeadLetter("dlt")}
    consume(bench, limited | options, at)

    async def test() -> None:
        async with bench.client as client:
            await publish(client, 3)
            await client.settle(timeout=300.0)

    run(test())
    assert bench.foreign == []
    assert [start for start, _ in bench.starts] == [0.0, pytest.approx(2.0, abs=0.2), pytest.approx(100.0, abs=0.2)]


def test_the_wait_for_the_ownership_is_not_the_time_of_a_run() -> None:
    bench = Bench()

    async def at(value: bytes | None) -> None:
        if value == b"0":
            bench.run_out(renewed_after=50.0)
            block(1.0)

    consume(bench, {"concurrency": 1}, at)

    async def test() -> None:
        async with bench.client as client:
            await publish(client, 2, keys=1)
            await client.settle(timeout=300.0)
            (counts,) = engine_of(bench.app).handlers[0].counters.topics.values()
            assert counts.durations.total == pytest.approx(1.0, abs=0.1)

    run(test())


def test_a_dependency_is_closed_although_another_member_may_own_the_partition() -> None:
    bench = Bench()
    closed: list[bool] = []

    def opened() -> Iterator[str]:
        yield ""
        closed.append(bench.transport.owned_for > 0.0)

    @bench.app.consume("orders")
    async def handle(record: Record, _: Annotated[str, Depends(opened)]) -> None:  # noqa: ARG001
        bench.run_out(renewed_after=5.0)

    async def test() -> None:
        async with bench.client as client:
            await publish(client, 1)
            await client.settle(timeout=100.0)

    run(test())
    assert closed == [False]


def test_an_app_stops_although_its_partitions_may_not_be_ours() -> None:
    bench = Bench(shutdown_timeout=5.0)

    async def at(_: bytes | None) -> None:
        bench.run_out()
        block(1.0)

    consume(bench, {"concurrency": 4}, at)

    async def test() -> None:
        async with bench.client as client:
            await publish(client, RECORDS, keys=KEYS)
            await until(lambda: bench.starts)
            await asyncio.sleep(1.0)
            lease = engine_of(bench.app).handlers.workers[0].lease
            began = now()
        assert now() - began < 6.0
        await asyncio.sleep(1.0)
        assert lease._timer is None, "nobody waits any more"

    run(test())
    assert len(bench.starts) == 1
    assert bench.foreign == []


def test_the_explanation_says_why_nothing_starts() -> None:
    bench = Bench()

    async def at(value: bytes | None) -> None:
        if value == b"0":
            bench.run_out(renewed_after=20.0)
            block(1.0)
        await asyncio.sleep(5.0)

    consume(bench, {"concurrency": 1}, at)

    async def test() -> None:
        async with bench.client as client:
            await publish(client, 2)
            await until(lambda: bench.starts)
            assert "another member may own" not in bench.app.explain()
            await asyncio.sleep(10.0)
            assert "another member may own its partition by now" in bench.app.explain()
            await asyncio.sleep(10.0)
            assert "another member may own" not in bench.app.explain()
            await client.settle(timeout=100.0)

    run(test())


# The lease itself ---------------------------------------------------------------------


class Client:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.until = 100.0
        self.asked = 0

    @property
    def owned_for(self) -> float:
        self.asked += 1
        return self.until - now()


def make_lease() -> tuple[Lease, Client]:
    client = Client()
    current = CurrentClient()
    current.use(cast("Transport", client))
    return Lease(current, asyncio.get_running_loop().time), client


def test_no_answer_counts_for_longer_than_the_ownership_or_a_millisecond() -> None:
    async def test() -> None:
        lease, client = make_lease()
        assert now() >= lease.due, "the first start asks"
        assert lease.lasts(now())
        assert lease.due == pytest.approx(now() + 0.001)
        client.until = now() + 0.000_3
        assert lease.lasts(now())
        assert lease.due == pytest.approx(client.until)
        block(0.000_3)
        assert now() >= lease.due
        assert not lease.lasts(now())
        assert lease.due <= now(), "the next start asks again"

    run(test())


def test_nothing_is_ours_without_a_client() -> None:
    async def test() -> None:
        lease, _ = make_lease()
        lease._client.retire()
        assert not lease.lasts(now())
        assert not lease.is_held

    run(test())


def test_all_that_waits_asks_together() -> None:
    async def test() -> None:
        lease, client = make_lease()
        client.until = 0.0
        waiting = [asyncio.create_task(lease.wait(), name=f"waits {number}") for number in range(100)]
        await asyncio.sleep(0.0)
        client.asked = 0
        await asyncio.sleep(10.0)
        assert client.asked <= 200
        waiting[0].cancel()
        client.until = 1_000.0
        done, _ = await asyncio.wait(waiting, timeout=0.1)
        assert len(done) == 100
        assert waiting[0].cancelled()
        assert lease._timer is None

    run(test())


def test_it_is_waited_for_each_time() -> None:
    async def test() -> None:
        lease, client = make_lease()
        for _ in range(2):
            client.until = now()
            asyncio.get_running_loop().call_later(1.0, setattr, client, "until", now() + 3.0)
            began = now()
            await lease.wait()
            assert now() - began == pytest.approx(1.0, abs=0.1)

    run(test())


def test_a_client_that_was_cut_off_for_a_moment_owns_its_partitions() -> None:
    bench = Bench()
    consume(bench, {}, lambda _: asyncio.sleep(0.0))

    async def test() -> None:
        async with bench.client as client:
            bench.transport.cut_off()
            await asyncio.sleep(10.0)
            bench.transport.reconnect()
            await asyncio.sleep(100.0)
            await publish(client, 1)
            await client.settle()
            assert bench.app.statistics().rebalances == 1

    run(test())


def test_a_client_that_was_cut_off_for_a_session_owns_nothing_until_it_has_joined() -> None:
    bench = Bench()
    consume(bench, {}, lambda _: asyncio.sleep(0.0))

    async def test() -> None:
        async with bench.client as client:
            bench.transport.cut_off()
            await asyncio.sleep(60.0)
            bench.transport.reconnect()
            assert bench.transport.owned_for < 0.0
            await publish(client, 1)
            await client.settle(timeout=100.0)
            assert bench.app.statistics().rebalances == 2

    run(test())


def test_nobody_waits_while_the_partitions_are_ours() -> None:
    async def test() -> None:
        lease, _ = make_lease()
        await lease.wait()
        assert now() == 0.0
        assert lease.is_held

    run(test())
