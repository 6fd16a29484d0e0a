"""What a topic says by itself, on a real broker, against the same added up in plain Python; and what it cannot say."""

import asyncio
import datetime as dt
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from pyspark.sql import SparkSession

from aioshard.cli.main import main
from aioshard.core.sharding import shard_number
from aioshard.spark.analysis.arrivals import backlog_at
from tests.support.shared_kafka import SharedKafka

pytestmark = pytest.mark.timeout(600)  # a busy machine starts Spark slowly

PARTITIONS = 3
BEGIN = (int(time.time()) - 3_600) * 1_000
"""Milliseconds since the epoch; not so long ago that the broker deletes what is as old."""
SECOND = 1_000


def sent() -> list[tuple[int, bytes | None, bytes, int]]:
    """Partition, key, value and timestamp of each record; keys are as unequal as 1, 2, 3 and so on."""
    records: list[tuple[int, bytes | None, bytes, int]] = []
    for number in range(1, 11):
        key = b"customer-%d" % number
        records += [(number % PARTITIONS, key, b"x" * number, BEGIN + turn * SECOND) for turn in range(number)]
    records += [(0, None, b"no key", BEGIN + 9 * SECOND)] * 5
    return records


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    assert isinstance(ended.value.code, int)
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code, out, err = asked(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.fixture
def filled(spark: SparkSession, kafka: SharedKafka, topic: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A topic with the records of `sent`; the environment names its broker."""
    assert spark.version

    async def fill() -> None:
        await kafka.create_topic(topic, PARTITIONS)
        async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
            for partition, key, value, timestamp in sent():
                await producer.send(topic, value, key, partition, timestamp)
            await producer.flush()

    asyncio.run(fill())
    monkeypatch.setenv("AIOSHARD_BOOTSTRAP_SERVERS", kafka.bootstrap)
    return topic


def test_skew_is_what_was_sent(filled: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, "skew", "--topic", filled, "--shards", "4", "--shards", "7", "--top", "100")

    records = sent()
    assert (found["records"], found["without_key"]) == (len(records), 5)
    assert found["bytes"] == sum(len(key or b"") + len(value) for _, key, value, _ in records)
    by_key, by_partition, *by_shard = found["spread"]
    named = {one["name"]: (one["records"], one["bytes"]) for one in by_key["top"]}
    assert named == {
        f"customer-{number}": (number, number * (len(b"customer-%d" % number) + number)) for number in range(1, 11)
    }
    assert by_key["most_records_share"] == pytest.approx(10 / 55)
    assert by_key["records_gini"] == pytest.approx(0.3)
    assert {one["name"]: one["records"] for one in by_partition["top"]} == {
        f"{filled}/{number}": count for number, count in Counter(partition for partition, *_ in records).items()
    }
    for shards, one in zip((4, 7), by_shard, strict=True):
        expected = Counter(shard_number(key, shards) for _, key, _, _ in records if key is not None)
        counts = Counter({int(group["name"]): group["records"] for group in one["top"]})
        assert one["of"] == shards
        assert counts >= expected
        assert (counts - expected).total() == 5
        assert max((counts - expected).values()) <= 2, "records without a key take turns"


def test_arrivals_are_the_timestamps(filled: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, "lag", "--topic", filled, "--moments", "10", "--rate", "5")

    came = Counter((timestamp - BEGIN) * 1_000 // found["step_us"] for *_, timestamp in sent())
    totals = [sum(one["records_at"][slot] for one in found["partitions"]) for slot in range(10)]
    assert totals == [came[slot] for slot in range(10)]
    assert found["start_us"] == BEGIN * 1_000
    assert found["wall_us"] == 9 * 1_000_000
    assert sum(one["late"] for one in found["partitions"]) == late_ones() > 0
    assert found["backlog"]["behind_at"] == list(backlog_at(totals, found["step_us"], 5.0).behind_at)
    assert found["backlog"]["most"] > 0


def late_ones() -> int:
    """How many records have an earlier timestamp than one before them in their partition."""
    latest: dict[int, int] = {}
    late = 0
    for partition, _, _, timestamp in sent():
        late += timestamp < latest.get(partition, 0)
        latest[partition] = max(timestamp, latest.get(partition, 0))
    return late


def test_a_range_is_read_and_no_more(
    filled: str, kafka: SharedKafka, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offsets = tmp_path / "start.json"
    offsets.write_text(json.dumps({filled: {"0": 2, "1": 0, "2": 1}}))
    moment = dt.datetime.fromtimestamp(BEGIN / 1_000 + 8, dt.UTC).isoformat()

    from_offsets = answered(
        capsys, "skew", "--topic", filled, "--start", str(offsets), "--bootstrap-servers", kafka.bootstrap
    )
    none_so_young = asked(capsys, "skew", "--topic", filled, "--start", "2099-01-01")
    until = answered(capsys, "skew", "--topic", filled, "--end", moment)

    assert from_offsets["records"] == len(sent()) - 3
    assert none_so_young[0] == 2
    assert "has no records in the range that was asked for" in none_so_young[2]
    in_order: dict[int, list[int]] = {}
    for partition, _, _, timestamp in sent():
        in_order.setdefault(partition, []).append(timestamp)
    before = [
        next((place for place, one in enumerate(times) if one >= BEGIN + 8 * SECOND), len(times))
        for times in in_order.values()
    ]
    assert until["records"] == sum(before)


def test_tables_and_the_page_say_what_needs_a_journal(
    filled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"

    _, skew, _ = asked(capsys, "skew", "--topic", filled, "--shards", "4")
    _, lag, _ = asked(capsys, "lag", "--topic", filled, "--rate", "5")
    code, _, err = asked(capsys, "html", "--topic", filled, "--shards", "4", "--out", str(page))

    assert code == 0, err
    text = page.read_text()
    assert "of 4 fixed shards have records" in skew
    assert "An app that processes 5 records/s would have been" in lag
    assert all("needs a journal" in one for one in (skew, lag, text))
    assert text.count("<svg") == 4
    assert "By shard, of 4" in text
    assert "<script" not in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tail", "--topic", "orders"], "What took long needs a journal: have the app write one"),
        (["skew"], "expected is JOURNAL, the directory of a journal, or --topic TOPIC"),
        (["tail"], "expected is JOURNAL, the directory of a journal"),
        (["skew", "journal", "--topic", "orders"], "expected is one of them"),
        (["skew", "--topic", "orders", "--handler", "on_order"], "--handler was given with --topic"),
        (["skew", "journal", "--shards", "3"], "--shards was given with a journal"),
        (["lag", "journal", "--start", "2026-01-01"], "--start was given with a journal"),
        (["skew", "--topic", "no topic"], "is no topic name"),
        (["skew", "--topic", "orders"], "bootstrap_servers"),
    ],
)
def test_what_does_not_go_together_is_refused_before_spark_starts(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AIOSHARD_BOOTSTRAP_SERVERS", raising=False)

    code, out, err = asked(capsys, *arguments)

    assert (code, out) == (2, "")
    assert told in err
    assert "Starting Spark" not in err


def test_an_app_that_is_too_slow_falls_behind() -> None:
    found = backlog_at([30, 0, 0, 10], 1_000_000, 5.0)

    assert found.behind_at == (25, 20, 15, 20)
    assert (found.most, found.most_at_us, found.left_us) == (25, 1_000_000, 4_000_000)
