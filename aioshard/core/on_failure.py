"""User options for records whose attempts are exhausted, and the budget for diversions."""

import dataclasses
from typing import Literal

from aioshard.core.options import check, is_number, is_topic, is_whole

_TOPIC = "the name of a topic: 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-'"


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """A limit on diverted records: successes pay for each diversion.

    An exhausted budget is taken as a sign that a dependency of the handler is down, not that the records are bad. The
    partition then pauses and probes with one record at a time until one succeeds.

    Attributes:
        per_success: Credit for each processed record; 0.01 is one diversion per hundred successes.
        burst: Diversions available at the start, and the most that can be saved up.

    Raises:
        HandlerError: If a value is outside its range.
    """

    per_success: float = 0.01
    burst: int = 50

    def __post_init__(self) -> None:
        is_share = is_number(self.per_success) and 0 < self.per_success <= 1
        check(self, "per_success", is_share, "a share above 0, at most 1")
        check(self, "burst", is_whole(self.burst), "a whole number of at least 1")


@dataclasses.dataclass(frozen=True, slots=True)
class DeadLetter:
    """Send a record whose attempts are exhausted to a dead-letter topic, and continue.

    The record is complete once the brokers have acknowledged the dead letter; its offset is not committed before.

    Attributes:
        topic: Topic for the dead letters.
        budget: Limit on their number; None means no limit.

    Raises:
        HandlerError: If *topic* is not a valid topic name, or *budget* is not a `Budget`.

    Example:
        >>> DeadLetter("orders.dlt", budget=Budget(per_success=0.05, burst=10)).topic
        'orders.dlt'
    """

    topic: str
    budget: Budget | None = dataclasses.field(default_factory=Budget)

    def __post_init__(self) -> None:
        check(self, "topic", is_topic(self.topic), _TOPIC)
        is_valid = self.budget is None or isinstance(self.budget, Budget)
        check(self, "budget", is_valid, "Budget(per_success=…, burst=…), or None for no limit")


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
        is_valid = is_number(self.delay) and 0 < self.delay < float("inf")
        check(self, "delay", is_valid, "a number of seconds above 0")
        check(
            self, "attempts", self.attempts is None or is_whole(self.attempts), "a whole number of at least 1, or None"
        )


OnFailure = Literal["halt", "skip"] | DeadLetter | Park


class BudgetAccount:
    """The remaining diversions of a handler.

    Credit is derived from an existing count of successes, so a success costs nothing.

    Example:
        >>> account = BudgetAccount(Budget(per_success=0.5, burst=2))
        >>> [account.spend(successes=0) for _ in range(3)]
        [True, True, False]
        >>> account.spend(successes=1), account.spend(successes=2)
        (False, True)
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._left = float(budget.burst)
        self._credited = 0

    def left(self, successes: int) -> int:
        """Return the number of diversions available after *successes* in total."""
        earned = (successes - self._credited) * self.budget.per_success
        self._left = min(self._left + earned, float(self.budget.burst))
        self._credited = successes
        # Rounding: a hundred times 0.01 must be 1.
        return int(self._left + 1e-9)

    def spend(self, successes: int) -> bool:
        """Pay for one diversion; return whether one was left."""
        if self.left(successes) < 1:
            return False
        self._left = max(self._left - 1, 0.0)
        return True
