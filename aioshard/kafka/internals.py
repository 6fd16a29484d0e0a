"""What we touch of aiokafka that is private, each attribute guarded by a canary test (`chunk` is the rest of it).

The version is pinned (`aiokafka>=0.14,<0.15`). What is used, and why the public way does not do:

* records are taken from the fetcher's buffer, because `getmany` builds a slow record class, cannot be
  bounded per partition, does not keep its time-out and blocks while the group rebalances;
* commits, the generation and the member id come from the coordinator, because the public `commit`
  retries for ever and sends whatever generation is current;
* stopping is done part by part, because the public `stop` hangs or breaks off when brokers are gone.
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
"""Kafka's own default of `fetch.max.wait.ms`."""
_TICK = 0.05
_NO_LEADER = (None, -1)
_REPLICATION_LAG = 2.0
"""Seconds after which a new coordinator knows what is committed: replicas ask it every 0.5 s, at the most, by default.
On Kafka 4.1.1 answers were up to 1 s behind in 5 of 6 moves right after a commit, and in none of 6 after 2 s."""
_COORDINATOR_AWAY = (
    kafka.GroupCoordinatorNotAvailableError,
    kafka.NotCoordinatorForGroupError,
    kafka.RequestTimedOutError,
)
"""Answers of a broker that does not coordinate the group, or cannot now."""


class Internals:
    """The parts of one started consumer, and what we do with them."""

    def __init__(self, consumer: AIOKafkaConsumer, group_id: str, patience: float = 10.0) -> None:
        """Take a consumer apart; *group_id* is empty for one that has no group.

        Args:
            consumer: Not started yet.
            group_id: The group, or nothing.
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
        """The time in office of the coordinator that knows all commits: what ends when that is looked for anew."""
        self._doubted: tuple[asyncio.Future[None] | None, float] = (None, 0.0)
        """That of one which has taken over since, and until when it may not know them; loop time."""
        refuse_useless_connections(self.client, patience)

    async def start(self) -> bool:
        """Connect, and begin to look up topics; true, since a `KafkaError` says when no broker answers."""
        await self.consumer.start()
        return True

    # The session ----------------------------------------------------------------------

    def watch_session(self, timeout: float, lost: Callable[[], None]) -> None:
        """Call *lost* as soon as the group may have given our partitions away; to be called once, before we join.

        That is when a broker no longer knows us, or *timeout* seconds after the last answered heartbeat was sent. The
        client by itself revokes what we have only when it joins again, for which it needs a coordinator first.
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
        """Start the session; a coordinator that has stored our assignment knows all earlier commits."""
        self._tell_generation(generation)
        self._believed = self.coordinator._coordinator_dead_fut
        self.begin_session(asyncio.get_running_loop().time())

    def begin_session(self, at: float) -> None:
        """Count a session from *at*, by loop time, when we became a member or were one still."""
        self.end_session()
        self._session_over = asyncio.get_running_loop().call_at(at + self._session_timeout, self._lose_session)

    def end_session(self) -> None:
        """Stop counting: we have no partitions."""
        if self._session_over is not None:
            self._session_over.cancel()
            self._session_over = None

    def _lose_session(self) -> None:
        self.coordinator.request_rejoin()
        self._lost()

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

    def _tell_generation(self, generation: int) -> None:
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

    def hold_fetches(self, partitions: int, *, left_over: bool = False, idle: bool = False) -> None:
        """Set how long brokers may hold a fetch that has nothing to return; see `fetch_wait`."""
        usual: int = self.consumer._fetch_max_wait_ms
        self.fetcher._fetch_max_wait_ms = fetch_wait(usual, partitions, left_over=left_over, idle=idle)

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

    async def commit_once(self, offsets: Mapping[TopicPartition, Committed], retention_ms: int = -1) -> None:
        """Send one commit request under the membership of this moment: nothing is awaited before it is built.

        Raises:
            KafkaError: Not every partition is acknowledged. The client's own commit takes one that the answer leaves
                out for acknowledged.
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
        """Ask once for committed offsets; partitions without one are left out.

        The client's own reading overlooks an answer that is an error as a whole (`stored_offsets`).
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
        """Ask the other brokers who coordinates the group, unless we are a member of it; the first answer counts.

        A broker that was frozen answers with the offsets of that time until it learns that another has taken over.
        Members do not ask it: the coordinator that gave them their partitions is the one that they know.

        Raises:
            KafkaError: Another broker names another coordinator, or none.
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
        """Wait until the coordinator of now knows all commits: the one that gave us our partitions does.

        One that has taken over since answers with older offsets, and no error, until it has learnt how far its log is
        replicated. Who has joined no group believes the first that it asks.
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
        """The bounds of logs; a partition is left out when no leader answers for it.

        Takes at most twice *patience* seconds: for a look at who leads, and for the leaders, all at once. The client's
        own look-up asks for all partitions again and again until each of them has a leader that answers.
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
        """The partitions by the broker that leads them, None for those without; looked up where one is unknown."""
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
                # One after the other: a start never lies behind an end that was asked for before it.
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
        """The partitions of a topic, asked now; neither follows the topic from here on nor creates it."""
        node = self.client.get_random_node()
        answer = await self.client.send(node, MetadataRequest([topic], allow_auto_topic_creation=False))
        return frozenset(topic_leaders(answer, topic))

    async def look_up_topics(self) -> frozenset[str]:
        """The topics that we may see, asked now, without the brokers' own."""
        return existing_topics(await self.client.send(self.client.get_random_node(), MetadataRequest(None)))

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """The first offset that is not older than *timestamp*, or None; retries what passes and has no deadline."""
        # The client's public method takes a log that the answer leaves out for one without newer records.
        found = await self.fetcher._retrieve_offsets({topic_partition: round(timestamp * 1000)})
        if topic_partition not in found:
            raise IncompleteAnswerError(f"{topic_partition} was not searched by time")
        offset, _ = found[topic_partition]
        return None if offset < 0 else int(offset)

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
        answer = await self.client.send(node, request, group=ConnectionGroup.COORDINATION)
        raise_for(answer.error_code)

    async def tear_down(self) -> None:
        """End every task and connection, whatever state they are in; takes at most 2 s."""
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

    A broker is asked for nothing else meanwhile: a partition that is drained or resumed while the fetch of its idle
    neighbours waits stands still that long. So while one is being drained, fetches hardly wait. A fetch names every
    partition, which costs 10 µs each: when all partitions are idle, and all are named, fetches of many wait longer.
    Records that arrive end the wait.

    Args:
        usual: The setting `fetch_max_wait`.
        partitions: How many are assigned.
        left_over: Whether a fetched partition is still being drained.
        idle: Whether no partition is paused, and none had records lately.

    Example:
        >>> [fetch_wait(100, 2_000, left_over=left_over, idle=not left_over) for left_over in (True, False)]
        [100, 500]
    """
    if left_over:
        return min(usual, max(_HURRIED_WAIT_MS, partitions // 10))
    return max(usual, min(partitions // 4, _IDLE_WAIT_MS)) if idle else usual


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
