"""The buffer of the process: how much it holds, and when the pump is woken because there is room."""

from collections.abc import Callable

from aioshard.core.flow import Usage


class Buffer:
    """Records and bytes that the engine holds for all partitions, from intake to completion.

    Owned by the event loop; the pump calls `take_in`, workers call `release`. Waking the pump costs one subtraction per
    completion: `arm` says after how many completions the pump wants to check again.
    """

    __slots__ = ("bounds", "bytes", "countdown", "hurry", "records", "unsent", "wake")

    def __init__(self, bounds: Usage, wake: Callable[[], None]) -> None:
        self.bounds = bounds
        self.records = 0
        self.bytes = 0
        self.unsent = 0
        """Bytes of messages whose transaction has not ended; `bytes` includes them."""
        self.hurry: Callable[[], object] = lambda: None
        """Called when these messages take too much of the buffer."""
        self.wake = wake
        """Called when room was made: by the releases that `arm` counts, or by `drop`."""
        self.countdown = 0
        """Completions until `wake` is called; 0 or less if `arm` was not called since."""

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
        """Add messages that wait for a transaction; request one when they take more than a quarter of the buffer."""
        self.bytes += size
        self.unsent += size
        if self.unsent > self.bounds.bytes // 4:
            self.hurry()

    def let_go(self, size: int) -> None:
        """Subtract messages whose transaction or epoch has ended."""
        self.unsent -= size
        self.drop(0, size)

    def arm(self, after: int | None = None) -> None:
        """Call `wake` after *after* releases, by default a tenth of the records held; an earlier wake-up remains."""
        after = max(self.records // 10 if after is None else after, 1)
        self.countdown = min(after, self.countdown) if self.countdown > 0 else after
