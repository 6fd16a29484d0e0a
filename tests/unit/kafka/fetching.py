"""The parts of an aiokafka consumer without a broker: what it has fetched, its assignment and its coordinator."""

import asyncio
import collections
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

from aiokafka.consumer.fetcher import FetchResult, PartitionRecords
from aiokafka.consumer.subscription_state import Assignment
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords

from aioshard.kafka.aiokafka.internals import Internals
from aioshard.kafka.assignors import ConsumerAssignor
from aioshard.ports import Allowance
from aioshard.records import TopicPartition

USUAL = 100
"""Milliseconds of `fetch_max_wait`."""


def everything(_: TopicPartition) -> Allowance:
    return Allowance(1_000, 1 << 30)


class Fetcher:
    """As much of aiokafka's as a buffer and the limits of a fetch take."""

    def __init__(self) -> None:
        self._records: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        self._fetch_max_wait_ms = USUAL
        self._wait_consume_future = None
        self._in_flight: set[int] = set()
        self.checks = 0
        """How often it was made to check what it may fetch."""
        self.planned: list[int] = []
        """The nodes that the next check sends a fetch to."""
        self._fetch_max_bytes = self._max_partition_fetch_bytes = 0
        self._fetch_task = None

    def _notify(self, _: object) -> None:
        self.checks += 1

    def _get_actions_per_node(self, _: object) -> Any:
        self._in_flight.update(self.planned)
        return [(node, object()) for node in self.planned], {}, 1, False, []


class Coordinator:
    """As much of aiokafka's as membership and commits take; the broker acknowledges each commit."""

    def __init__(self) -> None:
        self.coordinator_id = 1
        self.member_id, self.generation = "us", 4
        self.rejoins = 0
        self.commits: list[Any] = []
        self._coordinator_dead_fut = asyncio.get_running_loop().create_future()
        self._group_subscription: object = "topics of others"
        self._coordination_task = self._pending_exception = None
        self._performed_join_prepare = False

    async def ensure_coordinator_known(self) -> None:
        """It always is."""

    def request_rejoin(self) -> None:
        self.rejoins += 1

    def _start_heartbeat_task(self) -> None:
        """Send nothing to the broker."""

    async def _send_req(self, request: Any) -> Any:
        self.commits.append(request)
        return SimpleNamespace(
            topics=[(topic, [(number, 0) for number, *_ in parts]) for topic, parts in request._topics]
        )


class Parts(Internals):
    """Internals of a consumer that is not there."""

    def __init__(self, assignor: str = "range") -> None:
        self.subscription: Any = SimpleNamespace(subscription=None, reassignment_in_progress=False)
        brokers = SimpleNamespace(brokers=lambda: [1, 2, 3])
        client = SimpleNamespace(
            _get_conn=None, bootstrap=None, get_random_node=None, _conns={}, cluster=brokers, _sync_task=None
        )
        consumer: Any = SimpleNamespace(
            _client=client,
            _subscription=self.subscription,
            _coordinator=Coordinator(),
            _fetcher=Fetcher(),
            _fetch_max_wait_ms=USUAL,
        )
        super().__init__(consumer, ConsumerAssignor(assignor), "billing")

    @property
    def wait(self) -> int:
        return int(self.fetcher._fetch_max_wait_ms)

    def assign(self, partitions: Collection[TopicPartition]) -> Assignment:
        """Let the group assign partitions, and the client know of it."""
        assignment = Assignment(list(partitions))
        self.subscription.subscription = SimpleNamespace(assignment=assignment)
        return assignment

    def fetched(
        self, partition: TopicPartition, start: int, count: int, *, of: Assignment | None = None, size: int = 10
    ) -> Any:
        """Let the client have fetched records of a partition, for its present assignment or that of *of*."""
        builder = DefaultRecordBatchBuilder(2, 0, 0, -1, 0, 0, 1 << 20)
        for number in range(count):
            assert builder.append(number, 1_700_000_000_000, None, bytes(size), []) is not None
        raw = bytearray(builder.build())
        raw[:8] = start.to_bytes(8, "big")
        records = PartitionRecords(partition, MemoryRecords(bytes(raw)), [], start, None, None, False, 0)  # noqa: FBT003 - aiokafka's
        result = FetchResult(partition, assignment=of or self.assignment(), partition_records=records, backoff=2)
        self.buffered[partition] = result
        return result
