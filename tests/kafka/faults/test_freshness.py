"""Records that handlers leave out, on a real broker, with a second member that joins and leaves."""

import asyncio
import time
from typing import Any

from aioshard import App
from tests.kafka.faults.support import Ledger, handler_of, messages, quick_app, until, with_both_protocols
from tests.support.brokers import SharedKafka

PARTITIONS = 4
KEYS = 20


async def until_committed(kafka: SharedKafka, group: str, topic: str, records: int) -> None:
    while sum((await kafka.committed(group, topic)).values()) < records:  # noqa: ASYNC110 - brokers tell nobody
        await asyncio.sleep(0.05)


@with_both_protocols
async def test_the_newest_record_of_each_key_runs_while_members_join_and_leave(
    kafka: SharedKafka, topic: str, group: str, protocol: Any
) -> None:
    await kafka.create_topic(topic, PARTITIONS)
    sent = messages(4_000, keys=KEYS)
    newest = dict(sent)
    ledger = Ledger(pause=0.01)

    def member() -> App:
        app = quick_app(kafka, group, group_protocol=protocol)
        app.consume(topic, keep="latest", concurrency=4)(ledger.handle)
        return app

    superseded = 0
    async with member() as first:
        for start in range(0, len(sent), 1_000):
            await kafka.produce(topic, sent[start : start + 1_000])
            async with member() as second:
                await until(second.assignment)
                superseded += handler_of(second).superseded
        async with asyncio.timeout(60.0):
            await until_committed(kafka, group, topic, len(sent))
        superseded += handler_of(first).superseded

    last: dict[bytes | None, bytes | None] = {record.key: record.value for record in ledger.finished}
    assert last == newest, "the last run of each key is that of its newest record"
    assert ledger.overlaps == []
    assert superseded > 0
    assert len(ledger.finished) < len(sent)


async def test_old_records_expire_and_young_ones_run(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic, PARTITIONS)
    await kafka.produce(topic, messages(500))
    written = time.time()
    app, ledger = quick_app(kafka, group), Ledger()
    max_age = 5.0
    app.consume(topic, max_age=max_age)(ledger.handle)
    await asyncio.sleep(max(written + max_age + 0.1 - time.time(), 0.0))  # the brokers' clock
    async with app:
        await kafka.produce(topic, messages(100, start=500))
        async with asyncio.timeout(60.0):
            await until_committed(kafka, group, topic, 600)
        assert handler_of(app).expired >= 500
        assert handler_of(app).expired + handler_of(app).processed == 600
    assert {value for value in ledger.values if value is not None} <= {b"%d" % number for number in range(500, 600)}
