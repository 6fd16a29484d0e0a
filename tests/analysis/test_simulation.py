"""The event simulation against loops that are too simple to be wrong, and what has to hold whatever the numbers."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioshard.core.key_hash import key_hash, shard_of_hash
from aioshard.spark.analysis.simulation import NO_KEY, Engine, Runs, Work, fixed_shards, simulate

ROOM = 1_000_000


def some_work(seed: int, count: int, *, partitions: int = 3, keys: int = 12, mean_gap: float = 900) -> Work:
    chance = random.Random(seed)
    moment = 0.0
    columns: tuple[list[int], ...] = ([], [], [], [])
    for _ in range(count):
        moment += 1 + chance.expovariate(1 / mean_gap)  # no two at once: their order would be the pump's
        key = NO_KEY if chance.random() < 0.1 else key_hash(b"%d" % min(int(chance.expovariate(0.3)), keys))
        row = (chance.randrange(partitions), round(moment), round(chance.lognormvariate(8, 1)), key or 0)
        for column, value in zip(columns, row, strict=True):
            column.append(value)
    return Work(*(array("q", column) for column in columns))


def naive_on_demand(work: Work, workers: int) -> list[int]:
    """When each record starts: at each moment the oldest whose key is free, as long as there is a worker."""
    started: dict[int, int] = {}
    ends: dict[int, int] = {}
    waiting = list(range(len(work.partition)))
    now = 0
    while waiting:
        running = {record for record, end in ends.items() if end > now}
        busy = {work.key[record] for record in running}
        for record in [one for one in waiting if work.available[one] <= now]:
            key = work.key[record]
            if len(running) < workers and (key == NO_KEY or key not in busy):
                started[record] = now
                ends[record] = now + work.service[record]
                running.add(record)
                busy.add(key)
                waiting.remove(record)
        moments = [end for end in ends.values() if end > now] + [
            work.available[one] for one in waiting if work.available[one] > now
        ]
        now = min(moments, default=now)
    return [started[record] for record in range(len(work.partition))]


def naive_fixed(work: Work, shards: int) -> list[int]:
    """When each record starts: a shard runs what it has, one after the other."""
    free = [0] * shards
    started = []
    for record, shard in enumerate(fixed_shards(work, shards)):
        begin = max(work.available[record], free[shard])
        free[shard] = begin + work.service[record]
        started.append(begin)
    return started


@pytest.mark.parametrize("workers", [1, 3, 8, 100])
@pytest.mark.parametrize("seed", range(5))
def test_shards_on_demand_are_those_of_a_naive_loop(seed: int, workers: int) -> None:
    work = some_work(seed, 300)

    runs = simulate(work, Engine(0, workers, ROOM))

    assert list(runs.started) == naive_on_demand(work, workers)


@pytest.mark.parametrize("shards", [1, 4, 64])
@pytest.mark.parametrize("seed", range(5))
def test_fixed_shards_are_those_of_a_naive_loop(seed: int, shards: int) -> None:
    work = some_work(seed, 1_000)

    runs = simulate(work, Engine(shards, shards, ROOM))

    assert list(runs.started) == naive_fixed(work, shards)


@given(
    seed=st.integers(0, 10_000), shards=st.sampled_from([0, 1, 5]), workers=st.integers(1, 9), room=st.integers(1, 60)
)
@settings(max_examples=60)
def test_what_holds_whatever_the_numbers(seed: int, shards: int, workers: int, room: int) -> None:
    work = some_work(seed, 120, mean_gap=200)
    engine = Engine(shards, shards or workers, room)

    runs = simulate(work, engine)

    assert all(arrived >= 0 for arrived in runs.arrived)
    assert all(available <= arrived for available, arrived in zip(work.available, runs.arrived, strict=True))
    assert all(arrived <= started for arrived, started in zip(runs.arrived, runs.started, strict=True))
    assert most_at_once(runs.arrived, runs.finished) <= room
    assert most_at_once(runs.started, runs.finished) <= engine.workers
    identities = fixed_shards(work, shards) if shards else list(work.key)
    assert never_overlap(runs, identities)


def most_at_once(begins: "array[int]", ends: "array[int]") -> int:
    changes = sorted([(end, -1) for end in ends] + [(begin, 1) for begin in begins])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def never_overlap(runs: Runs, identities: list[int]) -> bool:
    free: dict[int, int] = {}
    for begin, end, identity in sorted(zip(runs.started, runs.finished, identities, strict=True)):
        if identity != NO_KEY and begin < free.get(identity, 0):
            return False
        free[identity] = end
    return True


def test_a_full_shard_keeps_its_feeder_waiting() -> None:
    """With room for two in each queue, the third of the slow shard holds up what its partition has for the other."""
    slow, quick = pair()
    work = Work(
        array("q", [0] * 5 + [1]),
        array("q", [0] * 6),
        array("q", [1_000] * 4 + [10] * 2),
        array("q", [slow] * 4 + [quick] * 2),
    )

    bounded = simulate(work, Engine(2, 2, 4))
    roomy = simulate(work, Engine(2, 2, 1_000))

    assert roomy.started[4] == 0
    assert bounded.started[4] >= 1_000


def on(key: int) -> int:
    return shard_of_hash(key, 2)


def pair() -> tuple[int, int]:
    """A key of each of two shards."""
    hashes = [key_hash(b"%d" % number) or 0 for number in range(20)]
    return next(key for key in hashes if on(key) == 0), next(key for key in hashes if on(key) == 1)


def test_what_has_not_ended_when_the_member_dies_never_does() -> None:
    work = Work(array("q", [0, 0]), array("q", [0, 0]), array("q", [10, 20]), array("q", [1, 2]))

    assert list(simulate(work, Engine(0, 2, 10), until=15).finished) == [10, -1]
