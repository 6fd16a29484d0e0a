"""`aioshard run --reload`: the app restarts when its code changes."""

import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from tests.support.brokers import SharedKafka
from tests.support.subprocesses import CommandProcess

NOWHERE = "127.0.0.1:1"

SOURCE = """
import asyncio
from aioshard import App, Record
from words import GREETING

print("imported", flush=True)
app = App({group!r}, bootstrap_servers={bootstrap!r}, auto_offset_reset="earliest")

@app.consume({topic!r})
async def handle(record: Record) -> None:
    print("began", record.offset, flush=True)
    await asyncio.sleep(0.5)
    print(GREETING, record.offset, flush=True)
"""

Start = Callable[..., Awaitable[CommandProcess]]


@pytest.fixture
async def start(tmp_path: Path, group: str, topic: str) -> AsyncIterator[Start]:
    async with contextlib.AsyncExitStack() as stack:

        async def started(bootstrap: str, *arguments: str) -> CommandProcess:
            (tmp_path / "service.py").write_text(SOURCE.format(group=group, bootstrap=bootstrap, topic=topic))
            (tmp_path / "words.py").write_text("GREETING = 'hello'\n")
            running = await CommandProcess.start(tmp_path, "run", "service:app", "--reload", *arguments)
            stack.push_async_callback(running.kill)
            return running

        yield started


async def test_a_change_reloads_the_app_and_a_broken_one_waits_for_the_next(
    kafka: SharedKafka, start: Start, tmp_path: Path, group: str, topic: str
) -> None:
    words = tmp_path / "words.py"
    await kafka.create_topic(topic)
    app = await start(kafka.bootstrap)
    await kafka.produce(topic, [(b"k", b"0")], partition=0)
    await app.says("began 0")

    words.write_text("GREETING = 'howdy'\n")  # of the same length, within the same second
    await app.warns("words.py changed: restarting")
    await app.says("hello 0")  # what ran was drained with the code that it began with
    await kafka.produce(topic, [(b"k", b"1")], partition=0)
    await app.says("howdy 1")

    words.write_text("GREETING = \n")
    await app.warns("SyntaxError: invalid syntax")
    await app.warns("waiting for a change")
    await kafka.produce(topic, [(b"k", b"2")], partition=0)
    words.write_text("GREETING = 'hullo'\n")
    await app.says("hullo 2")

    assert len(psutil.Process(app.process.pid).children()) == 1
    app.send(signal.SIGINT)
    assert await app.ends() == 0
    said = [line for line in app.output.splitlines() if line != "imported"]
    assert said == ["began 0", "hello 0", "began 1", "howdy 1", "began 2", "hullo 2"]
    assert await kafka.committed(group, topic) == {0: 3}


async def test_only_python_files_trigger_a_reload(start: Start, tmp_path: Path) -> None:
    app = await start(NOWHERE)
    await app.warns(f"watching {tmp_path} for changes")
    await app.says("imported")
    (tmp_path / "notes.txt").write_text("no code\n")
    (tmp_path / "code.py").write_text("code = True\n")
    assert "INFO aioshard.cli: code.py changed: restarting" in await app.warns("changed")
    app.send(signal.SIGTERM)
    assert await app.ends() == 0
