"""P8, a clean deploy: a member is replaced under load, and no record is repeated or lost."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from tests.guarantees.checks import DEPLOYED
from tests.guarantees.process import Member
from tests.guarantees.scenario import Scenario, even_keys


def start_load(scenario: Scenario) -> None:
    """With this number of keys, each has only a few records in the backlog: a drain takes no longer than those few."""
    scenario.start_feeding(even_keys(seed=4, keys=600), backlog=1_500, chunk=500)


@pytest.mark.parametrize(
    ("protocol", "form"),
    [
        ("classic", "context"),
        pytest.param("classic", "record", marks=pytest.mark.chaos),
        *(pytest.param(protocol, "process", marks=pytest.mark.chaos) for protocol in ("classic", "consumer")),
        *(pytest.param(protocol, "context", marks=pytest.mark.chaos) for protocol in ("eager", "consumer")),
    ],
)
async def test_one_of_three_members_stops_under_load(scenario: Scenario, form: str) -> None:
    await scenario.create(partitions=8)
    for name in "abc":
        scenario.start(name, form=form, base=0.005, spread=0.1)
    await scenario.until_settled("a", "b", "c")
    start_load(scenario)
    await scenario.until_finished(1_500)
    leaving = scenario.members["b"]

    code = await leaving.stop()

    assert code == 0, leaving.tail
    await scenario.until_settled("a", "c")
    await scenario.verify(*DEPLOYED)
    assert all(member.statistics["replayed"] == 0 for member in scenario.members.values())


@pytest.mark.chaos
async def test_a_new_member_joins_before_an_old_one_leaves(scenario: Scenario) -> None:
    """As Kubernetes deploys with `maxSurge`: the group is four for a while, and rebalances twice in a row."""
    await scenario.create(partitions=8)
    for name in "abc":
        scenario.start(name, base=0.005, spread=0.1)
    await scenario.until_settled("a", "b", "c")
    start_load(scenario)
    await scenario.until_finished(1_000)

    scenario.start("d", base=0.005, spread=0.1)
    await scenario.until(lambda: bool(scenario.members["d"].partitions), "the new member has joined", 30)
    code = await scenario.members["a"].stop()

    assert code == 0, scenario.members["a"].tail
    await scenario.until_settled("b", "c", "d")
    await scenario.verify(*DEPLOYED)


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_deploys_that_add_and_drop_a_topic_lose_and_repeat_nothing(scenario: Scenario) -> None:
    """Members of both versions are in the group together. Records of the dropped topic run once it is back."""
    pace: dict[str, Any] = {"base": 0.005, "spread": 0.05}
    async with scenario.beside("added") as added:
        await scenario.create(partitions=8)
        await added.create(partitions=4)

        async def deploy(*beside: Mapping[str, Any]) -> None:
            for name in "ab":
                assert await scenario.members[name].stop() == 0, scenario.members[name].tail
                member = scenario.start(name, **pace, beside=beside)
                await scenario.until(lambda member=member: bool(member.partitions), f"{name} has partitions", 60)  # type: ignore[misc]

        for name in "ab":
            scenario.start(name, **pace)
        await scenario.until_settled("a", "b")
        start_load(scenario)
        start_load(added)
        await scenario.until_finished(500)
        assert not added.observations.finished

        await deploy(added.handled())
        await added.until_finished(500)
        await deploy()
        await scenario.until_finished(len(scenario.observations.finished) + 500)
        await deploy(added.handled())

        await added.verify(*DEPLOYED)
        await scenario.verify(*DEPLOYED)


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_members_joining_and_leaving_in_a_row_lose_and_repeat_nothing(scenario: Scenario) -> None:
    await join_and_leave(scenario, seed=6, departures=8)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [7, 8, 9])
async def test_a_long_storm_of_rebalances_loses_and_repeats_nothing(scenario: Scenario, seed: int) -> None:
    await join_and_leave(scenario, seed=seed, departures=50)


async def join_and_leave(scenario: Scenario, *, seed: int, departures: int) -> None:
    """Beside one member that stays, others are started and asked to end, also while the group still rebalances."""
    chance = random.Random(seed)
    await scenario.create(partitions=8)
    scenario.start("a", base=0.005, spread=0.1)
    await scenario.until_settled("a")
    start_load(scenario)
    leaving: list[Member] = []

    while len(leaving) < departures:
        name = chance.choice("bcd")
        member = scenario.members.get(name)
        if member is None or not member.alive:
            assert member is None or member in leaving, f"nobody had asked it to end\n{member.tail}"
            scenario.start(name, base=0.005, spread=0.1)
        elif member.statistics["state"] == "running" and member not in leaving:
            member.terminate()
            leaving.append(member)
        reached = len(scenario.observations.finished) + chance.choice((1, 50, 1_000))
        await scenario.until(lambda reached=reached: len(scenario.observations.finished) >= reached, "records move", 60)  # type: ignore[misc]

    for member in leaving:
        assert await member.ended() == 0, member.tail
    await scenario.verify(*DEPLOYED)
