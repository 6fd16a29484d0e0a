"""Which of its forms a text takes where not everything has room: the one that reaches furthest."""

import random

import pytest

from aioshard.core.finished_offsets import Run, read_finished, runs_of, written

ROOM = 4_000
BITS = (ROOM - 20) * 15
"""How many offsets a bitmap reaches at least."""


def noted(runs: tuple[Run, ...], room: int = ROOM) -> tuple[Run, ...]:
    text = written(runs, 0, room)
    assert len(text) <= room
    return read_finished(text, 0) if text else ()


def test_without_any_shape_bits_reach_furthest() -> None:
    chosen = random.Random(1)
    runs = runs_of(offset for offset in range(1, 70_000) if chosen.random() < 0.5)

    found = noted(runs)

    assert found[:-1] == runs[: len(found) - 1]
    assert found[-1].end >= BITS - 50


def test_far_apart_their_lengths_reach_furthest() -> None:
    chosen = random.Random(2)
    runs = runs_of(chosen.sample(range(1, 3_000_000), 20_000))

    found = noted(runs)

    assert found == runs[: len(found)]
    assert found[-1].end > 4 * BITS


@pytest.mark.parametrize("room", [0, 12, 20, 64])
def test_in_next_to_no_room_the_lowest_are_noted_or_nothing(room: int) -> None:
    runs = runs_of(range(1, 4_000, 7))

    found = noted(runs, room)

    assert found == runs[: len(found)]
    assert bool(found) == (room >= 12)
