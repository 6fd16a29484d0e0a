"""The built site, once for all tests that read it."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.running import PROJECT


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the site. It is built elsewhere, so that nothing in the checkout changes."""
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("zensical is missing: dependency group docs")
    place = tmp_path_factory.mktemp("site")
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(PROJECT / name, place)
    for name in ("docs", "aioshard", "examples", "tests"):
        shutil.copytree(PROJECT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean"],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return place / "site"
