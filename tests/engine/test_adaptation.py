"""Adaptive concurrency in a running engine; the limit itself is tested against a model in tests/simulation."""

import asyncio
import statistics
import time
from collections import defaultdict, deque
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from aioshard import Adaptive, App, Batch, BatchError, Context, Limit, Record, Retry, RetryLater
from aioshard.errors import HandlerError
from aioshard.observe import AdaptiveStatistics, HandlerStatistics
from aioshard.telemetry.metrics import AppCollector
from aioshard.testing import TestClient, run
from tests.engine.live_apps import engine_of, publish

SERVICE = 0.2
PERSISTENT = Retry(attempts=1_000, initial=0.5, maximum=0.5)


class BackEnd:
    """Serves a number of calls concurrently; the others wait in line, or are refused."""

    def __init__(self, servers: int, *, refuses: bool = False) -> None:
        self.servers = servers
        self.served = 0
        self.most = 0
        """Highest number of concurrent calls."""
        self._refuses = refuses
        self._calls = 0
        self._busy = 0
        self._line: deque[asyncio.Future[None]] = deque()

    async def call(self) -> None:
        self._calls += 1
        self.most = max(self.most, self._calls)
        try:
            await self._serve()
        finally:
            self._calls -= 1

    async def _serve(self) -> None:
        if self._busy < self.servers and not self._line:
            self._busy += 1
        elif self._refuses:
            await asyncio.sleep(SERVICE / 10)
            raise RetryLater(0.5)
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._line.append(turn)
            await turn
        try:
            await asyncio.sleep(SERVICE)
            self.served += 1
        finally:
            self._busy -= 1
            while self._line and self._busy < self.servers:
                turn = self._line.popleft()
                if not turn.done():
                    self._busy += 1
                    turn.set_result(None)


def handler_of(app: App) -> HandlerStatistics:
    (handler,) = app.statistics().handlers
    return handler


def adaptive_of(app: App) -> AdaptiveStatistics:
    adaptive = handler_of(app).adaptive
    assert adaptive is not None
    return adaptive


async def limits(app: App, seconds: int) -> list[int]:
    """The concurrency at each second of a period."""
    seen = []
    for _ in range(seconds):
        await asyncio.sleep(1.0)
        seen.append(handler_of(app).concurrency)
    return seen


def test_a_concurrency_probes_by_the_time_of_day() -> None:
    """Processes that share a back end have event loops of different ages, and must probe it at the same moments."""
    app = App("adaptive")

    @app.consume("orders", concurrency=Adaptive(1, 64))
    async def handle(_: Record) -> None: ...

    async def test() -> None:
        async with TestClient(app) as client:
            (handler,) = engine_of(app).handlers
            assert handler.adaptation is not None
            assert handler.adaptation._figures().at == pytest.approx(client.broker.now(), abs=0.001)

    run(test())


def test_it_finds_what_the_back_end_bears_and_follows_it_up_and_down() -> None:
    app = App("adaptive")
    back_end = BackEnd(12)

    @app.consume("orders", concurrency=Adaptive(1, 128))
    async def handle(_: Record) -> None:
        await back_end.call()

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 15_000)
            for servers in (12, 4, 24):
                back_end.servers = servers
                await asyncio.sleep(40.0)
                before = back_end.served
                seen = await limits(app, 32)
                assert 0.85 * servers <= statistics.median(seen) <= servers * 1.4 + 1
                assert back_end.served - before >= 0.85 * 32 * servers / SERVICE

    run(test())


@pytest.mark.parametrize("kind", ["context", "batches", "rate limit", "batches with a rate limit"])
def test_every_kind_of_handler_may_have_it(kind: str) -> None:
    app = App("adaptive")
    back_end = BackEnd(16)
    options: dict[str, Any] = {"retry": Retry(attempts=1), "on_failure": "skip", "timeout": 30.0}
    if "limit" in kind:
        options["limit"] = Limit("quick", per_second=1_000)

    if "batches" in kind:

        @app.consume("orders", concurrency=Adaptive(2, 64), batch=Batch(max_records=5, linger=0.0), **options)
        async def handle_batch(records: list[Record]) -> None:
            await back_end.call()
            if records[0].offset % 7 == 0:
                raise BatchError({records[0]: ValueError()})

    else:

        @app.consume("orders", concurrency=Adaptive(2, 64), **options)
        async def handle(_: Record, context: Context) -> None:
            await back_end.call()
            if context.record.offset % 7 == 0:
                raise ValueError

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 24_000 if "batches" in kind else 6_000)
            await asyncio.sleep(20.0)
            assert 12 <= statistics.median(await limits(app, 30)) <= 26

    run(test())


def test_no_more_runs_are_in_flight_than_it_allows_and_keys_stay_in_order() -> None:
    app = App("adaptive")
    back_end = BackEnd(8)
    offsets: dict[bytes | None, list[int]] = defaultdict(list)

    @app.consume("orders", concurrency=Adaptive(1, 64))
    async def handle(record: Record) -> None:
        await back_end.call()
        offsets[record.key].append(record.offset)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 5_000, keys=100, partitions=2)
            allowed = {8}
            for _ in range(900):
                await asyncio.sleep(0.1)
                allowed.add(handler_of(app).concurrency)
                assert handler_of(app).busy <= max(allowed)
                if adaptive_of(app).since is not None and (adaptive_of(app).since or 0.0) > 2 * 64 / 8 * SERVICE:
                    allowed = {handler_of(app).concurrency}
            await client.settle(timeout=300.0)

    run(test())
    assert back_end.most < 64
    assert sum(map(len, offsets.values())) == 5_000
    assert all(done == sorted(done) for done in offsets.values())


def test_a_lower_limit_lets_busy_workers_end_and_wakes_none_instead() -> None:
    """The last raise is taken back while all workers are busy."""
    app = App("adaptive")
    back_end = BackEnd(1_000)
    overloaded = False

    @app.consume("orders", concurrency=Adaptive(1, 64), retry=PERSISTENT)
    async def handle(_: Record) -> None:
        await back_end.call()
        if overloaded:
            raise RetryLater(3_600.0)

    async def test() -> None:
        nonlocal overloaded
        async with TestClient(app) as client:
            await publish(client, 20_000)
            await asyncio.sleep(6.5)
            assert handler_of(app).busy == handler_of(app).concurrency == 64
            overloaded = True
            await asyncio.sleep(12.0)
            overloaded = False
            assert handler_of(app).busy <= handler_of(app).concurrency == 1
            assert adaptive_of(app).reason == "overload"

    run(test())


def test_retry_later_lowers_it_to_what_the_back_end_accepts() -> None:
    app = App("adaptive")
    back_end = BackEnd(6, refuses=True)

    @app.consume("orders", concurrency=Adaptive(1, 64), retry=PERSISTENT)
    async def handle(_: Record) -> None:
        await back_end.call()

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 6_000)
            await asyncio.sleep(20.0)
            before = back_end.served
            seen = await limits(app, 60)
            assert statistics.median(seen) <= 8
            assert back_end.served - before >= 0.6 * 60 * 6 / SERVICE
            assert adaptive_of(app).moves["overload"] >= 1

    run(test())


def test_attempts_that_time_out_are_slow() -> None:
    """The back end hangs: no run succeeds, and fewer try."""
    app = App("adaptive")
    hangs = asyncio.Event()

    @app.consume("orders", concurrency=Adaptive(1, 64), timeout=1.0, retry=PERSISTENT)
    async def handle(_: Record) -> None:
        await asyncio.sleep(3600.0 if hangs.is_set() else 0.05)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 20_000)
            await asyncio.sleep(5.0)
            assert handler_of(app).concurrency >= 40
            hangs.set()
            await asyncio.sleep(15.0)
            assert handler_of(app).concurrency <= 8
            assert adaptive_of(app).reason == "failures"
            hangs.clear()

    run(test())


def test_runs_in_threads() -> None:
    app = App("adaptive")
    running = most = 0

    @app.consume("orders", concurrency=Adaptive(1, 4, initial=2))
    def handle(_: Record) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.001)
        running -= 1

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 50)
            await client.settle(timeout=60.0)

    run(test())
    assert 1 <= most <= 4


def test_a_batch_that_is_to_be_retried_later_counts_as_one_overload() -> None:
    app = App("adaptive")

    @app.consume("orders", concurrency=Adaptive(1, 64), batch=Batch(max_records=50, linger=0.0), retry=PERSISTENT)
    async def handle(_: list[Record]) -> None:
        await asyncio.sleep(SERVICE)
        raise RetryLater(3_600.0)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 50)
            await asyncio.sleep(5.0)
            assert adaptive_of(app).moves == {}, "one run is too few"
            await publish(client, 2_000)
            await asyncio.sleep(5.0)
            assert adaptive_of(app).moves["overload"] >= 1

    run(test())


def test_the_share_of_workers_that_may_recover_follows_it() -> None:
    """Otherwise dead letters that cannot be written could take all runs that are allowed."""
    app = App("adaptive")

    @app.consume("orders", concurrency=Adaptive(1, 64), retry=Retry(attempts=1), on_failure="skip")
    async def handle(_: Record) -> None:
        await asyncio.sleep(SERVICE)

    async def test() -> None:
        async with TestClient(app) as client:
            (handler,) = engine_of(app).handlers
            assert handler.failures.workers == 8
            await publish(client, 2_000)
            await asyncio.sleep(4.0)
            assert handler.failures.workers == handler_of(app).concurrency > 8

    run(test())


def test_statistics_explanations_and_metrics_say_why_it_moved_last() -> None:
    app = App("adaptive")
    back_end = BackEnd(4)
    registry = CollectorRegistry()
    AppCollector(app, registry=registry)

    @app.consume("orders", concurrency=Adaptive(1, 64))
    async def handle(_: Record) -> None:
        await back_end.call()

    def changes(reason: str) -> float | None:
        labels = {"group": "adaptive", "handler": "handle", "reason": reason}
        return registry.get_sample_value("aioshard_concurrency_changes_total", labels)

    async def test() -> None:
        async with TestClient(app) as client:
            assert adaptive_of(app) == AdaptiveStatistics(
                1,
                64,
                before=8,
                reason="start",
                why=adaptive_of(app).why,
                since=None,
                latency=None,
                baseline=None,
                moves={},
            )
            assert changes("queue") == 0.0
            for number in range(2_000):
                await client.publish("orders", b"", partition=number % 3)
            await asyncio.sleep(15.1)  # in the middle of runs, not where they end
            found = adaptive_of(app)
            assert found.reason == "queue"
            assert (found.minimum, found.maximum) == (1, 64)
            assert found.before > handler_of(app).concurrency
            assert found.latency is not None
            assert found.baseline is not None
            assert found.since is not None
            assert found.since <= 15.0
            assert changes("queue") == found.moves["queue"]
            labels = {"group": "adaptive", "handler": "handle"}
            assert registry.get_sample_value("aioshard_concurrency", labels) == handler_of(app).concurrency
            assert found.why in app.explain()
            waiting = [part.head for part in app.diagnose().partitions if part.head and part.head.state == "queued"]
            assert any("adaptive concurrency of handler handle" in head.reason for head in waiting)

    run(test())


def test_a_drain_ends_while_most_workers_are_not_allowed_to_run() -> None:
    app = App("adaptive", drain_timeout=30.0, shutdown_timeout=30.0)
    done = 0

    @app.consume("orders", concurrency=Adaptive(1, 64, initial=1))
    async def handle(_: Record) -> None:
        nonlocal done
        await asyncio.sleep(SERVICE)
        done += 1

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 500, keys=10)
            await asyncio.sleep(0.3)

    run(test())
    assert 1 <= done < 500


@pytest.mark.parametrize("concurrency", [Adaptive(1, 64)])
def test_fixed_shards_cannot_have_it(concurrency: Adaptive) -> None:
    with pytest.raises(HandlerError, match=r"shards=4 and concurrency=Adaptive\(.*were both given"):
        App("adaptive").consume("orders", shards=4, concurrency=concurrency)


def compute(record: Record) -> None:
    """Can be imported by a worker process."""


def test_worker_processes_cannot_have_it() -> None:
    with pytest.raises(HandlerError, match=r"run_in='process'.*Adaptive"):
        App("adaptive").consume("orders", run_in="process", concurrency=Adaptive(1, 64))(compute)


@pytest.mark.parametrize("concurrency", [0, 1.5, "8"])
def test_other_values_are_refused_with_both_that_are_possible(concurrency: Any) -> None:
    with pytest.raises(HandlerError, match=r"concurrency=.*expected .*Adaptive"):
        App("adaptive").consume("orders", concurrency=concurrency)
