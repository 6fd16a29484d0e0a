"""The committable offset of one partition."""

import pytest

from aioshard.core.offsets import OffsetTracker
from aioshard.errors import OffsetRegressionError


def tracker_with(*offsets: int, start: int = 0, next_offset: int | None = None) -> OffsetTracker[str]:
    tracker: OffsetTracker[str] = OffsetTracker(start)
    position = offsets[-1] + 1 if next_offset is None else next_offset
    tracker.track(offsets, [f"record {offset}" for offset in offsets], position)
    return tracker


def test_without_records_the_start_is_committable() -> None:
    assert OffsetTracker[str](7).committable == 7


def test_commit_waits_for_the_oldest_incomplete_record() -> None:
    tracker = tracker_with(0, 1, 2)

    tracker.complete(1)
    tracker.complete(2)

    assert tracker.committable == 0


def test_completing_the_oldest_record_passes_all_finished_ones_after_it() -> None:
    tracker = tracker_with(0, 1, 2, 3)
    for offset in (2, 1, 0):
        tracker.complete(offset)

    assert tracker.committable == 3


def test_holes_between_records_are_passed() -> None:
    """Compaction and transaction markers leave them (I10)."""
    tracker = tracker_with(3, 90, 1000, start=1)

    tracker.complete(3)
    assert tracker.committable == 90
    tracker.complete(90)
    assert tracker.committable == 1000


def test_with_nothing_incomplete_the_position_of_the_batch_is_committable() -> None:
    """Otherwise trailing markers would leave a lag forever (I10)."""
    tracker = tracker_with(0, 1, next_offset=5)
    tracker.complete(0)
    tracker.complete(1)

    assert tracker.committable == 5


def test_a_batch_without_records_moves_the_position() -> None:
    tracker = OffsetTracker[str](4)

    tracker.track([], [], next_offset=9)

    assert (tracker.position, tracker.committable) == (9, 9)


@pytest.mark.parametrize(("offsets", "next_offset"), [([4], 6), ([5], 5), ([], 4), ([6, 7], 7)])
def test_going_back_is_refused_and_changes_nothing(offsets: list[int], next_offset: int) -> None:
    """The partition was rewound: its tracker must be replaced, not reused."""
    tracker = OffsetTracker[str](5)

    with pytest.raises(OffsetRegressionError):
        tracker.track(offsets, [""] * len(offsets), next_offset)

    assert (len(tracker), tracker.position) == (0, 5)


def test_a_record_completes_once() -> None:
    tracker = tracker_with(0, 1)
    tracker.complete(0)

    with pytest.raises(KeyError):
        tracker.complete(0)


def test_only_the_completion_of_the_watched_record_is_reported() -> None:
    tracker = tracker_with(0, 1, 2)

    assert tracker.watch() == 0
    assert not tracker.complete(1)
    assert tracker.complete(0)
    assert not tracker.complete(2)


def test_watching_an_empty_tracker_watches_the_next_record() -> None:
    """Else the commit coordinator of a quiet partition would sleep through its next record."""
    tracker = OffsetTracker[str](0)

    assert tracker.watch() == -1
    tracker.track([0, 1], ["a", "b"], 2)

    assert tracker.complete(0)


def test_the_oldest_value_belongs_to_the_blocking_record() -> None:
    tracker = tracker_with(0, 1, 2)
    tracker.complete(0)

    assert tracker.oldest == "record 1"
    assert list(tracker.values()) == ["record 1", "record 2"]
