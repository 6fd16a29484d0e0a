"""Partitions whose handler cannot divert any more: paused, and tried with one record at a time."""

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
"""Seconds between probes, at the start and at the most: so soon after an outage everything goes on."""

_PROBE_ROOM = 16
"""Records that a paused partition takes in when all that it has in hand has failed before."""


class Probing:
    """Pauses partitions of one handler, and resumes each when a record of it succeeds.

    Invariants:
        * Of a paused partition at most one record runs that was not running before.
        * While it is paused a probe is due, or runs.
    """

    def __init__(self, shards: Sequence[Shards], affordable: Callable[[], bool]) -> None:
        """Make one for a handler.

        Args:
            shards: Of the handler.
            affordable: Whether a diversion could be paid for again, so that nothing needs to wait.
        """
        self._shards = shards
        self._affordable = affordable

    def pause(self, epoch: Epoch, why: str) -> None:
        """Pause a partition, unless it is."""
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
            # What has failed before may be wrong itself: then only another record shows that the rest would succeed.
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
