"""I13 on three brokers: broker failures while processes have open transactions."""

import asyncio
import random
import signal
from pathlib import Path

import pytest

from tests.guarantees.exactly_once import SESSION, Group, Protocol, verify, verify_parked, with_protocols
from tests.support.three_brokers import ThreeBrokers

POISON = "13"
"""1 % of the records fail."""
MORE_POISON = "13,63"
RECORDS = 100_000
KEYS = 997
"""Prime, so that each key has records that fail and others."""
TURNS = 20
PATIENCE = 600.0
"""Seconds for a part of the records, on a busy machine."""
TRANSACTION_TOPIC, TRANSACTION_PARTITIONS = "__transaction_state", 3


@pytest.mark.chaos
@pytest.mark.timeout(300)
@with_protocols
async def test_a_rolling_broker_restart_publishes_every_output_exactly_once(
    brokers: ThreeBrokers, tmp_path: Path, protocol: Protocol
) -> None:
    group = Group(brokers, tmp_path, protocol, poison=POISON, longest="0.3")
    await group.create(2_000)
    try:
        for _ in range(3):
            group.start()
        for node in brokers.nodes:
            await group.produce(6_000)
            await group.until_committed(group.produced - 5_000)
            await brokers.stop(node)
            await brokers.start(node)
        await group.until_committed(group.produced)
        await verify(group, poison=POISON)
    finally:
        await group.end()


@pytest.mark.chaos
@pytest.mark.timeout(300)
@with_protocols
async def test_killing_the_coordinator_and_a_process_publishes_every_output_exactly_once(
    brokers: ThreeBrokers, tmp_path: Path, protocol: Protocol
) -> None:
    """The coordinator of the group dies in the middle of transactions, and then a process while it is away."""
    group, records = Group(brokers, tmp_path, protocol, poison=POISON, longest="0.2"), 20_000
    await group.create(records)
    try:
        for _ in range(3):
            group.start()
        await group.until_committed(records // 5)
        node = await brokers.coordinator_of(group.topic)
        async with group.frozen_in_a_transaction():
            await brokers.kill(node)
        await asyncio.sleep(2)
        await group.kill(group.members[0])
        group.start()
        await group.until_committed(records // 2)
        await brokers.start(node)
        await group.until_committed(group.produced)
        await verify(group, poison=POISON)
    finally:
        await group.end()


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_everything_together_publishes_every_output_exactly_once(
    brokers: ThreeBrokers, tmp_path: Path, request: pytest.FixtureRequest, protocol: Protocol
) -> None:
    """20 kills of processes; before each comes something else that goes wrong, or changes.

    A record has up to three outputs; 2 % fail, for every second key into dead letters, and for the others into a parked
    partition from which they return.
    """
    chance = random.Random(17)
    group = Group(
        brokers, tmp_path, protocol, keys=KEYS, parks_beside=True, poison=MORE_POISON, longest="0.2", park="0.5"
    )

    async def restart_a_broker() -> None:
        node = chance.choice(list(brokers.nodes))
        async with group.frozen_in_a_transaction():
            await brokers.kill(node)
        await asyncio.sleep(chance.uniform(0, 10))
        await brokers.start(node)

    async def move_the_group() -> None:
        await brokers.move_coordinator(group.topic)

    async def move_the_transactions() -> None:
        for partition in range(TRANSACTION_PARTITIONS):
            await brokers.move_leader(TRANSACTION_TOPIC, partition)

    async def freeze() -> None:
        frozen = chance.choice(group.members)
        frozen.send_signal(signal.SIGSTOP)
        await asyncio.sleep(SESSION + chance.uniform(1, 5))
        frozen.send_signal(signal.SIGCONT)

    async def deploy() -> None:
        await group.deploy((0, 4, -signal.SIGTERM))  # as in a hurry

    events = (
        restart_a_broker,
        freeze,
        move_the_transactions,
        group.deploy_in_a_hurry,
        move_the_group,
        group.kill_in_a_transaction,
        deploy,
    )
    await group.create(RECORDS)
    try:
        for _ in range(3):
            group.start()
        for turn in range(TURNS):
            await group.until_committed(RECORDS * (turn + 1) // (TURNS + 2), PATIENCE)
            await events[turn % len(events)]()
            await asyncio.sleep(chance.random())
            await group.kill(chance.choice(group.members))
            group.start()
            group.check_alive()
        assert await group.committed() < group.produced, "the last events came too late"
        await group.until_committed(group.produced, PATIENCE)
        parked = await verify_parked(group, PATIENCE)
        figures = await verify(group, poison=MORE_POISON, cut=True)
        request.node.user_properties.extend([*figures._asdict().items(), ("parked", parked)])
        print(figures, "parked:", parked)
    finally:
        await group.end()
