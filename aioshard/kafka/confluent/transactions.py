"""Transactions of confluent-kafka: messages and offsets that become visible together, or not at all."""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from aioshard.errors import ClientLostError, CommitError
from aioshard.kafka.confluent.consumer import CallQueue, client_offsets
from aioshard.kafka.confluent.translate import cause_of, commit_error, error_of, reason
from aioshard.kafka.errors import request_error
from aioshard.ports import Committed, Message
from aioshard.records import TopicPartition

_MOST_MESSAGE_BYTES = 2_000_000
"""Brokers decide about the size of a message; the engine refuses those above 1,000,000 bytes before."""
_POLL = 0.1
"""Seconds to wait for room in the client's queue, or until a call is tried again."""
_TURN, _PAUSE = 50, 0.0001
"""After so many messages, the event loop has the interpreter for so many seconds: otherwise it waits for 5 ms."""
_SLICE = 1.0
"""Seconds that one call should wait; the next call goes on with the same request."""
_HANGS = 5.0
"""Seconds beyond `transaction_timeout` after which a call counts as one that never returns: librdkafka waits without a
limit until it finds the coordinator of the group (its issues 5456 and 5511)."""


class Transactions:
    """One transaction at a time, by a transactional producer.

    Invariants:
        * When `settle` or a later call returns, no earlier transaction of ours is open or undecided. A client that
          cannot say how one ended, or hangs, is replaced by another one with the same id, which makes the brokers
          decide it; after that, they refuse the former client.
    """

    def __init__(self, options: Mapping[str, Any], transactional_id: str, group_id: str, timeout: float) -> None:
        """Create it; nothing connects yet.

        Args:
            options: Options of the connection.
            transactional_id: Unique among the running processes; a process that takes over the id ends the
                transactions of the one before.
            group_id: The consumer group.
            timeout: Seconds after which the brokers abort a transaction, and each of our calls gives up.
        """
        self._options = {
            **options,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": round(timeout * 1000),
            "partitioner": "murmur2_random",
            "message.max.bytes": _MOST_MESSAGE_BYTES,
        }
        self._group_id = group_id
        self._timeout = timeout
        self._producer = self._new_producer()
        self._closed = False

    async def commit(
        self, messages: Sequence[Message], offsets: Mapping[TopicPartition, Committed], group_metadata: object
    ) -> None:
        """Make messages and offsets visible together; wait for it.

        Raises:
            CommitRefusedError: The brokers know a newer member or generation: nothing is visible.
            TransportError: The transaction failed, or it is not known how it ended; see `settle`.
        """
        await self._call(lambda producer: producer.commit(messages, offsets, group_metadata))

    async def settle(self) -> None:
        """Wait until no transaction of ours is open or undecided.

        Raises:
            TransportError: The brokers do not answer, or do not allow transactions.
        """
        await self._call(ProducerThread.ready)

    async def close(self) -> None:
        """Let the running call end in its thread, then drop the client.

        It waits for the thread for a while: a client that is dropped while the interpreter ends can crash the process.
        """
        if not self._closed:
            self._closed = True
            self._producer.stop()
            await asyncio.to_thread(self._producer.thread.join, 2.0)

    def _new_producer(self) -> "ProducerThread":
        return ProducerThread(self._options, self._group_id, self._timeout)

    async def _call(self, function: Callable[["ProducerThread"], object]) -> None:
        if self._closed:
            raise ClientLostError("the Kafka client is closed")
        producer = self._producer
        answer = asyncio.wrap_future(producer.calls.submit(function, producer))
        try:
            while not (await asyncio.wait({answer}, timeout=_SLICE))[0]:
                if producer.hangs:
                    if producer is self._producer and not self._closed:
                        producer.stop()
                        self._producer = self._new_producer()
                    raise CommitError(
                        f"a transaction of group {self._group_id!r} failed: the Kafka client does not return from a "
                        "call, and is replaced"
                    )
            answer.result()
        finally:
            answer.cancel()


class ProducerThread:
    """A transactional producer and the only thread that calls it; a daemon, because a call may never return."""

    def __init__(self, options: Mapping[str, Any], group_id: str, timeout: float) -> None:
        self._options = {**options, "on_delivery": self._delivered, "delivery.report.only.error": True}
        self._group_id = group_id
        self._timeout = timeout
        self._producer: Producer | None = None
        self._counts: dict[str, int] = {}
        """Number of partitions of the topics in which messages of the current transaction take turns."""
        self._turns: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        self._refused = ""
        """Why a message of the current transaction was not stored."""
        self._call_began: float | None = None
        """When the call to the client began that runs now."""
        self._stopped = False
        self.calls = CallQueue()
        self.thread = Thread(target=self._run, name=f"transactions of {group_id}", daemon=True)
        self.thread.start()

    # Called in the event loop -------------------------------------------------------------

    @property
    def hangs(self) -> bool:
        """Whether a call to the client lasts longer than any that returns."""
        began = self._call_began
        return began is not None and time.monotonic() - began > self._timeout + _HANGS

    def stop(self) -> None:
        """Let the running call end, then drop the client."""
        self._stopped = True
        self.calls.end()

    # Called in the thread -------------------------------------------------------------------

    def _run(self) -> None:
        self.calls.serve()
        self._producer = None

    def ready(self) -> Producer:
        """Return a client that has no transaction."""
        if self._stopped:
            raise ClientLostError("the Kafka client is closed")  # a new client with our id would fence the next thread
        if self._producer is None:
            try:
                producer = Producer(self._options)
                self._again(producer.init_transactions)
            except KafkaException as error:
                raise request_error(cause_of(error_of(error)), "begin transactions", self._group_id) from error
            self._producer = producer
        return self._producer

    def commit(
        self, messages: Sequence[Message], offsets: Mapping[TopicPartition, Committed], group_metadata: object
    ) -> None:
        """See `Transactions.commit`."""
        producer = self.ready()
        self._refused = ""
        self._counts = {}
        try:
            producer.begin_transaction()
            for number, message in enumerate(messages, 1):
                self._produce(producer, message)
                if not number % _TURN:
                    time.sleep(_PAUSE)
            places = client_offsets(offsets)
            self._again(lambda seconds: producer.send_offsets_to_transaction(places, group_metadata, seconds))
            self._again(producer.commit_transaction)
        except Exception as error:
            self._abort(producer)
            if self._refused:
                raise CommitError(f"a message was not stored: {self._refused}") from error
            if not isinstance(error, KafkaException):
                raise CommitError(f"a message was refused by the client: {reason(error)}") from error
            raise commit_error(error_of(error), offsets.keys(), self._group_id) from error

    def _produce(self, producer: Producer, message: Message) -> None:
        """Queue a message; wait for room in the client's queue."""
        options: dict[str, Any] = {}
        if message.partition is not None:
            options["partition"] = message.partition
        elif message.chosen_by is None:
            options["partition"] = self._take_turn(producer, message.topic)
        if message.timestamp is not None:
            options["timestamp"] = round(message.timestamp * 1000)
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                producer.produce(
                    message.topic,
                    message.value,
                    message.key,
                    headers=list(message.headers),
                    **options,
                )
            except BufferError:
                if time.monotonic() > deadline:
                    raise
                producer.poll(_POLL)
            else:
                return

    def _take_turn(self, producer: Producer, topic: str) -> int:
        if topic not in self._counts:
            self._counts[topic] = len(producer.list_topics(topic, self._timeout).topics[topic].partitions) or 1
        return next(self._turns[topic]) % self._counts[topic]

    def _delivered(self, error: KafkaError | None, message: Any) -> None:
        if error is not None and error.code() not in {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}:  # noqa: SLF001 - its names
            self._refused = self._refused or f"{message.topic()}: {reason(error)}"

    def _again(self, call: Callable[[float], object]) -> None:
        """Call until it succeeds, is refused for good, or the time of a transaction is over."""
        deadline = time.monotonic() + self._timeout
        while True:
            self._call_began = time.monotonic()
            try:
                call(_SLICE)
            except KafkaException as raised:
                error = error_of(raised)
                if error is None or not error.retriable() or time.monotonic() >= deadline or self._stopped:
                    raise
                time.sleep(_POLL)
            else:
                return
            finally:
                self._call_began = None

    def _abort(self, producer: Producer) -> None:
        """Abort the transaction; if that fails, the next client with our id makes the brokers decide it."""
        try:
            self._again(producer.abort_transaction)
        except KafkaException:
            self._producer = None
