"""Six processes share 48 partitions and are killed, stopped, started and frozen all the time (I3, I4, I11, I12)."""

import asyncio
import itertools
import random
import time
from collections.abc import Iterator

import pytest

from tests.guarantees.checks import SAFE, OnlyUncommittedAgain
from tests.guarantees.observations import Kind
from tests.guarantees.process import Member
from tests.guarantees.scenario import SHORT, Scenario, even_keys

PARTITIONS = 48
NAMES = "abcdef"
CLIENTS = ("aiokafka", "cooperative", "KIP-848")
SESSION = 6.0
SETTINGS = {"session_timeout": SESSION, "start_timeout": 100}
WITHOUT_PROGRESS = SESSION + SHORT["rebalance_timeout"] + 5.0
"""Seconds for which nothing may finish at most, while a member lives that long."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("client", ["aiokafka", "cooperative", pytest.param("KIP-848", marks=pytest.mark.chaos)])
async def test_a_minute_of_chaos_loses_reorders_and_stops_nothing(scenario: Scenario) -> None:
    await chaos(scenario, seed=1, seconds=60, records=20_000)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seed", "client"), [(seed, CLIENTS[seed % 3]) for seed in range(2, 12)])
async def test_minutes_of_chaos_lose_reorder_and_stop_nothing(scenario: Scenario, seed: int) -> None:
    await chaos(scenario, seed=seed, seconds=300, records=300_000)


class Fleet:
    """The members, and since when each of them lives and is not frozen."""

    def __init__(self, scenario: Scenario, chance: random.Random) -> None:
        self._scenario = scenario
        self._chance = chance
        self._leaving: list[Member] = []
        self._since: dict[str, int] = {}
        self.frozen: set[str] = set()
        """Processes that have stood still beyond their session."""
        self.lives: list[tuple[int, int]] = []
        """Begin and end of each life of a member that was not frozen, in nanoseconds of the monotonic clock."""

    def start(self, name: str) -> None:
        self._scenario.start(name, SETTINGS, base=0.002, spread=0.02)
        self._since[name] = time.monotonic_ns()

    def _ends(self, name: str) -> None:
        self.lives.append((self._since.pop(name), time.monotonic_ns()))

    async def something_happens(self) -> None:
        """One event of one member, drawn by chance; one member stays."""
        name = self._chance.choice(NAMES)
        member = self._scenario.members[name]
        if not member.alive:
            self.start(name)
        elif len(self._since) > 1 and name in self._since:
            match self._chance.choice(("kill", "kill", "stop", "freeze")):
                case "kill":
                    self._ends(name)
                    await self._scenario.kill(name)
                case "stop":
                    self._ends(name)
                    member.ask_to_end()
                    self._leaving.append(member)
                case "freeze":
                    await self._freeze(name, member)

    async def _freeze(self, name: str, member: Member) -> None:
        self._ends(name)
        self.frozen.add(member.process)
        member.freeze()
        await asyncio.sleep(SESSION + self._chance.uniform(1, 3))
        member.thaw()
        self._since[name] = time.monotonic_ns()

    async def come_to_rest(self) -> None:
        """Every member runs."""
        for member in self._leaving:
            await member.ended()
        for name in NAMES:
            if not self._scenario.members[name].alive:
                self.start(name)

    def over(self) -> None:
        """Nothing happens to the members any more."""
        for name in list(self._since):
            self._ends(name)

    def outlived(self, begin: int, end: int) -> bool:
        """Whether a member lived all that time."""
        return any(since <= begin and end <= until for since, until in self.lives)


async def chaos(scenario: Scenario, *, seed: int, seconds: float, records: int) -> None:
    """Something happens every 0.5 to 10 s, while records come in."""
    chance = random.Random(seed)
    fleet = Fleet(scenario, chance)
    await scenario.create(partitions=PARTITIONS)
    for name in NAMES:
        fleet.start(name)
    await scenario.until_settled(*NAMES, timeout=90)
    scenario.start_feeding(even_keys(seed, keys=2_000), backlog=3_000, chunk=500, least=records)

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(min(chance.uniform(0.5, 10.0), max(end - time.monotonic(), 0.0)))
        await fleet.something_happens()
    await fleet.come_to_rest()
    await scenario.stop_feeding()
    await scenario.until_finished(len(scenario.produced), timeout=120)
    fleet.over()

    longest = max((after - before for before, after in gaps(scenario, fleet)), default=0) / 1e9
    scenario.notes["longest without progress"] = round(longest, 1)
    await scenario.verify(
        *(guarantee for guarantee in SAFE if not isinstance(guarantee, OnlyUncommittedAgain)),
        OnlyUncommittedAgain(frozen=fleet.frozen),
    )
    assert longest <= WITHOUT_PROGRESS
    assert scenario.kills + len(fleet.frozen) > 0, "nothing happened"


def gaps(scenario: Scenario, fleet: Fleet) -> Iterator[tuple[int, int]]:
    """Times in which nothing finished although a member lived."""
    finished = sorted(seen.at for seen in scenario.observations.refresh().seen if seen.kind is Kind.FINISHED)
    for before, after in itertools.pairwise(finished):
        if fleet.outlived(before, after):
            yield before, after
