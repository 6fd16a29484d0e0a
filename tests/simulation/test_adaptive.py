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

from aioshard.core.adaptive import Adaptive, LatencyGradient

SERVICE = 0.01
"""Seconds in which an idle back end answers, as a rule."""
TICK = 0.1

Noise = Callable[[random.Random], float]


def lognormal(sigma: float) -> Noise:
    """Around 1, as the times of most services."""
    return lambda chance: math.exp(chance.gauss(-sigma * sigma / 2, sigma))


def exponential(chance: random.Random) -> float:
    return chance.expovariate(1.0)


def rarely_slow(chance: random.Random) -> float:
    return 100.0 if chance.random() < 0.01 else 1.0


@dataclasses.dataclass
class Caller:
    """A process that keeps as many runs going as its limit allows."""

    limiter: LatencyGradient | None
    limit: int
    starts: float = 0.0
    clock_is_ahead: float = 0.0
    per_second: float | None = None
    """Runs that come; None is a backlog without end."""
    wrong: float = 0.0
    """Share of runs that fail whatever the back end does."""
    waiting: int = 0
    running: int = 0
    ended: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """When each success ended, and how long it had taken."""
    limits: list[tuple[float, int]] = dataclasses.field(default_factory=list)

    def between(self, start: float, end: float) -> "Found":
        latencies = [seconds for at, seconds in self.ended if start <= at < end]
        limits = [limit for at, limit in self.limits if start <= at < end]
        median = statistics.median(latencies) if latencies else math.inf
        return Found(len(latencies) / (end - start), median, statistics.mean(limits), max(limits))


@dataclasses.dataclass
class Found:
    rate: float
    median: float
    limit: float
    highest: int


def adaptive(minimum: int = 1, maximum: int = 512, **more: float) -> Caller:
    limiter = LatencyGradient(Adaptive(minimum, maximum))
    caller = Caller(limiter, limiter.limit)
    return dataclasses.replace(caller, **more)  # type: ignore[arg-type]


def fixed(limit: int) -> Caller:
    return Caller(None, limit)


class BackEnd:
    """Servers behind one queue; `run` moves time on."""

    def __init__(
        self, servers: int, *, noise: Noise | None = None, seed: int = 0, sheds: bool = False, gradual: float = 0.0
    ) -> None:
        self.servers = servers
        self.service = SERVICE
        self.now = 0.0
        self.stalled_until = 0.0
        self._noise = noise or lognormal(0.2)
        self._sheds = sheds
        self._gradual = gradual
        self._chance = random.Random(seed)
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
        self._at(self.now + TICK * self._chance.random(), self._look, caller)
        if caller.per_second is not None:
            self._come(caller)
        self._fill(caller)

    def _come(self, caller: Caller) -> None:
        assert caller.per_second is not None
        caller.waiting += 1
        self._at(self.now + self._chance.expovariate(caller.per_second), self._come, caller)
        self._fill(caller)

    def _look(self, caller: Caller) -> None:
        if caller.limiter is not None:
            caller.limit = caller.limiter.look(self.now + caller.clock_is_ahead)
        caller.limits.append((self.now, caller.limit))
        self._at(self.now + TICK, self._look, caller)
        self._fill(caller)

    def _fill(self, caller: Caller) -> None:
        while caller.running < caller.limit and (caller.per_second is None or caller.waiting):
            caller.waiting -= caller.per_second is not None
            caller.running += 1
            if self._sheds and self._busy >= self.servers:
                self._at(self.now + SERVICE / 10, self._end, caller, self.now, not self._sheds)
            else:
                self._queue.append((caller, self.now))
                self._serve()

    def _serve(self) -> None:
        while self._queue and self._busy < self.servers:
            caller, began = self._queue.popleft()
            self._busy += 1
            seconds = self.service * self._noise(self._chance) * (1 + self._gradual * (self._busy / self.servers) ** 2)
            works = self._chance.random() >= caller.wrong
            self._at(max(self.now, self.stalled_until) + seconds, self._served, caller, began, works)

    def _served(self, caller: Caller, began: float, works: bool) -> None:
        self._busy -= 1
        self._end(caller, began, works)
        self._serve()

    def _end(self, caller: Caller, began: float, works: bool) -> None:
        caller.running -= 1
        seconds = self.now - began
        if works:
            caller.ended.append((self.now, seconds))
        if caller.limiter is not None:
            (caller.limiter.ended if works else caller.limiter.failed)(seconds)
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
    """From the fourth second after each change on; a probe now and then is in these figures."""
    caller = adaptive()
    through_all_capacities(caller, noise, seed)

    idle = BackEnd(1000, noise=noise, seed=seed)
    alone = fixed(1)
    idle.run([alone], 20.0)
    for (start, servers), (end, _) in itertools.pairwise(CAPACITIES):
        found = caller.between(start + 4, end)
        assert 0.85 * servers <= found.limit <= 1.4 * servers
        assert found.rate >= (0.85 if noise is exponential else 0.9) * servers / SERVICE
        assert found.median <= 1.5 * alone.between(0.0, 20.0).median


def test_a_fixed_limit_is_too_low_or_too_high_somewhere() -> None:
    """The model can tell one limit from another."""
    low, high = fixed(8), fixed(512)
    through_all_capacities(low, lognormal(0.2), 1)
    through_all_capacities(high, lognormal(0.2), 1)

    assert low.between(49.0, 70.0).rate <= 0.15 * 64 / SERVICE
    assert high.between(49.0, 70.0).median >= 7 * SERVICE
    assert high.between(25.0, 45.0).median >= 60 * SERVICE


@NOISES
def test_noise_does_not_make_it_collapse(noise: Noise) -> None:
    caller = adaptive()
    BackEnd(32, noise=noise, seed=3).run([caller], 120.0)

    seconds = [caller.between(second, second + 1).rate for second in range(4, 119)]
    assert statistics.median(seconds) >= 0.95 * 32 / SERVICE
    assert sorted(seconds)[len(seconds) // 10] >= 0.65 * 32 / SERVICE  # a tenth are probes, or the end of one


def test_a_run_in_a_hundred_that_takes_a_hundred_times_as_long_changes_little() -> None:
    caller, ideal = adaptive(), fixed(38)
    BackEnd(32, noise=rarely_slow, seed=4).run([caller], 60.0)
    BackEnd(32, noise=rarely_slow, seed=4).run([ideal], 60.0)

    assert caller.between(10.0, 60.0).rate >= 0.85 * ideal.between(10.0, 60.0).rate


@pytest.mark.parametrize("changed_at", [17.0, 20.0, 24.2])
def test_a_back_end_that_becomes_slower_itself_does_not_keep_it_down(changed_at: float) -> None:
    """The baseline is stale then: latency five times as high, and no queue. The third change is within a probe."""
    caller = adaptive()
    back_end = BackEnd(32, seed=5)
    back_end.run([caller], changed_at)
    back_end.service = 5 * SERVICE
    back_end.run([caller], changed_at + 40)
    back_end.service = SERVICE
    back_end.run([caller], changed_at + 60)

    assert caller.between(changed_at + 10, changed_at + 40).rate >= 0.9 * 32 / (5 * SERVICE)
    assert caller.between(changed_at + 10, changed_at + 40).median <= 1.5 * 5 * SERVICE
    assert caller.between(changed_at + 42, changed_at + 60).rate >= 0.9 * 32 / SERVICE
    assert caller.between(changed_at + 50, changed_at + 60).median <= 1.5 * SERVICE


def test_a_latency_that_does_not_come_down_with_the_limit_does_not_take_it_all() -> None:
    """Until the next probe, at 24 s, it may be a queue of others."""
    caller = adaptive()
    back_end = BackEnd(32, seed=5)
    back_end.run([caller], 17.0)
    back_end.service = 5 * SERVICE
    back_end.run([caller], 23.5)

    assert 6 <= caller.limit <= 10


def test_one_that_began_far_too_high_comes_down() -> None:
    """The queue is so long that half of it is a queue as well: the probe goes deeper until it finds its end."""
    limiter = LatencyGradient(Adaptive(1, 512, initial=256))
    caller = Caller(limiter, limiter.limit)
    BackEnd(16, seed=17).run([caller], 22.0)

    assert caller.between(14.0, 22.0).limit <= 1.4 * 16
    assert caller.between(14.0, 22.0).median <= 1.5 * SERVICE


def test_a_limit_that_is_not_used_does_not_grow() -> None:
    caller = adaptive(per_second=500)  # five at a time
    BackEnd(64, seed=6).run([caller], 120.0)

    assert max(limit for _, limit in caller.limits) <= 20
    assert caller.between(10.0, 120.0).rate == pytest.approx(500, rel=0.05)


def test_a_burst_after_a_quiet_time_is_served_soon() -> None:
    caller = adaptive(per_second=500)
    back_end = BackEnd(64, seed=7)
    back_end.run([caller], 60.0)
    caller.per_second = 20_000
    back_end.run([caller], 70.0)

    assert caller.between(64.0, 70.0).rate >= 0.9 * 64 / SERVICE


@pytest.mark.parametrize("apart", [0.0, 0.1], ids=["one clock", "clocks a tenth of a second apart"])
def test_processes_share_a_back_end(apart: float) -> None:
    """None takes the queue of the others for the back end, which would drive all of them to the maximum."""
    callers = [adaptive(starts=5.0 * number, clock_is_ahead=apart * number / 3) for number in range(4)]
    back_end = BackEnd(64, seed=8)
    back_end.run(callers, 60.0)
    back_end.servers = 32
    back_end.run(callers, 100.0)

    for servers, start, end in ((64, 30.0, 60.0), (32, 66.0, 100.0)):
        found = [caller.between(start, end) for caller in callers]
        assert sum(one.rate for one in found) >= 0.9 * servers / SERVICE
        assert sum(one.limit for one in found) <= 1.5 * servers
        assert max(one.median for one in found) <= 1.5 * SERVICE
        assert min(one.limit for one in found) >= servers / 4 / 4


@pytest.mark.parametrize("servers", [1, 2, 3, 4])
def test_small_back_ends(servers: int) -> None:
    caller = adaptive()
    BackEnd(servers, seed=9).run([caller], 60.0)

    found = caller.between(5.0, 60.0)
    assert found.rate >= 0.9 * servers / SERVICE
    assert found.limit <= servers + 1.5


def test_records_that_are_wrong_do_not_keep_it_down() -> None:
    """Three in ten fail whatever the concurrency is."""
    caller = adaptive(wrong=0.3)
    BackEnd(32, seed=10).run([caller], 40.0)

    assert 0.85 * 32 <= caller.between(5.0, 40.0).limit <= 1.5 * 32


def test_a_back_end_that_refuses_what_is_too_much_is_not_hammered() -> None:
    """It refuses in a tenth of the time: the latency of what succeeds says nothing."""
    caller = adaptive()
    BackEnd(16, seed=11, sheds=True).run([caller], 40.0)

    found = caller.between(5.0, 40.0)
    assert found.rate >= 0.8 * 16 / SERVICE
    assert found.limit <= 2 * 16


def test_an_outage_leaves_it_where_it_was_or_near() -> None:
    caller = adaptive()
    back_end = BackEnd(32, seed=12)
    back_end.run([caller], 20.0)
    back_end.stalled_until = 25.0
    back_end.run([caller], 60.0)

    assert caller.between(29.0, 60.0).rate >= 0.9 * 32 / SERVICE
    assert caller.between(34.0, 60.0).limit <= 1.4 * 32


def test_while_everything_fails_it_goes_down_and_afterwards_up_again() -> None:
    caller = adaptive()
    back_end = BackEnd(32, seed=13)
    back_end.run([caller], 20.0)
    caller.wrong = 1.0
    back_end.run([caller], 30.0)
    lowest = caller.limit
    caller.wrong = 0.0
    back_end.run([caller], 60.0)

    assert lowest <= 2
    assert caller.between(36.0, 60.0).rate >= 0.9 * 32 / SERVICE


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
    BackEnd(32, seed=15, gradual=1.0).run([caller], 40.0)

    found = caller.between(5.0, 40.0)
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
    assert caller.between(660.0, 900.0).median <= 1.6 * 2.0
