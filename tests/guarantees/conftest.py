"""The scenario that each of these tests fills with members."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.guarantees.scenario import Client, Scenario
from tests.support.shared_kafka import SharedKafka


@pytest.fixture
def client() -> Client:
    """What members read with; a test that is for several clients is parametrised with it."""
    return "aiokafka"


@pytest.fixture
async def scenario(
    kafka: SharedKafka, topic: str, group: str, tmp_path: Path, client: Client, request: pytest.FixtureRequest
) -> AsyncIterator[Scenario]:
    """A scenario without members; ends those that a test leaves behind, and leaves its figures in the report."""
    async with Scenario(kafka, topic, group, tmp_path) as scenario:
        scenario.client = client
        yield scenario
        request.node.user_properties.extend(scenario.figures().items())
