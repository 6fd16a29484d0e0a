"""The buffer of the process: how much it holds, and when the intake is woken because there is room."""

import asyncio

from aioshard.core.flow import Usage
from aioshard.engine.current_client import CurrentClient


class Buffer:
    """Records and bytes that the engine holds for all partitions, from intake to completion.

    Owned by the event loop; the intake calls `take_in`, workers call `release`. Waking the intake costs one subtraction
    per completion: `arm` says after how many completions the intake wants to check again.
    """

    __slots__ = ("_client", "_crowding", "bounds", "bytes", "countdown", "records", "unsent")

    def __init__(self, bounds: Usage, client: CurrentClient) -> None:
        """Start empty.

        Args:
            bounds: The most that it may hold.
            client: The client that the intake polls; its poll ends when there is room.
        """
        self.bounds = bounds
        self.records = 0
        self.bytes = 0
        self.unsent = 0
        """Bytes of messages whose transaction has not ended; `bytes` includes them."""
        self.countdown = 0
        """Completions until `wake` is called; 0 or less if `arm` was not called since."""
        self._client = client
        self._crowding: asyncio.Future[None] | None = None
        """See `crowding`; None if nothing has waited for it yet."""

    def wake(self) -> None:
        """Wake the intake: the releases that `arm` counts, or a `drop`, have made room."""
        self._client.wake()

    def take_in(self, records: int, size: int) -> None:
        """Count records that were taken in."""
        self.records += records
        self.bytes += size

    def release(self, size: int) -> None:
        """Subtract a record that has completed."""
        self.records -= 1
        self.bytes -= size
        self.countdown -= 1
        if not self.countdown:
            self.wake()

    def drop(self, records: int, size: int) -> None:
        """Subtract the records of an epoch that has ended."""
        self.records -= records
        self.bytes -= size
        self.wake()

    def hold(self, size: int) -> None:
        """Add messages that wait for a transaction."""
        self.bytes += size
        self.unsent += size
        crowding = self._crowding
        if crowding is not None and not crowding.done() and self.unsent > self.bounds.bytes // 4:
            crowding.set_result(None)

    def crowding(self) -> asyncio.Future[None]:
        """A future that is done once messages are added that take more than a quarter of the buffer with the others."""
        crowding = self._crowding
        if crowding is None or crowding.done():
            self._crowding = crowding = asyncio.get_running_loop().create_future()
        return crowding

    def let_go(self, size: int) -> None:
        """Subtract messages whose transaction or epoch has ended."""
        self.unsent -= size
        self.drop(0, size)

    def arm(self, after: int | None = None) -> None:
        """Call `wake` after *after* releases, by default a tenth of the records held; an earlier wake-up remains."""
        after = max(self.records // 10 if after is None else after, 1)
        self.countdown = min(after, self.countdown) if self.countdown > 0 else after
