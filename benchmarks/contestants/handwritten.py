"""Typical handwritten consumers on aiokafka, each in a fair and careful form."""

import asyncio
import contextlib
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import CommitFailedError

from benchmarks.contestants.meter import LOOK_INTERVAL, Meter
from benchmarks.spec import Spec

MAX_RECORDS = 500
"""Maximum records per `getmany`: a third quicker than without a limit."""
COMMIT_INTERVAL = 1.0
QUEUE_BOUND = 100
"""Records in each queue; 128 of them hold a little more than aioshard does by default."""


async def plain_loop(spec: Spec, meter: Meter) -> None:
    """Call `getmany` and the handler for each record in order; commit once a second."""
    handler = meter.handler
    clock = asyncio.get_running_loop().time
    async with _consumer(spec) as consumer:
        watching = asyncio.create_task(meter.watch(), name="watch")
        committed_at = clock()
        while not watching.done():
            for records in (await consumer.getmany(timeout_ms=100, max_records=MAX_RECORDS)).values():
                for record in records:
                    await handler(record)
            if clock() - committed_at >= COMMIT_INTERVAL:
                await _commit(consumer)
                committed_at = clock()
        watching.result()
        await _commit(consumer)


async def _commit(consumer: Any) -> None:
    """Commit; records of revoked partitions are processed again by their new owners."""
    with contextlib.suppress(CommitFailedError):
        await consumer.commit()


async def task_per_record(spec: Spec, meter: Meter) -> None:
    """Start a task per record, limited by a semaphore; no order, and auto-commit, which loses records in a crash."""
    handler = meter.handler
    semaphore = asyncio.Semaphore(spec.concurrency)
    tasks: set[asyncio.Task[None]] = set()

    async def run(record: Any) -> None:
        try:
            await handler(record)
        finally:
            semaphore.release()

    async def consume(consumer: Any) -> None:
        while True:
            for records in (await consumer.getmany(timeout_ms=100, max_records=MAX_RECORDS)).values():
                for record in records:
                    await semaphore.acquire()
                    task = asyncio.create_task(run(record))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)

    async with _consumer(spec, enable_auto_commit=True, auto_commit_interval_ms=1000) as consumer:
        await _run_until_done(meter, [consume(consumer)])


async def fixed_queues(spec: Spec, meter: Meter) -> None:  # noqa: C901 - a contestant reads from top to bottom
    """Hash the key to one of *concurrency* bounded queues with one worker each; commit finished offsets."""
    number = spec.concurrency
    handler = meter.handler
    queues: list[asyncio.Queue[Any]] = [asyncio.Queue(QUEUE_BOUND) for _ in range(number)]
    incomplete: list[OrderedDict[int, None]] = [OrderedDict() for _ in spec.ends]
    position = [0] * len(spec.ends)

    async def work(queue: asyncio.Queue[Any]) -> None:
        while True:
            record = await queue.get()
            await handler(record)
            del incomplete[record.partition][record.offset]

    async def consume(consumer: Any) -> None:
        while True:
            for records in (await consumer.getmany(timeout_ms=100, max_records=MAX_RECORDS)).values():
                partition = records[0].partition
                incomplete[partition].update(dict.fromkeys(record.offset for record in records))
                position[partition] = records[-1].offset + 1
                for record in records:
                    await queues[zlib.crc32(record.key or b"") % number].put(record)

    async def commit(consumer: Any) -> None:
        done = {
            TopicPartition(spec.topic, partition): next(iter(incomplete[partition]), position[partition])
            for partition in range(len(spec.ends))
        }
        if started := {at: offset for at, offset in done.items() if offset}:
            await consumer.commit(started)

    async def keep_committing(consumer: Any) -> None:
        while True:
            await asyncio.sleep(COMMIT_INTERVAL)
            await commit(consumer)

    async with _consumer(spec) as consumer:
        await _run_until_done(meter, [consume(consumer), keep_committing(consumer), *map(work, queues)])
        await commit(consumer)


async def task_per_partition(spec: Spec, meter: Meter) -> None:
    """Start a task per partition, which fetches, runs the handler for each record in order, and commits."""
    handler = meter.handler
    clock = asyncio.get_running_loop().time

    async def work(consumer: Any, partition: TopicPartition) -> None:
        committed_at = clock()
        while True:
            for records in (await consumer.getmany(partition, timeout_ms=100, max_records=MAX_RECORDS)).values():
                for record in records:
                    await handler(record)
                if clock() - committed_at >= COMMIT_INTERVAL:
                    await consumer.commit({partition: records[-1].offset + 1})
                    committed_at = clock()

    async with _consumer(spec) as consumer:
        partitions = [TopicPartition(spec.topic, number) for number in range(len(spec.ends))]
        while set(partitions) - consumer.assignment():
            await asyncio.sleep(LOOK_INTERVAL)
        await _run_until_done(meter, [work(consumer, partition) for partition in partitions])


@asynccontextmanager
async def _consumer(spec: Spec, **options: Any) -> AsyncIterator[Any]:
    settings = {"enable_auto_commit": False, "auto_offset_reset": "earliest"} | options
    consumer = AIOKafkaConsumer(spec.topic, bootstrap_servers=spec.bootstrap, group_id=spec.group, **settings)
    async with consumer:
        yield consumer


async def _run_until_done(meter: Meter, parts: Sequence[Any]) -> None:
    """Run *parts* until the meter has seen the last record, or one of them fails."""
    watching = asyncio.create_task(meter.watch(), name="watch")
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait([watching, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (watching, *tasks):
            task.cancel()
        await asyncio.gather(watching, *tasks, return_exceptions=True)
