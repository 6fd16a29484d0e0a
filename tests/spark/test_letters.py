"""Dead letters of a run over history: those of the live app, in order, and none lost when it crashes between."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aioshard import spark as history
from aioshard.errors import NotVerifiedError, PlanError, TransportError
from aioshard.kafka.producer import KafkaProducer
from aioshard.ports import Message
from aioshard.records import Record
from aioshard.serde.side_headers import MESSAGE_ID
from aioshard.serde.side_records import dead_letter, read_dead_letter
from aioshard.spark import publishing
from aioshard.spark.handover import verified_ends
from aioshard.spark.letters import send_letters
from tests.spark.apps import write_app
from tests.spark.runs import HistoryRun
from tests.support.shared_kafka import SharedKafka

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HANDLER = """
from aioshard import Retry

@app.consume({topic!r}, retry=Retry(attempts=2, initial=0.01), on_failure=DeadLetter({letters!r}, budget=None))
async def handle(record: Record) -> None:
    seen.append((record.partition, record.offset))
    if record.value == b"bad":
        raise ValueError(f"no customer {{record.offset}} \\u20ac " + "x" * 2000)
"""
HEADERS = [("trace", b"7"), ("empty", None), ("trace", b"8")]
BAD = [(0, 3), (0, 5), (0, 9), (1, 2), (1, 5)]


class CrashError(Exception):
    """Ends the driver."""


@pytest.fixture
async def run(
    spark: "SparkSession",
    spark_modules: Path,
    kafka: SharedKafka,
    topic: str,
    group: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> HistoryRun:
    """Ten records in each of two partitions, some of them bad; nothing is planned yet."""
    await kafka.create_topic(topic, partitions=2)
    await kafka.create_topic(f"{topic}-letters")
    for partition in range(2):
        for offset in range(10):
            key = None if offset == 5 else b"k%d" % offset
            value = b"bad" if (partition, offset) in BAD else b"good"
            await kafka.produce(topic, [(key, value)], partition, HEADERS if offset == 3 else ())
    handlers = HANDLER.format(topic=topic, letters=f"{topic}-letters")
    app = write_app(spark_modules, monkeypatch, kafka, group, handlers=handlers)
    return HistoryRun(spark, kafka, topic, app, tmp_path / "run")


async def _send(run: HistoryRun, told: list[str] | None = None) -> int:
    return await asyncio.to_thread(send_letters, run.spark, run.directory, (told if told is not None else []).append)


async def _letters(run: HistoryRun, of: str = "letters") -> list[Record]:
    return await run.kafka.read(f"{run.topic}-{of}")


def _where(letters: list[Record]) -> list[tuple[int, int]]:
    found = [read_dead_letter(letter) for letter in letters]
    return [(one.original.partition, one.original.offset) for one in found if one is not None]


def _noted(run: HistoryRun) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.directory / "letters.json").read_text())
    return found


def _may_be_handed_over(run: HistoryRun) -> None:
    place = history.RunDirectory(run.directory)
    verified_ends(place, place.plan())


async def test_letters_are_those_of_the_live_app_with_a_message_id_behind(run: HistoryRun) -> None:
    await run.plan()
    await run.drain()
    assert await _send(run) == len(BAD)
    letters = await _letters(run)
    sent = dict(zip(_where(letters), letters, strict=True))
    await run.app.app.serve(until_caught_up=True)
    both = await _letters(run)
    live = {where: letter for where, letter in zip(_where(both), both, strict=True) if letter not in letters}

    assert sorted(sent) == sorted(live) == BAD
    for where, letter in sent.items():
        other = live[where]
        assert (letter.key, letter.value, letter.timestamp) == (other.key, other.value, other.timestamp)
        *headers, last = letter.headers
        assert last == (MESSAGE_ID, b"%s/%d/%d" % (run.topic.encode(), *where))
        changing = "aioshard.failed_at"
        assert [one for one in headers if one[0] != changing] == [one for one in other.headers if one[0] != changing]
        assert [name for name, _ in headers] == [name for name, _ in other.headers]


async def test_a_letter_failed_when_its_last_attempt_ended(run: HistoryRun) -> None:
    await run.plan()
    await run.drain()
    await _send(run)

    rows = {(row["partition"], row["offset"]): row for row in run.rows() if row["status"] == "dead_lettered"}
    for letter in await _letters(run):
        found = read_dead_letter(letter)
        assert found is not None
        row = rows[found.original.partition, found.original.offset]
        ended = row["started"].timestamp() + row["duration"]
        assert found.failure.failed_at == pytest.approx(ended, abs=1e-5)


async def test_letters_come_in_the_order_of_their_records_batch_by_batch(run: HistoryRun) -> None:
    await run.plan(max_rows_per_batch=12)
    await run.drain()
    told: list[str] = []

    assert await _send(run, told) == len(BAD)

    first = [(partition, offset) for partition, offset in BAD if offset < 6]
    assert _where(await _letters(run)) == [*first, *(one for one in BAD if one not in first)]
    assert told == ["4 dead letter(s) of batch 0 sent", "1 dead letter(s) of batch 1 sent"]


async def test_what_was_sent_is_not_sent_again(run: HistoryRun) -> None:
    await run.plan()
    await run.drain()

    assert [await _send(run), await _send(run)] == [len(BAD), 0]

    assert len(await _letters(run)) == len(BAD)
    plan = history.RunDirectory(run.directory).plan()
    assert _noted(run) == {"plan": plan.digest, "acknowledged": len(BAD), "batches": [0]}


async def test_a_crash_between_batches_repeats_the_letters_of_one_batch_with_the_same_ids(
    run: HistoryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.plan(max_rows_per_batch=12)
    await run.drain()
    write = history.RunDirectory.write_json

    def crash(place: history.RunDirectory, name: str, content: Any) -> None:
        if name == "letters.json" and content["batches"] == [0, 1]:
            raise CrashError
        write(place, name, content)

    with monkeypatch.context() as patched:
        patched.setattr(history.RunDirectory, "write_json", crash)
        with pytest.raises(CrashError):
            await _send(run)
    assert _noted(run)["acknowledged"] == 4

    assert await _send(run) == 1

    letters = await _letters(run)
    assert sorted(_where(letters)) == sorted([*BAD, (0, 9)])
    assert len({dict(letter.headers)[MESSAGE_ID] for letter in letters}) == len(BAD)
    assert _noted(run)["acknowledged"] == len(BAD)


async def test_a_run_is_handed_over_only_when_its_letters_are_acknowledged(run: HistoryRun) -> None:
    await run.plan()
    await run.drain()
    assert (await run.verify()).dead_lettered == len(BAD)
    with pytest.raises(NotVerifiedError, match="5 of 5 dead letters"):
        _may_be_handed_over(run)

    await _send(run)

    _may_be_handed_over(run)


async def test_what_is_not_acknowledged_is_an_error_and_not_noted(
    run: HistoryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.plan(max_rows_per_batch=12)
    await run.drain()
    publish = KafkaProducer.publish

    async def refuse(producer: KafkaProducer, message: Message) -> int:
        if (MESSAGE_ID, f"{run.topic}/0/9".encode()) in message.headers:
            raise TransportError("refused")
        return await publish(producer, message)

    with monkeypatch.context() as patched:
        patched.setattr(KafkaProducer, "publish", refuse)
        with pytest.raises(TransportError, match="refused"):
            await _send(run)
    assert _noted(run)["batches"] == [0]

    assert await _send(run) == 1


async def test_the_topic_of_the_plan_comes_before_that_of_the_handler(run: HistoryRun) -> None:
    await run.kafka.create_topic(f"{run.topic}-others")
    await run.plan(on_failure=f"dead-letter:{run.topic}-others")
    await run.drain()

    await _send(run)

    assert _where(await _letters(run, "others")) == BAD
    assert not await _letters(run)


async def test_outcomes_of_another_run_are_refused(run: HistoryRun, tmp_path: Path) -> None:
    await run.plan()
    await run.drain()
    skipping = HistoryRun(run.spark, run.kafka, run.topic, run.app, tmp_path / "skipping")
    await skipping.plan(on_failure="skip")
    (run.directory / "outcomes").rename(skipping.directory / "outcomes")

    with pytest.raises(PlanError, match="no dead-letter topic"):
        await _send(skipping)


async def test_a_letter_that_is_given_up_a_second_time_does_not_keep_its_old_id(run: HistoryRun) -> None:
    """Replayed into its topic, its record has only the headers that it came with."""
    await run.plan()
    await run.drain()
    await _send(run)

    for letter in await _letters(run):
        found = read_dead_letter(letter)
        assert found is not None
        assert not [name for name, _ in found.original.headers if name.startswith("aioshard.")]
        again = dead_letter("more", letter._replace(topic="other", offset=1), found.failure)
        assert MESSAGE_ID not in dict(again.headers)


async def test_waves_are_bounded_in_number_and_size() -> None:
    half = Message("t", bytes(9 * 1024 * 1024))
    small = Message("t", b"")

    assert [len(wave) for wave in publishing.waves([half, half, small, half])] == [1, 2, 1]
    assert [len(wave) for wave in publishing.waves([small] * 2001)] == [2000, 1]
    assert list(publishing.waves([])) == []
