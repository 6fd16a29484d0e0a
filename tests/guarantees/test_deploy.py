"""P8, a clean deploy: a member is replaced under load, and not one record runs twice or is lost."""

import asyncio
import random

import pytest

from tests.guarantees.checks import (
    CommitsOnlyAdvance,
    KeyOrder,
    LagZero,
    NeverAhead,
    NoDuplicates,
    NothingLost,
    OneAtATimePerKey,
    OnlyUncommittedAgain,
    verify,
)
from tests.guarantees.scenario import Scenario

DEPLOYED = (
    NothingLost(),
    NoDuplicates(),
    KeyOrder(),
    OneAtATimePerKey(),
    NeverAhead(),
    CommitsOnlyAdvance(),
    OnlyUncommittedAgain(),
    LagZero(),
)


def evenly(seed: int) -> list[bytes]:
    """Keys of which each has only a few records in the backlog: a drain takes no longer than those few."""
    return random.Random(seed).choices([b"k%d" % number for number in range(600)], k=12_000)


@pytest.mark.parametrize("form", ["context", "record"])
async def test_one_of_three_members_stops_under_load(scenario: Scenario, form: str) -> None:
    await scenario.create(partitions=8)
    for name in "abc":
        scenario.start(name, form=form, base=0.005, spread=0.1)
    await scenario.until_settled("a", "b", "c")
    messages = [(key, None) for key in evenly(4)]
    feeding = asyncio.create_task(scenario.feed(messages, backlog=1_500, chunk=500))
    await scenario.until_finished(1_500)
    leaving = scenario.members["b"]

    code = await leaving.stop()

    assert code == 0, leaving.tail
    assert not feeding.done(), "the load ended before the member did: it proves nothing"
    await scenario.until_settled("a", "c")
    await feeding
    await scenario.until_all_committed()
    story = await scenario.story()
    verify(story, *DEPLOYED)
    assert all(member.statistics["replayed"] == 0 for member in scenario.members.values())


async def test_a_new_member_comes_before_an_old_one_goes(scenario: Scenario) -> None:
    """As Kubernetes deploys with `maxSurge`: the group is four for a while, and rebalances twice in a row."""
    await scenario.create(partitions=8)
    for name in "abc":
        scenario.start(name, base=0.005, spread=0.1)
    await scenario.until_settled("a", "b", "c")
    messages = [(key, None) for key in evenly(5)]
    feeding = asyncio.create_task(scenario.feed(messages, backlog=1_500, chunk=500))
    await scenario.until_finished(1_000)

    scenario.start("d", base=0.005, spread=0.1)
    await scenario.until(lambda: bool(scenario.members["d"].partitions), "the new member has joined", 30)
    code = await scenario.members["a"].stop()

    assert code == 0, scenario.members["a"].tail
    assert not feeding.done(), "the load ended before the member did: it proves nothing"
    await scenario.until_settled("b", "c", "d")
    await feeding
    await scenario.until_all_committed()
    verify(await scenario.story(), *DEPLOYED)
