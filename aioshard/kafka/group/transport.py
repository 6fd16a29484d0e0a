"""A member of a group of the consumer protocol (KIP-848), in which the brokers assign partitions."""

import asyncio
import logging
import math
import random
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import anyio

from aioshard.errors import ClientLostError, CommitRefusedError, InstanceIdTakenError, TransportError
from aioshard.kafka.consumer import ConsumerTransport
from aioshard.kafka.errors import Cause, commit_error, named
from aioshard.kafka.group.consumer import ConsumerMember
from aioshard.kafka.group.consumer_driver import ConsumerDriver, ConsumerProtocol
from aioshard.kafka.group.member import (
    Assigned,
    Code,
    Ended,
    Event,
    Lost,
    Ownership,
    Recovered,
    Refused,
    Revoked,
    Troubled,
)
from aioshard.kafka.offsets import Member
from aioshard.kafka.wire.codes import ERROR_CODES
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.start import new_cluster
from aioshard.ports import NOT_A_MEMBER, Committed, GroupListener, Membership, Message
from aioshard.records import TopicPartition
from aioshard.settings import Settings

logger = logging.getLogger("aioshard.kafka.group")

_NO_TOPIC: Final = "aioshard has found no topic"
"""A pattern that no topic can match: brokers refuse an empty subscription."""
_STATE_INTERVAL: Final = 0.5
"""Seconds between two looks at the state of the group while others have our partitions."""
_RETRY_PAUSE: Final = 1.0
"""Seconds between two look-ups of topics while the brokers do not list them."""
_LEAVE_TIMEOUT: Final = 3.0
"""Seconds for the coordinator to answer a leave."""
_MEMBERSHIP_ENDED: Final = frozenset(
    {Code.UNKNOWN_MEMBER_ID, Code.GROUP_ID_NOT_FOUND, Code.FENCED_MEMBER_EPOCH, Code.FENCED_INSTANCE_ID}
)
"""Error codes of commits that say that the group does not know us any more."""


class MemberTransport(ConsumerTransport):
    """A member of a group of the consumer protocol. A thread sends its heartbeats; see `ConsumerDriver`.

    Changes of the assignment reach the engine one after another, in the order in which the group made them. A loss
    does not wait for its turn.

    The brokers raise the member epoch whenever the group changes, also if our partitions stay: commits always carry the
    newest one. The engine knows a membership by the epoch of its latest assignment.
    """

    def __init__(self, settings: Settings, group_id: str) -> None:
        """Check the options; connects to nothing yet.

        Raises:
            SettingsError: TLS and SASL settings cannot work.
        """
        super().__init__(settings, group_id)
        self._driver: ConsumerDriver | None = None
        """None with manual assignment, and before the start."""
        self._pattern: re.Pattern[str] | None = None
        self._subscribed: frozenset[str] = frozenset()
        """The topics that the group knows from us."""
        self._subscription_changed = asyncio.Event()
        self._changes: asyncio.Queue[Assigned | Revoked] = asyncio.Queue()
        """Changes of which the engine has not heard yet."""
        self._news = asyncio.Event()
        """Set when a change arrives."""
        self._troubled: Troubled | None = None
        """The latest trouble with the group; None once it has answered again."""
        self._failure: TransportError | None = None
        """The error that ends this life of the client; `poll` raises it."""

    @property
    def trouble(self) -> str | None:
        """See `Transport.trouble`."""
        return super().trouble or self._group_trouble

    @property
    def _group_trouble(self) -> str | None:
        """The reason why our heartbeats fail now, as a sentence; None if they are answered."""
        troubled = self._troubled
        if troubled is None or self._closed:
            return None
        if troubled.code is None:
            return f"group {self._group_id!r} does not answer our heartbeats now: {troubled.message}"
        return f"group {self._group_id!r} does not accept our heartbeats now: {_text_of(troubled)}"

    @property
    def inherits_within(self) -> float:
        """See `Transport.inherits_within`. Members join while the group still counts dead ones."""
        return 0.0 if self._driver is None else self._driver.session

    # Lifecycle ------------------------------------------------------------------------

    async def _join_group(self, pattern: str | None) -> None:
        self._pattern = None if pattern is None else re.compile(pattern)
        settings = self._settings
        self._subscribed = await self._wanted_topics()
        self._check_running()
        member = ConsumerMember(
            random.SystemRandom(),
            topics=self._subscribed,
            patterns=_patterns_beside(self._subscribed),
            rebalance_timeout=settings.rebalance_timeout,
            instance_id=settings.group_instance_id,
            rack=settings.client_options.get("client_rack"),
            assignor=settings.client_options.get("group_remote_assignor"),
        )
        self._driver = ConsumerDriver(
            ConsumerProtocol(self._group_id, member),
            lambda: new_cluster(settings),
            self._on_event,
            rebalance_timeout=settings.rebalance_timeout,
        )
        self._tasks += [
            asyncio.create_task(self._pass_on_changes(), name=f"assignments of {self._group_id}"),
            asyncio.create_task(self._watch_topics(), name=f"topics of {self._group_id}"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._note_end)
        self._driver.start()

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
                logger.info("the topics to subscribe to are unknown, and are looked up again: %s", error)
                await asyncio.sleep(_RETRY_PAUSE)
                self._subscription_changed.set()
                continue
            if wanted != self._subscribed:
                self._subscribed = wanted
                self._member().subscribe(wanted, _patterns_beside(wanted))

    async def _wanted_topics(self) -> frozenset[str]:
        """Look up the topics to subscribe to, and follow them.

        Brokers refuse all heartbeats of a member that names a topic which it may not see, so those are left out.

        Raises:
            TransportError: The brokers did not list the topics.
        """
        topics = self._topics
        if self._pattern is not None:
            topics |= {name for name in await self.topics() if self._pattern.fullmatch(name)}
        self._cluster.follow(topics)
        return topics - self._cluster.metadata.denied

    def _member(self) -> ConsumerDriver:
        if self._driver is None:
            raise ClientLostError("the Kafka client is not a member of the group")
        return self._driver

    async def _leave(self) -> None:
        if self._driver is not None:
            await self._driver.close(_LEAVE_TIMEOUT, "the app closes its client")

    async def _tear_down(self) -> None:
        try:
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
        if self._failure is not None:
            raise self._failure

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
        return own.alive_until - driver.clock() if own.member_id == self._membership.member_id else 0.0

    @property
    def _session(self) -> str:
        return f"{self._member().session:g} s (consumer.session.timeout.ms of the group)"

    async def _own_member_id(self) -> str:
        return self._member().ownership.member_id

    async def _commit_as_member(
        self,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: Sequence[Message] | None,  # noqa: ARG002
    ) -> None:
        driver = self._member()
        own = driver.ownership  # the thread may replace it at any time
        self._check_commit(offsets, membership)
        if not self._covers(own, membership, offsets):
            raise _not_ours(self._group_id, offsets)
        try:
            await self._send_commit(offsets, Member(own.epoch, own.member_id, self._settings.group_instance_id))
        except WireError as error:
            if error.code == Code.STALE_MEMBER_EPOCH or error.code in _MEMBERSHIP_ENDED:
                driver.heartbeat_now()
            if error.code == Code.STALE_MEMBER_EPOCH and self._covers(driver.ownership, membership, offsets):
                raise _overtaken(self._group_id, offsets) from error
            raise commit_error(error.cause, offsets, self._group_id) from error

    def _covers(self, own: Ownership, membership: Membership, partitions: Collection[TopicPartition]) -> bool:
        """Whether partitions are ours now, by an ownership of the life in which we got a membership.

        Each life has a member id of its own.
        """
        now = self._member().clock()
        return own.member_id == membership.member_id and all(own.owns(partition, now) for partition in partitions)

    def _on_event(self, event: Event) -> None:
        """Accept an event of the thread."""
        if self._closed:
            return
        match event:
            case Assigned() | Revoked():
                self._changes.put_nowait(event)
                self._news.set()
            case Lost():
                self._lose(event)
            case Troubled():
                self._troubled = event
            case Recovered():
                self._troubled = None
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
        # 2. The brokers, or this group, have only the other protocol.
        if isinstance(event, Refused) or event.code == Code.UNSUPPORTED_VERSION:
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
            listener = self._listener
            if listener is None or not self._lasts(change):
                continue
            if isinstance(change, Assigned) and not change.ownership.partitions and await self._others_release():
                continue  # the group has other news for us
            if not self._lasts(change):
                continue
            if isinstance(change, Assigned):
                own = change.ownership
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
        member that has to release it, or has died. It takes at most a session: a dead member counts until then.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._member().session
        while self._changes.empty() and loop.time() < give_up:
            self._joining_with = await self._look_up_others()
            if not self._joining_with:
                break
            self._news.clear()
            with anyio.move_on_after(_STATE_INTERVAL):
                await self._news.wait()
        self._joining_with = ()
        return not self._changes.empty()

    async def _release(self, change: Revoked, listener: GroupListener) -> None:
        """Let the engine release partitions, and then the group."""
        driver = self._member()
        await self._drain(listener, change.partitions)
        if not self._lasts(change) or self._listener_failure is not None:
            return
        self._remove(change.partitions)
        driver.released(change.life, change.partitions)
        if not self._fetcher.partitions and await self._others_release():
            return
        if not self._lasts(change):
            return
        listener.assigned(self._fetcher.partitions, self._membership)  # the drain stopped the opening of the others


def _patterns_beside(topics: Collection[str]) -> tuple[str, ...]:
    """Return the patterns to subscribe to beside *topics*."""
    return () if topics else (_NO_TOPIC,)


def _text_of(event: Troubled | Refused | Ended) -> str:
    """Return the message of the brokers, or what their code means."""
    if event.message:
        return event.message.rstrip(".")
    known = ERROR_CODES.get(event.code or 0)
    return f"error {event.code}" if known is None else known.text


def _not_ours(group_id: str, partitions: Collection[TopicPartition]) -> CommitRefusedError:
    """Return the error of a commit for a membership that has ended, or for partitions that were released."""
    return CommitRefusedError(
        f"a commit of group {group_id!r} was not sent: the membership that it was made for has ended, or "
        f"{named(partitions)} was released"
    )


def _overtaken(group_id: str, partitions: Collection[TopicPartition]) -> TransportError:
    """Return the error of a commit with an epoch that was raised while it was on its way."""
    cause = Cause(-1, "the group has a newer member epoch, which the next heartbeat brings")
    return commit_error(cause, partitions, group_id)
