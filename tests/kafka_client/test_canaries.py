"""What we rely on in aiokafka beyond its documentation: when one of these fails, read our code before you upgrade.

Each private attribute that `aioshard.kafka` uses stands in the table below with the object that has it.
"""

import asyncio
import contextlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import errors as kafka_errors
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.client import AIOKafkaClient
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import AIOKafkaConnection
from aiokafka.consumer.fetcher import Fetcher, FetchError, FetchResult, PartitionRecords
from aiokafka.consumer.group_coordinator import GroupCoordinator, NoGroupCoordinator
from aiokafka.consumer.subscription_state import Assignment, SubscriptionState, TopicPartitionState
from aiokafka.partitioner import murmur2
from aiokafka.producer.sender import Sender, SendProduceReqHandler
from aiokafka.protocol.commit import OffsetCommitRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.structs import TopicPartition as TheirTopicPartition

import aioshard.kafka.chunk
import aioshard.kafka.client
import aioshard.kafka.connections
import aioshard.kafka.intake
import aioshard.kafka.internals
import aioshard.kafka.options
from aioshard.errors import AuthorizationError, ClientLostError, CommitError
from aioshard.kafka import reading, sending
from aioshard.kafka.assignors import ConsumerAssignor
from aioshard.kafka.options import client_options, producer_options
from aioshard.kafka.reading import ReadingClient
from aioshard.kafka.sending import SendingClient
from aioshard.ports import Allowance, Committed, Fault, Message
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.kafka_client.members import Member
from tests.support.shared_kafka import SharedKafka

Join = Callable[..., Member]

ATTRIBUTES = {
    "admin": {"_client", "_closed"},
    "consumer": {"_client", "_closed", "_coordinator", "_fetch_max_wait_ms", "_fetcher", "_subscription"},
    "client": {
        "_conns",
        "_get_conn",
        "_get_conn_lock_value",
        "_maybe_wait_metadata",
        "_md_update_fut",
        "_md_update_waiter",
        "_retry_backoff",
        "_sync_task",
        "_topics",
    },
    "connection": {"_versions", "_writer"},
    "coordinator": {
        "_assignors",
        "_closing",
        "_commit_refresh_task",
        "_coordination_task",
        "_coordinator_dead_fut",
        "_do_heartbeat",
        "_group_instance_id",
        "_heartbeat_task",
        "_pending_exception",
        "_performed_join_prepare",
        "_send_req",
    },
    "outsider": {"_reset_committed_task"},
    "fetcher": {
        "_closed",
        "_create_fetch_waiter",
        "_fetch_max_wait_ms",
        "_isolation_level",
        "_fetch_task",
        "_max_partition_fetch_bytes",
        "_notify",
        "_pending_tasks",
        "_records",
        "_retrieve_offsets",
        "_wait_consume_future",
    },
    "result": {"_assignment", "_backoff", "_partition_records"},
    "entry": {"_error"},
    "part": {
        "_aborted_producers",
        "_check_crcs",
        "_consume_aborted_up_to",
        "_contains_abort_marker",
        "_isolation_level",
        "_records",
    },
    "accumulator": {"_batches", "_pending_batches", "_wakeup"},
    "batch": {"_builder", "_drain_waiter", "_msg_futures"},
    "transactions": {"_pid_and_epoch", "_pid_waiter", "_sequence_numbers"},
}
"""Names as in our code."""

INHERITED = {
    "SendingClient": {"_closed", "_message_accumulator", "_request_timeout_ms", "_sender", "_txn_manager"},
    "_Sender": {"_in_flight", "_message_accumulator", "_muted_partitions", "_retry_backoff", "_txn_manager"},
    "_Request": {"_batches", "_can_retry", "_client", "_to_reenqueue"},
    "ReadingClient": {"_get_conn", "_retry_backoff", "_sync_task", "_topics"},
}
"""What our subclasses of theirs use of themselves."""

OTHERS = {
    "coordinator": {
        "check_errors",
        "coordinator_dead",
        "coordinator_id",
        "ensure_coordinator_known",
        "generation",
        "member_id",
        "request_rejoin",
        "reset_generation",
    },
    "client": {
        "add_topic",
        "bootstrap",
        "cluster",
        "coordinator_lookup",
        "force_metadata_update",
        "get_random_node",
        "send",
        "set_topics",
    },
    "part": {"next_fetch_offset"},
    "connection": {"close", "connected"},
    "accumulator": {"add_message", "drain_by_nodes", "fail_all", "reenqueue", "waiter"},
    "batch": {"drain_ready", "failure", "future", "record_count", "retry_count", "tp"},
    "transactions": {"has_pid"},
}
"""Public by name, and documented nowhere."""


def test_the_version_is_the_one_that_was_read() -> None:
    assert importlib.metadata.version("aiokafka").startswith("0.14.")


def test_the_table_holds_every_private_attribute_that_we_use() -> None:
    modules = (
        aioshard.kafka.internals,
        aioshard.kafka.chunk,
        aioshard.kafka.intake,
        aioshard.kafka.client,
        aioshard.kafka.connections,
        sending,
        reading,
    )
    used: dict[str, set[str]] = {}
    for module in modules:
        for name, attribute in re.findall(r"\b([a-z]+)\.(_[a-z][a-z_]*)", inspect.getsource(module)):
            if name != "self":
                used.setdefault(name, set()).add(attribute)
    assert used == ATTRIBUTES


@pytest.mark.parametrize("kind", [SendingClient, sending._Sender, sending._Request, ReadingClient])
def test_the_table_holds_every_private_attribute_that_our_subclasses_use_of_theirs(kind: type) -> None:
    source = inspect.getsource(kind)
    used = set(re.findall(r"\bself\.(_[a-z][a-z_]*)", source))
    ours = {"_drain_and_look_up", "_drain_by_nodes", "_offset", "_send_again"}

    assert used - ours == INHERITED[kind.__name__]


async def test_everything_is_there_after_a_start(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"v")])
    one = member()
    await one.join(topic)
    internals = one.transport._internals
    assert internals is not None
    await one.poll_until(lambda: bool(internals.buffered), lambda _: Allowance(0, 0))
    (result,) = internals.buffered.values()
    found = {
        "consumer": internals.consumer,
        "client": internals.client,
        "connection": next(iter(internals.client._conns.values())),
        "coordinator": internals.coordinator,
        "fetcher": internals.fetcher,
        "result": result,
        "entry": FetchError(error=ValueError(), backoff=0),
        "part": result._partition_records,
    }
    kinds = (AIOKafkaConsumer, AIOKafkaClient, Fetcher, FetchResult, PartitionRecords, GroupCoordinator)
    assert {type(thing) for thing in found.values()} > set(kinds)
    missing = [
        f"{name}.{attribute}"
        for name, thing in found.items()
        for attribute in ATTRIBUTES[name] | OTHERS.get(name, set())
        if not hasattr(thing, attribute)
    ]
    assert missing == []
    assert set(internals.background_tasks()) == {"fetching", "group membership", "looking up topics"}
    assert all(not task.done() for task in internals.background_tasks().values())


async def test_a_consumer_without_a_group_has_what_we_end(kafka: SharedKafka, topic: str) -> None:
    await kafka.create_topic(topic)
    async with AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap) as consumer:
        consumer.assign([TheirTopicPartition(topic, 0)])
        assert await consumer.position(TheirTopicPartition(topic, 0)) == 0

        assert isinstance(consumer._coordinator, NoGroupCoordinator)
        assert isinstance(consumer._coordinator._reset_committed_task, asyncio.Task)


async def test_an_administrator_has_what_we_end() -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers="127.0.0.1:9")

    assert isinstance(admin._client, AIOKafkaClient)
    assert admin._closed is False


def test_their_partitions_are_ours_in_a_dictionary() -> None:
    assert {TheirTopicPartition("t", 1): "found"}[TopicPartition("t", 1)] == "found"


def test_the_state_of_a_partition_has_what_we_use() -> None:
    names = {"pause", "resume", "seek", "consumed_to", "position", "paused"}
    assert names <= set(dir(TopicPartitionState))
    assert {"active", "tps", "state_value"} <= set(dir(Assignment))
    assert {"subscription", "reassignment_in_progress"} <= set(dir(SubscriptionState))
    assert {"partitions_for_topic", "add_listener", "update_metadata", "brokers"} <= set(dir(ClusterMetadata))


async def test_a_placeholder_keeps_the_client_from_choosing_a_position(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    """Without it the client raises NoOffsetForPartitionError, or goes to what is committed."""
    await kafka.create_topic(topic, partitions=4)
    one = member()
    one.at_assign = lambda _partitions, _membership: None
    await one.join(topic)
    for _ in range(6):
        await one.poll()
    assert one.faults == []
    states = one.transport._internals.states(one.transport._internals.assignment())  # type: ignore[union-attr]
    assert [(state.position, state.paused) for state in states.values()] == [(0, True)] * 4


def test_a_listener_may_be_a_plain_function() -> None:
    source = inspect.getsource(GroupCoordinator._on_join_complete)
    assert "res = self._subscription.listener.on_partitions_assigned(assigned)" in source
    assert "if asyncio.iscoroutine(res)" in source
    assert issubclass(aioshard.kafka.internals.Rebalances, ConsumerRebalanceListener)


async def test_a_commit_is_built_before_anything_is_awaited_and_sent_once(
    kafka: SharedKafka, topic: str, member: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kafka.create_topic(topic)
    one = member()
    (_, membership) = await one.join(topic)
    internals: Any = one.transport._internals
    requests: list[Any] = []

    async def send(request: Any) -> None:
        requests.append(request)
        raise kafka_errors.GroupCoordinatorNotAvailableError

    monkeypatch.setattr(internals.coordinator, "_send_req", send)
    committing = internals.commit_once({TopicPartition(topic, 0): Committed(5, "m")})
    with pytest.raises(kafka_errors.GroupCoordinatorNotAvailableError):
        committing.send(None)

    (request,) = requests
    assert isinstance(request, OffsetCommitRequest)
    told = vars(request).values()
    assert membership.member_id in told
    assert membership.generation in told
    assert [(topic, [(0, 5, "m")])] in told


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


async def test_no_partition_waits_for_one_that_is_not_taken(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"v")])
    one = member()
    await one.join(topic)
    buffered = one.transport._internals.buffered  # type: ignore[union-attr]
    await one.poll_until(lambda: bool(buffered), lambda _: Allowance(0, 0))
    (result,) = buffered.values()
    fresh = FetchResult(TheirTopicPartition(topic, 0), assignment=None, partition_records=None, backoff=10)
    assert fresh.calculate_backoff() > 9
    await one.poll(lambda _: Allowance(0, 0))
    assert result.calculate_backoff() == 0


async def test_a_record_that_the_client_steps_over_is_gone_back_to(
    kafka: SharedKafka, topic: str, member: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiokafka takes a batch that comes in part for one that never comes whole, and goes on behind it."""
    await kafka.create_topic(topic)
    at = TopicPartition(topic, 0)
    await kafka.produce(topic, [(None, bytes(1000))] * 3)
    one = member()
    one.at_assign = lambda _partitions, _membership: None
    await one.join(topic)
    client = one.transport._internals.client  # type: ignore[union-attr]
    send = client.send

    async def cut(node: int, request: Any, **options: Any) -> Any:
        answer = await send(node, request, **options)
        if type(request).__name__ == "FetchRequest":
            ((name, ((*head, batches), *_)),) = answer.topics
            answer.topics = [(name, [(*head, batches[: len(batches) // 2])])]
        return answer

    monkeypatch.setattr(client, "send", cut)
    one.transport.seek(at, 0)
    one.transport.resume([at])
    await one.poll_until(lambda: bool(one.faults))
    monkeypatch.undo()

    assert isinstance(one.faults[0], Fault)
    assert "offset 0" in str(one.faults[0].error)
    assert one.transport.position(at) == 0
    await one.read_to({at: 3})
    assert one.offsets(at) == [0, 1, 2]


async def test_a_connection_to_a_broker_that_names_no_versions_is_given_up(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    """A broker that is just starting does; the client would fail with every request on it, for minutes."""
    await kafka.create_topic(topic)
    one = member()
    (partitions, membership) = await one.join(topic)
    client = one.transport._internals.client  # type: ignore[union-attr]
    useless = list(client._conns.values())
    for connection in useless:
        connection._versions = {}

    await kafka.produce(topic, [(None, b"v")])
    await one.read_to({partitions[0]: 1})
    with contextlib.suppress(CommitError):  # the commit itself may be what finds out
        await one.transport.commit({partitions[0]: Committed(1, "")}, membership)
    await one.transport.commit({partitions[0]: Committed(1, "")}, membership)

    assert one.transport.membership() == membership
    assert not [connection for connection in useless if connection.connected()]


@pytest.mark.parametrize(
    ("error", "raised", "told"),
    [
        (kafka_errors.GroupAuthorizationFailedError("a-group"), AuthorizationError, "READ"),
        (RuntimeError("nobody thought of it"), ClientLostError, "nobody thought of it"),
    ],
    ids=["a refusal", "one that nobody foresaw"],
)
async def test_a_fatal_error_of_the_coordinator_reaches_a_waiting_poll(
    kafka: SharedKafka, topic: str, member: Join, error: Exception, raised: type[Exception], told: str
) -> None:
    await kafka.create_topic(topic)
    one = member()
    await one.join(topic)
    waiting = asyncio.create_task(one.poll(timeout=30))
    await asyncio.sleep(0)
    coordinator = one.transport._internals.coordinator  # type: ignore[union-attr]

    pushed = asyncio.ensure_future(coordinator._push_error_to_user(error))

    with pytest.raises(raised, match=told):
        await waiting
    if raised is AuthorizationError:  # the client lives on
        await pushed
        assert coordinator._pending_exception is None
    pushed.cancel()


async def test_the_client_takes_an_object_for_an_assignor_and_calls_these_of_it(
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

        def on_generation_assignment(self, generation: int) -> None:
            called.append("on_generation_assignment")
            super().on_generation_assignment(generation)

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
        # If it calls the fourth too, we need not any more.
        assert called == ["metadata", "assign", "on_assignment"]
    finally:
        await consumer.stop()


# The producer ----------------------------------------------------------------------------


async def test_a_producer_has_what_we_use(kafka: SharedKafka, topic: str) -> None:
    await kafka.create_topic(topic)
    settings = Settings(bootstrap_servers=kafka.bootstrap)
    client = await sending.connect(settings, producer_options(settings), topic)
    try:
        await client.look_up(topic)
        await client.add(Message(topic, b"v"), 0)
        accumulator = client._message_accumulator
        (batches,) = accumulator._batches.values()
        found = {
            "client": client.client,
            "connection": next(iter(client.client._conns.values())),
            "accumulator": accumulator,
            "batch": batches[0],
            "transactions": client._txn_manager,
        }
        request = sending._Request(client._sender, {})
        subclasses = {"SendingClient": client, "_Sender": client._sender, "_Request": request}
        missing = [
            *(f"{name}.{one}" for name, thing in found.items() for one in ATTRIBUTES[name] if not hasattr(thing, one)),
            *(f"{name}.{one}" for name, thing in found.items() for one in OTHERS[name] if not hasattr(thing, one)),
            *(
                f"{name}.{one}"
                for name, thing in subclasses.items()
                for one in INHERITED[name]
                if not hasattr(thing, one)
            ),
        ]
        assert missing == []
    finally:
        client.give_up(RuntimeError("the test is over"))
        await client.tear_down()


async def test_a_reader_has_what_we_use(kafka: SharedKafka) -> None:
    settings = Settings(bootstrap_servers=kafka.bootstrap)
    client = await reading.connect(settings, client_options(settings, request_timeout=5))
    missing = [one for one in INHERITED["ReadingClient"] | ATTRIBUTES["client"] if not hasattr(client, one)]
    await client.tear_down()

    assert missing == []


async def test_their_producer_still_breaks_its_partition_with_a_refusal(kafka: SharedKafka, topic: str) -> None:
    """Why ours asks for a new producer id then. Theirs would do once this fails."""
    await kafka.create_topic(topic, 1, {"max.message.bytes": "2000"})
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, enable_idempotence=True, max_request_size=1 << 20)
    async with producer:
        await producer.send_and_wait(topic, b"v")
        with pytest.raises(kafka_errors.MessageSizeTooLargeError):
            await producer.send_and_wait(topic, bytes(5000))
        with pytest.raises(kafka_errors.OutOfOrderSequenceNumber):
            await producer.send_and_wait(topic, b"v")


def test_what_is_replaced_of_their_sender_is_as_it_was_read() -> None:
    routine = inspect.getsource(Sender._sender_routine)
    assert routine.index("await self._maybe_wait_for_pid()") < routine.index("drain_by_nodes(")
    assert "unknown_leaders_exist,\n                ) = self._message_accumulator.drain_by_nodes(" in routine
    assert "waiters.add(self._message_accumulator.waiter())" in routine
    request = inspect.getsource(Sender._send_produce_req)
    for statement in (
        "handler = SendProduceReqHandler(self, batches)",
        "await handler.do(node_id)",
        "self._in_flight.remove(node_id)",
        "self._muted_partitions.remove(tp)",
    ):
        assert statement in request
    do = inspect.getsource(SendProduceReqHandler.do)
    for statement in (
        "request = self.create_request()",
        "response = await self._client.send(node_id, request)",
        "self._client.force_metadata_update()",
        "await asyncio.sleep(self._default_backoff)",
        "self._sender._message_accumulator.reenqueue(batch)",
        "await self._client._maybe_wait_metadata()",
    ):
        assert statement in do


def test_a_topic_with_the_brokers_own_number_of_replicas_cannot_be_asked_for_in_their_words() -> None:
    with pytest.raises(kafka_errors.IllegalArgumentError):
        NewTopic("t", 1, -1)


def test_a_connection_asks_no_more_of_its_writer_than_ours_can() -> None:
    """And an `OSError` is still all that it is ready for when it writes."""
    source = inspect.getsource(AIOKafkaConnection)

    assert set(re.findall(r"\b_writer\.(\w+)", source)) == {"close", "drain", "write"}
    assert re.findall(r"except (.*):", inspect.getsource(AIOKafkaConnection.send)) == ["OSError as err"]


def test_their_look_up_would_create_topics() -> None:
    assert "MetadataRequest(list(topics) if topics else None)" in inspect.getsource(AIOKafkaClient._metadata_update)
    assert inspect.signature(MetadataRequest).parameters["allow_auto_topic_creation"].default is None


def test_murmur2_is_that_of_java() -> None:
    """The vectors of Kafka's own tests."""
    assert [murmur2(key) - 2**32 for key in (b"21", b"foobar")] == [-973932308, -790332482]
