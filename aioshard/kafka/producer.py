"""The producer port on our own client.

aiokafka's producer does not fit: after a broker has refused a batch, its partition accepts nothing more, and a batch
that nobody waits for is retried forever.
"""

import asyncio
import contextlib
import copy
import enum
import functools
import itertools
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aiokafka import codec
from aiokafka.partitioner import murmur2
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from aioshard.errors import (
    AuthorizationError,
    ClientLostError,
    MessageTooLargeError,
    SettingsError,
    TransportError,
)
from aioshard.kafka.errors import TOPIC_DENIED, missing_topic, nothing_acknowledged, publish_error
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.codes import error_for
from aioshard.kafka.wire.connection import CLOSE_GRACE
from aioshard.kafka.wire.errors import BrokerError, UnsupportedVersionError, WireError
from aioshard.kafka.wire.metadata import Broker
from aioshard.kafka.wire.pool import Purpose
from aioshard.kafka.wire.requests import INIT_PRODUCER_ID, PRODUCE
from aioshard.kafka.wire.responses import Answers, named_leaders, new_producer_id, stored_offsets
from aioshard.kafka.wire.start import connect, new_cluster
from aioshard.ports import RECORD_OVERHEAD, UNKNOWN_OFFSET, Message, record_size
from aioshard.records import TOPIC_NAME, TopicPartition, by_topic
from aioshard.serde.payloads import unwritable
from aioshard.settings import Settings

Compression = Literal["none", "gzip", "snappy", "lz4", "zstd"]

logger = logging.getLogger("aioshard.kafka.producer")

_CODECS: Mapping[Compression, int] = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
_HAS_CODEC: Mapping[Compression, Callable[[], bool]] = {
    "none": lambda: True,
    "gzip": codec.has_gzip,
    "snappy": codec.has_snappy,
    "lz4": codec.has_lz4,
    "zstd": codec.has_zstd,
}
_BATCH_BYTES = 64 * 1024
_REQUEST_BYTES = 8 * 1024 * 1024
"""A request contains no further batch that would make it larger than this."""
_MOST_REQUEST_BYTES = 100 * 1024 * 1024 - 64 * 1024
"""The largest message that brokers read: `socket.request.max.bytes`, less room for what a request adds. On a larger
request, they close the connection without an error, and it would be resent forever. Smaller messages can only exceed
the topic's limit, with a clear error."""
_PATIENCE = 30.0
"""Seconds after which an unacknowledged message fails."""
_REQUEST_TIMEOUT = 10.0
"""Seconds without a response after which a broker counts as gone; a few attempts fit into `_PATIENCE`."""
_PAUSE = 0.1
"""Seconds until a batch is sent again, or a topic is looked up again."""
_QUIET = 5.0
"""Seconds that a message may wait before `trouble` reports it."""
_TOPIC_TIMEOUT = 5.0
"""Seconds to wait until an unknown topic or partition appears: a broker may not have heard of it yet."""
_NO_ID = -1
_NO_EPOCH = -1
_TRANSACTION_TIMEOUT_MS = 60_000
"""Part of the request; brokers ignore it without a transactional id."""
_REMEMBERED_KEYS = 10_000

_THROTTLED = "brokers delay this client, because it exceeds its produce quota: publish less, or raise the quota"

_MOST_SEQUENCE = 2**31
_LAST_EPOCH = 2**15 - 1
_LONGEST_TIMESTAMP = 2**63 - 1
"""Milliseconds; a float of seconds may round up to one more."""


# Answers -----------------------------------------------------------------------------


class _Verdict(enum.Enum):
    """The meaning of an answer, or of its absence, for one batch."""

    STORED = enum.auto()
    AGAIN = enum.auto()
    """This attempt certainly stored nothing: send it again."""
    IN_DOUBT = enum.auto()
    """This attempt may have stored it: send the same bytes again, and never use their numbers for others."""
    SUSPECT = enum.auto()
    """As in doubt, but probably permanent: try once more."""
    REFUSED = enum.auto()
    """This attempt stored nothing, and none will: no single message can be the reason."""
    MESSAGE_REFUSED = enum.auto()
    """As refused, but one message of several may be the reason."""
    GAP = enum.auto()
    """The broker expects other sequence numbers: it has forgotten us, or lost messages."""
    FENCED = enum.auto()
    """The broker knows a later epoch of the producer id, or does not know the id."""


_VERDICTS: Mapping[int, _Verdict] = {
    46: _Verdict.STORED,  # a duplicate of a batch whose offset the broker no longer knows
    # Checked before anything is stored. Not so 3, 5, 6 and 56: a leader that changes while it waits for its replicas
    # answers these too.
    **dict.fromkeys((14, 15, 16, 19, 51, 74, 75), _Verdict.AGAIN),
    # Damaged on the way, or an error of the broker that it cannot name. It may depend on the messages.
    **dict.fromkeys((-1, 2), _Verdict.SUSPECT),
    # Of the whole batch: the topic's name, its permissions, the record format, the codec.
    **dict.fromkeys((17, 29, 31, 43, 76), _Verdict.REFUSED),
    # The size, the timestamp, a policy, or the record itself (a compacted topic rejects records without a key).
    **dict.fromkeys((10, 18, 32, 44, 87), _Verdict.MESSAGE_REFUSED),
    **dict.fromkeys((45, 59), _Verdict.GAP),
    **dict.fromkeys((47, 49, 90), _Verdict.FENCED),
}
_TOO_LARGE = frozenset({10, 18})
_FINAL = frozenset({17, 32, 43, 44, 76, 87})
"""Error codes that the same message will get again."""


class _NotSentError(WireError):
    """The connection to the broker was not opened, so nothing was sent."""


def _verdict(error: WireError | None) -> _Verdict:
    """Return what an error says about a batch. A code that no one has listed proves nothing: it is in doubt."""
    if error is None:
        return _Verdict.STORED
    if isinstance(error, _NotSentError):
        return _Verdict.AGAIN
    if isinstance(error, UnsupportedVersionError):
        return _Verdict.REFUSED  # by the client, which has not sent it
    if not isinstance(error, BrokerError):
        return _Verdict.IN_DOUBT  # the broker did not answer, or left the batch out
    known = _VERDICTS.get(error.code)
    if known is not None:
        return known
    return _Verdict.IN_DOUBT if error.retriable else _Verdict.SUSPECT


# Partitions --------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Call:
    """A message, and the future of its offset."""

    message: Message
    since: float
    """When it was accepted, by `time.monotonic`."""
    acknowledged: asyncio.Future[int]

    def fail(self, error: TransportError) -> None:
        if not self.acknowledged.done():
            self.acknowledged.set_exception(copy.copy(error))


@dataclass(slots=True, eq=False)
class _Batch:
    """Messages that are sent, unchanged, until the broker has stored or refused them."""

    calls: list[_Call]
    data: bytes
    is_in_doubt: bool = False
    """Whether an earlier attempt may have stored it: the broker may answer a batch with its numbers as a duplicate."""
    is_suspect: bool = False

    @property
    def is_given_up(self) -> bool:
        """Whether no caller waits for it any more."""
        return all(call.acknowledged.done() for call in self.calls)


@dataclass(slots=True, eq=False)
class _Partition:
    """The unacknowledged messages of one partition, and the only owner of its sequence numbers.

    Each partition raises the epoch of the producer id for itself: brokers remember the epoch and the sequence number
    of a producer per partition. So a new epoch leaves uncertain batches of other partitions as they are.

    Invariants:
        * At most one batch is in flight, so messages stay in order.
        * `sequence` counts messages that this epoch has stored. It belongs to another batch only if an answer says that
          no attempt has stored the batch before. Else the epoch rises and numbers start at 0. Once the new epoch has
          stored something, the broker refuses late copies of older batches.
    """

    name: TopicPartition
    waiting: deque[_Call] = field(default_factory=deque)
    sizes: deque[int] = field(default_factory=deque)
    """How many messages the next batches may have, after one was refused and split."""
    batch: _Batch | None = None
    is_busy: bool = False
    """Whether a request is in flight, or a retry is due."""
    identity: tuple[int, int] | None = None
    """The producer id, and its epoch when a broker issued it; kept as long as it has epochs left."""
    epoch: int = 0
    sequence: int = 0
    is_renewed: bool = False
    """Whether the epoch has risen since the last stored batch because of a gap."""

    @property
    def needs_new_id(self) -> bool:
        """Whether the producer id has no epoch left for this partition."""
        return self.epoch > _LAST_EPOCH

    @property
    def is_empty(self) -> bool:
        """Whether it has no messages."""
        return self.batch is None and not self.waiting

    def successor(self) -> "_Partition":
        """Return an empty partition that continues after an unknown outcome, in a new epoch."""
        return _Partition(self.name, identity=self.identity, epoch=self.epoch + 1)

    def drop_given_up(self) -> None:
        """Forget messages that nobody waits for, unless they share a batch with others."""
        if self.batch is not None and self.batch.is_given_up:
            is_in_doubt = self.batch.is_in_doubt
            self.batch = None
            if is_in_doubt:
                self._raise_epoch()
        _drop_given_up(self.waiting)

    def fill_batch(self, identity: tuple[int, int], codec_number: int) -> None:
        """Make a batch of waiting messages, unless the previous one must be sent again.

        A message that cannot be encoded fails alone; if no other waits, no batch is made.
        """
        if self.batch is not None:
            return
        producer_id = self._producer_id(identity)
        new_builder = functools.partial(
            DefaultRecordBatchBuilder, 2, codec_number, 0, producer_id, self.epoch, self.sequence, _BATCH_BYTES
        )
        builder = new_builder()
        most = self.sizes.popleft() if self.sizes else _MOST_SEQUENCE
        # A message without a timestamp has that of its acceptance, even if it is sent after an outage. In this order:
        # a pause between the two calls must not lead to a time before the acceptance.
        monotonic = time.monotonic()
        ahead = time.time() - monotonic
        calls: list[_Call] = []
        waiting = self.waiting
        while waiting and len(calls) < most:
            call = waiting[0]
            if not call.acknowledged.done():
                message = call.message
                try:
                    if message.timestamp is None:
                        timestamp = int((call.since + ahead) * 1000)
                    else:
                        timestamp = min(round(message.timestamp * 1000), _LONGEST_TIMESTAMP)
                    fits = builder.append(len(calls), timestamp, message.key, message.value, list(message.headers))
                except Exception as error:  # noqa: BLE001 - the encoder reports what it cannot encode in many ways
                    call.fail(_not_encoded(message, error))
                    if not calls:
                        builder = new_builder()  # the first message of a builder may be of any size
                else:
                    if fits is None:
                        break
                    calls.append(call)
            waiting.popleft()
        if calls:
            self.batch = _Batch(calls, bytes(builder.build()))

    def _producer_id(self, newest: tuple[int, int]) -> int:
        """Return the producer id; the newest only if there is none, or no epoch is left: it fences no late copies."""
        if self.identity is None or self.needs_new_id:
            self.identity = newest
            self.epoch = newest[1]
            self.sequence = 0
        return self.identity[0]

    def apply(self, offset: int, error: WireError | None) -> None:
        """Act on the answer to the batch; the batch stays if it must be sent again."""
        batch = self.batch
        assert batch is not None  # noqa: S101 - it was sent
        match _verdict(error):
            case _Verdict.STORED:
                self._acknowledge(batch, offset)
            case _Verdict.AGAIN:
                pass
            case _Verdict.IN_DOUBT:
                batch.is_in_doubt = True
            case _Verdict.SUSPECT if not batch.is_suspect:
                batch.is_suspect = True
                batch.is_in_doubt = True
            case verdict:
                assert error is not None  # noqa: S101 - it is not stored
                self.batch = None
                self._give_up(batch, verdict, error)

    def _give_up(self, batch: _Batch, verdict: _Verdict, error: WireError) -> None:
        """Fail the messages of a batch that the broker does not take, or put them back."""
        if batch.is_in_doubt:
            # 1. Perhaps an earlier attempt has stored it. Only its callers may send it again; its numbers are spent.
            for call in batch.calls:
                call.fail(_refused(error, call.message, is_in_doubt=True))
        elif verdict in (_Verdict.GAP, _Verdict.FENCED) and not self.is_renewed:
            # 2. Nothing is stored, and the reason is not the messages: send them again, in a new epoch.
            self._put_back(batch)
            self.is_renewed = True
        elif verdict is _Verdict.MESSAGE_REFUSED and len(batch.calls) > 1:
            # 3. Nothing is stored, and one of the messages may be the reason: look for it in each half.
            half = (len(batch.calls) + 1) // 2
            self._put_back(batch)
            self.sizes.extendleft((len(batch.calls) - half, half))
        else:
            # 4. Nothing is stored.
            for call in batch.calls:
                call.fail(_refused(error, call.message))
        if verdict is _Verdict.FENCED:
            self.epoch = _LAST_EPOCH + 1  # no epoch of this producer id is certainly later than that of the broker
        elif verdict is _Verdict.GAP or batch.is_in_doubt:
            self._raise_epoch()

    def _acknowledge(self, batch: _Batch, offset: int) -> None:
        """Resolve the messages of the batch, stored from *offset* on; below 0, it is unknown."""
        self.batch = None
        self.is_renewed = False
        self.sequence = (self.sequence + len(batch.calls)) % _MOST_SEQUENCE
        for number, call in enumerate(batch.calls):
            if not call.acknowledged.done():
                call.acknowledged.set_result(UNKNOWN_OFFSET if offset < 0 else offset + number)

    def _put_back(self, batch: _Batch) -> None:
        self.waiting.extendleft(reversed(batch.calls))

    def _raise_epoch(self) -> None:
        # No broker needs to be asked: without transactions, the epoch of a producer id is its producer's own, and
        # InitProducerId would only return another id, which fences nothing.
        self.epoch += 1
        self.sequence = 0


class KafkaProducer:
    """An idempotent producer; implements `aioshard.ports.Producer`.

    The first message connects. So does the next one after the client was lost or no broker acknowledged anything for
    30 s. Each broker has at most one request in flight, with at most one batch per partition.

    Invariants:
        * A message that the brokers reject, or that cannot be encoded, does not keep later ones of its partition from
          being stored.
        * A message that was given up is never retried behind its caller's back. If a copy of it is still on its way, it
          is not stored behind messages that were published after it.
    """

    def __init__(self, settings: Settings, compression: Compression = "none") -> None:
        """Check the options; connects to nothing yet.

        Raises:
            SettingsError: The brokers are not set, TLS and SASL settings cannot work, or the codec is not installed.
        """
        if not _HAS_CODEC[compression]():
            raise SettingsError(
                f"compression={compression!r} needs a package that is not installed: install it with  "
                "pip install 'aiokafka[all]'"
            )
        self._settings = settings
        self._codec = _CODECS[compression]
        new_cluster(settings)
        self._cluster: Cluster | None = None
        """Connected; None before the first message, and after it was lost."""
        self._closed = False
        self._identity: tuple[int, int] | None = None
        """Producer id and its first epoch; None while a new one is needed."""
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
        self._looked_up_at = 0.0
        """When a broker last answered a look-up of the topics of all messages, by `time.monotonic`."""
        self._counts: dict[str, int] = {}
        """Number of partitions by topic, as last used."""
        self._shrunk: dict[str, float] = {}
        """When the brokers first reported fewer partitions of a topic than before."""
        self._round_robin: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        """Counter of the messages without a key, by topic."""
        self._scheduled = False
        self._requests: set[int] = set()
        """The brokers with a request in flight, or that throttle us."""
        self._throttled: set[int] = set()
        """The brokers that throttle us."""
        self._recovering = False
        self._recover_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        """These close the connections of clients that were dropped."""

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
        if self._cluster is None or not self._cluster.is_connected:
            return f"{text}; no connection to a broker of {self._settings.bootstrap_servers} is open"
        if self._throttled:
            return f"{text}; {_THROTTLED}"
        if self._acknowledged_at < oldest.since:
            return f"{text}; the brokers have acknowledged nothing since"
        return f"{text}; others were acknowledged meanwhile: check that enough replicas of its partition are in sync"

    async def publish(self, message: Message) -> int:
        """See `Producer.publish`. Gives up after 30 s, or after 5 s if the topic or the partition does not exist.

        Raises:
            ClientLostError: The producer is closed, or its client failed.
            ConnectError: No broker could be reached.
            AuthenticationError: The brokers refused our credentials, or we refused their certificate.
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
        call = _Call(message, time.monotonic(), asyncio.get_running_loop().create_future())
        try:
            size = _size(message)
        except (TypeError, ValueError) as error:  # its parts have no length
            call.fail(_not_encoded(message, error))
            return call.acknowledged
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
        for task in self._tasks:
            task.cancel()
        self._drop_cluster()
        ending = {*self._tasks, *self._closing}
        if ending:
            await asyncio.wait(ending, timeout=2 * CLOSE_GRACE)

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
        cluster = self._usable
        recover = self._has_unassigned(cluster) or bool(self._held)
        ready: dict[int, list[_Partition]] = {}
        for partition in [partition for partition in self._pending if not partition.is_busy]:
            partition.drop_given_up()
            if partition.is_empty:
                del self._pending[partition]
                continue
            leader = self._leader(cluster, partition)
            if leader is None:
                recover = True
            elif leader not in self._requests:
                ready.setdefault(leader, []).append(partition)
        if cluster is not None and self._identity is not None:
            for node, partitions in ready.items():
                if chosen := self._fill_request(partitions, self._identity):
                    self._requests.add(node)
                    self._start(self._request(cluster, node, chosen))
        if recover and not self._recovering:
            self._recovering = True
            self._start(self._recover())

    @property
    def _usable(self) -> Cluster | None:
        """The client; None if there is none, or it was lost."""
        cluster = self._cluster
        return None if cluster is None or cluster.failure is not None else cluster

    def _leader(self, cluster: Cluster | None, partition: _Partition) -> int | None:
        """Return the broker to send a partition to; None while something is missing for that."""
        if partition.needs_new_id and partition.identity is self._identity:
            self._identity = None
        if cluster is None or self._identity is None:
            return None
        known = cluster.metadata.partition(partition.name)
        return None if known is None else known.leader

    def _fill_request(self, partitions: Iterable[_Partition], identity: tuple[int, int]) -> list[_Partition]:
        """Choose the partitions whose batches one request has room for."""
        chosen: list[_Partition] = []
        size = 0
        for partition in partitions:
            partition.fill_batch(identity, self._codec)
            if partition.batch is None:  # none of its messages can be encoded
                del self._pending[partition]
                continue
            size += len(partition.batch.data)
            if chosen and size > _REQUEST_BYTES:
                break
            partition.is_busy = True
            chosen.append(partition)
            # Last from now on: those that this request has no room for come first in the next one.
            del self._pending[partition]
            self._pending[partition] = None
        return chosen

    def _has_unassigned(self, cluster: Cluster | None) -> bool:
        """Move messages to the queues of their partitions; return whether some have no partition yet."""
        for topic, calls in list(self._topics.items()):
            if cluster is not None:
                self._assign_partitions(cluster, topic, calls)
            _drop_given_up(calls)
            if not calls:
                del self._topics[topic]
        return bool(self._topics)

    def _count_partitions(self, cluster: Cluster, topic: str) -> int:
        """Return the number of partitions of a topic; 0 while it is unknown.

        A broker that lags behind may report fewer than there are. They must not be used before that is certain: keys
        would change their partitions.
        """
        count = len(cluster.metadata.partitions(topic))
        if count < self._counts.get(topic, 0):
            now = time.monotonic()
            if now < self._shrunk.setdefault(topic, now) + _TOPIC_TIMEOUT:
                return 0
        self._shrunk.pop(topic, None)
        self._counts[topic] = count
        return count

    def _assign_partitions(self, cluster: Cluster, topic: str, calls: deque[_Call]) -> None:
        """Move messages of a topic to the queues of their partitions, except those whose partition is unknown."""
        count = self._count_partitions(cluster, topic)
        if not count:
            return
        led: Sequence[int] = ()
        unknown: list[_Call] = []
        while calls:
            call = calls.popleft()
            try:
                number = call.message.partition
                if number is None:
                    key = call.message.chosen_by
                    if key is not None:
                        number = _hash(key) % count
                    else:
                        led = led or _led_partitions(cluster, topic) or range(count)
                        number = led[next(self._round_robin[topic]) % len(led)]
                elif not 0 <= number < count:
                    if self._looked_up_at < call.since + _TOPIC_TIMEOUT:
                        unknown.append(call)  # it may be new
                    else:
                        call.fail(_no_partition(call.message, count))
                    continue
                name = TopicPartition(topic, number)
                partition = self._partitions.get(name) or self._partitions.setdefault(name, _Partition(name))
            except (TypeError, ValueError) as error:  # the key or the partition has a wrong type
                call.fail(_not_encoded(call.message, error))
                continue
            partition.waiting.append(call)
            self._pending[partition] = None
        calls.extend(unknown)

    async def _request(self, cluster: Cluster, node: int, partitions: Collection[_Partition]) -> None:
        """Send the batches of these partitions in one request; hold those that must be sent again."""
        batches = {partition.name: partition.batch.data for partition in partitions if partition.batch is not None}
        pause = 0.0
        moved: Collection[TopicPartition] = ()
        answers: Answers[int]
        try:
            response = await _produce(cluster, node, batches)
            pause = max(response.throttle_ms, 0) / 1000
            answers = stored_offsets(response, batches)
            moved = _learn_leaders(cluster, response)
        except WireError as error:
            logger.debug("a request to broker %d failed: %s", node, error)
            answers = Answers({}, dict.fromkeys(batches, error))
        finally:
            self._requests.discard(node)
        for partition in partitions:
            name = partition.name
            partition.apply(answers.values.get(name, UNKNOWN_OFFSET), answers.errors.get(name))
            if partition.batch is None or name in moved:  # it is sent to the new leader immediately
                partition.is_busy = False
            else:
                self._held.append(partition)
        if pause:
            # The broker reads nothing from us for so long. A message that is given up meanwhile must not be sent.
            self._requests.add(node)
            self._throttled.add(node)
            asyncio.get_running_loop().call_later(pause, self._resume, node)
        self._schedule()

    def _resume(self, node: int) -> None:
        """Send to a broker that has throttled us."""
        self._requests.discard(node)
        self._throttled.discard(node)
        self._schedule()

    async def _recover(self) -> None:
        """Get the missing parts: a client, a producer id, leaders of partitions. Then send held batches again."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._recover_at - loop.time())
        self._recover_at = loop.time() + _PAUSE
        held, self._held = self._held, []
        try:
            cluster = await self._connected()
            if self._identity is None:
                await self._identify(cluster)
            await self._look_up(cluster)
        except TransportError as error:
            self._fail_all(error)
        except SettingsError as error:
            self._fail_all(TransportError(str(error)))
        except WireError as error:
            logger.debug("messages wait for the brokers: %s", error)
        finally:
            self._recovering = False
            for partition in held:
                partition.is_busy = False
        self._schedule()

    async def _connected(self) -> Cluster:
        """Return a client that is connected; connect a new one if there is none, or it was lost.

        Raises:
            TransportError: No broker could be reached, or it did not accept us.
            SettingsError: A file with certificates or keys is no longer what it was at the start.
        """
        if self._usable is None:
            self._drop_cluster()
        if self._cluster is None:
            self._cluster = await connect(self._settings)
        return self._cluster

    async def _identify(self, cluster: Cluster) -> None:
        """Get a new producer id; fail all messages if the brokers refuse it.

        Raises:
            WireError: No broker answered, or the answer has an error.
        """
        try:
            self._identity = await _new_identity(cluster)
        except (BrokerError, UnsupportedVersionError) as error:
            if not error.retriable:
                for call in self._unacknowledged():
                    call.fail(publish_error(error.cause, call.message.topic))
            raise

    async def _look_up(self, cluster: Cluster) -> None:
        """Look up the topics of all messages; fail those of missing topics.

        Raises:
            WireError: No broker answered.
        """
        self._refuse_names()
        topics = {*self._topics, *(partition.name.topic for partition in self._pending)}
        await cluster.look_up(topics, create=True)
        now = time.monotonic()
        self._looked_up_at = now
        denied = cluster.metadata.denied
        missing = cluster.metadata.missing
        for topic in topics:
            if topic in denied:
                error: TransportError = publish_error(error_for(TOPIC_DENIED, topic).cause, topic)
            elif cluster.metadata.partitions(topic) and topic not in missing:
                self._missing.pop(topic, None)
                continue
            elif now > self._missing.setdefault(topic, now) + _TOPIC_TIMEOUT:
                error = missing_topic(topic, _TOPIC_TIMEOUT)
            else:
                continue
            self._forget(cluster, topic)
            for call in self._unacknowledged():
                if call.message.topic == topic:
                    call.fail(error)

    def _forget(self, cluster: Cluster, topic: str) -> None:
        """Know nothing of a topic any more; the numbers of its partitions stay."""
        cluster.forget(topic)
        self._missing.pop(topic, None)
        self._counts.pop(topic, None)
        self._shrunk.pop(topic, None)

    def _refuse_names(self) -> None:
        """Fail the messages for topics that no look-up can name; it would fail for all topics."""
        for topic, calls in list(self._topics.items()):
            name: object = topic
            if not isinstance(name, str) or not TOPIC_NAME.fullmatch(name):
                del self._topics[topic]
                for call in calls:
                    call.fail(_not_encoded(call.message))

    # Ends -------------------------------------------------------------------------------

    def _start(self, sending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(sending, name="send to brokers")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail_all(ClientLostError(f"the Kafka producer ended by itself ({_reason(error)})"))
            self._drop_cluster()
            # Requests that are still in flight know the old partitions only.
            self._partitions = {name: partition.successor() for name, partition in self._partitions.items()}
            self._pending.clear()
            self._held.clear()

    def _drop_cluster(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            closing = asyncio.create_task(cluster.close(), name="close connections to brokers")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _unacknowledged(self) -> list[_Call]:
        calls = [*itertools.chain(*self._topics.values())]
        for partition in self._pending:
            if partition.batch is not None:
                calls += partition.batch.calls
            calls += partition.waiting
        return calls

    def _fail_all(self, error: TransportError) -> None:
        for call in self._unacknowledged():
            call.fail(error)

    def _given_up(self, message: Message, since: float) -> TransportError:
        """Return the error of a message that was not acknowledged in time."""
        if self._throttled:
            return TransportError(
                f"a message for topic {message.topic!r} was not acknowledged within {_PATIENCE:g} s: {_THROTTLED}"
            )
        if self._acknowledged_at > since:
            return TransportError(
                f"a message for topic {message.topic!r} was not acknowledged within {_PATIENCE:g} s, while others "
                "were: check that its partition has a leader and enough replicas in sync"
            )
        self._drop_cluster()  # The next one starts over with the bootstrap addresses.
        return nothing_acknowledged(self._settings.bootstrap_servers, _PATIENCE)


async def _produce(cluster: Cluster, node: int, batches: Mapping[TopicPartition, bytes]) -> Any:
    """Send batches to a broker in one request, and return the response.

    Raises:
        _NotSentError: The connection to the broker was not opened.
        UnsupportedVersionError: The broker speaks no version of the request that we speak.
        WireError: The broker did not answer; it may have stored the batches.
    """
    try:
        await cluster.connect_to(node, purpose=Purpose.PRODUCE)
    except WireError as error:
        raise _NotSentError(str(error)) from error
    parts = by_topic(batches, lambda name: {"partition": name.partition, "records": batches[name]})
    request = PRODUCE(
        transactional_id=None,
        acks=-1,
        timeout_ms=round(_REQUEST_TIMEOUT * 1000),
        topics=[{"topic": topic, "partitions": partitions} for topic, partitions in parts],
    )
    return await cluster.ask(node, request, purpose=Purpose.PRODUCE, timeout=_REQUEST_TIMEOUT)


def _learn_leaders(cluster: Cluster, response: Any) -> set[TopicPartition]:
    """Accept the leaders that a broker names beside errors; return the partitions whose leader is news."""
    for endpoint in response.endpoints or ():
        cluster.learn_broker(Broker(*endpoint))
    leaders = named_leaders(response)
    return {name for name, leader in leaders.items() if cluster.metadata.learn_leader(name, leader)}


def _led_partitions(cluster: Cluster, topic: str) -> list[int]:
    """Return the partitions of a topic that have a leader."""
    partitions = cluster.metadata.partitions(topic)
    return sorted(number for number, known in partitions.items() if known.leader is not None)


async def _new_identity(cluster: Cluster) -> tuple[int, int]:
    """Request a new producer id and its epoch; any broker issues them.

    Raises:
        WireError: No broker answered, or the answer has an error.
    """
    request = INIT_PRODUCER_ID(
        transactional_id=None, timeout_ms=_TRANSACTION_TIMEOUT_MS, producer_id=_NO_ID, epoch=_NO_EPOCH
    )
    return new_producer_id(await cluster.ask_any(request))


def _drop_given_up(calls: deque[_Call]) -> None:
    while calls and calls[0].acknowledged.done():
        calls.popleft()


def _closed_error() -> ClientLostError:
    return ClientLostError("the Kafka producer is closed")


def _refused(error: WireError, message: Message, *, is_in_doubt: bool = False) -> TransportError:
    """Return the error of a message that a broker does not take.

    Args:
        error: From the broker.
        message: The message.
        is_in_doubt: Whether an earlier attempt may have stored it. The error is then retriable, as for any message
            whose fate is unknown.
    """
    code = error.code
    if code in _TOO_LARGE:
        refused: TransportError = MessageTooLargeError(
            f"a message of {_size(message)} bytes is too large for topic {message.topic!r}: raise max.message.bytes of "
            "the topic, or publish smaller messages"
        )
    else:
        refused = publish_error(error.cause, message.topic)
        if not isinstance(refused, AuthorizationError):
            refused.retriable = code not in _FINAL
    if is_in_doubt:
        return type(refused)(f"{refused}; an earlier attempt may have stored the message", retriable=True)
    return refused


def _not_encoded(message: Message, error: Exception | None = None) -> TransportError:
    why = unwritable(message) or (f"it cannot be encoded ({_reason(error)})" if error else "it cannot be encoded")
    return TransportError(f"a message for topic {message.topic!r} was not published: {why}", retriable=False)


def _reason(error: BaseException) -> str:
    """Return an error's text without the final full stop, or its class name if it has no text."""
    return str(error).strip().rstrip(".") or type(error).__name__


def _no_partition(message: Message, count: int) -> TransportError:
    return TransportError(
        f"topic {message.topic!r} has partitions 0 to {count - 1} and not {message.partition}: add partitions to it",
        retriable=False,
    )


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
