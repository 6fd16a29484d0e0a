"""A member of a group of the consumer protocol (KIP-848), as a state machine.

The member names its partitions in heartbeats, and the coordinator answers with the assignment. A partition that is
missing in the answer is revoked; the coordinator gives it to another member once a heartbeat does not name it any more.

    poll      a heartbeat: everything, if the coordinator may not know it; else what has changed since the last answer
    answered  a new epoch and assignment; or an error, see `ConsumerMember._refused`
    failed    the coordinator may have handled the heartbeat: the next one says everything

Each membership, a life, has a new member id: a request that arrives late cannot touch a later life. An id that
the coordinator may still know after its life is a *ghost*: it has to leave before we join again.
"""

import enum
import math
import random
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from aioshard.kafka.group.consumer_messages import (
    JOIN_EPOCH,
    LEAVE_EPOCH,
    STATIC_LEAVE_EPOCH,
    Heartbeat,
    HeartbeatAnswer,
    TopicIdPartition,
    TopicIdPartitions,
)
from aioshard.kafka.group.member import (
    COORDINATOR_MOVED,
    Backoff,
    Code,
    Ended,
    Event,
    Holdings,
    Ownership,
    Recovered,
    Refused,
    Troubled,
)
from aioshard.records import TopicPartition

NO_ANSWER: Final = "no answer from the coordinator of the group"

_LATER: Final = frozenset({*COORDINATOR_MOVED, Code.COORDINATOR_LOAD_IN_PROGRESS, -1})
"""Codes after which the same request may succeed."""
_NOT_HANDLED: Final = frozenset(Code) - COORDINATOR_MOVED
"""Codes with which a coordinator refuses a request. After others it may have stored the request nevertheless: it may
have failed while it waited for its replicas."""
_GONE: Final = frozenset({Code.UNKNOWN_MEMBER_ID, Code.GROUP_ID_NOT_FOUND})
_FENCED: Final = frozenset({Code.FENCED_MEMBER_EPOCH, Code.STALE_MEMBER_EPOCH})
_FINAL: Final = frozenset(
    {
        Code.INVALID_GROUP_ID,
        Code.INVALID_SESSION_TIMEOUT,
        Code.GROUP_AUTHORIZATION_FAILED,
        Code.FENCED_INSTANCE_ID,
        Code.UNSUPPORTED_ASSIGNOR,
        Code.INVALID_REGULAR_EXPRESSION,
    }
)
_OTHER_PROTOCOL: Final = frozenset({Code.INCONSISTENT_GROUP_PROTOCOL, *_GONE})
"""Codes with which a coordinator answers joins to a group that it does not convert to this protocol."""
_MOST_REFUSED_JOINS: Final = 3
_INSTANCE_MARGIN: Final = 5.0
"""Seconds beyond a session to wait for a static member that has died."""
_EARLY_HEARTBEATS: Final = 5
_EARLY_INTERVAL: Final = 1.0
"""Brokers may take a second to assign the first partitions, and say so at the next heartbeat only. So the first ones
after a join come early, as long as nothing is assigned."""
_FULL_GROUP_PAUSES: Final = (5.0, 30.0)


class _Subscription(NamedTuple):
    topics: tuple[str, ...]
    pattern: str


class _Told(NamedTuple):
    """The coordinator's knowledge of us."""

    subscription: _Subscription
    owned: TopicIdPartitions


@dataclass(slots=True)
class _Ghost:
    """A member id of an earlier life that the coordinator may still know."""

    member_id: str
    epoch: int
    """The epoch that says how it leaves."""
    until: float
    """When its session has ended for certain. A coordinator that moves or restarts begins all sessions anew, so a leave
    without an answer proves that it may last longer, unless we end for good."""


class _Goal(enum.Enum):
    """The next step, after all ghosts have left."""

    JOIN = enum.auto()
    STAY_AWAY = enum.auto()
    END = enum.auto()


def joined_patterns(patterns: Collection[str]) -> str:
    """Return one regular expression that matches the names that any of *patterns* matches as a whole.

    Example:
        >>> joined_patterns(["orders", "a|b"]), joined_patterns(["orders.*"]), joined_patterns([])
        ('(?:orders)|(?:a|b)', 'orders.*', '')
    """
    if len(patterns) == 1:
        return next(iter(patterns))
    return "|".join(f"(?:{pattern})" for pattern in patterns)


# The member -------------------------------------------------------------------------------


class ConsumerMember:
    """A member of a group of the consumer protocol; see `GroupMember`.

    Invariants:
        * The coordinator hears that a partition is not owned any more only after it was released or lost.
        * A partition becomes ours only while the coordinator has heard nothing else from us since it assigned it.
        * Nothing is owned when the coordinator may have removed us: a session after the sending of the last answered
          heartbeat, or a rebalance timeout after the sending of one that has or may have begun a revocation, unless the
          coordinator has heard of the release.
        * At most one heartbeat and one leave are in flight.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        topics: Collection[str] = (),
        patterns: Collection[str] = (),
        session: float = 45.0,
        interval: float = 5.0,
        rebalance_timeout: float = 300.0,
        instance_id: str | None = None,
        rack: str | None = None,
        assignor: str | None = None,
    ) -> None:
        """Join at the first `poll`.

        Args:
            rng: For member ids and jitter.
            topics: Names of topics.
            patterns: Regular expressions, in the syntax of RE2, for whole names of topics; brokers evaluate them.
            session: Seconds after which the coordinator removes a silent member; see `times`.
            interval: Seconds between two heartbeats, until the coordinator says it.
            rebalance_timeout: Seconds after which the coordinator removes a member that does not release.
            instance_id: The name of a static member; None for others.
            rack: The rack of this process.
            assignor: The name of the broker's assignor; None for its default.
        """
        self._rng = rng
        self._subscription = _Subscription(tuple(sorted(topics)), joined_patterns(patterns))
        self._session = session
        self._interval = interval
        self._rebalance_timeout = rebalance_timeout
        self._instance_id = instance_id
        self._rack = rack or None  # coordinators refuse empty ones
        self._assignor = assignor

        self._holdings = Holdings(self._new_id())
        self._owned_ids: dict[TopicPartition, TopicIdPartition] = {}
        self._owed: dict[TopicIdPartition, float] = {}
        """Until when the coordinator waits to hear that we do not own what it has taken away. It counts until it hears
        that, so a release alone does not help. Partitions without a name, which we never had, are among these."""
        self._names: dict[uuid.UUID, str] = {}
        self._target: TopicIdPartitions | None = None
        """The newest assignment of this life."""
        self._told: _Told | None = None
        """None if the coordinator must hear everything again."""

        self._goal = _Goal.JOIN
        self._last_word: Ended | Refused = Ended(0, "left the group")
        self._ended = False
        self._ghost: _Ghost | None = None
        self._may_be_known = False
        """Whether the coordinator may know the member id of this life."""
        self._in_flight: Heartbeat | None = None
        self._leave_in_flight: Heartbeat | None = None
        self._answered_at = 0.0
        """When the last answered heartbeat of this life was sent."""
        self._unanswered_since: float | None = None
        """When the first heartbeat was sent after the last answered one."""
        self._due = 0.0
        self._is_urgent = False
        self._heartbeats = 0
        """Those that were answered in this life."""

        self._has_succeeded = False
        self._is_troubled = False
        self._refused_joins = 0
        self._invalid_joins = 0
        self._instance_taken_since: float | None = None
        self._backoff = Backoff(rng)
        self._full_group_backoff = Backoff(rng, *_FULL_GROUP_PAUSES)

    # What others see ------------------------------------------------------------------

    @property
    def ownership(self) -> Ownership:
        """Our partitions now; a new value at each change."""
        return self._holdings.ownership

    @property
    def ended(self) -> bool:
        """Whether it has left, or may never join: there is nothing more to send."""
        return self._ended

    @property
    def session(self) -> float:
        """Seconds after which the coordinator removes a silent member, as far as we know."""
        return self._session

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats, as far as the coordinator has said it."""
        return self._interval

    @property
    def answered_at(self) -> float:
        """When the latest heartbeat was sent that the coordinator answered; minus infinity outside the group."""
        return self._answered_at if self._holdings.is_member else -math.inf

    @property
    def unnamed(self) -> frozenset[uuid.UUID]:
        """Ids of assigned topics whose names are unknown: look them up, and call `name_topics`."""
        return frozenset(at.topic_id for at in self._target or () if at.topic_id not in self._names)

    @property
    def deadline(self) -> float | None:
        """When to call `poll` again; None: only after another call."""
        if self._ended:
            return None
        times = []
        if self._holdings.is_member:
            times.append(self.ownership.alive_until)
        if self._ghost is not None:
            times.append(self._ghost.until)
            if self._leave_in_flight is None:
                times.append(self._due)
        elif self._in_flight is None and self._goal is _Goal.JOIN:
            times.append(self._due)
        return min(times, default=None)

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in order."""
        return self._holdings.take_events()

    # Requests -------------------------------------------------------------------------

    def poll(self, now: float) -> Sequence[Heartbeat]:
        """Return the requests to send now; each is answered by one call of `answered` or `failed`."""
        if self._holdings.expired(now):
            self._abandon(now, self._why_expired(now))
        if self._ghost is not None and now >= self._ghost.until:
            self._ghost_left(now)
        if self._ended or now < self._due:
            return ()
        if self._ghost is not None:
            return self._leave(self._ghost, now)
        if self._in_flight is not None or self._goal is not _Goal.JOIN:
            return ()
        self._in_flight = request = self._heartbeat(now)
        self._may_be_known = True
        self._is_urgent = False
        if self._unanswered_since is None:
            self._unanswered_since = now
            self._extend()
        return (request,)

    def _leave(self, ghost: _Ghost, now: float) -> Sequence[Heartbeat]:
        if self._leave_in_flight is not None:
            return ()
        life = self.ownership.life
        self._leave_in_flight = Heartbeat(life, now, ghost.member_id, ghost.epoch, self._instance_id)
        return (self._leave_in_flight,)

    def _heartbeat(self, now: float) -> Heartbeat:
        own = self.ownership
        epoch = own.epoch if self._holdings.is_member else JOIN_EPOCH
        owned = frozenset(self._owned_ids.values())
        topics, pattern = self._subscription
        told = self._told
        request = Heartbeat(own.life, now, own.member_id, epoch, self._instance_id)
        if told is None:
            return replace(
                request,
                rack=self._rack,
                rebalance_timeout=self._rebalance_timeout,
                topics=topics,
                pattern=pattern,
                assignor=self._assignor,
                owned=owned,
            )
        return replace(
            request,
            topics=None if told.subscription.topics == topics else topics,
            pattern=None if told.subscription.pattern == pattern else pattern,
            owned=None if told.owned == owned and not self._has_to_acknowledge else owned,
        )

    # Answers --------------------------------------------------------------------------

    def answered(self, request: Heartbeat, answer: HeartbeatAnswer, now: float) -> None:
        """Accept the response to a request. It cannot bring back an ownership that has ended."""
        if self._holdings.expired(now):
            self._abandon(now, self._why_expired(now))
        if request is self._leave_in_flight:
            self._leave_in_flight = None
            self._leave_answered(answer, now)
        elif request is self._in_flight:
            self._in_flight = None
            if answer.error:
                self._refused(request, answer, now)
            elif answer.epoch <= 0 or answer.epoch < request.epoch:
                self._try_later(now, None, f"the coordinator answered with epoch {answer.epoch}")
            else:
                self._accept(request, answer, now)

    def failed(self, request: Heartbeat, now: float, why: str = NO_ANSWER) -> None:
        """Accept that a request has no response; the coordinator may have handled it."""
        if request is self._leave_in_flight:
            self._leave_in_flight = None
        elif request is self._in_flight:
            self._in_flight = None
            self._unknown_outcome(request, now)
        else:
            return
        self._try_later(now, None, why, coordinator_moved=True)
        self._extend_ghost()

    def _unknown_outcome(self, request: Heartbeat, now: float) -> None:
        if request.epoch == JOIN_EPOCH:
            self._abandon(now, NO_ANSWER)

    def _accept(self, request: Heartbeat, answer: HeartbeatAnswer, now: float) -> None:
        began = request.sent_at if self._unanswered_since is None else self._unanswered_since
        self._unanswered_since = None
        self._answered_at = request.sent_at
        self._told = self._told_by(request)
        if request.owned is not None:
            self._owed = {by_id: until for by_id, until in self._owed.items() if by_id in request.owned}
        if 0 < answer.interval < self._session:
            self._interval = answer.interval
        if answer.assignment is not None:
            self._assign(answer.assignment, began + self._rebalance_timeout)
        self._recovered()
        self._reconcile(answer.epoch, began + self._rebalance_timeout)
        self._heartbeats += 1
        is_early = not self._target and self._heartbeats <= _EARLY_HEARTBEATS
        pause = min(self._interval, _EARLY_INTERVAL) if is_early else self._interval
        self._due = now if self._is_urgent or self._has_to_acknowledge else max(now, request.sent_at + pause)

    def _assign(self, assignment: Collection[TopicIdPartition], deadline: float) -> None:
        """Accept a new target."""
        before = self._target or frozenset()
        self._target = frozenset(by_id for by_id in assignment if by_id.partition >= 0)
        for by_id in before - self._target:
            self._owed.setdefault(by_id, deadline)

    @property
    def _has_to_acknowledge(self) -> bool:
        """Whether the coordinator waits for a heartbeat that names what we own."""
        return not self._owed.keys() <= set(self._owned_ids.values())

    def _told_by(self, request: Heartbeat) -> _Told:
        """Return what the coordinator knows after it has answered a request."""
        before = self._told
        topics = request.topics if request.topics is not None or before is None else before.subscription.topics
        pattern = request.pattern if request.pattern is not None or before is None else before.subscription.pattern
        owned = request.owned if request.owned is not None or before is None else before.owned
        return _Told(_Subscription(topics or (), pattern or ""), owned or frozenset())

    def _recovered(self) -> None:
        self._has_succeeded = True
        self._refused_joins = 0
        self._invalid_joins = 0
        self._instance_taken_since = None
        self._backoff.reset()
        self._full_group_backoff.reset()
        if self._is_troubled:
            self._is_troubled = False
            self._holdings.tell(Recovered())

    def _reconcile(self, epoch: int, deadline: float) -> None:
        """Take what the newest assignment adds, and revoke what it does not contain any more."""
        target = self._target
        if target is None:
            self._holdings.renew(epoch, self._end_of_certainty)
            return
        gained = self._gained(target)
        self._owned_ids |= gained
        leaving = frozenset(at for at, by_id in self._owned_ids.items() if by_id not in target)
        # Partitions without a name are not an empty assignment.
        assigned = None if self.unnamed and not gained else frozenset(gained)
        self._holdings.renew(
            epoch,
            self._end_of_certainty,
            assigned=assigned,
            revoked=leaving,
            deadline=deadline,
        )

    def _extend(self) -> None:
        """Let the ownership end at another time."""
        if self._holdings.is_member:
            self._holdings.renew(self.ownership.epoch, self._end_of_certainty)

    @property
    def _end_of_certainty(self) -> float:
        """When the coordinator may have removed us: an unanswered heartbeat may have begun a revocation."""
        ends = [self._answered_at + self._session, *self._owed.values()]
        if self._unanswered_since is not None:
            ends.append(self._unanswered_since + self._rebalance_timeout)
        return min(ends)

    def _gained(self, target: TopicIdPartitions) -> dict[TopicPartition, TopicIdPartition]:
        """Return the partitions to take: those with a name, but no name that is owned still, under an older id."""
        gained: dict[TopicPartition, TopicIdPartition] = {}
        for by_id in sorted(target):
            name = self._names.get(by_id.topic_id)
            if name is None:
                continue
            at = TopicPartition(name, by_id.partition)
            if at not in self._owned_ids:
                gained.setdefault(at, by_id)
        return gained

    # Errors ---------------------------------------------------------------------------

    def _refused(self, request: Heartbeat, answer: HeartbeatAnswer, now: float) -> None:
        """Decide about an error: whether it ends the member, this life, or only delays it."""
        code = answer.error
        message = answer.message
        is_join = request.epoch == JOIN_EPOCH
        if code in _NOT_HANDLED:
            self._was_not_handled(request)
        else:
            self._unknown_outcome(request, now)
        if code == Code.FENCED_INSTANCE_ID:
            self._forgotten(message or "another process uses our instance id")
            self._end(now, code, message)
        elif code in _FINAL or (code == Code.INVALID_REQUEST and not self._may_join_once_more(is_join=is_join)):
            self._end(now, code, message)
        elif code == Code.UNSUPPORTED_VERSION:
            self._end(now, code, message, other_protocol=not self._has_succeeded)
        elif is_join and code in _OTHER_PROTOCOL:
            self._join_refused(code, message, now)
        elif code in _GONE:
            self._forgotten(f"the group has removed this member: {message or code}")
        elif code in _FENCED:
            self._may_be_known = True
            self._abandon(now, f"the group has another epoch of this member: {message or code}")
            self._try_later(now, code, message)
        else:
            self._delayed(code, message, now)

    def _delayed(self, code: int, message: str, now: float) -> None:
        """Try again after an error. Codes that are unknown to us are among them: the session limits what we own."""
        if code == Code.UNRELEASED_INSTANCE_ID:
            self._instance_is_taken(message, now)
        elif code == Code.GROUP_MAX_SIZE_REACHED:
            self._try_later(now, code, message, pause=self._full_group_backoff.next())
        elif code == Code.TOPIC_AUTHORIZATION_FAILED:
            self._try_later(now, code, message, pause=self._interval)
        else:
            self._try_later(now, code, message, coordinator_moved=code in COORDINATOR_MOVED)

    def _was_not_handled(self, request: Heartbeat) -> None:
        if request.epoch == JOIN_EPOCH:
            self._may_be_known = False
        if self._unanswered_since == request.sent_at:
            self._unanswered_since = None

    def _may_join_once_more(self, *, is_join: bool) -> bool:
        """Whether a join that the coordinator finds invalid is sent a second time, as a new member."""
        self._invalid_joins += is_join
        return is_join and self._invalid_joins == 1

    def _join_refused(self, code: int, message: str, now: float) -> None:
        self._refused_joins += 1
        if code == Code.INCONSISTENT_GROUP_PROTOCOL or self._refused_joins == _MOST_REFUSED_JOINS:
            self._end(now, code, message, other_protocol=True)
        else:
            self._try_later(now, code, message)

    def _instance_is_taken(self, message: str, now: float) -> None:
        """Wait for the end of another process with our instance id: if it has died, its session ends."""
        if self._instance_taken_since is None:
            self._instance_taken_since = now
        if now - self._instance_taken_since > self._session + _INSTANCE_MARGIN:
            self._end(now, Code.UNRELEASED_INSTANCE_ID, message)
        else:
            self._try_later(now, Code.UNRELEASED_INSTANCE_ID, message)

    def _try_later(
        self, now: float, code: int | None, message: str, *, coordinator_moved: bool = False, pause: float | None = None
    ) -> None:
        self._told = None
        self._is_troubled = True
        self._due = now + (self._backoff.next() if pause is None else pause)
        self._holdings.tell(Troubled(code, message, coordinator_moved))

    # The end of a life ----------------------------------------------------------------

    def _why_expired(self, now: float) -> str:
        if now >= self._answered_at + self._session:
            return "no heartbeat was answered within the session timeout"
        if self._holdings.overdue(now):
            return "revoked partitions were not released within the rebalance timeout"
        return "no heartbeat was answered within the rebalance timeout"

    def _abandon(self, now: float, reason: str, epoch: int | None = None) -> None:
        """End this life; the coordinator may not know that yet."""
        member_id = self.ownership.member_id
        was_known = self._may_be_known
        self._forgotten(reason)
        if epoch is None:
            epoch = LEAVE_EPOCH if self._instance_id is None else STATIC_LEAVE_EPOCH
        if was_known:
            self._ghost = _Ghost(member_id, epoch, now + self._session)
            self._due = now
        elif self._ghost is not None and epoch != self._ghost.epoch == STATIC_LEAVE_EPOCH:
            self._ghost.epoch = epoch
            self._leave_in_flight = None  # the answer to the other kind of leave does not count
            self._due = now

    def _forgotten(self, reason: str) -> None:
        """End this life; the coordinator does not know it any more."""
        self._holdings.lose(reason)
        self._holdings.identify(self._new_id())
        self._owned_ids.clear()
        self._owed.clear()
        self._target = None
        self._told = None
        self._may_be_known = False
        self._heartbeats = 0
        self._in_flight = None  # its answer would be about the life that has ended
        self._unanswered_since = None

    def _end(self, now: float, code: int, message: str, *, other_protocol: bool = False) -> None:
        """End for good; first leave if the coordinator may know us."""
        self._goal = _Goal.END
        self._last_word = Refused(code, message) if other_protocol else Ended(code, message)
        self._abandon(now, message or f"the coordinator answered with error {code}")
        self._end_if_left()

    def _leave_answered(self, answer: HeartbeatAnswer, now: float) -> None:
        if answer.error in _LATER:
            moved = answer.error in COORDINATOR_MOVED
            self._try_later(now, answer.error, answer.message, coordinator_moved=moved)
            self._extend_ghost()
            return
        if answer.error == Code.FENCED_INSTANCE_ID and self._goal is not _Goal.END:
            self._goal = _Goal.END
            self._last_word = Ended(answer.error, answer.message)
        self._ghost_left(now)

    def _extend_ghost(self) -> None:
        """Let an old id leave later, because its leave was not answered."""
        if self._ghost is not None and self._goal is not _Goal.END:
            self._ghost.until = self._due + self._session

    def _ghost_left(self, now: float) -> None:
        self._ghost = None
        self._leave_in_flight = None
        self._due = now
        self._end_if_left()

    def _end_if_left(self) -> None:
        """Say the last word after the leave."""
        if self._goal is _Goal.END and self._ghost is None and not self._ended:
            self._ended = True
            self._holdings.tell(self._last_word)

    # Commands -------------------------------------------------------------------------

    def released(self, life: int, partitions: Collection[TopicPartition], now: float) -> None:
        """Give up revoked partitions, which nothing works on any more."""
        gone = self._holdings.release(life, partitions)
        for at in gone:
            del self._owned_ids[at]
        if gone:
            self.heartbeat_now(now)

    def subscribe(self, topics: Collection[str], patterns: Collection[str], now: float) -> None:
        """Subscribe to other topics; the group then rebalances."""
        self._subscription = _Subscription(tuple(sorted(topics)), joined_patterns(patterns))
        self.heartbeat_now(now)

    def name_topics(self, names: Mapping[uuid.UUID, str], now: float) -> None:
        """Learn names of topics, and take the partitions that were assigned by their ids.

        With a heartbeat in flight, or without an answer to the last one, they are taken at the next answer: the
        coordinator may just hear that we do not own them, and give them to another member.
        """
        self._names.update(names)
        is_certain = self._in_flight is None and self._told is not None and not self._holdings.expired(now)
        if is_certain and self._holdings.is_member:
            self._reconcile(self.ownership.epoch, now + self._rebalance_timeout)

    def heartbeat_now(self, now: float) -> None:
        """Send a heartbeat without waiting for the interval: something changed, or a new epoch is needed."""
        self._is_urgent = True
        if not self._is_troubled:
            self._due = min(self._due, now)

    def times(self, session: float, interval: float, now: float) -> None:
        """Use other times of the group: they may change while we are members."""
        if self._holdings.expired(now):
            self._abandon(now, self._why_expired(now))
        self._session = session
        if 0 < interval < session:
            self._interval = interval
        self._extend()
        if self._holdings.is_member:
            self._due = min(self._due, max(now, self._answered_at + self._interval))

    def suspend(self, now: float, reason: str) -> None:
        """Leave the group until `resume`."""
        if self._goal is _Goal.JOIN:
            self._goal = _Goal.STAY_AWAY
            self._abandon(now, reason)

    def resume(self, now: float) -> None:
        """Join again after `suspend`."""
        if self._goal is _Goal.STAY_AWAY:
            self._goal = _Goal.JOIN
            self._due = max(self._due, now)

    def leave(self, now: float, reason: str, *, for_good: bool = False) -> None:
        """Leave the group. Partitions that were not released are `Lost` before the leave is sent.

        Args:
            now: The time.
            reason: Why, for `Lost`.
            for_good: Whether a static member gives its partitions to others now, and not after a session.
        """
        if self._goal is _Goal.END:
            return
        self._goal = _Goal.END
        self._abandon(now, reason, LEAVE_EPOCH if for_good else None)
        self._end_if_left()

    # Helpers --------------------------------------------------------------------------

    def _new_id(self) -> str:
        return str(uuid.UUID(int=self._rng.getrandbits(128), version=4))
