"""How many runs of a handler at a time its back end can take: a limit that follows the latency.

A back end that serves c runs at a time answers in its own time up to concurrency c, the *knee*. Beyond it nothing is
gained: runs queue there, and the latency grows with the concurrency. The limit is kept where the latency is a little
above that of an empty back end, the *baseline*.

Measuring the baseline is what such algorithms fail at. A consumer with a backlog keeps its back end always busy, so a
minimum or a slow average of the latency takes the queue for the baseline after a while, and the limit runs away. So
the baseline is measured: for a moment, at times that all processes share, the limit is halved, and halved again for
as long as the latency falls with it.
"""

import dataclasses
import math

from aioshard.errors import HandlerError

__all__ = ["Adaptive", "LatencyGradient"]

_INITIAL = 8

_GROWTH, _GROWTH_RISE, _FASTEST_GROWTH = 1.2, 1.15, 1.5
"""Growth per round while there is no queue; it rises from round to round."""
_FIRST_CUT, _CUT = 0.8, 0.5
"""The least of a limit that is left by a first round above the knee, and by each one that follows."""
_HEADROOM = 0.5
"""Runs by which a limit exceeds what the latency asks for: several processes so come to similar limits."""
_UNVERIFIED = 0.2
"""The least of a limit that is left while the latency does not come down with it."""
_USE = 1.5
"""A limit grows to no more than so many times what is used."""
_BACKING_OFF = 0.9
"""Share of failures from which on there is nothing to be measured: the limit goes down until runs succeed again."""

_FEWEST_RUNS, _MANY_RUNS = 8, 128
_SURE = 0.05
"""Standard error of a logarithm of latency that is small enough, whatever was found."""
_CLEAR = 3.0
"""So many standard errors away from the tolerance, it is clear on which side the latency is."""
_ROUND, _ROUND_LATENCIES = 0.5, 4.0
"""Seconds, or latencies, after which a round ends with what there is."""
_SETTLING = 1.2
"""Latencies until a new limit shows."""

_PHASE, _PHASE_LATENCIES = 0.5, 4.0
"""Seconds of one step of a probe: a half for the queue to empty, a half to measure. At least so many latencies, and
then twice, four times ... as many seconds, so that processes whose latencies differ a little still probe together."""
_PERIOD = 16
"""Steps from the beginning of one probe to that of the next: a sixteenth of the time at half of the limit."""
_DEPTH = 0.5
_DEPENDS = 0.5
"""A latency that changes with at least this power of the limit depends on it: 1 is a queue, 0 is none."""
_PATIENCE = 4
"""Steps by which a probe may be longer where runs are few."""


@dataclasses.dataclass(frozen=True, slots=True)
class Adaptive:
    """Concurrency that follows what the back end can take: `concurrency=Adaptive(1, 512)`.

    As many runs at a time as the back end serves without a queue, found by latency, again and again: it grows while
    the latency stays that of an idle back end, and shrinks when runs begin to queue there. Every 8 seconds it is halved
    for half a second to measure what an idle back end needs (less often where runs take longer than an eighth of a
    second). Processes do so at the same time, by the computer's clock, so that they do not take each other's
    queue for the back end: their clocks should be right to a tenth of a second.

    Attributes:
        minimum: The concurrency is never below.
        maximum: Nor above.
        initial: What it begins with; None is 8, or what is nearest to that. Better too low than too high.
        tolerance: How many times the latency of an idle back end is accepted. With a back end that becomes slower
            gradually, instead of queueing at one point, more of it buys more throughput.

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
        """The concurrency to begin with."""
        return self.initial if self.initial is not None else min(max(_INITIAL, self.minimum), self.maximum)


class _Runs:
    """What ended in a time.

    Latencies are averaged as logarithms: one run in a hundred that takes a hundred times as long hides nothing.
    """

    __slots__ = ("busy", "count", "failed", "squares", "total")

    def __init__(self) -> None:
        self.count = self.failed = 0
        self.total = self.squares = 0.0
        self.busy = 0.0
        """Seconds that all of them took, the failed ones too."""

    @property
    def seconds(self) -> float:
        """How long a run takes."""
        return math.exp(self.total / self.count)

    @property
    def latency(self) -> float:
        """The logarithm of the seconds that one success takes.

        Failures make successes dearer: a back end that refuses what is too much for it is slow in this sense, and what
        fails in an idle one too, such as records that are wrong, does not count, as it is in the baseline.
        """
        return self.total / self.count + math.log1p(self.failed / self.count)

    @property
    def error(self) -> float:
        """The standard error of `latency`."""
        mean = self.total / self.count
        variance = max(self.squares / self.count - mean * mean, 0.0) + self.failed / self.count
        return math.sqrt(variance / max(self.count - 1, 1))


class _Probe:
    """A time with a lower limit, in steps."""

    __slots__ = ("before", "ends", "latency", "limit", "phase")

    def __init__(self, before: float, latency: float) -> None:
        self.before = before
        """The level to come back to."""
        self.latency = latency
        """At the step before, or before the first one."""
        self.limit = 0
        self.phase = self.ends = 0.0


class _Descent:
    """How the limit came down since the latency rose."""

    __slots__ = ("latency", "level", "peak")

    def __init__(self, level: float, latency: float) -> None:
        self.peak = level
        """Where it began."""
        self.level, self.latency = level, latency
        """Where the latency was the highest, and what it was there."""

    def floor(self, level: float, latency: float) -> float:
        """How far the limit may go down from *level*, where *latency* was found.

        A latency that does not come down with the limit is no queue of ours. It is left to the next probe then,
        at which others lower their limits too, to find out what it is.
        """
        if latency >= self.latency:
            self.level, self.latency = level, latency
        elif self.latency - latency > _DEPENDS * math.log(self.level / level):
            return 0.0
        return self.peak * _UNVERIFIED


class LatencyGradient:
    """The concurrency limit of one handler, from the latencies of its runs.

    Tell it of each run that ended, and let it `look` ten times a second. It has no clock: times are seconds on one that
    processes share and that does not go back.

    In rounds, runs are collected until it is clear on which side of the tolerance the latency is, or a while has
    passed. Below it the limit grows, by 20 % and more. Above it the limit becomes what would bring the latency to
    the tolerance: in a queue the one is proportional to the other. A limit that is not used does not grow.

    Invariants:
        * `minimum <= limit <= maximum`.
        * While the latency does not come down with it, the limit comes down by four fifths at the most before the
          baseline has been measured again.
    """

    def __init__(self, adaptive: Adaptive) -> None:
        self.limit = adaptive.beginning
        """How many runs at a time are right now."""
        self._minimum, self._maximum = adaptive.minimum, adaptive.maximum
        self._tolerance = math.log(adaptive.tolerance)
        self._level = float(self.limit)
        self._runs = _Runs()
        self._since: float | None = None
        """When the current round began; None before the first one."""
        self._settled: float | None = None
        """When a new limit will show; until then nothing is collected."""
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
        """Seconds that a success takes when the back end is idle; None until that was measured."""
        return None if self._baseline is None else math.exp(self._baseline)

    @property
    def latency(self) -> float | None:
        """Seconds that a success took lately; None until there were some."""
        return math.exp(self._latency) if self._since is not None and self._seconds else None

    def ended(self, seconds: float) -> None:
        """Take note of a run that succeeded after *seconds*, or that timed out then."""
        runs = self._runs
        logarithm = math.log(seconds + 1e-6)
        runs.count += 1
        runs.total += logarithm
        runs.squares += logarithm * logarithm
        runs.busy += seconds

    def failed(self, seconds: float) -> None:
        """Take note of a run that failed after *seconds*: how long that took says nothing."""
        self._runs.failed += 1
        self._runs.busy += seconds

    def look(self, now: float) -> int:
        """Decide, if it is time to; returns the limit."""
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
        """Whether the runs of a round say something."""
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
            # So few runs at a time are a probe in themselves.
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
            self._step(probe, now)  # a latency that rose meanwhile has to be looked at once more, too
        else:
            self._confirm(probe, runs.error, now)

    def _confirm(self, probe: _Probe, error: float, now: float) -> None:
        """The latency does not depend on the limit any more: it is the baseline."""
        assert self._baseline is not None  # noqa: S101 - there is no probe without
        before, found = self._baseline, probe.latency
        # What is within the error may be chance, and is half believed.
        self._baseline = found if abs(found - before) > 2 * error else (found + before) / 2
        excess = self._latency - self._baseline
        if self._descent is not None and self._baseline - before > (self._latency - before) / 2:
            # The back end has become slower, and not because of us: the limit came down for nothing.
            level = self._descent.peak
        else:
            level = probe.before * math.exp(min(self._tolerance - excess, 0.0))
        self._end_probe(level, now)

    def _end_probe(self, level: float, now: float) -> None:
        self._probe = self._descent = None
        self._cuts = 0
        self._collect(now)
        self._set(level, now)
