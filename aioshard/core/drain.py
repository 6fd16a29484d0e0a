"""Decide when a revoked partition has drained."""

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from aioshard.core.sharding import ShardKey

__all__ = ["DrainPlan", "Drainable"]


class Drainable(Protocol):
    """A record in the engine."""

    @property
    def offset(self) -> int:
        """Its offset."""

    @property
    def key(self) -> ShardKey:
        """Its shard key."""


D = TypeVar("D", bound=Drainable)


class DrainPlan(Generic[D]):
    """The records that must end before a partition can be handed over without running any record twice.

    These are the running records, and every queued record below the highest started offset: each of them holds the
    committable offset back. Records above that have not started and need no waiting. A failed record does not delay
    the drain, nor do the records behind it in its shard: only another attempt could complete them.

    Invariants:
        * `pending` only shrinks, so later events cannot prolong a drain.

    Example:
        >>> from types import SimpleNamespace as Delivery
        >>> one, two, three = (Delivery(offset=n, key=n % 2) for n in (1, 2, 3))
        >>> plan = DrainPlan([one, two, three], highest_started=2)
        >>> plan.settle(one); plan.done
        False
        >>> plan.block(two.key); plan.done
        True
    """

    def __init__(self, incomplete: Iterable[D], highest_started: int) -> None:
        """Plan the drain of one partition.

        Args:
            incomplete: The incomplete records of the partition.
            highest_started: The highest offset that a worker has started; -1 if none.
        """
        self.pending: dict[int, D] = {d.offset: d for d in incomplete if d.offset <= highest_started}

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        return not self.pending

    def settle(self, delivery: D) -> None:
        """Remove a record that completed, failed or was cancelled."""
        self.pending.pop(delivery.offset, None)

    def block(self, key: ShardKey) -> None:
        """Stop waiting for the shard of *key*: a record in it failed, from this or another partition."""
        if key is not None:
            for offset in [d.offset for d in self.pending.values() if d.key == key]:
                del self.pending[offset]
