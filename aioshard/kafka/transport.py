"""The common part of the transports of both client libraries: queries, commits without a member, and the life cycle."""

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import anyio

from aioshard.errors import (
    ClientLostError,
    CommitRefusedError,
    GroupHasMembersError,
    SessionTimeoutRefusedError,
    StateError,
    TopicsRefusedError,
    TransportError,
)
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.errors import (
    GROUP_CHANGED,
    GROUP_DENIED,
    TOPIC_DENIED,
    UNKNOWN_TOPIC,
    UNSTABLE_OFFSET,
    Cause,
    commit_error,
    group_error,
    named,
    request_error,
    topic_refused,
)
from aioshard.kafka.groups import GroupMember
from aioshard.kafka.offsets import (
    NO_MEMBER,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    GroupOffsets,
    Member,
    epoch_ends,
    log_ranges,
    offsets_at,
)
from aioshard.kafka.wire.cluster import CoordinatorKind
from aioshard.kafka.wire.epochs import UNKNOWN
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.metadata import PartitionMetadata
from aioshard.kafka.wire.pool import CONNECT_TIMEOUT
from aioshard.kafka.wire.responses import CommittedOffset, EpochEnd
from aioshard.kafka.wire.start import new_cluster, reach
from aioshard.ports import (
    NOT_A_MEMBER,
    AllowanceOf,
    ChosenProtocol,
    Committed,
    Fault,
    FetchedBatch,
    GroupListener,
    LogRange,
    Membership,
    Message,
    Oversized,
    TransactionCounts,
)
from aioshard.records import PartitionInfo, TopicPartition
from aioshard.settings import Settings

T = TypeVar("T")

logger = logging.getLogger("aioshard.kafka.transport")

_REBALANCING = frozenset({"preparingrebalance", "assigning", "reconciling"})
"""States of a group that does not answer joins yet, or in which members have partitions that others will get."""
_LEAST_PATIENCE = 2.0
"""Minimum seconds to wait for a response that brokers send without delay, even if the session is short."""
_RETRY_BACKOFF = 0.1
"""Seconds between two attempts of a query."""
_NO_TOPIC = frozenset({3, 17})
"""Error codes for topics that do not exist and for invalid topic names."""
_ABOUT_ONE_TOPIC = frozenset({UNKNOWN_TOPIC, TOPIC_DENIED})
"""Error codes with which a coordinator refuses the offsets of one topic, and stores those of the others."""


class KafkaTransport(ABC):
    """The common part of the members of Kafka groups: queries, commits without a member, and the life cycle.

    One instance is one life of the client: after `close`, or after `poll` raised, build a new one. With manual
    assignment (`assign`), it never joins the group: it takes its partitions at the start and keeps them until closed.
    """

    _buffer: Any
    """The positions of the assigned partitions, and their records."""
    last_heartbeat: float | None = None

    def __init__(self, settings: Settings, group_id: str) -> None:
        """Check the options; connects to nothing yet.

        Raises:
            SettingsError: TLS and SASL settings cannot work.
        """
        self._settings = settings
        self._group_id = group_id
        self._topics: frozenset[str] = frozenset()
        self._cluster = new_cluster(settings)
        self._offsets = GroupOffsets(self._cluster, group_id, self._patience)
        self._isolation = READ_COMMITTED if settings.isolation_level == "read_committed" else READ_UNCOMMITTED
        self._epochs: dict[TopicPartition, CommittedOffset] = {}
        """The latest known commits, or where we stopped reading since, for the leader epochs in them."""
        self._closed = False
        """Whether `close` was called: from then on, `poll` returns no records."""
        self._left = False
        """Whether all requests must stop, including the commits of a final drain."""
        self._membership = NOT_A_MEMBER
        self._listener: GroupListener | None = None
        self._is_started = False
        """Whether the brokers have answered."""
        self._joining_with: Sequence[GroupMember] = ()
        """The other members of the group, if our join has not been answered for a while."""
        self._tasks: list[asyncio.Task[None]] = []
        self._released = asyncio.Event()
        """Set unless the engine is handing partitions over."""
        self._released.set()
        self._woken = False

    @property
    def _patience(self) -> float:
        """Seconds for a coordinator to answer: if it hangs, a member must find another one before its session ends."""
        return max(self._settings.session_timeout / 5, _LEAST_PATIENCE)

    @property
    def trouble(self) -> str | None:
        """See `Transport.trouble`."""
        if not self._is_started or self._closed:
            return None
        if not self._cluster.is_connected:
            return f"no connection to a broker of {self._settings.bootstrap_servers} is open; the client keeps trying"
        return None

    @property
    def transaction_counts(self) -> TransactionCounts:
        """See `Transport.transaction_counts`."""
        return TransactionCounts()

    @property
    def hang(self) -> str | None:
        """See `Transport.hang`; the calls of asyncio clients end with their timeouts."""
        return None

    @property
    def missing_topics(self) -> Sequence[str]:
        """See `Transport.missing_topics`."""
        if not self._is_started or self._closed:
            return ()
        metadata = self._cluster.metadata
        return sorted(self._topics & (metadata.missing | metadata.denied))

    @property
    def slow_join(self) -> str | None:
        """See `Transport.slow_join`."""
        if not self._joining_with or self._closed or self.membership() != NOT_A_MEMBER:
            return None
        return _still_joining(self._group_id, self._joining_with, self._session)

    @property
    def group_protocol(self) -> ChosenProtocol | None:
        """See `Transport.group_protocol`."""
        return None

    @property
    def inherits_within(self) -> float:
        """See `Transport.inherits_within`. In the classic protocol the joins of all end a rebalance together."""
        return 0.0

    @property
    def owned_for(self) -> float:
        """See `Transport.owned_for`. Only a member whose heartbeats do not depend on the event loop knows a limit."""
        return math.inf

    @property
    def _session(self) -> str:
        """The session of dead members, for messages."""
        return f"session_timeout={self._settings.session_timeout:g} s"

    # Lifecycle ------------------------------------------------------------------------

    async def start(
        self, topics: Collection[str], pattern: str | None, listener: GroupListener, *, needs_all: bool = True
    ) -> None:
        """See `Transport.start`; connecting takes at most three and a half times `CONNECT_TIMEOUT`, which is 3 s.

        Topics and a pattern may be combined; the pattern must match a whole topic name.
        """
        if self._listener is not None or self._closed:
            raise StateError("this transport was started before: build a new one for each life of the client")
        self._listener = listener
        self._topics = frozenset(topics)
        try:
            await reach(self._cluster, self._settings, self._topics)
            self._is_started = True
            self._cluster.when_lost(self._check_again)
            await self._check_permissions(pattern, needs_all=needs_all)
            self._check_running()
            await self._join(pattern, listener)
        except BaseException:
            if self._closed:  # without what has begun since
                with anyio.CancelScope(shield=True):
                    await self._tear_down()
            else:
                await self.close()
            raise

    async def _check_permissions(self, pattern: str | None, *, needs_all: bool) -> None:
        denied = self._topics & self._cluster.metadata.denied
        has_others = pattern is not None or denied != self._topics
        if denied and (needs_all or not has_others):
            raise self._group_error(Cause(TOPIC_DENIED, "", topics=tuple(sorted(denied))))
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await self._cluster.find_coordinator(CoordinatorKind.GROUP, self._group_id)
        except (WireError, TimeoutError) as error:
            if isinstance(error, WireError) and error.code == GROUP_DENIED:
                raise self._group_error(error.cause) from error
            logger.debug("the first look-up of the group failed, which may be transient: %s", error)

    def _group_error(self, cause: Cause) -> TransportError:
        return group_error(cause, self._group_id, self._settings.session_timeout)

    @abstractmethod
    async def _join(self, pattern: str | None, listener: GroupListener) -> None:
        """Join the group, or take the manually assigned partitions."""

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
            logger.info("leaving group %r failed: %s", self._group_id, error)
        finally:
            self._left = True
            self._end_assignment()
            # A deadline may have ended the code above, and would also end every await that follows.
            with anyio.CancelScope(shield=True):
                await self._tear_down()

    @abstractmethod
    def subscribe(self, topics: Collection[str], pattern: str | None) -> None:
        """See `Transport.subscribe`."""

    def _follow_topics(self) -> None:
        """Keep the metadata of the subscribed topics, and of those that we have partitions of, up to date."""
        assigned = {partition.topic for partition in self._buffer.partitions}
        self._cluster.follow_only(self._topics | assigned)

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
        await self._cluster.close()

    def _check_running(self) -> None:
        """Raise if no request may be sent now."""
        if not self._is_started or self._left:
            raise ClientLostError(f"the Kafka client {'is closed' if self._closed else 'was not started'}")

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
            logger.debug("the limits of session_timeout are unknown: %s", error)
            return None

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
            is_outside = self.membership() == NOT_A_MEMBER
            others = await self._look_up_rebalance() if is_outside and was_outside else None
            self._joining_with = others or ()
            was_outside = is_outside

    async def _look_up_rebalance(self) -> Sequence[GroupMember] | None:
        """Return the other members of the group if it is rebalancing; None if it is not, or the brokers do not say."""
        try:
            own_id = await self._own_member_id()
            async with asyncio.timeout(CONNECT_TIMEOUT), KafkaAdmin(self._settings) as admin:
                group = await admin.group(self._group_id)
        except (TransportError, TimeoutError) as error:
            logger.debug("the members of group %r are unknown: %s", self._group_id, error)
            return None
        if group.state not in _REBALANCING:
            return None
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
        self._check_running()
        if self._settings.assign is None:
            await self._commit_as_member(offsets, membership, messages)
        else:
            self._check_commit(offsets, membership)
            await self._commit_without_member(offsets)

    @abstractmethod
    async def _commit_as_member(
        self, offsets: Mapping[TopicPartition, Committed], membership: Membership, messages: Sequence[Message] | None
    ) -> None:
        """Send one commit, if it is still ours, with *messages* if the client has transactions."""

    async def _commit_without_member(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Send one commit, once; brokers accept it while the group has no members.

        Raises:
            GroupHasMembersError: The group has members. Nothing was stored.
            TransportError: The commit was not acknowledged; all or part of it may have been stored.
        """
        try:
            await self._send_commit(offsets, NO_MEMBER)
        except WireError as error:
            why = GROUP_CHANGED.get(error.code)
            if why is not None:
                raise _has_members(self._group_id, f"a commit was refused: {why}") from error
            raise commit_error(error.cause, offsets, self._group_id) from error

    async def _send_commit(self, offsets: Mapping[TopicPartition, Committed], member: Member) -> None:
        """Send one commit.

        Raises:
            TopicsRefusedError: Some topics were refused, and everything else is stored.
            WireError: The commit was not acknowledged.
        """
        refused = await self._offsets.commit(self._with_epochs(offsets), member)
        for error in refused.values():
            if error.code not in _ABOUT_ONE_TOPIC:
                raise error
        if refused:
            raise TopicsRefusedError({name: topic_refused(error.code, name.topic) for name, error in refused.items()})

    def _with_epochs(self, offsets: Mapping[TopicPartition, Committed]) -> dict[TopicPartition, CommittedOffset]:
        """Add the newest leader epoch that was read, where it is known: the metadata may list records of it."""
        return {
            name: CommittedOffset(committed.offset, self._newest_epoch(name), committed.metadata)
            for name, committed in offsets.items()
        }

    def _newest_epoch(self, topic_partition: TopicPartition) -> int:  # noqa: ARG002 - for clients that know it
        """Return the newest leader epoch that was read of a partition; -1 if it is unknown."""
        return UNKNOWN

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
            self._check_running()
            try:
                commits = await self._offsets.committed(partitions)
            except WireError as error:
                cause = error.cause
                if not cause.retriable or cause.code == UNSTABLE_OFFSET:
                    what = f"return the committed offsets of {named(partitions)}"
                    raise request_error(cause, what, self._group_id) from error
                await asyncio.sleep(_RETRY_BACKOFF)
            else:
                self._epochs |= commits
                return {name: _committed(commits.get(name)) for name in partitions}
        return {}

    async def truncations(self, commits: Mapping[TopicPartition, Committed]) -> Mapping[TopicPartition, int | None]:
        """See `Transport.truncations`. Takes at most two thirds of `commit_timeout`.

        The newest leader epoch that the group had read is stored beside the committed offset (KIP-320).
        """
        self._check_running()
        known = {name: self._epochs[name] for name in commits if name in self._epochs}
        epochs = {
            name: stored.epoch
            for name, stored in known.items()
            if stored.epoch != UNKNOWN and stored.offset == commits[name].offset
        }
        found: dict[TopicPartition, int | None] = dict.fromkeys(commits.keys() - epochs.keys())
        if not epochs:
            return found
        ends = await self._answered(
            epoch_ends(self._cluster, epochs, self._settings.commit_timeout / 3),
            f"return the ends of leader epochs of {named(epochs)}",
        )
        for name, end in ends.items():
            found[name] = self._parting(name, epochs[name], end)
        return found

    def _parting(self, topic_partition: TopicPartition, epoch: int, end: EpochEnd | None) -> int | None:
        """Return where a log parts from the one that was read up to an epoch; None if nobody can tell."""
        # 1. The leader has no history of the epoch, or answers about another one.
        if end is None or end.epoch > epoch:
            return None
        # 2. It is another log, and all of it is new to the group.
        if not self._was_elected_since(topic_partition, epoch):
            return None
        # 3. It is the same log up to the end of the epoch.
        return end.end

    def _was_elected_since(self, topic_partition: TopicPartition, epoch: int) -> bool:
        """Return whether a leader was elected after an epoch, as far as brokers that have accepted our epoch know.

        Only an election can lose records. Without one, a log that is too short is another one: its topic was created
        again, and its first records are new to the group.
        """
        leader = self._cluster.metadata.leader(topic_partition)
        return leader is None or leader.epoch == UNKNOWN or leader.epoch > epoch

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """See `Transport.log_ranges`. Takes at most two thirds of `commit_timeout`."""
        self._check_running()
        return await self._answered(
            log_ranges(self._cluster, partitions, self._isolation, self._settings.commit_timeout / 3),
            f"return the bounds of {named(partitions)}",
        )

    async def partitions(self, topic: str) -> Mapping[int, PartitionInfo]:
        """See `Transport.partitions`. Looks up an unknown topic once, without creating it."""
        self._check_running()
        known = self._cluster.metadata.partitions(topic)
        if known:
            return {number: _partition_info(number, partition) for number, partition in known.items()}
        what = f"return the partitions of topic {topic!r}"
        described = await self._answered(self._cluster.describe([topic]), what)
        error = described.errors.get(topic)
        if error is None:
            return described.topics[topic].partitions
        if error.code in _NO_TOPIC:
            return {}
        raise request_error(error.cause, what, self._group_id) from error

    async def topics(self) -> frozenset[str]:
        """See `Transport.topics`."""
        self._check_running()
        return await self._answered(self._cluster.list_topics(), "list the topics")

    async def creates_topics(self) -> bool | None:
        """See `Transport.creates_topics`; uses a separate connection."""
        async with KafkaAdmin(self._settings, patience=CONNECT_TIMEOUT) as admin:
            return await admin.creates_topics()

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """See `Transport.offset_at`. Has no deadline; retries transient errors."""
        times = {topic_partition: round(timestamp * 1000)}
        what = f"return the offsets of {topic_partition} by time"
        while True:
            self._check_running()
            try:
                offsets = await offsets_at(self._cluster, times, self._isolation)
            except WireError as error:
                if not error.retriable:
                    raise request_error(error.cause, what, self._group_id) from error
                offsets = {}
            if topic_partition in offsets:
                offset = offsets[topic_partition]
                return None if offset < 0 else offset
            await asyncio.sleep(_RETRY_BACKOFF)

    async def _answered(self, request: Awaitable[T], what: str) -> T:
        try:
            return await request
        except WireError as error:
            raise request_error(error.cause, what, self._group_id) from error

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
            logger.debug("the members of group %r are unknown: %s", self._group_id, error)
            members = ()
        if members:
            raise _has_members(self._group_id, named(members))
        self._check_running()
        return [TopicPartition(topic, number) for topic, numbers in assign.items() for number in numbers]


def _committed(stored: CommittedOffset | None) -> Committed | None:
    return None if stored is None else Committed(stored.offset, stored.metadata)


def _partition_info(number: int, partition: PartitionMetadata) -> PartitionInfo:
    return PartitionInfo(number, partition.leader, partition.replicas, partition.in_sync)


def _still_joining(group_id: str, others: Sequence[GroupMember], session: str) -> str:
    """Describe a rebalance that lasts; the brokers do not say which member has not rejoined, nor why."""
    if len(others) == 1:
        members = str(others[0])
        which = "it"
    else:
        members = f"{len(others)} other members ({named(others)})"
        which = "one of them"
    return (
        f"group {group_id!r} is still rebalancing with {members}; if {which} has died, the rebalance lasts until its "
        f"session ends, {session} after its last heartbeat"
    )


def _has_members(group_id: str, what: str) -> GroupHasMembersError:
    return GroupHasMembersError(
        f"group {group_id!r} has members ({what}), so the brokers refuse commits of this app, which uses manual "
        "assignment. Stop the members (a killed one counts until its session timeout), remove assign to join them, "
        "or use another group id"
    )
