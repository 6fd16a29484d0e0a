"""Admin requests: topics, logs and groups."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, Self, TypeVar

from aiokafka import errors as kafka
from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.client import CoordinationType
from aiokafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest
from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest

from aioshard.errors import (
    AuthorizationError,
    CommitError,
    CommitRefusedError,
    SideTopicError,
    TransportError,
)
from aioshard.kafka.aiokafka.answers import (
    DescribedGroup,
    assigned_partitions,
    broker_settings,
    cause_of,
    described_group,
    error_for,
    existing_topics,
    log_offsets,
    only_part,
    raise_for,
    refused_offsets,
    removed_member,
    stored_offsets,
    topic_partitions,
    topic_settings,
)
from aioshard.kafka.aiokafka.client import BareClient
from aioshard.kafka.aiokafka.connections import connected
from aioshard.kafka.aiokafka.internals import RETENTION_MS
from aioshard.kafka.aiokafka.options import client_options
from aioshard.kafka.errors import CLUSTER_DENIED, GROUP_CHANGED, TOPIC_DENIED, denied, named, request_error
from aioshard.kafka.group_protocol import DescribeConsumerGroup, DescribeGroup, FetchStableOffsets, RemoveMember
from aioshard.kafka.offsets import END, START
from aioshard.kafka.topics import COMPACTED, POLICY, TopicDescription, side_topic_policy_problem, side_topic_problem
from aioshard.ports import Committed, LogRange
from aioshard.records import PartitionInfo, TopicPartition, by_topic
from aioshard.settings import Settings

T = TypeVar("T")

_PATIENCE = 30.0
"""Seconds to retry transient errors, such as a leader election or a coordinator that is still loading."""
_PAUSE = 0.2
_COMMIT_TIMEOUT = 5.0
_CREATE_TIMEOUT_MS = 30_000
_ISOLATION = {"read_uncommitted": 0, "read_committed": 1}
_NO_SUCH_GROUP, _NOT_SERVED = 69, 35
"""Errors for a group of the classic protocol, and for brokers that do not have the KIP-848 protocol enabled."""
_TOPIC_EXISTS = 36
_SESSION_LIMITS = ("group.min.session.timeout.ms", "group.max.session.timeout.ms")
_CREATES_TOPICS = "auto.create.topics.enable"


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


class Coordinator(NamedTuple):
    """The broker that coordinates a group."""

    broker: int
    host: str
    port: int


class GroupMember(NamedTuple):
    """A member of a group, as the brokers describe it."""

    member_id: str
    client_id: str
    host: str
    instance_id: str | None
    """None for a dynamic member."""
    partitions: tuple[TopicPartition, ...] = ()

    def __str__(self) -> str:
        """Describe the member for an error message."""
        static = f"static member {self.instance_id!r}" if self.instance_id else f"member {self.member_id!r}"
        return f"{static} (client {self.client_id!r} at {self.host.lstrip('/')})"


class Group(NamedTuple):
    """The brokers' description of a group."""

    state: str
    """The brokers' name for it, in lower case: stable, empty, dead, preparingrebalance, assigning, reconciling, …"""
    protocol: str
    """`classic`, or `consumer` (KIP-848)."""
    assignor: str
    """Empty if there is none."""
    members: tuple[GroupMember, ...]

    @property
    def owners(self) -> dict[TopicPartition, GroupMember]:
        """Map each assigned partition to its member."""
        return {partition: member for member in self.members for partition in member.partitions}


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
        self._options = client_options(settings, request_timeout=_PATIENCE)
        self._client: Any = None

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            TransportError: No broker answers within 10 s, or a broker refuses the connection.
        """
        self._client = await connected(self._settings, self._options, BareClient)
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Close all connections."""
        await self._client.tear_down()

    # Topics ---------------------------------------------------------------------------

    async def topics(self) -> frozenset[str]:
        """Return every topic that this user may see, without internal topics."""
        return await self._query("list the topics", MetadataRequest(None), existing_topics)

    async def partitions(self, topic: str) -> frozenset[int]:
        """Return the partitions of a topic without creating it.

        Raises:
            TransportError: The topic does not exist.
        """
        leaders = await self._partitions(topic)
        if not leaders:
            raise TransportError(f"topic {topic!r} does not exist: create it, or check its name")
        return frozenset(leaders)

    async def topic_settings(self, topic: str, names: Collection[str]) -> dict[str, str]:
        """Return settings of a topic; the broker's default where the topic does not override it."""
        try:
            return await self._query(
                f"return the settings of topic {topic!r}",
                DescribeConfigsRequest([(ConfigResourceType.TOPIC, topic, sorted(names))]),
                topic_settings,
                topic,
                names,
            )
        except AuthorizationError as error:
            raise AuthorizationError(
                f"the brokers do not allow this user to see the settings of topic {topic!r}: grant DESCRIBE_CONFIGS "
                "on it"
            ) from error

    async def creates_topics(self) -> bool | None:
        """Return whether the brokers create topics on demand; None if they do not say, or not to this user."""

        async def send() -> bool | None:
            node = self._client.get_random_node()
            request = DescribeConfigsRequest([(ConfigResourceType.BROKER, str(node), [_CREATES_TOPICS])])
            try:
                settings = broker_settings(await self._client.send(node, request), node, [_CREATES_TOPICS])
            except (kafka.IncompatibleBrokerVersion, kafka.UnsupportedVersionError, NotImplementedError):
                return None  # the embedded broker
            return settings[_CREATES_TOPICS] == "true"

        try:
            return await self._send_with_retries(send, "say whether they create topics on demand")
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

        async def send() -> tuple[int, str | None]:
            await self._client.force_metadata_update()
            controller = self._client.cluster.controller
            if controller is None:
                raise TransportError(
                    f"topic {topic!r} does not exist and cannot be created now, because the cluster has no controller. "
                    "An election ends by itself; the embedded broker never has one, so use TestClient or a real broker"
                )
            wanted: Any = (topic, partitions, -1, [], list(settings.items()))
            request = CreateTopicsRequest([wanted], _CREATE_TIMEOUT_MS, validate_only=False)
            response = await self._client.send(controller.nodeId, request)
            _, code, *messages = only_part(response.topic_errors, f"topic {topic!r}")
            return code, messages[0] if messages else None

        code, message = await self._send_with_retries(send, f"create topic {topic!r}")
        if code in (0, _TOPIC_EXISTS):
            return not code
        if code in (TOPIC_DENIED, CLUSTER_DENIED):
            by_hand = "" if partitions < 0 else f" with {partitions} partitions"
            if settings:
                by_hand += f", {' and '.join(f'{name}={value}' for name, value in settings.items())},"
            raise AuthorizationError(
                f"topic {topic!r} does not exist, as far as this user may see, and the brokers do not allow this user "
                f"to create it: grant CREATE on it, or create it{by_hand} and grant READ, WRITE and DESCRIBE_CONFIGS"
            )
        cause = cause_of(error_for(code))
        raise TransportError(
            f"topic {topic!r} could not be created: {message or cause.reason}", retriable=cause.retriable
        )

    async def _partitions(self, topic: str) -> dict[int, PartitionInfo]:
        """Return the partitions of a topic by number; empty if the topic does not exist."""
        return await self._query(
            f"return the partitions of topic {topic!r}",
            MetadataRequest([topic], allow_auto_topic_creation=False),
            topic_partitions,
            topic,
        )

    # Logs -----------------------------------------------------------------------------

    async def bounds(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, LogBounds]:
        """Fetch the current bounds of each partition's log."""
        # In this order, so that each bound is at or after the ones requested before it.
        starts = await self._offsets(dict.fromkeys(partitions, START), "read_uncommitted")
        stable = await self._offsets(dict.fromkeys(partitions, END), "read_committed")
        ends = await self._offsets(dict.fromkeys(partitions, END), "read_uncommitted")
        return {partition: LogBounds(starts[partition], stable[partition], ends[partition]) for partition in partitions}

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
        offsets = await self._offsets(dict.fromkeys(partitions, round(timestamp * 1000)), isolation)
        return {partition: offset if offset >= 0 else None for partition, offset in offsets.items()}

    async def _offsets(self, times: Mapping[TopicPartition, int], isolation: str) -> dict[TopicPartition, int]:
        async def send() -> dict[TopicPartition, int]:
            known = {topic: await self._partitions(topic) for topic in {partition.topic for partition in times}}
            wanted: dict[int, list[TopicPartition]] = {}
            for at in times:
                info = known[at.topic].get(at.partition)
                if info is None:
                    count = len(known[at.topic])
                    raise TransportError(f"{at} does not exist: topic {at.topic!r} has {count} partitions")
                if info.leader is None:
                    raise kafka.StaleMetadata(f"no broker is the leader of {at} now")
                wanted.setdefault(info.leader, []).append(at)
            offsets: dict[TopicPartition, int] = {}
            for leader, partitions in wanted.items():
                request = OffsetRequest(
                    -1, _ISOLATION[isolation], by_topic(partitions, lambda at: (at.partition, times[at]))
                )
                offsets |= log_offsets(await self._client.send(leader, request), partitions)
            return offsets

        return await self._send_with_retries(send, f"return the offsets of {named(sorted(times))}")

    # Groups ---------------------------------------------------------------------------

    async def coordinator(self, group_id: str) -> Coordinator:
        """Return the broker that coordinates a group, whether or not the group exists."""

        async def send() -> Coordinator:
            node = await self._client.coordinator_lookup(CoordinationType.GROUP, group_id)
            broker = self._client.cluster.broker_metadata(node)
            return Coordinator(node, broker.host, broker.port)

        return await self._send_with_retries(send, f"name the coordinator of group {group_id!r}", group_id)

    async def session_limits(self, group_id: str) -> tuple[float, float]:
        """Return the least and the most seconds that a member of a classic group may give as its session timeout.

        Raises:
            TransportError: This user lacks DESCRIBE_CONFIGS on the cluster, or the brokers do not answer.
        """

        async def send() -> tuple[float, float]:
            node = await self._client.coordinator_lookup(CoordinationType.GROUP, group_id)
            request = DescribeConfigsRequest([(ConfigResourceType.BROKER, str(node), list(_SESSION_LIMITS))])
            settings = broker_settings(await self._client.send(node, request), node, _SESSION_LIMITS)
            least, most = (int(settings[name]) / 1000 for name in _SESSION_LIMITS)
            return least, most

        return await self._send_with_retries(send, "return their limits of session timeouts", group_id)

    async def group(self, group_id: str) -> Group:
        """Describe a group of either protocol; a group that does not exist is "dead"."""

        async def send() -> Group:
            return await self._kip848_group(group_id) or await self._classic_group(group_id)

        return await self._send_with_retries(send, f"describe group {group_id!r}", group_id)

    async def _kip848_group(self, group_id: str) -> Group | None:
        """Describe a KIP-848 group; None if it is not one, or the brokers do not support KIP-848."""
        try:
            response = await self._send(DescribeConsumerGroup(group_id), group_id)
        except (kafka.IncompatibleBrokerVersion, NotImplementedError):
            return None
        group = only_part(response.to_object()["groups"], f"group {group_id!r}")
        if group["error_code"] in (_NO_SUCH_GROUP, _NOT_SERVED):
            return None
        raise_for(group["error_code"])
        members = sorted(
            GroupMember(
                member["member_id"],
                member["client_id"],
                member["client_host"],
                member["instance_id"],
                tuple(
                    sorted(
                        TopicPartition(topic["topic_name"], number)
                        for topic in member["assignment"]["topic_partitions"]
                        for number in topic["partitions"]
                    )
                ),
            )
            for member in group["members"]
        )
        return Group(group["group_state"].lower(), "consumer", group["assignor_name"] or "", tuple(members))

    async def _classic_group(self, group_id: str) -> Group:
        response = await self._send(DescribeGroup(group_id), group_id)
        group = only_part(response.to_object()["groups"], f"group {group_id!r}")
        raise_for(group["error_code"])
        members = sorted(
            GroupMember(
                member["member_id"],
                member["client_id"],
                member["client_host"],
                member.get("group_instance_id"),
                assigned_partitions(member["member_assignment"]),
            )
            for member in group["members"]
        )
        return Group(group["state"].lower(), "classic", group["protocol"] or "", tuple(members))

    async def classic_members(self, group_id: str) -> DescribedGroup:
        """Describe the members of a group of the classic protocol with their subscriptions; empty for another group."""
        return await self._query(
            f"describe group {group_id!r}", DescribeGroup(group_id), described_group, group_id, group_id=group_id
        )

    async def remove_member(self, group_id: str, member_id: str = "", *, instance_id: str | None = None) -> bool:
        """Remove a dead member, or a static one, from its group; others get its partitions immediately.

        Returns:
            Whether the group had it.
        """
        return await self._query(
            f"remove member {member_id or instance_id!r} of group {group_id!r}",
            RemoveMember(group_id, member_id=member_id, instance_id=instance_id),
            removed_member,
            group_id=group_id,
        )

    # Offsets of a group ---------------------------------------------------------------

    async def group_commits(
        self, group_id: str, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, Committed | None]:
        """Return the group's committed offset of each of *partitions*, or None; wait for open transactions to end."""
        request = FetchStableOffsets(group_id, by_topic(partitions))
        commits = await self._commits(group_id, request, partitions) if partitions else {}
        return {partition: commits.get(partition) for partition in partitions}

    async def all_commits(self, group_id: str) -> dict[TopicPartition, Committed]:
        """Return all committed offsets of a group; an open transaction may still change them."""
        return await self._commits(group_id, OffsetFetchRequest(group_id, None), ())

    async def _commits(
        self, group_id: str, request: Any, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, Committed]:
        return await self._query(
            f"return the committed offsets of group {group_id!r}",
            request,
            stored_offsets,
            partitions,
            group_id=group_id,
        )

    async def commit_without_member(
        self, group_id: str, offsets: Mapping[TopicPartition, Committed], *, retry: bool = False
    ) -> None:
        """Commit for a group that has no members.

        Brokers refuse it if the group has a member of any kind; no other check is reliable. They keep the offsets for
        ten years, although the group has no members; see `RETENTION_MS`.

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

        async def send() -> dict[TopicPartition, kafka.KafkaError]:
            commits = by_topic(offsets, lambda partition: (partition.partition, *offsets[partition]))
            request = OffsetCommitRequest(group_id, -1, "", RETENTION_MS, commits)
            refused = refused_offsets(await self._send(request, group_id), offsets)
            for error in refused.values():
                if retry and error.retriable:
                    raise error
            return refused

        if retry:
            refused = await self._send_with_retries(send, f"store the offsets of group {group_id!r}", group_id)
        else:
            try:
                async with asyncio.timeout(_COMMIT_TIMEOUT):
                    refused = await send()
            except (kafka.KafkaError, TimeoutError) as error:
                raise _not_stored(error, group_id) from error
        for refusal in refused.values():
            if (reason := GROUP_CHANGED.get(cause_of(refusal).code)) is not None:
                raise CommitRefusedError(
                    f"the broker refused a commit of group {group_id!r}: it has members ({reason})"
                )
            raise _not_stored(refusal, group_id, refused)

    # Requests -------------------------------------------------------------------------

    async def _query(self, what: str, request: Any, parse: Callable[..., T], *details: object, group_id: str = "") -> T:
        """Send a request to any broker, or to the coordinator of a group; *parse* gets the response and *details*."""

        async def send() -> T:
            return parse(await self._send(request, group_id), *details)

        return await self._send_with_retries(send, what, group_id)

    async def _send(self, request: Any, group_id: str = "") -> Any:
        client = self._client
        node = (
            await client.coordinator_lookup(CoordinationType.GROUP, group_id) if group_id else client.get_random_node()
        )
        return await client.send(node, request)

    async def _send_with_retries(self, send: Callable[[], Awaitable[T]], what: str, group_id: str = "") -> T:
        """Send a request with *send*, and retry transient errors; *what* is for the error message."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    return await send()
            except (kafka.IncompatibleBrokerVersion, kafka.UnsupportedVersionError, NotImplementedError) as error:
                raise TransportError(
                    f"the brokers cannot {what}: they do not support that request, like the embedded broker"
                ) from error
            except (kafka.KafkaError, TimeoutError) as error:
                if not getattr(error, "retriable", False) or loop.time() + _PAUSE > deadline:
                    raise request_error(cause_of(error), what, group_id) from error
            await asyncio.sleep(_PAUSE)


def _not_stored(error: BaseException, group_id: str, refused: Collection[TopicPartition] = ()) -> TransportError:
    cause = cause_of(error)
    where = f" of {named(refused)}" if refused else ""
    return denied(cause, group_id) or CommitError(
        f"the offsets of group {group_id!r}{where} were not stored: {cause.reason}",
        retriable=cause.retriable or isinstance(error, TimeoutError),
    )
