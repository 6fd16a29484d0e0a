"""The committed state of an epoch, and the contents of its next commit."""

from collections.abc import Callable
from typing import NamedTuple

from aioshard.core.commit_metadata import CommitMetadata, FirstCommit
from aioshard.core.finished_offsets import Run, records_with_room
from aioshard.core.publishing import Coverage, coverage
from aioshard.engine.epoch import Epoch, Outputs
from aioshard.ports import Committed

_GRACE = 30.0
"""Seconds after which a topic that the brokers do not know counts as deleted: they may only be a moment behind."""
_METADATA_OVERHEAD = 195
"""Maximum characters of a metadata text besides the finished runs, including those that deflate may add."""


class _State(NamedTuple):
    """Everything that decides what a transaction covers."""

    committable: int
    completed: int
    unsent: int


class Due(NamedTuple):
    """The commit to send for a partition, as of one moment."""

    committed: Committed
    completed: int
    """How many records had completed at that moment."""


class DueInTransaction(NamedTuple):
    """The commit to send for a partition in a transaction, as of one moment."""

    commit: Due
    coverage: Coverage
    """The outputs that the transaction may publish."""
    rest: _State | None
    """State of the partition if nothing changes meanwhile and not all outputs are covered; otherwise None."""


class Uncommitted(NamedTuple):
    """The records that finished in an epoch that ended before their commit was acknowledged: they run again."""

    records: int
    acknowledged: int | None
    """The committed offset that the epoch knew."""
    end: int
    """One past the highest of their offsets."""
    why: str
    """Why the epoch ended, as a sentence."""


class FailedTransactions(NamedTuple):
    """The transactions of a partition that have failed in a row."""

    since: float
    """Loop time of the first failure."""
    times: int
    why: str
    """Why the last one failed."""


class Commits:
    """The committed state of one epoch, and the contents of its next commit.

    The committer asks for the due commit and reports how it ended; the rebalance says where a new epoch begins. Owned
    by the event loop.

    Invariants:
        * `acknowledged` changes only when the broker acknowledged a commit, or when the epoch begins.
    """

    def __init__(self, epoch: Epoch, clock: Callable[[], float]) -> None:
        """Begin without a commit; *clock* is loop time."""
        self.acknowledged: int | None = None
        """The committed offset that was last acknowledged to us; None without one."""
        self.first_commit: FirstCommit | None = None
        """First-commit marker that our commits carry besides the completions; see `aioshard.core.ownership`."""
        self.completed = 0
        """How many records had completed as of the last acknowledged commit."""
        self.uncommitted = 0
        """How many records had finished without an acknowledged commit when the committer disowned the partition."""
        self.before: Uncommitted | None = None
        """The records that run again in this epoch, because those of the epoch before were not committed."""
        # With exactly-once processing:
        self.published: tuple[Run, ...] = ()
        """The completions beyond the acknowledged offset that its text lists."""
        self.stored_units = 0
        """Length of the text that the broker has stored with that offset."""
        self.outputs_waiting = 0
        """How many runs have outputs that the latest transaction could not cover."""
        self.failed_transactions: FailedTransactions | None = None
        """Set while the last transaction with the partition has failed; each new epoch takes it over."""
        self.attempted: Committed | None = None
        """The commit of the last transaction; the brokers may have stored it although it seemed to fail."""
        self._exhausted: _State | None = None
        """State in which another commit is of no use: the topic was deleted, or a transaction could not cover more."""
        self._unknown_since: float | None = None
        """Since when the brokers refuse the offset because they do not know the topic."""
        self._epoch = epoch
        self._clock = clock

    @property
    def lag_base(self) -> int:
        """The offset from which the partition's lag counts."""
        return self._epoch.tracker.committable if self.acknowledged is None else self.acknowledged

    # Due commits ------------------------------------------------------------------------

    def is_due(self, metadata_limit: int) -> bool:
        """Whether there is an offset to commit, or completions beyond it.

        Args:
            metadata_limit: Longest text that the broker stores with an offset; 0 if it stores none.
        """
        epoch = self._epoch
        tracker = epoch.tracker
        # 1. The topic was deleted, or the latest transaction left outputs that the next one could not cover either.
        if self._exhausted is not None and self._exhausted == self._state:
            return False
        # 2. The offset has changed, or messages wait for a transaction.
        if tracker.committable != self.acknowledged or epoch.unsent:
            return True
        # 3. The offset is unchanged, so all completions since then lie beyond it; they need a text.
        return bool(tracker and tracker.completed != self.completed and metadata_limit > 0 and epoch.is_seekable)

    def due(self, metadata_limit: int) -> Due:
        """Return the commit to send now: the offset and the records finished beyond it, from the same moment."""
        epoch = self._epoch
        offset = epoch.tracker.committable
        text = ""
        if metadata_limit:
            finished = tuple(epoch.finished()) if epoch.is_seekable else ()
            text = CommitMetadata(first=self.first_commit, finished=finished).text(offset, metadata_limit)
        return Due(Committed(offset, text), epoch.tracker.completed)

    def lists_all_finished(self, metadata_limit: int) -> bool:
        """Whether a commit sent now would list every record that has finished beyond the committable offset."""
        offset, text = self.due(metadata_limit).committed
        listed = CommitMetadata.read(text, offset).finished
        return metadata_limit > 0 and self._epoch.is_seekable and list(listed) == self._epoch.finished()

    def room(self, metadata_limit: int) -> int | None:
        """How many more records may be taken in so that all completions fit into a commit; None for any number."""
        epoch = self._epoch
        if not metadata_limit or not epoch.is_seekable:
            return None
        tracker = epoch.tracker
        ahead = epoch.finished_ahead
        end = max(tracker.position, ahead[-1].end) if ahead else tracker.position
        units = max(metadata_limit - _METADATA_OVERHEAD, 0)
        more = records_with_room(end - tracker.committable, len(tracker) + len(ahead), units)
        # Up to the end of an earlier owner's completions, the text does not grow: it already has the gaps there.
        return max(more, end - tracker.position)

    # How a commit ended -----------------------------------------------------------------

    def acknowledge(self, due: Due) -> None:
        """Record that the broker has stored a commit."""
        self.acknowledged = due.committed.offset
        self.completed = due.completed
        self.failed_transactions = None
        self._unknown_since = None

    def refuse(self, now: float) -> bool:
        """Record that the brokers did not know the topic at loop time *now*.

        Returns:
            Whether it counts as deleted. Then nothing is due unless more records complete.
        """
        if self._unknown_since is None:
            self._unknown_since = now
        if now - self._unknown_since < _GRACE:
            return False
        self._exhausted = self._state
        return True

    def count_uncommitted(self, *, is_due: bool) -> None:
        """Count the finished records without an acknowledged commit, for when no further commit is possible.

        Those of the epoch before count until they have run again and are committed, or are no longer in the log.
        """
        uncommitted = 0
        if is_due or self._epoch.unsent:
            uncommitted = self._epoch.tracker.completed - self.completed
        before = self.before
        if before is not None:
            run_again = before.records - self.completed
            uncommitted = max(uncommitted, min(run_again, before.end - (self.acknowledged or 0)))
        self.uncommitted = uncommitted

    # Transactions -----------------------------------------------------------------------

    def due_in_transaction(self, metadata_limit: int, too_long: float) -> DueInTransaction | None:
        """Return the commit of a transaction that begins now; see `aioshard.core.publishing`.

        Args:
            metadata_limit: As for `is_due`.
            too_long: Length of the shortest text that the broker has refused.

        Returns:
            The commit; None if it would cover no more than the one before, or if the broker stores no text that is
            long enough.
        """
        tracker = self._epoch.tracker
        unsent = self._epoch.unsent
        limit = metadata_limit
        if limit < self.stored_units < too_long:
            limit = self.stored_units  # stored once, so it can be stored again

        def text(offset: int, finished: tuple[Run, ...]) -> str | None:
            return CommitMetadata(first=self.first_commit, finished=finished).whole_text(offset, limit)

        covered = coverage(
            tracker.committable,
            self._epoch.finished(),
            self.published,
            lambda: [outputs.span for outputs in unsent],
            text,
        )
        # 1. No text that the broker stores covers anything.
        if covered is None:
            self.outputs_waiting = len(unsent)
            return None
        # 2. Everything is covered.
        if covered.is_whole:
            self.outputs_waiting = 0
            return DueInTransaction(Due(Committed(covered.offset, covered.text), tracker.completed), covered, None)
        left = [outputs for outputs in unsent if not covered.covers(outputs.span)]
        self.outputs_waiting = len(left)
        rest = self._state._replace(unsent=len(left))
        # 3. It would publish nothing, and commit nothing new.
        is_new = (covered.offset, covered.listed) != (self.acknowledged, self.published)
        if len(left) == len(unsent) and not is_new:
            self._exhausted = rest
            return None
        # 4. The rest waits for a later transaction.
        commit = Due(Committed(covered.offset, covered.text), tracker.completed - _records_of(left))
        return DueInTransaction(commit, covered, rest)

    @property
    def _state(self) -> _State:
        tracker = self._epoch.tracker
        return _State(tracker.committable, tracker.completed, len(self._epoch.unsent))

    def attempt(self, commit: Committed) -> None:
        """Note the commit of a transaction that begins; if it changes nothing, it cannot show the outcome."""
        changes = commit.offset != self.acknowledged or len(commit.metadata) != self.stored_units
        self.attempted = commit if changes else None

    def acknowledge_transaction(self, due: DueInTransaction) -> None:
        """Record that a transaction was committed."""
        self.acknowledge(due.commit)
        self.published = due.coverage.listed
        self.stored_units = len(due.coverage.text)
        self._exhausted = due.rest

    def with_failed_transaction(self, why: str) -> FailedTransactions:
        """Return the failed transactions of the partition, including one that has just failed."""
        before = self.failed_transactions
        if before is None:
            return FailedTransactions(self._clock(), 1, why)
        return FailedTransactions(before.since, before.times + 1, why)

    @property
    def held_up_by_transactions(self) -> FailedTransactions | None:
        """The transactions that have failed in a row, unless a halted record holds the partition up instead."""
        oldest = self._epoch.tracker.oldest
        if oldest is not None and oldest.block is not None and oldest.block.halted:
            return None
        return self.failed_transactions

    def keeps_failing(self, now: float, stuck_after: float) -> bool:
        """Whether transactions have failed for so long that the partition counts as stuck, although records complete.

        Unlike a partition that is `stuck`, it may advance with the next transaction, so its intake is not limited.
        """
        failed = self.held_up_by_transactions
        return failed is not None and failed.times > 1 and now - failed.since > stuck_after


def _records_of(outputs: list[Outputs]) -> int:
    return sum(len(one.offsets) for one in outputs)
