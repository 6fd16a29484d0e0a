"""The circuit breaker of dead letters: poison messages flow at full speed, and a wrong schema stops the topic."""

import asyncio
import itertools
import json
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from aioshard import App, CircuitBreaker, Context, DeadLetter, Retry
from tests.support.brokers import SharedKafka

RECORDS, PARTITIONS, KEYS, CONCURRENCY = 16_000, 4, 499, 128
POISON = [b'{"total": -1}', b"{"]
"""Refused by the handler, and not to be decoded."""


@dataclass
class Order:
    """A payload; negative totals are refused by the handler."""

    total: int


@dataclass
class Run:
    """The result of a run of an app."""

    app: App
    dead_letters: str
    seconds: float = 0.0
    order: dict[bytes | None, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Totals of the processed records, by key."""


def make_run(kafka: SharedKafka, topic: str, breaker: CircuitBreaker | None, number: int) -> Run:
    group = f"{topic}-{number}"
    app = App(group, bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest")
    run = Run(app, f"{group}.dlt")

    @app.consume(
        topic,
        concurrency=CONCURRENCY,
        retry=Retry(attempts=1),
        on_failure=DeadLetter(run.dead_letters, breaker=breaker),
    )
    async def on_order(order: Order, context: Context) -> None:
        await asyncio.sleep(0.01)
        if order.total < 0:
            raise ValueError(order.total)
        run.order[context.record.key].append(order.total)

    return run


async def fill(kafka: SharedKafka, topic: str, values: list[bytes]) -> None:
    await kafka.create_topic(topic, PARTITIONS)
    await kafka.produce(topic, [(b"key-%d" % (number % KEYS), value) for number, value in enumerate(values)])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("share", "pairs"),
    [
        pytest.param(20, 1),
        *(pytest.param(share, 5, marks=pytest.mark.chaos) for share in (2, 5, 20)),
    ],
)
async def test_poison_messages_are_dead_lettered_at_full_speed(
    kafka: SharedKafka, topic: str, share: int, pairs: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of it is refused by the handler, and half cannot be decoded. Of several runs in turn, the best count."""
    # In random places: a slow write holds up each key at its next poison message, and then all keys continue together.
    # At regular distances, the next poison messages would also come together, and the breaker would open.
    chosen = random.Random(share).sample(range(RECORDS), RECORDS * share // 100)
    poison_at = dict(zip(chosen, itertools.cycle(POISON), strict=False))
    values = [poison_at.get(number, b'{"total": %d}' % number) for number in range(RECORDS)]
    await fill(kafka, topic, values)
    runs = [make_run(kafka, topic, None if number % 2 else CircuitBreaker(), number) for number in range(2 * pairs)]
    poison = sorted((record.partition, record.offset) for record in await kafka.read(topic) if record.value in POISON)
    for run in runs:
        await kafka.create_topic(run.dead_letters, PARTITIONS)
        async with run.app:
            began = time.monotonic()
            while ended(run.app) < RECORDS:  # noqa: ASYNC110 - nothing tells the end
                await asyncio.sleep(0.02)
            run.seconds = time.monotonic() - began
        dead_letters = [dict(record.headers) for record in await kafka.read(run.dead_letters)]
        assert (
            sorted((int(at["aioshard.partition"] or b""), int(at["aioshard.offset"] or b"")) for at in dead_letters)
            == poison
        )
        assert sum(map(len, run.order.values())) == RECORDS - len(poison)
        assert all(totals == sorted(totals) for totals in run.order.values())
    assert not [line for line in caplog.records if getattr(line, "event", None) == "breaker_opened"]
    with_it, without = (min(run.seconds for run in runs[first::2]) for first in (0, 1))
    assert pairs == 1 or with_it <= 1.1 * without


def ended(app: App) -> int:
    handler = app.statistics().handlers[0]
    return handler.processed + handler.dead_lettered


async def test_a_wrong_schema_stops_the_topic(kafka: SharedKafka, topic: str) -> None:
    await fill(kafka, topic, [json.dumps({"sum": number}).encode() for number in range(2_000)])
    breaker = CircuitBreaker(window=50, minimum=20)
    run = make_run(kafka, topic, breaker, 0)
    await kafka.create_topic(run.dead_letters, PARTITIONS)
    async with run.app:
        async with asyncio.timeout(60):
            while not all("circuit breaker" in str(partition.paused) for partition in run.app.statistics().partitions):  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.02)
        assert "DecodeError" in run.app.explain()
    assert 0 < len(await kafka.read(run.dead_letters)) <= breaker.window + CONCURRENCY
    assert not run.order
