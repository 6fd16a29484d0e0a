"""The aiokafka transport: group membership, records and commits of one consumer."""

import asyncio
import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio
from aiokafka import AIOKafkaConsumer
from aiokafka import errors as kafka

from aioshard.errors import ClientLostError, SettingsError, StateError
from aioshard.kafka.backlog import Backlog
from aioshard.kafka.connecting import CONNECT_TIMEOUT, START_TIMEOUT, advertised_by, find_broker, why_unreachable
from aioshard.kafka.instance_watch import InstanceWatch
from aioshard.kafka.intake import Found, Intake
from aioshard.kafka.internals import Internals, Rebalances
from aioshard.kafka.memberless import by_hand, commit_by_hand, partitions_by_hand
from aioshard.kafka.options import consumer_options, partition_share
from aioshard.kafka.questions import Questions, refuse_what_is_not_ours
from aioshard.kafka.topics import SubscribedTopics, one_pattern
from aioshard.kafka.translate import commit_error, group_error, reason
from aioshard.kafka.waiting import Waiting, raise_ended_task
from aioshard.ports import (
    NOT_A_MEMBER,
    AllowanceOf,
    Committed,
    Fault,
    FetchedBatch,
    GroupListener,
    Membership,
    Oversized,
)
from aioshard.records import TopicPartition

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["AiokafkaTransport"]

logger = logging.getLogger("aioshard.kafka.client")

_LEAST_PATIENCE = 2.0
"""Minimum seconds to wait for a response that brokers send without delay, even if the session is short."""


class AiokafkaTransport(Questions):
    """A member of a consumer group through aiokafka 0.14; implements `aioshard.ports.Transport`.

    One instance is one life of the client: after `close`, or after `poll` raised, build a new one. With manual
    assignment (`assign`), it never joins the group: it takes its partitions at the start and keeps them until closed.

    Invariants:
        * `poll` returns nothing of a partition before the engine has seeked and resumed it, nor while
          the group rebalances.
        * The client never chooses or resets a position, never commits on its own, and never leaves
          the group because nobody polls.
    """

    def __init__(self, settings: "Settings", group_id: str) -> None:
        """Check the options; connects to nothing yet.

        Raises:
            SettingsError: TLS and SASL settings cannot work.
        """
        self._settings = settings
        self._group_id = group_id
        self._options = consumer_options(settings, group_id)
        self._topics = SubscribedTopics(settings.metadata_max_age)
        self._instance = InstanceWatch(settings, group_id)
        self._internals: Internals | None = None
        self._intake: Intake | None = None
        self._closed = False
        """Whether `close` was called: from then on, `poll` returns no records."""
        self._left = False
        """Whether all requests must stop, including the commits of a final drain."""
        self._membership = NOT_A_MEMBER
        self._by_hand: Membership | None = None
        """The membership under manual assignment."""
        self._listener: GroupListener | None = None
        self._listener_failure: Exception | None = None
        self._handed_back = asyncio.Event()
        self._handed_back.set()
        self._losing: asyncio.Task[None] | None = None
        self._waiting = Waiting()
        self._backlog: Backlog | None = None
        """The remaining records per partition, if the assignor needs them."""

    @property
    def trouble(self) -> str | None:
        """See `Transport.trouble`."""
        internals = self._internals
        if internals is None or self._closed:
            return None
        if not internals.connected:
            return f"no connection to a broker of {self._settings.bootstrap_servers} is open; the client goes on trying"
        if not internals.coordinator_known:
            return f"no broker coordinates group {self._group_id!r} now: nothing can be committed"
        return self._topics.trouble

    # Life -----------------------------------------------------------------------------

    async def start(self, topics: Collection[str], pattern: str | None, listener: GroupListener) -> None:
        """See `Transport.start`; takes at most three and a half times `CONNECT_TIMEOUT`, which is 3 s.

        Topics and a pattern may be combined; the pattern must match a whole topic name.
        """
        self._listener = listener
        internals = await self.connect(topics)
        if self._settings.assign is not None:
            await self._take_by_hand(internals)
            return
        internals.watch_session(self._settings.session_timeout, self._lose)
        rebalances = Rebalances(self._hand_back, self._take_over)
        if pattern is None:
            internals.consumer.subscribe(topics=tuple(self._topics.names), listener=rebalances)
        else:
            internals.consumer.subscribe(pattern=one_pattern(self._topics.names, pattern), listener=rebalances)
        self._watch(internals)

    async def _take_by_hand(self, internals: Internals) -> None:
        """Take the partitions in `assign`: the only assignment in this life of the client."""
        try:
            internals.consumer.assign(await partitions_by_hand(self._settings, self._group_id, self.partitions))
        except BaseException:
            await self.close()
            raise
        self._by_hand = by_hand()
        self._take_over()
        self._watch(internals)

    def _watch(self, internals: Internals) -> None:
        for task in internals.background_tasks().values():
            task.add_done_callback(self._waiting.look_again)

    async def connect(self, topics: Collection[str]) -> Internals:
        """Connect and look up *topics* without joining the group: enough for all queries. See `start`."""
        if self._internals is not None or self._closed:
            raise StateError("this transport was started before: build a new one for each life of the client")
        self._topics.names = frozenset(topics)
        # The client would try the servers in turn, with its full time-out for each.
        server = await find_broker(self._settings, self._options)
        try:
            internals = await self._connect(server)
        except BaseException as error:
            await self.close()
            if isinstance(error, ValueError | TypeError):
                raise SettingsError(f"the Kafka client refused an option: {reason(error)}") from error
            raise
        self._topics.watch(internals.client.cluster)
        return internals

    async def _connect(self, server: str) -> Internals:
        consumer = AIOKafkaConsumer(**(self._options | {"bootstrap_servers": server}))
        # If a member's coordinator hangs, it must find another one long before its session expires.
        patience = max(self._settings.session_timeout / 5, _LEAST_PATIENCE)
        internals = self._internals = Internals(consumer, self._group_id, patience)
        read_committed = self._settings.isolation_level == "read_committed"
        self._intake = Intake(
            internals,
            self._group_id,
            read_committed=read_committed,
            may_wait_longer="fetch_max_wait" not in self._settings.model_fields_set,
        )
        if self._settings.assignor == "lag":
            self._backlog = Backlog(internals, self._intake, self._settings.auto_offset_reset)
        client = internals.client
        answered = False
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await internals.consumer.start()
                if self._topics.names:
                    client.set_topics(self._topics.names)
                answered = await client.force_metadata_update()
        except (kafka.KafkaError, TimeoutError) as error:
            logger.debug("the first look-up of topics failed: %s", reason(error))
        if not answered:
            raise await why_unreachable(self._settings, self._options, advertised_by(client.cluster))
        denied = sorted(self._topics.names & client.cluster.unauthorized_topics)
        if denied:
            raise group_error(kafka.TopicAuthorizationFailedError(denied), self._group_id)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await internals.look_up_group()
        except kafka.GroupAuthorizationFailedError as error:
            raise group_error(error, self._group_id) from error
        except (kafka.KafkaError, TimeoutError) as error:
            logger.debug("the first look-up of the group failed, which may pass: %s", reason(error))
        return internals

    async def close(self) -> None:
        """See `Transport.close`. Waits for a drain in progress, and for the answer to our LeaveGroup request.

        If a cancellation cuts this short, all tasks and connections still end.
        """
        if self._closed:
            return
        self._closed = True
        self._waiting.look_again()
        internals = self._internals
        if internals is None or self._intake is None:
            return
        try:
            # A drain in progress ends at its own deadline; cutting it short would lose its commit.
            await self._handed_back.wait()
            self._left = True
            await internals.leave()
        except Exception as error:  # noqa: BLE001 - the group notices by itself after the session time-out
            logger.info("group %r was not told that we leave: %s", self._group_id, reason(error))
        finally:
            self._left = True
            self._forget_assignment(self._intake)
            # A deadline may have ended the code above, and would also end every await that follows.
            with anyio.CancelScope(shield=True):
                await internals.tear_down()

    def _running(self) -> tuple[Internals, Intake]:
        if self._internals is None or self._intake is None or self._left:
            raise ClientLostError(f"the Kafka client {'is closed' if self._closed else 'was not started'}")
        return self._internals, self._intake

    # Records --------------------------------------------------------------------------

    async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[FetchedBatch | Fault | Oversized]:
        """See `Transport.poll`. Does not suspend if records are ready.

        Allowances are those at the start of the poll: records taken from one partition count against the others. An
        `Oversized` record ends a poll only once; later polls repeat it when they end for another reason, including a
        time-out or `wake`.
        """
        try:
            found = await self._waiting.until_new(functools.partial(self._look, allowance), timeout)
        except kafka.KafkaError as error:
            if self._internals is not None:
                self._internals.take_pending_error()
            raise group_error(error, self._group_id) from error
        return found.new + found.repeated

    def _look(self, allowance: AllowanceOf) -> tuple[Internals, Found]:
        internals, intake = self._running()
        self._raise_what_is_lost(internals)
        return internals, intake.take(allowance)

    def wake(self) -> None:
        """See `Transport.wake`."""
        self._waiting.wake()

    def _raise_what_is_lost(self, internals: Internals) -> None:
        if self._closed:
            raise ClientLostError("the Kafka client is closed")
        if self._instance.taken is not None:
            raise self._instance.taken
        if (failure := self._listener_failure) is not None:
            raise ClientLostError(
                f"the engine failed while partitions were handed over: {reason(failure)}"
            ) from failure
        raise_ended_task(internals)
        pending = internals.take_pending_error()
        if pending is not None:
            raise group_error(pending, self._group_id) from pending

    # Positions ------------------------------------------------------------------------

    def position(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.position`."""
        return None if self._intake is None else self._intake.position(topic_partition)

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.end_offset`."""
        return None if self._intake is None else self._intake.end_offset(topic_partition)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.pause`."""
        if self._intake is not None:
            self._intake.pause(partitions)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.resume`.

        Raises:
            StateError: A partition was not seeked since it was assigned, so it has no position.
        """
        if self._intake is not None:
            self._intake.resume(partitions)
            self._waiting.look_again()

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """See `Transport.seek`."""
        if self._intake is not None:
            self._intake.seek(topic_partition, offset)

    def adjust_prefetch(self, partitions: int, max_bytes: int) -> None:
        """See `Transport.adjust_prefetch`; at least 16 KiB and at most 1 MiB per partition."""
        if self._internals is not None:
            self._internals.bound_prefetch(partition_share(partitions, max_bytes))

    # The group ------------------------------------------------------------------------

    def membership(self) -> Membership:
        """See `Transport.membership`. A generation counts once the engine has received its partitions."""
        internals = self._internals
        if internals is None or (internals.membership() != self._membership and self._by_hand is None):
            return NOT_A_MEMBER
        return self._membership

    async def commit(self, offsets: Mapping[TopicPartition, Committed], membership: Membership) -> None:
        """See `Transport.commit`. Has no deadline; you can cancel it safely."""
        if not offsets:
            return
        internals, intake = self._running()
        if self._by_hand is not None:
            refuse_what_is_not_ours(self._group_id, offsets.keys(), intake, membership, self.membership())
            await commit_by_hand(internals, offsets)
            return
        try:
            await internals.find_coordinator()
            # No await between this check and building the request.
            refuse_what_is_not_ours(self._group_id, offsets.keys(), intake, membership, self.membership())
            await internals.commit_once(offsets)
        except kafka.KafkaError as error:
            raise commit_error(error, offsets.keys(), self._group_id) from error
        if self._backlog is not None:
            self._backlog.committed(offsets)

    # Rebalances -------------------------------------------------------------------------

    async def _hand_back(self) -> None:
        """Tell the engine that its partitions are being revoked; the group waits."""
        internals, intake, listener = self._internals, self._intake, self._listener
        if internals is None or intake is None or listener is None or self._closed:
            return
        owned, lost = intake.partitions, self._instance.is_lost(internals.membership())
        self._handed_back.clear()
        try:
            if owned:
                await listener.revoked(owned, lost=lost)
            if self._backlog is not None:
                internals.tell_backlogs(await self._backlog.left())
        except Exception as error:  # noqa: BLE001 - aiokafka would swallow it; the next poll raises it
            self._listener_failure = error
        finally:
            self._handed_back.set()
            self._forget_assignment(intake)
            self._waiting.look_again()
        if self._instance.taken is not None:
            await asyncio.Event().wait()  # joining again would take the other process's place once more

    def _lose(self) -> None:
        """Report immediately to the engine that another member may own our partitions by now."""
        intake, listener = self._intake, self._listener
        if intake is None or listener is None or self._closed or not intake.partitions:
            return
        losing = self._tell_lost(listener, intake.partitions)
        self._forget_assignment(intake)
        self._losing = asyncio.create_task(losing, name=f"lost by {self._group_id}")

    async def _tell_lost(self, listener: GroupListener, partitions: Collection[TopicPartition]) -> None:
        try:
            await listener.revoked(partitions, lost=True)
        except Exception as error:  # noqa: BLE001 - nobody awaits this; the next poll raises it
            self._listener_failure = error
        finally:
            self._waiting.look_again()

    def _take_over(self) -> None:
        """Pass an assignment to the engine. Called synchronously, and done before any await."""
        internals, intake, listener = self._internals, self._intake, self._listener
        if internals is None or intake is None or listener is None or self._closed:
            return
        assignment = internals.assignment()
        if assignment is None:
            return
        intake.begin(assignment)
        if self._backlog is not None:
            self._backlog.begin()
        self._membership = self._by_hand or internals.membership()
        if self._by_hand is None:
            self._instance.joined(self._membership)
            internals.joined(self._membership.generation)
        try:
            listener.assigned(intake.partitions, self._membership)
        except Exception as error:  # noqa: BLE001 - aiokafka would swallow it; the next poll raises it
            self._listener_failure = error
            self._waiting.look_again()

    def _forget_assignment(self, intake: Intake) -> None:
        intake.end()
        if self._internals is not None:
            self._internals.end_session()
        self._membership = NOT_A_MEMBER
