"""A member that the group has dropped rejoins when it reaches its coordinator again."""

import asyncio

import pytest

from tests.guarantees.checks import SAFE, Apart, OnlyUncommittedAgain
from tests.guarantees.scenario import Scenario
from tests.support.load import Load
from tests.support.proxies import GROUP_APIS
from tests.support.three_brokers import ThreeBrokers

PARTITIONS = 4
CUT_FOR = 26.0
"""Seconds, much longer than a session."""


def key(partition: int, number: int) -> bytes:
    return b"k%d-%d" % (partition, number % 10)


@pytest.mark.chaos
@pytest.mark.timeout(180)
@pytest.mark.parametrize("protocol", ["consumer"])  # the others: `test_cut_off_members`
async def test_a_member_that_was_cut_off_rejoins(scenario: Scenario, brokers: ThreeBrokers) -> None:
    await scenario.create(PARTITIONS)
    for name in "ab":
        scenario.start(name, {"bootstrap_servers": brokers.proxied_bootstrap, "client_id": name})
    await scenario.until_settled("a", "b")
    async with Load(brokers.bootstrap, scenario.topic, PARTITIONS, scenario.produced, rate=40, key=key):
        rules = [brokers.proxies.swallow(api_key=api, client_id="a") for api in GROUP_APIS]
        await asyncio.sleep(CUT_FOR)
        assert len(scenario.members["b"].partitions) == PARTITIONS
        for rule in rules:
            rule.lift()
        await scenario.until_settled("a", "b", timeout=20)
    await scenario.read_back()
    others = [guarantee for guarantee in SAFE if not isinstance(guarantee, OnlyUncommittedAgain)]
    await scenario.verify(*others, OnlyUncommittedAgain(apart=[Apart("a.1")]))
