"""`aioshard run --workers N`: supervised processes of one group, each with its health server."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.brokers import SharedKafka
from tests.support.subprocesses import DEADLINE, CommandProcess, until_answer

NOWHERE = "127.0.0.1:1"
SHORT_SESSION = {"session_timeout": 6, "heartbeat_interval": 1}
NO_VARIABLES: Mapping[str, str] = {}

SOURCE = """
import asyncio, os
from aioshard import App, Record

app = App({group!r}, bootstrap_servers={bootstrap!r}, auto_offset_reset="earliest", **{settings!r})

def tell(what: str, record: Record) -> None:
    # In one piece: the workers have one pipe, and where Python does not buffer, print writes each word by itself.
    os.write(1, b"%s %d %d\\n" % (what.encode(), record.partition, record.offset))

@app.consume({topic!r}, shard_by="record")
async def handle(record: Record) -> None:
    tell("began", record)
    await asyncio.sleep({seconds!r})
    tell("finished", record)
"""

Start = Callable[..., Awaitable[CommandProcess]]


@pytest.fixture
async def start(tmp_path: Path, group: str, topic: str) -> AsyncIterator[Start]:
    """Starts `aioshard run --workers 2`; no process of it is left when the test ends."""
    async with contextlib.AsyncExitStack() as stack:

        async def started(
            bootstrap: str,
            *arguments: str,
            seconds: float = 0.0,
            before: str = "",
            variables: Mapping[str, str] = NO_VARIABLES,
            **settings: object,
        ) -> CommandProcess:
            source = SOURCE.format(group=group, bootstrap=bootstrap, topic=topic, seconds=seconds, settings=settings)
            (tmp_path / "service.py").write_text(before + source)
            command = ("run", "service:app", "--workers", "2", *arguments)
            running = await CommandProcess.start(tmp_path, *command, variables=variables)
            stack.push_async_callback(running.kill)
            return running

        yield started


class Workers:
    """The health servers of both workers; each restart of a worker gives it another port."""

    def __init__(self, app: CommandProcess) -> None:
        self._app = app

    async def client(self, number: int, process: int) -> httpx.AsyncClient:
        """A client of a process of a worker; the first is number 0."""

        def urls() -> list[str]:
            lines = (line for line in self._app.errors.splitlines() if f"[worker={number}]" in line)
            return [line.split("health server listens on ")[1].split()[0] for line in lines if "listens on" in line]

        async with asyncio.timeout(DEADLINE):
            while len(urls()) <= process:  # noqa: ASYNC110 - another process says it
                await asyncio.sleep(0.05)
        return httpx.AsyncClient(base_url=urls()[process], timeout=DEADLINE)

    async def pids(self) -> list[int]:
        """The processes of the workers, the latest of each."""
        await self._app.warns("worker 1 is process")
        return [int(re.findall(rf"worker {number} is process (\d+)", self._app.errors)[-1]) for number in (0, 1)]


async def statistics(client: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/statistics.json")).json()
    return found


def partitions_of(found: dict[str, Any]) -> list[int]:
    return [partition["partition"] for partition in found["partitions"]]


async def shared(clients: list[httpx.AsyncClient], count: int) -> list[dict[str, Any]]:
    """The statistics of the workers, as soon as each partition is one's and is read, and both have some."""
    async with asyncio.timeout(DEADLINE):
        while True:
            found = [await statistics(client) for client in clients]
            owned = list(map(partitions_of, found))
            whole = all(owned) and sorted(partition for each in owned for partition in each) == list(range(count))
            # A worker with its partitions may still wait for the other.
            if whole and not any(partition["paused"] for each in found for partition in each["partitions"]):
                return found
            await asyncio.sleep(0.05)


async def gone(pids: list[int]) -> None:
    """Wait until none of these processes runs."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    _, alive = await asyncio.to_thread(psutil.wait_procs, found, DEADLINE)
    assert alive == []


def children_of(app: CommandProcess) -> list[int]:
    return [child.pid for child in psutil.Process(app.process.pid).children(recursive=True)]


def finished(app: CommandProcess) -> set[tuple[int, int]]:
    return {(int(partition), int(two)) for partition, two in re.findall(r"finished (\d+) (\d+)", app.output)}


# Kept running -----------------------------------------------------------------------------


@pytest.mark.chaos
async def test_a_killed_worker_is_replaced_and_nothing_is_lost(
    kafka: SharedKafka, start: Start, group: str, topic: str
) -> None:
    """With the default session timeout of 45 s: nothing waits for the dead member to time out."""
    await kafka.create_topic(topic, partitions=8)
    await kafka.produce(topic, [(b"%d" % number, b"v") for number in range(100)])
    app = await start(kafka.bootstrap, "--health-port", "0", "--json")
    workers = Workers(app)
    async with await workers.client(0, 0) as first, await workers.client(1, 0) as second:
        await shared([first, second], 8)
        before = await workers.pids()
        await app.warns(f"process {before[1]} is member")  # its supervisor knows who it is in the group

        os.kill(before[1], signal.SIGKILL)
        since = time.monotonic()
        await kafka.produce(topic, [(b"%d" % number, b"v") for number in range(100)])
        warning = await app.warns("worker 1 was killed by SIGKILL, perhaps because memory ran out; restarting in")
        async with await workers.client(1, 1) as third:
            await until_answer(third, "/readyz", lambda answer: answer.status_code == 200)
            await shared([first, third], 8)
            print(f"the group whole after {time.monotonic() - since:.1f} s")
            await until_answer(third, "/livez", lambda _: len(finished(app)) == 200)
            metrics = (await third.get("/metrics")).text
        assert "aioshard_engine_state{" in metrics
        assert "process_resident_memory_bytes " in metrics
    after = await workers.pids()
    assert "was removed from the group" in app.errors
    assert "(restart 1)" in warning
    assert after[0] == before[0]
    assert after[1] != before[1]
    app.send(signal.SIGTERM)
    assert await app.ends() == 0
    await gone(after)
    assert await kafka.lag(group, topic) == 0
    ending = json.loads(app.output.splitlines()[-1])
    assert ending == {
        "exit_code": 0,
        "signal": "SIGTERM",
        "workers": [
            {"worker": 0, "exit_code": 0, "restarts": 0},
            {"worker": 1, "exit_code": 0, "restarts": 1},
        ],
    }


@pytest.mark.chaos
async def test_a_killed_static_member_gets_its_partitions_back(kafka: SharedKafka, start: Start, topic: str) -> None:
    """With the default session timeout of 45 s, without waiting for it."""
    await kafka.create_topic(topic, partitions=4)
    app = await start(kafka.bootstrap, "--health-port", "0", group_instance_id="left-hand")
    workers = Workers(app)
    async with await workers.client(0, 0) as killed, await workers.client(1, 0) as other:
        before = await shared([killed, other], 4)
        assert [member["member_id"][:11] for member in before] == ["left-hand-0", "left-hand-1"]
        os.kill((await workers.pids())[0], signal.SIGKILL)
        since = time.monotonic()
        async with await workers.client(0, 1) as third:
            after = await shared([third, other], 4)
        print(f"the group whole after {time.monotonic() - since:.1f} s")

        assert list(map(partitions_of, after)) == list(map(partitions_of, before))
        assert after[1]["rebalances"] == before[1]["rebalances"]
        assert after[1]["state"] == "running"


@pytest.mark.chaos
async def test_each_worker_listens_on_its_own_port(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1] - 1  # worker 1 finds its port in use, and is restarted until it is free
        app = await start(NOWHERE, "--health-port", str(port), start_timeout=600)
        await app.warns(f"health server listens on http://127.0.0.1:{port} ")
        refused = await app.warns("worker 1 ended with exit code 1")
    assert f"the health server cannot listen on 127.0.0.1:{port + 1}" in refused
    await app.warns(f"health server listens on http://127.0.0.1:{port + 1} ")
    app.send(signal.SIGTERM)
    assert await app.ends() == 0


@pytest.mark.chaos
async def test_a_worker_that_cannot_start_is_retried(start: Start) -> None:
    crashing = "import os, sys\nif os.environ.get('AIOSHARD_WORKER') == '1': os._exit(1)\n"
    app = await start(NOWHERE, before=crashing, start_timeout=600)
    assert "worker 1 ended with exit code 1" in await app.warns("(restart 2)")
    app.send(signal.SIGINT)
    assert await app.ends() == 0


async def test_a_permanent_worker_error_ends_all_workers(start: Start) -> None:
    refused = (
        "import os\nif os.environ.get('AIOSHARD_WORKER') == '0':\n"
        "    os.environ |= {'AIOSHARD_HEARTBEAT_INTERVAL': '40', 'AIOSHARD_SESSION_TIMEOUT': '45'}\n"
    )
    app = await start(NOWHERE, before=refused, start_timeout=600)
    assert await app.ends() == 2
    assert "worker 0 ended with exit code 2" in app.errors
    assert "session_timeout=45 s is less than 3 times heartbeat_interval=40 s" in app.errors


# The end ----------------------------------------------------------------------------------
@pytest.mark.chaos
async def test_workers_drain_and_exit_without_their_supervisor(
    kafka: SharedKafka, start: Start, group: str, topic: str
) -> None:
    await kafka.create_topic(topic, partitions=2)
    for partition in (0, 1):
        await kafka.produce(topic, [(b"k", b"v")], partition=partition)
    app = await start(kafka.bootstrap, seconds=1.0)
    await app.says("began")
    pids = children_of(app)
    assert len(pids) >= 2
    app.process.kill()
    await gone(pids)
    assert await app.ends() == -signal.SIGKILL
    began = len(re.findall("began", app.output))
    assert len(finished(app)) == began, "what ran has ended"
    committed = await kafka.committed(group, topic)
    assert sum(committed.values()) == began, "and was committed"


@pytest.mark.chaos
async def test_the_second_signal_kills_the_workers(kafka: SharedKafka, start: Start, topic: str) -> None:
    await kafka.create_topic(topic, partitions=2)
    await kafka.produce(topic, [(b"k", b"v")], partition=0)
    app = await start(kafka.bootstrap, seconds=60.0, shutdown_timeout=70)
    await app.says("began 0 0")
    pids = children_of(app)
    app.send(signal.SIGTERM)
    await app.warns("draining and committing: requested by the parent process")
    app.send(signal.SIGTERM)
    assert await app.ends() == 130
    await gone(pids)


@pytest.mark.chaos
async def test_a_signal_to_the_process_group_counts_once(kafka: SharedKafka, start: Start, topic: str) -> None:
    """As systemd does it: the supervisor and the workers get it, and the workers also get a request."""
    await kafka.create_topic(topic, partitions=2)
    await kafka.produce(topic, [(b"k", b"v")], partition=0)
    app = await start(kafka.bootstrap, seconds=1.0)
    await app.says("began 0 0")
    for pid in [app.process.pid, *children_of(app)]:
        os.kill(pid, signal.SIGTERM)
    assert await app.ends() == 0, app.errors
    assert finished(app) == {(0, 0)}


async def test_a_worker_killed_by_the_signal_during_startup_counts_as_stopped(start: Start) -> None:
    """Nothing ran in it: an interpreter that only just starts is ended by SIGTERM itself."""
    deaf = "import os, signal, time\nif os.environ.get('AIOSHARD_WORKER') == '1':\n"
    deaf += "    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n    print('deaf', flush=True)\n    time.sleep(600)\n"
    app = await start(NOWHERE, before=deaf, start_timeout=600)
    await app.says("deaf")
    for pid in [app.process.pid, *children_of(app)]:
        os.kill(pid, signal.SIGTERM)
    assert await app.ends() == 0, app.errors


async def test_workers_that_have_caught_up_exit_and_are_not_restarted(
    kafka: SharedKafka, start: Start, group: str, topic: str
) -> None:
    await kafka.create_topic(topic, partitions=4)
    await kafka.produce(topic, [(b"%d" % number, b"v") for number in range(40)])
    app = await start(kafka.bootstrap, "--until-caught-up", **SHORT_SESSION)
    assert await app.ends() == 0
    assert len(finished(app)) == 40
    assert await kafka.lag(group, topic) == 0
    assert "(restart 1)" not in app.errors


# Refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "settings", "sentence"),
    [
        (["--reload"], {}, "--reload cannot be combined with --workers"),
        (["--assign", "orders:0"], {}, "--workers cannot be combined with manually assigned partitions"),
        ([], {"assign": {"orders": [0]}}, "--workers cannot be combined with manually assigned partitions"),
        pytest.param(["--workers", "0"], {}, "0 is not in the range", marks=pytest.mark.chaos),
    ],
    ids=["reload", "assign-option", "assign-setting", "none"],
)
async def test_incompatible_options_exit_2(
    start: Start, arguments: list[str], settings: dict[str, Any], sentence: str
) -> None:
    app = await start(NOWHERE, *arguments, **settings)
    assert await app.ends() == 2
    assert sentence in app.errors
    assert "is process" not in app.errors, "no worker was started"
