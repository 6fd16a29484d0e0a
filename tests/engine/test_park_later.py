"""`ParkLater` and growing delays: a key waits as long as its handler says, also across a deploy, and stays in order."""

import asyncio
import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from aioshard import App, Batch, BatchError, DeadLetter, Growing, Park, ParkLater, Record, Retry
from aioshard.engine.workload import workload
from aioshard.serde.side_records import ParkedRecord, Removed, read_dead_letter, read_parked
from aioshard.testing import InMemoryBroker, TestClient, run
from tests.engine.live_apps import until as until_soon
from tests.engine.live_apps import watch_of

PARKED = "orders.parked"
HOUR = 3600.0


class Ledger:
    """Handlers that park what is closed, and note when each record ran and ended."""

    def __init__(self, seconds: float = HOUR) -> None:
        self.closed: dict[bytes, float] = {}
        """For each closed key the seconds after which it is to be tried again."""
        self.seconds = seconds
        self.runs: defaultdict[bytes, list[float]] = defaultdict(list)
        self.done: defaultdict[bytes, list[int]] = defaultdict(list)

    def app(self, policy: Park | DeadLetter | str | None = None, **options: Any) -> App:
        app = App("shop", commit_interval=0.1, show_keys=True)
        on_failure: Any = Park(PARKED, delay=5.0) if policy is None else policy

        @app.consume("orders", retry=Retry(attempts=3, initial=0.05), on_failure=on_failure, **options)
        async def handle(record: Record) -> None:
            self.run(record)

        return app

    def batch_app(self, *, named: bool, **options: Any) -> App:
        app = App("shop", commit_interval=0.1)

        @app.consume(
            "orders",
            batch=Batch(max_records=100, linger=0.5),
            retry=Retry(attempts=3, initial=0.05),
            on_failure=Park(PARKED, delay=5.0),
            **options,
        )
        async def handle(records: list[Record]) -> None:
            errors: dict[Record, BaseException] = {}
            for record in records:
                try:
                    self.run(record)
                except ParkLater as error:
                    errors[record] = error
            if errors and named:
                raise BatchError(errors)
            if errors:
                raise next(iter(errors.values()))

        return app

    def run(self, record: Record) -> None:
        key = record.key or b""
        self.runs[key].append(asyncio.get_running_loop().time())
        if key in self.closed:
            raise ParkLater(self.closed[key], "closed for lunch")
        self.done[key].append(record.offset)


async def until(condition: Callable[[], object], timeout: float = 2 * HOUR) -> None:
    """Poll rarely: hours pass."""
    await until_soon(condition, timeout, look_every=0.5)


def parked_in(broker: InMemoryBroker) -> list[ParkedRecord]:
    found: dict[object, ParkedRecord] = {}
    for record in broker.records(PARKED):
        match read_parked(record):
            case ParkedRecord() as parked:
                found[parked.storage_key] = parked
            case Removed(storage_key):
                found.pop(storage_key, None)
    return list(found.values())


async def publish(client: TestClient, keys: str, *, partition: int = 0) -> None:
    for key in keys:
        await client.publish("orders", b"", key=key, partition=partition)


@pytest.mark.parametrize("options", [{}, {"shards": 2}, {"concurrency": 1}], ids=str)
def test_a_key_is_parked_after_one_run_and_tried_when_its_handler_said(options: dict[str, Any]) -> None:
    ledger = Ledger()
    ledger.closed[b"a"] = HOUR

    async def test() -> None:
        clock = asyncio.get_running_loop().time
        async with TestClient(ledger.app(**options)) as client:
            await publish(client, "abaab")
            await client.settle()
            assert client.committed("orders", 0) == 5
            assert ledger.done == {b"b": [1, 4]}
            assert len(ledger.runs[b"a"]) == 1
            ledger.closed.clear()
            began = ledger.runs[b"a"][0]
            await asyncio.sleep(HOUR - 10.0)
            assert len(ledger.runs[b"a"]) == 1
            await until(lambda: len(ledger.done[b"a"]) == 3)
            assert clock() == pytest.approx(began + HOUR, abs=1.0)
            await until(lambda: not parked_in(client.broker))

    run(test())
    assert ledger.done[b"a"] == [0, 2, 3]


def test_the_delay_survives_a_deploy() -> None:
    """Whether the new process starts before or after the time, and although records of the key arrive meanwhile."""
    ledger = Ledger()
    ledger.closed.update({b"a": HOUR, b"c": HOUR / 4})

    async def test() -> None:
        clock = asyncio.get_running_loop().time
        client = TestClient(ledger.app())
        broker = client.broker
        async with client:
            await publish(client, "aabc")
            await client.settle()
        ledger.closed.clear()
        await asyncio.sleep(HOUR / 2)
        async with TestClient(ledger.app(), broker=broker) as client:
            await publish(client, "aabc")
            await client.settle()
            await until(lambda: ledger.done[b"c"] == [3, 7], timeout=5.0)
            assert len(ledger.runs[b"a"]) == 1
            await until(lambda: len(ledger.done[b"a"]) == 4, timeout=HOUR)
            assert clock() == pytest.approx(ledger.runs[b"a"][0] + HOUR, abs=1.0)
            await until(lambda: not parked_in(broker))

    run(test())
    assert ledger.done == {b"a": [0, 1, 4, 5], b"b": [2, 6], b"c": [3, 7]}


def test_the_delay_survives_a_move_to_another_member() -> None:
    ledger = Ledger()
    ledger.closed[b"a"] = HOUR

    async def test() -> None:
        clock = asyncio.get_running_loop().time
        client = TestClient(ledger.app())
        async with client:
            await publish(client, "aa", partition=1)
            await client.settle()
            ledger.closed.clear()
            async with TestClient(ledger.app(), broker=client.broker) as other:
                for _ in range(5):
                    await asyncio.sleep(HOUR / 10)
                    client.group.rebalance()
                await publish(other, "a", partition=1)
                await until(lambda: len(ledger.done[b"a"]) == 3, timeout=HOUR)
                assert clock() == pytest.approx(ledger.runs[b"a"][0] + HOUR, abs=2.0)

    run(test())
    assert ledger.done == {b"a": [0, 1, 2]}
    assert len(ledger.runs[b"a"]) == 4


def test_a_parked_record_may_be_parked_again_until_its_retries_are_exhausted() -> None:
    ledger = Ledger()
    ledger.closed[b"a"] = 60.0

    async def test() -> None:
        async with TestClient(ledger.app(Park(PARKED, delay=5.0, attempts=3))) as client:
            await publish(client, "a")
            await asyncio.sleep(1_000.0)
            assert [round(later - ledger.runs[b"a"][0]) for later in ledger.runs[b"a"]] == [0, 60, 120, 180]
            (parked,) = workload(watch_of(client.app)).parked
            assert (parked.retries, parked.due, parked.in_flight) == (3, None, False)
            assert "waits until it is released" in client.app.explain()
            ledger.closed.clear()
            client.app.release_parked("orders", 0, 0)
            await until(lambda: ledger.done[b"a"] == [0])

    run(test())


def test_explanations_say_when_each_key_runs_again() -> None:
    ledger = Ledger()
    ledger.closed.update({b"a": HOUR, b"b": 60.0})

    async def test() -> None:
        async with TestClient(ledger.app()) as client:
            await publish(client, "aab")
            await client.settle()
            await asyncio.sleep(20.0)
            due = {parked.key: parked.due for parked in workload(watch_of(client.app)).parked}
            assert due == {"b'a'": pytest.approx(HOUR - 20.0, abs=1.0), "b'b'": pytest.approx(40.0, abs=1.0)}
            lines = [line for line in client.app.explain().splitlines() if "runs again in" in line]
            assert [line.split()[1] for line in lines] == ["b'b'", "b'a'"]
            assert "orders/0/2" in lines[0]
            assert "closed for lunch" in lines[0]

    run(test())


def test_many_parked_keys_are_counted_in_explanations() -> None:
    ledger = Ledger()
    ledger.closed.update({b"%d" % number: HOUR for number in range(30)})

    async def test() -> None:
        async with TestClient(ledger.app()) as client:
            for number in range(30):
                await client.publish("orders", b"", key=f"{number}", partition=0)
            await client.settle()
            lines = client.app.explain().splitlines()
            assert sum("runs again in" in line for line in lines) == 10
            assert any("20 more keys" in line for line in lines)

    run(test())


@pytest.mark.parametrize("options", [{}, {"shards": 1}], ids=str)
@pytest.mark.parametrize("named", [False, True], ids=["whole batch", "BatchError"])
def test_a_batch_handler_parks_each_record_that_it_means(named: bool, options: dict[str, Any]) -> None:
    ledger = Ledger()
    ledger.closed.update({b"a": HOUR, b"c": HOUR})

    async def test() -> None:
        async with TestClient(ledger.batch_app(named=named, **options)) as client:
            await publish(client, "abacaba")
            await client.settle()
            assert client.committed("orders", 0) == 7
            if named:
                assert {record.original.key for record in parked_in(client.broker)} == {b"a", b"c"}
            assert [len(ledger.runs[key]) for key in (b"a", b"b", b"c")] == [4, 2, 1], "one call of the handler"
            ledger.closed.clear()
            await until(lambda: not parked_in(client.broker), timeout=2 * HOUR)

    run(test())
    # A batch that raises parks its records, and those that have succeeded in it run again: at least once, in order.
    assert {key: list(dict.fromkeys(offsets)) for key, offsets in ledger.done.items()} == {
        b"a": [0, 2, 4, 6],
        b"b": [1, 5],
        b"c": [3],
    }


@pytest.mark.parametrize("policy", ["halt", DeadLetter("orders.dlt", breaker=None)], ids=["halt", "dead letter"])
def test_without_park_it_is_a_final_failure_that_names_the_missing_option(policy: Any) -> None:
    """To wait in memory for an hour would stop the partition, and a deploy would forget it."""
    ledger = Ledger()
    ledger.closed[b"a"] = HOUR

    async def test() -> None:
        async with TestClient(ledger.app(policy)) as client:
            await publish(client, "ab")
            await asyncio.sleep(1.0)
            assert len(ledger.runs[b"a"]) == 1
            if policy == "halt":
                assert "on_failure is not Park" in client.app.explain()
                client.app.skip("orders", 0, 0)
            else:
                letter = read_dead_letter(client.records("orders.dlt")[0])
                assert letter is not None
                assert letter.failure.error == "ParkLater"
                assert "closed for lunch (nothing is parked: on_failure is not Park" in letter.failure.message
            await client.settle()

    run(test())


def test_a_growing_delay_grows_with_each_retry_of_a_record() -> None:
    broken = True
    runs: list[float] = []
    app = App("shop", commit_interval=0.1)

    @app.consume("orders", retry=Retry(attempts=1), on_failure=Park(PARKED, delay=Growing(10.0, 3.0, 200.0)))
    async def handle(_: Record) -> None:
        runs.append(asyncio.get_running_loop().time())
        if broken:
            raise ConnectionError

    async def test() -> None:
        nonlocal broken
        client = TestClient(app)
        async with client:
            await publish(client, "aa")
            await until(lambda: len(runs) == 3)
        async with TestClient(app, broker=client.broker):
            await until(lambda: len(runs) == 6)
            assert [round(after - before) for before, after in itertools.pairwise(runs)] == [
                10,
                30,
                90,
                200,
                200,
            ]
            broken = False
            await until(lambda: not parked_in(client.broker))
            assert runs[-1] - runs[-2] < 1.0, "the next record of the key follows immediately"

    run(test())


def test_the_speed_of_a_test_divides_a_growing_delay() -> None:
    runs: list[float] = []
    app = App("shop", commit_interval=0.1)

    @app.consume("orders", retry=Retry(attempts=1), on_failure=Park(PARKED, delay=Growing(100.0, 2.0, 200.0)))
    async def handle(_: Record) -> None:
        runs.append(asyncio.get_running_loop().time())
        raise ConnectionError

    async def test() -> None:
        async with TestClient(app, speed=10.0) as client:
            await publish(client, "a")
            await until(lambda: len(runs) == 4)
        assert [round(after - before) for before, after in itertools.pairwise(runs)] == [10, 20, 20]

    run(test())


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_an_impossible_delay_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"ParkLater.*was refused"):
        ParkLater(seconds)


def test_it_can_be_copied_to_another_process() -> None:
    copied = pickle.loads(pickle.dumps(ParkLater(30.0, "later")))
    assert (type(copied), copied.seconds, str(copied)) == (ParkLater, 30.0, "later")
