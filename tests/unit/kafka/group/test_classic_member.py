"""A classic member, answer by answer: which codes do what, what joins claim, and when partitions are lost."""

import math
import random
from collections.abc import Collection
from typing import Any, TypeVar

import pytest

from aioshard.core.assignment import Member
from aioshard.kafka.group.classic import ClassicEvent, ClassicMember, Elected
from aioshard.kafka.group.classic_messages import (
    Acknowledged,
    ClassicAnswer,
    ClassicRequest,
    Described,
    DescribeRequest,
    HeartbeatRequest,
    Joined,
    JoinRequest,
    LeaveRequest,
    Synced,
    SyncRequest,
    refusal_of,
)
from aioshard.kafka.group.member import (
    Assigned,
    Ended,
    Event,
    Lost,
    Partitions,
    Recovered,
    Refused,
    Revoked,
    Troubled,
)
from aioshard.kafka.groups import DescribedGroup
from aioshard.kafka.wire.consumer_protocol import (
    Subscription,
    assigned_partitions,
    read_subscription,
    write_subscription,
)
from aioshard.kafka.wire.pool import Purpose
from aioshard.records import TopicPartition
from tests.unit.kafka.group.classic_world import INTERVAL, REBALANCE, SESSION


class Plain:
    """An assignor without user data."""

    def __init__(self, name: str, *, is_incremental: bool) -> None:
        self.name = name
        self.is_incremental = is_incremental

    def user_data(self, partitions: Partitions, generation: int) -> bytes:  # noqa: ARG002 - it has none
        return b""


EAGER = Plain("eager", is_incremental=False)
INCREMENTAL = Plain("incremental", is_incremental=True)
RequestT = TypeVar("RequestT", bound=ClassicRequest)
ORDERS = frozenset({"orders"})
FATAL = [24, 26, 30, 42, 82]


def orders(*numbers: int) -> Partitions:
    return frozenset(TopicPartition("orders", number) for number in numbers)


class Talk:
    """A member and its coordinator, who says what the test wants."""

    def __init__(self, **options: Any) -> None:
        self.now = 100.0
        self.pending: list[ClassicRequest] = []
        self.member = ClassicMember(
            options.pop("topics", ["orders"]),
            options.pop("assignors", [INCREMENTAL]),
            random.Random(1),
            session_timeout=SESSION,
            heartbeat_interval=INTERVAL,
            rebalance_timeout=REBALANCE,
            **options,
        )
        self.member_id = "me"

    def wait(self, seconds: float = 0.0) -> list[ClassicRequest]:
        """Let time pass; return what is sent then."""
        self.now += seconds
        sent = list(self.member.poll(self.now))
        self.pending += sent
        return sent

    def request(self, kind: type[RequestT], seconds: float = 0.0) -> RequestT:
        """Return the latest unanswered request of a kind."""
        self.wait(seconds)
        found = [request for request in self.pending if isinstance(request, kind)]
        assert found, f"{kind.__name__} is not among {self.pending}"
        return found[-1]

    def answer(self, request: ClassicRequest, answer: ClassicAnswer | int) -> list[ClassicEvent]:
        self.pending = [other for other in self.pending if other is not request]
        self.member.answered(request, refusal_of(request, answer) if isinstance(answer, int) else answer, self.now)
        return self.member.take_events()

    def fail(self, request: ClassicRequest) -> list[ClassicEvent]:
        self.pending = [other for other in self.pending if other is not request]
        self.member.failed(request, self.now)
        return self.member.take_events()

    def beat(self, code: int = 0, seconds: float = INTERVAL) -> list[ClassicEvent]:
        return self.answer(self.request(HeartbeatRequest, seconds), code)

    def accept(self, generation: int, *, leader: str = "other", **values: Any) -> list[ClassicEvent]:
        """Answer the join; the member's first one needs an id before."""
        join = self.request(JoinRequest)
        if not join.member_id and join.instance_id is None:
            self.answer(join, Joined(79, self.member_id))
            join = self.request(JoinRequest)
        return self.answer(join, Joined(0, self.member_id, generation, "incremental", leader, **values))

    def assign(self, *numbers: int) -> list[ClassicEvent]:
        return self.answer(self.request(SyncRequest), Synced(0, orders(*numbers)))

    def settle_static(self, *numbers: int) -> "Talk":
        """Join as a static member of a group that has none yet."""
        self.answer(self.request(DescribeRequest), Described(-1))
        self.settle(*numbers)
        self.settle(*numbers)  # it does not know what a predecessor left
        return self

    def settle(self, *numbers: int, generation: int = 4) -> "Talk":
        """Join as a follower."""
        self.accept(generation)
        self.assign(*numbers)
        self.beat(seconds=0)
        return self

    def release(self, *numbers: int) -> None:
        self.member.released(self.member.ownership.life, orders(*numbers), self.now)

    @property
    def owned(self) -> Partitions:
        return self.member.ownership.partitions

    def claims(self, seconds: float = 0.0) -> tuple[Collection[TopicPartition] | None, int]:
        """Return what the next join claims, and the generation that gave it."""
        (_, content), *_ = self.request(JoinRequest, seconds).protocols
        subscription = read_subscription(content)
        return subscription.owned, subscription.generation


def only(events: list[ClassicEvent], kind: type[Any]) -> Any:
    """Return the only event of a kind."""
    found = [event for event in events if isinstance(event, kind)]
    assert len(found) == 1, events
    return found[0]


# Joining --------------------------------------------------------------------------------------


def test_a_new_member_joins_with_the_id_that_it_is_given() -> None:
    talk = Talk()
    first = talk.request(JoinRequest)

    talk.answer(first, Joined(79, "m1"))

    assert first.member_id == ""
    assert talk.request(JoinRequest).member_id == "m1"


def test_the_id_is_used_also_if_it_comes_after_another_subscription() -> None:
    """A member id that nobody uses holds up the whole group for a session."""
    talk = Talk()
    first = talk.request(JoinRequest)
    talk.member.subscribe(["refunds"], talk.now)

    talk.answer(first, Joined(79, "m1"))

    join = talk.request(JoinRequest)
    assert join.member_id == "m1"
    assert read_subscription(join.protocols[0][1]).topics == {"refunds"}


def test_an_id_that_comes_after_the_end_is_left_with() -> None:
    talk = Talk()
    first = talk.request(JoinRequest)
    talk.member.leave(talk.now, "closing")
    assert not talk.member.ended
    assert talk.wait(1) == []

    talk.answer(first, Joined(79, "m1"))

    leave = talk.request(LeaveRequest)
    assert (leave.member_id, leave.reason) == ("m1", "closing")
    assert isinstance(talk.answer(leave, 0)[-1], Ended)


def test_a_join_that_is_answered_during_the_end_starts_no_assignment() -> None:
    """Brokers that give out no ids may accept it directly."""
    talk = Talk()
    first = talk.request(JoinRequest)
    talk.member.leave(talk.now, "closing")

    events = talk.answer(first, Joined(0, "m1", 4, "incremental", "m1"))

    assert events == []
    assert [type(request) for request in talk.wait(1)] == [LeaveRequest]


@pytest.mark.parametrize("answer", [Joined(15), Joined(25), None], ids=["refused", "unknown", "silence"])
def test_a_member_without_an_id_ends_without_a_leave(answer: Joined | None) -> None:
    talk = Talk()
    first = talk.request(JoinRequest)
    talk.member.leave(talk.now, "closing")

    events = talk.fail(first) if answer is None else talk.answer(first, answer)

    assert only(events, Ended).code == 0
    assert talk.wait(10) == []


def test_a_join_without_pause_follows_neither_27_nor_silence() -> None:
    talk = Talk().settle(0, 1)
    talk.beat(27)

    talk.answer(talk.request(JoinRequest), 27)
    assert not any(isinstance(request, JoinRequest) for request in talk.wait())
    assert talk.fail(talk.request(JoinRequest, 2)) == [
        Troubled(None, "the coordinator did not answer", coordinator_moved=True)
    ]
    assert not any(isinstance(request, JoinRequest) for request in talk.wait())

    assert talk.claims(2) == (orders(0, 1), 4)


@pytest.mark.parametrize("code", [23, 35])
def test_a_group_of_another_protocol_is_refused_before_we_ever_joined_and_ends_us_later(code: int) -> None:
    talk = Talk()
    assert only(talk.answer(talk.request(JoinRequest), code), Refused).code == code
    assert talk.member.ended

    talk = Talk().settle(0)
    talk.beat(27)
    assert only(talk.answer(talk.request(JoinRequest), code), Ended).code == code


@pytest.mark.parametrize("kind", [JoinRequest, SyncRequest, HeartbeatRequest])
@pytest.mark.parametrize("code", FATAL)
def test_fatal_codes_end_the_member(kind: type[ClassicRequest], code: int) -> None:
    talk = Talk().settle(0, 1)
    if kind is not HeartbeatRequest:
        talk.beat(27)
    if kind is SyncRequest:
        talk.accept(5)

    lost, ended = talk.answer(talk.request(kind, INTERVAL), code)

    assert isinstance(lost, Lost)
    assert isinstance(ended, Ended)
    assert (lost.partitions, ended.code) == (orders(0, 1), code)
    assert talk.member.deadline is None
    assert talk.wait(60) == []


@pytest.mark.parametrize(("code", "moved"), [(7, True), (14, False), (15, True), (16, True), (-1, False), (None, True)])
@pytest.mark.parametrize("kind", [JoinRequest, SyncRequest, HeartbeatRequest])
def test_temporary_codes_and_silence_are_reported_once_they_pass(
    kind: type[ClassicRequest], code: int | None, moved: bool
) -> None:
    talk = Talk().settle(0, 1)
    if kind is not HeartbeatRequest:
        talk.beat(27)
    if kind is SyncRequest:
        talk.accept(5)
    request = talk.request(kind, INTERVAL)

    events = talk.fail(request) if code is None else talk.answer(request, code)
    trouble = only(events, Troubled)
    assert (trouble.code, trouble.coordinator_moved) == (code, moved)
    assert not any(isinstance(request, kind) for request in talk.wait())

    if kind is HeartbeatRequest:
        assert talk.beat(seconds=0.2) == [Recovered()]
    else:
        talk.wait(0.2)
        assert talk.accept(6) == [Recovered()]
    assert talk.owned == orders(0, 1)


def test_a_full_group_is_asked_again_after_a_long_pause() -> None:
    talk = Talk()

    assert only(talk.answer(talk.request(JoinRequest), 81), Troubled).code == 81

    assert talk.wait(3) == []
    assert talk.request(JoinRequest, 4).member_id == ""


def test_each_kind_of_request_has_a_limit_of_its_own() -> None:
    talk = Talk()
    talk.accept(4)

    assert talk.request(SyncRequest).timeout > REBALANCE
    assert talk.request(HeartbeatRequest).timeout <= SESSION / 3
    assert Talk().request(JoinRequest).timeout > REBALANCE


# Claims ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [27, 16, None], ids=["rebalance", "moved", "silence"])
def test_claims_carry_the_generation_that_gave_them_also_after_a_sync_that_failed(code: int | None) -> None:
    """KAFKA-13891: another member may have got them in the generation in between."""
    talk = Talk().settle(0, 1)
    talk.beat(27)
    assert talk.claims() == (orders(0, 1), 4)
    talk.accept(5)
    sync = talk.request(SyncRequest)

    events = talk.fail(sync) if code is None else talk.answer(sync, code)

    assert not any(isinstance(event, Assigned | Revoked | Lost) for event in events)
    assert talk.claims(1) == (orders(0, 1), 4)
    assert talk.member.ownership.epoch == (5 if code == 27 else 4), "under which commits are accepted meanwhile"


def test_partitions_and_their_generation_change_in_one_step() -> None:
    talk = Talk().settle(0, 1)
    talk.beat(27)
    talk.accept(5)
    assert (talk.owned, talk.member.ownership.epoch) == (orders(0, 1), 4)

    assigned = only(talk.assign(0, 1, 2), Assigned)

    assert assigned.partitions == orders(2)
    assert assigned.ownership == talk.member.ownership
    assert (talk.owned, talk.member.ownership.epoch) == (orders(0, 1, 2), 5)


@pytest.mark.parametrize(("code", "member_id"), [(22, "me"), (25, "")])
@pytest.mark.parametrize("kind", [HeartbeatRequest, SyncRequest])
def test_a_loss_is_reported_before_a_join_that_claims_nothing(
    kind: type[ClassicRequest], code: int, member_id: str
) -> None:
    """Code 22 keeps the member id, and 25 does not."""
    talk = Talk().settle(0, 1)
    if kind is SyncRequest:
        talk.beat(27)
        talk.accept(5)
    life = talk.member.ownership.life
    request = talk.request(kind, INTERVAL)

    lost = only(talk.answer(request, code), Lost)

    assert (lost.life, lost.partitions) == (life, orders(0, 1))
    assert talk.member.ownership.life == life + 1
    assert talk.claims(1)[0] == frozenset()
    assert talk.request(JoinRequest).member_id == member_id


def test_a_join_with_an_id_that_the_group_does_not_know_loses_the_partitions_too() -> None:
    talk = Talk().settle(0, 1)
    talk.beat(27)

    assert only(talk.answer(talk.request(JoinRequest), 25), Lost).partitions == orders(0, 1)
    assert talk.request(JoinRequest, 1).member_id == ""


# Old answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 22, 25, 27, 82])
def test_the_answer_to_a_heartbeat_of_an_earlier_generation_is_ignored(code: int) -> None:
    talk = Talk().settle(0, 1)
    talk.beat(27)
    old = talk.request(HeartbeatRequest, INTERVAL)
    talk.accept(5)
    talk.assign(0, 1)
    before = talk.member.ownership

    assert talk.answer(old, code) == []

    assert talk.member.ownership == before
    assert talk.request(HeartbeatRequest, 0).generation == 5, "the next one is not delayed"


def test_an_old_generation_is_no_loss_while_a_join_is_unanswered() -> None:
    """The answer to the join is on its way, with the next generation."""
    talk = Talk().settle(0, 1)
    talk.beat(27)
    join = talk.request(JoinRequest)

    assert talk.beat(22) == []

    assert talk.owned == orders(0, 1)
    talk.answer(join, Joined(0, "me", 5, "incremental", "other"))
    assert talk.request(SyncRequest).generation == 5


def test_a_member_that_was_removed_abandons_its_join() -> None:
    talk = Talk().settle(0, 1)
    talk.beat(27)
    old = talk.request(JoinRequest)

    assert only(talk.beat(25), Lost).partitions == orders(0, 1)

    assert talk.request(JoinRequest).member_id == ""
    assert talk.answer(old, Joined(0, "me", 5, "incremental", "me")) == []
    assert not any(isinstance(request, SyncRequest) for request in talk.wait())


@pytest.mark.parametrize(
    ("code", "events"),
    [(22, [Lost]), (25, [Lost]), (27, []), (82, [Lost, Ended]), (14, []), (16, [])],
)
def test_a_refused_commit_says_what_a_heartbeat_would_say(code: int, events: list[type[Event]]) -> None:
    talk = Talk().settle(0, 1)

    talk.member.commit_refused(talk.member.ownership, code, talk.now)

    assert [type(event) for event in talk.member.take_events()] == events
    joins = [request for request in talk.wait() if isinstance(request, JoinRequest)]
    assert len(joins) == (code in (22, 25, 27))


@pytest.mark.parametrize("code", [22, 25, 27, 82])
def test_a_commit_from_before_the_latest_join_says_nothing_about_us(code: int) -> None:
    talk = Talk().settle(0, 1)
    old = talk.member.ownership
    talk.beat(27)
    if code in (22, 27):  # the group has completed a rebalance, or is about to
        talk.request(JoinRequest)
        talk.member.commit_refused(old, code, talk.now)
        assert talk.member.take_events() == []
    talk.accept(5)
    talk.member.commit_refused(old, code, talk.now)
    assert talk.member.take_events() == []
    talk.assign(0, 1)
    talk.member.commit_refused(old, code, talk.now)

    assert talk.member.take_events() == []
    assert (talk.owned, talk.member.ended) == (orders(0, 1), False)


# Eager and incremental rebalances -------------------------------------------------------------


def test_an_incremental_member_keeps_its_partitions_and_releases_what_moves_in_a_second_step() -> None:
    talk = Talk().settle(0, 1, 2)

    assert talk.beat(27) == []
    talk.accept(5)
    revoked = only(talk.assign(0), Revoked)
    assert revoked.partitions == orders(1, 2)
    assert talk.owned == orders(0, 1, 2), "they are ours until they are released"
    assert not any(isinstance(request, JoinRequest) for request in talk.wait(0.1))
    talk.release(1)
    assert not any(isinstance(request, JoinRequest) for request in talk.wait(0.1))
    talk.release(2)

    assert talk.claims() == (orders(0), 5)


def test_the_second_step_follows_also_if_nothing_is_left() -> None:
    talk = Talk().settle(0)
    talk.beat(27)
    talk.accept(5)

    assert [type(event) for event in talk.assign()] == [Revoked]
    talk.release(0)

    assert talk.claims() == (frozenset(), 5)


def test_an_incremental_member_that_keeps_everything_does_not_join_again() -> None:
    talk = Talk().settle(0)
    talk.beat(27)
    talk.accept(5)

    assert talk.assign(0) == []
    assert not any(isinstance(request, JoinRequest) for request in talk.wait(1))


def test_what_was_lost_during_a_join_is_returned_to_the_group() -> None:
    """The join claimed it, so the leader left it with us."""
    talk = Talk().settle(0, 1)
    talk.beat(27)
    join = talk.request(JoinRequest)
    talk.wait(SESSION)
    assert only(talk.member.take_events(), Lost).partitions == orders(0, 1)

    talk.answer(join, Joined(0, "me", 5, "incremental", "other"))
    assert only(talk.assign(0), Assigned).partitions == orders(0)

    assert talk.claims() == (orders(0), 5)


def test_an_eager_member_releases_everything_before_it_joins() -> None:
    talk = Talk(assignors=[EAGER]).settle(0, 1)

    assert only(talk.beat(27), Revoked).partitions == orders(0, 1)
    assert talk.beat(27) == [], "once"
    assert not any(isinstance(request, JoinRequest) for request in talk.wait(0.1))
    talk.release(0)
    assert talk.owned == orders(1)
    assert not any(isinstance(request, JoinRequest) for request in talk.wait(0.1))
    talk.release(1)
    assert talk.claims() == (frozenset(), 4)
    talk.accept(5)
    assert only(talk.assign(1, 2), Assigned).partitions == orders(1, 2)


def test_an_eager_member_reports_also_that_it_gets_nothing_back() -> None:
    talk = Talk(assignors=[EAGER]).settle(0)
    talk.beat(27)
    talk.release(0)
    talk.accept(5)

    assert only(talk.assign(), Assigned).partitions == frozenset()


def test_an_incremental_member_reports_nothing_when_nothing_has_changed() -> None:
    talk = Talk().settle(0)
    talk.beat(27)
    talk.accept(5)

    assert talk.assign(0) == []


def test_the_latest_answered_heartbeat_is_known_while_we_are_a_member() -> None:
    talk = Talk()
    assert talk.member.answered_at == -math.inf
    talk.settle(0)
    talk.beat()
    assert talk.member.answered_at == talk.now
    talk.beat(25)
    assert talk.member.answered_at == -math.inf


def test_a_member_is_eager_if_one_of_its_assignors_is() -> None:
    assert not Talk(assignors=[INCREMENTAL, EAGER]).member.is_incremental
    assert Talk(assignors=[INCREMENTAL]).member.is_incremental
    names = [name for name, _ in Talk(assignors=[INCREMENTAL, EAGER]).request(JoinRequest).protocols]
    assert names == ["incremental", "eager"]


@pytest.mark.parametrize("assignor", [EAGER, INCREMENTAL], ids=["eager", "incremental"])
def test_an_assignment_that_does_not_fit_the_subscription_is_not_taken(assignor: Any) -> None:
    talk = Talk(assignors=[assignor])
    talk.accept(4)
    sync = talk.request(SyncRequest)
    talk.member.subscribe(["refunds"], talk.now)

    assert talk.answer(sync, Synced(0, orders(0))) == []

    assert talk.owned == frozenset()
    (_, content), *_ = talk.request(JoinRequest, 1).protocols
    assert read_subscription(content) == Subscription(frozenset({"refunds"}), b"", frozenset(), 4)


def test_partitions_of_topics_that_are_no_longer_subscribed_are_released_before_the_join() -> None:
    talk = Talk(topics=["orders", "refunds"])
    talk.accept(4)
    refund = TopicPartition("refunds", 0)
    talk.answer(talk.request(SyncRequest), Synced(0, orders(0) | {refund}))

    talk.member.subscribe(["orders"], talk.now)

    assert only(talk.member.take_events(), Revoked).partitions == {refund}
    assert not any(isinstance(request, JoinRequest) for request in talk.wait())
    talk.member.released(1, [refund], talk.now)
    assert talk.claims() == (orders(0), 4)


def test_a_topic_that_is_subscribed_again_is_assigned_after_the_release() -> None:
    """A partition that is being released is not ours any more behind the release, although the assignment names it."""
    talk = Talk().settle(0)
    talk.beat(27)
    join = talk.request(JoinRequest)
    talk.member.subscribe(["refunds"], talk.now)
    assert only(talk.member.take_events(), Revoked).partitions == orders(0)
    talk.member.subscribe(["orders"], talk.now)
    talk.answer(join, Joined(0, "me", 5, "incremental", "other"))

    assert talk.assign(0) == []
    talk.release(0)

    assert talk.claims() == (frozenset(), 5)


def test_an_eager_member_takes_no_assignment_that_it_would_have_to_release_at_once() -> None:
    talk = Talk(assignors=[EAGER])
    talk.accept(4)
    sync = talk.request(SyncRequest)
    talk.member.rejoin(talk.now, "?")

    assert talk.answer(sync, Synced(0, orders(0))) == []

    assert talk.claims(1) == (frozenset(), 4)


def test_what_is_released_during_a_join_is_committed_under_the_generation_that_the_join_brings() -> None:
    """The group accepts commits under no other one, and the next join waits for the release."""
    talk = Talk(topics=["orders", "refunds"])
    talk.accept(4)
    refund, new_refund = TopicPartition("refunds", 0), TopicPartition("refunds", 1)
    talk.answer(talk.request(SyncRequest), Synced(0, orders(0) | {refund}))
    talk.beat(27)
    join = talk.request(JoinRequest)
    talk.member.subscribe(["orders"], talk.now)
    assert only(talk.member.take_events(), Revoked).partitions == {refund}
    talk.answer(join, Joined(0, "me", 5, "incremental", "other"))

    talk.answer(talk.request(SyncRequest), Synced(0, orders(0, 1) | {refund, new_refund}))

    assert talk.member.ownership.epoch == 5
    assert talk.owned == orders(0, 1) | {refund}
    talk.member.released(1, [refund], talk.now)
    assert talk.claims(1) == (orders(0, 1), 5)


def test_what_is_released_after_a_sync_that_failed_is_committed_under_the_generation_of_the_group() -> None:
    talk = Talk(topics=["orders", "refunds"])
    talk.accept(4)
    refund = TopicPartition("refunds", 0)
    talk.answer(talk.request(SyncRequest), Synced(0, orders(0) | {refund}))
    talk.beat(27)
    join = talk.request(JoinRequest)
    talk.member.subscribe(["orders"], talk.now)
    talk.answer(join, Joined(0, "me", 5, "incremental", "other"))
    talk.answer(talk.request(SyncRequest), 27)

    assert (talk.member.ownership.epoch, talk.owned) == (5, orders(0) | {refund})
    talk.member.released(1, [refund], talk.now)
    assert talk.claims() == (orders(0), 4), "the assignment of 5 is unknown"


def test_a_release_that_began_during_a_join_gets_the_time_of_the_new_generation() -> None:
    talk = Talk(topics=["orders", "refunds"])
    talk.accept(4)
    refund = TopicPartition("refunds", 0)
    talk.answer(talk.request(SyncRequest), Synced(0, orders(0) | {refund}))
    talk.beat(27)
    join = talk.request(JoinRequest)
    for _ in range(int(REBALANCE / INTERVAL) - 2):
        talk.beat(27)
    talk.member.subscribe(["orders"], talk.now)
    early = only(talk.member.take_events(), Revoked).deadline
    talk.answer(join, Joined(0, "me", 5, "incremental", "other"))
    talk.answer(talk.request(SyncRequest), Synced(0, orders(0) | {refund}))

    assert talk.member.ownership.alive_until > early
    while talk.now <= early:
        talk.beat()
    assert talk.owned == orders(0) | {refund}


def test_the_same_subscription_again_changes_nothing() -> None:
    talk = Talk().settle(0)

    talk.member.subscribe(["orders"], talk.now)

    assert not any(isinstance(request, JoinRequest) for request in talk.wait())


def test_a_release_that_comes_after_a_loss_acknowledges_no_later_revocation() -> None:
    talk = Talk(assignors=[EAGER]).settle(0, 1)
    late = only(talk.beat(27), Revoked)
    talk.beat(25)
    talk.wait(1)
    talk.accept(6)
    talk.assign(0, 1)
    talk.beat(0)
    talk.beat(27)

    talk.member.released(late.life, late.partitions, talk.now)

    assert talk.owned == orders(0, 1)
    assert not any(isinstance(request, JoinRequest) for request in talk.wait())


# The clock ------------------------------------------------------------------------------------


def test_partitions_are_lost_a_session_after_the_sending_of_the_last_answered_heartbeat() -> None:
    talk = Talk().settle(0, 1)
    sent = talk.request(HeartbeatRequest, INTERVAL)
    sent_at = talk.now
    talk.now += 0.9
    talk.answer(sent, 0)
    assert talk.member.ownership.alive_until == sent_at + SESSION

    talk.request(HeartbeatRequest, INTERVAL)
    talk.now = sent_at + SESSION - 0.001
    talk.wait()
    assert talk.member.take_events() == []
    assert talk.member.deadline == sent_at + SESSION
    assert not talk.member.ownership.owns(TopicPartition("orders", 0), sent_at + SESSION)
    sent_late = talk.wait(0.001)

    assert only(talk.member.take_events(), Lost).partitions == orders(0, 1)
    assert [type(request) for request in sent_late] == [JoinRequest]


def test_heartbeats_renew_the_session_while_a_join_is_unanswered() -> None:
    talk = Talk().settle(0, 1)
    talk.beat(27)
    join = talk.request(JoinRequest)

    for _ in range(6):
        assert talk.beat(27) == []

    assert talk.owned == orders(0, 1)
    assert talk.member.ownership.owns(TopicPartition("orders", 0), talk.now)
    talk.answer(join, Joined(0, "me", 5, "incremental", "other"))
    assert talk.assign(0, 1) == []


def test_a_member_that_does_not_release_in_time_loses_everything() -> None:
    """Heartbeats are answered all the time. The rebalance may have begun as soon as the last quiet one was answered."""
    talk = Talk(assignors=[EAGER]).settle(0, 1)
    calm = talk.request(HeartbeatRequest, INTERVAL)
    calm_at = talk.now
    talk.answer(calm, 0)
    revoked = only(talk.beat(27), Revoked)
    assert revoked.deadline == calm_at + REBALANCE

    while talk.now < revoked.deadline - INTERVAL:
        talk.beat(27)
    assert talk.owned == orders(0, 1)
    talk.wait(INTERVAL)

    assert only(talk.member.take_events(), Lost).partitions == orders(0, 1)
    assert talk.request(JoinRequest).member_id == "me"


def test_partitions_only_pause_when_others_are_late_in_a_rebalance() -> None:
    """The group waits for the slowest member, and may remove it: it is too late for us only if our join was lost."""
    talk = Talk().settle(0, 1)
    calm_at = talk.now
    talk.beat(27)
    join = talk.request(JoinRequest)

    while talk.now < calm_at + REBALANCE:
        talk.beat(27)

    assert not talk.member.ownership.owns(TopicPartition("orders", 0), talk.now)
    assert talk.member.take_events() == []
    talk.answer(join, Joined(0, "me", 5, "incremental", "other"))
    assert talk.member.ownership.owns(TopicPartition("orders", 0), talk.now)
    talk.assign(0, 1)
    assert talk.member.ownership.owns(TopicPartition("orders", 0), talk.now)
    assert not any(isinstance(event, Lost) for event in talk.member.take_events())


def test_a_join_that_fails_after_that_time_has_lost_the_partitions() -> None:
    talk = Talk().settle(0, 1)
    calm_at = talk.now
    talk.beat(27)
    join = talk.request(JoinRequest)
    while talk.now < calm_at + REBALANCE:
        talk.beat(27)

    talk.fail(join)
    talk.wait()

    assert only(talk.member.take_events(), Lost).partitions == orders(0, 1)


def test_answered_heartbeats_do_not_replace_a_missing_sync() -> None:
    """The group removes a member whose sync is missing for a rebalance timeout."""
    talk = Talk().settle(0, 1)
    talk.beat(27)
    joined_at = talk.now
    talk.accept(5)
    talk.request(SyncRequest)

    for _ in range(int(REBALANCE) + 1):
        talk.beat(0)

    assert talk.member.ownership.alive_until <= joined_at + REBALANCE


def test_a_join_that_repeats_one_whose_sync_was_lost_begins_no_new_time() -> None:
    """The coordinator answers it with the generation of before, and removes us as if we had not asked again."""
    talk = Talk().settle(0, 1)
    talk.beat(27)
    joined_at = talk.now
    talk.accept(5)
    talk.fail(talk.request(SyncRequest))
    for _ in range(3):
        talk.beat(0)

    talk.accept(5)

    assert talk.member.ownership.alive_until <= joined_at + REBALANCE


@pytest.mark.parametrize("kind", [SyncRequest, HeartbeatRequest])
def test_another_rebalance_waits_for_a_join_and_not_for_the_sync_any_more(kind: type[ClassicRequest]) -> None:
    """It cannot have begun before the last heartbeat that did not find it."""
    talk = Talk().settle(0, 1)
    talk.beat(27)
    talk.accept(5)
    talk.request(SyncRequest)
    for _ in range(5):
        talk.beat(0)
    quiet_at = talk.now

    talk.answer(talk.request(kind, INTERVAL), 27)

    assert talk.member.ownership.alive_until >= quiet_at + SESSION


def test_everything_is_lost_before_the_leave_is_sent() -> None:
    talk = Talk().settle(0, 1)

    talk.member.leave(talk.now, "x" * 300)

    assert only(talk.member.take_events(), Lost).partitions == orders(0, 1)
    leave = talk.request(LeaveRequest)
    assert (leave.member_id, len(leave.reason)) == ("me", 255)
    assert leave.purpose is Purpose.HEARTBEAT


@pytest.mark.parametrize("code", [14, 15, 16])
def test_a_leave_is_sent_once_more_to_the_next_coordinator(code: int) -> None:
    talk = Talk().settle(0)
    talk.member.leave(talk.now, "closing")

    talk.answer(talk.request(LeaveRequest), code)
    assert not talk.member.ended
    assert only(talk.answer(talk.request(LeaveRequest, 1), code), Ended).code == 0
    assert talk.wait(60) == []


@pytest.mark.parametrize("code", [0, 25, 69, None])
def test_a_member_that_the_group_does_not_know_has_left(code: int | None) -> None:
    talk = Talk().settle(0)
    talk.member.leave(talk.now, "closing")
    talk.member.leave(talk.now, "again")

    leave = talk.request(LeaveRequest)
    events = talk.fail(leave) if code is None else talk.answer(leave, code)

    assert only(events, Ended).code == 0


def test_a_leave_does_not_wait_for_an_unanswered_join() -> None:
    talk = Talk().settle(0)
    talk.beat(27)
    join = talk.request(JoinRequest)

    talk.member.leave(talk.now, "closing")

    assert talk.request(LeaveRequest).member_id == "me"
    assert talk.answer(join, Joined(0, "me", 5, "incremental", "me")) == [Lost(1, orders(0), "closing")]
    assert talk.wait(5) == []


def test_a_heartbeat_that_fails_during_the_end_does_not_replace_the_leave() -> None:
    talk = Talk().settle(0)
    heartbeat = talk.request(HeartbeatRequest, INTERVAL)
    talk.member.leave(talk.now, "closing")

    assert talk.fail(heartbeat) == [Lost(1, orders(0), "closing")]

    assert talk.request(LeaveRequest).member_id == "me"


@pytest.mark.parametrize("code", [0, 25, None])
def test_a_suspended_member_leaves_and_joins_as_a_new_one_when_it_resumes(code: int | None) -> None:
    talk = Talk().settle(0)
    talk.member.suspend(talk.now, "blocked")
    assert talk.member.take_events() == [Lost(1, orders(0), "blocked")]
    leave = talk.request(LeaveRequest)
    events = talk.fail(leave) if code is None else talk.answer(leave, code)

    assert events == []
    assert talk.wait(2 * SESSION) == []
    assert talk.member.deadline is None
    talk.member.resume(talk.now)

    join = talk.request(JoinRequest)
    assert join.member_id == ""
    talk.settle(1, generation=9)
    assert talk.member.ownership.partitions == orders(1)


def test_a_member_that_resumes_joins_after_its_leave() -> None:
    talk = Talk().settle(0)
    talk.member.suspend(talk.now, "blocked")
    leave = talk.request(LeaveRequest)

    talk.member.resume(talk.now)

    assert talk.wait(1) == []
    talk.answer(leave, 0)
    assert talk.request(JoinRequest).member_id == ""


def test_a_leave_of_each_suspension_is_sent_once_more_to_the_next_coordinator() -> None:
    talk = Talk()
    for _ in range(2):
        talk.settle(0)
        talk.member.suspend(talk.now, "blocked")
        talk.answer(talk.request(LeaveRequest), 16)
        talk.answer(talk.request(LeaveRequest, 1), 0)
        talk.member.resume(talk.now)


def test_a_suspended_member_without_an_id_leaves_with_the_one_that_it_gets() -> None:
    talk = Talk()
    first = talk.request(JoinRequest)
    talk.member.suspend(talk.now, "blocked")
    assert talk.wait() == []

    talk.answer(first, Joined(79, "me"))

    assert talk.request(LeaveRequest).member_id == "me"


def test_a_suspended_static_member_is_silent_and_keeps_its_id() -> None:
    talk = Talk(instance_id="one").settle_static(0)
    talk.beat(27)
    join = talk.request(JoinRequest)
    talk.member.suspend(talk.now, "blocked")

    assert talk.answer(join, Joined(0, "me", 5, "incremental", "other")) == [Lost(1, orders(0), "blocked")]
    assert talk.wait(2 * SESSION) == []
    talk.member.resume(talk.now)

    assert talk.request(JoinRequest).member_id == "me"


@pytest.mark.parametrize("has_left", [True, False])
def test_a_suspended_member_can_leave(has_left: bool) -> None:
    talk = Talk().settle(0)
    talk.member.suspend(talk.now, "blocked")
    leave = talk.request(LeaveRequest)
    if has_left:
        talk.answer(leave, 0)

    talk.member.leave(talk.now, "closing")
    talk.member.resume(talk.now)
    if not has_left:
        assert talk.wait() == []
        talk.answer(leave, 0)

    assert talk.member.ended
    assert talk.wait(SESSION) == []


def test_nothing_revives_an_ended_member() -> None:
    talk = Talk().settle(0)
    late = talk.request(HeartbeatRequest, INTERVAL)
    talk.member.leave(talk.now, "closing")
    leave = talk.request(LeaveRequest)
    talk.answer(leave, 0)
    ownership = talk.member.ownership

    assert talk.answer(late, 0) == []
    talk.member.rejoin(talk.now, "?")
    talk.member.subscribe(["refunds"], talk.now)
    talk.member.partitions_changed({"orders": [9]}, talk.now)
    talk.member.commit_refused(ownership, 25, talk.now)

    assert talk.wait(60) == []
    assert (talk.member.deadline, talk.member.take_events()) == (None, [])


# Leading --------------------------------------------------------------------------------------


def elected(talk: Talk, generation: int = 4) -> Elected:
    members = {
        "me": write_subscription(Subscription(ORDERS)),
        "other": write_subscription(Subscription(frozenset({"refunds"}))),
    }
    event = only(talk.accept(generation, leader="me", members=members), Elected)
    assert isinstance(event, Elected)
    return event


def test_a_leader_assigns_and_watches_the_topics_of_all_members() -> None:
    talk = Talk()
    election = elected(talk)
    assert election.members["other"].topics == {"refunds"}
    assert talk.member.watched == {"orders", "refunds"}
    assert not any(isinstance(request, SyncRequest) for request in talk.wait(1))

    numbers = {"orders": range(2), "refunds": range(1)}
    talk.member.lead(election, {"me": orders(0, 1), "other": ()}, numbers, talk.now)
    sync = talk.request(SyncRequest)
    assert assigned_partitions(sync.assignments["me"]) == (TopicPartition("orders", 0), TopicPartition("orders", 1))
    assert sync.protocol == "incremental"
    talk.answer(sync, Synced(0, orders(0, 1)))

    talk.member.partitions_changed(numbers, talk.now)
    assert not any(isinstance(request, JoinRequest) for request in talk.wait())
    assert talk.member.leads
    talk.member.partitions_changed({"refunds": range(2)}, talk.now)
    assert talk.claims() == (orders(0, 1), 4)
    assert not talk.member.leads
    assert talk.member.watched == ORDERS


def test_an_election_names_the_latest_assignment_that_has_reached_the_group() -> None:
    talk = Talk()
    election = elected(talk)
    assert election.assigned_before is None
    first = {"orders": range(1), "refunds": range(1)}
    talk.member.lead(election, {"me": orders(0)}, first, talk.now)
    talk.answer(talk.request(SyncRequest), Synced(0, orders(0)))
    received = {"orders": frozenset({0}), "refunds": frozenset({0})}

    talk.beat(27)
    again = elected(talk, 5)
    assert again.assigned_before == received
    talk.member.lead(again, {"me": orders(0, 1)}, {"orders": range(2), "refunds": range(1)}, talk.now)
    talk.answer(talk.request(SyncRequest), 27)
    talk.wait(1)
    assert elected(talk, 6).assigned_before == received


def test_an_election_after_a_loss_does_not_know_the_assignment_before() -> None:
    """Another member may have led."""
    talk = Talk()
    talk.member.lead(elected(talk), {"me": orders(0)}, {"orders": range(1), "refunds": ()}, talk.now)
    talk.answer(talk.request(SyncRequest), Synced(0, orders(0)))
    talk.beat(seconds=0)
    talk.beat(22)
    talk.wait(1)

    assert elected(talk, 7).assigned_before is None


def test_partitions_that_appear_while_the_leader_assigns_are_noticed() -> None:
    talk = Talk()
    election = elected(talk)
    talk.member.lead(election, {"me": orders(0)}, {"orders": range(1), "refunds": ()}, talk.now)

    talk.member.partitions_changed({"orders": range(2)}, talk.now)
    talk.assign(0)

    assert talk.request(JoinRequest).member_id == "me"


def test_a_follower_leaves_new_partitions_to_the_leader() -> None:
    talk = Talk().settle(0)

    talk.member.partitions_changed({"orders": range(7)}, talk.now)

    assert not any(isinstance(request, JoinRequest) for request in talk.wait())


def test_the_assignment_of_an_earlier_election_has_no_effect() -> None:
    talk = Talk()
    old = elected(talk)
    talk.beat(25)
    talk.wait(1)
    newer = elected(talk, 6)

    talk.member.lead(old, {"me": orders(0)}, {}, talk.now)
    assert not any(isinstance(request, SyncRequest) for request in talk.wait())
    talk.member.lead(newer, {"me": orders(1)}, {}, talk.now)
    assert talk.request(SyncRequest).generation == 6


def test_a_leader_has_the_group_rebalance_when_withheld_partitions_are_due() -> None:
    talk = Talk()
    election = elected(talk)
    talk.member.lead(election, {"me": orders(0)}, {"orders": range(2)}, talk.now, rejoin_at=talk.now + 3)
    talk.assign(0)
    talk.beat(0)
    talk.beat(0)

    assert not any(isinstance(request, JoinRequest) for request in talk.wait())
    talk.beat(0, seconds=1)

    assert talk.claims() == (orders(0), 4)


# Static members -------------------------------------------------------------------------------


def described(*, topics: Collection[str] = ORDERS, is_stable: bool = True, **instances: str) -> Described:
    """A group with the member "old", which has orders/0, and "other", which has orders/1."""
    members = {
        "old": Member(frozenset(topics), (TopicPartition("orders", 0),)),
        "other": Member(frozenset({"orders", "refunds"}), (TopicPartition("orders", 1),)),
    }
    return Described(0, DescribedGroup(is_stable, members, instances or {"one": "old"}))


def restart(description: Described | None = None, **answer: Any) -> Talk:
    """A static member that has joined and synchronized, after its predecessor "old"."""
    talk = Talk(instance_id="one")
    request = talk.request(DescribeRequest)
    if description is None:
        talk.fail(request)
    else:
        talk.answer(request, description)
    talk.accept(4, **answer)
    talk.assign(0)
    talk.wait(1)
    return talk


def joins_again(talk: Talk) -> bool:
    return any(isinstance(request, JoinRequest) for request in talk.pending)


def test_every_request_of_a_static_member_has_its_instance_id_and_it_does_not_leave() -> None:
    talk = restart(described(), leader="other")
    talk.beat(27)
    requests = [*talk.pending, talk.request(JoinRequest), talk.request(HeartbeatRequest, INTERVAL)]
    talk.accept(5)
    requests.append(talk.request(SyncRequest))
    assert {request.instance_id for request in requests if hasattr(request, "instance_id")} == {"one"}

    talk.member.leave(talk.now, "closing")

    assert [type(event) for event in talk.member.take_events()] == [Lost, Ended]
    assert talk.wait(5) == []


def test_a_restarted_follower_changes_nothing() -> None:
    talk = restart(described(), leader="other")
    talk.member.partitions_changed({"orders": range(5)}, talk.now)
    talk.wait()

    assert not joins_again(talk)
    assert (talk.owned, talk.member.watched) == (orders(0), ORDERS)


@pytest.mark.parametrize(
    "answer",
    [{"leader": "me", "skips_assignment": True}, {"leader": "old"}, {"leader": "unknown"}],
    ids=["version 9", "version 5", "joined in between"],
)
def test_a_restarted_leader_assigns_nothing_and_watches_the_partitions(answer: dict[str, Any]) -> None:
    """KAFKA-13435: otherwise partitions that appear later are assigned to nobody."""
    talk = restart(described(), **answer)
    assert talk.owned == orders(0)
    assert talk.member.watched == {"orders", "refunds"}
    talk.member.partitions_changed({"orders": range(2), "refunds": ()}, talk.now)
    talk.wait()
    assert not joins_again(talk)

    talk.member.partitions_changed({"refunds": range(1)}, talk.now)

    assert talk.claims() == (orders(0), 4)
    assert talk.request(JoinRequest).member_id == "me"


def test_a_restarted_leader_notices_partitions_that_appeared_before() -> None:
    talk = restart(described(), leader="me", skips_assignment=True)

    talk.member.partitions_changed({"orders": range(3)}, talk.now)
    talk.wait()

    assert joins_again(talk)


@pytest.mark.parametrize(
    ("description", "answer"),
    [
        (described(topics={"orders", "invoices"}), {"leader": "other"}),
        (described(topics={"orders", "invoices"}), {"leader": "me", "skips_assignment": True}),
        (None, {"leader": "other"}),
        (Described(16), {"leader": "me", "skips_assignment": True}),
        (described(is_stable=False), {"leader": "me", "skips_assignment": True}),
    ],
    ids=["topics of a follower", "topics of a leader", "silence", "refused", "rebalanced since"],
)
def test_a_restarted_member_has_the_group_rebalance_if_its_assignment_may_be_outdated(
    description: Described | None, answer: dict[str, Any]
) -> None:
    """The coordinator takes a changed subscription without a rebalance. The second join differs from the first."""
    talk = restart(description, **answer)

    assert talk.claims() == (orders(0), 4)
    assert talk.request(JoinRequest).member_id == "me"


@pytest.mark.parametrize("description", [described(two="old"), described(is_stable=False)], ids=["new", "rebalancing"])
def test_a_static_member_that_takes_part_in_a_rebalance_needs_no_second_one(description: Described) -> None:
    talk = restart(description, leader="other")

    assert not joins_again(talk)


def test_a_static_member_looks_at_the_group_again_before_each_join_without_an_id() -> None:
    talk = restart(described(), leader="other")
    talk.beat(25)

    assert not joins_again(talk)
    talk.answer(talk.request(DescribeRequest), described())
    assert talk.request(JoinRequest).member_id == ""


# Answers that are not for the request -----------------------------------------------------------


def test_an_answer_of_another_kind_is_refused() -> None:
    talk = Talk()

    with pytest.raises(TypeError, match="Acknowledged"):
        talk.answer(talk.request(JoinRequest), Acknowledged(0))
