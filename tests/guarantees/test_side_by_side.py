"""One app with all policies side by side and publishing handlers, while processes are killed."""

import contextlib
import random
from collections.abc import Mapping
from typing import Any

import pytest

from tests.guarantees.behaviour import dead_letter, parking
from tests.guarantees.checks import safe_when_parked, verify
from tests.guarantees.scenario import Policy, Scenario, failing_keys
from tests.guarantees.side_topics import DeadLettersExact, ParkedExactly

POLICIES: tuple[Policy, ...] = ("halt", "skip", "dead-letters", "parked")
SETTINGS: Mapping[str, Any] = {
    "session_timeout": 3,
    "rebalance_timeout": 8,
    "start_timeout": 100,
    "max_buffered_records": 100_000,
}


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("records", "kills"),
    [
        pytest.param(500, 2, marks=pytest.mark.timeout(300), id="500 of each, 2 kills"),
        pytest.param(5_000, 10, marks=pytest.mark.timeout(1200), id="5000 of each, 10 kills"),
    ],
)
async def test_handlers_side_by_side_keep_their_policies_and_publish_every_result(
    scenario: Scenario, records: int, kills: int
) -> None:
    chance = random.Random(records)
    output = f"{scenario.topic}.out"
    await scenario.kafka.create_topic(output, 4)
    await scenario.create(2)
    async with contextlib.AsyncExitStack() as stack:
        lanes = {name: await stack.enter_async_context(scenario.beside(name)) for name in POLICIES}
        handlers = []
        for name, lane in lanes.items():
            await lane.create(4, policy=name)
            policies = {"dead-letters": dead_letter(lane.side_topic), "parked": parking(lane.side_topic, delay=3.0)}
            handlers.append(lane.handled(on_failure=policies.get(name, name), output=output))
        behaviour: dict[str, Any] = {
            "beside": handlers,
            "concurrency": 16,
            "base": 0.01,
            "spread": 0.04,
            "retry": {"attempts": 3, "initial": 0.01},
        }
        for member in "ab":
            scenario.start(member, SETTINGS, **behaviour)
        for lane in lanes.values():
            lane.start_feeding(failing_keys(records, keys=80, failing=4), backlog=250, chunk=125, least=records)
        for number in range(kills):
            for lane in lanes.values():
                await lane.until_finished(int(records * 0.9 * (number + chance.random()) / kills), timeout=180)
            member = chance.choice("ab")
            await scenario.kill(member)
            scenario.start(member, SETTINGS, **behaviour)
        for lane in lanes.values():
            await lane.stop_feeding()
            await lane.until_healthy_finished(timeout=180)
        await check_diverted_records(lanes)

        lanes["halt"].heal()
        lanes["parked"].heal()
        for member in "ab":  # what has halted is repaired by a restart
            await scenario.members[member].stop()
            scenario.start(member, SETTINGS, **behaviour)
        await lanes["parked"].until_finished(len(lanes["parked"].produced), timeout=180)
        await lanes["parked"].until_nothing_is_parked()
        for name, lane in lanes.items():
            await lane.verify(*safe_when_parked(lane.failing if name == "parked" else ()))
        await check_output(scenario, output, lanes)


async def check_diverted_records(lanes: Mapping[Policy, Scenario]) -> None:
    """Each policy has done with the records of failing keys what it should, and only with its own."""
    halted, dead_letters, parked = lanes["halt"], lanes["dead-letters"], lanes["parked"]
    for lane in (lanes["skip"], dead_letters, parked):
        await lane.until_all_committed(timeout=120)
    oldest = {at: min((o for p, o in halted.failing if p == at), default=None) for at in range(4)}
    held = {at: offset for at, offset in oldest.items() if offset is not None}
    await halted.until(lambda: halted.commits[-1].offsets.items() >= held.items(), f"{held} is committed", 60)
    for lane in lanes.values():
        assert lane.observations.finished.isdisjoint(lane.failing)
    verify(
        await dead_letters.history_so_far(),
        DeadLettersExact(
            await dead_letters.side_records(), await dead_letters.originals(), dead_letters.failing, lambda _: True
        ),
    )
    verify(
        await parked.history_so_far(),
        ParkedExactly(await parked.side_records(), await parked.originals(), parked.failing),
    )


async def check_output(scenario: Scenario, output: str, lanes: Mapping[Policy, Scenario]) -> None:
    """Check that processed records have their output, and that skipped or dead-lettered ones have none."""
    published = {(record.key or b"").decode() for record in await scenario.kafka.read(output)}
    processed = {
        f"{lane.topic}/{partition}/{offset}"
        for lane in lanes.values()
        for partition, offset in lane.observations.refresh().finished
    }
    scenario.notes |= {"processed": len(processed), "published": len(published)}
    assert processed <= published
    started = {
        f"{lane.topic}/{partition}/{offset}"
        for lane in lanes.values()
        for partition, offset in lane.observations.started.keys() - (lane.failing - lane.observations.finished)
    }
    assert published <= started
