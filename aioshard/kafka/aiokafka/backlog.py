"""The backlogs of the subscribed partitions, which the group leader uses to balance them."""

import asyncio
import logging

from aiokafka import errors as kafka

from aioshard.kafka.aiokafka.answers import reason
from aioshard.kafka.aiokafka.buffer import FetchBuffer
from aioshard.kafka.aiokafka.internals import Internals
from aioshard.records import TopicPartition

logger = logging.getLogger("aioshard.kafka.aiokafka.backlog")

_TIMEOUT = 0.5
"""Seconds to query the brokers while the group waits for us; after that, we use our last known offsets."""


async def backlogs(internals: Internals, buffer: FetchBuffer, reset: str | None) -> dict[TopicPartition, int]:
    """Return the number of uncommitted records of each subscribed partition, where known.

    Takes at most half a second. If the brokers do not answer, it counts from our own positions to the log ends of the
    latest fetch.

    Args:
        internals: The consumer.
        buffer: Its partitions and positions.
        reset: The setting `auto_offset_reset`: it decides where a partition without a commit starts.
    """
    begins = {partition: buffer.position(partition) for partition in buffer.partitions}
    ends = {partition: buffer.end_offset(partition) for partition in buffer.partitions}
    try:
        async with asyncio.timeout(_TIMEOUT):
            await internals.find_coordinator()
            partitions = {*buffer.partitions, *internals.subscribed_partitions()}
            commits = await internals.committed_once(partitions)
            ranges = await internals.log_ranges(partitions, _TIMEOUT)
    except (kafka.KafkaError, TimeoutError) as error:
        logger.info("could not query the remaining records of the partitions: %s", reason(error))
    else:
        for partition, (start, end) in ranges.items():
            ends[partition] = end
            if partition in commits:
                begins[partition] = max(commits[partition].offset, start)
            elif begins.get(partition) is None:
                begins[partition] = {"earliest": start, "latest": end}.get(reset or "")
    bounds = ((partition, begins.get(partition), end) for partition, end in ends.items())
    return {partition: end - begin for partition, begin, end in bounds if begin is not None and end is not None}
