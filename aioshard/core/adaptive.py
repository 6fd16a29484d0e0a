"""Adaptive concurrency: a limit on a handler's concurrent runs that follows the latency of its back end.

A back end that serves c runs concurrently answers at its normal latency up to concurrency c, the *knee*. More
concurrency gains nothing: runs queue in the back end, and the latency grows with the concurrency. The limit is kept
where the latency is slightly above that of an idle back end, the *baseline*.

Such algorithms usually fail at measuring the baseline. A consumer with a backlog keeps its back end busy all the time,
so a minimum or a slow average of the latency eventually mistakes the queue for the baseline, and the limit runs away.
So the baseline is measured explicitly: at times that all processes share, the limit is halved for a moment, and halved
again as long as the latency falls with it.
"""

import dataclasses
import math
from typing import NamedTuple

from aioshard.core.options import check, is_number, is_whole

_INITIAL = 8
_MOST_TOLERANCE = 10.0

_GROWTH = 1.3
"""Growth per round while no queue builds up."""
_CUT = 0.75
"""The smallest share of a limit that remains after a round with a queue."""
_HEADROOM = 0.5
"""Runs added to the limit that the latency calls for, so that several processes converge to similar limits."""
_UNVERIFIED = 0.2
"""The smallest share of a limit that remains until the baseline is measured again."""
_USE = 1.5
"""A limit grows to at most this multiple of the concurrency in use."""
_MOST_FAILURES = 9
"""Failures per success from which nothing can be measured: the limit falls until runs succeed again."""

_FEWEST_RUNS, _MANY_RUNS = 8, 128
"""Runs that a round needs, unless they are rare, and runs that always are enough."""
_SURE = 0.05
"""A standard error of the logarithm of latency that is always small enough."""
_CLEAR = 3.0
"""At this many standard errors, a latency is clearly above the baseline."""
_PHASE, _PHASE_LATENCIES = 0.5, 4.0
"""Seconds, or multiples of the latency, after which a round ends with the runs it has.

A step of a probe takes as long: one half to let the queue empty, one half to measure. A step lasts at least this many
latencies, and then 2, 4, 8, … times the seconds, so that processes with slightly different latencies still probe
together."""
_SETTLING = 1.2
"""Multiples of the latency until a new limit takes effect."""
_PERIOD = 16
"""Steps from the start of one probe to the next: a sixteenth of the time runs at half the limit."""
_DEPTH = 0.5
_DEPENDS = 0.5
"""A latency that changes with at least this power of the limit depends on it: 1 means a queue, 0 independence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Adaptive:
    """Concurrency that adapts to the capacity of the back end: `concurrency=Adaptive(1, 512)`.

    The handler runs as many records concurrently as the back end serves without queueing. The limit is found by
    latency, continuously: it grows while the latency is that of an idle back end, and shrinks when runs begin to queue
    there. Every 8 seconds it is halved for half a second to measure the latency of an idle back end (less often if
    runs take longer than an eighth of a second). All processes do this at the same time, by the system clock, so that
    none mistakes the queue of another for the back end itself: keep their clocks within a tenth of a second.

    Attributes:
        minimum: Lowest concurrency.
        maximum: Highest concurrency.
        initial: Concurrency at the start; None means 8, or the allowed value nearest to it. Better too low than too
            high.
        tolerance: Accepted latency, as a multiple of that of an idle back end. If a back end becomes slower
            gradually, instead of queueing at one point, a higher tolerance gives more throughput.

    Raises:
        HandlerError: If a value is outside its range.

    Example:
        >>> Adaptive(1, 512)
        Adaptive(minimum=1, maximum=512, initial=None, tolerance=1.2)
    """

    minimum: int
    maximum: int
    initial: int | None = None
    tolerance: float = 1.2

    def __post_init__(self) -> None:
        least, most, initial = self.minimum, self.maximum, self.initial
        check(self, "minimum", is_whole(least), "a whole number of at least 1")
        check(self, "maximum", is_whole(most, least), f"a whole number, at least {least}")
        is_valid = initial is None or (is_whole(initial, least) and initial <= most)
        check(self, "initial", is_valid, f"one from {least} to {most}")
        is_valid = is_number(self.tolerance) and 1.0 < self.tolerance <= _MOST_TOLERANCE
        check(self, "tolerance", is_valid, f"more than 1, and at most {_MOST_TOLERANCE:g}")

    @property
    def beginning(self) -> int:
        """Concurrency at the start."""
        return self.initial if self.initial is not None else min(max(_INITIAL, self.minimum), self.maximum)


@dataclasses.dataclass(slots=True)
class _Runs:
    """The runs that ended within a period.

    Latencies are averaged as logarithms, so one run in a hundred that takes a hundred times as long hides nothing.
    """

    count: int = 0
    """Successful runs."""
    failed: int = 0
    total: float = 0.0
    """Sum of the logarithms of their durations; `squares` is the sum of the squares of these."""
    squares: float = 0.0
    busy: float = 0.0
    """Total seconds of all runs, including failed ones."""

    @property
    def latency(self) -> float:
        """Logarithm of the seconds per success.

        Failures make a success more expensive, so a back end that rejects overload counts as slow. Failures that also
        happen in an idle back end, such as invalid records, have no effect: they are part of the baseline.
        """
        return self.total / self.count + math.log1p(self.failed / self.count)

    @property
    def error(self) -> float:
        """Standard error of `latency`."""
        mean = self.total / self.count
        variance = max(self.squares / self.count - mean * mean, 0.0) + self.failed / self.count
        return math.sqrt(variance / max(self.count - 1, 1))


class _Probe(NamedTuple):
    """One step of a probe, a period with a lowered limit."""

    before: float
    """The level to return to."""
    latency: float
    """At the previous step, or before the first one."""
    limit: int
    """The limit before the step."""
    ends: float


class LatencyGradient:
    """The concurrency limit of one handler, computed from the latencies of its runs.

    Report each run that ended, and call `look` ten times a second. It has no clock: pass times as seconds on a
    monotonic clock that the processes share.

    It collects runs in rounds. Below the tolerance the limit grows. Above it the limit becomes the one that would bring
    the latency back to the tolerance: in a queue they are proportional. An unused limit does not grow.

    Invariants:
        * `minimum <= limit <= maximum`.
        * The limit falls by at most four fifths before the baseline is measured again.
    """

    def __init__(self, adaptive: Adaptive) -> None:
        self.limit = adaptive.beginning
        """Number of runs that may be in flight now."""
        self._adaptive = adaptive
        self._tolerance = math.log(adaptive.tolerance)
        self._level = float(self.limit)
        self._runs = _Runs()
        self._since: float | None = None
        """When the current round began; None before the first one."""
        self._settled = 0.0
        """When the last change of the limit has taken effect; nothing is collected until then."""
        self._baseline: float | None = None
        self._latency = -math.inf
        """Logarithm of the recent seconds per success."""
        self._used = 0.0
        self._peak: float | None = None
        """The level before the limit began to fall; None unless it is falling."""
        self._probe: _Probe | None = None

    @property
    def baseline(self) -> float | None:
        """Seconds per success when the back end is idle; None until it has been measured."""
        return None if self._baseline is None else math.exp(self._baseline)

    def ended(self, seconds: float) -> None:
        """Record a run that succeeded, or timed out, after *seconds*."""
        runs = self._runs
        logarithm = math.log(seconds + 1e-6)
        runs.count += 1
        runs.total += logarithm
        runs.squares += logarithm * logarithm
        runs.busy += seconds

    def failed(self, seconds: float) -> None:
        """Record a run that failed after *seconds*; its duration does not count as a latency."""
        self._runs.failed += 1
        self._runs.busy += seconds

    def look(self, now: float) -> int:
        """Adjust the limit if it is time to; return the limit."""
        if self._since is None or self._since < self._settled <= now:
            self._collect(now)
        elif self._probe is None and self._probe_is_due(now):
            self._begin_step(self._level, self._latency, now)
        elif now < self._settled:
            return self.limit
        elif self._probe is not None:
            self._look_at_probe(self._probe, now)
        elif self._enough(now - self._since):
            self._decide(now, now - self._since)
        return self.limit

    # Rounds ------------------------------------------------------------------------

    def _collect(self, now: float) -> None:
        self._since = now
        self._runs = _Runs()

    def _enough(self, elapsed: float) -> bool:
        """Whether the runs of a round are enough to decide."""
        runs = self._runs
        ended = runs.count + runs.failed
        if ended < 2 or not elapsed:  # noqa: PLR2004 - one has no spread
            return False
        patience = max(_PHASE, _PHASE_LATENCIES * runs.busy / ended)
        if ended < _FEWEST_RUNS:
            return elapsed > 2 * patience
        return ended >= _MANY_RUNS or elapsed > patience or (runs.count > 1 and runs.error <= _SURE)

    def _decide(self, now: float, elapsed: float) -> None:
        runs, level = self._runs, self._level
        self._collect(now)
        if runs.count < 2 or runs.failed > runs.count * _MOST_FAILURES:  # noqa: PLR2004 - one has no spread
            self._set(level * _CUT, now)
            return
        self._used = runs.busy / elapsed
        self._latency = runs.latency
        if self._baseline is None:
            self._baseline = self._latency
            self._begin_step(level, self._latency, now)
            return
        self._baseline = min(self._baseline, self._latency + _CLEAR * runs.error)
        excess = max(self._latency - self._baseline - runs.error, 0.0)
        if excess <= self._tolerance:
            self._peak = None
        elif self._peak is None:
            self._peak = level
        if excess <= self._tolerance / 2:
            self._set(min(max(level * _GROWTH, level + 1), max(level, self._used * _USE + 1)), now)
            return
        used = min(level, max(self._used, _CUT * level))
        floor = 0.0 if self._peak is None else min(self._peak * _UNVERIFIED, level)
        self._set(max(used * math.exp(self._tolerance - excess) + _HEADROOM, level * _CUT, floor), now)

    def _set(self, level: float, now: float) -> None:
        previous = self.limit
        self._level = min(max(level, self._adaptive.minimum), self._adaptive.maximum)
        self.limit = int(self._level + 0.5)
        if self.limit != previous:
            self._settled = now + _SETTLING * math.exp(self._latency)

    # Probes -------------------------------------------------------------------------

    @property
    def _phase(self) -> float:
        steps = max(_PHASE_LATENCIES * math.exp(self._latency) / _PHASE, 1.0)
        return _PHASE * 2.0 ** math.ceil(math.log2(steps))

    def _probe_is_due(self, now: float) -> bool:
        phase = self._phase
        if self._baseline is None or not self._runs.count or now % (phase * _PERIOD) >= phase / 2:
            return False
        if self._peak is None and self._used <= self.limit * _DEPTH:
            self._baseline = self._latency  # so few concurrent runs are a probe in themselves
            return False
        return True

    def _begin_step(self, before: float, latency: float, now: float) -> None:
        self._probe = _Probe(before, latency, self.limit, now + self._phase)
        self._set(self._level * _DEPTH, now)
        self._settled = now + self._phase / 2

    def _look_at_probe(self, probe: _Probe, now: float) -> None:
        runs = self._runs
        if now < probe.ends or (runs.count < _FEWEST_RUNS and now < probe.ends + 4 * self._phase):
            return
        level, baseline = probe.before, self._baseline
        if runs.count >= 2 and baseline is not None:  # noqa: PLR2004 - otherwise nothing runs, or nothing succeeds
            change = abs(probe.latency - runs.latency) - runs.error
            if self.limit < probe.limit and change > _DEPENDS * math.log(probe.limit / self.limit):
                self._begin_step(level, runs.latency, now)  # a latency that rose meanwhile has to be checked again, too
                return
            level = self._verified(level, baseline, runs)
        self._probe = self._peak = None
        self._collect(now)
        self._set(level, now)

    def _verified(self, level: float, previous: float, runs: _Runs) -> float:
        """Accept the latency of a probe as the baseline, as it no longer depends on the limit; return the new level."""
        # A difference within the error may be chance: take the mean of both.
        apart = abs(runs.latency - previous) > 2 * runs.error
        self._baseline = runs.latency if apart else (runs.latency + previous) / 2
        if self._peak is not None and self._baseline - previous > (self._latency - previous) / 2:
            return self._peak  # the back end became slower, and not because of us: the limit was lowered for nothing
        return level * math.exp(min(self._tolerance - (self._latency - self._baseline), 0.0))
