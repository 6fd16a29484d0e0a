"""The engine over rows from elsewhere, without Spark."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from aioshard.errors import HaltedError, PlanError, RunError, StuckError
from aioshard.records import Record
from aioshard.spark.rows import RAW, raw_batch, records_of
from aioshard.spark.shuffle import MOMENT, SHARD, handlers_over_rows, with_shards
from aioshard.spark.work import Work
from tests.spark.apps import write_module

HEAD = """
import asyncio
from aioshard import App, Record, Retry
app = App("rows", bootstrap_servers="127.0.0.1:1", **{settings!r})
seen = []
"""
BY_KEY = """
@app.consume(pattern="orders.*", concurrency=16)
async def handle(record: Record):
    seen.append(record)
    await asyncio.sleep(0)
"""


def record(
    offset: int, key: bytes | None = b"k", *, topic: str = "orders", partition: int = 0, size: int = 1
) -> Record:
    return Record(topic, partition, offset, key, b"v" * size, (("h", b"1"),), 1_700_000_000.5 + offset / 1000)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the description of a task of an app with these handlers; and its module."""

    def work(handlers: str, *, halted_rows: bool = False, **settings: Any) -> tuple[Work, Any]:
        app = write_module(tmp_path, monkeypatch, HEAD.format(settings=settings) + handlers)
        return Work(app.target, halted_rows=halted_rows), app.module

    return work


def outcomes(work: Work, rows: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in handlers_over_rows(work, rows) for row in batch.to_pylist()]


def test_rows_round_trip_to_the_same_records() -> None:
    records = [record(n, None if n % 3 else b"k", partition=n % 2)._replace(headers=(("a", None),)) for n in range(9)]
    assert records_of(raw_batch(records)) == records
    without_headers = raw_batch([record._replace(headers=()) for record in records]).drop_columns(["headers"])
    assert records_of(without_headers) == [record._replace(headers=()) for record in records]


def test_records_keep_row_order_and_their_coordinates(work: Any) -> None:
    """Offsets of several partitions come mixed, descending and twice."""
    task, module = work(BY_KEY)
    records = [record(n % 50 if n % 7 else 99 - n % 50, b"%d" % (n % 3), partition=n % 4) for n in range(5_000)]
    rows = (raw_batch(records[begin : begin + 700]) for begin in range(0, len(records), 700))

    found = outcomes(task, rows)

    assert {row["status"] for row in found} == {"processed"}
    record_ids = sorted((row["partition"], row["offset"]) for row in found)
    assert record_ids == sorted((record.partition, record.offset) for record in records)
    for key in (b"0", b"1", b"2"):
        assert [record for record in module.seen if record.key == key] == [
            record for record in records if record.key == key
        ]


def test_no_rows_give_no_outcomes_and_start_nothing(work: Any) -> None:
    task, _ = work(BY_KEY)
    assert outcomes(task, iter([])) == []
    assert outcomes(task, iter([pa.RecordBatch.from_pylist([], schema=RAW)])) == []


def test_a_handler_whose_topics_arrive_late_runs_with_the_others(work: Any) -> None:
    task, module = work(
        BY_KEY + "@app.consume('refunds', shards=2)\nasync def refund(record: Record):\n    seen.append(record)\n"
    )
    first = [record(n) for n in range(3_000)]
    late = [record(n, b"%d" % n, topic=topic) for n in range(500) for topic in ("refunds", "orders.eu", "orders")]

    found = outcomes(task, iter([raw_batch(first), raw_batch(late)]))

    assert len(found) == len(module.seen) == 4_500
    handlers = {(row["topic"], row["handler"]) for row in found}
    assert handlers == {("orders", "handle"), ("orders.eu", "handle"), ("refunds", "refund")}


def test_waiting_for_rows_does_not_count_as_stuck(work: Any) -> None:
    task, module = work(BY_KEY, stuck_after=0.3)
    taken = threading.Event()

    def rows() -> Iterator[pa.RecordBatch]:
        yield raw_batch([record(n) for n in range(10)])
        assert not taken.wait(1.5)  # what comes before rows takes its time, and longer than handlers may
        yield raw_batch([record(10)])

    assert len(outcomes(task, rows())) == len(module.seen) == 11


@pytest.mark.chaos
def test_a_hanging_record_is_reported_before_the_rows_end(work: Any) -> None:
    task, _ = work(
        "@app.consume('orders')\nasync def handle(record: Record):\n"
        "    await asyncio.sleep(1000 * (record.offset == 3))\n",
        stuck_after=0.5,
        halted_rows=True,
    )
    read = []

    def rows() -> Iterator[pa.RecordBatch]:
        for number in range(40):
            read.append(number)
            yield raw_batch([record(number * 1000 + n, b"%d" % n) for n in range(1000)])

    found = {row["offset"]: row for row in outcomes(task, rows()) if row["status"] == "halted"}

    assert list(found) == [3]
    assert found[3]["error_type"] == StuckError.__name__
    assert len(read) == 40, "what is left is read, or the next task of the worker would find it"


def test_a_halted_record_ends_the_task_and_is_named(work: Any) -> None:
    task, _ = work(
        "@app.consume('orders', retry=Retry(attempts=1))\nasync def handle(record: Record):\n"
        "    if record.offset == 7:\n        raise ValueError('seven')\n"
    )

    with pytest.raises(HaltedError, match=r"orders/5/7 .*seven"):
        outcomes(task, iter([raw_batch([record(n, partition=5) for n in (9, 8, 7, 6)])]))


def test_rows_after_a_halt_are_read_to_the_end(work: Any) -> None:
    """The next task of the same worker would see rows that a task leaves unread."""
    task, _ = work(
        "@app.consume('orders', retry=Retry(attempts=1))\nasync def handle(record: Record):\n    raise ValueError\n",
        max_buffered_records=100,
    )
    task = task._replace(halted_rows=True)
    rows, read = raw_batch([record(n) for n in range(500)]), []

    def given() -> Iterator[pa.RecordBatch]:
        for number in range(200):
            read.append(number)
            yield rows

    assert [row["status"] for row in outcomes(task, given())] == ["halted"]
    assert len(read) == 200


def test_truncated_rows_are_an_error(work: Any) -> None:
    task, _ = work(BY_KEY)

    def rows() -> Iterator[pa.RecordBatch]:
        yield raw_batch([record(0)])
        raise EOFError

    with pytest.raises(RunError, match="EOFError"):
        outcomes(task, rows())


def test_a_record_larger_than_the_buffer_is_processed_alone(work: Any) -> None:
    task, module = work(BY_KEY, max_buffered_bytes=1_048_576)
    sizes = [10, 3_000_000, 10, 2_000_000, 10]

    outcomes(task, iter([raw_batch([record(n, size=size) for n, size in enumerate(sizes)])]))

    assert [len(record.value) for record in module.seen] == sizes


def test_rows_of_a_topic_without_a_handler_are_refused(work: Any) -> None:
    task, _ = work(BY_KEY)
    with pytest.raises(PlanError, match="'elsewhere'"):
        outcomes(task, iter([raw_batch([record(0, topic="elsewhere")])]))
    with pytest.raises(PlanError, match="'elsewhere'"):
        list(with_shards(task, iter([raw_batch([record(0, topic="elsewhere")])])))


def test_records_of_a_key_share_a_shard_and_times_never_decrease(work: Any) -> None:
    task, _ = work(
        "def shard(record):\n"
        "    if record.offset == 3:\n        raise ValueError\n"
        "    return {0: None, 1: 'a', 2: 'a', 4: [], 5: 'b'}[record.offset]\n"
        "@app.consume('orders', shard_by=shard)\nasync def handle(record: Record): ...\n"
        "@app.consume('others', shard_by=lambda record: 'a')\nasync def other(record: Record): ...\n"
    )
    moments = [5.0, 4.0, 7.0, 6.0, 1.0, 8.0]
    records = [record(n)._replace(timestamp=moment) for n, moment in enumerate(moments)]
    records.append(record(0, topic="others")._replace(timestamp=2.0))

    (batch,) = with_shards(task, iter([raw_batch(records)]))

    rows = batch.to_pylist()
    shards = [row[SHARD] for row in rows]
    assert shards[1] == shards[2]
    assert len(set(shards)) == 6, "a function that fails or gives nothing of use asks for no order"
    assert [row[MOMENT] for row in rows] == [5.0, 5.0, 7.0, 7.0, 7.0, 8.0, 2.0]


def test_rows_are_read_ahead_only_within_the_memory_bound(work: Any) -> None:
    task, module = work(
        "@app.consume('orders', concurrency=1)\nasync def handle(record: Record):\n"
        "    await asyncio.sleep(0.01)\n    seen.append(0)\n    ahead.append(read[0] - len(seen))\n"
        "ahead, read = [], [0]\n",
        max_buffered_bytes=1_048_576,
    )

    def rows() -> Iterator[pa.RecordBatch]:
        for number in range(100):
            module.read[0] += 1
            yield raw_batch([record(number, size=4_000_000)])

    assert len(outcomes(task, rows())) == 100
    assert max(module.ahead) <= 8 + 8 + 4, "between the threads, in the transport, and on the way"
