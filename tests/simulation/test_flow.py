"""The engine with rate limits and few or many workers, under seeded interleavings."""

import asyncio
from collections import defaultdict
from typing import Any

from aioshard import Context, Limit, Record
from tests.simulation.seeds import with_seeds
from tests.simulation.world import GROUP, Process, World, live

KINDS = 8


class FlowWorld(World):
    """A world in which most handlers have a rate limit, and each process its own number of workers."""

    def __init__(self, seed: int, *, clean: bool) -> None:
        self.kind = seed % KINDS
        self.limit = self._limit()
        self.starts: dict[object, list[float]] = defaultdict(list)
        """When runs began, of each process, key or group that has a limit of its own."""
        super().__init__(seed, shard_by="key", fixed_shards=self.kind == 5, clean=clean)

    def _limit(self) -> Limit | None:
        match self.kind:
            case 1 | 3 | 5:
                return Limit("stripe", 400.0, burst=5)
            case 2:
                return Limit("stripe", 100.0, burst=5)
            case 6:
                return Limit("stripe", 200.0, burst=5, per="group")
            case 7:
                return Limit("stripe", 40.0, burst=2, per="key")
        return None

    def consume_options(self) -> dict[str, Any]:
        options = super().consume_options()
        if self.limit is not None:
            options["limit"] = self.limit
        if self.kind != 5:
            options["concurrency"] = self.rng.choice([1, 1, 2, 3, 8, 30])
        return options

    async def handle(self, process: Process, record: Record, context: Context) -> None:
        if self.limit is not None:
            self._note_start(self.limit, process, record)
        await super().handle(process, record, context)

    def _note_start(self, limit: Limit, process: Process, record: Record) -> None:
        now = asyncio.get_running_loop().time()
        match limit.per:
            case "process":
                self.starts[process.number].append(now)
            case "key" if record.key is not None:
                self.starts[process.number, record.key].append(now)
            case "group" if self._is_owner(process, record):
                self.starts[GROUP].append(now)

    def _is_owner(self, process: Process, record: Record) -> bool:
        """Whether the group says so; a member that it has dropped by force learns of it later."""
        return self.broker.group(GROUP).owner(record.topic_partition) == process.member_id

    def check_limit(self) -> None:
        """Check that no window of time has more starts than the limit allows."""
        if self.limit is None:
            return
        burst, rate = self.limit.at_once, self.limit.per_second
        if self.limit.per == "group":
            burst += len(self.processes) - 1
        for who, times in self.starts.items():
            # Of all windows that end with a start, the worst one begins where the most tokens were left.
            most_left = -float("inf")
            for number, time in enumerate(times):
                most_left = max(most_left, time * rate - number)
                excess = number + 1 - time * rate + most_left - burst
                assert excess <= 1e-6, f"{who} started {excess} runs too many by {time}"


def simulate(seed: int, *, clean: bool) -> FlowWorld:
    worlds: list[FlowWorld] = []

    async def life() -> None:
        world = FlowWorld(seed, clean=clean)
        worlds.append(world)
        await world.live_through(30, [0.0, 0.01, 0.1, 1.0])

    live(life(), seed=seed, on_step=lambda: worlds[0].check() if worlds else None)
    worlds[0].check_limit()
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
