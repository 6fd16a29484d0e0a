"""Findings as sentences, identical in a terminal and on a page."""

from aioshard.spark.analysis.arrivals import Arrivals
from aioshard.spark.analysis.tail import Tail
from aioshard.spark.analysis.topic_skew import TopicSkewed

__all__ = [
    "about_arrivals",
    "about_slowest",
    "about_topic_skew",
    "duration_as_text",
    "needs_journal",
    "rate_as_text",
    "share_as_text",
    "size_as_text",
]

_STEPS = ((10_000, 1e3, "{:.2f} ms"), (1_000_000, 1e3, "{:.1f} ms"), (100_000_000, 1e6, "{:.2f} s"))
_KIBI = 1024
_FEW = 10
"""Rates below this many records per second are shown with decimals."""


def duration_as_text(microseconds: float) -> str:
    """Format a duration with three or four digits.

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
    """Format a share from 0 to 1 as a percentage.

    Example:
        >>> share_as_text(0.125)
        '12.5 %'
    """
    return f"{100 * share:.1f} %"


def about_slowest(tail: Tail) -> str:
    """Describe the slowest records' share of the work and of the waiting."""
    return (
        f"The slowest 1 % ({tail.slowest:,} records, {duration_as_text(tail.slowest_from_us)} and longer) are "
        f"{share_as_text(tail.slowest_work_share)} of the work. {share_as_text(tail.slowest_wait_share)} of all "
        "waiting was for one of them to end, in the same shard."
    )


def size_as_text(size: int) -> str:
    """Format a number of bytes with three or four digits.

    Example:
        >>> [size_as_text(one) for one in (0, 850, 45_000, 12_300_000, 400_000_000_000)]
        ['0 B', '850 B', '43.9 KiB', '11.7 MiB', '372.5 GiB']
    """
    if size < _KIBI:
        return f"{size} B"
    amount, unit = float(size), ""
    for unit in ("KiB", "MiB", "GiB", "TiB"):  # noqa: B007 - the last one reached is used
        amount /= _KIBI
        if amount < _KIBI:
            break
    return f"{amount:.1f} {unit}"


def rate_as_text(records: int, microseconds: int) -> str:
    """Format records per second.

    Example:
        >>> rate_as_text(3_000, 2_000_000), rate_as_text(1, 4_000_000)
        ('1,500/s', '0.25/s')
    """
    rate = records * 1e6 / max(microseconds, 1)
    return f"{rate:,.0f}/s" if rate >= _FEW else f"{rate:.2f}/s"


def about_topic_skew(one: TopicSkewed) -> str:
    """Describe how unequal the groups of one kind are."""
    kind = f"{one.by}s" if one.of is None else f"of {one.of:,} fixed shards"
    gini = f"Gini {one.records_gini:.2f} of the records, {one.bytes_gini:.2f} of the bytes"
    most = f"{share_as_text(one.most_records_share)} of the records, {share_as_text(one.most_bytes_share)} of the bytes"
    told = f"{one.groups:,} {kind} have records; {gini}; the hottest has {most}"
    if one.of is None:
        return f"{told}."
    return f"{told}, {one.most_records_share * one.of:.2f} times the records of an equal share."


def about_arrivals(found: Arrivals) -> list[str]:
    """Describe the arrivals, the backlog at the requested rate, and the limits of timestamps."""
    records = sum(one.records for one in found.partitions)
    totals = [sum(at) for at in zip(*(one.records_at for one in found.partitions), strict=True)]
    took, average = duration_as_text(found.wall_us), rate_as_text(records, found.wall_us)
    busiest = f"{rate_as_text(max(totals), found.step_us)} in the busiest {duration_as_text(found.step_us)}"
    told = [f"{records:,} records came in {took}, {average} on average and {busiest}."]
    backlog = found.backlog
    if backlog is not None:
        told.append(
            f"An app that processes {backlog.rate:,.12g} records/s would have been {backlog.most:,} records behind at "
            f"most, {duration_as_text(backlog.most_at_us)} after the oldest record, and done "
            f"{duration_as_text(backlog.left_us)} after the latest one."
        )
    late = sum(one.late for one in found.partitions)
    if late:
        told.append(
            f"{late:,} record(s) have an earlier timestamp than one before them in their partition: they count as "
            "coming when their timestamps say."
        )
    told.append("These are times of coming. " + needs_journal("When records were processed"))
    return told


def needs_journal(what: str) -> str:
    """Explain that a topic does not show *what*, and how to get a journal that does."""
    return (
        f"{what} needs a journal: have the app write one, with App(journal=PATH) or AIOSHARD_JOURNAL=PATH, and give "
        "its directory in place of --topic."
    )
