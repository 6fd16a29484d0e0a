"""Heartbeats of the consumer protocol as bytes."""

import uuid

import pytest

from aioshard.kafka.group.consumer_messages import (
    Heartbeat,
    HeartbeatAnswer,
    TopicIdPartition,
    heartbeat_answer,
    heartbeat_request,
)
from aioshard.kafka.wire.errors import IncompleteResponseError
from aioshard.kafka.wire.requests import CONSUMER_GROUP_HEARTBEAT
from tests.support.model_broker import encode_response

ORDERS, REFUNDS = uuid.UUID(int=1), uuid.UUID(int=2)
FULL = Heartbeat(
    life=3,
    sent_at=1.5,
    member_id="me",
    epoch=7,
    instance_id="one",
    rack="r1",
    rebalance_timeout=1.5,
    topics=("orders",),
    pattern="re.*",
    assignor="range",
    owned=frozenset({TopicIdPartition(ORDERS, 1), TopicIdPartition(ORDERS, 0), TopicIdPartition(REFUNDS, 3)}),
)


def sent(heartbeat: Heartbeat) -> dict[str, object]:
    request = heartbeat_request("billing", heartbeat)
    api = CONSUMER_GROUP_HEARTBEAT
    decoded = api.decode_request(1, api.encode(1, request.values))
    values: dict[str, object] = decoded._asdict()
    return values


def received(**values: object) -> HeartbeatAnswer:
    api = CONSUMER_GROUP_HEARTBEAT
    return heartbeat_answer(api.decode(1, encode_response(api, 1, **values)))


def test_a_full_heartbeat_says_everything() -> None:
    values = sent(FULL)
    owned = {(topic.id, *topic.partitions) for topic in values.pop("owned")}  # type: ignore[attr-defined]
    assert owned == {(ORDERS, 0, 1), (REFUNDS, 3)}
    assert values == {
        "group": "billing",
        "member": "me",
        "epoch": 7,
        "instance": "one",
        "rack": "r1",
        "rebalance_timeout_ms": 1500,
        "topics": ["orders"],
        "pattern": "re.*",
        "assignor": "range",
    }


def test_a_heartbeat_without_changes_says_nothing_of_them() -> None:
    values = sent(Heartbeat(life=1, sent_at=0.0, member_id="me", epoch=7))
    assert values.pop("rebalance_timeout_ms") == -1
    assert (values.pop("group"), values.pop("member"), values.pop("epoch")) == ("billing", "me", 7)
    assert set(values.values()) == {None}


def test_owning_nothing_is_not_the_same_as_no_change() -> None:
    assert sent(Heartbeat(life=1, sent_at=0.0, member_id="me", epoch=7, owned=frozenset()))["owned"] == []


def test_an_answer_has_an_assignment_by_topic_ids() -> None:
    answer = received(
        member="me",
        epoch=8,
        interval_ms=5000,
        assignment={"topics": [{"id": ORDERS, "partitions": [1, 0]}, {"id": REFUNDS, "partitions": []}]},
    )
    assert answer == HeartbeatAnswer(
        0, "", 8, 5.0, frozenset({TopicIdPartition(ORDERS, 0), TopicIdPartition(ORDERS, 1)})
    )


def test_no_assignment_is_not_an_empty_one() -> None:
    assert received(epoch=8, interval_ms=5000).assignment is None
    assert received(epoch=8, interval_ms=5000, assignment={"topics": []}).assignment == frozenset()


def test_an_error_has_a_message_and_no_assignment() -> None:
    answer = received(error=110, message=" fenced ", assignment={"topics": []})
    assert (answer.error, answer.message, answer.assignment) == (110, "fenced", None)


def test_an_assignment_without_its_parts_is_not_an_answer() -> None:
    api = CONSUMER_GROUP_HEARTBEAT
    values = {"throttle_ms": 0, "error": 0, "message": None, "member": None, "epoch": 1, "interval_ms": 1}
    for broken in ({"topics": None}, {"topics": [{"id": ORDERS, "partitions": None}]}):
        body = api.encode_response(1, values | {"assignment": broken})
        with pytest.raises(IncompleteResponseError):
            heartbeat_answer(api.decode(1, body))
