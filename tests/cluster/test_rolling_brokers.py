"""A rolling restart of all brokers under load: nothing runs twice (I3, I4, I12)."""

import contextlib
import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from tests.guarantees.behaviour import BAD, dead_letter, parking
from tests.guarantees.checks import DEPLOYED, NoDuplicates, safe_when_parked, verify
from tests.guarantees.scenario import Scenario
from tests.guarantees.side_topics import DeadLettersExact, OneDeadLetterPerOwnership
from tests.support.load import Load
from tests.support.three_brokers import ThreeBrokers

NAMES = "ab"
PARTITIONS = 4
RATE, KEYS = 30.0, 10
"""Records in a second of each topic, and keys of each partition."""
SETTINGS: Mapping[str, Any] = {
    "session_timeout": 10,
    "heartbeat_interval": 1,
    "start_timeout": 60,
    "max_buffered_records": 100_000,
}
HANDLERS: Mapping[str, Any] = {"base": 0.001, "spread": 0.05}
ONCE: Mapping[str, Any] = {"attempts": 1}


def healthy(partition: int, number: int) -> bytes:
    return b"k%d-%d" % (partition, number % KEYS)


def one_fails(partition: int, number: int) -> bytes:
    """One key of each partition fails."""
    return b"%s%d" % (BAD, partition) if number % KEYS == 0 else healthy(partition, number)


class Handlers:
    """An app with five handlers: shards on demand, fixed shards, dead letters, parked keys, and some that halt."""

    def __init__(self, brokers: ThreeBrokers, main: Scenario) -> None:
        self._brokers = brokers
        self.main = main
        self.fixed, self.dead_letters, self.parked, self.stuck = self.beside = [
            main.beside(name) for name in ("fixed", "dead-letters", "parked", "stuck")
        ]
        self.all = [main, *self.beside]

    async def create(self) -> None:
        """The topics; the first record of each partition of `stuck` halts its key."""
        for scenario in (self.main, self.fixed, self.stuck):
            await scenario.create(PARTITIONS)
        await self.dead_letters.create(PARTITIONS, policy="dead-letters")
        await self.parked.create(PARTITIONS, policy="parked")
        for partition in range(PARTITIONS):
            await self.stuck.produce([(b"%s%d" % (BAD, partition), None)], partition)

    async def start(self) -> None:
        """Start all members; return when they share all partitions."""
        behaviours: tuple[dict[str, Any], ...] = (
            {"shards": 8},
            {"on_failure": dead_letter(self.dead_letters.side_topic), "retry": ONCE},
            {"on_failure": parking(self.parked.side_topic, delay=1.0), "retry": ONCE},
            {"retry": ONCE},
        )
        beside = [
            scenario.handled(**HANDLERS, **behaviour)
            for scenario, behaviour in zip(self.beside, behaviours, strict=True)
        ]
        for name in NAMES:
            at = {"bootstrap_servers": self._brokers.proxied_bootstrap, "client_id": name}
            self.main.start(name, {**SETTINGS, **at}, beside=beside, **HANDLERS)
        everything = sorted((scenario.topic, number) for scenario in self.all for number in range(PARTITIONS))

        def shared() -> bool:
            owned = [member.owned for member in self.main.members.values()]
            return all(owned) and sorted(itertools.chain(*owned)) == everything

        await self.main.until(shared, "the members share all partitions", 60)

    async def restart_brokers(self) -> None:
        """Stop and start each broker while records come in."""
        async with contextlib.AsyncExitStack() as loads:
            for each in self.all:
                key = one_fails if each in (self.dead_letters, self.parked) else healthy
                load = Load(self._brokers.bootstrap, each.topic, PARTITIONS, each.produced, rate=RATE, key=key)
                await loads.enter_async_context(load)
            for node in self._brokers.nodes:
                await self._brokers.stop(node)
                await self._brokers.start(node)
                for each in self.all:
                    await each.until_finished(len(each.observations.refresh().finished) + int(RATE))

    def finished_ahead(self) -> int:
        """Count the records of `stuck` that the last commit stores as finished."""
        return sum(run.end - run.start for runs in self.stuck.commits[-1].completions.values() for run in runs)


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_a_rolling_broker_restart_runs_no_record_twice(scenario: Scenario, brokers: ThreeBrokers) -> None:
    async with contextlib.AsyncExitStack() as stack:
        handlers = Handlers(brokers, scenario)
        dead_letters, parked, stuck = handlers.dead_letters, handlers.parked, handlers.stuck
        for each in handlers.beside:
            await stack.enter_async_context(each)
        await handlers.create()
        await handlers.start()
        await handlers.restart_brokers()

        for each in handlers.all:
            await each.read_back()
            await each.until_healthy_finished()
            verify(await each.history_so_far(), NoDuplicates(apart_from=each.failing))
        assert all(member.alive for member in scenario.members.values())
        parked.heal()
        await parked.until_finished(len(parked.produced))
        await parked.until_nothing_is_parked()
        for each in (scenario, handlers.fixed, dead_letters, parked):
            await each.until_all_committed()
        healthy_ones = len(stuck.produced) - len(stuck.failing)
        await stuck.until(
            lambda: handlers.finished_ahead() == healthy_ones, "all but the halted records are stored as finished"
        )

        for name in NAMES:
            await scenario.kill(name)
        stuck.heal()
        await handlers.start()
        await stuck.until_finished(len(stuck.produced))

        copies, originals = await dead_letters.side_records(), await dead_letters.originals()
        assert len(copies) == len(dead_letters.failing) > 0
        exact = DeadLettersExact(copies, originals, dead_letters.failing, lambda _: True)
        await dead_letters.verify(*DEPLOYED, exact, OneDeadLetterPerOwnership(copies))
        await parked.verify(*safe_when_parked(parked.failing), NoDuplicates(apart_from=parked.failing))
        await stuck.verify(*safe_when_parked(()), NoDuplicates(apart_from=stuck.failing))
        await scenario.verify(*DEPLOYED)
        await handlers.fixed.verify(*DEPLOYED)
