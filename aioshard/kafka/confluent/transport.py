"""The confluent-kafka transport: a group member that, in a rebalance, loses only the partitions that move."""

import asyncio
import logging
import math
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import anyio
from confluent_kafka import KafkaError, KafkaException

from aioshard import timeouts
from aioshard.errors import ClientLostError, CommitRefusedError, SettingsError, TopicRecreatedError, TransportError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.confluent.buffers import Buffers
from aioshard.kafka.confluent.consumer import Callbacks, ConsumerThread, membership_of
from aioshard.kafka.confluent.options import connection_options, consumer_options, share_of_buffer
from aioshard.kafka.confluent.transactions import Transactions
from aioshard.kafka.confluent.translate import cause_of, group_error, is_final, reason
from aioshard.kafka.groupless import manual_membership
from aioshard.kafka.transport import KafkaTransport
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.pool import CONNECT_TIMEOUT
from aioshard.ports import (
    NOT_A_MEMBER,
    ChosenProtocol,
    Committed,
    GroupListener,
    LogRange,
    Membership,
    Message,
)
from aioshard.records import TopicPartition
from aioshard.settings import Settings

logger = logging.getLogger("aioshard.kafka.confluent.transport")

_RETRY_PAUSE = 0.05
"""Seconds until a change that the client could not make is retried."""
_CHECK_INTERVAL = 1.0
"""Seconds between two checks of log ends, topics and stale members."""
_CHECK_INTERVAL_PER_PARTITION = 0.005
"""Seconds per partition, at least, between two checks of the ids of topics: the answer takes a while to decode."""
_REPORTED_ELSEWHERE = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._PARTITION_EOF})  # noqa: SLF001 - its names
_NO_TOPIC = "^aioshard has found no topic$"
"""A subscription that matches no topic; joining the group with it yields an empty assignment."""


class ConfluentTransport(KafkaTransport):
    """A member of a consumer group through confluent-kafka; implements `aioshard.ports.Transport`.

    A thread calls the client, one call at a time: reads, commits between them, and everything that a rebalance callback
    needs. Queries do not wait for the thread: they use our own client. librdkafka's queries also do not recover from a
    broker restart, because they keep sending the old leader epoch.

    Invariants:
        * `poll` returns nothing of a partition before the engine has seeked and resumed it.
        * Commits are sent only for partitions that are ours at that moment. Unanswered ones are resolved before we
          release their partitions, so nothing is sent for those later.
        * Partitions kept in a rebalance stay buffered, and `poll` returns their records even while others drain.
    """

    _buffer: Buffers

    def __init__(self, settings: Settings, group_id: str, transactional_id: str = "") -> None:
        """Check the options; connects to nothing yet.

        Args:
            settings: The settings of the app.
            group_id: The consumer group.
            transactional_id: The same for every client of an app, and different from those of other processes.

        Raises:
            SettingsError: TLS and SASL settings cannot work.
        """
        # Computed timeouts stay as they are, although they depend on the client.
        computed = {name: getattr(settings, name) for name in timeouts.DEFAULTS} if settings.assign is None else {}
        queries = settings.replace(
            client="aiokafka",
            client_options={},
            group_protocol="auto",
            processing_guarantee="at_least_once",
            **computed,
        )
        super().__init__(queries, group_id)
        self._consumer_options = consumer_options(settings, group_id)
        self._buffer = Buffers(0)
        self._consumer: ConsumerThread | None = None
        self._is_classic = settings.group_protocol == "classic"
        self._is_protocol_given = "group_protocol" in settings.model_fields_set
        self._transactions: Transactions | None = None
        """Set with exactly-once processing."""
        if settings.processing_guarantee == "exactly_once":
            self._transactions = Transactions(
                connection_options(settings), transactional_id, group_id, settings.transaction_timeout
            )
        self._failure: TransportError | None = None
        """The error that ends this life of the client; `poll` raises it."""
        self._readable = asyncio.Event()
        """Set when `poll` must check again."""
        self._topic_ids: dict[str, uuid.UUID] = {}
        """The id of each assigned topic to whose log our positions belong."""
        self._pattern: re.Pattern[str] | None = None
        self._subscribed: frozenset[str] = frozenset()
        self._looked_up_at = 0.0
        self._member_id = ""
        self._stale_members: list[str] = []
        """Ids that the client dropped when it heard nothing from the brokers for a session. Brokers that come back give
        such a member another session, and the whole group would wait for it."""
        self._removes_stale_members = settings.group_protocol == "classic" and settings.group_instance_id is None
        """False for a static member, which reclaims its own id, and under KIP-848, where the client keeps its id."""

    # Lifecycle ------------------------------------------------------------------------

    async def _join(self, pattern: str | None, listener: GroupListener) -> None:
        """Join the group. Matches patterns itself, every `metadata_max_age`."""
        self._pattern = None if pattern is None else re.compile(pattern)
        try:
            consumer = self._consumer = ConsumerThread(
                self._consumer_options,
                self._group_id,
                self._settings.session_timeout,
                Callbacks(self._check_commit, self._on_assigned, self._on_revoked, self._fail),
            )
        except (KafkaException, ValueError, TypeError) as error:
            raise SettingsError(f"the Kafka client refused an option: {reason(error)}") from error
        if self._settings.assign is None:
            names = self._subscribed = await self._look_up_topics()
            existing = frozenset([name for name in names - {_NO_TOPIC} if await self.partitions(name)])
            if self._settings.group_protocol == "classic" and self._settings.group_instance_id is not None:
                await self._give_up_outdated_place(self._settings.group_instance_id, existing)
            await consumer.call(consumer.subscribe, names)
            if not existing:
                listener.assigned((), self._membership)  # the client does not join the group before a topic exists
        else:
            assigned = await self._manual_assignment()
            await consumer.call(consumer.assign, assigned)
            await self._on_assigned(assigned, manual_membership())
        self._tasks += [
            asyncio.create_task(self._until_lost(work, consumer), name=f"{work.__name__} of {self._group_id}")
            for work in (self._read, self._check_brokers)
        ]
        self._tasks.append(asyncio.create_task(self._watch_topic_ids(), name=f"topic ids of {self._group_id}"))
        if self._settings.assign is None and self._is_classic:
            self._tasks.append(asyncio.create_task(self._watch_joins(), name=f"joins of {self._group_id}"))

    async def _give_up_outdated_place(self, instance_id: str, topics: frozenset[str]) -> None:
        """Leave the group for our predecessor if it subscribed to other topics, so that we join as a new member.

        Otherwise, the broker would give us its partitions without a rebalance: nobody would read our new topics, and we
        would get partitions of topics that we no longer read.
        """
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT), KafkaAdmin(self._settings) as admin:
                group = await admin.classic_members(self._group_id)
                predecessor = group.instances.get(instance_id)
                if predecessor is not None and group.is_stable and group.members[predecessor].topics != topics:
                    await admin.remove_member(self._group_id, instance_id=instance_id)
        except (TransportError, TimeoutError) as error:
            logger.info("the subscription from before a restart is unknown: %s", reason(error))

    def subscribe(self, topics: Collection[str], pattern: str | None) -> None:  # noqa: ARG002
        """See `Transport.subscribe`; takes effect within a second or two."""
        self._check_running()
        self._topics = frozenset(topics)
        self._looked_up_at = -math.inf
        self._follow_topics()

    async def _leave(self) -> None:
        if self._consumer is not None:
            await asyncio.wrap_future(self._consumer.stop())

    def _end_assignment(self) -> None:
        self._buffer.remove(self._buffer.partitions)
        self._membership = NOT_A_MEMBER

    async def _tear_down(self) -> None:
        if self._consumer is not None:
            self._consumer.stop()
        if self._transactions is not None:
            await self._transactions.close()
        await super()._tear_down()

    # Background work ------------------------------------------------------------------

    async def _until_lost(self, work: Callable[[ConsumerThread], Awaitable[None]], consumer: ConsumerThread) -> None:
        """Run background work that must last as long as the client."""
        try:
            await work(consumer)
        except Exception as error:  # noqa: BLE001 - the next poll raises any error
            if not self._closed:
                self._fail(error)

    async def _read(self, consumer: ConsumerThread) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if seconds := self._buffer.crowded(loop.time()):
                self._buffer.room.clear()
                with anyio.move_on_after(seconds):
                    await self._buffer.room.wait()
                continue
            messages, failed = await consumer.call(consumer.read, self._buffer.changes(loop.time()))
            for change in failed:
                self._buffer.not_changed(change)
            if messages:
                for message in self._buffer.accept(messages, loop.time()):
                    self._note_error(message)
                self._readable.set()
            if failed:
                await asyncio.sleep(_RETRY_PAUSE)  # the client does not know a new partition yet

    async def _check_brokers(self, consumer: ConsumerThread) -> None:
        """Remove stale members, fetch the ends of logs, and look for new topics, once a second."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL)
            # librdkafka reports a lost membership only to members that had partitions.
            self._note_member(await consumer.call(consumer.membership))
            try:
                await self._remove_stale_members()  # outside the timeout: brokers that come back are slow
                async with asyncio.timeout(2 * _CHECK_INTERVAL):
                    await self.log_ranges(self._buffer.behind())
                    names = self._subscribed
                    if self._settings.assign is None and time.monotonic() >= (
                        self._looked_up_at + self._settings.metadata_max_age
                    ):
                        names = await self._look_up_topics()
            except (TransportError, TimeoutError) as error:
                logger.debug("the brokers did not answer a periodic query: %s", reason(error))
                continue
            if names != self._subscribed:
                await consumer.call(consumer.subscribe, names)
                self._subscribed = names

    async def _look_up_topics(self) -> frozenset[str]:
        """Look up the topics to subscribe to.

        Patterns are Python's and match a whole name. librdkafka has a different pattern language, and KIP-848 uses the
        broker's, so the client gets only names.
        """
        self._looked_up_at = time.monotonic()
        names = self._topics
        if self._pattern is not None:
            names |= {name for name in await self.topics() if self._pattern.fullmatch(name)}
        return names or frozenset([_NO_TOPIC])

    def _note_member(self, membership: Membership) -> None:
        """Note the client's current member id; if it has changed, the previous one is stale."""
        if self._removes_stale_members and self._member_id not in ("", membership.member_id):
            self._stale_members.append(self._member_id)
            self._member_id = ""

    async def _remove_stale_members(self) -> None:
        while self._stale_members:
            try:
                await self._remove_member(self._stale_members[0])
            except TransportError as error:
                if error.retriable:
                    raise
                logger.debug("a stale member stays in the group until its session expires: %s", reason(error))
            del self._stale_members[0]

    async def _remove_member(self, member_id: str) -> None:
        """Remove a member from the group. Succeeds also if the group does not have that member.

        Raises:
            TransportError: The request failed; retriable if the cause may be transient.
        """
        async with KafkaAdmin(self._settings) as admin:
            await admin.remove_member(self._group_id, member_id)

    async def _watch_topic_ids(self) -> None:
        """Check the ids of topics until cancelled; the client notices no topic that is deleted and created again."""
        while True:
            interval = _CHECK_INTERVAL_PER_PARTITION * len(self._buffer.partitions)
            await asyncio.sleep(max(_CHECK_INTERVAL, interval))
            try:
                await self._check_topic_ids()
            except WireError as error:
                logger.debug("the brokers did not return the ids of topics: %s", error)

    async def _check_topic_ids(self) -> None:
        """Find topics that were deleted and created again since the last check.

        Raises:
            WireError: The brokers did not answer.
        """
        topics = {partition.topic for partition in self._buffer.partitions}
        # A topic that is assigned later gets its positions from the log that it has then.
        self._topic_ids = {topic: topic_id for topic, topic_id in self._topic_ids.items() if topic in topics}
        if not topics:
            return
        await self._cluster.look_up(topics)
        for topic in topics:
            topic_id = self._cluster.metadata.topic_id(topic)
            if topic_id is None:
                continue
            known = self._topic_ids.get(topic)
            self._topic_ids[topic] = topic_id
            if known not in (None, topic_id):
                self._report_recreated(topic)

    def _report_recreated(self, topic: str) -> None:
        """Report the partitions of a topic whose positions belong to an old log; drop what was read from it."""
        for partition in self._buffer.partitions:
            position = self._buffer.position(partition)
            if partition.topic == topic and position is not None:
                self._buffer.fail(partition, TopicRecreatedError(partition, position))
        self._check_again()

    # Errors ---------------------------------------------------------------------------

    def _fail(self, error: Exception | KafkaError) -> None:
        """Record an error after which nothing can be read; only the first one counts."""
        if self._failure is None:
            settings = self._settings
            self._failure = group_error(error, self._group_id, settings.group_instance_id, settings.session_timeout)
        self._readable.set()

    def _note_error(self, message: Any) -> None:
        """Handle an error message that does not belong to an assigned partition."""
        error: KafkaError = message.error()
        topic: str | None = message.topic()
        if topic and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            self._fail(self._group_error(cause_of(error, [topic])))
        elif is_final(error):
            self._fail(error)
        elif error.code() not in _REPORTED_ELSEWHERE:
            logger.warning("the Kafka client reports: %s", reason(error))

    # Records --------------------------------------------------------------------------

    def _raise_loss(self) -> None:
        if self._closed or self._consumer is None:
            raise ClientLostError("the Kafka client is closed, or was not started")
        if self._failure is not None:
            raise self._failure
        failure = self._cluster.failure  # queries would never learn of another leader
        if failure is not None:
            raise ClientLostError(f"the Kafka client failed ({reason(failure)}); a new client is needed") from failure

    async def _wait_for_records(self, seconds: float) -> None:
        self._readable.clear()
        with anyio.move_on_after(seconds):
            await self._readable.wait()

    def _check_again(self, _ended: object = None) -> None:
        self._readable.set()
        self._buffer.room.set()

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """See `Transport.log_ranges`; remembers the ends."""
        ranges = await super().log_ranges(partitions)
        for partition, log_range in ranges.items():
            self._buffer.note_end(partition, log_range.end)
        return ranges

    # The group ------------------------------------------------------------------------

    async def _own_member_id(self) -> str:
        return "" if self._consumer is None else (await self._consumer.call(self._consumer.membership)).member_id

    async def _commit_as_member(
        self,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: Sequence[Message] | None,
    ) -> None:
        if self._consumer is None:
            return
        if self._transactions is None:
            await self._consumer.commit(offsets, membership)
            return
        metadata = await self._consumer.call(self._consumer.group_metadata)
        self._check_commit(offsets, membership)
        now = membership_of(metadata)
        # Under KIP-848 the generation rises without a new assignment; brokers accept the client's own. While we hand
        # partitions over, the client is a generation ahead, and they are still ours.
        must_agree = self._is_classic and self._released.is_set()
        if now.member_id != membership.member_id or (must_agree and now != membership):
            raise CommitRefusedError(f"a commit of group {self._group_id!r} was not sent: the group has rebalanced")
        await self._transactions.commit(messages or (), offsets, metadata)

    @property
    def group_protocol(self) -> ChosenProtocol | None:
        """See `Transport.group_protocol`. There is no choice: `Settings` decides."""
        if self._settings.assign is not None:
            return None
        reason = "group_protocol is set" if self._is_protocol_given else "it is the default of client='confluent'"
        return ChosenProtocol("classic" if self._is_classic else "consumer", reason)

    @property
    def hang(self) -> str | None:
        """See `Transport.hang`."""
        return None if self._transactions is None else self._transactions.hang

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """See `Transport.committed`; with transactions, only offsets that no open transaction may change."""
        if self._transactions is not None:
            await self._transactions.settle()
        return await super().committed(partitions)

    async def _on_assigned(self, partitions: list[TopicPartition], membership: Membership) -> None:
        """Pass our whole current assignment to the engine."""
        if self._listener is None or self._closed:
            return
        self._buffer.add(partitions)
        # Half is for our buffers, the rest for the client's single queue.
        self._buffer.share = share_of_buffer(len(self._buffer.partitions), self._settings.max_buffered_bytes // 2)
        self._membership = membership
        self._note_member(membership)
        self._member_id = membership.member_id
        self._listener.assigned(self._buffer.partitions, membership)

    async def _on_revoked(self, partitions: list[TopicPartition], lost: bool) -> None:
        """Tell the engine that partitions are being revoked; the group waits, and partitions we keep continue."""
        if self._consumer is None:
            return
        if self._listener is None or self._closed:
            self._consumer.end_revocation()
            return
        self._released.clear()
        self._buffer.pause(partitions)
        try:
            if lost:
                self._membership = NOT_A_MEMBER
                self._listener.lost(partitions)
            else:
                await self._listener.revoked(partitions)
                if self._transactions is not None:  # no transaction may end after we have released the partitions
                    with anyio.fail_after(self._settings.commit_timeout):
                        await self._transactions.settle()
        except Exception as error:  # noqa: BLE001 - the next poll raises it
            self._fail(error)
        finally:
            # In one step: the callback makes the calls queued so far; later commits of these partitions are refused.
            self._buffer.remove(partitions)
            self._consumer.end_revocation()
            self._released.set()
            self._readable.set()
