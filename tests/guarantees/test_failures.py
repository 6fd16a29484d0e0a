"""Failing keys and hanging records under each policy, while processes are killed: nothing lost, and in order."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest

from aioshard.serde.side_records import DeadLetterRecord, ParkedRecord
from tests.guarantees.behaviour import HANGING, dead_letter, parking
from tests.guarantees.checks import SAFE, safe_when_parked, verify
from tests.guarantees.observations import Kind, RecordId
from tests.guarantees.scenario import Scenario, failing_keys
from tests.guarantees.side_topics import DeadLettersExact, OneDeadLetterPerOwnership, ParkedExactly, live

PARTITIONS = 6
KEYS, FAILING = 200, 10
ATTEMPTS = 4
KILLABLE: Mapping[str, Any] = {"session_timeout": 3, "rebalance_timeout": 8, "start_timeout": 100}
TROUBLED: Mapping[str, Any] = {
    "concurrency": 16,
    "base": 0.002,
    "spread": 0.03,
    "hangs_once": 0.01,
    "timeout": 1.0,
    "retry": {"attempts": ATTEMPTS, "initial": 0.01, "maximum": 0.05},
}
"""Handlers that raise for 5 % of the keys, and hang on 1 % of the records until their attempt has timed out."""
ROOM_TO_HALT: Mapping[str, Any] = {**KILLABLE, "max_buffered_records": 100_000}
"""Records behind halted ones fit into the hundredth that a stuck partition keeps."""

DEFAULT = pytest.param(1_000, 1, marks=pytest.mark.timeout(300), id="1000 records, 1 kill")
FULL = pytest.param(20_000, 10, marks=[pytest.mark.chaos, pytest.mark.timeout(1800)], id="20000 records, 10 kills")
SIZES = pytest.mark.parametrize(("records", "kills"), [DEFAULT, FULL])


async def run_with_kills(
    scenario: Scenario, settings: Mapping[str, Any] = KILLABLE, *, records: int, kills: int, **behaviour: Any
) -> None:
    """Feeds three members while they are killed one by one, until every record of a healthy key has finished."""
    chance = random.Random(records)
    for name in "abc":
        scenario.start(name, settings, **TROUBLED, **behaviour)
    await scenario.until_settled("a", "b", "c")
    await scenario.produce([(b"%s0" % HANGING, b"%d" % number) for number in range(5)])
    scenario.start_feeding(failing_keys(records, KEYS, FAILING), backlog=1_500, chunk=500, least=records)
    for number in range(kills):
        reached = records * 0.9 * (number + chance.random()) / kills
        await scenario.until_finished(int(reached), timeout=120)
        name = chance.choice("abc")
        await scenario.kill(name)
        if chance.random() < 0.5:
            await asyncio.sleep(chance.uniform(0.1, 3))  # the group may be stable again, or not, when it comes back
        scenario.start(name, settings, **TROUBLED, **behaviour)
    await scenario.stop_feeding()
    await scenario.until_healthy_finished()


def heads(scenario: Scenario) -> dict[str, RecordId]:
    """The first record of each failing key."""
    first: dict[str, RecordId] = {}
    for record_id in sorted(scenario.failing):
        first.setdefault(scenario.produced[record_id], record_id)
    return first


def has_reason(scenario: Scenario, letter: DeadLetterRecord | ParkedRecord) -> bool:
    """Whether the headers of a dead letter or a parked record name the group, the handler and the failure."""
    key = (letter.original.key or b"").decode()
    error, message = letter.failure.error, letter.failure.message
    if key.startswith(HANGING.decode()):
        right = error == "AttemptTimeoutError"
    else:
        right = (error, message) == ("ConnectionError", f"the account of {key} is locked")
    named = (letter.failure.group, letter.failure.handler, letter.failure.attempts)
    return right and named == (scenario.group, "with_context", ATTEMPTS)


@pytest.mark.chaos
@SIZES
@pytest.mark.parametrize(
    "shards", [pytest.param(None, id=pytest.HIDDEN_PARAM)]
)  # a halted key halts those of its shard
async def test_halted_keys_hold_the_commit_but_no_other_key(scenario: Scenario, records: int, kills: int) -> None:
    await scenario.create(PARTITIONS)
    await run_with_kills(scenario, ROOM_TO_HALT, records=records, kills=kills)

    ends = await scenario.kafka.end_offsets(scenario.topic)
    oldest = {at: min((o for p, o in scenario.failing if p == at), default=end) for at, end in ends.items()}
    await scenario.until(lambda: scenario.commits[-1].offsets == oldest, f"the group has committed {oldest}", 60)
    assert await scenario.kafka.lag(scenario.group, scenario.topic) == sum(ends[at] - oldest[at] for at in ends)
    assert set(map(scenario.produced.__getitem__, scenario.failing)) == set(heads(scenario)), "nothing is lost"
    assert scenario.observations.finished.isdisjoint(scenario.failing)
    assert scenario.observations.started.keys() & scenario.failing == set(heads(scenario).values())
    await scenario.until(
        lambda: sum(m.statistics["handlers"][0]["halted"] for m in scenario.members.values()) == len(heads(scenario)),
        "all of them are counted as halted",
    )

    await let_go(scenario)
    await scenario.verify(*SAFE)


async def let_go(scenario: Scenario) -> None:
    """Halted records of a are retried and skipped; b is restarted and c killed when their handlers are repaired."""
    owner = scenario.members["a"]
    halted = {key: record_id for key, record_id in heads(scenario).items() if record_id[0] in owner.partitions}
    assert halted, "a has no halted record: it proves nothing"
    again = next(iter(halted.values()))
    before = sum(seen.record_id == again for seen in scenario.observations.of(owner.process, Kind.EXHAUSTED))
    assert await owner.order("retry_now", scenario.topic, *again) is None

    def failed_again() -> bool:
        runs = [seen for seen in scenario.observations.of(owner.process, Kind.EXHAUSTED) if seen.record_id == again]
        return len(runs) > before

    await scenario.until(failed_again, "a record that is not repaired has halted again")
    scenario.heal()
    for number, record_id in enumerate(halted.values()):
        if number == 1:
            scenario.skipped[record_id] = scenario.commits[-1].answered
        assert await owner.order("skip" if number == 1 else "retry_now", scenario.topic, *record_id) is None
    own = {
        record_id for record_id in scenario.failing if scenario.produced[record_id] in halted
    } - scenario.skipped.keys()
    await scenario.until(lambda: own <= scenario.observations.finished, "a has done what was released", 60)
    assert scenario.observations.finished.isdisjoint(scenario.skipped)

    await scenario.members["b"].stop()
    await scenario.kill("c")
    for name in "bc":
        scenario.start(name, ROOM_TO_HALT, **TROUBLED)


@pytest.mark.chaos
@SIZES
async def test_skipped_records_let_their_keys_continue(scenario: Scenario, records: int, kills: int) -> None:
    await scenario.create(PARTITIONS, policy="skip")
    await run_with_kills(scenario, records=records, kills=kills, on_failure="skip")

    await scenario.verify(*SAFE)
    assert scenario.observations.finished.isdisjoint(scenario.failing)
    gave_up = {seen.record_id for seen in scenario.observations.seen if seen.kind is Kind.EXHAUSTED}
    assert gave_up == scenario.failing, "each of them had all its attempts, and no other record was given up"


@pytest.mark.chaos
@SIZES
async def test_dead_letters_are_exactly_the_records_of_failing_keys(
    scenario: Scenario, records: int, kills: int
) -> None:
    await scenario.create(PARTITIONS, policy="dead-letters")
    await run_with_kills(scenario, records=records, kills=kills, on_failure=dead_letter(scenario.side_topic))
    await scenario.until_all_committed(timeout=120)

    dead_letters, originals = await scenario.side_records(), await scenario.originals()
    scenario.notes["dead-letters"] = len(dead_letters)
    await scenario.verify(
        *SAFE,
        DeadLettersExact(dead_letters, originals, scenario.failing, lambda letter: has_reason(scenario, letter)),
        OneDeadLetterPerOwnership(dead_letters),
    )
    assert scenario.observations.finished.isdisjoint(scenario.failing)


@pytest.mark.chaos
@SIZES
async def test_parked_keys_wait_in_the_side_topic_and_resume_in_order(
    scenario: Scenario, records: int, kills: int
) -> None:
    await scenario.create(PARTITIONS, policy="parked")
    policy = parking(scenario.side_topic, delay=3.0)
    await run_with_kills(scenario, records=records, kills=kills - 1, on_failure=policy)
    await scenario.until_all_committed(timeout=120)

    originals = await scenario.originals()
    verify(await scenario.history_so_far(), ParkedExactly(await scenario.side_records(), originals, scenario.failing))
    assert scenario.observations.finished.isdisjoint(scenario.failing)
    assert all(has_reason(scenario, parked) for parked in live(await scenario.side_records()).values())

    scenario.heal()
    half = len(scenario.produced) - len(scenario.failing) // 2
    await scenario.until_finished(half, timeout=120)
    await scenario.kill("a")
    scenario.start("a", KILLABLE, **TROUBLED, on_failure=policy)
    await scenario.until_finished(len(scenario.produced), timeout=240)
    await scenario.until_nothing_is_parked()
    scenario.notes["written to the park topic"] = len(await scenario.side_records())
    await scenario.verify(*safe_when_parked(scenario.failing))
