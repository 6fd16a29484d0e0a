"""Queues of deliveries that no worker has looked at yet."""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from aioshard.engine.epoch import Delivery

__all__ = ["Arrivals", "BoundedArrivals"]


class Arrivals(Protocol):
    """Deliveries in arrival order: a deque, or a bounded `asyncio.Queue`."""

    def __len__(self) -> int: ...

    def popleft(self) -> Delivery:
        """Remove and return the oldest delivery."""

    def extend(self, deliveries: Iterable[Delivery], /) -> None:
        """Queue deliveries, in order."""


class BoundedArrivals:
    """Bounded queue of a fixed shard."""

    def __init__(self, maxsize: int) -> None:
        self.queue: asyncio.Queue[Delivery] = asyncio.Queue(maxsize)

    def __len__(self) -> int:
        return self.queue.qsize()

    def popleft(self) -> Delivery:
        """Remove and return the oldest delivery."""
        return self.queue.get_nowait()

    def extend(self, deliveries: Iterable[Delivery]) -> None:
        """Queue deliveries, in order.

        Raises:
            asyncio.QueueFull: There is not enough room for all of them.
        """
        for delivery in deliveries:
            self.queue.put_nowait(delivery)
