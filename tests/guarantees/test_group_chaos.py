"""Six processes share 48 partitions and are killed, stopped, started and frozen all the time (I3, I4, I11, I12)."""

import asyncio
import random
import time

import pytest

from tests.guarantees.chaos import Fleet
from tests.guarantees.checks import SAFE, OnlyUncommittedAgain
from tests.guarantees.scenario import SHORT, Scenario, even_keys

PARTITIONS = 48
NAMES = "abcdef"
CLIENTS = ("aiokafka", "cooperative", "KIP-848", "eager")
SESSION = 6.0
SETTINGS = {"session_timeout": SESSION, "start_timeout": 100}
WITHOUT_PROGRESS = SESSION + SHORT["rebalance_timeout"] + 5.0
"""Seconds for which nothing may finish at most, while a member lives that long."""


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("client", CLIENTS)
async def test_fifteen_seconds_of_chaos_lose_reorder_and_stop_nothing(scenario: Scenario) -> None:
    await chaos(scenario, seed=1, seconds=15, records=5_000)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seed", "client"), [(seed, CLIENTS[seed % 4]) for seed in range(2, 12)])
async def test_minutes_of_chaos_lose_reorder_and_stop_nothing(scenario: Scenario, seed: int) -> None:
    await chaos(scenario, seed=seed, seconds=300, records=300_000)


async def chaos(scenario: Scenario, *, seed: int, seconds: float, records: int) -> None:
    """Something happens every 0.5 to 10 s, while records come in."""
    chance = random.Random(seed)
    fleet = Fleet(scenario, chance, NAMES, SESSION, lambda _: SETTINGS, base=0.002, spread=0.02)
    await scenario.create(partitions=PARTITIONS)
    for name in NAMES:
        fleet.start(name)
    await scenario.until_settled(*NAMES, timeout=90)
    scenario.start_feeding(even_keys(seed, keys=2_000), backlog=3_000, chunk=500, least=records)

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(min(chance.uniform(0.5, 10.0), max(end - time.monotonic(), 0.0)))
        await fleet.something_happens((fleet.kill, fleet.kill, fleet.stop, fleet.freeze))
    await fleet.come_to_rest()
    await scenario.stop_feeding()
    await scenario.until_finished(len(scenario.produced), timeout=120)
    fleet.over()

    longest = fleet.without_progress
    scenario.notes["longest without progress"] = round(longest, 1)
    await scenario.verify(
        *(guarantee for guarantee in SAFE if not isinstance(guarantee, OnlyUncommittedAgain)),
        OnlyUncommittedAgain(apart=fleet.apart),
    )
    assert longest <= WITHOUT_PROGRESS
    assert scenario.kills + len(fleet.apart) > 0, "nothing happened"
