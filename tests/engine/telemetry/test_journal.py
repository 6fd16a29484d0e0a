"""The event journal: a row for every record, unharmed by disk errors and crashes."""

import asyncio
import functools
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pyarrow.parquet
import pytest

from aioshard import App, Batch, BatchError, Context, DeadLetter, Park, Record, Retry
from aioshard.core.sharding import key_hash, shard_number
from aioshard.errors import SettingsError
from aioshard.observe import JournalStatistics
from aioshard.telemetry import journal
from aioshard.telemetry.journal import SCHEMA, JournalFiles, record_batch
from aioshard.telemetry.outcome_rows import ROW_WIDTH
from aioshard.testing import TestClient, run
from aioshard.testing.idempotence import assert_idempotent
from tests.engine.live_apps import until
from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow

ONCE = Retry(attempts=1)

Rows = list[dict[str, Any]]


def read(directory: Path) -> Rows:
    """All rows, by topic, partition and offset."""
    rows = [row for row in everything(directory) if row["status"] != "rebalance"]
    return sorted(rows, key=lambda row: (row["topic"], row["partition"], row["offset"]))


def everything(directory: Path) -> Rows:
    """All rows, those of rebalances too."""
    rows: Rows = pyarrow.dataset.dataset(directory, schema=SCHEMA).to_table().to_pylist()
    return rows


def names(directory: Path) -> list[str]:
    """The files that a reader sees."""
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def journal_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("aioshard journal")]


def live(app: App, *records: tuple[str | None, str], topic: str = "orders") -> None:
    """Run an app over records, each with a key and a value, all in one partition."""

    async def scenario() -> None:
        async with TestClient(app) as client:
            for key, value in records:
                await client.publish(topic, value, key=key, partition=0)
            await client.settle()

    run(scenario())


# Contents of a row ----------------------------------------------------------------------------------------------


def test_every_outcome_of_a_record_has_a_row(tmp_path: Path) -> None:
    app = App("billing", journal=tmp_path)
    retry = Retry(attempts=3, initial=0.5, jitter=0.0)

    async def handle(record: Record, context: Context) -> dict[str, int] | None:
        await asyncio.sleep(2.0)
        if record.value == b"bad":
            raise LookupError("no such customer")
        if record.value == b"once" and context.attempt == 1:
            raise ConnectionError
        return {"attempt": context.attempt} if record.value != b"nothing" else None

    app.consume("skips", retry=retry, on_failure="skip")(handle)
    app.consume("dead-letters", retry=retry, on_failure=DeadLetter("dead-letters.dlt"))(handle)
    app.consume("parks", retry=retry, on_failure=Park("parks.parked", delay=1e6))(handle)

    async def scenario() -> None:
        async with TestClient(app) as client:
            for topic in ("skips", "dead-letters", "parks"):
                for value in ("fine", "once", "bad", "nothing"):
                    await client.publish(topic, value, key=value, partition=0)
            await client.publish("parks", "behind", key="bad", partition=0)
            await client.settle(timeout=60.0)

    run(scenario())
    rows = read(tmp_path)

    outcomes = {(row["topic"], row["offset"]): (row["status"], row["attempts"], row["result"]) for row in rows}
    for topic, status in (("skips", "skipped"), ("dead-letters", "dead_lettered"), ("parks", "parked")):
        assert outcomes.pop((topic, 0)) == ("processed", 1, b'{"attempt":1}')
        assert outcomes.pop((topic, 1)) == ("processed", 2, b'{"attempt":2}')
        assert outcomes.pop((topic, 2)) == (status, 3, None)
        assert outcomes.pop((topic, 3)) == ("processed", 1, None)
    assert outcomes == {("parks", 4): ("parked", 0, None)}
    for row in rows:
        failed = row["status"] != "processed" and row["offset"] == 2
        assert (row["error_type"], row["error"]) == (("LookupError", "no such customer") if failed else (None, None))
        assert row["handler"] == "handle"
        if row["offset"] == 4:
            assert row["started"] is row["duration"] is None
        else:
            assert row["duration"] == pytest.approx(2.0)
            assert row["started"] >= row["arrived"]


class FlakyKey:
    """A shard key that cannot be hashed any more once the journal has it."""

    raises = False

    def fail(self) -> None:
        self.raises = True

    def __hash__(self) -> int:
        if self.raises:
            raise RuntimeError("hash")
        return 7

    def __eq__(self, other: object) -> bool:
        return self is other


@pytest.mark.parametrize("key", ["caf\udce9", 10**5_000, FlakyKey()], ids=["surrogate", "huge", "flaky"])
def test_text_and_keys_that_cannot_be_stored_lose_no_row(tmp_path: Path, key: Any) -> None:
    app = App("billing", journal=tmp_path)

    async def handle(_: Record) -> None:
        if isinstance(key, FlakyKey):
            asyncio.get_running_loop().call_later(0.01, key.fail)
        raise OSError("cannot open caf\udce9.txt")

    handle.__name__ = "on_caf\udce9"
    app.consume("orders", shard_by=lambda _: key, retry=Retry(attempts=1), on_failure="skip")(handle)

    live(app, (None, "bad"))

    (row,) = read(tmp_path)
    assert (row["handler"], row["error"]) == (r"on_caf\udce9", r"cannot open caf\udce9.txt")
    assert (row["shard"] is None) == (not isinstance(key, str))


def test_a_rebalance_has_a_row_without_a_record(tmp_path: Path) -> None:
    app = App("shop", journal=str(tmp_path))

    @app.consume("orders")
    async def handle(record: Record) -> None:
        """Nothing to be done."""

    async def scenario() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", "x", partition=0)
            await client.settle()
            await client.revoke("orders", 0)
            await client.assign("orders", 0)
            await client.settle()

    began = time.time()
    run(scenario())

    rows = everything(tmp_path)
    rebalances = [row for row in rows if row["status"] == "rebalance"]
    assert len(rows) - len(rebalances) == 1
    assert [row["error_type"] for row in rebalances] == ["revoked", "revoked"]
    for row in rebalances:
        assert (row["topic"], row["partition"], row["offset"], row["handler"], row["key_hash"]) == (None,) * 5
        assert row["attempts"] >= 3, "how many partitions were revoked"
        assert "have changed" in row["error"]
        assert abs(row["started"] - began) < 60
        assert row["duration"] >= 0


def test_times_are_wall_clock_times(tmp_path: Path) -> None:
    app = App("billing", journal=tmp_path)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def scenario() -> None:
        async with TestClient(app) as client:
            await asyncio.sleep(0.05)
            await client.publish("orders", "x", key="k")
            await client.settle()

    before = time.time()
    asyncio.run(scenario())
    (row,) = read(tmp_path)

    assert before < row["arrived"] <= row["started"] <= time.time()
    assert 0.0 <= row["duration"] < 1.0


def test_runs_shorter_than_a_millisecond_are_measured_on_uvloop_too(tmp_path: Path) -> None:
    """The clock of its loop counts whole milliseconds."""
    uvloop = pytest.importorskip("uvloop")
    app = App("billing", journal=tmp_path)
    took: list[float] = []

    @app.consume("orders", concurrency=1)
    async def handle(record: Record) -> None:  # noqa: ARG001
        began = time.monotonic()
        while time.monotonic() < began + 0.0003:
            pass
        took.append(time.monotonic() - began)

    async def scenario() -> None:
        async with TestClient(app) as client:
            for _ in range(50):
                await client.publish("orders", "x", key="k")
            await client.settle()

    uvloop.run(scenario())
    durations = [row["duration"] for row in read(tmp_path)]

    assert all(recorded >= seen for recorded, seen in zip(durations, took, strict=True))
    assert sorted(durations)[10] < 0.0009, "and not a millisecond or nothing"


@pytest.mark.parametrize("show_keys", [False, True])
def test_keys_are_shown_only_on_request(tmp_path: Path, *, show_keys: bool) -> None:
    app = App("billing", journal=tmp_path, show_keys=show_keys)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    live(app, ("alice", "a"), (None, "b"), ("alice", "c"), ("x" * 1_000, "d"))
    rows = read(tmp_path)

    assert [row["key_hash"] for row in rows] == [key_hash(key) for key in (b"alice", None, b"alice", b"x" * 1_000)]
    assert [row["key"] for row in rows] == (
        [b"alice", None, b"alice", b"x" * 1_000] if show_keys else [None, None, None, None]
    )
    if not show_keys:
        assert not any(b"alice" in path.read_bytes() for path in tmp_path.iterdir())


def by_customer(record: Record) -> object:
    return Unshowable() if record.key == b"odd" else (record.value or b"")[:1]


class Unshowable:
    """A shard key of the application that has no hash in other processes."""

    def __repr__(self) -> str:
        raise AssertionError


@pytest.mark.parametrize(
    ("options", "shard_of"),
    [
        ({}, key_hash),
        ({"shards": 7}, lambda key: shard_number(key, 7)),
        ({"shard_by": "record"}, lambda _: None),
        ({"shard_by": "partition"}, lambda _: key_hash(("orders", 0))),
        ({"shard_by": by_customer}, lambda key: None if key == b"odd" else key_hash(key[:1])),
    ],
    ids=["on demand", "fixed", "record", "partition", "function"],
)
def test_a_shard_is_written_as_a_number_or_a_hash(
    tmp_path: Path, options: dict[str, Any], shard_of: Callable[[bytes], int | None]
) -> None:
    app = App("billing", journal=tmp_path, show_keys=True)

    @app.consume("orders", **options)
    async def handle(record: Record) -> None: ...

    live(app, *((key, key) for key in ("alice", "bob", "odd", "alan")))

    assert [row["shard"] for row in read(tmp_path)] == [shard_of(row["key"]) for row in read(tmp_path)]


@pytest.mark.parametrize("options", [{}, {"shards": 3}], ids=["on demand", "fixed"])
def test_a_record_without_a_shard_key_never_ran(tmp_path: Path, options: dict[str, Any]) -> None:
    def broken(_: Record) -> object:
        raise ZeroDivisionError

    app = App("billing", journal=tmp_path)

    @app.consume("orders", shard_by=broken, on_failure="skip", **options)
    async def handle(record: Record) -> None: ...

    live(app, ("k", "x"))
    (row,) = read(tmp_path)

    assert (row["status"], row["error_type"]) == ("skipped", "ZeroDivisionError")
    assert row["started"] is row["duration"] is row["shard"] is None
    assert row["key_hash"] == key_hash(b"k")


def test_every_record_of_a_batch_has_the_times_and_result_of_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A worker process of the test run cannot send the message of the log.
    monkeypatch.setattr(logging.getLogger("aioshard.engine.failures"), "disabled", True)
    app = App("billing", journal=tmp_path)
    fail = [True]

    @app.consume("orders", batch=Batch(max_records=3, linger=0.1), retry=ONCE, on_failure="skip")
    async def handle(records: list[Record]) -> list[str]:
        await asyncio.sleep(1.0)
        if fail and records[0].value == b"3":
            fail.clear()
            raise BatchError({records[1]: ValueError("poison \udc80")})
        return [str(record.offset) for record in records]

    live(app, *((str(number), str(number)) for number in range(6)))
    rows = read(tmp_path)

    assert [row["status"] for row in rows] == ["processed"] * 4 + ["skipped", "processed"]
    assert [row["result"] for row in rows[:3]] == [b'["0","1","2"]'] * 3
    assert len({row["started"] for row in rows[:3]}) == 1
    assert [row["duration"] for row in rows] == pytest.approx([1.0] * 6)
    assert (rows[4]["attempts"], rows[4]["error"]) == (1, "poison \\udc80"), "not half a surrogate pair"


def test_a_result_is_written_as_the_handler_returned_it(tmp_path: Path) -> None:
    app = App("billing", journal=tmp_path)
    shared: list[str] = []

    @app.consume("orders", shard_by="partition")
    async def handle(record: Record) -> object:
        shared.append((record.value or b"").decode())
        return {b"1": shared, b"2": b"raw", b"3": Unshowable()}[record.value or b""]

    live(app, ("k", "1"), ("k", "2"), ("k", "3"))

    results = [row["result"] for row in read(tmp_path)]
    assert results[:2] == [b'["1"]', b"raw"]
    assert results[2] is None or b"Unshowable" in results[2]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in (2, 3, 4))])
def test_every_record_has_one_row_across_rebalances(tmp_path: Path, seed: int) -> None:
    app = App("billing", journal=tmp_path)

    @app.consume("orders", concurrency=8, retry=Retry(attempts=3, initial=0.1))
    async def handle(record: Record, context: Context) -> None:
        await asyncio.sleep(0.01)
        if record.offset % 5 == 0 and context.attempt == 1:
            raise ValueError

    async def scenario() -> None:
        async with TestClient(app) as client:
            for number in range(2_500):
                await client.publish("orders", "x", key=str(number % 50), partition=number % 2)
            for _ in range(5):
                await asyncio.sleep(0.3)
                client.group.rebalance()
            await client.settle(timeout=60.0)
            assert app.statistics().replayed == 0

    run(scenario(), seed=seed)
    rows = read(tmp_path)

    assert [(row["partition"], row["offset"]) for row in rows] == list(itertools.product((0, 1), range(1_250)))
    assert all(row["attempts"] == (2 if row["offset"] % 5 == 0 else 1) for row in rows)


# Files ----------------------------------------------------------------------------------------------------------


def batch_of(count: int, first: int = 0) -> Any:
    class Spec:
        name = "handle"
        shards = None

    flat = [
        value
        for offset in range(first, first + count)
        for value in (Spec, "orders", 0, offset, b"k%d" % offset, 1.0, 2.0, 3.0, 4.0, os.urandom(100), b"k", 1, None)
    ]
    assert len(flat) == count * ROW_WIDTH
    return record_batch(flat, ahead=0.0, show_keys=False)


def test_a_large_file_is_closed_and_the_next_one_sorts_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioshard.telemetry.journal._MAX_BYTES", 200_000)
    files = JournalFiles(tmp_path, "billing")
    files.prepare()
    for number in range(5):
        files.write(batch_of(40_000, 40_000 * number))
    files.finish()

    assert len(names(tmp_path)) == files.finished == 5
    assert files.rows == 200_000
    offsets = [pyarrow.parquet.read_table(tmp_path / name)["offset"].to_pylist() for name in names(tmp_path)]
    assert list(itertools.chain.from_iterable(offsets)) == list(range(200_000))


def test_an_old_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioshard.telemetry.journal._MAX_AGE", 0.2)
    app = App("billing", journal=tmp_path)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    def finished(number: int) -> bool:
        found = app.statistics().journal
        return found is not None and found.files == number

    async def scenario() -> None:
        async with TestClient(app) as client:
            for number in (1, 2):
                await client.publish("orders", "x")
                await client.settle()
                await until(functools.partial(finished, number), 20.0, look_every=0.01)
                assert len(read(tmp_path)) == number, "while the app runs"

    asyncio.run(scenario())
    assert len(names(tmp_path)) == 2


def test_readers_never_see_an_unfinished_file(tmp_path: Path) -> None:
    files = JournalFiles(tmp_path, "billing")
    files.prepare()
    files.write(batch_of(40_000))

    assert len(list(tmp_path.iterdir())) == 1
    assert names(tmp_path) == []
    assert read(tmp_path) == []
    files.finish()
    assert len(read(tmp_path)) == 40_000


def test_only_leftovers_of_the_same_group_are_removed(tmp_path: Path) -> None:
    def unfinished() -> set[str]:
        return {path.name for path in tmp_path.iterdir() if path.name.startswith(".")}

    for group in ("billing", "audit"):
        JournalFiles(tmp_path, group).write(batch_of(1))
    (of_other,) = [name for name in unfinished() if "-audit-" in name]
    for name in unfinished():
        os.utime(tmp_path / name, (0, time.time() - 2 * 3600))  # their processes have died since
    neighbour = JournalFiles(tmp_path, "billing")
    before = unfinished()
    neighbour.write(batch_of(1))
    (of_neighbour,) = unfinished() - before

    JournalFiles(tmp_path, "billing").prepare()

    assert unfinished() == {of_other, of_neighbour}
    neighbour.finish()
    assert len(read(tmp_path)) == 1


WRITES = """
import asyncio, sys
from aioshard import App, Record
from aioshard.telemetry import journal
from aioshard.testing import InMemoryBroker, InMemoryTransport

journal._MAX_AGE = 0.1
app = App("billing", journal=sys.argv[1], auto_offset_reset="earliest")

@app.consume("orders")
async def handle(record: Record) -> str:
    return str(record.offset)

async def main():
    broker = InMemoryBroker(partitions=1)
    async with app.started(lambda: InMemoryTransport(broker, "billing")):
        while True:
            for number in range(500):
                broker.publish("orders", b"x", key=b"%d" % (number % 7))
            await asyncio.sleep(0.02)

asyncio.run(main())
"""


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts processes whose app writes a journal endlessly."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", WRITES, str(tmp_path)]
        started.append(subprocess.Popen(command, cwd=PROJECT))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_after_kill_9_every_file_is_whole_and_the_next_start_removes_the_rest(
    tmp_path: Path, writers: Callable[[], subprocess.Popen[bytes]]
) -> None:
    processes = [writers(), writers()]
    wait_for(lambda: all(sum(f"-{process.pid}-" in name for name in names(tmp_path)) >= 3 for process in processes))
    wait_for(lambda: sum(path.name.startswith(".") for path in tmp_path.iterdir()) > 0)
    for process in processes:
        process.kill()
        process.wait()
    for path in tmp_path.iterdir():
        os.utime(path, (0, time.time() - 2 * 3600))

    finished = names(tmp_path)
    for process in processes:
        tables = [pyarrow.parquet.read_table(tmp_path / name) for name in finished if f"-{process.pid}-" in name]
        offsets = [offset for table in tables for offset in table["offset"].to_pylist()]
        results = [result for table in tables for result in table["result"].to_pylist()]
        assert len(offsets) >= 100
        assert len(set(offsets)) == len(offsets)
        assert results == [b'"%d"' % offset for offset in offsets]

    app = App("billing", journal=tmp_path)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    live(app)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert names(tmp_path) == finished


def test_other_parquet_readers_can_read_it(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    pandas = pytest.importorskip("pandas")
    app = App("billing", journal=tmp_path)

    @app.consume("orders")
    async def handle(record: Record) -> bytes | None:
        return record.value

    live(app, *((f"k{number % 3}", str(number)) for number in range(30)))
    (tmp_path / ".20261121T200600.962566Z-x-y-1-a.parquet.part").write_bytes(b"PAR1 and no more")

    query = f"SELECT key_hash, count(*) FROM '{tmp_path}/*.parquet' WHERE status = 'processed' GROUP BY 1"
    assert dict(duckdb.sql(query).fetchall()) == {key_hash(b"k%d" % number): 10 for number in range(3)}
    assert len(pandas.read_parquet(tmp_path)) == 30


# When it cannot be written ----------------------------------------------------------------------------------------


def test_a_hanging_disk_blocks_nothing_and_lost_rows_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, reached = threading.Event(), threading.Event()
    write = JournalFiles.write

    def hanging(files: JournalFiles, batch: Any) -> None:
        reached.set()
        assert go_on.wait(60.0)
        write(files, batch)

    monkeypatch.setattr(JournalFiles, "write", hanging)
    total = 100_000
    app = App("billing", journal=tmp_path, max_buffered_records=2_000)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def scenario() -> None:
        async with TestClient(app) as client:
            for number in range(total):
                client.broker.publish("orders", b"", key=b"%d" % (number % 100))
            await client.settle(timeout=100.0)
            assert reached.is_set()
            held = app.statistics().journal
            assert held is not None
            assert (held.written, held.trouble) == (0, None)
            assert 0 < held.dropped < total
            assert held.waiting + held.dropped == total
            assert held.waiting <= journal._WAITING_CHUNKS * 1_000 + 35_000, "it is bounded"
            go_on.set()

    asyncio.run(scenario())
    found = app.statistics().journal

    assert found is not None
    assert (found.waiting, found.written + found.dropped) == (0, total)
    assert len(read(tmp_path)) == found.written > 0
    assert [text for text in caplog.messages if "cannot keep up" in text] != []


def test_waiting_bytes_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(JournalFiles, "write", lambda files, batch: go_on.wait(60.0) and None)  # noqa: ARG005
    app = App("billing", journal=tmp_path)

    @app.consume("orders")
    async def handle(record: Record) -> bytes:  # noqa: ARG001
        return bytes(2_000_000)

    async def scenario() -> None:
        async with TestClient(app) as client:
            for _ in range(100):
                await client.publish("orders", "x")
            await client.settle(timeout=100.0)
            held = app.statistics().journal
            assert held is not None
            assert held.dropped >= 100 - journal._WAITING_BYTES // 2_000_000 - 33, "some are in flight"
            go_on.set()

    asyncio.run(scenario())


def test_rows_taken_for_writing_no_longer_count_as_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst that is written at last leaves as much room for the next one."""
    go_on, written = threading.Event(), list[int]()

    def held_up(_: JournalFiles, batch: Any) -> None:
        assert go_on.wait(60.0)
        written.append(batch.num_rows)

    monkeypatch.setattr(JournalFiles, "write", held_up)
    app = App("billing", journal=tmp_path)

    @app.consume("orders")
    async def handle(record: Record) -> bytes:  # noqa: ARG001
        return bytes(2_000_000)

    async def scenario() -> None:
        async with TestClient(app) as client:
            for burst in range(1, 4):
                go_on.clear()
                for _ in range(10):
                    await client.publish("orders", "x")
                await client.settle(timeout=100.0)
                go_on.set()
                await until(lambda burst=burst: sum(written) == 10 * burst, 20.0, look_every=0.01)  # type: ignore[misc]
            assert max(written) > 1, "several chunks were written together"
            held = app.statistics().journal
            assert held is not None
            assert held.dropped == 0

    asyncio.run(scenario())


def test_rows_that_arrive_while_writing_fails_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_PAUSE", 600.0)
    attempts, write = [], JournalFiles.write

    def failing(files: JournalFiles, batch: Any) -> None:
        attempts.append(batch)
        write(files, batch)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JournalFiles, "write", failing)
    app = App("billing", journal=tmp_path)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def scenario() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", "lost")
            await client.settle()
            await until(lambda: bool(attempts), 20.0, look_every=0.01)
            for _ in range(4):
                await client.publish("orders", "not tried")
            await client.settle()

    asyncio.run(scenario())
    found = app.statistics().journal

    assert found is not None
    assert (found.written, found.waiting, found.dropped) == (0, 0, 5)
    assert len(attempts) == 1


def test_a_full_disk_is_reported_and_writing_resumes_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal, "_PAUSE", 0.0)
    full = threading.Event()
    write = JournalFiles.write

    def failing(files: JournalFiles, batch: Any) -> None:
        write(files, batch)
        if full.is_set():
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(JournalFiles, "write", failing)
    full.set()
    app = App("billing", journal=tmp_path)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    def now() -> JournalStatistics:
        found = app.statistics().journal
        assert found is not None
        return found

    async def scenario() -> None:
        async with TestClient(app) as client:
            for _ in range(3):
                await client.publish("orders", "lost")
            await client.settle()
            await until(lambda: now().dropped == 3, 20.0, look_every=0.01)
            assert now().trouble == "the journal cannot be written: No space left on device"
            assert os.listdir(tmp_path) == [], "what was begun is gone"  # noqa: PTH208 - a path asks for a thread
            full.clear()
            await client.publish("orders", "kept")
            await client.settle()
            await until(lambda: now().trouble is None, 20.0, look_every=0.01)

    asyncio.run(scenario())

    assert [row["offset"] for row in read(tmp_path)] != []
    assert app.statistics().journal == JournalStatistics(written=1, waiting=0, dropped=3, files=1, trouble=None)
    assert sum("No space left" in text for text in caplog.messages) == 1
    assert sum("is written again" in text for text in caplog.messages) == 1


def test_trouble_lasts_until_rows_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that wait for their group do not mean that there is room again."""
    monkeypatch.setattr(journal, "_PAUSE", 0.0)
    monkeypatch.setattr(journal, "_GROUP_ROWS", 3)
    full = threading.Event()
    write = pyarrow.parquet.ParquetWriter.write_table

    def failing(writer: Any, *table: Any, **options: Any) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device")
        write(writer, *table, **options)

    monkeypatch.setattr(pyarrow.parquet.ParquetWriter, "write_table", failing)
    full.set()
    app = App("billing", journal=tmp_path)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    def now() -> JournalStatistics:
        found = app.statistics().journal
        assert found is not None
        return found

    async def scenario() -> None:
        async with TestClient(app) as client:
            for number in range(3):
                await client.publish("orders", str(number))
            await until(lambda: now().dropped == 3, 20.0, look_every=0.01)
            await client.publish("orders", "lost too")
            await client.settle()
            await until(lambda: now().dropped == 4 or now().trouble is None, 20.0, look_every=0.01)
            assert now().trouble == "the journal cannot be written: No space left on device"
            full.clear()
            await client.publish("orders", "kept")
            await until(lambda: now().trouble is None, 20.0, look_every=0.01)

    asyncio.run(scenario())

    assert app.statistics().journal == JournalStatistics(written=1, waiting=0, dropped=4, files=1, trouble=None)
    assert sum("No space left" in text for text in caplog.messages) == 1


def test_an_app_stops_even_when_its_disk_does_not_respond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal, "_CLOSE_TIMEOUT", 0.2)
    go_on = threading.Event()
    monkeypatch.setattr(JournalFiles, "finish", lambda _: go_on.wait(60.0) and None)
    app = App("billing", journal=tmp_path)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    live(app, ("k", "x"))

    assert [text for text in caplog.messages if "rows lost" in text] != []
    (left,) = [thread for thread in threading.enumerate() if thread.name in journal_threads()]
    assert left.daemon, "it keeps no process alive"
    go_on.set()
    left.join(20.0)


# Start and end --------------------------------------------------------------------------------------------------


def test_one_named_thread_runs_as_long_as_the_app(tmp_path: Path) -> None:
    app = App("billing", journal=tmp_path / "made" / "anew")

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def scenario() -> None:
        for _ in range(2):
            async with TestClient(app):
                assert journal_threads() == ["aioshard journal of billing"]
            assert journal_threads() == []

    run(scenario())
    assert names(tmp_path / "made" / "anew") == [], "without a record no file is made"


def test_an_app_that_does_not_start_leaves_no_thread(tmp_path: Path) -> None:
    def broken(_: App) -> Any:
        raise RuntimeError("no database")

    app = App("billing", journal=tmp_path, resources=broken)
    app.consume("orders")(handle_nothing)

    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="no database"):
            async with TestClient(app):
                pass

    run(scenario())
    assert journal_threads() == []


async def handle_nothing(record: Record) -> None:
    """Does nothing."""


def test_without_a_journal_there_is_no_trace_of_one() -> None:
    app = App("billing")
    app.consume("orders")(handle_nothing)

    async def scenario() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", "x")
            await client.settle()
            assert app.statistics().journal is None
            assert journal_threads() == []

    run(scenario())


def test_a_path_that_is_not_a_directory_is_refused_at_startup(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    app = App("billing", journal=tmp_path / "file")
    app.consume("orders")(handle_nothing)

    async def scenario() -> None:
        with pytest.raises(SettingsError, match="file' cannot be written to"):
            async with TestClient(app):
                pass

    run(scenario())


def test_a_url_is_refused_as_journal_directory() -> None:
    with pytest.raises(SettingsError, match=r"journal='s3://bucket/x' .*local directory"):
        App("billing", journal="s3://bucket/x")


def test_the_journal_can_be_set_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHARD_JOURNAL", str(tmp_path))
    app = App("billing")
    app.consume("orders")(handle_nothing)
    live(app, ("k", "x"))

    assert len(read(tmp_path)) == 1


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_missing_extra_is_named(tmp_path: Path, command: str) -> None:
    (tmp_path / "shop.py").write_text(
        "from aioshard import App, Record\n"
        "app = App('billing', bootstrap_servers='127.0.0.1:1', journal='j')\n"
        "@app.consume('orders')\n"
        "async def handle(record: Record) -> None: ...\n"
    )
    program = (
        "import importlib.util, sys\n"
        "sys.modules['pyarrow'] = None\n"
        "find_spec = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'pyarrow' else find_spec(name, *rest)\n"
        "from aioshard.cli.main import main\n"
        f"main(['{command}', 'shop:app'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 2, done.stderr
    assert "the journal needs the extra 'journal': install it with  pip install 'aioshard[journal]'" in done.stderr


def test_an_app_with_a_journal_imports_no_arrow_before_it_starts() -> None:
    program = (
        "import sys\nfrom aioshard import App\nApp('billing', journal='j')\n"
        "assert not {name for name in sys.modules if name.partition('.')[0] in ('pyarrow', 'pandas')}\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=PROJECT, check=True)


def test_replayed_prefixes_write_no_rows(tmp_path: Path) -> None:
    app = App("billing", journal=tmp_path)
    done: set[int] = set()

    @app.consume("orders")
    async def handle(record: Record) -> None:
        done.add(record.offset)

    history = [Record("orders", 0, offset, b"k", b"", (), 1.0) for offset in range(2)]
    run(assert_idempotent(app, history, reset=done.clear, effects=lambda: done))

    assert list(tmp_path.iterdir()) == []
    assert app.settings.journal == str(tmp_path)
