"""Stored replay progress loses no record and claims none."""

import random

from hypothesis import example, given
from hypothesis import strategies as st

from aioshard.cli.dlt import ReplayedOffsets
from aioshard.core.commit_metadata import MOST_UNITS, CommitMetadata
from aioshard.core.finished_offsets import Run
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
        replayed = ReplayedOffsets(stored)
        for offset in sorted(offsets):
            if offset >= replayed.start:
                replayed.add(offset)
        for offset in chosen & offsets:
            replayed.finish(offset)
        finished |= chosen & offsets
        assert {offset for offset in offsets if replayed.is_done(offset)} == finished
        stored = replayed.commit()
        assert replayed.fits
        assert stored.offset == min(offsets - finished, default=position)
        assert {offset for offset in offsets if replayed.is_done(offset)} == finished

    after = ReplayedOffsets(stored)

    assert {offset for offset in offsets if after.is_done(offset)} == finished


def test_only_the_offset_of_a_foreign_commit_counts() -> None:
    """As after a manual reset of the group's offsets."""
    for text in ("", "someone's", CommitMetadata(finished=(Run(8, 9),)).text(6)):
        replayed = ReplayedOffsets(Committed(7, text))

        assert [replayed.is_done(offset) for offset in (6, 7, 8)] == [True, False, False]


def test_progress_that_does_not_fit_is_detected() -> None:
    chance = random.Random(7)
    replayed = ReplayedOffsets(None)
    for offset in range(120_000):
        replayed.add(offset)
    chosen = [offset for offset in range(1, 120_000) if chance.random() < 0.5]

    for offset in chosen[:5000]:
        replayed.finish(offset)
    assert len(replayed.commit().metadata) <= MOST_UNITS
    assert replayed.fits

    for offset in chosen[5000:]:
        replayed.finish(offset)
    assert len(replayed.commit().metadata) <= MOST_UNITS
    assert not replayed.fits


def test_a_fully_replayed_prefix_needs_no_metadata() -> None:
    replayed = ReplayedOffsets(None)
    for offset in range(100_000):
        replayed.add(offset)
        replayed.finish(offset)

    assert replayed.commit() == Committed(100_000, "")
