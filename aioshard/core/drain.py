"""When a partition that is being taken away has drained."""

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from aioshard.core.sharding import ShardKey

__all__ = ["DrainPlan", "Drainable"]


class Drainable(Protocol):
    """A record on its way through the engine."""

    @property
    def offset(self) -> int:
        """Its offset."""

    @property
    def key(self) -> ShardKey:
        """Its shard key."""


D = TypeVar("D", bound=Drainable)


class DrainPlan(Generic[D]):
    """What must end before one partition can be handed over without a record being run twice.

    That is what runs, and every queued record below the highest offset that was started: each is a hole
    in what can be committed. What is above has not begun and needs no waiting. A record that failed does
    not delay the drain, nor does what waits in its shard: only another attempt could end them.

    Invariants:
        * `pending` only shrinks, so a drain cannot be prolonged by what happens during it.

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
            incomplete: Its incomplete records.
            highest_started: The highest offset that a worker took, -1 when none was.
        """
        self.pending: dict[int, D] = {d.offset: d for d in incomplete if d.offset <= highest_started}

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        return not self.pending

    def settle(self, delivery: D) -> None:
        """A record completed, failed, or its run was cancelled."""
        self.pending.pop(delivery.offset, None)

    def block(self, key: ShardKey) -> None:
        """The shard of *key* does not go on during this drain: a record in it failed, of whichever partition."""
        if key is not None:
            for offset in [d.offset for d in self.pending.values() if d.key == key]:
                del self.pending[offset]
