"""What `aioshard report skew` and `lag` print of topics."""

from typing import TYPE_CHECKING

import click

from aioshard.cli.tables import as_text, cut, print_table

if TYPE_CHECKING:
    from aioshard.spark.analysis.arrivals import Arrivals
    from aioshard.spark.analysis.topic_skew import TopicSkew

__all__ = ["show_arrivals", "show_topic_skew"]

_ROWS = 12
"""Steps of a table; with --json there are as many as were asked for."""


def show_topic_skew(found: "TopicSkew") -> None:
    """Print how unequal keys, partitions and shards are."""
    from aioshard.spark.analysis.wording import (  # noqa: PLC0415 - imported on use
        about_topic_skew,
        needs_journal,
        share_as_text,
        size_as_text,
    )

    click.echo(
        f"{found.records:,} records of {', '.join(found.topics)}, {size_as_text(found.bytes)} of keys and values, "
        f"{found.without_key:,} without a key"
    )
    for one in found.spread:
        click.echo("")
        click.echo(f"by {one.by}: {about_topic_skew(one)}")
        rows = [
            (
                cut(as_text(group.name)),
                f"{group.records:,}",
                share_as_text(group.records / one.records if one.records else 0),
                size_as_text(group.bytes),
                share_as_text(group.bytes / one.bytes if one.bytes else 0),
            )
            for group in one.top
        ]
        print_table((one.by, "records", "share", "bytes", "share"), rows)
    click.echo("")
    click.echo(needs_journal("What the work on them was"))


def show_arrivals(found: "Arrivals") -> None:
    """Print when the records came, and how far behind an app would have been."""
    from aioshard.spark.analysis.wording import (  # noqa: PLC0415 - imported on use
        about_arrivals,
        duration_as_text,
        rate_as_text,
        size_as_text,
    )

    print_table(
        ("partition", "records", "bytes", "busiest", "after"),
        [
            (
                as_text(one.partition),
                f"{one.records:,}",
                size_as_text(one.bytes),
                rate_as_text(one.most, found.step_us),
                duration_as_text(one.most_at_us),
            )
            for one in found.partitions
        ],
    )
    click.echo("")
    steps = len(found.partitions[0].records_at)
    at_once = max(-(-steps // _ROWS), 1)
    behind = found.backlog.behind_at if found.backlog is not None else None
    rows = []
    for slot in range(0, steps, at_once):
        until = min(slot + at_once, steps)
        came = sum(sum(one.records_at[slot:until]) for one in found.partitions)
        size = sum(sum(one.bytes_at[slot:until]) for one in found.partitions)
        row = (
            duration_as_text(slot * found.step_us),
            f"{came:,}",
            rate_as_text(came, (until - slot) * found.step_us),
            size_as_text(size),
        )
        rows.append(row if behind is None else (*row, f"{behind[until - 1]:,}"))
    print_table(("after", "records", "rate", "bytes", *(() if behind is None else ("behind",))), rows)
    click.echo("")
    for sentence in about_arrivals(found):
        click.echo(sentence)
