"""P14: CPU of a scrape of the metrics, and how long it blocks the event loop."""

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

TITLE = "A scrape of /metrics, in a thread beside the event loop; every partition has a record in flight"
ACCEPT = "application/openmetrics-text;version=1.0.0"
"""The `Accept` header of Prometheus."""
T = TypeVar("T")
INTERVAL = 15.0
"""Seconds between two scrapes, for their share of a core."""
MOST_SECONDS = 0.3
LONGEST_HOLD = 0.02


class Scrape(NamedTuple):
    """The measurement of one scrape."""

    seconds: float
    """CPU seconds of its thread."""
    hold: float
    """CPU seconds of the process during the longest block of the event loop."""
    page: bytes
    without: float
    """The same as `hold`, for an equally long time without a scrape."""


async def run(*, quick: bool) -> Report:
    """Measure one app after the other, each with more partitions."""
    report = Report("P14", TITLE)
    seconds = hold = spread([0.0])
    for partitions in (1, 100, 1_000):
        found = await scrapes(partitions, 3 if quick else 30)
        seconds = spread([scrape.seconds for scrape in found])
        hold = spread([scrape.hold for scrape in found])
        report.rows.append(
            {
                "partitions": partitions,
                "series": sum(1 for line in found[0].page.splitlines() if not line.startswith(b"#")),
                "ms CPU": spread([scrape.seconds * 1_000 for scrape in found]),
                "ms in which the loop was blocked": spread([scrape.hold * 1_000 for scrape in found]),
                "without a scrape": spread([scrape.without * 1_000 for scrape in found]),
                "% of a core, one each 15 s": 100 * seconds.median / INTERVAL,
            }
        )
    report.verdicts += [
        Verdict("CPU of a scrape of 1,000 partitions", seconds.median, must=MOST_SECONDS, unit="s", judged=not quick),
        Verdict("the loop was blocked for", hold.median, must=LONGEST_HOLD, unit="s", judged=not quick),
        Verdict("% of a core, one each 15 s", 100 * seconds.median / INTERVAL, must=2.0, unit="%", judged=not quick),
    ]
    report.notes.append("Without a scrape, it is the engine and its broker in memory that look at each partition.")
    report.notes.append("CPU time, so that it does not matter what else the machine does. Median (least–most).")
    return report


async def scrapes(partitions: int, rounds: int) -> list[Scrape]:
    """Scrape an app that has a record of each partition in flight."""
    app = App("billing", auto_offset_reset="earliest", max_buffered_records=100_000)
    release = asyncio.Event()

    @app.consume("orders", concurrency=64)
    async def on_order(_: Record) -> None:
        await release.wait()

    broker = InMemoryBroker()
    broker.create_topic("orders", partitions)
    registry = CollectorRegistry()
    AppCollector(app, registry=registry)
    async with TestClient(app, broker=broker) as client:
        for partition in range(partitions):
            await client.publish("orders", b"1", key=b"%d" % partition, partition=partition)
        while sum(partition.incomplete for partition in app.statistics().partitions) < partitions:
            await asyncio.sleep(0.01)
        found = [await _scrape(registry) for _ in range(rounds)]
        release.set()
        await client.settle()
    return found


def _timed(registry: CollectorRegistry) -> tuple[float, bytes]:
    before = time.thread_time()
    encoder, _ = choose_encoder(ACCEPT)
    page = encoder(registry)
    return time.thread_time() - before, page


async def _scrape(registry: CollectorRegistry) -> Scrape:
    """Measure one scrape, and an equally long time without one."""
    began = time.perf_counter()
    hold, (seconds, page) = await _watched(asyncio.to_thread(_timed, registry))
    without, _ = await _watched(asyncio.sleep(time.perf_counter() - began))
    return Scrape(seconds, hold, page, without)


async def _watched(coroutine: Coroutine[None, None, T]) -> tuple[float, T]:
    """Return the longest block of the event loop meanwhile, in CPU seconds of the process, and the result."""
    watched = asyncio.create_task(coroutine, name="watched")
    hold = 0.0
    while not watched.done():
        before = time.process_time()
        await asyncio.sleep(0)
        hold = max(hold, time.process_time() - before)
    return hold, watched.result()
