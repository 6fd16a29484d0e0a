"""How far stored completions reach when not all fit."""

import random

import pytest

from aioshard.core.finished_offsets import Run, read_finished, written
from tests.support.offsets import runs_of

ROOM = 4_000
BITS = (ROOM - 40) * 15
"""How many offsets a text reaches at least, for any set of finished ones."""


def round_trip(runs: tuple[Run, ...], room: int = ROOM) -> tuple[Run, ...]:
    text = written(runs, 0, room)
    assert len(text) <= room
    return read_finished(text, 0) if text else ()


def test_random_offsets_take_one_bit_each() -> None:
    chosen = random.Random(1)
    runs = runs_of(offset for offset in range(1, 70_000) if chosen.random() < 0.5)

    found = round_trip(runs)

    assert found == runs[: len(found)]
    assert found[-1].end >= BITS


def test_sparse_offsets_reach_further() -> None:
    chosen = random.Random(2)
    runs = runs_of(chosen.sample(range(1, 3_000_000), 20_000))

    found = round_trip(runs)

    assert found == runs[: len(found)]
    assert found[-1].end > 4 * BITS


@pytest.mark.parametrize("room", [0, 12, 20, 64])
def test_with_little_room_only_the_lowest_offsets_are_stored(room: int) -> None:
    runs = runs_of(range(1, 4_000, 7))

    found = round_trip(runs, room)

    assert found == runs[: len(found)]
    assert bool(found) == (room >= 12)


@pytest.mark.parametrize("runs", [[Run(7, 8), Run(5, 6)], [Run(5, 6), Run(6, 8)], [Run(5, 5)], [Run(3, 6)]], ids=str)
def test_runs_that_are_not_ascending_and_apart_are_refused(runs: list[Run]) -> None:
    """The text could not be read back, and its records would run again."""
    with pytest.raises(ValueError, match="ascending"):
        written(runs, 4, 100)
