"""The consumer's uses of aiokafka's private attributes, except those in `chunk` and `connections`.

Canary tests guard each attribute, and the version is pinned (`aiokafka>=0.14,<0.15`). The private parts, and why the
public API is not enough:

* We take records from the fetcher's buffer. `getmany` builds a slow record class, cannot be bounded per partition,
  overruns its time-out, and blocks while the group rebalances.
* Commits, generation and member id come from the coordinator. The public `commit` retries forever, and sends the
  current generation even if it is a newer one.
* We stop the parts one at a time. The public `stop` hangs or fails halfway when brokers are gone.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka import errors as kafka
from aiokafka.client import ConnectionGroup, CoordinationType
from aiokafka.conn import CloseReason
from aiokafka.consumer.fetcher import FetchError, FetchResult
from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.group import LeaveGroupRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest, OffsetResetStrategy

from aioshard.kafka.answers import (
    IncompleteAnswerError,
    by_topic,
    existing_topics,
    led_offsets,
    refused_offsets,
    stored_offsets,
    topic_leaders,
)
from aioshard.kafka.connections import close_client, end_tasks, is_connected, refuse_useless_connections
from aioshard.kafka.translate import raise_for
from aioshard.ports import NOT_A_MEMBER, Committed, LogRange, Membership
from aioshard.records import TopicPartition

__all__ = ["FetchError", "FetchResult", "Internals", "Rebalances", "fetch_wait"]

_HURRIED_WAIT_MS = 10
_IDLE_WAIT_MS = 500
"""Kafka's default of `fetch.max.wait.ms`."""
_TICK = 0.05
_NO_LEADER = (None, -1)
_REPLICATION_LAG = 2.0
"""Seconds until a new coordinator knows all commits: by default, replicas fetch from it at least every 0.5 s. On Kafka
4.1.1, answers right after a commit were up to 1 s out of date in 5 of 6 moves, and in none of 6 after 2 s."""
_COORDINATOR_AWAY = (
    kafka.GroupCoordinatorNotAvailableError,
    kafka.NotCoordinatorForGroupError,
    kafka.RequestTimedOutError,
)
"""Errors from a broker that does not coordinate the group, or cannot do so now."""


class Internals:
    """The parts of one consumer, and our operations on them."""

    def __init__(self, consumer: AIOKafkaConsumer, group_id: str, patience: float = 10.0) -> None:
        """Take a consumer apart.

        Args:
            consumer: Not started yet.
            group_id: The group; empty for a consumer without one.
            patience: See `refuse_useless_connections`.
        """
        self.group_id = group_id
        self.consumer: Any = consumer
        self.client: Any = consumer._client
        self.subscription: Any = consumer._subscription
        self._joining_again: asyncio.TimerHandle | None = None
        self._session_over: asyncio.TimerHandle | None = None
        self._lost: Callable[[], None] = lambda: None
        self._session_timeout = 0.0
        self._believed: asyncio.Future[None] | None = None
        """Tenure of the coordinator known to have all commits: a future that ends when we look for a new one."""
        self._doubted: tuple[asyncio.Future[None] | None, float] = (None, 0.0)
        """Tenure of a coordinator that took over since, and the loop time until which it may lack commits."""
        refuse_useless_connections(self.client, patience)

    async def start(self) -> bool:
        """Connect and start to look up topics. Always true: a `KafkaError` reports that no broker answers."""
        await self.consumer.start()
        return True

    # The session ----------------------------------------------------------------------

    def watch_session(self, timeout: float, lost: Callable[[], None]) -> None:
        """Call *lost* as soon as the group may have reassigned our partitions; call this once, before we join.

        That is when a broker no longer knows us, or *timeout* seconds after sending the last heartbeat that was
        answered. The client itself revokes our partitions only when it rejoins, which needs a coordinator first.
        """
        coordinator = self.coordinator
        beat, reset = coordinator._do_heartbeat, coordinator.reset_generation
        now = asyncio.get_running_loop().time
        self._lost, self._session_timeout = lost, timeout

        async def do_heartbeat() -> bool:
            sent = now()
            answered: bool = await beat()
            if answered and self._session_over is not None:
                self.begin_session(sent)
            return answered

        def reset_generation() -> None:
            reset()
            lost()

        coordinator._do_heartbeat, coordinator.reset_generation = do_heartbeat, reset_generation

    def joined(self, generation: int) -> None:
        """Start the session. The coordinator stored our assignment, so it knows all earlier commits."""
        self._tell_generation(generation)
        self._believed = self.coordinator._coordinator_dead_fut
        self.begin_session(asyncio.get_running_loop().time())

    def begin_session(self, at: float) -> None:
        """Restart the session timer from *at*, the loop time at which we were known to be a member."""
        self.end_session()
        self._session_over = asyncio.get_running_loop().call_at(at + self._session_timeout, self._lose_session)

    def end_session(self) -> None:
        """Stop the session timer: we have no partitions."""
        if self._session_over is not None:
            self._session_over.cancel()
            self._session_over = None

    def _lose_session(self) -> None:
        self.coordinator.request_rejoin()
        self._lost()

    # State ----------------------------------------------------------------------------

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
        """Fetched and not yet taken: a `FetchResult` or `FetchError` per partition."""
        return self.fetcher._records  # type: ignore[no-any-return]

    @property
    def rebalancing(self) -> bool:
        """Whether partitions are being revoked or assigned."""
        return bool(self.subscription.reassignment_in_progress)

    def assignment(self) -> Any:
        """The current assignment, or None; a new object after each rebalance."""
        subscribed = self.subscription.subscription
        return None if subscribed is None else subscribed.assignment

    def states(self, assignment: Any) -> dict[TopicPartition, Any]:
        """Map each partition of an assignment to aiokafka's state: position, log ends and pause flag."""
        return {
            TopicPartition(partition.topic, partition.partition): assignment.state_value(partition)
            for partition in assignment.tps
        }

    def membership(self) -> Membership:
        """The member id and generation that the client has now."""
        coordinator = self.coordinator
        if coordinator is None or coordinator.generation < 0:
            return NOT_A_MEMBER
        return Membership(coordinator.member_id, coordinator.generation)

    def background_tasks(self) -> dict[str, asyncio.Task[Any]]:
        """Return the tasks without which nothing works, keyed by their purpose."""
        found = {
            "fetching": self.fetcher and self.fetcher._fetch_task,
            "group membership": self.coordinator and self.group_id and self.coordinator._coordination_task,
            "looking up topics": self.client._sync_task,
        }
        return {name: task for name, task in found.items() if task}

    def take_pending_error(self) -> Exception | None:
        """Return the coordinator's pending fatal error, if any; the coordinator then continues to retry."""
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
        """Whether commits and heartbeats have a broker to go to."""
        return self.coordinator.coordinator_id is not None

    def _tell_generation(self, generation: int) -> None:
        """Pass the assignor the generation of its latest assignment; aiokafka forgets to do so."""
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
            # Slightly later, because the loop's clock may be a tick ahead of the assignor's.
            self._joining_again = asyncio.get_running_loop().call_later(
                seconds + _TICK, self.coordinator.request_rejoin
            )

    def subscribed_partitions(self) -> list[TopicPartition]:
        """Return all known partitions of the subscribed topics."""
        known = self.client.cluster.partitions_for_topic
        topics = sorted(self.consumer.subscription())
        return [TopicPartition(topic, number) for topic in topics for number in sorted(known(topic) or ())]

    def tell_backlogs(self, backlogs: Mapping[TopicPartition, int]) -> None:
        """Pass the assignor the remaining records of each partition, for the next join."""
        for assignor in self.coordinator._assignors:
            told = getattr(assignor, "on_backlogs", None)
            if told is not None:
                told(backlogs)

    # Fetching -------------------------------------------------------------------------

    def bound_prefetch(self, partition_bytes: int) -> None:
        """Set the maximum bytes per partition in one fetch."""
        if self.fetcher is not None:
            self.fetcher._max_partition_fetch_bytes = partition_bytes

    def hold_fetches(self, partitions: int, *, left_over: bool = False, idle: bool = False) -> None:
        """Set how long brokers may hold a fetch that has nothing to return; see `fetch_wait`."""
        usual: int = self.consumer._fetch_max_wait_ms
        self.fetcher._fetch_max_wait_ms = fetch_wait(usual, partitions, left_over=left_over, idle=idle)

    def waiter(self) -> asyncio.Future[None]:
        """Return a future that resolves after the next fetch, or raises when the group is lost."""
        return self.fetcher._create_fetch_waiter()  # type: ignore[no-any-return]

    def nudge_fetcher(self) -> None:
        """Make the fetcher check again which partitions it may fetch."""
        self.fetcher._notify(self.fetcher._wait_consume_future)

    def release_broker(self, result: Any) -> None:
        """Let the client fetch other partitions of the same broker although nobody takes *result*."""
        if result._backoff:
            result._backoff = 0
            self.nudge_fetcher()

    def belongs(self, result: Any, assignment: Any) -> bool:
        """Whether a fetch was sent for *assignment* and not for an earlier one."""
        return result._assignment is assignment

    def error_of(self, entry: Any) -> Exception:
        """Return the error of a failed fetch."""
        return entry._error  # type: ignore[no-any-return]

    def serve_last(self, topic_partition: TopicPartition) -> None:
        """Move a partition behind the others, so that each one gets its turn."""
        self.fetcher._records.move_to_end(topic_partition)

    def discard(self, topic_partition: TopicPartition) -> None:
        """Drop the fetched records of a partition; the client fetches it again from its position."""
        if self.buffered.pop(topic_partition, None) is not None:
            self.nudge_fetcher()

    # Broker requests ------------------------------------------------------------------

    async def find_coordinator(self) -> None:
        """Wait until the group's coordinator is known and connected; has no deadline."""
        await self.coordinator.ensure_coordinator_known()

    async def look_up_group(self) -> None:
        """Look up the group's coordinator once; raises if the group is not authorized."""
        await self.client.coordinator_lookup(CoordinationType.GROUP, self.group_id)

    async def commit_once(self, offsets: Mapping[TopicPartition, Committed], retention_ms: int = -1) -> None:
        """Send one commit request under the current membership: no await before the request is built.

        Raises:
            KafkaError: A partition is not acknowledged. aiokafka's own commit would treat a partition missing from
                the response as acknowledged.
        """
        coordinator = self.coordinator
        due = by_topic({name: (name.partition, *committed) for name, committed in offsets.items()})
        request = OffsetCommitRequest(self.group_id, coordinator.generation, coordinator.member_id, retention_ms, due)
        refused = refused_offsets(await coordinator._send_req(request), offsets)
        if not refused:
            return
        error = next(iter(refused.values()))
        if isinstance(error, _COORDINATOR_AWAY):
            coordinator.coordinator_dead()
        elif isinstance(error, kafka.RebalanceInProgressError):
            coordinator.request_rejoin()
        elif isinstance(error, kafka.UnknownMemberIdError | kafka.IllegalGenerationError):
            coordinator.reset_generation()
        raise error

    async def committed_once(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Committed]:
        """Fetch committed offsets with one request; partitions without one are left out.

        aiokafka's own method overlooks a response with a top-level error (see `stored_offsets`).
        """
        await self._wait_for_commits()
        request = OffsetFetchRequest(self.group_id, by_topic({name: name.partition for name in partitions}))
        answer = await self.coordinator._send_req(request)
        try:
            found = stored_offsets(answer, partitions)
            await self._confirm_coordinator()
        except _COORDINATOR_AWAY:
            self.coordinator.coordinator_dead()
            raise
        return found

    async def _confirm_coordinator(self) -> None:
        """Check with the other brokers who coordinates the group, unless we are a member; the first answer counts.

        A broker that was frozen returns old offsets until it learns that another one took over. Members skip the check:
        they use the coordinator that gave them their partitions.

        Raises:
            KafkaError: Another broker names a different coordinator, or none.
        """
        ours = self.coordinator.coordinator_id
        if self.membership() != NOT_A_MEMBER:
            return
        question = FindCoordinatorRequest(self.group_id, CoordinationType.GROUP)
        asking = [
            asyncio.create_task(self.client.send(broker.nodeId, question), name=f"coordinator by {broker.nodeId}")
            for broker in self.client.cluster.brokers()
            if broker.nodeId != ours
        ]
        try:
            for answered in asyncio.as_completed(asking):
                try:
                    answer = await answered
                except kafka.KafkaError:
                    continue
                raise_for(answer.error_code)
                if answer.coordinator_id != ours:
                    raise kafka.NotCoordinatorForGroupError(f"another broker names {answer.coordinator_id}")
                return
        finally:
            await end_tasks(asking)

    async def _wait_for_commits(self) -> None:
        """Wait until the current coordinator knows all commits; the one that assigned our partitions does.

        A coordinator that took over since returns older offsets, without an error, until it learns how far its log is
        replicated. A client that has not joined the group trusts the first coordinator it finds.
        """
        now = asyncio.get_running_loop().time
        while (tenure := self.coordinator._coordinator_dead_fut) is not self._believed:
            if self._believed is not None:
                if tenure is not self._doubted[0]:
                    self._doubted = tenure, now() + _REPLICATION_LAG
                await asyncio.sleep(max(self._doubted[1] - now(), 0.0))
            if tenure is self.coordinator._coordinator_dead_fut:
                self._believed = tenure

    async def log_ranges(
        self, partitions: Collection[TopicPartition], patience: float
    ) -> dict[TopicPartition, LogRange]:
        """Fetch the bounds of logs; partitions whose leader does not answer are left out.

        Takes at most twice *patience* seconds: one metadata look-up, then requests to all leaders concurrently.
        aiokafka's own method retries all partitions until each of them has a leader that answers.
        """
        leaders = await self._leaders(partitions, patience)
        asked = [self._ranges_at(leader, names, patience) for leader, names in leaders.items() if leader is not None]
        found = {name: log for answer in await asyncio.gather(*asked) for name, log in answer.items()}
        if len(found) < len(partitions):
            self.client.force_metadata_update()
        return found

    async def _leaders(
        self, partitions: Collection[TopicPartition], patience: float
    ) -> dict[int | None, list[TopicPartition]]:
        """Group partitions by leader, with None for partitions without one; look up unknown leaders first."""
        leader_of = self.client.cluster.leader_for_partition
        unknown = [name for name in partitions if leader_of(name) in _NO_LEADER]
        if unknown:
            for name in unknown:
                self.client.add_topic(name.topic)
            with contextlib.suppress(TimeoutError, kafka.KafkaError):
                async with asyncio.timeout(patience):
                    await self.client.force_metadata_update()
        found: dict[int | None, list[TopicPartition]] = {}
        for name in partitions:
            leader = leader_of(name)
            found.setdefault(None if leader in _NO_LEADER else leader, []).append(name)
        return found

    async def _ranges_at(
        self, leader: int, partitions: Collection[TopicPartition], patience: float
    ) -> dict[TopicPartition, LogRange]:
        try:
            async with asyncio.timeout(patience):
                # In this order, so that no end is older than its start.
                starts = await self._offsets_at(leader, partitions, OffsetResetStrategy.EARLIEST)
                ends = await self._offsets_at(leader, partitions, OffsetResetStrategy.LATEST)
        except (kafka.KafkaError, TimeoutError) as error:
            if not getattr(error, "retriable", True):
                raise
            return {}
        return {name: LogRange(starts[name], ends[name]) for name in starts.keys() & ends.keys()}

    async def _offsets_at(
        self, leader: int, partitions: Collection[TopicPartition], timestamp: int
    ) -> dict[TopicPartition, int]:
        asked = by_topic({name: (name.partition, timestamp) for name in partitions})
        return led_offsets(await self.client.send(leader, OffsetRequest(-1, self.fetcher._isolation_level, asked)))

    async def look_up_topic(self, topic: str) -> frozenset[int]:
        """Fetch the current partitions of a topic; does not subscribe to metadata updates or create the topic."""
        node = self.client.get_random_node()
        answer = await self.client.send(node, MetadataRequest([topic], allow_auto_topic_creation=False))
        return frozenset(topic_leaders(answer, topic))

    async def look_up_topics(self) -> frozenset[str]:
        """Fetch the current topics that this user may see, without internal topics."""
        return existing_topics(await self.client.send(self.client.get_random_node(), MetadataRequest(None)))

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """Return the first offset not older than *timestamp*, or None. Retries transient errors; has no deadline."""
        # The public method treats a partition missing from the response as one without newer records.
        found = await self.fetcher._retrieve_offsets({topic_partition: round(timestamp * 1000)})
        if topic_partition not in found:
            raise IncompleteAnswerError(f"{topic_partition} was not searched by time")
        offset, _ = found[topic_partition]
        return None if offset < 0 else int(offset)

    # Shutdown -------------------------------------------------------------------------

    async def leave(self) -> None:
        """Leave the group; tells the coordinator unless the member is static."""
        coordinator = self.coordinator
        if coordinator is None:
            return
        if not coordinator._closing.done():
            coordinator._closing.set_result(None)
        joining = bool(coordinator._performed_join_prepare)
        # Do not wait for the join itself: it lasts until the slowest member has drained.
        await end_tasks(
            task for task in (coordinator._coordination_task, coordinator._heartbeat_task) if task is not None
        )
        node = coordinator.coordinator_id
        if not coordinator.member_id or coordinator._group_instance_id is not None or node is None:
            return
        if joining:
            # While a join is unanswered, the broker reads nothing else from that connection.
            connection = self.client._conns.pop((node, ConnectionGroup.COORDINATION), None)
            if connection is not None:
                connection.close(reason=CloseReason.SHUTDOWN)
        request = LeaveGroupRequest(self.group_id, coordinator.member_id)
        answer = await self.client.send(node, request, group=ConnectionGroup.COORDINATION)
        raise_for(answer.error_code)

    async def tear_down(self) -> None:
        """End every task and connection, in any state; takes at most 2 s."""
        self._join_again_in(None)
        self.end_session()
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


def fetch_wait(usual: int, partitions: int, *, left_over: bool, idle: bool) -> int:
    """Return for how many milliseconds brokers may hold a fetch that has nothing to return.

    A broker gets only one fetch at a time. A partition that is drained or resumed while the fetch of its idle
    neighbours is held must wait for that fetch. So while a partition is being drained, fetches are held only briefly.
    Each partition in a fetch costs 10 µs: if all partitions are idle, every fetch contains all of them, so with many
    partitions the wait is longer. Arriving records end the wait.

    Args:
        usual: The setting `fetch_max_wait`.
        partitions: The number of assigned partitions.
        left_over: Whether a fetched partition is still being drained.
        idle: Whether no partition is paused and none had records lately.

    Example:
        >>> [fetch_wait(100, 2_000, left_over=left_over, idle=not left_over) for left_over in (True, False)]
        [100, 500]
    """
    if left_over:
        return min(usual, max(_HURRIED_WAIT_MS, partitions // 10))
    return max(usual, min(partitions // 4, _IDLE_WAIT_MS)) if idle else usual


class Rebalances(ConsumerRebalanceListener):  # type: ignore[misc]
    """aiokafka's rebalance callbacks. They ignore the partition lists, because the transport knows better."""

    def __init__(self, revoked: Callable[[], Awaitable[None]], assigned: Callable[[], None]) -> None:
        self._revoked = revoked
        self._assigned = assigned

    async def on_partitions_revoked(self, revoked: Collection[Any]) -> None:  # noqa: ARG002
        """Run the callback; the group waits until it returns."""
        await self._revoked()

    def on_partitions_assigned(self, assigned: Collection[Any]) -> None:  # noqa: ARG002
        """Run the callback. A plain function, so that nothing else can run before it is done."""
        self._assigned()
