"""Scenarios whose members reach three brokers through proxies."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.guarantees.scenario import GroupProtocol, Scenario
from tests.support.three_brokers import ThreeBrokers


@pytest.fixture
def protocol() -> GroupProtocol:
    """The group protocol of all members; a test for several protocols is parametrized with it."""
    return "classic"


@pytest.fixture
async def scenario(
    brokers: ThreeBrokers, topic: str, group: str, tmp_path: Path, protocol: GroupProtocol
) -> AsyncIterator[Scenario]:
    """A scenario without members; its samples survive any failure of a broker."""
    async with Scenario(brokers, topic, group, tmp_path) as scenario:
        scenario.protocol = protocol
        scenario.sampling.survives = True
        scenario.sampling.interval = 0.25
        yield scenario
