"""SIGTERM while the coordinator is unavailable: the last commit gets all remaining time (I12)."""

import asyncio

import pytest

from tests.guarantees.checks import DEPLOYED, SAFE
from tests.guarantees.process import Member
from tests.guarantees.scenario import Scenario
from tests.support.proxies import GROUP_APIS, Rule
from tests.support.three_brokers import ThreeBrokers

PARTITIONS, RECORDS = 4, 200
AWAY = 8.0
SETTINGS = {"client_id": "a", "session_timeout": 30, "rebalance_timeout": 60, "shutdown_timeout": 25}


async def stopped_without_coordinator(scenario: Scenario, brokers: ThreeBrokers) -> tuple[Member, list[Rule]]:
    """A member that has finished records, has committed none of them, and is asked to end."""
    await scenario.create(PARTITIONS)
    rarely = {"commit_interval": 600, "commit_records": None}
    settings = {**SETTINGS, "bootstrap_servers": brokers.proxied_bootstrap, **rarely}
    member = scenario.start("a", settings)
    await scenario.until_settled("a")
    await scenario.produce([(b"k%d" % (number % 40), None) for number in range(RECORDS)])
    await scenario.until_finished(RECORDS)
    assert not any((await scenario.sample_commits()).offsets.values()), "it has committed: this shows nothing"
    rules = [brokers.proxies.swallow(api_key=api, client_id="a") for api in GROUP_APIS]
    member.terminate()
    return member, rules


@pytest.mark.chaos
async def test_shutdown_during_a_short_coordinator_outage_repeats_nothing(
    scenario: Scenario, brokers: ThreeBrokers
) -> None:
    member, rules = await stopped_without_coordinator(scenario, brokers)
    await asyncio.sleep(AWAY)
    assert member.alive, member.tail
    for rule in rules:
        rule.lift()

    assert await member.ended() == 0, member.tail
    scenario.start("a")
    await scenario.until_settled("a")
    await scenario.verify(*DEPLOYED)


@pytest.mark.chaos
async def test_shutdown_without_a_coordinator_exits_4_and_names_the_partitions(
    scenario: Scenario, brokers: ThreeBrokers
) -> None:
    member, rules = await stopped_without_coordinator(scenario, brokers)

    assert await member.ended(60) == 4, member.tail
    for rule in rules:
        rule.lift()
    assert all(f"{scenario.topic}/{partition} (" in member.log for partition in range(PARTITIONS)), member.tail
    scenario.start("b")
    await scenario.verify(*SAFE)
    assert set(scenario.observations.started.values()) == {2}
