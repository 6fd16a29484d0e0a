"""`format("aioshard")` as a sink: each task sends its rows to Kafka topics as messages."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, DataType, IntegerType, LongType, StringType, StructType

from aioshard.errors import PlanError
from aioshard.ports import Message
from aioshard.records import TOPIC_NAME

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["WRITE_OPTIONS", "StreamTopicWriter", "TopicWriter"]

WRITE_OPTIONS = ("bootstrap_servers", "topic", "message_id", "checkpointlocation")
"""Supported options; see `docs/spark-sinks.md`. The last one is Spark's own option for streams."""

_TEXT = (StringType, BinaryType)
_NUMBER = (IntegerType, LongType)
_PLACE = ("topic", "partition", "offset")


@dataclasses.dataclass(frozen=True, slots=True)
class _Sent(WriterCommitMessage):
    """The messages that a task has sent; all are acknowledged."""

    messages: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    """The destination of rows and their conversion to messages. It contains no secrets."""

    topic: str | None
    """None: each row names its topic."""
    message_id: str | None
    """Header for the row's `topic/partition/offset`; these columns then name the source of the row."""
    settings: Mapping[str, Any]
    columns: frozenset[str]

    def messages(self, batch: "pa.RecordBatch") -> Iterator[Message]:
        """Yield one message per row."""
        if not batch.num_rows:
            return
        values, keys = _bytes_of(batch, "value"), self._bytes(batch, "key")
        headers = self._list(batch, "headers")
        topics, partitions = self._list(batch, "topic"), self._list(batch, "partition")
        offsets = self._list(batch, "offset") if self.message_id else [None] * batch.num_rows
        rows = zip(keys, values, headers, topics, partitions, offsets, strict=True)
        for key, value, pairs, topic, partition, offset in rows:
            own = tuple((pair["key"], pair["value"]) for pair in pairs or ())
            if self.message_id is not None:
                header = (self.message_id, f"{topic}/{partition}/{offset}".encode())
                yield Message(self.topic or topic, value, key, (*own, header))
            else:
                yield Message(self._topic(topic), value, key, own, partition)

    def _topic(self, named: str | None) -> str:
        topic = self.topic or named
        if topic is None:
            raise PlanError(
                "a row has no topic: fill the column topic, or name one topic for all with the option topic"
            )
        return topic

    def _list(self, batch: "pa.RecordBatch", name: str) -> list[Any]:
        return batch.column(name).to_pylist() if name in self.columns else [None] * batch.num_rows

    def _bytes(self, batch: "pa.RecordBatch", name: str) -> list[bytes | None]:
        return _bytes_of(batch, name) if name in self.columns else [None] * batch.num_rows


def _bytes_of(batch: "pa.RecordBatch", name: str) -> list[bytes | None]:
    import pyarrow as pa  # noqa: PLC0415 - in a task

    found: list[bytes | None] = batch.column(name).cast(pa.binary()).to_pylist()
    return found


class _Writing:
    """Shared part of the batch and stream writers."""

    def __init__(self, schema: StructType, options: Mapping[str, str], *, overwrite: bool) -> None:
        self._target = _target_of(schema, options, overwrite=overwrite)

    def write(self, iterator: "Iterator[pa.RecordBatch]") -> WriterCommitMessage:
        """Send the rows of one task in order, and wait until all are acknowledged."""
        from aioshard.kafka.producer import KafkaProducer  # noqa: PLC0415 - in a worker
        from aioshard.settings import Settings  # noqa: PLC0415
        from aioshard.spark.source.publishing import publish_wave, waves  # noqa: PLC0415
        from aioshard.spark.tasks.worker_loop import worker_loop  # noqa: PLC0415

        target, loop = self._target, worker_loop()
        producer = KafkaProducer(Settings(**target.settings))
        sent = 0
        try:
            for wave in waves(message for batch in iterator for message in target.messages(batch)):
                loop.submit(publish_wave(producer, wave)).result()
                sent += len(wave)
        finally:
            loop.submit(producer.close()).result()
        return _Sent(sent)


class TopicWriter(_Writing, DataSourceArrowWriter):
    """Append the rows of a batch to topics, at least once: a retried task sends its rows again."""


class StreamTopicWriter(_Writing, DataSourceStreamArrowWriter):
    """Append the rows of a stream to topics, at least once: a retried micro-batch sends its rows again."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Do nothing: acknowledged messages are already stored."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Do nothing: messages cannot be removed from a topic."""


def _target_of(schema: StructType, options: Mapping[str, str], *, overwrite: bool) -> _Target:
    """Check the options of a write and the columns of its rows."""
    unknown = sorted(name for name in options if name.lower() not in WRITE_OPTIONS)
    if unknown:
        raise PlanError(
            f"writing with format('aioshard') has no option {unknown[0]!r}: its options are bootstrap_servers, topic "
            "and message_id"
        )
    if overwrite:
        raise PlanError("mode('overwrite') was found; a topic is only appended to: use mode('append')")
    topic, message_id = options.get("topic"), options.get("message_id")
    if topic is not None and not TOPIC_NAME.fullmatch(topic):
        raise PlanError(f"option topic={topic!r} was found, the name of a topic was expected")
    columns = {field.name: field.dataType for field in schema.fields}
    _check(columns, "value", _TEXT, "string or binary", required=True)
    _check(columns, "key", _TEXT, "string or binary")
    of_the_record = message_id is not None
    if of_the_record and topic is None:
        raise PlanError(
            "option message_id says that the columns topic, partition and offset are where a row came from: name the "
            "topic that it goes to with the option topic"
        )
    _check(columns, "topic", (StringType,), "string", required=of_the_record or topic is None)
    _check(columns, "partition", (IntegerType,), "int", required=of_the_record)
    if of_the_record:
        _check(columns, "offset", _NUMBER, "long", required=True)
    with contextlib.suppress(KeyError):
        _check_headers(columns["headers"])
    settings = {name: options[name] for name in ("bootstrap_servers",) if name in options}
    used = ("key", "value", "headers", "partition", "topic", *(("offset",) if of_the_record else ()))
    return _Target(topic, message_id, settings, frozenset(name for name in used if name in columns))


def _check(
    columns: Mapping[str, DataType], name: str, kinds: tuple[type[DataType], ...], named: str, *, required: bool = False
) -> None:
    found = columns.get(name)
    if found is None:
        if required:
            raise PlanError(
                f"the rows have no column {name} ({named}); their columns are {', '.join(columns) or 'none'}. Select "
                "key, value, headers, topic and partition, of which value is needed, and topic where no option names it"
            )
        return
    if not isinstance(found, kinds):
        raise PlanError(f"column {name} is of type {found.simpleString()}, {named} was expected: cast it")


def _check_headers(found: DataType) -> None:
    expected = "array<struct<key:string,value:binary>>"
    if found.simpleString() != expected:
        raise PlanError(f"column headers is of type {found.simpleString()}, {expected} was expected")
