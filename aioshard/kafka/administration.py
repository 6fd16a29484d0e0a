"""Admin requests for the CLI commands: everything except reading and writing records."""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Collection, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from aiokafka import errors as kafka
from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.protocol.admin import DescribeConfigsRequest
from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest
from aiokafka.protocol.metadata import MetadataRequest

from aioshard.errors import AuthorizationError, TransportError
from aioshard.kafka.answers import (
    by_topic,
    refused_offsets,
    stored_offsets,
    topic_leaders,
    topic_settings,
)
from aioshard.kafka.connecting import advertised_by, connected
from aioshard.kafka.connections import close_client, refuse_useless_connections
from aioshard.kafka.options import client_options
from aioshard.kafka.translate import reason, request_error
from aioshard.ports import Committed
from aioshard.records import TopicPartition

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["Administration"]

T = TypeVar("T")

_PATIENCE = 30.0
"""Seconds to retry transient errors, such as a leader election or a coordinator that is still loading."""
_PAUSE = 0.2


class Administration:
    """A connection for single admin requests. Owned by one event loop.

    Example:
        ```python
        async with Administration(settings) as administration:
            partitions = await administration.partitions("orders.dlt")
        ```
    """

    def __init__(self, settings: "Settings") -> None:
        """Create an administration client; connects to nothing yet.

        Raises:
            SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
        """
        self._settings = settings
        self._options = client_options(settings, request_timeout=_PATIENCE)
        self._client: Any = None

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            TransportError: No broker answers within 10 s, or a broker refuses the connection.
        """
        self._client = await connected(
            self._settings,
            self._options,
            lambda options: AIOKafkaClient(**options),
            begin=_begin,
            end=_close,
            advertised=lambda client: advertised_by(client.cluster),
            timeout=_PATIENCE,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close all connections."""
        await _close(self._client)

    # Topics ---------------------------------------------------------------------------

    async def partitions(self, topic: str) -> frozenset[int]:
        """Return the partitions of a topic without creating it.

        Raises:
            TransportError: The topic does not exist.
            AuthorizationError: This user may not see it.
        """
        return frozenset((await self._leaders(topic)).keys())

    async def topic_settings(self, topic: str, names: Collection[str]) -> dict[str, str]:
        """Return settings of a topic; the broker's default where the topic does not override it.

        Raises:
            AuthorizationError: This user may not see them.
            TransportError: The brokers did not return them.
        """

        async def ask() -> dict[str, str]:
            node = self._client.get_random_node()
            resource = (ConfigResourceType.TOPIC, topic, sorted(names))
            answer = await self._client.send(node, DescribeConfigsRequest([resource]))
            return topic_settings(answer, topic, names)

        denied = f"see the settings of topic {topic!r}: grant DESCRIBE_CONFIGS on it"
        return await self._patiently(ask, f"tell the settings of topic {topic!r}", denied=denied)

    async def _by_leader(self, partitions: Collection[TopicPartition]) -> dict[int, list[TopicPartition]]:
        """Group the partitions by the broker that leads them now.

        Raises:
            KafkaError: A partition has no leader.
            TransportError: The topic or partition does not exist.
        """
        leaders = {topic: await self._leaders(topic) for topic in {name.topic for name in partitions}}
        found: dict[int, list[TopicPartition]] = {}
        for name in partitions:
            leader = leaders[name.topic].get(name.partition)
            if leader is None:
                raise TransportError(
                    f"{name} does not exist: topic {name.topic!r} has {len(leaders[name.topic])} partitions"
                )
            if leader < 0:
                raise kafka.StaleMetadata(f"no broker is the leader of {name} now")
            found.setdefault(leader, []).append(name)
        return found

    async def _leaders(self, topic: str) -> dict[int, int]:
        return await self._patiently(functools.partial(self._look_up, topic), f"tell the partitions of topic {topic!r}")

    async def _look_up(self, topic: str) -> dict[int, int]:
        node = self._client.get_random_node()
        answer = await self._client.send(node, MetadataRequest([topic], allow_auto_topic_creation=False))
        leaders = topic_leaders(answer, topic)
        if not leaders:
            raise TransportError(f"topic {topic!r} does not exist: create it, or check its name")
        return leaders

    # Offsets of an inactive group -----------------------------------------------------

    async def committed(self, group_id: str, topic: str, partitions: Collection[int]) -> dict[int, Committed]:
        """Return the group's committed offsets; partitions without one are left out.

        Raises:
            AuthorizationError: This user may not read with the group.
            TransportError: The brokers did not return them.
        """
        ask = functools.partial(self._stored, group_id, [TopicPartition(topic, one) for one in partitions])
        found = await self._patiently(ask, f"tell the committed offsets of {topic}", group_id)
        return {one.partition: stored for one, stored in found.items()}

    async def _stored(
        self, group_id: str, partitions: Collection[TopicPartition] | None
    ) -> dict[TopicPartition, Committed]:
        """Fetch the group's committed offsets of *partitions*, or all of them with None. Sends one request."""
        node = await self._client.coordinator_lookup(CoordinationType.GROUP, group_id)
        asked = None if partitions is None else by_topic({one: one.partition for one in partitions})
        return stored_offsets(await self._client.send(node, OffsetFetchRequest(group_id, asked)), partitions or ())

    async def commit(self, group_id: str, topic: str, offsets: Mapping[int, Committed], *, retention: float) -> None:
        """Commit for a group that has no members.

        Args:
            group_id: The group.
            topic: The topic.
            offsets: By partition.
            retention: Seconds that the broker keeps them, regardless of its `offsets.retention.minutes`.

        Raises:
            AuthorizationError: This user may not read with the group.
            TransportError: The offsets were not stored, or the group has members.
        """
        due = {TopicPartition(topic, partition): committed for partition, committed in offsets.items()}

        async def send() -> None:
            for error in (await self._store(group_id, due, round(retention * 1000))).values():
                raise error

        await self._patiently(send, f"store the offsets of {topic}", group_id)

    async def _store(
        self, group_id: str, offsets: Mapping[TopicPartition, Committed], retention_ms: int
    ) -> dict[TopicPartition, kafka.KafkaError]:
        """Commit once without a member; return the error of each partition that is not acknowledged."""
        node = await self._client.coordinator_lookup(CoordinationType.GROUP, group_id)
        due = by_topic({name: (name.partition, *committed) for name, committed in offsets.items()})
        request = OffsetCommitRequest(group_id, -1, "", retention_ms, due)
        return refused_offsets(await self._client.send(node, request), offsets)

    # Errors ---------------------------------------------------------------------------

    async def _patiently(
        self, ask: Callable[[], Awaitable[T]], what: str, group_id: str = "", *, denied: str | None = None
    ) -> T:
        """Send a request, and retry transient errors for up to 30 s.

        Args:
            ask: Sends the request once.
            what: The task the brokers failed at, for the error message.
            group_id: For the error message when the group is not authorized.
            denied: The action this user may not take, for the error message when the topic is not authorized.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _PATIENCE
        while True:
            try:
                async with asyncio.timeout_at(give_up):
                    return await ask()
            except (kafka.KafkaError, TimeoutError) as error:
                if not getattr(error, "retriable", False) or loop.time() + _PAUSE > give_up:
                    raise _translated(error, what, group_id, denied) from error
            await asyncio.sleep(_PAUSE)


async def _begin(client: Any) -> bool:
    refuse_useless_connections(client)
    with contextlib.suppress(kafka.KafkaError):
        await client.bootstrap()
    for broker in client.cluster.brokers():
        if await client.ready(broker.nodeId):
            return True
    return False


async def _close(client: Any) -> None:
    # The client's own `close` swallows a cancellation.
    await close_client(client, ())


def _translated(error: BaseException, what: str, group_id: str, denied: str | None) -> TransportError:
    if isinstance(error, kafka.TopicAuthorizationFailedError) and denied is not None:
        return AuthorizationError(f"the brokers do not allow this user to {denied}")
    if isinstance(error, kafka.IncompatibleBrokerVersion):
        return TransportError(
            f"the brokers cannot {what}: they do not know that request; a Kafka does, the embedded broker not"
        )
    known = request_error(error, what, group_id)
    return (
        known
        if isinstance(known, AuthorizationError)
        else TransportError(f"the brokers did not {what}: {reason(error)}")
    )
