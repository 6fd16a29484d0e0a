"""Parked keys across a rebalance, a restart, a kill and a release; and very many of them."""

import time
from collections.abc import Mapping
from typing import Any

import pytest

from aioshard.serde.side_records import Coordinates, release
from tests.guarantees.behaviour import parking
from tests.guarantees.checks import safe_when_parked, verify
from tests.guarantees.observations import Kind, RecordId
from tests.guarantees.scenario import Scenario
from tests.guarantees.side_topics import ParkedExactly, live

LONG = 100_000.0
"""Seconds after which a key is run again: nobody waits for that."""

QUICK: Mapping[str, Any] = {"session_timeout": 3, "rebalance_timeout": 8, "start_timeout": 100}
ONCE: Mapping[str, Any] = {"attempts": 1}


async def until_parked(scenario: Scenario) -> None:
    """Waits until all is committed, and looks whether exactly the records of failing keys are parked."""
    await scenario.until_all_committed(timeout=120)
    parked = ParkedExactly(await scenario.side_records(), await scenario.originals(), scenario.failing)
    verify(await scenario.history_so_far(), parked)


async def request_release(scenario: Scenario, *record_ids: RecordId) -> None:
    """Publishes the requests that `aioshard park release` publishes."""
    for partition in {partition for partition, _ in record_ids}:
        coordinates = [Coordinates(scenario.topic, partition, offset) for at, offset in record_ids if at == partition]
        asked = [release(scenario.side_topic, each) for each in coordinates]
        await scenario.kafka.produce(
            scenario.side_topic, [(request.key, request.value) for request in asked], partition
        )


@pytest.mark.timeout(240)
async def test_a_parked_key_survives_rebalance_restart_and_kill_until_its_release(
    scenario: Scenario,
) -> None:
    await scenario.create(partitions=4, policy="parked")
    behaviour: dict[str, Any] = {
        "on_failure": parking(scenario.side_topic, delay=LONG),
        "retry": ONCE,
        "base": 0.002,
        "spread": 0.01,
    }
    bad = [b"bad%d" % number for number in range(20)]

    async def more() -> None:
        for _ in range(5):
            await scenario.produce([(key, b"x") for key in bad])
            await scenario.produce([(b"k%d" % number, b"y") for number in range(100)])

    scenario.start("a", QUICK, **behaviour)
    await scenario.until_settled("a")
    await more()
    await until_parked(scenario)

    scenario.start("b", QUICK, **behaviour)
    await more()
    await scenario.until_settled("a", "b")
    await more()
    await until_parked(scenario)

    assert await scenario.members["a"].stop() == 0, scenario.members["a"].tail
    scenario.start("a", QUICK, **behaviour)
    await more()
    await scenario.until_settled("a", "b")
    await until_parked(scenario)

    await scenario.kill("b")
    await more()
    scenario.start("b", QUICK, **behaviour)
    await scenario.until_settled("a", "b", timeout=60)
    await until_parked(scenario)
    assert scenario.observations.finished.isdisjoint(scenario.failing)

    scenario.heal()
    joining = scenario.start("c", QUICK, **behaviour)
    await scenario.until(lambda: joining.statistics["state"] == "starting", "c is about to join")
    heads = {scenario.produced[record_id]: record_id for record_id in sorted(scenario.failing, reverse=True)}
    assert len(heads) == len(bad)
    await request_release(scenario, *heads.values())
    await scenario.until_settled("a", "b", "c", timeout=60)
    await scenario.until_finished(len(scenario.produced), timeout=120)
    await scenario.until_nothing_is_parked()
    await scenario.verify(*safe_when_parked(scenario.failing))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["deploy", "kill"])
async def test_a_delay_that_the_handler_chose_survives(scenario: Scenario, how: str) -> None:
    """The delay of the policy is far shorter: a process that forgot the handler's would run the records too early."""
    await scenario.create(partitions=4, policy="parked")
    seconds = 20.0
    behaviour: dict[str, Any] = {"on_failure": parking(scenario.side_topic, delay=0.1), "parks_for": seconds}
    bad = [b"bad%d" % number for number in range(20)]
    scenario.start("a", QUICK, **behaviour)
    await scenario.until_settled("a")
    began = time.monotonic_ns()
    for _ in range(3):
        await scenario.produce([(key, b"x") for key in bad])
        await scenario.produce([(b"k%d" % number, b"y") for number in range(100)])
    await until_parked(scenario)
    scenario.heal()

    if how == "deploy":
        assert await scenario.members["a"].stop() == 0, scenario.members["a"].tail
    else:
        await scenario.kill("a")
    scenario.start("a", QUICK, **behaviour)
    await scenario.until_settled("a")
    await scenario.produce([(key, b"x") for key in bad])
    await scenario.until_finished(len(scenario.produced), timeout=120)
    await scenario.until_nothing_is_parked()

    seen = scenario.observations.refresh().seen
    finished = [event.at for event in seen if event.kind is Kind.FINISHED and event.record_id in scenario.failing]
    assert min(finished) >= began + seconds * 1e9
    await scenario.verify(*safe_when_parked(scenario.failing))


@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.parametrize("keys", [2_000, 10_000])
@pytest.mark.parametrize("how", ["released", "after their delay"])
async def test_very_many_parked_keys_are_restored_and_resume(scenario: Scenario, keys: int, how: str) -> None:
    """Two records of each key: what is second waits for the first one."""
    await scenario.create(partitions=4, policy="parked")
    behaviour: dict[str, Any] = {
        "on_failure": parking(scenario.side_topic, delay=LONG if how == "released" else 5.0),
        "retry": ONCE,
    }
    scenario.start("a", QUICK, **behaviour)
    await scenario.until_settled("a")
    began = time.monotonic()
    for _ in range(2):
        await scenario.produce([(b"bad%d" % number, b"x" * 200) for number in range(keys)])
    await scenario.until_all_committed(timeout=300)
    note(scenario, "parked after", began)
    assert len(live(await scenario.side_records())) == 2 * keys

    assert await scenario.members["a"].stop() == 0, scenario.members["a"].tail
    scenario.heal()
    again = scenario.start("a", QUICK, **behaviour)
    await scenario.until(lambda: again.statistics["state"] == "starting", "a has begun to start", 60)
    began = time.monotonic()
    await scenario.until_settled("a", timeout=120)
    note(scenario, "restored after", began)
    began = time.monotonic()
    if how == "released":
        heads = {scenario.produced[record_id]: record_id for record_id in sorted(scenario.failing, reverse=True)}
        await request_release(scenario, *heads.values())
    await scenario.until_finished(len(scenario.produced), timeout=300)
    note(scenario, "all of them had run after", began)
    await scenario.until_nothing_is_parked()
    note(scenario, "and were taken out after", began)
    await scenario.verify(*safe_when_parked(scenario.failing))


def note(scenario: Scenario, what: str, since: float) -> None:
    """Notes how long something took."""
    scenario.notes[what] = f"{time.monotonic() - since:.1f} s"
