"""Runs a command and ends it when another process ends: `python guard.py WATCHED_PID COMMAND...`.

A broker outlives the test process that started it unless somebody ends it, also after `kill -9`.
The guard and its command share a process group, which `KafkaBroker` signals as one.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from types import FrameType


def _leave_to_the_command(_signum: int, _frame: FrameType | None) -> None:
    """A signal to the group reaches the command itself; the guard reports how it ended."""


def wait_for_end(pid: int, timeout: float | None = None) -> bool:
    """Blocks until the process has ended, reaped or not; False when it still runs after *timeout* seconds."""
    if sys.platform == "linux":
        try:
            ended = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([ended], [], [], timeout)[0])
        finally:
            os.close(ended)
    give_up = None if timeout is None else time.monotonic() + timeout
    while running := _exists(pid):
        if give_up is not None and time.monotonic() > give_up:
            break
        time.sleep(0.1)
    return not running


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _end_with(pid: int) -> None:
    wait_for_end(pid)
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Runs the command; returns its exit code, negative for a signal as `subprocess` has it."""
    # A handler, not SIG_IGN: the command would inherit that, and a JVM then never shuts down.
    signal.signal(signal.SIGTERM, _leave_to_the_command)
    signal.signal(signal.SIGINT, _leave_to_the_command)
    watched, command = int(sys.argv[1]), sys.argv[2:]
    threading.Thread(target=_end_with, args=(watched,), name="watch", daemon=True).start()
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
