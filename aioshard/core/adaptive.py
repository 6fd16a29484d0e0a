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

from aioshard.errors import HandlerError

__all__ = ["Adaptive", "LatencyGradient"]

_INITIAL = 8

_GROWTH, _GROWTH_RISE, _FASTEST_GROWTH = 1.2, 1.15, 1.5
"""Growth per round while no queue builds up; it accelerates from round to round."""
_FIRST_CUT, _CUT = 0.8, 0.5
"""The smallest share of a limit that remains after a first round above the knee, and after each further one."""
_HEADROOM = 0.5
"""Runs added to the limit that the latency calls for, so that several processes converge to similar limits."""
_UNVERIFIED = 0.2
"""The smallest share of a limit that remains while the latency does not fall with it."""
_USE = 1.5
"""A limit grows to at most this multiple of the concurrency in use."""
_BACKING_OFF = 0.9
"""Share of failures from which nothing can be measured: the limit falls until runs succeed again."""

_FEWEST_RUNS, _MANY_RUNS = 8, 128
_SURE = 0.05
"""A standard error of the logarithm of latency that is always small enough."""
_CLEAR = 3.0
"""At this many standard errors from the tolerance, it is clear on which side the latency is."""
_ROUND, _ROUND_LATENCIES = 0.5, 4.0
"""Seconds, or multiples of the latency, after which a round ends with the runs it has."""
_SETTLING = 1.2
"""Multiples of the latency until a new limit takes effect."""

_PHASE, _PHASE_LATENCIES = 0.5, 4.0
"""Seconds of one step of a probe: one half to let the queue empty, one half to measure. A step lasts at least this
many latencies, and then 2, 4, 8, … times the seconds, so that processes with slightly different latencies still probe
together."""
_PERIOD = 16
"""Steps from the start of one probe to the next: a sixteenth of the time runs at half the limit."""
_DEPTH = 0.5
_DEPENDS = 0.5
"""A latency that changes with at least this power of the limit depends on it: 1 means a queue, 0 independence."""
_PATIENCE = 4
"""Steps by which a probe may be extended if runs are rare."""


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
        least, most, initial, tolerance = self.minimum, self.maximum, self.initial, self.tolerance
        if type(least) is not int or least < 1:
            raise HandlerError(f"Adaptive(minimum={least!r}) was refused: expected a whole number of at least 1")
        if type(most) is not int or most < least:
            raise HandlerError(f"Adaptive(maximum={most!r}) was refused: expected a whole number, at least {least}")
        if initial is not None and (type(initial) is not int or not least <= initial <= most):
            raise HandlerError(f"Adaptive(initial={initial!r}) was refused: expected one from {least} to {most}")
        if type(tolerance) not in (int, float) or not 1.0 < tolerance <= 10.0:  # noqa: PLR2004 - the sentence says it
            raise HandlerError(f"Adaptive(tolerance={tolerance!r}) was refused: expected more than 1, and at most 10")

    @property
    def beginning(self) -> int:
        """Concurrency at the start."""
        return self.initial if self.initial is not None else min(max(_INITIAL, self.minimum), self.maximum)


class _Runs:
    """The runs that ended within a period.

    Latencies are averaged as logarithms, so one run in a hundred that takes a hundred times as long hides nothing.
    """

    __slots__ = ("busy", "count", "failed", "squares", "total")

    def __init__(self) -> None:
        self.count = self.failed = 0
        self.total = self.squares = 0.0
        self.busy = 0.0
        """Total seconds of all runs, including failed ones."""

    @property
    def seconds(self) -> float:
        """Geometric mean of the duration of a run."""
        return math.exp(self.total / self.count)

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


class _Probe:
    """A period with a lowered limit, in steps."""

    __slots__ = ("before", "ends", "latency", "limit", "phase")

    def __init__(self, before: float, latency: float) -> None:
        self.before = before
        """The level to return to."""
        self.latency = latency
        """At the previous step, or before the first one."""
        self.limit = 0
        self.phase = self.ends = 0.0


class _Descent:
    """The fall of the limit since the latency rose."""

    __slots__ = ("latency", "level", "peak")

    def __init__(self, level: float, latency: float) -> None:
        self.peak = level
        """The level at its start."""
        self.level, self.latency = level, latency
        """The level at which the latency was highest, and that latency."""

    def floor(self, level: float, latency: float) -> float:
        """Return the lowest limit to which the fall from *level*, with the measured *latency*, may go.

        A latency that does not fall with the limit is not our queue. The next probe, at which the other processes
        lower their limits too, then finds out the cause.
        """
        if latency >= self.latency:
            self.level, self.latency = level, latency
        elif self.latency - latency > _DEPENDS * math.log(self.level / level):
            return 0.0
        return self.peak * _UNVERIFIED


class LatencyGradient:
    """The concurrency limit of one handler, computed from the latencies of its runs.

    Report each run that ended, and call `look` ten times a second. It has no clock: pass times as seconds on a
    monotonic clock that the processes share.

    It collects runs in rounds, until it is clear on which side of the tolerance the latency is, or until a timeout.
    Below the tolerance the limit grows, by 20 % or more. Above it the limit becomes the one that would bring the
    latency back to the tolerance: in a queue they are proportional. An unused limit does not grow.

    Invariants:
        * `minimum <= limit <= maximum`.
        * While the latency does not fall with it, the limit falls by at most four fifths before the baseline is
          measured again.
    """

    def __init__(self, adaptive: Adaptive) -> None:
        self.limit = adaptive.beginning
        """Number of runs that may be in flight now."""
        self._minimum, self._maximum = adaptive.minimum, adaptive.maximum
        self._tolerance = math.log(adaptive.tolerance)
        self._level = float(self.limit)
        self._runs = _Runs()
        self._since: float | None = None
        """When the current round began; None before the first one."""
        self._settled: float | None = None
        """When a new limit will have taken effect; nothing is collected until then."""
        self._baseline: float | None = None
        self._latency = 0.0
        self._seconds = 0.0
        self._used = 0.0
        self._growth = _FASTEST_GROWTH
        self._cuts = 0
        self._descent: _Descent | None = None
        self._probe: _Probe | None = None
        self._probed_at = -math.inf

    @property
    def baseline(self) -> float | None:
        """Seconds per success when the back end is idle; None until it has been measured."""
        return None if self._baseline is None else math.exp(self._baseline)

    @property
    def latency(self) -> float | None:
        """Recent seconds per success; None until there were some."""
        return math.exp(self._latency) if self._since is not None and self._seconds else None

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
        if self._since is None:
            self._collect(now)
        elif self._probe is None and self._probe_is_due(now):
            self._begin_probe(now)
        elif self._settled is not None:
            if now >= self._settled:
                self._collect(now)
        elif self._probe is not None:
            self._look_at_probe(self._probe, now)
        elif self._enough(now - self._since):
            runs, elapsed = self._runs, now - self._since
            self._collect(now)
            self._decide(runs, elapsed, now)
        return self.limit

    # Rounds ------------------------------------------------------------------------

    def _collect(self, now: float) -> None:
        self._since = now
        self._settled = None
        self._runs = _Runs()

    def _enough(self, elapsed: float) -> bool:
        """Whether the runs of a round are enough to decide."""
        runs = self._runs
        ended = runs.count + runs.failed
        if not elapsed:
            return False
        if ended < _FEWEST_RUNS:
            return ended > 1 and elapsed > 2 * max(_ROUND, _ROUND_LATENCIES * runs.busy / ended)
        if runs.count < 2 or ended >= _MANY_RUNS:  # noqa: PLR2004 - one has no spread
            return True
        error = runs.error
        if error <= _SURE:
            return True
        if self._baseline is not None and abs(runs.latency - self._baseline - self._tolerance) > _CLEAR * error:
            return True
        return elapsed > max(_ROUND, _ROUND_LATENCIES * runs.seconds)

    def _decide(self, runs: _Runs, elapsed: float, now: float) -> None:
        self._used = runs.busy / elapsed
        if runs.count < 2 or runs.failed > runs.count * _BACKING_OFF / (1 - _BACKING_OFF):  # noqa: PLR2004
            self._set(self._level * _FIRST_CUT, now)
            return
        self._latency, self._seconds = runs.latency, runs.seconds
        if self._baseline is None:
            self._baseline = self._latency
            self._begin_probe(now)
            return
        self._baseline = min(self._baseline, self._latency + _CLEAR * runs.error)
        excess = max(self._latency - self._baseline - runs.error, 0.0)
        if excess <= self._tolerance:
            self._descent = None
        elif self._descent is None:
            self._descent = _Descent(self._level, self._latency)
        level = self._level
        if excess <= self._tolerance / 2:
            self._growth = min(self._growth * _GROWTH_RISE, _FASTEST_GROWTH)
            target = max(level * self._growth, level + 1)
        else:
            self._growth = _GROWTH
            used = min(level, max(self._used, _FIRST_CUT * level))
            target = used * math.exp(self._tolerance - excess) + _HEADROOM
        if target >= level:
            self._cuts = 0
            self._set(min(target, max(level, self._used * _USE + 1)), now)
        else:
            self._cuts += 1
            target = max(target, level * (_FIRST_CUT if self._cuts == 1 else _CUT))
            if self._descent is not None:
                target = max(target, min(self._descent.floor(level, self._latency), level))
            self._set(target, now)

    def _set(self, level: float, now: float) -> None:
        before = self.limit
        self._level = min(max(level, self._minimum), self._maximum)
        self.limit = int(self._level + 0.5)
        if self.limit != before:
            self._settled = now + _SETTLING * self._seconds

    # Probes -------------------------------------------------------------------------

    def _phase(self) -> float:
        steps = max(_PHASE_LATENCIES * self._seconds / _PHASE, 1.0)
        return _PHASE * 2.0 ** math.ceil(math.log2(steps))

    def _probe_is_due(self, now: float) -> bool:
        if self._baseline is None or not self._runs.count:
            return False
        phase = self._phase()
        if now % (phase * _PERIOD) >= phase / 2 or now - self._probed_at < phase:
            return False
        if self._descent is None and self._used <= self.limit * _DEPTH:
            # So few concurrent runs are a probe in themselves.
            self._probed_at = now
            self._baseline = self._latency
            return False
        return True

    def _begin_probe(self, now: float) -> None:
        self._probed_at = now
        self._probe = _Probe(self._level, self._latency)
        self._step(self._probe, now)

    def _step(self, probe: _Probe, now: float) -> None:
        probe.limit = self.limit
        probe.phase = self._phase()
        probe.ends = now + probe.phase
        self._set(self._level * _DEPTH, now)
        self._settled = now + probe.phase / 2

    def _look_at_probe(self, probe: _Probe, now: float) -> None:
        runs = self._runs
        if now < probe.ends or (runs.count < _FEWEST_RUNS and now < probe.ends + _PATIENCE * probe.phase):
            return
        if runs.count < 2:  # noqa: PLR2004 - nothing runs any more, or nothing succeeds
            self._end_probe(probe.before, now)
            return
        before, probe.latency = probe.latency, runs.latency
        self._seconds = runs.seconds
        change = abs(before - probe.latency) - runs.error
        if self.limit < probe.limit and change > _DEPENDS * math.log(probe.limit / self.limit):
            self._step(probe, now)  # a latency that rose meanwhile has to be checked once more, too
        else:
            self._confirm(probe, runs.error, now)

    def _confirm(self, probe: _Probe, error: float, now: float) -> None:
        """Accept the latency as the baseline: it no longer depends on the limit."""
        assert self._baseline is not None  # noqa: S101 - a probe needs a baseline
        before, found = self._baseline, probe.latency
        # A difference within the error may be chance: take the mean of both.
        self._baseline = found if abs(found - before) > 2 * error else (found + before) / 2
        excess = self._latency - self._baseline
        if self._descent is not None and self._baseline - before > (self._latency - before) / 2:
            # The back end became slower, and not because of us: the limit was lowered for nothing.
            level = self._descent.peak
        else:
            level = probe.before * math.exp(min(self._tolerance - excess, 0.0))
        self._end_probe(level, now)

    def _end_probe(self, level: float, now: float) -> None:
        self._probe = self._descent = None
        self._cuts = 0
        self._collect(now)
        self._set(level, now)
