"""Six processes share 48 partitions and are killed, stopped, started and frozen all the time (I3, I4, I11, I12)."""

import pytest

from tests.guarantees.chaos import chaos
from tests.guarantees.scenario import Scenario

PROTOCOLS = ("classic", "consumer", "eager", "mixed")


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_fifteen_seconds_of_chaos_lose_reorder_and_stop_nothing(scenario: Scenario) -> None:
    await chaos(scenario, seed=1, seconds=15, records=5_000)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seed", "protocol"), [(seed, PROTOCOLS[seed % 4]) for seed in range(2, 12)])
async def test_minutes_of_chaos_lose_reorder_and_stop_nothing(scenario: Scenario, seed: int) -> None:
    await chaos(scenario, seed=seed, seconds=300, records=300_000)
