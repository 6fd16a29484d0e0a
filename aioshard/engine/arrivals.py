"""Where deliveries wait that no worker has looked at yet."""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from aioshard.engine.epoch import Delivery

__all__ = ["Arrivals", "BoundedArrivals"]


class Arrivals(Protocol):
    """Deliveries in arrival order: a deque, or a bounded `asyncio.Queue`."""

    def __len__(self) -> int: ...

    def popleft(self) -> Delivery:
        """Take the oldest one out."""

    def extend(self, deliveries: Iterable[Delivery], /) -> None:
        """Queue deliveries, in order."""


class BoundedArrivals:
    """A fixed shard's queue: whoever feeds it waits while it is full."""

    def __init__(self, maxsize: int) -> None:
        self.queue: asyncio.Queue[Delivery] = asyncio.Queue(maxsize)

    def __len__(self) -> int:
        return self.queue.qsize()

    def popleft(self) -> Delivery:
        """Take the oldest one out."""
        return self.queue.get_nowait()

    def extend(self, deliveries: Iterable[Delivery]) -> None:
        """Queue deliveries, in order.

        Raises:
            asyncio.QueueFull: There is no room for all.
        """
        for delivery in deliveries:
            self.queue.put_nowait(delivery)
