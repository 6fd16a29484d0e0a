"""Drives a member of a classic group."""

import math
import uuid
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from aioshard.kafka.group.classic import Assignments, ClassicEvent, ClassicMember, Elected, Numbers
from aioshard.kafka.group.classic_messages import ClassicAnswer, ClassicRequest, answer_of, message_of, refusal_of
from aioshard.kafka.group.driver import GroupDriver, MemberLoop
from aioshard.kafka.group.member import Ownership
from aioshard.kafka.wire.notation import Request
from aioshard.kafka.wire.pool import Purpose


class ClassicProtocol:
    """A member of a classic group for its driver; see `GroupProtocol`. Its requests say how they travel."""

    def __init__(self, group_id: str, member: ClassicMember) -> None:
        """Describe it."""
        self.group_id = group_id
        self.member = member

    def purpose(self, request: ClassicRequest) -> Purpose:
        """See `GroupProtocol.purpose`."""
        return request.purpose

    def timeout(self, request: ClassicRequest) -> float:
        """See `GroupProtocol.timeout`."""
        return request.timeout

    def message(self, request: ClassicRequest) -> Request:
        """See `GroupProtocol.message`."""
        return message_of(request, self.group_id)

    def answer(self, request: ClassicRequest, response: Any) -> ClassicAnswer:
        """See `GroupProtocol.answer`."""
        return answer_of(request, response, self.group_id)

    def refusal(self, request: ClassicRequest, code: int, message: str) -> ClassicAnswer:  # noqa: ARG002
        """See `GroupProtocol.refusal`."""
        return refusal_of(request, code)

    def look_up(self, loop: MemberLoop[ClassicMember, ClassicEvent]) -> None:
        """See `GroupProtocol.look_up`. The engine looks up the partitions of topics, and reports them."""


class ClassicDriver(GroupDriver[ClassicMember, ClassicEvent]):
    """The driver of a member of a classic group.

    Answer each `Elected` with `lead`: the group waits for the assignment of its leader.
    """

    protocol = "classic"
    unnamed: Mapping[uuid.UUID, float] = MappingProxyType({})
    """Leaders assign topics by name."""
    inherits_within = 0.0
    """The joins of all members end a rebalance together: nobody joins while a dead one counts."""

    @property
    def session_text(self) -> str:
        """See `GroupDriver.session_text`."""
        return f"session_timeout={self.session:g} s"

    @property
    def is_incremental(self) -> bool:
        """See `GroupDriver.is_incremental`: whether all assignors are."""
        return self._member.is_incremental

    @property
    def leads(self) -> bool:
        """Whether we lead the group, and no further rebalance has begun as far as we know."""
        return self._member.leads

    @property
    def watched(self) -> frozenset[str]:
        """The topics to report to `partitions_changed`: as the leader, those of all members."""
        return self._member.watched

    def lead(
        self,
        election: Elected,
        assignments: Assignments,
        partitions: Numbers,
        *,
        rejoin_at: float = math.inf,
    ) -> None:
        """Assign the partitions of the group, as its leader; see `ClassicMember.lead`.

        Args:
            election: The event to answer.
            assignments: The partitions of each member.
            partitions: The partitions that existed, of all topics of the members.
            rejoin_at: When to have the group rebalance, at the latest, by `clock`.
        """
        self._command(lambda member, now: member.lead(election, assignments, partitions, now, rejoin_at=rejoin_at))

    def partitions_changed(self, partitions: Numbers) -> None:
        """Report the partitions that topics have now; see `ClassicMember.partitions_changed`."""
        self._command(lambda member, now: member.partitions_changed(partitions, now))

    def subscribe(self, topics: Collection[str]) -> None:
        """See `GroupDriver.subscribe`."""
        self._command(lambda member, now: member.subscribe(topics, now))

    def rejoin(self, reason: str) -> None:
        """Have the group rebalance, as soon as we have our assignment and have released what we must."""
        self._command(lambda member, now: member.rejoin(now, reason))

    def commit_refused(self, ownership: Ownership, code: int) -> None:
        """See `GroupDriver.commit_refused`."""
        self._command(lambda member, now: member.commit_refused(ownership, code, now))
