"""Clients reading faulty responses: an omission never means empty or done."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import errors as kafka
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.protocol.commit import OffsetCommitResponse_v3
from aiokafka.protocol.metadata import MetadataResponse_v5
from aiokafka.protocol.offset import OffsetResponse_v3
from aiokafka.protocol.produce import ProduceResponse_v7

from aioshard.errors import CommitError, GroupHasMembersError, TransportError
from aioshard.kafka.aiokafka.admin import KafkaAdmin
from aioshard.kafka.aiokafka.answers import IncompleteAnswerError
from aioshard.kafka.aiokafka.client import BareClient
from aioshard.kafka.aiokafka.internals import Internals
from aioshard.kafka.aiokafka.producer import KafkaProducer
from aioshard.kafka.aiokafka.transport import commit_without_member
from aioshard.kafka.group_protocol import FetchStableOffsets
from aioshard.ports import Committed, Message
from aioshard.records import TopicPartition
from aioshard.settings import Settings

ONE, TWO = TopicPartition("orders", 0), TopicPartition("orders", 1)
BOTH = {ONE: Committed(5, ""), TWO: Committed(7, "")}
BROKERS = [(1, "localhost", 9092, None)]


class Client:
    """Answers each request of a kind with the same answer."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def get_random_node(self) -> int:
        return 1

    cluster = SimpleNamespace(controller=SimpleNamespace(nodeId=1))

    async def force_metadata_update(self) -> bool:
        return True

    async def coordinator_lookup(self, *_: object) -> int:
        return 1

    async def send(self, _node: int, request: Any, **_group: object) -> Any:
        name = type(request).__name__
        self.asked.append(name)
        return self.answers[name]


class Answer:
    """An answer with some fields."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__ = fields

    def to_object(self) -> Any:
        return self.__dict__


class Coordinator:
    """As much of aiokafka's as a commit takes."""

    _send_req = GroupCoordinator._send_req
    _do_commit_offsets = GroupCoordinator._do_commit_offsets

    def __init__(self, client: Client, generation: int = 3, member_id: str = "me") -> None:
        self._client = client
        self.group_id = "billing"
        self.coordinator_id: int | None = 1
        self.generation, self.member_id = generation, member_id
        self.events: list[str] = []
        self._performed_join_prepare = False

    async def ensure_coordinator_known(self) -> None:
        return

    def coordinator_dead(self) -> None:
        self.events.append("dead")

    def request_rejoin(self) -> None:
        self.events.append("rejoin")

    def reset_generation(self) -> None:
        self.events.append("reset")


def stored(*partitions: tuple[int, int]) -> OffsetCommitResponse_v3:
    return OffsetCommitResponse_v3(0, [("orders", list(partitions))] if partitions else [])


def internals(answer: Any, **member: Any) -> Any:
    made: Any = object.__new__(Internals)
    made.client, made.group_id = Client(OffsetCommitRequest=answer), "billing"
    made.consumer = type("Consumer", (), {})()
    made.consumer._coordinator = Coordinator(made.client, **member)
    return made


def brokers(**answers: Any) -> Any:
    made: Any = KafkaAdmin(Settings(bootstrap_servers="localhost:9092"), patience=0.0)
    made._client = Client(**answers)
    return made


# Commits --------------------------------------------------------------------------------

COMMITS: dict[str, Callable[[Any], Awaitable[None]]] = {
    "a member": lambda answer: internals(answer).commit_once(BOTH),
    "manual assignment": lambda answer: commit_without_member(internals(answer, generation=-1, member_id=""), BOTH),
    "a command": lambda answer: brokers(OffsetCommitRequest=answer).commit_without_member("billing", BOTH),
    "dead letters": lambda answer: brokers(OffsetCommitRequest=answer).commit_without_member(
        "billing", BOTH, retry=True
    ),
}


@pytest.mark.parametrize("commit", COMMITS.values(), ids=COMMITS)
async def test_a_partition_omitted_in_a_commit_response_is_not_acknowledged(
    commit: Callable[[Any], Awaitable[None]],
) -> None:
    await commit(stored((0, 0), (1, 0)))
    for answer in (stored((0, 0)), stored()):
        with pytest.raises((IncompleteAnswerError, CommitError, TransportError)) as raised:
            await commit(answer)
        assert "missing" in str(raised.value)


@pytest.mark.parametrize(
    ("code", "event"), [(15, "dead"), (16, "dead"), (7, "dead"), (27, "rejoin"), (22, "reset"), (25, "reset")]
)
async def test_a_refused_commit_triggers_a_coordinator_lookup(code: int, event: str) -> None:
    member = internals(stored((0, 29), (1, code)))

    with pytest.raises(kafka.for_code(code)):
        await member.commit_once(BOTH)

    assert member.coordinator.events == [event]


async def test_an_older_generation_is_not_a_loss_during_a_cooperative_join() -> None:
    member = internals(stored((0, 22), (1, 22)))
    member.coordinator._performed_join_prepare = True

    with pytest.raises(kafka.IllegalGenerationError):
        await member.commit_once(BOTH)

    assert member.coordinator.events == []


@pytest.mark.parametrize("code", [22, 25, 27])
async def test_an_answer_to_a_commit_of_an_earlier_generation_changes_nothing(code: int) -> None:
    """The commit and the join take different connections, so the join may be answered first."""
    member = internals(stored((0, code), (1, code)))
    send = member.client.send

    async def send_during_a_join(*args: Any, **named: Any) -> Any:
        member.coordinator.generation += 1
        return await send(*args, **named)

    member.client.send = send_during_a_join

    with pytest.raises(kafka.for_code(code)):
        await member.commit_once(BOTH)

    assert member.coordinator.events == []


async def test_group_members_are_reported_before_a_denied_topic() -> None:
    with pytest.raises(GroupHasMembersError):
        await commit_without_member(internals(stored((0, 29), (1, 82)), generation=-1, member_id=""), BOTH)


# Committed offsets ----------------------------------------------------------------------


@pytest.mark.parametrize("code", [88, 29])
async def test_an_unstable_offset_is_an_error_when_stable_ones_are_required(
    code: int,
) -> None:
    """The brokers say so only to a client that asks for stable offsets."""
    parts: list[Any] = [(0, 7, -1, "", 0, {}), (1, 3, -1, "", code, {})]
    answer = FetchStableOffsets._CLASSES[-1].RESPONSE_TYPE(0, [("orders", parts, {})], 0, {})
    member = internals(None)
    member.client.answers["FetchStableOffsets"] = answer
    member._trusted = member.coordinator._coordinator_dead_fut = None

    with pytest.raises(kafka.KafkaError) as raised:
        await member.committed_once(BOTH, stable=True)

    assert raised.value.errno == code


# Topics ---------------------------------------------------------------------------------

NO_TOPIC: Any = (3, "orders", False, [])
NO_BROKERS = MetadataResponse_v5(0, [], None, 1, [])


def topics(*found: tuple[int, str, bool, list[Any]]) -> MetadataResponse_v5:
    return MetadataResponse_v5(0, BROKERS, None, 1, list(found))


def asking(**answers: Any) -> Any:
    made: Any = object.__new__(Internals)
    made.client = Client(**answers)
    return made


PARTITIONS: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "a transport": lambda answer: asking(MetadataRequest=answer).look_up_topic("orders"),
    "side topics": lambda answer: brokers(MetadataRequest=answer)._partition_count("orders"),
    "a command": lambda answer: brokers(MetadataRequest=answer).partitions("orders"),
}


@pytest.mark.parametrize("partitions", PARTITIONS.values(), ids=PARTITIONS)
@pytest.mark.parametrize("answer", [topics((5, "orders", False, [])), topics(), NO_BROKERS])
async def test_an_unavailable_topic_is_not_taken_for_missing(
    partitions: Callable[[Any], Awaitable[Any]], answer: Any
) -> None:
    with pytest.raises((kafka.KafkaError, TransportError)) as raised:
        await partitions(answer)

    assert "does not exist" not in str(raised.value)


async def test_a_topic_that_does_not_exist_has_no_partitions() -> None:
    assert not await PARTITIONS["a transport"](topics(NO_TOPIC))
    assert await PARTITIONS["side topics"](topics(NO_TOPIC)) == 0
    with pytest.raises(TransportError, match="does not exist"):
        await PARTITIONS["a command"](topics(NO_TOPIC))


TOPICS: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "a transport": lambda answer: asking(MetadataRequest=answer).look_up_topics(),
    "a command": lambda answer: brokers(MetadataRequest=answer).topics(),
}


@pytest.mark.parametrize("found", TOPICS.values(), ids=TOPICS)
async def test_metadata_without_brokers_does_not_mean_no_topics(
    found: Callable[[Any], Awaitable[Any]],
) -> None:
    with pytest.raises((IncompleteAnswerError, TransportError)):
        await found(NO_BROKERS)

    some = topics((0, "orders", False, []), (5, "moving", False, []), (0, "__consumer_offsets", True, []))
    assert await found(some) == {"orders", "moving"}


EXISTS = Answer(topic_errors=[("orders", 36, None)])
LED = topics((0, "orders", False, [(0, 0, 1, [], [], [])]))


@pytest.mark.parametrize(
    ("metadata", "created", "described"),
    [
        pytest.param(topics(NO_TOPIC), EXISTS, Answer(resources=[]), id="created concurrently"),
        pytest.param(topics(NO_TOPIC), Answer(topic_errors=[]), Answer(resources=[]), id="no answer whether created"),
        pytest.param(topics((5, "orders", False, [])), EXISTS, Answer(resources=[]), id="no leaders yet"),
        pytest.param(LED, None, Answer(resources=[]), id="no settings"),
        pytest.param(LED, None, Answer(resources=[(0, None, 2, "orders", [])]), id="no policy"),
    ],
)
async def test_a_side_topic_missing_in_a_response_is_retriable(metadata: Any, created: Any, described: Any) -> None:
    """It is neither too small nor kept by age, as the app would end with."""
    asked = brokers(MetadataRequest=metadata, CreateTopicsRequest=created, DescribeConfigsRequest=described)

    with pytest.raises(TransportError) as raised:
        await asked.ensure_compacted("orders", 1)

    assert type(raised.value) is TransportError
    assert raised.value.retriable


# Logs -----------------------------------------------------------------------------------


def offset_of(*partitions: tuple[int, int, int, int]) -> OffsetResponse_v3:
    return OffsetResponse_v3(0, [("orders", list(partitions))] if partitions else [])


async def test_a_log_missing_in_a_response_has_no_bounds() -> None:
    led = topics((0, "orders", False, [(0, 0, 1, [1], [1], []), (0, 1, 1, [1], [1], [])]))
    answer = offset_of((0, 0, -1, 5))

    with pytest.raises(TransportError, match="missing"):
        await brokers(MetadataRequest=led, OffsetRequest=answer).bounds([ONE, TWO])


async def test_a_partition_without_a_leader_is_named() -> None:
    led = topics((0, "orders", False, [(0, 0, 1, [1], [1], []), (5, 1, -1, [1], [1], [])]))

    with pytest.raises(TransportError, match="leader of orders/1"):
        await brokers(MetadataRequest=led, OffsetRequest=offset_of((0, 0, -1, 5))).bounds([ONE, TWO])


@pytest.mark.parametrize("answer", [offset_of(), offset_of((0, 43, -1, -1))])
async def test_a_failed_search_by_time_does_not_mean_no_newer_records(answer: Any) -> None:
    class Searching(Fetcher):  # type: ignore[misc]
        def __init__(self) -> None:
            self._client, self._isolation_level = Client(OffsetRequest=answer), 0

        async def _proc_offset_requests(self, timestamps: Any) -> Any:
            return await self._proc_offset_request(1, {"orders": [(0, timestamps[ONE])]})

    one = asking()
    one.consumer = type("Consumer", (), {"_fetcher": Searching()})()
    with pytest.raises(kafka.KafkaError):
        await one.offset_at(ONE, 1_000.0)


@pytest.mark.parametrize("creates_topics", [True, False])
async def test_only_producer_lookups_create_topics(creates_topics: bool) -> None:
    asked: list[Any] = []

    class Connection:
        async def send(self, request: Any) -> Any:
            asked.append(request)
            return LED

    async def connection(_: int) -> Connection:
        return Connection()

    made: Any = object.__new__(BareClient)
    made._topics, made._creates_topics, made._get_conn = set(), creates_topics, connection
    made.cluster = SimpleNamespace(brokers=lambda: [SimpleNamespace(nodeId=1)], update_metadata=lambda _: None)
    assert await made.look_up("orders")
    assert [(request._topics, request._allow_auto_topic_creation) for request in asked] == [
        (["orders"], creates_topics)
    ]


# Members ----------------------------------------------------------------------------------


async def test_a_refused_leave_request_is_reported() -> None:
    one = internals(None)
    one.client.answers["LeaveGroupRequest"] = Answer(error_code=16)
    vars(one.coordinator).update(
        _closing=asyncio.get_running_loop().create_future(),
        _performed_join_prepare=False,
        _coordination_task=None,
        _heartbeat_task=None,
        _group_instance_id=None,
    )

    with pytest.raises(kafka.NotCoordinatorForGroupError):
        await one.leave()


# Publishing -------------------------------------------------------------------------------


async def test_a_batch_omitted_in_a_produce_response_is_resent() -> None:
    """With the same sequence numbers, so it is stored once in any case."""
    sent: list[Any] = []

    class Leader(Client):
        lost = None
        updated_at = 0.0

        async def send(self, _node: int, request: Any, **_group: object) -> Any:
            parts = dict(request._topics)["orders"]
            sent.append(parts)
            return ProduceResponse_v7([("orders", [(parts[0][0], 0, 5, -1, 0)])], 0)

        async def look_up(self, *_topics: str) -> bool:
            return True

        async def tear_down(self) -> None:
            return

        partition_count = staticmethod(lambda _topic: 2)
        leader = staticmethod(lambda _partition: 1)

    producer = KafkaProducer(Settings(bootstrap_servers="localhost:9092"))
    producer._client, producer._identity = cast(Any, Leader()), (7, 0)

    offsets = await asyncio.gather(*(producer.publish(Message("orders", b"v", partition=number)) for number in (0, 1)))

    assert offsets == [5, 5]
    assert sent[1:] == [[sent[0][1]]]
    await producer.close()


# Single questions -----------------------------------------------------------------------

QUESTIONS: dict[str, Callable[[], Awaitable[Any]]] = {
    "settings": lambda: brokers(DescribeConfigsRequest=Answer(resources=[])).topic_settings("orders", ["retention.ms"]),
    "one setting": lambda: brokers(
        DescribeConfigsRequest=Answer(resources=[(0, None, 2, "orders", [])])
    ).topic_settings("orders", ["retention.ms"]),
    "group": lambda: brokers(DescribeConsumerGroup=Answer(groups=[])).group("billing"),
    "member": lambda: brokers(RemoveMember=Answer(error_code=0, members=[])).remove_member("billing", "gone"),
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
async def test_a_response_without_the_requested_item_is_a_clear_error(question: Callable[[], Awaitable[Any]]) -> None:
    with pytest.raises(TransportError, match="missing in the response"):
        await question()
