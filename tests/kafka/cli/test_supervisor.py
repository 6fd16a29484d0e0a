"""Parts of the supervisor and its children; see `test_workers.py` and `test_reload.py` for the whole."""

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from aioshard import App, Record
from aioshard.cli import supervisor as module
from aioshard.cli.supervisor import Child, Ending, Parent, Supervisor
from aioshard.errors import SettingsError
from aioshard.signals import Signals

DEADLINE = 30.0
NOWHERE = "127.0.0.1:1"

SOURCE = """
from aioshard import App, Record
app = App("billing", bootstrap_servers="127.0.0.1:1", auto_offset_reset="earliest", start_timeout=600)

@app.consume("orders")
async def handle(record: Record) -> None: ...
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    """One of a worker that looks for its brokers."""
    (tmp_path / "service.py").write_text(SOURCE)
    app = App("billing", bootstrap_servers=NOWHERE, auto_offset_reset="earliest")

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    return Supervisor(app, ["service:app", "--workers", "1", "--app-dir", str(tmp_path)], 1)


def endings(supervisor: Supervisor) -> list[tuple[int, int]]:
    return [(worker.exit_code, worker.restarts) for worker in supervisor.workers]


async def test_a_worker_that_stops_reporting_is_killed_and_replaced(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped process reports nothing and does not drain."""
    monkeypatch.setattr(module, "_UNHEALTHY_AFTER", 1.0)
    supervisor._drain_timeout = 0.5
    running = asyncio.create_task(supervisor.run(Signals()), name="supervise")
    (worker,) = supervisor.workers
    async with asyncio.timeout(DEADLINE):
        while worker.child is None or worker.child.healthy_at == float("inf"):  # noqa: ASYNC110 - another process reports
            await asyncio.sleep(0.05)
        first = worker.child.pid
        os.kill(first, signal.SIGSTOP)
        while worker.restarts == 0:  # noqa: ASYNC110 - another process ends
            await asyncio.sleep(0.05)
        supervisor._drain_timeout = DEADLINE
        while worker.child is None:  # noqa: ASYNC110 - another process starts
            await asyncio.sleep(0.05)
        supervisor._stopping.set()
        assert await running == 0
    assert "worker 0 is unhealthy and is drained and restarted: it has not reported for" in caplog.text
    assert "worker 0 did not drain in time and was killed; restarting in 0.5 s" in caplog.text
    assert endings(supervisor) == [(0, 1)]


async def test_a_failed_process_start_is_retried(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0

    async def start(*_: Any, **__: Any) -> NoReturn:
        nonlocal tries
        tries += 1
        if tries == 2:
            supervisor._stopping.set()
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(Child, "start", start)
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.0)
    async with asyncio.timeout(DEADLINE):
        assert await supervisor.run(Signals()) == 1
    assert "no process could be started: Resource temporarily unavailable; restarting in 0 s" in caplog.text
    assert tries == 2


@pytest.mark.parametrize(
    ("silent", "problems", "unhealthy"),
    [(-float("inf"), [], False), (14.0, [], False), (14.0, ["it hangs"], False), (15.1, [], True), (15.1, ["x"], True)],
    ids=["no report yet", "healthy", "recently unhealthy", "silent", "silent and unhealthy"],
)
async def test_a_worker_is_unhealthy_after_silence_or_problems_but_not_before_its_first_report(
    supervisor: Supervisor, silent: float, problems: list[str], *, unhealthy: bool
) -> None:
    """A worker that has not reported yet still imports its modules."""
    child = object.__new__(Child)
    child.problems, child.healthy_at = problems, time.monotonic() - silent
    watching = asyncio.create_task(supervisor._unhealthy(0, child), name="watch")
    done, _ = await asyncio.wait([watching], timeout=0.1)
    watching.cancel()
    assert bool(done) == unhealthy


class Ended:
    """A process that has ended as soon as it is started."""

    pid = 1
    problems = ()
    healthy_at = float("inf")

    def __init__(self, ending: Ending) -> None:
        self._ending = ending

    async def run_until(self, *_: Any, **__: Any) -> Ending:
        return self._ending


async def test_a_worker_is_replaced_although_its_member_cannot_be_removed(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No error may end the supervisor of the other workers."""
    endings = [Ending(-(signal.SIGRTMIN + 1), member="m-1"), Ending(0)]

    async def start(*_: Any, **__: Any) -> Ended:
        if len(endings) == 1:
            supervisor._stopping.set()
        return Ended(endings.pop(0))

    def fail(*_: Any) -> NoReturn:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Child, "start", start)
    monkeypatch.setattr(module, "KafkaAdmin", fail)
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.0)
    async with asyncio.timeout(DEADLINE):
        assert await supervisor.run(Signals()) == 0
    assert "member m-1 stays in the group until its session expires: a bug" in caplog.text
    assert "worker 0 was killed by signal" in caplog.text
    assert endings == []


@pytest.mark.parametrize(
    ("ending", "restarts"),
    [(Ending(3, "HaltedError"), 0), (Ending(3, "MissingTopicError"), 1)],
    ids=["halted", "lacks"],
)
async def test_until_caught_up_a_worker_that_lacks_a_topic_is_restarted(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, ending: Ending, restarts: int
) -> None:
    """Both end with 3, but only the halted one has processed the rest."""
    ended = [ending, Ending(0)]

    async def start(*_: Any, **__: Any) -> Ended:
        return Ended(ended.pop(0))

    monkeypatch.setattr(Child, "start", start)
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.0)
    supervisor._until_caught_up = True
    async with asyncio.timeout(DEADLINE):
        await supervisor.run(Signals())
    assert [worker.restarts for worker in supervisor.workers] == [restarts]


async def test_an_instance_id_used_by_another_process_ends_all_workers(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def start(*_: Any, **__: Any) -> Ended:
        return Ended(Ending(1, "InstanceIdTakenError", "another process has it"))

    monkeypatch.setattr(Child, "start", start)
    async with asyncio.timeout(DEADLINE):
        assert await supervisor.run(Signals()) == 1
    assert endings(supervisor) == [(1, 0)]
    assert "a restart would not help: stopping all workers" in caplog.text


@pytest.mark.parametrize(("ago", "permanent"), [(85.0, False), (91.0, True)])
def test_a_restart_waits_for_the_instance_id_of_a_killed_worker(
    supervisor: Supervisor, ago: float, *, permanent: bool
) -> None:
    """For two sessions of 45 s: until one is over the brokers keep it."""
    (worker,) = supervisor.workers
    worker.killed_at = time.monotonic() - ago
    assert supervisor._is_permanent(worker, Ending(1, "InstanceIdTakenError", seconds=1.0)) == permanent


async def test_restart_delays_grow_to_30_s_and_reset_after_a_minute_of_uptime(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    (worker,) = supervisor.workers
    supervisor._stopping.set()  # so nobody waits for them
    for seconds in (*[59.0] * 9, 60.0, 1.0, 1.0):
        await supervisor._pause(worker, Ending(1, seconds=seconds))

    pauses = [float(pause) for pause in re.findall(r"restarting in ([\d.]+) s", caplog.text)]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 0.5, 0.5, 1]


# The child's end ----------------------------------------------------------------------------


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, Parent]]:
    """The two ends of a child that does not exit, and its thread has ended before the test has."""
    monkeypatch.setattr(module, "_REPORT_INTERVAL", 0.02)
    monkeypatch.setattr(module, "exit_now", lambda _: None)
    before = set(threading.enumerate())
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE)
    parent = Parent(theirs.detach())
    yield ours, parent
    parent.app = None
    monkeypatch.setattr(module, "_IMPORT_TIMEOUT", -module.MARGIN)
    ours.close()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    parent._socket.close()


@pytest.mark.parametrize("way", ["asked", "dead"])
def test_a_child_stops_on_request_or_parent_death_in_bounded_time(
    ends: tuple[socket.socket, Parent], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, parent = ends
    drained, exited = threading.Event(), threading.Event()
    monkeypatch.setattr(module, "_IMPORT_TIMEOUT", 0.2 - module.MARGIN)
    monkeypatch.setattr(module, "exit_now", lambda _: exited.set())
    parent.watch(drained.set)
    assert not drained.wait(0.05)
    if way == "asked":
        ours.shutdown(socket.SHUT_WR)
    else:
        ours.close()
    assert drained.wait(DEADLINE)
    assert exited.wait(DEADLINE), "a process whose drain does not end exits all the same"


def test_a_child_reports_its_member_and_its_error(ends: tuple[socket.socket, Parent]) -> None:
    ours, parent = ends
    reports = ours.makefile()
    parent.watch(lambda: None)
    assert json.loads(reports.readline()) == {}, "it imports its modules"
    parent.app = App("billing")
    while not (report := json.loads(reports.readline())):
        pass
    assert report == {"member": None, "problems": []}
    parent.report_error(SettingsError("no such setting"))
    while "error" not in (report := json.loads(reports.readline())):
        pass
    assert report == {"error": "SettingsError", "message": "no such setting"}


def test_a_report_to_a_dead_parent_is_lost(ends: tuple[socket.socket, Parent]) -> None:
    ours, parent = ends
    ours.close()
    parent.report_error(SettingsError("nobody hears it"))
