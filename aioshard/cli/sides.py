"""A side topic opened by a command: its dead letters or parked records, read from its start to its end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import NamedTuple, TypeVar

import click

from aioshard.kafka.administration import Administration
from aioshard.kafka.connecting import silence_client
from aioshard.kafka.topic_reader import TopicReader
from aioshard.loops import loop_factory
from aioshard.records import TOPIC_NAME
from aioshard.settings import Settings

__all__ = ["SideTopic", "opened", "run", "settings_of", "topic_argument"]

T = TypeVar("T")


def _topic(_: click.Context, __: click.Parameter, value: str) -> str:
    if not TOPIC_NAME.fullmatch(value):
        raise click.BadParameter(
            f"{value!r} is no topic name: 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-' were expected"
        )
    return value


topic_argument = click.argument("topic", metavar="TOPIC", callback=_topic)


def settings_of(bootstrap_servers: str | None) -> Settings:
    """The settings of a command that has no app.

    Raises:
        SettingsError: The brokers are not set, or a variable was refused.
    """
    settings = Settings() if bootstrap_servers is None else Settings(bootstrap_servers=bootstrap_servers)
    settings.require_bootstrap_servers()
    return settings


def run(work: Coroutine[object, object, T]) -> T:
    """Run a command to its end, with the client's own log lines off the terminal."""
    silence_client()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


class SideTopic(NamedTuple):
    """An open side topic."""

    administration: Administration
    reader: TopicReader

    @property
    def name(self) -> str:
        """The topic."""
        return self.reader.topic

    @property
    def partitions(self) -> frozenset[int]:
        """Those that the command is about."""
        return frozenset(self.reader.ranges)


@contextlib.asynccontextmanager
async def opened(settings: Settings, topic: str, partitions: frozenset[int]) -> AsyncIterator[SideTopic]:
    """Connect to a side topic.

    Args:
        settings: The brokers.
        topic: Its name.
        partitions: Only these; empty means all.

    Raises:
        UsageError: It has no such partition.
        TransportError: There is no such topic, or no broker answers.
    """
    async with Administration(settings) as administration:
        found = await administration.partitions(topic)
        if partitions - found:
            raise click.UsageError(
                f"topic {topic!r} has no partition {min(partitions - found)}: it has 0 to {max(found)}"
            )
        async with TopicReader(settings, topic, partitions or found) as reader:
            yield SideTopic(administration, reader)
