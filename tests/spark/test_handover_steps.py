"""The steps of a handover with scripted brokers: a refusal leaves no trace."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

import pytest

from aioshard import spark
from aioshard.errors import CommitError, CommitRefusedError, GroupBusyError, NotVerifiedError, PlanError
from aioshard.kafka.admin import LogBounds
from aioshard.kafka.groups import Group
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.spark.run_directory import RunDirectory
from tests.spark.plans import PLAN

AT = TopicPartition("orders", 0)
THEN = PLAN.ranges[0].before or Committed(0, "")


class Brokers:
    """A group's one partition; the steps are recorded."""

    def __init__(self, *, refusals: int = 0, unanswered: int = 0, passes: bool = True) -> None:
        self.steps: list[str] = []
        self.committed = THEN
        self._refusals = refusals
        self._unanswered = unanswered
        self._passes = passes

    def __call__(self, _: object) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def bounds(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, LogBounds]:
        return {partition: LogBounds(0, 100, 100) for partition in partitions}

    async def group_commits(self, _: str, __: object) -> dict[TopicPartition, Committed | None]:
        self.steps.append("look")
        return {AT: self.committed}

    async def commit_without_member(self, _: str, due: Mapping[TopicPartition, Committed]) -> None:
        self.steps.append("commit")
        if self._refusals:
            self._refusals -= 1
            raise CommitRefusedError("it has members")
        self.committed = due[AT]
        if self._unanswered:
            self._unanswered -= 1
            failed = CommitError("no answer")
            failed.retriable = self._passes
            raise failed

    async def group(self, _: str) -> Group:
        return Group("dead", "classic", "", ())


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run_dir = RunDirectory(tmp_path)
    run_dir.begin(dataclasses.replace(PLAN, app="no_such_module:app", bootstrap_servers="127.0.0.1:1"))
    ends = {"orders": {"0": 9}}
    run_dir.write_json("verified.json", {"plan": run_dir.plan().digest, "ok": True, "dead_lettered": 2, "ends": ends})
    run_dir.write_json("dead-letters.json", {"plan": run_dir.plan().digest, "acknowledged": 2})
    return run_dir


def through(monkeypatch: pytest.MonkeyPatch, brokers: Brokers) -> Brokers:
    monkeypatch.setattr("aioshard.spark.handovers.KafkaAdmin", brokers)
    monkeypatch.setattr("aioshard.spark.handovers._PAUSE", 0.001)
    return brokers


async def test_a_handover_reads_the_group_before_it_commits(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = through(monkeypatch, Brokers())

    assert (await spark.handover(run)).state == "handed-over"
    assert brokers.steps == ["look", "commit"]
    assert brokers.committed.offset == 9
    assert (await spark.handover(run)).state == "already"
    assert brokers.steps == ["look", "commit"]


async def test_a_handover_of_another_plan_is_ignored(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = through(monkeypatch, Brokers())
    run.write_json("handover.json", {"plan": PLAN.digest, "before": {}, "offsets": {}, "moved": []})

    assert (await spark.handover(run)).state == "handed-over"
    assert brokers.committed.offset == 9


@pytest.mark.parametrize("progress", [None, {"acknowledged": 1}, {"plan": PLAN.digest, "acknowledged": 2}])
async def test_missing_dead_letters_prevent_the_handover(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, progress: dict[str, object] | None
) -> None:
    brokers = through(monkeypatch, Brokers())
    run.remove("dead-letters.json")
    if progress is not None:
        run.write_json("dead-letters.json", {"plan": run.plan().digest} | progress)

    with pytest.raises(NotVerifiedError, match="of 2 dead letters"):
        await spark.handover(run, force=True)
    assert brokers.steps == []


@pytest.mark.parametrize("force", [False, True])
async def test_a_handover_waits_for_members_and_never_overrides_them(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, *, force: bool
) -> None:
    brokers = through(monkeypatch, Brokers(refusals=2))

    with pytest.raises(GroupBusyError):
        await spark.handover(run, wait=0, force=force)
    assert (brokers.committed, run.exists("handover.json")) == (THEN, False)

    done = await spark.handover(run, wait=60, force=force)
    assert (done.state, brokers.committed.offset) == ("handed-over", 9)
    assert brokers.steps == ["look", "commit", "look", "commit", "look", "commit"]  # anew before each


async def test_the_earlier_offsets_are_reported_after_an_unanswered_commit(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers = through(monkeypatch, Brokers(unanswered=1))

    done = await spark.handover(run)

    assert brokers.steps == ["look", "commit", "look", "commit"]
    assert (done.before, done.offsets) == ({"orders": {"0": 5}}, {"orders": {"0": 9}})


async def test_a_permanent_error_is_not_retried(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = through(monkeypatch, Brokers(unanswered=1, passes=False))

    with pytest.raises(CommitError, match="no answer"):
        await spark.handover(run)
    assert brokers.steps == ["look", "commit"]


async def test_a_verification_of_another_plan_is_ignored(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = through(monkeypatch, Brokers())
    run.write_json("verified.json", {"plan": PLAN.digest, "ok": True})

    with pytest.raises(NotVerifiedError, match="was verified with another plan"):
        await spark.handover(run, force=True)
    assert brokers.steps == []


@pytest.mark.parametrize("wait", [float("nan"), -1.0])
async def test_an_invalid_wait_is_refused(run: RunDirectory, wait: float) -> None:
    with pytest.raises(PlanError, match="wait="):
        await spark.handover(run, wait=wait)
