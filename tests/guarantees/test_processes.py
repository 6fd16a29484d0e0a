"""Three processes that are restarted, killed and joined by others: nothing lost, and in order."""

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
    TakenInOnce,
    verify,
)
from tests.guarantees.observations import Kind
from tests.guarantees.scenario import Scenario, zipf_keys
from tests.support.cluster import Message

SAFE = (
    NothingLost(),
    KeyOrder(),
    OneAtATimePerKey(),
    NeverAhead(),
    CommitsOnlyAdvance(),
    OnlyUncommittedAgain(),
    LagZero(),
)
"""What every scenario keeps, crashes included."""


def skewed(seed: int, count: int) -> list[Message]:
    return [(key, b"%d" % number) for number, key in enumerate(zipf_keys(random.Random(seed), count))]


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_rolling_restart_under_load_loses_repeats_and_reorders_nothing(scenario: Scenario) -> None:
    await roll(scenario, records=50_000, restarts=1)


@pytest.mark.chaos
@pytest.mark.timeout(1200)
async def test_rolling_restarts_one_after_the_other_lose_repeat_and_reorder_nothing(scenario: Scenario) -> None:
    await roll(scenario, records=400_000, restarts=8)


async def roll(scenario: Scenario, *, records: int, restarts: int) -> None:
    """Three members are restarted one by one, *restarts* times, while *records* records come in."""
    await scenario.create(partitions=8)
    for name in "abc":
        scenario.start(name, spread=0.008)
    await scenario.until_settled("a", "b", "c")
    # What is left unfinished is mostly of the most frequent key, one after the other: it has to fit into a drain.
    feeding = asyncio.create_task(scenario.feed(skewed(1, records), backlog=600, chunk=300))

    for turn in range(restarts):
        await scenario.until_finished(records * (turn + 1) // (restarts + 2), timeout=120)
        for name in "abc":
            assert await scenario.members[name].stop() == 0, scenario.members[name].tail
            scenario.start(name, spread=0.008)
            await scenario.until_settled("a", "b", "c")
    assert not feeding.done(), "the load ended before the restarts did: they prove nothing"

    await feeding
    await scenario.until_all_committed(timeout=120)
    verify(await scenario.story(), *SAFE, NoDuplicates())


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_kill_9_at_any_moment_loses_and_reorders_nothing(scenario: Scenario) -> None:
    await kill_at_random(scenario, seed=2, rounds=10)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3, 8))
async def test_kill_9_again_and_again_loses_and_reorders_nothing(scenario: Scenario, seed: int) -> None:
    await kill_at_random(scenario, seed=seed, rounds=60)


async def kill_at_random(scenario: Scenario, *, seed: int, rounds: int) -> None:
    """Each round kills one of three members and starts it again, at whatever the group is doing then."""
    chance = random.Random(seed)
    settings = {"session_timeout": 3, "rebalance_timeout": 8, "start_timeout": 100}
    await scenario.create(partitions=8)
    for name in "abc":
        scenario.start(name, settings, base=0.002, spread=0.02)
    await scenario.until_settled("a", "b", "c")
    feeding = asyncio.create_task(scenario.feed(skewed(seed, 3_000 * rounds), backlog=3_000, chunk=500))

    for _ in range(rounds):
        # So many steps of records later, or so much time: a group that is rebalancing takes no steps.
        steps, seconds = chance.randrange(50, 6_000), chance.uniform(0.2, 4)
        reached = len(scenario.observations.seen) + steps
        with_luck = scenario.until(lambda reached=reached: len(scenario.observations.seen) >= reached, "", 600)  # type: ignore[misc]
        try:
            await asyncio.wait_for(with_luck, seconds)
        except TimeoutError:
            pass
        name = chance.choice("abc")
        await scenario.members[name].kill()
        await scenario.sample_commits()
        scenario.start(name, settings, base=0.002, spread=0.02)

    await scenario.until_settled("a", "b", "c", timeout=60)
    await asyncio.wait_for(feeding, 60 + rounds)
    await scenario.until_all_committed()
    story = await scenario.story()
    verify(story, *SAFE)
    again = sum(count - 1 for count in scenario.observations.started.values())
    assert again > 0, "nothing was killed while it ran: the kills prove nothing"


async def test_a_member_joins_while_handlers_run_and_nothing_runs_twice(scenario: Scenario) -> None:
    await scenario.create(partitions=8)
    first = scenario.start("a", base=0.1, spread=0.4, report_intake=True)
    await scenario.until_settled("a")
    epochs = {number: found["epoch"] for number, found in first.partitions.items()}
    keys = [b"k%d" % number for number in range(200)]
    feeding = asyncio.create_task(
        scenario.feed([(key, None) for _ in range(20) for key in keys], backlog=1_500, chunk=500)
    )
    await scenario.until_finished(200)

    second = scenario.start("b", base=0.1, spread=0.4, report_intake=True)
    await scenario.until_settled("a", "b")

    stayed = set(first.partitions)
    assert len(stayed) == 4, "the assignor moved more than it had to"
    assert {number: found["epoch"] for number, found in first.partitions.items()} == {
        number: epochs[number] for number in stayed
    }
    assert not feeding.done(), "the load ended before the rebalance did: it proves nothing"

    await feeding
    await scenario.until_all_committed()
    assert first.statistics["replayed"] == second.statistics["replayed"] == 0
    ownerships = {(seen.partition, seen.epoch) for seen in scenario.observations.of("a.1", Kind.STARTED)}
    assert len(ownerships) == 8, "a partition that stayed was one uninterrupted ownership"
    verify(await scenario.story(), *SAFE, NoDuplicates(), TakenInOnce("a.1", stayed))


async def test_what_came_between_the_first_position_and_a_crash_is_not_lost_under_latest(scenario: Scenario) -> None:
    await scenario.create(partitions=4)
    await scenario.kafka.produce(scenario.topic, [(b"old-%d" % number, None) for number in range(100)])
    begin = await scenario.kafka.end_offsets(scenario.topic)
    rarely = {"auto_offset_reset": "latest", "commit_interval": 600, "session_timeout": 2}
    scenario.start("a", rarely, base=0.01)
    await scenario.until_settled("a")

    assert (await scenario.sample_commits()).offsets == begin, "the first position is committed before anything else"
    await scenario.produce([(b"k%d" % number, None) for number in range(100)])
    await scenario.until_finished(30)
    await scenario.members["a"].kill()
    committed = (await scenario.sample_commits()).offsets
    await scenario.produce([(b"k%d" % number, None) for number in range(100, 200)])

    assert committed == begin, "the crash came after a commit: it proves nothing"
    scenario.start("b", rarely | {"commit_interval": 0.2}, base=0.01)
    await scenario.until_all_committed()
    verify(await scenario.story(), *SAFE)
