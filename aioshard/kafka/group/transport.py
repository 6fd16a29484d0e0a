"""A member of a consumer group, of either protocol, as the engine sees it."""

import asyncio
import base64
import datetime as dt
import logging
import math
import random
import re
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Final

import anyio

from aioshard.errors import ClientLostError, CommitRefusedError, InstanceIdTakenError, TransportError
from aioshard.kafka.consumer import ConsumerTransport
from aioshard.kafka.errors import TOPIC_DENIED, Cause, commit_error, named, request_error
from aioshard.kafka.group.assignors import GroupAssignor
from aioshard.kafka.group.classic import ClassicEvent, ClassicMember, Elected
from aioshard.kafka.group.classic_driver import ClassicDriver, ClassicProtocol
from aioshard.kafka.group.consumer import ConsumerMember
from aioshard.kafka.group.consumer_driver import ConsumerDriver, ConsumerProtocol, patterns_beside
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
from aioshard.kafka.offsets import Member
from aioshard.kafka.transactions.identity import TransactionalId
from aioshard.kafka.transactions.transactions import Transactions
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.codes import ERROR_CODES
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.start import new_cluster
from aioshard.ports import (
    NOT_A_MEMBER,
    ChosenProtocol,
    Committed,
    GroupListener,
    Membership,
    Message,
    TransactionCounts,
)
from aioshard.records import TopicPartition
from aioshard.settings import Settings

logger = logging.getLogger("aioshard.kafka.group")

_STATE_INTERVAL: Final = 0.5
"""Seconds between two looks at the state of the group while others have our partitions."""
_RETRY_PAUSE: Final = 1.0
"""Seconds between two look-ups of topics while the brokers do not list them."""
_UNNAMED_PATIENCE: Final = 10.0
"""Seconds in which all brokers know a new topic, and the group knows that one was deleted."""
_LEAVE_TIMEOUT: Final = 3.0
"""Seconds for the coordinator to answer a leave."""
_OVERTAKEN: Final = frozenset({Code.ILLEGAL_GENERATION, Code.REBALANCE_IN_PROGRESS, Code.STALE_MEMBER_EPOCH})
"""Error codes of commits that say only that the group is in another generation or epoch by now."""


class MemberTransport(ConsumerTransport):
    """A member of a group, and the whole client of a manual assignment. A thread sends its heartbeats.

    The drivers hold the differences between the protocols; see `GroupDriver`. A member of the classic protocol may lead
    the group; see `Leader`.

    Changes of the assignment reach the engine one after another, in the order in which the group made them. A loss
    does not wait for its turn.

    The brokers raise the epoch or generation whenever the group changes, also if our partitions stay: commits always
    carry the newest one. The engine knows a membership by the epoch of its latest assignment.
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
        super().__init__(settings, group_id)
        self._transactions: Transactions | None = None
        """None unless commits are transactions."""
        if transactional is not None:
            self._transactions = Transactions(
                self._cluster, transactional, self._offsets, group_id, timeout=settings.transaction_timeout
            )
        self._driver: ClassicDriver | ConsumerDriver | None = None
        """None with manual assignment, and before the start."""
        self._protocol: ChosenProtocol | None = None
        """That of the driver."""
        self._leader: Leader | None = None
        """None unless the protocol is the classic one."""
        self._life = 0
        """The life of the member in which `_membership` was assigned."""
        self._pattern: re.Pattern[str] | None = None
        self._subscribed: frozenset[str] = frozenset()
        """The topics that the group knows from us."""
        self._subscription_changed = asyncio.Event()
        self._changes: asyncio.Queue[Assigned | Revoked | Refused] = asyncio.Queue()
        """Changes of which the engine has not heard yet; a refusal of the protocol means to try the other one."""
        self._news = asyncio.Event()
        """Set when a change arrives."""
        self._troubled: Troubled | None = None
        """The latest trouble with the group; None once it has answered again."""
        self._failure: TransportError | None = None
        """The error that ends this life of the client; `poll` raises it."""

    @property
    def trouble(self) -> str | None:
        """See `Transport.trouble`."""
        return super().trouble or self._group_trouble or self._unnamed_trouble

    @property
    def _group_trouble(self) -> str | None:
        """The reason why our heartbeats fail now, as a sentence; None if they are answered."""
        troubled = self._troubled
        if troubled is None or self._closed:
            return None
        if troubled.code is None:
            return f"group {self._group_id!r} does not answer us now: {troubled.message}"
        return f"group {self._group_id!r} refuses our requests now: {_text_of(troubled)}"

    @property
    def group_protocol(self) -> ChosenProtocol | None:
        """See `Transport.group_protocol`."""
        return self._protocol

    @property
    def _unnamed_trouble(self) -> str | None:
        """Which assigned topics cannot be read because no broker names them, as a sentence; None without any."""
        driver = self._driver
        if driver is None or self._closed:
            return None
        latest = time.time() - _UNNAMED_PATIENCE
        unnamed = {topic_id: since for topic_id, since in driver.unnamed.items() if since <= latest}
        return _unnamed(self._group_id, unnamed) if unnamed else None

    @property
    def inherits_within(self) -> float:
        """See `Transport.inherits_within`."""
        return 0.0 if self._driver is None else self._driver.inherits_within

    @property
    def last_heartbeat(self) -> float | None:  # type: ignore[override]
        """See `Transport.last_heartbeat`."""
        return None if self._driver is None else self._driver.last_heartbeat

    # Lifecycle ------------------------------------------------------------------------

    async def _join_group(self, pattern: str | None) -> None:
        self._pattern = None if pattern is None else re.compile(pattern)
        self._subscribed = await self._wanted_topics()
        self._check_running()
        self._begin(self._pass_on_changes(), "assignments")
        self._begin(self._watch_topics(), "topics")
        self._become_member(self._first_choice())

    def _first_choice(self) -> ChosenProtocol:
        """Return the protocol to join with; the group may refuse it."""
        chosen = self._settings.group_protocol
        given = self._settings.classic_settings
        if chosen != "auto":
            return ChosenProtocol(chosen, "group_protocol is set")
        if given:
            return ChosenProtocol("classic", f"only this protocol has {' and '.join(given)}")
        return ChosenProtocol("consumer", "no setting asks for the classic one")

    def _become_member(self, protocol: ChosenProtocol) -> None:
        logger.info("group %r: group_protocol=%r, because %s", self._group_id, *protocol)
        self._protocol = protocol
        self._life = 0
        self._driver = self._consumer_driver() if protocol.name == "consumer" else self._classic_driver()
        self._driver.start()

    async def _fall_back(self, refused: Refused) -> None:
        """Join with the classic protocol, because the brokers or the group do not accept the other one."""
        await self._member().close(_LEAVE_TIMEOUT, "the group has another protocol")
        if not self._closed:
            self._troubled = None
            is_unknown = refused.code == Code.UNSUPPORTED_VERSION
            what = "the brokers do not have the other one" if is_unknown else "the group does not accept the other one"
            reason = f"{what} ({_text_of(refused)})"
            self._become_member(ChosenProtocol("classic", reason))

    def _consumer_driver(self) -> ConsumerDriver:
        settings = self._settings
        member = ConsumerMember(
            random.SystemRandom(),
            topics=self._subscribed,
            patterns=patterns_beside(self._subscribed),
            rebalance_timeout=settings.rebalance_timeout,
            instance_id=settings.group_instance_id,
            rack=settings.client_options.get("client_rack"),
            assignor=settings.client_options.get("group_remote_assignor"),
        )
        return ConsumerDriver(
            ConsumerProtocol(self._group_id, member),
            self._cluster_of_thread(),
            self._on_event,
            rebalance_timeout=settings.rebalance_timeout,
        )

    def _classic_driver(self) -> ClassicDriver:
        settings = self._settings
        assignor = GroupAssignor(
            settings.assignor, delay=settings.reassignment_delay, instance_id=settings.group_instance_id
        )
        member = ClassicMember(
            self._subscribed,
            [assignor],
            random.SystemRandom(),
            session_timeout=settings.session_timeout,
            heartbeat_interval=settings.heartbeat_interval,
            rebalance_timeout=settings.rebalance_timeout,
            instance_id=settings.group_instance_id,
        )
        driver = ClassicDriver(
            ClassicProtocol(self._group_id, member),
            self._cluster_of_thread(),
            self._on_event,
            rebalance_timeout=settings.rebalance_timeout,
        )
        self._leader = Leader(
            driver,
            assignor,
            group_id=self._group_id,
            cluster=self._cluster,
            offsets=self._offsets,
            fetcher=self._fetcher,
            settings=settings,
            isolation=self._isolation,
        )
        self._begin(self._leader.run(), "leadership")
        self._begin(self._watch_joins(), "joins")
        return driver

    def _cluster_of_thread(self) -> Callable[[], Cluster]:
        """Return what makes the cluster of the thread. It begins with the brokers that we know: a server may hang."""
        settings = self._settings
        brokers = tuple(self._cluster.metadata.brokers.values())

        def make() -> Cluster:
            cluster = new_cluster(settings)
            for broker in brokers:
                cluster.learn_broker(broker)
            return cluster

        return make

    def _begin(self, work: Coroutine[Any, Any, None], purpose: str) -> None:
        """Begin a task without which the client does not work."""
        task = asyncio.create_task(work, name=f"{purpose} of {self._group_id}")
        self._tasks.append(task)
        task.add_done_callback(self._note_end)

    def subscribe(self, topics: Collection[str], pattern: str | None) -> None:  # noqa: ARG002 - that of the start
        """See `Transport.subscribe`."""
        self._check_running()
        self._member()
        self._topics = frozenset(topics)
        self._subscription_changed.set()

    async def _watch_topics(self) -> None:
        """Tell the group when we subscribe to other topics, or other topics match our pattern, until cancelled.

        Patterns are those of Python, which the engine uses too; the brokers have another language.
        """
        is_failing = False
        while True:
            has_to_look = self._pattern is not None or not self._topics <= self._subscribed
            try:
                async with asyncio.timeout(self._settings.metadata_max_age if has_to_look else None):
                    await self._subscription_changed.wait()
            except TimeoutError:
                logger.debug("looking for topics that match the pattern, or are allowed by now")
            self._subscription_changed.clear()
            try:
                wanted = await self._wanted_topics()
            except TransportError as error:
                level = logging.DEBUG if is_failing else logging.INFO
                logger.log(level, "the topics to subscribe to are unknown, and are looked up again: %s", error)
                is_failing = True
                await asyncio.sleep(_RETRY_PAUSE)
                self._subscription_changed.set()
                continue
            if is_failing:
                is_failing = False
                logger.info("the topics to subscribe to are known again")
            if wanted != self._subscribed:
                self._subscribed = wanted
                self._member().subscribe(wanted)

    async def _wanted_topics(self) -> frozenset[str]:
        """Look up the topics to subscribe to, and follow them.

        Brokers refuse all heartbeats of a member that names a topic which it may not see, so those are left out.

        Raises:
            TransportError: The brokers did not list the topics.
        """
        topics = self._topics
        if self._pattern is not None:
            topics |= {name for name in await self.topics() if self._pattern.fullmatch(name)}
        assigned = {partition.topic for partition in self._fetcher.partitions}
        watched = frozenset[str]() if self._driver is None else self._driver.watched
        self._cluster.follow_only(topics | assigned | watched)
        try:
            await self._cluster.look_up(topics)
        except WireError as error:
            raise request_error(error.cause, "describe the topics", self._group_id) from error
        return topics - self._cluster.metadata.denied

    def _member(self) -> ClassicDriver | ConsumerDriver:
        if self._driver is None:
            raise ClientLostError("the Kafka client is not a member of the group")
        return self._driver

    async def _leave(self) -> None:
        if self._driver is not None:
            await self._driver.close(_LEAVE_TIMEOUT, "the app closes its client")

    async def _tear_down(self) -> None:
        try:
            if self._transactions is not None:
                await self._transactions.close()
            if self._driver is not None and self._driver.is_alive:
                await self._driver.close(0.0, "the app closes its client")
        finally:
            await super()._tear_down()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Let `poll` raise that a task has ended, without which nothing works."""
        if self._closed:
            return
        error = None if task.cancelled() else task.exception()
        if self._failure is None:
            self._failure = ClientLostError(f"the task for {task.get_name()} has ended ({error!r})")
        self._check_again()

    def _raise_group_loss(self) -> None:
        failure = self._failure
        if failure is None and self._transactions is not None:
            failure = self._transactions.failure
        if failure is not None:
            raise failure

    # The group ------------------------------------------------------------------------

    def membership(self) -> Membership:
        """See `Transport.membership`. It ends with our time, also before the engine has heard of that."""
        return self._membership if self.owned_for > 0.0 else NOT_A_MEMBER

    @property
    def owned_for(self) -> float:
        """See `Transport.owned_for`. A later life owns nothing of which the engine has heard."""
        driver = self._driver
        if driver is None:
            return math.inf
        own = driver.ownership
        return own.alive_until - driver.clock() if own.life == self._life else 0.0

    @property
    def _session(self) -> str:
        return self._member().session_text

    async def _own_member_id(self) -> str:
        return self._member().ownership.member_id

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
            raise _not_ours(self._group_id, offsets)
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
                raise _overtaken(self._group_id, offsets) from error
            raise commit_error(error.cause, offsets, self._group_id) from error

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """See `Transport.committed`; with transactions, only offsets that no open transaction of ours may change."""
        if self._transactions is not None:
            self._check_running()
            await self._transactions.settle()
        found = await super().committed(partitions)
        if self._transactions is not None:
            self._transactions.learn(found)
        return found

    @property
    def transaction_counts(self) -> TransactionCounts:
        """See `Transport.transaction_counts`."""
        return TransactionCounts() if self._transactions is None else self._transactions.counts

    @property
    def hang(self) -> str | None:
        """See `Transport.hang`: a transaction that waits for a broker."""
        return None if self._transactions is None else self._transactions.hang

    def _covers(self, own: Ownership, life: int, partitions: Collection[TopicPartition]) -> bool:
        """Whether partitions are ours now, by an ownership of this life: a later one may have the same member id."""
        now = self._member().clock()
        return own.life == life and all(own.owns(partition, now) for partition in partitions)

    def _on_event(self, event: ClassicEvent) -> None:
        """Accept an event of the thread; once we are closing, as long as the engine drains: it must hear of a loss."""
        if isinstance(event, Elected) and self._leader is not None:
            self._leader.elect(event)  # the others wait for it
        if self._closed and self._released.is_set():
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
                    self._subscription_changed.set()  # the group hears nothing of us until we leave that topic out
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
        why = _text_of(event)
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
        return self._group_error(Cause(event.code, why, topics=tuple(sorted(self._topics))))

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
        return not self._closed and change.life == self._member().ownership.life

    async def _others_release(self) -> bool:
        """Wait while the group moves partitions and has none for us; return whether it has news for us now.

        An empty assignment means only then that there is nothing to do: what is meant for us may still be with a
        member that has to release it, or has died. It takes at most a session and a heartbeat: a dead member counts
        until then, and when it was removed, the group rebalances without others.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self.inherits_within
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


def _text_of(event: Troubled | Refused | Ended) -> str:
    """Return the message of the brokers, or what their code means."""
    if event.message:
        return event.message.rstrip(".")
    known = ERROR_CODES.get(event.code or 0)
    return f"error {event.code}" if known is None else known.text


def _unnamed(group_id: str, topic_ids: Mapping[uuid.UUID, float]) -> str:
    """Describe assigned topics that no broker names, each with the time since when."""
    first = min(topic_ids, key=lambda topic_id: (topic_ids[topic_id], topic_id))
    since = dt.datetime.fromtimestamp(topic_ids[first], dt.UTC).isoformat(sep=" ", timespec="seconds")
    if len(topic_ids) == 1:
        what = f"partitions of a topic that no broker names, by its id {_kafka_text(first)}"
        cause = "the topic was deleted, or this user has no DESCRIBE on it; nothing of it is consumed"
    else:
        what = f"partitions of {len(topic_ids)} topics that no broker names, by their ids, {_kafka_text(first)} first"
        cause = "the topics were deleted, or this user has no DESCRIBE on them; nothing of them is consumed"
    return f"group {group_id!r} has assigned {what}, since {since}: {cause}"


def _kafka_text(topic_id: uuid.UUID) -> str:
    """Return an id of a topic as Kafka's commands print it."""
    return base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


def _not_ours(group_id: str, partitions: Collection[TopicPartition]) -> CommitRefusedError:
    """Return the error of a commit for a membership that has ended, or for partitions that were released."""
    return CommitRefusedError(
        f"a commit of group {group_id!r} was not sent: the membership that it was made for has ended, or "
        f"{named(partitions)} was released"
    )


def _overtaken(group_id: str, partitions: Collection[TopicPartition]) -> TransportError:
    """Return the error of a commit with an epoch that was raised while it was on its way."""
    cause = Cause(-1, "the group is in another epoch by now, which the next answer brings")
    return commit_error(cause, partitions, group_id)
