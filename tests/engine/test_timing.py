"""Durations of runs and waits: exact, although most are not sampled."""

import asyncio
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from aioshard.core.histogram import DURATION_BOUNDS, Histogram, HistogramCounts
from aioshard.core.options import Retry
from aioshard.engine.counts import Counters, TopicCounts
from aioshard.engine.epoch import Delivery
from aioshard.engine.failures import FailureHandler
from aioshard.engine.recoveries import skipping
from aioshard.engine.shards import Shards
from aioshard.engine.timing import precise
from aioshard.engine.worker import RecordWorker
from aioshard.records import Record
from tests.engine.deliveries import endless_lease, make_epoch

QUICK, SLOW = 0.000_5, 0.030_000


class Bench:
    """Workers on a clock that is stopped unless a handler moves it."""

    def __init__(
        self,
        durations: list[float],
        *,
        fails: Callable[[int], bool] = lambda _: False,
        workers: int = 1,
        **options: Any,
    ) -> None:
        self.options = options
        self.now = 100.0
        self.durations = durations
        self.fails = fails
        self.workers = workers
        self.epoch, self.deliveries = make_epoch([None] * len(durations), arrived=self.now)
        self.shards = Shards()
        self.attempts = 0

    @property
    def counts(self) -> TopicCounts:
        return self.epoch.counts

    def clock(self) -> float:
        return self.now

    async def handle(self, record: Record) -> None:
        self.attempts += 1
        if self.workers > 1:
            await asyncio.sleep(0)  # the others run meanwhile
        self.now += self.durations[record.offset] / self.workers
        if self.fails(record.offset):
            raise ValueError("broken")

    async def run(self) -> None:
        """Serve all deliveries; the workers wait then."""

        async def unused(_: Delivery) -> None:
            pytest.fail("the handler takes nothing but the record")

        failures = FailureHandler(
            Retry(attempts=1),
            skipping("on_failure='skip'"),
            shards=[self.shards],
            counters=Counters(),
            clock=self.clock,
            workers=self.workers,
        )
        await self.shards.put(self.deliveries)
        serving: list[asyncio.Task[None]] = []
        for number in range(self.workers):
            worker = RecordWorker(
                f"worker {number}",
                self.shards,
                call=self.handle,
                invoke=unused,
                failures=failures,
                lease=endless_lease(),
                clock=self.clock,
                **self.options,
            )
            worker.task = asyncio.create_task(worker.run())
            serving.append(worker.task)
        while len(self.epoch.tracker):  # noqa: ASYNC110 - no event, and the clock is stopped
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
        for task in serving:
            task.cancel()
        await asyncio.wait(serving)


def expected(durations: list[float]) -> HistogramCounts:
    histogram = Histogram()
    for duration in durations:
        histogram.add(duration)
    return histogram.counts()


def check(found: HistogramCounts, durations: list[float]) -> None:
    assert found.counts == expected(durations).counts
    assert found.total == pytest.approx(sum(durations))


@hypothesis.given(st.lists(st.sampled_from([0.0, 0.000_01, QUICK, 0.004, 0.005_1, SLOW, 0.7, 20.0]), max_size=400))
@hypothesis.settings(max_examples=60)
def test_every_run_is_counted_in_its_bucket(durations: list[float]) -> None:
    bench = Bench(durations)
    asyncio.run(bench.run())
    check(bench.counts.durations.counts(), durations)


async def test_failed_attempts_are_measured_too() -> None:
    durations = [QUICK, SLOW, QUICK, 0.2, QUICK] * 20
    bench = Bench(durations, fails=lambda offset: offset % 3 == 0)
    await bench.run()
    check(bench.counts.durations.counts(), durations)
    assert bench.counts.skipped == len([n for n in range(100) if n % 3 == 0])
    assert bench.counts.processed + bench.counts.skipped == len(durations)


async def test_other_tasks_run_at_a_yield_do_not_count_as_run_time() -> None:
    durations = [0.000_01] * 1_000  # more than it runs without a pause
    bench = Bench(durations)

    async def meddle() -> None:
        while True:
            bench.now += 0.5
            await asyncio.sleep(0)

    meddling = asyncio.create_task(meddle())
    await bench.run()
    meddling.cancel()
    check(bench.counts.durations.counts(), durations)


async def test_an_observed_attempt_stores_its_times_however_it_ends() -> None:
    durations = [0.25, 0.5, 1.0]
    bench = Bench(durations, fails=lambda offset: offset == 1, is_observed=True)
    await bench.run()
    times = [(100.0, 100.25, None), (100.25, 100.75, None), (100.75, 101.75, None)]
    assert [delivery.run for delivery in bench.deliveries] == times


async def test_an_attempt_that_nobody_observes_stores_nothing() -> None:
    bench = Bench([QUICK, QUICK], fails=lambda offset: offset == 1)
    await bench.run()
    assert not any(hasattr(delivery, "run") for delivery in bench.deliveries)


@pytest.mark.parametrize(
    ("run_ahead", "duration", "turns"),
    [(0.0, 0.000_01, 7), (0.005, 0.000_01, 1), (0.005, 0.000_02, 3), (0.005, SLOW, 7)],
    ids=["an app", "quick", "less quick", "slow"],
)
async def test_a_backfill_yields_only_after_a_while(run_ahead: float, duration: float, turns: int) -> None:
    bench = Bench([duration] * 1_000, run_ahead=run_ahead)
    before: list[int] = []

    async def look() -> None:
        while True:
            before.append(bench.attempts)
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    await bench.run()
    looking.cancel()
    assert len({attempts for attempts in before if 0 < attempts < 1_000}) == turns
    check(bench.counts.durations.counts(), [duration] * 1_000)


async def test_sampled_waits_represent_the_unsampled_records() -> None:
    bench = Bench([QUICK] * 999 + [SLOW])
    await bench.run()
    waits = bench.counts.waits.counts()
    assert 980 <= sum(waits.counts) <= 1_000
    assert waits.total / sum(waits.counts) == pytest.approx(0.25, rel=0.05)  # the last one waits for half a second
    assert waits.counts[-1] == 0


async def test_the_waits_of_one_slow_worker_are_each_measured() -> None:
    bench = Bench([SLOW] * 10)
    await bench.run()
    check(bench.counts.waits.counts(), [SLOW * number for number in range(10)])


async def test_of_many_slow_workers_a_sample_represents_the_others() -> None:
    bench = Bench([SLOW] * 1_000, workers=100)
    await bench.run()
    waits = bench.counts.waits.counts()
    assert 850 <= sum(waits.counts) <= 1_000  # a hundred were running at the last sample
    assert waits.total / sum(waits.counts) == pytest.approx(0.15, rel=0.1)  # the last ones wait for 0.3 s
    assert waits.counts[-1] == 0
    assert bench.counts.durations.counts().count == 1_000


async def test_a_retry_has_not_waited_in_the_queue() -> None:
    bench = Bench([SLOW])
    delivery: Delivery = bench.deliveries[0]
    delivery.starts = 1
    await bench.run()
    assert bench.counts.waits.counts() == HistogramCounts(DURATION_BOUNDS, (0,) * 15, 0.0)


async def test_a_retry_among_slow_runs_has_not_waited_in_the_queue() -> None:
    bench = Bench([SLOW] * 4)
    bench.deliveries[2].starts = 1
    await bench.run()
    check(bench.counts.waits.counts(), [0.0, SLOW, SLOW * 3])
    check(bench.counts.durations.counts(), [SLOW] * 4)


async def test_slow_runs_and_their_waits_belong_to_the_topic_of_their_record() -> None:
    durations = [SLOW, 0.7, 0.012, 20.0, SLOW]
    bench = Bench(durations)
    payments, others = make_epoch([None] * len(durations), partition=1, arrived=bench.now)
    bench.deliveries = [delivery for pair in zip(others, bench.deliveries, strict=True) for delivery in pair]
    await bench.run()

    waits_of_payments = [2 * sum(durations[:number]) for number in range(len(durations))]
    waits_of_orders = [waited + run for waited, run in zip(waits_of_payments, durations, strict=True)]
    check(payments.counts.durations.counts(), durations)
    check(bench.counts.durations.counts(), durations)
    check(payments.counts.waits.counts(), waits_of_payments)
    check(bench.counts.waits.counts(), waits_of_orders)


async def test_slow_runs_are_measured_without_a_call_for_each() -> None:
    runs = 1_000
    slow = await calls_of(Bench([SLOW] * runs, workers=100))
    quick = await calls_of(Bench([0.0] * runs, workers=100))
    assert slow < quick + runs, "each slow run costs a call that a quick run does not cost"


async def calls_of(bench: Bench) -> int:
    """Run the bench, and return how many functions were called meanwhile."""
    calls = 0

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        await bench.run()
    finally:
        sys.setprofile(before)
    return calls


async def test_run_times_are_not_taken_from_a_millisecond_clock() -> None:
    loop = asyncio.get_running_loop()
    assert precise(loop.time) is not loop.time
    assert abs(precise(loop.time)() - loop.time()) < 1.0

    def virtual() -> float:
        return 12.5

    assert precise(virtual) is virtual
