"""The load that one dead member of twenty moves to others, with and without a standby (measured, I3)."""

import asyncio
import time
from collections import Counter
from typing import NamedTuple

import psutil
import pytest

from tests.guarantees.checks import SAFE
from tests.guarantees.observations import Kind
from tests.guarantees.scenario import Scenario
from tests.guarantees.test_rolling_restart import steady_load

MEMBERS = 20
"""As many as partitions: each has one."""
MEASURED = 10.0
"""Seconds of each measurement."""
SETTINGS = {"start_timeout": 200, "session_timeout": 10, "heartbeat_interval": 1, "rebalance_timeout": 30}


class Load(NamedTuple):
    """The work of a member."""

    rate: float
    """Records that finished per second."""
    cpu: float
    """Share of a core."""
    memory: float
    """Resident, in MiB."""

    def summary(self) -> str:
        return f"{self.rate:.1f} records/s, {100 * self.cpu:.1f} % of a core, {self.memory:.0f} MiB"


async def loads(scenario: Scenario, names: list[str]) -> dict[str, Load]:
    """Measure members under a steady load."""
    processes = {name: psutil.Process(scenario.members[name].pid) for name in names}
    spent = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    began = time.monotonic_ns()
    await asyncio.sleep(MEASURED)
    now = time.monotonic_ns()
    seen = scenario.observations.refresh().seen
    finished = Counter(
        observation.process
        for observation in seen
        if observation.kind is Kind.FINISHED and began <= observation.at < now
    )
    seconds = (now - began) / 1e9
    return {
        name: Load(
            finished[scenario.members[name].process] / seconds,
            (sum(process.cpu_times()[:2]) - spent[name]) / seconds,
            process.memory_info().rss / (1 << 20),
        )
        for name, process in processes.items()
    }


async def until_each_is_owned(scenario: Scenario, names: list[str]) -> None:
    def owned() -> bool:
        return sorted(number for name in names for number in scenario.members[name].partitions) == list(range(MEMBERS))

    await scenario.until(owned, "every partition is open in one member", 120)


@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.parametrize("shards", [pytest.param(None, id=pytest.HIDDEN_PARAM)])
@pytest.mark.parametrize("standby", [False, True], ids=["no standby", "a standby"])
async def test_a_dead_members_load_goes_to_one_member_unless_there_is_a_standby(
    scenario: Scenario, standby: bool
) -> None:
    names = [f"m{number}" for number in range(MEMBERS + standby)]
    await scenario.create(MEMBERS)
    for name in names:
        scenario.start(name, SETTINGS, base=0.01)
    await until_each_is_owned(scenario, names)
    await scenario.until(
        lambda: all(len(scenario.members[name].partitions) <= 1 for name in names), "each has one at most", 60
    )
    async with steady_load(scenario, MEMBERS) as available:
        await scenario.until(lambda: len(available) > 100 * MEMBERS, "the load is steady", 60)
        before = await loads(scenario, names)
        dead = names[0] if scenario.members[names[0]].partitions else names[1]
        lost = set(scenario.members[dead].partitions)
        await scenario.kill(dead)
        names.remove(dead)
        await until_each_is_owned(scenario, names)
        behind = len(scenario.produced)
        await scenario.until_finished(behind, timeout=60)
        after = await loads(scenario, names)
    (successor,) = [name for name in names if lost & scenario.members[name].partitions.keys()]
    grew = {name: after[name].rate / before[name].rate for name in names if before[name].rate > 1}
    scenario.notes |= {"successor before": before[successor].summary(), "successor after": after[successor].summary()}
    scenario.notes["rate of the one that grew most"] = round(max(grew.values()), 2)
    if standby:
        assert before[successor].rate < 1, "the standby had nothing to do"
        assert max(grew.values()) < 1.3, grew
    else:
        assert grew.pop(successor) > 1.7
        assert after[successor].cpu > before[successor].cpu
        assert max(grew.values()) < 1.3, grew
    await scenario.verify(*SAFE)
