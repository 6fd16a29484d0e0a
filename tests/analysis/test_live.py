"""What-if against what is: from the journal of one run, other configurations, each run three times."""

import asyncio
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow.dataset as ds
import pytest
import uvloop
from pyspark.sql import SparkSession

from aioshard import App, Record
from aioshard.spark.analysis.candidate import Candidate
from aioshard.spark.analysis.fleet import quantile
from aioshard.spark.analysis.journal import read_journal
from aioshard.spark.analysis.what_if import ask
from aioshard.testing import InMemoryBroker, InMemoryProducer, InMemoryTransport
from tests.support.shared_kafka import SharedKafka

RECORDS = 3_000
PARTITIONS = 8
LIVE_RUNS = 3
MEAN_SLEEP = 0.031
"""Seconds."""
QUIET = 0.03
"""By so much may the same sleeps differ from run to run: else the machine has too much to do to say anything."""


class Load(NamedTuple):
    """A record to process."""

    key: bytes
    seconds: float
    after: float


class Live(NamedTuple):
    """What a run took; seconds."""

    makespan: float
    within: float
    """99 % of the records, from being taken in to their end."""
    late: float
    """How much longer than asked handlers slept, on average: what the machine does besides, and no model knows."""
    later: float
    """The same of 99 %."""


def work(seed: int, rate: float | None) -> list[Load]:
    """Handlers that sleep for 5 ms or longer, a few keys hotter than others; *rate* None is a backlog."""
    chance = random.Random(seed)
    keys = [b"customer-%d" % number for number in range(1_000)]
    weights = [(number + 1) ** -0.3 for number in range(len(keys))]
    after = 0.0
    loads = []
    for key in chance.choices(keys, weights, k=RECORDS):
        if rate is not None:
            after += chance.expovariate(rate)
        loads.append(Load(key, max(0.005, chance.lognormvariate(-3.6, 0.5)), after))
    return loads


def run(
    loads: Sequence[Load],
    journal: Path,
    *,
    shards: int | None = None,
    concurrency: int = 64,
    kafka: str | None = None,
    topic: str = "orders",
) -> Live:
    """Run an app in the loop of production, and read its journal.

    Args:
        loads: What there is to process.
        journal: Where the journal is written; its name is the group's.
        shards: Fixed ones; None is on demand.
        concurrency: With shards on demand.
        kafka: Brokers that have the records already; without it, they are published to a broker in memory.
        topic: Where they are.
    """
    servers = kafka or "unused"
    app = App(f"{topic}-{journal.name}", bootstrap_servers=servers, auto_offset_reset="earliest", journal=str(journal))
    done = asyncio.Event()
    late: list[float] = []

    async def on_order(record: Record) -> None:
        clock, asked = asyncio.get_running_loop().time, float(record.value or b"0")
        began = clock()
        await asyncio.sleep(asked)
        late.append(clock() - began - asked)
        if len(late) == len(loads):
            done.set()

    if shards is None:
        app.consume(topic, concurrency=concurrency)(on_order)
    else:
        app.consume(topic, shards=shards)(on_order)

    async def process() -> None:
        if kafka is not None:
            async with app:
                await done.wait()
            return
        broker = InMemoryBroker(partitions=PARTITIONS)
        broker.create_topic(topic, PARTITIONS)
        begin = asyncio.get_running_loop().time()
        for one in loads:
            if not one.after:
                broker.publish(topic, b"%f" % one.seconds, key=one.key)
        async with app.started(lambda: InMemoryTransport(broker, app.group_id), lambda: InMemoryProducer(broker)):
            for one in loads:
                if one.after:
                    # The loads have moments of their own: nothing waits for nothing.
                    await asyncio.sleep(max(begin + one.after - asyncio.get_running_loop().time(), 0))
                    broker.publish(topic, b"%f" % one.seconds, key=one.key)
            await done.wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(process())
    rows = ds.dataset(journal).to_table(["arrived", "started", "duration"]).to_pylist()
    assert len(rows) == len(loads)
    ends = [row["started"] + row["duration"] for row in rows]
    stays = sorted(round((end - row["arrived"]) * 1e6) for end, row in zip(ends, rows, strict=True))
    makespan = max(ends) - min(row["arrived"] for row in rows)
    late.sort()
    return Live(makespan, quantile(stays, 0.99) / 1e6, statistics.mean(late), late[99 * len(late) // 100])


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rate", [None, 400.0], ids=["backlog", "stream"])
def test_other_configurations_take_what_was_predicted(spark: SparkSession, tmp_path: Path, rate: float | None) -> None:
    compare(spark, tmp_path, work(1, rate))


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_other_configurations_take_what_was_predicted_on_a_real_broker(
    spark: SparkSession, tmp_path: Path, kafka: SharedKafka, topic: str
) -> None:
    loads = work(1, None)

    async def produce() -> None:
        await kafka.create_topic(topic, partitions=PARTITIONS)
        await kafka.produce(topic, [(one.key, b"%f" % one.seconds) for one in loads])

    asyncio.run(produce())
    compare(spark, tmp_path, loads, kafka=kafka.bootstrap, topic=topic)


def compare(
    spark: SparkSession, tmp_path: Path, loads: Sequence[Load], *, kafka: str | None = None, topic: str = "orders"
) -> None:
    """Record one run, ask about three others, and run each of these three times."""
    run(work(2, None)[:100], tmp_path / "warm", concurrency=16)
    journal = run(loads, tmp_path / "recorded", concurrency=16, kafka=kafka, topic=topic)
    asked = [Candidate(shards=0, concurrency=48), Candidate(shards=48), Candidate(shards=0, concurrency=24)]
    found = ask(read_journal(spark, str(tmp_path / "recorded")), asked)
    told = {}
    for number, answer in enumerate(found.answers):
        candidate, prediction = answer.candidate, answer.prediction
        assert prediction is not None, answer.not_predicted
        lives = [
            run(
                loads,
                tmp_path / f"{number}-{again}",
                shards=candidate.shards or None,
                concurrency=candidate.concurrency or 1,
                kafka=kafka,
                topic=topic,
            )
            for again in range(LIVE_RUNS)
        ]
        makespans, withins, late, later = zip(*lives, strict=True)
        told[candidate.label] = {
            "makespan": prediction.makespan / 1e6 / statistics.median(makespans) - 1,
            "makespan spread": (max(makespans) - min(makespans)) / statistics.median(makespans),
            "99 %": prediction.total[1] / 1e6 / statistics.median(withins) - 1,
            "99 % spread": (max(withins) - min(withins)) / statistics.median(withins),
            "sleeps": (statistics.median(late) - journal.late) / MEAN_SLEEP,
            "99 % of sleeps": (statistics.median(later) - journal.later) / statistics.median(withins),
        }
    print(json.dumps({label: {name: f"{off:+.1%}" for name, off in one.items()} for label, one in told.items()}))
    good = all(abs(one["makespan"]) <= 0.05 and abs(one["99 %"]) <= 0.15 for one in told.values())
    noise = max(max(abs(one["sleeps"]), abs(one["99 % of sleeps"]) / 3) for one in told.values())
    if not good and noise > QUIET:
        pytest.skip(f"the machine is too busy: the same sleeps take {noise:.1%} more or less; {told}")
    assert good, told
