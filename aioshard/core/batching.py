"""Micro-batches: how many records a handler gets together, and how long they wait for each other."""

import dataclasses
import math

from aioshard.core.options import check, is_number, is_whole

_SHRINKS = 3
"""Bits by which each failure shrinks the next batch: 500 records, then 62, then 7, then 1."""


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
        return 1 if failures >= attempts - 1 else max(self.max_records >> (_SHRINKS * failures), 1)
