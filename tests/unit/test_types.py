"""Type checkers report exactly what is refused at run time."""

import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from aioshard.settings import Settings, SettingsDict
from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow

USES = PROJECT / "tests/unit/typed_uses.py"
WRONG = {number for number, line in enumerate(USES.read_text().splitlines(), 1) if "# wrong" in line}


def mypy() -> set[int]:
    """Return the lines that mypy reports."""
    cache = PROJECT / ".cache/typed-uses"
    options = ["--strict", "--config-file=", "--follow-imports=silent", f"--cache-dir={cache}"]
    environment = os.environ | {"MYPYPATH": str(PROJECT)}
    # A separate module name: `tests` has no types for other programs.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--scripts-are-modules", USES.name],
        cwd=USES.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = re.findall(rf"^{USES.name}:(\d+): error", done.stdout, re.MULTILINE)
    assert lines, done.stdout + done.stderr
    return {int(line) for line in lines}


def pyright(directory: Path) -> set[int]:
    """Return the lines that pyright reports."""
    project = {"include": [str(USES)], "extraPaths": [str(PROJECT)], "typeCheckingMode": "standard"}
    path = directory / "pyrightconfig.json"
    path.write_text(json.dumps(project))
    options = ["--project", str(path), "--pythonpath", sys.executable, "--outputjson"]
    command = [str(Path(sys.executable).with_name("basedpyright")), *options]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert found, done.stderr
    return {error["range"]["start"]["line"] + 1 for error in found if error["severity"] == "error"}


def test_mypy_reports_the_wrong_lines() -> None:
    assert mypy() == WRONG


@pytest.mark.chaos
def test_pyright_reports_the_wrong_lines(tmp_path: Path) -> None:
    assert pyright(tmp_path) == WRONG


def test_type_checkers_know_every_setting() -> None:
    assert SettingsDict.__annotations__.keys() == Settings.model_fields.keys()


def words(annotation: Any) -> set[str]:
    """The words that an annotation allows, at any depth."""
    return {word for part in typing.get_args(annotation) for word in ([part] if isinstance(part, str) else words(part))}


@pytest.mark.parametrize("name", Settings.model_fields)
def test_type_checkers_know_the_choices_of_a_setting(name: str) -> None:
    assert words(Settings.model_fields[name].annotation) == words(SettingsDict.__annotations__[name])
