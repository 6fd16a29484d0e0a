"""The producer port on our own client.

aiokafka's producer does not fit: after a broker has refused a batch, its partition accepts nothing more, and a batch
that nobody waits for is retried forever.
"""

import asyncio
import copy
import itertools
import logging
import time
from collections import deque
from collections.abc import Collection, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from aioshard.errors import ClientLostError, MessageTooLargeError, SettingsError, TransportError
from aioshard.kafka.batches import BatchBuilder, Compression, Identity, codec_number, message_size, timestamp_ms
from aioshard.kafka.errors import TOPIC_DENIED, missing_topic, nothing_acknowledged, publish_error, reason_of
from aioshard.kafka.partitioning import Partitioner
from aioshard.kafka.produce import (
    REQUEST_BYTES,
    TOPIC_TIMEOUT,
    Verdict,
    learn_leaders,
    no_partition,
    not_encoded,
    produce,
    refused,
    verdict,
)
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.codes import error_for
from aioshard.kafka.wire.connection import CLOSE_GRACE
from aioshard.kafka.wire.errors import BrokerError, UnsupportedVersionError, WireError
from aioshard.kafka.wire.requests import INIT_PRODUCER_ID
from aioshard.kafka.wire.responses import Answers, new_producer_id, stored_offsets
from aioshard.kafka.wire.start import connect, new_cluster
from aioshard.ports import MOST_MESSAGE_BYTES, UNKNOWN_OFFSET, Message
from aioshard.records import TOPIC_NAME, TopicPartition
from aioshard.settings import Settings

logger = logging.getLogger("aioshard.kafka.producer")

_PATIENCE = 30.0
"""Seconds after which an unacknowledged message fails."""
_PAUSE = 0.1
"""Seconds until a batch is sent again, or a topic is looked up again."""
_QUIET = 5.0
"""Seconds that a message may wait before `trouble` reports it."""
_NO_ID = -1
_NO_EPOCH = -1
_TRANSACTION_TIMEOUT_MS = 60_000
"""Part of the request; brokers ignore it without a transactional id."""
_THROTTLED = "brokers delay this client, because it exceeds its produce quota: publish less, or raise the quota"

_MOST_SEQUENCE = 2**31
_LAST_EPOCH = 2**15 - 1

# Partitions --------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Call:
    """A message, and the future of its offset."""

    message: Message
    since: float
    """When it was accepted, by `time.monotonic`."""
    due: float
    """Loop time at which it is given up."""
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
    identity: Identity | None = None
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

    def fill_batch(self, newest: Identity, codec: int) -> None:
        """Make a batch of waiting messages, unless the previous one must be sent again.

        A message that cannot be encoded fails alone; if no other waits, no batch is made.
        """
        if self.batch is not None:
            return
        identity = self._batch_identity(newest)  # it may begin the sequence numbers again
        builder = BatchBuilder(identity, self.sequence, codec)
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
                accepted = call.since + ahead
                try:
                    # As `timestamp_ms`, without a call for each message.
                    timestamp = int(accepted * 1000) if message.timestamp is None else timestamp_ms(message, accepted)
                    fits = builder.add(message, timestamp)
                except Exception as error:  # noqa: BLE001 - the encoder reports what it cannot encode in many ways
                    call.fail(not_encoded(message, error))
                else:
                    if not fits:
                        break
                    calls.append(call)
            waiting.popleft()
        if calls:
            self.batch = _Batch(calls, builder.build())

    def _batch_identity(self, newest: Identity) -> Identity:
        """Return the identity of the next batch.

        It has the newest producer id only if there is none, or no epoch is left: a new id fences no late copies.
        """
        if self.identity is None or self.needs_new_id:
            self.identity = newest
            self.epoch = newest.epoch
            self.sequence = 0
        return Identity(self.identity.producer_id, self.epoch)

    def apply(self, offset: int, error: WireError | None) -> bool:
        """Act on the answer to the batch; return whether it is stored. It stays if it must be sent again."""
        batch = self.batch
        assert batch is not None  # noqa: S101 - it was sent
        match verdict(error):
            case Verdict.STORED:
                self._acknowledge(batch, offset)
                return True
            case Verdict.AGAIN:
                pass
            case Verdict.IN_DOUBT:
                batch.is_in_doubt = True
            case Verdict.SUSPECT if not batch.is_suspect:
                batch.is_suspect = True
                batch.is_in_doubt = True
            case refusal:
                assert error is not None  # noqa: S101 - it is not stored
                self.batch = None
                self._give_up(batch, refusal, error)
        return False

    def _give_up(self, batch: _Batch, refusal: Verdict, error: WireError) -> None:
        """Fail the messages of a batch that the broker does not take, or put them back."""
        if batch.is_in_doubt:
            # 1. Perhaps an earlier attempt has stored it. Only its callers may send it again; its numbers are spent.
            for call in batch.calls:
                call.fail(refused(error, call.message, is_in_doubt=True))
        elif refusal in (Verdict.GAP, Verdict.FENCED) and not self.is_renewed:
            # 2. Nothing is stored, and the reason is not the messages: send them again, in a new epoch.
            self._put_back(batch)
            self.is_renewed = True
        elif refusal is Verdict.MESSAGE_REFUSED and len(batch.calls) > 1:
            # 3. Nothing is stored, and one of the messages may be the reason: look for it in each half.
            half = (len(batch.calls) + 1) // 2
            self._put_back(batch)
            self.sizes.extendleft((len(batch.calls) - half, half))
        else:
            # 4. Nothing is stored.
            for call in batch.calls:
                call.fail(refused(error, call.message))
        if refusal is Verdict.FENCED:
            self.epoch = _LAST_EPOCH + 1  # no epoch of this producer id is certainly later than that of the broker
        elif refusal is Verdict.GAP or batch.is_in_doubt:
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
        self._codec = codec_number(compression)
        self._settings = settings
        new_cluster(settings)
        self._cluster: Cluster | None = None
        """Connected; None before the first message, and after it was lost."""
        self._closed = False
        self._identity: Identity | None = None
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
        self._partitioner = Partitioner()
        self._next_due: asyncio.TimerHandle | None = None
        """Fires when the oldest message may be overdue: one timer for all."""
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
        return await self.send(message)

    def send(self, message: Message) -> asyncio.Future[int]:
        """Send a message after those sent before it; return the future of its offset.

        The future raises the errors of `publish`.
        """
        if self._closed:
            raise _closed_error()
        loop = asyncio.get_running_loop()
        call = _Call(message, time.monotonic(), loop.time() + _PATIENCE, loop.create_future())
        try:
            size = message_size(message)
        except (TypeError, ValueError) as error:  # its parts have no length
            call.fail(not_encoded(message, error))
            return call.acknowledged
        if size > MOST_MESSAGE_BYTES:
            call.fail(
                MessageTooLargeError(
                    f"a message of {size} bytes for topic {message.topic!r} does not fit into one request of at most "
                    f"{MOST_MESSAGE_BYTES} bytes: publish smaller messages"
                )
            )
        else:
            self._topics.setdefault(message.topic, deque()).append(call)
            self._schedule()
            if self._next_due is None:
                self._next_due = loop.call_at(call.due, self._give_up_overdue)
        return call.acknowledged

    async def close(self) -> None:
        """See `Producer.close`; takes at most 2 s."""
        self._closed = True
        self._fail_all(_closed_error())
        if self._next_due is not None:
            self._next_due.cancel()
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

    def _fill_request(self, partitions: Iterable[_Partition], identity: Identity) -> list[_Partition]:
        """Choose the partitions whose batches one request has room for."""
        chosen: list[_Partition] = []
        size = 0
        for partition in partitions:
            partition.fill_batch(identity, self._codec)
            if partition.batch is None:  # none of its messages can be encoded
                del self._pending[partition]
                continue
            size += len(partition.batch.data)
            if chosen and size > REQUEST_BYTES:
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

    def _assign_partitions(self, cluster: Cluster, topic: str, calls: deque[_Call]) -> None:
        """Move messages of a topic to the queues of their partitions, except those whose partition is unknown."""
        metadata = cluster.metadata
        count = self._partitioner.count(metadata, topic)
        if not count:
            return
        choose = self._partitioner.choose
        unknown: list[_Call] = []
        while calls:
            call = calls.popleft()
            message = call.message
            try:
                number = choose(metadata, message, count)
                if message.partition is not None and not 0 <= number < count:
                    if self._looked_up_at < call.since + TOPIC_TIMEOUT:
                        unknown.append(call)  # it may be new
                    else:
                        call.fail(no_partition(message, count))
                    continue
                name = TopicPartition(topic, number)
                partition = self._partitions.get(name) or self._partitions.setdefault(name, _Partition(name))
            except (TypeError, ValueError) as error:  # the key or the partition has a wrong type
                call.fail(not_encoded(message, error))
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
            response = await produce(cluster, node, batches)
            pause = max(response.throttle_ms, 0) / 1000
            answers = stored_offsets(response, batches)
            moved = learn_leaders(cluster, response)
        except WireError as error:
            logger.debug("a request to broker %d failed: %s", node, error)
            answers = Answers({}, dict.fromkeys(batches, error))
        finally:
            self._requests.discard(node)
        for partition in partitions:
            name = partition.name
            if partition.apply(answers.values.get(name, UNKNOWN_OFFSET), answers.errors.get(name)):
                self._acknowledged_at = time.monotonic()
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
            elif now > self._missing.setdefault(topic, now) + TOPIC_TIMEOUT:
                error = missing_topic(topic, TOPIC_TIMEOUT)
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
        self._partitioner.forget(topic)

    def _refuse_names(self) -> None:
        """Fail the messages for topics that no look-up can name; it would fail for all topics."""
        for topic, calls in list(self._topics.items()):
            name: object = topic
            if not isinstance(name, str) or not TOPIC_NAME.fullmatch(name):
                del self._topics[topic]
                for call in calls:
                    call.fail(not_encoded(call.message))

    # Ends -------------------------------------------------------------------------------

    def _start(self, sending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(sending, name="send to brokers")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail_all(ClientLostError(f"the Kafka producer ended by itself ({reason_of(error)})"))
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

    def _give_up_overdue(self) -> None:
        """Fail the messages that were not acknowledged in time, and look again when the next one is due."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._next_due = None
        waiting = [call for call in self._unacknowledged() if not call.acknowledged.done()]
        for call in waiting:
            if call.due <= now:
                call.fail(self._given_up(call))
        next_due = min((call.due for call in waiting if call.due > now), default=None)
        if next_due is not None:
            self._next_due = loop.call_at(next_due, self._give_up_overdue)

    def _given_up(self, call: _Call) -> TransportError:
        """Return the error of a message that was not acknowledged in time."""
        topic = call.message.topic
        if self._throttled:
            return TransportError(
                f"a message for topic {topic!r} was not acknowledged within {_PATIENCE:g} s: {_THROTTLED}"
            )
        if self._acknowledged_at > call.since:
            return TransportError(
                f"a message for topic {topic!r} was not acknowledged within {_PATIENCE:g} s, while others "
                "were: check that its partition has a leader and enough replicas in sync"
            )
        self._drop_cluster()  # The next one starts over with the bootstrap addresses.
        return nothing_acknowledged(self._settings.bootstrap_servers, _PATIENCE)


async def _new_identity(cluster: Cluster) -> Identity:
    """Request a new producer id and its epoch; any broker issues them.

    Raises:
        WireError: No broker answered, or the answer has an error.
    """
    request = INIT_PRODUCER_ID(
        transactional_id=None, timeout_ms=_TRANSACTION_TIMEOUT_MS, producer_id=_NO_ID, epoch=_NO_EPOCH
    )
    return Identity(*new_producer_id(await cluster.ask_any(request)))


def _drop_given_up(calls: deque[_Call]) -> None:
    while calls and calls[0].acknowledged.done():
        calls.popleft()


def _closed_error() -> ClientLostError:
    return ClientLostError("the Kafka producer is closed")
