"""Adaptive concurrency: a limit on a handler's concurrent runs that follows what its back end bears.

A back end that serves c runs concurrently answers at its normal latency up to concurrency c, the *knee*. More
concurrency gains nothing: runs queue in the back end, and the latency grows with the concurrency. The limit is kept
where the latency is slightly above that of an idle back end, the *baseline*.

Such algorithms usually fail at measuring the baseline. A consumer with a backlog keeps its back end busy all the time,
so a minimum or a slow average of the latency eventually mistakes the queue for the baseline, and the limit runs away.
So the baseline is measured explicitly: at times that all processes share, the limit is halved for a moment, and halved
again as long as the latency falls with it. That is a *probe*.
"""

import math
from typing import Literal, NamedTuple

from aioshard.core.options import Adaptive

MoveReason = Literal["start", "spare", "queue", "overload", "failures", "probe"]
"""Why the limit moved last: it has not; the latency is that of an idle back end; runs queue there; runs raise
`RetryLater`; no run succeeds; the latency of an idle back end is being measured, or just was."""

_GROWTH = 2.0
"""Growth per round while runs do not queue."""
_LEAST_LEFT = 0.25
"""The smallest share of a limit that remains until the latency falls with it."""
_HALF = 0.5
_HEADROOM = 0.5
"""Runs added to the limit that the latency calls for, so that several processes converge to similar limits."""
_CLEAR = 3.0
"""A latency lower than the baseline by this many standard errors replaces it."""
_DEPENDS = 0.5
"""A latency that changes with at least this power of the limit depends on it: 1 means a queue, 0 independence."""
_FALLS = 0.25
"""The same after a cut; less, because the round before the cut may have begun before the queue."""
_OVERLOADED = 0.02
"""Share of runs that raise `RetryLater` above which the limit falls; fewer say something about single records."""
_LEAST_OVERLOADS = 2
_CALM = 1.5
"""Periods without overload after which the limit may double again."""
_ENOUGH = 16
"""Processed records that a round needs, unless they are rare; or failed runs, if nothing succeeds."""
_PATIENCE = 4.0
"""Multiples of the latency after which a round ends with the records that it has."""
_SETTLING = 1.2
"""Multiples of the latency until a new limit takes effect."""
_SETTLED = 0.2
"""Share of a round that may be older than that without harm."""
_STEP = 2.0
"""Seconds of one step of a probe, or more if the latency is long."""
_EMPTYING = 0.4
"""Share of a step in which the queue empties, before it is measured."""
_STEP_ENDS = 0.9
"""Share of a step after which it may end: `look` is not called on the dot."""
_PERIOD = 8
"""Steps from the start of one probe to the next."""
_QUICK = 1e-6
"""Seconds; a shorter latency counts as this, so that it can be compared."""


class Figures(NamedTuple):
    """Totals of the runs of a handler since it started."""

    at: float
    """The current time in seconds, on a clock that processes share and that never goes back."""
    runs: int
    seconds: float
    """The time of all these runs, also of failed ones."""
    processed: int
    """Records that succeeded."""
    overloads: int
    """Runs that raised `RetryLater`."""

    def since(self, before: "Figures") -> "Round":
        """Return the difference from earlier figures."""
        return Round(
            elapsed=self.at - before.at,
            runs=self.runs - before.runs,
            seconds=self.seconds - before.seconds,
            processed=self.processed - before.processed,
            overloads=self.overloads - before.overloads,
        )


class Move(NamedTuple):
    """The last change of a limit."""

    reason: MoveReason
    before: int
    at: float
    """Time of the change."""
    latency: float | None = None
    """Seconds of work per success at that time; None if unknown."""
    baseline: float | None = None
    """The same with an idle back end."""


class Round(NamedTuple):
    """Figures of a period during which the limit did not change."""

    elapsed: float
    runs: int
    seconds: float
    processed: int
    overloads: int

    @property
    def latency(self) -> float:
        """Seconds of work per success.

        Failed runs make successes dearer: a back end that refuses calls when it is overloaded is slow in this sense.
        Failures that also occur in an idle back end, such as invalid records, are part of the baseline.
        """
        return max(self.seconds / self.processed, _QUICK)

    @property
    def error(self) -> float:
        """Relative standard error of the latency if it varies as much as its mean."""
        return 1 / math.sqrt(self.processed)

    @property
    def used(self) -> float:
        """Average number of concurrent runs."""
        return self.seconds / self.elapsed

    @property
    def is_overload(self) -> bool:
        """Whether the back end says that it is overloaded."""
        return self.overloads >= _LEAST_OVERLOADS and self.overloads > _OVERLOADED * self.runs


class _Cut(NamedTuple):
    """Where the limit was cut, because the latency exceeded the tolerance there."""

    level: float
    latency: float
    """The highest since then."""


class _Probe(NamedTuple):
    """A probe in progress."""

    before: float
    """The level to return to."""
    first: float
    """Latency before the probe."""
    latency: float
    """Latency before its current step."""
    level: float
    """Level before its current step."""
    ends: float
    """Earliest end of the current step."""


class AdaptiveLimit:
    """The concurrency limit of one handler, calculated from the figures of its runs.

    Call `look` about once a second; it has no clock.

    In a round, runs are counted until there are enough to judge the latency. If it is that of an idle back end and the
    limit is used, the limit doubles. If it exceeds the tolerance, the limit becomes the number that should bring it
    back: in a queue, latency is proportional to concurrency.

    Invariants:
        * `minimum <= limit <= maximum`.
        * A limit that is not used does not grow.
        * While the latency does not fall with the limit, at least a quarter of the limit remains until the next probe.
    """

    def __init__(self, adaptive: Adaptive) -> None:
        self.limit = adaptive.beginning
        """The current maximum number of concurrent runs."""
        self.move = Move("start", self.limit, 0.0)
        """The last change."""
        self.latency: float | None = None
        """Seconds of work per success in the last round; None until the first ended."""
        self.baseline: float | None = None
        """The same with an idle back end."""
        self._adaptive = adaptive
        self._level = float(self.limit)
        """The limit before it is rounded."""
        self._looked: float | None = None
        """When it looked last."""
        self._began: Figures | None = None
        """The figures at the beginning of the current round; None before the first."""
        self._settling = 0.0
        """Seconds until the runs of the current limit show, from the beginning of the round."""
        self._cut: _Cut | None = None
        """Set until the latency is accepted, or until the next probe."""
        self._raised_from = self._level
        """The level before it was last raised."""
        self._calm_at = -math.inf
        """When it may double again after an overload."""
        self._probe_is_due = False
        self._probe: _Probe | None = None

    def look(self, now: Figures) -> int:
        """Change the limit if it is time to; return it."""
        if self._begins_period(now.at):
            self._cut = None
            self._probe_is_due = True
        self._looked = now.at
        ended = self._settled_round(now)
        if ended is not None:
            self._decide(ended, now)
        return self.limit

    def _decide(self, ended: Round, now: Figures) -> None:
        # 1. The back end says that it is overloaded.
        if ended.is_overload:
            self._calm_at = now.at + _CALM * self._period
            if self._raised_from >= self._level:
                self._raised_from = self._level * _HALF
            self._set(self._raised_from, "overload", now)
        # 2. Nothing succeeds, so nothing can be measured.
        elif not ended.processed:
            if ended.runs >= _ENOUGH:
                self._set(self._level * _HALF, "failures", now)
        # 3. There are too few records to judge.
        elif ended.processed < _ENOUGH and ended.elapsed < max(_STEP, _PATIENCE * (self.latency or ended.latency)):
            pass
        # 4. A step of a probe ends.
        elif self._probe is not None:
            if now.at >= self._probe.ends:
                self._end_step(self._probe, ended, now)
        # 5. It is time for a probe.
        elif self._probe_is_due and self.baseline is not None:
            self._probe_is_due = False
            self._step(_Probe(self._level, ended.latency, 0.0, 0.0, 0.0), ended, now)
        else:
            self._judge(ended, now)

    # Rounds ------------------------------------------------------------------------

    def _settled_round(self, now: Figures) -> Round | None:
        """Return what happened in the current round; None while runs of the previous limit dominate it."""
        began = self._began
        # 1. It is the first.
        if began is None:
            self._begin_round(now)
            return None
        elapsed = now.at - began.at
        # 2. Such runs still end.
        if elapsed <= self._settling:
            return None
        # 3. They have ended, but are too large a share of it.
        if self._settling > elapsed * _SETTLED:
            self._begin_round(now)
            return None
        return now.since(began)

    def _begin_round(self, now: Figures, settling: float = 0.0) -> None:
        self._began = now
        self._settling = settling

    def _set(self, level: float, reason: MoveReason, now: Figures, settling: float = 0.0) -> None:
        """Change the limit, and begin a round."""
        if reason != "probe":
            self._probe = None
        before = self.limit
        self._level = min(max(level, self._adaptive.minimum), self._adaptive.maximum)
        self.limit = int(self._level + _HALF)
        if self.limit != before:
            self.move = Move(reason, before, now.at, self.latency, self.baseline)
            settling = max(settling, _SETTLING * (self.latency or 0.0))
        self._begin_round(now, settling)

    def _judge(self, ended: Round, now: Figures) -> None:
        """Compare the latency of a round with the baseline."""
        latency = ended.latency
        self.latency = latency
        baseline = latency
        if self.baseline is not None:
            baseline = min(self.baseline, latency * (1 + _CLEAR * ended.error))
        self.baseline = baseline
        tolerance = self._adaptive.tolerance
        excess = latency / baseline
        if excess > tolerance * (1 + ended.error):
            self._cut_down(latency, baseline, now)
            return
        self._cut = None
        level = self._level
        if excess <= math.sqrt(tolerance) and ended.used > level * _HALF and now.at >= self._calm_at:
            self._raised_from = level
            level *= _GROWTH
        self._set(level, "spare", now)

    def _cut_down(self, latency: float, baseline: float, now: Figures) -> None:
        level = self._level
        tolerance = self._adaptive.tolerance
        cut = self._cut
        # 1. The first round above the tolerance, or the latency has fallen with the limit: our runs queue.
        if cut is None or latency <= cut.latency * (level / cut.level) ** _FALLS:
            cut = _Cut(level, latency)
        # 2. It has risen since.
        elif latency > cut.latency * math.sqrt(tolerance):
            cut = cut._replace(latency=latency)
        # 3. It does not depend on the limit: something else is slow, and a probe will find out what that means.
        else:
            self._begin_round(now)
            return
        self._cut = cut
        target = level * tolerance * baseline / latency + _HEADROOM
        self._set(min(max(target, cut.level * _LEAST_LEFT), level), "queue", now)

    # Probes -------------------------------------------------------------------------

    @property
    def _step_seconds(self) -> float:
        """Seconds of a step: the same in processes whose latencies differ a little, so that they probe together."""
        steps = max(_PATIENCE * (self.baseline or 0.0) / _STEP, 1.0)
        return _STEP * 2.0 ** math.ceil(math.log2(steps))

    @property
    def _period(self) -> float:
        """Seconds from the start of one probe to the next."""
        return self._step_seconds * _PERIOD

    def _begins_period(self, now: float) -> bool:
        return self._looked is not None and now // self._period > self._looked // self._period

    def _step(self, probe: _Probe, ended: Round, now: Figures) -> None:
        """Halve the limit, unless so little of it is used that this is a probe in itself."""
        seconds = self._step_seconds
        level = self._level
        self.latency = ended.latency
        self._probe = probe._replace(level=level, latency=ended.latency, ends=now.at + seconds * _STEP_ENDS)
        if ended.used > level * _HALF:
            level *= _HALF
        self._set(level, "probe", now, settling=seconds * _EMPTYING)

    def _end_step(self, probe: _Probe, ended: Round, now: Figures) -> None:
        latency = ended.latency
        tolerance = self._adaptive.tolerance
        # 1. It depends on the limit: this is still a queue.
        fell = math.log(probe.latency / latency) - ended.error
        has_queued = self._level < probe.level and fell > _DEPENDS * math.log(probe.level / self._level)
        # 2. It is higher although the limit is lower: the back end has changed meanwhile.
        has_changed = latency > probe.latency * (1 + ended.error) * math.sqrt(tolerance)
        if has_queued or has_changed:
            self._step(probe, ended, now)
            return
        # 3. It is that of an idle back end.
        self.baseline = latency
        accepted = tolerance * latency / probe.first
        level = probe.before * min(accepted, 1.0)
        if self._level < probe.before:
            # A step too far, which is relatively larger for a low limit: so processes that share a back end converge.
            self._raised_from = level
            level += math.sqrt(level)
        self._probe = None
        self._set(level, "probe", now)
