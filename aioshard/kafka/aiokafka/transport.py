"""The aiokafka transport: group membership, records and commits of one consumer."""

import asyncio
import logging
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import anyio
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka import errors as kafka

from aioshard.core.ownership import Losses
from aioshard.errors import (
    ClientLostError,
    CommitRefusedError,
    GroupHasMembersError,
    InstanceIdTakenError,
    SessionTimeoutRefusedError,
    StateError,
    TopicRecreatedError,
    TransportError,
)
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.aiokafka.answers import cause_of, reason
from aioshard.kafka.aiokafka.buffer import FetchBuffer
from aioshard.kafka.aiokafka.connections import CONNECT_TIMEOUT, connected, is_connected
from aioshard.kafka.aiokafka.internals import Internals
from aioshard.kafka.aiokafka.options import consumer_options
from aioshard.kafka.errors import GROUP_CHANGED, UNSTABLE_OFFSET, Cause, commit_error, group_error, named, request_error
from aioshard.kafka.groupless import manual_membership
from aioshard.kafka.groups import GroupMember
from aioshard.ports import (
    NOT_A_MEMBER,
    AllowanceOf,
    Committed,
    Fault,
    FetchedBatch,
    GroupListener,
    LogRange,
    Membership,
    Message,
    Oversized,
)
from aioshard.records import PartitionInfo, TopicPartition
from aioshard.settings import Settings

T = TypeVar("T")

logger = logging.getLogger("aioshard.kafka.aiokafka")

_CHECK_INTERVAL = 1.0
_CHECK_INTERVAL_PER_PARTITION = 0.005
"""Seconds between two checks of the ids of topics, at least and per partition."""

_JOINING = "preparingrebalance"
"""State of a group of the classic protocol that does not answer joins yet."""
_LEAST_PATIENCE = 2.0
"""Minimum seconds to wait for a response that brokers send without delay, even if the session is short."""
_RETRY_BACKOFF = 0.1
"""Seconds between two attempts of a query."""
_BACKLOG_TIMEOUT = 0.5
"""Seconds to query the backlogs while the group waits for us; after that, we use our last known offsets."""


class KafkaTransport(ABC):
    """The common part of the transports of both client libraries: its queries go through aiokafka.

    One instance is one life of the client: after `close`, or after `poll` raised, build a new one. With manual
    assignment (`assign`), it never joins the group: it takes its partitions at the start and keeps them until closed.
    """

    _buffer: Any
    """The positions of the assigned partitions, and their records."""
    last_heartbeat: float | None = None
    _stable_offsets = False
    """Whether committed offsets that an open transaction may still change are an error."""

    def __init__(self, settings: Settings, group_id: str) -> None:
        """Check the options; connects to nothing yet.

        Raises:
            SettingsError: TLS and SASL settings cannot work.
        """
        self._settings = settings
        self._group_id = group_id
        self._options = consumer_options(settings, group_id)
        self._topics: frozenset[str] = frozenset()
        self._internals: Internals | None = None
        self._closed = False
        """Whether `close` was called: from then on, `poll` returns no records."""
        self._left = False
        """Whether all requests must stop, including the commits of a final drain."""
        self._membership = NOT_A_MEMBER
        self._listener: GroupListener | None = None
        self._topic_ids: dict[str, uuid.UUID] = {}
        """The id of each topic in the last check."""
        self._retired_ids: dict[str, set[uuid.UUID]] = {}
        """Ids that assigned topics had before they were created again."""
        self._recreated: list[TopicPartition] = []
        """Partitions of topics that were deleted and created again, until `poll` reports them."""
        self._joining_with: Sequence[GroupMember] = ()
        """The other members of the group, if our join has not been answered for a while."""
        self._tasks: list[asyncio.Task[None]] = []
        self._released = asyncio.Event()
        """Set unless the engine is handing partitions over."""
        self._released.set()
        self._woken = False

    @property
    def trouble(self) -> str | None:
        """See `Transport.trouble`."""
        internals = self._internals
        if internals is None or self._closed:
            return None
        if not is_connected(internals.client):
            return f"no connection to a broker of {self._settings.bootstrap_servers} is open; the client keeps trying"
        return None

    @property
    def hang(self) -> str | None:
        """See `Transport.hang`; the calls of asyncio clients end with their timeouts."""
        return None

    @property
    def missing_topics(self) -> Sequence[str]:
        """See `Transport.missing_topics`."""
        internals = self._internals
        if internals is None or self._closed:
            return ()
        return [topic for topic in sorted(self._topics) if not internals.cluster.partitions_for_topic(topic)]

    @property
    def slow_join(self) -> str | None:
        """See `Transport.slow_join`."""
        if not self._joining_with or self._closed or self._membership != NOT_A_MEMBER:
            return None
        return _still_joining(self._group_id, self._joining_with, self._settings.session_timeout)

    # Lifecycle ------------------------------------------------------------------------

    async def start(self, topics: Collection[str], pattern: str | None, listener: GroupListener) -> None:
        """See `Transport.start`; connecting takes at most three and a half times `CONNECT_TIMEOUT`, which is 3 s.

        Topics and a pattern may be combined; the pattern must match a whole topic name.
        """
        if self._listener is not None or self._closed:
            raise StateError("this transport was started before: build a new one for each life of the client")
        self._listener = listener
        self._topics = frozenset(topics)
        try:
            internals = await self._connect()
            await self._check_permissions(internals)
            await self._join(internals, pattern, listener)
        except BaseException:
            await self.close()
            raise

    async def _check_permissions(self, internals: Internals) -> None:
        if denied := sorted(self._topics & internals.cluster.unauthorized_topics):
            raise self._group_error(cause_of(kafka.TopicAuthorizationFailedError(denied)))
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await internals.look_up_group()
        except kafka.GroupAuthorizationFailedError as error:
            raise self._group_error(cause_of(error)) from error
        except (kafka.KafkaError, TimeoutError) as error:
            logger.debug("the first look-up of the group failed, which may be transient: %s", reason(error))

    def _group_error(self, cause: Cause) -> TransportError:
        return group_error(cause, self._group_id, self._settings.session_timeout)

    @abstractmethod
    async def _join(self, internals: Internals, pattern: str | None, listener: GroupListener) -> None:
        """Join the group, or take the manually assigned partitions."""

    async def _connect(self) -> Internals:
        # If a member's coordinator hangs, it must find another one long before its session expires.
        patience = max(self._settings.session_timeout / 5, _LEAST_PATIENCE)
        (assignor,) = self._options["partition_assignment_strategy"]
        self._internals = await connected(
            self._settings,
            self._options,
            lambda options: Internals(AIOKafkaConsumer(**options), assignor, self._group_id, patience, self._topics),
        )
        return self._internals

    async def close(self) -> None:
        """See `Transport.close`. Waits for a drain in progress, and until we have left the group.

        If a cancellation cuts this short, all tasks and connections still end.
        """
        if self._closed:
            return
        self._closed = True
        self._check_again()
        try:
            # A drain in progress ends at its own deadline; cutting it short would lose its commit.
            await self._released.wait()
            self._left = True
            await self._leave()
        except Exception as error:  # noqa: BLE001 - the group notices by itself after the session timeout
            logger.info("leaving group %r failed: %s", self._group_id, reason(error))
        finally:
            self._left = True
            self._end_assignment()
            # A deadline may have ended the code above, and would also end every await that follows.
            with anyio.CancelScope(shield=True):
                await self._tear_down()

    @abstractmethod
    def subscribe(self, topics: Collection[str], pattern: str | None) -> None:
        """See `Transport.subscribe`."""

    @abstractmethod
    async def _leave(self) -> None:
        """Leave the group; wait for the response."""

    @abstractmethod
    def _end_assignment(self) -> None:
        """Forget all partitions and the membership."""

    async def _tear_down(self) -> None:
        """End all tasks and connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._internals is not None:
            await self._internals.tear_down()

    def _running(self) -> Internals:
        if self._internals is None or self._left:
            raise ClientLostError(f"the Kafka client {'is closed' if self._closed else 'was not started'}")
        return self._internals

    # Records and positions ------------------------------------------------------------

    async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[FetchedBatch | Fault | Oversized]:
        """See `Transport.poll`. Does not suspend if records are ready.

        Allowances are those at the start of the poll: records taken from one partition count against the others. An
        `Oversized` record ends a poll only once; later polls repeat it when they end for another reason, including a
        timeout or `wake`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        self._woken = False
        try:
            while True:
                self._raise_loss()
                if self._recreated:
                    return self._take_recreated()
                result = self._buffer.take(allowance)
                remaining = deadline - loop.time()
                if result.new or self._woken or remaining <= 0:
                    return result.new + result.repeated  # type: ignore[no-any-return]
                await self._wait_for_records(remaining)
        except SessionTimeoutRefusedError as error:
            raise SessionTimeoutRefusedError(error.session_timeout, await self._session_limits()) from error

    async def _session_limits(self) -> tuple[float, float] | None:
        """Return the least and the most seconds that the brokers accept as a session timeout; None if unknown."""
        try:
            async with (
                asyncio.timeout(2 * CONNECT_TIMEOUT),
                KafkaAdmin(self._settings, patience=CONNECT_TIMEOUT) as admin,
            ):
                return await admin.session_limits(self._group_id)
        except (TransportError, TimeoutError) as error:
            logger.debug("the limits of session_timeout are unknown: %s", reason(error))
            return None

    def _take_recreated(self) -> list[FetchedBatch | Fault | Oversized]:
        """Report partitions whose positions belong to an old log; what was fetched from them is dropped."""
        recreated, self._recreated = self._recreated, []
        faults: list[FetchedBatch | Fault | Oversized] = []
        for partition in recreated:
            position = self._buffer.position(partition)
            if position is not None:
                self._buffer.pause([partition])
                faults.append(Fault(partition, TopicRecreatedError(partition, position)))
        return faults

    async def _watch_topic_ids(self) -> None:
        """Check the topic ids until cancelled."""
        while True:
            # The brokers describe every partition, which takes a while to decode.
            await asyncio.sleep(max(_CHECK_INTERVAL, _CHECK_INTERVAL_PER_PARTITION * len(self._buffer.partitions)))
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    await self._check_topic_ids()
            except (TransportError, TimeoutError) as error:
                logger.debug("the brokers did not return the ids of topics: %s", reason(error))
            except Exception:  # a broker may answer in a form that we cannot read
                logger.exception("topics that are created again are not noticed now, because their ids are unknown")

    async def _check_topic_ids(self) -> None:
        """Find topics that were deleted and created again since the last check.

        Raises:
            TransportError: The brokers did not answer.
        """
        topics = {partition.topic for partition in self._buffer.partitions}
        # A topic that is assigned later gets its positions from the log that it has then.
        self._topic_ids = {topic: topic_id for topic, topic_id in self._topic_ids.items() if topic in topics}
        self._retired_ids = {topic: retired for topic, retired in self._retired_ids.items() if topic in topics}
        if not topics:
            return
        ids = await self._answered(self._running().topic_ids(topics), "return the ids of topics")
        for topic, topic_id in ids.items():
            retired = self._retired_ids.setdefault(topic, set())
            if topic_id in retired:
                continue  # a broker that has not heard of the new topic yet
            known = self._topic_ids.get(topic, topic_id)
            self._topic_ids[topic] = topic_id
            if topic_id != known:
                retired.add(known)
                self._recreated += [partition for partition in self._buffer.partitions if partition.topic == topic]
                self._check_again()

    @abstractmethod
    def _raise_loss(self) -> None:
        """Raise if this client can no longer be used, or the group refuses us."""

    @abstractmethod
    async def _wait_for_records(self, seconds: float) -> None:
        """Wait until there may be records, or `_check_again` is called."""

    def wake(self) -> None:
        """See `Transport.wake`."""
        self._woken = True
        self._check_again()

    @abstractmethod
    def _check_again(self, _ended: object = None) -> None:
        """Make a waiting poll look again; also usable as a task's callback."""

    def position(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.position`."""
        return self._buffer.position(topic_partition)  # type: ignore[no-any-return]

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.end_offset`."""
        return self._buffer.end_offset(topic_partition)  # type: ignore[no-any-return]

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.pause`."""
        self._buffer.pause(partitions)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.resume`.

        Raises:
            StateError: A partition was not seeked since it was assigned, so it has no position.
        """
        self._buffer.resume(partitions)
        self._check_again()

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """See `Transport.seek`."""
        self._buffer.seek(topic_partition, offset)
        self._check_again()

    # The group ------------------------------------------------------------------------

    def membership(self) -> Membership:
        """See `Transport.membership`: that of the latest assignment passed to the engine."""
        return self._membership

    async def _watch_joins(self) -> None:
        """Look up the other members of the group whenever a join takes long, until cancelled."""
        was_outside = True  # the first join begins now
        while True:
            await asyncio.sleep(self._settings.heartbeat_interval)  # members that answer rejoin within it
            is_outside = self._membership == NOT_A_MEMBER
            self._joining_with = await self._look_up_others() if is_outside and was_outside else ()
            was_outside = is_outside

    async def _look_up_others(self) -> Sequence[GroupMember]:
        """Return the other members of a group that is rebalancing; none if the brokers do not name them."""
        try:
            own_id = await self._own_member_id()
            async with asyncio.timeout(CONNECT_TIMEOUT), KafkaAdmin(self._settings) as admin:
                group = await admin.group(self._group_id)
        except (TransportError, TimeoutError) as error:
            logger.debug("the members of group %r are unknown: %s", self._group_id, reason(error))
            return ()
        if group.state != _JOINING:
            return ()
        return [member for member in group.members if member.member_id != own_id]

    @abstractmethod
    async def _own_member_id(self) -> str:
        """Return the id with which this client joins; empty before the brokers have given it one."""

    async def commit(
        self,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: Sequence[Message] | None = None,
    ) -> None:
        """See `Transport.commit`. Has no deadline; you can cancel it safely."""
        if not offsets:
            return
        internals = self._running()
        if self._settings.assign is None:
            await self._commit_as_member(internals, offsets, membership, messages)
        else:
            self._check_commit(offsets, membership)
            await commit_without_member(internals, offsets)

    @abstractmethod
    async def _commit_as_member(
        self,
        internals: Internals,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: Sequence[Message] | None,
    ) -> None:
        """Send one commit, if it is still ours, with *messages* if the client has transactions."""

    def _check_commit(self, partitions: Collection[TopicPartition], membership: Membership) -> None:
        """Refuse a commit before it is sent if we no longer have *membership* or its partitions.

        Raises:
            CommitRefusedError: The group has rebalanced since.
        """
        current = self.membership()
        if current == NOT_A_MEMBER:
            why = "we are not a member of it now"
        elif membership != current:
            why = f"it was made for generation {membership.generation}, and ours is {current.generation}"
        elif foreign := [topic_partition for topic_partition in partitions if topic_partition not in self._buffer]:
            why = f"not assigned to us: {named(foreign)}"
        else:
            return
        raise CommitRefusedError(f"a commit of group {self._group_id!r} was not sent: {why}")

    # Queries --------------------------------------------------------------------------

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """See `Transport.committed`. Has no deadline; retries transient errors."""
        while partitions:
            internals = self._running()
            try:
                commits = await internals.committed_once(partitions, stable=self._stable_offsets)
            except kafka.KafkaError as error:
                cause = cause_of(error)
                if not cause.retriable or cause.code == UNSTABLE_OFFSET:
                    what = f"return the committed offsets of {named(partitions)}"
                    raise request_error(cause, what, self._group_id) from error
                await asyncio.sleep(_RETRY_BACKOFF)
            else:
                return {topic_partition: commits.get(topic_partition) for topic_partition in partitions}
        return {}

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """See `Transport.log_ranges`. Takes at most two thirds of `commit_timeout`."""
        return await self._answered(
            self._running().log_ranges(partitions, self._settings.commit_timeout / 3),
            f"return the bounds of {named(partitions)}",
        )

    async def partitions(self, topic: str) -> Mapping[int, PartitionInfo]:
        """See `Transport.partitions`. Looks up an unknown topic once, without creating it."""
        internals = self._running()
        if known := internals.known_partitions(topic):
            return known
        return await self._answered(internals.look_up_topic(topic), f"return the partitions of topic {topic!r}")

    async def topics(self) -> frozenset[str]:
        """See `Transport.topics`."""
        return await self._answered(self._running().look_up_topics(), "list the topics")

    async def creates_topics(self) -> bool | None:
        """See `Transport.creates_topics`; uses a separate connection."""
        async with KafkaAdmin(self._settings, patience=CONNECT_TIMEOUT) as admin:
            return await admin.creates_topics()

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """See `Transport.offset_at`. Has no deadline; retries transient errors."""
        return await self._answered(
            self._running().offset_at(topic_partition, timestamp), f"return the offsets of {topic_partition} by time"
        )

    async def _answered(self, request: Awaitable[T], what: str) -> T:
        try:
            return await request
        except kafka.KafkaError as error:
            raise request_error(cause_of(error), what, self._group_id) from error

    # Manual assignment ----------------------------------------------------------------

    async def _manual_assignment(self) -> list[TopicPartition]:
        """Return the partitions in `assign`, after checking that they exist and the group is inactive.

        If the brokers do not list the group's members, the first commit finds out.

        Raises:
            GroupHasMembersError: The group has members.
            TransportError: A topic does not have such a partition; not retriable.
        """
        assign = self._settings.assign or {}
        for topic, numbers in assign.items():
            existing = await self.partitions(topic)
            if missing := sorted(set(numbers) - existing.keys()):
                actual = f"has partitions 0 to {max(existing)}" if existing else "does not exist"
                raise TransportError(
                    f"topic {topic!r} {actual}, but assign names {topic}/{named(missing)}: correct assign, or create "
                    "the partitions",
                    retriable=False,
                )
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT), KafkaAdmin(self._settings) as admin:
                members = (await admin.group(self._group_id)).members
        except (TransportError, TimeoutError) as error:
            logger.debug("the members of group %r are unknown: %s", self._group_id, reason(error))
            members = ()
        if members:
            raise _has_members(self._group_id, named(members))
        return [TopicPartition(topic, number) for topic, numbers in assign.items() for number in numbers]


async def commit_without_member(internals: Internals, offsets: Mapping[TopicPartition, Committed]) -> None:
    """Send one commit without a member, once; brokers accept it while the group has no members.

    Raises:
        GroupHasMembersError: The group has members. Nothing was stored.
        TransportError: The commit was not acknowledged; all or part of it may have been stored.
    """
    try:
        await internals.coordinator.ensure_coordinator_known()
        await internals.commit_once(offsets, without_member=True)
    except kafka.KafkaError as error:
        if (why := GROUP_CHANGED.get(cause_of(error).code)) is not None:
            raise _has_members(internals.group_id, f"a commit was refused: {why}") from error
        raise commit_error(cause_of(error), offsets, internals.group_id) from error


def _still_joining(group_id: str, others: Sequence[GroupMember], session: float) -> str:
    """Describe a rebalance that lasts; the brokers do not say which member has not rejoined, nor why."""
    if len(others) == 1:
        members = str(others[0])
        which = "it"
    else:
        members = f"{len(others)} other members ({named(others)})"
        which = "one of them"
    return (
        f"group {group_id!r} is still rebalancing with {members}; if {which} has died, the rebalance lasts until its "
        f"session ends, session_timeout={session:g} s after its last heartbeat"
    )


def _has_members(group_id: str, what: str) -> GroupHasMembersError:
    return GroupHasMembersError(
        f"group {group_id!r} has members ({what}), so the brokers refuse commits of this app, which uses manual "
        "assignment. Stop the members (a killed one counts until its session timeout), remove assign to join them, "
        "or use another group id"
    )


class AiokafkaTransport(KafkaTransport, ConsumerRebalanceListener):  # type: ignore[misc]
    """A member of a consumer group through aiokafka 0.14; implements `aioshard.ports.Transport`.

    Invariants:
        * `poll` returns nothing of a partition before the engine has seeked and resumed it, nor while
          the group rebalances.
        * The client never chooses or resets a position, never commits on its own, and never leaves
          the group because nobody polls.
    """

    _buffer: FetchBuffer

    def __init__(self, settings: Settings, group_id: str) -> None:
        """Check the options; connects to nothing yet.

        Raises:
            SettingsError: TLS and SASL settings cannot work.
        """
        super().__init__(settings, group_id)
        self._instance = _InstanceWatch(settings, group_id)
        self._buffer = FetchBuffer(
            read_committed=settings.isolation_level == "read_committed",
            may_wait_longer="fetch_max_wait" not in settings.model_fields_set,
        )
        self._listener_failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def trouble(self) -> str | None:
        """See `Transport.trouble`. The group's coordinator counts only after `start`."""
        internals, trouble = self._internals, super().trouble
        if trouble is not None or internals is None or self._closed:
            return trouble
        if self._listener is not None and internals.coordinator.coordinator_id is None:
            return f"group {self._group_id!r} has no coordinator now: nothing can be committed"
        return None

    @property
    def last_heartbeat(self) -> float | None:  # type: ignore[override]
        """See `Transport.last_heartbeat`."""
        return None if self._internals is None else self._internals.last_heartbeat

    # Lifecycle ------------------------------------------------------------------------

    async def _join(self, internals: Internals, pattern: str | None, listener: GroupListener) -> None:  # noqa: ARG002
        internals.bound_prefetch(self._settings.max_buffered_bytes // 2)
        internals.keep_fetched_bytes()
        if self._settings.assign is not None:
            internals.consumer.assign(await self._manual_assignment())
            self.on_partitions_assigned(())
        else:
            internals.watch_session(self._settings.session_timeout, self._lose)
            if self._settings.group_instance_id is not None:
                internals.complete_static_joins()
            if internals.assignor.cooperative:
                internals.coordinator._on_join_prepare = self.on_partitions_revoked
            self.subscribe(self._topics, pattern)
            self._tasks.append(asyncio.create_task(self._watch_joins(), name=f"joins of {self._group_id}"))
        self._watch_tasks(internals)
        self._tasks.append(asyncio.create_task(self._watch_topic_ids(), name=f"topic ids of {self._group_id}"))
        if self._settings.balance_interval:
            self._tasks.append(asyncio.create_task(self._balance(internals), name=f"balance of {self._group_id}"))

    async def _balance(self, internals: Internals) -> None:
        """As the leader, request a rebalance once two checks in a row have found unequal backlogs."""
        seen = False
        while True:
            await asyncio.sleep(self._settings.balance_interval)
            assignor, before = internals.assignor, seen
            seen = assignor.leads and assignor.would_pay(await self._backlogs(internals))
            if before and seen:
                logger.info("the members of group %r have unequal backlogs: requesting a rebalance", self._group_id)
                internals.coordinator.request_rejoin()
                seen = False

    def subscribe(self, topics: Collection[str], pattern: str | None) -> None:
        """See `Transport.subscribe`."""
        consumer, self._topics = self._running().consumer, frozenset(topics)
        if pattern is None:
            consumer.subscribe(topics=tuple(topics), listener=self)
        else:
            # aiokafka accepts either topics or a pattern. It uses `match`, so the pattern needs an end.
            choices = [*map(re.escape, sorted(topics)), f"(?:{pattern})"]
            consumer.subscribe(pattern=rf"(?:{'|'.join(choices)})\Z", listener=self)

    def _watch_tasks(self, internals: Internals) -> None:
        for task in internals.background_tasks().values():
            task.add_done_callback(self._check_again)

    async def _leave(self) -> None:
        if self._internals is not None and self._group_id:
            await self._internals.leave()

    # Records --------------------------------------------------------------------------

    async def _wait_for_records(self, seconds: float) -> None:
        internals = self._running()
        waiter = self._waiter = internals.fetcher._create_fetch_waiter()
        timer = asyncio.get_running_loop().call_later(seconds, self._check_again)
        try:
            await waiter
        except kafka.KafkaError as error:
            internals.take_pending_error()
            raise self._group_error(cause_of(error)) from error
        except Exception as error:
            raise ClientLostError(f"the Kafka client failed ({reason(error)}); a new client is needed") from error
        finally:
            timer.cancel()
            self._waiter = None

    def _check_again(self, _ended: object = None) -> None:
        """Make a waiting poll look again; also usable as a task's callback."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _raise_loss(self) -> None:
        internals = self._running()
        if self._closed:
            raise ClientLostError("the Kafka client is closed")
        if self._instance.taken is not None:
            raise self._instance.taken
        if (failure := self._listener_failure) is not None:
            raise ClientLostError(f"the engine failed during a rebalance: {reason(failure)}") from failure
        if (lost := internals.lost) is not None:
            raise lost
        if (pending := internals.take_pending_error()) is not None:
            raise self._group_error(cause_of(pending)) from pending

    # The group ------------------------------------------------------------------------

    def membership(self) -> Membership:
        """See `Transport.membership`. A generation counts once the engine has received its partitions."""
        internals, manual = self._internals, self._settings.assign is not None
        if internals is None or (internals.membership() != self._membership and not manual):
            return NOT_A_MEMBER
        return self._membership

    async def _own_member_id(self) -> str:
        return str(self._running().coordinator.member_id)

    async def _commit_as_member(
        self,
        internals: Internals,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: Sequence[Message] | None,  # noqa: ARG002
    ) -> None:
        try:
            await internals.coordinator.ensure_coordinator_known()
            # No await between this check and building the request.
            self._check_commit(offsets, membership)
            await internals.commit_once(offsets)
        except kafka.KafkaError as error:
            raise commit_error(cause_of(error), offsets, self._group_id) from error

    async def on_partitions_revoked(self, _revoked: Collection[Any]) -> None:
        """Tell the engine that its partitions are being revoked; the group waits until this returns.

        A cooperative assignor keeps them until the group has another assignment.
        """
        internals = self._internals
        if internals is None or self._listener is None or self._closed:
            return
        self._instance.rejoins(internals.membership())
        internals.coordinator._group_subscription = None  # else a previous leader would watch topics of others
        try:
            if self._buffer.partitions and not internals.assignor.cooperative:  # none after `_lose`
                await self._drain(self._listener, self._buffer.partitions)
            if self._settings.assignor.endswith("lag"):
                internals.assignor.backlogs = await self._backlogs(internals)
        finally:
            if not internals.assignor.cooperative:
                self._end_assignment()
                self._check_again()
        if self._instance.taken is not None:
            await asyncio.Event().wait()  # rejoining would take the place of the other process again

    async def _drain(self, listener: GroupListener, partitions: Collection[TopicPartition]) -> None:
        """Let the engine release partitions."""
        self._released.clear()
        try:
            await listener.revoked(partitions)
        except Exception as error:  # noqa: BLE001 - aiokafka would swallow it; the next poll raises it
            self._listener_failure = error
        finally:
            self._released.set()

    async def _release_moving(self, internals: Internals, listener: GroupListener) -> None:
        """Release the partitions that are no longer ours; as the leader, rejoin, so that the group assigns them."""
        internals.coordinator._start_heartbeat_task()  # aiokafka would wait until this returns
        if gone := [at for at in self._buffer.partitions if at not in internals.assignor.owned]:
            await self._drain(listener, gone)
            self._buffer.remove(gone)
            listener.assigned(self._buffer.partitions, self._membership)  # the drain stopped the opening of the others
        if internals.assignor.moving:
            internals.coordinator.request_rejoin()

    async def _backlogs(self, internals: Internals) -> dict[TopicPartition, int]:
        """Return the number of uncommitted records of each subscribed partition, where known, to balance them.

        Takes at most half a second. If the brokers do not answer, it counts from our own positions to the log ends of
        the latest fetch.
        """
        buffer = self._buffer
        begins = {partition: buffer.position(partition) for partition in buffer.partitions}
        ends = {partition: buffer.end_offset(partition) for partition in buffer.partitions}
        try:
            async with asyncio.timeout(_BACKLOG_TIMEOUT):
                partitions = {*buffer.partitions, *internals.subscribed_partitions()}
                commits = await internals.committed_once(partitions)
                ranges = await internals.log_ranges(partitions, _BACKLOG_TIMEOUT)
        except (kafka.KafkaError, TimeoutError) as error:
            logger.info("could not query the remaining records of the partitions: %s", reason(error))
        else:
            for partition, (start, end, _) in ranges.items():
                ends[partition] = end
                if partition in commits:
                    begins[partition] = max(commits[partition].offset, start)
                elif begins.get(partition) is None:
                    begins[partition] = {"earliest": start, "latest": end}.get(self._settings.auto_offset_reset or "")
        bounds = ((partition, begins.get(partition), end) for partition, end in ends.items())
        return {partition: end - begin for partition, begin, end in bounds if begin is not None and end is not None}

    def _lose(self) -> None:
        """Report immediately to the engine that another member may own our partitions by now."""
        buffer, listener = self._buffer, self._listener
        if listener is None or self._closed or not buffer.partitions:
            return
        try:
            listener.lost(buffer.partitions)
        except Exception as error:  # noqa: BLE001 - called from a timer; the next poll raises it
            self._listener_failure = error
        finally:
            self._end_assignment()
            self._check_again()

    def on_partitions_assigned(self, _assigned: Collection[Any]) -> Awaitable[None] | None:
        """Pass an assignment to the engine. A plain function, so that nothing else can run before it is done.

        Returns:
            With a cooperative assignor, the release of the partitions that move; aiokafka awaits it.
        """
        internals, buffer, listener = self._internals, self._buffer, self._listener
        assignment = None if internals is None else internals.assignment()
        if internals is None or assignment is None or listener is None or self._closed:
            return None
        buffer.begin(internals, assignment)
        manual = self._settings.assign is not None
        if manual:
            self._membership = manual_membership()
        else:
            self._membership = internals.membership()
            self._instance.joined(self._membership, was_displaced=internals.was_displaced)
            internals.joined(self._membership.generation)
        try:
            listener.assigned(buffer.partitions, self._membership)
        except Exception as error:  # noqa: BLE001 - aiokafka would swallow it; the next poll raises it
            self._listener_failure = error
            self._check_again()
        return self._release_moving(internals, listener) if internals.assignor.cooperative and not manual else None

    def _end_assignment(self) -> None:
        self._buffer.end()
        if self._internals is not None:
            self._internals.end_session()
        self._membership = NOT_A_MEMBER


class _InstanceWatch:
    """Detects another process with our `group_instance_id`, which aiokafka does not notice.

    When a second process joins with the same id, the broker gives it the member's place: same partitions, same
    generation, a new member id. Our member id is unknown from then on. aiokafka rejoins and takes the place back, and
    the two alternate forever. In contrast, a member that was dropped as silent comes back in a later generation.

    A single loss may be two processes that overlap, as in a rolling deploy. If we lose the place again within a
    session timeout, we must not take it back: the process that notices this first ends, and the other one keeps it.
    """

    def __init__(self, settings: Settings, group_id: str) -> None:
        self._is_static = settings.group_instance_id is not None
        self._within = settings.session_timeout
        self._error = InstanceIdTakenError(group_id, str(settings.group_instance_id), self._within, persists=True)
        self._previous = NOT_A_MEMBER
        self._losses = Losses(time.monotonic)
        self._was_taken = False
        self.taken: InstanceIdTakenError | None = None
        """The error, once we lost the place again; from then on, the client must not rejoin."""

    def joined(self, now: Membership, *, was_displaced: bool = False) -> None:
        """Record a new membership; *was_displaced* if the group had another process in our place before."""
        previous, self._previous = self._previous, now
        took_back = now.generation == previous.generation and now.member_id != previous.member_id
        # Only for a static member: a group that was deleted and recreated counts generations from 1 again.
        self._was_taken = self._is_static and (took_back or was_displaced)
        if self._was_taken:
            self._losses.again(0.0)
            logger.warning("%s. If it continues, one of the processes ends", self._error)

    def rejoins(self, now: Membership) -> None:
        """Set `taken` if we have lost our place again; call it before rejoining."""
        if now == NOT_A_MEMBER and self._was_taken and self._losses.again(self._within):
            self.taken = self._error
