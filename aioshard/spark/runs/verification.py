"""What the verification of a run has found, and what of it keeps the run from being handed over."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["NAMED", "Found", "Verification"]

NAMED = 20
"""Offsets of a partition that are named; all are counted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Offsets of one partition.

    Attributes:
        count: How many.
        offsets: The first of them, ascending.
    """

    count: int
    offsets: tuple[int, ...]

    def __str__(self) -> str:
        """For people."""
        named = ", ".join(map(str, self.offsets))
        return f"{named} and {self.count - len(self.offsets)} more" if self.count > len(self.offsets) else named


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Whether every record of a planned range has come to its end exactly once. Partitions are `topic/partition`.

    Attributes:
        plan: The digest of the plan.
        ok: Whether the run may be handed over, once its dead letters are sent.
        ends: How far it was verified: topic, partition, offset.
        records: Outcome rows.
        statuses: Rows by status.
        left: Offsets that the run has not come to, by partition.
        missing: Offsets whose record is in the log now, and that have no row.
        duplicates: Offsets with several rows, or with a row although they had been finished before.
        outside: Offsets with a row that are not in the range.
        halted: Records that halted, named.
        deleted_since: Offsets without a row which are not in the log any more, by partition. That is no error.
        holes: Offsets of the range that hold no record: compacted, or a transaction's marker or aborted record.
        finished: Offsets that had been finished before the run.
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
        """Dead letters that the run owes."""
        return self.statuses.get("dead_lettered", 0)

    @property
    def problems(self) -> tuple[str, ...]:
        """What keeps the run from being handed over: sentences, none where it is `ok`."""
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
        """For JSON."""
        return {**dataclasses.asdict(self), "dead_lettered": self.dead_lettered, "problems": list(self.problems)}
