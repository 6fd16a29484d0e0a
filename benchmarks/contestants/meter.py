"""The meter of a run: clocks, CPU time and memory."""

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
"""Seconds between two readings of clock and counter, which cost nothing per record."""
STALL_TIMEOUT = 60.0
"""Seconds without progress after which a run fails."""
NEARLY_ALL = 0.99
"""Share of the records, so that a few hanging ones do not count."""
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class StalledError(RuntimeError):
    """A contestant stopped processing before the end."""


class Reading(NamedTuple):
    """One reading of the clocks."""

    wall: float
    cpu: float
    records: int
    rss: int
    last_ended: float
    """When the last record ended; 0 if times are not recorded."""


class Meter:
    """Provides the handler, waits for the end of the run and returns its figures.

    A handler that only counts is observed from outside, by readings of its counter and of the CPU time of the process,
    so measuring costs nothing per record. A handler that sleeps marks each record, and records the times at which the
    first one started and the last one ended.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._work: Work = make_work(spec)
        self._readings: list[Reading] = []
        self.over = asyncio.Event()
        """Set when `watch` ends."""
        self._children_peak = 0
        self.dropped = 0
        """Rows that a journal dropped."""
        self.longest_pause = 0.0
        """Maximum seconds from one start of a handler to the next; 0 if not observed."""
        self.first_of_all = 0.0
        """When the process started its first record, in seconds, if another run came before."""

    @property
    def work(self) -> Any:
        """The work of the handler, which observes the records."""
        return self._work

    @property
    def handler(self) -> Handler:
        """The handler, to be called with each record, which has `partition` and `offset`."""
        return self._work.handler

    async def watch(self) -> None:
        """Return when the run has ended: by its last record, by the clock, or by a signal.

        Raises:
            StalledError: Nothing was processed for a minute.
        """
        match self._spec.work:
            case "hang":
                await self._watch_memory()
            case "journal":
                await _terminated()
                self._read()
            case _:
                await self._watch_records()
        self.over.set()

    async def _watch_records(self) -> None:
        progress = self._read()
        while (now := self._read()).records < self._spec.records:
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
        while self._read(process).wall < until:
            await asyncio.sleep(LOOK_INTERVAL)

    def _read(self, process: psutil.Process | None = None) -> Reading:
        used = resource.getrusage(resource.RUSAGE_SELF)
        rss = process.memory_info().rss if process is not None else 0
        cpu, memory = _children()
        cpu, work = cpu + used.ru_utime + used.ru_stime, self._work
        self._children_peak = max(self._children_peak, memory)
        reading = Reading(time.perf_counter(), cpu, work.count(), rss, work.last_ended)
        self._readings.append(reading)
        return reading

    def result(self) -> Measurement:
        """Return the figures of the run."""
        last = self._readings[-1]
        warm = 1 if self._spec.warm_up else max(self._spec.records // 10, 1)
        first = next((reading for reading in self._readings[:-1] if reading.records >= warm), self._readings[0])
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
        """When the first record was started, in seconds; 0 if times are not recorded."""
        return self._work.first_started

    def _nearly(self) -> Reading:
        enough = math.ceil(self._spec.records * NEARLY_ALL)
        return next((reading for reading in self._readings if reading.records >= enough), self._readings[-1])

    def _late_growth(self) -> int:
        later = self._readings[-1].wall - (self._readings[-1].wall - self._readings[0].wall) / 3
        before = max((reading.rss for reading in self._readings if reading.wall < later), default=0)
        return max(max(reading.rss for reading in self._readings) - before, 0)


async def _terminated() -> None:
    signaled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signaled.set)
    await signaled.wait()


def _children() -> tuple[float, int]:
    """Return CPU seconds and bytes of the worker processes."""
    cpu, memory = 0, 0
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):  # it has ended
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            cpu += int(fields[11]) + int(fields[12])
            memory += int(fields[21]) * _PAGE
    return cpu / _TICKS, memory


def _peak_rss() -> int:
    """Return the maximum resident memory in bytes; `ru_maxrss` would begin with that of the parent process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
