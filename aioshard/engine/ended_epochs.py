"""Facts about ended epochs that the next epoch of the same partition needs."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from aioshard.engine.commits import FailedTransactions, Uncommitted
from aioshard.engine.epoch import Refused, Rerun
from aioshard.engine.partition import Partition
from aioshard.ports import Committed
from aioshard.records import TopicPartition


class _Restart(NamedTuple):
    """State of an epoch that ended because its transaction failed."""

    failed_transactions: FailedTransactions
    attempted: Committed | None
    """The commit of that transaction."""
    refused: Mapping[int, Refused]


class EndedEpochs:
    """Facts about ended epochs: which records they had started or finished, and failed transactions.

    The next epoch of the same partition takes it over, unless another member owns the partition first. Owned by the
    rebalance.
    """

    def __init__(self) -> None:
        self.uncommitted: dict[TopicPartition, Uncommitted] = {}
        """Finished records that were not committed, until the partition begins again here or elsewhere."""
        self._reruns: dict[TopicPartition, Rerun] = {}
        """Records that this process had started."""
        self._restarts: dict[TopicPartition, _Restart] = {}
        """State of epochs that ended because a transaction failed."""

    def end(self, partition: Partition, why: str) -> None:
        """End the epoch of a partition that was disowned, and remember it; *why* is a sentence."""
        name = partition.topic_partition
        commits = partition.commits
        if commits.uncommitted:
            end = partition.highest_started + 1
            if commits.before is not None:
                end = max(end, commits.before.end)
            self.uncommitted[name] = Uncommitted(commits.uncommitted, commits.acknowledged, end, why)
        self._reruns[name] = partition.end()

    def remember_restart(self, partition: Partition, why: str, refused: Mapping[int, Refused]) -> None:
        """Remember that an epoch ends because its transaction failed.

        Args:
            partition: The partition.
            why: Why it failed, as a sentence.
            refused: Its records with a message that cannot be written, by offset; those known before are added.
        """
        commits = partition.commits
        known = {offset: found for offset, found in partition.refused.items() if offset >= commits.lag_base}
        self._restarts[partition.topic_partition] = _Restart(
            commits.with_failed_transaction(why), commits.attempted, {**known, **refused}
        )

    def forget_restarts(self, names: Collection[TopicPartition]) -> None:
        """Forget the failed transactions of partitions that another member may own now."""
        for name in names:
            self._restarts.pop(name, None)

    def forget_others(self, assignment: Collection[TopicPartition]) -> Collection[TopicPartition]:
        """Forget what is no use because other members own the partitions.

        Args:
            assignment: All partitions that are ours.

        Returns:
            The partitions whose failed transactions were forgotten.
        """
        foreign = self._restarts.keys() - assignment
        self.forget_restarts(foreign)
        for name in self.uncommitted.keys() - assignment:
            del self.uncommitted[name]
        return foreign

    def pass_on(self, partition: Partition, committed: Committed | None, *, moves: bool) -> None:
        """Let a new epoch take over what is known of the last one of its partition.

        Args:
            partition: The partition, whose epoch begins.
            committed: Its commit, as the brokers report it.
            moves: Whether the application requested another position.
        """
        name = partition.topic_partition
        commits = partition.commits
        # 1. Which records this process had started: they count as replayed.
        partition.rerun = self._reruns.pop(name, None)
        # 2. A transaction that failed here. The brokers may have committed it: then only its answer was lost.
        restart = self._restarts.pop(name, None)
        was_committed = restart is not None and committed is not None and committed == restart.attempted
        if restart is not None:
            partition.refused = dict(restart.refused)
            if not was_committed:
                commits.failed_transactions = restart.failed_transactions
        # 3. Finished records that run again: nobody has committed anything since.
        before = self.uncommitted.pop(name, None)
        offset = None if committed is None else committed.offset
        if before is not None and not was_committed and not moves and offset == before.acknowledged:
            commits.before = before
            commits.uncommitted = before.records
