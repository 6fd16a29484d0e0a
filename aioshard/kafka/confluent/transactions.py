"""Transactions of confluent-kafka: messages and offsets that become visible together, or not at all."""

import asyncio
import itertools
import logging
import re
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer

from aioshard.errors import ClientLostError, CommitError, MessageRefusedError, MessagesRefusedError
from aioshard.kafka.confluent.consumer import CallQueue, client_offsets
from aioshard.kafka.confluent.options import LOGGER
from aioshard.kafka.confluent.output_topics import OutputTopics
from aioshard.kafka.confluent.translate import cause_of, commit_error, error_of, reason
from aioshard.kafka.errors import publish_error, request_error
from aioshard.ports import Committed, Message
from aioshard.records import TopicPartition
from aioshard.serde.header_names import escaped

_MOST_MESSAGE_BYTES = 2_000_000
"""The brokers limit the size of a message; before that, the engine refuses those above 1,000,000 bytes."""
_POLL = 0.1
"""Seconds to wait for room in the client's queue, or until a call is retried."""
_MESSAGES_PER_PAUSE, _PAUSE = 50, 0.0001
"""Number of messages between two pauses of this many seconds. A pause releases the interpreter lock to the event loop,
which would otherwise wait 5 ms for it."""
_SLICE = 1.0
"""Seconds that one call should wait; the next call continues the same request."""
_LATE = 3.0
"""Seconds after which a call that should end within a second is reported."""
_HANG_MARGIN = 5.0
"""Seconds beyond `transaction_timeout` after which a call counts as hanging: librdkafka waits without a limit until it
finds the coordinator of the group (its issues 5456 and 5511)."""
_IDLE = 60.0
"""Seconds without a call after which the lines that the client has logged are read."""
_OF_A_TRANSACTION = frozenset({"AddPartitionsToTxn", "AddOffsetsToTxn", "Produce", "TxnOffsetCommit", "EndTxn"})
"""Requests that change a transaction when they arrive, even if it is not the one they were sent for."""
_TRAFFIC = re.compile(r": (Sent|Received) (\w+)(?:Request|Response) \(v")


_BATCH_REFUSALS = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        KafkaError.POLICY_VIOLATION,
    }
)
"""Codes with which brokers refuse a whole batch because of any message in it, again each time."""
_TOPIC_REFUSALS = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 - its names
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    }
)
"""Codes that refuse all messages for a topic or a partition, again each time."""
_REFUSALS = _BATCH_REFUSALS | _TOPIC_REFUSALS


def _refusal(message: Message, error: KafkaError) -> MessageRefusedError:
    return MessageRefusedError(str(publish_error(cause_of(error), message.topic)))


def _abort_cause(producer: Producer) -> KafkaError | None:
    """Return why the open transaction must be aborted; None if it need not, or there is none.

    The client tells it only as the error of a call that is wrong at this moment, as a second beginning is.
    """
    try:
        producer.begin_transaction()
    except KafkaException as raised:
        error = error_of(raised)
        if error is not None and error.txn_requires_abort():
            return error
    return None


class Transactions:
    """One transaction at a time, by a transactional producer.

    Invariants:
        * When `settle` or a later call returns, no earlier transaction of ours is open or undecided. If the client
          hangs, or does not know how a transaction ended, a new client with the same transactional id replaces it.
          The brokers then decide the transaction, and fence the old client.
        * When a transaction begins, no request of an earlier one can change it. A client begins another transaction
          only if the last one was committed and each of its requests was answered. Otherwise a new client replaces it;
          its epoch is newer, so the brokers refuse what arrives late (error 47 or 90).
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

    @property
    def hang(self) -> str | None:
        """See `Transport.hang`."""
        return self._producer.hang

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


class RequestLog:
    """The log of one client, which shows each request of a transaction that was not answered.

    librdkafka repeats a request when its connection is lost or the answer takes too long. A copy may then arrive at any
    time. In the client's version of the protocol all transactions of an epoch are the same to the brokers, so an old
    EndTxn ends the current one, and an old TxnOffsetCommit moves its offsets back.

    Only the debug lines for requests and responses prove that there is no such copy:

    * The warning about a lost connection does not. librdkafka suppresses it for 30 s if it is identical to the last
      one, writes another one after a request that timed out, and none when the coordinator moves to another broker.
    * A time limit does not. A client that has been connected for a while connects and sends again within 0.1 s.
    * The debug line of a request is queued as soon as the last byte is sent, before its answer can be read. So when
      a commit has returned, `poll` has logged every copy that was sent.
    * An unexpected text counts as unanswered: it costs a new client, and not a guarantee.
    """

    def __init__(self) -> None:
        self._sent: Counter[str] = Counter()
        self._answered: Counter[str] = Counter()

    def log(self, level: int, text: str, *values: str) -> None:
        """Count requests and responses, and pass all lines on except those for debugging; librdkafka calls this."""
        if level > logging.DEBUG:
            LOGGER.log(level, text, *values)
            return
        found = _TRAFFIC.search(values[-1])
        if found is None or found[2] not in _OF_A_TRANSACTION:
            return
        counts = self._sent if found[1] == "Sent" else self._answered
        counts[found[2]] += 1

    def begin(self) -> None:
        """Count from here on, for the next transaction."""
        self._sent.clear()
        self._answered.clear()

    @property
    def all_answered(self) -> bool:
        """Whether the transaction has sent its EndTxn, and each of its requests was answered."""
        return self._sent["EndTxn"] > 0 and self._sent == self._answered


class _Call(NamedTuple):
    """A call to librdkafka that has not returned."""

    name: str
    began: float
    """By `time.monotonic`."""

    @property
    def lasts(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began


class ProducerThread:
    """A transactional producer and the only thread that calls it; a daemon, because a call may never return."""

    def __init__(self, options: Mapping[str, Any], group_id: str, timeout: float) -> None:
        self._options = {
            **options,
            # One function for all messages: one for each would cost a quarter of the CPU of a transaction.
            "on_delivery": self._delivered,
            "delivery.report.only.error": True,
            # One line per request and response, with the name and the size only; see `RequestLog`.
            "debug": "protocol",
        }
        self._group_id = group_id
        self._timeout = timeout
        self._producer: Producer | None = None
        self._requests = RequestLog()
        """Of the current client."""
        self._topics = OutputTopics()
        self._round_robin: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        self._errors: dict[int, KafkaError] = {}
        """Why messages of the current transaction were not stored, by their index."""
        self._messages: Mapping[int, Message] = {}
        """The messages of the current transaction, by their index."""
        self._numbers: dict[tuple[str, bytes | None, bytes | None], list[int]] = {}
        """Their indexes by topic, key and value; filled when a message was not stored."""
        self._current: _Call | None = None
        """The call to the client that has not returned; None between calls."""
        self._stopped = False
        self.calls = CallQueue()
        self.thread = Thread(target=self._run, name=f"transactions of {group_id}", daemon=True)
        self.thread.start()

    # Called in the event loop -------------------------------------------------------------

    @property
    def hangs(self) -> bool:
        """Whether the current call to the client takes longer than any call that still returns."""
        call = self._current
        return call is not None and call.lasts > self._longest

    @property
    def hang(self) -> str | None:
        """See `Transport.hang`."""
        call = self._current
        if call is None or call.lasts < _LATE:
            return None
        return (
            f"the Kafka client does not return from {call.name}, which should end within {_SLICE:g} s; it is replaced "
            f"when the call has lasted {self._longest:g} s"
        )

    @property
    def _longest(self) -> float:
        return self._timeout + _HANG_MARGIN

    def stop(self) -> None:
        """Let the running call end, then drop the client."""
        self._stopped = True
        self.calls.end()

    # Called in the thread -------------------------------------------------------------------

    def _run(self) -> None:
        while not self.calls.serve_for(_IDLE):
            self._read_log()
        self._drop()

    def _read_log(self) -> None:
        """Read the log of an idle client, which would otherwise grow without limit."""
        try:
            if self._producer is not None:
                self._producer.poll(0)
        except Exception:  # noqa: BLE001 - a fatal error of the client, or a log handler that fails
            self._drop()

    def ready(self) -> Producer:
        """Return a client that has no transaction, and whose next one no late request can change."""
        if self._stopped:
            raise ClientLostError("the Kafka client is closed")  # a new client here would fence that of the next thread
        if self._producer is not None:
            return self._producer
        try:
            self._requests = RequestLog()
            self._producer = Producer({**self._options, "logger": self._requests})
            self._retry("init_transactions", self._producer.init_transactions)  # a new epoch, once for each client
        except KafkaException as error:
            self._drop(error)
            raise request_error(cause_of(error_of(error)), "begin transactions", self._group_id) from error
        if self._stopped:  # that took long, so the next thread has a client already, with an older epoch
            raise ClientLostError("the Kafka client is closed")
        return self._producer

    def _drop(self, error: BaseException | None = None) -> None:
        """Destroy the client. The caller must have no reference to it; *error* loses its own.

        The thread that drops the last reference waits until the threads of the client have ended. That must not be the
        event loop, which handles *error*. `Producer.close` would first abort a transaction, and wait for that without
        limit.
        """
        self._producer = None
        if error is not None:
            traceback.clear_frames(error.__traceback__)

    def commit(
        self, messages: Sequence[Message], offsets: Mapping[TopicPartition, Committed], group_metadata: object
    ) -> None:
        """See `Transactions.commit`."""
        try:
            self._commit(messages, offsets, group_metadata)
        finally:
            self._begin_messages({})  # they count in the memory of the engine only until here

    def _commit(
        self, messages: Sequence[Message], offsets: Mapping[TopicPartition, Committed], group_metadata: object
    ) -> None:
        producer = self.ready()
        self._begin_messages(dict(enumerate(messages)))
        self._check_topics(producer, messages)
        self._requests.begin()
        try:
            producer.begin_transaction()
            self._produce_all(producer, messages)
            to_commit = client_offsets(offsets)
            self._retry(
                "send_offsets_to_transaction",
                lambda seconds: producer.send_offsets_to_transaction(to_commit, group_metadata, seconds),
            )
            self._retry("commit_transaction", producer.commit_transaction)
            producer.poll(0)  # writes the log, see `RequestLog`
        except Exception as error:
            cause = _abort_cause(producer) or error_of(error)
            self._abort(producer)
            del producer  # see `_drop`
            self._drop(error)
            self._topics.forget()
            self._raise_refused(messages, cause)
            if self._errors:
                number, failure = next(iter(self._errors.items()))
                raise CommitError(
                    f"a message for topic {messages[number].topic!r} was not stored: {reason(failure)}"
                ) from error
            if cause is None:
                raise CommitError(f"a message was refused by the client: {reason(error)}") from error
            raise commit_error(cause, offsets.keys(), self._group_id) from error
        self._topics.committed()
        if not self._requests.all_answered:
            self._drop()

    def _check_topics(self, producer: Producer, messages: Sequence[Message]) -> None:
        """Look up the topics and partitions of all messages, before a transaction begins.

        Raises:
            MessagesRefusedError: They cannot be written to.
            TransportError: The brokers do not answer.
        """
        try:
            refused = self._topics.check(producer, messages)
        except KafkaException as error:
            raise CommitError(
                f"a transaction was not begun, because the topics of its messages are unknown: {reason(error)}"
            ) from error
        if refused:
            raise MessagesRefusedError(refused)

    def _raise_refused(self, messages: Sequence[Message], cause: KafkaError | None) -> None:
        """Find the messages for which a transaction was aborted, if it was for messages.

        Raises:
            MessagesRefusedError: They were found, or the next transaction with smaller batches will show them.
        """
        permanent = {number: error for number, error in self._errors.items() if error.code() in _REFUSALS}
        if not permanent and cause is not None and cause.code() in _TOPIC_REFUSALS:
            permanent = self._find_topics(messages)
        if not permanent:
            return
        batches: dict[str, list[int]] = {}
        for number, error in permanent.items():
            if error.code() in _BATCH_REFUSALS:
                batches.setdefault(messages[number].topic, []).append(number)
        for topic, numbers in batches.items():
            if self._topics.halve_batch(topic, [messages[number] for number in numbers], len(messages)):
                for number in numbers:
                    del permanent[number]
        raise MessagesRefusedError(
            {number: _refusal(messages[number], error) for number, error in sorted(permanent.items())}
        )

    def _find_topics(self, messages: Sequence[Message]) -> dict[int, KafkaError]:
        """Find the topics that a transaction may not write to; the client does not name them.

        Raises:
            TransportError: The brokers do not answer.
        """
        first: dict[str, tuple[int, Message]] = {}
        for number, message in enumerate(messages):
            first.setdefault(message.topic, (number, message))
        refused: dict[str, KafkaError] = {}
        for topic, (number, message) in first.items():
            error = self._try_message(number, message)
            if error is not None and error.code() in _TOPIC_REFUSALS:
                refused[topic] = error
        return {number: refused[message.topic] for number, message in enumerate(messages) if message.topic in refused}

    def _try_message(self, number: int, message: Message) -> KafkaError | None:
        """Write a message in a transaction of its own, which is aborted; return why it was not stored."""
        producer = self.ready()
        self._begin_messages({number: message})
        try:
            producer.begin_transaction()
            self._produce(producer, number, message)
            error = self._await_delivery(producer)
        except KafkaException as raised:
            error = error_of(raised)
        self._abort(producer)
        del producer  # see `_drop`
        self._drop()
        return self._errors.pop(number, error)

    def _await_delivery(self, producer: Producer) -> KafkaError | None:
        """Wait until queued messages are stored, or the transaction must be aborted; return the reason for that."""
        deadline = time.monotonic() + self._timeout
        while True:
            left = producer.flush(_POLL)
            cause = _abort_cause(producer)
            if cause is not None or not left or time.monotonic() >= deadline:
                return cause

    def _produce_all(self, producer: Producer, messages: Sequence[Message]) -> None:
        for batch in self._topics.batches(messages):
            if batch.start > 0:
                self._end_batch(producer)
            for number in batch:
                self._produce(producer, number, messages[number])
                if not (number + 1) % _MESSAGES_PER_PAUSE:
                    time.sleep(_PAUSE)

    def _end_batch(self, producer: Producer) -> None:
        """Wait until the queued messages are stored, so that later ones come in another batch.

        Raises:
            KafkaException: A message was not stored.
        """
        error = self._await_delivery(producer)
        if error is None:
            error = next(iter(self._errors.values()), None)
        if error is not None:
            raise KafkaException(error)

    def _produce(self, producer: Producer, number: int, message: Message) -> None:
        """Queue a message; wait for room in the client's queue."""
        options = self._options_of(producer, message)
        deadline: float | None = None
        while True:
            try:
                producer.produce(message.topic, message.value, message.key, **options)
            except BufferError:
                now = time.monotonic()
                if deadline is None:
                    deadline = now + self._timeout
                elif now > deadline:
                    raise
                producer.poll(_POLL)
            except KafkaException as raised:
                error = error_of(raised)
                if error is not None:
                    self._errors[number] = error
                raise
            else:
                return

    def _options_of(self, producer: Producer, message: Message) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if message.partition is not None:
            options["partition"] = message.partition
        elif message.chosen_by is None:
            options["partition"] = self._next_partition(producer, message.topic)
        if message.timestamp is not None:
            options["timestamp"] = round(message.timestamp * 1000)
        if message.headers:
            # The engine refuses names that UTF-8 cannot encode; with one, this client would crash.
            options["headers"] = list(escaped(message.headers))
        return options

    def _next_partition(self, producer: Producer, topic: str) -> int:
        return next(self._round_robin[topic]) % self._topics.partitions(producer, topic)

    def _begin_messages(self, messages: Mapping[int, Message]) -> None:
        """Replace the messages whose delivery is reported."""
        self._errors = {}
        self._messages = messages
        self._numbers = {}

    def _delivered(self, error: KafkaError | None, stored: Any) -> None:
        """Note why a message was not stored. Messages with the same content share their fate."""
        if error is None or error.code() in {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}:  # noqa: SLF001 - its names
            return
        if not self._numbers:
            for number, message in self._messages.items():
                self._numbers.setdefault((message.topic, message.key, message.value), []).append(number)
        for number in self._numbers.get((stored.topic(), stored.key(), stored.value()), ()):
            self._errors[number] = error

    def _retry(self, name: str, call: Callable[[float], object]) -> None:
        """Repeat a call until it succeeds, fails for good, or the transaction timeout has passed."""
        deadline = time.monotonic() + self._timeout
        while True:
            self._current = _Call(name, time.monotonic())
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
                self._current = None

    def _abort(self, producer: Producer) -> None:
        """Abort the transaction; if that fails, the next client makes the brokers abort it.

        A new client must follow also if the abort was answered: an EndTxn that was sent twice, or a message in flight
        that the client has given up, may arrive late.
        """
        with suppress(KafkaException):
            self._retry("abort_transaction", producer.abort_transaction)
