"""Scenarios whose members reach three brokers through proxies."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.guarantees.scenario import Client, Scenario
from tests.support.three_brokers import ThreeBrokers


@pytest.fixture
def client() -> Client:
    """The client of all members; a test that is for several clients is parametrised with it."""
    return "aiokafka"


@pytest.fixture
async def scenario(
    brokers: ThreeBrokers, topic: str, group: str, tmp_path: Path, client: Client
) -> AsyncIterator[Scenario]:
    """A scenario without members; its samples survive any failure of a broker."""
    async with Scenario(brokers, topic, group, tmp_path) as scenario:
        scenario.client = client
        scenario.sampling.survives = True
        scenario.sampling.interval = 0.25
        yield scenario
