"""The scenario that these tests fill with members."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tests.guarantees.scenario import GroupProtocol, Scenario
from tests.support.brokers import SharedKafka

FIXED = 16
"""Fixed shards of each member: few, so that keys share them."""


@pytest.fixture
def protocol() -> GroupProtocol:
    """The group protocol of the members; a test for several protocols is parametrized with it."""
    return "classic"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every scenario runs with shards on demand and, in the long tests, with fixed ones, unless it says which."""
    named = {name for mark in metafunc.definition.iter_markers("parametrize") for name in argument_names(mark)}
    if "shards" in metafunc.fixturenames and "shards" not in named:
        fixed = pytest.param(FIXED, marks=pytest.mark.chaos, id="fixed")
        metafunc.parametrize("shards", [pytest.param(None, id=pytest.HIDDEN_PARAM), fixed])


def argument_names(mark: pytest.Mark) -> list[str]:
    """Return the argument names of a `parametrize` mark."""
    names: str | Sequence[str] = mark.args[0]
    return names.split(",") if isinstance(names, str) else list(names)


@pytest.fixture
async def scenario(
    kafka: SharedKafka,
    topic: str,
    group: str,
    tmp_path: Path,
    protocol: GroupProtocol,
    shards: int | None,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Scenario]:
    """A scenario without members; ends those that a test leaves behind, and leaves its figures in the report."""
    async with Scenario(kafka, topic, group, tmp_path) as scenario:
        scenario.protocol = protocol
        scenario.shards = shards
        yield scenario
        request.node.user_properties.extend(scenario.figures().items())
