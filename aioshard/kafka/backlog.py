"""The backlogs of the subscribed partitions, which the group leader uses to balance them."""

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
"""Seconds to look up log end offsets while the group waits for us; after that, we use the last known ones."""


class Backlog:
    """Records between the committed offsets and the log ends.

    Owned by the transport, which reports its commits here and calls `left` before each join, after the drain.
    """

    def __init__(self, internals: Internals, intake: Intake, reset: str | None) -> None:
        """Take *reset*, the setting `auto_offset_reset`: it decides where a partition without a commit starts."""
        self._internals = internals
        self._intake = intake
        self._reset = reset
        self._committed: dict[TopicPartition, int] = {}

    def begin(self) -> None:
        """Forget the commits of the previous assignment."""
        self._committed.clear()

    def committed(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Remember a successful commit."""
        self._committed.update((name, due.offset) for name, due in offsets.items())

    async def left(self) -> dict[TopicPartition, int]:
        """Return an upper bound of the remaining records of each subscribed partition, where known.

        Takes at most half a second. Without an answer, it uses earlier known offsets, for our own partitions only.
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
