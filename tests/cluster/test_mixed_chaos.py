"""Members of both protocols in one group on three brokers are killed, stopped and frozen (I3, I4, I11, I12)."""

import pytest

from tests.guarantees.chaos import chaos
from tests.guarantees.scenario import Scenario

pytestmark = [pytest.mark.chaos, pytest.mark.parametrize("protocol", ["mixed"])]


@pytest.mark.timeout(300)
async def test_seconds_of_chaos_in_a_mixed_group_lose_and_reorder_nothing(scenario: Scenario) -> None:
    await chaos(scenario, seed=1, seconds=15, records=5_000)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 12))
async def test_minutes_of_chaos_in_a_mixed_group_lose_and_reorder_nothing(scenario: Scenario, seed: int) -> None:
    await chaos(scenario, seed=seed, seconds=300, records=300_000)
