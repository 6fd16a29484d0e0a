"""A run of the tests imports either the compiled modules or the sources, and `aioshard --version` says which."""

import importlib
import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from aioshard import __version__
from tests.support.paths import PROJECT
from tests.tools.compiled import EXPECTED, modules

COMPILED = EXPECTED in os.environ


@pytest.mark.parametrize("path", modules(), ids=str)
def test_every_listed_module_is_compiled_as_expected(path: Path) -> None:
    imported = importlib.import_module(".".join(path.with_suffix("").parts)).__file__
    assert imported is not None
    if COMPILED:
        assert imported.endswith(EXTENSION_SUFFIXES[0])
    else:
        assert imported == str(PROJECT / path)


def test_the_version_says_whether_it_is_compiled() -> None:
    done = subprocess.run([sys.executable, "-m", "aioshard", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"aioshard {__version__} ({'compiled' if COMPILED else 'pure Python'})\n"
