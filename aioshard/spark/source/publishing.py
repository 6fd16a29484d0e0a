"""Publish many messages in waves: each wave is acknowledged before the next is sent, which keeps their order."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence

from aioshard.ports import Message, Producer

__all__ = ["publish_wave", "waves"]

_MESSAGES = 2_000
_BYTES = 16 * 1024 * 1024
"""Maximum size of a wave, unless a single message is larger."""


def waves(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """Cut messages into non-empty waves.

    Example:
        >>> [len(wave) for wave in waves(Message("t", b"") for _ in range(4500))]
        [2000, 2000, 500]
    """
    wave: list[Message] = []
    size = 0
    for message in messages:
        own = len(message.value or b"") + len(message.key or b"")
        if wave and (len(wave) == _MESSAGES or size + own > _BYTES):
            yield wave
            wave, size = [], 0
        wave.append(message)
        size += own
    if wave:
        yield wave


async def publish_wave(producer: Producer, wave: Sequence[Message]) -> None:
    """Publish messages concurrently; return once all are acknowledged.

    Messages of one partition are stored in order, unless the brokers refuse one of them.

    Raises:
        TransportError: A message was not acknowledged; this is the error of the first one. Others may be stored.
    """
    # Tasks start in the order of their creation, and the producer accepts messages in the order of the calls.
    ended = await asyncio.gather(*(producer.publish(message) for message in wave), return_exceptions=True)
    for error in ended:
        if isinstance(error, BaseException):
            raise error
