"""Dead letters of a backfill: equal to those of the live app, in order, and not lost in a crash."""

import asyncio
import dataclasses
import json
import logging
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aioshard import spark as history
from aioshard.errors import NotVerifiedError, PlanError, TransportError
from aioshard.kafka.producer import KafkaProducer
from aioshard.ports import Message
from aioshard.records import Record
from aioshard.schema_registry.framing import framed
from aioshard.serde.side_records import MESSAGE_ID, dead_letter, read_dead_letter
from aioshard.spark.handovers import send_dead_letters, verified_ends
from aioshard.spark.work import blocking
from tests.spark.apps import write_app
from tests.spark.runs import HistoryRun
from tests.support.brokers import SharedKafka

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)  # a session of Spark starts in it, and the machine may be busy

HANDLER = """
from aioshard import Retry

@app.consume({topic!r}, retry=Retry(attempts=2, initial=0.01), on_failure=DeadLetter({dead_letters!r}, breaker=None))
async def handle(record: Record) -> None:
    seen.append((record.partition, record.offset))
    if record.value == b"bad":
        raise ValueError(f"no \\u20ac {{record.offset}} " + ("\\udc80" if record.offset == 2 else "x" * 2000))
"""
REGISTRY_HANDLER = """
from typing import Annotated
from aioshard.schema_registry import JsonSchema, SchemaRegistry

@app.consume({topic!r}, on_failure=DeadLetter({dead_letters!r}))
async def handle(number: Annotated[int, JsonSchema(SchemaRegistry("http://127.0.0.1:1"))]) -> None: ...
"""
HEADERS = [("trace", b"7"), ("empty", None), ("trace", b"8")]
BAD = [(0, 3), (0, 5), (0, 9), (1, 2), (1, 5)]


class CrashError(Exception):
    """Ends the driver."""


@dataclasses.dataclass(frozen=True)
class Sending:
    """A drained run, and the dead letters that a test has sent."""

    run: HistoryRun
    dead_letter_topic: str
    before: int
    """Dead letters of other tests."""

    async def send(self, messages: list[str] | None = None) -> int:
        """Sends what was not sent."""
        tell = (messages if messages is not None else []).append
        return await asyncio.to_thread(send_dead_letters, self.run.spark, self.run.directory, tell)

    async def dead_letters(self) -> list[Record]:
        """Return the dead letters in the topic."""
        return (await self.run.kafka.read(self.dead_letter_topic))[self.before :]

    def progress(self) -> dict[str, Any]:
        """Return the acknowledged dead letters according to the directory."""
        found: dict[str, Any] = json.loads((self.run.directory / "dead-letters.json").read_text())
        return found

    def check_that_it_may_be_handed_over(self) -> None:
        """Raises what stands in the way."""
        run_dir = history.RunDirectory(self.run.directory)
        verified_ends(run_dir, run_dir.plan())


@pytest.fixture(scope="module")
def drained_once(
    spark: "SparkSession", spark_modules: Path, kafka: SharedKafka, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HistoryRun]:
    """Ten records in each of two partitions, some of them bad; drained in two micro-batches."""
    topic = f"dead-letters-{uuid.uuid4().hex[:8]}"

    async def drain(run: HistoryRun) -> None:
        await kafka.create_topic(topic, partitions=2)
        for name in ("dead-letters", "others"):
            await kafka.create_topic(f"{topic}-{name}")
        for partition in range(2):
            for offset in range(10):
                key = None if offset == 5 else b"k%d" % offset
                value = b"bad" if (partition, offset) in BAD else b"good"
                await kafka.produce(topic, [(key, value)], partition, HEADERS if offset == 3 else ())
        await run.plan(max_rows_per_batch=12)
        assert (await run.drain()).statuses == {"dead_lettered": len(BAD), "processed": 20 - len(BAD)}

    with pytest.MonkeyPatch.context() as patched:
        handlers = HANDLER.format(topic=topic, dead_letters=f"{topic}-dead-letters")
        app = write_app(spark_modules, patched, kafka, topic, handlers=handlers)
        run = HistoryRun(spark, kafka, topic, app, tmp_path_factory.mktemp("dead-letters") / "run")
        blocking(lambda: drain(run))
        yield run


@pytest.fixture
async def sending(drained_once: HistoryRun, tmp_path: Path) -> Sending:
    """Nothing was sent yet; the directory is the test's own."""
    run = drained_once.copied(tmp_path / "run")
    name = f"{run.topic}-dead-letters"
    return Sending(run, name, len(await run.kafka.read(name)))


def _where(dead_letters: list[Record]) -> list[tuple[int, int]]:
    found = [read_dead_letter(letter) for letter in dead_letters]
    return [
        (dead_letter.original.partition, dead_letter.original.offset)
        for dead_letter in found
        if dead_letter is not None
    ]


async def test_dead_letters_match_the_live_app_plus_a_message_id(
    sending: Sending, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A worker process of the test run cannot send a log line with half a surrogate pair.
    monkeypatch.setattr(logging.getLogger("aioshard.engine.failures"), "disabled", True)
    assert await sending.send() == len(BAD)
    dead_letters = await sending.dead_letters()
    sent = dict(zip(_where(dead_letters), dead_letters, strict=True))
    await sending.run.app.app.serve(until_caught_up=True)
    both = await sending.dead_letters()
    live = {where: letter for where, letter in zip(_where(both), both, strict=True) if letter not in dead_letters}

    assert sorted(sent) == sorted(live) == BAD
    for where, letter in sent.items():
        other = live[where]
        assert (letter.key, letter.value, letter.timestamp) == (other.key, other.value, other.timestamp)
        *headers, last = letter.headers
        assert last == (MESSAGE_ID, b"%s/%d/%d" % (sending.run.topic.encode(), *where))
        changing = "aioshard.failed_at"
        assert [pair for pair in headers if pair[0] != changing] == [
            pair for pair in other.headers if pair[0] != changing
        ]
        assert [name for name, _ in headers] == [name for name, _ in other.headers]


async def test_dead_letters_name_the_schema_of_their_values(
    spark: "SparkSession", spark_modules: Path, kafka: SharedKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = f"dead-letters-{uuid.uuid4().hex[:8]}"
    await kafka.create_topic(topic)
    await kafka.create_topic(f"{topic}-dead-letters")
    await kafka.produce(topic, [(b"k", framed(7, value)) for value in (b"41", b'"no number"')], 0)
    handlers = REGISTRY_HANDLER.format(topic=topic, dead_letters=f"{topic}-dead-letters")
    app = write_app(spark_modules, monkeypatch, kafka, topic, handlers=handlers)
    run = HistoryRun(spark, kafka, topic, app, tmp_path / "run")
    await run.plan()
    assert (await run.drain()).statuses == {"dead_lettered": 1, "processed": 1}
    assert await asyncio.to_thread(send_dead_letters, spark, run.directory, print) == 1
    (letter,) = [read_dead_letter(record) for record in await kafka.read(f"{topic}-dead-letters")]

    assert letter is not None
    assert (letter.original.offset, letter.failure.error) == (1, "DecodeError")
    assert (letter.schema_id, letter.subject) == ("7", f"{topic}-value")


async def test_a_dead_letter_has_the_time_of_its_last_attempt(sending: Sending) -> None:
    await sending.send()

    rows = {(row["partition"], row["offset"]): row for row in sending.run.rows() if row["status"] == "dead_lettered"}
    for letter in await sending.dead_letters():
        found = read_dead_letter(letter)
        assert found is not None
        row = rows[found.original.partition, found.original.offset]
        ended = row["started"].timestamp() + row["duration"]
        assert found.failure.failed_at == pytest.approx(ended, abs=1e-5)


async def test_dead_letters_are_in_record_order_batch_by_batch(sending: Sending) -> None:
    messages: list[str] = []

    assert await sending.send(messages) == len(BAD)

    first = [(partition, offset) for partition, offset in BAD if offset < 6]
    assert _where(await sending.dead_letters()) == [*first, *(pair for pair in BAD if pair not in first)]
    assert messages == ["dead letters sent for batch 0: 4", "dead letters sent for batch 1: 1"]


async def test_sent_dead_letters_are_not_sent_again(sending: Sending) -> None:

    assert [await sending.send(), await sending.send()] == [len(BAD), 0]

    assert len(await sending.dead_letters()) == len(BAD)
    plan = history.RunDirectory(sending.run.directory).plan()
    assert sending.progress() == {"plan": plan.digest, "acknowledged": len(BAD), "batches": [0, 1]}


async def test_a_crash_repeats_the_dead_letters_of_one_batch_with_the_same_ids(
    sending: Sending, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = history.RunDirectory.write_json

    def crash(run_dir: history.RunDirectory, name: str, content: Any) -> None:
        if name == "dead-letters.json" and content["batches"] == [0, 1]:
            raise CrashError
        write(run_dir, name, content)

    with monkeypatch.context() as patched:
        patched.setattr(history.RunDirectory, "write_json", crash)
        with pytest.raises(CrashError):
            await sending.send()
    assert sending.progress()["acknowledged"] == 4

    assert await sending.send() == 1

    dead_letters = await sending.dead_letters()
    assert sorted(_where(dead_letters)) == sorted([*BAD, (0, 9)])
    assert len({dict(letter.headers)[MESSAGE_ID] for letter in dead_letters}) == len(BAD)
    assert sending.progress()["acknowledged"] == len(BAD)


@pytest.mark.chaos
async def test_a_run_is_handed_over_only_after_its_dead_letters_are_acknowledged(sending: Sending) -> None:
    assert (await sending.run.verify()).dead_lettered == len(BAD)
    with pytest.raises(NotVerifiedError, match="5 of 5 dead letters"):
        sending.check_that_it_may_be_handed_over()

    await sending.send()

    sending.check_that_it_may_be_handed_over()


@pytest.mark.chaos
async def test_the_handover_command_sends_dead_letters_first(sending: Sending) -> None:
    """The group may have moved, by another test."""
    run = sending.run

    async def command(*words: str) -> tuple[int, str]:
        spoken = [sys.executable, "-m", "aioshard", "spark", *words, f"--app-dir={run.app.path.parent}"]
        ended = await asyncio.to_thread(subprocess.run, spoken, capture_output=True, text=True, check=False)
        return ended.returncode, ended.stdout + ended.stderr

    code, said = await command("handover", str(run.directory), "--force")
    assert (code, "was not verified" in said) == (3, True), said
    code, said = await command("verify", str(run.directory), "--master=local[1]")
    assert (code, "verified: 20 records" in said) == (0, True), said
    code, said = await command("handover", str(run.directory), "--force", "--master=local[1]")

    assert (code, "dead letters sent for batch 1: 1" in said, "handed-over" in said) == (0, True, True), said
    assert len(await sending.dead_letters()) == len(BAD)


async def test_an_unacknowledged_dead_letter_is_an_error_and_not_recorded(
    sending: Sending, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = KafkaProducer.send

    def refuse(producer: KafkaProducer, message: Message) -> asyncio.Future[int]:
        if (MESSAGE_ID, f"{sending.run.topic}/0/9".encode()) not in message.headers:
            return send(producer, message)
        refused: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        refused.set_exception(TransportError("refused"))
        return refused

    with monkeypatch.context() as patched:
        patched.setattr(KafkaProducer, "send", refuse)
        with pytest.raises(TransportError, match="refused"):
            await sending.send()
    assert sending.progress()["batches"] == [0]

    assert await sending.send() == 1


async def test_the_plans_dead_letter_topic_overrides_the_handlers(sending: Sending, tmp_path: Path) -> None:
    run, others = sending.run, f"{sending.run.topic}-others"
    again = Sending(dataclasses.replace(run, directory=tmp_path / "again"), others, 0)
    await again.run.plan(on_failure=f"dead-letter:{others}")
    (run.directory / "outcomes").rename(again.run.directory / "outcomes")

    await again.send()

    assert sorted(_where(await again.dead_letters())) == BAD
    assert not await sending.dead_letters()


async def test_outcomes_of_another_run_are_refused(sending: Sending, tmp_path: Path) -> None:
    skipping = dataclasses.replace(sending.run, directory=tmp_path / "skipping")
    await skipping.plan(on_failure="skip")
    (sending.run.directory / "outcomes").rename(skipping.directory / "outcomes")

    with pytest.raises(PlanError, match="no dead-letter topic"):
        await Sending(skipping, sending.dead_letter_topic, 0).send()


async def test_a_replayed_dead_letter_loses_its_message_id(sending: Sending) -> None:
    """Replayed into its topic, its record has only the headers that it came with."""
    await sending.send()

    for letter in await sending.dead_letters():
        found = read_dead_letter(letter)
        assert found is not None
        assert not [name for name, _ in found.original.headers if name.startswith("aioshard.")]
        again = dead_letter("more", letter._replace(topic="other", offset=1), found.failure)
        assert MESSAGE_ID not in dict(again.headers)
