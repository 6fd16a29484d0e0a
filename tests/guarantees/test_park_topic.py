"""A park topic that is unwritable, missing or misconfigured: errors and recovery."""

from collections.abc import Mapping
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from confluent_kafka.admin import AclOperation

from tests.guarantees.access import consuming_user
from tests.guarantees.behaviour import parking
from tests.guarantees.checks import safe_when_parked, verify
from tests.guarantees.scenario import Scenario
from tests.guarantees.side_topics import ParkedExactly
from tests.support.access import allow
from tests.support.brokers import SharedKafka

PARTITIONS = 4
ONCE: Mapping[str, Any] = {"attempts": 1}


def behaviour(scenario: Scenario) -> dict[str, Any]:
    """Members that park for a second."""
    return {"on_failure": parking(scenario.side_topic, delay=1.0), "retry": ONCE, "explains": True}


async def park_and_resume(scenario: Scenario) -> None:
    """Looks whether the records of failing keys are parked, heals them, and waits until all is done."""
    await scenario.until_all_committed()
    parked = ParkedExactly(await scenario.side_records(), await scenario.originals(), scenario.failing)
    verify(await scenario.history_so_far(), parked)
    scenario.heal()
    await scenario.until_finished(len(scenario.produced))
    await scenario.until_nothing_is_parked()
    await scenario.verify(*safe_when_parked(scenario.failing))


async def produce_some(scenario: Scenario) -> None:
    """Records of 30 healthy keys and 3 that fail, 4 of each."""
    bad = [b"bad%d" % number for number in range(3)]
    for _ in range(4):
        await scenario.produce([(key, b"x") for key in scenario.keys_apart(b"k", 30, *bad)])
        await scenario.produce([(key, b"x") for key in bad])


@pytest.mark.timeout(240)
async def test_an_unwritable_park_topic_holds_failed_keys_until_granted(scenario: Scenario, kafka: SharedKafka) -> None:
    await scenario.create(PARTITIONS, policy="parked")
    user, login = await consuming_user(kafka, scenario)
    may = (AclOperation.READ, AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS)
    await allow(kafka, user, "topic", scenario.side_topic, *may)
    await produce_some(scenario)
    member = scenario.start("a", login, **behaviour(scenario))

    await scenario.until_healthy_finished()
    oldest = {at: min((o for p, o in scenario.failing if p == at), default=None) for at in range(PARTITIONS)}
    held = {at: offset for at, offset in oldest.items() if offset is not None}
    await scenario.until(lambda: scenario.commits[-1].offsets.items() >= held.items(), f"{held} is committed", 60)
    await scenario.until(lambda: "do not allow" in member.explanation, f"it says so: {member.explanation}", 60)
    assert scenario.side_topic in member.explanation
    assert "stays incomplete and is tried again" in member.log
    assert scenario.commits[-1].offsets.items() >= held.items()
    assert await scenario.side_records() == []
    await allow(kafka, user, "topic", scenario.side_topic, AclOperation.WRITE)

    await park_and_resume(scenario)


@pytest.mark.timeout(240)
async def test_a_missing_park_topic_is_created_with_the_right_settings(scenario: Scenario) -> None:
    await scenario.create(PARTITIONS, policy="parked", side_partitions=0)
    scenario.start("a", **behaviour(scenario))
    await scenario.until_settled("a")

    assert len(await scenario.kafka.partitions(scenario.side_topic)) == PARTITIONS
    assert await cleanup_policy(scenario) == "compact"
    await scenario.watch_side_topic()
    await produce_some(scenario)
    await park_and_resume(scenario)


async def cleanup_policy(scenario: Scenario) -> str:
    """Return the cleanup policy of the side topic."""
    admin = AIOKafkaAdminClient(bootstrap_servers=scenario.kafka.bootstrap)
    await admin.start()
    try:
        wanted = ConfigResource(ConfigResourceType.TOPIC, scenario.side_topic, configs={"cleanup.policy": ""})
        (answer,) = await admin.describe_configs([wanted])
    finally:
        await admin.close()
    return next(str(value) for name, value, *_ in answer.resources[0][4] if name == "cleanup.policy")


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("topic_is", "says"),
    [
        (
            {"side": {"cleanup.policy": "delete"}},
            "has cleanup.policy=delete, so old entries would be deleted",
        ),
        pytest.param(
            {"side_partitions": 2},
            "has 2 partitions and needs 4, as many as the topic whose records it keeps: add 2",
            marks=pytest.mark.chaos,
        ),
    ],
    ids=["not compacted", "too few partitions"],
)
@pytest.mark.timeout(240)
async def test_a_park_topic_that_would_lose_records_ends_the_start(
    scenario: Scenario, topic_is: Mapping[str, Any], says: str
) -> None:
    await scenario.create(PARTITIONS, policy="parked", **topic_is)
    await produce_some(scenario)
    member = scenario.start("a", {"start_timeout": 5}, **behaviour(scenario))

    assert await member.ended(60) == 1, member.tail
    assert says in member.log, member.tail
    assert f"{scenario.side_topic!r}" in member.log
    assert scenario.observations.refresh().seen == [], "nothing ran that could not be parked"


@pytest.mark.chaos
@pytest.mark.timeout(240)
async def test_a_park_topic_without_permissions_ends_the_start_and_names_them(
    scenario: Scenario, kafka: SharedKafka
) -> None:
    await scenario.create(PARTITIONS, policy="parked", side_partitions=0)
    _, login = await consuming_user(kafka, scenario)
    member = scenario.start("a", {**login, "start_timeout": 5}, **behaviour(scenario))

    assert await member.ended(60) == 1, member.tail
    assert "the brokers do not allow this user to create it: grant CREATE on it" in member.log, member.tail
