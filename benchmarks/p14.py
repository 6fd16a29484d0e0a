"""P14: what a scrape of the metrics costs, and for how long it keeps the event loop from turning."""

import asyncio
import time
from collections.abc import Coroutine
from typing import NamedTuple, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from aioshard import App, Record
from aioshard.telemetry.metrics import AppCollector
from aioshard.testing import InMemoryBroker, TestClient
from benchmarks.report import Report, Verdict, spread

TITLE = "A scrape of /metrics, in a thread beside the event loop; every partition has a record in hand"
ACCEPT = "application/openmetrics-text;version=1.0.0"
"""What Prometheus asks for."""
T = TypeVar("T")
INTERVAL = 15.0
"""Seconds between two scrapes, for their share of a core."""
MOST_SECONDS = 0.3
LONGEST_HOLD = 0.02


class Scrape(NamedTuple):
    """One of them."""

    seconds: float
    """CPU that its thread took."""
    hold: float
    """CPU seconds of the process in the longest time for which the event loop did not turn."""
    page: bytes
    without: float
    """The same as `hold`, of as long a time in which nobody scrapes."""


async def run(*, quick: bool) -> Report:
    """One app after the other, each with more partitions."""
    report = Report("P14", TITLE)
    seconds = hold = spread([0.0])
    for partitions in (1, 100, 1_000):
        found = await scrapes(partitions, 3 if quick else 30)
        seconds = spread([one.seconds for one in found])
        hold = spread([one.hold for one in found])
        report.rows.append(
            {
                "partitions": partitions,
                "series": sum(1 for line in found[0].page.splitlines() if not line.startswith(b"#")),
                "ms CPU": spread([one.seconds * 1_000 for one in found]),
                "ms in which the loop did not turn": spread([one.hold * 1_000 for one in found]),
                "without a scrape": spread([one.without * 1_000 for one in found]),
                "% of a core, one each 15 s": 100 * seconds.median / INTERVAL,
            }
        )
    report.verdicts += [
        Verdict("CPU of a scrape of 1,000 partitions", seconds.median, must=MOST_SECONDS, unit="s", judged=not quick),
        Verdict("the loop did not turn for", hold.median, must=LONGEST_HOLD, unit="s", judged=not quick),
        Verdict("% of a core, one each 15 s", 100 * seconds.median / INTERVAL, must=2.0, unit="%", judged=not quick),
    ]
    report.notes.append("Without a scrape, it is the engine and its broker in memory that look at each partition.")
    report.notes.append("CPU time, so that it does not matter what else the machine does. Median (least–most).")
    return report


async def scrapes(partitions: int, rounds: int) -> list[Scrape]:
    """Scrape an app that has a record of each partition in hand."""
    app = App("billing", auto_offset_reset="earliest", max_buffered_records=100_000)
    let_go = asyncio.Event()

    @app.consume("orders", concurrency=64)
    async def on_order(_: Record) -> None:
        await let_go.wait()

    broker = InMemoryBroker()
    broker.create_topic("orders", partitions)
    registry = CollectorRegistry()
    AppCollector(app, registry=registry)
    async with TestClient(app, broker=broker) as client:
        for partition in range(partitions):
            await client.publish("orders", b"1", key=b"%d" % partition, partition=partition)
        while sum(one.incomplete for one in app.statistics().partitions) < partitions:
            await asyncio.sleep(0.01)
        found = [await _scrape(registry) for _ in range(rounds)]
        let_go.set()
        await client.settle()
    return found


def _timed(registry: CollectorRegistry) -> tuple[float, bytes]:
    before = time.thread_time()
    encoder, _ = choose_encoder(ACCEPT)
    page = encoder(registry)
    return time.thread_time() - before, page


async def _scrape(registry: CollectorRegistry) -> Scrape:
    """One, and as long a time without."""
    began = time.perf_counter()
    hold, (seconds, page) = await _watched(asyncio.to_thread(_timed, registry))
    without, _ = await _watched(asyncio.sleep(time.perf_counter() - began))
    return Scrape(seconds, hold, page, without)


async def _watched(what: Coroutine[None, None, T]) -> tuple[float, T]:
    """The longest time, in CPU seconds of the process, for which the loop did not turn meanwhile; and the result."""
    watched = asyncio.create_task(what, name="watched")
    hold = 0.0
    while not watched.done():
        before = time.process_time()
        await asyncio.sleep(0)
        hold = max(hold, time.process_time() - before)
    return hold, watched.result()
