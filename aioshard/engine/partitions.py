"""The partitions of this process."""

from collections.abc import Iterator

from aioshard.engine.partition import Partition
from aioshard.records import TopicPartition


class Partitions:
    """The partitions that are ours, or may become ours again; each can be found by its name.

    Only the rebalance adds and removes them. Iterating goes over a copy, so partitions may begin and end meanwhile.
    Safe to read from any thread.
    """

    __slots__ = ("_by_name",)

    def __init__(self) -> None:
        self._by_name: dict[TopicPartition, Partition] = {}

    def __iter__(self) -> Iterator[Partition]:
        return iter(tuple(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def __getitem__(self, name: TopicPartition) -> Partition:
        return self._by_name[name]

    def get(self, name: TopicPartition) -> Partition | None:
        """Return the partition of that name; None if it is not ours."""
        return self._by_name.get(name)

    def add(self, partition: Partition) -> None:
        """Add a partition whose epoch begins."""
        self._by_name[partition.topic_partition] = partition

    def remove(self, partition: Partition) -> None:
        """Remove a partition whose epoch has ended."""
        del self._by_name[partition.topic_partition]
