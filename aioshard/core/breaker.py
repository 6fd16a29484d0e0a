"""The counting of a circuit breaker: whether too many of the latest records of a handler have failed."""

from collections import deque
from collections.abc import Callable

from aioshard.core.options import CircuitBreaker


class BreakerState:
    """The state of a handler's circuit breaker.

    Successes are not reported one by one. For each failed record, the caller passes how many records had succeeded when
    it *first* failed, so retries do not move the failure behind later successes. Failures with few successes between
    them belong to one window. Failures may be quicker than successes. So after the share became too high, the breaker
    opens only once as many more records have failed as are running.

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
        self._failure_count = 0
        """Failures since the start, or since it last closed."""
        self._successes_before = 0
        """How many records had succeeded then."""
        self._suspected: int | None = None
        """Value of `_failure_count` when the share became too high; None while it is not."""

    def fail(self, successes: int, error: str, running: Callable[[], int] = int) -> bool:
        """Count a record that failed for good; return whether the breaker is open.

        Args:
            successes: How many records had succeeded when it first failed.
            error: Class of the error.
            running: Returns how many records run now that have not failed; called only while the share is too high.
        """
        if self.is_open:
            return True
        self._failures.append((successes, error))
        self._failure_count += 1
        ended = self._failure_count + max(successes - self._successes_before, 0)
        window = min(ended, self.limits.window)
        # Of a window with too many failures, at most this many records succeeded.
        between = (1 - self.limits.failure_rate) * window
        errors = [name for before, name in self._failures if abs(successes - before) < between]
        self.failed = len(errors)
        self.alike = errors.count(error)
        # 1. The share is not too high, or too few records have ended to tell.
        if ended < self.limits.minimum or self.failed <= self.limits.failure_rate * window:
            self._suspected = None
            return False
        # 2. It is too high since this failure, or since an earlier one.
        if self._suspected is None:
            self._suspected = self._failure_count
        # 3. The records that were running then might have succeeded, but at least as many have failed since.
        self.is_open = self._failure_count - self._suspected >= running()
        return self.is_open

    def close(self, successes: int) -> None:
        """Close the breaker and start counting again, because a record has succeeded."""
        self.is_open = False
        self._failures.clear()
        self._failure_count = 0
        self._successes_before = successes
        self._suspected = None
