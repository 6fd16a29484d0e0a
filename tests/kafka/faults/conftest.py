"""The client that the apps of these tests use."""

import pytest


@pytest.fixture
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Names it in the environment, which every app of the test reads its settings from."""
    name: str = request.param
    monkeypatch.setenv("AIOSHARD_CLIENT", name)
    return name
