"""The `Producer` port on the in-memory broker."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable

from aioshard.errors import ClientLostError, ConnectError, TransportError
from aioshard.ports import Message
from aioshard.testing.broker import InMemoryBroker

__all__ = ["InMemoryProducer"]


@dataclasses.dataclass(eq=False, slots=True)
class _Sent:
    """A message on its way to the broker."""

    message: Message
    answer: asyncio.Future[int]
    withdrawn: bool = False


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
        self._sent: deque[_Sent] = deque()
        self._arrived = 0
        """Number of sent messages, counted from the first, that the broker would store if it were available."""
        self._storing = False
        self._closed = False
        self._unwatch = broker.watch(self._store)

    @property
    def trouble(self) -> str | None:
        """See `Producer.trouble`."""
        if self._broker.available or not self._sent:
            return None
        return f"{len(self._sent)} message(s) wait for the in-memory broker: the test has made it unavailable"

    async def publish(self, message: Message) -> int:
        """See `Producer.publish`.

        Raises:
            ClientLostError: The producer is closed.
            ConnectError: The broker was not available within the producer's timeout.
            TransportError: The partition does not exist, or the error set with `fail_publishes`.
        """
        if self._closed:
            raise _closed()
        loop = asyncio.get_running_loop()
        sent = _Sent(message, loop.create_future())
        self._sent.append(sent)
        loop.call_later(self._delay(), self._arrive)
        try:
            async with asyncio.timeout(self._timeout):
                offset = await sent.answer
        except TimeoutError:
            sent.withdrawn = True
            told = f"a message for topic {message.topic!r} was not acknowledged within {self._timeout:g} s"
            raise ConnectError(f"{told}: the in-memory broker is not available") from None
        if self._latency is not None:
            await asyncio.sleep(self._delay())
        return offset

    def _delay(self) -> float:
        return 0.0 if self._latency is None else self._latency()

    def _arrive(self) -> None:
        self._arrived += 1
        self._store()

    def _store(self) -> None:
        if self._storing or self._closed:
            return
        self._storing = True  # storing a record notifies all watchers, including this one
        try:
            while self._arrived and self._sent and self._broker.available:
                self._arrived -= 1
                self._answer(self._sent.popleft())
        finally:
            self._storing = False

    def _answer(self, sent: _Sent) -> None:
        if sent.withdrawn:
            return
        answer = sent.answer
        try:
            offset = self._append(sent.message)
        except TransportError as error:
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(offset)

    def _append(self, message: Message) -> int:
        error, stored = self._broker.publish_fault(message.topic) or (None, True)
        offset = -1
        if stored:
            try:
                offset = self._broker.publish(**message._asdict()).offset
            except LookupError as missing:
                raise TransportError(str(missing.args[0])) from missing
        if error is not None:
            raise error
        return offset

    async def close(self) -> None:
        """See `Producer.close`."""
        self._closed = True
        self._unwatch()
        for sent in self._sent:
            if not sent.answer.done():
                sent.answer.set_exception(_closed())
        self._sent.clear()


def _closed() -> ClientLostError:
    return ClientLostError("the message was not acknowledged: the producer is closed")
