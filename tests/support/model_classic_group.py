"""The coordinator of one classic group, as a state machine with requests and answers in place of bytes.

group = ModelClassicGroup()
group.handle(request, reply, now)   # calls reply(answer), now or later
group.advance(now)                  # what happens by the clock: sessions and rebalance timeouts end

It does what brokers do: Kafka's `GroupMetadataManager`.
"""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from aioshard.core.assignment import Member
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
from aioshard.kafka.groups import DescribedGroup
from aioshard.kafka.wire.consumer_protocol import assigned_partitions, subscribed_topics

Reply = Callable[[ClassicAnswer], None]


class State(Enum):
    EMPTY = "empty"
    PREPARING = "preparing"
    COMPLETING = "completing"
    STABLE = "stable"


@dataclass
class ModelMember:
    member_id: str
    instance_id: str | None
    protocols: tuple[tuple[str, bytes], ...]
    session: float
    rebalance: float
    expires: float = math.inf
    join: Reply | None = field(default=None, repr=False)
    """Waits for the other members."""
    sync: Reply | None = field(default=None, repr=False)
    """Waits for the leader."""
    has_synced: bool = False
    assignment: bytes = b""

    def subscription(self, protocol: str) -> bytes:
        return dict(self.protocols).get(protocol, b"")


class ModelClassicGroup:
    """One classic group.

    Attributes:
        join_version: The version of JoinGroup that members use: from 9 on, a restarted leader learns that it leads.
        loading_until: Until then, the coordinator loads the group.
        most_members: More are refused.
        completed: The times at which rebalances completed, in order.
    """

    def __init__(self, join_version: int = 9) -> None:
        self.join_version = join_version
        self.loading_until = -math.inf
        self.most_members = math.inf
        self.state = State.EMPTY
        self.generation = 0
        self.protocol = ""
        self.leader = ""
        self.members: dict[str, ModelMember] = {}
        self.pending: dict[str, float] = {}
        """Member ids that were given out and not used yet, and when they expire."""
        self.completed: list[float] = []
        self._ids = itertools.count()
        self._deadline = math.inf
        """Of the rebalance, or of the syncs behind it."""
        self._stored: dict[str, Any] = self._snapshot()

    # By the clock -----------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """When `advance` changes something."""
        expiries = [member.expires for member in self.members.values() if not self._waits(member)]
        return min([self._deadline, *self.pending.values(), *expiries])

    def advance(self, now: float) -> None:
        if now < self.loading_until:
            return
        for member_id in [name for name, expires in self.pending.items() if now >= expires]:
            del self.pending[member_id]
            self._complete_if_all_joined(now)
        for member in list(self.members.values()):
            if now >= member.expires and not self._waits(member) and member.member_id in self.members:
                self._remove(member, now)
        if now < self._deadline:
            return
        if self.state is State.PREPARING:
            self._complete(now)
        elif self.state is State.COMPLETING:
            self._deadline = math.inf
            for member in list(self.members.values()):
                if not member.has_synced:
                    self._remove(member, now)

    @staticmethod
    def _waits(member: ModelMember) -> bool:
        return member.join is not None or member.sync is not None

    # Requests ---------------------------------------------------------------------------

    def handle(self, request: ClassicRequest, reply: Reply, now: float) -> None:
        self.advance(now)
        is_loading = now < self.loading_until
        match request:
            case DescribeRequest():
                reply(Described(14) if is_loading else Described(0, self._description()))
            case JoinRequest():
                if is_loading:
                    reply(Joined(14))
                else:
                    self._join(request, reply, now)
            case SyncRequest():
                if is_loading:
                    reply(Synced(27))
                else:
                    self._sync(request, reply, now)
            case HeartbeatRequest():
                reply(Acknowledged(0 if is_loading else self._beat(request, now)))
            case LeaveRequest():
                reply(Acknowledged(14 if is_loading else self.remove(request.member_id, now)))

    def commit(self, member_id: str, instance_id: str | None, generation: int, now: float) -> int:
        """Return the error code of a commit of this member."""
        self.advance(now)
        if now < self.loading_until:
            return 14
        code = self._validate(member_id, instance_id, generation)
        if code:
            return code
        if self.state is State.COMPLETING:
            return 27
        self._renew(self.members[member_id], now)
        return 0

    def _join(self, request: JoinRequest, reply: Reply, now: float) -> None:
        if request.member_id in self.pending:
            del self.pending[request.member_id]
            self._add(request, request.member_id, reply, now)
        elif request.member_id:
            code = self._validate(request.member_id, request.instance_id, self.generation)
            if code:
                reply(Joined(code))
            elif not self._has_common_protocol(request):
                reply(Joined(23))
            else:
                self._join_again(self.members[request.member_id], request, reply, now)
        elif not self._has_common_protocol(request):
            reply(Joined(23))
        elif request.instance_id is not None:
            self._join_static(request, request.instance_id, reply, now)
        elif len(self.members) + len(self.pending) >= self.most_members:
            reply(Joined(81))
        else:
            member_id = self._new_id()
            self.pending[member_id] = now + request.session_timeout
            reply(Joined(79, member_id))

    def _join_static(self, request: JoinRequest, instance_id: str, reply: Reply, now: float) -> None:
        old = self._of_instance(instance_id)
        new_id = self._new_id()
        if old is None:
            self._add(request, new_id, reply, now)
            return
        leader = self.leader
        for waiting, answer in ((old.join, Joined(82)), (old.sync, Synced(82))):
            if waiting is not None:
                waiting(answer)
        del self.members[old.member_id]
        member = ModelMember(new_id, instance_id, request.protocols, request.session_timeout, request.rebalance_timeout)
        member.assignment = old.assignment
        self.members[new_id] = member
        self._renew(member, now)
        if leader == old.member_id:
            self.leader = new_id
        if self.state is State.STABLE and self._elected_protocol() == self.protocol:
            self._stored = self._snapshot()
            skips = self.join_version >= 9 and self.leader == new_id
            reply(
                Joined(
                    0,
                    new_id,
                    self.generation,
                    self.protocol,
                    self.leader if self.join_version >= 9 else leader,
                    self._subscriptions() if skips else {},
                    skips,
                )
            )
            return
        member.join = reply
        self._prepare(now)

    def _join_again(self, member: ModelMember, request: JoinRequest, reply: Reply, now: float) -> None:
        same = member.protocols == request.protocols
        follows = self.state is State.COMPLETING or (self.state is State.STABLE and member.member_id != self.leader)
        if same and follows:
            reply(self._joined(member))
            return
        member.protocols = request.protocols
        member.session = request.session_timeout
        member.rebalance = request.rebalance_timeout
        member.join = reply
        self._prepare(now)

    def _add(self, request: JoinRequest, member_id: str, reply: Reply, now: float) -> None:
        if len(self.members) >= self.most_members:
            reply(Joined(81))
            return
        self.members[member_id] = ModelMember(
            member_id,
            request.instance_id,
            request.protocols,
            request.session_timeout,
            request.rebalance_timeout,
            join=reply,
        )
        self._prepare(now)

    def _sync(self, request: SyncRequest, reply: Reply, now: float) -> None:
        code = self._validate(request.member_id, request.instance_id, request.generation)
        if not code and request.protocol != self.protocol:
            code = 23
        if not code and self.state is State.PREPARING:
            code = 27
        if code:
            reply(Synced(code))
            return
        member = self.members[request.member_id]
        member.has_synced = True
        if self.state is State.STABLE:
            self._renew(member, now)
            reply(self._synced(member))
            return
        member.sync = reply
        if request.member_id == self.leader:
            self._assign(request.assignments, now)

    def _assign(self, assignments: Mapping[str, bytes], now: float) -> None:
        self.state = State.STABLE
        self._deadline = math.inf
        for member in self.members.values():
            member.assignment = assignments.get(member.member_id, b"")
        self._stored = self._snapshot()
        for member in list(self.members.values()):
            self._renew(member, now)
            waiting = member.sync
            member.sync = None
            if waiting is not None:
                waiting(self._synced(member))

    def _beat(self, request: HeartbeatRequest, now: float) -> int:
        code = self._validate(request.member_id, request.instance_id, request.generation)
        if code:
            return code
        self._renew(self.members[request.member_id], now)
        return 27 if self.state is State.PREPARING else 0

    def remove(self, member_id: str, now: float) -> int:
        """Remove a member that leaves, or that an operator removes; return the error code."""
        if member_id in self.pending:
            del self.pending[member_id]
            self._complete_if_all_joined(now)
            return 0
        if member_id not in self.members:
            return 25
        self._remove(self.members[member_id], now)
        return 0

    def _validate(self, member_id: str, instance_id: str | None, generation: int) -> int:
        if instance_id is not None:
            current = self._of_instance(instance_id)
            if current is None:
                return 25
            if current.member_id != member_id:
                return 82
        if member_id not in self.members or self.state is State.EMPTY:
            return 25
        return 0 if generation == self.generation else 22

    # Rebalances -------------------------------------------------------------------------

    def _prepare(self, now: float) -> None:
        if self.state is not State.PREPARING:
            for member in list(self.members.values()):
                waiting = member.sync
                member.sync = None
                if waiting is not None:
                    waiting(Synced(27))
            self.state = State.PREPARING
            self._deadline = now + max(member.rebalance for member in self.members.values())
        self._complete_if_all_joined(now)

    def _complete_if_all_joined(self, now: float) -> None:
        all_joined = all(member.join is not None for member in self.members.values())
        if self.state is State.PREPARING and all_joined and not self.pending:
            self._complete(now)

    def _complete(self, now: float) -> None:
        """Begin the next generation with those that have joined, and with all static members."""
        for member in list(self.members.values()):
            if member.join is None and member.instance_id is None:
                del self.members[member.member_id]
        self.generation += 1
        self.completed.append(now)
        joined = [member for member in self.members.values() if member.join is not None]
        if not self.members:
            self.state = State.EMPTY
            self._deadline = math.inf
            return
        if not joined:
            self._deadline = now + max(member.rebalance for member in self.members.values())
            return
        if self.leader not in {member.member_id for member in joined}:
            self.leader = joined[0].member_id
        self.protocol = self._elected_protocol()
        self.state = State.COMPLETING
        self._deadline = now + max(member.rebalance for member in self.members.values())
        for member in joined:
            waiting = member.join
            member.join = None
            member.has_synced = False
            self._renew(member, now)
            if waiting is not None:
                waiting(self._joined(member))

    def _remove(self, member: ModelMember, now: float) -> None:
        del self.members[member.member_id]
        for waiting, answer in ((member.join, Joined(25)), (member.sync, Synced(25))):
            if waiting is not None:
                waiting(answer)
        if not self.members and self.state is not State.PREPARING:
            self.state = State.PREPARING
            self._complete(now)
        elif self.state in (State.STABLE, State.COMPLETING):
            self._prepare(now)
        else:
            self._complete_if_all_joined(now)

    def _has_common_protocol(self, request: JoinRequest) -> bool:
        others = [
            {name for name, _ in member.protocols}
            for member in self.members.values()
            if member.member_id != request.member_id and member.instance_id != (request.instance_id or "")
        ]
        return bool({name for name, _ in request.protocols}.intersection(*others))

    def _elected_protocol(self) -> str:
        common = set.intersection(*({name for name, _ in member.protocols} for member in self.members.values()))
        votes = Counter(
            next(name for name, _ in member.protocols if name in common) for member in self.members.values()
        )
        return max(sorted(votes), key=lambda name: votes[name])

    # Answers ----------------------------------------------------------------------------

    def _joined(self, member: ModelMember) -> Joined:
        leads = member.member_id == self.leader
        members = self._subscriptions() if leads else {}
        return Joined(0, member.member_id, self.generation, self.protocol, self.leader, members)

    def _subscriptions(self) -> dict[str, bytes]:
        return {name: member.subscription(self.protocol) for name, member in self.members.items()}

    @staticmethod
    def _synced(member: ModelMember) -> Synced:
        return Synced(0, frozenset(assigned_partitions(member.assignment)))

    def _description(self) -> DescribedGroup:
        return DescribedGroup(
            self.state is State.STABLE,
            {
                name: Member(
                    subscribed_topics(member.subscription(self.protocol)), assigned_partitions(member.assignment)
                )
                for name, member in self.members.items()
            },
            {member.instance_id: name for name, member in self.members.items() if member.instance_id is not None},
        )

    # Other brokers ----------------------------------------------------------------------

    def move(self, now: float, loading: float) -> None:
        """Let another broker load what was stored when the last rebalance was complete."""
        for member in self.members.values():
            for waiting, answer in ((member.join, Joined(16)), (member.sync, Synced(16))):
                if waiting is not None:
                    waiting(answer)
            member.join = member.sync = None
        self.__dict__.update(copy.deepcopy(self._stored))
        self.pending.clear()
        self._deadline = math.inf
        self.loading_until = now + loading
        for member in self.members.values():
            self._renew(member, self.loading_until)

    def _snapshot(self) -> dict[str, Any]:
        members = {}
        for name, member in self.members.items():
            members[name] = copy.copy(member)
            members[name].join = members[name].sync = None
        names = ("state", "generation", "protocol", "leader")
        return {name: getattr(self, name) for name in names} | {"members": members}

    # Details ----------------------------------------------------------------------------

    def _new_id(self) -> str:
        return f"m{next(self._ids)}"

    def _of_instance(self, instance_id: str) -> ModelMember | None:
        found = [member for member in self.members.values() if member.instance_id == instance_id]
        return found[0] if found else None

    @staticmethod
    def _renew(member: ModelMember, now: float) -> None:
        member.expires = now + member.session
