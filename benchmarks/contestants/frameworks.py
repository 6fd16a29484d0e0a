"""FastStream and its add-on, set up as in their documentation."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from faststream import AckPolicy, ContextRepo, FastStream
from faststream.kafka import KafkaBroker, KafkaMessage
from faststream_concurrent_aiokafka import (
    KafkaConcurrentProcessingMiddleware,
    initialize_concurrent_processing,
    stop_concurrent_processing,
)

from benchmarks.contestants.meter import Meter
from benchmarks.spec import Spec

COMMIT_BATCH = 1_000
COMMIT_INTERVAL = 1.0


async def faststream_default(spec: Spec, meter: Meter) -> None:
    """One record at a time, with auto-commit of the client: at most once."""
    broker = _broker(spec)

    @broker.subscriber(spec.topic, group_id=spec.group, auto_offset_reset="earliest")
    async def on_record(message: KafkaMessage) -> None:
        await meter.handler(message.raw_message)

    await _run(FastStream(broker, logger=None), meter)


async def faststream_manual(spec: Spec, meter: Meter) -> None:
    """One record at a time, acknowledged after each."""
    broker = _broker(spec)

    @broker.subscriber(spec.topic, group_id=spec.group, auto_offset_reset="earliest", ack_policy=AckPolicy.MANUAL)
    async def on_record(message: KafkaMessage) -> None:
        await meter.handler(message.raw_message)
        await message.ack()

    await _run(FastStream(broker, logger=None), meter)


async def faststream_concurrent(spec: Spec, meter: Meter) -> None:
    """faststream-concurrent-aiokafka: a task per record, unordered, committed in batches."""
    broker = _broker(spec)
    broker.add_middleware(KafkaConcurrentProcessingMiddleware)

    @asynccontextmanager
    async def lifespan(context: ContextRepo) -> AsyncIterator[None]:
        await initialize_concurrent_processing(
            context=context,
            concurrency_limit=spec.concurrency,
            commit_batch_size=COMMIT_BATCH,
            commit_batch_timeout_sec=COMMIT_INTERVAL,
        )
        try:
            yield
        finally:
            await stop_concurrent_processing(context)

    @broker.subscriber(spec.topic, group_id=spec.group, auto_offset_reset="earliest", ack_policy=AckPolicy.MANUAL)
    async def on_record(message: KafkaMessage) -> None:
        await meter.handler(message.raw_message)

    app = FastStream(broker, logger=None, lifespan=lifespan)
    async with app.lifespan_context():
        await _run(app, meter)


def _broker(spec: Spec) -> KafkaBroker:
    # Without a logger: otherwise a log line for each record would be measured too.
    return KafkaBroker(spec.bootstrap, logger=None)


async def _run(app: FastStream, meter: Meter) -> None:
    await app.start()
    try:
        await meter.watch()
    finally:
        await app.stop()
