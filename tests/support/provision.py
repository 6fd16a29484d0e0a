"""Requirements of the tests besides Python: installed if possible, otherwise reported."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import pytest

INSTALL = ["apt-get", "install", "--yes", "--quiet=2", "--no-install-recommends"]
UPDATE = ["apt-get", "update", "--quiet=2"]
INSTALL_TIMEOUT = 600.0

T = TypeVar("T")


def in_ci() -> bool:
    """Whether this runs where something missing is an error."""
    return os.environ.get("CI", "").lower() in {"1", "true", "yes"}


def provide(what: str, find: Callable[[], object], unavailable: type[RuntimeError]) -> int:
    """Find something and say where it is, or say that tests go without it.

    Returns:
        Exit code: what is missing is an error only in CI.
    """
    try:
        found = find()
    except unavailable as missing:
        consequence = "fail" if in_ci() else "be skipped"
        print(f"NO {what.upper()}, tests that need it will {consequence}: {missing}", file=sys.stderr)
        return 1 if in_ci() else 0
    print(f"{what}: {found}")
    return 0


def or_installed(find: Callable[[], T], packages: Sequence[str], unavailable: type[RuntimeError]) -> T:
    """Find something; where it is missing and we may, install packages of Debian's and find it then."""
    try:
        return find()
    except unavailable:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise
    _install(packages, unavailable)
    return find()


def _install(packages: Sequence[str], unavailable: type[RuntimeError]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = [*INSTALL, *packages]
    said = ""
    for command in (install, UPDATE, install):  # lists of packages may be old, or missing
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=INSTALL_TIMEOUT, check=False
        )
        if command is install and done.returncode == 0:
            return
        said = done.stdout + done.stderr
    raise unavailable(f"`{' '.join(install)}` failed:\n{said}")


def skip_or_fail(what: str, missing: str) -> NoReturn:
    """Skip what needs something that is not here; in CI, which must have it, fail."""
    if in_ci():
        pytest.fail(f"no {what}, which CI must have: {missing}", pytrace=False)
    pytest.skip(f"no {what}: {missing}")
