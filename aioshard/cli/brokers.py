"""Connections of commands to the brokers: settings, publishing, and side topics read from start to end."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable
from typing import TypeVar

import click

from aioshard.kafka.aiokafka.admin import KafkaAdmin
from aioshard.kafka.aiokafka.connections import silence_client
from aioshard.kafka.aiokafka.producer import KafkaProducer
from aioshard.kafka.aiokafka.side_topics import TopicReader
from aioshard.kafka.errors import nothing_acknowledged
from aioshard.loops import loop_factory
from aioshard.ports import Message
from aioshard.settings import Settings

T = TypeVar("T")

_CHUNK = 1000
"""Messages in flight at a time."""
_STALLED = 30.0
"""Seconds without an acknowledgement after which we give up."""


def settings_of(bootstrap_servers: str | None) -> Settings:
    """Return the settings of a command without an app: `AIOSHARD_*` variables and `--bootstrap-servers`.

    Raises:
        SettingsError: No brokers are set, or a variable is not valid.
    """
    settings = Settings() if bootstrap_servers is None else Settings(bootstrap_servers=bootstrap_servers)
    settings.require_bootstrap_servers()
    return settings


def run(work: Coroutine[object, object, T]) -> T:
    """Run a command's coroutine to its end, without the Kafka client's log lines in the terminal."""
    silence_client()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


class Publisher(contextlib.AbstractAsyncContextManager["Publisher"]):
    """Publishes in order with an idempotent producer, and counts what the brokers have acknowledged."""

    def __init__(self, settings: Settings) -> None:
        """Create a publisher; connects to nothing yet.

        Raises:
            SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
        """
        self.acknowledged = 0
        """Number of messages."""
        self._servers = settings.bootstrap_servers
        self._producer = KafkaProducer(settings, "lz4")

    async def __aexit__(self, *_: object) -> None:
        await self._producer.close()

    async def publish(self, messages: Iterable[Message]) -> None:
        """Publish, and wait for all acknowledgements.

        Raises:
            TransportError: A message was not acknowledged; later ones may have been.
        """
        due = iter(messages)
        while chunk := list(itertools.islice(due, _CHUNK)):
            try:
                async with asyncio.timeout(_STALLED):
                    results = await asyncio.gather(*map(self._producer.send, chunk), return_exceptions=True)
            except TimeoutError:
                raise nothing_acknowledged(self._servers, _STALLED) from None
            errors = [result for result in results if isinstance(result, BaseException)]
            self.acknowledged += len(chunk) - len(errors)
            if errors:
                raise errors[0]


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
        missing = set(partitions) - existing
        if missing:
            raise click.UsageError(f"topic {topic!r} has no partition {min(missing)}: it has 0 to {max(existing)}")
        async with TopicReader(settings, topic, partitions or existing) as reader:
            yield administration, reader
