"""The producer port on aiokafka's connections.

aiokafka's own producer does not fit: after a broker has refused a batch, its partition accepts nothing more, and a
batch that nobody waits for is retried forever.
"""

import asyncio
import contextlib
import copy
import functools
import itertools
import logging
import time
from collections import defaultdict, deque
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aiokafka import errors as kafka
from aiokafka.client import AIOKafkaClient
from aiokafka.partitioner import murmur2
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import InitProducerIdRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from aioshard.errors import AuthorizationError, ClientLostError, MessageTooLargeError, TransportError
from aioshard.kafka.aiokafka.answers import IncompleteAnswerError, cause_of, produced, raise_for, reason
from aioshard.kafka.aiokafka.client import BareClient
from aioshard.kafka.aiokafka.connections import connected, end_tasks, is_connected
from aioshard.kafka.aiokafka.options import client_options
from aioshard.kafka.errors import nothing_acknowledged, publish_error
from aioshard.ports import RECORD_OVERHEAD, Message, record_size
from aioshard.records import TopicPartition, by_topic
from aioshard.settings import Settings

Compression = Literal["none", "gzip", "snappy", "lz4", "zstd"]

logger = logging.getLogger("aioshard.kafka.aiokafka.producer")

_CODECS: Mapping[Compression, int] = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
_BATCH_BYTES = 64 * 1024
_MOST_REQUEST_BYTES = 100 * 1024 * 1024
"""The largest request that brokers read (`socket.request.max.bytes`). On a larger one, they close the connection
without an error, and it would be resent forever. Smaller ones can only exceed the topic's limit, with a clear error."""
_PATIENCE = 30.0
"""Seconds after which an unacknowledged message fails."""
_REQUEST_TIMEOUT = 10.0
"""Seconds without a response after which a broker counts as gone; a few attempts fit into `_PATIENCE`."""
_PAUSE = 0.1
"""Seconds until a batch is sent again, or a topic is looked up again."""
_QUIET = 5.0
"""Seconds that a message may wait before `trouble` reports it."""
_TOPIC_TIMEOUT = 5.0
"""Seconds to wait until an unknown topic appears."""
_REMEMBERED_KEYS = 10_000

_DUPLICATE = 46
_TOO_LARGE = frozenset({10, 18})
_BAD_IDENTITY = frozenset({45, 47, 49, 59})
"""Error codes that refuse the producer id or its sequence number."""
_OF_THE_WHOLE_BATCH = _BAD_IDENTITY | {29, 31}
"""Error codes that no single record of a batch can cause."""
_FINAL = frozenset({17, 32, 43, 44, 76, 87})
"""Error codes that are never transient. They concern the topic's name, the timestamp, the format, a policy, the
compression, or the record itself (a compacted topic rejects records without a key)."""


@dataclass(slots=True, eq=False)
class _Call:
    """A message, and the future of its offset."""

    message: Message
    since: float = field(default_factory=time.monotonic)
    acknowledged: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def fail(self, error: TransportError) -> None:
        if not self.acknowledged.done():
            self.acknowledged.set_exception(copy.copy(error))


@dataclass(slots=True, eq=False)
class _Partition:
    """The unacknowledged messages of one partition.

    Invariants:
        * At most one batch is in flight, so messages stay in order.
        * `sequence` counts acknowledged messages only. A refused batch was not stored and uses up no numbers.
    """

    name: TopicPartition
    waiting: deque[_Call] = field(default_factory=deque)
    alone: int = 0
    """How many of the next messages get a batch each."""
    batch: list[_Call] = field(default_factory=list)
    """The messages that are sent, unchanged, until the broker has stored or refused them."""
    data: bytes = b""
    busy: bool = False
    """Whether a request is in flight, or a retry is due."""
    identity: tuple[int, int] | None = None
    """Producer id and epoch of the batch."""
    sequence: int = 0

    def fill_batch(self, identity: tuple[int, int], codec: int) -> None:
        """Make a new batch of waiting messages, unless the previous one must be sent again."""
        if self.batch:
            return
        if self.identity is not identity:
            self.identity, self.sequence = identity, 0
        builder = DefaultRecordBatchBuilder(2, codec, 0, *identity, self.sequence, _BATCH_BYTES)
        while self.waiting:
            call = self.waiting[0]
            if not call.acknowledged.done():
                message = call.message
                timestamp = None if message.timestamp is None else round(message.timestamp * 1000)
                if (
                    builder.append(len(self.batch), timestamp, message.key, message.value, list(message.headers))
                    is None
                ):
                    break
                self.batch.append(call)
            self.waiting.popleft()
            if self.alone:
                self.alone -= 1
                break
        self.data = bytes(builder.build())

    def acknowledge(self, offset: int) -> None:
        """Resolve the messages of the batch, stored from *offset* on."""
        self.sequence = (self.sequence + len(self.batch)) % 2**31
        for number, call in enumerate(self.batch):
            if not call.acknowledged.done():
                call.acknowledged.set_result(offset + number)
        self.batch = []

    def refuse(self, error: kafka.KafkaError) -> None:
        """Fail the messages of the batch, or send each alone if one of them may be the reason."""
        if len(self.batch) > 1 and getattr(error, "errno", 29) not in _OF_THE_WHOLE_BATCH:
            self.waiting.extendleft(reversed(self.batch))
            self.alone = len(self.batch)
        else:
            for call in self.batch:
                call.fail(_refused(error, call.message))
        self.batch = []


class KafkaProducer:
    """An idempotent producer; implements `aioshard.ports.Producer`.

    The first message connects. So does the next one after the client was lost or no broker acknowledged anything for
    30 s. Each broker has at most one request in flight, with at most one batch per partition.

    Invariants:
        * A message that the brokers reject does not keep later ones of its partition from being stored.
        * A message that was given up is never retried behind its caller's back.
    """

    def __init__(self, settings: Settings, compression: Compression = "none") -> None:
        """Check the options; connects to nothing yet.

        Raises:
            SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
        """
        self._settings = settings
        self._codec = _CODECS[compression]
        self._options = client_options(settings, request_timeout=_REQUEST_TIMEOUT)
        self._client: BareClient | None = None
        self._closed = False
        self._identity: tuple[int, int] | None = None
        """Producer id and epoch; None while a new one is needed."""
        self._acknowledged_at = 0.0
        self._topics: dict[str, deque[_Call]] = {}
        """Messages without a partition yet."""
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._pending: dict[_Partition, None] = {}
        """The partitions with unacknowledged messages."""
        self._held: list[_Partition] = []
        """The partitions whose batch must be sent again."""
        self._missing: dict[str, float] = {}
        """When the brokers first reported that a topic does not exist."""
        self._round_robin: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        """Counter of the messages without a key, by topic."""
        self._scheduled = False
        self._requests: set[int] = set()
        """The brokers with a request in flight."""
        self._recovering = False
        self._recover_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def trouble(self) -> str | None:
        """See `Producer.trouble`; reports messages that have waited for 5 s."""
        waiting = [call for call in self._unacknowledged() if not call.acknowledged.done()]
        oldest = min(waiting, key=lambda call: call.since, default=None)
        if oldest is None or (waited := time.monotonic() - oldest.since) < _QUIET:
            return None
        text = (
            f"messages not acknowledged by the brokers: {len(waiting)}; the oldest, for topic "
            f"{oldest.message.topic!r}, has waited {waited:.0f} s"
        )
        if self._client is None or not is_connected(self._client):
            return f"{text}; no connection to a broker of {self._settings.bootstrap_servers} is open"
        if self._acknowledged_at < oldest.since:
            return f"{text}; the brokers have acknowledged nothing since"
        return f"{text}; others were acknowledged meanwhile: check that enough replicas of its partition are in sync"

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
        since = time.monotonic()
        try:
            async with asyncio.timeout(_PATIENCE):
                offset = await self.send(message)
        except TimeoutError:
            raise self._given_up(message, since) from None
        self._acknowledged_at = time.monotonic()
        return offset

    def send(self, message: Message) -> asyncio.Future[int]:
        """Send a message after those sent before it, without a deadline; return the future of its offset.

        The future raises the errors of `publish`.
        """
        if self._closed:
            raise _closed_error()
        call, size = _Call(message), _size(message)
        if size > _MOST_REQUEST_BYTES:
            call.fail(
                MessageTooLargeError(
                    f"a message of {size} bytes for topic {message.topic!r} does not fit into one request of at most "
                    f"{_MOST_REQUEST_BYTES} bytes: publish smaller messages"
                )
            )
        else:
            self._topics.setdefault(message.topic, deque()).append(call)
            self._schedule()
        return call.acknowledged

    async def close(self) -> None:
        """See `Producer.close`; takes at most 2 s."""
        self._closed = True
        self._fail_all(_closed_error())
        await end_tasks(self._tasks)
        if self._client is not None:
            await self._client.tear_down()

    def _schedule(self) -> None:
        """Send soon: messages published in the same iteration of the event loop share a batch."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._send_pending)

    # Requests ---------------------------------------------------------------------------

    def _send_pending(self) -> None:
        """Send the next batch of every partition to its leader, unless that has a request in flight."""
        self._scheduled = False
        if self._closed:
            return
        client = self._client if self._client is not None and self._client.lost is None else None
        recover = self._has_unassigned(client) or bool(self._held)
        requests: dict[int, list[_Partition]] = {}
        for partition in [partition for partition in self._pending if not partition.busy]:
            if not self._is_wanted(partition):
                del self._pending[partition]
                continue
            leader = None if client is None or self._identity is None else client.leader(partition.name)
            if leader is None:
                recover = True
            elif leader not in self._requests:
                requests.setdefault(leader, []).append(partition)
        if client is not None and self._identity is not None:
            for node, partitions in requests.items():
                self._requests.add(node)
                self._start(self._request(client, node, partitions, self._identity))
        if recover and not self._recovering:
            self._recovering = True
            self._start(self._recover())

    def _has_unassigned(self, client: BareClient | None) -> bool:
        """Move messages to the queues of their partitions; return whether some have no partition yet."""
        for topic, calls in list(self._topics.items()):
            if client is not None:
                self._assign_partitions(client, topic, calls)
            _drop_given_up(calls)
            if not calls:
                del self._topics[topic]
        return bool(self._topics)

    def _is_wanted(self, partition: _Partition) -> bool:
        """Return whether a caller waits for a message; forget a batch that nobody waits for."""
        if partition.batch and all(call.acknowledged.done() for call in partition.batch):
            partition.batch = []
            self._identity = None  # The batch may or may not have used its sequence numbers.
        _drop_given_up(partition.waiting)
        return bool(partition.batch or partition.waiting)

    def _assign_partitions(self, client: BareClient, topic: str, calls: deque[_Call]) -> None:
        """Move messages of a topic to the queues of their partitions, up to one whose partition is unknown."""
        count = client.partition_count(topic)
        led: Sequence[int] = ()
        while calls:
            call = calls[0]
            number, key = call.message.partition, call.message.chosen_by
            if not count or (number is not None and number >= count and client.updated_at < call.since):
                return
            calls.popleft()
            if number is None and key is not None:
                number = _hash(key) % count
            elif number is None:
                led = led or sorted(client.cluster.available_partitions_for_topic(topic) or range(count))
                number = led[next(self._round_robin[topic]) % len(led)]
            elif not 0 <= number < count:
                call.fail(
                    TransportError(
                        f"topic {topic!r} has partitions 0 to {count - 1} and not {number}: add partitions to it",
                        retriable=False,
                    )
                )
                continue
            name = TopicPartition(topic, number)
            partition = self._partitions.get(name) or self._partitions.setdefault(name, _Partition(name))
            partition.waiting.append(call)
            self._pending[partition] = None

    async def _request(
        self, client: BareClient, node: int, partitions: Collection[_Partition], identity: tuple[int, int]
    ) -> None:
        """Send one request to a broker; hold the batches that it neither stores nor refuses."""
        batches = {}
        for partition in partitions:
            partition.busy = True
            partition.fill_batch(identity, self._codec)
            batches[partition.name] = partition.data
        results: dict[TopicPartition, tuple[int, kafka.KafkaError | None]] = {}
        failure: kafka.KafkaError = IncompleteAnswerError("a batch is missing in the response")
        try:
            request = ProduceRequest(
                None,
                -1,
                round(_REQUEST_TIMEOUT * 1000),
                by_topic(batches, lambda name: (name.partition, batches[name])),
            )
            results = produced(await client.send(node, request))
        except kafka.KafkaError as error:
            logger.debug("a request to broker %d failed: %s", node, reason(error))
            failure = error
        finally:
            self._requests.discard(node)
        for partition in partitions:
            offset, refusal = results.get(partition.name, (-1, failure))
            code = getattr(refusal, "errno", None)
            if refusal is None or code == _DUPLICATE:
                partition.acknowledge(offset)
            elif refusal.retriable:
                self._held.append(partition)
                continue
            else:
                if code is None or code in _BAD_IDENTITY:
                    self._identity = None
                partition.refuse(refusal)
            partition.busy = False
        self._schedule()

    async def _recover(self) -> None:
        """Get the missing parts: a client, a producer id, leaders of partitions. Then send held batches again."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._recover_at - loop.time())
        self._recover_at = loop.time() + _PAUSE
        held, self._held = self._held, []
        try:
            if self._client is None or self._client.lost is not None:
                self._drop_client()
                self._client = await connected(
                    self._settings, self._options, lambda options: BareClient(options, creates_topics=True)
                )
            if self._identity is None:
                self._identity = await producer_identity(self._client)
            await self._look_up(self._client)
        except TransportError as error:
            self._fail_all(error)
        except kafka.KafkaError as error:
            if not error.retriable:
                for call in self._unacknowledged():
                    call.fail(publish_error(cause_of(error), call.message.topic))
        finally:
            self._recovering = False
            for partition in held:
                partition.busy = False
        self._schedule()

    async def _look_up(self, client: BareClient) -> None:
        """Look up the topics of all messages; fail those of missing topics."""
        topics = {*self._topics, *(partition.name.topic for partition in self._pending)}
        if not await client.look_up(*topics):
            return
        now = time.monotonic()
        for topic in topics:
            if not client.partition_count(topic):
                if client.may_not_see(topic):
                    error = publish_error(cause_of(kafka.TopicAuthorizationFailedError(topic)), topic)
                elif now > self._missing.setdefault(topic, now) + _TOPIC_TIMEOUT:
                    error = TransportError(
                        f"topic {topic!r} does not exist, and the brokers did not create it within "
                        f"{_TOPIC_TIMEOUT:g} s: create it, or check its name",
                        retriable=False,
                    )
                else:
                    continue
                client.forget(topic)
                for call in self._unacknowledged():
                    if call.message.topic == topic:
                        call.fail(error)
            self._missing.pop(topic, None)

    # Ends -------------------------------------------------------------------------------

    def _start(self, sending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(sending, name="send to brokers")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail_all(ClientLostError(f"the Kafka producer ended by itself ({reason(error)})"))
            self._drop_client()
            self._identity = None
            self._partitions.clear()
            self._pending.clear()

    def _drop_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            self._start(client.tear_down())

    def _unacknowledged(self) -> list[_Call]:
        assigned = (queue for partition in self._pending for queue in (partition.batch, partition.waiting))
        return [*itertools.chain(*self._topics.values(), *assigned)]

    def _fail_all(self, error: TransportError) -> None:
        for call in self._unacknowledged():
            call.fail(error)

    def _given_up(self, message: Message, since: float) -> TransportError:
        """Return the error of a message that was not acknowledged in time."""
        if self._acknowledged_at > since:
            return TransportError(
                f"a message for topic {message.topic!r} was not acknowledged within {_PATIENCE:g} s, while others "
                "were: check that its partition has a leader and enough replicas in sync"
            )
        self._drop_client()  # The next one starts over with the bootstrap addresses.
        return nothing_acknowledged(self._settings.bootstrap_servers, _PATIENCE)


async def producer_identity(client: AIOKafkaClient) -> tuple[int, int]:
    """Request a new producer id and its epoch."""
    response = await client.send(client.get_random_node(), InitProducerIdRequest(None, 60_000))
    raise_for(response.error_code)
    return response.producer_id, response.producer_epoch


def _drop_given_up(calls: deque[_Call]) -> None:
    while calls and calls[0].acknowledged.done():
        calls.popleft()


def _closed_error() -> ClientLostError:
    return ClientLostError("the Kafka producer is closed")


def _refused(error: kafka.KafkaError, message: Message) -> TransportError:
    code = getattr(error, "errno", None)
    if code in _TOO_LARGE:
        return MessageTooLargeError(
            f"a message of {_size(message)} bytes is too large for topic {message.topic!r}: raise max.message.bytes of "
            "the topic, or publish smaller messages"
        )
    refused = publish_error(cause_of(error), message.topic)
    if not isinstance(refused, AuthorizationError):
        refused.retriable = code not in _FINAL
    return refused


def _size(message: Message) -> int:
    """Return roughly the size of a message in bytes, as brokers count it."""
    return record_size(message.key, message.value, message.headers) - RECORD_OVERHEAD


@functools.lru_cache(maxsize=_REMEMBERED_KEYS)
def _hash(key: bytes) -> int:
    """Hash a key as Java's partitioner does. Cached: in Python, hashing takes as long as the rest of publishing."""
    return int(murmur2(key)) & 0x7FFFFFFF


# Many messages -----------------------------------------------------------------------------

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
        self._servers = settings.bootstrap_servers
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
            try:
                async with asyncio.timeout(_PATIENCE):
                    results = await asyncio.gather(*map(self._producer.send, wave), return_exceptions=True)
            except TimeoutError:
                raise nothing_acknowledged(self._servers, _PATIENCE) from None
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
