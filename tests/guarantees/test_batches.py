"""Rolling restarts of members with batch handlers: nothing is lost, repeated or reordered."""

import asyncio
import contextlib
from collections import Counter

import pytest

from aioshard import App, Batch, Record
from tests.guarantees.scenario import SHORT
from tests.support.brokers import SharedKafka

RECORDS = 20_000
KEYS = 400


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_a_rolling_restart_loses_and_repeats_no_record_of_a_batch(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    await kafka.create_topic(topic, partitions=8)
    await kafka.produce(topic, [(b"k%d" % (number % KEYS), b"%d" % number) for number in range(RECORDS)])
    runs: list[Record] = []
    sizes: list[int] = []
    moved = asyncio.Event()

    def make_app() -> App:
        app = App(group, bootstrap_servers=kafka.bootstrap, **SHORT)

        @app.consume(topic, batch=Batch(max_records=50, linger=0.05), concurrency=4)
        async def on_records(records: list[Record]) -> None:
            runs.extend(records)
            moved.set()
            sizes.append(len(records))
            await asyncio.sleep(0.05)

        return app

    async def until(count: int) -> None:
        """Wait until that number of different records have arrived."""
        while len({(record.partition, record.offset) for record in runs}) < count:
            moved.clear()
            await moved.wait()

    async with contextlib.AsyncExitStack() as stack:
        members = [await stack.enter_async_context(contextlib.AsyncExitStack()) for _ in range(3)]
        await asyncio.gather(*(member.enter_async_context(make_app()) for member in members))
        for number, member in enumerate(members, 1):
            await until(RECORDS * number // 5)
            await member.aclose()
            await member.enter_async_context(make_app())
        await until(RECORDS)

    assert [record_id for record_id, count in Counter((r.partition, r.offset) for r in runs).items() if count > 1] == []
    of_keys: dict[bytes | None, list[int]] = {}
    for record in runs:
        of_keys.setdefault(record.key, []).append(record.offset)
    assert all(offsets == sorted(offsets) for offsets in of_keys.values())
    assert max(sizes) == 50
