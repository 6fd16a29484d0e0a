"""Unprocessable records: a raising sharding function, a raising key, an undecodable payload."""

import contextlib
from typing import Any

import pytest

from aioshard.serde.side_records import Coordinates, release
from tests.guarantees.behaviour import POISON, dead_letter, parking
from tests.guarantees.checks import safe_when_parked, verify
from tests.guarantees.observations import RecordId
from tests.guarantees.scenario import Policy, Scenario
from tests.guarantees.side_topics import DeadLettersExact, ParkedExactly

ILLS = {
    "payload": "key",
    "function": "raises",
    "hash": "cannot be hashed",
    "comparison": "cannot be compared",
}
"""The fault, and the behavior of the sharding function with it."""


def on_failure(lane: Scenario, policy: Policy) -> Any:
    """The policy of a handler."""
    match policy:
        case "dead-letters":
            return dead_letter(lane.side_topic)
        case "parked":
            return parking(lane.side_topic, delay=100_000.0)
    return policy


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "shards", [pytest.param(None, id="on demand"), pytest.param(3, marks=pytest.mark.chaos, id="fixed shards")]
)
@pytest.mark.parametrize("policy", ["halt", "skip", "dead-letters", "parked"])
async def test_an_unprocessable_record_has_an_outcome_and_ends_no_worker(
    scenario: Scenario, policy: Policy, shards: int | None
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lanes = {name: await stack.enter_async_context(scenario.beside(name)) for name in ILLS}
        poison: dict[str, list[RecordId]] = {}
        for name, lane in lanes.items():
            await lane.create(1, policy=policy)
            for number in range(3):
                await lane.produce([(b"k%d" % key, b"%d" % number) for key in range(10)])
                # Each with its own key: without a shard key they are in no order.
                record_ids = await lane.produce([(b"poison%d" % number, POISON)])
                poison.setdefault(name, []).extend(record_ids)
            lane.failing.update(poison[name])
            if policy == "skip":
                lane.skipped.update(dict.fromkeys(poison[name], 0))
        await scenario.create(1)
        handlers = [
            lane.handled(shard_by=ILLS[name], on_failure=on_failure(lane, policy), shards=shards)
            for name, lane in lanes.items()
        ]
        member = scenario.start("a", retry={"attempts": 2, "initial": 0.01}, beside=handlers)

        for name, lane in lanes.items():
            if policy != "halt" or shards is None:
                await lane.until_healthy_finished()  # else other keys are in the shards that halt
            await outcome(lane, policy, poison[name])
        assert member.alive
        assert member.statistics["state"] == "running"


async def outcome(lane: Scenario, policy: Policy, poison: list[RecordId]) -> None:
    """Looks at what has become of the records that cannot be handled, and heals those that wait for it."""
    member = lane.members["a"]
    if policy == "halt":
        first = {0: poison[0][1]}
        await lane.until(lambda: lane.commits[-1].offsets == first, f"the group has committed {first}", 60)
        lane.heal()
        for record_id in poison:
            while record_id not in lane.observations.refresh().finished:
                # It may not have come to its first attempt yet, where another one halts its shard.
                await member.order("retry_now", lane.topic, *record_id)
    await lane.until_all_committed()
    originals = await lane.originals()
    if policy == "dead-letters":
        dead_letters = DeadLettersExact(await lane.side_records(), originals, poison, lambda _: True)
        verify(await lane.history_so_far(), dead_letters)
    elif policy == "parked":
        verify(await lane.history_so_far(), ParkedExactly(await lane.side_records(), originals, poison))
        lane.heal()
        asked = [release(lane.side_topic, Coordinates(lane.topic, *record_id)) for record_id in poison]
        await lane.kafka.produce(lane.side_topic, [(request.key, request.value) for request in asked], 0)
        await lane.until_finished(len(lane.produced))
        await lane.until_nothing_is_parked()
    await lane.verify(*safe_when_parked(poison if policy == "parked" else ()))
