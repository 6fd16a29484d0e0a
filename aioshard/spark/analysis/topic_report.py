"""The report of topics as one HTML page. Work and tail are missing, because they need a journal."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from aioshard.spark.analysis.arrivals import Arrivals, find_arrivals
from aioshard.spark.analysis.page import check_plots, escaped, page_of, paragraphs, table, tiles
from aioshard.spark.analysis.topic import Topics
from aioshard.spark.analysis.topic_skew import TopicSkew, TopicSkewed, find_topic_skew
from aioshard.spark.analysis.wording import (
    about_arrivals,
    about_topic_skew,
    duration_as_text,
    needs_journal,
    rate_as_text,
    size_as_text,
)

__all__ = ["TopicFindings", "find_all_of_topics", "topic_page"]


class TopicFindings(NamedTuple):
    """The content of a page."""

    title: str
    skew: TopicSkew
    arrivals: Arrivals


def find_all_of_topics(
    topics: Topics, shards: Sequence[int] = (), *, title: str | None = None, rate: float | None = None
) -> TopicFindings:
    """Run all analyses of topics.

    Args:
        topics: The topics to analyze.
        shards: As for `aioshard.spark.analysis.topic_skew.find_topic_skew`.
        title: Title of the page; by default it names the topics.
        rate: As for `aioshard.spark.analysis.arrivals.find_arrivals`.
    """
    named = title or f"Records of {', '.join(topics.names)}"
    return TopicFindings(named, find_topic_skew(topics, shards), find_arrivals(topics, rate=rate))


def topic_page(found: TopicFindings) -> str:
    """Return the page; its only URLs are the names of XML namespaces.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    check_plots()
    from aioshard.spark.analysis.plots import plot_arrivals, plot_shares  # noqa: PLC0415 - matplotlib on use

    skew, arrivals = found.skew, found.arrivals
    began = datetime.fromtimestamp(arrivals.start_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    missing = needs_journal("What the work on them was, and its tail,")
    sections = [
        f"<h1>{escaped(found.title)}</h1>",
        f"<p>{skew.records:,} records from {began} on, {skew.without_key:,} without a key. {escaped(missing)}</p>",
        tiles(_figures(found)),
        "<h2>Skew</h2>",
    ]
    for one in skew.spread:
        kind = f"By {one.by}" if one.of is None else f"By shard, of {one.of:,}"
        sections += [f"<h3>{kind}</h3>", paragraphs([about_topic_skew(one)])]
        if one.top:
            what = f"{one.by}s" if one.of is None else f"of {one.of} fixed shards"
            sections.append(plot_shares(_shares(one), "bytes", f"Shares of the hottest of {one.groups} {what}"))
    sections += [
        "<h2>Arrivals</h2>",
        paragraphs(about_arrivals(arrivals)),
        plot_arrivals(arrivals),
        _arrivals(arrivals),
    ]
    return page_of(found.title, sections)


def _figures(found: TopicFindings) -> list[tuple[str, str]]:
    skew, arrivals = found.skew, found.arrivals
    return [
        ("records", f"{skew.records:,}"),
        ("of keys and values", size_as_text(skew.bytes)),
        ("keys", f"{skew.spread[0].groups:,}"),
        ("from first to last", duration_as_text(arrivals.wall_us)),
        ("records came", rate_as_text(skew.records, arrivals.wall_us)),
    ]


def _shares(one: TopicSkewed) -> list[tuple[str, float, float]]:
    return [(group.name, group.records / max(one.records, 1), group.bytes / max(one.bytes, 1)) for group in one.top]


def _arrivals(found: Arrivals) -> str:
    rows = [
        (
            one.partition,
            f"{one.records:,}",
            size_as_text(one.bytes),
            rate_as_text(one.most, found.step_us),
            duration_as_text(one.most_at_us),
        )
        for one in found.partitions
    ]
    return table(("partition", "records", "bytes", "busiest", "after"), rows)
