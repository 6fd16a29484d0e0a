"""Detect repeated losses."""

from collections.abc import Callable

__all__ = ["Losses"]


class Losses:
    """Distinguishes an isolated loss from repeated ones.

    Example:
        >>> now = 0.0
        >>> losses = Losses(lambda: now)
        >>> losses.again(45.0)
        False
        >>> now = 50.0
        >>> losses.again(45.0)
        False
        >>> now = 60.0
        >>> losses.again(45.0)
        True
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without any loss; *clock* is in seconds."""
        self._clock = clock
        self._last: float | None = None

    def again(self, within: float) -> bool:
        """Record a loss; return whether the previous one was at most *within* seconds ago."""
        before, self._last = self._last, self._clock()
        return before is not None and self._last - before <= within
