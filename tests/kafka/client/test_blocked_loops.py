"""A blocking handler: how long its member stays in the group."""

import asyncio
import contextlib
import re
import sys
import threading
import time
from collections import Counter
from typing import Any, NamedTuple, Self

import pytest

from aioshard import App, Context, Record
from tests.kafka.client.members import PATIENCE
from tests.support.brokers import SharedKafka
from tests.support.starving import a_core, member, starve

SESSION = 3.0
RECORDS = 20

SHORT_REBALANCE: dict[str, Any] = {"rebalance_timeout": 4.0, "drain_timeout": 1.0, "commit_timeout": 1.0}


class Case(NamedTuple):
    """A handler that blocks for some seconds, and the promise for its member."""

    settings: dict[str, Any]
    seconds: float
    keeps_its_partitions: bool
    in_a_thread: bool = False


CASES = {
    "three-sessions": Case({}, 3 * SESSION + 0.5, keeps_its_partitions=True),
    "longer-than-a-rebalance": Case(SHORT_REBALANCE, 6.5, keeps_its_partitions=False),
    "longer-in-a-thread": Case({}, 5.5, keeps_its_partitions=True, in_a_thread=True),
}


def make_app(kafka: SharedKafka, topic: str, group: str, case: Case) -> tuple[App, Counter[int]]:
    app = App(
        group,
        bootstrap_servers=kafka.bootstrap,
        auto_offset_reset="earliest",
        session_timeout=SESSION,
        heartbeat_interval=0.5,
        commit_interval=0.2,
        fetch_max_wait=0.05,
        **case.settings,
    )
    ran: Counter[int] = Counter()

    def run(record: Record) -> None:
        ran[record.offset] += 1
        if record.offset == 0 and ran[0] == 1:
            time.sleep(case.seconds)

    if case.in_a_thread:
        app.consume(topic, concurrency=4)(run)
    else:

        @app.consume(topic, concurrency=4)
        async def handle(record: Record) -> None:
            run(record)

    return app, ran


class Ages:
    """Asks from a thread how old the last heartbeat is."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="asks for heartbeats")
        self.highest = 0.0

    def _ask(self) -> None:
        while not self._over.wait(0.1):
            self.highest = max(self.highest, self._app.statistics().heartbeat_age or 0.0)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await asyncio.to_thread(self._thread.join)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[pytest.mark.chaos] if case.settings else []) for name, case in CASES.items()],
)
async def test_a_blocked_member_stays_for_as_long_as_a_rebalance_may_take(
    kafka: SharedKafka, topic: str, group: str, case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    await kafka.create_topic(topic, 1)
    app, ran = make_app(kafka, topic, group, case)
    async with app, Ages(app) as ages:
        await kafka.produce(topic, [(b"%d" % number, b"") for number in range(RECORDS)])
        async with asyncio.timeout(PATIENCE + case.seconds):
            while [partition.committed for partition in app.statistics().partitions] != [RECORDS]:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.1)
        await asyncio.sleep(2.0)  # a few heartbeats more: a lost membership would be noticed
        statistics = app.statistics()

    assert statistics.state == "running"
    if not case.settings:
        assert 0.0 < ages.highest < SESSION, "a thread sends them"
    assert ran.keys() == set(range(RECORDS))
    if case.keeps_its_partitions:
        assert (statistics.rebalances, statistics.commit_failures, set(ran.values())) == (1, 0, {1})
    else:
        assert statistics.rebalances > 1
    named = re.search(r"the event loop has been blocked for .*: handler handle blocks", caplog.text)
    assert bool(named) == (not case.in_a_thread)


def block(seconds: float) -> None:
    """Block the event loop, as a handler does by mistake."""
    time.sleep(seconds)


@pytest.mark.chaos
async def test_nothing_starts_after_a_block_in_which_the_member_has_left(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    """The thread of the heartbeats has left the group, and another member may have joined."""
    await kafka.create_topic(topic, 1)
    app = App(
        group,
        bootstrap_servers=kafka.bootstrap,
        auto_offset_reset="earliest",
        group_protocol="consumer",
        fetch_max_wait=0.05,
        **SHORT_REBALANCE,
    )
    starts: list[asyncio.Event] = []
    """The ownership in which each record started."""
    starts_before = 0

    @app.consume(topic, concurrency=8)
    async def handle(_: Record, context: Context) -> None:
        nonlocal starts_before
        starts.append(context.revoked)
        if len(starts) == 20:
            block(6.5)
            starts_before = len(starts)
        else:
            await asyncio.sleep(0.05)

    async with app:
        await kafka.produce(topic, [(b"%d" % number, b"") for number in range(500)])
        async with asyncio.timeout(PATIENCE):
            while [partition.committed for partition in app.statistics().partitions] != [500]:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.1)
        assert app.statistics().rebalances > 1
    assert starts_before == 20, "the loop was blocked"
    assert starts[0] not in starts[starts_before:]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the time without a CPU")
async def test_a_member_without_a_cpu_does_not_blame_its_handlers(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic, 1)
    core = a_core()

    async def produce() -> None:
        while True:
            await kafka.produce(topic, [(b"%d" % number, b"") for number in range(100)])
            await asyncio.sleep(0.5)

    async with member("await", kafka.bootstrap, topic, group, core=core, niceness=19) as starved:
        producing = asyncio.create_task(produce(), name="produce")
        await starve(starved, core, lambda report: report.get("cause") == "no CPU")
        await starved.end()
        producing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await producing
    reports = [report for report in starved.reports if report["kind"] in ("log", "explained")]
    assert "no CPU" in {report["cause"] for report in reports}
    assert not [report for report in reports if "without an await" in report["text"]]
