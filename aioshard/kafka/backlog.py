"""How much is left to read of our partitions, for those who share them out anew."""

import asyncio
import logging
from collections.abc import Mapping

from aiokafka import errors as kafka

from aioshard.kafka.intake import Intake
from aioshard.kafka.internals import Internals
from aioshard.kafka.translate import reason
from aioshard.ports import Committed
from aioshard.records import TopicPartition

__all__ = ["Backlog"]

logger = logging.getLogger("aioshard.kafka.backlog")

_TIMEOUT = 0.5
"""Seconds for which the group waits until we know where our logs end; then it is what we knew before."""


class Backlog:
    """From the committed offsets to the ends of the logs.

    Owned by the transport, which tells it what is committed, and asks before each join, after the drain.
    """

    def __init__(self, internals: Internals, intake: Intake, reset: str | None) -> None:
        """*reset* says where a partition without a committed offset begins, as the setting `auto_offset_reset`."""
        self._internals = internals
        self._intake = intake
        self._reset = reset
        self._committed: dict[TopicPartition, int] = {}

    def begin(self) -> None:
        """Forget what was committed under an assignment before."""
        self._committed.clear()

    def committed(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Take note of a commit that succeeded."""
        self._committed.update((name, due.offset) for name, due in offsets.items())

    async def left(self) -> dict[TopicPartition, int]:
        """Records, at most, that are left of each partition that we subscribe to, where it is known.

        Takes at most half a second. Without an answer it is what was known before of the partitions that are ours.
        """
        intake, internals = self._intake, self._internals
        begins = {name: self._committed.get(name, intake.position(name)) for name in intake.partitions}
        ends = {name: intake.end_offset(name) for name in intake.partitions}
        try:
            async with asyncio.timeout(_TIMEOUT):
                await internals.find_coordinator()
                everything = {*intake.partitions, *internals.subscribed_partitions()}
                others = everything - begins.keys()
                committed = await internals.committed_once(others) if others else {}
                ranges = await internals.log_ranges(everything, _TIMEOUT)
        except (kafka.KafkaError, TimeoutError) as error:
            logger.info("what is left to read of the partitions could not be asked for: %s", reason(error))
        else:
            for name, (start, end) in ranges.items():
                first = committed[name].offset if name in committed else self._first(start, end)
                found = begins.setdefault(name, first)
                begins[name] = None if found is None else max(found, start)
                ends[name] = end
        known = ((name, begins[name], end) for name, end in ends.items())
        return {name: end - begin for name, begin, end in known if begin is not None and end is not None}

    def _first(self, start: int, end: int) -> int | None:
        return start if self._reset == "earliest" else end if self._reset == "latest" else None
