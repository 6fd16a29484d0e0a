"""The options of a handler, with the checks of their values."""

import dataclasses
import math
from typing import Any, Literal, get_args

from aioshard.errors import DecodeError, HandlerError, MessageRefusedError, ParkLater, RetryLater
from aioshard.records import TOPIC_NAME

_SHRINKS = 3
"""Bits by which each failure shrinks the next batch: 500 records, then 62, then 7, then 1."""
_DEFAULT_BURST = 0.05
"""The default burst of a rate limit, in seconds of its rate."""
_LONGEST_NAME = 100
"""Characters in the name of a limit, which labels metrics."""
_INITIAL = 8
"""The default beginning of an adaptive concurrency."""
_MOST_TOLERANCE = 10.0
_MOST_FACTOR = 100.0
_TOPIC = "the name of a topic: 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-'"


def check(option: object, name: str, is_valid: bool, expected: str) -> None:
    """Refuse *option*, such as `Retry(...)`, if the value of its field *name* is invalid.

    Raises:
        HandlerError: The value is not *expected*.
    """
    if not is_valid:
        value = getattr(option, name)
        raise HandlerError(f"{type(option).__name__}({name}={value!r}) was refused: expected {expected}")


def is_whole(value: object, most: float = math.inf) -> bool:
    """Whether a value is a whole number from 1 to *most*; a bool is not."""
    return type(value) is int and 1 <= value <= most


def is_number(value: object) -> bool:
    """Whether a value is a number; a bool is not."""
    return type(value) in (int, float)


def is_positive(value: Any) -> bool:
    """Whether a value is a finite number above 0; a bool is not."""
    return is_number(value) and 0 < value < math.inf


def _is_limit_name(value: object) -> bool:
    return isinstance(value, str) and value.strip() == value and 1 <= len(value) <= _LONGEST_NAME


def is_topic(value: object) -> bool:
    """Whether a value is the name of a topic."""
    return isinstance(value, str) and TOPIC_NAME.fullmatch(value) is not None


@dataclasses.dataclass(frozen=True, slots=True)
class Retry:
    """How often and when to retry a failed record; only its shard waits meanwhile.

    Attributes:
        attempts: Maximum number of runs, including the first.
        initial: Seconds before the second attempt.
        maximum: Upper limit of any delay, in seconds.
        factor: Factor by which each delay exceeds the previous one.
        jitter: Random share of a delay, 0 to 1, so that many failed records are not retried at the same moment.
        retry_on: Exceptions that are worth another attempt.
        give_up_on: Exceptions that are not; they take precedence over *retry_on*.

    Raises:
        HandlerError: If a value is outside its range.

    Example:
        >>> retry = Retry(attempts=4, initial=0.5, maximum=1.5, jitter=0.0)
        >>> [retry.delay(ValueError(), attempt, chance=0.0) for attempt in (1, 2, 3, 4)]
        [0.5, 1.0, 1.5, None]
    """

    attempts: int = 5
    initial: float = 0.1
    maximum: float = 30.0
    factor: float = 2.0
    jitter: float = 0.2
    retry_on: tuple[type[BaseException], ...] = (Exception,)
    give_up_on: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        check(self, "attempts", is_whole(self.attempts), "a whole number of at least 1: it counts the first run")
        for name in ("initial", "maximum", "factor", "jitter"):
            check(self, name, is_number(getattr(self, name)), "a number")
        check(self, "initial", self.initial >= 0, "a number of seconds, 0 or more")
        check(self, "maximum", self.maximum >= self.initial, f"at least initial={self.initial}")
        check(self, "factor", self.factor >= 1, "at least 1, so that delays do not shrink")
        check(self, "jitter", 0 <= self.jitter <= 1, "a share between 0 and 1")
        for name in ("retry_on", "give_up_on"):
            try:
                isinstance(None, getattr(self, name))
            except TypeError:
                check(self, name, False, "an exception class, or a tuple of them")  # noqa: FBT003 - just found out

    def delay(self, error: BaseException, attempt: int, chance: float) -> float | None:
        """Return the seconds until the next attempt, or None to give up, as after an error that repeats.

        A `DecodeError` and a `MessageRefusedError` always repeat. A `RetryLater` chooses the delay. A `ParkLater` is
        never waited for here.

        Args:
            error: The exception that attempt number *attempt* raised.
            attempt: Counted from 1.
            chance: A random number from 0 to 1; it changes the delay by up to ± `jitter` / 2 of its value.
        """
        if isinstance(error, RetryLater) and attempt < self.attempts:
            return error.seconds
        repeats = isinstance(error, DecodeError | MessageRefusedError | ParkLater)
        is_final = repeats or isinstance(error, self.give_up_on) or not isinstance(error, self.retry_on)
        if is_final or attempt >= self.attempts:
            return None
        delay = _grown(self.initial, self.factor, attempt - 1, self.maximum)
        return float(min(self.maximum, delay * (1 + self.jitter * (chance - 0.5))))


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Pass the handler a list of records, bounded in number, size and waiting time.

    A batch goes to the handler as soon as it is full, and at most *linger* seconds after its first record arrived.
    A batch may mix records of different shard keys, and may hold several records of the same key, in order.

    Attributes:
        max_records: Maximum number of records in a batch.
        linger: Seconds that a batch waits for more records; 0 takes those already there. Must be below `stuck_after`.
        max_bytes: Maximum bytes of keys, values and headers in a batch; a larger record comes alone.

    Raises:
        HandlerError: If a value is outside its range.

    Example:
        >>> Batch(max_records=1_000, linger=0.2).max_bytes
        1048576
    """

    max_records: int = 500
    linger: float = 0.05
    max_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        check(self, "max_records", is_whole(self.max_records), "a whole number of at least 1")
        check(self, "max_bytes", is_whole(self.max_bytes), "a whole number of at least 1")
        check(self, "linger", is_number(self.linger) and 0 <= self.linger < math.inf, "a number of seconds, 0 or more")

    def size_after(self, failures: int, attempts: int) -> int:
        """Return the maximum batch size for a record that has failed *failures* times, out of *attempts* attempts.

        A failed batch does not say which of its records is to blame. So its records are retried in smaller batches,
        and alone on the last attempt, which identifies the bad one.

        Example:
            >>> [Batch().size_after(failures, attempts=5) for failures in range(5)]
            [500, 62, 7, 1, 1]
            >>> [Batch().size_after(failures, attempts=2) for failures in range(2)]
            [500, 1]
        """
        if not failures:
            return self.max_records
        if failures >= attempts - 1:
            return 1
        return max(self.max_records >> (_SHRINKS * failures), 1)


LimitScope = Literal["process", "group", "key"]
"""The scope in which a limit counts runs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """A rate limit: at most `at_once + per_second * t` runs start in any *t* seconds.

    All handlers of an app that are given an equal limit share it. Every attempt counts as a run, including retries; a
    batch is one run.

    Attributes:
        name: Name of the limit in explanations, statistics and metrics, such as that of the service that it protects.
            An app has one limit of each name.
        per_second: Runs per second in the long run; 0.1 is one in ten seconds.
        burst: Runs that may start together after a quiet period; unused runs beyond that are lost. By default, the
            runs of a twentieth of a second, at least one: timers fire up to a millisecond late, so a smaller burst
            could not keep up with a high rate.
        per: `"process"`: the limit holds for each process. `"group"`: it holds for all members of the consumer group
            together; each has the share of the partitions that it owns. `"key"`: each shard key has a limit of its
            own; needs a handler with one shard for each key, and no batches.

    Raises:
        HandlerError: If a value is outside its range.

    Example:
        >>> Limit("stripe", per_second=100).at_once
        5
        >>> Limit("stripe", per_second=0.5, burst=10, per="group").at_once
        10
    """

    name: str
    per_second: float
    burst: int | None = None
    per: LimitScope = "process"

    def __post_init__(self) -> None:
        check(
            self,
            "name",
            _is_limit_name(self.name),
            f"a name of 1 to {_LONGEST_NAME} characters, as in Limit('stripe', per_second=50)",
        )
        check(self, "per_second", is_positive(self.per_second), "a number of runs greater than 0")
        check(self, "burst", self.burst is None or is_whole(self.burst), "a whole number of at least 1")
        scopes = get_args(LimitScope)
        check(self, "per", self.per in scopes, " or ".join(map(repr, scopes)))

    @property
    def at_once(self) -> int:
        """Number of runs that may start at the same moment: *burst*, or its default."""
        if self.burst is not None:
            return self.burst
        return max(int(self.per_second * _DEFAULT_BURST), 1)

    def divided_among(self, tasks: int) -> "Limit":
        """Return the limit for each of the *tasks* of a backfill that together keep this one in the long run.

        The limit of a key stays as it is: one task has all records of a partition, and usually of a key.

        Example:
            >>> Limit("stripe", 100, burst=10, per="group").divided_among(4)
            Limit(name='stripe', per_second=25.0, burst=2, per='process')
        """
        if self.per == "key":
            return self
        burst = None if self.burst is None else max(self.burst // tasks, 1)
        return Limit(self.name, self.per_second / tasks, burst)


@dataclasses.dataclass(frozen=True, slots=True)
class Adaptive:
    """Concurrency that follows what the back end bears: `concurrency=Adaptive(1, 512)`.

    The handler runs as many records concurrently as the back end serves without queueing. The limit doubles while the
    latency is that of an idle back end, falls when runs begin to queue there, and falls when they raise `RetryLater`.
    Every 16 seconds it is halved for two seconds to measure the latency of an idle back end (less often if runs take
    longer than half a second). All processes do this at the same time, by the system clock, so that none mistakes the
    queue of another for the back end itself: keep their clocks within half a second.

    Attributes:
        minimum: Lowest concurrency.
        maximum: Highest concurrency.
        initial: Concurrency at the start; None means 8, or the allowed value nearest to it. Better too low than too
            high.
        tolerance: Accepted latency, as a multiple of that of an idle back end. If a back end becomes slower
            gradually, instead of queueing at one point, a higher tolerance gives more throughput.

    Raises:
        HandlerError: If a value is outside its range.

    Example:
        >>> Adaptive(1, 512)
        Adaptive(minimum=1, maximum=512, initial=None, tolerance=1.2)
    """

    minimum: int
    maximum: int
    initial: int | None = None
    tolerance: float = 1.2

    def __post_init__(self) -> None:
        least, most, initial = self.minimum, self.maximum, self.initial
        check(self, "minimum", is_whole(least), "a whole number of at least 1")
        check(self, "maximum", is_whole(most) and most >= least, f"a whole number, at least minimum={least}")
        is_valid = initial is None or (is_whole(initial, most) and initial >= least)
        check(self, "initial", is_valid, f"a whole number from {least} to {most}")
        is_valid = is_number(self.tolerance) and 1 < self.tolerance <= _MOST_TOLERANCE
        check(self, "tolerance", is_valid, f"a number above 1, and at most {_MOST_TOLERANCE:g}")

    @property
    def beginning(self) -> int:
        """Concurrency at the start."""
        return self.initial if self.initial is not None else min(max(_INITIAL, self.minimum), self.maximum)

    def at_most(self, maximum: int) -> "Adaptive":
        """Return the same with a lower maximum.

        Example:
            >>> Adaptive(16, 512, initial=100).at_most(8)
            Adaptive(minimum=8, maximum=8, initial=8, tolerance=1.2)
        """
        most = min(self.maximum, maximum)
        initial = None if self.initial is None else min(self.initial, most)
        return Adaptive(min(self.minimum, most), most, initial, self.tolerance)


# When retries are exhausted -----------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class CircuitBreaker:
    """When to stop diverting records, because too many of a handler's records fail.

    While it is closed, every record whose attempts are exhausted is diverted. It opens when more than `failure_rate` of
    the last `window` records failed: a dependency may be down, or the handler or the schema wrong. Then partitions
    pause when one of their records fails, and try one record at a time (half-open) until one succeeds.

    Attributes:
        failure_rate: Share of failed records above which it opens.
        window: How many records count.
        minimum: How many records must have ended, since the start or since it last closed, before it may open.

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
        fits = is_whole(self.minimum, most=self.window)
        check(self, "minimum", fits, f"a whole number from 1 to window={self.window}")


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
class Growing:
    """A delay that grows with each retry of a parked key: `Park("orders.parked", delay=Growing(60.0))`.

    It begins again when a record of the key succeeds.

    Attributes:
        initial: Seconds until the first retry.
        factor: Factor by which each delay exceeds the previous one.
        maximum: Longest delay, in seconds.

    Raises:
        HandlerError: If a value is outside its range.

    Example:
        >>> growing = Growing(60.0, factor=2.0, maximum=300.0)
        >>> [growing.after(retries) for retries in range(5)]
        [60.0, 120.0, 240.0, 300.0, 300.0]
    """

    initial: float
    factor: float = 2.0
    maximum: float = 3600.0

    def __post_init__(self) -> None:
        check(self, "initial", is_positive(self.initial), "a number of seconds above 0")
        is_valid = is_number(self.factor) and 1 <= self.factor <= _MOST_FACTOR
        check(self, "factor", is_valid, f"a number from 1 to {_MOST_FACTOR:g}")
        is_valid = is_positive(self.maximum) and self.maximum >= self.initial
        check(self, "maximum", is_valid, f"a number of seconds, at least initial={self.initial}")

    def after(self, retries: int) -> float:
        """Return the seconds until the next retry of a key that was retried *retries* times."""
        return _grown(self.initial, self.factor, retries, self.maximum)


def _grown(initial: float, factor: float, times: int, maximum: float) -> float:
    """Return a delay that grew by a factor a number of times, at most *maximum*."""
    if not initial:
        return 0.0
    try:
        return min(initial * float(factor) ** times, float(maximum))
    except OverflowError:
        return float(maximum)


@dataclasses.dataclass(frozen=True, slots=True)
class Park:
    """Set aside a record whose attempts are exhausted, with every later record of its key, and continue with the rest.

    Parked records wait, in order, in a compacted side topic, while commits continue. When the delay has passed, or an
    operator releases the key, they are processed in order, before newer records of the key.

    Attributes:
        topic: Topic for parked records; by default the name of the group, followed by `.parked`. It needs at least as
            many partitions as each topic of the handlers that park there; if it does not exist, it is created,
            compacted.
        delay: Seconds until a parked key is retried; `Growing(initial, factor, maximum)` for a delay that grows with
            each retry.
        attempts: Maximum number of retries; a key that fails once more stays parked until an operator releases or
            drops it. None means unlimited.

    Raises:
        HandlerError: If a value is outside its range.
    """

    topic: str = ""
    delay: float | Growing = 60.0
    attempts: int | None = None

    def __post_init__(self) -> None:
        check(self, "topic", self.topic == "" or is_topic(self.topic), _TOPIC)
        is_delay = isinstance(self.delay, Growing) or is_positive(self.delay)
        check(self, "delay", is_delay, "a number of seconds above 0, or Growing(initial, factor, maximum)")
        check(
            self, "attempts", self.attempts is None or is_whole(self.attempts), "a whole number of at least 1, or None"
        )

    def in_group(self, group_id: str) -> "Park":
        """Return the same with the name of its topic, which may derive from that of the consumer group.

        Raises:
            HandlerError: The name of the group cannot be part of the name of a topic.

        Example:
            >>> Park().in_group("billing").topic, Park("orders.parked").in_group("billing").topic
            ('billing.parked', 'orders.parked')
        """
        if self.topic:
            return self
        topic = f"{group_id}.parked"
        if not is_topic(topic):
            raise HandlerError(
                f"Park() names its topic after the group, and {topic!r} cannot be the name of a topic: expected "
                f"{_TOPIC}; name one, as in Park('orders.parked')"
            )
        return dataclasses.replace(self, topic=topic)

    def delay_after(self, retries: int) -> float | None:
        """Return the seconds until the next retry of a key that was retried *retries* times; None if there is none."""
        if self.attempts is not None and retries >= self.attempts:
            return None
        return self.delay.after(retries) if isinstance(self.delay, Growing) else self.delay


OnFailure = Literal["halt", "skip"] | DeadLetter | Park
