"""Processing a micro-batch without Spark: the order of steps, and which count as done after a crash."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioshard.errors import HaltedError, PlanError, RunError
from aioshard.spark.run_directory import STOP, RunDirectory
from aioshard.spark.runs import follow, read_halted, run, status, write_batch
from tests.spark.plans import PLAN

HALTED = {"record": "orders/0/7", "key": "k", "error_type": "E", "error": ""}


class Rows:
    """As much of a DataFrame as a micro-batch needs: a written one has a file."""

    def __init__(self, place: RunDirectory, statuses: list[str], events: list[str]) -> None:
        self._place = place
        self._statuses = statuses
        self._events = events

    def __getattr__(self, name: str) -> Any:
        if name in {"write", "read", "sparkSession"}:
            return self
        return lambda *_: self  # mode, schema, where, orderBy, limit, selectExpr

    def parquet(self, uri: str) -> "Rows":
        name = uri.removeprefix(self._place.uri() + "/")
        if not self._place.exists(name):
            self._events.append("written")
            self._place.write(f"{name}/part-0.parquet", "rows")
        return self

    def groupBy(self, _: str) -> "Counts":  # noqa: N802 - Spark's name
        return Counts(self._statuses)

    def collect(self) -> list[dict[str, Any]]:
        return [HALTED] * self._statuses.count("halted")


class Counts:
    """Rows by status."""

    def __init__(self, statuses: list[str]) -> None:
        self._statuses = statuses

    def count(self) -> "Counts":
        return self

    def collect(self) -> list[dict[str, Any]]:
        return [{"status": status, "count": self._statuses.count(status)} for status in set(self._statuses)]


def test_a_complete_batch_runs_no_handler_again(tmp_path: Path) -> None:
    """The driver was lost after the rows had come to their place, and before Spark had noted that."""
    place, events = RunDirectory(tmp_path), list[str]()
    place.begin(PLAN)
    write = functools.partial(write_batch, place, lambda *_: events.append("told"), lambda rows: rows)
    write(Rows(place, ["processed"], events), 0)  # type: ignore[arg-type]
    write(Rows(place, ["processed"], events), 0)  # type: ignore[arg-type]

    assert events == ["written", "told"]
    assert (place.list("outcomes"), status(place).statuses) == (["batch=0"], {"processed": 1})


def test_an_empty_batch_is_not_counted(tmp_path: Path) -> None:
    place = RunDirectory(tmp_path)
    place.begin(PLAN)
    write = functools.partial(write_batch, place, None, lambda rows: rows)
    write(Rows(place, [], []), 0)  # type: ignore[arg-type]
    assert status(place).batches == 0

    write(Rows(place, ["processed"], []), 1)  # type: ignore[arg-type]

    assert status(place).batches == 1


def test_a_sink_is_called_before_the_batch_counts_as_done(tmp_path: Path) -> None:
    place, events = RunDirectory(tmp_path), list[str]()

    def failing(_: Any, batch: int) -> None:
        events.append(f"{batch}: {place.list('outcomes')}")
        raise LookupError("no such table")

    with pytest.raises(RunError, match=r"foreach of micro-batch 3 failed \(LookupError: no such table"):
        write_batch(place, failing, lambda rows: rows, Rows(place, ["processed"], events), 3)  # type: ignore[arg-type]

    assert events == ["written", "3: []"]
    assert place.list("outcomes") == []


def test_a_sink_is_not_called_for_a_halted_batch(tmp_path: Path) -> None:
    place, events = RunDirectory(tmp_path), list[str]()
    write = functools.partial(write_batch, place, lambda *_: events.append("told"), lambda rows: rows)

    with pytest.raises(HaltedError, match="orders/0/7"):
        write(Rows(place, ["processed", "halted"], events), 0)  # type: ignore[arg-type]

    assert events == ["written"]
    assert place.list("outcomes") == []
    assert [record.split()[0] for record in read_halted(place)] == ["orders/0/7"]


class Session:
    """As much of a Spark session as is asked before a query starts."""

    conf: dict[str, str] = {}  # noqa: RUF012 - nothing is set


@pytest.fixture
def begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunDirectory]:
    """Makes a run and begins to drain or to follow it, as far as that needs no Spark."""
    place = RunDirectory(tmp_path)
    place.begin(PLAN)
    session: Any = Session()
    session.readStream = None

    def begins(check_logs: Callable[..., None] = lambda *_: None, trigger: str | None = None) -> RunDirectory:
        monkeypatch.setattr("aioshard.spark.runs.check_logs", check_logs)
        monkeypatch.setattr("aioshard.spark.runs.planned_source", _nothing)
        monkeypatch.setattr("aioshard.spark.runs.slots_of", lambda *_: 1)
        begin = run if trigger is None else functools.partial(follow, trigger=trigger)
        with pytest.raises(LookupError):
            begin(session, place)
        return place

    return begins


def _nothing(*_: object, **__: object) -> Any:
    raise LookupError


def test_a_stop_during_startup_is_honored(tmp_path: Path, begins: Callable[..., RunDirectory]) -> None:
    place = RunDirectory(tmp_path)
    place.write(STOP, "")  # of an earlier drain
    seen = []

    def brokers_answer(*_: object) -> None:
        seen.append(place.exists(STOP))
        place.write(STOP, "")

    begins(brokers_answer)

    assert seen == [False]
    assert place.exists(STOP)
    with place.alone():  # a run that did not start keeps nobody off
        pass


@pytest.mark.parametrize(("trigger", "verified"), [(None, True), ("1 second", False)])
def test_a_continued_run_is_no_longer_verified(
    tmp_path: Path, begins: Callable[..., RunDirectory], trigger: str | None, *, verified: bool
) -> None:
    RunDirectory(tmp_path).write_json("verified.json", {})

    assert begins(trigger=trigger).exists("verified.json") == verified


def test_a_run_that_was_handed_over_cannot_follow(tmp_path: Path) -> None:
    place = RunDirectory(tmp_path)
    place.begin(PLAN)
    place.write_json("handover.json", {})

    with pytest.raises(PlanError, match="was handed over"):
        follow(Session(), place)  # type: ignore[arg-type]
