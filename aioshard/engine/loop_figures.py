"""Reads how much CPU an event loop's thread gets. Linux says all of it, other systems less."""

import contextlib
import sys
import threading
import time
from pathlib import Path

from aioshard.core.loop_block import LoopFigures

_PROC = Path("/proc/self")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")


class LoopMeter:
    """Reads the figures of one event loop; `read` may be called from any thread.

    `/proc/self/task/ID/schedstat` counts the time for which a thread was ready to run and got no CPU. Throttling by the
    CPU limit of a control group is part of it: measured on Linux 6.18. Only the time since the thread last got a CPU is
    missing. A virtual machine whose kernel does not account for stolen time counts it as computing.
    """

    def __init__(self) -> None:
        """Make a meter for the thread that calls this."""
        self._ident = threading.get_ident()
        self._task = _own_task()
        self._watcher: Path | None = None
        self._clock: int | None = None
        if sys.platform != "win32" and hasattr(time, "pthread_getcpuclockid"):  # macOS has none
            self._clock = time.pthread_getcpuclockid(self._ident)
        self._cpu_stat = find_cpu_stat(_PROC, _CONTROL_GROUPS)

    def watched_here(self) -> None:
        """Count from now on also for how long the calling thread, which watches the loop, gets no CPU."""
        self._watcher = _own_task()

    def read(self) -> LoopFigures:
        """Read the figures; what the system does not provide is None."""
        no_cpu, starts = _read_schedstat(self._task / "schedstat")
        return LoopFigures(
            at=time.monotonic(),
            cpu=self.read_cpu(),
            no_cpu=no_cpu,
            starts=starts,
            watcher_no_cpu=None if self._watcher is None else _read_schedstat(self._watcher / "schedstat")[0],
            process_cpu=time.process_time(),
            throttles=None if self._cpu_stat is None else _read_throttles(self._cpu_stat),
        )

    def read_cpu(self) -> float | None:
        """Read for how many seconds the thread has computed."""
        if threading.get_ident() == self._ident:
            return time.thread_time()
        if self._clock is None:
            return None
        with contextlib.suppress(OSError):  # the thread has ended
            return time.clock_gettime(self._clock)
        return None

    def is_ready(self) -> bool | None:
        """Return whether the thread computes or is ready to; None if the system does not say."""
        with contextlib.suppress(OSError, IndexError):
            # The name of the thread, in parentheses, may contain anything.
            return (self._task / "stat").read_text("utf-8", "replace").rpartition(") ")[2][0] == "R"
        return None


def _own_task() -> Path:
    return _PROC / "task" / str(threading.get_native_id())


def find_cpu_stat(proc: Path, control_groups: Path) -> Path | None:
    """Find the file that counts how often the CPU limit stopped this process; None if it cannot be read.

    A limit of an outer group, which a container cannot see, is not counted there.

    Args:
        proc: The process's folder in `/proc`.
        control_groups: Where the control groups are mounted.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "cgroup").read_text("utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            mounted = control_groups / controllers
            # In a container the group's path may be that of the host; the mount then shows the group itself.
            for folder in (mounted / group.lstrip("/"), mounted):
                if _read_throttles(folder / "cpu.stat") is not None:
                    return folder / "cpu.stat"
    return None


def _read_throttles(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text("ascii").splitlines():
            name, _, number = line.partition(" ")
            if name == "nr_throttled":
                return int(number)
    return None


def _read_schedstat(file: Path) -> tuple[float | None, int | None]:
    """Return the seconds for which a thread got no CPU, and how often it got one."""
    with contextlib.suppress(OSError, ValueError):
        _, no_cpu, starts = file.read_text("ascii").split()
        return int(no_cpu) / 1e9, int(starts)
    return None, None
