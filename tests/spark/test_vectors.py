"""Micro-batches and tasks as plain values: complete, disjoint and bounded."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from aioshard.spark.plans import PlannedRange, advanced, ends_of, packed, ranges_between, split, starts_of

RANGES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 300)), min_size=1, max_size=8).map(
    lambda sizes: [
        PlannedRange(topic="ab"[number % 2], partition=number, start=start, end=start + size)
        for number, (start, size) in enumerate(sizes)
    ]
)


def offsets(ranges: list[PlannedRange]) -> Counter[tuple[str, int, int]]:
    return Counter(
        (planned.topic, planned.partition, offset) for planned in ranges for offset in range(planned.start, planned.end)
    )


@given(RANGES, st.integers(1, 200))
def test_batches_cover_everything_once_and_none_is_larger_than_asked(ranges: list[PlannedRange], most: int) -> None:
    at, end = starts_of(ranges), ends_of(ranges)
    found: Counter[tuple[str, int, int]] = Counter()
    batches = 0
    while at != end:
        following = advanced(at, end, most)
        batch = offsets(ranges_between(at, following))
        assert 0 < batch.total() <= most
        found += batch
        at = following
        batches += 1

    assert found == offsets(ranges)
    assert batches == -(-offsets(ranges).total() // most)  # as few as there can be


@given(RANGES, st.integers(1, 10))
def test_packed_tasks_split_no_partition(ranges: list[PlannedRange], tasks: int) -> None:
    found = packed(ranges, tasks)

    assert len(found) == min(tasks, len(ranges))
    assert sorted((planned.topic, planned.partition) for task in found for planned in task) == sorted(
        (planned.topic, planned.partition) for planned in ranges
    )
    assert sum((offsets(task) for task in found), Counter()) == offsets(ranges)


@given(RANGES, st.integers(1, 10))
def test_divided_tasks_are_balanced_and_have_a_partition_once(ranges: list[PlannedRange], tasks: int) -> None:
    found = split(ranges, tasks)
    total = offsets(ranges).total()

    assert sum((offsets(task) for task in found), Counter()) == offsets(ranges)
    for task in found:
        assert offsets(task).total() <= -(-total // tasks)
        assert len({(planned.topic, planned.partition) for planned in task}) == len(task)
