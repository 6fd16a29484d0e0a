"""A handler that ignores its cancellation: its key waits; other keys and rebalances continue."""

import pytest

from tests.guarantees.behaviour import HANG
from tests.guarantees.checks import (
    KeyOrder,
    LagZero,
    NeverAhead,
    NoDuplicates,
    NothingLost,
    OneAtATimePerKey,
    OnlyUncommittedAgain,
)
from tests.guarantees.observations import Kind, RecordId
from tests.guarantees.scenario import SHORT, Scenario

PARTITIONS = 4
BOUND = 400
MARGIN = 3.0
"""Seconds beyond the drain for the heartbeat that tells of the rebalance, the commit and the new assignment."""

FORMS = pytest.mark.parametrize(
    "form",
    [
        pytest.param("context", id="swallows its cancellation"),
        pytest.param("thread", marks=pytest.mark.chaos, id="is a thread"),
    ],
)


async def hang(scenario: Scenario, form: str, hangs: str = "until released") -> list[RecordId]:
    """Starts member a, in which one record of each partition hangs; returns those records."""
    await scenario.create(PARTITIONS)
    settings = {"max_buffered_records": BOUND, "stuck_after": 2, "shutdown_timeout": 4}
    scenario.start("a", settings, form=form, hangs=hangs, concurrency=24)
    await scenario.until_settled("a")
    hanging = []
    keys = [b"p%d-stuck" % partition for partition in range(PARTITIONS)]
    for partition, stuck in enumerate(keys):
        others = [(key, None) for key in scenario.keys_apart(b"p%d-k" % partition, 20, *keys)]
        # Far more records wait behind the hanging one than memory may hold.
        queue = [*others, (stuck, HANG), *others, *[(stuck, None)] * (2 * BOUND)]
        hanging.append((await scenario.produce(queue, partition))[len(others)])
    await scenario.until(lambda: set(hanging) <= scenario.observations.started.keys(), "one hangs in each partition")
    return hanging


def not_committed(scenario: Scenario, hanging: list[RecordId]) -> list[RecordId]:
    """The records from those that hang on: nothing was committed beyond them when their partitions moved."""
    first = dict(hanging)
    return [
        record_id for record_id in scenario.produced if record_id[0] in first and record_id[1] >= first[record_id[0]]
    ]


@pytest.mark.chaos
@FORMS
@pytest.mark.timeout(180)
async def test_a_hanging_run_blocks_neither_other_keys_nor_a_rebalance(scenario: Scenario, form: str) -> None:
    hanging = await hang(scenario, form)
    first = scenario.members["a"]

    await scenario.until_finished(PARTITIONS * 40)
    await scenario.until(lambda: all(found["paused"] for found in first.partitions.values()), "a takes in nothing more")
    assert scenario.observations.finished.isdisjoint(hanging)

    second = scenario.start("b")
    await scenario.until(lambda: second.sample.get("samples", 0) > 0, "b is about to join")
    joining = second.sample["at"]
    await scenario.until_settled("a", "b")
    took = (max(first.sample["at"], second.sample["at"]) - joining) / 1e9
    assert SHORT["drain_timeout"] <= took + 0.5, "nothing was drained: it proves nothing"
    assert took < SHORT["drain_timeout"] + MARGIN, f"the rebalance took {took:.1f} s"

    moved = [record_id for record_id in hanging if record_id[0] in second.partitions]
    stayed = [record_id for record_id in hanging if record_id[0] in first.partitions]
    assert len(moved) == len(stayed) == PARTITIONS // 2
    outliving = first.statistics["handlers"][0]["outliving"]
    assert sorted(outliving) == sorted(f"{scenario.topic}/{partition}/{offset}" for partition, offset in hanging)

    gone = [record_id for record_id in scenario.produced if record_id[0] in second.partitions]
    await scenario.until(lambda: scenario.observations.finished.issuperset(gone), "b has done all of its partitions")
    runs = scenario.observations.of("a.1", Kind.STARTED)
    assert not [seen for seen in runs if seen.key.endswith("-stuck") and seen.record_id not in hanging]
    assert first.sample["peaks"]["buffered_records"] <= BOUND
    assert first.statistics["state"] == "running"

    assert await first.stop() == 4, first.tail
    await scenario.verify(
        NothingLost(),
        KeyOrder(),
        OneAtATimePerKey(),
        NeverAhead(),
        OnlyUncommittedAgain(),
        NoDuplicates(apart_from=not_committed(scenario, hanging)),
        LagZero(),
    )


@pytest.mark.chaos
@FORMS
@pytest.mark.timeout(180)
async def test_a_run_that_ends_after_its_cancellation_completes_nothing_and_frees_its_key(
    scenario: Scenario, form: str
) -> None:
    hanging = await hang(scenario, form)
    first = scenario.members["a"]
    second = scenario.start("b", hangs="until cancelled")
    await scenario.until_settled("a", "b")
    stayed = [record_id for record_id in hanging if record_id[0] in first.partitions]
    moved = [record_id for record_id in hanging if record_id[0] in second.partitions]
    await scenario.until(
        lambda: all(scenario.observations.started[record_id] == 2 for record_id in moved), "b has them again"
    )

    scenario.release()

    own = [record_id for record_id in scenario.produced if record_id[0] in first.partitions]
    await scenario.until(lambda: scenario.observations.finished.issuperset(own), "a has done all of its partitions")
    assert all(scenario.observations.started[record_id] == 2 for record_id in stayed), (
        "what was cancelled runs once more"
    )
    assert not first.statistics["handlers"][0]["outliving"]
    committed = (await scenario.sample_commits()).offsets
    assert all(committed[partition] == offset for partition, offset in moved), "a run in a completes nothing of b's"

    assert await second.stop() == 4, second.tail
    await scenario.verify(
        NothingLost(),
        KeyOrder(),
        OneAtATimePerKey(),
        NeverAhead(),
        OnlyUncommittedAgain(),
        NoDuplicates(apart_from=[*stayed, *not_committed(scenario, moved)]),
        LagZero(),
    )


@pytest.mark.chaos
async def test_a_run_that_a_rebalance_cancels_completes_nothing_and_runs_again(scenario: Scenario) -> None:
    hanging = await hang(scenario, "context", hangs="until cancelled")
    first = scenario.members["a"]
    second = scenario.start("b")
    await scenario.until_settled("a", "b")
    stayed = [record_id for record_id in hanging if record_id[0] in first.partitions]
    moved = [record_id for record_id in hanging if record_id[0] in second.partitions]

    gone = [record_id for record_id in scenario.produced if record_id[0] in second.partitions]
    await scenario.until(lambda: scenario.observations.finished.issuperset(gone), "b has done all of its partitions")
    await scenario.until(
        lambda: all(scenario.observations.started[record_id] == 2 for record_id in stayed), "a runs them again"
    )
    assert {seen.record_id for seen in scenario.observations.of("a.1", Kind.ENDED)} == set(hanging)
    assert not first.statistics["handlers"][0]["outliving"]

    assert await first.stop() == 4, first.tail
    await scenario.verify(
        NothingLost(),
        KeyOrder(),
        OneAtATimePerKey(),
        NeverAhead(),
        OnlyUncommittedAgain(),
        NoDuplicates(apart_from=not_committed(scenario, [*moved, *stayed])),
        LagZero(),
    )
