"""The built site, shared by all tests that read it."""

import importlib.util
from pathlib import Path

import pytest

from tests.tools.site import build


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the site."""
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("zensical is missing: dependency group docs")
    return build(tmp_path_factory.mktemp("site"))
