"""The engine with rate limits and few or many workers, under seeded interleavings."""

from typing import Any

from aioshard import Context, Limit, Record
from tests.simulation.limits import StartLedger
from tests.simulation.seeds import with_seeds
from tests.simulation.world import Process, World, live

KINDS = 8


class FlowWorld(World):
    """A world in which most handlers have a rate limit, and each process its own number of workers."""

    def __init__(self, seed: int, *, clean: bool) -> None:
        self.kind = seed % KINDS
        limit = self._limit()
        self.ledger = None if limit is None else StartLedger(limit)
        super().__init__(seed, shard_by="key", fixed_shards=self.kind == 5, clean=clean)

    def _limit(self) -> Limit | None:
        match self.kind:
            case 1 | 3 | 5:
                return Limit("stripe", 400.0, burst=5)
            case 2:
                return Limit("stripe", 100.0, burst=5)
            case 6:
                return Limit("stripe", 30.0, burst=2, per="group")
            case 7:
                return Limit("stripe", 40.0, burst=2, per="key")
        return None

    def consume_options(self) -> dict[str, Any]:
        options = super().consume_options()
        if self.ledger is not None:
            options["limit"] = self.ledger.limit
        if self.kind != 5:
            options["concurrency"] = self.rng.choice([1, 1, 2, 3, 8, 30])
        return options

    async def handle(self, process: Process, record: Record, context: Context) -> None:
        if self.ledger is not None:
            self.ledger.note(self, process, record)
        await super().handle(process, record, context)


def simulate(seed: int, *, clean: bool) -> FlowWorld:
    worlds: list[FlowWorld] = []

    async def life() -> None:
        world = FlowWorld(seed, clean=clean)
        worlds.append(world)
        await world.live_through(30, [0.0, 0.01, 0.1, 1.0])

    live(life(), seed=seed, on_step=lambda: worlds[0].check() if worlds else None)
    if worlds[0].ledger is not None:
        worlds[0].ledger.check(len(worlds[0].processes))
    return worlds[0]


@with_seeds(10, least=KINDS)
def test_guarantees_hold_after_every_step(seeds: range) -> None:
    for seed in seeds:
        simulate(seed, clean=False)


@with_seeds(10, least=KINDS)
def test_nothing_runs_twice_when_drains_fit_their_deadline(seeds: range) -> None:
    """I12, with limits under which a drain is soon done."""
    for seed in seeds:
        world = simulate(seed, clean=True)
        assert world.runs == sum(len(offsets) for offsets in world.offsets.values()), f"seed {seed}"
