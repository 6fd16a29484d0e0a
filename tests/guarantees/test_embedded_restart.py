"""The order service under uvicorn and load: an unnoticed rolling restart of two processes (I3, I12)."""

import asyncio
import contextlib
import signal
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import httpx
import psycopg
import pytest

from tests.guarantees.servers import Balancer, Server, Start
from tests.support.kafka import KafkaBroker

TARGET = "tests.guarantees.embedded_member:api"
READY = "/internal/readyz"
DELAY = 1.0
"""Seconds after which a change of readiness is known to all clients at the latest."""
READY_WITHIN = 10.0
MARGIN = 1.0
"""Seconds more than that for a busy machine: until a probe has its answer, and a request its connection."""
PACE = 0.05
"""Seconds that a run takes beside its transaction: there is always something to drain."""
CLIENTS = 8
EVERY = 0.08
"""Seconds between two orders of a client."""


class Replacement(NamedTuple):
    """How long it took, in seconds."""

    hook: float
    end: float
    start: Start


class Shop:
    """Two processes of the service, orders for it, and what became of them."""

    def __init__(self, kafka: KafkaBroker, database: str, directory: Path) -> None:
        self.kafka = kafka
        self.database = database
        self.runs = directory / "runs"
        self.balancer = Balancer(READY, delay=DELAY)
        self.ordered: list[uuid.UUID] = []
        self._directory = directory
        self._exit = contextlib.ExitStack()
        self._numbers = 0
        self._environment = {
            "AIOSHARD_BOOTSTRAP_SERVERS": kafka.bootstrap,
            "AIOSHARD_START_TIMEOUT": "40",  # how soon a start is over is judged below
            "DATABASE_URL": database,
            "RUNS": str(self.runs),
            "PACE": str(PACE),
        }

    def start(self, name: str) -> Server:
        """Starts a process, which is probed from now on."""
        self._numbers += 1
        log = self._directory / f"{name}-{self._numbers}.log"
        server = Server(TARGET, log, self._environment, "--timeout-graceful-shutdown=10")
        self.balancer.servers[name] = self._exit.enter_context(server)
        return server

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Clients that order one thing after the other while the context is open."""
        enough = asyncio.Event()

        async def order_steadily(client: httpx.AsyncClient) -> None:
            while not enough.is_set():
                self.ordered.append(uuid.uuid4())
                body = {"customer": f"customer-{len(self.ordered) % 300}", "article": "book", "amount": 2.5}
                await self.balancer.put(client, f"/orders/{self.ordered[-1]}", body)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(enough.wait(), EVERY)

        # The server closes connections that were idle for 5 s: a client that reuses one later may find it closed.
        limits = httpx.Limits(keepalive_expiry=2.0)
        async with httpx.AsyncClient(timeout=30.0, limits=limits) as client, asyncio.TaskGroup() as ordering:
            for number in range(CLIENTS):
                ordering.create_task(order_steadily(client), name=f"client {number}")
            try:
                yield
            finally:
                enough.set()

    async def replace(self, name: str) -> Replacement:
        """Replace a process as Kubernetes does: `preStop`, SIGTERM, and a new process."""
        leaving = self.balancer.servers[name]
        began = time.monotonic()
        async with httpx.AsyncClient(timeout=60.0) as client:
            hook = await client.get(f"{leaving.base}/internal/drain?wait={DELAY + MARGIN}")
        assert hook.status_code == 200, hook.text
        drained = time.monotonic()
        leaving.send(signal.SIGTERM)
        await leaving.ended()
        assert "Application shutdown complete" in leaving.log, leaving.tail
        ended = time.monotonic()
        ready = await self.start(name).until_ready(READY)
        return Replacement(drained - began, ended - drained, ready)

    def booked(self) -> Counter[uuid.UUID]:
        """The orders in the database."""
        with psycopg.connect(self.database) as connection:
            return Counter(found for (found,) in connection.execute("SELECT id FROM orders"))

    async def until_booked(self) -> None:
        """Waits until nothing is left to do."""
        await self.kafka.wait_for_lag("order-service", "orders", timeout=60.0)

    def ran(self) -> Counter[str]:
        """How often each record was begun."""
        return Counter(self.runs.read_text().splitlines())

    def close(self) -> None:
        """Ends what still runs."""
        self._exit.close()


@pytest.fixture
async def shop(own_kafka: KafkaBroker, postgresql_url: str, tmp_path: Path) -> AsyncIterator[Shop]:
    await own_kafka.create_topic("orders", partitions=8)
    shop = Shop(own_kafka, postgresql_url, tmp_path)
    try:
        yield shop
    finally:
        shop.close()


@pytest.mark.chaos
@pytest.mark.timeout(240)
async def test_replacing_two_processes_under_load_goes_unnoticed(shop: Shop) -> None:
    """The promise of the example's README about restarts, with the probes and hooks of Kubernetes."""
    for name in "ab":
        shop.start(name)
    ready = [await server.until_ready(READY) for server in shop.balancer.servers.values()]
    async with shop.balancer.probing(), shop.load():
        await asyncio.sleep(2)  # under load, before anything happens, and after it
        replaced = [await shop.replace(name) for name in "ab"]
        await asyncio.sleep(2)
    await shop.until_booked()

    balancer, ran = shop.balancer, shop.ran()
    starts = [*ready, *(replacement.start for replacement in replaced)]
    figures = {
        "orders": len(shop.ordered),
        "answers": dict(balancer.answers),
        "lost": len(set(shop.ordered) - set(shop.booked())),
        "ran twice": sum(times - 1 for times in ran.values()),
        "rounds of probes": balancer.rounds,
        "nobody ready": balancer.nobody,
        "seconds until ready": [round(start.seconds, 1) for start in starts],
        "of these without a core": [round(start.in_line, 1) for start in starts],
        "seconds of preStop": [round(replacement.hook, 1) for replacement in replaced],
        "seconds of the end": [round(replacement.end, 1) for replacement in replaced],
    }
    print(figures)
    assert set(balancer.answers) == {"202"}, figures
    assert figures["lost"] == 0, figures
    assert len(ran) == len(shop.ordered), figures
    assert figures["ran twice"] == 0, figures
    assert balancer.rounds > 30, figures
    assert balancer.nobody == 0, figures
    assert max(start.seconds - start.in_line for start in starts) < READY_WITHIN, figures
