"""Continuous samples of a group's commits and side topics from the broker."""

import asyncio
import time
from collections.abc import Sequence
from typing import Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from aioshard.core.commit_metadata import CommitMetadata
from tests.guarantees.checks import CommitsAt
from tests.support.cluster import committed_offsets

REPLICATION_LAG = 2.0
"""Seconds within which a new coordinator knows every commit that the old one acknowledged."""


class Sampling:
    """Samples the committed offsets of a group on a topic, and the ends of a side topic; used with `async with`.

    Attributes:
        commits: The samples so far, in order of time.
        side: The partitions of the side topic.
        survives: Whether a broker that does not answer, or with an error, is asked again; else it ends the sampling.
        interval: Seconds between two samples.
    """

    def __init__(self, bootstrap: str, group: str, topic: str) -> None:
        self.commits: list[CommitsAt] = []
        self.side: Sequence[TopicPartition] = ()
        self.survives = False
        self.interval = 0.05
        self._group = group
        self._topic = topic
        self._admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=2_000)
        self._reader = AIOKafkaConsumer(bootstrap_servers=bootstrap, request_timeout_ms=5_000)
        self._coordinator: int | None = None
        self._believed_from = 0.0
        self._one_at_a_time = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._admin.start()
        await self._reader.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._reader.stop()
        await self._admin.close()

    def begin(self) -> None:
        """From now on samples are taken, until `end`."""
        self._task = asyncio.create_task(self._run(), name="sample commits")

    async def end(self) -> None:
        """Stop taking samples; raise the exception that had ended the sampling before."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self.check()

    def check(self) -> None:
        """Raises what has ended the sampling, if anything has."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    def paused(self) -> asyncio.Lock:
        """Used with `async with`: no question is open then, and none is asked."""
        return self._one_at_a_time

    async def sample(self) -> CommitsAt:
        """Asks, again if that may fail, and notes the answer."""
        while True:
            try:
                sample = await self._sample()
                if not self.survives or await self._is_trusted():
                    self.commits.append(sample)
                    return sample
            except (KafkaError, TimeoutError):
                if not self.survives:
                    raise
            await asyncio.sleep(self.interval)

    async def _sample(self) -> CommitsAt:
        async with self._one_at_a_time:
            asked = time.monotonic_ns()
            found = await committed_offsets(self._admin, self._group)
            answered = time.monotonic_ns()
            ends = await self._reader.end_offsets(self.side) if self.side else {}
            offsets = {at.partition: found[at].offset for at in found if at.topic == self._topic}
            return CommitsAt(
                asked,
                answered,
                {partition: offset for partition, offset in offsets.items() if offset >= 0},
                {at.partition: end for at, end in ends.items()},
                {
                    at.partition: CommitMetadata.read(found[at].metadata, found[at].offset).finished
                    for at in found
                    if at.topic == self._topic and "done=" in found[at].metadata
                },
            )

    async def _is_trusted(self) -> bool:
        """Whether the coordinator is not new: a new one answers with older offsets until replicas confirm the last."""
        node = await self._admin.find_coordinator(self._group)
        if node != self._coordinator:
            new = self._coordinator is not None
            self._coordinator, self._believed_from = node, time.monotonic() + (REPLICATION_LAG if new else 0.0)
        return time.monotonic() >= self._believed_from

    async def _run(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(self.interval)
