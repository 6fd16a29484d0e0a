"""The `Producer` port on the in-memory broker."""

import asyncio
from collections.abc import Callable

from aioshard.errors import ClientLostError, ConnectError, TransportError
from aioshard.kafka.errors import missing_topic
from aioshard.kafka.memory.broker import InMemoryBroker
from aioshard.ports import Message
from aioshard.serde.payloads import unwritable


class InMemoryProducer:
    """Publishes to an `InMemoryBroker`; implements `aioshard.ports.Producer`.

    While the broker is not available, messages wait as they do in a real client; errors set with `fail_publishes` are
    raised immediately. The message of a cancelled call is still stored: callers must tolerate that.

    Invariants:
        * Messages are stored in the order of the calls, regardless of the latencies.

    Example:
        >>> import asyncio
        >>> broker = InMemoryBroker(partitions=1)
        >>> async def publish() -> int:
        ...     producer = InMemoryProducer(broker)
        ...     await producer.publish(Message("letters", b"first"))
        ...     return await producer.publish(Message("letters", b"second"))
        >>> asyncio.run(publish())
        1
    """

    def __init__(
        self, broker: InMemoryBroker, *, latency: Callable[[], float] | None = None, timeout: float = 30.0
    ) -> None:
        """Create a producer.

        Args:
            broker: Destination of the messages. Topics are created on first use.
            latency: Seconds until a message is stored, and again until its acknowledgement arrives; called each time.
                None means no latency.
            timeout: Seconds after which an unanswered message is given up; it is then not stored.
        """
        self._broker = broker
        self._latency = latency
        self._timeout = timeout
        self._sending: list[asyncio.Task[int]] = []
        """Messages that are not answered, in the order of the calls."""
        self._closed = False

    @property
    def trouble(self) -> str | None:
        """See `Producer.trouble`."""
        if self._broker.available or not self._sending:
            return None
        return f"messages are waiting for the in-memory broker ({len(self._sending)}): the test has made it unavailable"

    async def publish(self, message: Message) -> int:
        """See `Producer.publish`.

        Raises:
            ClientLostError: The producer is closed.
            ConnectError: The broker was not available within the producer's timeout.
            TransportError: The topic or the partition does not exist, the message cannot be encoded, or the error set
                with `fail_publishes`.
        """
        if self._closed:
            raise _closed()
        if (why := unwritable(message)) is not None:
            raise TransportError(f"a message for topic {message.topic!r} was not published: {why}", retriable=False)
        sending = asyncio.get_running_loop().create_task(
            self._send(message, self._sending[-1] if self._sending else None), name="in-memory producer"
        )
        self._sending.append(sending)
        sending.add_done_callback(self._forget)
        done, _ = await asyncio.wait([sending], timeout=self._timeout)
        if not done:
            sending.cancel()
            raise ConnectError(
                f"a message for topic {message.topic!r} was not acknowledged within {self._timeout:g} s: the in-memory "
                "broker is not available"
            )
        if sending.cancelled():
            raise _closed()
        offset = sending.result()
        if self._latency is not None:
            await asyncio.sleep(self._latency())
        return offset

    def _forget(self, sending: asyncio.Task[int]) -> None:
        self._sending.remove(sending)
        if not sending.cancelled():
            sending.exception()  # retrieve it: after a cancelled call nobody else does

    async def _send(self, message: Message, previous: asyncio.Task[int] | None) -> int:
        """Store a message after the previous one, in a separate task: cancelling the call must not withdraw it."""
        await asyncio.sleep(0.0 if self._latency is None else self._latency())
        if previous is not None:
            await asyncio.wait([previous])
        await self._broker.until(lambda: self._broker.available)
        if self._broker.refuses(message.topic):
            raise missing_topic(message.topic)
        error, stored = self._broker.publish_faults.get(message.topic, (None, True))
        offset = self._broker.publish(**message._asdict()).offset if stored else -1
        if error is not None:
            raise error
        return offset

    async def close(self) -> None:
        """See `Producer.close`."""
        self._closed = True
        for sending in self._sending:
            sending.cancel()


def _closed() -> ClientLostError:
    return ClientLostError("the message was not acknowledged: the producer is closed")
