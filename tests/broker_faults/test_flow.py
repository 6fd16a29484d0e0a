"""Rate limits, and a concurrency that changes, on a real broker."""

import asyncio
import bisect
from collections.abc import Sequence

from aioshard import RateLimit, Record
from tests.broker_faults.support import Ledger, handler_of, messages, quick_app, until
from tests.support.shared_kafka import SharedKafka


class Timed(Ledger):
    """Notes when each run began."""

    def __init__(self, *, pause: float = 0.0) -> None:
        super().__init__(pause=pause)
        self.times: list[float] = []

    async def handle(self, record: Record) -> None:
        now = asyncio.get_running_loop().time()
        self.times.append(now)
        await super().handle(record)


def assert_keeps(limit: RateLimit, times: Sequence[float]) -> None:
    """No window of a tenth of a second to two seconds has more starts than the limit allows."""
    for window in (0.0, 0.1, 0.5, 2.0):
        for first, start in enumerate(times):
            count = bisect.bisect_right(times, start + window) - first
            assert count <= limit.at_once + limit.per_second * window + 1e-3


async def test_ten_thousand_records_at_a_limited_rate(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic, partitions=4)
    sent = messages(10_000, keys=500)
    await kafka.produce(topic, sent)
    app, ledger, limit = quick_app(kafka, group), Timed(), RateLimit(5_000, burst=100)
    app.consume(topic, concurrency=32, rate_limit=limit)(ledger.handle)
    async with app:
        await ledger.until_finished(sent)

    assert_keeps(limit, ledger.times)
    assert ledger.times[-1] - ledger.times[0] >= (10_000 - 100) / 5_000 - 1e-3
    assert ledger.duplicates == []
    ledger.assert_in_order()


async def test_the_concurrency_changes_under_load_while_members_come_and_go(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    """I4 while it goes 1 → 64 → 2, and nothing is lost or runs twice."""
    await kafka.create_topic(topic, partitions=6)
    sent = messages(6_000, keys=300)
    await kafka.produce(topic, sent)
    ledger = Ledger(pause=0.005)
    first, second = quick_app(kafka, group), quick_app(kafka, group)
    for app in (first, second):
        app.consume(topic, concurrency=1)(ledger.handle)
    async with first:
        await ledger.until_more_than(20)
        first.set_concurrency("handle", 64)
        await ledger.until_more_than(500)
        async with second:
            second.set_concurrency("handle", 64)
            await ledger.until_more_than(1_000)
            first.set_concurrency("handle", 2)
            await ledger.until_more_than(1_500)
        assert handler_of(first).concurrency == 2
        await ledger.until_more_than(len(ledger.finished) + 50)
        first.set_concurrency("handle", 64)
        await ledger.until_finished(sent)
        await until(lambda: sum(part.lag or 0 for part in first.statistics().partitions) == 0, first.explain)

    assert ledger.duplicates == []
    ledger.assert_in_order()
    assert sum((await kafka.committed(group, topic)).values()) == 6_000


class BackEnd:
    """Serves so many calls at a time, each in 50 ms; the others wait in line."""

    def __init__(self, servers: int) -> None:
        self.servers = servers
        self._places = asyncio.Semaphore(servers)

    async def call(self, _: Record) -> None:
        async with self._places:
            await asyncio.sleep(0.05)

    async def shrink(self, servers: int) -> None:
        for _ in range(self.servers - servers):
            await self._places.acquire()
        self.servers = servers
