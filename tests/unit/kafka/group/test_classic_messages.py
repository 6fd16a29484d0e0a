"""The requests of a classic member as messages, and the answers in their responses, in each version."""

from typing import Any

import pytest

from aioshard.kafka.group.classic_messages import (
    Acknowledged,
    ClassicRequest,
    Described,
    DescribeRequest,
    HeartbeatRequest,
    Joined,
    JoinRequest,
    LeaveRequest,
    Synced,
    SyncRequest,
    answer_of,
    message_of,
)
from aioshard.kafka.wire.codes import ERROR_CODES
from aioshard.kafka.wire.consumer_protocol import write_assignment
from aioshard.kafka.wire.errors import IncompleteResponseError
from aioshard.kafka.wire.notation import Api
from aioshard.kafka.wire.requests import DESCRIBE_GROUPS, HEARTBEAT, JOIN_GROUP, LEAVE_GROUP, SYNC_GROUP
from aioshard.records import TopicPartition

DESCRIBE = DescribeRequest(timeout=5)
JOIN = JoinRequest(
    member_id="me",
    instance_id="one",
    session_timeout=45.0,
    rebalance_timeout=60.5,
    protocols=(("cooperative-fair", b"new"), ("fair", b"old")),
    reason="the group rebalances",
    timeout=65.5,
)
SYNC = SyncRequest(
    member_id="me", instance_id=None, generation=7, protocol="fair", assignments={"me": b"a", "other": b"b"}, timeout=65
)
BEAT = HeartbeatRequest(member_id="me", instance_id="one", generation=7, timeout=5)
LEAVE = LeaveRequest(member_id="me", reason="closing", timeout=5)
REQUESTS: list[tuple[ClassicRequest, Api]] = [
    (DESCRIBE, DESCRIBE_GROUPS),
    (JOIN, JOIN_GROUP),
    (SYNC, SYNC_GROUP),
    (BEAT, HEARTBEAT),
    (LEAVE, LEAVE_GROUP),
]
VERSIONS = [
    pytest.param(request, api, version, id=f"{api.name} {version}")
    for request, api in REQUESTS
    for version in range(api.lowest, api.highest + 1)
]
EMPTY = {"member": "", "leader": "", "protocol": "", "kind": "consumer", "generation": -1, "skip_assignment": False}


def sent(request: ClassicRequest, version: int) -> Any:
    """The request as the broker reads it."""
    message = message_of(request, "billing")
    return message.api.decode_request(version, message.api.encode(version, message.values))


def answered(request: ClassicRequest, api: Api, version: int, **values: Any) -> Any:
    response = api.decode(version, api.encode_response(version, {"throttle_ms": 0, "error": 0} | EMPTY | values))
    return answer_of(request, response, "billing")


@pytest.mark.parametrize("version", range(JOIN_GROUP.lowest, JOIN_GROUP.highest + 1))
def test_a_join_says_all_in_each_version(version: int) -> None:
    read = sent(JOIN, version)

    assert (read.group, read.member, read.instance, read.kind) == ("billing", "me", "one", "consumer")
    assert (read.session_timeout_ms, read.rebalance_timeout_ms) == (45_000, 60_500)
    assert [tuple(protocol) for protocol in read.protocols] == [("cooperative-fair", b"new"), ("fair", b"old")]
    assert read.reason == ("the group rebalances" if version >= 8 else None)


@pytest.mark.parametrize("version", range(SYNC_GROUP.lowest, SYNC_GROUP.highest + 1))
def test_a_sync_says_all_in_each_version(version: int) -> None:
    read = sent(SYNC, version)

    assert (read.group, read.generation, read.member, read.instance) == ("billing", 7, "me", None)
    assert [tuple(part) for part in read.assignments] == [("me", b"a"), ("other", b"b")]
    assert (read.kind, read.protocol) == (("consumer", "fair") if version >= 5 else (None, None))


def test_a_heartbeat_names_the_instance() -> None:
    for version in range(HEARTBEAT.lowest, HEARTBEAT.highest + 1):
        assert tuple(sent(BEAT, version)) == ("billing", 7, "me", "one")


def test_a_leave_names_the_member_and_the_reason() -> None:
    for version in range(LEAVE_GROUP.lowest, LEAVE_GROUP.highest + 1):
        (member,) = sent(LEAVE, version).members
        assert tuple(member) == ("me", None, "closing" if version >= 5 else None)


@pytest.mark.parametrize(
    ("request_", "api", "version"), [each for each in VERSIONS if each.values[1] is not DESCRIBE_GROUPS]
)
def test_each_code_is_an_answer_with_this_code(request_: ClassicRequest, api: Api, version: int) -> None:
    for code in (*ERROR_CODES, 999):
        if api is LEAVE_GROUP and code == 25:
            continue
        found = answered(request_, api, version, error=code, members=[], assignment=b"")
        assert found.error == code


def described(version: int, error: int) -> Any:
    group: dict[str, Any] = {
        "error": error,
        "message": None,
        "group": "billing",
        "state": "Stable",
        "kind": "consumer",
        "protocol": "fair",
        "members": [],
        "operations": 0,
    }
    return answered(DESCRIBE, DESCRIBE_GROUPS, version, groups=[group])


@pytest.mark.parametrize("version", range(DESCRIBE_GROUPS.lowest, DESCRIBE_GROUPS.highest + 1))
def test_a_description_is_a_group_or_a_code(version: int) -> None:
    found = described(version, 0)

    assert isinstance(found, Described)
    assert found.group is not None
    assert found.group.is_stable
    assert described(version, 15) == Described(15, None)


@pytest.mark.parametrize("version", range(JOIN_GROUP.lowest, JOIN_GROUP.highest + 1))
def test_the_answer_to_a_join_is_read(version: int) -> None:
    members = [
        {"member": name, "instance": None, "metadata": metadata} for name, metadata in (("me", b"1"), ("b", b""))
    ]
    values = {"member": "me", "leader": "me", "protocol": "fair", "generation": 7, "members": members}

    found = answered(JOIN, JOIN_GROUP, version, **values, skip_assignment=True)

    assert found == Joined(0, "me", 7, "fair", "me", {"me": b"1", "b": b""}, version >= 9)
    assert answered(JOIN, JOIN_GROUP, version, error=79, member="m1", members=[]) == Joined(79, "m1")


@pytest.mark.parametrize(
    "damage",
    [
        {"member": ""},
        {"generation": -1},
        {"members": [{"member": "me", "instance": None, "metadata": b""}] * 2},
    ],
    ids=["no member id", "no generation", "a member twice"],
)
def test_an_incomplete_answer_to_a_join_is_refused(damage: dict[str, Any]) -> None:
    values = {"member": "me", "leader": "me", "protocol": "fair", "generation": 7, "members": []}

    with pytest.raises(IncompleteResponseError):
        answered(JOIN, JOIN_GROUP, 9, **values | damage)


@pytest.mark.parametrize("version", range(SYNC_GROUP.lowest, SYNC_GROUP.highest + 1))
def test_the_answer_to_a_sync_is_read(version: int) -> None:
    partition = TopicPartition("orders", 3)

    found = answered(SYNC, SYNC_GROUP, version, assignment=write_assignment([partition]))

    assert found == Synced(0, frozenset({partition}))
    assert answered(SYNC, SYNC_GROUP, version, assignment=b"") == Synced(0)


@pytest.mark.parametrize("version", range(LEAVE_GROUP.lowest, LEAVE_GROUP.highest + 1))
def test_a_member_that_the_group_does_not_know_has_left(version: int) -> None:
    for code, expected in ((0, 0), (25, 0), (30, 30)):
        members = [{"member": "me", "instance": None, "error": code}]
        assert answered(LEAVE, LEAVE_GROUP, version, members=members) == Acknowledged(expected)
    with pytest.raises(IncompleteResponseError):
        answered(LEAVE, LEAVE_GROUP, version, members=[])
