"""Drives a member of the consumer protocol (KIP-848): its heartbeats and its look-ups."""

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any, Final

from aioshard.kafka.group.consumer import ConsumerMember
from aioshard.kafka.group.consumer_messages import Heartbeat, HeartbeatAnswer, heartbeat_answer, heartbeat_request
from aioshard.kafka.group.driver import GroupDriver, MemberLoop
from aioshard.kafka.group.member import NOT_A_MEMBER, Backoff, Code, Event, Ownership
from aioshard.kafka.groups import GROUP_TIMES
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.notation import Request
from aioshard.kafka.wire.pool import Purpose
from aioshard.kafka.wire.requests import DESCRIBE_CONFIGS
from aioshard.kafka.wire.responses import ResourceKind, group_times

logger = logging.getLogger("aioshard.kafka.group")

_TIMES_MAX_AGE: Final = 300.0
"""Seconds after which the times of the group are looked up again: an operator may change them."""
_LEAST_REQUEST_TIMEOUT: Final = 1.0
_NO_TOPIC: Final = "aioshard has found no topic"
"""A pattern that no topic can match: brokers refuse an empty subscription."""
_MEMBERSHIP_ENDED: Final = frozenset(
    {
        Code.UNKNOWN_MEMBER_ID,
        Code.GROUP_ID_NOT_FOUND,
        Code.FENCED_MEMBER_EPOCH,
        Code.FENCED_INSTANCE_ID,
        Code.STALE_MEMBER_EPOCH,
    }
)
"""Error codes of commits that say that the group does not know us, or our epoch, any more."""


def patterns_beside(topics: Collection[str]) -> tuple[str, ...]:
    """Return the patterns to subscribe to beside *topics*."""
    return () if topics else (_NO_TOPIC,)


class ConsumerProtocol:
    """A member of the consumer protocol for its driver; see `GroupProtocol`.

    It looks up the names of assigned topics, and the times of the group, which only the brokers know.
    """

    def __init__(self, group_id: str, member: ConsumerMember) -> None:
        """Look up nothing yet."""
        self.group_id = group_id
        self.member = member
        self.unnamed: Mapping[uuid.UUID, float] = {}
        """Ids of assigned topics that a broker did not know or did not show to us, each with the time of the first such
        answer in seconds since the epoch. It is replaced as a whole: any thread may read it."""
        self._is_naming = False
        self._times_wanted = asyncio.Event()
        self._watches_times = False
        self._life_of_times = 0
        self._has_warned = False

    # Requests -------------------------------------------------------------------------

    def purpose(self, request: Heartbeat) -> Purpose:  # noqa: ARG002 - all of them are heartbeats
        """See `GroupProtocol.purpose`."""
        return Purpose.HEARTBEAT

    def timeout(self, request: Heartbeat) -> float:  # noqa: ARG002
        """See `GroupProtocol.timeout`. There is time for another heartbeat before the session ends."""
        return max(self.member.session / 3, _LEAST_REQUEST_TIMEOUT)

    def message(self, request: Heartbeat) -> Request:
        """See `GroupProtocol.message`."""
        return heartbeat_request(self.group_id, request)

    def answer(self, request: Heartbeat, response: Any) -> HeartbeatAnswer:  # noqa: ARG002
        """See `GroupProtocol.answer`."""
        return heartbeat_answer(response)

    def refusal(self, request: Heartbeat, code: int, message: str) -> HeartbeatAnswer:  # noqa: ARG002
        """See `GroupProtocol.refusal`."""
        return HeartbeatAnswer(code, message)

    # Look-ups -------------------------------------------------------------------------

    def look_up(self, loop: MemberLoop[ConsumerMember, Event]) -> None:
        """See `GroupProtocol.look_up`."""
        own = self.member.ownership
        if not self._watches_times:
            self._watches_times = True
            self._times_wanted.set()
            loop.spawn(self._watch_times(loop), "look up the times of a group")
        if own.epoch != NOT_A_MEMBER and own.life != self._life_of_times:
            self._life_of_times = own.life
            self._times_wanted.set()
        if self.member.unnamed and not self._is_naming:
            self._is_naming = True
            loop.spawn(self._name_topics(loop), "look up names of topics")

    async def _name_topics(self, loop: MemberLoop[ConsumerMember, Event]) -> None:
        """Look up the names of assigned topics until all are known; a new topic may be unknown to some brokers."""
        backoff = Backoff(random.Random())  # noqa: S311 - no secret
        while unnamed := self.member.unnamed:
            try:
                names = await loop.cluster.names_of(unnamed)
            except WireError as error:
                logger.debug("the names of assigned topics are unknown: %s", error)
                names = {}
            else:
                now = time.time()
                self.unnamed = {topic_id: self.unnamed.get(topic_id, now) for topic_id in unnamed - names.keys()}
            if names:
                self._learn_names(loop, names)
            if self.member.unnamed:
                await asyncio.sleep(backoff.next())
        self.unnamed = {}
        self._is_naming = False

    def _learn_names(self, loop: MemberLoop[ConsumerMember, Event], names: Mapping[uuid.UUID, str]) -> None:
        loop.command(lambda member, now: member.name_topics(names, now))

    async def _watch_times(self, loop: MemberLoop[ConsumerMember, Event]) -> None:
        """Look up the times of the group after each join, and every few minutes."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TIMES_MAX_AGE):
                    await self._times_wanted.wait()
            self._times_wanted.clear()
            await self._learn_times(loop)

    async def _learn_times(self, loop: MemberLoop[ConsumerMember, Event]) -> None:
        resource = {"kind": ResourceKind.GROUP, "name": self.group_id, "keys": list(GROUP_TIMES)}
        request = DESCRIBE_CONFIGS(resources=[resource], synonyms=False, documentation=False)
        try:
            times = group_times(await loop.cluster.ask_any(request), self.group_id)
        except WireError as error:
            self._report_unknown_times(error)
            return
        session = times.session_timeout.seconds
        interval = times.heartbeat_interval.seconds
        loop.command(lambda member, now: member.times(session, interval, now))

    def _report_unknown_times(self, error: WireError) -> None:
        level = logging.DEBUG if self._has_warned or error.retriable else logging.WARNING
        self._has_warned |= level == logging.WARNING
        logger.log(
            level,
            "the session timeout of group %s cannot be read (%s), so %g s are assumed: grant DESCRIBE_CONFIGS on the "
            "group, or set this value with `aioshard group configure %s --session-timeout %g`",
            self.group_id,
            error,
            self.member.session,
            self.group_id,
            self.member.session,
        )


class ConsumerDriver(GroupDriver[ConsumerMember, Event]):
    """The driver of a member of the consumer protocol."""

    protocol = "consumer"
    is_incremental = True
    watched = frozenset[str]()
    """The brokers watch the topics."""
    _protocol: ConsumerProtocol

    @property
    def unnamed(self) -> Mapping[uuid.UUID, float]:
        """See `GroupDriver.unnamed`."""
        return self._protocol.unnamed

    @property
    def session_text(self) -> str:
        """See `GroupDriver.session_text`."""
        return f"{self.session:g} s (consumer.session.timeout.ms of the group)"

    @property
    def inherits_within(self) -> float:
        """See `Transport.inherits_within`. Members join while the group still counts dead ones.

        The group says that it has removed one in its answer to our next heartbeat.
        """
        return self.session + self._member.interval

    def subscribe(self, topics: Collection[str]) -> None:
        """See `GroupDriver.subscribe`."""
        self._command(lambda member, now: member.subscribe(topics, patterns_beside(topics), now))

    def commit_refused(self, ownership: Ownership, code: int) -> None:  # noqa: ARG002 - a heartbeat does no harm
        """See `GroupDriver.commit_refused`. A heartbeat asks for the newest epoch, or learns that there is none."""
        if code in _MEMBERSHIP_ENDED:
            self._command(lambda member, now: member.heartbeat_now(now))

    async def close(self, timeout: float, reason: str, *, for_good: bool = False) -> None:
        """See `GroupDriver.close`.

        Args:
            timeout: Seconds in which to leave.
            reason: Why, for `Lost`.
            for_good: Whether a static member gives its partitions to others now, and not after a session.
        """
        if for_good:
            self._command(lambda member, now: member.leave(now, reason, for_good=True))
        await super().close(timeout, reason)
