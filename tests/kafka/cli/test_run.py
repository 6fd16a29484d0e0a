"""`aioshard run` as a process: signals, exit codes, the health server."""

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.brokers import SharedKafka
from tests.support.kafka import KafkaBroker
from tests.support.paths import PROJECT
from tests.support.subprocesses import DEADLINE, CommandProcess, environment, until_answer

NOWHERE = "127.0.0.1:1"
"""An address where nobody listens."""
NO_VARIABLES: Mapping[str, str] = {}

HANDLERS = {
    # A line on standard input lets one record finish.
    "held": """
@app.consume(topic)
async def handle(record: Record) -> None:
    print("began", record.offset, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    print("finished", record.offset, flush=True)
""",
    "quick": """
@app.consume(topic)
async def handle(record: Record) -> None:
    print("finished", record.offset, flush=True)
""",
    "failing": """
@app.consume(topic, retry=Retry(attempts=1))
async def handle(record: Record) -> None:
    if record.offset == 2:
        raise ValueError("this record cannot be handled")
    print("finished", record.offset, flush=True)
""",
    "endless": """
@app.consume(topic)
async def handle(record: Record) -> None:
    print("began", record.offset, flush=True)
    await asyncio.Event().wait()
""",
    "ignoring": """
@app.consume(topic)
async def handle(record: Record) -> None:
    print("began", record.offset, flush=True)
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
""",
    "blocking": """
@app.consume(topic)
async def handle(record: Record) -> None:
    print("began", record.offset, flush=True)
    time.sleep(3600)
""",
    "thread": """
@app.consume(topic)
def handle(record: Record) -> None:
    print("began", record.offset, flush=True)
    threading.Event().wait()
""",
}

HANDLERS["held without uvloop"] = "sys.modules['uvloop'] = None\n" + HANDLERS["held"]
HANDLERS["blocking without uvloop"] = "sys.modules['uvloop'] = None\n" + HANDLERS["blocking"]


Start = Callable[..., Awaitable[CommandProcess]]


@pytest.fixture
async def start(tmp_path: Path, group: str, topic: str) -> AsyncIterator[Start]:
    """Starts `aioshard run` on a handler of `HANDLERS`; the process is gone when the test ends."""
    async with contextlib.AsyncExitStack() as stack:

        async def started(
            handler: str,
            bootstrap: str,
            *arguments: str,
            variables: Mapping[str, str] = NO_VARIABLES,
            **settings: object,
        ) -> CommandProcess:
            source = f"""
import asyncio, sys, threading, time
from aioshard import App, Record, Retry

topic = {topic!r}
app = App({group!r}, bootstrap_servers={bootstrap!r}, auto_offset_reset="earliest", **{settings!r})
{HANDLERS[handler]}
"""
            (tmp_path / "service.py").write_text(source)
            running = await CommandProcess.start(tmp_path, "run", "service:app", *arguments, variables=variables)
            stack.push_async_callback(running.kill)
            return running

        yield started


# Signals


@pytest.mark.parametrize(
    ("handler", "number"),
    [
        ("held", signal.SIGTERM),
        ("held without uvloop", signal.SIGINT),
        pytest.param("held", signal.SIGINT, marks=pytest.mark.chaos),
        pytest.param("held without uvloop", signal.SIGTERM, marks=pytest.mark.chaos),
    ],
)
async def test_the_first_signal_drains_commits_and_exits_0(
    kafka: SharedKafka, start: Start, group: str, topic: str, *, number: signal.Signals, handler: str
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(b"k", b"0")], partition=0)
    app = await start(handler, kafka.bootstrap, shutdown_timeout=30)
    await app.says("began 0")
    app.send(number)
    await app.warns(f"{number.name}: draining and committing")
    app.release()
    assert await app.ends() == 0
    assert "finished 0" in app.output
    assert await kafka.committed(group, topic) == {0: 1}
    assert "ended cleanly" in app.errors


@pytest.mark.parametrize(
    "handler",
    [
        pytest.param("endless", marks=pytest.mark.chaos),
        "ignoring",
        pytest.param("thread", marks=pytest.mark.chaos),
        "blocking",
        pytest.param("blocking without uvloop", marks=pytest.mark.chaos),
    ],
)
async def test_the_second_signal_exits_at_once_with_130(
    kafka: SharedKafka, start: Start, group: str, topic: str, handler: str
) -> None:
    """Also when the handler ignores its cancellation, sits in a thread or blocks the event loop."""
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(b"k", b"0")], partition=0)
    app = await start(handler, kafka.bootstrap, shutdown_timeout=60)
    await app.says("began 0")
    app.send(signal.SIGTERM)
    await app.warns("SIGTERM: draining and committing")
    app.send(signal.SIGINT)
    assert await app.ends() == 130
    assert "SIGINT again: exiting now" in app.errors
    assert (await kafka.committed(group, topic)).get(0, 0) == 0


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["one", "several"])
async def test_sigterm_during_the_import_exits_0(tmp_path: Path, workers: tuple[str, ...]) -> None:
    (tmp_path / "slow.py").write_text("import time\nprint('imported', flush=True)\ntime.sleep(60)\n")
    app = await CommandProcess.start(tmp_path, "run", "slow:app", *workers)
    await app.says("imported")
    app.send(signal.SIGTERM)
    assert await app.ends() == 0
    assert "SIGTERM: draining and committing" in app.errors


async def test_a_signal_during_a_broker_outage_exits_0(start: Start) -> None:
    app = await start("quick", NOWHERE, "--health-port", "0", start_timeout=600)
    async with await app.health() as client:
        await until_answer(client, "/readyz", lambda response: "Connection refused" in response.text)
        app.send(signal.SIGTERM)
        assert await app.ends() == 0


# Exit codes


@pytest.mark.parametrize("handler", [pytest.param("endless", marks=pytest.mark.chaos), "ignoring", "thread"])
async def test_a_handler_that_outlasts_shutdown_exits_4_and_is_named(
    kafka: SharedKafka, start: Start, group: str, topic: str, handler: str
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(b"k", b"0")], partition=0)
    app = await start(handler, kafka.bootstrap, "--json", shutdown_timeout=1)
    await app.says("began 0")
    app.send(signal.SIGTERM)
    assert await app.ends() == 4
    assert f"Error: 1 record still ran after shutdown_timeout=1 s and stayed uncommitted: {topic}/0/0" in app.errors
    ending = json.loads(app.output.splitlines()[-1])
    assert (ending["exit_code"], ending["records"], ending["signal"]) == (4, [f"{topic}/0/0"], "SIGTERM")
    assert (await kafka.committed(group, topic)).get(0, 0) == 0


@pytest.mark.chaos
async def test_the_last_commit_survives_brokers_frozen_for_8_seconds(
    own_kafka: KafkaBroker, start: Start, group: str, topic: str
) -> None:
    app = await frozen_while_the_last_record_runs(own_kafka, start, topic, shutdown_timeout=60)
    await asyncio.sleep(8)  # that long the brokers are away
    own_kafka.thaw()
    assert await app.ends() == 0, app.errors
    assert await own_kafka.committed(group, topic) == {0: 1}


@pytest.mark.chaos
async def test_an_unacknowledged_last_commit_exits_4_and_names_the_partition(
    own_kafka: KafkaBroker, start: Start, topic: str
) -> None:
    app = await frozen_while_the_last_record_runs(own_kafka, start, topic, shutdown_timeout=2)
    began = asyncio.get_running_loop().time()
    assert await app.ends() == 4
    assert asyncio.get_running_loop().time() - began < 2 + 2
    assert f"{topic}/0 (1)" in app.errors
    ending = json.loads(app.output.splitlines()[-1])
    assert (ending["exit_code"], ending["records"], ending["uncommitted"]) == (4, [], {f"{topic}/0": 1})


async def frozen_while_the_last_record_runs(
    kafka: KafkaBroker, start: Start, topic: str, *, shutdown_timeout: float
) -> CommandProcess:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(b"k", b"0")], partition=0)
    app = await start("held", kafka.bootstrap, "--json", shutdown_timeout=shutdown_timeout)
    await app.says("began 0")
    kafka.freeze()
    app.send(signal.SIGTERM)
    await app.warns("SIGTERM: draining and committing")
    app.release()
    await app.says("finished 0")
    return app


@pytest.mark.chaos
async def test_a_wrong_address_exits_1_and_is_named(start: Start) -> None:
    app = await start("quick", NOWHERE, start_timeout=1)
    async with asyncio.timeout(10):
        assert await app.ends() == 1
    error = app.errors[app.errors.index("Error: ") :]
    assert NOWHERE in error
    assert "start_timeout=1 s" in error
    assert "Traceback" not in app.errors


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--no-such-option"], "No such option"),
        pytest.param(["--health-port", "70000"], "70000 is not in the range", marks=pytest.mark.chaos),
        pytest.param(["--log-level", "loud"], "'loud' is not one of", marks=pytest.mark.chaos),
        (["--app-dir", "/no/such/place"], "does not exist"),
        (["--bootstrap-servers", "kafka://a:1"], "without a scheme"),
    ],
)
async def test_wrong_options_exit_2(start: Start, arguments: list[str], sentence: str) -> None:
    app = await start("quick", NOWHERE, *arguments)
    assert await app.ends() == 2
    assert sentence in app.errors
    assert "Traceback" not in app.errors


@pytest.mark.parametrize("target", ["service:ap", "servic:app", "service"])
async def test_an_unknown_app_exits_2(tmp_path: Path, target: str) -> None:
    (tmp_path / "service.py").write_text("from aioshard import App\napp = App('billing')\n")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "aioshard", "run", target),
        cwd=tmp_path,
        env={**environment(), "PYTHONPATH": str(PROJECT)},
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), DEADLINE)
    assert process.returncode == 2
    assert target.partition(":")[0].encode() in errors


async def test_a_missing_address_error_says_how_to_set_it(tmp_path: Path) -> None:
    source = "from aioshard import App\napp = App('billing')\n@app.consume('orders')\nasync def on(record): ...\n"
    (tmp_path / "service.py").write_text(source)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "aioshard", "run", "service:app"),
        cwd=tmp_path,
        env={**environment(), "PYTHONPATH": str(PROJECT)},
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), DEADLINE)
    assert process.returncode == 2
    assert b"AIOSHARD_BOOTSTRAP_SERVERS=localhost:9092" in errors


# Until caught up


async def test_until_caught_up_processes_all_records_and_exits_0(
    kafka: SharedKafka, start: Start, group: str, topic: str
) -> None:
    await kafka.create_topic(topic, partitions=3)
    await kafka.produce(topic, [(b"%d" % number, b"v") for number in range(50)])
    app = await start("quick", NOWHERE, "--until-caught-up", "--json", "--bootstrap-servers", kafka.bootstrap)
    assert await app.ends() == 0
    assert app.output.count("finished") == 50
    assert await kafka.lag(group, topic) == 0
    ending: dict[str, Any] = json.loads(app.output.splitlines()[-1])
    assert (ending["exit_code"], ending["error"], ending["signal"]) == (0, None, None)
    assert ending["statistics"]["handlers"][0]["processed"] == 50


async def test_until_caught_up_exits_3_and_names_the_halted_record(
    kafka: SharedKafka, start: Start, group: str, topic: str
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(b"%d" % number, b"v") for number in range(5)], partition=0)
    app = await start("failing", kafka.bootstrap, "--until-caught-up", "--json")
    assert await app.ends() == 3
    assert f"{topic}/0/2" in app.errors[app.errors.index("Error: ") :]
    assert json.loads(app.output.splitlines()[-1])["records"] == [f"{topic}/0/2"]
    assert (await kafka.committed(group, topic)) == {0: 2}


# Health


async def test_health_is_served_while_running_and_draining(
    kafka: SharedKafka, start: Start, group: str, topic: str
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(b"k", b"0"), (b"k", b"1")], partition=0)
    app = await start("held", kafka.bootstrap, "--health-port", "0", shutdown_timeout=30)
    async with await app.health() as client:
        await app.says("began 0")
        ready = await until_answer(client, "/readyz", lambda response: response.status_code == 200)
        assert ready.json() == {"status": "ok", "state": "running", "reasons": [], "findings": []}
        assert (await client.get("/livez")).status_code == 200
        statistics = (await client.get("/statistics.json")).json()
        assert (statistics["group_id"], statistics["partitions"][0]["incomplete"]) == (group, 2)
        assert f"{topic}/0" in (await client.get("/explain")).text
        metrics = (await client.get("/metrics")).text
        assert f'aioshard_partition_incomplete_records{{group="{group}",partition="0",topic="{topic}"}} 2.0' in metrics
        assert "process_resident_memory_bytes" in metrics, "the process's own metrics are on the same page"
        app.send(signal.SIGTERM)
        draining = await until_answer(client, "/readyz", lambda response: response.status_code == 503)
        assert draining.json()["state"] == "draining"
        assert (await client.get("/livez")).status_code == 200
        app.release()
        assert await app.ends() == 0
    assert "began 1" not in app.output, "nothing new is taken in while the app drains"
    assert await kafka.committed(group, topic) == {0: 1}


@pytest.mark.chaos
async def test_an_outage_changes_neither_health_status_and_is_reported(
    own_kafka: KafkaBroker, start: Start, topic: str
) -> None:
    await own_kafka.create_topic(topic)
    app = await start("quick", own_kafka.bootstrap, "--health-port", "0", session_timeout=6, heartbeat_interval=1)
    async with await app.health() as client:
        await until_answer(client, "/readyz", lambda response: response.status_code == 200)
        await own_kafka.kill()
        response = await until_answer(client, "/readyz", lambda response: bool(response.json()["findings"]))
        assert response.status_code == 200
        assert (await client.get("/livez")).status_code == 200
        app.send(signal.SIGTERM)
        assert await app.ends() == 0


async def test_a_health_port_in_use_exits_1_before_consuming(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        app = await start("quick", NOWHERE, "--health-port", str(port), start_timeout=600)
        assert await app.ends() == 1
    assert f"Error: the health server cannot listen on 127.0.0.1:{port}" in app.errors


async def test_a_missing_topic_exits_3_and_is_named(kafka: SharedKafka, start: Start, topic: str) -> None:
    app = await start("quick", kafka.bootstrap, start_timeout=2)
    assert await app.ends() == 3
    assert f"topics that do not exist, or that this user may not see: {topic!r}" in app.errors
    assert "Traceback" not in app.errors


# Logs


async def test_surprising_settings_are_logged_at_startup(start: Start) -> None:
    app = await start("quick", NOWHERE, variables={"AIOSHARD_COMIT_INTERVAL": "3"})
    await app.warns("AIOSHARD_COMIT_INTERVAL is not used; did you mean AIOSHARD_COMMIT_INTERVAL?")


async def test_json_logs_are_one_object_per_line(start: Start) -> None:
    app = await start("quick", NOWHERE, "--log-format", "json", start_timeout=1)
    assert await app.ends() == 1
    *lines, last = app.errors.splitlines()
    assert lines
    assert all({"time", "level", "logger", "message"} <= set(json.loads(line)) for line in lines)
    assert last.startswith("Error: ")
