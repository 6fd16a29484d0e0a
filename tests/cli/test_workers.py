"""`aioshard run --workers N`: processes of one group that are kept running, and answer as one."""

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from tests.support.running import DEADLINE, Running, settled
from tests.support.shared_kafka import SharedKafka

NOWHERE = "127.0.0.1:1"
SHORT_SESSION = {"session_timeout": 6, "heartbeat_interval": 1}
WHAT_PROMETHEUS_ACCEPTS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;q=0.5,*/*;q=0.1"
)
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

Start = Callable[..., Awaitable[Running]]


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
        ) -> Running:
            source = SOURCE.format(group=group, bootstrap=bootstrap, topic=topic, seconds=seconds, settings=settings)
            (tmp_path / "service.py").write_text(before + source)
            command = ("run", "service:app", "--workers", "2", *arguments)
            running = await Running.start(tmp_path, *command, variables=variables)
            stack.push_async_callback(running.kill)
            return running

        yield started


async def workers(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.get("/statistics.json")).json()["workers"]
    return found


def partitions_of(worker: dict[str, Any]) -> list[int]:
    return [one["partition"] for one in (worker["statistics"] or {"partitions": []})["partitions"]]


def paused_of(worker: dict[str, Any]) -> list[str | None]:
    return [one["paused"] for one in (worker["statistics"] or {"partitions": []})["partitions"]]


async def shared(client: httpx.AsyncClient, count: int) -> list[dict[str, Any]]:
    """The workers, as soon as each partition is one's and is read, and both have some."""
    async with asyncio.timeout(DEADLINE):
        while True:
            found = await workers(client)
            owned = [partitions_of(one) for one in found]
            whole = all(owned) and sorted(one for each in owned for one in each) == list(range(count))
            # Who has been given its partitions may still wait for the other.
            if whole and not any(reason for worker in found for reason in paused_of(worker)):
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


def children_of(app: Running) -> list[int]:
    return [child.pid for child in psutil.Process(app.process.pid).children(recursive=True)]


def finished(app: Running) -> set[tuple[int, int]]:
    return {(int(one), int(two)) for one, two in re.findall(r"finished (\d+) (\d+)", app.output)}


# Kept running -----------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_killed_worker_is_followed_by_another_and_nothing_is_lost(
    kafka: SharedKafka, start: Start, group: str, topic: str
) -> None:
    """With the default session time-out of 45 s: nobody waits until that of the dead member is over."""
    await kafka.create_topic(topic, partitions=8)
    await kafka.produce(topic, [(b"%d" % number, b"v") for number in range(100)])
    app = await start(kafka.bootstrap, "--health-port", "0", "--json")
    async with await app.health() as client:
        await settled(client, "/readyz", lambda answer: answer.status_code == 200)
        before = await shared(client, 8)
        killed = before[1]["pid"]
        await asyncio.sleep(1.0)  # a worker tells its supervisor who it is in the group within a tenth of a second

        os.kill(killed, signal.SIGKILL)
        since = time.monotonic()
        not_ready = await settled(client, "/readyz", lambda answer: answer.status_code == 503)
        assert (await client.get("/livez")).status_code == 200
        await kafka.produce(topic, [(b"%d" % number, b"v") for number in range(100)])
        told = await app.warns("worker 1 was killed by SIGKILL, maybe since memory was short; it is started again in")
        ready = await settled(client, "/readyz", lambda answer: answer.status_code == 200)
        ready_after = time.monotonic() - since
        after = await shared(client, 8)
        print(f"ready again after {ready_after:.1f} s, the group whole after {time.monotonic() - since:.1f} s")

        assert "was taken out of the group" in app.errors
        assert any(reason.startswith("worker 1: ") for reason in not_ready.json()["reasons"])
        assert "for the 1. time" in told
        assert ready.json()["status"] == "ok"
        assert after[0]["pid"] == before[0]["pid"]
        assert after[1]["pid"] not in {killed, None}
        assert [one["restarts"] for one in after] == [0, 1]
        await settled(client, "/livez", lambda _: len(finished(app)) == 200)
        metrics = (await client.get("/metrics")).text
        scraped = await client.get("/metrics", headers={"accept": WHAT_PROMETHEUS_ACCEPTS})
        processes = {number: psutil.Process(after[number]["pid"]) for number in (0, 1)}
        assert all(one.is_running() for one in processes.values())
    check_metrics(metrics, group)
    assert scraped.headers["content-type"].startswith("application/openmetrics-text")
    strictly = {family.name for family in parse_openmetrics(scraped.text)}  # type: ignore[no-untyped-call]
    assert {"aioshard_records_processed", "aioshard_worker_up", "process_cpu_seconds"} <= strictly
    app.send(signal.SIGTERM)
    assert await app.ends() == 0
    await gone([one["pid"] for one in after])
    assert await kafka.lag(group, topic) == 0
    ending = json.loads(app.output.splitlines()[-1])
    assert ending == {
        "exit_code": 0,
        "signal": "SIGTERM",
        "workers": [
            {"worker": "0", "exit_code": 0, "restarts": 0},
            {"worker": "1", "exit_code": 0, "restarts": 1},
        ],
    }
    assert "[worker=0]" in app.errors


def check_metrics(text: str, group: str) -> None:
    """Every series says of which worker it is, and each family is told once."""
    series = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in series if 'worker="' not in line] == []
    headings = [line for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(headings) == len(set(headings))
    for number in "01":
        assert f'aioshard_worker_up{{group="{group}",worker="{number}"}} 1.0' in series
        assert f'aioshard_engine_state{{worker="{number}",group="{group}",state="running"}} 1.0' in series
    assert f'aioshard_worker_restarts_total{{group="{group}",worker="1"}} 1.0' in series
    of_processes = [line for line in series if line.startswith("process_resident_memory_bytes{")]
    assert len(of_processes) == 3
    assert any('worker="supervisor"' in line for line in of_processes)


@pytest.mark.slow
async def test_static_members_are_told_apart_and_a_killed_one_gets_its_partitions_back(
    kafka: SharedKafka, start: Start, topic: str
) -> None:
    """With the default session time-out of 45 s, which nobody waits for here."""
    await kafka.create_topic(topic, partitions=4)
    app = await start(kafka.bootstrap, "--health-port", "0", group_instance_id="left-hand")
    async with await app.health() as client:
        await settled(client, "/readyz", lambda answer: answer.status_code == 200)
        before = await shared(client, 4)
        assert [one["statistics"]["member_id"][:11] for one in before] == ["left-hand-0", "left-hand-1"]
        os.kill(before[0]["pid"], signal.SIGKILL)
        since = time.monotonic()
        await settled(client, "/readyz", lambda answer: answer.status_code == 503)
        await settled(client, "/readyz", lambda answer: answer.status_code == 200)
        after = await shared(client, 4)
        print(f"the group whole after {time.monotonic() - since:.1f} s")

        assert list(map(partitions_of, after)) == list(map(partitions_of, before))
        assert after[1]["statistics"]["rebalances"] == before[1]["statistics"]["rebalances"]
        assert after[1]["statistics"]["state"] == "running"


async def test_one_page_shows_all_and_acts_on_the_worker_that_is_meant(
    kafka: SharedKafka, start: Start, topic: str
) -> None:
    await kafka.create_topic(topic, partitions=4)
    token = "the token of a test"
    app = await start(kafka.bootstrap, "--web", variables={"AIOSHARD_WEB_TOKEN": token.replace(" ", "-")})
    allowed = {"authorization": f"Bearer {token.replace(' ', '-')}"}
    async with await app.health() as client:
        await settled(client, "/readyz", lambda answer: answer.status_code == 200)
        await shared(client, 4)
        assert "text/html" in (await client.get("/")).headers["content-type"]
        shown = (await client.get("/processes.json")).json()
        assert shown["actions"] is True
        assert [(one["worker"], one["error"], one["statistics"]["state"]) for one in shown["processes"]] == [
            ("0", None, "running"),
            ("1", None, "running"),
        ]

        pause = {"action": "pause_handler", "handler": "handle", "worker": "1"}
        done = await client.post("/actions", json=pause, headers=allowed)
        assert (done.status_code, done.json()) == (200, {"done": "worker 1: handler handle is paused"})
        paused = [paused_of(worker) for worker in await workers(client)]
        assert paused[0] == [None, None]
        assert None not in paused[1]

        for given, status in (
            ({}, 401),
            ({"authorization": f"{allowed['authorization']}x"}, 401),
            ({**allowed, "origin": "http://elsewhere.example"}, 403),
            ({**allowed, "host": "elsewhere.example", "origin": "http://elsewhere.example"}, 403),
        ):
            assert (await client.post("/actions", json={**pause, "worker": "0"}, headers=given)).status_code == status
        assert (await client.get("/processes.json", headers={"host": "elsewhere.example"})).status_code == 403
        now = [paused_of(worker) for worker in await workers(client)]
        assert now == paused, "who was refused has done nothing"
        for wrong, status in (({**pause, "handler": "none"}, 409), ({**pause, "worker": "7"}, 409)):
            refused = await client.post("/actions", json=wrong, headers=allowed)
            assert refused.status_code == status
            assert "worker" in refused.json()["error"]
        checked = await client.post("/actions", json={"action": "check"}, headers=allowed)
        assert checked.json() == {"done": "the token is right"}


async def test_a_worker_that_cannot_start_is_tried_again_and_the_probes_say_so(start: Start) -> None:
    crashing = "import os, sys\nif os.environ.get('AIOSHARD_WORKER') == '1': os._exit(1)\n"
    app = await start(NOWHERE, "--health-port", "0", before=crashing, start_timeout=600)
    async with await app.health() as client:
        await app.warns("for the 2. time")
        alive = await client.get("/livez")
        ready = await client.get("/readyz")
        explained = (await client.get("/explain")).text
        asked = (await client.get("/explain", params={"format": "json"})).json()["workers"]
    assert alive.status_code == 200
    assert any("worker 1: crashed (exit code 1); it is started again" in one for one in alive.json()["findings"])
    assert (ready.status_code, ready.json()["state"]) == (503, "starting")
    assert [reason[:9] for reason in ready.json()["reasons"]] == ["worker 0:", "worker 1:"]
    assert "Worker 0\nThe app is starting" in explained
    assert "Worker 1\ncrashed (exit code 1)" in explained
    assert asked[0]["diagnosis"]["state"] == "starting"
    assert asked[1]["diagnosis"] is None
    app.send(signal.SIGINT)
    assert await app.ends() == 0


async def test_what_a_restart_would_not_cure_ends_all(start: Start) -> None:
    refused = (
        "import os\nif os.environ.get('AIOSHARD_WORKER') == '0': os.environ['AIOSHARD_HEARTBEAT_INTERVAL'] = '40'\n"
    )
    app = await start(NOWHERE, before=refused, start_timeout=600)
    assert await app.ends() == 2
    assert "worker 0 was refused (exit code 2)" in app.errors
    assert "session_timeout=45 s is less than 3 times heartbeat_interval=40 s" in app.errors


# The end ----------------------------------------------------------------------------------


async def test_without_their_supervisor_the_workers_drain_and_end(
    kafka: SharedKafka, start: Start, group: str, topic: str
) -> None:
    await kafka.create_topic(topic, partitions=2)
    for partition in (0, 1):
        await kafka.produce(topic, [(b"k", b"v")], partition=partition)
    app = await start(kafka.bootstrap, seconds=2.0)
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


async def test_the_second_signal_kills_the_workers(kafka: SharedKafka, start: Start, topic: str) -> None:
    await kafka.create_topic(topic, partitions=2)
    await kafka.produce(topic, [(b"k", b"v")], partition=0)
    app = await start(kafka.bootstrap, seconds=60.0, shutdown_timeout=70)
    await app.says("began 0 0")
    pids = children_of(app)
    app.send(signal.SIGTERM)
    await app.warns("asked to end: draining and committing")
    app.send(signal.SIGTERM)
    assert await app.ends() == 130
    await gone(pids)


@pytest.mark.parametrize("way", ["killed", "second-signal"])
async def test_the_directory_of_their_sockets_is_gone_however_the_supervisor_ended(
    start: Start, tmp_path: Path, way: str
) -> None:
    (tmp_path / "made").mkdir()
    variables = {"TMPDIR": str(tmp_path / "made")}
    tells = "import os\nprint('imported by', os.environ.get('AIOSHARD_WORKER'), flush=True)\n"
    app = await start(NOWHERE, "--health-port", "0", before=tells, variables=variables, start_timeout=600)
    for worker in "01":
        await app.says(f"imported by {worker}")
    pids = children_of(app)
    (directory,) = (tmp_path / "made").glob("aioshard-*")
    if way == "killed":
        app.process.kill()
    else:
        app.send(signal.SIGTERM)
        await app.warns("SIGTERM: draining")
        app.send(signal.SIGTERM)
    await gone(pids)
    await app.ends()
    assert not directory.exists()


async def test_a_signal_to_all_of_them_at_once_is_one_signal(kafka: SharedKafka, start: Start, topic: str) -> None:
    """As systemd does it: the supervisor and the workers get it, and the workers are asked beside that."""
    await kafka.create_topic(topic, partitions=2)
    await kafka.produce(topic, [(b"k", b"v")], partition=0)
    app = await start(kafka.bootstrap, seconds=1.0)
    await app.says("began 0 0")
    for pid in [app.process.pid, *children_of(app)]:
        os.kill(pid, signal.SIGTERM)
    assert await app.ends() == 0, app.errors
    assert finished(app) == {(0, 0)}


async def test_a_worker_that_the_signal_ends_before_it_can_hear_it_has_ended_as_it_should(start: Start) -> None:
    """Nothing ran in it: an interpreter that only just starts is ended by SIGTERM itself."""
    deaf = "import os, signal, time\nif os.environ.get('AIOSHARD_WORKER') == '1':\n"
    deaf += "    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n    print('deaf', flush=True)\n    time.sleep(600)\n"
    app = await start(NOWHERE, before=deaf, start_timeout=600)
    await app.says("deaf")
    for pid in [app.process.pid, *children_of(app)]:
        os.kill(pid, signal.SIGTERM)
    assert await app.ends() == 0, app.errors


async def test_workers_that_have_caught_up_end_and_are_not_started_again(
    kafka: SharedKafka, start: Start, group: str, topic: str
) -> None:
    await kafka.create_topic(topic, partitions=4)
    await kafka.produce(topic, [(b"%d" % number, b"v") for number in range(40)])
    app = await start(kafka.bootstrap, "--until-caught-up", **SHORT_SESSION)
    assert await app.ends() == 0
    assert len(finished(app)) == 40
    assert await kafka.lag(group, topic) == 0
    assert "is started again" not in app.errors


# Refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "settings", "sentence"),
    [
        (["--reload"], {}, "--reload and --workers were given"),
        (["--reload-dir", "."], {}, "--reload-dir was given without --reload"),
        (["--assign", "orders:0"], {}, "--workers was given for an app whose partitions are given by hand"),
        ([], {"assign": {"orders": [0]}}, "--workers was given for an app whose partitions are given by hand"),
        (["--workers", "0"], {}, "0 is not in the range"),
    ],
    ids=["reload", "reload-dir", "assign-option", "assign-setting", "none"],
)
async def test_what_does_not_go_together_ends_with_2(
    start: Start, arguments: list[str], settings: dict[str, Any], sentence: str
) -> None:
    app = await start(NOWHERE, *arguments, **settings)
    assert await app.ends() == 2
    assert sentence in app.errors
    assert "is process" not in app.errors, "no worker was started"
