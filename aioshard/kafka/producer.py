"""The producer port on aiokafka's idempotent producer."""

import asyncio
import copy
import functools
import logging
import random
import time
from typing import TYPE_CHECKING, Any

from aiokafka import errors as kafka
from aiokafka.partitioner import murmur2

from aioshard.errors import AuthorizationError, ClientLostError, TransportError
from aioshard.kafka.options import producer_options
from aioshard.kafka.sending import RefusedError, SendingClient, connect
from aioshard.kafka.sharing import SharedClient
from aioshard.kafka.translate import missing_topic, nothing_acknowledged, publish_error, reason, too_large
from aioshard.ports import Message

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["KafkaProducer"]

logger = logging.getLogger("aioshard.kafka.producer")

_PATIENCE = 30.0
"""Seconds after which an unacknowledged message fails. The client itself would retry forever."""
_REQUEST_TIMEOUT = 10.0
"""Seconds without a response after which a broker counts as gone; a few attempts fit into `_PATIENCE`."""
_QUIET = 5.0
"""Seconds that a message may wait before `trouble` reports it."""
_TOPIC_TIMEOUT = 5.0
"""Seconds to wait until an unknown topic appears."""
_SAME_PARTITION = 100
"""Messages without a key that go to the same partition in a row, so that they share batches."""
_REMEMBERED_KEYS = 10_000

_OF_THE_WHOLE_BATCH = (
    kafka.TopicAuthorizationFailedError,
    kafka.ClusterAuthorizationFailedError,
    kafka.OutOfOrderSequenceNumber,
    kafka.InvalidProducerEpoch,
    kafka.InvalidProducerIdMapping,
    kafka.UnknownProducerId,
)
"""Errors that no single record of a batch can cause."""
_TOO_LARGE = (kafka.MessageSizeTooLargeError, kafka.RecordListTooLargeError)
_FINAL = frozenset({17, 32, 43, 44, 76, 87})
"""Error codes that are never transient. They concern the topic's name, the timestamp, the format, a policy, the
compression, or the record itself (a compacted topic rejects records without a key)."""


class _Topic:
    """A topic that the app has published to."""

    __slots__ = ("failed_at", "failure", "line", "lines", "partitions", "same", "same_left")

    def __init__(self) -> None:
        self.line = asyncio.Lock()
        """Keeps callers in order until the partition of their message is known."""
        self.lines: dict[int, asyncio.Lock] = {}
        """The same per partition, until the message is in a batch."""
        self.partitions = 0
        """The number of partitions; 0 if unknown."""
        self.same = 0
        self.same_left = 0
        self.failure: TransportError | None = None
        self.failed_at = 0.0


class _Waiting:
    """A message that is not acknowledged yet."""

    __slots__ = ("since", "topic")

    def __init__(self, topic: str, since: float) -> None:
        self.topic = topic
        self.since = since


class KafkaProducer:
    """Publishes through aiokafka's idempotent producer; implements `aioshard.ports.Producer`.

    The first message connects. So does the next one after the client was lost or no broker acknowledged anything for
    30 s.

    Invariants:
        * A message that the brokers reject does not keep later ones of its partition from being stored.
        * A message that was given up is never retried behind its caller's back.
    """

    def __init__(self, settings: "Settings") -> None:
        """Check the options; connects to nothing yet.

        Raises:
            SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
        """
        self._settings = settings
        self._options = producer_options(settings, request_timeout=_REQUEST_TIMEOUT)
        self._shared = SharedClient("producer", self._connect)
        self._asking = ""
        """The topic of the latest caller that needed a client; for the error message."""
        self._topics: dict[str, _Topic] = {}
        self._waiting: dict[_Waiting, None] = {}
        """The unacknowledged messages, oldest first."""
        self._acknowledged_at = 0.0

    @property
    def trouble(self) -> str | None:
        """See `Producer.trouble`; reports messages that have waited for 5 s."""
        oldest = next(iter(self._waiting), None)
        if oldest is None or (waited := time.monotonic() - oldest.since) < _QUIET:
            return None
        told = (
            f"{len(self._waiting)} message(s) wait to be acknowledged by the brokers, the oldest, for topic "
            f"{oldest.topic!r}, for {waited:.0f} s"
        )
        client = self._shared.client
        if client is None or not client.connected:
            return f"{told}; no connection to a broker of {self._settings.bootstrap_servers} is open"
        if self._acknowledged_at < oldest.since:
            return f"{told}; nothing was acknowledged since"
        return f"{told}; others were acknowledged meanwhile: are enough replicas of its partition in sync?"

    async def publish(self, message: Message) -> int:
        """See `Producer.publish`. Gives up after 30 s, or after 5 s if the topic does not exist.

        Raises:
            ClientLostError: The producer is closed, or its client failed.
            ConnectError: No broker could be reached.
            AuthenticationError: The brokers rejected our credentials, or we rejected their certificate.
            AuthorizationError: This user may not write to the topic.
            MessageTooLargeError: The message is larger than its topic allows.
            TransportError: The message was not acknowledged for another reason; see `retriable`.
        """
        waiting = _Waiting(message.topic, time.monotonic())
        self._waiting[waiting] = None
        try:
            async with asyncio.timeout(_PATIENCE):
                offset = await self._deliver(message, waiting.since)
        except TimeoutError:
            raise self._given_up(waiting) from None
        finally:
            del self._waiting[waiting]
        self._acknowledged_at = time.monotonic()
        return offset

    async def close(self) -> None:
        """See `Producer.close`; takes at most 2 s."""
        if self._shared.client is not None:
            self._shared.client.give_up(self._shared.closed_error())
        await self._shared.close()

    # One message ------------------------------------------------------------------------

    async def _deliver(self, message: Message, since: float) -> int:
        size = _size(message)
        limit = self._options["max_request_size"]
        if size > limit:
            raise too_large(message.topic, size, limit)
        alone = False
        while True:
            client, acknowledgement = await self._send(message, since, alone=alone)
            try:
                return int((await acknowledgement).offset)
            except RefusedError as refusal:
                if refusal.records == 1 or refusal.error in _OF_THE_WHOLE_BATCH:
                    raise _refused(refusal, message) from refusal
                # The broker may have rejected another record of the batch, or the batch as a whole.
                alone = True
            except kafka.KafkaError as error:
                raise self._failed(client, error, message.topic) from error

    async def _send(self, message: Message, since: float, *, alone: bool) -> tuple[SendingClient, asyncio.Future[Any]]:
        """Add a message to a batch, after all messages published before it; return its acknowledgement."""
        topic = self._topics.get(message.topic)
        if topic is None:
            topic = self._topics[message.topic] = _Topic()
        async with topic.line:
            client = await self._usable(message.topic, since)
            partition = await self._partition(client, topic, message, since)
            line = topic.lines.get(partition)
            if line is None:
                line = topic.lines[partition] = asyncio.Lock()
        # No await between the two locks, so nobody overtakes.
        async with line:
            try:
                acknowledgement = await client.add(message, partition, alone=alone)
            except kafka.KafkaError as error:
                raise self._failed(client, error, message.topic) from error
        return client, acknowledgement

    async def _partition(self, client: SendingClient, topic: _Topic, message: Message, since: float) -> int:
        wanted = message.partition
        if not topic.partitions:
            topic.partitions = client.partition_count(message.topic)
        if not topic.partitions or (wanted is not None and wanted >= topic.partitions):
            topic.partitions = await self._look_up(client, topic, message.topic, since)
        count = topic.partitions
        if wanted is not None:
            if not 0 <= wanted < count:
                absent = TransportError(
                    f"topic {message.topic!r} has partitions 0 to {count - 1} and not {wanted}: add partitions to it"
                )
                absent.retriable = False
                raise absent
            return wanted
        if message.key is not None:
            return _hash(message.key) % count
        topic.same_left -= 1
        if topic.same_left < 0 or topic.same >= count:
            led = client.led_partitions(message.topic)
            topic.same = random.choice(led) if led else random.randrange(count)  # noqa: S311 - spreads load
            topic.same_left = _SAME_PARTITION
        return topic.same

    async def _look_up(self, client: SendingClient, topic: _Topic, name: str, since: float) -> int:
        """Look up the number of partitions. Callers that waited meanwhile share the error of a missing topic."""
        if topic.failure is not None and topic.failed_at >= since:
            raise copy.copy(topic.failure)
        give_up: float | None = None
        while True:
            answered = await client.look_up(name)
            if client is not self._shared.client:
                raise self._shared.closed_error() if self._shared.closed else _lost(client, name)
            count = client.partition_count(name)
            if count:
                return count
            give_up = time.monotonic() + _TOPIC_TIMEOUT if give_up is None and answered else give_up
            if client.may_not_see(name):
                topic.failure = publish_error(kafka.TopicAuthorizationFailedError(name), name)
            elif give_up is not None and time.monotonic() > give_up:
                topic.failure = missing_topic(name, _TOPIC_TIMEOUT)
            else:
                continue
            topic.failed_at = time.monotonic()
            client.forget_topic(name)
            raise topic.failure

    # The client -------------------------------------------------------------------------

    async def _usable(self, topic: str, since: float) -> SendingClient:
        client = self._shared.client
        if client is not None and client.lost is not None:
            self._discard(client, _lost(client, topic))
        self._asking = topic
        return await self._shared.get(since)

    async def _connect(self) -> SendingClient:
        client = await connect(self._settings, self._options, self._asking)
        client.client.cluster.add_listener(self._forget_partitions)
        self._forget_partitions()
        logger.debug("the producer is connected to the brokers of %s", self._settings.bootstrap_servers)
        return client

    def _forget_partitions(self, _cluster: object = None) -> None:
        """Forget partition counts after each metadata update: topics may have new partitions, or be gone."""
        for topic in self._topics.values():
            topic.partitions = 0

    def _discard(self, client: SendingClient, error: TransportError) -> None:
        """Close a client and fail its pending messages with *error*; the next message connects."""
        client.give_up(error)
        if client is self._shared.client:
            logger.warning("%s; the producer connects anew", error)
            self._shared.drop(client)

    # Errors -----------------------------------------------------------------------------

    def _given_up(self, waiting: _Waiting) -> TransportError:
        """Return the error of a message that was not acknowledged in time."""
        if self._acknowledged_at > waiting.since:
            return TransportError(
                f"a message for topic {waiting.topic!r} was not acknowledged within {_PATIENCE:g} s, while others "
                "were: check that its partition has a leader and enough replicas in sync"
            )
        error = nothing_acknowledged(self._settings.bootstrap_servers, _PATIENCE)
        if self._shared.client is not None:
            # Otherwise, once brokers are back, it would send its old messages in addition to those published again.
            self._discard(self._shared.client, error)
        return error

    def _failed(self, client: SendingClient, error: kafka.KafkaError, topic: str) -> TransportError:
        """Return the error of a message whose batch did not reach a broker."""
        if client.lost is not None:
            lost = _lost(client, topic)
            self._discard(client, lost)
            return lost
        # The batch used up its sequence numbers anyway.
        client.forget_producer_id()
        if not client.partition_count(topic):
            return missing_topic(topic, _REQUEST_TIMEOUT)
        return publish_error(error, topic)


def _refused(refusal: RefusedError, message: Message) -> TransportError:
    if refusal.error in _TOO_LARGE:
        return too_large(message.topic, _size(message))
    error = publish_error(refusal, message.topic)
    if not isinstance(error, AuthorizationError):
        error.retriable = refusal.code not in _FINAL
    return error


def _lost(client: SendingClient, topic: str) -> TransportError:
    cause = client.lost
    cause = (cause and cause.__cause__) or cause or kafka.ProducerClosed()
    denied = publish_error(cause, topic)
    if isinstance(denied, AuthorizationError):
        return denied
    return ClientLostError(f"the Kafka producer ended by itself ({reason(cause)})")


def _size(message: Message) -> int:
    """Return roughly the size of a message in bytes, as brokers count it."""
    headers = sum(len(name) + len(content or b"") for name, content in message.headers)
    return len(message.key or b"") + len(message.value or b"") + headers


@functools.lru_cache(maxsize=_REMEMBERED_KEYS)
def _hash(key: bytes) -> int:
    """Hash a key as Java's partitioner does. Cached: in Python, hashing takes as long as the rest of publishing."""
    hashed: int = murmur2(key) & 0x7FFFFFFF
    return hashed
