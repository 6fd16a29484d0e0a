"""Defects that random histories have shown, each with a history that shows it in a few seconds."""

import asyncio
import time
from unittest import mock

import pytest

from aioshard.errors import CommitError
from aioshard.kafka.offsets import GroupOffsets, Member
from aioshard.kafka.transactions.identity import TransactionalId
from aioshard.kafka.transactions.transactions import Transactions
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.requests import END_TXN
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.kafka.wire.start import new_cluster
from aioshard.ports import Message
from tests.simulation.seeds import with_seeds
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import Received
from tests.support.model_cluster import ModelCluster
from tests.support.model_transactions import LOST_ANSWER, LOST_REQUEST, NO_FAULT, Fault, ModelTransactions
from tests.unit.kafka.transactions.transaction_world import GROUP, INPUTS, OUTPUTS, TIMEOUT, Plan, run_history

REFUSED = Plan([1], apis=[END_TXN], kinds=["refused"], fault_rate=0.5)
STUCK = Plan([2], most_epoch=6, repeats_last_epoch=False, fault_rate=0.06)


@with_seeds()
def test_a_transaction_whose_commit_is_refused_is_not_committed_later(seeds: range) -> None:
    for seed in seeds:
        run_history(seed, plan=REFUSED)


@with_seeds()
def test_a_process_does_not_end_with_the_epochs_of_its_producer(seeds: range) -> None:
    for seed in seeds:
        run_history(seed, plan=STUCK)


def test_a_transaction_is_not_taken_for_aborted_because_a_partition_has_moved() -> None:
    async def live(network: MemoryNetwork) -> None:
        brokers = ModelCluster(network)
        brokers.create(OUTPUTS, 2)
        model = ModelTransactions(brokers, GROUP)
        loop = asyncio.get_running_loop()
        first, second = Member(1, "first"), Member(2, "second")
        model.group.set_members(first)

        def client(name: str) -> tuple[Cluster, Transactions]:
            cluster = new_cluster(brokers.settings)
            cluster.start()
            offsets = GroupOffsets(cluster, GROUP)
            return cluster, Transactions(cluster, TransactionalId(name), offsets, GROUP, timeout=TIMEOUT)

        def lose_its_answers(request: Received) -> Fault:
            is_lost = request.api is END_TXN and request.values.transactional_id == "first"
            return LOST_ANSWER if is_lost else NO_FAULT

        ours, theirs = client("first"), client("second")
        try:
            with mock.patch.object(time, "monotonic", loop.time):
                await ours[1].settle()
                model.choose_fault = lose_its_answers
                offsets = dict.fromkeys(INPUTS, CommittedOffset(1, -1, "ours"))
                commit = asyncio.create_task(ours[1].commit([Message(OUTPUTS, b"ours")], offsets, first))
                await asyncio.sleep(3)
                model.group.set_members(second)
                await theirs[1].commit([], {INPUTS[0]: CommittedOffset(2, -1, "theirs")}, second)
                await asyncio.wait([commit])
        finally:
            for cluster, transactions in (ours, theirs):
                await transactions.close()
                await cluster.close()
            await model.close()

        assert model.committed[INPUTS[1]] == CommittedOffset(1, -1, "ours")
        assert isinstance(commit.exception(), CommitError | None)
        assert ours[1].counts.decided_aborted == 0, "it was committed"

    run_on_network(live)


def test_a_transaction_that_changes_no_offset_is_not_taken_for_committed_after_a_restart() -> None:
    async def live(network: MemoryNetwork) -> None:
        brokers = ModelCluster(network)
        brokers.create(OUTPUTS)
        model = ModelTransactions(brokers, GROUP)
        member = Member(1, "first")
        before = {INPUTS[0]: CommittedOffset(5, -1, "before")}
        model.group.set_members(member)
        model.group.committed |= before
        cluster = new_cluster(brokers.settings)
        cluster.start()
        offsets = GroupOffsets(cluster, GROUP)
        transactions = Transactions(cluster, TransactionalId("first"), offsets, GROUP, timeout=TIMEOUT)
        model.choose_fault = lambda request: LOST_REQUEST if request.api is END_TXN else NO_FAULT
        try:
            with mock.patch.object(time, "monotonic", asyncio.get_running_loop().time):
                await transactions.settle()
                assert await offsets.committed([INPUTS[0]]) == before
                with pytest.raises(CommitError):
                    await transactions.commit([Message(OUTPUTS, b"of a parked record")], before, member)
        finally:
            await transactions.close()
            await cluster.close()
            await model.close()

    run_on_network(live)
