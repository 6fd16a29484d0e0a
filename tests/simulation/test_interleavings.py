"""The engine under hundreds of seeded interleavings, I1 to I10 asserted after every step."""

import hashlib
import os
import subprocess
import sys

import pytest

from aioshard.engine import parking
from tests.simulation.failing import POLICIES, FailingWorld
from tests.simulation.seeds import with_seeds
from tests.simulation.world import World, live


def simulate(seed: int, *, clean: bool = False, policy: str | None = None) -> World:
    kinds = [("key", False), ("key", False), ("key", True), (lambda record: record.key, False)]
    shard_by, fixed = kinds[seed % len(kinds)]
    worlds: list[World] = []

    async def life() -> None:
        if policy is None:
            world = World(seed, shard_by=shard_by, fixed_shards=fixed, clean=clean)
        else:
            world = FailingWorld(seed, policy, shard_by=shard_by, fixed_shards=fixed)
        worlds.append(world)
        await world.live_through(25, [0.0, 0.01, 0.1, 0.3, 2.0])

    live(life(), seed=seed, on_step=lambda: worlds[0].check() if worlds else None)
    return worlds[0]


@with_seeds()
def test_guarantees_hold_after_every_step(seeds: range) -> None:
    for seed in seeds:
        world = simulate(seed)
        assert world.runs > 0


@pytest.mark.parametrize("policy", POLICIES)
@with_seeds(2)
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


@pytest.mark.parametrize("seed", [515, 1226])
def test_a_partition_without_a_leader_leaves_room_for_the_others(seed: int) -> None:
    """It was revoked with a record in the buffer that is larger than the bound, or with its oldest record evicted."""
    simulate(seed, policy="halt")


@with_seeds(4)
def test_nothing_runs_twice_when_drains_fit_their_deadline(seeds: range) -> None:
    """I12: members come, go and rebalance; no handler fails or outlasts a drain."""
    for seed in seeds:
        world = simulate(seed, clean=True)
        assert world.runs == sum(len(offsets) for offsets in world.offsets.values()), f"seed {seed}"


def digest(*seeds: int) -> str:
    """Return a digest that distinguishes the runs of some seeds."""
    worlds = [simulate(seed, policy=policy) for seed in seeds for policy in (None, "breaker", "park for good")]
    commits = [(request.applied, list(request.offsets.items())) for world in worlds for request in world.broker.commits]
    return hashlib.sha256(repr(([world.runs for world in worlds], commits)).encode()).hexdigest()


@pytest.mark.slow
def test_a_seed_repeats_its_run_under_any_hash_seed() -> None:
    program = "import logging; from tests.simulation.test_interleavings import digest; logging.disable(); "
    found = [
        subprocess.check_output(
            [sys.executable, "-c", f"{program}print(digest(1, 2))"],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        )
        for seed in ("1", "2")
    ]
    assert len(set(found)) == 1
