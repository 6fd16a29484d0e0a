"""Adaptive concurrency on a real broker, while members come and go."""

import asyncio

from aioshard import Adaptive, Record, Retry, RetryLater
from tests.kafka.faults.support import Ledger, handler_of, messages, quick_app, until
from tests.support.brokers import SharedKafka


class Overloaded(Ledger):
    """Refuses every run while its back end is overloaded."""

    def __init__(self) -> None:
        super().__init__(pause=0.02)
        self.is_overloaded = False

    async def handle(self, record: Record) -> None:
        if self.is_overloaded:
            await asyncio.sleep(0.02)
            raise RetryLater(0.2)
        await super().handle(record)


async def test_it_rises_and_falls_while_members_come_and_go(kafka: SharedKafka, topic: str, group: str) -> None:
    """Nothing is lost, nothing runs twice, and keys stay in order."""
    await kafka.create_topic(topic, partitions=6)
    sent = messages(12_000, keys=2_000)
    await kafka.produce(topic, sent)
    ledger = Overloaded()
    first, second, third = (quick_app(kafka, group) for _ in range(3))
    for app in (first, second, third):
        app.consume(topic, concurrency=Adaptive(1, 64, initial=4), retry=Retry(attempts=10_000))(ledger.handle)
    async with first:
        await until(lambda: handler_of(first).concurrency >= 16, first.explain)
        async with second:
            await ledger.until_more_than(len(ledger.finished) + 200)
            ledger.is_overloaded = True
            await until(lambda: handler_of(first).concurrency <= 2, first.explain)
            ledger.is_overloaded = False
            await ledger.until_more_than(len(ledger.finished) + 20)
    async with third:
        await ledger.until_finished(sent)
        await until(lambda: sum(part.lag or 0 for part in third.statistics().partitions) == 0, third.explain)

    assert ledger.duplicates == []
    ledger.assert_in_order()
    assert sum((await kafka.committed(group, topic)).values()) == len(sent)
