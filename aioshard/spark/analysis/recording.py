"""From a journal to what simulations take: when each record could be fetched, how long it ran, what its shard is."""

from array import array
from typing import TYPE_CHECKING, NamedTuple

import pyarrow.compute as pc
from pyspark.sql import functions as sql

from aioshard.core.key_hash import SHARD_BITS
from aioshard.spark.analysis.fleet import NO_TURN, Recording
from aioshard.spark.analysis.journal import Journal, RecordedHandler
from aioshard.spark.analysis.partitioner import place_of_key, recognised
from aioshard.spark.analysis.simulation import NO_KEY, Work
from aioshard.spark.analysis.stalls import Stalls, stalls_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["Recorded", "recorded"]

_LOW_BITS = (1 << 32) - 1


class Recorded(NamedTuple):
    """What a handler did, on Spark and in memory; moments are microseconds from the start."""

    handler: RecordedHandler
    work: "DataFrame"
    """`part`, `offset`, `available`, `service`, `key` (the shard key's hash, null without order), `place`, `topic`."""
    recording: Recording
    """The same, in the order of `available`, `part`, `offset`."""
    splits: bool
    """Whether the shard keys are known, so that other numbers of shards can be asked about."""
    places: str
    """What another number of partitions is taken of: `murmur2` or `crc32` of the keys, as the producers did; else a
    stand-in, because that is `unknown` or the keys are `hidden`."""
    left_out: int
    """Records that are not asked about, because there are too many."""
    retried: int
    """Records with more than one attempt: the earlier ones, and the delays between, are not known."""
    never_ran: int
    """Records that no handler ran for, such as those that were parked behind another."""
    stalls: Stalls
    """When the event loops stood still: what the durations have too much."""


def recorded(journal: Journal, handler: str | None, limit: int) -> Recorded:
    """Prepare what a handler did.

    A record could be fetched when it was produced, as its timestamp says, but not before its process took in its first
    one, and no later than it was taken in. (The first one of its partition says less: it may have waited for room.)

    Args:
        journal: What to look at.
        handler: By default the one with the most records.
        limit: Only the records that were there first, so many.
    """
    told = journal.handler(handler)
    rows = journal.of_handler(told.name)
    names = sorted(tuple(row) for row in rows.select("topic", "partition").distinct().collect())
    topics = tuple(sorted({topic for topic, _ in names}))
    numbers = rows.sparkSession.createDataFrame(
        [(topic, partition, number, topics.index(topic)) for number, (topic, partition) in enumerate(names)],
        "topic string, partition int, part bigint, topic_number bigint",
    )
    firsts = rows.groupBy("member").agg(sql.min("arrived_us").alias("first"))
    key, splits = _shard_key(rows, told)
    place, places = _place(rows)
    fetchable = sql.least("arrived_us", sql.greatest("produced_us", "first")) - sql.lit(journal.start)
    placed = rows.join(sql.broadcast(numbers), ["topic", "partition"]).join(sql.broadcast(firsts), ["member"])
    work = placed.select(
        "part",
        "offset",
        fetchable.alias("available"),
        sql.col("service_us").alias("service"),
        key.alias("key"),
        place.alias("place"),
        sql.col("topic_number").alias("topic"),
    )
    work = work.orderBy("available", "part", "offset").limit(limit).cache()
    sums = journal.rows.where(sql.col("handler") == told.name).agg(
        sql.count("service_us"), sql.count_if(sql.col("attempts") > 1), sql.count_if(sql.col("service_us").isNull())
    )
    ran, retried, never_ran = sums.first() or (0, 0, 0)
    recording = _collected(work, topics, by_partition=_is_by_partition(rows, told))
    left_out = ran - len(recording.work.service)
    stalls = _stalls(rows.orderBy("arrived_us").limit(limit))
    return Recorded(told, work, recording, splits, places, left_out, retried, never_ran, stalls)


def _shard_key(rows: "DataFrame", told: RecordedHandler) -> "tuple[Column, bool]":
    """The hash of a record's shard key, and whether that is one for each key.

    With shards on demand the journal has it. With fixed shards it has their numbers; where these are those of the
    records' keys, the keys' hashes are it. Else all that is known is which records shared a shard.
    """
    if told.shards is None:
        return sql.col("shard"), True
    high = sql.shiftright("key_hash", SHARD_BITS).bitwiseAND(sql.lit(_LOW_BITS))
    expected = sql.shiftright(high * sql.lit(told.shards), SHARD_BITS)
    others = rows.where(sql.col("key_hash").isNotNull() & (expected != sql.col("shard"))).limit(1).count()
    if not others:
        return sql.col("key_hash"), True
    # The middle of what the shard has of all hashes.
    middle = (sql.col("shard") * sql.lit(1 << 32) + sql.lit(1 << 31)) / sql.lit(told.shards)
    return sql.shiftleft(sql.floor(middle).cast("bigint"), SHARD_BITS), False


def _place(rows: "DataFrame") -> "tuple[Column, str]":
    """What a number of partitions is taken of, and what that is."""
    hidden = rows.where(sql.col("key_hash").isNotNull() & sql.col("key").isNull()).limit(1).count()
    if hidden:
        return sql.col("key_hash").bitwiseAND(sql.lit(_LOW_BITS)), "hidden"
    partitioner = recognised(rows)
    return place_of_key(partitioner or "crc32"), partitioner or "unknown"


def _is_by_partition(rows: "DataFrame", told: RecordedHandler) -> bool:
    if told.shard_by is not None or told.shards is not None:
        return told.shard_by == "partition"
    found = rows.agg(
        sql.count_distinct("topic", "partition"),
        sql.count_distinct("shard"),
        sql.count_distinct("topic", "partition", "shard"),
        sql.count_distinct("key_hash"),
    ).first()
    assert found is not None  # noqa: S101 - an aggregate without groups has one row
    return bool(found[0] == found[1] == found[2] and found[3] > found[0])


def _stalls(rows: "DataFrame") -> Stalls:
    """Of all processes; each has an event loop."""
    table = rows.select("member", "started_us", "finished_us").toArrow()
    found = []
    for member in table.column("member").unique():
        of_member = table.filter(pc.equal(table.column("member"), member))
        found.append(stalls_of(*(of_member.column(name).to_numpy() for name in ("started_us", "finished_us"))))
    counts, longest, totals, waited = zip(*found, strict=True) if found else ((), (0,), (), ())
    return Stalls(sum(counts), max(longest), sum(totals), sum(waited))


def _collected(work: "DataFrame", topics: tuple[str, ...], *, by_partition: bool) -> Recording:
    table = work.orderBy("available", "part", "offset").toArrow()

    def column(name: str, missing: int) -> "array[int]":
        found = table.column(name).fill_null(missing).combine_chunks()
        return array("q", found.cast("int64").to_numpy(zero_copy_only=False).tobytes())

    return Recording(
        work=Work(column("part", 0), column("available", 0), column("service", 0), column("key", NO_KEY)),
        topic=column("topic", 0),
        place=column("place", NO_TURN),
        topics=topics,
        by_partition=by_partition,
    )
