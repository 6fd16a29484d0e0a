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
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.requests import END_TXN, INIT_PRODUCER_ID, TXN_OFFSET_COMMIT
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.kafka.wire.start import new_cluster
from aioshard.ports import Message
from tests.simulation.seeds import with_seeds
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import Received
from tests.support.model_cluster import ModelCluster
from tests.support.model_transactions import LOST_ANSWER, LOST_REQUEST, NO_FAULT, Fault, ModelTransactions, refused
from tests.unit.kafka.transactions.one_client import INPUT, OneClient, scenario
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
    async def test(client: OneClient) -> None:
        client.model.group.committed[INPUT] = before = CommittedOffset(5, -1, "")
        client.model.choose_fault = lambda request: LOST_REQUEST if request.api is END_TXN else NO_FAULT
        await client.transactions.settle()
        assert await client.offsets.committed([INPUT]) == {INPUT: before}
        with pytest.raises(CommitError):
            await client.commit(before.offset, b"of a parked record")

    scenario(test)


def test_a_client_that_is_closed_while_the_coordinator_fails_is_not_taken_for_fenced() -> None:
    """The next client would begin without the epoch of this one, and so end a process that has taken over the id."""

    def fail(request: Received) -> Fault:
        codes = {INIT_PRODUCER_ID: -1, TXN_OFFSET_COMMIT: 22}
        return refused(codes[request.api]) if request.api in codes else NO_FAULT

    async def test(client: OneClient) -> None:
        await client.transactions.settle()
        client.model.choose_fault = fail
        with pytest.raises(WireError):
            await client.commit(1)
        await asyncio.sleep(0.5)  # the coordinator fails to abort the transaction
        await client.transactions.close()
        assert client.received(INIT_PRODUCER_ID)[-1].values.epoch == 0
        assert not client.transactional.is_fenced

    scenario(test)
