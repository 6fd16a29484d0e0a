"""The commit coordinator: the one task that commits offsets, in order, one request at a time."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import anyio

from aioshard.core.commit_metadata import MOST_UNITS
from aioshard.core.histogram import Histogram
from aioshard.engine.partition import Due, Partition
from aioshard.engine.trouble import Trouble
from aioshard.errors import (
    AuthorizationError,
    CommitError,
    CommitRefusedError,
    MetadataRefusedError,
    TransportError,
)
from aioshard.observe import TransactionStatistics
from aioshard.ports import GroupHasMembersError, Membership, Message, Transport

logger = logging.getLogger("aioshard.engine.committer")

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


class Committer:
    """Waits for the oldest incomplete records to complete and commits the changed offsets.

    Decides which partitions may be committed (`own`, `disown`). Only it sends commits, one at a time, each with a
    deadline. Anything that was not acknowledged stays due. Every attempt computes its commit again, under the current
    membership and from the partitions owned at that moment: no request is ever sent again unchanged (I9).

    Invariants:
        * A partition's `acknowledged` changes only when the broker acknowledged a commit, or when its epoch starts.
        * A commit carries the committable offset together with the records finished beyond it, both from the same
          moment (I1).
        * Metadata never holds an offset back: if the broker does not store it, it is shortened or left out.
    """

    def __init__(
        self,
        interval: float,
        timeout: float,
        clock: Callable[[], float],
        refused: Callable[[TransportError], object] = lambda _: None,
        records: int | None = None,
        *,
        aborted: Callable[[Collection[Partition], str], object] | None = None,
    ) -> None:
        """Make a committer; `run` is its task, once per life of a client.

        Args:
            interval: Seconds between commits.
            timeout: Seconds after which a request counts as not acknowledged.
            clock: Loop time.
            refused: Called when a commit is not authorized, or the group has members and we are not one; the commit
                stays due.
            records: Number of completions that are committed before the interval has passed; so are the first ones of
                an epoch. None disables such early commits.
            aborted: If given, each commit is a transaction with the messages of the completed records. Called with
                the partitions of a failed transaction, and the reason: their epochs must end, because only the
                brokers know the outcome.
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
        self._refused = refused
        self._aborted = aborted
        self._aborts = 0
        """How many transactions have failed in a row."""
        self._fenced = self._messages = 0
        """Transactions that the brokers refused, and messages in those that were committed."""
        self._began: float | None = None
        """When the open transaction began."""
        self._interval = interval
        self._records = records
        self._timeout = timeout
        self._clock = clock
        self._owned: dict[Partition, None] = {}
        self._requests: dict[asyncio.Future[bool], Collection[Partition]] = {}
        """Waiting callers of `flush`: the future of each result, with the partitions."""
        self._waiter: asyncio.Future[None] | None = None
        self._last = -interval
        self._has_long_texts = False
        """Whether the last commit had any."""
        self._running = False

    def transactions(self) -> TransactionStatistics | None:
        """Statistics of the transactions; None if commits do not use any. Safe from any thread."""
        began = self._began
        lasts = None if began is None else self._clock() - began
        return None if self._aborted is None else TransactionStatistics(self._fenced, self._messages, lasts)

    @property
    def owns(self) -> bool:
        """Whether it owns any partition."""
        return bool(self._owned)

    def own(self, partition: Partition) -> None:
        """Start committing the partition."""
        self._owned[partition] = None
        self._wake()

    def hurry(self) -> None:
        """Commit now instead of after the interval, unless transactions fail."""
        if not self._aborts:
            self._last = -self._interval
            self._wake()

    def disown(self, partition: Partition) -> None:
        """Stop committing the partition, and count its records that finished but are not committed."""
        if partition in self._owned:
            due = self._due([partition])
            del self._owned[partition]
            partition.uncommitted = partition.tracker.completed - partition.committed_completions if due else 0

    async def flush(self, partitions: Collection[Partition], timeout: float) -> bool:
        """Commit the due offsets of *partitions* now, and retry until they are acknowledged.

        Args:
            partitions: The partitions to commit; those that are not owned are ignored.
            timeout: Seconds after which to give up.

        Returns:
            Whether nothing is due for them any longer.
        """
        if not self._running or not self._due(partitions):
            return not self._due(partitions)
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._requests[done] = partitions
        self._wake()
        with anyio.move_on_after(timeout):
            return await done
        self._requests.pop(done, None)
        return not self._due(partitions)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _due(self, partitions: Collection[Partition]) -> list[Partition]:
        """Owned partitions among *partitions* that have something to commit."""
        return [
            partition for partition in partitions if partition in self._owned and partition.is_due(self.metadata_limit)
        ]

    async def run(self, transport: Transport) -> None:
        """Commit until cancelled; callers that still wait in `flush` then learn that the commit did not happen."""
        self._running = True
        try:
            while True:
                await self._until_due(transport)
                await self._commit_due(transport)
        finally:
            self._running = False
            self._give_up()

    def _give_up(self) -> None:
        """Let all waiting callers continue without a commit."""
        for done in tuple(self._requests):
            self._resolve(done, acknowledged=False)

    def _resolve(self, done: asyncio.Future[bool], *, acknowledged: bool) -> None:
        """Let a waiting caller continue, unless it was cancelled."""
        del self._requests[done]
        if not done.done():
            done.set_result(acknowledged)

    async def _until_due(self, transport: Transport) -> None:
        """Wait for a request, or until a commit is due and the time for it has come."""
        while not self._requests:
            self.turns += 1
            self._waiter = asyncio.get_running_loop().create_future()
            awaited: list[asyncio.Future[None]] = [self._waiter]
            timeout = None
            if due := self._due(self._owned):
                timeout = self._seconds_left(due)
                if timeout <= 0:
                    if transport.membership().generation >= 0:
                        return
                    timeout = _RETRY_DELAY
            else:
                self.trouble.end()
                awaited += [partition.frontier() for partition in self._owned]
                if self._owned:
                    # No future signals completions beyond the oldest record.
                    timeout = max(self._interval, _CHECK_INTERVAL)
                    if self._may_commit_early and any(partition.tracker for partition in self._owned):
                        timeout = min(timeout, _least_pause(len(self._owned)))
            await asyncio.wait(awaited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    @property
    def _may_commit_early(self) -> bool:
        return self._records is not None and not self._has_long_texts and self.trouble.why is None

    def _seconds_left(self, due: Collection[Partition]) -> float:
        """Return when the due commits should be sent, or checked again, in seconds; 0 or less to send them now."""
        now = self._clock()
        wait = self._last + self._interval - now
        if self._records is None or not self._may_commit_early:
            return wait
        pause = _least_pause(len(due))
        if now < self._last + pause:
            return min(wait, self._last + pause - now)
        # An epoch's first completions are committed early: an app that dies within a second of each start would
        # otherwise never get past its first records.
        first = any(partition.tracker.completed and not partition.committed_completions for partition in due)
        completed = sum(partition.tracker.completed - partition.committed_completions for partition in due)
        return 0.0 if first or completed >= self._records else min(wait, pause)

    async def _commit_due(self, transport: Transport) -> None:
        due = self._due(self._owned)
        membership = transport.membership()
        pause = 0.0
        if due and membership.generation >= 0:
            if self._aborted is None:
                await self._send_all(transport, due, membership)
            else:
                pause = await self._transact(transport, due, membership, self._aborted)
        self._last = self._clock() + pause
        for done, partitions in tuple(self._requests.items()):
            if not self._due(partitions):
                self._resolve(done, acknowledged=True)
        if self._requests:
            await asyncio.sleep(_RETRY_DELAY)

    async def _send_all(self, transport: Transport, due: Sequence[Partition], membership: Membership) -> None:
        """Send the due commits, in requests small enough for the brokers; stop at the first one not acknowledged."""
        request: dict[Partition, Due] = {}
        size = 0
        self._has_long_texts = False
        for partition in due:
            if partition not in self._owned:
                continue
            commit = partition.due(self.metadata_limit)
            if len(commit.committed.metadata) > _LONG_TEXT:
                self._has_long_texts = True
                await asyncio.sleep(0)
            length = _size(partition, commit)
            if request and size + length > _MOST_BYTES:
                if not await self._send(transport, request, membership):
                    return
                request, size = {}, 0
            request[partition] = commit
            size += length
        if request:
            await self._send(transport, request, membership)

    async def _send(self, transport: Transport, request: dict[Partition, Due], membership: Membership) -> bool:
        """Send one request; if the broker refuses the metadata, retry with shorter texts, in the end without any."""
        while True:
            self.turns += 1
            began = self._clock()
            owned = {partition: due for partition, due in request.items() if partition in self._owned}
            try:
                with anyio.fail_after(self._timeout):
                    offsets = {partition.topic_partition: due.committed for partition, due in owned.items()}
                    await transport.commit(offsets, membership)
                break
            except MetadataRefusedError as error:
                longest = max((len(due.committed.metadata) for due in owned.values()), default=0)
                if not longest:
                    self._failed(error, began)
                    return False
                self._shorten(longest)
                request = {partition: partition.due(self.metadata_limit) for partition in owned}
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # this task itself is cancelled, not only a future that it awaits
                self._failed(CommitError("the Kafka client cancelled the commit"), began)
                return False
            except (TransportError, TimeoutError) as error:
                self._failed(error, began)
                return False
        self._acknowledged(owned, began)
        return True

    def _acknowledged(self, request: Mapping[Partition, Due], began: float) -> None:
        self.durations.add(self._clock() - began)
        lasted = self.trouble.end()
        if lasted is not None:
            logger.info("commits are acknowledged again after %.1f s", lasted, extra={"event": "commit_recovered"})
        for partition, due in request.items():
            partition.acknowledge(due)

    async def _transact(
        self,
        transport: Transport,
        due: Sequence[Partition],
        membership: Membership,
        aborted: Callable[[Collection[Partition], str], object],
    ) -> float:
        """Commit the due offsets and the messages of the completed records in one transaction.

        Returns:
            Seconds to wait before the next one, besides the interval.
        """
        began = self._began = self._clock()
        request: dict[Partition, Due] = {}
        outgoing: dict[Partition, tuple[list[Message], int]] = {}
        size = 0
        for partition in due:
            commit = partition.due(self.metadata_limit)
            size += _size(partition, commit)
            if request and size > _MOST_BYTES:
                break
            request[partition] = commit
            outgoing[partition] = partition.take_unsent()
        messages = [message for unsent, _ in outgoing.values() for message in unsent]
        try:
            with anyio.fail_after(self._timeout):
                offsets = {partition.topic_partition: commit.committed for partition, commit in request.items()}
                await transport.commit(offsets, membership, messages)
        except CommitRefusedError as error:  # so none of its messages can ever become visible
            self._fenced += 1
            self._failed(error, began)
            for partition, (unsent, _) in outgoing.items():
                partition.put_back(unsent)
            return 0.0
        except (TransportError, TimeoutError) as error:
            self._aborts += 1
            self._failed(error, began)
            if isinstance(error, MetadataRefusedError):
                self._shorten(max(len(commit.committed.metadata) for commit in request.values()))
            aborted(request, f"its transaction failed: {self.trouble.why}")
            return min(_RETRY_DELAY * 2.0 ** min(self._aborts, 10), _LONGEST_DELAY)
        finally:
            self._began = None
        for partition, (_, sent) in outgoing.items():
            partition.sent(sent)
        self._aborts = 0
        self._messages += len(messages)
        self._acknowledged(request, began)
        return 0.0

    def _shorten(self, refused: int) -> None:
        """Send shorter metadata from now on, because the broker does not store *refused* characters."""
        tried = min(refused, self.metadata_limit) // 2
        self.metadata_limit = tried if tried >= _SHORTEST_METADATA else 0
        logger.warning(
            "the broker refused %d characters of commit metadata; trying at most %d. Completions that do not fit are "
            "processed again after a crash: raise offset.metadata.max.bytes of the broker",
            refused,
            self.metadata_limit,
            extra={"event": "note_shortened", "refused": refused, "tried": self.metadata_limit},
        )

    def _failed(self, error: Exception, began: float) -> None:
        self.failure_durations.add(self._clock() - began)
        reason = str(error) or f"no answer within commit_timeout={self._timeout:g} s"
        if self.trouble.report(reason):
            fields = {"event": "commit_failed", "failures": self.failure_durations.counts().count}
            logger.warning("a commit was not acknowledged and is retried: %s", reason, extra=fields)
        if isinstance(error, AuthorizationError | GroupHasMembersError):
            self._give_up()
            self._refused(error)


def _size(partition: Partition, commit: Due) -> int:
    """Bytes of a partition in a request."""
    return len(partition.topic_partition.topic) + len(commit.committed.metadata.encode()) + _PARTITION_OVERHEAD


def _least_pause(partitions: int) -> float:
    return _PAUSE + _PAUSE_PER_PARTITION * partitions
