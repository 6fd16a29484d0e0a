"""The group side of a transport that reads for itself, without a group."""

from collections.abc import Collection, Mapping
from typing import NoReturn

from aioshard.errors import StateError
from aioshard.ports import Committed, Membership
from aioshard.records import TopicPartition

__all__ = ["Groupless"]


class Groupless:
    """Keeps commits in memory; no other member takes part and nothing is ever revoked.

    It has the methods of `aioshard.ports.Transport` that concern the group.
    """

    def __init__(self, member_id: str, committed: Mapping[TopicPartition, Committed]) -> None:
        """Start at the given offsets.

        Args:
            member_id: Names the reader in statistics.
            committed: The first committed offset of each partition.
        """
        self._membership = Membership(member_id, 1)
        self._committed = dict(committed)

    def membership(self) -> Membership:
        """See `Transport.membership`: always the same."""
        return self._membership

    async def commit(self, offsets: Mapping[TopicPartition, Committed], membership: Membership) -> None:  # noqa: ARG002
        """See `Transport.commit`: kept in this object."""
        self._committed.update(offsets)

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """See `Transport.committed`: at first the given offsets."""
        return {name: self._committed[name] for name in partitions}

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> NoReturn:
        """See `Transport.offset_at`: what is read is fixed.

        Raises:
            StateError: Always.
        """
        raise StateError(f"{topic_partition} is read once, from start to end: you cannot seek to {timestamp:g}")
