"""How many records a handler takes at once, and how long they wait for each other."""

import dataclasses
import math

from aioshard.errors import HandlerError

__all__ = ["Batch"]

_SHRINKS = 3
"""Bits that each failure takes from the size of the next batch: 500 records, then 62, then 7, then 1."""


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Give the handler a list of records: at most so many, at most so large, and none waits for long.

    A batch goes to the handler as soon as it is full, and no later than *linger* after its first record came. Records
    of different shard keys fill one batch, and so do several of the same, in order.

    Attributes:
        max_records: Records in a batch at most.
        linger: Seconds that a batch waits for more records; 0 takes what is there. Less than `stuck_after`.
        max_bytes: Keys, values and headers in a batch at most; a record that is larger comes alone.

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
        for name, value in (("max_records", self.max_records), ("max_bytes", self.max_bytes)):
            if type(value) is not int or value < 1:
                raise HandlerError(f"Batch({name}={value!r}) was refused: expected a whole number of at least 1")
        if type(self.linger) not in (int, float) or not 0 <= self.linger < math.inf:
            raise HandlerError(f"Batch(linger={self.linger!r}) was refused: expected a number of seconds, 0 or more")

    def size_after(self, failures: int, attempts: int) -> int:
        """How many records may be in a batch with one that has failed *failures* times, of *attempts* at most.

        When a batch fails nobody knows which of its records is to blame. So what failed together is tried again in
        smaller batches, and for the last time alone: then it is known.

        Example:
            >>> [Batch().size_after(failures, attempts=5) for failures in range(5)]
            [500, 62, 7, 1, 1]
            >>> [Batch().size_after(failures, attempts=2) for failures in range(2)]
            [500, 1]
        """
        if not failures:
            return self.max_records
        return 1 if failures >= attempts - 1 else max(self.max_records >> (_SHRINKS * failures), 1)
