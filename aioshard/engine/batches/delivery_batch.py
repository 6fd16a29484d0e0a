"""Deliveries that go to the handler together."""

import asyncio
from collections.abc import Hashable

from aioshard.engine.epoch import Delivery
from aioshard.ports import RECORD_OVERHEAD
from aioshard.records import Record

__all__ = ["DeliveryBatch"]


class DeliveryBatch:
    """Deliveries that go to the handler together, those of one shard in order.

    Invariants:
        * It occupies the shards in `keys`: nothing else of them runs.
        * All of them have failed equally often, so the batch has one number of attempts.
    """

    __slots__ = (
        "deliveries",
        "full",
        "keys",
        "limit",
        "overdue",
        "payloads",
        "plain",
        "revoked",
        "ripe_at",
        "size",
        "timer",
    )

    def __init__(self, limit: int, ripe_at: float) -> None:
        self.deliveries: list[Delivery] = []
        self.keys: dict[Hashable, Delivery] = {}
        """The shard keys, and of each the first delivery."""
        self.limit = limit
        """How many there may be."""
        self.size = 0
        """Bytes of keys, values and headers."""
        self.ripe_at = ripe_at
        """Loop time at which it waits for no more."""
        self.full = False
        self.overdue = False
        """Whether it has waited for as long as it may."""
        self.plain = True
        """Whether none of them has a past: has run before, or takes a detour now or later."""
        self.payloads: list[object] | None = None
        """What the handler gets for the deliveries, where that was made of their records before."""
        self.timer: asyncio.TimerHandle | None = None
        """Set while it waits for more."""
        self.revoked = asyncio.Event()
        """Set when a partition of which it has records is being taken away while it runs."""

    def __repr__(self) -> str:
        """As messages name it: by its first record."""
        first, *others = self.deliveries
        return f"{first!r} and {len(others)} more" if others else repr(first)

    @property
    def records(self) -> list[Record]:
        """Those of its deliveries, in order; a list of its own each time."""
        return [delivery.record for delivery in self.deliveries]

    def add(self, delivery: Delivery, max_bytes: int) -> None:
        """Append a delivery, of a shard that the batch occupies, or that has no other."""
        self.deliveries.append(delivery)
        self.size += delivery.size - RECORD_OVERHEAD
        if delivery.aside:
            self.plain = False
        if len(self.deliveries) >= self.limit or self.size >= max_bytes:
            self.full = True

    def has_room_for(self, delivery: Delivery, max_bytes: int) -> bool:
        """Whether one more fits; the first always does."""
        if self.full:
            return False
        return not self.deliveries or self.size + delivery.size - RECORD_OVERHEAD <= max_bytes
