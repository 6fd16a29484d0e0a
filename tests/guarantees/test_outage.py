"""Outages of the dead-letter topic and of the backend while records fail."""

import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from confluent_kafka.admin import AclOperation

from tests.guarantees.access import consuming_user
from tests.guarantees.behaviour import dead_letter
from tests.guarantees.checks import SAFE
from tests.guarantees.observations import Kind, RecordId
from tests.guarantees.scenario import Scenario, even_keys, failing_keys
from tests.guarantees.side_topics import DeadLettersExact, ids_of_dead_letters
from tests.support.access import allow
from tests.support.brokers import SharedKafka
from tests.support.kafka import KafkaBroker

ONCE: Mapping[str, Any] = {"attempts": 1}
PARTITIONS = 4


def oldest_of(scenario: Scenario, ends: Mapping[int, int]) -> dict[int, int]:
    """Of each partition its first record that fails, or its end: nothing may be committed past that."""
    return {at: min((o for p, o in scenario.failing if p == at), default=end) for at, end in ends.items()}


async def until_held(scenario: Scenario, says: str) -> None:
    """Waits until all but failing keys are done, and check that the failing ones hold the commit."""
    member = scenario.members["a"]
    held = oldest_of(scenario, await scenario.kafka.end_offsets(scenario.topic))
    await scenario.until_healthy_finished()
    await scenario.until(lambda: scenario.commits[-1].offsets == held, f"the group has committed {held}", 60)
    await scenario.until(lambda: says in member.explanation, f"it explains {says!r}: {member.explanation}", 60)
    await scenario.until(lambda: says in member.log, f"it logs {says!r}", 60)
    assert scenario.side_topic in member.explanation
    assert "stays incomplete and is tried again" in member.log
    assert scenario.commits[-1].offsets == held
    assert await scenario.side_records() == []
    runs = {seen.record_id for seen in scenario.observations.seen if seen.kind is Kind.STARTED} & scenario.failing
    firsts = {scenario.produced[record_id]: record_id for record_id in sorted(scenario.failing, reverse=True)}
    assert runs == set(firsts.values()), "the records behind wait"


async def exact(scenario: Scenario, expected: set[RecordId], *, repeated: int = 0) -> None:
    """All is committed, each expected record has a dead letter, and at most *repeated* have another one."""
    await scenario.until_all_committed(timeout=120)
    dead_letters, originals = await scenario.side_records(), await scenario.originals()
    scenario.notes["dead-letters"] = len(dead_letters)
    assert len(dead_letters) - len(expected) <= repeated
    await scenario.verify(*SAFE, DeadLettersExact(dead_letters, originals, expected, lambda _: True))


async def produce_some(scenario: Scenario, *, size: int = 10) -> None:
    """Records of 30 healthy keys and 3 that fail, 4 of each."""
    bad = [b"bad%d" % number for number in range(3)]
    for _ in range(4):
        await scenario.produce([(key, b"x") for key in scenario.keys_apart(b"k", 30, *bad)])
        await scenario.produce([(key, b"x" * size) for key in bad])


@pytest.mark.timeout(240)
async def test_an_unwritable_dead_letter_topic_holds_failed_keys_until_granted(
    scenario: Scenario, kafka: SharedKafka
) -> None:
    await scenario.create(PARTITIONS, policy="dead-letters")
    user, login = await consuming_user(kafka, scenario)
    await produce_some(scenario)
    scenario.start("a", login, on_failure=dead_letter(scenario.side_topic), retry=ONCE, explains=True)

    await until_held(scenario, "do not allow")
    await allow(kafka, user, "topic", scenario.side_topic, AclOperation.WRITE, AclOperation.DESCRIBE)

    await exact(scenario, scenario.failing)


@pytest.mark.timeout(240)
async def test_oversized_dead_letters_hold_their_keys_until_the_topic_accepts_them(scenario: Scenario) -> None:
    await scenario.create(PARTITIONS, policy="dead-letters", side={"max.message.bytes": "2000"})
    await produce_some(scenario, size=5_000)
    scenario.start("a", on_failure=dead_letter(scenario.side_topic), retry=ONCE, explains=True)

    await until_held(scenario, "max.message.bytes")
    admin = AIOKafkaAdminClient(bootstrap_servers=scenario.kafka.bootstrap)
    await admin.start()
    try:
        larger = {"max.message.bytes": "100000"}
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, scenario.side_topic, larger)])
    finally:
        await admin.close()

    await exact(scenario, scenario.failing)


@pytest.fixture
async def alone(own_kafka: KafkaBroker, topic: str, group: str, tmp_path: Path) -> AsyncIterator[Scenario]:
    """A scenario on a broker that may be stopped."""
    async with Scenario(own_kafka, topic, group, tmp_path) as scenario:
        scenario.sampling.survives = True
        yield scenario


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_a_broker_outage_loses_no_dead_letters_in_flight(alone: Scenario, own_kafka: KafkaBroker) -> None:
    await alone.create(PARTITIONS, policy="dead-letters")
    member = alone.start("a", on_failure=dead_letter(alone.side_topic), retry=ONCE, base=0.01, explains=True)
    await alone.until_settled("a")
    await alone.produce(
        [(key, b"x") for key, _ in zip(failing_keys(1, keys=100, failing=50), range(6_000), strict=False)]
    )
    await alone.until_finished(500)

    await own_kafka.kill()
    await alone.until(lambda: bool(member.statistics["trouble"]), "the statistics tell that the broker is gone", 60)
    await alone.until(lambda: "its dead letter is written to" in member.explanation, "and what waits", 60)
    assert alone.unfinished > 0, "the outage came too late"
    left = len(alone.failing) - len(alone.observations.refresh().finished)
    assert left > 0
    await own_kafka.start()

    # Unacknowledged dead letters may have been stored and are sent again; at most one per worker was in flight. A
    # broker that has just come back may store that and not answer in time, once more.
    await exact(alone, alone.failing, repeated=2 * 64)
    await alone.until(lambda: member.statistics["trouble"] is None, "the trouble is over", 60)


@pytest.mark.chaos
@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(8.0, marks=pytest.mark.timeout(240), id="8 s"),
        pytest.param(30.0, marks=pytest.mark.timeout(400), id="30 s"),
    ],
)
async def test_a_backend_outage_diverts_at_most_a_window_and_recovers_by_itself(
    scenario: Scenario, seconds: float
) -> None:
    window, concurrency = 100, 16
    most = 2 * (window + concurrency)
    await scenario.create(PARTITIONS, policy="dead-letters")
    behaviour: dict[str, Any] = {
        "on_failure": dead_letter(scenario.side_topic, window=window),
        "retry": {"attempts": 3, "initial": 0.05, "maximum": 0.2},
        "base": 0.05,
        "concurrency": concurrency,
    }
    members = [scenario.start(name, explains=True, **behaviour) for name in "ab"]
    await scenario.until_settled("a", "b")
    scenario.start_feeding(even_keys(seed=3, keys=600), backlog=1_500, chunk=500)
    await scenario.until_finished(500)
    before = await rate(scenario, 3.0)

    scenario.tell("down")
    down = time.monotonic()
    await scenario.until(
        lambda: all("circuit breaker" in str(found["paused"]) for m in members for found in m.partitions.values()),
        "every partition is paused by the circuit breaker",
        60,
    )
    assert all("circuit breaker of handler with_context is open" in member.explanation for member in members)
    await pass_time(scenario, down + seconds - time.monotonic())
    during = len(await scenario.side_records())
    assert 0 < during <= most
    scenario.tell("down", holds=False)
    up, done = time.monotonic(), len(scenario.observations.finished)
    await scenario.until_finished(done + 1, timeout=60)
    scenario.notes["first success after"] = f"{time.monotonic() - up:.1f} s"
    await scenario.until(
        lambda: not any("circuit breaker" in str(found["paused"]) for found in partitions(scenario)),
        "no partition is paused any more",
        60,
    )
    scenario.notes["all partitions resume after"] = f"{time.monotonic() - up:.1f} s"
    after = await rate(scenario, 3.0)
    scenario.notes |= {"a second before": round(before), "and after": round(after), "diverted": during}

    assert after > before / 2, f"{before:.0f} a second before, {after:.0f} after"
    await scenario.stop_feeding()
    record_ids = {record_id for record_id, _ in ids_of_dead_letters(await scenario.side_records())}
    assert len(record_ids) <= most
    scenario.failing |= record_ids  # nobody waits for them to finish
    assert record_ids.isdisjoint(scenario.observations.refresh().finished)
    await exact(scenario, record_ids)


def partitions(scenario: Scenario) -> list[dict[str, Any]]:
    """The statistics of all partitions."""
    return [found for member in scenario.members.values() for found in member.partitions.values()]


async def rate(scenario: Scenario, seconds: float) -> float:
    """Records that finish in a second, over some seconds."""
    scenario.observations.refresh()
    before, began = len(scenario.observations.finished), time.monotonic()
    await pass_time(scenario, seconds)
    return (len(scenario.observations.finished) - before) / (time.monotonic() - began)


async def pass_time(scenario: Scenario, seconds: float) -> None:
    """Let some seconds pass: the test needs the time itself."""
    end = time.monotonic() + seconds
    await scenario.until(lambda: time.monotonic() >= end, "time passes", seconds + 60)
