"""Chaos for three members and three brokers (I1, I3, I4, I9, I11, I12).

Environment variables of the long run: `AIOSHARD_CHAOS_SECONDS` of load, `AIOSHARD_CHAOS_SEEDS` such as `1,2,3`, and
`AIOSHARD_CHAOS_FIGURES`, a file to which each run appends its figures as a line of JSON.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.guarantees.chaos import Fleet
from tests.guarantees.checks import (
    Apart,
    CommitsOnlyAdvance,
    Guarantee,
    KeyOrder,
    LagZero,
    NeverAhead,
    NothingLost,
    OneAtATimePerKey,
    OneProcessPerKey,
    OnlyUncommittedAgain,
    verify,
)
from tests.guarantees.observations import Kind
from tests.guarantees.scenario import PROTOCOLS, GroupProtocol, Scenario
from tests.support.load import Load
from tests.support.proxies import (
    CONSUMER_GROUP_HEARTBEAT,
    FETCH,
    GROUP_APIS,
    JOIN_GROUP,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    SYNC_GROUP,
)
from tests.support.three_brokers import ThreeBrokers

NAMES = "abc"
PARTITIONS, MOST_PARTITIONS = 16, 24
RATE, KEYS = 80.0, 20
"""Records in a second, and keys of each partition. A key belongs to one partition."""
SESSION, SESSION_OF_THE_BROKER = 10.0, 6.0
GRACE = 1.0
"""Seconds after its session within which a member that is cut off has ended what it had."""
SETTINGS: dict[str, Any] = {
    "session_timeout": SESSION,
    "heartbeat_interval": 1,
    "rebalance_timeout": 20,
    "commit_timeout": 3,
    "start_timeout": 100,
    "shutdown_timeout": 25,
    "metadata_max_age": 5,
}
HANDLERS: dict[str, Any] = {
    "base": 0.001,
    "spread": 0.049,
    "fails_once": 0.02,
    "retry": {"attempts": 3, "initial": 0.05, "maximum": 0.1},
}
WITHOUT_PROGRESS = 60.0


@pytest.fixture
async def own_brokers(tmp_path: Path) -> AsyncIterator[ThreeBrokers]:
    """A cluster that this test alone uses, so that several may run concurrently."""
    cluster = ThreeBrokers(tmp_path / "brokers")
    try:
        async with cluster:
            yield cluster
    finally:
        await cluster.end()


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_fifteen_seconds_of_chaos_lose_reorder_and_repeat_nothing(
    brokers: ThreeBrokers, topic: str, group: str, tmp_path: Path, protocol: GroupProtocol
) -> None:
    await chaos(brokers, topic, group, tmp_path, protocol, seed=1, seconds=15)


@pytest.mark.chaos
@pytest.mark.kafka
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", [int(seed) for seed in os.environ.get("AIOSHARD_CHAOS_SEEDS", "1,2,3").split(",")])
async def test_minutes_of_chaos_lose_reorder_and_repeat_nothing(
    own_brokers: ThreeBrokers, topic: str, group: str, tmp_path: Path, seed: int
) -> None:
    seconds = float(os.environ.get("AIOSHARD_CHAOS_SECONDS", "300"))
    await chaos(own_brokers, topic, group, tmp_path, PROTOCOLS[seed % len(PROTOCOLS)], seed=seed, seconds=seconds)


async def chaos(
    brokers: ThreeBrokers,
    topic: str,
    group: str,
    directory: Path,
    protocol: GroupProtocol,
    *,
    seed: int,
    seconds: float,
) -> None:
    """Something happens to members every 1 to 6 s, and to brokers as well, while records come in."""
    chance = random.Random(seed)
    session = SESSION_OF_THE_BROKER if protocol == "consumer" else SESSION
    async with Scenario(brokers, topic, group, directory) as scenario:
        scenario.protocol = protocol
        scenario.sampling.survives = True
        scenario.sampling.interval = 0.2
        at = {"bootstrap_servers": brokers.proxied_bootstrap}
        fleet = Fleet(scenario, chance, NAMES, session, lambda name: {**SETTINGS, **at, "client_id": name}, **HANDLERS)
        await scenario.create(PARTITIONS)
        for name in NAMES:
            fleet.start(name)
        await scenario.until_settled(*NAMES, timeout=90)
        async with Load(brokers.bootstrap, topic, PARTITIONS, scenario.produced, rate=RATE, key=key) as load:
            trouble = Trouble(brokers, scenario, fleet, load, random.Random(-seed), seconds)
            await asyncio.gather(
                keep_happening(lambda: fleet.something_happens(trouble.of_members), chance, seconds),
                keep_happening(trouble.something_happens, trouble.chance, seconds),
            )
            await fleet.come_to_rest()
        await scenario.until_settled(*NAMES, timeout=90)
        await scenario.until_finished(len(scenario.produced), timeout=180)
        await scenario.until_all_committed()
        fleet.over()
        await fleet.stop_all()
        await judge(scenario, fleet, load, {"seed": seed, "protocol": protocol, "seconds": seconds})


def key(partition: int, number: int) -> bytes:
    return b"k%d-%d" % (partition, number % KEYS)


async def keep_happening(event: Callable[[], Awaitable[None]], chance: random.Random, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(min(chance.uniform(1.0, 6.0), max(end - time.monotonic(), 0.0)))
        await event()


class Trouble:
    """Things that happen to brokers, and between them and members; at most one broker is away at a time."""

    def __init__(
        self,
        brokers: ThreeBrokers,
        scenario: Scenario,
        fleet: Fleet,
        load: Load,
        chance: random.Random,
        seconds: float,
    ) -> None:
        self.chance = chance
        self._brokers = brokers
        self._proxies = brokers.proxies
        self._scenario = scenario
        self._fleet = fleet
        self._load = load
        self._freezes = (5.0, 12.0, 40.0) if seconds > 60 else (5.0, 12.0)
        self._longest_cut = 30 if seconds > 60 else 15
        self.of_members: Sequence[Callable[[str], Awaitable[None]]] = (
            fleet.kill,
            fleet.stop,
            fleet.freeze,
            self.cut_off,
            self.delay,
            self.lose_answers,
        )
        self._of_brokers: Sequence[Callable[[], Awaitable[None]]] = (
            self.kill_a_broker,
            self.stop_a_broker,
            self.freeze_a_broker,
            self.move_coordinator,
            self.move_coordinator_in_a_rebalance,
            self.move_leaders,
            self.reassign,
            self.add_a_partition,
        )

    async def something_happens(self) -> None:
        event = self.chance.choice(self._of_brokers)
        self._fleet.happened[event.__name__] += 1
        await event()

    # Brokers ----------------------------------------------------------------------------------

    def _node(self) -> int:
        return self.chance.choice(list(self._brokers.nodes))

    def _partition(self) -> int:
        return self.chance.randrange(self._load.partitions)

    async def kill_a_broker(self) -> None:
        node = self._node()
        await self._brokers.kill(node)
        await asyncio.sleep(self.chance.uniform(0, 10))
        await self._brokers.start(node)

    async def stop_a_broker(self) -> None:
        node = self._node()
        await self._brokers.stop(node)
        await self._brokers.start(node)

    async def freeze_a_broker(self) -> None:
        node = self._node()
        await self._brokers.freeze(node)
        await asyncio.sleep(self.chance.choice(self._freezes))
        async with self._scenario.sampling.paused():  # until it knows better it answers as the coordinator it was
            await self._brokers.thaw(node)

    async def move_coordinator(self) -> None:
        await self._brokers.move_coordinator(self._scenario.group)

    async def move_coordinator_in_a_rebalance(self) -> None:
        """Members that leave and come back make the group rebalance."""
        await self._fleet.something_happens((self._fleet.kill, self._fleet.stop))
        await asyncio.sleep(self.chance.uniform(0, 1))
        await self.move_coordinator()

    async def move_leaders(self) -> None:
        for _ in range(3):
            await self._brokers.move_leader(self._scenario.topic, self._partition())

    async def reassign(self) -> None:
        """Take a replica away, and copy it to its node again."""
        partition, replicas = self._partition(), list(self._brokers.nodes)
        self.chance.shuffle(replicas)
        await self._brokers.reassign(self._scenario.topic, partition, replicas[:2])
        await self._brokers.reassign(self._scenario.topic, partition, replicas)

    async def add_a_partition(self) -> None:
        if self._load.partitions < MOST_PARTITIONS:
            await self._brokers.add_partitions(self._scenario.topic, self._load.partitions + 1)
            await self._load.until_known(self._load.partitions + 1)

    # Between members and brokers --------------------------------------------------------------

    async def cut_off(self, name: str) -> None:
        """Let nothing that a member asks its coordinator be answered."""
        now, seconds = time.monotonic_ns(), self.chance.uniform(5, self._longest_cut)
        until = now + int((self._fleet.session + GRACE) * 1e9)
        self._fleet.apart.append(Apart(self._scenario.members[name].process, now, until))
        rules = [self._proxies.swallow(api_key=api, client_id=name) for api in GROUP_APIS]
        await asyncio.sleep(seconds)
        for rule in rules:
            rule.lift()

    async def delay(self, name: str) -> None:
        rule = self._proxies.delay(0.2, client_id=name)
        await asyncio.sleep(self.chance.uniform(5, 15))
        rule.lift()

    async def lose_answers(self, name: str) -> None:
        """Close connections instead of answering, one in three."""
        rules = [
            self._proxies.answer(
                lambda _, answer: None if self.chance.random() < 1 / 3 else answer, api_key=api, client_id=name
            )
            for api in (FETCH, OFFSET_COMMIT, OFFSET_FETCH, JOIN_GROUP, SYNC_GROUP, CONSUMER_GROUP_HEARTBEAT)
        ]
        await asyncio.sleep(self.chance.uniform(2, 8))
        for rule in rules:
            rule.lift()


async def judge(scenario: Scenario, fleet: Fleet, load: Load, run: dict[str, object]) -> None:
    """Compare what happened with the log, which is read again; write the figures down, and fail for each breach."""
    acknowledged = scenario.produced
    await scenario.read_back()
    history = await scenario.history()
    guarantees: dict[str, Guarantee] = {
        "lost": NothingLost(),
        "out of order": KeyOrder(),
        "one at a time in a process": OneAtATimePerKey(),
        "both at once": OneProcessPerKey(apart=fleet.apart),
        "committed too early": NeverAhead(),
        "commits that went back": CommitsOnlyAdvance(),
        "unexplained": OnlyUncommittedAgain(apart=fleet.apart),
        "not committed": LagZero(),
    }
    runs = Counter(seen.record_id for seen in history.seen if seen.kind is Kind.FINISHED)
    figures = {
        **run,
        "records": len(history.produced),
        **{name: sum(1 for _ in guarantee.breaches(history)) for name, guarantee in guarantees.items()},
        "finished again": sum(count - 1 for count in runs.values()),
        "longest without progress": round(fleet.without_progress, 1),
        "samples": len(history.commits),
        "events": dict(fleet.happened),
        "exits": dict(fleet.exits),
    }
    write(figures)
    verify(history, *guarantees.values())
    assert acknowledged.items() <= history.produced.items(), "the log has all that was acknowledged"
    assert len(history.produced) >= load.sent, "the log has all that was sent; a producer that gets a new id may repeat"
    assert fleet.exits.keys() <= {"0", "4", "before it began"}, fleet.exits
    assert fleet.without_progress < WITHOUT_PROGRESS
    assert fleet.happened, "nothing happened"


def write(figures: Mapping[str, object]) -> None:
    line = json.dumps(figures)
    print(line)
    if file := os.environ.get("AIOSHARD_CHAOS_FIGURES"):
        with Path(file).open("a", encoding="utf-8") as stream:
            stream.write(f"{line}\n")
