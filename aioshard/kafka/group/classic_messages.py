"""The requests of a classic member as values, their answers, and both as messages of Kafka."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from aioshard.kafka.groups import DescribedGroup
from aioshard.kafka.wire import notation
from aioshard.kafka.wire.consumer_protocol import assigned_partitions
from aioshard.kafka.wire.errors import BrokerError, IncompleteResponseError
from aioshard.kafka.wire.pool import Purpose
from aioshard.kafka.wire.requests import DESCRIBE_GROUPS, HEARTBEAT, JOIN_GROUP, LEAVE_GROUP, SYNC_GROUP
from aioshard.kafka.wire.responses import classic_members, removed_member
from aioshard.records import TopicPartition

_CONSUMERS = "consumer"
"""The kind of the members of a group that are consumers."""

# Requests ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeRequest:
    """Asks who is in the group: a static member does so before it joins without a member id."""

    purpose: ClassVar = Purpose.JOIN
    timeout: float
    """Seconds to wait for the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """Joins a group, or takes part in its next rebalance. The answer waits for the other members."""

    purpose: ClassVar = Purpose.JOIN
    member_id: str
    """Empty for a new member."""
    instance_id: str | None
    session_timeout: float
    rebalance_timeout: float
    protocols: tuple[tuple[str, bytes], ...]
    """The names of the assignors, the preferred one first, each with our subscription."""
    reason: str
    timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRequest:
    """Fetches our assignment; from the leader, it brings the assignments of all. The answer waits for the leader's."""

    purpose: ClassVar = Purpose.JOIN
    member_id: str
    instance_id: str | None
    generation: int
    protocol: str
    assignments: Mapping[str, bytes]
    timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatRequest:
    """Renews the session."""

    purpose: ClassVar = Purpose.HEARTBEAT
    member_id: str
    instance_id: str | None
    generation: int
    timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequest:
    """Leaves the group."""

    purpose: ClassVar = Purpose.HEARTBEAT
    member_id: str
    reason: str
    timeout: float


ClassicRequest = DescribeRequest | JoinRequest | SyncRequest | HeartbeatRequest | LeaveRequest

# Answers ----------------------------------------------------------------------------------


class Described(NamedTuple):
    """The answer to a `DescribeRequest`."""

    error: int
    """Kafka's error code; 0 for none, here and below."""
    group: DescribedGroup | None = None
    """None with an error."""


class Joined(NamedTuple):
    """The answer to a `JoinRequest`."""

    error: int
    member_id: str = ""
    generation: int = -1
    protocol: str = ""
    leader: str = ""
    """The member id of the leader. Before version 9, it may be the one that a restarted leader had before."""
    members: Mapping[str, bytes] = {}
    """The subscriptions of all members, for the leader only."""
    skips_assignment: bool = False
    """Whether we lead, but the group keeps its assignment."""


class Synced(NamedTuple):
    """The answer to a `SyncRequest`."""

    error: int
    assignment: frozenset[TopicPartition] = frozenset()


class Acknowledged(NamedTuple):
    """The answer to a `HeartbeatRequest` or a `LeaveRequest`."""

    error: int


ClassicAnswer = Described | Joined | Synced | Acknowledged

# Messages ---------------------------------------------------------------------------------


def message_of(request: ClassicRequest, group_id: str) -> notation.Request:
    """Return the message of a request."""
    match request:
        case DescribeRequest():
            return DESCRIBE_GROUPS(groups=[group_id], operations=False)
        case JoinRequest():
            return JOIN_GROUP(
                group=group_id,
                session_timeout_ms=round(request.session_timeout * 1_000),
                rebalance_timeout_ms=round(request.rebalance_timeout * 1_000),
                member=request.member_id,
                instance=request.instance_id,
                kind=_CONSUMERS,
                protocols=[{"name": name, "metadata": metadata} for name, metadata in request.protocols],
                reason=request.reason,
            )
        case SyncRequest():
            return SYNC_GROUP(
                group=group_id,
                generation=request.generation,
                member=request.member_id,
                instance=request.instance_id,
                kind=_CONSUMERS,
                protocol=request.protocol,
                assignments=[
                    {"member": member_id, "assignment": content} for member_id, content in request.assignments.items()
                ],
            )
        case HeartbeatRequest():
            return HEARTBEAT(
                group=group_id,
                generation=request.generation,
                member=request.member_id,
                instance=request.instance_id,
            )
        case LeaveRequest():
            leaving = {"member": request.member_id, "instance": None, "reason": request.reason}
            return LEAVE_GROUP(group=group_id, members=[leaving])


def answer_of(request: ClassicRequest, response: Any, group_id: str) -> ClassicAnswer:
    """Read the response to a request, in any version.

    Raises:
        IncompleteResponseError: A part is missing, or it is about something else.
    """
    match request:
        case DescribeRequest():
            try:
                return Described(0, classic_members(response, group_id))
            except BrokerError as error:
                return Described(error.code)
        case JoinRequest():
            return _joined(response)
        case SyncRequest():
            return Synced(response.error, frozenset(assigned_partitions(response.assignment)))
        case HeartbeatRequest():
            return Acknowledged(response.error)
        case LeaveRequest():
            return _left(request, response)


def refusal_of(request: ClassicRequest, code: int) -> ClassicAnswer:
    """Return the answer to a request that is refused with an error code."""
    match request:
        case DescribeRequest():
            return Described(code)
        case JoinRequest():
            return Joined(code)
        case SyncRequest():
            return Synced(code)
        case HeartbeatRequest() | LeaveRequest():
            return Acknowledged(code)


def _joined(response: Any) -> Joined:
    if response.error:
        return Joined(response.error, response.member or "")
    if not response.member or response.leader is None or response.generation < 0:
        raise IncompleteResponseError("the member, the leader or the generation is missing in the response")
    return Joined(
        0,
        response.member,
        response.generation,
        response.protocol or "",
        response.leader,
        _subscriptions(response.members or ()),
        bool(response.skip_assignment),
    )


def _subscriptions(members: Collection[Any]) -> Mapping[str, bytes]:
    subscriptions = {part.member: part.metadata or b"" for part in members}
    if len(subscriptions) < len(members):
        raise IncompleteResponseError("the response names a member of the group twice")
    return subscriptions


def _left(request: LeaveRequest, response: Any) -> Acknowledged:
    """A member that the group does not know has left too."""
    try:
        removed_member(response, request.member_id, None)
    except BrokerError as error:
        return Acknowledged(error.code)
    return Acknowledged(0)
