"""The supervisor and its ties to the workers, piece by piece; whole they are in `test_workers.py`."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest

from aioshard import App, Record
from aioshard.cli import supervising
from aioshard.cli.reloading import _Reloading
from aioshard.cli.run_options import RunOptions
from aioshard.cli.running import Signals
from aioshard.cli.supervising import Supervisor, _Life
from aioshard.cli.tether import MARGIN, Child, Ending, Tether
from aioshard.errors import SettingsError
from aioshard.web import asking
from aioshard.web.asking import NoAnswerError, WorkerAnswer

DEADLINE = 30.0
NOWHERE = "127.0.0.1:1"

SOURCE = """
from aioshard import App, Record
app = App("billing", bootstrap_servers="127.0.0.1:1", auto_offset_reset="earliest", start_timeout=600)

@app.consume("orders")
async def handle(record: Record) -> None: ...
"""


def options(directory: Path, **given: Any) -> RunOptions:
    chosen: dict[str, Any] = {
        "target": "service:app",
        "app_dir": str(directory),
        "workers": 1,
        "log_level": "warning",
        "log_format": "text",
        "host": "127.0.0.1",
        "reload_dirs": (),
    }
    unset = dict.fromkeys(RunOptions.__dataclass_fields__)
    return RunOptions(**{**unset, **chosen, **given})


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    """One of a worker that looks for its brokers."""
    (tmp_path / "service.py").write_text(SOURCE)
    app = App("billing", bootstrap_servers=NOWHERE, auto_offset_reset="earliest")

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    return Supervisor(app, options(tmp_path), Signals(), tmp_path)


async def test_a_worker_that_does_not_answer_any_more_is_killed_and_followed_by_another(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped process is one that answers nothing and does not drain."""
    monkeypatch.setattr(supervising, "_LOOKS_EVERY", 0.05)
    monkeypatch.setattr(supervising, "_LOOKS_WITHIN", 0.2)
    supervisor._drains_within = 0.5
    supervising_task = asyncio.create_task(supervisor.supervise(), name="supervise")
    (worker,) = supervisor._workers
    async with asyncio.timeout(DEADLINE):
        while worker.child is None or not os.path.exists(worker.socket):  # noqa: ASYNC110, ASYNC240, PTH110 - another process makes it
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)  # it has answered once
        first = worker.child.pid
        os.kill(first, signal.SIGSTOP)
        while supervisor.workers()[0].pid in {None, first}:  # noqa: ASYNC110 - another process ends
            await asyncio.sleep(0.05)
        supervisor._drains_within = DEADLINE
        supervisor._stopping.set()
        assert await supervising_task == 0
    assert "worker 0 does not answer: no answer within 0.2 s; it is drained, ended and started again" in caplog.text
    assert "worker 0 did not end in time when it was to, and was killed; it is started again in 0.5 s" in caplog.text
    assert supervisor.told() == [{"worker": "0", "exit_code": 0, "restarts": 1}]


async def test_where_no_process_can_be_started_it_is_tried_again(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = asyncio.Event()

    async def start(*_: Any, **__: Any) -> NoReturn:
        refused.set()
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(Child, "start", start)
    supervising_task = asyncio.create_task(supervisor.supervise(), name="supervise")
    async with asyncio.timeout(DEADLINE):
        await refused.wait()
        while (trouble := supervisor.workers()[0].trouble) is None:  # noqa: ASYNC110 - said in a step of the loop
            await asyncio.sleep(0.01)
        supervisor._stopping.set()
        assert await supervising_task == 0
    assert "no process could be started: Resource temporarily unavailable" in trouble
    assert "it is started again" in trouble


async def test_a_worker_is_given_up_only_after_several_looks_and_none_before_its_first_answer(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    well, ill = WorkerAnswer(200, {}, b"{}"), WorkerAnswer(503, {}, b'{"reasons": ["it hangs"]}')
    looks = [None, None, None, None, well, None, ill, well, ill, ill, None, well]

    async def ask(*_: Any, **__: Any) -> WorkerAnswer:
        answer = looks.pop(0)
        if answer is None:
            raise NoAnswerError("no answer")
        return answer

    monkeypatch.setattr(asking, "ask_worker", ask)
    monkeypatch.setattr(supervising, "_LOOKS_EVERY", 0.0)
    async with asyncio.timeout(DEADLINE):
        await supervisor._watch(supervisor._workers[0])
    assert looks == [well]


class Ended:
    """A process that has ended as soon as it is started."""

    pid, member = 1, ""

    def __init__(self, ending: Ending) -> None:
        self._ending = ending

    async def ended(self) -> Ending:
        return self._ending


async def test_an_instance_id_that_somebody_else_has_ends_all(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def start(*_: Any, **__: Any) -> Ended:
        return Ended(Ending(1, "InstanceIdTakenError", "somebody else has it"))

    monkeypatch.setattr(Child, "start", start)
    async with asyncio.timeout(DEADLINE):
        assert await supervisor.supervise() == 1
    assert supervisor.told() == [{"worker": "0", "exit_code": 1, "restarts": 0}]
    assert "starting it again would not help, all end" in caplog.text


@pytest.mark.parametrize(("ago", "hopeless"), [(85.0, False), (91.0, True)])
def test_the_instance_id_of_a_worker_that_was_killed_is_waited_for(
    supervisor: Supervisor, ago: float, *, hopeless: bool
) -> None:
    """For two sessions of 45 s: until one is over the brokers keep it."""
    (worker,) = supervisor._workers
    worker.killed_at = time.monotonic() - ago
    life = _Life(Ending(1, "InstanceIdTakenError", ""), 1.0, overdue=False, member="")
    assert supervisor._is_hopeless(worker, life) == hopeless


async def test_pauses_grow_to_half_a_minute_and_begin_anew_after_a_minute_of_life(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    (worker,) = supervisor._workers
    supervisor._stopping.set()  # so nobody waits for them
    for seconds in (*[59.0] * 9, 60.0, 1.0, 1.0):
        await supervisor._pause(worker, _Life(Ending(1, None, ""), seconds, overdue=False, member=""))

    pauses = [float(pause) for pause in re.findall(r"it is started again in ([\d.]+) s", caplog.text)]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 0.5, 0.5, 1]


# The other way to start it again ------------------------------------------------------------


async def test_without_a_process_there_is_no_reload_and_the_sentence_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    reloading = _Reloading(options(tmp_path, workers=None, reload=True), Signals())
    async with asyncio.timeout(DEADLINE):
        with pytest.raises(click.ClickException, match=r"no process can be started with .*gone: No such file"):
            await reloading.run()


# The tie ------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Any:
    ours, theirs = socket.socketpair()
    tether = Tether(theirs.detach())
    yield ours, tether
    ours.close()
    tether._socket.close()


@pytest.mark.parametrize("way", ["asked", "dead"])
def test_the_wish_of_the_parent_and_its_death_are_heard_and_bounded(
    ends: tuple[socket.socket, Tether], way: str
) -> None:
    ours, tether = ends
    asked, left = threading.Event(), threading.Event()
    tether.within = 0.2 - MARGIN
    tether.watch(asked.set, left.set)
    assert not asked.wait(0.05)
    if way == "asked":
        ours.shutdown(socket.SHUT_WR)
    else:
        ours.close()
    assert asked.wait(DEADLINE)
    assert left.wait(DEADLINE), "a process whose drain does not end leaves all the same"


def test_how_it_ended_is_told(ends: tuple[socket.socket, Tether]) -> None:
    ours, tether = ends
    tether.tell(SettingsError("no such thing"))
    assert json.loads(ours.recv(4096)) == {"error": "SettingsError", "message": "no such thing"}
    ours.close()
    tether.tell(SettingsError("nobody hears it"))  # and nothing happens


async def test_a_member_id_is_told_when_it_changes(ends: tuple[socket.socket, Tether]) -> None:
    ours, tether = ends
    ours.setblocking(False)  # noqa: FBT003 - positional only
    ids = iter(["", "a", "a", "b"])
    telling = asyncio.create_task(tether.tell_member(lambda: next(ids, "b")), name="tell")
    told = b""
    async with asyncio.timeout(DEADLINE):
        while told.count(b"\n") < 2:
            told += await asyncio.get_running_loop().sock_recv(ours, 4096)
    telling.cancel()
    assert [json.loads(line)["member"] for line in told.splitlines()] == ["a", "b"]
