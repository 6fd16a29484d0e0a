"""From completed deliveries to rows: the quick way and the general one agree, and no record is kept."""

import gc
from typing import Any

import pyarrow as pa
import pytest

from aioshard import App, Record
from aioshard.core.sharding import key_hash
from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import Handler
from aioshard.engine.outcomes import Outcome, Recovery
from aioshard.spark.outcomes import Outcomes
from aioshard.spark.rows import outcome_batch
from aioshard.telemetry.outcome_rows import OutcomeRows, hashes
from aioshard.telemetry.outcome_rows import _known_hashes as known_hashes
from tests.engine.deliveries import make_epoch

AHEAD = 1_700_000_000.0


def spec(name: str = "handle", shards: int | None = None) -> Handler:
    app = App("history")

    async def handle(_: Record) -> None:
        pass

    handle.__name__ = name
    options: Any = {} if shards is None else {"shards": shards}
    app.consume("orders", **options)(handle)
    return next(iter(app))


def completed(keys: list[Any], topics: list[str] | None = None) -> list[Delivery]:
    _, deliveries = make_epoch(keys)
    for number, delivery in enumerate(deliveries):
        topic = "orders" if topics is None else topics[number % len(topics)]
        delivery.record = delivery.record._replace(topic=topic, partition=number % 3)
        delivery.starts = 1
        delivery.run = (10.0 + number, 10.25 + number, None)
    return deliveries


def collected(handler: Handler, deliveries: list[Delivery], rows: int = 1_000_000) -> list[pa.RecordBatch]:
    batches: list[pa.RecordBatch] = []
    outcomes = Outcomes(batches.append, rows, AHEAD)
    for number, delivery in enumerate(deliveries, 1):
        outcomes.observe(handler)(delivery)
        if not number % 150:
            outcomes.collect()
    outcomes.finish()
    assert outcomes.count == len(deliveries)
    return batches


class Unhashable:
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("keys", [[b"a", b"b", None, "text", 7, ("orders", 1)], [b"a", Unhashable()], [None]])
@pytest.mark.parametrize("topics", [["orders"], ["orders", "refunds"]])
def test_processed_records_get_the_rows_of_the_general_way(keys: list[Any], topics: list[str]) -> None:
    handler = spec()
    deliveries = completed([keys[number % len(keys)] for number in range(1_000)], topics)
    general = OutcomeRows(lambda: None, 1_000_000, max_bytes=1 << 40, keep_failed=True)
    for delivery in deliveries:
        general.add(handler, delivery)

    (batch,) = collected(handler, deliveries)

    batch.validate(full=True)
    assert batch == outcome_batch(general.take()[0], AHEAD)


def test_the_hashes_of_many_keys_are_forgotten() -> None:
    keys = [b"%d" % number for number in range(25_000)]

    assert hashes(keys).to_pylist() == [key_hash(key) for key in keys]
    assert not known_hashes


def test_a_key_that_cannot_be_hashed_costs_no_other_key_its_hash() -> None:
    keys: list[Any] = [b"a", Unhashable(), b"b"]

    assert hashes(keys).to_pylist() == [key_hash(b"a"), None, key_hash(b"b")]


def test_the_shard_of_a_fixed_shard_is_its_number() -> None:
    (batch,) = collected(spec(shards=4), completed([0, 3, 1]))

    assert batch.column("shard").to_pylist() == [0, 3, 1]


def test_each_handler_has_its_own_rows() -> None:
    batches: list[pa.RecordBatch] = []
    outcomes = Outcomes(batches.append, 1_000, AHEAD)
    first, second = spec("first"), spec("second")
    for number, delivery in enumerate(completed([b"k"] * 10)):
        outcomes.observe(first if number % 2 else second)(delivery)
    outcomes.finish()

    assert sorted(batch.column("handler").to_pylist() for batch in batches) == [["first"] * 5, ["second"] * 5]


def test_rows_are_passed_on_once_they_are_enough() -> None:
    batches = collected(spec(), completed([b"k"] * 1_000), rows=300)

    assert [batch.num_rows for batch in batches] == [300, 300, 300, 100]
    assert sorted(offset for batch in batches for offset in batch.column("offset").to_pylist()) == list(range(1_000))


def test_unusual_outcomes_among_others_keep_their_details() -> None:
    deliveries = completed([b"k"] * 5)
    deliveries[1].run = (1.0, 2.0, b"result")
    deliveries[2].starts = 2
    deliveries[2].failures = 1
    deliveries[3].divert(Recovery("skip", _unused))
    deliveries[3].outcome = Outcome.SKIPPED

    batches = collected(spec(), deliveries)

    rows = sorted((row for batch in batches for row in batch.to_pylist()), key=lambda row: row["offset"])
    assert [(row["status"], row["attempts"], row["result"]) for row in rows] == [
        ("processed", 1, None),
        ("processed", 1, b"result"),
        ("processed", 2, None),
        ("skipped", 0, None),
        ("processed", 1, None),
    ]


async def _unused(_: Any) -> Outcome:
    pytest.fail("the recovery is not taken here")


def test_collected_rows_keep_no_record() -> None:
    outcomes = Outcomes(lambda _: None, 1_000_000, AHEAD)
    deliveries = completed([b"k"] * 10)
    records = [delivery.record for delivery in deliveries]
    for delivery in deliveries:
        outcomes.observe(spec())(delivery)
    outcomes.collect()
    del delivery
    deliveries.clear()
    gc.collect()

    assert [gc.get_referrers(record) for record in records] == [[records]] * 10
