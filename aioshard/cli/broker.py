"""`aioshard broker`: the embedded broker, until a signal ends it."""

import asyncio
import re
import signal
from collections.abc import Coroutine
from typing import Any

import click

from aioshard.cli import options
from aioshard.cli.brokers import run
from aioshard.cli.output import print_result
from aioshard.errors import TransportError
from aioshard.kafka.embedded import DEFAULT_PARTITIONS, RETAINED_BATCHES, RETAINED_BYTES, EmbeddedBroker
from aioshard.records import TOPIC_NAME, counted


def _topic_and_partitions(text: str) -> tuple[str, int]:
    name, colon, partitions = text.partition(":")
    if not TOPIC_NAME.fullmatch(name) or (colon and not re.fullmatch(r"[1-9]\d{0,3}", partitions)):
        raise click.BadParameter(f"{text!r} was found; expected NAME or NAME:PARTITIONS, such as orders:8")
    return name, int(partitions or DEFAULT_PARTITIONS)


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), metavar="PORT", help="Port on 127.0.0.1; by default a free one.")
@click.option(
    "--topic",
    "topics",
    multiple=True,
    type=_topic_and_partitions,
    metavar="NAME[:PARTITIONS]",
    help=f"Create this topic, by default with {DEFAULT_PARTITIONS} partitions; repeatable.",
)
@options.as_json("the address")
def command(*, port: int | None, topics: tuple[tuple[str, int], ...], as_json: bool) -> None:
    """Run a broker in memory until SIGINT or SIGTERM.

    For first steps and demonstrations; it prints its limits when it starts.
    """
    run(_serve(port or None, dict(topics), as_json=as_json))


async def _serve(port: int | None, topics: dict[str, int], *, as_json: bool) -> None:
    signalled = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    async with EmbeddedBroker(port=port) as broker:
        for name, partitions in topics.items():
            await broker.create_topic(name, partitions)
        address = {"bootstrap_servers": broker.bootstrap_servers, "topics": topics, "environment": _environment(broker)}
        print_result(address, [_introduction(broker, topics)], as_json=as_json)
        await unless_ended(broker, signalled.wait())
    if not as_json:
        click.echo("The embedded broker has ended, and its data is gone.")


async def unless_ended(broker: EmbeddedBroker, work: Coroutine[Any, Any, object]) -> None:
    """Do *work* while an embedded broker runs.

    Raises:
        TransportError: The broker ended first.
    """
    working = asyncio.create_task(work, name="work")
    ending = asyncio.create_task(broker.ended(), name="end of the broker")
    try:
        await asyncio.wait([working, ending], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise TransportError(await ending)
        await working
    finally:
        working.cancel()
        ending.cancel()
        await asyncio.wait([working, ending])


def _environment(broker: EmbeddedBroker) -> dict[str, str]:
    return {
        f"AIOSHARD_{name.upper()}": f"{value:g}" if isinstance(value, float) else value
        for name, value in broker.settings.items()
    }


def _introduction(broker: EmbeddedBroker, topics: dict[str, int]) -> str:
    created = ", ".join(f"{name} ({counted(partitions, 'partition')})" for name, partitions in topics.items())
    variables = "\n".join(f"  export {name}={value}" for name, value in _environment(broker).items())
    return f"""\
The embedded broker listens on {broker.bootstrap_servers}

{variables}
  aioshard publish orders.jsonl orders --key customer
  aioshard run module:app

Topics: {f"{created}; " if created else ""}others are created on first use, with {DEFAULT_PARTITIONS} partitions.

It is librdkafka's mock cluster, for a first try and for tests of one member. Its limits:
  - all data is in memory, and gone when this command ends
  - a partition keeps its newest {RETAINED_BYTES // 1024**2} MiB or {RETAINED_BATCHES:,} batches; older ones are dropped
  - a commit during a rebalance is refused, so records repeat
  - a rebalance takes the session timeout less 1 s, also after a restart of the app: hence the short one above
  - no transactions, no compaction, no static membership, no TLS, no users
  - topics cannot be configured: Park needs a Kafka
  - groups cannot be inspected: aioshard group needs a Kafka

Ctrl-C ends it.
"""
