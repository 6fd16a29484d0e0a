"""The transport on aiokafka: membership, records and commits of one consumer in its group."""

import asyncio
import inspect
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka import errors as kafka
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

from aioshard.errors import (
    AuthorizationError,
    ClientLostError,
    CommitRefusedError,
    OffsetOutOfRangeError,
    SettingsError,
    StateError,
    TransportError,
)
from aioshard.kafka.connecting import why_unreachable
from aioshard.kafka.internals import Chunk, FetchResult, Internals
from aioshard.kafka.security import security_options
from aioshard.kafka.translate import commit_error, corrupt_record, group_error, reason, request_error
from aioshard.ports import (
    NOT_A_MEMBER,
    AllowanceOf,
    Batch,
    Committed,
    Fault,
    GroupListener,
    LogRange,
    Membership,
    Oversized,
)
from aioshard.records import TopicPartition

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["AiokafkaTransport"]

log = logging.getLogger("aioshard.kafka")

RECORDS_PER_PARTITION = 500
"""Records of one partition that one poll hands out at most: more live objects cost time per record."""
LEAST_PREFETCH = 16 * 1024
MOST_PREFETCH = 1024 * 1024
"""Bytes that one fetch may bring of one partition; a broker returns at least one batch of any size."""
FAULT_INTERVAL = 1.0
"""Seconds until a partition that cannot be read is tried, and reported, again."""
RETRY_BACKOFF = 0.1
"""Seconds between two attempts of a question to the brokers."""

_NEVER_MS = 10**15
"""The client leaves the group when nobody calls `getmany` for so long; we never do."""

_OURS = frozenset(
    {
        "auto_offset_reset",
        "bootstrap_servers",
        "client_id",
        "enable_auto_commit",
        "fetch_max_bytes",
        "fetch_max_wait_ms",
        "group_id",
        "group_instance_id",
        "heartbeat_interval_ms",
        "isolation_level",
        "key_deserializer",
        "loop",
        "max_partition_fetch_bytes",
        "max_poll_interval_ms",
        "max_poll_records",
        "metadata_max_age_ms",
        "partition_assignment_strategy",
        "rebalance_timeout_ms",
        "sasl_mechanism",
        "sasl_plain_password",
        "sasl_plain_username",
        "security_protocol",
        "session_timeout_ms",
        "topics",
        "value_deserializer",
    }
)
"""Options that aioshard sets itself, from its own settings or because its guarantees need them so."""


class AiokafkaTransport:
    """A member of a consumer group through aiokafka 0.14; implements `aioshard.ports.Transport`.

    One instance is one life of the client: after `close`, or after `poll` raised, build a new one.

    Invariants:
        * Nothing is handed out of a partition before the engine has seeked and resumed it, nor while
          the group rebalances.
        * The client never chooses or resets a position, never commits on its own, and never leaves
          the group because nobody polls.
    """

    def __init__(self, settings: "Settings", group_id: str) -> None:
        """Check the options; connects to nothing.

        Raises:
            SettingsError: An option for the client is unknown or not for the user to set, or TLS and
                SASL settings cannot work.
        """
        self._settings = settings
        self._group_id = group_id
        self._read_committed = settings.isolation_level == "read_committed"
        self._options = _consumer_options(settings, group_id)
        self._topics: frozenset[str] = frozenset()
        self._internals: Internals | None = None
        self._listener: GroupListener | None = None
        self._listener_failure: Exception | None = None
        self._listener_done: asyncio.Event = asyncio.Event()
        self._listener_done.set()
        self._closed = False
        self._membership = NOT_A_MEMBER
        self._assignment: Any = None
        self._states: dict[TopicPartition, Any] = {}
        self._unplaced: set[TopicPartition] = set()
        self._chunks: dict[TopicPartition, Chunk] = {}
        self._reported: dict[TopicPartition, Any] = {}
        self._retries: set[asyncio.TimerHandle] = set()
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False
        self._missing_told: set[str] = set()

    @property
    def missing_topics(self) -> frozenset[str]:
        """Topics that were subscribed to and do not exist, or that this user may not see."""
        internals = self._internals
        if internals is None:
            return frozenset()
        cluster = internals.client.cluster
        return frozenset(topic for topic in self._topics if not cluster.partitions_for_topic(topic))

    # Life -----------------------------------------------------------------------------

    async def start(self, topics: Collection[str], pattern: str | None, listener: GroupListener) -> None:
        """See `aioshard.ports.Transport.start`. Has no deadline of its own for a broker that is silent."""
        if self._internals is not None:
            message = "this transport was started before: build a new one for each life of the client"
            raise StateError(message)
        self._listener = listener
        self._topics = frozenset(topics)
        try:
            consumer = AIOKafkaConsumer(**self._options)
        except (ValueError, TypeError) as error:
            message = f"the Kafka client refused its options: {reason(error)}"
            raise SettingsError(message) from error
        internals = self._internals = Internals(consumer, self._group_id)
        try:
            await self._connect(internals)
            rebalances = _Rebalances(self)
            if pattern is None:
                consumer.subscribe(topics=tuple(self._topics), listener=rebalances)
            else:
                consumer.subscribe(pattern=_one_pattern(self._topics, pattern), listener=rebalances)
        except BaseException:
            await self.close()
            raise
        internals.client.cluster.add_listener(self._on_metadata)
        self._on_metadata(internals.client.cluster)
        for task in internals.background_tasks().values():
            task.add_done_callback(self._notice_end)

    async def _connect(self, internals: Internals) -> None:
        servers = self._options["bootstrap_servers"]
        try:
            await internals.consumer.start()
        except kafka.KafkaConnectionError:
            raise await why_unreachable(self._settings, self._options, servers) from None
        client = internals.client
        if self._topics:
            client.set_topics(self._topics)
        if not await client.force_metadata_update():
            advertised = ",".join(f"{broker.host}:{broker.port}" for broker in client.cluster.brokers())
            raise await why_unreachable(self._settings, self._options, advertised or servers, advertised=bool(advertised))
        denied = sorted(self._topics & client.cluster.unauthorized_topics)
        if denied:
            raise group_error(kafka.TopicAuthorizationFailedError(denied), self._group_id)
        try:
            await internals.look_up_group()
        except kafka.KafkaError as error:
            translated = group_error(error, self._group_id)
            if isinstance(translated, AuthorizationError):
                raise translated from error
            # Anything else passes, or shows when the group is joined.

    async def close(self) -> None:
        """See `aioshard.ports.Transport.close`. Bounded by itself except for the request to leave."""
        if self._closed:
            return
        self._closed = True
        self._interrupt()
        for retry in self._retries:
            retry.cancel()
        internals = self._internals
        if internals is None:
            return
        try:
            # A drain in progress ends on its own deadline; cutting it would lose its commit.
            await self._listener_done.wait()
            await internals.leave()
        except kafka.KafkaError as error:
            log.info("group %r was not told that we leave: %s", self._group_id, reason(error))
        finally:
            await internals.tear_down()
            self._forget_assignment()

    def _started(self) -> Internals:
        if self._internals is None or self._closed:
            message = "the Kafka client is closed" if self._closed else "the Kafka client was not started"
            raise ClientLostError(message)
        return self._internals

    # Records --------------------------------------------------------------------------

    async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[Batch | Fault | Oversized]:  # noqa: ASYNC109
        """See `aioshard.ports.Transport.poll`.

        Allowances are taken as of the start of the poll: what it takes of one partition counts against
        those of the others. An `Oversized` record is reported once; it is taken when its allowance grows.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        self._woken = False
        # Lets others run also while records come faster than they are taken.
        await asyncio.sleep(0)
        while True:
            internals = self._started()
            self._raise_what_is_lost(internals)
            found = self._take(internals, allowance)
            remaining = deadline - loop.time()
            if found or self._woken or remaining <= 0:
                return found
            await self._wait(internals, remaining)

    async def _wait(self, internals: Internals, seconds: float) -> None:
        waiter = self._waiter = internals.waiter()
        timer = asyncio.get_running_loop().call_later(seconds, _resolve, waiter)
        try:
            await waiter
        except kafka.KafkaError as error:
            internals.take_pending_error()
            raise group_error(error, self._group_id) from error
        finally:
            timer.cancel()
            self._waiter = None

    def _take(self, internals: Internals, allowance_of: AllowanceOf) -> list[Batch | Fault | Oversized]:
        found: list[Batch | Fault | Oversized] = []
        assignment = self._assignment
        if assignment is None or not assignment.active or internals.rebalancing:
            return found
        taken_records = taken_bytes = 0
        for key, entry in list(internals.buffered.items()):
            state = self._states.get(key)
            if state is None or state.paused:
                continue
            if type(entry) is not FetchResult:
                self._report_error(internals, key, entry, state, found)
                continue
            chunk = self._chunks.get(key)
            if chunk is None or chunk.result is not entry:
                if entry._assignment is not assignment:
                    continue
                chunk = self._chunks[key] = Chunk(TopicPartition(*key), entry)
            topic_partition = chunk.topic_partition
            if state.position != chunk.next_offset:
                self._drop(internals, topic_partition)
                continue
            if chunk.error is not None:
                self._report_corrupt(chunk, found)
                continue
            limit, room, alone = allowance_of(topic_partition)
            if limit <= 0:
                internals.release_broker(entry)
                continue
            if taken_records:
                limit -= taken_records
                alone = False
                if limit <= 0 or room <= taken_bytes:
                    continue
            taken = chunk.take(min(limit, RECORDS_PER_PARTITION), room - taken_bytes, alone=alone)
            next_offset = chunk.next_offset
            if next_offset != state.position:
                state.consumed_to(next_offset)
                found.append(Batch(topic_partition, taken.records, taken.sizes, next_offset))
                taken_records += len(taken.records)
                taken_bytes += sum(taken.sizes)
            if chunk.drained:
                self._drop(internals, topic_partition)
            elif chunk.error is not None and not taken.records:
                self._report_corrupt(chunk, found)
            elif taken.oversized > room:
                internals.release_broker(entry)
                if not chunk.reported:
                    chunk.reported = True
                    found.append(Oversized(topic_partition, taken.oversized))
        return found

    def _drop(self, internals: Internals, topic_partition: TopicPartition) -> None:
        self._chunks.pop(topic_partition, None)
        self._reported.pop(topic_partition, None)
        internals.discard(topic_partition)

    def _report_corrupt(self, chunk: Chunk, found: list[Batch | Fault | Oversized]) -> None:
        if chunk.reported or chunk.error is None:
            return
        chunk.reported = True
        topic_partition = chunk.topic_partition
        found.append(Fault(topic_partition, corrupt_record(chunk.error, topic_partition, chunk.next_offset)))
        self._retry_later(topic_partition, chunk.result)

    def _report_error(
        self, internals: Internals, key: Any, entry: Any, state: Any, found: list[Batch | Fault | Oversized]
    ) -> None:
        topic_partition = TopicPartition(*key)
        if self._reported.get(topic_partition) is entry:
            return
        error = entry._error
        fault: TransportError
        if isinstance(error, kafka.OffsetOutOfRangeError):
            asked = error.args[0][key]
            if state.position != asked:
                self._drop(internals, topic_partition)
                return
            fault = OffsetOutOfRangeError(topic_partition, asked)
        elif isinstance(error, kafka.RecordTooLargeError):
            # aiokafka has stepped over the record; that would lose it.
            asked = error.args[2]
            if state.position == asked + 1:
                state.seek(asked)
            fault = TransportError(
                f"the record at offset {asked} of {topic_partition} is larger than the broker returns in one fetch: "
                "raise max_buffered_bytes, or the broker's fetch limits"
            )
        else:
            fault = request_error(error, f"the records of {topic_partition}", self._group_id)
        self._reported[topic_partition] = entry
        found.append(Fault(topic_partition, fault))
        self._retry_later(topic_partition, entry)

    def _retry_later(self, topic_partition: TopicPartition, entry: Any) -> None:
        """Keep what failed for a while: as long as it is there, nothing is fetched of the partition."""

        def retry() -> None:
            self._retries.discard(timer)
            internals = self._internals
            if internals is not None and not self._closed and internals.buffered.get(topic_partition) is entry:
                self._drop(internals, topic_partition)

        timer = asyncio.get_running_loop().call_later(FAULT_INTERVAL, retry)
        self._retries.add(timer)

    def wake(self) -> None:
        """See `aioshard.ports.Transport.wake`."""
        self._woken = True
        self._interrupt()

    def _interrupt(self) -> None:
        """Make a waiting poll look again."""
        if self._waiter is not None:
            _resolve(self._waiter)

    def _notice_end(self, _task: "asyncio.Task[Any]") -> None:
        self._interrupt()

    def _raise_what_is_lost(self, internals: Internals) -> None:
        failure = self._listener_failure
        if failure is not None:
            message = f"the engine failed while partitions were handed over: {reason(failure)}"
            raise ClientLostError(message) from failure
        for name, task in internals.background_tasks().items():
            if task.done():
                cause = None if task.cancelled() else task.exception()
                message = f"the Kafka client's task for {name} ended ({reason(cause) if cause else 'without an error'})"
                raise ClientLostError(message) from cause
        pending = internals.take_pending_error()
        if pending is not None:
            raise group_error(pending, self._group_id) from pending

    # Positions ------------------------------------------------------------------------

    def position(self, topic_partition: TopicPartition) -> int | None:
        """See `aioshard.ports.Transport.position`."""
        state = self._states.get(topic_partition)
        if state is None or topic_partition in self._unplaced:
            return None
        return int(state.position)

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """See `aioshard.ports.Transport.end_offset`."""
        state = self._states.get(topic_partition)
        if state is None:
            return None
        end: int | None = state.lso if self._read_committed else state.highwater
        return end

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """See `aioshard.ports.Transport.pause`."""
        for topic_partition in partitions:
            state = self._states.get(topic_partition)
            if state is not None:
                state.pause()

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """See `aioshard.ports.Transport.resume`.

        Raises:
            StateError: A partition has no position: it was not seeked since it was assigned.
        """
        for topic_partition in partitions:
            state = self._states.get(topic_partition)
            if state is None:
                continue
            if topic_partition in self._unplaced:
                message = f"{topic_partition} was resumed before it was seeked: it has no position yet"
                raise StateError(message)
            state.resume()
        if self._internals is not None and not self._closed:
            self._internals.nudge_fetcher()
            self._interrupt()

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """See `aioshard.ports.Transport.seek`."""
        state = self._states.get(topic_partition)
        if state is None or self._internals is None:
            return
        state.seek(offset)
        self._unplaced.discard(topic_partition)
        self._drop(self._internals, topic_partition)

    def adjust_prefetch(self, partitions: int, max_bytes: int) -> None:
        """See `aioshard.ports.Transport.adjust_prefetch`; at least 16 KiB and at most 1 MiB per partition."""
        share = max_bytes // max(partitions, 1)
        if self._internals is not None and not self._closed:
            self._internals.bound_prefetch(min(max(share, LEAST_PREFETCH), MOST_PREFETCH))

    # The group ------------------------------------------------------------------------

    def membership(self) -> Membership:
        """See `aioshard.ports.Transport.membership`. A generation counts once its partitions were handed over."""
        internals = self._internals
        if internals is None or internals.membership() != self._membership:
            return NOT_A_MEMBER
        return self._membership

    async def commit(self, offsets: Mapping[TopicPartition, Committed], membership: Membership) -> None:
        """See `aioshard.ports.Transport.commit`. Has no deadline; cancelling it is clean."""
        if not offsets:
            return
        internals = self._started()
        try:
            await internals.find_coordinator()
            # Nothing is awaited between this check and the moment the request is built.
            self._refuse_what_is_not_ours(offsets, membership)
            await internals.commit_once(offsets)
        except kafka.KafkaError as error:
            raise commit_error(error, offsets.keys(), self._group_id) from error

    def _refuse_what_is_not_ours(self, offsets: Mapping[TopicPartition, Committed], membership: Membership) -> None:
        current = self.membership()
        if membership != current or current == NOT_A_MEMBER:
            message = (
                f"a commit of group {self._group_id!r} for generation {membership.generation} was not sent: "
                f"{'we are no member now' if current == NOT_A_MEMBER else f'the generation is {current.generation}'}"
            )
            raise CommitRefusedError(message)
        foreign = [str(topic_partition) for topic_partition in offsets if topic_partition not in self._states]
        if foreign:
            message = f"a commit of group {self._group_id!r} was not sent: {', '.join(foreign)} is not assigned to us"
            raise CommitRefusedError(message)

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """See `aioshard.ports.Transport.committed`. Tries again for ever while the reason may pass."""
        internals = self._started()
        if not partitions:
            return {}
        while True:
            try:
                await internals.find_coordinator()
                found = await internals.committed_once(partitions)
            except kafka.KafkaError as error:
                if not error.retriable or self._closed:
                    named = ", ".join(map(str, partitions))
                    raise request_error(error, f"the committed offsets of {named}", self._group_id) from error
                await asyncio.sleep(RETRY_BACKOFF)
            else:
                return {topic_partition: found.get(topic_partition) for topic_partition in partitions}

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """See `aioshard.ports.Transport.log_ranges`. Tries again for ever while the reason may pass."""
        internals = self._started()
        try:
            return await internals.log_ranges(partitions)
        except kafka.KafkaError as error:
            named = ", ".join(map(str, partitions))
            raise request_error(error, f"the bounds of {named}", self._group_id) from error

    async def partitions(self, topic: str) -> frozenset[int]:
        """See `aioshard.ports.Transport.partitions`."""
        internals = self._started()
        known = internals.client.cluster.partitions_for_topic(topic)
        if known:
            return frozenset(known)
        return await internals.look_up_topic(topic)

    def _on_metadata(self, cluster: Any) -> None:
        missing = {topic for topic in self._topics if not cluster.partitions_for_topic(topic)}
        for topic in sorted(missing - self._missing_told):
            why = "this user may not see it" if topic in cluster.unauthorized_topics else "it does not exist"
            log.warning(
                "topic %r has no partitions (%s): nothing of it is consumed; it is looked up every %g s",
                topic,
                why,
                self._settings.metadata_max_age,
            )
        for topic in sorted(self._missing_told - missing):
            log.info("topic %r exists now", topic)
        self._missing_told = missing

    # Called by the rebalance listener -------------------------------------------------

    async def _hand_back(self) -> None:
        internals, listener = self._internals, self._listener
        if internals is None or listener is None or self._closed:
            return
        owned = tuple(self._states)
        self._listener_done.clear()
        try:
            if owned:
                lost = internals.membership() == NOT_A_MEMBER
                await listener.revoked(owned, lost=lost)
        except Exception as error:  # noqa: BLE001 - aiokafka would swallow it; the next poll raises it
            self._listener_failure = error
        finally:
            self._listener_done.set()
            self._forget_assignment()

    def _take_over(self) -> None:
        internals, listener = self._internals, self._listener
        if internals is None or listener is None or self._closed:
            return
        assignment = internals.assignment()
        if assignment is None:
            return
        # First of all, and before anything is awaited: a paused partition with a position is neither
        # fetched nor reset by the client. The engine seeks each to where it belongs.
        states = internals.states(assignment)
        for topic_partition, state in states.items():
            state.pause()
            state.seek(0)
            internals.discard(topic_partition)
        self._forget_assignment()
        self._assignment = assignment
        self._states = states
        self._unplaced = set(states)
        self._membership = internals.membership()
        try:
            listener.assigned(tuple(states), self._membership)
        except Exception as error:  # noqa: BLE001 - aiokafka would swallow it; the next poll raises it
            self._listener_failure = error
            self._interrupt()

    def _forget_assignment(self) -> None:
        self._assignment = None
        self._states = {}
        self._unplaced = set()
        self._chunks.clear()
        self._reported.clear()
        self._membership = NOT_A_MEMBER


class _Rebalances(ConsumerRebalanceListener):  # type: ignore[misc]
    """What aiokafka calls when the group rebalances; it trusts our own account of what we hold."""

    def __init__(self, transport: AiokafkaTransport) -> None:
        self._transport = transport

    async def on_partitions_revoked(self, revoked: Collection[Any]) -> None:  # noqa: ARG002
        await self._transport._hand_back()

    def on_partitions_assigned(self, assigned: Collection[Any]) -> None:  # noqa: ARG002
        self._transport._take_over()


def _one_pattern(topics: Collection[str], pattern: str) -> str:
    """One pattern for both, because aiokafka takes either topics or a pattern."""
    named = "".join(f"{re.escape(topic)}$|" for topic in sorted(topics))
    return f"{named}(?:{pattern})"


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _consumer_options(settings: "Settings", group_id: str) -> dict[str, Any]:
    extra = dict(settings.client_options)
    known = inspect.signature(AIOKafkaConsumer.__init__).parameters
    for name in extra:
        if name in _OURS:
            message = f"client_options sets {name!r}, which aioshard sets itself: remove it and use aioshard's own setting"
            raise SettingsError(message)
        if name not in known:
            message = f"client_options has {name!r}, which aiokafka's consumer does not know: check the spelling"
            raise SettingsError(message)
    half = settings.max_buffered_bytes // 2
    return {
        "bootstrap_servers": settings.require_bootstrap_servers(),
        "client_id": settings.client_id or "aioshard",
        "group_id": group_id,
        "group_instance_id": settings.group_instance_id,
        "enable_auto_commit": False,
        "auto_offset_reset": "none",
        "isolation_level": settings.isolation_level,
        "max_poll_interval_ms": _NEVER_MS,
        "rebalance_timeout_ms": _milliseconds(settings.rebalance_timeout),
        "session_timeout_ms": _milliseconds(settings.session_timeout),
        "heartbeat_interval_ms": _milliseconds(settings.heartbeat_interval),
        "metadata_max_age_ms": _milliseconds(settings.metadata_max_age),
        "fetch_max_wait_ms": _milliseconds(settings.fetch_max_wait),
        "fetch_max_bytes": half,
        "max_partition_fetch_bytes": min(max(half, LEAST_PREFETCH), MOST_PREFETCH),
        "partition_assignment_strategy": (_assignor(settings.assignor),),
        **security_options(settings),
        **extra,
    }


def _assignor(name: str) -> Any:
    if name == "range":
        return RangePartitionAssignor
    if name == "roundrobin":
        return RoundRobinPartitionAssignor
    if name == "sticky":
        # It keeps its state on the class, which would be shared by all consumers of the process.
        return type("StickyAssignorOfOneConsumer", (StickyPartitionAssignor,), {})
    message = f"assignor={name!r} is not available in this version of aioshard; use 'range', 'roundrobin' or 'sticky'"
    raise SettingsError(message)


def _milliseconds(seconds: float) -> int:
    return max(round(seconds * 1000), 1)
