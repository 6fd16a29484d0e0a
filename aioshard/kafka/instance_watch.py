"""Whether another process has our `group_instance_id`, which aiokafka does not find out."""

import logging
import time
from typing import TYPE_CHECKING

from aioshard.core.losses import Losses
from aioshard.ports import NOT_A_MEMBER, InstanceIdTakenError, Membership

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["InstanceWatch"]

logger = logging.getLogger("aioshard.kafka.client")


class InstanceWatch:
    """Looks at the memberships of one client, one after the other.

    When a second process joins with the id, the broker gives it the member's place: same partitions, same generation,
    a new member id. Ours is unknown from then on. aiokafka joins anew, and by that takes the place back, and so on for
    ever. A member that was dropped because it was silent comes back in a later generation.

    Once, it may be an overlap of two processes. When the place is lost again within a session time-out, it must not be
    taken back: whoever notices that first ends, and the other one keeps the place.
    """

    def __init__(self, settings: "Settings", group_id: str) -> None:
        """Nothing was seen yet."""
        self._settings = settings
        self._group_id = group_id
        self._before = NOT_A_MEMBER
        self._losses = Losses(time.monotonic)
        self._was_taken = False
        self.taken: InstanceIdTakenError | None = None
        """The error, once the place was lost again; the client must not join any more then."""

    def _error(self, instance_id: str) -> InstanceIdTakenError:
        return InstanceIdTakenError(self._group_id, instance_id, self._settings.session_timeout, goes_on=True)

    def joined(self, now: Membership) -> None:
        """Take note of a membership that was just given."""
        before, self._before = self._before, now
        instance_id = self._settings.group_instance_id
        if instance_id is None or before == NOT_A_MEMBER:
            return
        self._was_taken = now.generation == before.generation and now.member_id != before.member_id
        if self._was_taken:
            self._losses.again(0.0)
            logger.warning("%s. If it goes on, one of them ends", self._error(instance_id))

    def is_lost(self, now: Membership) -> bool:
        """Whether we have lost our place, looked at before joining anew."""
        lost = now == NOT_A_MEMBER
        instance_id = self._settings.group_instance_id
        if lost and self._was_taken and instance_id and self._losses.again(self._settings.session_timeout):
            self.taken = self._error(instance_id)
        return lost
