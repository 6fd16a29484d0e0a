"""`aioshard report skew`, `tail` and `lag`: what the journal says of the run itself."""

import click

from aioshard.cli.report_options import AskedOf, asked, journal_only, opened, opened_topics, print_json, shards, top
from aioshard.cli.report_topic import show_arrivals, show_topic_skew
from aioshard.cli.tables import as_text, cut, print_table

__all__ = ["lag", "skew", "tail"]

_LAG_ROWS = 12
"""Moments of a table; with --json there are as many as were asked for."""


@click.command()
@asked("the totals, and the hottest of each kind,")
@top
@shards
def skew(*, of: AskedOf, as_json: bool, top: int, shards: tuple[int, ...]) -> None:
    """How unequal the keys, partitions and shards of JOURNAL are, or of a topic.

    Work is how long the handler ran: the sum of the latest attempts. A Gini coefficient of 0 says that all have as
    much; close to 1, that one has it all. A topic has no work: its records and bytes are counted.
    """
    if of.topics:
        _topic_skew(of, top, shards, as_json=as_json)
        return
    of.refuse(shards=shards)
    with opened(of) as journal:
        from aioshard.spark.analysis.skew import find_skew  # noqa: PLC0415 - imported on use
        from aioshard.spark.analysis.wording import duration_as_text, share_as_text  # noqa: PLC0415

        found = find_skew(journal, of.handler, top)
    if as_json:
        print_json(found)
        return
    click.echo(
        f"{found.records:,} records of handler {found.handler!r}, {duration_as_text(found.work_us)} of work, "
        f"{found.without_key:,} without a key"
    )
    if found.retried:
        click.echo(f"{found.retried:,} took more than one attempt; the work is that of the latest")
    for one in found.spread:
        click.echo("")
        click.echo(
            f"by {one.by}: {one.groups:,}; Gini {one.records_gini:.2f} of the records, {one.work_gini:.2f} of the work;"
            f" the hottest has {share_as_text(one.most_records_share)} of the records, "
            f"{share_as_text(one.most_work_share)} of the work"
        )
        rows = [
            (
                cut(as_text(group.name)),
                f"{group.records:,}",
                share_as_text(group.records / one.records if one.records else 0),
                duration_as_text(group.work_us),
                share_as_text(group.work_us / one.work_us if one.work_us else 0),
            )
            for group in one.top
        ]
        print_table((one.by, "records", "share", "work", "share"), rows)


@click.command()
@journal_only("the percentiles, and what finished last,", "What took long")
@top
def tail(*, of: AskedOf, as_json: bool, top: int) -> None:
    """What took long in JOURNAL, and what finished last.

    Wait is from being taken in to the start of the latest attempt, service is that attempt, total is both.
    """
    with opened(of) as journal:
        from aioshard.spark.analysis.tail import LEVELS, find_tail  # noqa: PLC0415 - imported on use
        from aioshard.spark.analysis.wording import about_slowest, duration_as_text  # noqa: PLC0415

        found = find_tail(journal, of.handler, top)
    if as_json:
        print_json(found)
        return
    click.echo(f"{found.records:,} records of handler {found.handler!r} in {duration_as_text(found.wall_us)}")
    if not found.records:
        return
    headings = ("", "mean", *(f"{100 * level:g} %" for level in LEVELS))
    print_table(
        headings,
        [(one.of, duration_as_text(one.mean), *map(duration_as_text, one.levels)) for one in found.percentiles],
    )
    click.echo("")
    click.echo(about_slowest(found))
    for what, last in (("partition", found.partitions), ("key", found.keys)):
        click.echo("")
        print_table(
            (f"last {what}s", "ended after", "records", "work"),
            [
                (
                    cut(as_text(one.name)),
                    duration_as_text(one.finished_us),
                    f"{one.records:,}",
                    duration_as_text(one.work_us),
                )
                for one in last
            ],
        )


@click.command()
@asked("the lag of each partition over time")
@click.option("--moments", type=click.IntRange(1), default=60, show_default=True, help="How many moments to look at.")
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="With --topic: how far behind an app would have been that processes N records/s.",
)
def lag(*, of: AskedOf, as_json: bool, moments: int, rate: float | None) -> None:
    """How far behind each partition of JOURNAL was, or when the records of a topic came.

    A journal has what was finished. So a record counts from its timestamp to its end, and one that never ended does
    not count at all. A topic has no ends: its timestamps say when records came, and how fast.
    """
    if of.topics:
        _arrivals(of, moments, rate, as_json=as_json)
        return
    of.refuse(rate=rate)
    with opened(of) as journal:
        from aioshard.spark.analysis.lag import find_lag  # noqa: PLC0415 - imported on use
        from aioshard.spark.analysis.wording import duration_as_text  # noqa: PLC0415

        found = find_lag(journal, of.handler, moments)
    if as_json:
        print_json(found)
        return
    print_table(
        ("partition", "most unfinished", "of them taken in", "after"),
        [
            (
                as_text(one.partition),
                f"{one.most.unfinished:,}",
                f"{one.most.in_hand:,}",
                duration_as_text(one.most.at_us),
            )
            for one in found.partitions
        ],
    )
    click.echo("")
    every = max(-(-moments // _LAG_ROWS), 1)
    print_table(
        ("after", "unfinished", "of them taken in"),
        [
            (
                duration_as_text(slot * found.step_us),
                f"{sum(one.moments[slot].unfinished for one in found.partitions):,}",
                f"{sum(one.moments[slot].in_hand for one in found.partitions):,}",
            )
            for slot in range(0, moments + 1, every)
        ],
    )
    if found.made_up:
        click.echo("")
        click.echo(f"{found.made_up:,} record(s) have a timestamp after their arrival: somebody's clock is wrong.")


def _topic_skew(of: AskedOf, top: int, shards: tuple[int, ...], *, as_json: bool) -> None:
    with opened_topics(of) as topics:
        from aioshard.spark.analysis.topic_skew import find_topic_skew  # noqa: PLC0415 - imported on use

        found = find_topic_skew(topics, shards, top)
    if as_json:
        print_json(found)
    else:
        show_topic_skew(found)


def _arrivals(of: AskedOf, moments: int, rate: float | None, *, as_json: bool) -> None:
    with opened_topics(of) as topics:
        from aioshard.spark.analysis.arrivals import find_arrivals  # noqa: PLC0415 - imported on use

        found = find_arrivals(topics, moments, rate)
    if as_json:
        print_json(found)
    else:
        show_arrivals(found)
