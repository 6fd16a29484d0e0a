"""Log ends, requested from the brokers: the client learns no end of a partition that it does not fetch."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

import anyio

from aioshard.engine.epoch import Epoch
from aioshard.errors import TransportError
from aioshard.ports import Transport
from aioshard.records import TopicPartition

logger = logging.getLogger("aioshard.engine.log_ends")

_INTERVAL = 10.0
"""Seconds between two requests; with the time that an answer may take, an end is at most 15 s old."""
_TIMEOUT = 5.0


class LogEnds:
    """Log ends of the assigned partitions, for the consumer lag.

    The client learns the end of a log with each fetch. It learns nothing about a partition that is paused or full:
    without these requests, the lag would freeze just when it grows.
    """

    def __init__(self, client: Callable[[], Transport | None], epochs: Callable[[], Iterable[Epoch]]) -> None:
        """Make the log ends; `run` is their task.

        Args:
            client: Returns the current client.
            epochs: Returns the epochs that have not ended.
        """
        self._client = client
        self._epochs = epochs
        self._ends: Mapping[TopicPartition, int] = {}

    def of(self, epoch: Epoch) -> int | None:
        """End of a log, under `read_committed` its last stable offset; None while unknown. Safe from any thread."""
        name = epoch.topic_partition
        client = self._client()
        fetched = None if client is None else client.end_offset(name)
        known = [end for end in (fetched, self._ends.get(name)) if end is not None]
        # The end from a fetch that found nothing new may be older than the records taken in since.
        return max(*known, epoch.tracker.position) if known else None

    async def run(self) -> None:
        """Query the brokers repeatedly until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL)
            await self._query()

    async def _query(self) -> None:
        client = self._client()
        partitions = [epoch.topic_partition for epoch in self._epochs()]
        if client is None or not partitions:
            self._ends = {}
            return
        try:
            with anyio.fail_after(_TIMEOUT):
                ranges = await client.log_ranges(partitions)
        except (TransportError, TimeoutError) as error:
            logger.debug("the brokers did not report the log ends: %s", str(error) or "no answer in time")
        else:
            known = {name: self._ends[name] for name in partitions if name in self._ends}
            self._ends = known | {name: log.end for name, log in ranges.items()}
