"""What a user may ask for when the attempts of a record are used up, and what diversions cost."""

import dataclasses
from typing import Literal

from aioshard.errors import HandlerError
from aioshard.records import TOPIC_NAME

__all__ = ["Budget", "BudgetAccount", "DeadLetter", "OnFailure", "Park"]


def _refuse(option: str, name: str, value: object, expected: str) -> None:
    raise HandlerError(f"{option}({name}={value!r}) was refused: expected {expected}")


def _check_topic(option: str, topic: object) -> None:
    if not isinstance(topic, str) or not TOPIC_NAME.fullmatch(topic):
        _refuse(option, "topic", topic, "the name of a topic: 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-'")


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """How many records may be diverted: each diversion is paid for by successes.

    A spent budget says that not the records are wrong but something that their handler depends on is down. Their
    partition then pauses and probes with one record at a time until one succeeds.

    Attributes:
        per_success: What each processed record pays in; 0.01 is one diversion for a hundred successes.
        burst: Diversions that are there at the start, and that can be saved up at most.

    Raises:
        HandlerError: If a value is outside its range.
    """

    per_success: float = 0.01
    burst: int = 50

    def __post_init__(self) -> None:
        if type(self.per_success) not in (int, float) or not 0 < self.per_success <= 1:
            _refuse("Budget", "per_success", self.per_success, "a share above 0, at most 1")
        if type(self.burst) is not int or self.burst < 1:
            _refuse("Budget", "burst", self.burst, "a whole number of at least 1")


@dataclasses.dataclass(frozen=True, slots=True)
class DeadLetter:
    """Send a record whose attempts are used up to a dead-letter topic, and go on.

    It is complete when the brokers have acknowledged the dead letter; until then its offset is not committed.

    Attributes:
        topic: Where dead letters go.
        budget: How many there may be; None is no limit.

    Raises:
        HandlerError: If *topic* is no name of a topic, or *budget* no budget.

    Example:
        >>> DeadLetter("orders.dlt", budget=Budget(per_success=0.05, burst=10)).topic
        'orders.dlt'
    """

    topic: str
    budget: Budget | None = dataclasses.field(default_factory=Budget)

    def __post_init__(self) -> None:
        _check_topic("DeadLetter", self.topic)
        if self.budget is not None and not isinstance(self.budget, Budget):
            _refuse("DeadLetter", "budget", self.budget, "Budget(per_success=…, burst=…), or None for no limit")


@dataclasses.dataclass(frozen=True, slots=True)
class Park:
    """Set a record whose attempts are used up aside, with every later record of its key, and go on with the others.

    They wait, in order, in a compacted side topic; the commit goes on. When the delay has passed, or somebody
    releases the key, they are processed in order, before newer records of the key.

    Attributes:
        topic: Where parked records are kept. It has at least as many partitions as each topic of the handler; where it
            does not exist it is created, compacted.
        delay: Seconds until a parked key is tried again.
        attempts: How often; a key that fails once more stays parked until somebody releases or drops it. None
            is without end.

    Raises:
        HandlerError: If a value is outside its range.
    """

    topic: str
    delay: float = 60.0
    attempts: int | None = None

    def __post_init__(self) -> None:
        _check_topic("Park", self.topic)
        if type(self.delay) not in (int, float) or not 0 < self.delay < float("inf"):
            _refuse("Park", "delay", self.delay, "a number of seconds above 0")
        if self.attempts is not None and (type(self.attempts) is not int or self.attempts < 1):
            _refuse("Park", "attempts", self.attempts, "a whole number of at least 1, or None")


OnFailure = Literal["halt", "skip"] | DeadLetter | Park


class BudgetAccount:
    """The diversions that a handler has left.

    Credited from a count of successes that is kept anyway, so that a success costs nothing.

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
        """Whole diversions that can be paid for, after *successes* in all."""
        earned = (successes - self._credited) * self.budget.per_success
        self._left = min(self._left + earned, float(self.budget.burst))
        self._credited = successes
        # A hundred hundredths are one.
        return int(self._left + 1e-9)

    def spend(self, successes: int) -> bool:
        """Pay for one diversion; returns whether there was one left."""
        if self.left(successes) < 1:
            return False
        self._left = max(self._left - 1, 0.0)
        return True
