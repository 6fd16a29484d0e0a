"""I13: a `read_committed` reader sees the output of every record exactly once, in order per key."""

import asyncio
import random
import signal
from pathlib import Path

import pytest

from tests.guarantees.exactly_once import (
    KEYS,
    SESSION,
    Group,
    Protocol,
    read_side_topic,
    verify,
    verify_parked,
    with_protocols,
)
from tests.guarantees.exactly_once_member import copies
from tests.support.brokers import SharedKafka
from tests.support.kafka import KafkaBroker

POISON = "13"
"""1 % of the records fail."""
MORE_POISON = "13,63"
OUTAGES = (0.0, 5.0, 10.0)
"""Seconds: within `commit_timeout`, beyond it, and beyond `transaction_timeout`."""


@pytest.mark.timeout(300)
@with_protocols
@pytest.mark.parametrize(
    ("park", "kills"),
    [("0.5", 1), pytest.param("0", 3, marks=pytest.mark.chaos), pytest.param("0.5", 3, marks=pytest.mark.chaos)],
)
async def test_killed_processes_publish_everything_exactly_once(
    kafka: SharedKafka, tmp_path: Path, protocol: Protocol, park: str, kills: int
) -> None:
    """Three processes are killed in a transaction, and then *kills* times one at a random moment. Each is replaced."""
    chance = random.Random(13)
    group, records = Group(kafka, tmp_path, protocol, poison=MORE_POISON, park=park), 2_000 * kills
    await group.create(records)
    try:
        for _ in range(3):
            group.start()
        for turn in range(kills):
            await group.until_committed(records * (turn + 1) // (kills + 2))
            if turn == kills // 2:
                await group.kill_in_a_transaction()
            await asyncio.sleep(chance.random() * 0.1)
            await group.kill(chance.choice(group.members))
            group.start()
        await group.until_committed(group.produced)
        await verify_end(group, park)
    finally:
        await group.end()


async def is_done(group: Group, park: str) -> bool:
    """Whether everything is committed, and nothing is parked."""
    parked = await read_side_topic(group) if float(park) else None
    waits = parked is not None and parked.stored.keys() != parked.removed.keys()
    return await group.committed() == group.produced and not waits


async def verify_end(group: Group, park: str) -> tuple[tuple[str, int], ...]:
    """Verify what a reader sees at the end, and return it."""
    if not float(park):
        return tuple((await verify(group, poison=MORE_POISON, cut=True))._asdict().items())
    parked = await verify_parked(group)
    return (*(await verify(group, cut=True))._asdict().items(), ("parked", parked))


@pytest.mark.chaos
@pytest.mark.timeout(300)
@with_protocols
async def test_rolling_deploys_publish_everything_exactly_once(
    kafka: SharedKafka, tmp_path: Path, protocol: Protocol
) -> None:
    """Three processes are replaced in turn, twice; the second time without a pause."""
    group = Group(kafka, tmp_path, protocol, poison=POISON, longest="0.2")
    await group.create(2_000)
    try:
        for _ in range(3):
            group.start()
        for deploy in (group.deploy, group.deploy_in_a_hurry):
            await group.produce(8_000)
            await group.until_committed(group.produced - 7_000)
            await deploy()
        await group.until_committed(group.produced)
        await verify(group, poison=POISON)
    finally:
        await group.end()


@pytest.mark.chaos
@pytest.mark.timeout(300)
@with_protocols
async def test_a_killed_and_restarted_broker_publishes_every_output_exactly_once(
    own_kafka: KafkaBroker, tmp_path: Path, protocol: Protocol
) -> None:
    """It is killed while transactions are open; the members wait for it, and none of them ends."""
    group, records = Group(own_kafka, tmp_path, protocol, poison=POISON), 20_000
    await group.create(records)
    try:
        for _ in range(2):
            group.start()
        for turn, outage in enumerate(OUTAGES, 1):
            await group.until_committed(records * turn // (len(OUTAGES) + 2))
            await restart(own_kafka, group, outage)
        assert await group.committed() < records, "the outages came too late"
        await group.until_committed(group.produced)
        await verify(group, poison=POISON)
    finally:
        await group.end()


async def restart(broker: KafkaBroker, group: Group, outage: float) -> None:
    """Kill the broker while a transaction is open, and start it again after some seconds."""
    async with group.frozen_in_a_transaction():
        await broker.kill()
    await asyncio.sleep(outage)
    await broker.start()
    group.check_alive()


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_members_joining_and_leaving_under_kip_848_publish_exactly_once(
    kafka: SharedKafka, tmp_path: Path
) -> None:
    """The member epoch rises with each of them, also where the assignment stays as it is."""
    group, records = Group(kafka, tmp_path, protocol="consumer"), 15_000
    await group.create(records)
    try:
        group.start()
        for turn in range(1, 4):
            await group.until_committed(records * turn // 5)
            if turn == 2:
                await group.kill_in_a_transaction()
            group.start()
        await group.until_committed(group.produced)
        await verify(group, cut=True)
    finally:
        await group.end()


@pytest.mark.timeout(180)
@with_protocols
async def test_outputs_of_a_process_frozen_beyond_its_session_stay_invisible(
    kafka: SharedKafka, tmp_path: Path, protocol: Protocol
) -> None:
    group, records = Group(kafka, tmp_path, protocol), 10_000
    await group.create(records)
    try:
        frozen = group.start()
        await group.until_committed(records // 10)
        frozen.send_signal(signal.SIGSTOP)
        group.start()
        await group.until_committed(records)
        frozen.send_signal(signal.SIGCONT)
        # It may end before it learns that the other member has finished its records: then they are uncommitted to it.
        await group.stop(frozen, codes=(0, 4))
        await verify(group)
    finally:
        await group.end()


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_records_finished_beyond_a_stuck_one_are_not_republished_after_a_kill(
    kafka: SharedKafka, tmp_path: Path
) -> None:
    """More than 10,000 records have finished beyond the only committed offset."""
    group, records, number = Group(kafka, tmp_path), 12_000, 11
    await group.create(records, partitions=1)
    try:
        stuck = group.start(stuck=str(number))
        others = [other for other in range(records) if other % KEYS != number]
        await group.until_visible(sum(copies(str(other)) for other in others))
        assert await group.committed() == number
        await group.kill(stuck)
        group.start()
        await group.until_committed(group.produced)
        await verify(group)
    finally:
        await group.end()


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("park", ["0", "0.5"])
async def test_chaos_publishes_everything_exactly_once(
    own_kafka: KafkaBroker, tmp_path: Path, request: pytest.FixtureRequest, park: str
) -> None:
    """20 kills; with each comes a broker restart, a freeze beyond the session, a deploy, or a kill of all together.

    Most of a backlog is parked, behind a failed record of each key, and read again after each of these.
    """
    chance = random.Random(13)
    group, turns = Group(own_kafka, tmp_path, poison=MORE_POISON, longest="0.2", park=park), 20
    records = 30_000 if float(park) else 100_000

    async def restart_the_broker() -> None:
        await restart(own_kafka, group, chance.choice(OUTAGES))

    async def freeze() -> None:
        frozen = chance.choice(group.members)
        frozen.send_signal(signal.SIGSTOP)
        await asyncio.sleep(SESSION + chance.uniform(1, 5))
        frozen.send_signal(signal.SIGCONT)

    events = (restart_the_broker, freeze, group.deploy_in_a_hurry, group.kill_in_a_transaction)
    await group.create(records)
    try:
        for _ in range(3):
            group.start()
        for turn in range(turns):
            await group.until_committed(records * (turn + 1) // (turns + 2))
            await events[turn % len(events)]()
            await asyncio.sleep(chance.random())
            await group.kill(chance.choice(group.members))
            group.start()
        assert not await is_done(group, park), "the last events came too late"
        await group.until_committed(group.produced, timeout=300)
        figures = await verify_end(group, park)
        request.node.user_properties.extend(figures)
        print(figures)
    finally:
        await group.end()
