"""The vocabulary of group members in both protocols.

A member is a state machine without a clock, an event loop or a connection. A driver owns these, and calls the member:

    for request in member.poll(now):        # the requests to send now; then wait until `member.deadline`
        ...
    member.answered(request, answer, now)   # or member.failed(request, now): no answer, handled by the broker or not
    member.released(life, partitions, now)  # the engine has let go of the partitions that a `Revoked` named
    member.leave(now, reason)
    for event in member.take_events():      # after each of the calls above
        ...

Times are seconds of one clock that also counts while the machine is suspended.
"""

import enum
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from aioshard.records import TopicPartition

Partitions = frozenset[TopicPartition]
NO_PARTITIONS: Final[Partitions] = frozenset()
NOT_A_MEMBER: Final = -1
"""The epoch of an `Ownership` while the group has not accepted us."""
LONGEST_REASON: Final = 255
"""The most characters that brokers accept as the reason of a join or leave."""


class Code(enum.IntEnum):
    """The error codes of coordinators of groups, by Kafka's names; see `aioshard.kafka.wire.codes`."""

    REQUEST_TIMED_OUT = 7
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    UNSUPPORTED_VERSION = 35
    INVALID_REQUEST = 42
    GROUP_ID_NOT_FOUND = 69
    MEMBER_ID_REQUIRED = 79
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    FENCED_MEMBER_EPOCH = 110
    UNRELEASED_INSTANCE_ID = 111
    UNSUPPORTED_ASSIGNOR = 112
    STALE_MEMBER_EPOCH = 113
    INVALID_REGULAR_EXPRESSION = 128


COORDINATOR_MOVED: Final = frozenset(
    {Code.REQUEST_TIMED_OUT, Code.COORDINATOR_NOT_AVAILABLE, Code.NOT_COORDINATOR},
)
"""Codes after which the coordinator has to be looked up; so has it after no answer."""


# Ownership --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ownership:
    """The partitions of a member, and until when they are ours. Any thread may read it: it never changes."""

    life: int
    """The number of the membership. It rises with each loss of a membership: words about an earlier one are ignored."""
    member_id: str
    epoch: int
    """The member epoch, or the generation of a classic member, for commits; `NOT_A_MEMBER` if the group has none."""
    partitions: Partitions
    """All that is owned, including those that are being revoked and were not released yet."""
    alive_until: float
    """From this time on, other members may own the partitions: nothing starts, and nothing is committed."""

    def owns(self, partition: TopicPartition, now: float) -> bool:
        """Whether a partition is ours now."""
        return now < self.alive_until and partition in self.partitions


# Events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assigned:
    """Partitions are ours from now on. There may be none: the first assignment of a life is always reported."""

    life: int
    partitions: Partitions
    """The new ones; those that we keep are not among them."""
    ownership: Ownership
    """Everything that is ours after this event."""


@dataclass(frozen=True, slots=True)
class Revoked:
    """Partitions to finish, to commit, and then to name in `released`, once. They are ours until then."""

    life: int
    partitions: Partitions
    deadline: float
    """When the whole membership is lost unless they are released."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Partitions are not ours any more, released or not: nothing of them may be committed."""

    life: int
    partitions: Partitions
    reason: str


@dataclass(frozen=True, slots=True)
class Troubled:
    """The group does not answer as it should, and the member tries again."""

    code: int | None
    """Kafka's error code; None without an answer."""
    message: str
    coordinator_moved: bool = False
    """Whether to look up the coordinator before the next request."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The group answers again; it follows one or more `Troubled`."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The group does not accept members of this protocol, but may accept the other one. This member has ended."""

    code: int
    message: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The member has left, or may never join. This is its last event."""

    code: int
    """Kafka's error code; 0 if it has left."""
    message: str


Event = Assigned | Revoked | Lost | Troubled | Recovered | Refused | Ended


# Members ----------------------------------------------------------------------------------

RequestT = TypeVar("RequestT")
AnswerT_contra = TypeVar("AnswerT_contra", contravariant=True)
EventT_co = TypeVar("EventT_co", covariant=True)


class GroupMember(Protocol[RequestT, AnswerT_contra, EventT_co]):
    """A member of a group, as its driver sees it."""

    @property
    def ownership(self) -> Ownership:
        """Our partitions now; a new value at each change."""

    @property
    def session(self) -> float:
        """Seconds after which the coordinator removes a silent member, as far as we know."""

    @property
    def answered_at(self) -> float:
        """When the latest heartbeat was sent that the coordinator answered; minus infinity outside the group."""

    @property
    def ended(self) -> bool:
        """Whether it has left, or may never join: there is nothing more to send."""

    @property
    def deadline(self) -> float | None:
        """When to call `poll` again; None: only after another call."""

    def poll(self, now: float) -> Sequence[RequestT]:
        """Return the requests to send now; each is answered by one call of `answered` or `failed`."""

    def answered(self, request: RequestT, answer: AnswerT_contra, now: float) -> None:
        """Accept the response to a request."""

    def failed(self, request: RequestT, now: float, why: str = ...) -> None:
        """Accept that a request has no response; the coordinator may have handled it."""

    def released(self, life: int, partitions: Collection[TopicPartition], now: float) -> None:
        """Give up revoked partitions, which nothing works on any more."""

    def leave(self, now: float, reason: str) -> None:
        """Leave the group. Partitions that were not released are `Lost` before the leave is sent."""

    def suspend(self, now: float, reason: str) -> None:
        """Leave the group until `resume`. Partitions that were not released are `Lost` before the leave is sent."""

    def resume(self, now: float) -> None:
        """Join again after `suspend`."""

    def take_events(self) -> Sequence[EventT_co]:
        """Return the events since the last call, in order."""


# State that both kinds of members have ----------------------------------------------------


class Holdings:
    """The partitions of a member, and the events about them.

    Invariants:
        * A partition enters with one `Assigned`, and goes with one `Lost`, or one `Revoked` and its release.
        * `ownership` is replaced once by each call, by a value that is true as a whole.
        * Partitions of an earlier life are never released.
    """

    def __init__(self, member_id: str = "") -> None:
        """Own nothing, in life 1."""
        self.ownership = Ownership(1, member_id, NOT_A_MEMBER, NO_PARTITIONS, -math.inf)
        self._session_end = -math.inf
        self._revoking: dict[TopicPartition, float] = {}
        self._has_assignment = False
        self._events: list[Event] = []

    @property
    def owned(self) -> Partitions:
        """All that is ours, including what is being revoked."""
        return self.ownership.partitions

    @property
    def revoking(self) -> Partitions:
        """Owned partitions that the engine has yet to release."""
        return frozenset(self._revoking)

    @property
    def is_member(self) -> bool:
        """Whether the group has accepted us in this life."""
        return self.ownership.epoch != NOT_A_MEMBER

    def expired(self, now: float) -> bool:
        """Whether the group may have given our partitions to others: call `lose` before anything else."""
        return self.is_member and now >= self.ownership.alive_until

    def overdue(self, now: float) -> Partitions:
        """Return the partitions that the engine should have released by now."""
        return frozenset(at for at, until in self._revoking.items() if now >= until)

    def identify(self, member_id: str) -> None:
        """Use another member id from now on."""
        self._replace(member_id=member_id)

    def renew(
        self,
        epoch: int,
        session_end: float,
        *,
        assigned: Partitions | None = None,
        revoked: Partitions = NO_PARTITIONS,
        deadline: float = math.inf,
    ) -> None:
        """Accept the group's word that we are a member.

        Args:
            epoch: The member epoch or generation.
            session_end: When the group may remove us without another answer.
            assigned: New partitions; None if the group has not decided yet. Owned ones among them are ignored.
            revoked: Partitions to release; others than owned ones, and those already being revoked, are ignored.
            deadline: When the membership ends unless *revoked* are released.
        """
        gained = NO_PARTITIONS if assigned is None else assigned - self.owned
        leaving = (revoked & self.owned) - self._revoking.keys()
        self._session_end = session_end
        self._revoking.update(dict.fromkeys(leaving, deadline))
        self._replace(epoch=epoch, partitions=self.owned | gained)
        if leaving:
            self._events.append(Revoked(self.ownership.life, leaving, deadline))
        if gained or (assigned is not None and not self._has_assignment):
            self._has_assignment = True
            self._events.append(Assigned(self.ownership.life, gained, self.ownership))

    def postpone(self, deadline: float) -> None:
        """Accept that everything that is being revoked may take until *deadline*: the group waits longer by now."""
        self._revoking.update((partition, max(deadline, until)) for partition, until in self._revoking.items())
        self._replace()

    def await_assignment(self) -> None:
        """Report the next assignment also if it brings nothing: it replaces what an eager member has released."""
        self._has_assignment = False

    def release(self, life: int, partitions: Collection[TopicPartition]) -> Partitions:
        """Give up revoked partitions, and return those that are given up: none of an earlier life."""
        if life != self.ownership.life:
            return NO_PARTITIONS
        gone = frozenset(partitions).intersection(self._revoking)
        for partition in gone:
            del self._revoking[partition]
        self._replace(partitions=self.owned - gone)
        return gone

    def lose(self, reason: str) -> None:
        """Give up the membership and all partitions; a new life begins."""
        lost = self.ownership
        self._session_end = -math.inf
        self._revoking.clear()
        self._has_assignment = False
        self.ownership = Ownership(lost.life + 1, lost.member_id, NOT_A_MEMBER, NO_PARTITIONS, -math.inf)
        if lost.partitions:
            self._events.append(Lost(lost.life, lost.partitions, reason))

    def tell(self, event: Troubled | Recovered | Refused | Ended) -> None:
        """Add another event, behind those about partitions."""
        self._events.append(event)

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events = self._events
        self._events = []
        return events

    def _replace(
        self, *, member_id: str | None = None, epoch: int | None = None, partitions: Partitions | None = None
    ) -> None:
        before = self.ownership
        self.ownership = Ownership(
            before.life,
            before.member_id if member_id is None else member_id,
            before.epoch if epoch is None else epoch,
            before.partitions if partitions is None else partitions,
            min([self._session_end, *self._revoking.values()]),
        )


class Backoff:
    """Growing pauses between attempts, with jitter so that members spread their attempts."""

    def __init__(self, rng: random.Random, first: float = 0.1, longest: float = 1.0) -> None:
        """Begin with the shortest pause.

        Args:
            rng: For the jitter of a fifth.
            first: Seconds of the first pause; each further one is twice as long.
            longest: Seconds of the longest pause.
        """
        self._rng = rng
        self._first = first
        self._longest = longest
        self._attempts = 0

    def next(self) -> float:
        """Return the seconds to wait before the next attempt."""
        pause = min(self._first * 2.0 ** min(self._attempts, 10), self._longest)
        self._attempts += 1
        return pause * self._rng.uniform(0.8, 1.2)

    def reset(self) -> None:
        """Begin with the shortest pause again."""
        self._attempts = 0
