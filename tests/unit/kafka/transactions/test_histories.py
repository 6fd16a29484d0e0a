"""Transactions in random histories: each output is visible once and in order, and agrees with the offsets."""

import contextlib
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest

from aioshard.errors import AioshardError, CommitError
from aioshard.kafka.batches import Identity
from aioshard.kafka.offsets import GroupOffsets, Member
from aioshard.kafka.transactions.call import Call
from aioshard.kafka.transactions.identity import TransactionalId
from aioshard.kafka.transactions.transactions import Transactions
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.errors import IncompleteResponseError, WireError
from aioshard.kafka.wire.requests import END_TXN, TXN_OFFSET_COMMIT
from aioshard.kafka.wire.responses import Answers, CommittedOffset, stored_offsets
from aioshard.records import TopicPartition
from tests.simulation.seeds import with_seeds
from tests.support.model_broker import Received
from tests.support.model_transactions import HELD, NO_FAULT, Fault
from tests.unit.kafka.transactions.one_client import INPUT, OneClient, scenario
from tests.unit.kafka.transactions.transaction_world import (
    GROUP,
    OUTPUTS,
    TIMEOUT,
    Plan,
    ViolationError,
    World,
    run_history,
)

LEAST_SEEDS = 100
MEMBER = Member(1, "member")
MOST_SEEDS = 150
"""Histories in which a mistake has to show."""
SECOND = Plan([2])
UNANSWERED = Plan([2], apis=[END_TXN], kinds=["lost answer", "held"], fault_rate=0.8)
LOST = Plan([2], apis=[END_TXN], kinds=["lost request"], fault_rate=1.0)
EXHAUSTED = Plan([2], most_epoch=6, fault_rate=0.06)


@with_seeds(least=LEAST_SEEDS, chunk=20)
def test_outputs_and_offsets_agree_in_each_history(seeds: range) -> None:
    for seed in seeds:
        run_history(seed)


@with_seeds()
@pytest.mark.parametrize("level", [1, 2])
def test_outputs_and_offsets_agree_although_the_brokers_forget_transactional_ids(level: int, seeds: range) -> None:
    for seed in seeds:
        run_history(seed, plan=Plan([level], fault_rate=0.06, forgets_ids=True))


# Mistakes, each of which some history has to show ---------------------------------------------


class MistakenWorld(World):
    """A world whose processes make a mistake."""

    kind: type[Transactions] = Transactions
    id_kind: type[TransactionalId] = TransactionalId

    def new_id(self, name: str) -> TransactionalId:
        return self.id_kind(name)

    def new_transactions(self, cluster: Cluster, transactional: TransactionalId, offsets: GroupOffsets) -> Transactions:
        return self.kind(cluster, transactional, offsets, GROUP, timeout=TIMEOUT)


class TakesOnlyTheEpochOfTheNextTransaction(MistakenWorld):
    class id_kind(TransactionalId):  # noqa: N801
        def commit(self, following: Identity | None, *, is_in_doubt: bool) -> None:
            if following is not None:
                following = Identity(self.identity.producer_id, following.epoch)
            super().commit(following, is_in_doubt=is_in_doubt)


class ContinuesTheNumbersInANewEpoch(MistakenWorld):
    class id_kind(TransactionalId):  # noqa: N801
        def _begin_epoch(self, identity: Identity) -> None:
            sequences = dict(self._sequences)
            super()._begin_epoch(identity)
            self._sequences = sequences


class CommitsWithoutAnAcknowledgement(MistakenWorld):
    """A partition that an answer leaves out counts as stored."""

    async def run(self) -> None:

        def lenient(response: Any, sent: Any) -> Answers[int]:
            answers = stored_offsets(response, sent)
            lost = {name: 0 for name, error in answers.errors.items() if isinstance(error, IncompleteResponseError)}
            errors = {name: error for name, error in answers.errors.items() if name not in lost}
            return Answers({**answers.values, **lost}, errors)

        with mock.patch("aioshard.kafka.transactions.messages.stored_offsets", lenient):
            await super().run()


class CommitsTheSameOffsetsUnderANewerGeneration(MistakenWorld):
    def new_transactions(self, cluster: Cluster, transactional: TransactionalId, offsets: GroupOffsets) -> Transactions:
        group = self.model.group

        class Mistaken(Transactions):
            async def _write_offsets(
                self, call: Call, offsets: Mapping[TopicPartition, CommittedOffset], member: Member
            ) -> Any:
                try:
                    return await super()._write_offsets(call, offsets, member)
                except WireError as refused:
                    if refused.code != 22:
                        raise
                    return await super()._write_offsets(call, offsets, member._replace(generation=group.generation))

        return Mistaken(cluster, transactional, offsets, GROUP, timeout=TIMEOUT)


class TakesANewerEpochForAnAbort(MistakenWorld):
    class kind(Transactions):  # noqa: N801
        async def _decide(self, offsets: Mapping[TopicPartition, CommittedOffset], unknown: CommitError) -> None:  # noqa: ARG002
            self.counts.aborted += 1
            raise unknown


class TakesALostAnswerForACommit(MistakenWorld):
    class kind(Transactions):  # noqa: N801
        async def _decide(self, offsets: Mapping[TopicPartition, CommittedOffset], unknown: CommitError) -> None:  # noqa: ARG002
            self.counts.committed += 1
            self._id.fail()


@pytest.mark.parametrize(
    ("mistaken", "plan"),
    [
        (TakesOnlyTheEpochOfTheNextTransaction, EXHAUSTED),
        (ContinuesTheNumbersInANewEpoch, SECOND),
        (CommitsWithoutAnAcknowledgement, SECOND),
        (CommitsTheSameOffsetsUnderANewerGeneration, SECOND),
        (TakesANewerEpochForAnAbort, UNANSWERED),
        (TakesALostAnswerForACommit, LOST),
    ],
)
def test_histories_show_each_mistake(mistaken: type[World], plan: Plan) -> None:
    def run() -> None:
        for seed in range(MOST_SEEDS):
            run_history(seed, mistaken, plan)

    with pytest.raises(ViolationError):
        run()


# A rare history, told in full -----------------------------------------------------------------


class ReusesTheEpochAfterADoubt(TransactionalId):
    """Takes the epoch of a transaction again after its commit was requested twice."""

    def commit(self, following: Identity | None, *, is_in_doubt: bool) -> None:  # noqa: ARG002 - the mistake
        super().commit(following, is_in_doubt=False)


@pytest.mark.parametrize(("id_kind", "ended"), [(TransactionalId, [90]), (ReusesTheEpochAfterADoubt, [0])])
def test_a_late_commit_of_the_first_protocol_ends_no_later_transaction(
    id_kind: type[TransactionalId], ended: list[int]
) -> None:
    async def test(client: OneClient) -> None:
        model = client.model
        faults = iter([HELD])
        late: list[int] = []

        def hold_the_first_commit(request: Received) -> Fault:
            return next(faults, NO_FAULT) if request.api is END_TXN else NO_FAULT

        def release_it_during_the_second_transaction(request: Received) -> Fault:
            if request.api is TXN_OFFSET_COMMIT and model.held:
                answer = model.release(model.held[0])
                late.append(answer["error"])
            return NO_FAULT

        model.choose_fault = hold_the_first_commit
        await client.commit(1, b"first")
        model.choose_fault = release_it_during_the_second_transaction
        with contextlib.suppress(AioshardError, WireError):
            await client.commit(2, b"second")
        await client.transactions.close()
        assert late == ended
        visible = [b"first", b"second"] in model.visible(OUTPUTS).values()
        assert (model.committed[INPUT].offset == 2) == (visible and late == [90])

    scenario(test, level=1, id_kind=id_kind)
