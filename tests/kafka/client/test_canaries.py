"""Undocumented aiokafka behavior that we rely on: if a test fails, review our code before upgrading.

Each private attribute that `aioshard.kafka.aiokafka` uses stands in the table below with the object that has it.
"""

import asyncio
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import errors as kafka_errors
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.client import AIOKafkaClient
from aiokafka.cluster import ClusterMetadata
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.consumer.subscription_state import Assignment, SubscriptionState, TopicPartitionState
from aiokafka.partitioner import murmur2
from aiokafka.protocol.group import JoinGroupRequest

from aioshard.errors import AuthorizationError, ClientLostError
from aioshard.kafka import aiokafka
from aioshard.kafka.aiokafka.transport import AiokafkaTransport
from aioshard.kafka.assignors import ConsumerAssignor
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from tests.kafka.client.members import Member
from tests.support.brokers import SharedKafka

Join = Callable[..., Member]

ATTRIBUTES = {
    "consumer": {"_client", "_closed", "_coordinator", "_fetcher", "_subscription"},
    "client": {
        "_conns",
        "_get_conn",
        "_get_conn_lock_value",
        "_md_update_fut",
        "_sync_task",
    },
    "connection": {"_versions", "_writer"},
    "coordinator": {
        "_closing",
        "_commit_refresh_task",
        "_coordination_task",
        "_do_heartbeat",
        "_group_instance_id",
        "_group_subscription",
        "_heartbeat_task",
        "_metadata_snapshot",
        "_on_join_prepare",
        "_pending_exception",
        "_performed_join_prepare",
        "_send_req",
        "_start_heartbeat_task",
        "_subscription",
    },
    "request": {"_group_protocols", "_member_id"},
    "forcing": {"_group_protocols", "_member_id"},
    "fetcher": {"_closed", "_fetch_task", "_pending_tasks"},
}
"""Names as in our code."""

OTHERS = {
    "coordinator": {
        "check_errors",
        "coordinator_id",
        "generation",
        "member_id",
        "request_rejoin",
        "reset_generation",
    },
    "client": {
        "bootstrap",
        "cluster",
        "force_metadata_update",
        "get_random_node",
        "send",
        "set_topics",
    },
    "connection": {"close", "connected"},
}
"""Public by name, and documented nowhere."""


def test_the_client_version_is_the_reviewed_one() -> None:
    assert importlib.metadata.version("aiokafka").startswith("0.14.")


def test_the_table_lists_every_private_attribute_that_aioshard_uses() -> None:
    used: dict[str, set[str]] = {}
    for module in Path(*aiokafka.__path__).glob("*.py"):
        for name, attribute in re.findall(r"\b([a-z]+)\.(_[a-z][a-z_]*)", module.read_text()):
            if name != "self":
                used.setdefault(name, set()).add(attribute)
    assert used == ATTRIBUTES


async def test_every_listed_attribute_exists_after_a_start(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"v")])
    one = member()
    await one.join(topic)
    internals = one.transport._internals
    assert internals is not None
    found = {
        "consumer": internals.consumer,
        "client": internals.client,
        "connection": next(iter(internals.client._conns.values())),
        "coordinator": internals.coordinator,
        "fetcher": internals.fetcher,
        "request": JoinGroupRequest("", 1, 1, "", "", "", []),
        "forcing": JoinGroupRequest("", 1, 1, "", "", "", []),
    }
    kinds = (AIOKafkaConsumer, AIOKafkaClient, Fetcher, GroupCoordinator)
    assert {type(thing) for thing in found.values()} > set(kinds)
    missing = [
        f"{name}.{attribute}"
        for name, thing in found.items()
        for attribute in ATTRIBUTES[name] | OTHERS.get(name, set())
        if not hasattr(thing, attribute)
    ]
    assert missing == []
    assert set(internals.background_tasks()) == {"group membership", "looking up topics"}
    assert all(not task.done() for task in internals.background_tasks().values())


def test_the_state_of_a_partition_has_the_attributes_that_we_use() -> None:
    names = {"pause", "seek", "position", "paused"}
    assert names <= set(dir(TopicPartitionState))
    assert {"tps", "state_value"} <= set(dir(Assignment))
    assert {"subscription", "abort_waiters"} <= set(dir(SubscriptionState))
    assert {"partitions_for_topic", "update_metadata", "brokers"} <= set(dir(ClusterMetadata))


async def test_a_placeholder_keeps_the_client_from_choosing_a_position_and_fetching(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    """Without it the client raises NoOffsetForPartitionError, or reads from the committed offset."""
    await kafka.create_topic(topic, partitions=4)
    await kafka.produce(topic, [(None, b"v")])
    one = member()
    one.at_assign = lambda _partitions, _membership: None
    await one.join(topic)
    for _ in range(6):
        await one.poll()
    assert one.faults == []
    assert not one.transport._internals.fetcher._records  # type: ignore[union-attr]
    assignment = one.transport._internals.subscription.subscription.assignment  # type: ignore[union-attr]
    states = [assignment.state_value(partition) for partition in assignment.tps]
    assert [(state.position, state.paused) for state in states] == [(0, True)] * 4


def test_a_listener_may_be_a_plain_function() -> None:
    source = inspect.getsource(GroupCoordinator._on_join_complete)
    assert "res = self._subscription.listener.on_partitions_assigned(assigned)" in source
    assert "if asyncio.iscoroutine(res)" in source
    assert issubclass(AiokafkaTransport, ConsumerRebalanceListener)


async def test_the_client_never_leaves_because_nobody_calls_getmany(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    await kafka.create_topic(topic)
    one = member()
    await one.join(topic)
    coordinator = one.transport._internals.coordinator  # type: ignore[union-attr]
    ten_years = 10 * 365 * 86_400
    assert coordinator._max_poll_interval > ten_years
    assert "idle_time < self._max_poll_interval" in inspect.getsource(GroupCoordinator._heartbeat_routine)
    assert "asyncio.sleep(sleep_time)" in inspect.getsource(GroupCoordinator._heartbeat_routine)


async def test_a_connection_without_api_versions_is_closed(kafka: SharedKafka, topic: str, member: Join) -> None:
    """A broker that is just starting does; the client would fail with every request on it, for minutes."""
    await kafka.create_topic(topic)
    one = member()
    (partitions, membership) = await one.join(topic)
    client = one.transport._internals.client  # type: ignore[union-attr]
    useless = list(client._conns.values())
    for connection in useless:
        connection._versions = {}

    await one.poll_until(lambda: not any(connection.connected() for connection in useless))
    await one.transport.commit({partitions[0]: Committed(1, "")}, membership)

    assert one.transport.membership() == membership
    assert not [connection for connection in useless if connection.connected()]


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (kafka_errors.GroupAuthorizationFailedError("a-group"), AuthorizationError, "READ"),
        (RuntimeError("nobody thought of it"), ClientLostError, "nobody thought of it"),
    ],
    ids=["a refusal", "an unexpected error"],
)
async def test_a_fatal_error_of_the_coordinator_reaches_a_waiting_poll(
    kafka: SharedKafka, topic: str, member: Join, error: Exception, raised: type[Exception], message: str
) -> None:
    await kafka.create_topic(topic)
    one = member()
    await one.join(topic)
    waiting = asyncio.create_task(one.poll(timeout=30))
    await asyncio.sleep(0)
    coordinator = one.transport._internals.coordinator  # type: ignore[union-attr]

    pushed = asyncio.ensure_future(coordinator._push_error_to_user(error))

    with pytest.raises(raised, match=message):
        await waiting
    if raised is AuthorizationError:  # the client lives on
        await pushed
        assert coordinator._pending_exception is None
    pushed.cancel()


async def test_the_client_accepts_an_assignor_object_and_calls_these_methods(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    called = []

    class Recorder(ConsumerAssignor):
        def metadata(self, topics: Iterable[str]) -> Any:
            called.append("metadata")
            return super().metadata(topics)

        def assign(self, cluster: Any, members: Mapping[str, Any]) -> dict[str, Any]:
            called.append("assign")
            return super().assign(cluster, members)

        def on_assignment(self, assignment: Any) -> None:
            called.append("on_assignment")
            super().on_assignment(assignment)

    await kafka.create_topic(topic)
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=kafka.bootstrap,
        group_id=group,
        partition_assignment_strategy=(Recorder("sticky"),),
        auto_offset_reset="none",
        enable_auto_commit=False,
    )
    try:
        async with asyncio.timeout(30):
            await consumer.start()
        assert consumer.assignment() == {TopicPartition(topic, 0)}
        # It does not call on_generation_assignment, which theirs has: the transport sets the generation.
        assert called == ["metadata", "assign", "on_assignment"]
    finally:
        await consumer.stop()


# Other clients --------------------------------------------------------------------------


async def test_their_producer_still_breaks_a_partition_after_a_refusal(kafka: SharedKafka, topic: str) -> None:
    """Why ours is our own. Theirs would do once this fails."""
    await kafka.create_topic(topic, 1, {"max.message.bytes": "2000"})
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, enable_idempotence=True, max_request_size=1 << 20)
    async with producer:
        await producer.send_and_wait(topic, b"v")
        with pytest.raises(kafka_errors.MessageSizeTooLargeError):
            await producer.send_and_wait(topic, bytes(5000))
        with pytest.raises(kafka_errors.OutOfOrderSequenceNumber):
            await producer.send_and_wait(topic, b"v")


def test_murmur2_matches_java() -> None:
    """The vectors of Kafka's own tests."""
    assert [murmur2(key) - 2**32 for key in (b"21", b"foobar")] == [-973932308, -790332482]
