"""The event simulation against the engine itself, in virtual time: what a model leaves out shows, and no noise does."""

import asyncio
import random
from array import array
from typing import NamedTuple

import pytest

import aioshard.testing
from aioshard import App, Record
from aioshard.core.key_hash import key_hash
from aioshard.engine.epoch import Delivery
from aioshard.spark.analysis.fleet import quantile
from aioshard.spark.analysis.simulation import NO_KEY, Engine, Work, simulate
from aioshard.testing import InMemoryBroker, InMemoryProducer, InMemoryTransport

RECORDS = 3_000
PARTITIONS = 6
AT_ONCE = 100_000
"""Records that the client hands out: the client in memory bounds those of each partition, and Kafka's those of all."""


class Load(NamedTuple):
    """A record to process."""

    key: bytes | None
    microseconds: int
    after: int
    """When it is published, in microseconds."""


class Ran(NamedTuple):
    """What became of a record; microseconds from the start."""

    partition: int
    offset: int
    key: bytes | None
    available: int
    arrived: int
    started: int
    finished: int


def loads(seed: int, rate: float | None) -> list[Load]:
    chance = random.Random(seed)
    keys = [b"customer-%d" % number for number in range(150)]
    weights = [(number + 1) ** -0.7 for number in range(len(keys))]
    after = 0.0
    found = []
    for key in chance.choices(keys, weights, k=RECORDS):
        if rate is not None:
            after += chance.expovariate(rate)
        microseconds = max(5_000, round(chance.lognormvariate(-4.4, 0.8) * 1e6))
        found.append(Load(None if chance.random() < 0.1 else key, microseconds, round(after * 1e6)))
    return found


def run(work: list[Load], engine: Engine) -> list[Ran]:
    """Process *work* with the real engine."""
    ran: list[Ran] = []

    async def process() -> None:
        loop = asyncio.get_running_loop()
        broker = InMemoryBroker(partitions=PARTITIONS, clock=loop.time)
        broker.create_topic("orders", PARTITIONS)
        app = App(
            "g",
            bootstrap_servers="unused",
            auto_offset_reset="earliest",
            max_buffered_records=engine.max_buffered_records,
        )
        done = asyncio.Event()
        begin = 0.0

        async def on_order(record: Record) -> None:
            await asyncio.sleep(int(record.value or b"0") / 1e6)

        if engine.shards:
            app.consume("orders", shards=engine.shards)(on_order)
        else:
            app.consume("orders", concurrency=engine.workers)(on_order)

        def completed(delivery: Delivery) -> None:
            assert delivery.run is not None
            record = delivery.record
            moments = (max(record.timestamp, begin), delivery.arrived, *delivery.run[:2])
            times = (round((moment - begin) * 1e6) for moment in moments)
            ran.append(Ran(record.partition, record.offset, record.key, *times))
            if len(ran) == len(work):
                done.set()

        for one in work:
            if not one.after:
                broker.publish("orders", b"%d" % one.microseconds, key=one.key)
        started = app.started(
            lambda: InMemoryTransport(broker, "g", max_batch_records=AT_ONCE),
            lambda: InMemoryProducer(broker),
            observe=lambda _: completed,
        )
        async with started:
            begin = loop.time()
            for one in work:
                if one.after:
                    await asyncio.sleep(begin + one.after / 1e6 - loop.time())
                    broker.publish("orders", b"%d" % one.microseconds, key=one.key)
            await done.wait()

    aioshard.testing.run(process())
    return ran


def recorded(ran: list[Ran]) -> Work:
    ordered = sorted(ran, key=lambda one: (one.available, one.partition, one.offset))
    return Work(
        array("q", [one.partition for one in ordered]),
        array("q", [one.available for one in ordered]),
        array("q", [one.finished - one.started for one in ordered]),
        array("q", [NO_KEY if one.key is None else key_hash(one.key) or 0 for one in ordered]),
    )


ENGINES = {
    "8-on-demand-backlog": (Engine(0, 8, 10_000), None),
    "100-on-demand-backlog": (Engine(0, 100, 10_000), None),
    "100-on-demand-stream": (Engine(0, 100, 10_000), 1_500.0),
    "40-on-demand-little-memory-backlog": (Engine(0, 40, 150), None),
    "40-on-demand-little-memory-stream": (Engine(0, 40, 150), 1_500.0),
    "16-fixed-backlog": (Engine(16, 16, 10_000), None),
    "16-fixed-stream": (Engine(16, 16, 10_000), 1_500.0),
    "64-fixed-stream": (Engine(64, 64, 10_000), 1_500.0),
    "32-fixed-short-queues-backlog": (Engine(32, 32, 160), None),
}


@pytest.mark.parametrize(("engine", "rate"), ENGINES.values(), ids=ENGINES)
def test_the_simulation_finds_what_the_engine_does(engine: Engine, rate: float | None) -> None:
    """Asked from the journal of one run with 32 workers. The bounds are those that predictions have to keep."""
    work = loads(7, rate)

    simulated = simulate(recorded(run(work, Engine(0, 32, 10_000))), engine._replace(records_per_poll=AT_ONCE))
    ran = run(work, engine)

    makespan = max(one.finished for one in ran) - min(one.available for one in ran)
    stays = sorted(one.finished - one.arrived for one in ran)
    found = sorted(end - arrival for end, arrival in zip(simulated.finished, simulated.arrived, strict=True))
    assert max(simulated.finished) == pytest.approx(makespan, rel=0.05)
    assert quantile(found, 0.99) == pytest.approx(quantile(stays, 0.99), rel=0.15)
    assert quantile(found, 0.5) == pytest.approx(quantile(stays, 0.5), rel=0.15)
