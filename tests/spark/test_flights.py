"""The documented example: flights are backfilled with a fixed handler and handed over to the live app."""

import asyncio
import importlib
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aioshard import App
from aioshard import spark as history
from aioshard.cli.demo import read_flights
from aioshard.spark.runs import run
from aioshard.spark.verification import verify
from tests.spark.apps import QUICK
from tests.support.kafka import KafkaBroker
from tests.support.paths import PROJECT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.timeout(600), pytest.mark.chaos]

FLIGHTS = 30_000
LATER = 500
"""Flights that come while the run lasts."""


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, spark_modules: Path) -> App:
    """The example, where the tasks of Spark find it too."""
    (spark_modules / "flight_delays.py").write_text((PROJECT / "examples" / "flight_delays.py").read_text())
    monkeypatch.syspath_prepend(str(spark_modules))
    found: App = importlib.import_module("flight_delays").app
    return found


async def test_flights_are_backfilled_and_the_live_app_resumes_at_the_end(
    spark: "SparkSession", own_kafka: KafkaBroker, app: App, tmp_path: Path
) -> None:
    flights = read_flights(FLIGHTS + LATER)
    await own_kafka.create_topic("flights", 4)
    await own_kafka.produce("flights", [(flight.aircraft, flight.value) for flight in flights[:FLIGHTS]])
    app.configure(bootstrap_servers=own_kafka.bootstrap, **QUICK)
    directory = tmp_path / "run"

    plan = await history.plan(
        "flight_delays:app", directory=directory, start="earliest", bootstrap_servers=own_kafka.bootstrap
    )
    report = await asyncio.to_thread(run, spark, directory)
    await own_kafka.produce("flights", [(flight.aircraft, flight.value) for flight in flights[FLIGHTS:]])
    verification = await asyncio.to_thread(verify, spark, directory)
    done = await history.handover(directory)

    assert plan.records == report.done == FLIGHTS
    assert verification.ok
    assert done.state == "handed-over"
    rows: list[Any] = spark.read.parquet(str(directory / "outcomes")).select("result").collect()
    results = [json.loads(bytes(row.result)) for row in rows]
    assert sorted(result["number"] for result in results) == list(range(FLIGHTS))
    cancelled = sum(json.loads(flight.value)["departure_delay"] is None for flight in flights[:FLIGHTS])
    assert Counter(result["class"] for result in results)["cancelled"] == cancelled > 0

    async with asyncio.timeout(60):
        await app.serve(until_caught_up=True)

    (handler,) = app.statistics().handlers
    assert handler.processed == LATER  # none again, none left out
    assert sum((await own_kafka.committed("flight-delays", "flights")).values()) == FLIGHTS + LATER
