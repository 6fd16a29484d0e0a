"""`aioshard demo`: its figures, and proof that each can fail."""

import asyncio
import importlib.util
import json
import os
import signal
import sys
from typing import Any

import psutil
import pytest

from aioshard import App
from aioshard.cli import demo
from aioshard.cli.demo import FLIGHTS, Findings, Flight, check, read_flights
from aioshard.errors import MissingExtraError, TransportError
from aioshard.kafka.publisher import Publisher
from aioshard.ports import Message
from aioshard.records import Record
from tests.support.paths import PROJECT

DEADLINE = 90.0
FIGURES = [
    "records",
    "processed",
    "duplicates",
    "missing",
    "order_violations",
    "uncommitted",
    "seconds",
    "records_per_second",
    "one_by_one_seconds",
    "speedup",
]


async def start(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AIOSHARD_")}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "aioshard", "demo", *arguments),
        cwd=PROJECT,
        env=inherited | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def run(*arguments: str, **environment: str) -> tuple[int | None, str, str]:
    """Exit code, standard output and standard error."""
    process = await start(*arguments, **environment)
    try:
        async with asyncio.timeout(DEADLINE):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode(), errors.decode()


# The command


async def test_json_has_every_figure_with_the_right_value() -> None:
    code, output, errors = await run("--records", "3000", "--json")

    assert (code, "Wrong" in errors) == (0, False), errors
    figures = json.loads(output)
    assert list(figures) == FIGURES
    assert figures["records"] == figures["processed"] == 3000
    assert figures["duplicates"] == figures["order_violations"] == figures["uncommitted"] == 0
    assert figures["records_per_second"] == pytest.approx(3000 / figures["seconds"], rel=0.05)
    assert figures["speedup"] == pytest.approx(figures["one_by_one_seconds"] / figures["seconds"], rel=0.05)
    assert figures["one_by_one_seconds"] == 3000 * 0.002
    assert "consuming: 3,000 of 3,000 (100 %) records" in errors, "progress in plain lines"


async def test_the_table_is_readable() -> None:
    code, output, _ = await run("--records", "300")

    assert code == 0
    for line in ("records 300", "processed 300", "duplicates 0", "order violations 0", "uncommitted 0", "speedup"):
        assert line in " ".join(output.split())


async def test_environment_settings_for_other_brokers_are_ignored() -> None:
    environment = {
        "AIOSHARD_BOOTSTRAP_SERVERS": "127.0.0.1:1",
        "AIOSHARD_SECURITY_PROTOCOL": "SSL",
        "AIOSHARD_GROUP_INSTANCE_ID": "static",
        "AIOSHARD_DRAIN_TIMEOUT": "soon",
        "AIOSHARD_CLIENT_OPTIONS": '{"fetch_min_bytes": 1000000}',
        "AIOSHARD_MAX_BUFFERED_RECORDS": "1",
    }

    code, output, errors = await run("--records", "100", "--json", **environment)

    assert code == 0, errors
    assert json.loads(output)["processed"] == 100


@pytest.mark.chaos
async def test_an_interrupt_ends_the_demo_with_130_and_leaves_no_broker_behind() -> None:
    records = 60_000
    process = await start("--records", str(records))
    assert process.stderr is not None
    async with asyncio.timeout(DEADLINE):
        while f"publishing: {records:,} of".encode() not in await process.stderr.readline():
            pass
        children = psutil.Process(process.pid).children()

        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()

    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert len(children) == 1
    assert [process for process in children if process.is_running()] == []


@pytest.mark.parametrize(
    "arguments", [pytest.param(["--records", "0"], marks=pytest.mark.chaos), ["--records", str(FLIGHTS + 1)]]
)
async def test_wrong_options_end_the_command_with_2(arguments: list[str]) -> None:
    code, _, errors = await run(*arguments)

    assert code == 2
    assert "is not in the range" in errors


# A figure that is wrong


def demonstrate(*arguments: str) -> int:
    """Run the command in this process."""
    code: int = demo.command.main([*arguments], standalone_mode=False)
    return code


def handler_that(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let *change* tamper with a flight's log after the handler has run."""
    handle = demo.Flights.on_flight

    async def on_flight(self: demo.Flights, record: Record) -> None:
        await handle(self, record)
        change(self, record)

    monkeypatch.setattr(demo.Flights, "on_flight", on_flight)


def number_of(record: Record) -> int:
    number: int = json.loads(record.value or b"")["number"]
    return number


def test_the_figures_of_a_correct_run_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert demonstrate("--records", "200", "--json") == 0
    assert json.loads(capsys.readouterr().out)["processed"] == 200


def lose(handler: demo.Flights, record: Record) -> None:
    if number_of(record) == 7:
        handler.log.remove(~7)


def repeat(handler: demo.Flights, record: Record) -> None:
    if number_of(record) == 7:
        handler.log += [7, ~7]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lose, "Wrong: 1 record not processed"),
        (repeat, "Wrong: 1 record processed more than once"),
    ],
)
def test_a_wrong_log_ends_the_demo_with_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: Any, sentence: str
) -> None:
    handler_that(monkeypatch, change)

    assert demonstrate("--records", "200", "--json") == 3
    assert sentence in capsys.readouterr().err


def test_a_handler_out_of_order_ends_the_demo_with_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same demonstration without order per key: what the check is there to find."""
    consume = App.consume
    monkeypatch.setattr(
        App, "consume", lambda self, topic, **options: consume(self, topic, **{**options, "shard_by": "record"})
    )

    assert demonstrate("--records", "5000", "--json") == 3

    captured = capsys.readouterr()
    assert json.loads(captured.out)["order_violations"] > 0
    assert "started out of order, or during another leg of the same aircraft" in captured.err


def test_uncommitted_records_are_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    consume = demo._consume

    async def consume_and_publish_one_more(app: Any, broker: Any, records: int) -> None:
        await consume(app, broker, records)
        async with Publisher(app.settings) as publisher:
            await publisher.publish([Message("flights", b"{}", b"N1")])

    monkeypatch.setattr(demo, "_consume", consume_and_publish_one_more)

    assert demonstrate("--records", "200", "--json") == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out)["uncommitted"] == 1
    assert "Wrong: 1 record not committed" in captured.err


def test_a_broker_that_dies_ends_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    consume = demo._consume

    async def kill_and_consume(app: Any, broker: Any, records: int) -> None:
        os.kill(broker.pid, signal.SIGKILL)
        await consume(app, broker, records)

    monkeypatch.setattr(demo, "_consume", kill_and_consume)

    with pytest.raises(TransportError, match=r"the embedded broker ended by itself \(SIGKILL\)"):
        demonstrate("--records", "200")


# The input


@pytest.fixture(scope="module")
def flights() -> list[Flight]:
    return read_flights(20_000)


def test_flights_are_read_in_data_order(flights: list[Flight]) -> None:
    assert flights[0].aircraft == b"N14228"
    assert json.loads(flights[0].value) == {
        "number": 0,
        "flight": "UA1545",
        "from": "EWR",
        "to": "IAH",
        "departure_delay": 2,
        "arrival_delay": 11,
    }
    assert [json.loads(flight.value)["number"] for flight in flights] == list(range(20_000))
    assert any(flight.aircraft is None for flight in flights)
    assert any(json.loads(flight.value)["departure_delay"] is None for flight in flights)


def test_missing_data_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    with pytest.raises(MissingExtraError, match=r"pip install 'aioshard\[demo\]'"):
        read_flights(1)


# The check


def leg(aircraft: bytes | None) -> Flight:
    return Flight(aircraft, b"")


LEGS = [leg(b"A"), leg(b"B"), leg(b"A"), leg(None), leg(b"A"), leg(None)]


@pytest.mark.parametrize(
    ("log", "findings"),
    [
        ([0, ~0, 1, ~1, 2, ~2, 3, ~3, 4, ~4, 5, ~5], Findings(6, 0, 0, 0)),
        ([0, 1, 3, 5, ~1, ~5, ~0, 2, ~2, ~3, 4, ~4], Findings(6, 0, 0, 0)),
        ([5, ~5, 3, ~3, 1, ~1, 0, ~0, 2, ~2, 4, ~4], Findings(6, 0, 0, 0)),
        ([0, ~0, 1, ~1, 4, ~4, 3, ~3, 2, ~2, 5, ~5], Findings(6, 0, 0, 1)),
        ([2, ~2, 0, ~0, 4, ~4, 1, ~1, 3, ~3, 5, ~5], Findings(6, 0, 0, 1)),
        ([4, ~4, 2, ~2, 0, ~0, 1, ~1, 3, ~3, 5, ~5], Findings(6, 0, 0, 2)),
        ([0, 2, ~0, ~2, 4, ~4, 1, ~1, 3, ~3, 5, ~5], Findings(6, 0, 0, 1)),
        ([0, 2, 4, ~0, ~2, ~4, 1, ~1, 3, ~3, 5, ~5], Findings(6, 0, 0, 2)),
        ([0, ~0, 1, ~1, 2, ~2, 3, ~3, 4, ~4], Findings(5, 0, 1, 0)),
        ([0, ~0, 1, ~1, 2, ~2, 3, ~3, 4, ~4, 5], Findings(5, 0, 1, 0)),
        ([0, ~0, 1, ~1, 2, ~2, 3, ~3, 4, ~4, 5, ~5, 2, ~2, 4, ~4], Findings(8, 2, 0, 0)),
        ([0, ~0, 1, ~1, 2, ~2, 2, ~2, 3, ~3, 4, ~4], Findings(6, 1, 1, 0)),
        ([], Findings(0, 0, 6, 0)),
    ],
    ids=[
        "in-order",
        "interleaved",
        "only-each-aircraft-has-an-order",
        "two-legs-swapped",
        "the-first-legs-swapped",
        "backwards",
        "two-legs-at-once",
        "three-legs-at-once",
        "one-missing",
        "one-began-only",
        "two-repeated",
        "one-repeated-and-one-missing",
        "nothing",
    ],
)
def test_the_check_finds_errors(log: list[int], findings: Findings) -> None:
    assert check(LEGS, log) == findings


async def test_the_handler_writes_the_log_that_the_check_reads(flights: list[Flight]) -> None:
    handler = demo.Flights()
    first = flights[:400]

    for number, flight in enumerate(first):
        await handler.on_flight(Record("flights", 0, number, flight.aircraft, flight.value, (), 0.0))

    assert check(first, handler.log) == Findings(400, 0, 0, 0)
