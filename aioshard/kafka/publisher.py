"""Publishes many messages, in waves that bound the memory."""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator

from aioshard.kafka.producer import KafkaProducer
from aioshard.ports import Message
from aioshard.settings import Settings

_WAVE_MESSAGES = 2_000
_WAVE_BYTES = 8 * 1024 * 1024
"""A wave ends with the message that reaches this size."""


class Publisher(contextlib.AbstractAsyncContextManager["Publisher"]):
    """Publishes in order with an idempotent producer, and counts what the brokers have acknowledged."""

    def __init__(self, settings: Settings) -> None:
        """Create a publisher; connects to nothing yet.

        Raises:
            SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
        """
        self.acknowledged = 0
        """Number of messages."""
        self._producer = KafkaProducer(settings, "lz4")

    async def __aexit__(self, *_: object) -> None:
        await self._producer.close()

    async def publish(self, messages: Iterable[Message]) -> None:
        """Publish in waves: one is acknowledged before the next is sent, which bounds the memory.

        Messages of one partition are stored in order, unless the brokers refuse one of them.

        Raises:
            TransportError: A message was not acknowledged; later ones may have been.
        """
        for wave in waves(messages):
            results = await asyncio.gather(*map(self._producer.send, wave), return_exceptions=True)
            errors = [result for result in results if isinstance(result, BaseException)]
            self.acknowledged += len(wave) - len(errors)
            if errors:
                raise errors[0]


def waves(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """Cut messages into non-empty waves, which bound the memory.

    Example:
        >>> [len(wave) for wave in waves(Message("t", b"") for _ in range(4500))]
        [2000, 2000, 500]
    """
    wave: list[Message] = []
    size = 0
    for message in messages:
        wave.append(message)
        size += len(message.value or b"") + len(message.key or b"")
        if len(wave) == _WAVE_MESSAGES or size >= _WAVE_BYTES:
            yield wave
            wave, size = [], 0
    if wave:
        yield wave
