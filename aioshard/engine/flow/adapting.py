"""Adaptive concurrency: measures the runs of a handler and keeps as many workers as its back end can take."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aioshard.core.adaptive import Adaptive, LatencyGradient
from aioshard.engine.flow.staffing import Staff
from aioshard.errors import BatchError

__all__ = ["Adapting"]

logger = logging.getLogger("aioshard.engine.adapting")

T = TypeVar("T")

_LOOK_INTERVAL = 0.1
_SAME_CLOCK = 1.0
"""Maximum difference in seconds at which the loop's time counts as the computer's monotonic clock."""


class Adapting:
    """Adapts the concurrency of one handler to the latency of its runs."""

    def __init__(self, adaptive: Adaptive, clock: Callable[[], float], timeout: float | None) -> None:
        """Start without measurements.

        Args:
            adaptive: Bounds of the concurrency.
            clock: Returns the loop time.
            timeout: Timeout of an attempt in seconds; a cancelled run is measured only if it took at least that long.
        """
        self.adaptive = adaptive
        self._gradient = LatencyGradient(adaptive)
        self._clock = clock
        self._timeout = timeout
        # Processes that share a back end must measure it at the same moments. A loop with virtual time keeps its own.
        real = abs(clock() - time.monotonic()) < _SAME_CLOCK
        self._ahead = time.time() - clock() if real else 0.0

    def measured(self, invoke: Callable[[T], Awaitable[object]]) -> Callable[[T], Awaitable[object]]:
        """Wrap *invoke* to measure its runs."""
        gradient, clock, timeout = self._gradient, self._clock, self._timeout

        async def run(given: T) -> object:
            began = clock()
            try:
                result = await invoke(given)
            except BatchError:
                gradient.ended(clock() - began)  # it did its work, and names the records that failed
                raise
            except asyncio.CancelledError:
                if timeout is not None and clock() - began >= timeout:
                    gradient.ended(clock() - began)
                raise
            except Exception:
                gradient.failed(clock() - began)
                raise
            gradient.ended(clock() - began)
            return result

        return run

    async def run(self, staff: Staff, name: str) -> None:
        """Adjust the concurrency to the latency until cancelled.

        Args:
            staff: Workers of the handler.
            name: Name of the handler.
        """
        while True:
            await asyncio.sleep(_LOOK_INTERVAL)
            limit = self._gradient.look(self._clock() + self._ahead)
            if limit != staff.concurrency:
                logger.debug("handler %s: concurrency %d, %d before", name, limit, staff.concurrency)
                staff.change(limit, name)

    def __str__(self) -> str:
        """Bounds, and the latencies that determine the concurrency; for explanations."""
        adaptive, latency, baseline = self.adaptive, self._gradient.latency, self._gradient.baseline
        bounds = f"Adaptive({adaptive.minimum}, {adaptive.maximum})"
        if latency is None or baseline is None:
            return f"{bounds}, nothing measured yet"
        return f"{bounds}, a run takes {latency:.3g} s and {baseline:.3g} s in an idle back end"
