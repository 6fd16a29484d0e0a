"""Members of the group that the client was and is no more: the group is told that they have left."""

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
    """Who the client was before it lost its membership.

    When librdkafka hears nothing of the brokers for a session, it drops its member id and joins as somebody else. A
    broker that comes back remembers the old member, gives it another session, and the whole group waits for it.
    """

    def __init__(self, settings: "Settings") -> None:
        """Nobody was anybody yet."""
        # A static member takes its own place again; under KIP-848 the client keeps its id.
        self._counts = settings.group_protocol == "classic" and settings.group_instance_id is None
        self._now = ""
        self._left: list[str] = []
        self._alone = False

    def joined(self, membership: Membership) -> None:
        """The client is this member now."""
        self._now = membership.member_id

    def compare(self, now: Membership) -> None:
        """The client is this member now: when that is another one, who it was is to leave."""
        if self._counts and self._now and now.member_id != self._now:
            self._left.append(self._now)
            self._now = ""

    async def look_at(self, member: Member) -> None:
        """See `compare`; where the client may be called. One that does not tell who it is changes nothing."""
        try:
            now = await member.who()
        except (KafkaException, RuntimeError) as error:
            logger.debug("the client did not tell which member it is: %s", reason(error))
            return
        self.compare(now)

    def may_be_unknown(self, trouble: str | None) -> bool:
        """Whether it is time to `look_at` the client, as it tells only those of a lost membership who had partitions.

        Args:
            trouble: What is wrong with the brokers now; asked for again and again.
        """
        back = self._alone and trouble is None
        self._alone = trouble is not None
        return back and self._counts

    async def leave(self, asking: Asking) -> None:
        """Tell the brokers who has left; whom they could not be told of stays for the next call.

        Raises:
            TransportError: It was not told, which may pass.
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
