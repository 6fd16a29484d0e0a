"""The result of verifying a run, and the problems that prevent its hand-over."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["NAMED", "Found", "Verification"]

NAMED = 20
"""How many offsets of a partition a report names at most; all are counted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Offsets of one partition that a check found.

    Attributes:
        count: How many there are.
        offsets: The first of them, ascending.
    """

    count: int
    offsets: tuple[int, ...]

    def __str__(self) -> str:
        """Return the offsets as text for people."""
        named = ", ".join(map(str, self.offsets))
        return f"{named} and {self.count - len(self.offsets)} more" if self.count > len(self.offsets) else named


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Whether every record of a planned range was handled exactly once. Partitions are named `topic/partition`.

    Attributes:
        plan: The digest of the plan.
        ok: Whether the run may be handed over once its dead letters are sent.
        ends: How far the run was verified: topic, partition, offset.
        records: Number of outcome rows.
        statuses: Rows by status.
        left: Number of offsets that the run has not reached, by partition.
        missing: Offsets whose record is in the log but has no row.
        duplicates: Offsets with several rows, or with a row although they were completed before the run.
        outside: Offsets with a row that are not in the range.
        halted: Names of the records that halted.
        deleted_since: Number of offsets without a row that are no longer in the log, by partition. Not an error.
        holes: Number of offsets in the range without a record: compacted, or a transaction marker or aborted record.
        finished: Number of offsets that were completed before the run.
    """

    plan: str
    ok: bool
    ends: Mapping[str, Mapping[str, int]]
    records: int
    statuses: Mapping[str, int]
    left: Mapping[str, int]
    missing: Mapping[str, Found]
    duplicates: Mapping[str, Found]
    outside: Mapping[str, Found]
    halted: tuple[str, ...]
    deleted_since: Mapping[str, int]
    holes: Mapping[str, int]
    finished: Mapping[str, int]

    @property
    def dead_lettered(self) -> int:
        """Dead letters that the run still has to send."""
        return self.statuses.get("dead_lettered", 0)

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences that explain why the run cannot be handed over; empty if it is `ok`."""
        return tuple(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.halted:
            more = "" if len(self.halted) == 1 else f" and {len(self.halted) - 1} more"
            yield f"{self.halted[0]}{more} halted: correct what it failed with, and drain again"
        for name, count in self.left.items():
            yield f"{name}: the last {count} offset(s) were not drained; drain to the end"
        for name, found in self.missing.items():
            yield f"{name}: {found.count} record(s) in the log have no outcome, offsets {found}"
        for name, found in self.duplicates.items():
            yield f"{name}: {found.count} offset(s) have more than one outcome: {found}"
        for name, found in self.outside.items():
            yield f"{name}: {found.count} outcome(s) are not in the planned range: {found}"

    def asdict(self) -> dict[str, Any]:
        """Return the verification as a dictionary for JSON."""
        return {**dataclasses.asdict(self), "dead_lettered": self.dead_lettered, "problems": list(self.problems)}
