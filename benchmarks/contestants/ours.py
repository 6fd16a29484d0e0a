"""aioshard as its users run it."""

import asyncio
import functools
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from aioshard import App, Batch, BatchContext, Context, Record
from aioshard.engine import worker
from aioshard.signals import Signals
from benchmarks.contestants.handlers import compute, hash_record, hash_records
from benchmarks.contestants.meter import Meter
from benchmarks.spec import Spec


async def on_demand(spec: Spec, meter: Meter) -> None:
    """Run the default: a shard per key, served by *concurrency* workers."""
    app = _app(spec)
    app.consume(spec.topic, concurrency=spec.concurrency)(meter.handler)
    await _run(app, meter)


async def compiled(spec: Spec, meter: Meter) -> None:
    """Run the default on the compiled package."""
    assert not worker.__file__.endswith(".py"), worker.__file__
    await on_demand(spec, meter)


async def fixed_shards(spec: Spec, meter: Meter) -> None:
    """Run *concurrency* fixed shards with one worker each."""
    app = _app(spec)
    app.consume(spec.topic, shards=spec.concurrency)(meter.handler)
    await _run(app, meter)


async def at_least_once(spec: Spec, meter: Meter) -> None:
    """Run handlers that publish."""
    await _publishing(spec, meter, "at_least_once")


async def exactly_once(spec: Spec, meter: Meter) -> None:
    """Run handlers that publish in the transactions of the commits."""
    await _publishing(spec, meter, "exactly_once")


async def _publishing(spec: Spec, meter: Meter, guarantee: Literal["at_least_once", "exactly_once"]) -> None:
    app = _app(spec)
    app.configure(processing_guarantee=guarantee)
    last = 0.0

    @app.consume(spec.topic, concurrency=spec.concurrency)
    async def publish(record: Record, context: Context) -> None:
        nonlocal last
        now = time.perf_counter()
        meter.longest_pause, last = max(meter.longest_pause, now - (last or now)), now
        await meter.handler(record)
        await context.publish(spec.output, record.value, key=record.key)

    await _run(app, meter)


async def classic_protocol(spec: Spec, meter: Meter) -> None:
    """Run as a member of the classic group protocol, in which a member assigns."""
    await _with_protocol(spec, meter, "classic")


async def consumer_protocol(spec: Spec, meter: Meter) -> None:
    """Run as a member of the group protocol in which the broker assigns (KIP-848)."""
    await _with_protocol(spec, meter, "consumer")


async def _with_protocol(spec: Spec, meter: Meter, protocol: Literal["classic", "consumer"]) -> None:
    app = _app(spec)
    app.configure(group_protocol=protocol)
    app.consume(spec.topic, concurrency=spec.concurrency)(meter.handler)
    await _run(app, meter)


async def decoding(spec: Spec, meter: Meter) -> None:
    """Run with values that are decoded, and a session so short that a killed member is missed soon."""
    app = _app(spec)
    app.configure(group_protocol="classic", session_timeout=6.0, heartbeat_interval=1.0)
    handler = meter.handler

    @app.consume(spec.topic, concurrency=spec.concurrency)
    async def handle(_value: dict[str, Any], context: Context) -> None:
        await handler(context.record)

    await _run(app, meter)


async def static(spec: Spec, meter: Meter) -> None:
    """Run the default as a static member: its replacement gets the same partitions."""
    app = _app(spec)
    app.configure(group_instance_id=f"member-{spec.member}")
    app.consume(spec.topic, concurrency=spec.concurrency)(meter.handler)
    await _run(app, meter)


async def journaling(spec: Spec, meter: Meter) -> None:
    """Run the default with a journal of every record."""
    with tempfile.TemporaryDirectory() as directory:
        app = _app(spec)
        app.configure(journal=directory)
        app.consume(spec.topic, concurrency=spec.concurrency)(meter.handler)
        await _run(app, meter)
        journal = app.statistics().journal
        assert journal is not None
        meter.dropped = journal.dropped


async def _run(app: App, meter: Meter) -> None:
    """Run the app as `aioshard run` and `App.run` do."""
    serving = asyncio.create_task(app.serve_until_signal(Signals()), name="serve")
    watching = asyncio.create_task(meter.watch(), name="watch")
    await asyncio.wait([serving, watching], return_when=asyncio.FIRST_COMPLETED)
    if watching.done():
        app.stop()
    else:
        watching.cancel()
    await serving
    await watching


async def processes(spec: Spec, meter: Meter) -> None:
    """Run a CPU-bound function in worker processes."""
    await _computing(spec, meter, "process")


async def threads(spec: Spec, meter: Meter) -> None:
    """Run the same function in threads."""
    await _computing(spec, meter, "thread")


async def _computing(spec: Spec, meter: Meter, run_in: Literal["process", "thread"]) -> None:
    app = _app(spec)

    @app.middleware
    async def observed(record: Record, context: Context, call_next: Callable[..., Awaitable[object]]) -> None:
        await meter.work.around(record, call_next(record, context))

    function = hash_record if spec.work == "hash" else functools.partial(compute, turns=spec.turns)
    app.consume(spec.topic, concurrency=spec.concurrency, run_in=run_in)(function)
    await _run(app, meter)


async def batches_in_processes(spec: Spec, meter: Meter) -> None:
    """Run CPU-bound batches in worker processes: one call for many records."""
    app = _app(spec)

    @app.middleware
    async def observed(records: Any, context: BatchContext, call_next: Callable[..., Awaitable[object]]) -> None:
        await meter.work.around_batch(records, call_next(records, context))

    app.consume(spec.topic, batch=Batch(max_records=50, linger=0.005), run_in="process")(hash_records)
    await _run(app, meter)


def _app(spec: Spec) -> App:
    return App(spec.group, bootstrap_servers=spec.bootstrap, auto_offset_reset="earliest")
