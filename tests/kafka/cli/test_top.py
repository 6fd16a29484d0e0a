"""`aioshard top`: several processes in one terminal view."""

import asyncio
import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NoReturn

import pytest
from rich.console import Console
from starlette.applications import Starlette
from starlette.routing import Mount

from aioshard import App, Record
from aioshard.cli import top
from aioshard.cli.top import Frame, Frames, Snapshot, view
from aioshard.testing import TestClient
from aioshard.web.health import health_routes, serve_health
from tests.support.browsing import served
from tests.support.paths import PROJECT
from tests.support.subprocesses import DEADLINE, environment
from tests.tools.pictures import picture_of_top

Aioshard = Callable[..., Awaitable[Any]]


def statistics(
    topic: str = "orders", first: int = 0, *, done: int = 0, partitions: int = 2, **given: Any
) -> dict[str, Any]:
    """Return the JSON statistics of a process with a handler and some partitions."""
    return {
        "state": "running",
        "group_id": "billing",
        "buffered_bytes": 0,
        "rebalances": 1,
        "partitions": [
            {
                "topic": topic,
                "partition": first + number,
                "lag": 10 * (first + number),
                "lag_seconds": 1.0,
                "committed": done,
                "committable": done,
                "end_offset": 100,
                "incomplete": 1,
                "paused": None,
                "oldest_incomplete_age": None,
            }
            for number in range(partitions)
        ],
        "handlers": [
            {
                "name": "on_order",
                "busy": 3,
                "concurrency": 64,
                "shards": 5,
                "processed": done,
                "skipped": 0,
                "dead_lettered": 0,
                "parked": 0,
                "retried": 0,
                "halted": 0,
            }
        ],
        **given,
    }


def sample(process: str, at: float, found: dict[str, Any] | None, *findings: str) -> Snapshot:
    return Snapshot(process, at, found, findings)


def drawn(frame: Frame, width: int, height: int | None = None) -> list[str]:
    console = Console(width=width, file=io.StringIO(), legacy_windows=False)
    console.print(view(frame, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


# As one ----------------------------------------------------------------------------------


def test_processes_are_summed_and_rates_are_between_two_samples() -> None:
    frames = Frames()
    first = frames.add(
        [sample("a:1", 0.0, statistics(done=100)), sample("b:1", 0.0, statistics(first=2, done=50))], 0.0
    )
    second = frames.add(
        [sample("a:1", 2.0, statistics(done=300)), sample("b:1", 4.0, statistics(first=2, done=90))], 2.0
    )

    assert first.totals["records_per_second"] is None
    assert second.totals["records_per_second"] == 110
    assert (second.totals["lag"], second.totals["busy"], second.totals["concurrency"]) == (60, 6, 128)
    assert [(row["process"], row["partition"]) for row in second.partitions] == [
        ("b:1", 3),
        ("b:1", 2),
        ("a:1", 1),
        ("a:1", 0),
    ]
    assert [row["offsets_per_second"] for row in second.partitions] == [10, 10, 100, 100]
    (handler,) = second.handlers
    assert (handler["records_per_second"], handler["processed"], handler["concurrency"]) == (110, 390, 128)


def test_apps_with_equal_handlers_are_shown_apart() -> None:
    frames = Frames()
    shop, returns = ({**statistics(done=done), "group_id": group} for done, group in ((10, "shop"), (20, "returns")))
    frame = frames.add([sample("a:1/shop", 0.0, shop), sample("a:1/returns", 0.0, returns)], 0.0)

    assert [(row["group"], row["name"], row["processed"]) for row in frame.handlers] == [
        ("shop", "on_order", 10),
        ("returns", "on_order", 20),
    ]
    assert {row["group"] for row in frame.processes} == {"shop", "returns"}
    lines = drawn(frame, 120)
    assert any("shop on_order" in line for line in lines)
    assert any("returns on_order" in line for line in lines)


def test_a_restarted_process_has_no_rate_at_first() -> None:
    frames = Frames()
    frames.add([sample("a:1", 0.0, statistics(done=100))], 0.0)
    anew = frames.add([sample("a:1", 2.0, statistics(done=3))], 2.0)
    after = frames.add([sample("a:1", 4.0, statistics(done=7))], 4.0)

    assert anew.totals["records_per_second"] is None
    assert after.totals["records_per_second"] == 2


def test_an_unresponsive_process_is_shown_until_it_recovers() -> None:
    frames = Frames()
    frames.add([sample("a:1", 0.0, statistics(done=0)), sample("b:1", 0.0, statistics(first=2))], 0.0)
    away = frames.add([sample("a:1", 2.0, statistics(done=4)), sample("b:1", 2.0, None, "cannot be reached")], 2.0)
    back = frames.add([sample("a:1", 4.0, statistics(done=8)), sample("b:1", 4.0, statistics(first=2, done=12))], 4.0)

    assert (away.totals["answering"], away.totals["processes"]) == (1, 2)
    assert away.findings == [{"process": "b:1", "sentence": "cannot be reached"}]
    assert any(line.startswith("b:1") and "silent" in line for line in drawn(away, 80))
    assert (back.totals["answering"], back.totals["records_per_second"]) == (2, 2 + 3)


def test_the_oldest_record_comes_first_and_then_the_largest_lag() -> None:
    found = statistics(partitions=3)
    found["partitions"][0]["oldest_incomplete_age"] = 75.0
    frame = Frames().add([sample("a:1", 0.0, found)], 0.0)

    assert [row["partition"] for row in frame.partitions] == [0, 2, 1]
    assert any("orders/0" in line and "75 s" in line for line in drawn(frame, 80))


# How it looks ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 200])
def test_a_frame_fits_the_terminal(width: int) -> None:
    frames = Frames()
    processes = [
        sample(
            f"10.0.0.7:808{number}",
            0.0,
            statistics("a-topic-with-a-long-name", 20 * number, partitions=20),
            "x" * 300,
        )
        for number in range(6)
    ]
    lines = drawn(frames.add(processes, 0.0), width, 50)

    assert len(lines) <= 50
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    assert "6/6 processes" in text
    assert "a-topic-with-a-long-name/119" in text
    assert re.search(r"… \d+ more", text)
    assert ":8085" in text


def test_control_characters_are_escaped() -> None:
    evil = "halted: \x1b[2J\x1b]0;title\x07 [bold]"
    found = statistics()
    found["handlers"][0]["name"] = evil
    text = "\n".join(drawn(Frames().add([sample("a:1", 0.0, found, evil)], 0.0), 200))

    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.count("\\x1b[2J") == 2
    assert text.count("[bold]") == 2, "and is not markup"


def test_the_picture_for_the_docs_is_drawn() -> None:
    assert "on_order" in picture_of_top(Frames().add([sample("a:1", 0.0, statistics())], 0.0))


# The command -------------------------------------------------------------------------------


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A health server of an app that is working on its records."""
    app = App("billing", bootstrap_servers="localhost:9092", auto_offset_reset="earliest")

    @app.consume("orders", concurrency=2)
    async def on_order(_: Record) -> None:
        await asyncio.sleep(0.01)

    async with TestClient(app) as client, serve_health(app) as (host, port):
        for number in range(200):
            await client.publish("orders", b"v", key=str(number))
        yield f"http://{host}:{port}"
        await client.settle(timeout=DEADLINE)


async def test_one_frame_as_json_has_rates(aioshard: Aioshard, url: str) -> None:
    ended = await aioshard("top", url, "--once", "--json", "--interval", "0.3")

    assert ended.code == 0, ended
    frame = json.loads(ended.output)
    assert frame["groups"] == ["billing"]
    assert frame["totals"]["answering"] == 1
    assert frame["totals"]["records_per_second"] > 0
    assert frame["handlers"][0]["records_per_second"] == frame["totals"]["records_per_second"]


async def test_without_a_terminal_one_frame_is_printed(aioshard: Aioshard, url: str) -> None:
    ended = await aioshard("top", url, "http://127.0.0.1:1", "--interval", "0.2")

    assert ended.code == 0, ended
    assert "1/2 processes" in ended.output
    assert "silent" in ended.output
    assert "orders/0" in ended.output
    assert "\x1b" not in ended.output


async def test_two_apps_of_one_process_have_names_of_their_own(aioshard: Aioshard) -> None:
    shop, returns = App("shop"), App("returns")
    for app in (shop, returns):

        @app.consume("orders")
        async def on_order(_: Record) -> None: ...

    web = Starlette(routes=[Mount(f"/{app.group_id}", routes=health_routes(app)) for app in (shop, returns)])
    async with TestClient(shop), TestClient(returns), served(web) as address:
        ended = await aioshard("top", f"{address}/shop", f"{address}/returns", "--once", "--json", "--interval", "0.1")

    assert ended.code == 0, ended
    frame = json.loads(ended.output)
    host = address.removeprefix("http://")
    names = {f"{host}/shop": "shop", f"{host}/returns": "returns"}
    assert {row["process"]: row["group"] for row in frame["processes"]} == names


async def test_without_any_response_top_exits_3(aioshard: Aioshard) -> None:
    ended = await aioshard("top", "http://127.0.0.1:1", "--once", "--interval", "0.1")

    assert ended.code == 3
    assert "http://127.0.0.1:1 did not answer" in ended.errors


async def test_an_interrupt_before_the_first_answer_exits_3(
    aioshard: Aioshard, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "take", interrupted)
    ended = await aioshard("top", url, "--once")

    assert (ended.code, ended.output, ended.errors) == (3, "", "")


@contextlib.contextmanager
def in_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`aioshard` in its own terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "aioshard", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment(), "PYTHONPATH": str(PROJECT), "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(fd: int, text: bytes) -> bytes:
    seen = b""
    with contextlib.suppress(OSError):  # the other side is closed
        while text not in seen and (more := os.read(fd, 65536)):
            seen += more
    assert text in seen, seen.decode(errors="replace")
    return seen


async def test_an_interrupt_ends_top_cleanly(url: str) -> None:
    def play() -> int:
        with in_terminal("top", url, "--interval", "60") as (process, terminal):
            shown = read_until(terminal, b"orders/0")
            assert b"\x1b[?1049h" in shown, "the alternate screen"
            process.send_signal(signal.SIGINT)
            read_until(terminal, b"\x1b[?1049l")
            return process.wait(DEADLINE)

    assert await asyncio.to_thread(play) == 0
