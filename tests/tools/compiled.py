"""The compiled package, built once per state of the sources, and the fast tests on it."""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

from tests.support.paths import PROJECT
from tests.support.requirements import provide

BUILD_TIMEOUT = 1_200.0
FAST_TESTS = [
    *("-m", "not chaos and not slow"),
    *(
        "tests/unit/core",
        "tests/unit/kafka/test_fetched_records.py",
        "tests/unit/kafka/wire/test_records.py",
        "tests/unit/test_compiled.py",
        "tests/unit/properties",
        "tests/engine",
        "tests/simulation",
    ),
]
SEEDS, FEW_SEEDS = "AIOSHARD_TEST_SEEDS", "4"
"""How many seeds each simulation gets, unless the variable is set; the tests of the sources run them all."""
EXPECTED = "AIOSHARD_TEST_COMPILED"
"""Set where the tests must run on the compiled package; see `tests/unit/test_compiled.py`."""


class CompilerUnavailableError(RuntimeError):
    """This machine cannot compile the package; the message says why."""


def modules() -> list[Path]:
    """The modules that a compiled build compiles, relative to the project."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    return [Path(name) for name in project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["modules"]]


def compiled_package() -> Path:
    """Build the compiled package, unless that was done; returns the directory to import it from.

    Raises:
        CompilerUnavailableError: The C compiler is missing, or it fails.
    """
    directory = PROJECT / "build" / "compiled" / _state()
    if not directory.exists():
        compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
        if shutil.which(compiler) is None:
            raise CompilerUnavailableError(f"PATH lacks {compiler}: install it, on Debian with `apt-get install gcc`")
        _build(directory)
    return directory


def environment() -> dict[str, str]:
    """The environment in which Python imports the compiled package, in child processes too.

    Raises:
        CompilerUnavailableError: See `compiled_package`.
    """
    # Without the first, `python -m` would find the sources in the current directory first.
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": f"{compiled_package()}{os.pathsep}{PROJECT}"}


def _state() -> str:
    """Identify what the build depends on."""
    packaged = [path for path in PROJECT.glob("*aioshard/**/*.*") if path.is_file() and path.suffix != ".pyc"]
    sources = [PROJECT / "pyproject.toml", PROJECT / "hatch_build.py", *sorted(packaged)]
    digest = hashlib.sha256(sys.version.encode())
    for path in sources:
        digest.update(str(path.relative_to(PROJECT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _build(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", temporary, str(PROJECT)]
        changes = {"AIOSHARD_COMPILE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        done = subprocess.run(
            command, env={**os.environ, **changes}, capture_output=True, text=True, timeout=BUILD_TIMEOUT, check=False
        )
        if done.returncode != 0:
            raise CompilerUnavailableError(f"`{' '.join(command)}` failed:\n{done.stdout}{done.stderr}")
        Path(temporary).rename(directory)
        Path(temporary).mkdir()  # for its own removal


def main(arguments: list[str]) -> int:
    """Run the fast tests, or those that the arguments name, on the compiled package.

    Returns:
        The exit code; outside CI it is 0 where nothing can be compiled.
    """
    code = provide("compiled package", compiled_package, CompilerUnavailableError)
    try:
        variables = environment()
    except CompilerUnavailableError:
        return code
    variables = {SEEDS: FEW_SEEDS, **variables, EXPECTED: "1"}
    paths = f"pythonpath={variables['PYTHONPATH'].replace(os.pathsep, ' ')}"
    chosen = [] if any(argument.startswith("tests") for argument in arguments) else FAST_TESTS
    command = [sys.executable, "-m", "pytest", "--override-ini", paths, *chosen, *arguments]
    return subprocess.run(command, cwd=PROJECT, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
