"""Adaptive concurrency: measures the runs of a handler and keeps as many workers as its back end can take."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aioshard.core.adaptive import Adaptive, LatencyGradient
from aioshard.engine.timing import precise
from aioshard.errors import BatchError

logger = logging.getLogger("aioshard.engine.adapting")

T = TypeVar("T")

_LOOK_INTERVAL = 0.1


class Adapting:
    """Adapts the concurrency of one handler to the latency of its runs."""

    def __init__(self, adaptive: Adaptive, clock: Callable[[], float], timeout: float | None) -> None:
        """Start without measurements.

        Args:
            adaptive: Bounds of the concurrency.
            clock: Returns the loop time.
            timeout: Timeout of an attempt in seconds; a cancelled run is measured only if it took at least that long.
        """
        self._gradient = LatencyGradient(adaptive)
        self._clock = clock
        self._timeout = timeout
        # Processes that share a back end must measure it at the same moments. A loop with virtual time keeps its own.
        self._ahead = time.time() - clock() if precise(clock) is time.monotonic else 0.0

    def measured(self, invoke: Callable[[T], Awaitable[object]]) -> Callable[[T], Awaitable[object]]:
        """Wrap *invoke* to measure its runs."""
        gradient, clock, timeout = self._gradient, self._clock, self._timeout

        async def run(argument: T) -> object:
            began = clock()
            report: Callable[[float], None] = gradient.ended
            try:
                return await invoke(argument)
            except BatchError:
                raise  # it did its work, and names the records that failed
            except asyncio.CancelledError:
                if timeout is None or clock() - began < timeout:
                    report = _ignore
                raise
            except Exception:
                report = gradient.failed
                raise
            finally:
                report(clock() - began)

        return run

    async def run(self, concurrency: Callable[[], int], change: Callable[[int], None], name: str) -> None:
        """Adjust the concurrency to the latency until cancelled.

        Args:
            concurrency: Returns the current number of workers.
            change: Changes it.
            name: Name of the handler.
        """
        while True:
            await asyncio.sleep(_LOOK_INTERVAL)
            limit, current = self._gradient.look(self._clock() + self._ahead), concurrency()
            if limit != current:
                logger.debug("handler %s: concurrency %d, %d before", name, limit, current)
                change(limit)


def _ignore(_: float) -> None:
    """Measure nothing: the run was cut short."""
