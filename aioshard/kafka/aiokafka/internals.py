"""One consumer taken apart: its client, its group coordinator and its fetcher.

The private parts of aiokafka are used in this package only; canary tests guard each attribute, and the version is
pinned (`aiokafka>=0.14,<0.15`). Why the public API of the consumer is not enough:

* We take records from the fetcher's buffer. `getmany` builds a slow record class, cannot be bounded per partition,
  overruns its timeout, and blocks while the group rebalances.
* Commits, generation and member id come from the coordinator. The public `commit` retries forever, and sends the
  current generation even if it is a newer one.
* We stop the parts one at a time. The public `stop` hangs or fails halfway when brokers are gone.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka import errors as kafka
from aiokafka.client import ConnectionGroup, CoordinationType
from aiokafka.conn import CloseReason
from aiokafka.consumer.fetcher import READ_COMMITTED, READ_UNCOMMITTED, FetchResult
from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.group import LeaveGroupRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest, OffsetResetStrategy

from aioshard.core.flow import fetch_limits
from aioshard.errors import ClientLostError
from aioshard.kafka.aiokafka.answers import (
    IncompleteAnswerError,
    existing_topics,
    led_offsets,
    partition_info,
    raise_for,
    reason,
    refused_offsets,
    stored_offsets,
    topic_partitions,
)
from aioshard.kafka.aiokafka.connections import close_client, end_tasks, refuse_useless_connections
from aioshard.kafka.aiokafka.static_members import StaticJoins
from aioshard.kafka.aiokafka.topic_ids import TopicIds, ids_in
from aioshard.kafka.assignors import ConsumerAssignor
from aioshard.kafka.group_protocol import FetchStableOffsets
from aioshard.ports import NOT_A_MEMBER, Committed, LogRange, Membership
from aioshard.records import PartitionInfo, TopicPartition, by_topic

_TICK = 0.05
_NO_LEADER = (None, -1)
RETENTION_MS = 10 * 365 * 24 * 3600 * 1000
"""Milliseconds that brokers keep offsets committed without a member. Otherwise `offsets.retention.minutes`, a week by
default, would count from the time the group lost its last member: a group with manual assignment has none."""
_REPLICATION_LAG = 2.0
"""Seconds until a new coordinator knows all commits: by default, replicas fetch from it at least every 0.5 s. On Kafka
4.1.1, answers right after a commit were up to 1 s out of date in 5 of 6 moves, and in none of 6 after 2 s."""
_BESIDE_JOIN = max(ConnectionGroup) + 1
"""Key of a connection to the coordinator that carries neither joins nor fetches: brokers hold both."""
_COORDINATOR_AWAY = (
    kafka.GroupCoordinatorNotAvailableError,
    kafka.NotCoordinatorForGroupError,
    kafka.RequestTimedOutError,
)
"""Errors from a broker that does not coordinate the group, or cannot do so now."""


class Internals:
    """The parts of one consumer, and our operations on them."""

    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        assignor: ConsumerAssignor,
        group_id: str,
        patience: float = 10.0,
        topics: Collection[str] = (),
    ) -> None:
        """Take a consumer apart.

        Args:
            consumer: Not started yet.
            assignor: The consumer's.
            group_id: The group; empty for a consumer without one.
            patience: See `refuse_useless_connections`.
            topics: The topics to look up when connecting.
        """
        self._topics = topics
        self.group_id = group_id
        self.consumer: Any = consumer
        self.assignor = assignor
        self.client: Any = consumer._client
        self.subscription: Any = consumer._subscription
        self._patience = patience
        self._static_joins: StaticJoins | None = None
        self._rejoin_timer: asyncio.TimerHandle | None = None
        self._session_timer: asyncio.TimerHandle | None = None
        self._lost: Callable[[], None] = lambda: None
        self._session_timeout = 0.0
        self._trusted: asyncio.Future[None] | None = None
        """Tenure of the coordinator known to have all commits: a future that ends when we look for a new one."""
        self.fetched_bytes: dict[TopicPartition, bytes] = {}
        """The bytes of the latest fetch of a partition, until they are taken; see `keep_fetched_bytes`."""
        self._suspected: tuple[asyncio.Future[None] | None, float] = (None, 0.0)
        """Tenure of a coordinator that took over later, and the loop time until which it may lack commits."""
        refuse_useless_connections(self.client, patience)

    async def begin(self) -> bool:
        """Connect and look up the topics; return whether an advertised broker has answered."""
        await self.consumer.start()
        if self._topics:
            self.client.set_topics(self._topics)
        return bool(await self.client.force_metadata_update())

    # The session ----------------------------------------------------------------------

    def watch_session(self, timeout: float, lost: Callable[[], None]) -> None:
        """Call *lost* as soon as the group may have reassigned our partitions; call this once, before we join.

        That is when a broker no longer knows us, or *timeout* seconds after sending the last heartbeat that was
        answered. The client itself revokes our partitions only when it rejoins, which needs a coordinator first.
        """
        coordinator = self.coordinator
        heartbeat, reset = coordinator._do_heartbeat, coordinator.reset_generation
        now = asyncio.get_running_loop().time
        self._lost, self._session_timeout = lost, timeout

        async def do_heartbeat() -> bool:
            sent = now()
            answered: bool = await heartbeat()
            if answered and self._session_timer is not None:
                self.begin_session(sent)
            return answered

        def reset_generation() -> None:
            reset()
            lost()

        coordinator._do_heartbeat, coordinator.reset_generation = do_heartbeat, reset_generation

    def complete_static_joins(self) -> None:
        """See `StaticJoins`; call this once, before we join as a static member."""
        self._static_joins = StaticJoins(self.client, self.coordinator, self.assignor, self._patience)

    @property
    def was_displaced(self) -> bool:
        """See `StaticJoins.was_displaced`."""
        return self._static_joins is not None and self._static_joins.was_displaced

    def joined(self, generation: int) -> None:
        """Start the session. The coordinator stored our assignment, so it knows all earlier commits."""
        self.assignor.generation = generation  # aiokafka forgets to pass it
        self._rejoin_in(self.assignor.joins_again_in)
        self._trusted = self.coordinator._coordinator_dead_fut
        self.begin_session(asyncio.get_running_loop().time())

    def begin_session(self, at: float) -> None:
        """Restart the session timer from *at*, the loop time at which we were known to be a member."""
        self.end_session()
        self._session_timer = asyncio.get_running_loop().call_at(at + self._session_timeout, self._lose_session)

    @property
    def last_heartbeat(self) -> float | None:
        """Loop time at which the last answered heartbeat was sent; None without a session."""
        timer = self._session_timer
        return None if timer is None else timer.when() - self._session_timeout

    def end_session(self) -> None:
        """Stop the session timer: we have no partitions."""
        if self._session_timer is not None:
            self._session_timer.cancel()
            self._session_timer = None

    def _lose_session(self) -> None:
        self.coordinator.request_rejoin()
        self._lost()

    # Fetches --------------------------------------------------------------------------

    def bound_prefetch(self, most: int) -> None:
        """Limit the bytes that are fetched and not yet taken to *most*; call this once, before we join."""
        fetcher = self.fetcher
        plan = fetcher._get_actions_per_node
        granted: dict[int, int] = {}

        def plan_within_bound(assignment: Any) -> Any:
            in_flight = fetcher._in_flight
            used = sum(granted.get(node, 0) for node in in_flight)
            for result in self.buffered.values():
                if type(result) is FetchResult:  # its size includes records already taken
                    used += result._partition_records._records.size_in_bytes()
            partitions = len(assignment.tps)
            requests = min(len(self.cluster.brokers()) - len(in_flight), partitions)
            limits = fetch_limits(most, used, partitions, max(requests, 1))
            fetcher._fetch_max_bytes, fetcher._max_partition_fetch_bytes = limits
            actions = plan(assignment)
            granted.update((node, limits.response) for node, _ in actions[0])
            return actions

        fetcher._get_actions_per_node = plan_within_bound

    def keep_fetched_bytes(self) -> None:
        """Keep the bytes of each fetch until its records are taken; call this once, before we join.

        aiokafka holds the same bytes as long, but does not hand them out. Its decoder stops for good at a header name
        that is not UTF-8, so `Chunk` needs them.
        """
        send = self.client.send

        async def send_and_keep(node_id: int, request: Any, *, group: Any = ConnectionGroup.DEFAULT) -> Any:
            response = await send(node_id, request, group=group)
            if isinstance(request, FetchRequest):
                for topic, parts in response.topics:
                    for partition, *part in parts:
                        if part[-1]:
                            self.fetched_bytes[TopicPartition(topic, partition)] = part[-1]
            return response

        self.client.send = send_and_keep

    # State ----------------------------------------------------------------------------

    @property
    def cluster(self) -> Any:
        """Aiokafka's metadata of the cluster."""
        return self.client.cluster

    @property
    def lost(self) -> BaseException | None:
        """The error of a background task that has ended; None while all run."""
        for purpose, task in self.background_tasks().items():
            if task.done():
                cause = None if task.cancelled() else task.exception()
                detail = reason(cause) if cause else "without an error"
                lost = ClientLostError(f"the Kafka client's task for {purpose} ended ({detail})")
                lost.__cause__ = cause
                return lost
        return None

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
        tasks = {
            "fetching": self.fetcher and self.fetcher._fetch_task,
            "group membership": self.coordinator and self.group_id and self.coordinator._coordination_task,
            "looking up topics": self.client._sync_task,
        }
        return {purpose: task for purpose, task in tasks.items() if task}

    def take_pending_error(self) -> Exception | None:
        """Return the coordinator's pending fatal error, if any; the coordinator then continues to retry."""
        coordinator = self.coordinator
        if not self.group_id or coordinator._pending_exception is None:
            return None
        try:
            coordinator.check_errors()
        except Exception as error:  # noqa: BLE001 - it is the return value
            return error
        return None

    def _rejoin_in(self, seconds: float | None) -> None:
        if self._rejoin_timer is not None:
            self._rejoin_timer.cancel()
        if seconds is not None:
            # Slightly later, because the loop's clock may be a tick ahead of the assignor's.
            self._rejoin_timer = asyncio.get_running_loop().call_later(seconds + _TICK, self.coordinator.request_rejoin)

    def subscribed_partitions(self) -> list[TopicPartition]:
        """Return all known partitions of the subscribed topics."""
        return [
            TopicPartition(topic, number)
            for topic in self.consumer.subscription()
            for number in self.cluster.partitions_for_topic(topic) or ()
        ]

    # Broker requests ------------------------------------------------------------------

    async def look_up_group(self) -> None:
        """Look up the group's coordinator once; raises if the group is not authorized."""
        await self.client.coordinator_lookup(CoordinationType.GROUP, self.group_id)

    async def topic_ids(self, topics: Collection[str]) -> dict[str, uuid.UUID]:
        """Look up the ids of topics; leave out those that do not exist now, and all if the brokers have no ids."""
        try:
            return ids_in(await self.client.send(self.client.get_random_node(), TopicIds(topics)))
        except kafka.IncompatibleBrokerVersion:
            return {}

    async def commit_once(self, offsets: Mapping[TopicPartition, Committed], *, without_member: bool = False) -> None:
        """Send one commit request under the current membership: no await before the request is built.

        Raises:
            KafkaError: A partition is not acknowledged. aiokafka's own commit would treat a partition missing from
                the response as acknowledged.
        """
        coordinator = self.coordinator
        membership = self.membership()
        request = OffsetCommitRequest(
            self.group_id,
            coordinator.generation,
            coordinator.member_id,
            RETENTION_MS if without_member else -1,
            by_topic(offsets, lambda partition: (partition.partition, *offsets[partition])),
        )
        refused = refused_offsets(await self._ask_coordinator(request), offsets)
        if not refused:
            return
        error = next(iter(refused.values()))
        if isinstance(error, _COORDINATOR_AWAY):
            coordinator.coordinator_dead()
        elif coordinator._performed_join_prepare or self.membership() != membership:
            pass  # we are joining, or have joined since: the group was a generation ahead of us
        elif isinstance(error, kafka.RebalanceInProgressError):
            coordinator.request_rejoin()
        elif isinstance(error, kafka.UnknownMemberIdError | kafka.IllegalGenerationError):
            coordinator.reset_generation()
        raise error

    async def committed_once(
        self, partitions: Collection[TopicPartition], *, stable: bool = False
    ) -> dict[TopicPartition, Committed]:
        """Fetch committed offsets once the coordinator is known, with one request; leave out partitions without one.

        With *stable*, those that an open transaction may still change are an error.

        aiokafka's own method overlooks a response with a top-level error (see `stored_offsets`).
        """
        await self.coordinator.ensure_coordinator_known()
        await self._wait_for_commits()
        kind = FetchStableOffsets if stable else OffsetFetchRequest
        response = await self._ask_coordinator(kind(self.group_id, by_topic(partitions)))
        try:
            commits = stored_offsets(response, partitions)
            await self._confirm_coordinator()
        except _COORDINATOR_AWAY:
            self.coordinator.coordinator_dead()
            raise
        return commits

    async def _ask_coordinator(self, request: Any) -> Any:
        """Send a request to the group's coordinator; while a join is unanswered, over another connection.

        A broker reads nothing from a connection until it has answered the join, or the fetch, that came over it.
        """
        coordinator = self.coordinator
        node = coordinator.coordinator_id
        if coordinator._performed_join_prepare and node is not None:
            return await self.client.send(node, request, group=_BESIDE_JOIN)
        return await coordinator._send_req(request)

    async def _confirm_coordinator(self) -> None:
        """Check with the other brokers who coordinates the group, unless we are a member; the first response counts.

        A broker that was frozen returns old offsets until it learns that another one took over. Members skip the check:
        they use the coordinator that gave them their partitions.

        Raises:
            KafkaError: Another broker names a different coordinator, or none.
        """
        ours = self.coordinator.coordinator_id
        if self.membership() != NOT_A_MEMBER:
            return
        request = FindCoordinatorRequest(self.group_id, CoordinationType.GROUP)
        requests = [
            asyncio.create_task(self.client.send(broker.nodeId, request), name=f"coordinator by {broker.nodeId}")
            for broker in self.client.cluster.brokers()
            if broker.nodeId != ours
        ]
        try:
            for pending in asyncio.as_completed(requests):
                try:
                    response = await pending
                except kafka.KafkaError:
                    continue
                raise_for(response.error_code)
                if response.coordinator_id != ours:
                    raise kafka.NotCoordinatorForGroupError(f"another broker names {response.coordinator_id}")
                return
        finally:
            await end_tasks(requests)

    async def _wait_for_commits(self) -> None:
        """Wait until the current coordinator knows all commits; the one that assigned our partitions does.

        A coordinator that took over since returns older offsets, without an error, until it learns how far its log is
        replicated. A client that has not joined the group trusts the first coordinator it finds.
        """
        now = asyncio.get_running_loop().time
        while (tenure := self.coordinator._coordinator_dead_fut) is not self._trusted:
            if self._trusted is not None:
                if tenure is not self._suspected[0]:
                    self._suspected = tenure, now() + _REPLICATION_LAG
                await asyncio.sleep(max(self._suspected[1] - now(), 0.0))
            if tenure is self.coordinator._coordinator_dead_fut:
                self._trusted = tenure

    async def log_ranges(
        self, partitions: Collection[TopicPartition], patience: float
    ) -> dict[TopicPartition, LogRange]:
        """Fetch the bounds of logs; partitions whose leader does not answer are left out.

        Takes at most twice *patience* seconds: one metadata look-up, then requests to all leaders concurrently.
        aiokafka's own method retries all partitions until each of them has a leader that answers.
        """
        leader_of = self.cluster.leader_for_partition
        unknown = [topic_partition for topic_partition in partitions if leader_of(topic_partition) in _NO_LEADER]
        for topic_partition in unknown:
            self.client.add_topic(topic_partition.topic)
        if unknown:
            with contextlib.suppress(TimeoutError, kafka.KafkaError):
                async with asyncio.timeout(patience):
                    await self.client.force_metadata_update()
        by_leader: dict[Any, list[TopicPartition]] = {}
        for topic_partition in partitions:
            by_leader.setdefault(leader_of(topic_partition), []).append(topic_partition)
        requests = [
            self._ranges_at(leader, led, patience) for leader, led in by_leader.items() if leader not in _NO_LEADER
        ]
        ranges: dict[TopicPartition, LogRange] = {}
        for response in await asyncio.gather(*requests):
            ranges |= response
        if len(ranges) < len(partitions):
            self.client.force_metadata_update()
        return ranges

    async def _ranges_at(
        self, leader: int, partitions: Collection[TopicPartition], patience: float
    ) -> dict[TopicPartition, LogRange]:
        try:
            async with asyncio.timeout(patience):
                # In this order, so that no end is older than its start. The end is asked for last: records that
                # are written between two requests would otherwise look like those of an open transaction.
                isolation = self.fetcher._isolation_level
                newest: dict[TopicPartition, int] = {}
                starts = await self._offsets_at(leader, partitions, OffsetResetStrategy.EARLIEST, isolation)
                if isolation == READ_COMMITTED:
                    newest = await self._offsets_at(leader, partitions, OffsetResetStrategy.LATEST, READ_UNCOMMITTED)
                ends = await self._offsets_at(leader, partitions, OffsetResetStrategy.LATEST, isolation)
        except (kafka.KafkaError, TimeoutError) as error:
            if not getattr(error, "retriable", True):
                raise
            return {}
        answered = starts.keys() & ends.keys()
        return {name: LogRange(starts[name], ends[name], max(newest.get(name, -1), ends[name])) for name in answered}

    async def _offsets_at(
        self, leader: int, partitions: Collection[TopicPartition], timestamp: int, isolation: int
    ) -> dict[TopicPartition, int]:
        requested = by_topic(partitions, lambda at: (at.partition, timestamp))
        return led_offsets(await self.client.send(leader, OffsetRequest(-1, isolation, requested)))

    def known_partitions(self, topic: str) -> dict[int, PartitionInfo]:
        """Return the last known partitions of a topic."""
        known = self.cluster._partitions.get(topic, {}).values()
        return {info.partition: partition_info(info.partition, info.leader, info.replicas, info.isr) for info in known}

    async def look_up_topic(self, topic: str) -> dict[int, PartitionInfo]:
        """Fetch the current partitions of a topic; does not subscribe to metadata updates or create the topic."""
        request = MetadataRequest([topic], allow_auto_topic_creation=False)
        return topic_partitions(await self.client.send(self.client.get_random_node(), request), topic)

    async def look_up_topics(self) -> frozenset[str]:
        """Fetch the current topics that this user may see, without internal topics."""
        return existing_topics(await self.client.send(self.client.get_random_node(), MetadataRequest(None)))

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """Return the first offset not older than *timestamp*, or None. Retries transient errors; has no deadline."""
        # The public method treats a partition missing from the response as one without newer records.
        offsets = await self.fetcher._retrieve_offsets({topic_partition: round(timestamp * 1000)})
        if topic_partition not in offsets:
            raise IncompleteAnswerError(f"{topic_partition} was not searched by time")
        offset, _ = offsets[topic_partition]
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
        response = await self.client.send(
            node, LeaveGroupRequest(self.group_id, coordinator.member_id), group=ConnectionGroup.COORDINATION
        )
        raise_for(response.error_code)

    async def tear_down(self) -> None:
        """End every task and connection, in any state; takes at most 2 s."""
        self._rejoin_in(None)
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
