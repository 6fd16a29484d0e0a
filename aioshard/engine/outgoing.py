"""Exactly-once processing: messages of a run become visible in the transaction that commits its record."""

from aioshard.engine.epoch import Delivery
from aioshard.errors import MessageError, MessageTooLargeError, StateError
from aioshard.ports import MOST_MESSAGE_BYTES, RECORD_OVERHEAD, UNKNOWN_OFFSET, Message, record_size
from aioshard.serde.payloads import unwritable

_HEADER_OVERHEAD = 10
"""Maximum bytes of the lengths of a header."""


class RunMessages:
    """The messages of one run of a handler; nothing of a run that fails is ever published."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._ended = False

    async def publish(self, message: Message) -> int:
        """Accept a message; return -1, as its offset is not known yet.

        Raises:
            StateError: The run has ended: nothing could make the message visible together with its record.
            MessageError: No broker can be sent the message.
            MessageTooLargeError: The message does not fit into any request. The limit of its topic is for the brokers
                to know: they refuse the message in the transaction, and the run fails then.
        """
        if self._ended:
            raise StateError(
                f"a message for topic {message.topic!r} was not published: with exactly-once processing, a handler "
                "must publish before it returns. Await the tasks that it starts, or use app.publish (at-least-once)"
            )
        _check(message)
        self.messages.append(message)
        return UNKNOWN_OFFSET

    def end(self) -> list[Message]:
        """Accept no more messages; return those so far."""
        self._ended = True
        return self.messages


async def add_message(delivery: Delivery, message: Message) -> int:
    """Make a message visible with the completion of a delivery; return -1, as its offset is not known yet.

    Raises:
        MessageError: As for `RunMessages.publish`.
        MessageTooLargeError: As for `RunMessages.publish`.
    """
    _check(message)
    delivery.outgoing = [*delivery.outgoing, message]
    return UNKNOWN_OFFSET


def _check(message: Message) -> None:
    # `message` checks this too, but handlers may return a `Message` of their own, and the client would crash.
    why = unwritable(message)
    if why is not None:
        raise MessageError(f"a message for topic {message.topic!r} was refused: {why}")
    size = record_size(message.key, message.value, message.headers) - RECORD_OVERHEAD
    size += _HEADER_OVERHEAD * len(message.headers)
    if size > MOST_MESSAGE_BYTES:
        raise MessageTooLargeError(
            f"a message of {size} bytes for topic {message.topic!r} does not fit into one request of at most "
            f"{MOST_MESSAGE_BYTES} bytes: publish smaller messages"
        )
