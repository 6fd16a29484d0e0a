"""The clocks beside the handler."""

import asyncio
import contextlib
import math
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.contestants.handlers import Handler, Work, make_work
from benchmarks.spec import Measurement, Spec

LOOK_INTERVAL = 0.02
"""Seconds between two readings of clock and counter: often enough, and no cost per record."""
STALL_TIMEOUT = 60.0
"""Seconds without any progress after which a run is given up."""
NEARLY_ALL = 0.99
"""Share of the records; a few that hang do not hold it up."""
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class StalledError(RuntimeError):
    """A contestant stopped processing before the end."""


class Reading(NamedTuple):
    """One look at the clocks."""

    wall: float
    cpu: float
    records: int
    rss: int
    last_ended: float
    """When the last record was done; 0 where no times are noted."""


class Meter:
    """Gives the handler, waits for the end of the run and tells what happened.

    A handler that only counts is looked at from outside: readings of its counter and of the process's CPU
    time, so that measuring costs a record nothing. One that sleeps notes each record, and the times at
    which the first one started and the last one ended.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._work: Work = make_work(spec)
        self._readings: list[Reading] = []
        self.over = asyncio.Event()
        """Set when `watch` has seen what it waited for."""
        self._children_peak = 0
        self.dropped = 0
        """Rows that a journal did not keep."""
        self.longest_pause = 0.0
        """Most seconds from one start of a handler to the next, as far as noted."""
        self.first_of_all = 0.0
        """When the process started its first record, where another run came before; seconds."""

    @property
    def work(self) -> Any:
        """Notes the records."""
        return self._work

    @property
    def handler(self) -> Handler:
        """What is called with each record; it has `partition` and `offset`."""
        return self._work.handler

    async def watch(self) -> None:
        """Return when the run is over: by its last record, by the clock, or by a signal.

        Raises:
            StalledError: Nothing was processed for a minute.
        """
        match self._spec.work:
            case "hang":
                await self._watch_memory()
            case "journal":
                await _terminated()
                self._look()
            case _:
                await self._watch_records()
        self.over.set()

    async def _watch_records(self) -> None:
        progress = self._look()
        while (now := self._look()).records < self._spec.records:
            if now.records > progress.records:
                progress = now
            elif now.wall - progress.wall > STALL_TIMEOUT:
                message = (
                    f"{self._spec.contestant} stopped at {now.records} of {self._spec.records} records "
                    f"for {STALL_TIMEOUT:g} s"
                )
                raise StalledError(message)
            await asyncio.sleep(LOOK_INTERVAL)

    async def _watch_memory(self) -> None:
        process = psutil.Process()
        until = time.perf_counter() + self._spec.watch_seconds
        while self._look(process).wall < until:
            await asyncio.sleep(LOOK_INTERVAL)

    def _look(self, process: psutil.Process | None = None) -> Reading:
        used = resource.getrusage(resource.RUSAGE_SELF)
        rss = process.memory_info().rss if process is not None else 0
        cpu, memory = _children()
        cpu, work = cpu + used.ru_utime + used.ru_stime, self._work
        self._children_peak = max(self._children_peak, memory)
        reading = Reading(time.perf_counter(), cpu, work.count(), rss, work.last_ended)
        self._readings.append(reading)
        return reading

    def result(self) -> Measurement:
        """What the readings say."""
        last = self._readings[-1]
        warm = 1 if self._spec.warm_up else max(self._spec.records // 10, 1)
        first = next((one for one in self._readings[:-1] if one.records >= warm), self._readings[0])
        work = self._work
        timed = last.last_ended > work.first_started
        whole = self._spec.records == (self._spec.present or sum(self._spec.ends))
        return Measurement(
            records=last.records,
            cpu_seconds=last.cpu - first.cpu,
            cpu_records=last.records - first.records,
            wall_seconds=last.last_ended - work.first_started if timed else last.wall - first.wall,
            wall_records=last.records if timed else last.records - first.records,
            repeated=work.repeated,
            missing=work.missing if whole else 0,
            rss=last.rss,
            peak_rss=_peak_rss() + self._children_peak,
            dropped=self.dropped,
            late_growth=self._late_growth(),
            disordered=work.disordered,
            peak_concurrency=work.peak_concurrency,
            longest_pause=self.longest_pause,
            nearly_seconds=self._nearly().wall - work.first_started if timed else 0.0,
            start_seconds=(self.first_of_all or work.first_started) - self._spec.spawned_at if timed else 0.0,
        )

    @property
    def first_started(self) -> float:
        """When the first record was started, in seconds; 0 where no times are noted."""
        return self._work.first_started

    def _nearly(self) -> Reading:
        enough = math.ceil(self._spec.records * NEARLY_ALL)
        return next((one for one in self._readings if one.records >= enough), self._readings[-1])

    def _late_growth(self) -> int:
        later = self._readings[-1].wall - (self._readings[-1].wall - self._readings[0].wall) / 3
        before = max((one.rss for one in self._readings if one.wall < later), default=0)
        return max(max(one.rss for one in self._readings) - before, 0)


async def _terminated() -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    await asked.wait()


def _children() -> tuple[float, int]:
    """CPU seconds and bytes of the worker processes."""
    cpu, memory = 0, 0
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):  # it has ended
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            cpu += int(fields[11]) + int(fields[12])
            memory += int(fields[21]) * _PAGE
    return cpu / _TICKS, memory


def _peak_rss() -> int:
    """Bytes; not `ru_maxrss`, which begins with what the parent process held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
