"""Handlers in worker processes when the app is killed: no process is left, and no record is lost."""

import asyncio
import os
import select
from pathlib import Path

import pytest

from tests.guarantees.behaviour import HANG
from tests.guarantees.checks import SAFE
from tests.guarantees.observations import Kind
from tests.guarantees.scenario import Scenario, even_keys


@pytest.mark.parametrize("protocol", ["classic", pytest.param("consumer", marks=pytest.mark.chaos)])
async def test_kill_9_of_the_app_leaves_no_worker_process_and_loses_nothing(scenario: Scenario) -> None:
    """One of its processes computes forever, and no parent is left to end it."""
    settings = {"processes": 2, "session_timeout": 3, "rebalance_timeout": 8}
    await scenario.create(partitions=4)
    first = scenario.start("a", settings, form="process", base=0.002, hangs="until cancelled")
    await scenario.until_settled("a")
    await scenario.produce([(b"stuck", HANG)])
    await scenario.until(lambda: len(scenario.observations.of("a.1", Kind.STARTED)) == 1, "a run computes forever")
    scenario.start_feeding(even_keys(seed=5, keys=200), backlog=1_000, chunk=500)
    await scenario.until_finished(300)
    workers = [os.pidfd_open(pid) for pid in _children(first.pid)]
    assert len(workers) == 2

    await scenario.kill("a")

    for worker in workers:
        readable, *_ = await asyncio.to_thread(select.select, [worker], [], [], 10.0)
        assert readable, "a worker process outlives its app"
        os.close(worker)
    scenario.start("a", settings, form="process", base=0.002)
    await scenario.verify(*SAFE)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
