"""A member of the consumer protocol, step by step: the rules for each answer, and for a missing one."""

import itertools
import random
import uuid
from typing import Any

import pytest

from aioshard.kafka.group.consumer import ConsumerMember, joined_patterns
from aioshard.kafka.group.consumer_messages import Heartbeat, HeartbeatAnswer, TopicIdPartition
from aioshard.kafka.group.member import (
    NOT_A_MEMBER,
    Assigned,
    Ended,
    Event,
    GroupMember,
    Lost,
    Recovered,
    Refused,
    Revoked,
    Troubled,
)
from aioshard.records import TopicPartition
from tests.support.model_consumer_group import ModelConsumerGroup

ORDERS, REFUNDS = uuid.UUID(int=1), uuid.UUID(int=2)
NAMES = {ORDERS: "orders", REFUNDS: "refunds"}
SESSION, INTERVAL, REBALANCE = 10.0, 3.0, 60.0
KIND: type[GroupMember[Heartbeat, HeartbeatAnswer, Event]] = ConsumerMember
"""For the type checker: a driver may use it as any other member."""


def orders(*numbers: int) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition("orders", number) for number in numbers)


def by_id(*numbers: int, topic_id: uuid.UUID = ORDERS) -> list[TopicIdPartition]:
    return [TopicIdPartition(topic_id, number) for number in numbers]


class Bench:
    """A member, its clock, and all its events."""

    def __init__(self, *, named: bool = True, **settings: Any) -> None:
        times = {"session": SESSION, "interval": INTERVAL, "rebalance_timeout": REBALANCE}
        self.member = ConsumerMember(random.Random(1), **({"topics": ["orders"]} | times | settings))
        self.now = 0.0
        self.events: list[Event] = []
        if named:
            self.member.name_topics(NAMES, 0.0)

    def request(self) -> Heartbeat:
        """Waits until the member sends a request, and returns it."""
        requests = self.poll()
        for _ in range(100):
            if requests:
                break
            assert self.member.deadline is not None, "the member waits for another input"
            self.now = max(self.now, self.member.deadline)
            requests = self.poll()
        (request,) = requests
        return request

    def poll(self) -> list[Heartbeat]:
        requests = list(self.member.poll(self.now))
        self.events += self.member.take_events()
        return requests

    def answer(self, request: Heartbeat, *partitions: TopicIdPartition, epoch: int = 1, **values: Any) -> None:
        """Answers with an assignment, or, if *values* have an error, with that."""
        answer: dict[str, Any] = {"error": 0, "epoch": epoch, "interval": INTERVAL, "assignment": partitions} | values
        self.member.answered(request, HeartbeatAnswer(**answer), self.now)
        self.events += self.member.take_events()

    def refuse(self, request: Heartbeat, code: int) -> None:
        self.answer(request, error=code, epoch=0, interval=0.0, assignment=None)

    def fail(self, request: Heartbeat) -> None:
        self.member.failed(request, self.now)
        self.events += self.member.take_events()

    def join(self, *partitions: TopicIdPartition) -> "Bench":
        self.answer(self.request(), *(partitions or by_id(0, 1)))
        return self

    def taken(self) -> list[Event]:
        events = self.events
        self.events = []
        return events

    @property
    def owned(self) -> frozenset[TopicPartition]:
        return self.member.ownership.partitions


def is_full(request: Heartbeat) -> bool:
    return None not in (request.rebalance_timeout, request.topics, request.pattern, request.owned)


# Joining --------------------------------------------------------------------------------------


def test_a_join_says_everything_and_owns_nothing() -> None:
    bench = Bench(patterns=["a", "b"], instance_id="one", rack="r1", assignor="range")
    request = bench.request()
    assert is_full(request)
    assert request.member_id
    assert request.epoch == 0
    assert (request.topics, request.pattern, request.owned) == (("orders",), "(?:a)|(?:b)", frozenset())
    assert (request.instance_id, request.rack, request.assignor) == ("one", "r1", "range")


def test_ownership_is_one_value_that_names_the_epoch() -> None:
    bench = Bench()
    assert bench.member.ownership.epoch == NOT_A_MEMBER
    bench.join()
    own = bench.member.ownership
    assert bench.taken() == [Assigned(1, orders(0, 1), own)]
    assert (own.life, own.epoch, own.partitions, own.alive_until) == (1, 1, orders(0, 1), SESSION)
    assert own.owns(TopicPartition("orders", 0), SESSION - 0.1)
    assert not own.owns(TopicPartition("orders", 0), SESSION)


def test_an_empty_first_assignment_is_reported_once() -> None:
    bench = Bench()
    bench.answer(bench.request())
    bench.answer(bench.request(), assignment=None)
    assert [event.partitions for event in bench.taken() if isinstance(event, Assigned)] == [frozenset()]


def test_later_heartbeats_say_what_has_changed() -> None:
    bench = Bench().join()
    first = bench.request()
    assert (first.epoch, first.topics, first.rebalance_timeout) == (1, None, None)
    assert first.owned == frozenset(by_id(0, 1))
    bench.answer(first, assignment=None)
    second = bench.request()
    assert (second.topics, second.pattern, second.owned) == (None, None, None)
    bench.member.subscribe(["orders", "refunds"], [], bench.now)
    bench.answer(second, assignment=None)
    third = bench.request()
    assert third.sent_at == second.sent_at, "a changed subscription does not wait"
    assert (third.topics, third.pattern, third.owned) == (("orders", "refunds"), None, None)


def test_instance_ids_are_in_every_request() -> None:
    bench = Bench(instance_id="one").join()
    assert bench.request().instance_id == "one"
    bench.member.leave(bench.now, "closing")
    assert bench.request().instance_id == "one"


def test_patterns_are_alternatives_as_a_whole() -> None:
    assert joined_patterns(["a|b", "c"]) == "(?:a|b)|(?:c)"
    assert joined_patterns(["a|b"]) == "a|b"
    assert joined_patterns([]) == ""


# Missing and unusual answers ------------------------------------------------------------------


@pytest.mark.parametrize("code", [7, 14, 15, 16, 29, -1, 999, None])
def test_everything_is_said_after_an_unusual_answer(code: int | None) -> None:
    bench = Bench().join()
    bench.answer(bench.request(), assignment=None)
    request = bench.request()
    if code is None:
        bench.fail(request)
    else:
        bench.refuse(request, code)
    again = bench.request()
    assert is_full(again)
    assert (again.epoch, again.owned) == (1, frozenset(by_id(0, 1)))
    assert again.sent_at > request.sent_at, "an error must not be repeated without a pause"
    bench.answer(again)
    assert [event for event in bench.taken() if isinstance(event, Recovered)] == [Recovered()]
    assert not is_full(bench.request())


@pytest.mark.parametrize(("code", "moved"), [(14, False), (15, True), (16, True), (7, True), (29, False)])
def test_the_coordinator_is_looked_up_if_it_may_be_another(code: int, moved: bool) -> None:
    bench = Bench().join()
    bench.refuse(bench.request(), code)
    (trouble,) = [event for event in bench.taken() if isinstance(event, Troubled)]
    assert (trouble.code, trouble.coordinator_moved) == (code, moved)


@pytest.mark.parametrize("epoch", [0, -1, 4])
def test_an_epoch_that_cannot_be_ours_is_ignored(epoch: int) -> None:
    bench = Bench()
    bench.answer(bench.request(), *by_id(0), epoch=5)
    bench.answer(bench.request(), epoch=epoch)
    assert (bench.member.ownership.epoch, bench.owned) == (5, orders(0))
    assert is_full(bench.request())


@pytest.mark.parametrize("interval", [0.0, -1.0, 3600.0])
def test_an_unusable_interval_keeps_the_last_one(interval: float) -> None:
    bench = Bench().join()
    request = bench.request()
    bench.answer(request, assignment=None, interval=interval)
    assert bench.request().sent_at == request.sent_at + INTERVAL


def test_the_interval_counts_from_the_sending() -> None:
    bench = Bench().join()
    request = bench.request()
    bench.now += 1.0
    bench.answer(request, assignment=None)
    assert bench.request().sent_at == request.sent_at + INTERVAL


def test_pauses_grow() -> None:
    bench = Bench().join()
    times = []
    for _ in range(5):
        request = bench.request()
        times.append(request.sent_at)
        bench.refuse(request, 14)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times[1:])]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 2 * pauses[0]


def test_a_topic_denied_is_asked_for_at_the_interval_and_ends_nothing() -> None:
    bench = Bench().join()
    request = bench.request()
    bench.refuse(request, 29)
    assert bench.owned == orders(0, 1)
    assert bench.request().sent_at == request.sent_at + INTERVAL


def test_a_full_group_is_tried_again_after_long_pauses() -> None:
    bench = Bench()
    request = bench.request()
    bench.refuse(request, 81)
    assert bench.request().sent_at >= request.sent_at + 4.0
    assert [event.code for event in bench.taken() if isinstance(event, Troubled)] == [81]


# Ends of a life -------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [25, 69])
def test_a_removed_member_loses_everything_and_joins_as_new(code: int) -> None:
    bench = Bench().join()
    before = bench.member.ownership
    bench.taken()
    bench.refuse(bench.request(), code)
    (lost,) = bench.taken()
    assert isinstance(lost, Lost)
    assert (lost.life, lost.partitions) == (1, orders(0, 1))
    again = bench.request()
    assert (again.epoch, again.life) == (0, 2)
    assert again.member_id != before.member_id


@pytest.mark.parametrize("code", [110, 113])
def test_a_fenced_member_leaves_before_it_joins_as_new(code: int) -> None:
    """Otherwise the coordinator refuses the join as long as it has the other epoch of this member."""
    bench = Bench().join()
    before = bench.member.ownership
    request = bench.request()
    bench.refuse(request, code)
    assert not bench.owned
    leave = bench.request()
    assert (leave.member_id, leave.epoch) == (before.member_id, -1)
    bench.answer(leave, epoch=-1, assignment=None)
    join = bench.request()
    assert join.epoch == 0
    assert join.member_id != before.member_id


def test_a_session_without_an_answer_ends_ownership_before_anything_is_sent() -> None:
    bench = Bench().join()
    bench.taken()
    late = bench.request()
    bench.now = SESSION
    (leave,) = bench.poll()
    (lost,) = bench.taken()
    assert isinstance(lost, Lost)
    assert lost.partitions == orders(0, 1)
    assert leave.epoch == -1
    bench.answer(late, *by_id(0, 1))
    assert not bench.owned, "an answer to an earlier life was accepted"
    bench.answer(leave, epoch=-1, assignment=None)
    join = bench.request()
    assert (join.epoch, join.life) == (0, 2)


@pytest.mark.parametrize("news", ["answer", "times"])
def test_an_ownership_that_has_ended_is_never_revived(news: str) -> None:
    """After a pause of the machine, the answer may be read before the clock; readers have seen the end already."""
    bench = Bench().join()
    bench.taken()
    late = bench.request()
    bench.now = SESSION
    if news == "answer":
        bench.answer(late, *by_id(0, 1))
    else:
        bench.member.times(2 * SESSION, 1.0, bench.now)
    assert not bench.owned
    bench.poll()
    (lost,) = bench.taken()
    assert isinstance(lost, Lost)


def test_ownership_has_ended_for_a_reader_before_the_member_runs_again() -> None:
    bench = Bench().join()
    assert not bench.member.ownership.owns(TopicPartition("orders", 0), SESSION + 1000)


def test_an_unanswered_join_is_left_before_another_one() -> None:
    """The coordinator may have handled the join, or may handle it later: nothing of it may touch the next one."""
    bench = Bench()
    join = bench.request()
    bench.fail(join)
    leave = bench.request()
    assert (leave.member_id, leave.epoch) == (join.member_id, -1)
    bench.fail(leave)
    leave = bench.request()
    assert (leave.member_id, leave.epoch) == (join.member_id, -1)
    bench.refuse(leave, 25)
    assert bench.request().member_id != join.member_id


def test_a_refused_join_is_not_left() -> None:
    bench = Bench()
    join = bench.request()
    bench.refuse(join, 14)
    again = bench.request()
    assert (again.member_id, again.epoch) == (join.member_id, 0)
    bench.refuse(again, 14)
    bench.member.leave(bench.now, "closing")
    assert bench.poll() == []
    assert bench.taken()[-1] == Ended(0, "left the group")


@pytest.mark.parametrize("code", [None, 14])
def test_an_old_id_leaves_also_after_a_long_outage(code: int | None) -> None:
    """The coordinator begins its session anew when it restarts, so all others would wait for that."""
    bench = Bench().join()
    own = bench.member.ownership
    bench.fail(bench.request())
    while bench.now < 5 * SESSION:
        request = bench.request()
        if code is None or request.epoch != -1:
            bench.fail(request)
        else:
            bench.refuse(request, code)
    leave = bench.request()
    assert (leave.member_id, leave.epoch) == (own.member_id, -1)
    bench.answer(leave, epoch=-1, assignment=None)
    assert bench.request().epoch == 0


def test_a_member_that_ends_gives_up_an_old_id_that_cannot_leave() -> None:
    bench = Bench().join()
    bench.member.leave(bench.now, "closing")
    while (leaves := bench.poll()) or bench.member.deadline is not None:
        assert bench.now < SESSION + 2.0
        for leave in leaves:
            assert leave.epoch == -1
            bench.fail(leave)
        bench.now = bench.member.deadline or bench.now
    assert isinstance(bench.taken()[-1], Ended)


# What ends a member ---------------------------------------------------------------------------


@pytest.mark.parametrize("code", [24, 26, 30, 42, 112, 128])
def test_final_errors_of_a_member_lose_leave_and_end(code: int) -> None:
    bench = Bench().join()
    bench.taken()
    bench.answer(bench.request(), error=code, message="the reason")
    (lost,) = bench.taken()
    assert isinstance(lost, Lost)
    leave = bench.request()
    assert leave.epoch == -1
    bench.refuse(leave, 25)
    assert bench.taken() == [Ended(code, "the reason")]
    assert bench.member.ended
    assert bench.member.deadline is None


@pytest.mark.parametrize("code", [24, 26, 30, 82, 112, 128])
def test_final_errors_of_a_join_end(code: int) -> None:
    bench = Bench()
    bench.answer(bench.request(), error=code, message="the reason")
    assert bench.taken() == [Ended(code, "the reason")]


def test_another_process_with_our_instance_id_ends_the_member() -> None:
    bench = Bench(instance_id="one").join()
    bench.taken()
    bench.refuse(bench.request(), 82)
    lost, ended = bench.taken()
    assert isinstance(lost, Lost)
    assert isinstance(ended, Ended)
    assert ended.code == 82
    assert bench.poll() == [], "the leave would be that of the other process"


def test_an_invalid_join_is_tried_once_more() -> None:
    bench = Bench()
    bench.refuse(bench.request(), 42)
    again = bench.request()
    assert is_full(again)
    bench.answer(again, error=42, message="no topics")
    assert bench.taken()[-1] == Ended(42, "no topics")


def test_brokers_without_the_protocol_are_a_reason_for_the_other_one() -> None:
    bench = Bench()
    bench.answer(bench.request(), error=35, message="not enabled")
    assert bench.taken() == [Refused(35, "not enabled")]
    assert bench.member.ended


def test_a_member_that_has_worked_does_not_change_the_protocol() -> None:
    bench = Bench().join()
    bench.answer(bench.request(), error=35, message="not enabled")
    bench.refuse(bench.request(), 25)
    assert bench.taken()[-1] == Ended(35, "not enabled")


def test_a_group_of_the_other_protocol_is_found_after_a_few_joins() -> None:
    bench = Bench().join()
    bench.refuse(bench.request(), 69)
    joins = []
    while not bench.member.ended:
        joins.append(bench.request())
        bench.refuse(joins[-1], 69)
    assert len(joins) == 3
    assert isinstance(bench.taken()[-1], Refused)


def test_a_group_that_had_expired_is_joined_again() -> None:
    bench = Bench().join()
    bench.refuse(bench.request(), 69)
    bench.join()
    assert bench.owned == orders(0, 1)


# Static members -------------------------------------------------------------------------------


def test_an_instance_id_that_another_process_had_is_waited_for_a_session() -> None:
    bench = Bench(instance_id="one")
    attempts = 0
    while not bench.member.ended:
        attempts += 1
        bench.refuse(bench.request(), 111)
    assert SESSION < bench.now < SESSION + 10.0
    assert attempts > 5
    assert isinstance(bench.taken()[-1], Ended)


def test_the_wait_for_an_instance_id_begins_anew_after_a_success() -> None:
    bench = Bench(instance_id="one")
    bench.refuse(bench.request(), 111)
    bench.join()
    bench.now = 9 * SESSION
    while (request := bench.request()).epoch != 0:
        bench.refuse(request, 25)
    bench.refuse(request, 111)
    assert not bench.member.ended


def test_a_lost_join_of_a_static_member_does_not_lock_it_out() -> None:
    """Its instance id would be taken, by itself, until a session has passed."""
    group = ModelConsumerGroup(random.Random(1), session=SESSION)
    group.add_topic("orders", 2)
    bench = Bench(instance_id="one")
    group.heartbeat(join := bench.request(), bench.now)
    bench.fail(join)
    while bench.member.ownership.epoch != group.epoch:
        request = bench.request()
        bench.member.answered(request, group.heartbeat(request, bench.now), bench.now)
    assert bench.now < 2.0


@pytest.mark.parametrize(("for_good", "epoch"), [(False, -2), (True, -1)])
def test_a_static_member_keeps_its_partitions_unless_it_leaves_for_good(for_good: bool, epoch: int) -> None:
    bench = Bench(instance_id="one").join()
    bench.member.leave(bench.now, "closing", for_good=for_good)
    assert bench.request().epoch == epoch


def test_a_static_member_that_is_away_can_still_leave_for_good() -> None:
    bench = Bench(instance_id="one").join()
    bench.member.suspend(bench.now, "the event loop is blocked")
    away = bench.request()
    assert away.epoch == -2
    bench.member.leave(bench.now, "closing", for_good=True)
    leave = bench.request()
    assert (leave.member_id, leave.epoch) == (away.member_id, -1)
    bench.answer(away, epoch=-2, assignment=None)
    assert not bench.member.ended
    bench.answer(leave, epoch=-1, assignment=None)
    assert bench.member.ended


def test_another_process_took_our_instance_id_while_we_were_away() -> None:
    bench = Bench(instance_id="one").join()
    bench.refuse(bench.request(), 110)
    bench.answer(bench.request(), error=82, message="taken")
    assert bench.taken()[-1] == Ended(82, "taken")


# Assignments ----------------------------------------------------------------------------------


def test_revoked_partitions_are_ours_until_they_are_released() -> None:
    bench = Bench().join()
    bench.taken()
    sent = bench.request()
    bench.answer(sent, *by_id(1, 2))
    revoked, assigned = bench.taken()
    assert revoked == Revoked(1, orders(0), sent.sent_at + REBALANCE)
    assert isinstance(assigned, Assigned)
    assert assigned.partitions == orders(2)
    assert bench.owned == orders(0, 1, 2)
    waiting = bench.request()
    assert waiting.owned == frozenset(by_id(0, 1, 2))
    bench.answer(waiting, assignment=None, epoch=2)
    assert bench.member.ownership.epoch == 2
    bench.member.released(1, orders(0), bench.now)
    assert bench.owned == orders(1, 2)
    acknowledgement = bench.request()
    assert acknowledgement.sent_at == bench.now == waiting.sent_at
    assert acknowledgement.owned == frozenset(by_id(1, 2))


def test_a_revocation_is_counted_from_the_first_heartbeat_that_may_have_begun_it() -> None:
    bench = Bench(session=1000.0).join()
    bench.taken()
    first = bench.request()
    bench.fail(first)
    bench.answer(bench.request(), *by_id(1))
    (revoked,) = [event for event in bench.taken() if isinstance(event, Revoked)]
    assert revoked.deadline == first.sent_at + REBALANCE
    bench.now = revoked.deadline
    bench.poll()
    assert not bench.owned


def test_a_refused_heartbeat_has_not_begun_a_revocation() -> None:
    bench = Bench(session=1000.0).join()
    bench.refuse(bench.request(), 14)
    bench.answer(second := bench.request(), *by_id(1))
    (revoked,) = [event for event in bench.taken() if isinstance(event, Revoked)]
    assert revoked.deadline == second.sent_at + REBALANCE


def test_an_unanswered_heartbeat_may_have_begun_a_revocation() -> None:
    bench = Bench(session=1000.0).join()
    sent = bench.request()
    assert bench.member.ownership.alive_until == sent.sent_at + REBALANCE
    bench.fail(sent)
    assert bench.member.ownership.alive_until == sent.sent_at + REBALANCE
    bench.answer(again := bench.request(), *by_id(0, 1))
    assert bench.member.ownership.alive_until == again.sent_at + 1000.0


def test_a_release_counts_when_the_coordinator_has_heard_of_it() -> None:
    bench = Bench(session=1000.0).join()
    bench.answer(sent := bench.request(), *by_id(1))
    bench.member.released(1, orders(0), bench.now)
    assert bench.member.ownership.alive_until == sent.sent_at + REBALANCE
    bench.answer(bench.request(), assignment=None, epoch=2)
    assert bench.member.ownership.alive_until > 1000.0


def test_only_the_newest_assignment_is_kept_during_a_revocation() -> None:
    bench = Bench().join()
    bench.answer(bench.request(), *by_id(1))
    bench.answer(bench.request(), *by_id(1, 3))
    bench.answer(bench.request(), *by_id(1, 4))
    assert bench.owned == orders(0, 1, 3, 4)
    bench.member.released(1, orders(0, 3), bench.now)
    assert bench.owned == orders(1, 4)


def test_a_partition_that_comes_back_is_assigned_after_its_release() -> None:
    bench = Bench().join()
    bench.answer(bench.request(), *by_id(1))
    bench.answer(bench.request(), *by_id(0, 1))
    bench.taken()
    bench.member.released(1, orders(0), bench.now)
    assert bench.owned == orders(1)
    bench.answer(bench.request(), assignment=None, epoch=2)
    (assigned,) = bench.taken()
    assert isinstance(assigned, Assigned)
    assert assigned.partitions == orders(0)


def test_a_release_of_an_earlier_life_is_ignored() -> None:
    bench = Bench().join()
    bench.answer(bench.request(), *by_id(1))
    bench.refuse(bench.request(), 25)
    bench.join()
    bench.answer(bench.request(), *by_id(1))
    bench.member.released(1, orders(0), bench.now)
    assert bench.owned == orders(0, 1)


def test_damaged_assignments_name_each_partition_once() -> None:
    bench = Bench()
    bench.answer(bench.request(), *by_id(0, 0, -1))
    assert bench.owned == orders(0)


def test_a_created_again_topic_is_taken_after_its_earlier_self() -> None:
    new = uuid.UUID(int=9)
    bench = Bench().join()
    bench.member.name_topics({new: "orders"}, bench.now)
    bench.answer(bench.request(), *by_id(0, 1, topic_id=new))
    assert bench.taken()[-1].__class__ is Revoked
    assert bench.owned == orders(0, 1)
    bench.member.released(1, orders(0, 1), bench.now)
    acknowledgement = bench.request()
    assert acknowledgement.owned == frozenset()
    bench.answer(acknowledgement, assignment=None, epoch=2)
    assert bench.owned == orders(0, 1)
    assert bench.request().owned == frozenset(by_id(0, 1, topic_id=new))


# Topics without a name ------------------------------------------------------------------------


def test_partitions_without_a_name_are_neither_owned_nor_claimed() -> None:
    bench = Bench(named=False).join()
    assert bench.member.unnamed == {ORDERS}
    assert not bench.owned
    assert bench.taken() == [], "an assignment without names is not an empty one"
    bench.answer(bench.request(), assignment=None)
    bench.member.name_topics({ORDERS: "orders"}, bench.now)
    assert bench.owned == orders(0, 1)
    assert bench.member.unnamed == frozenset()
    assert bench.request().owned == frozenset(by_id(0, 1))


def test_partitions_with_a_name_do_not_wait_for_others() -> None:
    bench = Bench(named=False)
    bench.member.name_topics({ORDERS: "orders"}, 0.0)
    bench.join(*by_id(0), *by_id(0, topic_id=REFUNDS))
    assert bench.owned == orders(0)
    assert bench.member.unnamed == {REFUNDS}


def test_partitions_are_not_taken_while_a_heartbeat_says_that_they_are_not_owned() -> None:
    """The coordinator may give them to another member when it hears that."""
    bench = Bench(named=False)
    bench.member.name_topics({ORDERS: "orders"}, 0.0)
    bench.join(*by_id(0), *by_id(0, topic_id=REFUNDS))
    request = bench.request()
    assert request.owned == frozenset(by_id(0))
    bench.member.name_topics({REFUNDS: "refunds"}, bench.now)
    assert bench.owned == orders(0)
    bench.answer(request, *by_id(0), epoch=2)
    assert bench.owned == orders(0)


@pytest.mark.parametrize("code", [14, None])
def test_partitions_are_not_taken_after_a_missing_answer(code: int | None) -> None:
    bench = Bench(named=False).join()
    if code is None:
        bench.fail(bench.request())
    else:
        bench.refuse(bench.request(), code)
    bench.member.name_topics({ORDERS: "orders"}, bench.now)
    assert not bench.owned
    bench.answer(bench.request(), *by_id(0))
    assert bench.owned == orders(0)


def test_partitions_that_had_no_name_are_acknowledged_when_they_are_taken_away() -> None:
    """Otherwise the coordinator waits for their release, and removes the member."""
    bench = Bench(named=False, session=1000.0).join()
    bench.answer(bench.request(), assignment=None)
    bench.answer(sent := bench.request())
    assert bench.member.ownership.alive_until == sent.sent_at + REBALANCE
    acknowledgement = bench.request()
    assert (acknowledgement.sent_at, acknowledgement.owned) == (sent.sent_at, frozenset())
    bench.answer(acknowledgement, assignment=None, epoch=2)
    assert bench.member.ownership.alive_until > 1000.0
    assert bench.request().owned is None


def test_unnamed_topics_of_an_earlier_life_are_forgotten() -> None:
    bench = Bench(named=False).join()
    bench.refuse(bench.request(), 25)
    assert bench.member.unnamed == frozenset()
    bench.member.name_topics({ORDERS: "orders"}, bench.now)
    assert not bench.owned


# Leaving and returning ------------------------------------------------------------------------


def test_a_leave_does_not_wait_for_a_heartbeat_in_flight() -> None:
    bench = Bench().join()
    bench.taken()
    own = bench.member.ownership
    late = bench.request()
    bench.member.leave(bench.now, "closing")
    (leave,) = bench.poll()
    assert bench.taken() == [Lost(1, orders(0, 1), "closing")], "lost before the leave is sent"
    assert (leave.member_id, leave.epoch) == (own.member_id, -1)
    bench.answer(late, *by_id(0, 1))
    assert not bench.owned, "an older answer has revived the member"
    bench.answer(leave, epoch=-1, assignment=None)
    assert bench.taken() == [Ended(0, "left the group")]
    assert bench.poll() == []


@pytest.mark.parametrize("code", [14, 15, 16, None])
def test_a_leave_is_repeated(code: int | None) -> None:
    bench = Bench().join()
    bench.member.leave(bench.now, "closing")
    leave = bench.request()
    if code is None:
        bench.fail(leave)
    else:
        bench.refuse(leave, code)
    assert not bench.member.ended
    bench.refuse(bench.request(), 25)
    assert bench.member.ended


@pytest.mark.parametrize("code", [0, 25, 69])
def test_a_member_that_is_gone_has_left(code: int) -> None:
    bench = Bench().join()
    bench.member.leave(bench.now, "closing")
    bench.answer(bench.request(), error=code, epoch=-1)
    assert bench.taken()[-1] == Ended(0, "left the group")


def test_a_leave_during_a_join_leaves_with_the_id_of_the_join() -> None:
    bench = Bench()
    join = bench.request()
    bench.member.leave(bench.now, "closing")
    (leave,) = bench.poll()
    assert (leave.member_id, leave.epoch) == (join.member_id, -1)
    bench.answer(join, *by_id(0))
    assert not bench.owned


def test_nothing_is_left_before_the_first_join() -> None:
    bench = Bench()
    bench.member.leave(0.0, "closing")
    assert bench.poll() == []
    assert bench.taken() == [Ended(0, "left the group")]


def test_a_suspended_member_leaves_and_joins_again_on_request() -> None:
    bench = Bench().join()
    bench.taken()
    bench.member.suspend(bench.now, "the event loop is blocked")
    leave = bench.request()
    assert bench.taken() == [Lost(1, orders(0, 1), "the event loop is blocked")]
    bench.answer(leave, epoch=-1, assignment=None)
    assert bench.poll() == []
    assert bench.member.deadline is None
    assert not bench.member.ended
    bench.member.resume(bench.now)
    join = bench.request()
    assert (join.epoch, join.life) == (0, 2)


# Times ----------------------------------------------------------------------------------------


def test_the_first_partitions_do_not_wait_for_the_interval() -> None:
    bench = Bench(interval=4.0)
    times = []
    for _ in range(8):
        request = bench.request()
        times.append(request.sent_at)
        bench.answer(request, interval=4.0)
    assert times[:6] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert times[6:] == [9.0, 13.0], "a member without partitions is nothing unusual"


def test_a_heartbeat_is_sent_now_if_a_new_epoch_is_needed() -> None:
    bench = Bench().join()
    bench.now = 1.0
    assert bench.poll() == []
    bench.member.heartbeat_now(bench.now)
    (request,) = bench.poll()
    bench.answer(request, assignment=None, epoch=2)
    assert bench.poll() == []


def test_a_wish_for_a_heartbeat_is_not_lost_while_one_is_in_flight() -> None:
    bench = Bench().join()
    request = bench.request()
    bench.member.heartbeat_now(bench.now)
    assert bench.poll() == []
    bench.answer(request, assignment=None)
    assert len(bench.poll()) == 1


def test_a_wish_for_a_heartbeat_does_not_shorten_the_pause_after_an_error() -> None:
    bench = Bench().join()
    bench.refuse(bench.request(), 14)
    bench.member.heartbeat_now(bench.now)
    assert bench.poll() == []


def test_a_shorter_session_counts_from_the_last_answered_heartbeat() -> None:
    bench = Bench().join()
    bench.now = 2.0
    bench.member.times(4.0, 1.0, bench.now)
    assert bench.member.ownership.alive_until == 4.0
    assert bench.request().sent_at == 2.0
    bench.now = 4.0
    bench.poll()
    assert not bench.owned


def test_a_longer_session_extends_ownership() -> None:
    bench = Bench().join()
    bench.member.times(40.0, INTERVAL, bench.now)
    assert bench.member.ownership.alive_until == 40.0
