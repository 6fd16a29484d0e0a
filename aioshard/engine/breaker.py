"""The circuit breaker of a handler at work: it pauses partitions, and probes them with one record at a time."""

import asyncio
import functools
from collections.abc import Callable, Sequence

from aioshard.core.breaker import BreakerState
from aioshard.core.options import CircuitBreaker
from aioshard.engine.counts import Counters
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.failure_log import FailureLog
from aioshard.engine.shards import Shards
from aioshard.records import counted

_PAUSED_BY = "breaker"
_FIRST_PROBE = 0.5
_LONGEST_PROBE = 5.0
"""Seconds between probes, at first and at most: processing resumes that soon after an outage."""
_PROBE_ROOM = 16
"""Records that a paused partition takes in when all its records in flight have failed before."""


class HandlerBreaker:
    """Circuit breaker of one handler: while it is open, a partition pauses when one of its records fails for good.

    A paused partition tries one record at a time. The first one that succeeds closes the breaker, and each partition
    resumes when its own next probe is due. Nothing here awaits.

    Invariants:
        * In a partition that it has paused, at most one record runs besides those that were running already.
        * While such a partition is paused, a probe is due or running.
    """

    def __init__(
        self,
        limits: CircuitBreaker | None,
        *,
        shards: Sequence[Shards],
        counters: Counters,
        running: Callable[[], int],
        log: FailureLog,
    ) -> None:
        """Create the breaker, closed.

        Args:
            limits: When it opens; None if it never does.
            shards: Shards of the handler.
            counters: Counters of the handler.
            running: Returns how many records run now that have not failed.
            log: Log of the handler's failures.
        """
        self.why = ""
        """Why it opened last."""
        self._state = None if limits is None else BreakerState(limits)
        self._shards = shards
        self._counters = counters
        self._running = running
        self._log = log

    @property
    def is_open(self) -> bool:
        """Whether the share of failed records is so high that they are probably not to blame."""
        return self._state is not None and self._state.is_open

    def count_failed(self, delivery: Delivery) -> None:
        """Count a delivery that gets no further attempt; the breaker may open."""
        state = self._state
        failure = delivery.failure
        if state is None or state.is_open or failure is None:
            return
        if state.fail(delivery.successes_before, failure.error, self._running):
            self.why = (
                f"the circuit breaker of handler {self._log.handler} is open: {counted(state.failed, 'record')} failed "
                f"within a window of {state.limits.window}, {state.alike} of them with {failure.error}, the latest "
                f"with {failure}; one record at a time is tried until one succeeds"
            )
            self._log.breaker_opened(self.why)

    # Pausing and probing --------------------------------------------------------------

    def pause(self, epoch: Epoch) -> None:
        """Pause a partition until one of its records succeeds, or can be diverted again."""
        if _PAUSED_BY not in epoch.pauses:
            epoch.pause(_PAUSED_BY, self.why)
            self._probe_after(epoch, _FIRST_PROBE)

    def _probe_after(self, epoch: Epoch, delay: float) -> None:
        epoch.probed = functools.partial(self._probed, epoch, min(delay * 2, _LONGEST_PROBE))
        asyncio.get_running_loop().call_later(delay, self._probe, epoch, delay)

    def _probe(self, epoch: Epoch, delay: float) -> None:
        """Start a probe, or resume the partition if no probe is necessary any more."""
        # 1. The partition is gone.
        if epoch.gate is Gate.ENDED:
            return
        # 2. It drains, or the application has paused it as well: a probe has to wait.
        if epoch.gate is not Gate.PAUSED or len(epoch.pauses) > 1:
            self._probe_after(epoch, delay)
            return
        # 3. A record of another partition has succeeded, or nothing is left to try.
        if not self.is_open or not len(epoch.tracker):
            self._resume(epoch)
            return
        # 4. One of its records is tried. If it failed before, it may itself be bad: then only another one can show that
        # the rest would succeed.
        probe = self._start_probe(epoch)
        epoch.probe_room = 0 if probe is not None and not probe.failures else _PROBE_ROOM
        # 5. None can be tried yet.
        if probe is None:
            self._probe_after(epoch, delay)

    def _start_probe(self, epoch: Epoch) -> Delivery | None:
        for shards in self._shards:
            probe = shards.probe(epoch)
            if probe is not None:
                return probe
        return None

    def _probed(self, epoch: Epoch, delay: float, processed: bool) -> None:
        if processed:
            self._close()
            self._resume(epoch)
        else:
            self._probe_after(epoch, delay)

    def _close(self) -> None:
        if self._state is not None and self._state.is_open:
            self._state.close(self._counters.processed)
            self._log.breaker_closed()

    def _resume(self, epoch: Epoch) -> None:
        epoch.probed = None
        epoch.probe_room = 0
        if epoch.resume(_PAUSED_BY):
            for shards in self._shards:
                shards.reopen(epoch)
