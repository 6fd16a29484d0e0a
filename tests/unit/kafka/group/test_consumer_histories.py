"""Members of the consumer protocol in random histories: one owner at a time, and none missing in the end."""

import copy
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

import pytest

from aioshard.kafka.group.consumer import ConsumerMember
from aioshard.kafka.group.consumer_messages import Heartbeat, HeartbeatAnswer, TopicIdPartition
from aioshard.kafka.group.member import Ownership
from aioshard.records import TopicPartition
from tests.simulation.seeds import with_seeds
from tests.unit.kafka.group.consumer_world import ViolationError, World

MOST_SEEDS = 200
"""Histories in which a mistake has to show."""


@with_seeds()
def test_a_partition_has_one_owner_in_each_history(seeds: range) -> None:
    for seed in seeds:
        World(seed).run()


# Mistakes, each of which some history has to show ---------------------------------------------


class KeepsPartitionsAfterFencing(ConsumerMember):
    def _refused(self, request: Heartbeat, answer: HeartbeatAnswer, now: float) -> None:
        if answer.error in (25, 110):
            self._try_later(now, answer.error, answer.message)
        else:
            super()._refused(request, answer, now)


class CommitsWithAnOldEpoch(ConsumerMember):
    _assigned_epoch = -1

    @property
    def ownership(self) -> Ownership:
        own = super().ownership
        if own.partitions != getattr(self, "_before", None):  # the epoch is read at an assignment only
            self._before = own.partitions
            self._assigned_epoch = own.epoch
        return dataclasses.replace(own, epoch=self._assigned_epoch)


class ForgetsAnUnansweredHeartbeat(ConsumerMember):
    """Says only what has changed, also after a missing answer."""

    def _try_later(self, *args: Any, **options: Any) -> None:
        told = self._told
        super()._try_later(*args, **options)
        self._told = told


class LeavesOutTheOwnedPartitions(ConsumerMember):
    """Says everything but what it owns after a missing answer."""

    def _heartbeat(self, now: float) -> Heartbeat:
        request = super()._heartbeat(now)
        return request if request.epoch <= 0 or request.topics is None else dataclasses.replace(request, owned=None)


class AcceptsAReleaseOfAnEarlierLife(ConsumerMember):
    def released(self, life: int, partitions: Collection[TopicPartition], now: float) -> None:  # noqa: ARG002
        super().released(self.ownership.life, partitions, now)


class RestartsItsEpoch(ConsumerMember):
    """Joins again without having lost anything."""

    def _heartbeat(self, now: float) -> Heartbeat:
        request = super()._heartbeat(now)
        again = self._told is None and request.epoch > 0
        return dataclasses.replace(request, epoch=0, owned=frozenset()) if again else request


class CountsTheSessionFromTheAnswer(ConsumerMember):
    def _accept(self, request: Heartbeat, answer: HeartbeatAnswer, now: float) -> None:
        super()._accept(dataclasses.replace(request, sent_at=now), answer, now)


class CountsTheRevocationFromTheLastHeartbeat(ConsumerMember):
    """A lost answer may have begun the revocation."""

    def _accept(self, request: Heartbeat, answer: HeartbeatAnswer, now: float) -> None:
        self._unanswered_since = request.sent_at
        super()._accept(request, answer, now)


class KnowsOfNoRevocationInALostAnswer(ConsumerMember):
    def _extend(self) -> None:
        pass


class ForgetsTheDeadlineAtTheRelease(ConsumerMember):
    """The coordinator counts until it hears of the release."""

    def released(self, life: int, partitions: Collection[TopicPartition], now: float) -> None:
        super().released(life, partitions, now)
        self._owed.clear()
        self._extend()


class IgnoresTheDeadlineOfARevocation(ConsumerMember):
    def _assign(self, assignment: Collection[TopicIdPartition], deadline: float) -> None:
        super()._assign(assignment, deadline + 1000.0)

    def _reconcile(self, epoch: int, deadline: float) -> None:
        super()._reconcile(epoch, deadline + 1000.0)


class LosesNothingAtTheEnd(ConsumerMember):
    def leave(self, now: float, reason: str, *, for_good: bool = False) -> None:
        holdings = copy.copy(self._holdings)
        super().leave(now, reason, for_good=for_good)
        self._holdings = holdings


class SkipsUnnamedPartitions(ConsumerMember):
    def name_topics(self, names: Mapping[UUID, str], now: float) -> None:
        super().name_topics(names, now)
        if self._target is not None:
            self._target = frozenset(self._owned_ids.values())


class AcknowledgesOnlyWhatItHad(ConsumerMember):
    """The coordinator also waits for partitions that had no name yet when it took them away again."""

    def _assign(self, assignment: Collection[TopicIdPartition], deadline: float) -> None:
        super()._assign(assignment, deadline)
        self._owed = {by_id: until for by_id, until in self._owed.items() if by_id in self._owned_ids.values()}


MISTAKES = [
    AcknowledgesOnlyWhatItHad,
    KeepsPartitionsAfterFencing,
    CommitsWithAnOldEpoch,
    ForgetsAnUnansweredHeartbeat,
    LeavesOutTheOwnedPartitions,
    AcceptsAReleaseOfAnEarlierLife,
    RestartsItsEpoch,
    CountsTheSessionFromTheAnswer,
    CountsTheRevocationFromTheLastHeartbeat,
    KnowsOfNoRevocationInALostAnswer,
    ForgetsTheDeadlineAtTheRelease,
    IgnoresTheDeadlineOfARevocation,
    LosesNothingAtTheEnd,
    SkipsUnnamedPartitions,
]


@pytest.mark.parametrize("kind", MISTAKES)
def test_histories_show_each_mistake(kind: type[ConsumerMember]) -> None:
    def run() -> None:
        for seed in range(MOST_SEEDS):
            World(seed, kind).run()

    with pytest.raises(ViolationError):
        run()
