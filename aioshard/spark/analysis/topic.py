"""Topics as Spark reads them, for analyses that do not need processed records."""

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as sql

from aioshard.errors import SettingsError
from aioshard.kafka.history import HistoryBrokers
from aioshard.ports import LogRange
from aioshard.records import TopicPartition
from aioshard.spark.planning.bounds import (
    End,
    Facts,
    Offsets,
    end_of,
    lost,
    offsets_given,
    refuse_losses,
    start_of,
    timestamp_of,
)
from aioshard.spark.session import register

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from aioshard.settings import Settings

__all__ = ["Topics", "TopicsAsked", "ask_for_topics", "partition_name", "read_topics"]


class TopicsAsked(NamedTuple):
    """Frozen ranges of topics; nothing is read yet."""

    bootstrap_servers: str
    """Other connection settings, such as credentials, are in the environment of Spark's executors."""
    isolation_level: str
    ranges: Mapping[TopicPartition, LogRange]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the topics."""
        return tuple(sorted({one.topic for one in self.ranges}))

    @property
    def offsets(self) -> int:
        """Number of offsets; compaction and transactions can leave some without a record."""
        return sum(one.end - one.start for one in self.ranges.values())


class Topics:
    """The records of some topics, ready for queries.

    Attributes:
        names: Names of the topics.
        rows: One row per record: `topic`, `partition`, `offset`, `key`, `bytes` (size of key and value), and
            `produced_us` (timestamp in microseconds since the epoch). Cached by Spark.
        records: Number of records.
        start: The earliest timestamp, in microseconds since the epoch.
        end: The latest timestamp, in microseconds since the epoch.
    """

    def __init__(self, names: Sequence[str], rows: "DataFrame") -> None:
        self.names = tuple(names)
        self.rows = rows.cache()
        found = self.rows.agg(sql.count("*"), sql.min("produced_us"), sql.max("produced_us")).first()
        assert found is not None  # noqa: S101 - an aggregate without groups has one row
        if not found[0]:
            raise SettingsError(
                f"{', '.join(self.names)} has no records in the range that was asked for: publish some, or give "
                "another --start and --end"
            )
        self.records: int = found[0]
        self.start: int = found[1] or 0
        self.end: int = found[2] or 0

    @property
    def wall(self) -> int:
        """Microseconds from the earliest timestamp to the latest."""
        return max(self.end - self.start, 1)


async def ask_for_topics(
    settings: "Settings",
    topics: Sequence[str],
    start: dt.datetime | float | Offsets | str = "earliest",
    end: End = "latest",
) -> TopicsAsked:
    """Freeze the ranges to analyze; contacts the brokers but does not need Spark.

    Args:
        settings: The brokers and the isolation level.
        topics: Names of the topics.
        start: `earliest`, a time (the first record that is not older), or offsets of every partition.
        end: `latest`, a time, or offsets.

    Raises:
        PlanError: The offsets do not match the partitions of the topics, or the time is invalid.
        DataLossError: The offsets begin before the start of the log.
        TransportError: The brokers do not answer, or do not have the topic.
    """
    async with HistoryBrokers(settings) as brokers:
        partitions = [
            TopicPartition(topic, number) for topic in topics for number in sorted(await brokers.partitions(topic))
        ]
        bounds = await brokers.bounds(partitions)
        timed: list[Mapping[TopicPartition, int | None]] = []
        for when, option in ((start, "start"), (end, "end")):
            moment = timestamp_of(when, option)
            isolation = settings.isolation_level
            timed.append({} if moment is None else await brokers.offsets_at(partitions, moment, isolation))
    starts, ends = (offsets_given(when, name, partitions) or {} for when, name in ((start, "start"), (end, "end")))
    ranges, losses = {}, []
    for at in partitions:
        log = bounds[at]
        last = log.stable if settings.isolation_level == "read_committed" else log.end
        facts = Facts(at=at, committed=None, log=log, last=last, knows_topic=False)
        first = start_of(facts, start, None, given=starts.get(at), timed=timed[0].get(at))
        loss = lost(facts, first)
        if loss is not None:
            losses.append(loss)
        ranges[at] = LogRange(first, end_of(facts, first, given=ends.get(at), timed=timed[1].get(at)))
    refuse_losses(losses)
    return TopicsAsked(settings.require_bootstrap_servers(), settings.isolation_level, ranges)


def read_topics(spark: "SparkSession", asked: TopicsAsked) -> Topics:
    """Read the ranges with `format("aioshard")`, without an app; keeps keys, sizes and times, but not values.

    Raises:
        SettingsError: The ranges contain no records.
    """
    register(spark)
    options = {
        "bootstrap_servers": asked.bootstrap_servers,
        "topics": ",".join(asked.names),
        "start": _as_json({at: one.start for at, one in asked.ranges.items()}),
        "end": _as_json({at: one.end for at, one in asked.ranges.items()}),
        "isolation_level": asked.isolation_level,
    }
    records = spark.read.format("aioshard").options(**options).load()
    return Topics(asked.names, records.select("topic", "partition", "offset", "key", _size(), _produced()))


def partition_name() -> "Column":
    """Return the name of a partition as text."""
    return sql.concat_ws("/", "topic", "partition")


def _size() -> "Column":
    lengths = (sql.coalesce(sql.octet_length(name), sql.lit(0)) for name in ("key", "value"))
    return sum(lengths, sql.lit(0)).cast("bigint").alias("bytes")


def _produced() -> "Column":
    return sql.unix_micros("timestamp").alias("produced_us")


def _as_json(offsets: Mapping[TopicPartition, int]) -> str:
    found: dict[str, dict[str, int]] = {}
    for at, offset in offsets.items():
        found.setdefault(at.topic, {})[str(at.partition)] = offset
    return json.dumps(found)
