"""The stores that each of these tests runs on."""

from pathlib import Path

import pytest

from tests.services.idempotence.stores import Store, store_at


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store."""
    if request.param == "sqlite":
        return store_at(str(tmp_path / "customers.db"))
    return store_at(request.getfixturevalue("postgresql_url"))
