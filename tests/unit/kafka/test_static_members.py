"""The first join of a static member: what it is, and when it makes the group rebalance."""

import asyncio
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import errors as kafka
from aiokafka.coordinator.protocol import ConsumerProtocolMemberMetadata
from aiokafka.protocol.group import HeartbeatRequest, JoinGroupRequest, SyncGroupRequest

from aioshard.core.assignment import Member
from aioshard.kafka.aiokafka.static_members import Standing, StaticJoins, standing_of
from aioshard.kafka.assignors import ConsumerAssignor
from aioshard.kafka.groups import DescribedGroup
from aioshard.kafka.wire.codes import error_for
from aioshard.records import TopicPartition


def member(*topics: str, owned: str = "") -> Member:
    """A member that subscribes to topics, with partitions such as t0."""
    return Member(frozenset(topics), tuple(TopicPartition(at[:-1], int(at[-1])) for at in owned.split()))


TWO = {"t": [0, 1]}
HALVES = {"us": member("t", owned="t0"), "them": member("t", owned="t1")}
ALONE = {"us": member("t", owned="t0 t1"), "them": member("t")}


@pytest.mark.parametrize(
    ("standing", "leader", "topics", "members", "partitions"),
    [
        pytest.param(Standing.FOLLOWER, "them", "t", HALVES, TWO, id="nothing changed, and another member leads"),
        pytest.param(Standing.LEADER, "us", "t", HALVES, TWO, id="nothing changed, and we lead"),
        pytest.param(Standing.LEADER, "nobody", "t", HALVES, TWO, id="the leader has been replaced in between"),
        pytest.param(Standing.FOLLOWER, "them", "t", HALVES, {"t": [0, 1, 2]}, id="the leader notices it"),
        pytest.param(Standing.OUTDATED, "us", "t", HALVES, {"t": [0, 1, 2]}, id="we notice it as the leader"),
        pytest.param(Standing.OUTDATED, "nobody", "t", HALVES, {"t": [0, 1, 2]}, id="we might be the leader"),
        pytest.param(Standing.OUTDATED, "them", "tu", HALVES, TWO, id="another subscription"),
        pytest.param(Standing.OUTDATED, "us", "tu", HALVES, TWO, id="another subscription of the leader"),
        pytest.param(
            Standing.OUTDATED,
            "them",
            "t",
            {"us": member("t", owned="t0 u0"), "them": member("t", owned="t1")},
            TWO,
            id="partitions of a topic that we no longer read",
        ),
        pytest.param(
            Standing.OUTDATED,
            "them",
            "tu",
            {"us": member("t", "u", owned="t0"), "them": member("t", owned="t1")},
            {"t": [0, 1], "u": [0]},
            id="a known topic that nobody reads",
        ),
        pytest.param(
            Standing.LEADER,
            "us",
            "tu",
            {"us": member("t", "u", owned="t0"), "them": member("t", owned="t1")},
            TWO,
            id="a subscribed topic that does not exist",
        ),
        pytest.param(Standing.LEADER, "us", "t", ALONE, TWO, id="a standby without partitions"),
    ],
)
def test_a_static_member_follows_or_leads_or_makes_the_group_rebalance(
    standing: Standing, leader: str, topics: str, members: dict[str, Member], partitions: dict[str, list[int]]
) -> None:
    assert standing_of("us", leader, frozenset(topics), members, partitions) is standing


class Brokers:
    """The brokers, which describe the group or fail to."""

    def __init__(self, described: Any) -> None:
        self.described = described
        self.is_silent = False
        self.forgotten: list[int] = []
        """Brokers that do not coordinate the group any more, as far as we know."""

    async def coordinator(self, _kind: object, _group: str) -> int:
        return 1

    def forget_coordinator(self, _kind: object, _group: str, node: int) -> None:
        self.forgotten.append(node)

    async def ask(self, _node: int, _request: object, **_options: object) -> Any:
        if self.is_silent:
            await asyncio.Event().wait()
        if isinstance(self.described, Exception):
            raise self.described
        return self.described


class Group:
    """A coordinator and its broker: what the broker answers to a join without a member id, and to one with it."""

    def __init__(
        self, described: Any, leader: str, *, partitions: int = 2, generation_leader: str = "us again"
    ) -> None:
        self.sent: list[Any] = []
        self.looked_up: list[Any] = []
        self._leaders = {"": leader, "us again": generation_leader}
        self.coordinator: Any = SimpleNamespace(
            group_id="billing",
            _group_instance_id="worker-1",
            _subscription=SimpleNamespace(topics={"t"}, subscribed_pattern=None),
            _group_subscription="topics of others",
            _metadata_snapshot={},
            _send_req=self._answer,
        )
        metadata = SimpleNamespace(partitions_for_topic={"t": set(range(partitions))}.get)
        client = SimpleNamespace(cluster=metadata, set_topics=self.looked_up.append)
        self.assignor = ConsumerAssignor("lag")
        self.brokers = Brokers(described)
        cluster: Any = self.brokers
        self.joins = StaticJoins(client, self.coordinator, self.assignor, cluster, 5.0)

    async def _answer(self, request: Any) -> Any:
        self.sent.append(request)
        if not isinstance(request, JoinGroupRequest):
            return SimpleNamespace(error_code=0)
        return SimpleNamespace(error_code=0, member_id="us again", leader_id=self._leaders[request._member_id])

    async def join(self, member_id: str = "") -> Any:
        metadata = ConsumerProtocolMemberMetadata(0, ["t"], b"worker-1").encode()
        request = JoinGroupRequest("billing", 1, 1, member_id, "worker-1", "consumer", [("lag", metadata)])
        return await self.coordinator._send_req(request)

    @property
    def joined(self) -> list[tuple[str, bytes]]:
        """The member id and metadata of each join."""
        return [
            (request._member_id, request._group_protocols[0][1])
            for request in self.sent
            if isinstance(request, JoinGroupRequest)
        ]


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let descriptions arrive parsed."""
    monkeypatch.setattr("aioshard.kafka.aiokafka.static_members.classic_members", lambda group, _: group)


STABLE = DescribedGroup(True, HALVES, {"worker-1": "us"})  # noqa: FBT003 - stable
usual = pytest.mark.usefixtures("described")


@usual
async def test_a_quiet_restart_of_the_leader_is_one_join_and_it_watches_the_group() -> None:
    group = Group(STABLE, leader="us")

    answer = await group.join()

    assert [member_id for member_id, _ in group.joined] == [""]
    assert answer.member_id == "us again"
    assert group.coordinator._group_subscription == {"t"}
    assert group.coordinator._metadata_snapshot == {"t": 2}
    assert group.looked_up == [{"t"}]
    assert group.assignor.leads
    backlogs = {TopicPartition("t", 0): 9_000, TopicPartition("t", 1): 0}
    assert not group.assignor.would_pay(backlogs), "each has one partition"


@usual
async def test_a_restarted_leader_still_knows_when_a_rebalance_pays() -> None:
    group = Group(STABLE._replace(members=ALONE), leader="us")

    await group.join()

    assert group.assignor.would_pay(dict.fromkeys((TopicPartition("t", 0), TopicPartition("t", 1)), 9_000))


@usual
async def test_a_follower_joins_once_and_watches_nothing() -> None:
    group = Group(STABLE, leader="them", partitions=3)

    await group.join()

    assert [member_id for member_id, _ in group.joined] == [""]
    assert group.coordinator._group_subscription is None
    assert not group.assignor.leads


@usual
@pytest.mark.parametrize(
    "group_of",
    [
        pytest.param(lambda: Group(STABLE, leader="us", partitions=3), id="unassigned partitions"),
        pytest.param(lambda: Group(error_for(30, "billing"), leader="us"), id="no permission"),
        pytest.param(lambda: Group(TimeoutError(), leader="them"), id="no answer"),
    ],
)
async def test_a_second_join_says_the_same_in_other_bytes(group_of: Any) -> None:
    group = group_of()

    await group.join()

    (first, before), (second, after) = group.joined
    assert (first, second) == ("", "us again")
    assert before != after, "the broker would see no reason to rebalance"
    decoded = [ConsumerProtocolMemberMetadata.decode(BytesIO(metadata)) for metadata in (before, after)]
    assert [(metadata.subscription, metadata.user_data) for metadata in decoded] == [(["t"], b"worker-1")] * 2
    assert not group.assignor.leads, "aiokafka computes the assignment if we lead"


@usual
@pytest.mark.parametrize(
    "description",
    [STABLE._replace(is_stable=False), STABLE._replace(members={}, instances={})],
    ids=["the group rebalances", "a new member"],
)
async def test_after_a_rebalance_the_answer_names_the_real_leader(description: DescribedGroup) -> None:
    group = Group(description, leader="them", partitions=3)

    await group.join()

    assert len(group.joined) == 1


@usual
async def test_a_join_with_a_member_id_and_other_requests_are_left_alone() -> None:
    group = Group(STABLE, leader="us", partitions=3)

    await group.join("us again")
    await group.coordinator._send_req(HeartbeatRequest("billing", 4, "us again"))

    assert [type(request).__name__ for request in group.sent] == ["JoinGroupRequest", "HeartbeatRequest"]
    assert group.coordinator._group_subscription is None


@usual
async def test_a_member_is_displaced_if_the_group_has_another_process_in_its_place() -> None:
    group = Group(
        STABLE._replace(instances={"worker-1": "us again"}, members={**HALVES, "us again": HALVES["us"]}), "them"
    )
    await group.join()
    assert not group.joins.was_displaced, "it has just started"
    await group.join()
    assert not group.joins.was_displaced, "that is itself"

    group.brokers.described = STABLE
    await group.join()

    assert group.joins.was_displaced


@pytest.mark.parametrize("request_kind", [JoinGroupRequest, SyncGroupRequest])
async def test_a_fenced_member_joins_anew(request_kind: type) -> None:
    """aiokafka does not know the error code, and would end."""
    group = Group(STABLE, leader="them")

    async def fence(_request: Any) -> Any:
        return SimpleNamespace(error_code=82)

    group.joins._send = fence
    request: Any = object.__new__(request_kind)
    request._member_id = "us again"

    answer = await group.coordinator._send_req(request)

    assert kafka.for_code(answer.error_code) is kafka.UnknownMemberIdError


async def test_a_silent_coordinator_is_not_waited_for() -> None:
    group = Group(STABLE, leader="them")
    group.joins._patience = 0.0
    group.brokers.is_silent = True

    await asyncio.wait_for(group.join(), 5)

    assert [member_id for member_id, _ in group.joined] == ["", "us again"]
    assert group.brokers.forgotten == [1], "another broker may coordinate the group by now"
