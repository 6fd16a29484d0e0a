"""Findings in words, the same in a terminal and on a page."""

from aioshard.spark.analysis.tail import Tail
from aioshard.spark.analysis.what_if import WhatIf

__all__ = ["about_slowest", "duration_as_text", "sentences", "share_as_text", "trusted"]

_STEPS = ((10_000, 1e3, "{:.2f} ms"), (1_000_000, 1e3, "{:.1f} ms"), (100_000_000, 1e6, "{:.2f} s"))


def duration_as_text(microseconds: float) -> str:
    """A duration with three digits or four.

    Example:
        >>> [duration_as_text(one) for one in (0, 850, 45_000, 12_300_000, 400_000_000)]
        ['0', '0.85 ms', '45.0 ms', '12.30 s', '400.0 s']
    """
    if microseconds <= 0:
        return "0"
    for below, unit, form in _STEPS:
        if microseconds < below:
            return form.format(microseconds / unit)
    return f"{microseconds / 1e6:.1f} s"


def share_as_text(share: float) -> str:
    """A share from 0 to 1.

    Example:
        >>> share_as_text(0.125)
        '12.5 %'
    """
    return f"{100 * share:.1f} %"


def about_slowest(tail: Tail) -> str:
    """How much of the work, and of the waiting, is due to the slowest records."""
    return (
        f"The slowest 1 % ({tail.slowest:,} records, {duration_as_text(tail.slowest_from_us)} and longer) are "
        f"{share_as_text(tail.slowest_work_share)} of the work. {share_as_text(tail.slowest_wait_share)} of all "
        "waiting was for one of them to end, in the same shard."
    )


def trusted(found: WhatIf) -> list[str]:
    """What was measured, and how well the same configuration is predicted."""
    measured = found.measured
    own = "" if found.own is None else f" ({found.own.label})"
    what = f"{found.records:,} records of handler {found.handler.name!r}{own}"
    within = duration_as_text(measured.total[1])
    told = [f"{what} took {duration_as_text(measured.makespan)}, 99 % within {within} of being taken in."]
    if found.cpu is not None:
        told.append(f"The process took {share_as_text(found.cpu)} of a core.")
    if found.check is not None:
        off = 100 * (found.check.makespan / measured.makespan - 1)
        told.append(
            f"The same configuration, predicted: {duration_as_text(found.check.makespan)} ({off:+.1f} %), 99 % within "
            f"{duration_as_text(found.check.total[1])}. The other predictions are no better than that."
        )
    return told


def sentences(found: WhatIf) -> list[str]:
    """The recommendation with what bounds it, and what the answers leave out."""
    told = []
    if found.recommended is not None and found.recommended.prediction is not None:
        takes = found.recommended.prediction.makespan
        told.append(
            f"Recommended of these: {found.recommended.candidate.label}, the fewest workers within 5 % of the quickest "
            f"({duration_as_text(takes)}, {takes / max(found.best_possible, 1):.2f} times the least possible)."
        )
    if found.hottest_key is not None:
        alone = f"the key {found.hottest_key} alone is {duration_as_text(found.hottest_work)} of work"
        why = f"{alone}, and a key is in order"
    else:
        why = "that is when the last record had come and run"
    least = duration_as_text(found.best_possible)
    return [*told, f"No number of shards, workers or members takes less than {least}: {why}.", *found.remarks]
