"""Broker responses with any error in any field, or with omissions, never mean empty or done.

The error fields are those of the answers' schemas, so that none is forgotten.
"""

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from io import BytesIO
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from aiokafka import errors as kafka
from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.protocol.api import Request, Response
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.group import HeartbeatRequest, LeaveGroupRequest
from aiokafka.protocol.types import Array, CompactArray, Schema
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from aioshard.errors import AioshardError
from aioshard.kafka.aiokafka.internals import Internals
from aioshard.records import TopicPartition

Path = tuple[str, ...]

CODES = sorted({*kafka.kafka_errors, 74, 75, 78, 82, 88, 89, 100, 110, 113, 999} - {0})
RETRIABLE = frozenset({2, 3, 5, 6, 7, 9, 13, 14, 15, 16, 19, 20, 41, 51, 56, 70, 71, 72, 74, 75, 78, 88, 89, 100})
"""Those of the codes that Kafka's own clients try again."""
TOPICS, PARTITIONS = {"topic", "topics", "name"}, {"partition", "partition_index"}
ONE_OF = {"groups", "members"}
"""Arrays of an answer that have one part here."""
VALUES = {
    "offset": 5,
    "low_watermark": 5,
    "leader": 1,
    "node_id": 1,
    "controller_id": 1,
    "coordinator_id": 1,
    "host": "localhost",
    "port": 9092,
    "last_stable_offset": 9,
    "highwater_offset": 9,
}


class Fault(NamedTuple):
    """A fault in a response: an error code in a field of a partition or topic, or without a field, an omission."""

    at: TopicPartition | None
    path: Path | None = None
    code: int = 0


def made(
    schema: Any, asked: Collection[TopicPartition], fault: Fault, path: Path = (), of: Any = None
) -> tuple[Any, ...]:
    """The values of an answer, in the order of its schema."""
    return tuple(
        value(name, kind, asked, fault, (*path, name), of)
        for name, kind in zip(schema.names, schema.fields, strict=True)
    )


def value(name: str, kind: Any, asked: Collection[TopicPartition], fault: Fault, path: Path, of: Any) -> Any:
    """The value of one field of the part about *of*: a topic, a partition, or None."""
    inner = kind.array_of if isinstance(kind, Array | CompactArray) else None
    if isinstance(kind, Schema):
        return made(kind, asked, fault, path, of)
    if inner is not None:
        found = parts(name, asked, fault, of) if isinstance(inner, Schema) else ()
        return [made(inner, asked, fault, path, part) for part in found]
    if name == "error_code":
        return fault.code if path == fault.path and of in (None, fault.at, fault.at and fault.at.topic) else 0
    if name in TOPICS:
        return of or "orders"
    return of.partition if name in PARTITIONS else VALUES.get(name, empty(kind))


def parts(name: str, asked: Collection[TopicPartition], fault: Fault, of: Any) -> list[Any]:
    """Return the items that an array has a part for."""
    left = (
        sorted(asked) if fault.path is not None else [partition for partition in sorted(asked) if partition != fault.at]
    )
    if name == "topics":
        return list(dict.fromkeys(partition.topic for partition in left))
    if name == "partitions":
        return [partition for partition in left if partition.topic == of]
    return [of] if name == "brokers" or (left and name in ONE_OF) else []


def empty(kind: Any) -> Any:
    """A value of a type that says nothing."""
    name = getattr(kind, "__name__", type(kind).__name__)
    return {"Boolean": False, "String": "", "CompactString": "", "Bytes": b"", "TaggedFields": {}}.get(name, 0)


def error_fields(schema: Any, path: Path = ()) -> Iterator[Path]:
    """Return the positions of error codes in a response."""
    for name, kind in zip(schema.names, schema.fields, strict=True):
        inner = kind.array_of if isinstance(kind, Array | CompactArray) else kind
        if isinstance(inner, Schema):
            yield from error_fields(inner, (*path, name))
        elif name == "error_code":
            yield (*path, name)


class Client:
    """Answers every request with one answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def get_random_node(self) -> int:
        return 1

    async def coordinator_lookup(self, *_: object) -> int:
        return 1

    async def send(self, _node: int, _request: Any, **_group: object) -> Any:
        return self.answer

    async def _send_req(self, _request: Any) -> Any:
        return self.answer


# How each answer is read: the partitions of which something is known, or done ------------------------------------

Asked = Collection[TopicPartition]
Read = Callable[[Any, Asked], Awaitable[Collection[TopicPartition]]]


async def left_group(answer: Any, asked: Asked) -> Collection[TopicPartition]:
    internals: Any = object.__new__(Internals)
    internals.group_id, internals.client = "billing", Client(answer)
    done = SimpleNamespace(done=lambda: True)
    coordinator = SimpleNamespace(
        _closing=done,
        _performed_join_prepare=False,
        _coordination_task=None,
        _heartbeat_task=None,
        _group_instance_id=None,
        coordinator_id=1,
        member_id="me",
    )
    internals.consumer = SimpleNamespace(_coordinator=coordinator)
    await internals.leave()
    return asked


async def coordinator(answer: Any, asked: Asked) -> Collection[TopicPartition]:
    client: Any = Client(answer)
    return asked if await AIOKafkaClient.coordinator_lookup(client, CoordinationType.GROUP, "billing") == 1 else ()


async def heartbeat(answer: Any, asked: Asked) -> Collection[TopicPartition]:
    member: Any = Client(answer)
    member.group_id, member.generation, member.member_id, member.coordinator_id = "billing", 1, "me", 1
    member.coordinator_dead = member.request_rejoin = member.reset_generation = lambda: None
    return asked if await GroupCoordinator._do_heartbeat(member) else ()


class Question(NamedTuple):
    """A request, and how its answer is read."""

    request: type[Request[Any]]
    read: Read
    facts: Mapping[Path, frozenset[int]] = MappingProxyType({})
    """Codes that are not a fault but have a meaning, by their field."""
    single: bool = False
    """Whether it is about one thing."""
    theirs: bool = False
    """Whether aiokafka makes the error, and with it says whether it passes."""
    least: int = 0
    """The first version in which it is asked."""


ALL = frozenset(CODES)
QUESTIONS = [
    Question(LeaveGroupRequest, left_group, single=True),
    Question(FindCoordinatorRequest, coordinator, single=True, theirs=True),
    Question(HeartbeatRequest, heartbeat, {("error_code",): frozenset({27})}, single=True, theirs=True),
]
VERSIONS = [
    (question, struct.RESPONSE_TYPE)
    for question in QUESTIONS
    for struct in question.request._CLASSES
    if question.least <= struct.API_VERSION
]
ONE = TopicPartition("orders", 0)
several = st.sets(st.builds(TopicPartition, st.sampled_from(["orders", "sales"]), st.integers(0, 3)), min_size=1)


def named(value: object) -> str:
    return value.read.__name__ if isinstance(value, Question) else f"version {getattr(value, 'API_VERSION', '')}"


async def outcome(
    question: Question, kind: type[Response], asked: Asked, fault: Fault
) -> tuple[Collection[TopicPartition], bool | None]:
    """Return what is known or done after a broker response; for an error, whether it is retriable."""
    answer = kind.decode(BytesIO(kind(*made(kind.SCHEMA, asked, fault)).encode()))
    try:
        return await question.read(answer, asked), None
    except (kafka.KafkaError, AioshardError) as error:
        return (), bool(getattr(error, "retriable", False))


@pytest.mark.parametrize(("question", "kind"), VERSIONS, ids=named)
@settings(max_examples=2, phases=[Phase.generate])
@given(several=several, data=st.data())
async def test_an_error_in_any_field_means_neither_empty_nor_done(
    question: Question, kind: type[Response], several: set[TopicPartition], data: st.DataObject
) -> None:
    asked = frozenset([ONE]) if question.single else frozenset(several)
    at = data.draw(st.sampled_from(sorted(asked)))
    assert await question.read(kind(*made(kind.SCHEMA, asked, Fault(None))), asked), "it can be read"

    for path in error_fields(kind.SCHEMA):
        for code in ALL - question.facts.get(path, frozenset()):
            known, passes = await outcome(question, kind, asked, Fault(at, path, code))
            assert at not in known, (path, code)
            assert passes is None or question.theirs or passes is (code in RETRIABLE), (path, code)
