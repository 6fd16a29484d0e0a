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
from aioshard.kafka.group.member import NOT_A_MEMBER, Backoff, Event
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.notation import Request
from aioshard.kafka.wire.pool import Purpose
from aioshard.kafka.wire.requests import DESCRIBE_CONFIGS
from aioshard.kafka.wire.responses import ResourceKind, described_settings

logger = logging.getLogger("aioshard.kafka.group")

_SESSION: Final = "consumer.session.timeout.ms"
_INTERVAL: Final = "consumer.heartbeat.interval.ms"
_TIMES_MAX_AGE: Final = 300.0
"""Seconds after which the times of the group are looked up again: an operator may change them."""
_LEAST_REQUEST_TIMEOUT: Final = 1.0


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
        resource = {"kind": ResourceKind.GROUP, "name": self.group_id, "keys": [_SESSION, _INTERVAL]}
        request = DESCRIBE_CONFIGS(resources=[resource], synonyms=False, documentation=False)
        try:
            response = await loop.cluster.ask_any(request)
            values = described_settings(response, ResourceKind.GROUP, self.group_id, [_SESSION, _INTERVAL])
            session = int(values[_SESSION]) / 1000
            interval = int(values[_INTERVAL]) / 1000
        except (WireError, ValueError) as error:
            self._report_unknown_times(error)
            return
        loop.command(lambda member, now: member.times(session, interval, now))

    def _report_unknown_times(self, error: Exception) -> None:
        level = logging.DEBUG if self._has_warned or getattr(error, "retriable", False) else logging.WARNING
        self._has_warned |= level == logging.WARNING
        logger.log(
            level,
            "the session timeout of group %s cannot be read (%s), so %g s are assumed: grant DESCRIBE_CONFIGS on the "
            "group, and set consumer.session.timeout.ms of the group to this value",
            self.group_id,
            error,
            self.member.session,
        )


class ConsumerDriver(GroupDriver[ConsumerMember, Event]):
    """The driver of a member of the consumer protocol."""

    _protocol: ConsumerProtocol

    @property
    def unnamed(self) -> Mapping[uuid.UUID, float]:
        """Ids of assigned topics that no broker names, each with the time since when, in seconds since the epoch."""
        return self._protocol.unnamed

    def subscribe(self, topics: Collection[str], patterns: Collection[str]) -> None:
        """Subscribe to other topics."""
        self._command(lambda member, now: member.subscribe(topics, patterns, now))

    def heartbeat_now(self) -> None:
        """Ask for the newest epoch: a commit was refused because of the epoch."""
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
