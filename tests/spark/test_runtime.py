"""The engine inside a task, without Spark and Kafka: rows, named obstacles, nothing left running."""

import asyncio
import dataclasses
import importlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from aioshard import App
from aioshard.errors import HaltedError, PlanError, StuckError
from aioshard.kafka.memory.transport import InMemoryTransport
from aioshard.ports import NOTHING, Allowance, AllowanceOf, FetchedBatch, Transport
from aioshard.records import TopicPartition
from aioshard.schema_registry.framing import framed
from aioshard.schema_registry.registries import Registries
from aioshard.spark.rows import OUTCOMES
from aioshard.spark.task import _Paced, run_handlers
from aioshard.spark.work import Work
from aioshard.testing import InMemoryBroker

Make = Callable[..., "Task"]

HEAD = """
import asyncio, threading, time
from aioshard import Adaptive, App, CircuitBreaker, Context, DeadLetter, Limit, Park, Record, Retry

app = App("history", stuck_after=0.5)
seen = []
release = threading.Event()
"""


class Task:
    """A module with an app, and a topic with its own records."""

    def __init__(self, name: str, records: int) -> None:
        self.module = importlib.import_module(name)
        self.name = name
        self.broker = InMemoryBroker(partitions=2)
        self.broker.create_topic("orders", 2)
        for number in range(records):
            self.broker.publish("orders", b"%d" % number, key=b"k%d" % (number % 5), partition=number % 2)
        start: dict[TopicPartition, int | None] = {TopicPartition("orders", number): 0 for number in (0, 1)}
        self.broker.group("history").commit_from_outside(start)

    def run(self, **work: Any) -> Iterator[pa.RecordBatch]:
        def transport(app: App) -> Transport:
            return InMemoryTransport(self.broker, app.group_id, isolation_level="read_committed")

        return run_handlers(Work(f"{self.name}:app", **work), transport)

    def rows(self, **work: Any) -> list[dict[str, Any]]:
        batches = list(self.run(**work))
        assert all(batch.schema == OUTCOMES for batch in batches)
        rows: list[dict[str, Any]] = [row for batch in batches for row in batch.to_pylist()]
        return sorted(rows, key=lambda row: (row["partition"], row["offset"]))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.syspath_prepend(str(tmp_path))

    def made(handler: str, records: int = 20) -> Task:
        name = f"task_{uuid.uuid4().hex[:8]}"
        (tmp_path / f"{name}.py").write_text(HEAD + handler)
        return Task(name, records)

    return made


def alive() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_every_record_has_a_row(make: Make) -> None:
    task = make("""
@app.consume("orders", retry=Retry(attempts=2, initial=0.001), on_failure="skip")
async def handle(record: Record, context: Context) -> object:
    number = int(record.value)
    if number == 3 or (number == 4 and context.attempt == 1):
        raise LookupError("no such customer")
    return {0: None, 1: b"raw", 2: "text"}.get(number, {"replay": context.replay})
""")
    rows = {int(2 * row["offset"] + row["partition"]): row for row in task.rows()}

    assert sorted(rows) == list(range(20))
    assert [rows[n]["result"] for n in (0, 1, 2, 4)] == [None, b"raw", b'"text"', b'{"replay":true}']
    assert [(rows[n]["status"], rows[n]["attempts"]) for n in (3, 4, 5)] == [
        ("skipped", 2),
        ("processed", 2),
        ("processed", 1),
    ]
    assert (rows[3]["error_type"], rows[3]["error"], rows[3]["value"]) == ("LookupError", "no such customer", b"3")
    assert rows[5]["value"] is rows[5]["headers"] is rows[5]["timestamp"] is None
    assert rows[5]["shard"] == rows[15]["shard"] != rows[6]["shard"]  # of the same key, and of another one
    assert all(row["duration"] >= 0 and row["started"] is not None for row in rows.values())


def test_values_with_a_schema_registry_are_decoded(make: Make) -> None:
    task = make(f"""
from typing import Annotated
from aioshard.schema_registry import Avro, JsonSchema, SchemaRegistry

registry = SchemaRegistry("mock://{uuid.uuid4().hex}")

@app.consume("orders", on_failure="skip")
async def handle(order: Annotated[int, Avro(registry)]) -> int:
    return order + 1

@app.consume("others")
def plain(order: Annotated[int, JsonSchema(registry)]) -> int:
    return order + 2
""")
    form = task.module.app.handlers[0].taken.format
    writer = dataclasses.replace(form, schema='"int"', auto_register=True)
    value = asyncio.run(Registries().encode(writer, "orders", 41))
    task.broker = InMemoryBroker(partitions=1)
    task.broker.create_topic("orders", 1)
    task.broker.create_topic("others", 1)
    task.broker.publish("orders", value)
    task.broker.publish("orders", b"no schema")
    task.broker.publish("others", framed(7, b"40"))
    task.broker.group("history").commit_from_outside({TopicPartition("orders", 0): 0, TopicPartition("others", 0): 0})

    results = {(row["topic"], row["offset"]): (row["status"], row["result"]) for row in task.rows()}

    assert results == {
        ("orders", 0): ("processed", b"42"),
        ("orders", 1): ("skipped", None),
        ("others", 0): ("processed", b"42"),
    }


def test_a_result_is_captured_when_the_record_completes(make: Make) -> None:
    task = make("""
kept = {}

@app.consume("orders")
async def handle(record: Record) -> object:
    kept["number"] = int(record.value)
    return kept
""")
    assert sorted(row["result"] for row in task.rows()) == sorted(b'{"number":%d}' % n for n in range(20))


def test_dependencies_are_injected_and_closed(make: Make) -> None:
    task = make("""
import contextlib
from typing import Annotated
from fast_depends import Depends

closed = []

@contextlib.asynccontextmanager
async def resources(_):
    yield "pool"

app = App("history", stuck_after=0.5, resources=resources)

async def get_session(record: Record, context: Context):
    yield f"session of {context.state} for {record.value.decode()}"
    closed.append(record)

def get_number(number: int) -> int:
    return -number

@app.consume("orders")
async def handle(
    number: int, session: Annotated[str, Depends(get_session)], negative: int = Depends(get_number)
) -> str:
    return f"{session}, {negative}"
""")
    results = {row["result"] for row in task.rows()}

    assert results == {b'"session of pool for %d, %d"' % (number, -number) for number in range(20)}
    assert len(task.module.closed) == 20


def test_a_process_handler_runs_in_the_spark_worker_one_record_at_a_time(make: Make) -> None:
    """Spark has a worker for each core already."""
    task = make("""
import os
running = []

@app.consume("orders", run_in="process", shard_by="record")
def handle(record: Record, context: Context) -> object:
    running.append(record)
    result = {"pid": os.getpid(), "replay": context.replay, "concurrent": len(running)}
    time.sleep(0.001)
    running.remove(record)
    return result
""")
    here = b'{"pid":%d,"replay":true,"concurrent":1}' % os.getpid()
    assert {row["result"] for row in task.rows()} == {here}


def test_a_halted_record_is_an_error_or_a_row(make: Make) -> None:
    handler = """
@app.consume("orders", retry=Retry(attempts=1))
async def handle(record: Record) -> None:
    if record.value == b"7":
        raise LookupError("no such customer")
"""
    with pytest.raises(HaltedError, match=r"orders/1/3 \(key b'k2', LookupError: no such customer\)"):
        make(handler).rows()
    (row,) = [row for row in make(handler).rows(halted_rows=True) if row["status"] == "halted"]
    assert (row["partition"], row["offset"], row["attempts"], row["value"]) == (1, 3, 1, b"7")


def test_a_halt_ends_the_task_at_once(make: Make) -> None:
    task = make("""
app.configure(stuck_after=60.0)

@app.consume("orders", retry=Retry(attempts=1))
async def handle(record: Record) -> None:
    if record.value == b"7":
        raise LookupError("no such customer")
    if record.value == b"0":
        await asyncio.sleep(12)
""")
    rows = task.rows(halted_rows=True)

    assert [row["offset"] for row in rows if row["status"] == "halted"] == [3]
    assert (0, 0) not in {(row["partition"], row["offset"]) for row in rows}  # nobody waited for it


def test_an_open_circuit_breaker_ends_the_task(make: Make) -> None:
    task = make("""
@app.consume("orders", retry=Retry(attempts=1), on_failure=DeadLetter("orders.dlt", breaker=CircuitBreaker(minimum=3)))
async def handle(record: Record) -> None:
    raise ConnectionError("down")
""")
    rows = task.rows(halted_rows=True)

    assert [row["status"] for row in rows].count("dead_lettered") == 2
    halted = next(row for row in rows if row["status"] == "halted")
    assert "the circuit breaker of handler handle is open" in halted["error"]
    assert "ConnectionError" in halted["error"], "what it failed with"
    assert task.broker.topics().keys() == {"orders"}  # no letter is sent from a task


HANGING = """
@app.consume("orders")
async def handle(record: Record) -> None:
    seen.append(record.offset)
    if record.value == b"7":
        await asyncio.sleep(60)
"""


def test_a_hanging_record_ends_the_task_after_stuck_after_and_is_named(make: Make) -> None:
    began = time.monotonic()
    (row,) = [row for row in make(HANGING).rows(halted_rows=True) if row["status"] == "halted"]

    assert time.monotonic() - began < 30
    assert (row["partition"], row["offset"], row["error_type"]) == (1, 3, "StuckError")
    assert "asyncio.tasks.sleep" in row["error"]
    with pytest.raises(HaltedError, match=r"orders/1/3 .*StuckError: no record completed for stuck_after=0.5 s"):
        make(HANGING).rows()


def test_a_handler_that_blocks_the_loop_fails_only_its_task(make: Make) -> None:
    task = make("""
@app.consume("orders")
async def handle(record: Record) -> None:
    release.wait(30)
""")
    try:
        with pytest.raises(StuckError, match="has blocked the event loop"):
            task.rows()
        assert (
            len(
                make("""
@app.consume("orders")
async def handle(record: Record) -> None:
    pass
""").rows()
            )
            == 20
        )
    finally:
        task.module.release.set()


def test_unread_rows_hold_back_reading(make: Make) -> None:
    task = make(
        """
app.configure(max_buffered_records=1_000, stuck_after=30.0)

@app.consume("orders")
async def handle(record: Record) -> None:
    seen.append(record.offset)
""",
        records=60_000,
    )
    rows = task.run()
    first = next(rows)
    at_rest = _until_at_rest(task.module.seen)

    assert at_rest < 50_000
    assert first.num_rows + sum(batch.num_rows for batch in rows) == 60_000


def test_the_event_loop_is_blocked_while_spark_writes_rows(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioshard.spark.task._HAND_OVER", 30.0)
    task = make(
        """
@app.consume("orders")
async def handle(record: Record) -> None:
    seen.append(record.offset)
""",
        records=20_000,
    )
    rows = task.run()
    began = time.monotonic()
    written = 0
    for _ in range(2):
        written += next(rows).num_rows
        before = len(task.module.seen)
        time.sleep(0.2)  # what is looked for is that nothing happens
        assert len(task.module.seen) == before < 20_000

    assert written + sum(batch.num_rows for batch in rows) == 20_000
    assert time.monotonic() - began < 30.0  # it continues as soon as Spark asks for more


async def test_rows_are_collected_before_records_are_taken_in() -> None:
    calls: list[str] = []

    class Client:
        async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[FetchedBatch]:
            assert timeout == 1.0
            allowance(TopicPartition("orders", 0))
            return ()

    def allowance(_: TopicPartition) -> Allowance:
        calls.append("allowance")
        return NOTHING

    client: Any = Client()
    await _Paced(client, lambda: False, lambda: calls.append("collect")).poll(allowance, 1.0)

    assert calls == ["collect", "allowance"]


def _until_at_rest(seen: list[int]) -> int:
    """Count the records that ran, once none runs any longer."""
    before = -1
    while len(seen) != before:
        before = len(seen)
        time.sleep(0.5)  # what is looked for is that nothing happens
    return before


def test_a_task_abandoned_by_spark_leaves_nothing_running(make: Make) -> None:
    handler = "app.configure(stuck_after=60.0)\n" + HANGING.replace('record.value == b"7"', "record.offset >= 6_900")
    task = make(handler, 14_000)  # it hangs behind the first rows
    app: App = task.module.app
    rows = task.run()
    next(rows)
    assert app.statistics().state != "stopped"
    rows.close()  # type: ignore[attr-defined]  # it is a generator

    assert app.statistics().state == "stopped"
    assert len(make(HANGING.replace("60", "0")).rows()) == 20  # the loop serves the next one


@pytest.mark.parametrize("rows", [3, 5_000], ids=["in the middle", "at the end"])
def test_rows_rejected_by_arrow_end_the_task(make: Make, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    handler = """
@app.consume("orders")
async def handle(record):
    pass
"""

    def refuse(*_: object) -> None:
        raise pa.ArrowCapacityError("too large")

    with monkeypatch.context() as patched:
        patched.setattr("aioshard.spark.task._ROWS", rows)
        patched.setattr("aioshard.spark.outcomes.ProcessedRows.take", refuse)
        with pytest.raises(pa.ArrowCapacityError):
            make(handler).rows()
    assert len(make(handler).rows()) == 20  # the loop serves the next one


def test_tasks_share_the_total_concurrency(make: Make) -> None:
    task = make("""
running = 0

@app.consume("orders", concurrency=16)
async def handle(record: Record) -> int:
    global running
    running += 1
    most = running
    await asyncio.sleep(0.005)
    most = max(most, running)
    running -= 1
    return most
""")
    assert max(int(row["result"]) for row in task.rows(total_concurrency=6, at_once=3)) == 2


@pytest.mark.parametrize("bounds", ["1, 16, initial=16", "16, 512"])
def test_tasks_share_the_total_concurrency_of_an_adaptive_handler(make: Make, bounds: str) -> None:
    """Its bounds are lowered to the share of the task."""
    task = make(SHARED.format(concurrency=f"Adaptive({bounds})", other="elsewhere"), records=200)
    task.broker.create_topic("elsewhere", 1)
    task.broker.group("history").commit_from_outside({TopicPartition("elsewhere", 0): 0})
    assert len(task.rows(total_concurrency=6, at_once=2, topics=("orders",))) == 200

    assert task.module.most == 3


SHARED = """
running = most = 0

async def run() -> None:
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.002)
    running -= 1

@app.consume("orders", concurrency={concurrency})
async def handle(record: Record) -> None:
    await run()

@app.consume("{other}", concurrency=16)
async def others(record: Record) -> None:
    await run()
"""


def test_the_total_concurrency_applies_to_a_single_handler(make: Make) -> None:
    task = make(SHARED.format(concurrency=16, other="elsewhere"), records=200)
    task.broker.create_topic("elsewhere", 1)
    task.broker.group("history").commit_from_outside({TopicPartition("elsewhere", 0): 0})
    task.rows(total_concurrency=6, at_once=2, topics=("orders",))

    assert task.module.most == 3


def test_handlers_of_a_task_share_its_part_of_the_total(make: Make) -> None:
    task = make(SHARED.format(concurrency=16, other="invoices"))
    task.broker.create_topic("invoices", 1)
    for number in range(20):
        task.broker.publish("invoices", b"x", key=b"i%d" % number)
    task.broker.group("history").commit_from_outside({TopicPartition("invoices", 0): 0})
    assert len(task.rows(total_concurrency=8, at_once=2)) == 40

    assert task.module.most == 4


def test_a_total_below_the_number_of_tasks_gives_one_each(make: Make) -> None:
    task = make(SHARED.format(concurrency=16, other="elsewhere"))
    task.broker.create_topic("elsewhere", 1)
    task.broker.group("history").commit_from_outside({TopicPartition("elsewhere", 0): 0})
    assert len(task.rows(total_concurrency=2, at_once=3)) == 20

    assert task.module.most <= 2  # one of each handler


def test_a_total_that_fixed_shards_would_break_is_refused(make: Make) -> None:
    task = make("""
@app.consume("orders", shards=8)
async def handle(record: Record) -> None:
    pass
""")
    with pytest.raises(PlanError, match="total_concurrency=4 does not work with shards=8 of handler 'handle'"):
        task.rows(total_concurrency=4)
    assert len(task.rows()) == 20


def test_tasks_share_the_rate_of_the_whole_job(make: Make) -> None:
    task = make("""
@app.consume("orders", limit=Limit("pace", 80, burst=4))
async def handle(record: Record) -> float:
    return time.monotonic()
""")
    started = sorted(float(row["result"]) for row in task.rows(at_once=4))

    assert started[-1] - started[0] > 0.85 * 19 / 20


def test_the_failure_policy_of_a_run_replaces_the_handlers(make: Make) -> None:
    handler = """
@app.consume("orders", retry=Retry(attempts=1), on_failure="halt")
async def handle(record: Record) -> None:
    if record.offset % 3 == 0:
        raise LookupError("no such customer")
"""
    task = make(handler)
    assert {row["status"] for row in make(handler).rows(on_failure="skip")} == {"processed", "skipped"}
    assert {row["status"] for row in task.rows(on_failure="dead-letter:orders.dlt")} == {"processed", "dead_lettered"}
    assert task.broker.topics().keys() == {"orders"}


def test_a_missing_app_is_a_clear_error() -> None:
    with pytest.raises(PlanError, match="No module named 'no_such_module'"):
        next(run_handlers(Work("no_such_module:app"), lambda _: None))  # type: ignore[arg-type, return-value]
