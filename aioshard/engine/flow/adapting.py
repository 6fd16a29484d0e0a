"""Adaptive concurrency: measures the runs of a handler, and has as many workers as its back end can take."""

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
"""Seconds by which the loop's time may differ from the computer's monotonic clock, and is taken for it."""


class Adapting:
    """Keeps the concurrency of one handler where the latency of its runs says."""

    def __init__(self, adaptive: Adaptive, clock: Callable[[], float], timeout: float | None) -> None:
        """Make it with nothing measured.

        Args:
            adaptive: Within which bounds.
            clock: Loop time.
            timeout: Of an attempt: one that is cancelled after it took as long.
        """
        self.adaptive = adaptive
        self._gradient = LatencyGradient(adaptive)
        self._clock = clock
        self._timeout = timeout
        # Processes that share a back end have to look at it at the same moment. A loop with virtual time keeps its own.
        real = abs(clock() - time.monotonic()) < _SAME_CLOCK
        self._ahead = time.time() - clock() if real else 0.0

    def measured(self, invoke: Callable[[T], Awaitable[object]]) -> Callable[[T], Awaitable[object]]:
        """The same, with its runs measured."""
        gradient, clock, timeout = self._gradient, self._clock, self._timeout

        async def run(given: T) -> object:
            began = clock()
            try:
                result = await invoke(given)
            except BatchError:
                gradient.ended(clock() - began)  # it has been at work, and says what of it failed
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
        """Follow the latency until cancelled.

        Args:
            staff: The workers.
            name: Of the handler.
        """
        while True:
            await asyncio.sleep(_LOOK_INTERVAL)
            limit = self._gradient.look(self._clock() + self._ahead)
            if limit != staff.concurrency:
                logger.debug("handler %s: concurrency %d, %d before", name, limit, staff.concurrency)
                staff.change(limit, name)

    def __str__(self) -> str:
        """For explanations: bounds, and the latencies by which the concurrency is chosen."""
        adaptive, latency, baseline = self.adaptive, self._gradient.latency, self._gradient.baseline
        bounds = f"Adaptive({adaptive.minimum}, {adaptive.maximum})"
        if latency is None or baseline is None:
            return f"{bounds}, nothing measured yet"
        return f"{bounds}, a run takes {latency:.3g} s and {baseline:.3g} s in an idle back end"
