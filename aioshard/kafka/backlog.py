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

    Owned by the transport, which tells it what is committed, and asks after the drain.
    """

    def __init__(self, internals: Internals, intake: Intake) -> None:
        self._internals = internals
        self._intake = intake
        self._committed: dict[TopicPartition, int] = {}

    def begin(self) -> None:
        """Forget what was committed under an assignment before."""
        self._committed.clear()

    def committed(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Take note of a commit that succeeded."""
        self._committed.update((name, due.offset) for name, due in offsets.items())

    async def left(self) -> dict[TopicPartition, int]:
        """Records, at most, that are left of each partition that is ours; without those of which it is not known.

        Takes at most half a second.
        """
        intake = self._intake
        ends = {name: intake.end_offset(name) for name in intake.partitions}
        try:
            async with asyncio.timeout(_TIMEOUT):
                ends.update(await self._internals.ends(intake.partitions))
        except (kafka.KafkaError, TimeoutError) as error:
            logger.info("the ends of our partitions could not be asked for: %s", reason(error))
        begins = {name: self._committed.get(name, intake.position(name)) for name in ends}
        return {
            name: end - begin for name, end in ends.items() if end is not None and (begin := begins[name]) is not None
        }
