"""The group membership of one aiokafka consumer: its client and its group coordinator.

The private parts of aiokafka are used in this package only; canary tests guard each attribute, and the version is
pinned (`aiokafka>=0.14,<0.15`). Records, positions, commits and queries go through our own client; the consumer's
fetcher has nothing to do, because all partitions are paused. Why the public API of the consumer is not enough:

* Generation and member id come from the coordinator.
* We stop the parts one at a time. The public `stop` hangs or fails halfway when brokers are gone.
"""

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka import errors as kafka
from aiokafka.client import ConnectionGroup
from aiokafka.conn import CloseReason
from aiokafka.protocol.group import LeaveGroupRequest

from aioshard.errors import ClientLostError
from aioshard.kafka.aiokafka.answers import (
    raise_for,
    reason,
)
from aioshard.kafka.aiokafka.connections import close_client, end_tasks, refuse_useless_connections
from aioshard.kafka.aiokafka.static_members import StaticJoins
from aioshard.kafka.assignors import ConsumerAssignor
from aioshard.kafka.wire.cluster import Cluster
from aioshard.ports import NOT_A_MEMBER, Membership
from aioshard.records import TopicPartition

_TICK = 0.05
_REBALANCING = kafka.RebalanceInProgressError.errno
_NOT_OURS = frozenset({kafka.UnknownMemberIdError.errno, kafka.IllegalGenerationError.errno})
"""Error codes for a membership that the group has ended."""


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
            group_id: The group.
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
        refuse_useless_connections(self.client, patience)

    async def begin(self) -> bool:
        """Connect and look up the topics; return whether an advertised broker has answered."""
        await self.consumer.start()
        # It would visit every partition a few times a second, to find that each of them is paused.
        await end_tasks([self.fetcher._fetch_task])
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

    def complete_static_joins(self, cluster: Cluster) -> None:
        """See `StaticJoins`; call this once, before we join as a static member."""
        self._static_joins = StaticJoins(self.client, self.coordinator, self.assignor, cluster, self._patience)

    @property
    def was_displaced(self) -> bool:
        """See `StaticJoins.was_displaced`."""
        return self._static_joins is not None and self._static_joins.was_displaced

    def joined(self, generation: int) -> None:
        """Start the session."""
        self.assignor.generation = generation  # aiokafka forgets to pass it
        self._rejoin_in(self.assignor.joins_again_in)
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

    def watch_errors(self, act: Callable[[], None]) -> None:
        """Call *act* when the coordinator has an error for us; see `take_pending_error`. Call this once."""
        abort = self.subscription.abort_waiters

        def abort_waiters(error: Exception) -> None:
            abort(error)
            act()

        self.subscription.abort_waiters = abort_waiters

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

    def take_assignment(self) -> list[TopicPartition] | None:
        """Return the assigned partitions, and keep the client from fetching them; None without an assignment.

        The client neither fetches nor resets a partition that is paused and has a position, even a dummy one.
        """
        subscribed = self.subscription.subscription
        assignment = None if subscribed is None else subscribed.assignment
        if assignment is None:
            return None
        for partition in assignment.tps:
            state = assignment.state_value(partition)
            state.pause()
            state.seek(0)
        return [TopicPartition(partition.topic, partition.partition) for partition in assignment.tps]

    def membership(self) -> Membership:
        """The member id and generation that the client has now."""
        coordinator = self.coordinator
        if coordinator is None or coordinator.generation < 0:
            return NOT_A_MEMBER
        return Membership(coordinator.member_id, coordinator.generation)

    def background_tasks(self) -> dict[str, asyncio.Task[Any]]:
        """Return the tasks without which nothing works, keyed by their purpose."""
        tasks = {
            "group membership": self.coordinator and self.coordinator._coordination_task,
            "looking up topics": self.client._sync_task,
        }
        return {purpose: task for purpose, task in tasks.items() if task}

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

    def note_refusal(self, code: int, membership: Membership) -> None:
        """Act on an error code that refused a commit under a membership, as the client would."""
        coordinator = self.coordinator
        if coordinator._performed_join_prepare or self.membership() != membership:
            return  # we are joining, or have joined since: the group was a generation ahead of us
        if code == _REBALANCING:
            coordinator.request_rejoin()
        elif code in _NOT_OURS:
            coordinator.reset_generation()

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
            coordinator = self.coordinator
            tasks |= {coordinator._coordination_task, coordinator._heartbeat_task, coordinator._commit_refresh_task}
        await close_client(self.client, tasks)
