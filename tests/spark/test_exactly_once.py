"""From an exactly-once app to Spark and back: published messages, and offsets of pending transactions."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as ClientPartition

from aioshard import spark as history
from aioshard.errors import GroupMovedError, HaltedError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from aioshard.spark.plans import ends_of
from tests.spark.apps import write_app
from tests.spark.runs import HistoryRun
from tests.support.brokers import SharedKafka
from tests.support.paths import PROJECT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)  # a session of Spark starts in it, and the machine may be busy

PARTITIONS, KEYS = 3, 50
FIRST, SECOND = 2_000, 1_000
"""Records that are there before the app starts, and those that come after it has ended."""
STUCK = 7
PATIENCE = 120.0
POLL_INTERVAL = 0.1
SETTLED = 0.3
"""Seconds after which the brokers have ended what a frozen process had asked for."""
EXACTLY_ONCE: dict[str, Any] = {
    "processing_guarantee": "exactly_once",
    "commit_interval": 0.02,
    "commit_timeout": 2.0,
    "transaction_timeout": 6.0,
    "shutdown_timeout": 5.0,
}

HANDLER = """
import asyncio, os, random
from aioshard import Context

@app.consume({topic!r}, concurrency=16)
async def handle(record: Record, context: Context) -> None:
    if record.value == os.environ.get("STUCK", "").encode():
        await asyncio.sleep(3600)
    await asyncio.sleep(random.random() * float(os.environ.get("LONGEST", "0.01")))
    where = "spark" if context.replay else "live"
    await context.publish({out!r}, where, key=record.value, headers=[("id", context.idempotency_key)])
    if context.replay and os.path.exists({broken!r}):
        raise ValueError("broken")
"""


# There and back -------------------------------------------------------------------------


class Publishing(HistoryRun):
    """An exactly-once app whose handler publishes a message for each record, in a process and on Spark."""

    @property
    def out(self) -> str:
        return f"{self.topic}.out"

    async def produce(self, numbers: range) -> None:
        await self.kafka.produce(self.topic, [(b"k%d" % (number % KEYS), b"%d" % number) for number in numbers])

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "aioshard", "run", self.app.target, "--app-dir", str(self.app.path.parent)]
        more = os.environ | {"PYTHONPATH": str(PROJECT)} | environment
        with self.directory.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(command, env=more, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    async def published(self) -> dict[str, list[int]]:
        """The numbers of the records whose messages a reader sees, by where they were published."""
        found: dict[str, list[int]] = {"live": [], "spark": []}
        for message in await self.kafka.read(self.out):
            found[(message.value or b"").decode()].append(int(message.key or b""))
        return found

    async def until_published(self, live: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len((await self.published())["live"]) < live:  # noqa: ASYNC110 - no event in this process
                await asyncio.sleep(POLL_INTERVAL)

    async def until_committed(self, records: int) -> None:
        group = self.app.app.group_id
        async with asyncio.timeout(PATIENCE):
            while sum((await self.kafka.committed(group, self.topic)).values()) < records:  # noqa: ASYNC110 - as above
                await asyncio.sleep(POLL_INTERVAL)

    async def freeze_in_a_transaction(self, process: subprocess.Popen[bytes]) -> None:
        async with asyncio.timeout(PATIENCE):
            while True:
                process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(SETTLED)
                if await self.kafka.end_offsets(self.out) != await self.kafka.end_offsets(self.out, "read_committed"):
                    return
                process.send_signal(signal.SIGCONT)
                await asyncio.sleep(random.random() * POLL_INTERVAL)


@pytest.fixture
async def run(
    spark: "SparkSession",
    kafka: SharedKafka,
    topic: str,
    group: str,
    tmp_path: Path,
    spark_modules: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Publishing:
    for name in (topic, f"{topic}.out"):
        await kafka.create_topic(name, PARTITIONS)
    source = HANDLER.format(topic=topic, out=f"{topic}.out", broken=str(tmp_path / "broken"))
    app = write_app(spark_modules, monkeypatch, kafka, group, handlers=source, **EXACTLY_ONCE)
    return Publishing(spark, kafka, topic, app, tmp_path / "run")


async def stop(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    return await asyncio.to_thread(process.wait, PATIENCE)


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_app_spark_and_app_again_publish_every_record_once(run: Publishing, how: str) -> None:
    """The first app ends with records finished beyond the committed offset, the killed one in a transaction."""
    await run.produce(range(FIRST))
    processes = [run.start(STUCK=str(STUCK), LONGEST="0.1")]
    try:
        await run.until_published(FIRST // 8)
        if how == "stopped":
            await stop(processes[0])
        else:
            await run.freeze_in_a_transaction(processes[0])
            processes[0].kill()
        await run.produce(range(FIRST, FIRST + SECOND))
        numbers = {
            (record.partition, record.offset): int(record.value or b"") for record in await run.kafka.read(run.topic)
        }

        ends = {number: offset * 3 // 4 for number, offset in (await run.kafka.end_offsets(run.topic)).items()}
        plan = await run.plan(start="committed", end={run.topic: ends})
        before = (await run.published())["live"]
        await run.drain()
        assert (await run.verify()).ok
        assert (await history.handover(run.directory)).state == "handed-over"
        planned = {
            numbers[planned.partition, offset]
            for planned in plan.ranges
            for offset in range(planned.start, planned.end)
            if offset not in planned.finished
        }

        processes.append(run.start())
        await run.until_committed(FIRST + SECOND)
        assert await stop(processes[1]) == 0
    finally:
        for process in processes:
            process.kill()
            await asyncio.to_thread(process.wait)

    published = await run.published()
    assert any(planned.finished for planned in plan.ranges), (
        "nothing was finished beyond an offset: the test shows nothing"
    )
    assert sorted(published["spark"]) == sorted(planned)
    assert planned.isdisjoint(before)
    assert Counter(published["live"] + published["spark"]) == Counter(range(FIRST + SECOND))
    everything = await run.kafka.read(run.out, "read_uncommitted")
    assert how == "stopped" or len(everything) > FIRST + SECOND, "no transaction was cut: the test shows nothing"


@pytest.mark.chaos
async def test_a_repeated_micro_batch_publishes_under_the_same_id(run: Publishing, tmp_path: Path) -> None:
    await run.produce(range(20))
    notices: list[str] = []
    (tmp_path / "broken").touch()
    await run.plan(tell=notices.append)
    with pytest.raises(HaltedError):
        await run.drain()
    (tmp_path / "broken").unlink()
    await run.drain()

    messages = await run.kafka.read(run.out)
    assert len(messages) > 20
    assert {(message.key, tuple(message.headers)) for message in messages} == {
        (record.value, (("id", f"{run.topic}/{record.partition}/{record.offset}".encode()),))
        for record in await run.kafka.read(run.topic)
    }
    assert any("at least once" in sentence for sentence in notices)


# An open transaction --------------------------------------------------------------------


class OpenTransaction:
    """A transaction of a process that is gone from the group; it holds a new offset and may still end either way."""

    def __init__(self, kafka: SharedKafka, topic: str, group: str, offset: int) -> None:
        options = {"bootstrap.servers": kafka.bootstrap}
        member = Consumer(options | {"group.id": group})
        self._producer = Producer(options | {"transactional.id": group})
        self._producer.init_transactions()
        self._producer.begin_transaction()
        offsets = [ClientPartition(topic, 0, offset)]
        self._producer.send_offsets_to_transaction(offsets, member.consumer_group_metadata())
        member.close()

    async def end(self, how: str) -> None:
        end = self._producer.commit_transaction if how == "commit" else self._producer.abort_transaction
        await asyncio.to_thread(end)


async def produce_and_commit(kafka: SharedKafka, topic: str, group: str) -> None:
    """Ten records, of which the group has committed three."""
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"")] * 10)
    async with KafkaAdmin(Settings(bootstrap_servers=kafka.bootstrap)) as brokers:
        await brokers.commit_without_member(group, {TopicPartition(topic, 0): Committed(3, "")})


@pytest.mark.parametrize(("how", "start"), [("commit", 7), ("abort", 3)])
async def test_a_plan_waits_for_a_transaction_that_may_move_its_start(
    kafka: SharedKafka, topic: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, start: int
) -> None:
    await produce_and_commit(kafka, topic, group)
    app = write_app(tmp_path, monkeypatch, kafka, group, topic, **EXACTLY_ONCE)
    transaction = OpenTransaction(kafka, topic, group, 7)

    planning = asyncio.create_task(history.plan(app.target, directory=tmp_path / "run"), name="plan")
    await asyncio.wait([planning], timeout=1.0)
    waited = not planning.done()
    await transaction.end(how)

    (planned,) = (await planning).ranges
    assert (planned.start, waited) == (start, True)


@pytest.mark.parametrize("how", ["commit", "abort"])
async def test_a_handover_waits_for_a_transaction_that_may_move_the_group(
    kafka: SharedKafka, topic: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """An app that ran after the plan was made, and was frozen in its transaction."""
    await produce_and_commit(kafka, topic, group)
    app = write_app(tmp_path, monkeypatch, kafka, group, topic, **EXACTLY_ONCE)
    plan = await history.plan(app.target, directory=tmp_path / "run")
    verified = {"plan": plan.digest, "ok": True, "halted": [], "ends": ends_of(plan.ranges)}
    history.RunDirectory(tmp_path / "run").write_json("verified.json", verified)
    transaction = OpenTransaction(kafka, topic, group, 7)

    handing_over = asyncio.create_task(history.handover(tmp_path / "run", wait=0), name="hand over")
    await asyncio.wait([handing_over], timeout=1.0)
    waited = not handing_over.done()
    await transaction.end(how)

    with pytest.raises(GroupMovedError) if how == "commit" else contextlib.nullcontext():
        assert (await handing_over).state == "handed-over"
    assert waited
