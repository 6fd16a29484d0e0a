"""The tasks of a shuffle: they compute the shards of records before it, and run handlers over the records after it."""

import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pyarrow as pa

from aioshard.core.key_bytes import key_bytes
from aioshard.core.sharding import ShardKey, check_usable, shard_key_of
from aioshard.errors import PlanError
from aioshard.handlers import Registration
from aioshard.records import Record
from aioshard.spark.tasks.loading import resolve_app
from aioshard.spark.tasks.row_records import records_of
from aioshard.spark.tasks.row_transport import RowFeed, RowTransport
from aioshard.spark.tasks.runtime import run_handlers
from aioshard.spark.tasks.work import Work

__all__ = ["MOMENT", "SHARD", "HandlersOverRows", "WithShards"]

SHARD = "aioshard_shard"
"""Column: rows with the same value are processed by one task, in order."""
MOMENT = "aioshard_moment"
"""Column: the latest timestamp in the record's partition up to and including the record."""

_DIGEST = 8


class WithShards:
    """Adds the shard of each record to the rows; a callable for `mapInArrow`.

    Records are sorted by `MOMENT`. If the clocks of a partition's producers disagree, timestamps can go backwards. The
    latest timestamp so far never does, so the offset order within each partition is preserved.
    """

    def __init__(self, work: Work) -> None:
        self._work = work

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the same rows with two more columns; rows of a partition must arrive in offset order."""
        shards = _Shards(resolve_app(self._work.app, self._work.places).handlers)
        latest: dict[tuple[str, int], float] = {}
        for batch in rows:
            records = records_of(batch)
            moments = []
            for record in records:
                name = (record.topic, record.partition)
                latest[name] = moment = max(record.timestamp, latest.get(name, record.timestamp))
                moments.append(moment)
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, pa.array(map(shards.of, records), pa.int64()), pa.array(moments, pa.float64())],
                names=[*batch.schema.names, SHARD, MOMENT],
            )


class HandlersOverRows:
    """Runs an app's handlers over ordered rows; a callable for `mapInArrow`."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield outcome rows."""
        feed = RowFeed(rows)
        if feed.first is None:
            return
        work = self._work
        transport = RowTransport(feed, resolve_app(work.app, work.places).handlers)
        yield from run_handlers(work, lambda _: transport, transport)
        feed.finish()


class _Sharding(NamedTuple):
    """The function that shards the records of one handler."""

    number: int
    key_of: Callable[[Record], ShardKey]


class _Shards:
    """The shards of the records of all handlers."""

    def __init__(self, handlers: tuple[Registration, ...]) -> None:
        self._handlers = handlers
        self._by_topic: dict[str, _Sharding] = {}

    def of(self, record: Record) -> int:
        """Return a number that is equal for records that must be processed in order, and almost never for others.

        Raises:
            HandlerError: The sharding function returns a key that other processes could not tell apart from others.
            PlanError: No handler takes the topic.
        """
        sharding = self._by_topic.get(record.topic) or self._find(record.topic)
        try:
            key = sharding.key_of(record)
            check_usable(key)
        except Exception:  # noqa: BLE001 - the user's function: the record fails when it is processed, as in an app
            key = None
        if key is None:
            identity = b"r%d/%d/%s" % (record.partition, record.offset, record.topic.encode())
        else:
            identity = b"%d:" % sharding.number + key_bytes(key)
        return int.from_bytes(hashlib.blake2b(identity, digest_size=_DIGEST).digest(), "big", signed=True)

    def _find(self, topic: str) -> _Sharding:
        for number, handler in enumerate(self._handlers):
            if handler.takes(topic):
                one_topic = len(handler.topics) == 1 and handler.pattern is None
                found = self._by_topic[topic] = _Sharding(number, shard_key_of(handler.shard_by, one_topic=one_topic))
                return found
        raise PlanError(
            f"rows of topic {topic!r} were found, which no handler of the app takes: leave them out, or give the "
            "topic to a handler"
        )
