"""Outputs of a transaction: each is visible exactly once and in key order, for any amount that fits into the text."""

import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import Run, holds
from aioshard.core.publishing import Span, coverage
from tests.support.offsets import runs_of

RECORDS = 40
KEYS = 7


class World:
    """A partition whose records publish one output each, in transactions of a process that crashes now and then."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.offset = 0
        self.listed: tuple[Run, ...] = ()
        self.room = RECORDS
        self.visible: list[int] = []
        self.crash()

    def crash(self) -> None:
        self.published = self.listed
        self.incomplete = {
            offset for offset in range(RECORDS) if offset >= self.offset and not holds(self.listed, offset)
        }
        self.waiting: list[tuple[Span, list[int]]] = []

    def complete(self, most: int) -> None:
        """Complete some records that are the oldest of their keys, in one batch."""
        heads = {offset % KEYS: offset for offset in sorted(self.incomplete, reverse=True)}
        batch = self.chance.sample(sorted(heads.values()), min(most, len(heads)))
        if batch:
            self.incomplete -= set(batch)
            self.waiting.append((Span(min(batch), max(batch)), batch))

    def text(self, offset: int, runs: tuple[Run, ...]) -> str | None:
        assert all(run.start > offset for run in runs)
        return f"{offset}" if len(runs) <= self.room else None

    def transact(self) -> None:
        committable = min(self.incomplete, default=RECORDS)
        finished = runs_of(offset for offset in range(committable, RECORDS) if offset not in self.incomplete)
        spans = [span for span, _ in self.waiting]
        covered = coverage(committable, finished, self.published, lambda: spans, self.text)
        if covered is None:
            return
        assert self.offset <= covered.offset <= committable
        assert len(covered.listed) <= self.room
        for span, batch in self.waiting:
            if covered.covers(span):
                self.visible += batch
        self.waiting = [entry for entry in self.waiting if not covered.covers(entry[0])]
        self.offset, self.listed = covered.offset, covered.listed
        self.published = covered.listed


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), batch=st.integers(1, 4), room=st.integers(0, 6))
def test_every_output_is_visible_once_and_in_key_order(seed: int, batch: int, room: int) -> None:
    chance = random.Random(seed)
    world = World(chance)
    for _ in range(150):
        world.room = room if chance.random() < 0.9 else chance.randint(0, RECORDS)  # another broker
        event = chance.random()
        if event < 0.6:
            world.complete(chance.randint(1, batch))
        elif event < 0.95:
            world.transact()
        else:
            world.crash()
    world.room = room
    while world.incomplete:
        world.complete(batch)
    world.transact()

    assert sorted(world.visible) == list(range(RECORDS))
    by_key = defaultdict(list)
    for offset in world.visible:
        by_key[offset % KEYS].append(offset)
    assert all(offsets == sorted(offsets) for offsets in by_key.values())


def whole(offset: int, runs: tuple[Run, ...], most: int) -> str | None:
    return CommitMetadata(finished=runs).whole_text(offset, most)


def test_the_lowest_completions_come_first_and_published_ones_stay() -> None:
    finished = runs_of(random.Random(7).sample(range(1, 2_000), 1_000))
    published = finished[-1:]

    covered = coverage(0, finished, published, list, lambda offset, runs: whole(offset, runs, 60))

    assert covered is not None
    assert covered.listed[-1] == published[0]
    assert covered.listed[:-1] == finished[: len(covered.listed) - 1]
    assert CommitMetadata.read(covered.text, 0).finished == covered.listed
    assert 1 < len(covered.listed) < len(finished)
    first, (last, _), (uncovered, _) = finished[0], covered.listed[-2], finished[len(covered.listed) - 1]
    assert covered.covers(Span(first.start, last))
    assert covered.covers(Span(published[0].start, published[0].start))
    assert not covered.covers(Span(uncovered, uncovered))


def test_without_any_text_only_records_below_the_offset_are_covered() -> None:
    covered = coverage(5, [Run(6, 9)], [], lambda: [Span(6, 6)], lambda offset, runs: whole(offset, runs, 0))

    assert covered is not None
    assert (covered.offset, covered.text, covered.listed) == (5, "", ())
    assert covered.covers(Span(4, 4))
    assert not covered.covers(Span(6, 6))


def test_a_batch_that_is_not_covered_as_a_whole_holds_the_offset_back() -> None:
    spans = [Span(3, 8), Span(2, 2)]
    covered = coverage(5, [Run(6, 9)], [], lambda: spans, lambda offset, runs: whole(offset, runs, 0))

    assert covered is not None
    assert covered.offset == 3
    assert not covered.covers(Span(3, 8))
    assert covered.covers(Span(2, 2))


@pytest.mark.parametrize("most", [0, 20])
def test_published_completions_that_cannot_be_listed_allow_no_transaction(most: int) -> None:
    published = runs_of(range(1, 400, 2))

    assert coverage(0, published, published, list, lambda offset, runs: whole(offset, runs, most)) is None
