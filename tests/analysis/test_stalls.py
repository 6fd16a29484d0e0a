"""When an event loop stood still, found in the ends of its records; and what looks like it and is not."""

import heapq
import random
from collections.abc import Callable, Sequence

import pytest

from aioshard.spark.analysis.stalls import Stalls, stalls_of

MILLISECOND = 1_000
NONE = Stalls(0, 0, 0, 0)


def run_of(
    services: Sequence[int], workers: int, stalls: Sequence[tuple[int, int]] = ()
) -> tuple[list[int], list[int], int]:
    """Begins and ends of a run whose loop does nothing within each of *stalls*; and what that added to durations."""

    def awake(moment: int) -> int:
        return next((end for begin, end in stalls if begin < moment < end), moment)

    free = [0] * workers
    begins, ends, added = [], [], 0
    for service in services:
        begun = awake(heapq.heappop(free))
        ready = begun + service
        ended = awake(ready)
        added += ended - ready
        heapq.heappush(free, ended)
        begins.append(begun)
        ends.append(ended)
    return begins, ends, added


def uniform(chance: random.Random) -> int:
    return chance.randint(5 * MILLISECOND, 6 * MILLISECOND)


def lognormal(chance: random.Random) -> int:
    return round(chance.lognormvariate(-3.6, 0.5) * 1_000_000)


@pytest.mark.parametrize("workers", [16, 64])
@pytest.mark.parametrize("service", [uniform, lognormal])
def test_stalls_are_found_and_measured(service: Callable[[random.Random], int], workers: int) -> None:
    chance = random.Random(4)
    services = [service(chance) for _ in range(400 * workers)]
    whole = sum(services) // workers
    stalls = [(whole * part // 10, whole * part // 10 + 60 * MILLISECOND) for part in range(1, 9)]

    begins, ends, added = run_of(services, workers, stalls)
    found = stalls_of(begins, ends)

    assert found.times >= len(stalls)
    assert found.longest == pytest.approx(60 * MILLISECOND, rel=0.1)
    assert 0.95 * len(stalls) * 60 * MILLISECOND <= found.total <= 1.5 * len(stalls) * 60 * MILLISECOND
    assert 0.9 * added <= found.waited <= 1.3 * added


@pytest.mark.parametrize("workers", [16, 64])
@pytest.mark.parametrize("service", [uniform, lognormal])
def test_a_loop_that_never_stands_still_is_left_alone(service: Callable[[random.Random], int], workers: int) -> None:
    chance = random.Random(5)
    services = [service(chance) for _ in range(6_000)]

    begins, ends, _ = run_of(services, workers)

    assert stalls_of(begins, ends).waited < sum(services) / 100


def test_handlers_that_take_one_and_the_same_time_end_together() -> None:
    """Nothing ends for 5 ms, again and again, and then all end at once: as they would without a stall."""
    begins, ends, _ = run_of([5 * MILLISECOND] * 1_600, 16)
    some_slow = ([5 * MILLISECOND] * 19 + [50 * MILLISECOND]) * 320
    slow_begins, slow_ends, _ = run_of(some_slow, 64)

    assert stalls_of(begins, ends) == NONE
    assert stalls_of(slow_begins, slow_ends).waited < sum(some_slow) / 100


def test_a_loop_without_work_does_not_stand_still() -> None:
    begins = [number * 200 * MILLISECOND for number in range(50)]

    assert stalls_of(begins, [one + 20 * MILLISECOND for one in begins]) == NONE
    assert stalls_of([], []) == NONE
