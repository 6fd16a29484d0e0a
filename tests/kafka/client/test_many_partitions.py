"""How long a rebalance of a thousand partitions blocks the event loop."""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from aioshard import App, Record
from tests.kafka.client.members import POLL
from tests.support.brokers import SharedKafka

PATIENCE = 60.0
PARTITIONS = 1_000
LONGEST = 0.1
"""Seconds of CPU. The longest turns take a seventh of that; ending partitions one by one took several times as much."""


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Keeps the garbage collector from holding the loop.

    How long it does depends on the objects of the whole process, here those of both members and of all other tests.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def make_app(kafka: SharedKafka, topic: str, group: str) -> App:
    app = App(group, bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest", heartbeat_interval=0.2)

    @app.consume(topic, concurrency=1_024)
    async def handle(record: Record) -> None: ...

    return app


async def stay(app: App, leave: threading.Event) -> None:
    async with app:
        await asyncio.to_thread(leave.wait)


async def own(app: App, partitions: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while len(app.assignment()) != partitions:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(POLL)


@asynccontextmanager
async def measured(turns: dict[str, float]) -> AsyncIterator[Callable[[str], None]]:
    """Measure the longest turn of the loop in each phase, in CPU time, so that other processes do not count.

    Yields a function that begins a phase.
    """
    phase = ""

    def begin(name: str) -> None:
        nonlocal phase
        phase = name
        turns[phase] = 0.0

    async def measure() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            turns[phase] = max(turns[phase], time.thread_time() - before)

    begin("before")
    measuring = asyncio.create_task(measure(), name="measure turns")
    try:
        yield begin
    finally:
        measuring.cancel()
        await asyncio.wait([measuring])
        del turns["before"]


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("no_collection")
async def test_a_rebalance_of_a_thousand_partitions_does_not_block_the_loop(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    await kafka.create_topic(topic, PARTITIONS)
    app, turns, leave = make_app(kafka, topic, group), dict[str, float](), threading.Event()
    async with app:  # also imports what is imported on use
        await own(app, PARTITIONS)
    # In a thread, so that the work of the other member does not count.
    other = stay(make_app(kafka, topic, group), leave)
    async with measured(turns) as begin:
        begin("join")
        async with app:
            await own(app, PARTITIONS)
            begin("another member joins")
            joined = asyncio.create_task(asyncio.to_thread(asyncio.run, other), name="other member")
            try:
                await own(app, PARTITIONS // 2)
                begin("it leaves")
            finally:
                leave.set()
                await joined
            await own(app, PARTITIONS)
            begin("stop")
    await kafka.delete_topic(topic)

    assert turns.keys() == {"join", "another member joins", "it leaves", "stop"}
    assert {phase: seconds for phase, seconds in turns.items() if seconds > LONGEST} == {}
