"""Prosody as a contestant: the environment in which it runs."""

import fcntl
import subprocess
import sys
from pathlib import Path

from tests.support.paths import PROJECT

PROSODY = "Prosody"
"""Name in the tables."""

_REQUIREMENTS = Path(__file__).with_name("prosody-requirements.txt")
_ENVIRONMENT = PROJECT / "build" / "prosody"
_LOCK = PROJECT / "build" / "prosody.lock"
_TIMEOUT = 300.0


class ProsodyUnavailableError(RuntimeError):
    """This machine cannot make the environment; the message says why."""


def find_prosody() -> Path:
    """Return the Python of an environment with Prosody; make it unless that was done for these versions.

    Raises:
        ProsodyUnavailableError: The packages are neither here nor can they be fetched, or this platform has none.
    """
    made_for = _ENVIRONMENT / "made-for"
    wanted = f"{sys.version}\n{_REQUIREMENTS.read_text()}"
    python = _ENVIRONMENT / "bin" / "python"
    _LOCK.parent.mkdir(exist_ok=True)
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may make it concurrently
        if not made_for.exists() or made_for.read_text() != wanted:
            made_for.unlink(missing_ok=True)
            _run(sys.executable, "-m", "venv", "--clear", str(_ENVIRONMENT))
            # Wheels only: its core would be compiled for many minutes, if there is a compiler for Rust.
            options = ["--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
            _run(str(python), "-m", "pip", "install", *options, "--requirement", str(_REQUIREMENTS))
            made_for.write_text(wanted)
    return python


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as expired:
        raise ProsodyUnavailableError(f"`{' '.join(command)}` did not end within {_TIMEOUT:g} s") from expired
    if done.returncode != 0:
        raise ProsodyUnavailableError(f"`{' '.join(command)}` failed:\n{done.stdout}{done.stderr}")
