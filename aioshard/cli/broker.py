"""`aioshard broker`: the embedded broker, until a signal ends it."""

import asyncio
import json
import re
import signal

import click

from aioshard.cli import options
from aioshard.errors import TransportError
from aioshard.kafka.embedded import DEFAULT_PARTITIONS, RETAINED_BATCHES, RETAINED_BYTES, EmbeddedBroker
from aioshard.loops import loop_factory
from aioshard.records import TOPIC_NAME

__all__ = ["command"]

_TOPIC = re.compile(rf"(?P<name>{TOPIC_NAME.pattern})(?::(?P<partitions>[1-9]\d{{0,3}}))?")


def _topics(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    topics: dict[str, int] = {}
    for value in values:
        found = _TOPIC.fullmatch(value)
        if found is None:
            raise click.BadParameter(f"{value!r} was given: NAME or NAME:PARTITIONS was expected, such as orders:8")
        if found["name"] in topics:
            raise click.BadParameter(f"topic {found['name']!r} was given twice: once was expected")
        topics[found["name"]] = int(found["partitions"] or DEFAULT_PARTITIONS)
    return topics


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), help="Port on 127.0.0.1; by default a free one.")
@click.option(
    "--topic",
    "topics",
    multiple=True,
    callback=_topics,
    metavar="NAME:PARTITIONS",
    help="Create this topic; may be given again and again.",
)
@options.as_json("the address")
def command(*, port: int | None, topics: dict[str, int], as_json: bool) -> int:
    """Run a broker in memory until SIGINT or SIGTERM.

    For quick starts and demonstrations; what it is not is printed when it starts.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(port or None, topics, as_json=as_json))
    return 0


async def _serve(port: int | None, topics: dict[str, int], *, as_json: bool) -> None:
    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    async with EmbeddedBroker(port=port) as broker:
        for name, partitions in topics.items():
            await broker.create_topic(name, partitions)
        if as_json:
            body = {
                "bootstrap_servers": broker.bootstrap_servers,
                "topics": topics,
                "environment": _environment(broker),
            }
            click.echo(json.dumps(body))
        else:
            click.echo(_told(broker, topics))
        stopping = asyncio.create_task(asked.wait(), name="signal")
        ending = asyncio.create_task(broker.ended(), name="end of the broker")
        try:
            await asyncio.wait([stopping, ending], return_when=asyncio.FIRST_COMPLETED)
            if not asked.is_set():
                raise TransportError(await ending)
        finally:
            stopping.cancel()
            ending.cancel()
            await asyncio.wait([stopping, ending])
    if not as_json:
        click.echo("The embedded broker has ended; what it held is gone.")


def _environment(broker: EmbeddedBroker) -> dict[str, str]:
    shown = {name: f"{value:g}" if isinstance(value, float) else value for name, value in broker.settings.items()}
    return {f"AIOSHARD_{name.upper()}": value for name, value in shown.items()}


def _told(broker: EmbeddedBroker, topics: dict[str, int]) -> str:
    created = ", ".join(f"{name} ({partitions} partitions)" for name, partitions in topics.items())
    variables = "\n".join(f"  export {name}={value}" for name, value in _environment(broker).items())
    return f"""\
The embedded broker listens on {broker.bootstrap_servers}

{variables}
  aioshard publish orders.jsonl orders --key customer
  aioshard run module:app

Topics: {f"{created}; " if created else ""}any other appears when it is used, with {DEFAULT_PARTITIONS} partitions.

It is librdkafka's mock cluster, for a first try and for tests of one member. It is not a Kafka to rely on:
  - everything is in memory, and gone when this command ends
  - a partition keeps its newest {RETAINED_BYTES // 1024**2} MiB or {RETAINED_BATCHES:,} batches; older ones are dropped
  - a commit during a rebalance is refused, so records repeat
  - a rebalance takes the session time-out less 1 s, also when an app is run again: hence the short one above
  - no transactions, no compaction, no static membership, no TLS, no users
  - topics cannot be administered: Park needs a Kafka
  - groups cannot be looked at: aioshard group needs a Kafka

Ctrl-C ends it.
"""
