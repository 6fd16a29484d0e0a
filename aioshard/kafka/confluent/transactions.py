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
"""The brokers limit the size of a message; before that, the engine refuses those above 1,000,000 bytes."""
_POLL = 0.1
"""Seconds to wait for room in the client's queue, or until a call is retried."""
_MESSAGES_PER_PAUSE, _PAUSE = 50, 0.0001
"""Number of messages between two pauses of this many seconds. A pause releases the interpreter lock to the event loop,
which would otherwise wait 5 ms for it."""
_SLICE = 1.0
"""Seconds that one call should wait; the next call continues the same request."""
_HANG_MARGIN = 5.0
"""Seconds beyond `transaction_timeout` after which a call counts as hanging: librdkafka waits without a limit until it
finds the coordinator of the group (its issues 5456 and 5511)."""


class Transactions:
    """One transaction at a time, by a transactional producer.

    Invariants:
        * When `settle` or a later call returns, no earlier transaction of ours is open or undecided. If the client
          hangs, or does not know how a transaction ended, a new client with the same transactional id replaces it.
          The brokers then decide the transaction, and fence the old client.
    """

    def __init__(self, options: Mapping[str, Any], transactional_id: str, group_id: str, timeout: float) -> None:
        """Create it; nothing connects yet.

        Args:
            options: Options of the connection.
            transactional_id: Unique among the running processes; a process that starts with the id of another one
                ends the transactions of that one.
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
        """Commit messages and offsets in one transaction, and wait until it has ended.

        Raises:
            CommitRefusedError: The brokers know a newer member or generation: nothing is visible.
            TransportError: The transaction failed, or its outcome is unknown; see `settle`.
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
        result = asyncio.wrap_future(producer.calls.submit(function, producer))
        try:
            while not (await asyncio.wait({result}, timeout=_SLICE))[0]:
                if producer.hangs:
                    if producer is self._producer and not self._closed:
                        producer.stop()
                        self._producer = self._new_producer()
                    raise CommitError(
                        f"a transaction of group {self._group_id!r} failed: the Kafka client does not return from a "
                        "call, and is replaced"
                    )
            result.result()
        finally:
            result.cancel()


class ProducerThread:
    """A transactional producer and the only thread that calls it; a daemon, because a call may never return."""

    def __init__(self, options: Mapping[str, Any], group_id: str, timeout: float) -> None:
        self._options = {**options, "on_delivery": self._delivered, "delivery.report.only.error": True}
        self._group_id = group_id
        self._timeout = timeout
        self._producer: Producer | None = None
        self._counts: dict[str, int] = {}
        """Number of partitions of each topic over which the current transaction spreads messages round-robin."""
        self._round_robin: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        self._refused = ""
        """Why a message of the current transaction was not stored."""
        self._call_began: float | None = None
        """When the current call to the client began; None between calls."""
        self._stopped = False
        self.calls = CallQueue()
        self.thread = Thread(target=self._run, name=f"transactions of {group_id}", daemon=True)
        self.thread.start()

    # Called in the event loop -------------------------------------------------------------

    @property
    def hangs(self) -> bool:
        """Whether the current call to the client takes longer than any call that still returns."""
        began = self._call_began
        return began is not None and time.monotonic() - began > self._timeout + _HANG_MARGIN

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
            raise ClientLostError("the Kafka client is closed")  # a new client here would fence that of the next thread
        if self._producer is None:
            try:
                producer = Producer(self._options)
                self._retry(producer.init_transactions)
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
                if not number % _MESSAGES_PER_PAUSE:
                    time.sleep(_PAUSE)
            to_commit = client_offsets(offsets)
            self._retry(lambda seconds: producer.send_offsets_to_transaction(to_commit, group_metadata, seconds))
            self._retry(producer.commit_transaction)
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
            options["partition"] = self._next_partition(producer, message.topic)
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

    def _next_partition(self, producer: Producer, topic: str) -> int:
        if topic not in self._counts:
            self._counts[topic] = len(producer.list_topics(topic, self._timeout).topics[topic].partitions) or 1
        return next(self._round_robin[topic]) % self._counts[topic]

    def _delivered(self, error: KafkaError | None, message: Any) -> None:
        if error is not None and error.code() not in {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}:  # noqa: SLF001 - its names
            self._refused = self._refused or f"{message.topic()}: {reason(error)}"

    def _retry(self, call: Callable[[float], object]) -> None:
        """Repeat a call until it succeeds, fails for good, or the transaction timeout has passed."""
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
            self._retry(producer.abort_transaction)
        except KafkaException:
            self._producer = None
