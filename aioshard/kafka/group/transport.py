"""A member of a consumer group, of either protocol, as the engine sees it."""

import asyncio
import logging
import math
import re
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any, Final

import anyio

from aioshard.core.text import message_of
from aioshard.errors import (
    ClientLostError,
    CommitRefusedError,
    InstanceIdTakenError,
    SessionTimeoutRefusedError,
    StateError,
    TopicsRefusedError,
    TransportError,
)
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.errors import (
    GROUP_CHANGED,
    GROUP_DENIED,
    TOPIC_DENIED,
    UNKNOWN_TOPIC,
    Cause,
    commit_error,
    group_error,
    named,
    topic_refused,
)
from aioshard.kafka.fetcher import Fetcher
from aioshard.kafka.group.assignors import GroupAssignor
from aioshard.kafka.group.classic import ClassicEvent, Elected
from aioshard.kafka.group.classic_driver import ClassicDriver
from aioshard.kafka.group.consumer_driver import ConsumerDriver
from aioshard.kafka.group.drivers import classic_driver, consumer_driver, first_choice
from aioshard.kafka.group.errors import not_ours, overtaken, still_joining, text_of, unnamed
from aioshard.kafka.group.leader import Leader
from aioshard.kafka.group.member import (
    Assigned,
    Code,
    Ended,
    Lost,
    Ownership,
    Recovered,
    Refused,
    Revoked,
    Troubled,
)
from aioshard.kafka.group.subscription import Subscription
from aioshard.kafka.groupless import manual_membership
from aioshard.kafka.groups import GroupMember
from aioshard.kafka.lifetime import Lifetime
from aioshard.kafka.manual_assignment import assigned_manually, has_members
from aioshard.kafka.offsets import NO_MEMBER, READ_COMMITTED, GroupOffsets, Member
from aioshard.kafka.queries import Queries
from aioshard.kafka.transactions.identity import TransactionalId
from aioshard.kafka.transactions.transactions import Transactions
from aioshard.kafka.wire.cluster import CoordinatorKind
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.pool import CONNECT_TIMEOUT
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.kafka.wire.start import new_cluster, reach
from aioshard.ports import (
    NOT_A_MEMBER,
    AllowanceOf,
    ChosenProtocol,
    Committed,
    Fault,
    FetchedBatch,
    GroupListener,
    LogRange,
    Membership,
    Message,
    Oversized,
    TransactionCounts,
)
from aioshard.records import PartitionInfo, TopicPartition
from aioshard.settings import Settings

logger = logging.getLogger("aioshard.kafka.group")

_REBALANCING: Final = frozenset({"preparingrebalance", "assigning", "reconciling"})
"""States of a group that does not answer joins yet, or in which members have partitions that others will get."""
_LEAST_PATIENCE: Final = 2.0
"""Minimum seconds to wait for a response that brokers send without delay, even if the session is short."""
_OTHERS_PATIENCE: Final = 60.0
"""Seconds for which a classic member without partitions waits while the group moves some: a member of the consumer
protocol may have died, which has the brokers' session, 45 s by default."""
_STATE_INTERVAL: Final = 0.5
"""Seconds between two looks at the state of the group while others have our partitions."""
_UNNAMED_PATIENCE: Final = 10.0
"""Seconds in which all brokers know a new topic, and the group knows that one was deleted."""
_LEAVE_TIMEOUT: Final = 3.0
"""Seconds for the coordinator to answer a leave."""
_ABOUT_ONE_TOPIC: Final = frozenset({UNKNOWN_TOPIC, TOPIC_DENIED})
"""Error codes with which a coordinator refuses the offsets of one topic, and stores those of the others."""
_OVERTAKEN: Final = frozenset({Code.ILLEGAL_GENERATION, Code.REBALANCE_IN_PROGRESS, Code.STALE_MEMBER_EPOCH})
"""Error codes of commits that say only that the group is in another generation or epoch by now."""


class MemberTransport:
    """A member of a group, and the whole client of a manual assignment. A thread sends its heartbeats.

    One instance is one life of the client: after `close`, or after `poll` raised, build a new one. With manual
    assignment (`assign`), it never joins the group: it takes its partitions at the start and keeps them until closed.

    The drivers hold the differences between the protocols; see `GroupDriver`. A member of the classic protocol may lead
    the group; see `Leader`.

    The brokers raise the epoch or generation whenever the group changes, also if our partitions stay: commits always
    carry the newest one. The engine knows a membership by the epoch of its latest assignment.

    Invariants:
        * `poll` returns nothing of a partition before the engine has seeked and resumed it, nor while the engine
          releases it.
        * The client never chooses or resets a position, never commits on its own, and never leaves
          the group because nobody polls.
        * Changes of the assignment reach the engine one after another, in the order in which the group made them. A
          loss does not wait for its turn.
    """

    def __init__(self, settings: Settings, group_id: str, transactional: TransactionalId | None = None) -> None:
        """Check the options; connects to nothing yet.

        Args:
            settings: The settings of the app.
            group_id: The group.
            transactional: The transactional id, the same for each client of a process, if commits are transactions.

        Raises:
            SettingsError: TLS and SASL settings cannot work.
        """
        self._settings = settings
        self._group_id = group_id
        self._lifetime = Lifetime()
        self._cluster = new_cluster(settings)
        # A coordinator may hang: a member must find another one before its session ends.
        self._offsets = GroupOffsets(self._cluster, group_id, max(settings.session_timeout / 5, _LEAST_PATIENCE))
        self._queries = Queries(self._cluster, self._offsets, settings, group_id, self._lifetime)
        self._fetcher = Fetcher(
            self._cluster,
            read_committed=self._queries.isolation == READ_COMMITTED,
            max_bytes=settings.max_buffered_bytes // 2,
            max_wait=settings.fetch_max_wait,
            min_bytes=settings.client_options.get("fetch_min_bytes", 1),
            may_wait_longer="fetch_max_wait" not in settings.model_fields_set,
            rack=settings.client_options.get("client_rack") or "",
        )
        self._subscription = Subscription(
            group_id, self._cluster, self._queries, self._fetcher, metadata_max_age=settings.metadata_max_age
        )
        self._transactions: Transactions | None = None
        """None unless commits are transactions."""
        if transactional is not None:
            self._transactions = Transactions(
                self._cluster, transactional, self._offsets, group_id, timeout=settings.transaction_timeout
            )
        self._tasks: list[asyncio.Task[None]] = []
        self._woken = False

        self._listener: GroupListener | None = None
        self._listener_failure: Exception | None = None
        """The error that the engine has raised during a rebalance."""
        self._membership = NOT_A_MEMBER
        """That of the latest assignment passed to the engine."""
        self._life = 0
        """The life of the member in which `_membership` was assigned."""
        self._released = asyncio.Event()
        """Set unless the engine is handing partitions over."""
        self._released.set()

        self._driver: ClassicDriver | ConsumerDriver | None = None
        """None with manual assignment, and before the start."""
        self._protocol: ChosenProtocol | None = None
        """That of the driver."""
        self._leader: Leader | None = None
        """None unless the protocol is the classic one."""
        self._changes: asyncio.Queue[Assigned | Revoked | Refused] = asyncio.Queue()
        """Changes of which the engine has not heard yet; a refusal of the protocol means to try the other one."""
        self._news = asyncio.Event()
        """Set when a change arrives."""
        self._joining_with: Sequence[GroupMember] = ()
        """The other members of the group, if our join has not been answered for a while."""
        self._troubled: Troubled | None = None
        """The latest trouble with the group; None once it has answered again."""
        self._failure: TransportError | None = None
        """The error that ends this life of the client; `poll` raises it."""

    # Reports --------------------------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """See `Transport.trouble`."""
        return self._connection_trouble or self._group_trouble or self._unnamed_trouble

    @property
    def _connection_trouble(self) -> str | None:
        """The reason why nothing can be read or committed now, as a sentence; None if a broker is there for both."""
        if not self._lifetime.is_open:
            return None
        if not self._cluster.is_connected:
            return f"no connection to a broker of {self._settings.bootstrap_servers} is open; the client keeps trying"
        if self._cluster.known_coordinator(CoordinatorKind.GROUP, self._group_id) is None:
            return f"group {self._group_id!r} has no coordinator now: nothing can be committed"
        return None

    @property
    def _group_trouble(self) -> str | None:
        """The reason why our heartbeats fail now, as a sentence; None if they are answered."""
        troubled = self._troubled
        if troubled is None or self._lifetime.is_closed:
            return None
        if troubled.code is None:
            return f"group {self._group_id!r} does not answer us now: {troubled.message}"
        return f"group {self._group_id!r} refuses our requests now: {text_of(troubled)}"

    @property
    def _unnamed_trouble(self) -> str | None:
        """Which assigned topics cannot be read because no broker names them, as a sentence; None without any."""
        driver = self._driver
        if driver is None or self._lifetime.is_closed:
            return None
        latest = time.time() - _UNNAMED_PATIENCE
        topic_ids = {topic_id: since for topic_id, since in driver.unnamed.items() if since <= latest}
        return unnamed(self._group_id, topic_ids) if topic_ids else None

    @property
    def transaction_counts(self) -> TransactionCounts:
        """See `Transport.transaction_counts`."""
        return TransactionCounts() if self._transactions is None else self._transactions.counts

    @property
    def hang(self) -> str | None:
        """See `Transport.hang`."""
        return None if self._transactions is None else self._transactions.hang

    @property
    def missing_topics(self) -> Sequence[str]:
        """See `Transport.missing_topics`."""
        if not self._lifetime.is_open:
            return ()
        metadata = self._cluster.metadata
        return sorted(self._subscription.topics & (metadata.missing | metadata.denied))

    @property
    def slow_join(self) -> str | None:
        """See `Transport.slow_join`."""
        if not self._joining_with or self._lifetime.is_closed or self.membership() != NOT_A_MEMBER:
            return None
        return still_joining(self._group_id, self._joining_with, self._member().session_text)

    @property
    def group_protocol(self) -> ChosenProtocol | None:
        """See `Transport.group_protocol`."""
        return self._protocol

    @property
    def last_heartbeat(self) -> float | None:
        """See `Transport.last_heartbeat`."""
        return None if self._driver is None else self._driver.last_heartbeat

    @property
    def inherits_within(self) -> float:
        """See `Transport.inherits_within`."""
        return 0.0 if self._driver is None else self._driver.inherits_within

    @property
    def owned_for(self) -> float:
        """See `Transport.owned_for`. A later life owns nothing of which the engine has heard."""
        driver = self._driver
        if driver is None:
            return math.inf
        own = driver.ownership
        return own.alive_until - driver.clock() if own.life == self._life else 0.0

    def membership(self) -> Membership:
        """See `Transport.membership`. It ends with our time, also before the engine has heard of that."""
        return self._membership if self.owned_for > 0.0 else NOT_A_MEMBER

    # Lifecycle ------------------------------------------------------------------------

    async def start(
        self, topics: Collection[str], pattern: str | None, listener: GroupListener, *, needs_all: bool = True
    ) -> None:
        """See `Transport.start`; connecting takes at most three and a half times `CONNECT_TIMEOUT`, which is 3 s.

        Topics and a pattern may be combined; the pattern must match a whole topic name.
        """
        if self._listener is not None or self._lifetime.is_closed:
            raise StateError("this transport was started before: build a new one for each life of the client")
        self._listener = listener
        self._subscription.topics = frozenset(topics)
        self._subscription.pattern = None if pattern is None else re.compile(pattern)
        try:
            await reach(self._cluster, self._settings, self._subscription.topics)
            self._lifetime.is_started = True
            self._cluster.when_lost(self._check_again)
            await self._check_permissions(needs_all=needs_all)
            self._lifetime.check()
            if self._settings.assign is None:
                await self._join()
            else:
                await self._assign_manually(listener)
        except BaseException:
            if self._lifetime.is_closed:  # without what has begun since
                with anyio.CancelScope(shield=True):
                    await self._tear_down()
            else:
                await self.close()
            raise

    async def _check_permissions(self, *, needs_all: bool) -> None:
        topics = self._subscription.topics
        denied = topics & self._cluster.metadata.denied
        has_others = self._subscription.pattern is not None or denied != topics
        if denied and (needs_all or not has_others):
            raise self._group_error(Cause(TOPIC_DENIED, "", topics=tuple(sorted(denied))))
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await self._cluster.find_coordinator(CoordinatorKind.GROUP, self._group_id)
        except (WireError, TimeoutError) as error:
            if isinstance(error, WireError) and error.code == GROUP_DENIED:
                raise self._group_error(error.cause) from error
            logger.debug("the first look-up of the group failed, which may be transient: %s", error)

    async def _assign_manually(self, listener: GroupListener) -> None:
        assigned = await assigned_manually(self._settings, self._group_id, self._queries)
        self._lifetime.check()
        self._fetcher.start()
        self._fetcher.add(assigned)
        self._membership = manual_membership()
        listener.assigned(assigned, self._membership)

    async def _join(self) -> None:
        await self._subscription.look_up()
        self._lifetime.check()
        self._fetcher.start()
        self._begin(self._pass_on_changes(), "assignments")
        self._begin(self._subscription.run(), "topics")
        self._become_member(first_choice(self._settings))

    def _become_member(self, protocol: ChosenProtocol) -> None:
        logger.info("group %r: group_protocol=%r, because %s", self._group_id, *protocol)
        self._protocol = protocol
        self._life = 0
        self._driver = self._consumer_driver() if protocol.name == "consumer" else self._classic_driver()
        self._subscription.driver = self._driver
        self._driver.start()

    def _consumer_driver(self) -> ConsumerDriver:
        return consumer_driver(self._settings, self._group_id, self._subscription.known, self._cluster, self._on_event)

    def _classic_driver(self) -> ClassicDriver:
        settings = self._settings
        assignor = GroupAssignor(
            settings.assignor, delay=settings.reassignment_delay, instance_id=settings.group_instance_id
        )
        driver = classic_driver(
            settings, self._group_id, self._subscription.known, self._cluster, self._on_event, assignor=assignor
        )
        self._leader = Leader(
            driver,
            assignor,
            group_id=self._group_id,
            cluster=self._cluster,
            offsets=self._offsets,
            fetcher=self._fetcher,
            settings=settings,
            isolation=self._queries.isolation,
        )
        self._begin(self._leader.run(), "leadership")
        self._begin(self._watch_joins(), "joins")
        return driver

    async def _fall_back(self, refused: Refused) -> None:
        """Join with the classic protocol, because the brokers or the group do not accept the other one."""
        await self._member().close(_LEAVE_TIMEOUT, "the group has another protocol")
        if self._lifetime.is_closed:
            return
        self._troubled = None
        is_unknown = refused.code == Code.UNSUPPORTED_VERSION
        what = "the brokers do not have the other one" if is_unknown else "the group does not accept the other one"
        self._become_member(ChosenProtocol("classic", f"{what} ({text_of(refused)})"))

    def _begin(self, work: Coroutine[Any, Any, None], purpose: str) -> None:
        """Begin a task without which the client does not work."""
        task = asyncio.create_task(work, name=f"{purpose} of {self._group_id}")
        self._tasks.append(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Let `poll` raise that a task has ended, without which nothing works."""
        if self._lifetime.is_closed:
            return
        error = None if task.cancelled() else task.exception()
        if self._failure is None:
            self._failure = ClientLostError(f"the task for {task.get_name()} has ended ({error!r})")
        self._check_again()

    def subscribe(self, topics: Collection[str], pattern: str | None) -> None:  # noqa: ARG002 - that of the start
        """See `Transport.subscribe`."""
        self._lifetime.check()
        self._member()
        self._subscription.replace(topics)

    def _member(self) -> ClassicDriver | ConsumerDriver:
        if self._driver is None:
            raise ClientLostError("the Kafka client is not a member of the group")
        return self._driver

    async def close(self) -> None:
        """See `Transport.close`. Waits for a drain in progress, and until we have left the group.

        If a cancellation cuts this short, all tasks and connections still end.
        """
        if self._lifetime.is_closed:
            return
        self._lifetime.is_closed = True
        self._check_again()
        try:
            # A drain in progress ends at its own deadline; cutting it short would lose its commit.
            await self._released.wait()
            self._lifetime.has_left = True
            if self._driver is not None:
                await self._driver.close(_LEAVE_TIMEOUT, "the app closes its client")
        except Exception as error:  # noqa: BLE001 - the group notices by itself after the session timeout
            logger.info("leaving group %r failed: %s", self._group_id, error)
        finally:
            self._lifetime.has_left = True
            self._remove(self._fetcher.partitions)
            self._membership = NOT_A_MEMBER
            # A deadline may have ended the code above, and would also end every await that follows.
            with anyio.CancelScope(shield=True):
                await self._tear_down()

    async def _tear_down(self) -> None:
        """End all tasks and connections."""
        try:
            if self._transactions is not None:
                await self._transactions.close()
            if self._driver is not None and self._driver.is_alive:
                await self._driver.close(0.0, "the app closes its client")
        finally:
            await self._fetcher.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._cluster.close()

    # Records and positions ------------------------------------------------------------

    async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[FetchedBatch | Fault | Oversized]:
        """See `Transport.poll`. Does not suspend if records are ready.

        Allowances are those at the start of the poll: records taken from one partition count against the others. An
        `Oversized` record ends a poll only once; later polls repeat it when they end for another reason, including a
        timeout or `wake`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        self._woken = False
        try:
            while True:
                self._raise_loss()
                result = self._fetcher.take(allowance)
                remaining = deadline - loop.time()
                if result.new or self._woken or remaining <= 0:
                    return result.new + result.repeated
                with anyio.move_on_after(remaining):
                    await self._fetcher.readable.wait()
        except SessionTimeoutRefusedError as error:
            raise SessionTimeoutRefusedError(error.session_timeout, await self._session_limits()) from error

    async def _session_limits(self) -> tuple[float, float] | None:
        """Return the least and the most seconds that the brokers accept as a session timeout; None if unknown."""
        try:
            async with (
                asyncio.timeout(2 * CONNECT_TIMEOUT),
                KafkaAdmin(self._settings, patience=CONNECT_TIMEOUT) as admin,
            ):
                return await admin.session_limits(self._group_id)
        except (TransportError, TimeoutError) as error:
            logger.debug("the limits of session_timeout are unknown: %s", error)
            return None

    def _raise_loss(self) -> None:
        """Raise if this client can no longer be used, or the group refuses us."""
        self._lifetime.check()
        if self._lifetime.is_closed:
            raise ClientLostError("the Kafka client is closed")
        failure = self._failure
        if failure is None and self._transactions is not None:
            failure = self._transactions.failure
        if failure is not None:
            raise failure
        if self._listener_failure is not None:
            raise ClientLostError(
                f"the engine failed during a rebalance: {_reason(self._listener_failure)}"
            ) from self._listener_failure
        broken = self._fetcher.failure or self._cluster.failure
        if broken is not None:
            why = f"the Kafka client failed ({_reason(broken)}); a new client is needed"
            raise ClientLostError(why) from broken

    def wake(self) -> None:
        """See `Transport.wake`."""
        self._woken = True
        self._check_again()

    def _check_again(self, _ended: object = None) -> None:
        """Make a waiting poll look again; also usable as a task's callback."""
        self._fetcher.readable.set()

    def position(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.position`."""
        return self._fetcher.position(topic_partition)

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.end_offset`."""
        return self._fetcher.end_offset(topic_partition)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.pause`."""
        self._fetcher.pause(partitions)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.resume`.

        Raises:
            StateError: A partition was not seeked since it was assigned, so it has no position.
        """
        self._fetcher.resume(partitions)
        self._check_again()

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """See `Transport.seek`. The leader epoch of the record before it travels with the offset, if it is known."""
        epoch = self._queries.epoch_of(topic_partition, offset)
        if epoch is None:
            epoch = self._fetcher.epoch_at(topic_partition, offset)
        self._fetcher.seek(topic_partition, offset, epoch)
        self._check_again()

    def _remove(self, partitions: Collection[TopicPartition]) -> None:
        """Stop reading partitions; one that comes back continues at its position, which may be beyond the commit."""
        for partition in partitions:
            position = self._fetcher.position(partition)
            if position is not None:
                self._queries.remember(partition, position, self._fetcher.epoch_at(partition, position))
        self._fetcher.remove(partitions)

    # Events of the group --------------------------------------------------------------

    def _on_event(self, event: ClassicEvent) -> None:
        """Accept an event of the thread; once we are closing, as long as the engine drains: it must hear of a loss."""
        if isinstance(event, Elected) and self._leader is not None:
            self._leader.elect(event)  # the others wait for it
        if self._lifetime.is_closed and self._released.is_set():
            return
        match event:
            case Assigned() | Revoked():
                self._changes.put_nowait(event)
                self._news.set()
            case Lost():
                self._lose(event)
            case Troubled():
                self._troubled = event
                if event.code == TOPIC_DENIED:
                    self._subscription.changed.set()  # the group hears nothing of us until we leave that topic out
            case Recovered():
                self._troubled = None
            case Refused() if self._settings.group_protocol == "auto" and self._member().protocol == "consumer":
                self._changes.put_nowait(event)
            case Refused() | Ended():
                self._fail(event)

    def _fail(self, event: Refused | Ended) -> None:
        """Let `poll` raise that the group does not accept us; the first cause counts."""
        if self._failure is None:
            self._failure = self._failure_of(event)
        self._check_again()

    def _failure_of(self, event: Refused | Ended) -> TransportError:
        why = text_of(event)
        # 1. Another process is the static member; after more than a session it is alive.
        if event.code in (Code.FENCED_INSTANCE_ID, Code.UNRELEASED_INSTANCE_ID):
            instance = str(self._settings.group_instance_id)
            persists = event.code == Code.UNRELEASED_INSTANCE_ID
            return InstanceIdTakenError(
                self._group_id, instance, self._member().session, f" ({why})", persists=persists
            )
        # 2. The brokers, or this group, have only the classic protocol.
        is_other_protocol = isinstance(event, Refused) or event.code == Code.UNSUPPORTED_VERSION
        if is_other_protocol and self._member().protocol == "consumer":
            return TransportError(
                f"group {self._group_id!r} accepts no members of group_protocol='consumer' ({why}): use "
                "group_protocol='classic', or brokers from Kafka 4.0 that enable it",
                retriable=event.code != Code.UNSUPPORTED_VERSION,
            )
        # 3. Anything else.
        return self._group_error(Cause(event.code, why, topics=tuple(sorted(self._subscription.topics))))

    def _group_error(self, cause: Cause) -> TransportError:
        return group_error(cause, self._group_id, self._settings.session_timeout)

    def _lose(self, event: Lost) -> None:
        """Report to the engine that other members may own partitions by now."""
        listener = self._listener
        if listener is None:
            return
        logger.warning("group %r: partitions are lost: %s (%s)", self._group_id, named(event.partitions), event.reason)
        self._membership = NOT_A_MEMBER
        lost = [partition for partition in event.partitions if partition in self._fetcher]
        try:
            listener.lost(lost)
        except Exception as error:  # noqa: BLE001 - called from the event loop; the next poll raises it
            self._listener_failure = error
        finally:
            self._remove(lost)
            self._check_again()

    async def _pass_on_changes(self) -> None:
        """Pass changes of the assignment on to the engine until cancelled."""
        while True:
            change = await self._changes.get()
            if isinstance(change, Refused):
                await self._fall_back(change)
                continue
            listener = self._listener
            if listener is None or not self._lasts(change):
                continue
            if isinstance(change, Assigned) and not change.ownership.partitions and await self._others_release():
                continue  # the group has other news for us
            if not self._lasts(change):
                continue
            if isinstance(change, Assigned):
                own = change.ownership
                self._life = own.life
                self._membership = Membership(own.member_id, own.epoch)
                self._fetcher.add(change.partitions)
                listener.assigned(self._fetcher.partitions, self._membership)
            else:
                await self._release(change, listener)

    def _lasts(self, change: Assigned | Revoked) -> bool:
        """Whether a change still counts: the membership has not been lost since."""
        return not self._lifetime.is_closed and change.life == self._member().ownership.life

    async def _others_release(self) -> bool:
        """Wait while the group moves partitions and has none for us; return whether it has news for us now.

        An empty assignment means only then that there is nothing to do: what is meant for us may still be with a
        member that has to release it, or has died. It takes at most a session and a heartbeat: a dead member counts
        until then, and when it was removed, the group rebalances without others.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + (self.inherits_within or _OTHERS_PATIENCE)
        while self._changes.empty() and loop.time() < give_up:
            others = await self._look_up_rebalance()
            if others is None:
                break
            self._joining_with = others
            self._news.clear()
            with anyio.move_on_after(_STATE_INTERVAL):
                await self._news.wait()
        self._joining_with = ()
        return not self._changes.empty()

    async def _release(self, change: Revoked, listener: GroupListener) -> None:
        """Let the engine release partitions, and then the group."""
        driver = self._member()
        await self._drain(listener, change.partitions)
        await self._settle_transactions()
        if not self._lasts(change) or self._listener_failure is not None:
            return
        self._remove(change.partitions)
        if not driver.is_incremental and not self._fetcher.partitions:
            self._membership = NOT_A_MEMBER  # until the group has assigned everything anew
            driver.released(change.life, change.partitions)
            return
        driver.released(change.life, change.partitions)
        # 1. The engine continues with the others.
        if self._fetcher.partitions:
            return
        # 2. The group has other news for us, or the membership has ended.
        if await self._others_release() or not self._lasts(change):
            return
        # 3. Nothing is left, and nothing is meant for us.
        listener.assigned((), self._membership)

    async def _drain(self, listener: GroupListener, partitions: Collection[TopicPartition]) -> None:
        """Let the engine release partitions."""
        self._released.clear()
        self._fetcher.pause(partitions)
        try:
            await listener.revoked(partitions)
        except Exception as error:  # noqa: BLE001 - the next poll raises it
            self._listener_failure = error
        finally:
            self._released.set()

    async def _settle_transactions(self) -> None:
        """Wait until no transaction may end any more: not after we have released its partitions."""
        if self._transactions is None:
            return
        try:
            async with asyncio.timeout(self._settings.commit_timeout):
                await self._transactions.settle()
        except (TransportError, TimeoutError) as error:
            # The next owner waits for the end of the transaction, because it reads stable offsets.
            logger.info("group %r: partitions are released during a transaction: %s", self._group_id, error)

    async def _watch_joins(self) -> None:
        """Look up the other members of the group whenever a join takes long, until cancelled."""
        was_outside = True  # the first join begins now
        while True:
            await asyncio.sleep(self._settings.heartbeat_interval)  # members that answer rejoin within it
            is_outside = self.membership() == NOT_A_MEMBER
            others = await self._look_up_rebalance() if is_outside and was_outside else None
            self._joining_with = others or ()
            was_outside = is_outside

    async def _look_up_rebalance(self) -> Sequence[GroupMember] | None:
        """Return the other members of the group if it is rebalancing; None if it is not, or the brokers do not say."""
        try:
            own_id = self._member().ownership.member_id
            async with asyncio.timeout(CONNECT_TIMEOUT), KafkaAdmin(self._settings) as admin:
                group = await admin.group(self._group_id)
        except (TransportError, TimeoutError) as error:
            logger.debug("the members of group %r are unknown: %s", self._group_id, error)
            return None
        if group.state not in _REBALANCING:
            return None
        return [member for member in group.members if member.member_id != own_id]

    # Commits --------------------------------------------------------------------------

    async def commit(
        self,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: Sequence[Message] | None = None,
    ) -> None:
        """See `Transport.commit`. Has no deadline; you can cancel it safely."""
        if not offsets:
            return
        self._lifetime.check()
        if self._settings.assign is None:
            await self._commit_as_member(offsets, membership, messages)
        else:
            self._check_commit(offsets, membership)
            await self._commit_without_member(offsets)

    async def _commit_as_member(
        self,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: Sequence[Message] | None,
    ) -> None:
        driver = self._member()
        life = self._life
        own = driver.ownership  # the thread may replace it at any time
        self._check_commit(offsets, membership)
        if not self._covers(own, life, offsets):
            raise not_ours(self._group_id, offsets)
        member = Member(own.epoch, own.member_id, self._settings.group_instance_id)
        try:
            if self._transactions is None:
                await self._send_commit(offsets, member)
            else:
                await self._transactions.commit(messages or (), self._with_epochs(offsets), member)
        except WireError as error:
            driver.commit_refused(own, error.code)
            # A transaction is aborted then; a plain commit in an older epoch may also have been stored before.
            is_plain = self._transactions is None
            if is_plain and error.code in _OVERTAKEN and self._covers(driver.ownership, life, offsets):
                raise overtaken(self._group_id, offsets) from error
            raise commit_error(error.cause, offsets, self._group_id) from error

    def _covers(self, own: Ownership, life: int, partitions: Collection[TopicPartition]) -> bool:
        """Whether partitions are ours now, by an ownership of this life: a later one may have the same member id."""
        now = self._member().clock()
        return own.life == life and all(own.owns(partition, now) for partition in partitions)

    async def _commit_without_member(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Send one commit, once; brokers accept it while the group has no members.

        Raises:
            GroupHasMembersError: The group has members. Nothing was stored.
            TransportError: The commit was not acknowledged; all or part of it may have been stored.
        """
        try:
            await self._send_commit(offsets, NO_MEMBER)
        except WireError as error:
            why = GROUP_CHANGED.get(error.code)
            if why is not None:
                raise has_members(self._group_id, f"a commit was refused: {why}") from error
            raise commit_error(error.cause, offsets, self._group_id) from error

    async def _send_commit(self, offsets: Mapping[TopicPartition, Committed], member: Member) -> None:
        """Send one commit.

        Raises:
            TopicsRefusedError: Some topics were refused, and everything else is stored.
            WireError: The commit was not acknowledged.
        """
        refused = await self._offsets.commit(self._with_epochs(offsets), member)
        for error in refused.values():
            if error.code not in _ABOUT_ONE_TOPIC:
                raise error
        if refused:
            raise TopicsRefusedError({name: topic_refused(error.code, name.topic) for name, error in refused.items()})

    def _with_epochs(self, offsets: Mapping[TopicPartition, Committed]) -> dict[TopicPartition, CommittedOffset]:
        """Add the newest leader epoch that was read, where it is known: the metadata may list records of it."""
        return {
            name: CommittedOffset(committed.offset, self._fetcher.newest_epoch(name), committed.metadata)
            for name, committed in offsets.items()
        }

    def _check_commit(self, partitions: Collection[TopicPartition], membership: Membership) -> None:
        """Refuse a commit before it is sent if we no longer have *membership* or its partitions.

        Raises:
            CommitRefusedError: The group has rebalanced since.
        """
        current = self.membership()
        if current == NOT_A_MEMBER:
            why = "we are not a member of it now"
        elif membership != current:
            why = f"it was made for generation {membership.generation}, and ours is {current.generation}"
        elif foreign := [topic_partition for topic_partition in partitions if topic_partition not in self._fetcher]:
            why = f"not assigned to us: {named(foreign)}"
        else:
            return
        raise CommitRefusedError(f"a commit of group {self._group_id!r} was not sent: {why}")

    # Queries --------------------------------------------------------------------------

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """See `Transport.committed`; with transactions, only offsets that no open transaction of ours may change."""
        if self._transactions is not None:
            self._lifetime.check()
            await self._transactions.settle()
        found = await self._queries.committed(partitions)
        if self._transactions is not None:
            self._transactions.learn(found)
        return found

    async def truncations(self, commits: Mapping[TopicPartition, Committed]) -> Mapping[TopicPartition, int | None]:
        """See `Transport.truncations`."""
        return await self._queries.truncations(commits)

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """See `Transport.log_ranges`."""
        return await self._queries.log_ranges(partitions)

    async def partitions(self, topic: str) -> Mapping[int, PartitionInfo]:
        """See `Transport.partitions`."""
        return await self._queries.partitions(topic)

    async def topics(self) -> frozenset[str]:
        """See `Transport.topics`."""
        return await self._queries.topics()

    async def creates_topics(self) -> bool | None:
        """See `Transport.creates_topics`."""
        return await self._queries.creates_topics()

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """See `Transport.offset_at`."""
        return await self._queries.offset_at(topic_partition, timestamp)


def _reason(error: BaseException) -> str:
    return message_of(error) or type(error).__name__
