"""Data shared with other threads is read in one step of the interpreter."""

import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import Any, TypeVar

import pytest

from aioshard.core.offsets import OffsetTracker
from aioshard.core.parking import ParkedEntry, ParkedKeys

T = TypeVar("T")


def changed_before_every_step(read: Callable[[], T], change: Callable[[], object]) -> T:
    """Return the results of *read* when *change* runs before every bytecode, as another thread may at any of them."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            change()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return read()
    finally:
        sys.settrace(before)


@pytest.fixture
def tracker() -> OffsetTracker[str]:
    tracker = OffsetTracker[str](0)
    tracker.track([0, 1], ["0", "1"], 2)
    return tracker


@pytest.fixture
def advance(tracker: OffsetTracker[str]) -> Callable[[], None]:
    """One record comes, and the oldest one completes."""
    numbers: Iterator[int] = count(2)

    def change() -> None:
        number = next(numbers)
        tracker.track([number], [str(number)], number + 1)
        tracker.complete(number - 2)

    return change


def test_the_oldest_record_is_found_in_one_step(tracker: OffsetTracker[str], advance: Callable[[], None]) -> None:
    oldest = changed_before_every_step(lambda: tracker.oldest, advance)
    assert oldest is not None
    assert 0 < int(oldest) <= tracker.committable


def test_the_committable_offset_is_found_in_one_step(tracker: OffsetTracker[str], advance: Callable[[], None]) -> None:
    committable = changed_before_every_step(lambda: tracker.committable, advance)
    assert 0 < committable <= tracker.committable


def test_the_first_parked_records_are_found_in_one_step() -> None:
    parked, numbers = ParkedKeys(), count(2)

    def park(number: int) -> None:
        parked.add(ParkedEntry(number, str(number), generation=1, stored_at=number, due=0.0, retries=0))

    def change() -> None:
        number = next(numbers)
        park(number)
        parked.remove(number - 2)

    park(0)
    park(1)
    assert len(changed_before_every_step(lambda: parked.heads(2), change)) <= 2
