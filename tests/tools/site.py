"""The documentation site, built from an unchanging copy of the checkout."""

import shutil
import subprocess
import sys
from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from tests.support.paths import PROJECT


def build(directory: Path) -> Path:
    """Build the site below an empty directory, and return the directory of its pages."""
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(PROJECT / name, directory)
    for name in ("docs", "aioshard", "examples", "tests"):
        shutil.copytree(PROJECT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return directory / "site"


def addresses(site: Path) -> list[str]:
    """The pages of a built site, such as `concepts/`; the landing page is empty."""
    return sorted(str(page.relative_to(site)).removesuffix("index.html") for page in site.rglob("index.html"))


def application(site: Path) -> Starlette:
    """Serves a built site."""
    return Starlette(routes=[Mount("/", StaticFiles(directory=site, html=True))])
