"""The group methods of a transport that reads without a consumer group."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from aioshard.errors import StateError
from aioshard.ports import Committed, Membership, Message, TransactionCounts
from aioshard.records import TopicPartition

_LIVES = itertools.count(1)


def manual_membership() -> Membership:
    """Return a membership for manual assignment: no member id, and a new generation for each life of a client.

    Neither is sent to the brokers. Without a member id, no partition is ever resumed in place. The new generation
    keeps a response to one life of the client from being used in the next.
    """
    return Membership("", next(_LIVES))


class Groupless:
    """Keeps commits in memory; it is the only member, and its partitions are never revoked.

    It has the group methods of `aioshard.ports.Transport`.
    """

    def __init__(self, member_id: str, committed: Mapping[TopicPartition, Committed]) -> None:
        """Start at the given offsets.

        Args:
            member_id: The reader's name in statistics.
            committed: The initial committed offset of each partition.
        """
        self._membership = Membership(member_id, 1)
        self._committed = dict(committed)

    @property
    def transaction_counts(self) -> TransactionCounts:
        """See `Transport.transaction_counts`: nothing is written."""
        return TransactionCounts()

    @property
    def hang(self) -> str | None:
        """See `Transport.hang`: there are no transactions."""
        return None

    @property
    def inherits_within(self) -> float:
        """See `Transport.inherits_within`: there are no other members."""
        return 0.0

    @property
    def owned_for(self) -> float:
        """See `Transport.owned_for`: nobody else gets the partitions."""
        return math.inf

    def membership(self) -> Membership:
        """See `Transport.membership`: never changes."""
        return self._membership

    async def commit(
        self,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,  # noqa: ARG002
        messages: Sequence[Message] | None = None,  # noqa: ARG002
    ) -> None:
        """See `Transport.commit`: stored in this object."""
        self._committed.update(offsets)

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """See `Transport.committed`: initially the given offsets."""
        return {partition: self._committed[partition] for partition in partitions}

    async def truncations(self, commits: Mapping[TopicPartition, Committed]) -> Mapping[TopicPartition, int | None]:
        """See `Transport.truncations`: offsets that are not stored on a broker have no leader epochs."""
        return dict.fromkeys(commits)

    def subscribe(self, topics: Collection[str], pattern: str | None) -> NoReturn:  # noqa: ARG002
        """See `Transport.subscribe`: not supported, because the offsets to read are fixed.

        Raises:
            StateError: Always.
        """
        raise StateError(f"the topics to read are fixed: you cannot change them to {', '.join(topics)}")

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> NoReturn:
        """See `Transport.offset_at`: not supported, because the offsets to read are fixed.

        Raises:
            StateError: Always.
        """
        raise StateError(f"{topic_partition} is read once, from start to end: you cannot seek to {timestamp:g}")
