"""Probing: pauses partitions whose handler can no longer divert records, and tries one record at a time."""

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence

from aioshard.engine.epoch import Epoch, Gate
from aioshard.engine.log_fields import partition_fields
from aioshard.engine.shards import Shards

__all__ = ["Probing"]

logger = logging.getLogger("aioshard.engine.probing")

_WHO = "budget"
_FIRST = 0.5
_LONGEST = 5.0
"""Seconds between probes, at first and at most: processing resumes that soon after an outage."""

_PROBE_ROOM = 16
"""Records that a paused partition takes in when all its records in flight have failed before."""


class Probing:
    """Pauses partitions of one handler, and resumes each when one of its records succeeds.

    Invariants:
        * In a paused partition, at most one record runs besides those that were running already.
        * While a partition is paused, a probe is due or running.
    """

    def __init__(self, shards: Sequence[Shards], affordable: Callable[[], bool]) -> None:
        """Create the probing of one handler.

        Args:
            shards: Shards of the handler.
            affordable: Returns whether the budget allows a diversion again, so that nothing needs to wait.
        """
        self._shards = shards
        self._affordable = affordable

    def pause(self, epoch: Epoch, why: str) -> None:
        """Pause a partition unless it is paused already."""
        if _WHO in epoch.pauses:
            return
        fields = partition_fields("paused", epoch.topic_partition, why=why)
        logger.warning("%s pauses: %s", epoch.topic_partition, why, extra=fields)
        epoch.pause(_WHO, why)
        self._probe_after(epoch, _FIRST)

    def _probe_after(self, epoch: Epoch, delay: float) -> None:
        epoch.probed = functools.partial(self._probed, epoch, min(delay * 2, _LONGEST))
        asyncio.get_running_loop().call_later(delay, self._probe, epoch, delay)

    def _probe(self, epoch: Epoch, delay: float) -> None:
        if epoch.gate is Gate.ENDED:
            return
        if epoch.gate is Gate.PAUSED and len(epoch.pauses) == 1:
            if self._affordable() or not len(epoch.tracker):
                self._resume(epoch)
                return
            probe = next((probe for shards in self._shards if (probe := shards.probe(epoch)) is not None), None)
            # A record that failed before may itself be bad: then only another one shows that the rest would succeed.
            epoch.probe_room = 0 if probe is not None and not probe.failures else _PROBE_ROOM
            if probe is not None:
                return
        self._probe_after(epoch, delay)

    def _probed(self, epoch: Epoch, delay: float, processed: bool) -> None:
        if processed:
            self._resume(epoch)
        else:
            self._probe_after(epoch, delay)

    def _resume(self, epoch: Epoch) -> None:
        epoch.probed = None
        epoch.probe_room = 0
        message = "%s goes on: a record of it succeeded, or can be diverted again"
        logger.warning(message, epoch.topic_partition, extra=partition_fields("resumed", epoch.topic_partition))
        if epoch.resume(_WHO):
            for shards in self._shards:
                shards.reopen(epoch)
