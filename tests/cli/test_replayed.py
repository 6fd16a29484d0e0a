"""What is noted of dead letters: nothing is lost of it, and nothing is claimed."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aioshard.cli.dlt import LONGEST_NOTE, NoteTooLongError, Replayed
from aioshard.ports import Committed

OFFSETS = st.sets(st.integers(0, 40) | st.integers(0, 3000), max_size=60)


@example({0, 1}, [{1}], 0)
@example({0, 1, 2}, [{1}, {0}, {2}], 3)
@given(OFFSETS, st.lists(OFFSETS, max_size=4), st.integers(0, 5))
def test_what_was_finished_in_any_run_is_done_and_nothing_else(
    offsets: set[int], runs: list[set[int]], behind: int
) -> None:
    position = max(offsets, default=0) + 1 + behind
    note: Committed | None = None
    finished: set[int] = set()
    for chosen in runs:
        replayed = Replayed(note)
        for offset in sorted(offsets):
            if offset >= replayed.start:
                replayed.meet(offset)
        for offset in chosen & offsets:
            if not replayed.is_done(offset):
                replayed.finish(offset)
        finished |= chosen & offsets
        assert {offset for offset in offsets if replayed.is_done(offset)} == finished
        note = replayed.note(position)
        assert note.offset == min(offsets - finished, default=position)
        assert {offset for offset in offsets if replayed.is_done(offset)} == finished

    after = Replayed(note)

    assert {offset for offset in offsets if after.is_done(offset)} == finished


def test_a_note_that_is_not_ours_counts_by_its_offset() -> None:
    """As after a reset of the group's offsets by hand."""
    for text in ("", "someone's", "aioshard-dlt/1 ?", "aioshard-dlt/1 c$}Sp"):
        replayed = Replayed(Committed(7, text))

        assert [replayed.is_done(offset) for offset in (6, 7, 8)] == [True, False, False]


def test_what_is_too_scattered_is_refused_before_it_is_done() -> None:
    chance = random.Random(7)
    replayed = Replayed(None)
    for offset in range(60_000):
        replayed.meet(offset)
    chosen = [offset for offset in range(1, 60_000) if chance.random() < 0.5]

    with pytest.raises(NoteTooLongError):
        replayed.note(60_000, soon=chosen)
    assert len(replayed.note(60_000, soon=chosen[:5000]).metadata) <= LONGEST_NOTE


def test_what_is_done_from_the_start_needs_no_text() -> None:
    replayed = Replayed(None)
    for offset in range(100_000):
        replayed.meet(offset)
        replayed.finish(offset)

    assert replayed.note(100_010) == Committed(100_010, "")
