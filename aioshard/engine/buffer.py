"""The memory of the process: what is buffered, and when whoever waits for room is woken."""

from collections.abc import Callable

from aioshard.core.flow import Usage

__all__ = ["Buffer"]


class Buffer:
    """Records and bytes that the engine holds of all partitions, from being taken in to being complete.

    Owned by the event loop; `take_in` is the pump's, `release` the workers'. Waking costs a completion
    one subtraction: `arm` says after how many completions the pump wants to look again.
    """

    __slots__ = ("bounds", "bytes", "countdown", "records", "wake")

    def __init__(self, bounds: Usage, wake: Callable[[], None]) -> None:
        self.bounds = bounds
        self.records = 0
        self.bytes = 0
        self.wake = wake
        """Called when room was made after `arm`."""
        self.countdown = 0
        """Completions until `wake` is called; not above 0 when nobody asked for it."""

    def take_in(self, records: int, size: int) -> None:
        """Count what was taken in."""
        self.records += records
        self.bytes += size

    def release(self, size: int) -> None:
        """Count one record out."""
        self.records -= 1
        self.bytes -= size
        self.countdown -= 1
        if not self.countdown:
            self.wake()

    def drop(self, records: int, size: int) -> None:
        """Count out the records of an epoch that ended."""
        self.records -= records
        self.bytes -= size
        self.wake()

    def arm(self, after: int | None = None) -> None:
        """Have `wake` called when *after* records were released, by default a tenth of what is held; or earlier."""
        after = max(self.records // 10 if after is None else after, 1)
        self.countdown = min(after, self.countdown) if self.countdown > 0 else after
