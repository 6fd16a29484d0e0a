"""The tracker against a naive model, under histories that Hypothesis invents."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from aioshard.core.offsets import OffsetTracker
from aioshard.errors import OffsetRegressionError


class TrackerMachine(RuleBasedStateMachine):
    """The model is a plain set of incomplete offsets, and the position."""

    incomplete = Bundle("incomplete")

    @initialize(start=st.integers(0, 1000))
    def begin(self, start: int) -> None:
        self.tracker: OffsetTracker[int] = OffsetTracker(start)
        self.arrived = 0
        self.model: set[int] = set()
        self.position = start
        self.committable = start
        self.watched = -1

    @rule(target=incomplete, gaps=st.lists(st.integers(0, 5), max_size=6), trailing=st.integers(0, 4))
    def track(self, gaps: list[int], trailing: int) -> object:
        offsets = []
        offset = self.position
        for gap in gaps:
            offsets.append(offset + gap)
            offset += gap + 1
        self.tracker.track(offsets, offsets, offset + trailing)
        self.position = offset + trailing
        self.model.update(offsets)
        self.arrived += len(offsets)
        if self.watched == -1 and offsets:
            self.watched = offsets[0]
        return multiple(*offsets)

    @rule(offset=consumes(incomplete))
    def complete(self, offset: int) -> None:
        reported = self.tracker.complete(offset)
        self.model.remove(offset)
        assert reported == (offset == self.watched)

    @rule()
    def watch(self) -> None:
        self.watched = self.tracker.watch()
        assert self.watched == min(self.model, default=-1)

    @rule(back=st.integers(1, 10))
    def go_back(self, back: int) -> None:
        try:
            self.tracker.track([self.position - back], [0], self.position + 1)
        except OffsetRegressionError:
            return
        raise AssertionError

    @invariant()
    def agrees_with_the_model(self) -> None:
        tracker = self.tracker
        assert tracker.committable == min(self.model, default=self.position)
        assert tracker.completed == self.arrived - len(self.model)
        finished = [offset for run in tracker.finished() for offset in range(*run)]
        assert finished == sorted(set(range(tracker.committable, self.position)) - self.model)
        assert list(tracker.values()) == sorted(self.model)
        assert tracker.oldest == min(self.model, default=None)
        assert tracker.position == self.position

    @invariant()
    def the_committable_offset_never_decreases(self) -> None:
        assert self.tracker.committable >= self.committable
        self.committable = self.tracker.committable


TestTracker = TrackerMachine.TestCase
TestTracker.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
