"""One hanging record delays no other, and the diagnosis names it (I6, I11)."""

import asyncio
import logging
import time
from pathlib import Path

import pytest

from aioshard import App, Record
from aioshard.observe import PartitionDiagnosis
from tests.support.brokers import SharedKafka

PARTITIONS = 4
WORKERS = 100
TAKES = 0.02
"""Seconds that each run waits, so that the machine does not limit the workers."""
HANGING = (0, 1_000)
"""Partition and offset of the record that hangs."""
KEPT = 0.9
"""Share of the undisturbed rate."""
ROUNDS = 3
"""Others may use the machine: of these interleaved rounds the best count, and the first good one ends it."""


def line_of(mark: str) -> int:
    """The line of this file that ends with the comment *mark*."""
    (line,) = [n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith(f"  # {mark}")]
    return line


class Consumption:
    """One group that consumes the topic, with a record that hangs or without."""

    def __init__(
        self, kafka: SharedKafka, topic: str, group: str, records: int, hangs: float, stuck_after: float
    ) -> None:
        self._app = App(
            group,
            bootstrap_servers=kafka.bootstrap,
            auto_offset_reset="earliest",
            stuck_after=stuck_after,
            start_timeout=30,
        )
        self._records = records
        self._hangs = hangs
        self._began = self._ended = 0.0
        self._runs = 0
        self._others_done = asyncio.Event()
        self._is_hanging = asyncio.Event()
        self._app.consume(topic, concurrency=WORKERS)(self.handle)
        self.explained = ""
        """The explanation soon after the record began to hang."""
        self.diagnosed: PartitionDiagnosis | None = None
        """The diagnosis shortly before that ended."""

    async def handle(self, record: Record) -> None:
        if self._hangs and (record.partition, record.offset) == HANGING:
            self._is_hanging.set()
            await asyncio.sleep(self._hangs)  # the await that hangs
            return
        self._began = self._began or time.monotonic()
        await asyncio.sleep(TAKES)
        self._ended = time.monotonic()
        self._runs += 1
        if self._runs == self._records - bool(self._hangs):
            self._others_done.set()

    async def rate(self) -> float:
        """Consumes everything; returns the records per second of those that do not hang."""
        async with self._app, asyncio.timeout(200):
            if self._hangs:
                await self._ask_for_the_diagnosis()
            await self._others_done.wait()
            while any(partition.lag != 0 for partition in self._app.statistics().partitions):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.1)
        assert self._runs == self._records - bool(self._hangs), "each once"
        return self._runs / (self._ended - self._began)

    async def _ask_for_the_diagnosis(self) -> None:
        """From a thread, and so while the event loop is at work."""
        await self._is_hanging.wait()
        await asyncio.sleep(1.0)
        self.explained = await asyncio.to_thread(self._app.explain)
        await asyncio.sleep(self._hangs - 2.0)
        diagnosis = await asyncio.to_thread(self._app.diagnose)
        (self.diagnosed,) = [partition for partition in diagnosis.partitions if partition.partition == HANGING[0]]


async def fill(kafka: SharedKafka, topic: str, records: int) -> None:
    await kafka.create_topic(topic, PARTITIONS)
    share = records // PARTITIONS
    for partition in range(PARTITIONS):
        await kafka.produce(topic, [(b"p%d-k%d" % (partition, n), b"%100d" % n) for n in range(share)], partition)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("records", "hangs", "stuck_after"),
    [
        pytest.param(30_000, 6.0, 7.0, marks=pytest.mark.timeout(300), id="6 s among 30,000"),
        pytest.param(200_000, 60.0, 60.0, marks=pytest.mark.timeout(900), id="60 s among 200,000"),
    ],
)
async def test_a_hanging_record_is_named_and_delays_no_other(
    kafka: SharedKafka,
    topic: str,
    group: str,
    records: int,
    hangs: float,
    stuck_after: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await fill(kafka, topic, records)
    undisturbed: list[float] = []
    disturbed: list[float] = []
    for number in range(ROUNDS):
        undisturbed.append(await Consumption(kafka, topic, f"{group}-{number}", records, 0.0, stuck_after).rate())
        caplog.clear()
        consumption = Consumption(kafka, topic, f"{group}-{number}-hangs", records, hangs, stuck_after)
        with caplog.at_level(logging.WARNING, "aioshard"):
            disturbed.append(await consumption.rate())
        check_reports(consumption, topic, caplog)
        if max(disturbed) >= KEPT * max(undisturbed):
            return
    pytest.fail(f"records/s without: {undisturbed}, with one that hangs: {disturbed}")


def check_reports(consumption: Consumption, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    hanging_await = f"{__file__}:{line_of('the await that hangs')} in Consumption.handle"
    (sentence,) = [text for text in consumption.explained.splitlines() if text.startswith(f"{topic}/{HANGING[0]} ")]
    assert f"the oldest is offset {HANGING[1]} " in sentence
    assert f"at {hanging_await}, waiting in asyncio.tasks.sleep" in sentence

    diagnosed = consumption.diagnosed
    assert diagnosed is not None
    assert diagnosed.head is not None
    assert (diagnosed.head.offset, diagnosed.head.state) == (HANGING[1], "in_flight")
    assert str(diagnosed.head.stack and diagnosed.head.stack.place) == hanging_await
    assert diagnosed.behind > diagnosed.window / 2 > 500, "most of the rest is done, and waits for it"
    held_up = [text for text in caplog.messages if text.startswith("almost everything waits for one record")]
    assert len(held_up) == 1
    assert hanging_await in held_up[0]
