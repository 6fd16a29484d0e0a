"""Deliveries that go to the handler together."""

import asyncio
from collections.abc import Hashable

from aioshard.engine.epoch import Delivery
from aioshard.ports import RECORD_OVERHEAD
from aioshard.records import Record

__all__ = ["DeliveryBatch"]


class DeliveryBatch:
    """Deliveries that go to the handler together; those of one shard are in order.

    Invariants:
        * The batch occupies the shards in `keys`: no other delivery of them runs.
        * All its deliveries have failed equally often, so the batch has a single attempt number.
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
        """The shard keys, each with its first delivery."""
        self.limit = limit
        """Maximum number of deliveries."""
        self.size = 0
        """Bytes of keys, values and headers."""
        self.ripe_at = ripe_at
        """Loop time at which it stops waiting for more deliveries."""
        self.full = False
        self.overdue = False
        """Whether it has waited as long as it may."""
        self.plain = True
        """Whether none of the deliveries was cancelled before or takes a detour, now or later."""
        self.payloads: list[object] | None = None
        """The converted records for the handler; None if they are not converted before the run."""
        self.timer: asyncio.TimerHandle | None = None
        """Set while it waits for more deliveries."""
        self.revoked = asyncio.Event()
        """Set when one of its partitions is revoked while it runs."""

    def __repr__(self) -> str:
        """Name in messages: the first record and the number of others."""
        first, *others = self.deliveries
        return f"{first!r} and {len(others)} more" if others else repr(first)

    @property
    def records(self) -> list[Record]:
        """Records of its deliveries, in order; a new list each time."""
        return [delivery.record for delivery in self.deliveries]

    def add(self, delivery: Delivery, max_bytes: int) -> None:
        """Append a delivery that has no shard, or whose shard the batch occupies."""
        self.deliveries.append(delivery)
        self.size += delivery.size - RECORD_OVERHEAD
        if delivery.aside:
            self.plain = False
        if len(self.deliveries) >= self.limit or self.size >= max_bytes:
            self.full = True

    def has_room_for(self, delivery: Delivery, max_bytes: int) -> bool:
        """Return whether one more delivery fits; the first always does."""
        if self.full:
            return False
        return not self.deliveries or self.size + delivery.size - RECORD_OVERHEAD <= max_bytes
