"""The commit coordinator: the one task that commits offsets, in order, one request at a time."""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import anyio

from aioshard.core.commit_metadata import MOST_UNITS
from aioshard.core.histogram import Histogram, HistogramCounts
from aioshard.engine.buffer import Buffer
from aioshard.engine.commits import Due, DueInTransaction
from aioshard.engine.epoch import Outputs, Refused
from aioshard.engine.late_commits import LateCommits
from aioshard.engine.log_fields import partition_fields
from aioshard.engine.partition import Partition
from aioshard.engine.trouble import Trouble
from aioshard.errors import (
    AuthorizationError,
    CommitError,
    CommitRefusedError,
    GroupHasMembersError,
    MessageRefusedError,
    MessagesRefusedError,
    MetadataRefusedError,
    TopicsRefusedError,
    TransportError,
)
from aioshard.log_fields import get_logger
from aioshard.observe import TransactionStatistics
from aioshard.ports import Committed, Membership, Message, TransactionCounts, Transport
from aioshard.records import TopicPartition

logger = get_logger("aioshard.engine.committer")

_RETRY_DELAY = 0.1
_LONGEST_DELAY = 5.0
"""Seconds until the next transaction, after many that failed in a row."""
_CHECK_INTERVAL = 0.1
"""Minimum seconds between checks while nothing is in flight: a tiny commit interval must not spin."""
_PAUSE = 0.03
_PAUSE_PER_PARTITION = 0.001
"""Minimum seconds before an early commit: a hundred times the cost of a commit, 0.3 ms and 10 µs per partition."""
_MOST_BYTES = 768 * 1024
"""Limit of one request: brokers refuse a whole commit if it makes a batch above 1 MiB in their own topic."""
_PARTITION_OVERHEAD = 100
"""Bytes of a partition in a request, besides its topic and its metadata."""
_SHORTEST_METADATA = 256
"""If the broker stores fewer characters than this, commits carry only offsets."""
_LONG_TEXT = 500
"""Building a longer text takes milliseconds: other tasks run before the next one, and the next commit is not early."""


_NO_RESTARTS: Final[Mapping[Any, Any]] = MappingProxyType({})


class CommitFailure(NamedTuple):
    """A commit that was not acknowledged, and what follows from it.

    The commit itself stays due: the committer computes it again and retries.
    """

    error: Exception
    why: str
    """The reason, as a sentence."""
    restarts: Mapping[Partition, Mapping[int, Refused]] = _NO_RESTARTS
    """The partitions that must begin again at the offsets that the brokers report as committed: only the brokers know
    how their transaction ended. Each with its records with a message that cannot be written, by offset."""
    pause: float = 0.0
    """Seconds until the next attempt, besides the interval."""

    @property
    def is_refusal(self) -> bool:
        """Whether commits are not authorized, or the group has members and we are not one."""
        if isinstance(self.error, TopicsRefusedError):
            return self.error.is_denied
        return isinstance(self.error, AuthorizationError | GroupHasMembersError)


class _Transaction(NamedTuple):
    """The offsets that one transaction commits, and the messages that become visible with them."""

    parts: Mapping[Partition, DueInTransaction]
    outgoing: Mapping[Partition, list[Outputs]]

    @property
    def offsets(self) -> Mapping[TopicPartition, Committed]:
        """The commit of each partition."""
        return {partition.topic_partition: part.commit.committed for partition, part in self.parts.items()}

    @property
    def messages(self) -> list[Message]:
        """All messages, in order."""
        return [message for taken in self.outgoing.values() for outputs in taken for message in outputs.messages]


class CommitStatistics(NamedTuple):
    """The committer's part of the statistics of an app."""

    durations: HistogramCounts
    """Seconds until requests were acknowledged."""
    failure_durations: HistogramCounts
    """Seconds until requests failed or timed out."""
    transactions: TransactionStatistics | None
    """None if commits do not use any."""


class Committer:
    """Waits for the oldest incomplete records to complete and commits the changed offsets.

    Decides which partitions may be committed (`own`, `disown`). Only it sends commits, one at a time, each with a
    deadline. Anything that was not acknowledged stays due. Every attempt computes its commit again, under the current
    membership and from the partitions owned at that moment: no request is ever sent again unchanged (I9).

    A failure is a value that `run` returns. What it means for partitions and for the app is for the caller to decide.

    Invariants:
        * A commit carries the committable offset together with the records finished beyond it, both from the same
          moment (I1).
        * A commit that was not answered, and arrives later within 30 s, replaces no newer one for good.
        * Metadata never holds an offset back: if the broker does not store it, it is shortened or left out.
        * A transaction publishes no output of a record that neither its offset nor its metadata covers (I13).
    """

    def __init__(
        self,
        buffer: Buffer,
        clock: Callable[[], float],
        *,
        interval: float,
        timeout: float,
        records: int | None = None,
        transactional: bool = False,
    ) -> None:
        """Make a committer; `run` commits.

        Args:
            buffer: The buffer of the process; transactions are early when their messages take too much of it.
            clock: Loop time.
            interval: Seconds between commits.
            timeout: Seconds after which a request counts as not acknowledged.
            records: Number of completions that are committed before the interval has passed; so are the first ones of
                an epoch. None disables such early commits.
            transactional: Whether each commit is a transaction with the messages of the completed records.
        """
        self.durations = Histogram()
        """Seconds until requests were acknowledged."""
        self.failure_durations = Histogram()
        """Seconds until requests failed or timed out."""
        self.trouble = Trouble(clock)
        """Why the last commit was not acknowledged, until one is or nothing is due."""
        self.turns = 0
        """Number of checks for due commits, plus requests; it keeps rising while any partition is owned."""
        self.metadata_limit = MOST_UNITS
        """Longest metadata to send; reduced after a broker refused one, and 0 if it stores none."""
        self._too_long = math.inf
        """Length of the shortest metadata that a broker has refused."""
        self._has_waiting_outputs = False
        """Whether the latest transaction could not cover all outputs of completed records."""
        self._late = LateCommits()
        self._transactional = transactional
        self._failed_in_a_row = 0
        """How many transactions have failed in a row."""
        self._failing: set[TopicPartition] = set()
        """Partitions whose last transaction failed, also while none of their epochs is open."""
        self._fenced = 0
        """Transactions that the brokers refused."""
        self._messages = 0
        """Messages in transactions that were committed."""
        self._counted: tuple[TransactionCounts, Transport | None] = (TransactionCounts(), None)
        """The transactions of earlier clients, and the latest client, which counts its own."""
        self._began: float | None = None
        """When the open transaction began."""
        self._buffer = buffer
        self._clock = clock
        self._interval = interval
        self._timeout = timeout
        self._records = records
        self._owned: dict[Partition, None] = {}
        self._flushes: dict[asyncio.Future[bool], Collection[Partition]] = {}
        """Waiting callers of `flush`: the future of each result, with the partitions."""
        self._waiter: asyncio.Future[None] | None = None
        self._last = -interval
        """Loop time of the last commit, from which the interval counts."""
        self._has_long_texts = False
        """Whether the last commit had any."""
        self._is_committing = False
        """Whether `run` commits, so that a flush may wait for it."""

    def statistics(self) -> CommitStatistics:
        """Return the figures of its requests and transactions. Safe from any thread."""
        return CommitStatistics(self.durations.counts(), self.failure_durations.counts(), self.transactions())

    def transactions(self) -> TransactionStatistics | None:
        """Return the figures of its transactions; None if commits do not use any. Safe from any thread."""
        if not self._transactional:
            return None
        began = self._began
        lasts = None if began is None else self._clock() - began
        earlier, transport = self._counted
        counts = earlier if transport is None else earlier.plus(transport.transaction_counts)
        return TransactionStatistics(
            fenced=self._fenced,
            messages=self._messages,
            open_seconds=lasts,
            committed=counts.committed,
            aborted=counts.aborted,
            decided_committed=counts.decided_committed,
            decided_aborted=counts.decided_aborted,
            undecided=counts.undecided,
            producer_epochs=counts.epochs,
        )

    def _count_transactions_of(self, transport: Transport) -> None:
        """Count the transactions of a client from now on; those of the one before, which is closed, stay counted."""
        earlier, before = self._counted
        if before is not transport:
            total = earlier if before is None else earlier.plus(before.transaction_counts)
            self._counted = (total, transport)

    @property
    def owns(self) -> bool:
        """Whether it owns any partition."""
        return bool(self._owned)

    def own(self, partition: Partition) -> None:
        """Start committing the partition."""
        self._owned[partition] = None
        if partition.commits.failed_transactions is None:
            self._failing.discard(partition.topic_partition)
        self._wake()

    def disown(self, partition: Partition) -> None:
        """Stop committing the partition, and count its records that finished but are not committed."""
        if partition in self._owned:
            partition.commits.count_uncommitted(is_due=bool(self._due([partition])))
            del self._owned[partition]

    def forget_failures(self, names: Collection[TopicPartition]) -> None:
        """Forget the failed transactions of partitions that another member may own now."""
        self._failing.difference_update(names)
        self._wake()

    async def flush(self, partitions: Collection[Partition], timeout: float) -> bool:
        """Commit the due offsets of *partitions* now, and retry until they are acknowledged.

        An offset that an earlier commit may have replaced is committed once more.

        Args:
            partitions: The partitions to commit; those that are not owned are ignored.
            timeout: Seconds after which to give up.

        Returns:
            Whether nothing is due for them any longer.
        """
        self._late.repeat_now((partition.topic_partition for partition in partitions), self._clock())
        if not self._is_committing or not self._due(partitions):
            return not self._due(partitions)
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._flushes[done] = partitions
        self._wake()
        with anyio.move_on_after(timeout):
            return await done
        self._flushes.pop(done, None)
        return not self._due(partitions)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _due(self, partitions: Collection[Partition]) -> list[Partition]:
        """Owned partitions among *partitions* that have something to commit."""
        now = self._clock()
        owned = [partition for partition in partitions if partition in self._owned]
        return [
            partition
            for partition in owned
            if partition.commits.is_due(self.metadata_limit) or self._late.is_due(partition.topic_partition, now)
        ]

    # The task ---------------------------------------------------------------------------

    async def run(self, transport: Transport) -> CommitFailure:
        """Commit until a commit fails.

        The caller acts on the failure before anything can await, and calls `run` again: callers of `flush` wait
        meanwhile. In the end it calls `stop`.
        """
        self._is_committing = True
        if self._transactional:
            self._count_transactions_of(transport)
        while True:
            await self._answer_flushes()
            await self._until_due(transport)
            failure = await self._commit_due(transport)
            self._last = self._clock()
            if failure is not None:
                self._last += failure.pause
                return failure

    def stop(self) -> None:
        """Let callers that still wait in `flush` learn that no commit will happen, until `run` is called again."""
        self._is_committing = False
        self._give_up(self._owned)

    def _give_up(self, refused: Collection[Partition]) -> None:
        """Let the waiting callers continue for whom only commits of these partitions are due."""
        for done, partitions in tuple(self._flushes.items()):
            due = self._due(partitions)
            if all(partition in refused for partition in due):
                self._resolve(done, acknowledged=not due)

    def _resolve(self, done: asyncio.Future[bool], *, acknowledged: bool) -> None:
        """Let a waiting caller continue, unless it was cancelled."""
        del self._flushes[done]
        if not done.done():
            done.set_result(acknowledged)

    async def _answer_flushes(self) -> None:
        """Let the callers continue for whose partitions nothing is due any longer; wait a moment for the others."""
        for done, partitions in tuple(self._flushes.items()):
            if not self._due(partitions):
                self._resolve(done, acknowledged=True)
        if self._flushes:
            await asyncio.sleep(_RETRY_DELAY)

    # When to commit ---------------------------------------------------------------------

    async def _until_due(self, transport: Transport) -> None:
        """Wait until a commit is due and the time for it has come."""
        # 1. A caller of `flush` waits: the time has come, whatever is due.
        while not self._flushes:
            self.turns += 1
            self._waiter = asyncio.get_running_loop().create_future()
            awaited: list[asyncio.Future[None]] = [self._waiter]
            due = self._due(self._owned)
            timeout: float | None
            if due:
                timeout = self._seconds_left(due)
                if timeout <= 0:
                    # 2. A commit is due, and its time has come.
                    if transport.membership().generation >= 0:
                        return
                    # 3. The same, but it must wait until we are a member of the group again.
                    timeout = _RETRY_DELAY
            else:
                # 4. Nothing is due. With failing transactions, that is so only because their epochs have ended.
                if not self._failing:
                    self._failed_in_a_row = 0
                    self.trouble.end()
                for partition in self._owned:
                    partition.wake(self._waiter)
                timeout = self._seconds_to_next_check()
            crowding = self._crowding()
            if crowding is not None:
                awaited.append(crowding)
            await asyncio.wait(awaited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if crowding is not None and crowding.done():
                self._last = -self._interval

    def _crowding(self) -> asyncio.Future[None] | None:
        """A future that is done when messages take too much of the buffer; None if an early commit does not help.

        It does not while transactions fail, or if the latest one could not take the messages.
        """
        if not self._transactional or self._failed_in_a_row or self._has_waiting_outputs:
            return None
        return self._buffer.crowding()

    def _seconds_to_next_check(self) -> float | None:
        """Return when to check again while nothing is due; None if something will signal it.

        No future signals completions beyond the oldest record.
        """
        if not self._owned:
            return None
        seconds = max(self._interval, _CHECK_INTERVAL)
        if self._may_commit_early and any(partition.tracker for partition in self._owned):
            seconds = min(seconds, _least_pause(len(self._owned)))
        return seconds

    @property
    def _may_commit_early(self) -> bool:
        return self._records is not None and not self._has_long_texts and self.trouble.why is None

    def _seconds_left(self, due: Collection[Partition]) -> float:
        """Return when the due commits should be sent, or checked again, in seconds; 0 or less to send them now."""
        now = self._clock()
        wait = self._last + self._interval - now
        # 1. Only the interval counts.
        if self._records is None or not self._may_commit_early:
            return wait
        # 2. The last commit was a moment ago.
        pause = _least_pause(len(due))
        if now < self._last + pause:
            return min(wait, self._last + pause - now)
        # 3. An epoch's first completions are committed early: an app that dies within a second of each start would
        # otherwise never get past its first records.
        if any(partition.tracker.completed and not partition.commits.completed for partition in due):
            return 0.0
        # 4. So many records have completed that a crash would repeat too much.
        completed = sum(partition.tracker.completed - partition.commits.completed for partition in due)
        return 0.0 if completed >= self._records else min(wait, pause)

    # Commits ----------------------------------------------------------------------------

    async def _commit_due(self, transport: Transport) -> CommitFailure | None:
        due = self._due(self._owned)
        membership = transport.membership()
        if not due or membership.generation < 0:
            return None
        if self._transactional:
            return await self._transact(transport, due, membership)
        return await self._send_all(transport, due, membership)

    async def _send_all(
        self, transport: Transport, due: Sequence[Partition], membership: Membership
    ) -> CommitFailure | None:
        """Send the due commits, in requests small enough for the brokers; stop at the first one not acknowledged.

        One that is acknowledged except for some topics is a failure, but does not hold back the next ones.
        """
        request: dict[Partition, Due] = {}
        size = 0
        partial: CommitFailure | None = None
        self._has_long_texts = False
        for partition in due:
            if partition not in self._owned:
                continue
            commit = partition.commits.due(self.metadata_limit)
            if len(commit.committed.metadata) > _LONG_TEXT:
                self._has_long_texts = True
                await asyncio.sleep(0)
            length = _size(partition, commit)
            if request and size + length > _MOST_BYTES:
                failure = await self._send(transport, request, membership)
                if failure is not None and not isinstance(failure.error, TopicsRefusedError):
                    return failure
                partial = failure or partial
                request = {}
                size = 0
            request[partition] = commit
            size += length
        if not request:
            return partial
        return await self._send(transport, request, membership) or partial

    async def _send(
        self, transport: Transport, request: dict[Partition, Due], membership: Membership
    ) -> CommitFailure | None:
        """Send one request; if the broker refuses the metadata, retry with shorter texts, in the end without any."""
        while True:
            self.turns += 1
            began = self._clock()
            # A partition may have been revoked since its commit was computed (I9).
            owned = {partition: due for partition, due in request.items() if partition in self._owned}
            offsets = {partition.topic_partition: due.committed for partition, due in owned.items()}
            try:
                with anyio.fail_after(self._timeout):
                    await transport.commit(offsets, membership)
                break
            except MetadataRefusedError as error:
                longest = max((len(due.committed.metadata) for due in owned.values()), default=0)
                if not longest:
                    return self._failed(error, began, transport)
                self._shorten(longest)
                request = {partition: partition.commits.due(self.metadata_limit) for partition in owned}
            except asyncio.CancelledError:
                self._late.unanswered(offsets)
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # this task itself is cancelled, not only a future that it awaits
                return self._failed(CommitError("the Kafka client cancelled the commit"), began, transport)
            except TopicsRefusedError as error:
                return self._end_partly_refused(owned, error, began, transport)
            except (TransportError, TimeoutError) as error:
                if _may_arrive(error):
                    self._late.unanswered(offsets)
                return self._failed(error, began, transport)
        self._succeeded(began)
        self._late.acknowledged(offsets, began, self._clock())
        for partition, due in owned.items():
            partition.commits.acknowledge(due)
        return None

    def _end_partly_refused(
        self, request: Mapping[Partition, Due], error: TopicsRefusedError, began: float, transport: Transport
    ) -> CommitFailure | None:
        """End a request that the brokers have stored except for some topics; give up those that count as deleted."""
        stored = [partition.topic_partition for partition in request if partition.topic_partition not in error.refused]
        self._late.acknowledged(stored, began, self._clock())
        refused: dict[Partition, TransportError] = {}
        for partition, due in request.items():
            reason = error.refused.get(partition.topic_partition)
            if reason is None:
                partition.commits.acknowledge(due)
            elif isinstance(reason, AuthorizationError) or not self._counts_as_deleted(partition):
                refused[partition] = reason
        if not refused:
            self._succeeded(began)
            return None
        # Another attempt soon would be refused too, and a rebalance must not wait for it.
        self._give_up(refused)
        pending = {partition.topic_partition: reason for partition, reason in refused.items()}
        return self._failed(TopicsRefusedError(pending), began, transport)

    def _counts_as_deleted(self, partition: Partition) -> bool:
        """Record that the brokers do not know the topic; return whether it is given up, and log that."""
        if not partition.commits.refuse(self._clock()):
            return False
        name = partition.topic_partition
        self._late.forget(name)
        records = partition.tracker.completed - partition.commits.completed
        logger.warning(
            "topic %r counts as deleted: the brokers do not store its offsets; finished records of %s whose commit is "
            "given up: %d",
            name.topic,
            name,
            records,
            extra=partition_fields("commit_given_up", name, records=records),
        )
        return True

    def _succeeded(self, began: float) -> None:
        """Record that a request which began then was acknowledged."""
        self.durations.add(self._clock() - began)
        lasted = self.trouble.end()
        if lasted is not None:
            logger.info("commits are acknowledged again after %.1f s", lasted, extra={"event": "commit_recovered"})

    def _failed(self, error: Exception, began: float, transport: Transport) -> CommitFailure:
        """Record that a request which began then was not acknowledged, and log it if that is new."""
        self.failure_durations.add(self._clock() - began)
        reason = str(error) or transport.hang or f"no answer within commit_timeout={self._timeout:g} s"
        if self.trouble.report(reason):
            fields = {"event": "commit_failed", "failures": self.failure_durations.counts().count}
            logger.warning("a commit was not acknowledged and is retried: %s", reason, extra=fields)
        failure = CommitFailure(error, reason)
        if failure.is_refusal and not isinstance(error, TopicsRefusedError):
            self._give_up(self._owned)
        return failure

    # Transactions -----------------------------------------------------------------------

    async def _transact(
        self, transport: Transport, due: Sequence[Partition], membership: Membership
    ) -> CommitFailure | None:
        """Commit the due offsets and the messages of the completed records in one transaction."""
        transaction = self._begin_transaction(due)
        if transaction is None:
            return None
        began = self._began = self._clock()
        try:
            with anyio.fail_after(self._timeout):
                await transport.commit(transaction.offsets, membership, transaction.messages)
        except (TransportError, TimeoutError) as error:
            return self._end_failed(transaction, error, self._failed(error, began, transport))
        finally:
            self._began = None
        self._end_committed(transaction, began)
        return None

    def _begin_transaction(self, due: Sequence[Partition]) -> _Transaction | None:
        """Take the messages of the next transaction; return None if it would cover nothing."""
        parts = self._parts_of_transaction(due)
        if not parts:
            return None
        outgoing = {partition: partition.take_unsent(part.coverage) for partition, part in parts.items()}
        self._has_waiting_outputs = any(partition.unsent for partition in self._owned)
        for partition, part in parts.items():
            partition.commits.attempt(part.commit.committed)
        return _Transaction(parts, outgoing)

    def _end_committed(self, transaction: _Transaction, began: float) -> None:
        """End a transaction that was committed."""
        for partition, taken in transaction.outgoing.items():
            partition.sent(sum(outputs.size for outputs in taken))
        self._failed_in_a_row = 0
        self._failing.difference_update(partition.topic_partition for partition in transaction.parts)
        self._messages += len(transaction.messages)
        self._succeeded(began)
        for partition, part in transaction.parts.items():
            partition.commits.acknowledge_transaction(part)

    def _end_failed(
        self, transaction: _Transaction, error: TransportError | TimeoutError, failure: CommitFailure
    ) -> CommitFailure:
        """End a transaction that was not committed, and decide what happens to its messages."""
        # 1. Some messages cannot be written: those of other partitions go into the next transaction. Partitions with
        # such records begin again, so that later records of their keys do not pass them; they fail this time.
        if isinstance(error, MessagesRefusedError):
            refused = _refused_records(error.refused, transaction.outgoing)
            for partition, taken in transaction.outgoing.items():
                if partition not in refused:
                    partition.put_back(taken)
            return failure._replace(restarts=refused)
        # 2. It was refused before the commit. None of its messages can ever become visible: the client has asked for no
        # commit, and the brokers refuse late requests of earlier transactions.
        if isinstance(error, CommitRefusedError):
            self._fenced += 1
            for partition, taken in transaction.outgoing.items():
                partition.put_back(taken)
            return failure
        # 3. Only the brokers know whether its messages are visible.
        self._failed_in_a_row += 1
        self._failing.update(partition.topic_partition for partition in transaction.parts)
        if isinstance(error, MetadataRefusedError):
            self._shorten(max(len(part.coverage.text) for part in transaction.parts.values()))
        return failure._replace(
            restarts=dict.fromkeys(transaction.parts, _NO_RESTARTS),
            pause=min(_RETRY_DELAY * 2.0 ** min(self._failed_in_a_row, 10), _LONGEST_DELAY),
        )

    def _parts_of_transaction(self, due: Sequence[Partition]) -> dict[Partition, DueInTransaction]:
        """Return what the next transaction commits of each partition, in a request small enough for the brokers."""
        request: dict[Partition, DueInTransaction] = {}
        size = 0
        for partition in due:
            part = partition.commits.due_in_transaction(self.metadata_limit, self._too_long)
            if part is None:
                continue
            size += _size(partition, part.commit)
            if request and size > _MOST_BYTES:
                break
            request[partition] = part
        return request

    def _shorten(self, length: int) -> None:
        """Send shorter metadata from now on, because the broker does not store *length* characters."""
        self._too_long = min(self._too_long, length)
        tried = min(length, self.metadata_limit) // 2
        self.metadata_limit = tried if tried >= _SHORTEST_METADATA else 0
        effect = (
            "Completions that do not fit are processed again after a crash"
            if not self._transactional
            else "Outputs of completed records that do not fit are published once the records before them are complete"
        )
        logger.warning(
            "the broker refused %d characters of commit metadata; trying at most %d. %s: set "
            "offset.metadata.max.bytes of the broker to 4096, its default",
            length,
            self.metadata_limit,
            effect,
            extra={"event": "commit_metadata_shortened", "refused": length, "tried": self.metadata_limit},
        )


def _refused_records(
    refused: Mapping[int, MessageRefusedError], outgoing: Mapping[Partition, Sequence[Outputs]]
) -> dict[Partition, dict[int, Refused]]:
    """Return the records whose messages were refused, by partition and offset.

    Args:
        refused: The errors of messages, by their index in the transaction.
        outgoing: The messages of the transaction, in their order.
    """
    records: dict[Partition, dict[int, Refused]] = {}
    first = 0
    for partition, taken in outgoing.items():
        for outputs in taken:
            end = first + len(outputs.messages)
            error = next((refused[index] for index in range(first, end) if index in refused), None)
            first = end
            if error is not None:
                failed = dict.fromkeys(outputs.offsets, Refused(error, outputs._replace(messages=())))
                records.setdefault(partition, {}).update(failed)
    return records


def _may_arrive(error: TransportError | TimeoutError) -> bool:
    """Whether a commit that failed may still be stored: it was not refused for good."""
    return isinstance(error, TimeoutError | CommitError) and not isinstance(error, CommitRefusedError)


def _size(partition: Partition, commit: Due) -> int:
    """Bytes of a partition in a request."""
    return len(partition.topic_partition.topic) + len(commit.committed.metadata.encode()) + _PARTITION_OVERHEAD


def _least_pause(partitions: int) -> float:
    return _PAUSE + _PAUSE_PER_PARTITION * partitions
