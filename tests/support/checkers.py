"""Programs that check files: schemas, manifests and packages."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from tests.support.requirements import skip_or_fail


def checked(program: str, *arguments: object) -> None:
    """Run a program of the dependency group `test`, and fail with its output unless it ends with 0."""
    if importlib.util.find_spec(program.replace("-", "_")) is None:
        skip_or_fail(program, "dependency group test")
    command = [str(Path(sys.executable).parent / program), *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
