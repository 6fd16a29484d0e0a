"""`aioshard broker`: its output and its end."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import psutil
import pytest
from aiokafka import AIOKafkaProducer

from aioshard import Settings
from tests.support.paths import PROJECT

Start = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts `aioshard broker`; the process is gone when the test ends."""
    async with contextlib.AsyncExitStack() as stack:

        async def started(*arguments: str) -> asyncio.subprocess.Process:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "aioshard", "broker", *arguments),
                cwd=PROJECT,
                env={name: value for name, value in os.environ.items() if not name.startswith("AIOSHARD_")},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            stack.push_async_callback(_end, process)
            return process

        yield started


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.communicate()


async def says(process: asyncio.subprocess.Process, text: str) -> str:
    """Wait for a line with *text* and return it."""
    assert process.stdout is not None
    while line := (await process.stdout.readline()).decode():
        if text in line:
            return line
    assert process.stderr is not None
    pytest.fail(f"{text!r} was never said; on standard error:\n{(await process.stderr.read()).decode()}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_the_broker_with_0_and_leaves_nothing_behind(start: Start, number: signal.Signals) -> None:
    process = await start()
    await says(process, "Ctrl-C ends it")
    (broker,) = psutil.Process(process.pid).children()

    process.send_signal(number)
    output, errors = await process.communicate()

    assert process.returncode == 0
    assert b"its data is gone" in output
    assert errors == b""
    assert not broker.is_running()


async def test_the_broker_prints_how_to_use_it_and_its_limits(start: Start) -> None:
    process = await start()
    listening = await says(process, "listens on 127.0.0.1:")
    address = listening.split()[-1]

    exported = await says(process, "export AIOSHARD_BOOTSTRAP_SERVERS=")
    await says(process, "Its limits:")

    assert exported.strip() == f"export AIOSHARD_BOOTSTRAP_SERVERS={address}"
    async with AIOKafkaProducer(bootstrap_servers=address) as producer:
        await producer.send_and_wait("t", b"v")


async def test_json_has_the_address_and_the_topics_exist(start: Start) -> None:
    process = await start("--json", "--topic", "orders:8", "--topic", "clicks")

    description = json.loads(await says(process, "{"))

    assert description["topics"] == {"orders": 8, "clicks": 4}
    assert description["environment"]["AIOSHARD_BOOTSTRAP_SERVERS"] == description["bootstrap_servers"]
    async with AIOKafkaProducer(bootstrap_servers=description["bootstrap_servers"]) as producer:
        assert await producer.partitions_for("orders") == set(range(8))
        assert await producer.partitions_for("clicks") == set(range(4))


async def test_the_printed_environment_is_valid_for_settings(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = await start("--json")
    description = json.loads(await says(process, "{"))
    for name, value in description["environment"].items():
        monkeypatch.setenv(name, value)

    settings = Settings()
    assert settings.bootstrap_servers == description["bootstrap_servers"]
    assert settings.session_timeout == 3


async def test_a_chosen_port_is_used(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    process = await start("--json", "--port", str(port))

    assert json.loads(await says(process, "{"))["bootstrap_servers"] == f"127.0.0.1:{port}"


async def test_a_port_in_use_ends_the_broker_with_1(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await start("--port", str(port))
        _, errors = await process.communicate()

    assert process.returncode == 1
    assert errors.decode().startswith(f"Error: cannot listen on port {port} of 127.0.0.1")


async def test_a_broker_that_dies_ends_the_command_with_1(start: Start) -> None:
    process = await start()
    await says(process, "Ctrl-C ends it")
    (broker,) = psutil.Process(process.pid).children()

    broker.kill()
    _, errors = await process.communicate()

    assert process.returncode == 1
    assert errors.decode() == "Error: the embedded broker ended by itself (SIGKILL)\n"


async def test_a_killed_command_leaves_no_broker_behind(start: Start) -> None:
    process = await start()
    await says(process, "Ctrl-C ends it")
    (broker,) = psutil.Process(process.pid).children()

    process.kill()
    await process.wait()

    _, alive = psutil.wait_procs([broker], timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--topic", "orders:x"], "expected NAME or NAME:PARTITIONS"),
        pytest.param(["--topic", "orders:0"], "expected NAME or NAME:PARTITIONS", marks=pytest.mark.chaos),
        pytest.param(["--port", "70000"], "is not in the range", marks=pytest.mark.chaos),
        (["somewhere"], "unexpected extra argument"),
    ],
)
async def test_wrong_options_end_the_command_with_2(start: Start, arguments: list[str], sentence: str) -> None:
    process = await start(*arguments)

    _, errors = await process.communicate()

    assert process.returncode == 2
    assert sentence in errors.decode()
