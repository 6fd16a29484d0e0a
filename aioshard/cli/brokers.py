"""Connections of commands to the brokers: settings, publishing, and side topics read from start to end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable
from typing import TypeVar

import click

from aioshard.cli.output import progress
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.publisher import Publisher
from aioshard.kafka.side_topics import TopicReader
from aioshard.loops import loop_factory
from aioshard.ports import Message
from aioshard.settings import Settings

T = TypeVar("T")


def settings_of(bootstrap_servers: str | None) -> Settings:
    """Return the settings of a command without an app: `AIOSHARD_*` variables and `--bootstrap-servers`.

    Raises:
        SettingsError: No brokers are set, or a variable is not valid.
    """
    settings = Settings() if bootstrap_servers is None else Settings(bootstrap_servers=bootstrap_servers)
    settings.require_bootstrap_servers()
    return settings


def run(work: Coroutine[object, object, T]) -> T:
    """Run a command's coroutine to its end."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


async def publish(settings: Settings, messages: Iterable[Message], label: str, *, total: int | None = None) -> None:
    """Publish, wait for all acknowledgements, and show the progress under *label*; see `Publisher` and `progress`."""
    async with Publisher(settings) as publisher, progress(label, lambda: publisher.acknowledged, total=total):
        await publisher.publish(messages)


@contextlib.asynccontextmanager
async def opened(
    settings: Settings, topic: str, partitions: Collection[int] = ()
) -> AsyncIterator[tuple[KafkaAdmin, TopicReader]]:
    """Connect to a side topic; yield an admin client and a reader.

    Args:
        settings: The brokers.
        topic: Its name.
        partitions: The partitions to read; empty means all.

    Raises:
        UsageError: It has no such partition.
        TransportError: The topic does not exist, or no broker answers.
    """
    async with KafkaAdmin(settings) as administration:
        existing = await administration.partitions(topic)
        if missing := set(partitions) - existing:
            raise click.UsageError(f"topic {topic!r} has no partition {min(missing)}: it has 0 to {max(existing)}")
        async with TopicReader(settings, topic, partitions or existing) as reader:
            yield administration, reader
