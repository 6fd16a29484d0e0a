"""The circuit breaker of dead letters."""

from collections import deque
from collections.abc import Callable

from aioshard.core.options import CircuitBreaker


class BreakerState:
    """The state of the circuit breaker of a handler.

    A success costs nothing: for each failed record, the caller says how many records had succeeded when it *first*
    failed. So retries do not matter, which would shift the failures behind later successes. Failures with few
    successes between them are those of one window. Failures may be faster than successes, so it opens only if the
    share stays too high until as many more have failed as records run.

    Example:
        >>> state = BreakerState(CircuitBreaker(failure_rate=0.5, window=4, minimum=2))
        >>> state.fail(10, "KeyError"), state.fail(20, "KeyError"), state.fail(21, "OSError")
        (False, False, False)
        >>> state.fail(21, "OSError"), state.is_open, state.failed, state.alike
        (True, True, 3, 2)
    """

    def __init__(self, limits: CircuitBreaker) -> None:
        self.limits = limits
        self.is_open = False
        self.failed = 0
        """How many of the records in the window had failed when it opened."""
        self.alike = 0
        """Those of them with the latest error."""
        self._failures: deque[tuple[int, str]] = deque(maxlen=limits.window)
        self._ended = 0
        """Failures since the start, or since it closed."""
        self._since = 0
        """How many records had succeeded then."""
        self._suspected: int | None = None
        """How many had failed when the share became too high; None while it is not."""

    def fail(self, successes: int, error: str, running: Callable[[], int] = int) -> bool:
        """Count a record that failed for good; return whether the breaker is open.

        Args:
            successes: How many records had succeeded when it first failed.
            error: Class of the error.
            running: Returns how many records run now that have not failed; called only while the share is too high.
        """
        if not self.is_open:
            self._failures.append((successes, error))
            self._ended += 1
            ended = self._ended + max(successes - self._since, 0)
            window = min(ended, self.limits.window)
            # Of a window with too many failures, at most this many records succeeded.
            between = (1 - self.limits.failure_rate) * window
            errors = [name for before, name in self._failures if abs(successes - before) < between]
            self.failed, self.alike = len(errors), errors.count(error)
            if ended < self.limits.minimum or self.failed <= self.limits.failure_rate * window:
                self._suspected = None
            elif self._suspected is None:
                self._suspected = self._ended
            self.is_open = self._suspected is not None and self._ended - self._suspected >= running()
        return self.is_open

    def close(self, successes: int) -> None:
        """Begin anew: a record has succeeded."""
        self.is_open = False
        self._failures.clear()
        self._ended, self._since, self._suspected = 0, successes, None
