"""Admin requests: topics, logs and groups."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, Self, TypeVar

from aioshard.errors import (
    AuthorizationError,
    CommitError,
    CommitRefusedError,
    SettingsError,
    SideTopicError,
    TransportError,
)
from aioshard.kafka.errors import (
    CLUSTER_DENIED,
    GROUP_CHANGED,
    TOPIC_DENIED,
    UNSUPPORTED_VERSION,
    Cause,
    denied,
    named,
    request_error,
)
from aioshard.kafka.groups import (
    GROUP_TIMES,
    HEARTBEAT_INTERVAL,
    SESSION_TIMEOUT,
    Coordinator,
    Group,
    GroupTimes,
    TimeLimits,
    words_of,
)
from aioshard.kafka.offsets import READ_COMMITTED, READ_UNCOMMITTED, GroupOffsets, try_log_ranges, try_offsets_at
from aioshard.kafka.topics import COMPACTED, POLICY, TopicDescription, side_topic_policy_problem, side_topic_problem
from aioshard.kafka.wire.cluster import CoordinatorKind
from aioshard.kafka.wire.errors import IncompleteResponseError, WireError
from aioshard.kafka.wire.metadata import Broker
from aioshard.kafka.wire.notation import Request
from aioshard.kafka.wire.requests import (
    CONSUMER_GROUP_DESCRIBE,
    CREATE_TOPICS,
    DESCRIBE_CONFIGS,
    DESCRIBE_GROUPS,
    INCREMENTAL_ALTER_CONFIGS,
    LEAVE_GROUP,
)
from aioshard.kafka.wire.responses import (
    Answers,
    CommittedOffset,
    ResourceKind,
    check_altered_settings,
    classic_group,
    consumer_group,
    described_settings,
    group_times,
    refused_topic,
    removed_member,
)
from aioshard.kafka.wire.start import new_cluster, reach
from aioshard.ports import Committed, LogRange
from aioshard.records import PartitionInfo, TopicPartition
from aioshard.settings import Settings

T = TypeVar("T")

_PATIENCE = 30.0
"""Seconds to retry transient errors, such as a leader election or a coordinator that is still loading."""
_PAUSE = 0.2
_COMMIT_TIMEOUT = 5.0
_CREATE_TIMEOUT_MS = 30_000
_ISOLATION = {"read_uncommitted": READ_UNCOMMITTED, "read_committed": READ_COMMITTED}
_NO_TOPIC = frozenset({3, 17})
"""Error codes for topics that do not exist and for invalid topic names."""
_TOPIC_EXISTS = 36
_INVALID_SETTING = 40
_TIMED_OUT = Cause(-1, "no answer in time", retriable=True)
_SESSION_LIMITS = ("group.min.session.timeout.ms", "group.max.session.timeout.ms")
_CREATES_TOPICS = "auto.create.topics.enable"
_SET, _DELETE = 0, 1
"""Operations on a setting; the values are Kafka's."""
_TIME_LIMITS = {
    SESSION_TIMEOUT: ("group.consumer.min.session.timeout.ms", "group.consumer.max.session.timeout.ms"),
    HEARTBEAT_INTERVAL: ("group.consumer.min.heartbeat.interval.ms", "group.consumer.max.heartbeat.interval.ms"),
}
"""The brokers' settings with the least and the most milliseconds of each time of a group."""


class LogBounds(NamedTuple):
    """The bounds of a partition's log."""

    start: int
    stable: int
    """The last stable offset: the end for readers of committed records."""
    end: int
    """The offset after the last record."""

    def readable(self, isolation: Literal["read_committed", "read_uncommitted"]) -> LogRange:
        """Return what a reader with this isolation level can read."""
        return LogRange(self.start, self.stable if isolation == "read_committed" else self.end)


class KafkaAdmin:
    """A connection for admin requests. Owned by one event loop.

    Unless a method says otherwise, it retries transient errors for up to *patience* seconds. It raises
    `AuthorizationError` if this user lacks a permission, and `TransportError` if the brokers do not answer.

    Example:
        ```python
        async with KafkaAdmin(settings) as admin:
            partitions = await admin.partitions("orders.dlt")
        ```
    """

    def __init__(self, settings: Settings, *, patience: float = _PATIENCE) -> None:
        """Create an admin client; connects to nothing yet.

        Args:
            settings: The brokers, TLS and SASL.
            patience: Seconds to retry transient errors.

        Raises:
            SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
        """
        self._settings = settings
        self._patience = patience
        self._cluster = new_cluster(settings)
        self._offsets: dict[str, GroupOffsets] = {}
        """By group: each keeps the order of its commits."""

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            TransportError: No broker answers within 10 s, or a broker refuses the connection.
        """
        await reach(self._cluster, self._settings)
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Close all connections."""
        await self._cluster.close()

    # Topics ---------------------------------------------------------------------------

    async def topics(self) -> frozenset[str]:
        """Return every topic that this user may see, without internal topics."""
        return await self._with_retries(self._cluster.list_topics, "list the topics")

    async def partitions(self, topic: str) -> frozenset[int]:
        """Return the partitions of a topic without creating it.

        Raises:
            TransportError: The topic does not exist.
        """
        leaders = await self._partitions(topic)
        if not leaders:
            raise TransportError(f"topic {topic!r} does not exist: create it, or check its name")
        return frozenset(leaders)

    async def topic_id(self, topic: str) -> uuid.UUID | None:
        """Return the id of a topic, which is another one once the topic was deleted and created again.

        None if the topic does not exist, or if its brokers give no ids: those before Kafka 2.8.
        """

        async def topic_id() -> uuid.UUID | None:
            described = await self._cluster.describe([topic])
            known = described.topics.get(topic)
            return None if known is None else known.topic_id

        return await self._with_retries(topic_id, f"return the id of topic {topic!r}")

    async def topic_settings(self, topic: str, names: Collection[str]) -> dict[str, str]:
        """Return settings of a topic; the broker's default where the topic does not override it."""

        async def settings() -> dict[str, str]:
            response = await self._cluster.ask_any(_describe_settings(ResourceKind.TOPIC, topic, names))
            return described_settings(response, ResourceKind.TOPIC, topic, names)

        try:
            return await self._with_retries(settings, f"return the settings of topic {topic!r}")
        except AuthorizationError as error:
            raise AuthorizationError(
                f"the brokers do not allow this user to see the settings of topic {topic!r}: grant DESCRIBE_CONFIGS "
                "on it"
            ) from error

    async def creates_topics(self) -> bool | None:
        """Return whether the brokers create topics on demand; None if they do not say, or not to this user."""

        async def answer() -> bool | None:
            try:
                settings = await self._broker_settings(self._cluster.any_broker(), [_CREATES_TOPICS])
            except WireError as error:
                if error.code == UNSUPPORTED_VERSION:
                    return None  # the embedded broker
                raise
            return settings[_CREATES_TOPICS] == "true"

        try:
            return await self._with_retries(answer, "say whether they create topics on demand")
        except TransportError as error:
            if error.retriable:
                raise
            return None

    async def ensure_compacted(self, topic: str, partitions: int) -> None:
        """Create a compacted topic, or check that an existing one is compacted and has enough partitions.

        Raises:
            SideTopicError: The topic is not compacted, or has too few partitions.
        """
        count = await self._partition_count(topic)
        if not count and await self.create_topic(topic, partitions, COMPACTED):
            return
        count = count or await self._partition_count(topic)
        if not count:
            raise TransportError(f"topic {topic!r} was just created, and not every broker knows it yet")
        problem = side_topic_problem(topic, count, partitions)
        if problem is None:
            policy = (await self.topic_settings(topic, [POLICY]))[POLICY]
            problem = side_topic_policy_problem(topic, policy)
        if problem is not None:
            raise SideTopicError(problem)

    async def _partition_count(self, topic: str) -> int:
        """Return the number of partitions; 0 if the topic does not exist or this user may not see it."""
        try:
            return len(await self._partitions(topic))
        except AuthorizationError:
            return 0

    async def describe_topic(self, topic: str, names: Collection[str]) -> TopicDescription | None:
        """Return the partitions of a topic and the settings *names*; None if it does not exist."""
        leaders = await self._partitions(topic)
        if not leaders:
            return None
        try:
            settings = await self.topic_settings(topic, names)
        except AuthorizationError:
            settings = {}
        return TopicDescription(len(leaders), settings)

    async def create_topic(self, topic: str, partitions: int, settings: Mapping[str, str]) -> bool:
        """Create a topic with the brokers' default replication factor; return False if it exists by now.

        Args:
            topic: Its name.
            partitions: Number of partitions; -1 for the brokers' default.
            settings: Those that differ from the brokers' defaults.

        Raises:
            AuthorizationError: This user may not create it.
            TransportError: The brokers refused it, or do not answer.
        """

        async def send() -> WireError | None:
            await self._cluster.look_up(())
            controller = self._cluster.metadata.controller
            if controller is None:
                raise TransportError(
                    f"topic {topic!r} does not exist and cannot be created now, because the cluster has no controller. "
                    "An election ends by itself; the embedded broker never has one, so use TestClient or a real broker"
                )
            return refused_topic(await self._cluster.ask(controller, request), topic)

        wanted = {
            "name": topic,
            "partitions": partitions,
            "replication": -1,
            "assignments": [],
            "configs": [{"name": name, "value": value} for name, value in settings.items()],
        }
        request = CREATE_TOPICS(topics=[wanted], timeout_ms=_CREATE_TIMEOUT_MS, validate_only=False)
        refusal = await self._with_retries(send, f"create topic {topic!r}")
        if refusal is None:
            return True
        if refusal.code == _TOPIC_EXISTS:
            return False
        if refusal.code in (TOPIC_DENIED, CLUSTER_DENIED):
            by_hand = "" if partitions < 0 else f" with {partitions} partitions"
            if settings:
                by_hand += f", {' and '.join(f'{name}={value}' for name, value in settings.items())},"
            raise AuthorizationError(
                f"topic {topic!r} does not exist, as far as this user may see, and the brokers do not allow this user "
                f"to create it: grant CREATE on it, or create it{by_hand} and grant READ, WRITE and DESCRIBE_CONFIGS"
            )
        raise TransportError(
            f"topic {topic!r} could not be created: {refusal.cause.reason}", retriable=refusal.retriable
        )

    async def _partitions(self, topic: str) -> dict[int, PartitionInfo]:
        """Return the partitions of a topic by number; empty if the topic does not exist."""

        async def partitions() -> dict[int, PartitionInfo]:
            return (await self._partitions_of([topic]))[topic]

        return await self._with_retries(partitions, f"return the partitions of topic {topic!r}")

    async def _partitions_of(self, topics: Collection[str]) -> dict[str, dict[int, PartitionInfo]]:
        """Return the partitions of each topic by number; none for a topic that does not exist. One attempt.

        Raises:
            WireError: No broker answered, or a topic has another error.
        """
        described = await self._cluster.describe(topics)
        partitions: dict[str, dict[int, PartitionInfo]] = {}
        for topic in topics:
            error = described.errors.get(topic)
            if error is None:
                partitions[topic] = described.topics[topic].partitions
            elif error.code in _NO_TOPIC:
                partitions[topic] = {}
            else:
                raise error
        return partitions

    async def _broker_settings(self, node: int, names: Collection[str]) -> dict[str, str]:
        """Return settings of a broker. One attempt.

        Raises:
            WireError: The broker did not answer, or refused.
        """
        response = await self._cluster.ask(node, _describe_settings(ResourceKind.BROKER, str(node), names))
        return described_settings(response, ResourceKind.BROKER, str(node), names)

    # Logs -----------------------------------------------------------------------------

    async def bounds(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, LogBounds]:
        """Fetch the current bounds of each partition's log."""

        async def ranges() -> dict[TopicPartition, LogRange]:
            await self._refuse_missing(partitions)
            return _complete(await try_log_ranges(self._cluster, partitions, READ_COMMITTED))

        found = await self._with_retries(ranges, _offsets_of(partitions))
        return {at: LogBounds(found[at].start, found[at].end, found[at].newest) for at in partitions}

    async def offsets_at(
        self,
        partitions: Collection[TopicPartition],
        timestamp: float,
        isolation: Literal["read_committed", "read_uncommitted"],
    ) -> dict[TopicPartition, int | None]:
        """Return the first offset of each partition whose record is not older than a time; None if there is none.

        Args:
            partitions: The partitions to search.
            timestamp: Seconds since the epoch; not negative.
            isolation: Whether records of open transactions count.
        """
        times = dict.fromkeys(partitions, round(timestamp * 1000))

        async def offsets() -> dict[TopicPartition, int]:
            await self._refuse_missing(partitions)
            return _complete(await try_offsets_at(self._cluster, times, _ISOLATION[isolation]))

        found = await self._with_retries(offsets, _offsets_of(partitions))
        return {partition: offset if offset >= 0 else None for partition, offset in found.items()}

    async def _refuse_missing(self, partitions: Collection[TopicPartition]) -> None:
        """Look up the partitions.

        Raises:
            TransportError: A partition does not exist.
            WireError: No broker answered, or a topic has an error.
        """
        known = await self._partitions_of({partition.topic for partition in partitions})
        for at in partitions:
            if at.partition not in known[at.topic]:
                count = len(known[at.topic])
                raise TransportError(f"{at} does not exist: topic {at.topic!r} has {count} partitions")

    # Groups ---------------------------------------------------------------------------

    async def coordinator(self, group_id: str) -> Coordinator:
        """Return the broker that coordinates a group, whether or not the group exists."""

        async def find() -> Coordinator:
            broker = await self._find_coordinator(group_id)
            return Coordinator(broker.node, broker.host, broker.port)

        return await self._with_retries(find, f"name the coordinator of group {group_id!r}", group_id)

    async def session_limits(self, group_id: str) -> tuple[float, float]:
        """Return the least and the most seconds that a member of a classic group may give as its session timeout.

        Raises:
            TransportError: This user lacks DESCRIBE_CONFIGS on the cluster, or the brokers do not answer.
        """

        async def limits() -> tuple[float, float]:
            coordinator = await self._find_coordinator(group_id)
            settings = await self._broker_settings(coordinator.node, _SESSION_LIMITS)
            least, most = (int(settings[name]) / 1000 for name in _SESSION_LIMITS)
            return least, most

        return await self._with_retries(limits, "return their limits of session timeouts", group_id)

    async def group(self, group_id: str) -> Group:
        """Describe a group of either protocol; a group that does not exist is "dead"."""

        async def describe() -> Group:
            return await self._kip848_group(group_id) or await self._classic_group(group_id)

        return await self._with_retries(describe, f"describe group {group_id!r}", group_id)

    async def _kip848_group(self, group_id: str) -> Group | None:
        """Describe a KIP-848 group; None if it is not one, or the brokers do not support KIP-848."""
        try:
            return await self._describe_kip848(group_id)
        except WireError as error:
            if error.code == UNSUPPORTED_VERSION:
                return None
            raise

    async def _describe_kip848(self, group_id: str) -> Group | None:
        request = CONSUMER_GROUP_DESCRIBE(groups=[group_id], operations=False)
        return consumer_group(await self._ask_coordinator(group_id, request), group_id)

    async def _classic_group(self, group_id: str) -> Group:
        return classic_group(await self._ask_coordinator(group_id, _describe_classic(group_id)), group_id)

    async def remove_member(self, group_id: str, member_id: str = "", *, instance_id: str | None = None) -> bool:
        """Remove a dead member, or a static one, from its group; others get its partitions immediately.

        Returns:
            Whether the group had it.
        """
        member = {"member": member_id, "instance": instance_id, "reason": None}
        request = LEAVE_GROUP(group=group_id, members=[member])

        async def remove() -> bool:
            return removed_member(await self._ask_coordinator(group_id, request), member_id, instance_id)

        return await self._with_retries(
            remove, f"remove member {member_id or instance_id!r} of group {group_id!r}", group_id
        )

    # Times of a group under the consumer protocol -------------------------------------

    async def has_consumer_protocol(self, group_id: str) -> bool:
        """Return whether the coordinator of a group accepts members of the consumer protocol (KIP-848).

        Brokers older than Kafka 4.0 do not, nor newer ones where it is switched off.
        """

        async def ask() -> bool:
            try:
                await self._describe_kip848(group_id)
            except WireError as error:
                if error.code == UNSUPPORTED_VERSION:
                    return False
                raise
            return True

        return await self._with_retries(ask, f"describe group {group_id!r}", group_id)

    async def group_times(self, group_id: str) -> GroupTimes:
        """Return the times of a group under the consumer protocol, whether or not the group exists."""

        async def times() -> GroupTimes:
            return await self._group_times(group_id)

        return await self._with_group_settings(times, group_id)

    async def time_limits(self) -> dict[str, TimeLimits]:
        """Return the limits of the times of groups, by Kafka's name of each; empty if this user may not see them."""

        async def limits() -> dict[str, TimeLimits]:
            names = [name for pair in _TIME_LIMITS.values() for name in pair]
            settings = await self._broker_settings(self._cluster.any_broker(), names)
            return {
                time: TimeLimits(int(settings[least]) / 1000, int(settings[most]) / 1000)
                for time, (least, most) in _TIME_LIMITS.items()
            }

        try:
            return await self._with_retries(limits, "return their limits of the times of groups")
        except TransportError as error:
            if error.retriable:
                raise
            return {}

    async def set_group_times(self, group_id: str, seconds: Mapping[str, float]) -> GroupTimes:
        """Set times of a group under the consumer protocol, and return those that are in force then.

        Args:
            group_id: The group; it need not exist.
            seconds: The times to set, by Kafka's names: see `GROUP_TIMES`.

        Raises:
            SettingsError: The brokers do not accept a time.
            AuthorizationError: This user lacks ALTER_CONFIGS on the group.
        """
        return await self._alter_group_times(group_id, {name: round(value * 1000) for name, value in seconds.items()})

    async def reset_group_times(self, group_id: str) -> GroupTimes:
        """Remove a group's own times; return the brokers' defaults, which are in force then.

        Raises:
            AuthorizationError: This user lacks ALTER_CONFIGS on the group.
        """
        return await self._alter_group_times(group_id, dict.fromkeys(GROUP_TIMES))

    async def _alter_group_times(self, group_id: str, wanted: Mapping[str, int | None]) -> GroupTimes:
        """Set times, in milliseconds, or remove those that are None; return when a broker shows them."""
        request = _alter_settings(ResourceKind.GROUP, group_id, wanted)

        async def alter() -> WireError | None:
            try:
                check_altered_settings(await self._cluster.ask_any(request), ResourceKind.GROUP, group_id)
            except WireError as error:
                if error.code == _INVALID_SETTING:
                    return error
                raise
            return None

        async def shown() -> GroupTimes:
            """The brokers learn from the controller what has changed, a moment later."""
            times = await self._group_times(group_id)
            own = {name: round(time.seconds * 1000) for name, time in times.by_name.items() if time.is_own}
            if any(own.get(name) != value for name, value in wanted.items()):
                raise IncompleteResponseError("they have stored the change, but a broker does not show it yet")
            return times

        refusal = await self._with_group_settings(alter, group_id, "change")
        if refusal is not None:
            raise SettingsError(_refused_times(group_id, wanted, refusal, await self.time_limits()))
        return await self._with_group_settings(shown, group_id)

    async def _group_times(self, group_id: str) -> GroupTimes:
        request = _describe_settings(ResourceKind.GROUP, group_id, GROUP_TIMES)
        return group_times(await self._cluster.ask_any(request), group_id)

    async def _with_group_settings(
        self, send: Callable[[], Awaitable[T]], group_id: str, verb: Literal["return", "change"] = "return"
    ) -> T:
        """Return the result of *send*, which returns or changes settings of a group; see `_with_retries`."""
        try:
            return await self._with_retries(send, f"{verb} the settings of group {group_id!r}", group_id)
        except AuthorizationError as error:
            if verb == "change":
                do, permission = "change", "ALTER_CONFIGS"
            else:
                do, permission = "see", "DESCRIBE_CONFIGS"
            raise AuthorizationError(
                f"the brokers do not allow this user to {do} the settings of group {group_id!r}: grant {permission} on "
                "it"
            ) from error

    # Offsets of a group ---------------------------------------------------------------

    async def group_commits(
        self, group_id: str, partitions: Collection[TopicPartition], *, stable: bool = True
    ) -> dict[TopicPartition, Committed | None]:
        """Return the group's committed offset of each of *partitions*, or None.

        If *stable*, wait for open transactions that may change it to end; otherwise return it as it was before them.
        """
        if not partitions:
            return {}

        async def fetch() -> dict[TopicPartition, CommittedOffset]:
            return await (await self._group_offsets(group_id)).committed(partitions, stable=stable)

        found = await self._with_retries(fetch, _committed_offsets_of(group_id), group_id)
        return {at: _without_epoch(found[at]) if at in found else None for at in partitions}

    async def all_commits(self, group_id: str) -> dict[TopicPartition, Committed]:
        """Return all committed offsets of a group; an open transaction may still change them."""

        async def fetch() -> dict[TopicPartition, CommittedOffset]:
            return await (await self._group_offsets(group_id)).all_committed()

        found = await self._with_retries(fetch, _committed_offsets_of(group_id), group_id)
        return {partition: _without_epoch(committed) for partition, committed in found.items()}

    async def commit_without_member(
        self, group_id: str, offsets: Mapping[TopicPartition, Committed], *, retry: bool = False
    ) -> None:
        """Commit for a group that has no members.

        Brokers refuse it if the group has a member of any kind; no other check is reliable. They keep the offsets for
        ten years, although the group has no members.

        Args:
            group_id: The group.
            offsets: The offsets and metadata.
            retry: Whether to retry transient errors; otherwise sends one request.

        Raises:
            CommitRefusedError: The group has a member, or a dead one that has not expired. Nothing was stored.
            AuthorizationError: This user may not read with the group or may not see a topic; offsets of other topics
                may have been stored.
            CommitError: The commit was not acknowledged; all or part of it may have been stored. If the error is
                retriable, the cause is transient.
        """
        commits = {at: CommittedOffset(offset, -1, metadata) for at, (offset, metadata) in offsets.items()}

        async def send() -> Mapping[TopicPartition, WireError]:
            refused = await (await self._group_offsets(group_id)).commit(commits)
            for error in refused.values():
                if retry and error.retriable:
                    raise error
            return refused

        if retry:
            refused = await self._with_retries(send, f"store the offsets of group {group_id!r}", group_id)
        else:
            try:
                async with asyncio.timeout(_COMMIT_TIMEOUT):
                    refused = await send()
            except WireError as error:
                raise _not_stored(error.cause, group_id) from error
            except TimeoutError as error:
                raise _not_stored(_TIMED_OUT, group_id) from error
        for refusal in refused.values():
            if (reason := GROUP_CHANGED.get(refusal.code)) is not None:
                raise CommitRefusedError(
                    f"the broker refused a commit of group {group_id!r}: it has members ({reason})"
                )
            raise _not_stored(refusal.cause, group_id, refused)

    # Requests -------------------------------------------------------------------------

    async def _group_offsets(self, group_id: str) -> GroupOffsets:
        """Return the offsets of a group, whose coordinator is known.

        Raises:
            WireError: The coordinator is unknown; `GroupOffsets` would look for it until the deadline, without saying
                why.
        """
        await self._find_coordinator(group_id)
        return self._offsets.setdefault(group_id, GroupOffsets(self._cluster, group_id))

    async def _find_coordinator(self, group_id: str) -> Broker:
        return await self._cluster.find_coordinator(CoordinatorKind.GROUP, group_id)

    async def _ask_coordinator(self, group_id: str, request: Request) -> Any:
        """Send a request to the coordinator of a group, once."""
        coordinator = await self._find_coordinator(group_id)
        return await self._cluster.ask(coordinator.node, request)

    async def _with_retries(self, send: Callable[[], Awaitable[T]], what: str, group_id: str = "") -> T:
        """Return the result of *send*; retry transient errors. *what* is for the error message."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience
        cause = _TIMED_OUT  # or the latest error, which explains more
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    return await send()
            except TimeoutError as error:
                raise request_error(cause, what, group_id) from error
            except WireError as error:
                if error.code == UNSUPPORTED_VERSION:
                    raise TransportError(
                        f"the brokers cannot {what}: they do not support that request, like the embedded broker"
                    ) from error
                cause = error.cause
                if not error.retriable or loop.time() + _PAUSE > deadline:
                    raise request_error(cause, what, group_id) from error
            await asyncio.sleep(_PAUSE)


# Requests ---------------------------------------------------------------------------------


def _describe_settings(kind: ResourceKind, name: str, settings: Collection[str]) -> Request:
    resource = {"kind": int(kind), "name": name, "keys": sorted(settings)}
    return DESCRIBE_CONFIGS(resources=[resource], synonyms=False, documentation=False)


def _alter_settings(kind: ResourceKind, name: str, values: Mapping[str, int | None]) -> Request:
    """Return a request that sets the values, and removes the settings without one."""
    configs = [
        {"name": setting, "operation": _DELETE, "value": None}
        if value is None
        else {"name": setting, "operation": _SET, "value": str(value)}
        for setting, value in values.items()
    ]
    resource = {"kind": int(kind), "name": name, "configs": configs}
    return INCREMENTAL_ALTER_CONFIGS(resources=[resource], validate_only=False)


def _describe_classic(group_id: str) -> Request:
    return DESCRIBE_GROUPS(groups=[group_id], operations=False)


def _complete(answers: Answers[T]) -> dict[TopicPartition, T]:
    """Return the answer of every partition; raise an error that does not pass, or else any error."""
    for error in sorted(answers.errors.values(), key=lambda error: error.retriable):
        raise error
    return answers.values


def _without_epoch(committed: CommittedOffset) -> Committed:
    return Committed(committed.offset, committed.metadata)


# Errors -----------------------------------------------------------------------------------


def _offsets_of(partitions: Collection[TopicPartition]) -> str:
    return f"return the offsets of {named(sorted(partitions))}"


def _committed_offsets_of(group_id: str) -> str:
    return f"return the committed offsets of group {group_id!r}"


def _refused_times(
    group_id: str, wanted: Mapping[str, int | None], refusal: WireError, limits: Mapping[str, TimeLimits]
) -> str:
    """Explain why the brokers refused times of a group, given in milliseconds."""
    outside = []
    for name, value in wanted.items():
        limit = limits.get(name)
        if value is None or limit is None or limit.least <= value / 1000 <= limit.most:
            continue
        outside.append(
            f"a {words_of(name)} of {value / 1000:g} s is outside {limit.least:g} to {limit.most:g} s "
            f"({' and '.join(_TIME_LIMITS[name])})"
        )
    if outside:
        return (
            f"the brokers refused the times of group {group_id!r}: {', and '.join(outside)}; choose a value within the "
            "limits, or change the limits on brokers and controllers"
        )
    unseen = "" if limits else "; grant DESCRIBE_CONFIGS on the cluster to see the limits of the brokers here"
    return f"the brokers refused the times of group {group_id!r}: {refusal.cause.reason}{unseen}"


def _not_stored(cause: Cause, group_id: str, refused: Collection[TopicPartition] = ()) -> TransportError:
    where = f" of {named(refused)}" if refused else ""
    return denied(cause, group_id) or CommitError(
        f"the offsets of group {group_id!r}{where} were not stored: {cause.reason}", retriable=cause.retriable
    )
