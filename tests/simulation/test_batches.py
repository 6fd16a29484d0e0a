"""Batch handlers under hundreds of seeded interleavings, I1 to I10 asserted after every step."""

import pytest

from aioshard.engine import parking
from tests.simulation.batching import BatchWorld, FailingBatchWorld
from tests.simulation.failing import POLICIES
from tests.simulation.seeds import with_seeds
from tests.simulation.world import live


def simulate(seed: int, *, clean: bool = False, policy: str | None = None) -> BatchWorld:
    kinds = [("key", False), ("key", False), ("key", True), (lambda record: record.key, False)]
    shard_by, fixed = kinds[seed % len(kinds)]
    worlds: list[BatchWorld] = []

    async def life() -> None:
        if policy is None:
            world = BatchWorld(seed, shard_by=shard_by, fixed_shards=fixed, clean=clean)
        else:
            world = FailingBatchWorld(seed, policy, shard_by=shard_by, fixed_shards=fixed)
        worlds.append(world)
        await world.live_through(25, [0.0, 0.01, 0.1, 0.3, 2.0])

    live(life(), seed=seed, on_step=lambda: worlds[0].check() if worlds else None)
    return worlds[0]


@with_seeds(2)
def test_guarantees_hold_after_every_step(seeds: range) -> None:
    largest = 0
    for seed in seeds:
        world = simulate(seed)
        assert world.runs > 0
        largest = max(largest, world.largest)
    assert largest > 8, "records came one by one"


@pytest.mark.parametrize("policy", POLICIES)
@with_seeds(4)
def test_guarantees_hold_when_attempts_are_exhausted(seeds: range, policy: str) -> None:
    for seed in seeds:
        world = simulate(seed, policy=policy)
        assert world.runs > 0


@pytest.mark.parametrize("policy", ["park", "park later"])
@with_seeds(4)
def test_guarantees_hold_when_few_parked_records_are_tracked(
    seeds: range, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that cannot be parked must not keep those that are parked from running again."""
    monkeypatch.setattr(parking, "_MOST_PARKED", 3)
    for seed in seeds:
        world = simulate(seed, policy=policy)
        assert world.runs > 0


@with_seeds(4)
def test_nothing_runs_twice_when_drains_fit_their_deadline(seeds: range) -> None:
    """I12: a batch that was waiting for more when its partition left ran once, here or there."""
    for seed in seeds:
        world = simulate(seed, clean=True)
        assert world.runs == sum(len(offsets) for offsets in world.offsets.values()), f"seed {seed}"
