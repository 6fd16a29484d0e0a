"""The scenario that each of these tests fills with members."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.guarantees.scenario import Scenario
from tests.support.shared_kafka import SharedKafka


@pytest.fixture
async def scenario(
    kafka: SharedKafka, topic: str, group: str, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Scenario]:
    """A scenario without members; ends those that a test leaves behind, and leaves its figures in the report."""
    async with Scenario(kafka, topic, group, tmp_path) as scenario:
        yield scenario
        request.node.user_properties.extend(scenario.figures().items())
