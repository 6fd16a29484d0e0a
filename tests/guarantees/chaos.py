"""Random events for the members of a scenario."""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tests.guarantees.checks import SAFE, Apart, OnlyUncommittedAgain
from tests.guarantees.observations import Kind
from tests.guarantees.process import Member
from tests.guarantees.scenario import SHORT, Scenario, even_keys

PARTITIONS = 48
NAMES = "abcdef"
SESSION = 6.0
SETTINGS = {"session_timeout": SESSION, "start_timeout": 100}
WITHOUT_PROGRESS = SESSION + SHORT["rebalance_timeout"] + 5.0
"""Seconds for which nothing may finish at most, while a member lives that long."""


class Fleet:
    """The members, and since when each of them lives and is not frozen.

    Attributes:
        session: Seconds after which the group gives up a member that it does not hear.
        settings: Of each member, by its name.
        apart: Processes that have stood still beyond their session.
        lives: Begin and end of each life of a member that was not frozen, in nanoseconds of the monotonic clock.
        exits: How often a process that was asked to end, or ended by itself, had which exit code.
        happened: How often each event happened.
    """

    def __init__(
        self,
        scenario: Scenario,
        chance: random.Random,
        names: str,
        session: float,
        settings: Callable[[str], Mapping[str, Any]],
        **behaviour: Any,
    ) -> None:
        self.session = session
        self.settings = settings
        self.apart: list[Apart] = []
        self.lives: list[tuple[int, int]] = []
        self.exits: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()
        self._scenario = scenario
        self._chance = chance
        self._names = names
        self._behaviour = behaviour
        self._leaving: list[Member] = []
        self._since: dict[str, int] = {}

    def start(self, name: str) -> None:
        self._scenario.start(name, self.settings(name), **self._behaviour)
        self._since[name] = time.monotonic_ns()

    def _ends(self, name: str) -> Member:
        self.lives.append((self._since.pop(name), time.monotonic_ns()))
        return self._scenario.members[name]

    async def something_happens(self, events: Sequence[Callable[[str], Awaitable[None]]]) -> None:
        """One event of one member, both drawn by chance; one member stays."""
        name = self._chance.choice(self._names)
        member = self._scenario.members[name]
        if not member.alive:
            if name in self._since:
                self.exits[f"{await self._ends(name).ended()} by itself"] += 1
            self.start(name)
        elif len(self._since) > 1 and name in self._since:
            event = self._chance.choice(events)
            self.happened[event.__name__] += 1
            await event(name)

    async def kill(self, name: str) -> None:
        self._ends(name)
        await self._scenario.kill(name)

    async def stop(self, name: str) -> None:
        member = self._ends(name)
        member.terminate()
        self._leaving.append(member)

    async def freeze(self, name: str) -> None:
        """Freeze a member for longer than its session."""
        member = self._ends(name)
        self.apart.append(Apart(member.process))
        member.freeze()
        await asyncio.sleep(self.session + self._chance.uniform(1, 3))
        member.thaw()
        self._since[name] = time.monotonic_ns()

    async def come_to_rest(self) -> None:
        """Every member runs."""
        for member in self._leaving:
            code = await member.ended(60)
            self.exits[str(code) if member.sample else "before it began"] += 1
        self._leaving.clear()
        for name in self._names:
            if not self._scenario.members[name].alive:
                if name in self._since:
                    self.exits[f"{await self._ends(name).ended()} by itself"] += 1
                self.start(name)

    def over(self) -> None:
        """Nothing happens to the members any more."""
        for name in list(self._since):
            self._ends(name)

    async def stop_all(self) -> None:
        """End all members, one after the other."""
        for name in self._names:
            self.exits[str(await self._scenario.members[name].stop(60))] += 1

    @property
    def without_progress(self) -> float:
        """The longest time in seconds in which nothing finished although a member lived."""
        seen = self._scenario.observations.refresh().seen
        finished = sorted(observation.at for observation in seen if observation.kind is Kind.FINISHED)
        gaps = (
            after - before
            for before, after in itertools.pairwise(finished)
            if any(since <= before and after <= until for since, until in self.lives)
        )
        return max(gaps, default=0) / 1e9


async def chaos(scenario: Scenario, *, seed: int, seconds: float, records: int) -> None:
    """Six processes share 48 partitions; something happens to one of them every 0.5 to 10 s, while records come in."""
    chance = random.Random(seed)
    fleet = Fleet(scenario, chance, NAMES, SESSION, lambda _: SETTINGS, base=0.002, spread=0.02)
    await scenario.create(partitions=PARTITIONS)
    for name in NAMES:
        fleet.start(name)
    await scenario.until_settled(*NAMES, timeout=90)
    scenario.start_feeding(even_keys(seed, keys=2_000), backlog=3_000, chunk=500, least=records)

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(min(chance.uniform(0.5, 10.0), max(end - time.monotonic(), 0.0)))
        await fleet.something_happens((fleet.kill, fleet.kill, fleet.stop, fleet.freeze))
    await fleet.come_to_rest()
    await scenario.stop_feeding()
    await scenario.until_finished(len(scenario.produced), timeout=120)
    fleet.over()

    longest = fleet.without_progress
    scenario.notes["longest without progress"] = round(longest, 1)
    await scenario.verify(
        *(guarantee for guarantee in SAFE if not isinstance(guarantee, OnlyUncommittedAgain)),
        OnlyUncommittedAgain(apart=fleet.apart),
    )
    assert longest <= WITHOUT_PROGRESS
    assert scenario.kills + len(fleet.apart) > 0, "nothing happened"
