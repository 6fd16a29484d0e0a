"""A member of a consumer group: membership through aiokafka, records and offsets through our own client."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any

import anyio
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener

from aioshard.core.ownership import Losses
from aioshard.errors import ClientLostError, ConnectError, InstanceIdTakenError, SettingsError
from aioshard.kafka.aiokafka.answers import cause_of, reason
from aioshard.kafka.aiokafka.internals import Internals
from aioshard.kafka.aiokafka.options import consumer_options
from aioshard.kafka.consumer import ConsumerTransport
from aioshard.kafka.errors import commit_error
from aioshard.kafka.offsets import Member, log_ranges
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.start import START_TIMEOUT
from aioshard.ports import NOT_A_MEMBER, Committed, GroupListener, Membership, Message
from aioshard.records import TopicPartition
from aioshard.settings import Settings

logger = logging.getLogger("aioshard.kafka.aiokafka")

_BACKLOG_TIMEOUT = 0.5
"""Seconds to query the backlogs while the group waits for us; after that, we use our last known offsets."""


class AiokafkaTransport(ConsumerTransport, ConsumerRebalanceListener):  # type: ignore[misc]
    """A member of a group of the classic protocol; aiokafka 0.14 keeps the membership."""

    def __init__(self, settings: Settings, group_id: str) -> None:
        """Check the options; connects to nothing yet.

        Raises:
            SettingsError: TLS and SASL settings cannot work.
        """
        super().__init__(settings, group_id)
        self._options = consumer_options(settings, group_id)
        self._instance = _InstanceWatch(settings, group_id)
        self._internals: Internals | None = None
        """The member; None with manual assignment."""

    @property
    def _has_coordinator(self) -> bool:
        if self._internals is None:
            return super()._has_coordinator
        return bool(self._internals.coordinator.coordinator_id is not None)

    @property
    def last_heartbeat(self) -> float | None:  # type: ignore[override]
        """See `Transport.last_heartbeat`."""
        return None if self._internals is None else self._internals.last_heartbeat

    # Lifecycle ------------------------------------------------------------------------

    async def _join_group(self, pattern: str | None) -> None:
        internals = self._internals = await self._connect_member()
        internals.watch_session(self._settings.session_timeout, self._lose)
        internals.watch_errors(self._check_again)
        if self._settings.group_instance_id is not None:
            internals.complete_static_joins(self._cluster)
        if internals.assignor.cooperative:
            internals.coordinator._on_join_prepare = self.on_partitions_revoked
        self.subscribe(self._topics, pattern)
        self._tasks.append(asyncio.create_task(self._watch_joins(), name=f"joins of {self._group_id}"))
        for task in internals.background_tasks().values():
            task.add_done_callback(self._check_again)
        if self._settings.balance_interval:
            self._tasks.append(asyncio.create_task(self._balance(internals), name=f"balance of {self._group_id}"))

    async def _connect_member(self) -> Internals:
        """Connect the client that keeps the membership.

        Raises:
            ConnectError: No broker answered it.
            SettingsError: It refused an option.
        """
        broker = self._cluster.metadata.brokers[self._cluster.any_broker()]
        host = f"[{broker.host}]" if ":" in broker.host else broker.host
        options = {**self._options, "bootstrap_servers": f"{host}:{broker.port}"}
        (assignor,) = options["partition_assignment_strategy"]
        try:
            internals = Internals(AIOKafkaConsumer(**options), assignor, self._group_id, self._patience, self._topics)
        except (ValueError, TypeError) as error:
            raise SettingsError(f"the Kafka client refused an option: {reason(error)}") from error
        has_answer = False
        try:
            async with asyncio.timeout(START_TIMEOUT):
                has_answer = await internals.begin()
        except (RuntimeError, TimeoutError) as error:  # a KafkaError, or uvloop's error for a connection that was lost
            logger.debug("connecting failed: %s", reason(error))
        finally:
            if not has_answer:
                with anyio.CancelScope(shield=True):
                    await internals.tear_down()
        if not has_answer:
            raise ConnectError(
                f"the brokers of bootstrap_servers={self._settings.bootstrap_servers} did not answer in time: check "
                "these brokers"
            )
        return internals

    async def _balance(self, internals: Internals) -> None:
        """As the leader, request a rebalance once two checks in a row have found unequal backlogs."""
        seen = False
        while True:
            await asyncio.sleep(self._settings.balance_interval)
            assignor = internals.assignor
            before = seen
            seen = assignor.leads and assignor.would_pay(await self._backlogs(internals))
            if before and seen:
                logger.info("the members of group %r have unequal backlogs: requesting a rebalance", self._group_id)
                internals.coordinator.request_rejoin()
                seen = False

    def subscribe(self, topics: Collection[str], pattern: str | None) -> None:
        """See `Transport.subscribe`."""
        self._check_running()
        consumer = self._member().consumer
        self._topics = frozenset(topics)
        self._follow_topics()
        if pattern is None:
            consumer.subscribe(topics=tuple(topics), listener=self)
        else:
            # aiokafka accepts either topics or a pattern. It uses `match`, so the pattern needs an end.
            choices = [*map(re.escape, sorted(topics)), f"(?:{pattern})"]
            consumer.subscribe(pattern=rf"(?:{'|'.join(choices)})\Z", listener=self)

    def _member(self) -> Internals:
        if self._internals is None:
            raise ClientLostError("the Kafka client is not a member of the group")
        return self._internals

    async def _leave(self) -> None:
        if self._internals is not None:
            await self._internals.leave()

    async def _tear_down(self) -> None:
        await self._fetcher.close()
        if self._internals is not None:
            await self._internals.tear_down()
        await super()._tear_down()

    def _raise_group_loss(self) -> None:
        if self._instance.taken is not None:
            raise self._instance.taken
        internals = self._internals
        if internals is None:
            return
        pending = internals.take_pending_error()
        if pending is not None:
            raise self._group_error(cause_of(pending)) from pending
        if internals.lost is not None:
            raise internals.lost

    # The group ------------------------------------------------------------------------

    def membership(self) -> Membership:
        """See `Transport.membership`. A generation counts once the engine has received its partitions."""
        internals = self._internals
        if internals is not None and internals.membership() != self._membership:
            return NOT_A_MEMBER
        return self._membership

    async def _own_member_id(self) -> str:
        return str(self._member().coordinator.member_id)

    async def _commit_as_member(
        self,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: Sequence[Message] | None,  # noqa: ARG002
    ) -> None:
        self._check_commit(offsets, membership)
        member = Member(membership.generation, membership.member_id, self._settings.group_instance_id)
        try:
            await self._send_commit(offsets, member)
        except WireError as error:
            if self._internals is not None:
                self._internals.note_refusal(error.code, membership)
            raise commit_error(error.cause, offsets, self._group_id) from error

    async def on_partitions_revoked(self, _revoked: Collection[Any]) -> None:
        """Tell the engine that its partitions are being revoked; the group waits until this returns.

        A cooperative assignor keeps them until the group has another assignment.
        """
        internals = self._internals
        if internals is None or self._listener is None or self._closed:
            return
        self._instance.rejoins(internals.membership())
        internals.coordinator._group_subscription = None  # else a previous leader would watch topics of others
        try:
            if self._fetcher.partitions and not internals.assignor.cooperative:  # none after `_lose`
                await self._drain(self._listener, self._fetcher.partitions)
            if self._settings.assignor.endswith("lag"):
                internals.assignor.backlogs = await self._backlogs(internals)
        finally:
            if not internals.assignor.cooperative:
                self._end_assignment()
                self._check_again()
        if self._instance.taken is not None:
            await asyncio.Event().wait()  # rejoining would take the place of the other process again

    async def _release_moving(self, internals: Internals, listener: GroupListener) -> None:
        """Release the partitions that are no longer ours; as the leader, rejoin, so that the group assigns them."""
        internals.coordinator._start_heartbeat_task()  # aiokafka would wait until this returns
        gone = [partition for partition in self._fetcher.partitions if partition not in internals.assignor.owned]
        if gone:
            await self._drain(listener, gone)
            if self._closed:
                return
            self._fetcher.remove(gone)
            listener.assigned(self._fetcher.partitions, self._membership)  # the drain stopped the opening of the others
        if internals.assignor.moving:
            internals.coordinator.request_rejoin()

    async def _backlogs(self, internals: Internals) -> dict[TopicPartition, int]:
        """Return the number of uncommitted records of each subscribed partition, where known, to balance them.

        Takes at most half a second. If the brokers do not answer, it counts from our own positions to the log ends of
        the latest fetch.
        """
        fetcher = self._fetcher
        begins = {partition: fetcher.position(partition) for partition in fetcher.partitions}
        ends = {partition: fetcher.end_offset(partition) for partition in fetcher.partitions}
        try:
            async with asyncio.timeout(_BACKLOG_TIMEOUT):
                partitions = {*fetcher.partitions, *internals.subscribed_partitions()}
                commits = await self._offsets.committed(partitions)
                ranges = await log_ranges(self._cluster, partitions, self._isolation, _BACKLOG_TIMEOUT)
        except (WireError, TimeoutError) as error:
            logger.info("could not query the remaining records of the partitions: %s", reason(error))
        else:
            for partition, (start, end, _) in ranges.items():
                ends[partition] = end
                if partition in commits:
                    begins[partition] = max(commits[partition].offset, start)
                elif begins.get(partition) is None:
                    begins[partition] = {"earliest": start, "latest": end}.get(self._settings.auto_offset_reset or "")
        bounds = ((partition, begins.get(partition), end) for partition, end in ends.items())
        return {partition: end - begin for partition, begin, end in bounds if begin is not None and end is not None}

    def _lose(self) -> None:
        """Report immediately to the engine that another member may own our partitions by now."""
        listener = self._listener
        if listener is None or self._closed or not self._fetcher.partitions:
            return
        try:
            listener.lost(self._fetcher.partitions)
        except Exception as error:  # noqa: BLE001 - called from a timer; the next poll raises it
            self._listener_failure = error
        finally:
            self._end_assignment()
            self._check_again()

    def on_partitions_assigned(self, _assigned: Collection[Any]) -> Awaitable[None] | None:
        """Pass an assignment to the engine. A plain function, so that nothing else can run before it is done.

        Returns:
            With a cooperative assignor, the release of the partitions that move; aiokafka awaits it.
        """
        internals = self._internals
        listener = self._listener
        assigned = None if internals is None else internals.take_assignment()
        if internals is None or assigned is None or listener is None or self._closed:
            return None
        self._fetcher.add(assigned)
        self._follow_topics()
        self._fetcher.pause(set(self._fetcher.partitions).difference(assigned))
        self._membership = internals.membership()
        self._instance.joined(self._membership, was_displaced=internals.was_displaced)
        internals.joined(self._membership.generation)
        try:
            listener.assigned(self._fetcher.partitions, self._membership)
        except Exception as error:  # noqa: BLE001 - aiokafka would swallow it; the next poll raises it
            self._listener_failure = error
            self._check_again()
        return self._release_moving(internals, listener) if internals.assignor.cooperative else None

    def _end_assignment(self) -> None:
        super()._end_assignment()
        if self._internals is not None:
            self._internals.end_session()


class _InstanceWatch:
    """Detects another process with our `group_instance_id`, which aiokafka does not notice.

    When a second process joins with the same id, the broker gives it the member's place: same partitions, same
    generation, a new member id. Our member id is unknown from then on. aiokafka rejoins and takes the place back, and
    the two alternate forever. In contrast, a member that was dropped as silent comes back in a later generation.

    A single loss may be two processes that overlap, as in a rolling deploy. If we lose the place again within a
    session timeout, we must not take it back: the process that notices this first ends, and the other one keeps it.
    """

    def __init__(self, settings: Settings, group_id: str) -> None:
        self._is_static = settings.group_instance_id is not None
        self._within = settings.session_timeout
        self._error = InstanceIdTakenError(group_id, str(settings.group_instance_id), self._within, persists=True)
        self._previous = NOT_A_MEMBER
        self._losses = Losses(time.monotonic)
        self._was_taken = False
        self.taken: InstanceIdTakenError | None = None
        """The error, once we lost the place again; from then on, the client must not rejoin."""

    def joined(self, now: Membership, *, was_displaced: bool = False) -> None:
        """Record a new membership; *was_displaced* if the group had another process in our place before."""
        previous, self._previous = self._previous, now
        took_back = now.generation == previous.generation and now.member_id != previous.member_id
        # Only for a static member: a group that was deleted and recreated counts generations from 1 again.
        self._was_taken = self._is_static and (took_back or was_displaced)
        if self._was_taken:
            self._losses.again(0.0)
            logger.warning("%s. If it continues, one of the processes ends", self._error)

    def rejoins(self, now: Membership) -> None:
        """Set `taken` if we have lost our place again; call it before rejoining."""
        if now == NOT_A_MEMBER and self._was_taken and self._losses.again(self._within):
            self.taken = self._error
