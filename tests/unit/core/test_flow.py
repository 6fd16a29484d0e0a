"""How many more records of a partition may be admitted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshard.core.flow import NONE, Usage, fetch_limits, partition_share, room_for

BOUNDS = Usage(10_000, 64 * 2**20)


def fill(partitions: int, stuck: frozenset[int] = frozenset()) -> list[int]:
    """Let greedy partitions take turns until none finds room."""
    held = [0] * partitions
    while True:
        moved = False
        for index in range(partitions):
            total = Usage(sum(held), sum(held))
            room = room_for(BOUNDS, total, Usage(held[index], held[index]), stuck=index in stuck)
            held[index] += room.records
            moved = moved or room.records > 0
        if not moved:
            return held


def test_one_busy_partition_fills_half() -> None:
    assert fill(1) == [5_000]


def test_a_late_partition_gets_half_of_the_free_space() -> None:
    assert fill(4) == [5_000, 2_500, 1_250, 625]


def test_busy_partitions_converge_to_equal_shares_and_leave_one_free() -> None:
    held = fill(9)
    for turn in range(1_000):
        index = turn % 9
        held[index] -= held[index] // 5
        room = room_for(BOUNDS, Usage(sum(held), 0), Usage(held[index], 0), stuck=False)
        held[index] += room.records

    assert max(held) - min(held) <= BOUNDS.records / 100
    assert BOUNDS.records * 0.89 <= sum(held) <= BOUNDS.records * 0.91


def test_stuck_partitions_do_not_starve_the_others() -> None:
    held = fill(9, stuck=frozenset(range(8)))

    assert held[:8] == [100] * 8
    assert held[8] > 4_000


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.booleans())
def test_the_bounds_are_never_exceeded(others: int, held: int, stuck: bool) -> None:
    total = Usage(others + held, 0)

    room = room_for(BOUNDS, total, Usage(held, 0), stuck=stuck)

    assert room == NONE or total.records + room.records <= BOUNDS.records
    assert room == NONE or held + room.records <= BOUNDS.records - total.records - room.records + 1


def test_without_room_for_bytes_there_is_no_room_for_records() -> None:
    assert room_for(BOUNDS, Usage(1, BOUNDS.bytes), Usage(1, BOUNDS.bytes), stuck=False) == NONE


@pytest.mark.parametrize("brokers", [1, 3, 30])
def test_fetches_from_many_brokers_stay_within_the_bound_in_whole_batches(brokers: int) -> None:
    bound = 32 * 1024 * 1024
    limits = fetch_limits(bound, 0, partitions=512, requests=brokers)
    assert brokers * limits.response <= bound
    assert limits.partition >= 512 * 1024


@pytest.mark.parametrize("bound", [0, 1, 7, 1_000, 100_000])
def test_a_tiny_bound_still_fetches(bound: int) -> None:
    for used in (0, bound, 2 * bound):
        assert min(fetch_limits(bound, used, partitions=3, requests=2)) >= 1


def test_the_last_quarter_of_the_fetch_bound_is_shared_equally() -> None:
    bound = 32_000_000
    limits = fetch_limits(bound, bound * 3 // 4, partitions=100, requests=1)
    assert limits.response == bound // 4
    assert limits.partition == partition_share(100, bound // 4)
