"""Offsets as runs."""

from collections.abc import Iterable

from aioshard.core.finished_offsets import Run, joined


def runs_of(offsets: Iterable[int]) -> tuple[Run, ...]:
    """Groups offsets, in any order."""
    return tuple(joined(Run(offset, offset + 1) for offset in sorted(set(offsets))))
