"""Fields of log lines, for programs that read them: the event and its subject."""

from aioshard.core.sharding import shown
from aioshard.engine.epoch import Delivery
from aioshard.records import TopicPartition


def partition_fields(event: str, name: TopicPartition, **more: object) -> dict[str, object]:
    """Fields of a log line about a partition.

    Args:
        event: Name of the event, in a word or two: `paused`.
        name: The partition.
        more: Any further fields.

    Example:
        >>> partition_fields("paused", TopicPartition("orders", 3), why="the ledger is down")
        {'event': 'paused', 'topic': 'orders', 'partition': 3, 'why': 'the ledger is down'}
    """
    return {"event": event, "topic": name.topic, "partition": name.partition, **more}


def record_fields(event: str, delivery: Delivery, **more: object) -> dict[str, object]:
    """Fields of a log line about a record; its key appears as a hash, as in explanations."""
    record = delivery.record
    fields = partition_fields(event, record.topic_partition, offset=record.offset)
    if record.key is not None:
        fields["key"] = shown(record.key, show_keys=False)
    return {**fields, **more}
