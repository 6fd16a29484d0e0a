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

    def __init__(self, run_dir: RunDirectory, statuses: list[str], events: list[str]) -> None:
        self._run_dir = run_dir
        self._statuses = statuses
        self._events = events

    def __getattr__(self, name: str) -> Any:
        if name in {"write", "read", "sparkSession"}:
            return self
        return lambda *_: self  # mode, schema, where, orderBy, limit, selectExpr

    def parquet(self, uri: str) -> "Rows":
        name = uri.removeprefix(self._run_dir.uri() + "/")
        if not self._run_dir.exists(name):
            self._events.append("written")
            self._run_dir.write(f"{name}/part-0.parquet", "rows")
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
    """The driver was lost after the rows had moved, and before Spark had recorded that."""
    run_dir, events = RunDirectory(tmp_path), list[str]()
    run_dir.begin(PLAN)
    write = functools.partial(write_batch, run_dir, lambda *_: events.append("reported"), lambda rows: rows)
    write(Rows(run_dir, ["processed"], events), 0)  # type: ignore[arg-type]
    write(Rows(run_dir, ["processed"], events), 0)  # type: ignore[arg-type]

    assert events == ["written", "reported"]
    assert (run_dir.list("outcomes"), status(run_dir).statuses) == (["batch=0"], {"processed": 1})


def test_an_empty_batch_is_not_counted(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    run_dir.begin(PLAN)
    write = functools.partial(write_batch, run_dir, None, lambda rows: rows)
    write(Rows(run_dir, [], []), 0)  # type: ignore[arg-type]
    assert status(run_dir).batches == 0

    write(Rows(run_dir, ["processed"], []), 1)  # type: ignore[arg-type]

    assert status(run_dir).batches == 1


def test_a_sink_is_called_before_the_batch_counts_as_done(tmp_path: Path) -> None:
    run_dir, events = RunDirectory(tmp_path), list[str]()

    def failing(_: Any, batch: int) -> None:
        events.append(f"{batch}: {run_dir.list('outcomes')}")
        raise LookupError("no such table")

    with pytest.raises(RunError, match=r"foreach of micro-batch 3 failed \(LookupError: no such table"):
        write_batch(run_dir, failing, lambda rows: rows, Rows(run_dir, ["processed"], events), 3)  # type: ignore[arg-type]

    assert events == ["written", "3: []"]
    assert run_dir.list("outcomes") == []


def test_a_sink_is_not_called_for_a_halted_batch(tmp_path: Path) -> None:
    run_dir, events = RunDirectory(tmp_path), list[str]()
    write = functools.partial(write_batch, run_dir, lambda *_: events.append("reported"), lambda rows: rows)

    with pytest.raises(HaltedError, match="orders/0/7"):
        write(Rows(run_dir, ["processed", "halted"], events), 0)  # type: ignore[arg-type]

    assert events == ["written"]
    assert run_dir.list("outcomes") == []
    assert [record.split()[0] for record in read_halted(run_dir)] == ["orders/0/7"]


class Session:
    """As much of a Spark session as is asked before a query starts."""

    conf: dict[str, str] = {}  # noqa: RUF012 - nothing is set


@pytest.fixture
def begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunDirectory]:
    """Makes a run and begins to drain or to follow it, as far as that needs no Spark."""
    run_dir = RunDirectory(tmp_path)
    run_dir.begin(PLAN)
    session: Any = Session()
    session.readStream = None

    def begins(check_logs: Callable[..., None] = lambda *_: None, trigger: str | None = None) -> RunDirectory:
        monkeypatch.setattr("aioshard.spark.runs.check_logs", check_logs)
        monkeypatch.setattr("aioshard.spark.runs.planned_source", _nothing)
        monkeypatch.setattr("aioshard.spark.runs.slots_of", lambda *_: 1)
        begin = run if trigger is None else functools.partial(follow, trigger=trigger)
        with pytest.raises(LookupError):
            begin(session, run_dir)
        return run_dir

    return begins


def _nothing(*_: object, **__: object) -> Any:
    raise LookupError


def test_a_stop_during_startup_is_honored(tmp_path: Path, begins: Callable[..., RunDirectory]) -> None:
    run_dir = RunDirectory(tmp_path)
    run_dir.write(STOP, "")  # of an earlier drain
    seen = []

    def brokers_answer(*_: object) -> None:
        seen.append(run_dir.exists(STOP))
        run_dir.write(STOP, "")

    begins(brokers_answer)

    assert seen == [False]
    assert run_dir.exists(STOP)
    with run_dir.alone():  # a run that did not start keeps nobody off
        pass


@pytest.mark.parametrize(("trigger", "verified"), [(None, True), ("1 second", False)])
def test_a_continued_run_is_no_longer_verified(
    tmp_path: Path, begins: Callable[..., RunDirectory], trigger: str | None, *, verified: bool
) -> None:
    RunDirectory(tmp_path).write_json("verified.json", {})

    assert begins(trigger=trigger).exists("verified.json") == verified


def test_a_run_that_was_handed_over_cannot_follow(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    run_dir.begin(PLAN)
    run_dir.write_json("handover.json", {})

    with pytest.raises(PlanError, match="was handed over"):
        follow(Session(), run_dir)  # type: ignore[arg-type]
