"""`aioshard run` as a process: signals, exit codes, the health server."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.kafka import KafkaBroker
from tests.support.shared_kafka import SharedKafka

PROJECT = Path(__file__).parents[2]
DEADLINE = 40.0
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


class Running:
    """An `aioshard run` in a directory of its own, whose output is read all the time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._news = asyncio.Condition()
        self._readers = [
            asyncio.create_task(self._read(name, stream), name=f"read {name}")
            for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
            if stream is not None
        ]

    @property
    def output(self) -> str:
        return "".join(self._lines["stdout"])

    @property
    def errors(self) -> str:
        return "".join(self._lines["stderr"])

    async def _read(self, name: str, stream: asyncio.StreamReader) -> None:
        while line := (await stream.readline()).decode():
            async with self._news:
                self._lines[name].append(line)
                self._news.notify_all()
        async with self._news:
            self._news.notify_all()

    async def says(self, text: str) -> str:
        """Wait for a line with *text* on standard output."""
        return await self._line("stdout", text)

    async def warns(self, text: str) -> str:
        """Wait for a line with *text* on standard error."""
        return await self._line("stderr", text)

    async def _line(self, name: str, text: str) -> str:
        def found() -> str | None:
            return next((line for line in self._lines[name] if text in line), None)

        def over() -> bool:
            return self.process.stdout is not None and self.process.stdout.at_eof()

        async with asyncio.timeout(DEADLINE), self._news:
            await self._news.wait_for(lambda: found() is not None or over())
        line = found()
        assert line is not None, f"{text!r} was never said; on standard error:\n{self.errors}"
        return line

    async def health(self) -> httpx.AsyncClient:
        """A client of the health server."""
        line = await self.warns("health server listens on")
        return httpx.AsyncClient(base_url=line.split()[-1], timeout=DEADLINE)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def release(self) -> None:
        """Let one held record finish."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    async def ends(self) -> int:
        """Wait for the end; `output` and `errors` are complete then."""
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*self._readers)
            return await self.process.wait()

    async def kill(self) -> None:
        """End the process if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.ends()


Start = Callable[..., Awaitable[Running]]


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
        ) -> Running:
            source = f"""
import asyncio, sys, threading, time
from aioshard import App, Record, Retry

topic = {topic!r}
app = App({group!r}, bootstrap_servers={bootstrap!r}, auto_offset_reset="earliest", **{settings!r})
{HANDLERS[handler]}
"""
            (tmp_path / "service.py").write_text(source)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "aioshard",
                "run",
                "service:app",
                *arguments,
                cwd=tmp_path,
                env={**_environment(), "PYTHONPATH": str(PROJECT), **variables},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            running = Running(process)
            stack.push_async_callback(running.kill)
            return running

        yield started


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("AIOSHARD_")}


async def settled(client: httpx.AsyncClient, path: str, condition: Callable[[httpx.Response], bool]) -> httpx.Response:
    """The first answer of *path* that fulfils the condition."""
    async with asyncio.timeout(DEADLINE):
        while not condition(response := await client.get(path)):  # noqa: ASYNC110 (HTTP sends no event)
            await asyncio.sleep(0.05)
    return response


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("handler", ["held", "held without uvloop"])
async def test_the_first_signal_drains_commits_and_ends_with_0(
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


@pytest.mark.parametrize("handler", ["endless", "ignoring", "thread", "blocking", "blocking without uvloop"])
async def test_the_second_signal_leaves_at_once_with_130(
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
    assert "SIGINT again: leaving at once" in app.errors
    assert (await kafka.committed(group, topic)).get(0, 0) == 0


async def test_a_signal_while_no_broker_answers_ends_with_0(start: Start) -> None:
    app = await start("quick", NOWHERE, "--health-port", "0", start_timeout=600)
    async with await app.health() as client:
        await settled(client, "/readyz", lambda response: "Connection refused" in response.text)
        app.send(signal.SIGTERM)
        assert await app.ends() == 0


# Exit codes


@pytest.mark.parametrize("handler", ["endless", "ignoring", "thread"])
async def test_a_handler_that_outlasts_the_shutdown_ends_with_4_and_is_named(
    kafka: SharedKafka, start: Start, group: str, topic: str, handler: str
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(b"k", b"0")], partition=0)
    app = await start(handler, kafka.bootstrap, "--json", shutdown_timeout=1)
    await app.says("began 0")
    app.send(signal.SIGTERM)
    assert await app.ends() == 4
    assert f"Error: 1 record(s) still ran after shutdown_timeout=1 s and stay uncommitted: {topic}/0/0" in app.errors
    ending = json.loads(app.output.splitlines()[-1])
    assert (ending["exit_code"], ending["records"], ending["signal"]) == (4, [f"{topic}/0/0"], "SIGTERM")
    assert (await kafka.committed(group, topic)).get(0, 0) == 0


async def test_a_wrong_address_is_an_error_that_names_it_and_ends_with_1(start: Start) -> None:
    app = await start("quick", NOWHERE, start_timeout=2)
    async with asyncio.timeout(10):
        assert await app.ends() == 1
    error = app.errors[app.errors.index("Error: ") :]
    assert NOWHERE in error
    assert "start_timeout=2 s" in error
    assert "Traceback" not in app.errors


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--no-such-option"], "No such option"),
        (["--health-port", "70000"], "70000 is not in the range"),
        (["--log-level", "loud"], "'loud' is not one of"),
        (["--app-dir", "/no/such/place"], "does not exist"),
        (["--bootstrap-servers", "kafka://a:1"], "without a scheme"),
    ],
)
async def test_wrong_options_end_with_2(start: Start, arguments: list[str], sentence: str) -> None:
    app = await start("quick", NOWHERE, *arguments)
    assert await app.ends() == 2
    assert sentence in app.errors
    assert "Traceback" not in app.errors


@pytest.mark.parametrize("target", ["service:ap", "servic:app", "service"])
async def test_an_unknown_app_ends_with_2(tmp_path: Path, target: str) -> None:
    (tmp_path / "service.py").write_text("from aioshard import App\napp = App('billing')\n")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "aioshard", "run", target),
        cwd=tmp_path,
        env={**_environment(), "PYTHONPATH": str(PROJECT)},
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), DEADLINE)
    assert process.returncode == 2
    assert b"service" in errors


async def test_without_an_address_the_error_says_how_to_give_one(tmp_path: Path) -> None:
    source = "from aioshard import App\napp = App('billing')\n@app.consume('orders')\nasync def on(record): ...\n"
    (tmp_path / "service.py").write_text(source)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "aioshard", "run", "service:app"),
        cwd=tmp_path,
        env={**_environment(), "PYTHONPATH": str(PROJECT)},
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), DEADLINE)
    assert process.returncode == 2
    assert b"AIOSHARD_BOOTSTRAP_SERVERS=localhost:9092" in errors


# Until caught up


async def test_until_caught_up_processes_what_is_there_and_ends_with_0(
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


async def test_until_caught_up_ends_with_3_and_names_the_halted_record(
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


async def test_health_while_running_and_while_draining(
    kafka: SharedKafka, start: Start, group: str, topic: str
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(b"k", b"0"), (b"k", b"1")], partition=0)
    app = await start("held", kafka.bootstrap, "--health-port", "0", shutdown_timeout=30)
    async with await app.health() as client:
        await app.says("began 0")
        ready = await settled(client, "/readyz", lambda response: response.status_code == 200)
        assert ready.json() == {"status": "ok", "state": "running", "reasons": [], "findings": []}
        assert (await client.get("/livez")).status_code == 200
        statistics = (await client.get("/statistics.json")).json()
        assert (statistics["group_id"], statistics["partitions"][0]["incomplete"]) == (group, 2)
        assert f"{topic}/0" in (await client.get("/explain")).text
        metrics = (await client.get("/metrics")).text
        assert f'aioshard_partition_incomplete_records{{group="{group}",partition="0",topic="{topic}"}} 2.0' in metrics
        assert "process_resident_memory_bytes" in metrics, "the process's own metrics are on the same page"
        app.send(signal.SIGTERM)
        draining = await settled(client, "/readyz", lambda response: response.status_code == 503)
        assert draining.json()["state"] == "draining"
        assert (await client.get("/livez")).status_code == 200
        app.release()
        assert await app.ends() == 0
    assert "began 1" not in app.output, "nothing new is taken in while the app drains"
    assert await kafka.committed(group, topic) == {0: 1}


async def test_an_outage_changes_neither_answer_and_is_told(own_kafka: KafkaBroker, start: Start, topic: str) -> None:
    await own_kafka.create_topic(topic)
    app = await start("quick", own_kafka.bootstrap, "--health-port", "0", session_timeout=6, heartbeat_interval=1)
    async with await app.health() as client:
        await settled(client, "/readyz", lambda response: response.status_code == 200)
        await own_kafka.kill()
        told = await settled(client, "/readyz", lambda response: bool(response.json()["findings"]))
        assert told.status_code == 200
        assert (await client.get("/livez")).status_code == 200
        app.send(signal.SIGTERM)
        assert await app.ends() == 0


async def test_a_health_port_in_use_ends_with_1_before_anything_is_consumed(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        app = await start("quick", NOWHERE, "--health-port", str(port), start_timeout=600)
        assert await app.ends() == 1
    assert f"Error: the health server cannot listen on 127.0.0.1:{port}" in app.errors


# Logs


async def test_what_may_surprise_is_logged_at_the_start(start: Start) -> None:
    app = await start("quick", NOWHERE, variables={"AIOSHARD_COMIT_INTERVAL": "3"})
    await app.warns("AIOSHARD_COMIT_INTERVAL is not used; did you mean AIOSHARD_COMMIT_INTERVAL?")


async def test_json_logs_are_one_object_per_line(start: Start) -> None:
    app = await start("quick", NOWHERE, "--log-format", "json", start_timeout=1)
    assert await app.ends() == 1
    *lines, last = app.errors.splitlines()
    assert lines
    assert all({"time", "level", "logger", "message"} <= set(json.loads(line)) for line in lines)
    assert last.startswith("Error: ")
