"""Remove stale members from the group: member ids that our client had before."""

import logging
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from aioshard.errors import TransportError
from aioshard.kafka.confluent.asking import Asking
from aioshard.kafka.confluent.member import Member
from aioshard.kafka.translate import reason
from aioshard.ports import Membership

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["Former"]

logger = logging.getLogger("aioshard.kafka.confluent.client")


class Former:
    """The ids that the client had before it lost its membership.

    If librdkafka hears nothing from the brokers for a session, it drops its member id and joins with a new one. A
    broker that comes back remembers the stale member, gives it another session, and the whole group waits for it.
    """

    def __init__(self, settings: "Settings") -> None:
        """Start without a member id."""
        # A static member reclaims its own place; under KIP-848 the client keeps its id.
        self._counts = settings.group_protocol == "classic" and settings.group_instance_id is None
        self._now = ""
        self._left: list[str] = []
        self._alone = False

    def joined(self, membership: Membership) -> None:
        """Record the client's current member id."""
        self._now = membership.member_id

    def compare(self, now: Membership) -> None:
        """Compare the client's current member id with the last one; if it changed, the old one is stale."""
        if self._counts and self._now and now.member_id != self._now:
            self._left.append(self._now)
            self._now = ""

    async def look_at(self, member: Member) -> None:
        """Query the client and call `compare`; ignores a failed query. Use it where the client may be called."""
        try:
            now = await member.who()
        except (KafkaException, RuntimeError) as error:
            logger.debug("the client did not tell which member it is: %s", reason(error))
            return
        self.compare(now)

    def may_be_unknown(self, trouble: str | None) -> bool:
        """Whether to call `look_at` now: librdkafka reports a lost membership only to members that had partitions.

        Args:
            trouble: The current problem with the brokers, or None. Pass it regularly.
        """
        back = self._alone and trouble is None
        self._alone = trouble is not None
        return back and self._counts

    async def leave(self, asking: Asking) -> None:
        """Remove the stale members from the group; those that could not be removed stay for the next call.

        Raises:
            TransportError: A request failed for a reason that may be transient.
        """
        while self._left:
            member_id = self._left[0]
            try:
                await asking.remove_member(member_id)
            except TransportError as error:
                if error.retriable:
                    raise
                logger.debug("the group waits a session for a member that has left: %s", reason(error))
            self._left.remove(member_id)
