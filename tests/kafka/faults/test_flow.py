"""Rate limits on a real broker."""

import asyncio
import bisect
from collections.abc import Sequence

from aioshard import Limit, Record
from tests.kafka.faults.support import Ledger, messages, quick_app
from tests.support.brokers import SharedKafka


class Timed(Ledger):
    """Notes when each run began."""

    def __init__(self, *, pause: float = 0.0) -> None:
        super().__init__(pause=pause)
        self.times: list[float] = []

    async def handle(self, record: Record) -> None:
        now = asyncio.get_running_loop().time()
        self.times.append(now)
        await super().handle(record)


def assert_keeps(limit: Limit, times: Sequence[float]) -> None:
    """No window of a tenth of a second to two seconds has more starts than the limit allows."""
    for window in (0.0, 0.1, 0.5, 2.0):
        for first, start in enumerate(times):
            count = bisect.bisect_right(times, start + window) - first
            assert count <= limit.at_once + limit.per_second * window + 1e-3


async def test_ten_thousand_records_are_processed_at_a_limited_rate(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic, partitions=4)
    sent = messages(10_000, keys=500)
    await kafka.produce(topic, sent)
    app, ledger, limit = quick_app(kafka, group), Timed(), Limit("pace", 5_000, burst=100)
    app.consume(topic, concurrency=32, limit=limit)(ledger.handle)
    async with app:
        await ledger.until_finished(sent)

    assert_keeps(limit, ledger.times)
    assert ledger.times[-1] - ledger.times[0] >= (10_000 - 100) / 5_000 - 1e-3
    assert ledger.duplicates == []
    ledger.assert_in_order()
