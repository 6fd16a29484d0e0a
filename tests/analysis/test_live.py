"""What-if against what is: from the journal of one run, other configurations, each run three times."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
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
from aioshard.spark.analysis.stalls import stalls_of
from aioshard.spark.analysis.trust import GOOD
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
    stood: float
    """For which share of the time the event loop stood still."""


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


def short_work(seed: int) -> list[Load]:
    """A backlog for handlers that sleep for 5 to 6 ms."""
    chance = random.Random(seed)
    return [Load(b"customer-%d" % chance.randrange(1_000), chance.uniform(0.005, 0.006), 0.0) for _ in range(RECORDS)]


async def standing_still(stalls: Sequence[tuple[float, float]]) -> None:
    """Block the event loop so long after each of some times."""
    for after, seconds in stalls:
        # The stalls have moments of their own: nothing waits for nothing.
        await asyncio.sleep(after)
        time.sleep(seconds)  # noqa: ASYNC251 - this is what is tested


def run(
    loads: Sequence[Load],
    journal: Path,
    *,
    shards: int | None = None,
    concurrency: int = 64,
    kafka: str | None = None,
    topic: str = "orders",
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    stalls: Sequence[tuple[float, float]] = (),
) -> Live:
    """Run an app in the loop of production, and read its journal.

    Args:
        loads: What there is to process.
        journal: Where the journal is written; its name is the group's.
        shards: Fixed ones; None is on demand.
        concurrency: With shards on demand.
        kafka: Brokers that have the records already; without it, they are published to a broker in memory.
        topic: Where they are.
        loop_factory: Makes the event loop.
        stalls: The loop stands still: seconds after the one before, and for how long.
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
            blocking = asyncio.create_task(standing_still(stalls), name="stalls")
            for one in loads:
                if one.after:
                    # The loads have moments of their own: nothing waits for nothing.
                    await asyncio.sleep(max(begin + one.after - asyncio.get_running_loop().time(), 0))
                    broker.publish(topic, b"%f" % one.seconds, key=one.key)
            await done.wait()
            blocking.cancel()
            await asyncio.wait([blocking])

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(process())
    rows = ds.dataset(journal).to_table(["arrived", "started", "duration"]).to_pylist()
    assert len(rows) == len(loads)
    ends = [row["started"] + row["duration"] for row in rows]
    stays = sorted(round((end - row["arrived"]) * 1e6) for end, row in zip(ends, rows, strict=True))
    makespan = max(ends) - min(row["arrived"] for row in rows)
    late.sort()
    stood = stalls_of([round(row["started"] * 1e6) for row in rows], [round(end * 1e6) for end in ends])
    late_at = late[99 * len(late) // 100]
    return Live(makespan, quantile(stays, 0.99) / 1e6, statistics.mean(late), late_at, stood.total / 1e6 / makespan)


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


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stood", [0, 4], ids=["as-it-is", "stands-still"])
@pytest.mark.parametrize("workers", [16, 64])
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_short_handlers_take_what_was_predicted_within_what_is_told(
    spark: SparkSession,
    tmp_path: Path,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    workers: int,
    stood: int,
) -> None:
    """Whatever the machine does: by how much predictions may be off is found in the journal, and it is no less.

    What the runs after it stand still adds to their times, and no journal of an earlier run knows.
    """
    loads = short_work(3)
    run(loads[:200], tmp_path / "warm", concurrency=16, loop_factory=loop_factory)
    whole = sum(one.seconds for one in loads) / workers
    stalls = [(whole / (stood + 1), 0.05)] * stood
    journal = tmp_path / "recorded"
    run(loads, journal, concurrency=workers, loop_factory=loop_factory, stalls=stalls)
    others = [number for number in (16, 24, 48, 64) if number != workers]

    found = ask(read_journal(spark, str(journal)), [Candidate(shards=0, concurrency=number) for number in others])

    told = {}
    for answer in found.answers:
        candidate, prediction, off_by = answer.candidate, answer.prediction, answer.off_by
        assert prediction is not None, answer.not_predicted
        assert off_by is not None
        lives = [
            run(
                loads,
                tmp_path / f"{candidate.concurrency}-{again}",
                concurrency=candidate.concurrency or 1,
                loop_factory=loop_factory,
            )
            for again in range(LIVE_RUNS)
        ]
        live = statistics.median(one.makespan for one in lives)
        told[candidate.label] = {
            "takes": live / (prediction.makespan / 1e6) - 1,
            "99 % within": statistics.median(one.within for one in lives) / (prediction.total[1] / 1e6) - 1,
            "by up to": off_by,
            "stood": statistics.median(one.stood for one in lives),
        }
    print(found.stalls, json.dumps({label: {n: f"{v:+.1%}" for n, v in one.items()} for label, one in told.items()}))
    if stood:
        assert found.stalls.times >= stood
        assert found.stalls.longest >= 45_000
        assert all(one["by up to"] > 2 * GOOD for one in told.values()), "it is told that the loop stood still"
    for one in told.values():
        off_by, awake = one["by up to"], 1 - one["stood"]
        assert -off_by <= one["takes"] <= (1 + off_by) / awake - 1, told
        assert -3 * off_by <= one["99 % within"] <= (1 + 3 * off_by) / awake - 1, told


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
        makespans, withins, late, later, _ = zip(*lives, strict=True)
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
