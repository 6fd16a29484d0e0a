"""Members, partitions and deaths: what a candidate comes to."""

import random
from array import array

import pytest

from aioshard.core.key_hash import key_hash
from aioshard.errors import SettingsError
from aioshard.spark.analysis.candidate import Candidate
from aioshard.spark.analysis.fleet import NO_TURN, Recording, best_possible, predict, repartitioned
from aioshard.spark.analysis.simulation import NO_KEY, Work

PARTITIONS = 6
SECOND = 1_000_000


@pytest.fixture
def recording() -> Recording:
    chance = random.Random(3)
    keys = [b"%d" % chance.randrange(80) for _ in range(2_000)]
    hashes = [key_hash(key) or 0 for key in keys]
    work = Work(
        array("q", [hashed % PARTITIONS for hashed in hashes]),
        array("q", [number * 1_000 for number in range(len(keys))]),
        array("q", [round(chance.lognormvariate(9, 0.5)) for _ in keys]),
        array("q", hashes),
    )
    count = len(keys)
    return Recording(
        work, array("q", [0]) * count, array("q", [one & 0xFFFF for one in hashes]), ("t",), by_partition=False
    )


def candidate(text: str) -> Candidate:
    return Candidate.parse(text).as_recorded(shards=None, concurrency=16, max_buffered_records=10_000)


def test_members_share_the_work(recording: Recording) -> None:
    alone, three = (predict(recording, candidate(text)) for text in ("concurrency=4", "concurrency=4,members=3"))

    assert len(three.member_work) == 3
    assert sum(three.member_work) == sum(alone.member_work) == sum(recording.work.service)
    assert three.makespan < alone.makespan


def test_a_death_delays_what_the_dead_had(recording: Recording) -> None:
    """Its partitions stand still until its session has timed out."""
    calm = predict(recording, candidate("members=3"))
    spread = predict(recording, candidate("members=3,dies_at=1,session_timeout=5"))

    assert calm.makespan < 6 * SECOND < spread.makespan
    assert sum(spread.member_work) == sum(recording.work.service)


def test_one_neighbour_is_loaded_less_evenly_than_all(recording: Recording) -> None:
    spread, neighbour, standby = (
        predict(recording, candidate(f"members=3,dies_at=0.5,session_timeout=1,takeover={takeover}"))
        for takeover in ("spread", "neighbour", "standby")
    )

    assert max(neighbour.member_work) > max(spread.member_work)
    assert len(standby.member_work) == 4
    assert max(standby.member_work) < max(neighbour.member_work)


def test_another_number_of_partitions_keeps_keys_together(recording: Recording) -> None:
    work = repartitioned(recording, 10)

    homes: dict[int, set[int]] = {}
    for key, partition in zip(work.key, work.partition, strict=True):
        homes.setdefault(key, set()).add(partition)
    assert all(len(home) == 1 for home in homes.values())
    assert set(work.partition) == set(range(10))


def test_without_keys_records_take_turns() -> None:
    nobody = Work(*(array("q", [value] * 6) for value in (0, 0, 5, NO_KEY)))
    recording = Recording(nobody, array("q", [0] * 6), array("q", [NO_TURN] * 6), ("t",), by_partition=False)

    assert sorted(repartitioned(recording, 3).partition) == [0, 0, 1, 1, 2, 2]


def test_shards_that_are_partitions_change_with_these() -> None:
    work = Work(*(array("q", values) for values in ([0, 0], [0, 0], [10, 10], [7, 7])))
    recording = Recording(work, array("q", [0, 0]), array("q", [0, 1]), ("t",), by_partition=True)

    assert predict(recording, candidate("concurrency=2")).makespan == 20
    assert predict(recording, candidate("concurrency=2,partitions=2")).makespan == 10


@pytest.mark.parametrize("text", ["concurrency=1000", "shards=500", "concurrency=4", "members=6,concurrency=100"])
def test_nothing_beats_the_least_possible(recording: Recording, text: str) -> None:
    least, key = best_possible(recording.work)

    assert key != NO_KEY
    assert predict(recording, candidate(text)).makespan >= least
    assert predict(recording, candidate("concurrency=1000")).makespan == least


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("shards", "NAME=VALUE was expected"),
        ("colour=3", "NAME=VALUE was expected"),
        ("shards=many", "a number was expected"),
        ("concurrency=1.5", "a number was expected"),
        ("concurrency=0", "at least 1 was expected"),
        ("shards=4,concurrency=8", "leave out one"),
        ("dies_at=3", "nobody is left"),
        ("members=3,dies_at=3,takeover=all", "'standby' was expected"),
    ],
)
def test_a_candidate_that_makes_no_sense_is_refused(text: str, told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        Candidate.parse(text)
