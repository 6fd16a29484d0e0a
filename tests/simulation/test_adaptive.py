"""The adaptive limit against a model of a back end: servers, a queue before them, and callers that always have more."""

import dataclasses
import heapq
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence

import pytest

from aioshard import Adaptive
from aioshard.core.adaptive import AdaptiveLimit, Figures

SERVICE = 0.02
"""Seconds in which an idle back end answers, usually."""
TICK = 1.0
"""Seconds between two looks, as in the engine."""

Noise = Callable[[random.Random], float]


def lognormal(sigma: float) -> Noise:
    """Around 1, as the times of most services."""
    return lambda rng: math.exp(rng.gauss(-sigma * sigma / 2, sigma))


def exponential(rng: random.Random) -> float:
    return rng.expovariate(1.0)


def rarely_slow(rng: random.Random) -> float:
    return 10.0 if rng.random() < 0.01 else 1.0


@dataclasses.dataclass
class Found:
    """Figures of a period."""

    rate: float
    median: float
    limit: float
    refused: float
    """Share of runs that were refused."""


@dataclasses.dataclass
class Caller:
    """A process that keeps as many runs in flight as its limit allows."""

    limiter: AdaptiveLimit | None
    limit: int
    starts: float = 0.0
    clock_is_ahead: float = 0.0
    per_second: float | None = None
    """Runs that arrive; None is an endless backlog."""
    wrong: float = 0.0
    """Share of runs that fail with an idle back end too."""
    waiting: int = 0
    running: int = 0
    runs: int = 0
    seconds: float = 0.0
    overloads: int = 0
    ended: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """When each success ended, and how long it had taken."""
    refused: list[float] = dataclasses.field(default_factory=list)
    """When each refused run ended."""
    limits: list[tuple[float, int]] = dataclasses.field(default_factory=list)

    def figures(self, now: float) -> Figures:
        return Figures(now + self.clock_is_ahead, self.runs, self.seconds, len(self.ended), self.overloads)

    def between(self, start: float, end: float) -> Found:
        latencies = [seconds for at, seconds in self.ended if start <= at < end]
        limits = [limit for at, limit in self.limits if start <= at < end]
        refused = sum(start <= at < end for at in self.refused)
        median = statistics.median(latencies) if latencies else math.inf
        share = refused / max(len(latencies) + refused, 1)
        return Found(len(latencies) / (end - start), median, statistics.mean(limits), share)


def adaptive(
    minimum: int = 1,
    maximum: int = 512,
    *,
    initial: int | None = None,
    starts: float = 0.0,
    clock_is_ahead: float = 0.0,
    per_second: float | None = None,
    wrong: float = 0.0,
) -> Caller:
    limiter = AdaptiveLimit(Adaptive(minimum, maximum, initial))
    return Caller(limiter, limiter.limit, starts, clock_is_ahead, per_second, wrong)


def fixed(limit: int) -> Caller:
    return Caller(None, limit)


class BackEnd:
    """Servers behind one queue; `run` moves time on."""

    def __init__(
        self,
        servers: int,
        *,
        noise: Noise | None = None,
        seed: int = 0,
        sheds: bool = False,
        says_so: bool = False,
        gradual: float = 0.0,
    ) -> None:
        self.servers = servers
        self.service = SERVICE
        self.now = 0.0
        self.stalled_until = 0.0
        self._noise = noise or lognormal(0.2)
        self._sheds = sheds
        self._says_so = says_so
        self._gradual = gradual
        self._rng = random.Random(seed)
        self._queue: deque[tuple[Caller, float]] = deque()
        self._busy = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._ties = itertools.count()

    def run(self, callers: Sequence[Caller], until: float) -> None:
        for caller in callers:
            if not caller.limits:
                self._at(max(caller.starts, self.now), self._begin, caller)
        while self._events and self._events[0][0] <= until:
            self.now, _, happens, what = heapq.heappop(self._events)
            happens(*what)
        self.now = until

    def _at(self, when: float, happens: Callable[..., None], *what: object) -> None:
        heapq.heappush(self._events, (when, next(self._ties), happens, what))

    def _begin(self, caller: Caller) -> None:
        self._at(self.now + TICK * self._rng.random(), self._look, caller)
        if caller.per_second is not None:
            self._arrive(caller)
        self._fill(caller)

    def _arrive(self, caller: Caller) -> None:
        assert caller.per_second is not None
        caller.waiting += 1
        self._at(self.now + self._rng.expovariate(caller.per_second), self._arrive, caller)
        self._fill(caller)

    def _look(self, caller: Caller) -> None:
        if caller.limiter is not None:
            caller.limit = caller.limiter.look(caller.figures(self.now))
        caller.limits.append((self.now, caller.limit))
        self._at(self.now + TICK, self._look, caller)
        self._fill(caller)

    def _fill(self, caller: Caller) -> None:
        while caller.running < caller.limit and (caller.per_second is None or caller.waiting):
            caller.waiting -= caller.per_second is not None
            caller.running += 1
            if self._sheds and self._busy >= self.servers:
                self._at(self.now + SERVICE / 10, self._refuse, caller, self.now)
            else:
                self._queue.append((caller, self.now))
                self._serve()

    def _serve(self) -> None:
        while self._queue and self._busy < self.servers:
            caller, began = self._queue.popleft()
            self._busy += 1
            seconds = self.service * self._noise(self._rng) * (1 + self._gradual * (self._busy / self.servers) ** 2)
            works = self._rng.random() >= caller.wrong
            self._at(max(self.now, self.stalled_until) + seconds, self._served, caller, began, works)

    def _served(self, caller: Caller, began: float, works: bool) -> None:
        self._busy -= 1
        if works:
            caller.ended.append((self.now, self.now - began))
        self._end(caller, began)
        self._serve()

    def _refuse(self, caller: Caller, began: float) -> None:
        caller.refused.append(self.now)
        caller.overloads += self._says_so
        self._end(caller, began)

    def _end(self, caller: Caller, began: float) -> None:
        caller.running -= 1
        caller.runs += 1
        caller.seconds += self.now - began
        self._fill(caller)


NOISES = pytest.mark.parametrize(
    "noise", [lognormal(0.1), lognormal(0.3), exponential], ids=["10 % noise", "30 % noise", "exponential"]
)
CAPACITIES = ((0.0, 32), (21.0, 8), (45.0, 64), (70.0, 0))
"""When the back end gets how many servers."""


def through_all_capacities(caller: Caller, noise: Noise, seed: int) -> None:
    back_end = BackEnd(32, noise=noise, seed=seed)
    for (_, servers), (end, _) in itertools.pairwise(CAPACITIES):
        back_end.servers = servers
        back_end.run([caller], end)


@NOISES
@pytest.mark.parametrize("seed", [1, 2])
def test_it_finds_the_knee_of_a_back_end_whose_capacity_changes(noise: Noise, seed: int) -> None:
    """From the sixth second after each change on; these figures include probes."""
    caller = adaptive()
    through_all_capacities(caller, noise, seed)

    idle = BackEnd(1000, noise=noise, seed=seed)
    alone = fixed(1)
    idle.run([alone], 20.0)
    for (start, servers), (end, _) in itertools.pairwise(CAPACITIES):
        found = caller.between(start + 6, end)
        assert 0.85 * servers <= found.limit <= 1.4 * servers
        assert found.rate >= (0.85 if noise is exponential else 0.9) * servers / SERVICE
        assert found.median <= (1.75 if noise is exponential else 1.5) * alone.between(0.0, 20.0).median


@pytest.mark.parametrize("changed_at", [31.5, 32.2, 32.6, 33.0, 33.4, 33.8, 34.2])
def test_a_capacity_that_falls_during_a_probe_is_not_mistaken_for_an_idle_back_end(changed_at: float) -> None:
    """The probe begins between 32 s and 33 s, and takes two seconds."""
    caller = adaptive()
    back_end = BackEnd(32, seed=19)
    back_end.run([caller], changed_at)
    back_end.servers = 8
    back_end.run([caller], 47.0)

    found = caller.between(42.0, 47.0)
    assert found.limit <= 1.75 * 8
    assert found.median <= 1.75 * SERVICE


def test_a_fixed_limit_is_too_low_or_too_high_somewhere() -> None:
    """The model can tell one limit from another."""
    low = fixed(8)
    high = fixed(512)
    through_all_capacities(low, lognormal(0.2), 1)
    through_all_capacities(high, lognormal(0.2), 1)

    assert low.between(49.0, 70.0).rate <= 0.15 * 64 / SERVICE
    assert high.between(49.0, 70.0).median >= 7 * SERVICE
    assert high.between(25.0, 45.0).median >= 60 * SERVICE


@NOISES
def test_noise_does_not_make_it_collapse(noise: Noise) -> None:
    caller = adaptive()
    BackEnd(32, noise=noise, seed=3).run([caller], 70.0)

    seconds = [caller.between(second, second + 1).rate for second in range(5, 69)]
    assert statistics.median(seconds) >= 0.95 * 32 / SERVICE
    assert sorted(seconds)[len(seconds) // 5] >= 0.75 * 32 / SERVICE  # an eighth are probes


def test_a_run_in_a_hundred_that_takes_ten_times_as_long_changes_little() -> None:
    caller = adaptive()
    ideal = fixed(38)
    BackEnd(32, noise=rarely_slow, seed=4).run([caller], 60.0)
    BackEnd(32, noise=rarely_slow, seed=4).run([ideal], 60.0)

    assert caller.between(10.0, 60.0).rate >= 0.85 * ideal.between(10.0, 60.0).rate


@pytest.mark.parametrize("changed_at", [20.0, 24.5, 33.2])
def test_a_back_end_that_becomes_slower_itself_does_not_keep_it_down(changed_at: float) -> None:
    """The baseline is stale then: latency five times as high, and no queue. The third change is within a probe."""
    caller = adaptive()
    back_end = BackEnd(32, seed=5)
    back_end.run([caller], changed_at)
    back_end.service = 5 * SERVICE
    back_end.run([caller], changed_at + 60)
    back_end.service = SERVICE
    back_end.run([caller], changed_at + 90)

    slow = caller.between(changed_at + 22, changed_at + 60)
    quick = caller.between(changed_at + 64, changed_at + 90)
    assert slow.rate >= 0.88 * 32 / (5 * SERVICE)
    assert slow.median <= 1.5 * 5 * SERVICE
    assert quick.rate >= 0.85 * 32 / SERVICE
    assert quick.median <= 1.6 * SERVICE


def test_a_latency_that_does_not_fall_with_the_limit_does_not_take_all_of_it() -> None:
    """Until the next probe, at 32 s, it may be the queue of others."""
    caller = adaptive()
    back_end = BackEnd(32, seed=5)
    back_end.run([caller], 20.0)
    back_end.service = 5 * SERVICE
    back_end.run([caller], 31.5)

    assert 8 <= caller.limit <= 24


def test_a_limit_that_begins_far_too_high_comes_down() -> None:
    """The queue is so long that half of it is a queue as well: the probe goes deeper until it finds its end."""
    caller = adaptive(initial=256)
    BackEnd(16, seed=17).run([caller], 60.0)

    found = caller.between(34.0, 60.0)
    assert found.limit <= 1.4 * 16
    assert found.median <= 1.5 * SERVICE


def test_a_limit_that_is_not_used_does_not_grow() -> None:
    caller = adaptive(per_second=250)  # five at a time
    BackEnd(64, seed=6).run([caller], 120.0)

    assert max(limit for _, limit in caller.limits) <= 16
    assert caller.between(10.0, 120.0).rate == pytest.approx(250, rel=0.05)


def test_a_burst_after_a_quiet_time_is_served_soon() -> None:
    caller = adaptive(per_second=250)
    back_end = BackEnd(64, seed=7)
    back_end.run([caller], 60.0)
    caller.per_second = 10_000
    back_end.run([caller], 75.0)

    assert caller.between(66.0, 75.0).rate >= 0.75 * 64 / SERVICE


@pytest.mark.parametrize("apart", [0.0, 0.5], ids=["one clock", "clocks half a second apart"])
@pytest.mark.parametrize("seed", [8, 9])
def test_processes_share_a_back_end(apart: float, seed: int) -> None:
    """None mistakes the queue of the others for the back end, which would drive all of them to the maximum."""
    callers = [adaptive(starts=5.0 * number, clock_is_ahead=apart * number / 3) for number in range(4)]
    back_end = BackEnd(32, seed=seed)
    back_end.run(callers, 120.0)
    back_end.servers = 16
    back_end.run(callers, 200.0)

    for servers, start, end in ((32, 50.0, 120.0), (16, 135.0, 200.0)):
        found = [caller.between(start, end) for caller in callers]
        assert sum(part.rate for part in found) >= 0.88 * servers / SERVICE
        assert sum(part.limit for part in found) <= 1.5 * servers + 2
        assert max(part.median for part in found) <= 1.5 * SERVICE
        assert min(part.limit for part in found) >= servers / 4 / 4


@pytest.mark.parametrize("servers", [1, 2, 3, 4])
def test_small_back_ends(servers: int) -> None:
    caller = adaptive()
    BackEnd(servers, seed=9).run([caller], 150.0)

    found = caller.between(54.0, 150.0)
    assert found.rate >= 0.9 * servers / SERVICE
    assert found.limit <= servers + 1.5


def test_invalid_records_do_not_keep_it_down() -> None:
    """Three in ten fail at any concurrency."""
    caller = adaptive(wrong=0.3)
    BackEnd(32, seed=10).run([caller], 60.0)

    assert 0.85 * 32 <= caller.between(6.0, 60.0).limit <= 1.5 * 32


@pytest.mark.parametrize("says_so", [False, True], ids=["errors", "RetryLater"])
def test_a_back_end_that_refuses_calls_is_not_hammered(says_so: bool) -> None:
    """It refuses in a tenth of the time: the latency of what succeeds says nothing."""
    caller = adaptive()
    BackEnd(16, seed=11, sheds=True, says_so=says_so).run([caller], 80.0)

    found = caller.between(8.0, 80.0)
    assert found.rate >= 0.75 * 16 / SERVICE
    assert found.limit <= 2 * 16
    assert found.refused <= (0.3 if says_so else 0.75)


def test_overload_that_runs_report_halves_it_within_a_round_and_keeps_it_down() -> None:
    caller = adaptive()
    back_end = BackEnd(64, seed=18, sheds=True, says_so=True)
    back_end.run([caller], 20.0)
    back_end.servers = 8
    back_end.run([caller], 24.5)

    assert caller.limit <= 8
    back_end.run([caller], 31.9)
    assert max(limit for at, limit in caller.limits if at > 24.5) <= 8
    assert caller.between(25.0, 31.9).refused <= 0.02


def test_an_outage_leaves_it_near_its_level() -> None:
    caller = adaptive()
    back_end = BackEnd(32, seed=12)
    back_end.run([caller], 20.0)
    back_end.stalled_until = 25.0
    back_end.run([caller], 80.0)

    assert caller.between(29.0, 80.0).rate >= 0.85 * 32 / SERVICE
    assert caller.between(34.0, 80.0).limit <= 1.4 * 32


def test_while_everything_fails_it_falls_and_afterwards_rises_again() -> None:
    caller = adaptive()
    back_end = BackEnd(32, seed=13)
    back_end.run([caller], 20.0)
    caller.wrong = 1.0
    back_end.run([caller], 30.0)
    lowest = caller.limit
    caller.wrong = 0.0
    back_end.run([caller], 60.0)

    assert lowest <= 2
    assert caller.between(38.0, 60.0).rate >= 0.88 * 32 / SERVICE


def test_its_bounds_hold_whatever_the_back_end_can_do() -> None:
    caller = adaptive(16, 24)
    back_end = BackEnd(64, seed=14)
    back_end.run([caller], 20.0)
    back_end.servers = 4
    back_end.run([caller], 40.0)

    assert {16, 24} <= {limit for _, limit in caller.limits}
    assert all(16 <= limit <= 24 for _, limit in caller.limits)


def test_a_back_end_that_becomes_slower_gradually_is_kept_near_the_tolerance() -> None:
    """Twice the latency at full use, and no point at which it begins."""
    caller = adaptive()
    BackEnd(32, seed=15, gradual=1.0).run([caller], 60.0)

    found = caller.between(18.0, 60.0)
    assert found.rate >= 0.75 * 32 / (2 * SERVICE)
    assert found.median <= 1.5 * SERVICE


def test_runs_of_seconds() -> None:
    """A service of two seconds, as language models are: minutes instead of seconds, and no collapse."""
    caller = adaptive()
    back_end = BackEnd(8, noise=lognormal(0.3), seed=16)
    back_end.service = 2.0
    back_end.run([caller], 300.0)
    back_end.servers = 32
    back_end.run([caller], 600.0)
    back_end.servers = 8
    back_end.run([caller], 900.0)

    assert caller.between(60.0, 300.0).rate >= 0.8 * 8 / 2.0
    assert caller.between(360.0, 600.0).rate >= 0.8 * 32 / 2.0
    assert caller.between(660.0, 900.0).median <= 1.8 * 2.0
