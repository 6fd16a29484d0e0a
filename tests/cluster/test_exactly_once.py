"""I13 on three brokers: broker failures while processes have open transactions."""

import asyncio
from pathlib import Path

import pytest

from tests.guarantees.exactly_once import Group, Protocol, verify, with_protocols
from tests.support.three_brokers import ThreeBrokers

POISON = "13"
"""1 % of the records fail."""


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
