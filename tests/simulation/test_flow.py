"""The engine with rate limits and few, many or an adaptive number of workers, under seeded interleavings."""

from collections import Counter
from typing import Any

from aioshard import Adaptive, Context, Limit, Record, RetryLater
from tests.simulation.limits import StartLedger
from tests.simulation.seeds import with_seeds
from tests.simulation.world import Process, World, live

_ADAPTIVE = 8
KINDS = 9


class FlowWorld(World):
    """A world in which most handlers have a rate limit, and each process its own number of workers."""

    def __init__(self, seed: int, *, clean: bool) -> None:
        self.kind = seed % KINDS
        limit = self._limit()
        self.ledger = None if limit is None else StartLedger(limit)
        self.moves: Counter[str] = Counter()
        """Changes of adaptive concurrencies, by reason."""
        super().__init__(seed, shard_by="key", fixed_shards=self.kind == 5, clean=clean)
        self.overload = self.rng.choice([0.0, 0.2])
        """Share of runs that raise `RetryLater`, if the concurrency is adaptive."""

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
        if self.kind == _ADAPTIVE:
            options["concurrency"] = Adaptive(1, 16, initial=self.rng.choice([1, 2, 16]))
        elif self.kind != 5:
            options["concurrency"] = self.rng.choice([1, 1, 2, 3, 8, 30])
        return options

    async def handle(self, process: Process, record: Record, context: Context) -> None:
        if self.ledger is not None:
            self.ledger.note(self, process, record)
        await super().handle(process, record, context)

    async def something_happens(self) -> None:
        await super().something_happens()
        for process in self.living:
            handlers = () if process.engine is None else process.app.statistics().handlers
            for handler in handlers:
                if handler.adaptive is not None:
                    self.moves |= Counter(handler.adaptive.moves)

    async def _work(self, process: Process, *records: Record) -> bool:
        if self.kind == _ADAPTIVE and not self.clean and not self.calm and self.rng.random() < self.overload:
            raise RetryLater(0.1)
        return await super()._work(process, *records)


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


def test_the_adaptive_concurrency_of_these_worlds_moves() -> None:
    moves: Counter[str] = Counter()
    for number in range(20):
        moves += simulate(_ADAPTIVE + number * KINDS, clean=False).moves

    assert moves["overload"] >= 1
    assert moves["queue"] >= 1
