"""User options for records whose attempts are exhausted, and the circuit breaker of dead letters."""

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Literal

from aioshard.core.options import check, is_number, is_topic, is_whole

_TOPIC = "the name of a topic: 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-'"


@dataclasses.dataclass(frozen=True, slots=True)
class CircuitBreaker:
    """When to stop diverting records, because too many of a handler's records fail.

    Closed, every record whose attempts are exhausted is diverted. It opens when more than `failure_rate` of the last
    `window` records failed: a dependency may be down, or the handler or the schema wrong. Then partitions pause when
    one of their records fails, and try one record at a time (half-open) until one succeeds.

    Attributes:
        failure_rate: Share of failed records above which it opens.
        window: How many records count.
        minimum: How many records must have ended, from the start or since it closed, before it may open.

    Raises:
        HandlerError: If a value is outside its range.

    Example:
        >>> CircuitBreaker(failure_rate=0.8, window=500)
        CircuitBreaker(failure_rate=0.8, window=500, minimum=20)
    """

    failure_rate: float = 0.5
    window: int = 100
    minimum: int = 20

    def __post_init__(self) -> None:
        is_share = is_number(self.failure_rate) and 0 < self.failure_rate < 1
        check(self, "failure_rate", is_share, "a share between 0 and 1")
        check(self, "window", is_whole(self.window), "a whole number of at least 1")
        is_possible = is_whole(self.minimum) and self.minimum <= self.window
        check(self, "minimum", is_possible, f"a whole number from 1 to window={self.window}")


@dataclasses.dataclass(frozen=True, slots=True)
class DeadLetter:
    """Send a record whose attempts are exhausted to a dead-letter topic, and continue.

    The record is complete once the brokers have acknowledged the dead letter; its offset is not committed before.

    Attributes:
        topic: Topic for the dead letters.
        breaker: Pauses partitions when too many records fail; None diverts every record.

    Raises:
        HandlerError: If *topic* is not a valid topic name, or *breaker* is not a `CircuitBreaker`.

    Example:
        >>> DeadLetter("orders.dlt", breaker=CircuitBreaker(failure_rate=0.8)).topic
        'orders.dlt'
    """

    topic: str
    breaker: CircuitBreaker | None = dataclasses.field(default_factory=CircuitBreaker)

    def __post_init__(self) -> None:
        check(self, "topic", is_topic(self.topic), _TOPIC)
        check(
            self,
            "breaker",
            self.breaker is None or isinstance(self.breaker, CircuitBreaker),
            "CircuitBreaker(failure_rate=…, window=…, minimum=…), or None for none",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Park:
    """Set aside a record whose attempts are exhausted, with every later record of its key, and continue with the rest.

    Parked records wait, in order, in a compacted side topic, while commits continue. When the delay has passed, or an
    operator releases the key, they are processed in order, before newer records of the key.

    Attributes:
        topic: Topic for parked records. It needs at least as many partitions as each topic of the handler; if it does
            not exist, it is created, compacted.
        delay: Seconds until a parked key is retried.
        attempts: Maximum number of retries; a key that fails once more stays parked until an operator releases or
            drops it. None means unlimited.

    Raises:
        HandlerError: If a value is outside its range.
    """

    topic: str
    delay: float = 60.0
    attempts: int | None = None

    def __post_init__(self) -> None:
        check(self, "topic", is_topic(self.topic), _TOPIC)
        check(self, "delay", is_number(self.delay) and 0 < self.delay < float("inf"), "a number of seconds above 0")
        check(
            self, "attempts", self.attempts is None or is_whole(self.attempts), "a whole number of at least 1, or None"
        )


OnFailure = Literal["halt", "skip"] | DeadLetter | Park


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
