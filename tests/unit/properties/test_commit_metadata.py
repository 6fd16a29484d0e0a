"""Commit metadata round-trips, fits, and never claims too much."""

import itertools
import random
import time
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioshard.core.commit_metadata import MOST_UNITS, CommitMetadata, FirstCommit
from aioshard.core.finished_offsets import Run, _to_units
from tests.support.offsets import runs_of

offsets = st.integers(0, 1 << 40)
markers = st.none() | st.builds(FirstCommit, st.integers(0, 1 << 20), st.integers(0, 1 << 31))


@st.composite
def runs(draw: st.DrawFn, offset: int, most: int = 200) -> tuple[Run, ...]:
    found = []
    start = offset
    for gap, length in draw(st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(1, 1 << 20)), max_size=most)):
        found.append(Run(start + gap, start + gap + length))
        start += gap + length
    return tuple(found)


@st.composite
def metadata_and_offset(draw: st.DrawFn) -> tuple[CommitMetadata, int]:
    offset = draw(offsets)
    metadata = CommitMetadata(
        first=draw(markers),
        finished=draw(runs(offset)),
    )
    return metadata, offset


def assert_stored(text: str) -> None:
    """Check the limits of every broker with default settings."""
    assert len(text) == len(text.encode("utf-16-le")) // 2 <= MOST_UNITS
    assert "\0" not in text


@given(metadata_and_offset())
def test_metadata_round_trips(case: tuple[CommitMetadata, int]) -> None:
    metadata, offset = case

    text = metadata.text(offset)

    assert_stored(text)
    assert CommitMetadata.read(text, offset) == metadata
    assert CommitMetadata.read(text + "\0", offset) == metadata, "librdkafka appends a NUL"


@pytest.mark.slow
@settings(max_examples=25)  # each writes a full text
@given(offset=offsets, seed=st.integers(), sparse=st.integers(1, 8), first=markers)
def test_offsets_that_do_not_fit_are_dropped_from_the_highest(
    offset: int, seed: int, sparse: int, first: FirstCommit | None
) -> None:
    chosen = random.Random(seed)
    every = runs_of(offset + position for position in range(1, 40_000) if chosen.randrange(sparse + 1))
    metadata = CommitMetadata(first=first, finished=every)

    text = metadata.text(offset)
    read = CommitMetadata.read(text, offset)

    assert_stored(text)
    assert read.finished == every[: len(read.finished)]
    assert (read.first, read.ignored) == (first, ())
    if len(read.finished) < len(every):
        assert len(text) > MOST_UNITS - 100, "there was room"


@given(st.text(max_size=300), offsets)
def test_no_text_raises(text: str, offset: int) -> None:
    CommitMetadata.read(text, offset)


@given(metadata_and_offset(), st.data())
def test_damaged_metadata_raises_nothing_and_can_be_rewritten(
    case: tuple[CommitMetadata, int], data: st.DataObject
) -> None:
    metadata, offset = case
    text = metadata.text(offset)
    position = data.draw(st.integers(0, len(text)))
    other = data.draw(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=3))
    damaged = text[:position] + other + text[position + len(other) :]

    read = CommitMetadata.read(damaged, offset)

    assert read.finished in {(), metadata.finished}, "records that nobody finished would be passed over"
    assert CommitMetadata.read(read.text(offset), offset).finished == read.finished


@given(metadata_and_offset(), offsets)
def test_finished_records_count_only_with_their_own_offset(case: tuple[CommitMetadata, int], elsewhere: int) -> None:
    """Another tool may move the offset and take the text along: then nothing may be passed over."""
    metadata, offset = case

    read = CommitMetadata.read(metadata.text(offset), elsewhere)

    assert read.finished == (metadata.finished if elsewhere == offset else ())
    assert bool(read.ignored) == bool(metadata.finished and elsewhere != offset)


@given(st.sets(st.integers(0, 500)))
def test_runs_hold_exactly_their_offsets(finished: set[int]) -> None:
    found = runs_of(finished)

    assert [offset for run in found for offset in range(*run)] == sorted(finished)
    assert all(run.end < other.start for run, other in itertools.pairwise(found))


def test_the_format_of_live_apps_is_unchanged() -> None:
    assert CommitMetadata(first=FirstCommit(12, 1_750_000_000)).text(7) == "aioshard/1 first=12,1750000000"
    assert CommitMetadata().text(7) == ""


@pytest.mark.parametrize(
    ("finished", "whole"),
    [
        (range(1, 100_001), True),
        (range(1, 100_001, 2), True),
        ([position for position in range(1, 100_001) if position % 331], True),
    ],
    ids=["beyond-one-stuck-record", "alternating", "beyond-300-stuck-records"],
)
def test_metadata_has_room_for_a_hundred_thousand_finished_records(finished: list[int], *, whole: bool) -> None:
    metadata = CommitMetadata(first=FirstCommit(3, 2), finished=runs_of(7 + position for position in finished))

    text = metadata.text(7)

    assert_stored(text)
    assert (CommitMetadata.read(text, 7) == metadata) == whole


@pytest.mark.slow
def test_records_without_room_are_not_searched_for_long() -> None:
    chosen = random.Random(5)
    metadata = CommitMetadata(finished=runs_of(chosen.sample(range(1, 1_000_000), 300_000)))

    began = time.process_time()
    text = metadata.text(0)

    assert time.process_time() - began < 5.0
    assert len(text) > MOST_UNITS - 100


def content(packed: bytes) -> str:
    return f"aioshard/1 done=7:{_to_units(zlib.compress(packed))}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("aioshard/1 first=-3", "damaged"),
        ("aioshard/1 first=99999999999999999999,3", "damaged"),
        ("aioshard/1 first", "damaged"),
        ("aioshard/1 done=?", "damaged"),
        ("aioshard/1 done=5:abc", "written for offset 5"),
        ("aioshard/1 done=7:abc", "unexpected character"),
        ("aioshard/1 done=7:㐀㐀㐀", "inflated"),
        (content(b"\1\2")[:-1], "truncated"),
        (content(b"\1"), "truncated"),
        (content(b"\1\x82"), "truncated"),
        (content(b"\1" + b"\x82" * 20), "too long"),
        (content(b"\1\0"), "invalid runs"),
        (content(b"\1\1\0\1"), "invalid runs"),
    ],
)
def test_damaged_parts_are_ignored_with_a_reason(text: str, reason: str) -> None:
    read = CommitMetadata.read(text, 7)

    assert read == CommitMetadata(ignored=read.ignored)
    assert len(read.ignored) == 1
    assert reason in read.ignored[0]


def test_the_marker_next_to_damaged_parts_counts() -> None:
    read = CommitMetadata.read("aioshard/1 first=3,2 done=7:?", 7)

    assert (read.first, read.finished) == (FirstCommit(3, 2), ())
    assert read.ignored == ("done: damaged: unexpected character",)


@pytest.mark.parametrize("text", ["aioshard/2 what=ever", "aioshard/one", "worker-7"])
def test_future_formats_and_other_programs_are_foreign(text: str) -> None:
    assert CommitMetadata.read(text, 7) == CommitMetadata(foreign=text)


@pytest.mark.parametrize(
    "metadata",
    [
        CommitMetadata(finished=(Run(6, 8),)),
        CommitMetadata(finished=(Run(8, 8),)),
        CommitMetadata(finished=(Run(8, 10), Run(10, 12))),
    ],
)
def test_invalid_metadata_is_not_written(metadata: CommitMetadata) -> None:
    with pytest.raises(ValueError, match="must be ascending"):
        metadata.text(7)
