"""Stored replay progress loses no record and claims none."""

import random

from hypothesis import example, given
from hypothesis import strategies as st

from aioshard.core.commit_metadata import MOST_UNITS, CommitMetadata
from aioshard.core.finished_offsets import Run
from aioshard.dead_letters.progress import ReplayProgress
from aioshard.ports import Committed

OFFSETS = st.sets(st.integers(0, 40) | st.integers(0, 3000), max_size=60)


@example({0, 1}, [{1}])
@example({0, 1, 2}, [{1}, {0}, {2}])
@given(OFFSETS, st.lists(OFFSETS, max_size=4))
def test_exactly_the_records_finished_in_any_run_are_done(offsets: set[int], runs: list[set[int]]) -> None:
    position = max(offsets, default=-1) + 1
    stored: Committed | None = None
    finished: set[int] = set()
    for chosen in runs:
        replayed = ReplayProgress() if stored is None else ReplayProgress(stored)
        for offset in sorted(offsets):
            if offset >= replayed.start:
                replayed.add(offset)
        replayed.finish(chosen & offsets)
        finished |= chosen & offsets
        assert {offset for offset in offsets if replayed.is_done(offset)} == finished
        stored = replayed.commit()
        assert replayed.fits
        assert stored.offset == min(offsets - finished, default=position)
        assert {offset for offset in offsets if replayed.is_done(offset)} == finished

    after = ReplayProgress() if stored is None else ReplayProgress(stored)

    assert {offset for offset in offsets if after.is_done(offset)} == finished


def test_only_the_offset_of_a_foreign_commit_counts() -> None:
    """As after a manual reset of the group's offsets."""
    for text in ("", "someone's", CommitMetadata(finished=(Run(8, 9),)).text(6)):
        replayed = ReplayProgress(Committed(7, text))

        assert [replayed.is_done(offset) for offset in (6, 7, 8)] == [True, False, False]


def test_progress_that_does_not_fit_is_detected() -> None:
    chance = random.Random(7)
    replayed = ReplayProgress()
    for offset in range(120_000):
        replayed.add(offset)
    chosen = [offset for offset in range(1, 120_000) if chance.random() < 0.5]

    replayed.finish(chosen[:5000])
    assert len(replayed.commit().metadata) <= MOST_UNITS
    assert replayed.fits

    replayed.finish(chosen[5000:])
    assert len(replayed.commit().metadata) <= MOST_UNITS
    assert not replayed.fits


def test_a_fully_replayed_prefix_needs_no_metadata() -> None:
    replayed = ReplayProgress()
    for offset in range(100_000):
        replayed.add(offset)
        replayed.finish([offset])

    assert replayed.commit() == Committed(100_000, "")


@given(OFFSETS, OFFSETS, OFFSETS)
def test_dead_letters_that_were_not_read_can_be_done_too(offsets: set[int], read: set[int], chosen: set[int]) -> None:
    """As if some were sent by their positions: the others before them stay due."""
    replayed = ReplayProgress()
    for offset in sorted(offsets & read):
        replayed.add(offset)
    due_below = max(offsets & read, default=-1) + 1
    replayed.finish(offsets & chosen)

    after = ReplayProgress(replayed.commit())

    known = {offset for offset in offsets if offset in read or offset >= due_below}
    assert {offset for offset in known if after.is_done(offset)} == known & chosen


@example(set(range(10)), {2, 3, 4, 5, 6}, {4})
@given(OFFSETS, OFFSETS, OFFSETS)
def test_a_dead_letter_is_done_if_any_commit_says_so(offsets: set[int], first: set[int], second: set[int]) -> None:
    commits = []
    for chosen in (first, second):
        replayed = ReplayProgress()
        for offset in sorted(offsets):
            replayed.add(offset)
        replayed.finish(offsets & chosen)
        commits.append(replayed.commit())

    both = ReplayProgress(*commits)

    assert {offset for offset in offsets if both.is_done(offset)} == offsets & (first | second)


def test_the_progress_after_a_transaction_leaves_the_one_before_it_alone() -> None:
    """The transaction may fail."""
    replayed = ReplayProgress()
    replayed.add(3)

    after = replayed.after([3, 9])
    after.add(20)

    assert [replayed.is_done(offset) for offset in (3, 9)] == [False, False]
    assert [after.is_done(offset) for offset in (3, 9, 20)] == [True, True, False]
