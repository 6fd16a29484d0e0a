"""Record batches with header names that are not UTF-8, which no client writes but every broker stores."""

from collections.abc import Sequence
from typing import Any

from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy

from aioshard.kafka.wire.requests import PRODUCE
from aioshard.kafka.wire.responses import stored_offsets
from aioshard.kafka.wire.start import connect
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.support.batches import compressed

Content = tuple[bytes | None, Sequence[tuple[bytes, bytes | None]]]
"""The value of a record, and its headers."""


class _Name(str):  # noqa: SLOT000 - it has an attribute
    """The name of a header, written as any bytes."""

    raw: bytes

    def encode(self, *_: Any) -> bytes:
        return self.raw


def _name(raw: bytes) -> _Name:
    name = _Name("any")
    name.raw = raw
    return name


def batch_of(contents: Sequence[Content], *, codec: int = 0) -> bytes:
    """A batch that begins at offset 0."""
    builder: Any = _DefaultRecordBatchBuilderPy(2, 0, 0, -1, -1, -1, 1 << 20)
    for number, (value, headers) in enumerate(contents):
        pairs = [(_name(name), content) for name, content in headers]
        assert builder.append(number, 1_700_000_000_000 + number, None, value, pairs) is not None
    return compressed(bytes(builder.build()), codec)


async def produce(bootstrap: str, partition: TopicPartition, contents: Sequence[Content]) -> None:
    """Write a batch to a broker."""
    cluster = await connect(Settings(bootstrap_servers=bootstrap))
    try:
        await cluster.look_up([partition.topic])
        leader = cluster.metadata.leader(partition)
        assert leader is not None
        parts = [{"partition": partition.partition, "records": batch_of(contents)}]
        topics = [{"topic": partition.topic, "partitions": parts}]
        request = PRODUCE(transactional_id=None, acks=-1, timeout_ms=10_000, topics=topics)
        answers = stored_offsets(await cluster.ask(leader.node, request), [partition])
        assert not answers.errors
    finally:
        await cluster.close()
