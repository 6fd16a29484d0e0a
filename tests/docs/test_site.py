"""The site builds without a warning, and the reference in it is not empty."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.tables import PROJECT, named_tests

needs_zensical = pytest.mark.skipif(
    importlib.util.find_spec("zensical") is None, reason="zensical is not installed (dependency group docs)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; built elsewhere, so that nothing in the checkout changes."""
    place = tmp_path_factory.mktemp("documentation")
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(PROJECT / name, place)
    for name in ("docs", "aioshard", "tests"):
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


def ids(site: Path, page: str) -> set[str]:
    return set(re.findall(r'id="([\w.]+)"', (site / page / "index.html").read_text()))


@needs_zensical
def test_the_reference_has_the_public_names(site: Path) -> None:
    """A plugin that the builder does not know is ignored in silence, and the pages are empty then."""
    expected = {"aioshard.App", "aioshard.App.serve", "aioshard.Handlers.consume", "aioshard.Retry", "aioshard.Record"}
    expected |= {
        "aioshard.Context.idempotency_key",
        "aioshard.testing.TestClient.settle",
        "aioshard.errors.HaltedError",
    }

    assert expected - ids(site, "reference") == set()


@needs_zensical
def test_examples_in_docstrings_are_shown_as_code(site: Path) -> None:
    page = (site / "reference" / "index.html").read_text()

    assert '<span class="gp">&gt;&gt;&gt; </span>' in page
    assert "<blockquote>" not in page


@needs_zensical
def test_the_evidence_shows_the_source_of_each_test(site: Path) -> None:
    named = {name for names in named_tests().values() for name in names}

    assert named - ids(site, "evidence") == set()
    shown = (site / "evidence" / "index.html").read_text().count("Source code in <code>tests/")
    assert shown >= len(named)


@needs_zensical
def test_the_changelog_is_included(site: Path) -> None:
    assert "Keep a Changelog" in (site / "changelog" / "index.html").read_text()
