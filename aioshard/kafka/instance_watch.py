"""Detect another process with our `group_instance_id`, which aiokafka does not notice."""

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
    """Compares successive memberships of one client.

    When a second process joins with the same id, the broker gives it the member's place: same partitions, same
    generation, a new member id. Our member id is unknown from then on. aiokafka rejoins and takes the place back, and
    the two alternate forever. A member dropped because it was silent comes back in a later generation.

    A single loss may be two processes that overlap, as in a rolling deploy. If we lose the place again within a
    session time-out, we must not take it back: the process that notices this first ends, and the other one keeps it.
    """

    def __init__(self, settings: "Settings", group_id: str) -> None:
        """Start without a membership."""
        self._settings = settings
        self._group_id = group_id
        self._before = NOT_A_MEMBER
        self._losses = Losses(time.monotonic)
        self._was_taken = False
        self.taken: InstanceIdTakenError | None = None
        """The error, once we lost the place again; from then on, the client must not rejoin."""

    def _error(self, instance_id: str) -> InstanceIdTakenError:
        return InstanceIdTakenError(self._group_id, instance_id, self._settings.session_timeout, goes_on=True)

    def joined(self, now: Membership) -> None:
        """Record a new membership."""
        before, self._before = self._before, now
        instance_id = self._settings.group_instance_id
        if instance_id is None or before == NOT_A_MEMBER:
            return
        self._was_taken = now.generation == before.generation and now.member_id != before.member_id
        if self._was_taken:
            self._losses.again(0.0)
            logger.warning("%s. If it goes on, one of them ends", self._error(instance_id))

    def is_lost(self, now: Membership) -> bool:
        """Return whether we have lost our place; call it before rejoining."""
        lost = now == NOT_A_MEMBER
        instance_id = self._settings.group_instance_id
        if lost and self._was_taken and instance_id and self._losses.again(self._settings.session_timeout):
            self.taken = self._error(instance_id)
        return lost
