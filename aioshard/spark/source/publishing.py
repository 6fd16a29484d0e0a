"""Many messages at once, in waves: a wave is acknowledged before the next one is sent, so that order holds."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence

from aioshard.ports import Message, Producer

__all__ = ["publish_wave", "waves"]

_MESSAGES = 2_000
_BYTES = 16 * 1024 * 1024
"""Of one wave at most, unless a single message is larger."""


def waves(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """Cut messages into waves, none of them empty.

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
    """Publish messages side by side; returns when all are acknowledged.

    Those of one partition are stored in their order, unless the brokers refuse one of them.

    Raises:
        TransportError: What the first of them that was not acknowledged met with; others may have been.
    """
    # Tasks begin in the order in which they are made, and the producer takes messages in that of their calls.
    ended = await asyncio.gather(*(producer.publish(message) for message in wave), return_exceptions=True)
    for error in ended:
        if isinstance(error, BaseException):
            raise error
