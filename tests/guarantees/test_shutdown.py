"""The end of a process at a signal: drained and committed, or in time with a report of unfinished runs."""

import time

import pytest

from tests.guarantees.behaviour import HANG
from tests.guarantees.checks import KeyOrder, LagZero, NeverAhead, NoDuplicates, NothingLost, OneAtATimePerKey
from tests.guarantees.observations import Kind
from tests.guarantees.scenario import Scenario

CLEAN = (NothingLost(), KeyOrder(), OneAtATimePerKey(), NeverAhead(), LagZero())


@pytest.mark.parametrize(
    "form", ["context", *(pytest.param(form, marks=pytest.mark.chaos) for form in ("record", "thread"))]
)
async def test_sigterm_finishes_and_commits_started_records(scenario: Scenario, form: str) -> None:
    await scenario.create(partitions=4)
    rarely = {"commit_interval": 600, "commit_records": None}
    first = scenario.start("a", rarely, form=form, concurrency=32, base=0.05, spread=0.4)
    await scenario.until_settled("a")
    await scenario.produce([(b"k%d" % (number % 40), None) for number in range(400)])
    await scenario.until_finished(40)

    code = await first.stop()

    assert code == 0, first.tail
    scenario.observations.refresh()
    assert scenario.unfinished > 0, "nothing was left to do: the signal proves nothing"
    assert set(scenario.observations.started) == scenario.observations.finished
    assert not scenario.observations.of("a.1", Kind.ENDED)
    committed = (await scenario.sample_commits()).offsets
    left = scenario.produced.keys() - scenario.observations.finished
    for partition in range(4):
        first_left = min((offset for at, offset in left if at == partition), default=committed[partition])
        assert committed[partition] == first_left, "what had finished is committed, up to the first that had not begun"

    scenario.start("a", form=form, concurrency=32)
    await scenario.verify(*CLEAN, NoDuplicates())


@pytest.mark.parametrize(
    ("form", "hangs"),
    [
        pytest.param("context", "until cancelled", marks=pytest.mark.chaos, id="awaits forever"),
        pytest.param("context", "until released", id="swallows its cancellation"),
        pytest.param("thread", "until released", marks=pytest.mark.chaos, id="is a thread"),
    ],
)
@pytest.mark.parametrize("shards", [pytest.param(None, id=pytest.HIDDEN_PARAM)])  # keys wait behind no other key
async def test_a_handler_that_outlasts_shutdown_is_named_and_the_process_exits_in_time(
    scenario: Scenario, form: str, hangs: str
) -> None:
    await scenario.create(partitions=2)
    member = scenario.start("a", {"shutdown_timeout": 3}, form=form, hangs=hangs)
    await scenario.until_settled("a")
    record_ids = await scenario.produce([(b"k%d" % number, HANG if number == 20 else None) for number in range(40)])
    await scenario.until_finished(39)
    stuck = record_ids[20]
    asked = time.monotonic()

    code = await member.stop()

    took = time.monotonic() - asked
    assert code == 4, member.tail
    assert f"1 record still ran after shutdown_timeout=3 s and stayed uncommitted: {scenario.topic}/{stuck[0]}/" in (
        member.log
    )
    assert f"{scenario.topic}/{stuck[0]}/{stuck[1]}" in member.log
    assert 2.0 < took < 6.0, f"the process took {took:.1f} s to end"
    committed = (await scenario.sample_commits()).offsets
    assert committed[stuck[0]] == stuck[1], "everything before the record is committed, and nothing beyond"

    scenario.start("b")
    await scenario.verify(*CLEAN)
    assert scenario.observations.started[stuck] == 2


async def test_an_idle_member_ends_at_once_and_leaves_its_partitions_to_the_others(scenario: Scenario) -> None:
    await scenario.create(partitions=4)
    leaving = scenario.start("a")
    scenario.start("b")
    await scenario.until_settled("a", "b")
    asked = time.monotonic()

    code = await leaving.stop()

    assert code == 0, leaving.tail
    await scenario.until_settled("b", timeout=20)
    took = time.monotonic() - asked
    assert took < 5.0, f"the group took {took:.1f} s, which is the session timeout rather than a good-bye"
