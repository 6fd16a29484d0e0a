"""Transactions on our own client: one at a time, over any number of clients of a process."""

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any, Final

from aioshard.errors import (
    AuthorizationError,
    ClientLostError,
    CommitError,
    MessagesRefusedError,
    SettingsError,
    TransportError,
)
from aioshard.kafka.batches import Identity
from aioshard.kafka.offsets import GroupOffsets, Member
from aioshard.kafka.transactions.answers import (
    DENIED_ID,
    OF_TRANSACTION,
    ON_ADDING,
    ON_COMMIT,
    ON_NEW_EPOCH,
    ON_OFFSETS,
    TIMEOUT_TOO_LONG,
    Meaning,
)
from aioshard.kafka.transactions.call import Call
from aioshard.kafka.transactions.coordinator import Answer, Coordinator
from aioshard.kafka.transactions.identity import TransactionalId, Version
from aioshard.kafka.transactions.messages import MessageWriter
from aioshard.kafka.transactions.outcomes import KnownOffsets, TransactionOutcome
from aioshard.kafka.transactions.outputs import OutputTopics
from aioshard.kafka.transactions.requests import aborted, error_of, request_of
from aioshard.kafka.transactions.writes import Writes
from aioshard.kafka.wire.cluster import Cluster, CoordinatorKind
from aioshard.kafka.wire.errors import BrokerError, IncompleteResponseError, WireError
from aioshard.kafka.wire.requests import (
    ADD_OFFSETS_TO_TXN,
    END_TXN,
    INIT_PRODUCER_ID,
    TXN_OFFSET_COMMIT,
)
from aioshard.kafka.wire.responses import (
    CommittedOffset,
    following_identity,
    new_producer_id,
    refused_offsets,
)
from aioshard.ports import Committed, Message, TransactionCounts
from aioshard.records import TopicPartition, by_topic

logger = logging.getLogger("aioshard.kafka.transactions")

_FEATURE: Final = "transaction.version"
_FEATURES_AGE: Final = 10.0
"""Seconds after which the features of the cluster are looked up again: operators change them on a running cluster."""
_ABORT_TIMEOUT: Final = 5.0
"""Seconds to abort a failed transaction at once. After that, the beginning of the next one aborts it."""
_CLOSE_TIMEOUT: Final = 2.0
"""Seconds to wait for a running call when the client is closed."""
_NO_ID: Final = -1
_SERVER_FAILED: Final = -1
"""Error code of a broker that failed for a reason which only its log tells."""
_NO_TRANSACTION: Final = 48
"""Error code of a commit without an open transaction, and not after one that was committed."""


class Transactions:
    """Commits messages and offsets in transactions, one at a time.

    Each call runs in a task of its own, which outlives a caller that gives up: nothing else tells how a transaction
    has ended. The next call waits for it.

    Invariants:
        * When `settle` or a later call returns, no earlier transaction of ours is open or undecided.
        * The commit is requested only after every message and every offset was acknowledged. No abort follows it:
          repeated, it tells its own outcome.
        * Each failure is followed by a new epoch. The brokers refuse requests of the old epoch that arrive later. In
          the second protocol, the request of it aborts what is open; in the first one, an abort precedes it.
    """

    def __init__(
        self,
        cluster: Cluster,
        transactional: TransactionalId,
        offsets: GroupOffsets,
        group_id: str,
        *,
        timeout: float,
    ) -> None:
        """Serve one client; requests nothing yet.

        Args:
            cluster: The cluster, started.
            transactional: The transactional id; the same for each client of a process.
            offsets: The committed offsets of the group.
            group_id: The group.
            timeout: Seconds after which the brokers abort a transaction, and each of our calls gives up.
        """
        self.counts = TransactionCounts()
        self._cluster = cluster
        self._id = transactional
        self._offsets = offsets
        self._group_id = group_id
        self._timeout = timeout
        self._coordinator = Coordinator(cluster, CoordinatorKind.TRANSACTION, transactional.name)
        self._group = Coordinator(cluster, CoordinatorKind.GROUP, group_id)
        self._topics = OutputTopics(cluster)
        self._messages = MessageWriter(cluster, transactional, self._coordinator)
        self._version = Version.FIRST
        """The protocol, according to the features of the cluster."""
        self._known = KnownOffsets()
        self._looked_up_at = float("-inf")
        """When the features were looked up, by `time.monotonic`."""
        self._call: Call | None = None
        self._latest: Call | None = None
        """The latest call, running or not."""
        self._task: asyncio.Task[None] | None = None
        """That of the running call."""
        self._closed = False

    @property
    def hang(self) -> str | None:
        """Why the running call takes long, as a sentence; None if it does not."""
        delay = None if self._call is None else self._call.delay
        return None if delay is None else f"{self._id} is {self._id.phase} and {delay}"

    @property
    def failure(self) -> TransportError | None:
        """The reason why this client can never commit again, if there is one."""
        return self._id.end

    async def commit(
        self, messages: Sequence[Message], offsets: Mapping[TopicPartition, CommittedOffset], member: Member
    ) -> None:
        """Commit messages and offsets in one transaction, and wait until it has ended.

        Raises:
            MessagesRefusedError: Some messages can never be written. Nothing is visible.
            WireError: The brokers refused the offsets, for example because the group has rebalanced. Nothing is
                visible.
            TransportError: The transaction failed, or its outcome is unknown; see `settle`.
        """
        call = Call(self._timeout)
        await self._alone(call, self._commit(call, messages, offsets, member), "transaction")

    async def settle(self) -> None:
        """Wait until no transaction of ours is open or undecided.

        Raises:
            TransportError: The brokers do not answer, or do not allow transactions.
        """
        call = Call(self._timeout)
        await self._alone(call, self._settle(call), "end of transactions")

    def learn(self, committed: Mapping[TopicPartition, Committed | None]) -> None:
        """Note what the group has committed: a transaction that does not change it leaves no trace of its outcome."""
        self._known.learn(committed)

    async def close(self) -> None:
        """Wait a moment for the running call; the next epoch ends what it leaves open."""
        self._closed = True
        if self._call is not None:
            self._call.is_abandoned = True
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_CLOSE_TIMEOUT)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # One at a time --------------------------------------------------------------------

    async def _alone(self, call: Call, work: Coroutine[Any, Any, None], purpose: str) -> None:
        """Run a call while no other one runs. If the caller gives up, it ends by itself."""
        try:
            await self._turn()
        except BaseException:
            work.close()
            raise
        result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start(call)
        self._task = asyncio.create_task(self._run(work, result), name=f"{purpose} of {self._id.name}")
        self._task.add_done_callback(self._end)
        try:
            await result
        finally:
            call.is_abandoned = not result.done() or result.cancelled()

    def _start(self, call: Call) -> None:
        """Make a call the running one."""
        if self._latest is not None:
            call.follow(self._latest)
        self._call = call
        self._latest = call

    async def _turn(self) -> None:
        while self._task is not None:
            await asyncio.wait([self._task])
        if self._closed:
            raise _closed_error()

    async def _run(self, work: Coroutine[Any, Any, None], result: "asyncio.Future[None]") -> None:
        """Run a call, tell its result, and then abort what it has left open: readers wait for that."""
        try:
            await work
        except asyncio.CancelledError:  # by `close`
            self._id.fail()
            if self._call is not None and self._call.must_end:
                self.counts.undecided += 1
            if not result.done():
                result.set_exception(_closed_error())
            raise
        except Exception as error:  # noqa: BLE001 - raised in the caller, if it still waits
            self._id.fail()
            if not result.done():
                result.set_exception(error)
        else:
            if not result.done():
                result.set_result(None)
        if self._id.is_stale and self._id.known is not None and not self._closed:
            call = Call(_ABORT_TIMEOUT)
            self._start(call)
            try:
                await self._prepare(call)
            except (TransportError, SettingsError) as error:
                logger.debug("a transaction is aborted later: %s", error)

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._task = None
        self._call = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the task %r has failed", task.get_name(), exc_info=error)

    # Epochs ---------------------------------------------------------------------------

    async def _settle(self, call: Call) -> None:
        had_epoch = self._id.known is not None
        try:
            await self._prepare(call)
        except CommitError:
            is_forgotten = had_epoch and self._id.known is None
            if not is_forgotten:
                raise
            # Another process may have had the id meanwhile. The caller reads next what the group has committed.
            await self._prepare(call)

    async def _prepare(self, call: Call) -> None:
        """Make sure that a transaction can begin."""
        if (failure := self._id.end) is not None:
            raise failure
        if not self._id.is_stale and time.monotonic() >= self._looked_up_at + _FEATURES_AGE:
            await self._look_up_version(call)
            self._id.use(self._version)
        if self._id.is_stale:
            await self._renew(call)

    async def _look_up_version(self, call: Call) -> None:
        call.expect("the features of the cluster")
        features: Mapping[str, int] | None = None
        while features is None:
            try:
                features = await self._cluster.features()
            except WireError as error:
                await call.pause(error)
        call.finish()
        level = features.get(_FEATURE, 0)
        self._version = Version.SECOND if level >= Version.SECOND else Version.FIRST
        self._looked_up_at = time.monotonic()

    async def _renew(self, call: Call) -> None:
        """Request a new epoch, and wait until the open transaction has ended, if there is one.

        Raises:
            ClientLostError: Somebody else has requested a newer epoch.
            AuthorizationError: This user may not use the id.
            SettingsError: The brokers do not allow transactions of this length.
            CommitError: The brokers did not answer in time, or have forgotten the transactional id.
        """
        await self._look_up_version(call)
        await self._finish(call)
        known = self._id.known
        request = INIT_PRODUCER_ID(
            transactional_id=self._id.name,
            timeout_ms=round(self._timeout * 1000),
            producer_id=_NO_ID if known is None else known.producer_id,
            epoch=_NO_ID if known is None else known.epoch,
        )
        self.counts.epochs += 1
        try:
            answer = await self._coordinator.ask(call, request, ON_NEW_EPOCH, error_of)
        except CommitError:
            # Kafka up to 4.1 fails for good at the last epochs of a producer id (KAFKA-20090). Only a producer that
            # begins anew gets another id. A call that was given up early proves nothing of the kind.
            latest = call.latest
            is_failing = isinstance(latest, BrokerError) and latest.code == _SERVER_FAILED
            if known is not None and is_failing and call.left <= 0:
                self._id.fence()
            raise
        match answer.meaning:
            case Meaning.DONE:
                self._id.renew(Identity(*new_producer_id(answer.response)), self._version)
            case Meaning.FENCED if known is not None:
                self._id.fence()
                raise self._id.end or CommitError(f"the brokers have fenced {self._id}")
            case Meaning.EXPIRED:
                self._id.forget()
                raise CommitError(f"the brokers have forgotten {self._id}, because it was not used for long")
            case _:
                raise self._refusal(answer)

    async def _finish(self, call: Call) -> None:
        """End the open transaction before a new epoch is requested, if the protocol needs that.

        Raises:
            CommitError: The brokers did not answer in time.
        """
        is_commit = self._id.unfinished
        if is_commit is None:
            return
        request = request_of(self._id, END_TXN, commit=is_commit)
        await self._coordinator.ask(call, request, ON_COMMIT, error_of)
        # A refusal means that the coordinator has ended it already, or has given the epoch to another process: the
        # answer to the next request tells.
        self._id.finish()

    def _refusal(self, answer: Answer) -> Exception:
        """Return the error of an epoch that the brokers will refuse each time."""
        code = 0 if answer.error is None else answer.error.code
        if code == TIMEOUT_TOO_LONG:
            return SettingsError(
                f"transaction_timeout={self._timeout:g} s is longer than the brokers allow: use at most their "
                "transaction.max.timeout.ms, 15 min by default"
            )
        if code == DENIED_ID:
            return AuthorizationError(
                f"the brokers do not allow this user to use transactional id {self._id.name!r}: grant WRITE and "
                f"DESCRIBE on transactional ids with the prefix '{self._group_id}:'"
            )
        return CommitError(f"the brokers refused a new epoch of {self._id}: {answer.error}")

    # Transactions ---------------------------------------------------------------------

    async def _commit(
        self,
        call: Call,
        messages: Sequence[Message],
        offsets: Mapping[TopicPartition, CommittedOffset],
        member: Member,
    ) -> None:
        await self._prepare(call)
        writes = await self._topics.assign(call, messages)
        if writes.refused:
            raise MessagesRefusedError(writes.refused)
        self._id.begin()
        try:
            is_in_doubt, stored = await self._write_all(call, writes, offsets, member)
            call.check()
        except BaseException:
            self.counts.aborted += 1
            raise
        if not stored and not messages:
            # Nothing belongs to it any more, so the brokers would refuse its commit, time and again.
            self._id.fail()
            return
        await self._request_commit(call, stored, is_in_doubt=is_in_doubt)

    async def _write_all(
        self, call: Call, writes: Writes, offsets: Mapping[TopicPartition, CommittedOffset], member: Member
    ) -> tuple[bool, Mapping[TopicPartition, CommittedOffset]]:
        """Write messages and offsets.

        Returns:
            Whether a request may arrive later once more, and the offsets without those of deleted topics.
        """
        is_in_doubt = False
        if self._id.version is Version.FIRST:
            is_in_doubt |= await self._messages.add_partitions(call, writes)
        await self._messages.write(call, writes)
        is_in_doubt |= writes.is_in_doubt
        if self._id.version is Version.FIRST:
            is_in_doubt |= await self._add_offsets(call)
        stored = dict(offsets)
        while stored:
            answer = await self._write_offsets(call, stored, member)
            is_in_doubt |= answer.is_in_doubt
            if answer.error is None:
                break
            # A deleted topic must not hold back the others. One that the coordinator only does not know yet must: its
            # outputs would be visible without its offset.
            unknown = refused_offsets(answer.response, stored)
            if not await self._are_deleted({name.topic for name in unknown}):
                raise aborted(self._id, "a coordinator does not know topics that exist", answer.error)
            for name in unknown:
                logger.warning("the offset of %s is not committed: the brokers do not know its topic any more", name)
                del stored[name]
        return is_in_doubt, stored

    async def _are_deleted(self, topics: Collection[str]) -> bool:
        """Whether the brokers say that none of the topics exists: two answers count, because one broker may lag."""
        try:
            for _ in range(2):
                await self._cluster.look_up(topics)
        except WireError:
            return False
        return self._cluster.metadata.missing.issuperset(topics)

    def _refused(self, what: str, error: BrokerError | None) -> CommitError | WireError:
        """Return the error of a refused request: that of the brokers if it is about the group, a topic or offsets."""
        return aborted(self._id, what, error) if error is None or error.code in OF_TRANSACTION else error

    # Offsets --------------------------------------------------------------------------

    async def _add_offsets(self, call: Call) -> bool:
        """Add the group to the transaction; return whether a request may arrive once more."""
        request = request_of(self._id, ADD_OFFSETS_TO_TXN, group=self._group_id)
        answer = await self._coordinator.ask(call, request, ON_ADDING, error_of)
        if answer.meaning is not Meaning.DONE:
            raise self._refused("its group was refused", answer.error)
        return answer.is_in_doubt

    async def _write_offsets(
        self, call: Call, offsets: Mapping[TopicPartition, CommittedOffset], member: Member
    ) -> Answer:
        """Write offsets; an error in the answer is that of topics which the brokers do not know.

        Raises:
            WireError: The offsets were refused.
            CommitError: There was no answer in time.
        """
        request = request_of(
            self._id,
            TXN_OFFSET_COMMIT,
            group=self._group_id,
            generation=member.generation,
            member=member.member_id,
            instance=member.instance_id,
            topics=_rows(offsets),
        )

        def first_error(response: Any) -> WireError | None:
            return next(iter(refused_offsets(response, offsets).values()), None)  # those of single topics come last

        answer = await self._group.ask(call, request, ON_OFFSETS, first_error)
        if answer.error is not None and answer.meaning is not Meaning.UNKNOWN_TOPIC:
            raise self._refused("its offsets were refused", answer.error)
        return answer

    # The end --------------------------------------------------------------------------

    async def _request_commit(
        self, call: Call, offsets: Mapping[TopicPartition, CommittedOffset], *, is_in_doubt: bool
    ) -> None:
        """Request the commit, and wait until the outcome is known.

        Raises:
            CommitError: It was not committed, or nobody can tell.
        """
        self._id.request_commit()
        call.must_end = True
        request = request_of(self._id, END_TXN, commit=True)
        try:
            answer = await self._coordinator.ask(call, request, ON_COMMIT, error_of)
        except CommitError as unanswered:
            await self._decide(offsets, unanswered)
            return
        # 1. It is committed: this attempt, or an earlier one.
        if answer.meaning is Meaning.DONE:
            self._id.commit(_following(answer.response), is_in_doubt=is_in_doubt or answer.is_in_doubt)
            self.counts.committed += 1
            self._known.note(offsets)
            return
        # 2. It is not: the coordinator has no such transaction, or has refused the only attempt.
        if not answer.is_in_doubt or (answer.error is not None and answer.error.code == _NO_TRANSACTION):
            self._id.refuse_commit()
            self.counts.aborted += 1
            raise aborted(self._id, "its commit was refused", answer.error)
        # 3. An earlier attempt may have been executed before the epoch changed.
        await self._decide(offsets, aborted(self._id, "its commit was refused", answer.error))

    async def _decide(self, offsets: Mapping[TopicPartition, CommittedOffset], unknown: CommitError) -> None:
        """Find out whether the transaction was committed, by its offsets; see `KnownOffsets`.

        Raises:
            CommitError: It was not, or nobody can tell.
        """
        self._id.fail()
        call = Call(self._timeout)
        self._start(call)
        call.must_end = True
        try:
            await self._renew_or_fence(call)  # afterwards, nothing of the transaction can happen any more
            stored = await self._committed(call, offsets)
        except TransportError as error:
            self.counts.undecided += 1
            raise CommitError(f"nobody can tell whether a transaction was committed ({unknown}): {error}") from error
        match self._known.outcome(offsets, stored):
            case TransactionOutcome.COMMITTED:
                self.counts.decided_committed += 1
                self._known.note(offsets)
                logger.info("a transaction counts as committed, because its offsets are: %s", unknown)
            case TransactionOutcome.ABORTED:
                self.counts.decided_aborted += 1
                raise unknown
            case TransactionOutcome.UNKNOWN:
                self.counts.undecided += 1
                raise CommitError(f"nobody can tell whether a transaction was committed: {unknown}")

    async def _renew_or_fence(self, call: Call) -> None:
        """Request a new epoch; another process that has one ends our transaction too."""
        try:
            await self._renew(call)
        except TransportError:
            if not self._id.is_fenced:
                raise

    async def _committed(
        self, call: Call, offsets: Mapping[TopicPartition, CommittedOffset]
    ) -> Mapping[TopicPartition, CommittedOffset]:
        call.expect("OffsetFetch")
        while True:
            try:
                async with asyncio.timeout(call.left):
                    stored = await self._offsets.committed(offsets)
            except TimeoutError:
                await call.pause(None)
            except WireError as error:
                await call.pause(error)
            else:
                call.finish()
                return stored


def _closed_error() -> ClientLostError:
    return ClientLostError("the Kafka client is closed")


def _following(response: Any) -> Identity | None:
    """Return the identity of the next transaction; None if the answer to a commit does not name a whole one."""
    try:
        following = following_identity(response)
    except IncompleteResponseError:
        return None
    return None if following is None else Identity(*following)


def _rows(offsets: Mapping[TopicPartition, CommittedOffset]) -> list[dict[str, Any]]:
    def row(name: TopicPartition) -> dict[str, Any]:
        committed = offsets[name]
        return {
            "partition": name.partition,
            "offset": committed.offset,
            "leader_epoch": committed.epoch,
            "metadata": committed.metadata,
        }

    return [{"topic": topic, "partitions": rows} for topic, rows in by_topic(offsets, row)]
