"""What we touch of aiokafka that is private, each attribute guarded by a canary test (`chunk` is the rest of it).

The version is pinned (`aiokafka>=0.14,<0.15`). What is used, and why the public way does not do:

* records are taken from the fetcher's buffer, because `getmany` builds a slow record class, cannot be
  bounded per partition, does not keep its time-out and blocks while the group rebalances;
* commits, the generation and the member id come from the coordinator, because the public `commit`
  retries for ever and sends whatever generation is current;
* stopping is done part by part, because the public `stop` hangs or breaks off when brokers are gone.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka.client import ConnectionGroup, CoordinationType
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import CloseReason
from aiokafka.consumer.fetcher import FetchError, FetchResult
from aiokafka.protocol.group import LeaveGroupRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.structs import OffsetAndMetadata

from aioshard.kafka.connections import close_client, end_tasks, is_connected, refuse_useless_connections
from aioshard.ports import NOT_A_MEMBER, Committed, LogRange, Membership
from aioshard.records import TopicPartition

__all__ = ["FetchError", "FetchResult", "Internals", "Rebalances"]

_HURRIED_WAIT_MS = 10
_TICK = 0.05


class Internals:
    """The parts of one started consumer, and what we do with them."""

    def __init__(self, consumer: AIOKafkaConsumer, group_id: str) -> None:
        """Take a consumer apart; *group_id* is empty for one that has no group."""
        self.group_id = group_id
        self.consumer: Any = consumer
        self.client: Any = consumer._client
        self.subscription: Any = consumer._subscription
        self._joining_again: asyncio.TimerHandle | None = None
        refuse_useless_connections(self.client)

    async def start(self) -> bool:
        """Connect, and begin to look up topics; true, since a `KafkaError` says when no broker answers."""
        await self.consumer.start()
        return True

    # What there is --------------------------------------------------------------------

    @property
    def fetcher(self) -> Any:
        """The fetcher; None before the consumer has started."""
        return self.consumer._fetcher

    @property
    def coordinator(self) -> Any:
        """The group coordinator's client side; None before the consumer has started."""
        return self.consumer._coordinator

    @property
    def buffered(self) -> dict[Any, Any]:
        """What was fetched and not yet taken: `FetchResult` or `FetchError` by partition."""
        return self.fetcher._records  # type: ignore[no-any-return]

    @property
    def rebalancing(self) -> bool:
        """Whether partitions are being taken away or given out."""
        return bool(self.subscription.reassignment_in_progress)

    def assignment(self) -> Any:
        """The current assignment, or None; a new object after each rebalance."""
        subscribed = self.subscription.subscription
        return None if subscribed is None else subscribed.assignment

    def states(self, assignment: Any) -> dict[TopicPartition, Any]:
        """Position, marks and pause of each partition of an assignment."""
        return {
            TopicPartition(partition.topic, partition.partition): assignment.state_value(partition)
            for partition in assignment.tps
        }

    def membership(self) -> Membership:
        """Member id and generation as the coordinator's client side has them now."""
        coordinator = self.coordinator
        if coordinator is None or coordinator.generation < 0:
            return NOT_A_MEMBER
        return Membership(coordinator.member_id, coordinator.generation)

    def background_tasks(self) -> dict[str, asyncio.Task[Any]]:
        """The tasks without which nothing moves, by what they do."""
        found = {
            "fetching": self.fetcher and self.fetcher._fetch_task,
            "group membership": self.coordinator and self.group_id and self.coordinator._coordination_task,
            "looking up topics": self.client._sync_task,
        }
        return {name: task for name, task in found.items() if task}

    def take_pending_error(self) -> Exception | None:
        """A fatal error that the coordinator wants to tell; it goes on trying once it was taken."""
        coordinator = self.coordinator
        if coordinator._pending_exception is None:
            return None
        try:
            coordinator.check_errors()
        except Exception as error:  # noqa: BLE001 - it is the return value
            return error
        return None

    @property
    def connected(self) -> bool:
        """Whether a connection to any broker is open."""
        return is_connected(self.client)

    @property
    def coordinator_known(self) -> bool:
        """Whether commits and heartbeats have somebody to go to."""
        return self.coordinator.coordinator_id is not None

    def tell_generation(self, generation: int) -> None:
        """Tell the assignor the generation of its latest assignment, which aiokafka forgets to do."""
        for assignor in self.coordinator._assignors:
            told = getattr(assignor, "on_generation_assignment", None)
            if told is not None:
                told(generation)
            self._join_again_in(getattr(assignor, "joins_again_in", None))

    def _join_again_in(self, seconds: float | None) -> None:
        if self._joining_again is not None:
            self._joining_again.cancel()
            self._joining_again = None
        if seconds is not None:
            # A little later: the loop's clock may be ahead of the assignor's by a tick.
            self._joining_again = asyncio.get_running_loop().call_later(
                seconds + _TICK, self.coordinator.request_rejoin
            )

    def subscribed_partitions(self) -> list[TopicPartition]:
        """All partitions of the topics that we subscribe to, as far as they are known."""
        known = self.client.cluster.partitions_for_topic
        topics = sorted(self.consumer.subscription())
        return [TopicPartition(topic, number) for topic in topics for number in sorted(known(topic) or ())]

    def tell_backlogs(self, backlogs: Mapping[TopicPartition, int]) -> None:
        """Tell the assignor how many records are left of each partition, for when we join again."""
        for assignor in self.coordinator._assignors:
            told = getattr(assignor, "on_backlogs", None)
            if told is not None:
                told(backlogs)

    # Fetching -------------------------------------------------------------------------

    def bound_prefetch(self, partition_bytes: int) -> None:
        """Set how much one fetch may bring of one partition."""
        if self.fetcher is not None:
            self.fetcher._max_partition_fetch_bytes = partition_bytes

    def hurry(self, partitions: int) -> None:
        """Set how long brokers may hold a fetch that has nothing to return.

        A broker is asked for nothing else meanwhile: a partition that is drained while the fetch of its idle
        neighbours waits would stand still that long. So while one is being drained, fetches hardly wait.

        Args:
            partitions: How many are assigned, since that is what a fetch costs; 0 where there is no hurry.
        """
        usual: int = self.consumer._fetch_max_wait_ms
        self.fetcher._fetch_max_wait_ms = min(usual, max(_HURRIED_WAIT_MS, partitions // 10)) if partitions else usual

    def waiter(self) -> asyncio.Future[None]:
        """A future that resolves when something was fetched, or raises when the group is lost."""
        return self.fetcher._create_fetch_waiter()  # type: ignore[no-any-return]

    def nudge_fetcher(self) -> None:
        """Make the fetcher look again at what it may fetch."""
        self.fetcher._notify(self.fetcher._wait_consume_future)

    def release_broker(self, result: Any) -> None:
        """Let other partitions of the same broker be fetched although *result* is not being taken."""
        if result._backoff:
            result._backoff = 0
            self.nudge_fetcher()

    def belongs(self, result: Any, assignment: Any) -> bool:
        """Whether a fetch was sent for *assignment* rather than for one before it."""
        return result._assignment is assignment

    def error_of(self, entry: Any) -> Exception:
        """What a fetch failed with."""
        return entry._error  # type: ignore[no-any-return]

    def serve_last(self, topic_partition: TopicPartition) -> None:
        """Put a partition behind the others, so that each has its turn."""
        self.fetcher._records.move_to_end(topic_partition)

    def discard(self, topic_partition: TopicPartition) -> None:
        """Forget what was fetched of a partition; it is fetched again from its position."""
        if self.buffered.pop(topic_partition, None) is not None:
            self.nudge_fetcher()

    # Questions to the brokers ---------------------------------------------------------

    async def find_coordinator(self) -> None:
        """Wait until the broker that coordinates the group is known and connected; has no deadline."""
        await self.coordinator.ensure_coordinator_known()

    async def look_up_group(self) -> None:
        """Ask once which broker coordinates the group; raises when the group is not allowed."""
        await self.client.coordinator_lookup(CoordinationType.GROUP, self.group_id)

    async def commit_once(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Send one commit request under the membership of this moment: nothing is awaited before it is built."""
        await self.coordinator._do_commit_offsets(
            None, {partition: _Unprinted(*due) for partition, due in offsets.items()}
        )

    async def committed_once(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Committed]:
        """Ask once for committed offsets; partitions without one are left out."""
        found = await self.coordinator._do_fetch_commit_offsets(partitions)
        return {
            TopicPartition(partition.topic, partition.partition): Committed(committed.offset, committed.metadata)
            for partition, committed in found.items()
        }

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, LogRange]:
        """The bounds of logs; retries what passes and has no deadline."""
        # One after the other: a start never lies behind an end that was asked for before it.
        starts = await self.fetcher.beginning_offsets(partitions, None)
        ends = await self.fetcher.end_offsets(partitions, None)
        return {partition: LogRange(starts[partition], ends[partition]) for partition in partitions}

    async def look_up_topic(self, topic: str) -> frozenset[int]:
        """The partitions of a topic, asked now; neither follows the topic from here on nor creates it."""
        node = self.client.get_random_node()
        answer = await self.client.send(node, MetadataRequest([topic], allow_auto_topic_creation=False))
        separate = ClusterMetadata()
        separate.update_metadata(answer)
        return frozenset(separate.partitions_for_topic(topic) or ())

    async def look_up_topics(self) -> frozenset[str]:
        """The topics that we may see, asked now, without the brokers' own."""
        answer = await self.client.send(self.client.get_random_node(), MetadataRequest(None))
        separate = ClusterMetadata()
        separate.update_metadata(answer)
        return frozenset(separate.topics())

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """The first offset that is not older than *timestamp*, or None; retries what passes and has no deadline."""
        asked = {topic_partition: round(timestamp * 1000)}
        found = (await self.fetcher.get_offsets_by_times(asked, None))[topic_partition]
        return None if found is None else int(found.offset)

    # The end --------------------------------------------------------------------------

    async def leave(self) -> None:
        """Stop taking part in the group, and say so unless the member is static."""
        coordinator = self.coordinator
        if coordinator is None:
            return
        if not coordinator._closing.done():
            coordinator._closing.set_result(None)
        joining = bool(coordinator._performed_join_prepare)
        # Cancelled, not awaited: a join in progress lasts as long as the slowest member drains.
        await end_tasks(
            task for task in (coordinator._coordination_task, coordinator._heartbeat_task) if task is not None
        )
        node = coordinator.coordinator_id
        if not coordinator.member_id or coordinator._group_instance_id is not None or node is None:
            return
        if joining:
            # The broker reads nothing more from a connection whose join it has not answered.
            connection = self.client._conns.pop((node, ConnectionGroup.COORDINATION), None)
            if connection is not None:
                connection.close(reason=CloseReason.SHUTDOWN)
        request = LeaveGroupRequest(self.group_id, coordinator.member_id)
        await self.client.send(node, request, group=ConnectionGroup.COORDINATION)

    async def tear_down(self) -> None:
        """End every task and connection, whatever state they are in; takes at most 2 s."""
        self._join_again_in(None)
        self.consumer._closed = True
        tasks: set[asyncio.Task[Any] | None] = set()
        if self.fetcher is not None:
            self.fetcher._closed = True
            tasks |= {self.fetcher._fetch_task, *self.fetcher._pending_tasks}
        if self.coordinator is not None:
            coordinator = outsider = self.coordinator
            if self.group_id:
                tasks |= {coordinator._coordination_task, coordinator._heartbeat_task, coordinator._commit_refresh_task}
            else:
                tasks.add(outsider._reset_committed_task)
        await close_client(self.client, tasks)


class _Unprinted(OffsetAndMetadata):  # type: ignore[misc]
    """A committed offset whose text, thousands of characters, does not get into aiokafka's logs."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"offset {self.offset}"


class Rebalances(ConsumerRebalanceListener):  # type: ignore[misc]
    """What aiokafka calls when the group rebalances. What it says of the partitions, we know better."""

    def __init__(self, revoked: Callable[[], Awaitable[None]], assigned: Callable[[], None]) -> None:
        self._revoked = revoked
        self._assigned = assigned

    async def on_partitions_revoked(self, revoked: Collection[Any]) -> None:  # noqa: ARG002
        """The group waits until this returns."""
        await self._revoked()

    def on_partitions_assigned(self, assigned: Collection[Any]) -> None:  # noqa: ARG002
        """A plain function, so that nothing can run before it is done."""
        self._assigned()
