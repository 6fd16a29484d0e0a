"""The journal analysis on Spark, compared with plain Python."""

import dataclasses
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

from aioshard.core.sharding import shard_number
from aioshard.errors import SettingsError
from aioshard.reports.analysis import Journal, lag, progress, read_journal, skew, tail
from aioshard.reports.tables import DuckTables, SparkTables
from tests.support.journals import BEGIN, Row, rebalance, seeded_rows, write_journal

pytestmark = pytest.mark.timeout(600)  # a busy machine starts Spark slowly

RECORDS = 1_200


def ran(rows: Sequence[Row], workers: int) -> list[Row]:
    """The same rows as an app with that number of workers would have written them."""
    free: dict[int | None, float] = {}
    slots = [0.0] * workers
    for row in rows:
        slot = min(range(workers), key=slots.__getitem__)
        row.started = round(max(row.arrived, slots[slot], free.get(row.shard, 0.0)), 6)
        slots[slot] = row.started + (row.duration or 0.0)
        if row.shard is not None:
            free[row.shard] = slots[slot]
    return list(rows)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return ran(seeded_rows(5, RECORDS, rate=600, show_keys=True), 16)


@pytest.fixture(scope="module")
def journal(spark: SparkSession, rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Journal:
    directory = tmp_path_factory.mktemp("journal")
    write_journal(directory, rows[: RECORDS // 2])
    write_journal(directory, rows[RECORDS // 2 :], number=1)
    (directory / ".20261101T000002.000000Z-shop-host-1-00000002.parquet.part").write_bytes(b"not finished")
    return read_journal(SparkTables(spark), str(directory))


def equal(one: Any, other: Any) -> bool:
    """Whether two results are the same, but for the last digits of fractions."""
    if isinstance(one, float):
        return bool(one == pytest.approx(other, rel=1e-9))
    if isinstance(one, dict):
        return [*one] == [*other] and all(equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def test_duckdb_computes_the_same_as_spark(spark: SparkSession, tmp_path: Path) -> None:
    rows = ran(seeded_rows(7, 400, rate=300, show_keys=True), 8)
    rows[3] = dataclasses.replace(rows[3], started=None, duration=None, status="skipped")
    rows[4] = dataclasses.replace(rows[4], attempts=3, shard=None)
    rows += [
        Row(offset=900, key=b"\xff|\x00", key_hash=-1, shard=5, duration=2.5),
        Row(offset=901, key_hash=17, shard=-2, topic="it's", started=BEGIN + 1.0000005),
        Row(offset=902, handler="o'ther"),
        rebalance(0.5, 0.25, "somebody came"),
        rebalance(1.5, 12.0, 'somebody "went"'),
    ]
    write_journal(tmp_path, rows[:200])
    write_journal(tmp_path, rows[200:], number=1)

    for handler in (None, "o'ther"):
        here = read_journal(DuckTables(), str(tmp_path), handler)
        there = read_journal(SparkTables(spark), str(tmp_path), handler)
        assert here[3:] == there[3:]
        for report in (skew, tail, lag, progress):
            assert equal(report(here), report(there)), (report.__name__, report(here), report(there))


def microseconds(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1e6)


def test_totals_of_skew_are_exact(journal: Journal, rows: list[Row]) -> None:
    found = skew(journal, top=1_000)

    assert (found["records"], found["ran"]) == (RECORDS, RECORDS)
    assert found["work_us"] == sum(microseconds(row.duration) for row in rows)
    assert found["without_key"] == sum(row.key is None for row in rows)
    counts = Counter(row.key.decode() for row in rows if row.key is not None)
    hottest = found["hottest"]
    assert {group["name"]: group["records"] for group in hottest if group["by"] == "key"} == counts
    work = Counter[str]()
    for row in rows:
        work[f"orders/{row.partition}"] += microseconds(row.duration)
    assert {group["name"]: group["work_us"] for group in hottest if group["by"] == "partition"} == work
    by_key, by_partition, by_shard = found["spread"]
    assert [by_key["by"], by_partition["by"], by_shard["by"]] == ["key", "partition", "shard"]
    assert by_shard["groups"] == len(counts)
    assert by_key["hottest_records_share"] == max(counts.values()) / counts.total()
    assert by_key["records_gini"] == pytest.approx(gini(list(counts.values())))


def gini(values: list[int]) -> float:
    differences = sum(abs(value - other) for value in values for other in values)
    return differences / (2 * len(values) * sum(values))


@pytest.mark.chaos
def test_the_tail_matches_the_rows(journal: Journal, rows: list[Row]) -> None:
    found = tail(journal, top=3)

    waits = sorted(microseconds(row.started) - microseconds(row.arrived) for row in rows)
    assert found["wait_us"] == sum(waits)
    of_wait = found["percentiles"][0]
    assert of_wait["of"] == "wait"
    assert of_wait["p100_us"] == waits[-1]
    assert of_wait["p50_us"] == pytest.approx((waits[RECORDS // 2 - 1] + waits[RECORDS // 2]) / 2)
    ends: dict[str, int] = defaultdict(int)
    for row in rows:
        ends[f"orders/{row.partition}"] = max(
            ends[f"orders/{row.partition}"], microseconds(row.started) + microseconds(row.duration)
        )
    partitions = [group for group in found["last"] if group["by"] == "partition"]
    assert partitions[0]["name"] == max(ends, key=ends.__getitem__)
    assert found["slowest_wait_share"] == pytest.approx(waited_for_the_slowest(rows) / sum(waits))
    assert 0 < found["slowest_wait_share"] < 1


def waited_for_the_slowest(rows: list[Row]) -> int:
    slowest = sorted(rows, key=lambda row: -(row.duration or 0.0))[: RECORDS // 100]
    waited = 0
    for slow in slowest:
        began = microseconds(slow.started)
        ended = began + microseconds(slow.duration)
        for row in rows:
            if row.shard is not None and row.shard == slow.shard and row is not slow:
                waited += max(min(ended, microseconds(row.started)) - max(began, microseconds(row.arrived)), 0)
    return waited


@pytest.mark.chaos
def test_lag_counts_unfinished_records(journal: Journal, rows: list[Row]) -> None:
    found = lag(journal, moments=7)

    start = min(microseconds(row.arrived) for row in rows)
    assert len(found["moments"]) == 8
    for moment in found["moments"]:
        now = start + moment["at_us"]
        for name, counted in moment["partitions"].items():
            mine = [row for row in rows if f"orders/{row.partition}" == name]
            ends = [microseconds(row.started) + microseconds(row.duration) for row in mine]
            there = sum(microseconds(row.arrived) <= now < end for row, end in zip(mine, ends, strict=True))
            assert counted == {"unfinished": there, "in_flight": there}
        assert moment["unfinished"] == sum(counted["unfinished"] for counted in moment["partitions"].values())
    assert len(found["moments"][0]["partitions"]) == len(found["most"]) == 4
    assert found["clock_errors"] == 0
    assert found["moments"][-1]["unfinished"] == 0


def test_a_journal_without_rows_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    write_journal(tmp_path, [])

    with pytest.raises(SettingsError, match="has no rows"):
        read_journal(SparkTables(spark), str(tmp_path))


def test_a_shard_has_one_number_in_python_and_in_sql(spark: SparkSession) -> None:
    keys = [b"key-%d" % number for number in range(10_000)]
    table = spark.createDataFrame([(bytearray(key),) for key in keys], "key binary")
    for shards in (1, 6, 64, 1_000):
        twin = f"shiftright(((crc32(key)*1327217885L) & 4294967295L)*{shards}, 32)"
        seen = table.select(sql.expr(twin).alias("twin")).toArrow()
        assert seen.column("twin").to_pylist() == [shard_number(key, shards) for key in keys]


@pytest.mark.parametrize(("partitions", "shards"), [(6, 64), (16, 64), (64, 64)])
def test_every_partition_reaches_nearly_every_shard(partitions: int, shards: int) -> None:
    """The partitioner's own hash must not decide the shard, or a partition would reach few of them."""
    reached: dict[int, set[int]] = defaultdict(set)
    for number in range(100_000):
        key = b"key-%d" % number
        reached[zlib.crc32(key) % partitions].add(shard_number(key, shards))
    assert all(len(value) >= math.ceil(0.95 * shards) for value in reached.values())
