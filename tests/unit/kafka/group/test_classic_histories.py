"""Members of a classic group in random histories: one owner at a time, and none missing in the end."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from aioshard.kafka.group.classic import Assignor, ClassicMember, _Session
from aioshard.kafka.group.classic_messages import ClassicRequest, HeartbeatRequest, Joined, JoinRequest
from aioshard.kafka.group.member import NO_PARTITIONS, Code, Ownership, Partitions
from aioshard.records import TopicPartition
from tests.simulation.seeds import with_seeds
from tests.unit.kafka.group.classic_chaos import Chaos, Release
from tests.unit.kafka.group.classic_world import EAGER, INCREMENTAL, INTERVAL, REBALANCE, SESSION, Faults, Node, World

MOST_SEEDS = 60
"""Histories in which a mistake has to show."""


@with_seeds()
def test_a_partition_has_one_owner_in_each_history(seeds: range) -> None:
    for seed in seeds:
        Chaos(seed).run()


# Mistakes, each of which some history has to show ---------------------------------------------


class CommitsWithAnOldEpoch(ClassicMember):
    _first = -1

    @property
    def ownership(self) -> Ownership:
        own = super().ownership
        if self._first < 0:
            self._first = own.epoch
        return dataclasses.replace(own, epoch=self._first)


class JoinsBeforeTheRelease(ClassicMember):
    """Claims only what it keeps, while its engine still works on the rest."""

    def _next_kind(self) -> type[ClassicRequest] | None:
        if self._holdings.revoking and self._in_flight is None and self._rejoin_reason is not None:
            return JoinRequest
        return super()._next_kind()

    def _join(self) -> JoinRequest:
        whole = self._holdings.ownership
        kept = whole.partitions - self._holdings.revoking
        self._holdings.ownership = dataclasses.replace(whole, partitions=kept)
        request = super()._join()
        self._holdings.ownership = whole
        return request


class ClaimsNothingAfterALostAnswer(ClassicMember):
    _had_no_answer = False

    def _retry(self, request: ClassicRequest, code: int | None, now: float, why: str) -> None:
        super()._retry(request, code, now, why)
        self._had_no_answer = not isinstance(request, HeartbeatRequest)

    def _subscription(self, assignor: Assignor) -> bytes:
        if self._had_no_answer:
            self._claimed = NO_PARTITIONS
        self._had_no_answer = False
        return super()._subscription(assignor)


class NeverJoinsAgainAfterARelease(ClassicMember):
    def _reconcile(self, target: Partitions, now: float) -> None:
        self._claimed = NO_PARTITIONS
        super()._reconcile(target, now)


@pytest.mark.parametrize(
    "mistaken",
    [
        CommitsWithAnOldEpoch,
        JoinsBeforeTheRelease,
        ClaimsNothingAfterALostAnswer,
        NeverJoinsAgainAfterARelease,
    ],
)
def test_histories_show_each_mistake(mistaken: type[ClassicMember]) -> None:
    for seed in range(MOST_SEEDS):
        try:
            Chaos(seed, mistaken, [[Release(INCREMENTAL)]]).run()
        except AssertionError:
            return
    pytest.fail(f"{mistaken.__name__} is not noticed in {MOST_SEEDS} histories")


# Rare histories, told in full, and the mistakes that they show --------------------------------


class KeepsPartitionsAfterFencing(ClassicMember):
    def _refuse(self, request: ClassicRequest, code: int, now: float) -> None:
        if code == Code.UNKNOWN_MEMBER_ID:
            self._forget_id()
        else:
            super()._refuse(request, code, now)


class LetsAnEarlierLifeRelease(ClassicMember):
    def released(self, life: int, partitions: Collection[TopicPartition], now: float) -> None:  # noqa: ARG002 - the mistake
        super().released(self.ownership.life, partitions, now)


class CountsTheSessionFromTheAnswer(ClassicMember):
    def _take_heartbeat(self, request: HeartbeatRequest, code: int, sent: float, now: float) -> None:  # noqa: ARG002
        super()._take_heartbeat(request, code, now, now)


class TakesHeartbeatsForASync(ClassicMember):
    def _accept(self, request: JoinRequest, answer: Joined, now: float) -> None:
        super()._accept(request, answer, now)
        self._session._has_synced = True


class NeverRemovedSession(_Session):
    @property
    def removal(self) -> float:
        return math.inf


class NeverGivesUpWhileTheGroupRebalances(ClassicMember):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._session = NeverRemovedSession(SESSION, REBALANCE)


def two_members(kind: type[ClassicMember], assignors: Sequence[str] = INCREMENTAL) -> tuple[World, Node]:
    """The first of two members of a group, each with half of the partitions."""
    world = World()
    first = world.start(Node(world, "first", kind=kind, assignors=assignors))
    world.run(5)
    world.start(Node(world, "second", assignors=assignors))
    world.run(10)
    assert sorted(world.owners().values()) == ["first"] * 3 + ["second"] * 3
    return world, first


def removed(kind: type[ClassicMember]) -> None:
    """An operator removes a member; it joins again, and has nothing before the group says so."""
    world, first = two_members(kind)
    first.unknown_until = world.now + 1.5
    world.group.remove(first.member.ownership.member_id, world.now)

    world.run(SESSION)

    assert world.is_settled(), world.describe()


def released_too_late(kind: type[ClassicMember]) -> None:
    """A release that took too long ends in the next life of the member, while it releases the same partitions again."""
    world, first = two_members(kind, EAGER)
    world.faults = Faults(stuck=1.0)
    first.do(lambda: first.member.rejoin(world.now, "for a test"))
    late = first.drains[-1]
    world.run_until(lambda: first.member.ownership.life > late.life, 2 * REBALANCE)
    world.run_until(lambda: bool(first.held), REBALANCE)
    first.do(lambda: first.member.rejoin(world.now, "for a test"))
    assert first.draining

    first.do(lambda: first.release(late))

    assert first.held, world.describe()


def frozen_after_a_slow_answer(kind: type[ClassicMember]) -> None:
    """The answer to a heartbeat takes long; then the process is frozen until its session has ended."""
    world, first = two_members(kind)
    second = world.nodes[1]
    world.run_until(lambda: first.member._heartbeat is not None, 2 * INTERVAL)
    first.hold_answers(1.4)
    world.run(1.45)
    first.freeze(2 * SESSION)
    second.do(lambda: second.member.rejoin(world.now, "for a test"))

    world.run(2 * SESSION)


def lost_sync(kind: type[ClassicMember]) -> None:
    """A sync never arrives: the group removes that member, after it has answered its heartbeats for a long time."""
    world, first = two_members(kind)
    first.lose = lambda request: type(request).__name__ == "SyncRequest"
    first.do(lambda: first.member.rejoin(world.now, "for a test"))
    world.run_until(lambda: first.member.ownership.epoch < world.group.generation, REBALANCE)
    world.run(REBALANCE - 1)
    first.freeze(4.0)

    world.run(2 * REBALANCE)


def slow_release(kind: type[ClassicMember]) -> None:
    """An eager member takes too long to release its partitions, and the group removes it."""
    world, first = two_members(kind, EAGER)
    world.faults = Faults(stuck=1.0)
    world.start(Node(world, "third", assignors=EAGER))
    world.run(REBALANCE - 0.5)
    first.freeze(4.0)

    world.run(2 * REBALANCE)


TELL = pytest.mark.parametrize(
    ("tell", "mistaken"),
    [
        (removed, KeepsPartitionsAfterFencing),
        (released_too_late, LetsAnEarlierLifeRelease),
        (frozen_after_a_slow_answer, CountsTheSessionFromTheAnswer),
        (lost_sync, TakesHeartbeatsForASync),
        (slow_release, NeverGivesUpWhileTheGroupRebalances),
    ],
    ids=lambda each: each.__name__,
)


@TELL
def test_a_rare_history_has_one_owner_and_shows_a_mistake(tell: object, mistaken: type[ClassicMember]) -> None:
    assert callable(tell)
    tell(ClassicMember)

    with pytest.raises(AssertionError):
        tell(mistaken)
