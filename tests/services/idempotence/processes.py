"""Processes of a group that run the handler of an inbox example on a real broker."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.paths import PROJECT

VARIABLE = "INBOX_MEMBER"
STANDSTILL = 2
"""Seconds until PostgreSQL ends the transaction of a frozen member."""
TAIL_LINES = 25
END_TIMEOUT = 60.0

SHORT = {
    "auto_offset_reset": "earliest",
    "session_timeout": 3,
    "heartbeat_interval": 0.5,
    "rebalance_timeout": 12,
    "drain_timeout": 3,
    "commit_timeout": 3,
    "commit_interval": 0.2,
    "start_timeout": 40,
    "shutdown_timeout": 10,
}
"""Settings of members: everything comes soon."""


class Member:
    """One process, started immediately; `with` ends it."""

    def __init__(self, what: dict[str, str], log: Path, *arguments: str, **settings: Any) -> None:
        """Starts it.

        Args:
            what: Store, group and topic; see `member`.
            log: Where it prints to.
            arguments: Of `aioshard run`.
            settings: Beside those of `SHORT`.
        """
        self._log = log
        described = json.dumps({**what, "settings": SHORT | settings})
        environment = {**os.environ, VARIABLE: described, "PYTHONPATH": str(PROJECT)}
        command = [sys.executable, "-m", "aioshard", "run", "tests.services.idempotence.member:app", *arguments]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=PROJECT,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            state = "alive" if self._process.poll() is None else f"exit code {self._process.returncode}"
            error.add_note("\n".join([f"--- {self._log.name}, {state}:", *self.log.splitlines()[-TAIL_LINES:]]))
        self.kill()

    @property
    def log(self) -> str:
        """All that it printed."""
        return self._log.read_text()

    def kill(self) -> None:
        """SIGKILL, and waits."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM, and waits; returns the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self) -> int:
        """Waits for the end; returns the exit code."""
        return self._process.wait(END_TIMEOUT)

    def freeze(self) -> None:
        """Freezes it until `thaw`."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resumes it."""
        self._process.send_signal(signal.SIGCONT)
