"""What a journal says on Spark, against the same added up in plain Python."""

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.compute as pc
import pytest
from aiokafka.partitioner import murmur2
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

from aioshard.core.sharding import shard_number
from aioshard.errors import SettingsError
from aioshard.spark.analysis.candidate import Candidate
from aioshard.spark.analysis.fleet import predict
from aioshard.spark.analysis.journal import Journal, read_journal
from aioshard.spark.analysis.lag import find_lag
from aioshard.spark.analysis.partitioner import Keyed, partitioner_of, place_of_key, recognised
from aioshard.spark.analysis.recording import recorded
from aioshard.spark.analysis.simulation import Engine, simulate
from aioshard.spark.analysis.skew import find_skew
from aioshard.spark.analysis.tail import find_tail
from aioshard.spark.analysis.what_if import ask
from aioshard.spark.analysis.windows import runs_by_windows, shard_of_key, summed_windows
from tests.support.journals import BEGIN, Row, seeded_rows, write_journal

pytestmark = pytest.mark.timeout(600)  # a busy machine starts Spark slowly

RECORDS = 1_200
HANDLERS = {"on_order": {"concurrency": 16, "shards": None}}


def ran(rows: Sequence[Row], workers: int) -> list[Row]:
    """The same rows as an app with so many workers would have written them."""
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
    write_journal(directory, rows[: RECORDS // 2], handlers=HANDLERS)
    write_journal(directory, rows[RECORDS // 2 :], number=1, handlers=HANDLERS)
    (directory / ".20261101T000002.000000Z-shop-host-1-00000002.parquet.part").write_bytes(b"not finished")
    return read_journal(spark, str(directory))


def microseconds(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1e6)


def test_totals_of_skew_are_exact(journal: Journal, rows: list[Row]) -> None:
    found = find_skew(journal, top=1_000)

    assert (found.records, found.ran) == (RECORDS, RECORDS)
    assert found.work_us == sum(microseconds(row.duration) for row in rows)
    assert found.without_key == sum(row.key is None for row in rows)
    by_key, by_partition, by_shard = found.spread
    counts = Counter(row.key.decode() for row in rows if row.key is not None)
    assert {one.name: one.records for one in by_key.top} == counts
    work = Counter[str]()
    for row in rows:
        work[f"orders/{row.partition}"] += microseconds(row.duration)
    assert {one.name: one.work_us for one in by_partition.top} == work
    assert by_shard.groups == len(counts)
    assert by_key.most_records_share == max(counts.values()) / counts.total()
    assert by_key.records_gini == pytest.approx(gini(list(counts.values())))


def gini(values: list[int]) -> float:
    differences = sum(abs(one - other) for one in values for other in values)
    return differences / (2 * len(values) * sum(values))


def test_the_tail_is_that_of_the_rows(journal: Journal, rows: list[Row]) -> None:
    found = find_tail(journal, top=3)

    waits = sorted(microseconds(row.started) - microseconds(row.arrived) for row in rows)
    assert found.wait_us == sum(waits)
    of_wait = found.percentiles[0]
    assert of_wait.levels[-1] == waits[-1]
    assert of_wait.levels[0] == pytest.approx((waits[RECORDS // 2 - 1] + waits[RECORDS // 2]) / 2)
    ends: dict[str, int] = defaultdict(int)
    for row in rows:
        ends[f"orders/{row.partition}"] = max(
            ends[f"orders/{row.partition}"], microseconds(row.started) + microseconds(row.duration)
        )
    assert found.partitions[0].name == max(ends, key=ends.__getitem__)
    assert found.slowest_wait_share == pytest.approx(waited_for_the_slowest(rows) / sum(waits))
    assert 0 < found.slowest_wait_share < 1


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


def test_lag_counts_what_was_not_finished(journal: Journal, rows: list[Row]) -> None:
    found = find_lag(journal, moments=7)

    start = min(microseconds(row.arrived) for row in rows)
    for one in found.partitions:
        mine = [row for row in rows if f"orders/{row.partition}" == one.partition]
        for moment in one.moments:
            now = start + moment.at_us
            ends = [microseconds(row.started) + microseconds(row.duration) for row in mine]
            there = sum(microseconds(row.arrived) <= now < end for row, end in zip(mine, ends, strict=True))
            assert (moment.unfinished, moment.in_hand) == (there, there)
    assert found.made_up == 0
    assert all(one.moments[-1].unfinished == 0 for one in found.partitions)


def test_windows_and_events_agree_on_every_record(journal: Journal) -> None:
    """Whole microseconds: not nearly the same, the same."""
    found = recorded(journal, None, RECORDS)
    shards = [3, 16, 250]
    table = runs_by_windows(found.work, shards).orderBy("available", "part", "offset").toArrow()
    seen = {number: table.filter(pc.equal(table.column("shards"), number)) for number in shards}

    for number in shards:
        runs = simulate(found.recording.work, Engine(number, number, 1_000_000))
        assert seen[number].column("started").to_pylist() == list(runs.started)
        assert seen[number].column("finished").to_pylist() == list(runs.finished)


def test_windows_know_where_a_bound_would_have_changed_something(journal: Journal) -> None:
    found = recorded(journal, None, RECORDS)
    seen = summed_windows(found.work, [8])[8]

    roomy = predict(found.recording, Candidate(shards=8, max_buffered_records=1_000_000))
    tight = predict(found.recording, Candidate(shards=8, max_buffered_records=40))

    assert seen.is_exact(1_000_000)
    assert not seen.is_exact(40)
    assert (seen.makespan, seen.wait, seen.total) == (roomy.makespan, roomy.wait, roomy.total)
    assert tight.total != roomy.total


def test_a_shard_has_one_number_in_python_and_in_sql(spark: SparkSession) -> None:
    keys = [b"key-%d" % number for number in range(100_000)]
    table = spark.createDataFrame([(bytearray(key),) for key in keys], "key binary")
    for shards in (1, 6, 64, 1_000):
        twin = f"shiftright(((crc32(key)*1327217885L) & 4294967295L)*{shards}, 32)"
        seen = table.select(sql.expr(twin).alias("twin"), shard_of_key("key", shards).alias("shard")).toArrow()
        expected = [shard_number(key, shards) for key in keys]
        assert seen.column("twin").to_pylist() == expected
        assert seen.column("shard").to_pylist() == expected


@pytest.mark.parametrize(("partitions", "shards"), [(6, 64), (16, 64), (64, 64)])
def test_each_partition_reaches_nearly_every_shard(partitions: int, shards: int) -> None:
    """The partitioner's own hash must not decide the shard, or a partition would reach few of them."""
    reached: dict[int, set[int]] = defaultdict(set)
    for number in range(100_000):
        key = b"key-%d" % number
        reached[zlib.crc32(key) % partitions].add(shard_number(key, shards))
    assert all(len(one) >= math.ceil(0.95 * shards) for one in reached.values())


def test_asking_what_if(journal: Journal) -> None:
    asked = [Candidate.parse(text) for text in ("shards=64", "concurrency=4", "concurrency=4,partitions=9,members=3")]

    found = ask(journal, asked)

    assert found.handler.concurrency == 16
    assert found.check is not None
    assert found.check.makespan == pytest.approx(found.measured.makespan, rel=0.02)
    windows, events, members = (answer.prediction for answer in found.answers)
    assert windows is not None
    assert events is not None
    assert members is not None
    assert (windows.by, events.by) == ("windows", "events")
    assert len(members.member_work) == 3
    assert found.hottest_key == "key-0"
    assert all(prediction.makespan >= found.best_possible for prediction in (windows, events, members))


@pytest.mark.parametrize("partitioner", ["murmur2", "crc32"])
def test_the_producers_hash_is_found_in_what_it_did(spark: SparkSession, partitioner: str) -> None:
    keys = [b"customer-%d" % number for number in range(60)]
    hashes: dict[str, Callable[[bytes], int]] = {"murmur2": lambda key: murmur2(key) & 0x7FFFFFFF, "crc32": zlib.crc32}
    hashed = hashes[partitioner]
    rows = [("orders", hashed(key) % 7, bytearray(key)) for key in keys]
    table = spark.createDataFrame(rows, "topic string, partition int, key binary")

    assert recognised(table) == partitioner
    seen = table.select(place_of_key(partitioner).alias("place")).toArrow().column("place").to_pylist()
    assert seen == [hashed(key) for key in keys]


def test_murmur2_is_that_of_java() -> None:
    """The vectors of Kafka's own tests."""
    assert [murmur2(key) - 2**32 for key in (b"21", b"foobar")] == [-973932308, -790332482]


def test_another_hash_is_not_taken_for_one_of_them() -> None:
    assert partitioner_of([Keyed("t", number % 3, b"%d" % number) for number in range(50)]) is None


def test_fixed_shards_that_are_those_of_the_keys_can_be_split_anew(spark: SparkSession, tmp_path: Path) -> None:
    fixed = ran(seeded_rows(5, 200, shards=4), 1_000)
    write_journal(tmp_path / "keys", fixed, handlers={"on_order": {"shards": 4, "concurrency": 4}})
    for row in fixed:
        row.shard = (row.partition + 1) % 4  # of some function of the user's own
    write_journal(tmp_path / "own", ran(fixed, 1_000), handlers={"on_order": {"shards": 4, "concurrency": 4}})

    assert ask(read_journal(spark, str(tmp_path / "keys")), [Candidate(shards=9)]).answers[0].prediction is not None
    own = read_journal(spark, str(tmp_path / "own"))
    with pytest.raises(SettingsError, match="cannot be asked about"):
        ask(own, [Candidate(shards=9)])
    assert ask(own, [Candidate(shards=4)]).answers[0].prediction is not None


def test_what_the_processor_decides_is_not_predicted(spark: SparkSession, tmp_path: Path) -> None:
    """Runs that never overlap although 16 workers were free, and all of it was there: the loop had no time."""
    rows = [
        Row(offset=number, arrived=BEGIN, started=BEGIN + number * 0.01, duration=0.01, shard=number, key_hash=number)
        for number in range(100)
    ]
    write_journal(tmp_path, rows, handlers=HANDLERS)

    found = ask(read_journal(spark, str(tmp_path)), [Candidate(concurrency=64)])

    answer = found.answers[0]
    assert answer.prediction is None
    assert answer.not_predicted is not None
    assert answer.not_predicted.startswith("CPU-bound, not predicted")
