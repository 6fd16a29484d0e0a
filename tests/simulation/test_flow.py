"""The engine with rate limits and few or many workers, under seeded interleavings."""

from typing import Any

from aioshard import Limit
from tests.simulation.seeds import with_seeds
from tests.simulation.world import World, live


class FlowWorld(World):
    """A world in which most handlers have a rate limit, and each process its own number of workers."""

    def __init__(self, seed: int, *, clean: bool) -> None:
        self.kind = seed % 6
        super().__init__(seed, shard_by="key", fixed_shards=self.kind == 5, clean=clean)

    def consume_options(self) -> dict[str, Any]:
        options = super().consume_options()
        if self.kind in (1, 2, 3, 5):
            options["limit"] = Limit("pace", 100.0 if self.kind == 2 else 400.0, burst=5)
        if self.kind < 5:
            options["concurrency"] = self.rng.choice([1, 1, 2, 3, 8, 30])
        return options


def simulate(seed: int, *, clean: bool) -> FlowWorld:
    worlds: list[FlowWorld] = []

    async def life() -> None:
        world = FlowWorld(seed, clean=clean)
        worlds.append(world)
        await world.live_through(30, [0.0, 0.01, 0.1, 1.0])

    live(life(), seed=seed, on_step=lambda: worlds[0].check() if worlds else None)
    return worlds[0]


@with_seeds(10)
def test_guarantees_hold_after_every_step(seeds: range) -> None:
    for seed in seeds:
        simulate(seed, clean=False)


@with_seeds(10)
def test_nothing_runs_twice_when_drains_fit_their_deadline(seeds: range) -> None:
    """I12, with limits under which a drain is soon done."""
    for seed in seeds:
        world = simulate(seed, clean=True)
        assert world.runs == sum(len(offsets) for offsets in world.offsets.values()), f"seed {seed}"
