"""A member of a classic group: JoinGroup, SyncGroup, Heartbeat and LeaveGroup.

Invariants:
    * A join claims the partitions of `ownership`, with the generation of the latest assignment that we received: what a
      rebalance did not complete changes neither.
    * An answer counts only for the membership that its request named: the member id and the generation.
    * A loss is reported before the next join is sent, and that join claims nothing.
    * An incremental member joins again after each release, so that the group can assign what it released.

Heartbeats continue while a join is unanswered. The coordinator answers them with "rebalance in progress", so it still
counts us, and the partitions that an incremental member keeps are still ours.
"""

import enum
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from aioshard.kafka.group.classic_messages import (
    Acknowledged,
    ClassicAnswer,
    ClassicRequest,
    Described,
    DescribeRequest,
    HeartbeatRequest,
    Joined,
    JoinRequest,
    LeaveRequest,
    Synced,
    SyncRequest,
)
from aioshard.kafka.group.member import (
    COORDINATOR_MOVED,
    LONGEST_REASON,
    NO_PARTITIONS,
    NOT_A_MEMBER,
    Backoff,
    Code,
    Ended,
    Event,
    Holdings,
    Ownership,
    Partitions,
    Recovered,
    Refused,
    Troubled,
)
from aioshard.kafka.groups import DescribedGroup
from aioshard.kafka.wire.codes import error_for
from aioshard.kafka.wire.consumer_protocol import (
    Subscription,
    read_subscription,
    write_assignment,
    write_subscription,
)
from aioshard.kafka.wire.pool import Purpose
from aioshard.records import TopicPartition

_SLOW_ANSWER = 5.0
"""Seconds that a join or a sync may take beyond the rebalance timeout."""
_QUICK_ANSWER = 5.0
"""Seconds to wait for a heartbeat or a leave, but at most a quarter of the session."""
_LEAVES = 2
"""How often a leave is sent before we give up."""
_OTHER_PROTOCOL: Final = frozenset({Code.INCONSISTENT_GROUP_PROTOCOL, Code.UNSUPPORTED_VERSION})
"""Codes of a first join that say that the group has another protocol."""
_GONE: Final = frozenset({Code.UNKNOWN_MEMBER_ID, Code.GROUP_ID_NOT_FOUND})
_SERVER_ERROR = -1
_NO_ANSWER: Final = "the coordinator did not answer"

Assignments = Mapping[str, Collection[TopicPartition]]
"""The partitions of each member, by member id."""
Numbers = Mapping[str, Collection[int]]
"""The partitions of each topic."""


class Assignor(Protocol):
    """An assignor, as far as a member needs it: it writes what a leader with this assignor reads."""

    @property
    def name(self) -> str:
        """The name that the members of a group agree on."""

    @property
    def is_incremental(self) -> bool:
        """Whether every leader with this assignor leaves out partitions that another member still works on."""

    def user_data(self, partitions: Partitions, generation: int) -> bytes:
        """Return the user data of a subscription.

        Args:
            partitions: The partitions that we have, or that an eager member had last.
            generation: The generation that assigned them; -1 if there was none.
        """


@dataclass(frozen=True, slots=True)
class Elected:
    """We lead the group: it waits until `lead` says who gets what."""

    generation: int
    protocol: str
    """The name of the assignor that all members have."""
    members: Mapping[str, Subscription]
    assigned_before: Mapping[str, frozenset[int]] | None = None
    """The partitions in the assignment before this election, by topic, if it was ours, or that of a predecessor with
    our instance id; None if another member led."""

    @property
    def topics(self) -> frozenset[str]:
        """The topics of all members."""
        return frozenset[str]().union(*(member.topics for member in self.members.values()))


ClassicEvent = Event | Elected


class _Session:
    """Until when the coordinator keeps our place in the group.

    Times are those at which we sent the requests: the coordinator counts from their arrival, so never from earlier.
    """

    def __init__(self, timeout: float, rebalance_timeout: float) -> None:
        """Begin without a membership."""
        self.timeout = timeout
        self.rebalance_timeout = rebalance_timeout
        self.forget()

    def forget(self) -> None:
        """Give up the membership."""
        self.end = -math.inf
        """When it ends without another answer."""
        self.heard_at = -math.inf
        """Sending of the latest heartbeat that was answered."""
        self._quiet_at = -math.inf
        """Sending of the latest one that found the group not rebalancing, in the current generation."""
        self._calm_at = -math.inf
        """A time at which the group did not yet wait for the join or sync that it needs next from us."""
        self._has_synced = False
        """Whether our sync of the current generation was answered: the group removes members whose sync is missing."""

    @property
    def removal(self) -> float:
        """When the group removes us at the earliest, unless it has our join or sync: it may wait for it already."""
        return self._calm_at + self.rebalance_timeout

    @property
    def limit(self) -> float:
        """When the first of both may happen."""
        return min(self.end, self.removal)

    def begin_generation(self) -> None:
        """Accept that a join was answered with another generation. It began behind the latest heartbeat of before.

        It may have begun before this join was sent, if the answer to an earlier one was lost.
        """
        self._calm_at = max(self._calm_at, self.heard_at)
        self._quiet_at = self._calm_at
        self._has_synced = False

    def sync(self, sent: float) -> None:
        """Accept that a sync brought an assignment."""
        self._has_synced = True
        self.hear(sent)

    def hear(self, sent: float) -> None:
        """Accept that a heartbeat found the group not rebalancing."""
        self._renew(sent)
        self._quiet_at = max(self._quiet_at, sent)
        if self._has_synced:
            self._calm_at = max(self._calm_at, sent)

    def hear_rebalance(self, sent: float) -> None:
        """Accept that a heartbeat found the group rebalancing."""
        self._renew(sent)
        self.rebalance()

    def rebalance(self) -> None:
        """Accept that the group waits for our next join, and not for a sync any more."""
        self._calm_at = max(self._calm_at, self._quiet_at)

    def _renew(self, sent: float) -> None:
        self.end = max(self.end, sent + self.timeout)
        self.heard_at = max(self.heard_at, sent)


class _State(enum.Enum):
    OUT = "has to join"
    JOINING = "waits for the other members"
    LEADING = "has to assign the partitions"
    SYNCING = "waits for its assignment, or is about to fetch it"
    STABLE = "has its assignment"


class _Goal(enum.Enum):
    JOIN = "be a member"
    STAY_AWAY = "leave, and wait for `resume`"
    END = "leave, and end"


class _Lead:
    """The knowledge and the duties of a leader; empty while another member leads."""

    def __init__(self) -> None:
        """Lead nothing."""
        self.elections: list[Elected] = []
        """New events."""
        self.election: Elected | None = None
        """The election that waits for an assignment."""
        self.assignments: Mapping[str, bytes] = {}
        """The assignments that our sync brings, by member id."""
        self.assigned_from: Mapping[str, frozenset[int]] | None = None
        """The partitions that existed when we assigned them; None if another member leads."""
        self.confirmed_from: Mapping[str, frozenset[int]] | None = None
        """Like `assigned_from`, of the latest assignment that the group has received; see `Elected.assigned_before`."""
        self.known: dict[str, frozenset[int]] = {}
        """The partitions of topics, as far as they were reported."""
        self.rejoin_at = math.inf
        """When to assign again."""

    def end(self) -> None:
        """Another member may lead, or nobody."""
        self.election = None
        self.assignments = {}
        self.assigned_from = None
        self.rejoin_at = math.inf

    def confirm(self) -> None:
        """Accept that the group has an assignment, from us or from another leader."""
        if self.assigned_from is not None:
            self.confirmed_from = self.assigned_from

    def elect(self, election: Elected) -> None:
        """Wait for an assignment."""
        self.election = election
        self.elections.append(election)

    def changed_topics(self) -> list[str]:
        """Return the topics that have other partitions than those that we assigned."""
        return sorted(
            topic for topic, numbers in (self.assigned_from or {}).items() if self.known.get(topic, numbers) != numbers
        )


class ClassicMember:
    """A member of a classic group; see `aioshard.kafka.group.member.GroupMember`.

    It is incremental if all its assignors are: it keeps its partitions during a rebalance, and releases those that the
    group moves. Otherwise it is eager, and releases everything first. So a group can change from an eager assignor to
    an incremental one: first all members offer both, and then, one after another, only the incremental one.

    A join or sync that is sent while an earlier one is unanswered replaces it: the answer to that one is ignored, and
    the connection that waits for it is of no use.
    """

    def __init__(
        self,
        topics: Collection[str],
        assignors: Sequence[Assignor],
        rng: random.Random,
        *,
        session_timeout: float,
        heartbeat_interval: float,
        rebalance_timeout: float,
        instance_id: str | None = None,
    ) -> None:
        """Join with the first `poll`.

        Args:
            topics: The topics to subscribe to.
            assignors: The preferred one first.
            rng: For the jitter of pauses.
            session_timeout: Seconds after which the group removes a member without heartbeats.
            heartbeat_interval: Seconds between two heartbeats.
            rebalance_timeout: Seconds in which each member has to join a rebalance.
            instance_id: The name of a static member.
        """
        self._topics = frozenset(topics)
        self._assignors = tuple(assignors)
        self._interval = heartbeat_interval
        self._instance_id = instance_id
        self.is_incremental = all(assignor.is_incremental for assignor in assignors)
        """Whether we keep our partitions during a rebalance."""
        self._holdings = Holdings()
        self._session = _Session(session_timeout, rebalance_timeout)
        self._previous: tuple[Partitions, int] = NO_PARTITIONS, NOT_A_MEMBER
        """The latest assignment, and its generation; it outlives a loss."""

        self._state = _State.OUT
        self._generation = NOT_A_MEMBER
        """The generation that the latest join gave us; `NOT_A_MEMBER` if the coordinator may not know us."""
        self._protocol = ""
        self._claimed: Partitions = NO_PARTITIONS
        """The partitions that the latest join claimed."""
        self._rejoin_reason: str | None = None
        """Why to join again once we have our assignment; None otherwise."""
        self._in_flight: tuple[ClassicRequest, float] | None = None
        """The unanswered request other than a heartbeat, and when it was sent."""
        self._due = -math.inf
        """When to send the next request other than a heartbeat."""
        self._heartbeat: tuple[ClassicRequest, float] | None = None
        self._heartbeat_due = math.inf

        self._lead = _Lead()
        self._group_before_join: DescribedGroup | None = None
        """The group before we joined as a static member; None if it could not be described."""
        self._was_described = instance_id is None

        self._leave_reason: str | None = None
        """Why we leave; None once we have left."""
        self._leaves_left = _LEAVES
        self._goal = _Goal.JOIN
        self._was_accepted = False
        self._troubled: set[Purpose] = set()
        """The purposes of the requests that fail now."""
        self._pauses = Backoff(rng)
        self._heartbeat_pauses = Backoff(rng)
        self._long_pauses = Backoff(rng, first=5.0, longest=60.0)
        self.ended = False
        """Whether it has left, or may never join."""

    # What others read -------------------------------------------------------------------

    @property
    def ownership(self) -> Ownership:
        """Our partitions now. While a join is unanswered, they may be paused: `alive_until` passes without a loss."""
        return self._holdings.ownership

    @property
    def session(self) -> float:
        """Seconds after which the group removes a member without heartbeats."""
        return self._session.timeout

    @property
    def answered_at(self) -> float:
        """When the latest heartbeat was sent that the coordinator answered; minus infinity outside the group."""
        return self._session.heard_at

    @property
    def leads(self) -> bool:
        """Whether we lead the group, and no further rebalance has begun as far as we know. Any thread may read it."""
        return self._lead.assigned_from is not None

    @property
    def watched(self) -> frozenset[str]:
        """The topics to report to `partitions_changed`: as the leader, those of all members.

        Any thread may read it: each attribute is read once.
        """
        topics = self._topics.union(self._lead.assigned_from or ())
        election = self._lead.election
        return topics if election is None else topics | election.topics

    @property
    def deadline(self) -> float | None:
        """When to call `poll` again; None: only after another call."""
        if self.ended:
            return None
        times = [self._lead.rejoin_at]
        if self._holdings.is_member:
            times.append(self._lost_at)
        if self._in_flight is None and self._next_kind() is not None:
            times.append(self._due)
        if self._heartbeat is None and self._generation != NOT_A_MEMBER:
            times.append(self._heartbeat_due)
        first = min(times)
        return None if first == math.inf else first

    def take_events(self) -> list[ClassicEvent]:
        """Return the events since the last call, in order."""
        events: list[ClassicEvent] = [*self._holdings.take_events(), *self._lead.elections]
        self._lead.elections.clear()
        return events

    # Requests ---------------------------------------------------------------------------

    def poll(self, now: float) -> Sequence[ClassicRequest]:
        """Return the requests to send now; each is answered by one call of `answered` or `failed`."""
        if self.ended:
            return ()
        if self._holdings.is_member and now >= self._lost_at:
            self._lose(self._reason_of_expiry(now))
        if now >= self._lead.rejoin_at:
            self._lead.rejoin_at = math.inf
            self.rejoin(now, "partitions wait to be assigned")
        requests: list[ClassicRequest] = []
        kind = self._next_kind()
        if self._in_flight is None and kind is not None and now >= self._due:
            request = self._build(kind)
            self._in_flight = request, now
            requests.append(request)
        if self._heartbeat is None and self._generation != NOT_A_MEMBER and now >= self._heartbeat_due:
            heartbeat = HeartbeatRequest(
                member_id=self._member_id,
                instance_id=self._instance_id,
                generation=self._generation,
                timeout=self._quick_answer,
            )
            self._heartbeat = heartbeat, now
            requests.append(heartbeat)
        return requests

    def _next_kind(self) -> type[ClassicRequest] | None:
        """Return which request other than a heartbeat comes next; None while there is something to wait for."""
        if self._leave_reason is not None:
            return LeaveRequest
        if self._goal is _Goal.STAY_AWAY:
            return None
        if self._state is _State.SYNCING:
            return SyncRequest
        wants_to_join = self._state is _State.OUT or (self._state is _State.STABLE and self._rejoin_reason is not None)
        must_release = self._holdings.revoking or (not self.is_incremental and self._holdings.owned)
        if not wants_to_join or must_release:
            return None
        return JoinRequest if self._was_described or self._member_id else DescribeRequest

    def _build(self, kind: type[ClassicRequest]) -> ClassicRequest:
        """Return the next request, and change the state as its sending does."""
        if kind is LeaveRequest:
            self._leaves_left -= 1
            return LeaveRequest(member_id=self._member_id, reason=self._leave_reason or "", timeout=self._quick_answer)
        if kind is DescribeRequest:
            return DescribeRequest(timeout=self._quick_answer)
        if kind is SyncRequest:
            return SyncRequest(
                member_id=self._member_id,
                instance_id=self._instance_id,
                generation=self._generation,
                protocol=self._protocol,
                assignments=self._lead.assignments,
                timeout=self._session.rebalance_timeout + _SLOW_ANSWER,
            )
        return self._join()

    def _join(self) -> JoinRequest:
        reason = self._rejoin_reason or "the member starts"
        self._state = _State.JOINING
        self._rejoin_reason = None
        self._claimed = self._holdings.owned
        self._was_described = self._instance_id is None
        self._lead.end()
        if not self.is_incremental:
            self._holdings.await_assignment()
        return JoinRequest(
            member_id=self._member_id,
            instance_id=self._instance_id,
            session_timeout=self._session.timeout,
            rebalance_timeout=self._session.rebalance_timeout,
            protocols=tuple((assignor.name, self._subscription(assignor)) for assignor in self._assignors),
            reason=reason[:LONGEST_REASON],
            timeout=self._session.rebalance_timeout + _SLOW_ANSWER,
        )

    def _subscription(self, assignor: Assignor) -> bytes:
        """Return what we say when we join.

        Claims carry the generation that gave them. Without claims, there is the latest generation all the same: else
        the coordinator could take the join of a follower for a repetition, and would not rebalance.
        """
        partitions, generation = self._previous
        if self.is_incremental:
            partitions = self._claimed
        user_data = assignor.user_data(partitions, generation)
        return write_subscription(Subscription(self._topics, user_data, self._claimed, generation))

    # Answers ----------------------------------------------------------------------------

    def answered(self, request: ClassicRequest, answer: ClassicAnswer, now: float) -> None:
        """Accept the response to a request."""
        sent = self._take(request)
        if sent is None or self.ended:
            return
        match request, answer:
            case DescribeRequest(), Described():
                self._take_description(answer, now)
            case JoinRequest(), Joined():
                self._take_join(request, answer, now)
            case SyncRequest(), Synced():
                self._take_sync(request, answer, sent, now)
            case HeartbeatRequest(), Acknowledged():
                self._take_heartbeat(request, answer.error, sent, now)
            case LeaveRequest(), Acknowledged():
                self._take_leave(request, answer.error, now)
            case _:
                raise TypeError(f"{type(answer).__name__} is not an answer to {type(request).__name__}")

    def failed(self, request: ClassicRequest, now: float, why: str = _NO_ANSWER) -> None:
        """Accept that a request has no response; the coordinator may have handled it."""
        if self._take(request) is None or self.ended:
            return
        match request:
            case DescribeRequest():
                self._take_description(Described(_SERVER_ERROR), now)
            case LeaveRequest():
                self._left("the leave was sent", now)
            case _ if self._leave_reason is None:
                self._retry(request, None, now, why)
            case JoinRequest():
                self._left("the group had not accepted us", now)
            case _:
                pass

    def _take(self, request: ClassicRequest) -> float | None:
        """Return when an unanswered request was sent; None if its answer does not matter any more."""
        if self._heartbeat is not None and self._heartbeat[0] is request:
            sent = self._heartbeat[1]
            self._heartbeat = None
            return sent
        if self._in_flight is not None and self._in_flight[0] is request:
            sent = self._in_flight[1]
            self._in_flight = None
            return sent
        return None

    def _take_description(self, answer: Described, now: float) -> None:
        """Join in any case: without a description, we have the group rebalance afterwards."""
        self._group_before_join = answer.group
        self._was_described = True
        self._due = now

    def _take_join(self, request: JoinRequest, answer: Joined, now: float) -> None:
        if self._leave_reason is not None:
            # It was sent without a member id, and we waited for one to leave with.
            self._holdings.identify(answer.member_id)
            self._due = now
            if not answer.member_id:
                self._left("the group had not accepted us", now)
        elif answer.error == Code.MEMBER_ID_REQUIRED:
            self._holdings.identify(answer.member_id)
            self._state = _State.OUT
            self._due = now if not request.member_id else now + self._pauses.next()
        elif answer.error == Code.REBALANCE_IN_PROGRESS:
            self._state = _State.OUT
            self._due = now + self._pauses.next()
        elif answer.error in _OTHER_PROTOCOL and not self._was_accepted:
            self._end(answer.error, str(error_for(answer.error)), other_protocol=True)
        elif answer.error:
            self._refuse(request, answer.error, now)
        else:
            self._accept(request, answer, now)

    def _accept(self, request: JoinRequest, answer: Joined, now: float) -> None:
        """Begin a generation: we are in it, but what we own is still from the one before."""
        self._recover(request.purpose)
        self._was_accepted = True
        self._holdings.identify(answer.member_id)
        if answer.generation != self._generation:
            self._session.begin_generation()
            self._renew()
        self._generation = answer.generation
        self._protocol = answer.protocol
        self._heartbeat_due = now
        self._due = now
        self._state = _State.SYNCING
        if answer.leader == answer.member_id and not answer.skips_assignment:
            members = {member_id: read_subscription(content) for member_id, content in answer.members.items()}
            self._lead.elect(Elected(answer.generation, answer.protocol, members, self._lead.confirmed_from))
            self._state = _State.LEADING
            return
        self._lead.confirmed_from = None
        if self._instance_id is not None and not request.member_id:
            self._replace_predecessor(self._instance_id, answer)

    def _replace_predecessor(self, instance_id: str, answer: Joined) -> None:
        """Take the place of a static member: the group keeps its assignment, unless its state says otherwise.

        It also keeps the one of a leader, whom it names by the member id that the predecessor had.
        """
        group = self._group_before_join
        predecessor = None if group is None else group.instances.get(instance_id)
        if group is None or (answer.skips_assignment and (predecessor is None or not group.is_stable)):
            self._rejoin_reason = "a static member does not know what its predecessor left"
        elif predecessor is None or not group.is_stable:
            return  # the group has rebalanced, and another member leads
        elif self._topics != group.members[predecessor].topics:
            self._rejoin_reason = "a static member has other topics than its predecessor"
        elif answer.skips_assignment or answer.leader == predecessor or answer.leader not in group.members:
            # An unknown leader has joined in between: it may be us. To watch the group does no harm if it is not.
            self._lead.assigned_from = _assigned_in(group)

    def _take_sync(self, request: SyncRequest, answer: Synced, sent: float, now: float) -> None:
        if answer.error == Code.REBALANCE_IN_PROGRESS:
            self._session.rebalance()
            if self._holdings.is_member:
                # The next join waits for what is being released, and the group accepts commits under this generation.
                self._holdings.renew(self._generation, self._session.limit)
            self._state = _State.OUT
            self._due = now
            return
        if answer.error:
            self._refuse(request, answer.error, now)
            return
        self._recover(request.purpose)
        self._session.sync(sent)
        self._lead.confirm()
        self._previous = answer.assignment, self._generation
        fits = all(partition.topic in self._topics for partition in answer.assignment)
        if not fits:
            self._rejoin_reason = self._rejoin_reason or "the assignment does not fit the subscription"
        if self.is_incremental or self._rejoin_reason is None:
            self._reconcile(answer.assignment, now)
        else:
            self._renew()
            self._state = _State.OUT
        if fits:
            self._pauses.reset()
        else:
            self._due = now + self._pauses.next()

    def _reconcile(self, target: Partitions, now: float) -> None:
        """Take an assignment: what is new is ours, what is missing has to be released, then we join again.

        New partitions of topics that we do not subscribe to any more are not taken. Those that we have are released
        under this generation: the group accepts commits under no other one.
        """
        wanted = frozenset(partition for partition in target if partition.topic in self._topics)
        gone = self._holdings.owned - target
        self._holdings.postpone(self._session.removal)
        is_complete = wanted == target or bool(wanted - self._holdings.owned)
        self._state = _State.STABLE
        if self._claimed - target:
            self._rejoin_reason = self._rejoin_reason or "partitions were released"
        self._holdings.renew(
            self._generation,
            self._session.limit,
            assigned=wanted if is_complete else None,
            revoked=gone,
            deadline=self._session.removal,
        )
        self._rejoin_if_partitions_changed(now)

    def _take_heartbeat(self, request: HeartbeatRequest, code: int, sent: float, now: float) -> None:
        if (request.member_id, request.generation) != (self._member_id, self._generation):
            return
        if code in (0, Code.REBALANCE_IN_PROGRESS):
            self._recover(request.purpose)
            self._heartbeat_pauses.reset()
            if code:
                self._session.hear_rebalance(sent)
            else:
                self._session.hear(sent)
            self._renew()
            self._heartbeat_due = now + self._interval
            if code and self._state is _State.STABLE:
                self.rejoin(now, "the group rebalances")
        elif code == Code.ILLEGAL_GENERATION and self._state is _State.JOINING:
            self._heartbeat_due = now + self._interval  # our join was answered, or is about to be
        else:
            self._refuse(request, code, now)

    def _take_leave(self, request: LeaveRequest, code: int, now: float) -> None:
        moved = code in COORDINATOR_MOVED or code == Code.COORDINATOR_LOAD_IN_PROGRESS
        if moved and self._leaves_left > 0:
            self._due = now + self._pauses.next()
            self._report(code, request.purpose, str(error_for(code)))
        elif not code or code in _GONE or moved:
            self._left("the member has left", now)
        else:
            self._end(code, str(error_for(code)))

    def _refuse(self, request: ClassicRequest, code: int, now: float) -> None:
        """Act on an error code, for the membership that we have now."""
        if code in (Code.UNKNOWN_MEMBER_ID, Code.ILLEGAL_GENERATION):
            if code == Code.UNKNOWN_MEMBER_ID:
                self._forget_id()
            self._lose(str(error_for(code)))
            self._due = now if isinstance(request, HeartbeatRequest) else now + self._pauses.next()
        elif _is_temporary(code):
            self._retry(request, code, now, str(error_for(code)))
        else:
            self._end(code, str(error_for(code)))

    def _retry(self, request: ClassicRequest, code: int | None, now: float, why: str) -> None:
        """Send a request again later; a join in place of a sync, because its assignment may be lost."""
        if isinstance(request, HeartbeatRequest):
            self._heartbeat_due = now + self._heartbeat_pauses.next()
        else:
            pauses = self._long_pauses if code == Code.GROUP_MAX_SIZE_REACHED else self._pauses
            self._state = _State.OUT
            self._due = now + pauses.next()
        self._report(code, request.purpose, why)

    # Commands ---------------------------------------------------------------------------

    def released(self, life: int, partitions: Collection[TopicPartition], now: float) -> None:
        """Give up revoked partitions, which nothing works on any more."""
        if self._holdings.release(life, partitions) and not self._holdings.revoking and self._in_flight is None:
            self._due = min(self._due, now)

    def subscribe(self, topics: Collection[str], now: float) -> None:
        """Subscribe to other topics. Partitions of topics that are not among them have to be released first."""
        if frozenset(topics) == self._topics or self.ended:
            return
        self._topics = frozenset(topics)
        if self._state is not _State.OUT:
            self.rejoin(now, "the subscription has changed")
        unsubscribed = frozenset(partition for partition in self._holdings.owned if partition.topic not in self._topics)
        self._revoke(unsubscribed)

    def rejoin(self, now: float, reason: str) -> None:
        """Have the group rebalance, as soon as we have our assignment and have released what we must."""
        if self._leave_reason is not None or self.ended:
            return
        self._rejoin_reason = self._rejoin_reason or reason
        if self._state is not _State.STABLE:
            return
        self._due = now
        if not self.is_incremental:
            self._revoke(self._holdings.owned)

    def lead(
        self,
        election: Elected,
        assignments: Assignments,
        partitions: Numbers,
        now: float,
        *,
        rejoin_at: float = math.inf,
    ) -> None:
        """Assign the partitions of the group, as its leader.

        Args:
            election: The event to answer. An earlier one than the latest has no effect.
            assignments: The partitions of each member.
            partitions: The partitions that existed, of all topics of the members: if there are others later, we have
                the group rebalance.
            now: The time.
            rejoin_at: When to have the group rebalance, at the latest.
        """
        lead = self._lead
        if election is not lead.election:
            return
        lead.election = None
        lead.assignments = {name: write_assignment(assigned) for name, assigned in assignments.items()}
        numbers = {topic: frozenset(partitions.get(topic, ())) for topic in election.topics}
        lead.assigned_from = numbers
        lead.known.update(numbers)
        lead.rejoin_at = rejoin_at
        self._state = _State.SYNCING
        self._due = now

    def partitions_changed(self, partitions: Numbers, now: float) -> None:
        """Accept the partitions that topics have now; those of a topic that does not exist are empty.

        Leave out topics about which the brokers gave no certain answer.
        """
        self._lead.known.update({topic: frozenset(numbers) for topic, numbers in partitions.items()})
        if self._state is _State.STABLE:
            self._rejoin_if_partitions_changed(now)

    def commit_refused(self, ownership: Ownership, code: int, now: float) -> None:
        """Accept that the coordinator refused a commit that was judged with this ownership.

        Compute the commit again in any case: what is still owned may be committed under the next generation.
        """
        current = self._holdings.ownership
        if (ownership.life, ownership.member_id, ownership.epoch) != (current.life, current.member_id, current.epoch):
            return
        if self.ended or self._generation != current.epoch:
            return  # we are in a later generation, and only wait for our assignment
        if code == Code.REBALANCE_IN_PROGRESS:
            if self._state is _State.STABLE:
                self.rejoin(now, "the group rebalances")
        elif code == Code.FENCED_INSTANCE_ID:
            self._end(code, str(error_for(code)))
        elif code == Code.UNKNOWN_MEMBER_ID:
            self._forget_id()
            self._lose(str(error_for(code)))
            self._due = now
        elif code == Code.ILLEGAL_GENERATION and self._state is not _State.JOINING:
            self._lose(str(error_for(code)))
            self._due = now

    def leave(self, now: float, reason: str) -> None:
        """Leave the group. Partitions that were not released are `Lost` before the leave is sent.

        A static member keeps its place for a session: it only ends.
        """
        if self._goal is _Goal.END or self.ended:
            return
        self._goal = _Goal.END
        self._depart(now, reason)

    def suspend(self, now: float, reason: str) -> None:
        """Leave the group until `resume`. A static member only falls silent."""
        if self._goal is _Goal.JOIN and not self.ended:
            self._goal = _Goal.STAY_AWAY
            self._depart(now, reason)

    def resume(self, now: float) -> None:
        """Join again after `suspend`, once the leave is answered."""
        if self._goal is _Goal.STAY_AWAY:
            self._goal = _Goal.JOIN
            self._due = max(self._due, now)

    def _depart(self, now: float, reason: str) -> None:
        """Give up everything, and leave unless a leave is under way."""
        if self._leave_reason is not None:
            return
        waits_for_id = not self._member_id and self._in_flight is not None
        self._lose(reason)
        if self._instance_id is not None or not (self._member_id or waits_for_id):
            self._left("the member has left", now)
            return
        self._leave_reason = reason[:LONGEST_REASON]
        self._leaves_left = _LEAVES
        if not waits_for_id:
            self._in_flight = None
            self._due = now

    def _left(self, message: str, now: float) -> None:
        """Accept that the group does not count us any more, or that a static member has fallen silent."""
        if self._goal is _Goal.END:
            self._end(0, message)
            return
        self._leave_reason = None
        self._rejoin_reason = message
        self._state = _State.OUT
        self._in_flight = None
        self._due = now
        if self._instance_id is None:
            self._holdings.identify("")

    # Changes ----------------------------------------------------------------------------

    @property
    def _member_id(self) -> str:
        return self._holdings.ownership.member_id

    @property
    def _quick_answer(self) -> float:
        return min(_QUICK_ANSWER, self._session.timeout / 4)

    @property
    def _lost_at(self) -> float:
        """When the partitions are lost, unless there is an answer before.

        While our join or sync is unanswered, others may be late, and the group may remove them instead of us. Then the
        partitions only pause at the time of the removal: our heartbeats tell whether we are still members.
        """
        is_waiting = self._in_flight is not None and self._state in (_State.JOINING, _State.SYNCING)
        return self._session.end if is_waiting else self._holdings.ownership.alive_until

    def _reason_of_expiry(self, now: float) -> str:
        if now >= self._session.end:
            return f"no heartbeat was answered for {self._session.timeout:g} s"
        return f"nothing was released, or the group had no join, for {self._session.rebalance_timeout:g} s"

    def _renew(self) -> None:
        """Apply the limits of the membership to our partitions."""
        if self._holdings.is_member:
            self._holdings.renew(self._holdings.ownership.epoch, self._session.limit)

    def _revoke(self, partitions: Partitions) -> None:
        if partitions:
            self._holdings.renew(
                self._holdings.ownership.epoch,
                self._session.limit,
                revoked=partitions,
                deadline=self._session.removal,
            )

    def _rejoin_if_partitions_changed(self, now: float) -> None:
        """As the leader, have the group rebalance if other partitions exist than those that we assigned."""
        changed = self._lead.changed_topics()
        if changed:
            self.rejoin(now, f"the partitions of {', '.join(changed)} have changed")

    def _lose(self, reason: str) -> None:
        """Give up the membership. A join that is unanswered still counts, as long as its member id does."""
        self._holdings.lose(reason)
        self._session.forget()
        self._lead.end()
        self._lead.confirmed_from = None
        self._generation = NOT_A_MEMBER
        if self._state is not _State.JOINING:
            self._state = _State.OUT
            self._in_flight = None
            self._rejoin_reason = reason

    def _forget_id(self) -> None:
        """Join as a new member: the coordinator does not know ours."""
        self._holdings.identify("")
        self._state = _State.OUT
        self._in_flight = None

    def _end(self, code: int, message: str, *, other_protocol: bool = False) -> None:
        if self._holdings.is_member:
            self._holdings.lose(message)
        self._generation = NOT_A_MEMBER
        self.ended = True
        self._holdings.tell(Refused(code, message) if other_protocol else Ended(code, message))

    def _report(self, code: int | None, purpose: Purpose, why: str) -> None:
        self._troubled.add(purpose)
        moved = code is None or code in COORDINATOR_MOVED
        self._holdings.tell(Troubled(code, why, moved))

    def _recover(self, purpose: Purpose) -> None:
        was_troubled = bool(self._troubled)
        self._troubled.discard(purpose)
        if was_troubled and not self._troubled:
            self._holdings.tell(Recovered())


def _is_temporary(code: int) -> bool:
    """Whether the same request may succeed later."""
    return code in (_SERVER_ERROR, Code.GROUP_MAX_SIZE_REACHED) or error_for(code).retriable


def _assigned_in(group: DescribedGroup) -> Mapping[str, frozenset[int]]:
    """Return the assigned partitions of all topics that the members subscribe to."""
    numbers: dict[str, set[int]] = {topic: set() for member in group.members.values() for topic in member.topics}
    for member in group.members.values():
        for partition in member.owned:
            numbers.setdefault(partition.topic, set()).add(partition.partition)
    return {topic: frozenset(assigned) for topic, assigned in numbers.items()}
