"""Broker responses with any error in any field, and with parts left out, doubled or added, never mean empty or done.

The error fields and the parts are those of the responses' schemas, in each version, so that none is forgotten.
"""

import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from aioshard.kafka.group.consumer_messages import heartbeat_answer
from aioshard.kafka.wire import responses
from aioshard.kafka.wire.codes import ERROR_CODES, raise_for
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.notation import Api, Field
from aioshard.kafka.wire.requests import (
    CONSUMER_GROUP_DESCRIBE,
    CONSUMER_GROUP_HEARTBEAT,
    CREATE_TOPICS,
    DESCRIBE_CONFIGS,
    DESCRIBE_GROUPS,
    FIND_COORDINATOR,
    INCREMENTAL_ALTER_CONFIGS,
    INIT_PRODUCER_ID,
    LEAVE_GROUP,
    LIST_OFFSETS,
    METADATA,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    OFFSET_FOR_LEADER_EPOCH,
    PRODUCE,
)
from aioshard.kafka.wire.responses import ResourceKind
from aioshard.records import TopicPartition

Path = tuple[str, ...]
Asked = Collection[TopicPartition]
Results = Mapping[TopicPartition, WireError | None]
"""The error of a partition; None if something is known of it, or done. No entry if nothing is known."""

CODES = [*ERROR_CODES, 999]
IDS = {"orders": uuid.UUID(int=1), "sales": uuid.UUID(int=2)}
NAMES = {topic_id: topic for topic, topic_id in IDS.items()}
VALUES = {
    "offset": 5,
    "timestamp": 7,
    "epoch": 3,
    "end": 9,
    "producer_id": 11,
    "node": 1,
    "leader": 1,
    "port": 9092,
    "host": "localhost",
    "group": "billing",
    "member": "me",
    "instance": "one",
    "value": "1",
}
FOREIGN = {
    "topic": "refunds",
    "id": uuid.UUID(int=3),
    "name": "refunds",
    "partition": 99,
    "group": "shipping",
    "member": "other",
    "instance": "two",
    "node": 99,
}
"""The names and numbers of a part that was not requested."""
CHANGES = ["left out", "doubled", "added", "replaced", "null"]


class Fault(NamedTuple):
    """A fault in the part about a partition."""

    at: TopicPartition
    path: Path = ()
    """A field with an error code, or an array."""
    code: int = 0
    change: str = ""
    """One of `CHANGES` to the item of the array."""


NO_FAULT = Fault(TopicPartition("", 0))


class Question(NamedTuple):
    """A request, and how its response is read."""

    api: Api
    read: Callable[[Any, Asked], Results]
    name: str = ""
    """The `name` in its response, where that is not a topic."""
    kind: int | str = 0
    """The `kind` in its response."""
    facts: Mapping[Path, Collection[int]] = MappingProxyType({})
    """Codes that are not a fault but have a meaning, by their field."""
    harmless: Collection[tuple[Path, str]] = ()
    """Changes of arrays that are not a fault."""
    single: bool = False
    """Whether it is about one thing."""
    isolates: bool = False
    """Whether the errors of one topic or partition do not affect the others."""
    least: int = 0
    """The first version in which it is asked."""


# Responses ------------------------------------------------------------------------------------


class Writer(NamedTuple):
    """Writes responses with one fault."""

    question: Question
    version: int
    asked: Asked
    fault: Fault

    def body(self) -> bytes:
        values = self.structure(self.question.api.response, (), None)
        return self.question.api.encode_response(self.version, values)

    def structure(self, fields: Sequence[Field], path: Path, about: Any) -> dict[str, Any]:
        """The values of the part about *about*: a topic, a partition, or None for all."""
        present = [field for field in fields if field.is_in(self.version) and field.tag is None]
        return {field.name: self.value(field, (*path, field.name), about) for field in present}

    def value(self, field: Field, path: Path, about: Any) -> Any:
        if field.kind == "[":
            return self.items(field, path, about)
        if field.kind in ("(", "{"):
            return self.structure(field.fields, path, about)
        if field.name == "error":
            return self.fault.code if path == self.fault.path and self.is_at(about) else 0
        values = VALUES | {"name": self.question.name, "kind": self.question.kind}
        if "configs" in path:
            values["name"] = "retention.ms"
        if about is not None:
            topic = about.topic if isinstance(about, TopicPartition) else about
            values |= {"topic": topic, "name": topic, "id": IDS[topic]}
        if isinstance(about, TopicPartition):
            values["partition"] = about.partition
        return values.get(field.name, nothing(field.kind))

    def items(self, field: Field, path: Path, about: Any) -> Any:
        parts = self.parts(field.name, about)
        items = [self.structure(field.fields, path, part) for part in parts]
        if path != self.fault.path or not self.is_at(about):
            return items
        index = next(index for index, part in enumerate(parts) if self.is_at(part))
        item = items.pop(index)
        foreign = item | {name: value for name, value in FOREIGN.items() if name in item}
        return {
            "": [*items, item],
            "left out": items,
            "doubled": [*items, item, item],
            "added": [foreign, *items, item],
            "replaced": [*items, foreign],
            "null": None,
        }[self.fault.change]

    def parts(self, name: str, about: Any) -> list[Any]:
        """The topics or partitions that the items of an array are about."""
        if name == "topics":
            return sorted({partition.topic for partition in self.asked})
        if name == "partitions" and about is not None:
            return sorted(partition for partition in self.asked if partition.topic == about)
        return [] if name == "synonyms" else [about]

    def is_at(self, about: Any) -> bool:
        return about in (None, self.fault.at.topic, self.fault.at)


def nothing(kind: str) -> Any:
    if kind.endswith("*"):
        return []
    return {"s": "", "b": b"", "bool": False, "u": uuid.UUID(int=0)}.get(kind, 0)


def fields_of(fields: Sequence[Field], version: int, path: Path = ()) -> Iterator[tuple[Path, Field]]:
    """Return all fields of a version, with the way to each."""
    for field in fields:
        if field.is_in(version) and field.tag is None:
            yield (*path, field.name), field
            yield from fields_of(field.fields, version, (*path, field.name))


# How each response is read --------------------------------------------------------------------


def committed(response: Any, asked: Asked) -> Results:
    """A partition without a committed offset is not named: that is something known of it too."""
    offsets = responses.committed_offsets(response, "billing", asked, NAMES)
    assert offsets.keys() == set(asked)
    return dict.fromkeys(asked)


def all_committed(response: Any, asked: Asked) -> Results:
    responses.committed_offsets(response, "billing", None, NAMES)
    return dict.fromkeys(asked)


def commits(response: Any, asked: Asked) -> Results:
    return dict.fromkeys(asked) | responses.refused_offsets(response, asked, NAMES)


def listed(response: Any, asked: Asked) -> Results:
    answers = responses.listed_offsets(response, asked)
    assert sorted([*answers.values, *answers.errors]) == sorted(asked)
    return dict.fromkeys(answers.values) | answers.errors


def epoch_ends(response: Any, asked: Asked) -> Results:
    answers = responses.epoch_ends(response, asked)
    assert sorted([*answers.values, *answers.errors]) == sorted(asked)
    return {partition: None for partition, end in answers.values.items() if end is not None} | answers.errors


def stored(response: Any, asked: Asked) -> Results:
    answers = responses.stored_offsets(response, asked)
    assert sorted([*answers.values, *answers.errors]) == sorted(asked)
    assert set(answers.values.values()) <= {VALUES["offset"]}
    return dict.fromkeys(answers.values) | answers.errors


def identified(response: Any, asked: Asked) -> Results:
    assert responses.new_producer_id(response) == (VALUES["producer_id"], VALUES["epoch"])
    return dict.fromkeys(asked)


def found_coordinator(response: Any, asked: Asked) -> Results:
    assert responses.coordinator(response, "billing") == (1, "localhost", 9092, None)
    return dict.fromkeys(asked)


def described(response: Any, asked: Asked) -> Results:
    topics = {partition.topic for partition in asked}
    answers = responses.described_topics(response, topics)
    assert sorted([*answers.topics, *map(str, answers.errors)]) == sorted(topics)
    return results_of(answers, asked)


def all_described(response: Any, asked: Asked) -> Results:
    return results_of(responses.described_topics(response), asked)


def described_by_id(response: Any, asked: Asked) -> Results:
    return results_of(responses.described_topics(response, {IDS[partition.topic] for partition in asked}), asked)


def results_of(answers: responses.DescribedTopics, asked: Asked) -> Results:
    results: dict[TopicPartition, WireError | None] = {}
    for name, topic in answers.topics.items():
        assert name not in answers.errors
        results |= {TopicPartition(name, number): None for number, info in topic.partitions.items() if info.leader == 1}
        results |= {TopicPartition(name, number): error for number, error in topic.errors.items()}
    for partition in asked:
        error = answers.errors.get(partition.topic) or answers.errors.get(IDS[partition.topic])
        if error is not None:
            results[partition] = error
    return results


def existing(response: Any, asked: Asked) -> Results:
    """A topic that is not named does not exist."""
    responses.existing_topics(response)
    return dict.fromkeys(asked)


def settings_of(kind: ResourceKind, name: str) -> Callable[[Any, Asked], Results]:
    def read(response: Any, asked: Asked) -> Results:
        assert responses.described_settings(response, kind, name, ["retention.ms"]) == {"retention.ms": "1"}
        return dict.fromkeys(asked)

    read.__name__ = f"settings_of_{kind.name.lower()}"
    return read


def altered(response: Any, asked: Asked) -> Results:
    responses.check_altered_settings(response, ResourceKind.GROUP, "billing")
    return dict.fromkeys(asked)


def created(response: Any, asked: Asked) -> Results:
    return dict.fromkeys(asked, responses.refused_topic(response, "orders"))


def classic_group(response: Any, asked: Asked) -> Results:
    """A group with other members is something known of it."""
    responses.classic_group(response, "billing")
    return dict.fromkeys(asked)


def classic_members(response: Any, asked: Asked) -> Results:
    responses.classic_members(response, "billing")
    return dict.fromkeys(asked)


def consumer_group(response: Any, asked: Asked) -> Results:
    return {} if responses.consumer_group(response, "billing") is None else dict.fromkeys(asked)


def beat(response: Any, asked: Asked) -> Results:
    """An assignment is a fact, whatever it contains: the member drops what cannot be."""
    answer = heartbeat_answer(response)
    raise_for(answer.error)
    assert answer.assignment is not None
    return dict.fromkeys(asked)


def removed(response: Any, asked: Asked) -> Results:
    return dict.fromkeys(asked) if responses.removed_member(response, "me", None) else {}


def removed_static(response: Any, asked: Asked) -> Results:
    return dict.fromkeys(asked) if responses.removed_member(response, "", "one") else {}


EVERY_CODE = frozenset(CODES)
TOPICS = ("topics",)
PARTITIONS = ("topics", "partitions")
MEMBERS = ("groups", "members")
IN_TOPIC = (*TOPICS, "error")
IN_PARTITION = (*PARTITIONS, "error")
OTHER_BROKERS = [(("brokers",), change) for change in ("doubled", "added", "replaced")]
MORE_TOPICS = (TOPICS, "added")
MORE_PARTITIONS = (PARTITIONS, "added")
ANY_CHANGE_OF_PARTITIONS = [(PARTITIONS, change) for change in CHANGES]
OTHER_TOPICS = [(TOPICS, change) for change in ("left out", "doubled", "added", "replaced")]
OTHER_COMMITS = [
    ((*level, *array), change)
    for level in ((), ("groups",))
    for array in (TOPICS, PARTITIONS)
    for change in ("left out", "added", "replaced")
]
"""A group has a commit of any partition, or none."""
QUESTIONS = [
    Question(OFFSET_FETCH, committed),
    Question(OFFSET_FETCH, all_committed, harmless=OTHER_COMMITS),
    Question(OFFSET_COMMIT, commits, isolates=True),
    Question(LIST_OFFSETS, listed, isolates=True),
    Question(OFFSET_FOR_LEADER_EPOCH, epoch_ends, isolates=True),
    Question(PRODUCE, stored, harmless=[((*PARTITIONS, "record_errors"), change) for change in CHANGES], isolates=True),
    Question(INIT_PRODUCER_ID, identified, single=True),
    Question(FIND_COORDINATOR, found_coordinator, single=True),
    Question(METADATA, described, harmless=[*OTHER_BROKERS, MORE_PARTITIONS], isolates=True),
    Question(METADATA, described_by_id, harmless=[*OTHER_BROKERS, MORE_PARTITIONS], isolates=True, least=10),
    Question(METADATA, all_described, harmless=[*OTHER_BROKERS, MORE_PARTITIONS, MORE_TOPICS], isolates=True),
    Question(
        METADATA,
        existing,
        facts={IN_TOPIC: EVERY_CODE, IN_PARTITION: EVERY_CODE},
        harmless=[*OTHER_BROKERS, *OTHER_TOPICS, *ANY_CHANGE_OF_PARTITIONS],
    ),
    *(
        Question(
            DESCRIBE_CONFIGS,
            settings_of(kind, name),
            name=name,
            kind=kind,
            single=True,
            harmless=[(("resources", "configs"), "added")],
        )
        for kind, name in [(ResourceKind.TOPIC, "orders"), (ResourceKind.BROKER, "1"), (ResourceKind.GROUP, "billing")]
    ),
    Question(INCREMENTAL_ALTER_CONFIGS, altered, name="billing", kind=ResourceKind.GROUP, single=True),
    Question(
        CREATE_TOPICS,
        created,
        single=True,
        harmless=[((*TOPICS, "configs"), change) for change in CHANGES],
    ),
    *(
        Question(
            DESCRIBE_GROUPS,
            read,
            kind="consumer",
            single=True,
            facts={("groups", "error"): {69}},
            harmless=[(MEMBERS, change) for change in ("left out", "added", "replaced")],
        )
        for read in (classic_group, classic_members)
    ),
    Question(
        CONSUMER_GROUP_DESCRIBE,
        consumer_group,
        single=True,
        facts={("groups", "error"): {69}},
        harmless=[
            *((MEMBERS, change) for change in ("left out", "added", "replaced")),
            *(((*MEMBERS, "assignment", "partitions"), change) for change in CHANGES if change != "null"),
            *(((*MEMBERS, "target", "partitions"), change) for change in CHANGES),
        ],
    ),
    Question(
        CONSUMER_GROUP_HEARTBEAT,
        beat,
        single=True,
        harmless=[(("assignment", "topics"), change) for change in CHANGES if change != "null"],
    ),
    *(
        Question(LEAVE_GROUP, read, single=True, facts={("members", "error"): {25}})
        for read in (removed, removed_static)
    ),
]
VERSIONS = [
    (question, version)
    for question in QUESTIONS
    for version in range(max(question.api.lowest, question.least), question.api.highest + 1)
]
ONE = TopicPartition("orders", 0)
several = st.sets(st.builds(TopicPartition, st.sampled_from(list(IDS)), st.integers(0, 3)), min_size=1)


def named(value: object) -> str:
    return value.read.__name__ if isinstance(value, Question) else f"version {value}"


def results(question: Question, version: int, asked: Asked, fault: Fault) -> Results:
    """Return what a response says; an error of the whole response is one of each partition."""
    body = Writer(question, version, asked, fault).body()
    try:
        return question.read(question.api.decode(version, body), asked)
    except WireError as error:
        return dict.fromkeys(asked, error)


def is_retriable(code: int) -> bool:
    return code in ERROR_CODES and ERROR_CODES[code].retriable


def unaffected(question: Question, asked: Asked, fault: Fault) -> Asked:
    """Return the partitions that a fault must leave alone."""
    if not question.isolates or "topics" not in fault.path or fault.change in ("added", "replaced", "null"):
        return []
    if fault.path == IN_PARTITION:
        return [partition for partition in asked if partition != fault.at]
    return [partition for partition in asked if partition.topic != fault.at.topic]


def check(question: Question, version: int, asked: Asked, fault: Fault) -> WireError | None:
    """Check that nothing is known of a partition after a fault, and everything of the others; return its error."""
    found = results(question, version, asked, fault)

    error = found.get(fault.at)
    assert fault.at not in found or error is not None, fault
    for partition in unaffected(question, asked, fault):
        assert partition in found, (fault, partition)
        assert found[partition] is None, (fault, partition)
    return error


@pytest.mark.parametrize(("question", "version"), VERSIONS, ids=named)
@settings(max_examples=2, phases=[Phase.generate])
@given(several=several, data=st.data())
def test_an_error_in_any_field_means_neither_empty_nor_done(
    question: Question, version: int, several: set[TopicPartition], data: st.DataObject
) -> None:
    asked = frozenset([ONE]) if question.single else frozenset(several)
    at = data.draw(st.sampled_from(sorted(asked)))
    assert results(question, version, asked, NO_FAULT) == dict.fromkeys(asked), "it can be read"

    for path, field in fields_of(question.api.response, version):
        if field.name != "error":
            continue
        for code in EVERY_CODE.difference(question.facts.get(path, ())):
            error = check(question, version, asked, Fault(at, path, code))
            assert error is None or error.retriable is is_retriable(code), (path, code)
            assert error is None or error.code == code


@pytest.mark.parametrize(
    ("question", "version"), [pair for pair in VERSIONS if pair[0].api is not FIND_COORDINATOR], ids=named
)
@settings(max_examples=10, phases=[Phase.generate])
@given(several=several, data=st.data())
def test_a_part_that_is_left_out_doubled_or_added_means_neither_empty_nor_done(
    question: Question, version: int, several: set[TopicPartition], data: st.DataObject
) -> None:
    asked = frozenset([ONE]) if question.single else frozenset(several)
    at = data.draw(st.sampled_from(sorted(asked)))

    for path, field in fields_of(question.api.response, version):
        if field.kind != "[" or field.name == "synonyms":
            continue
        for change in CHANGES:
            if (path, change) not in question.harmless:
                error = check(question, version, asked, Fault(at, path, change=change))
                assert error is None or error.retriable or change == "null", (path, change)
