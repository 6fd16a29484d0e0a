"""aioshard as its users run it."""

import tempfile

from aioshard import App
from benchmarks.contestants.meter import Meter
from benchmarks.spec import Spec


async def on_demand(spec: Spec, meter: Meter) -> None:
    """A shard per key, served by *concurrency* workers: the default."""
    app = _app(spec)
    app.consume(spec.topic, concurrency=spec.concurrency)(meter.handler)
    async with app:
        await meter.watch()


async def fixed_shards(spec: Spec, meter: Meter) -> None:
    """As many numbered shards with one worker each."""
    app = _app(spec)
    app.consume(spec.topic, shards=spec.concurrency)(meter.handler)
    async with app:
        await meter.watch()


async def confluent(spec: Spec, meter: Meter) -> None:
    """As the default, with the other client."""
    app = _app(spec)
    app.configure(client="confluent")
    app.consume(spec.topic, concurrency=spec.concurrency)(meter.handler)
    async with app:
        await meter.watch()


async def consumer_protocol(spec: Spec, meter: Meter) -> None:
    """With the other client and the group protocol in which the broker assigns (KIP-848)."""
    app = _app(spec)
    app.configure(client="confluent", group_protocol="consumer")
    app.consume(spec.topic, concurrency=spec.concurrency)(meter.handler)
    async with app:
        await meter.watch()


async def static(spec: Spec, meter: Meter) -> None:
    """As the default, as a static member: what replaces it takes its place."""
    app = _app(spec)
    app.configure(group_instance_id=f"member-{spec.member}")
    app.consume(spec.topic, concurrency=spec.concurrency)(meter.handler)
    async with app:
        await meter.watch()


async def journaling(spec: Spec, meter: Meter) -> None:
    """As the default, with a journal of every record."""
    with tempfile.TemporaryDirectory() as directory:
        app = _app(spec)
        app.configure(journal=directory)
        app.consume(spec.topic, concurrency=spec.concurrency)(meter.handler)
        async with app:
            await meter.watch()
        journal = app.statistics().journal
        assert journal is not None
        meter.dropped = journal.dropped


def _app(spec: Spec) -> App:
    return App(spec.group, bootstrap_servers=spec.bootstrap, auto_offset_reset="earliest")
