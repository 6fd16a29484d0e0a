"""The confluent-kafka consumer and the one thread that calls it."""

import asyncio
import struct
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, ParamSpec, TypeVar

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as ClientPartition

from aioshard.errors import ClientLostError, CommitError, CommitRefusedError, TransportError
from aioshard.kafka.confluent.translate import commit_error, error_of, is_final
from aioshard.ports import NOT_A_MEMBER, Committed, Membership
from aioshard.records import TopicPartition

P = ParamSpec("P")
T = TypeVar("T")
Offsets = Mapping[TopicPartition, Committed]

_MAX_MESSAGES = 500  # per read
_WAIT = 0.05  # seconds that one read, and so a queued commit, may wait
_LAST_READ = 0.5
"""Seconds at the end of a session in which we still read a response: the event loop may have been blocked."""
_MEMBER_UNKNOWN = frozenset({KafkaError.UNKNOWN_MEMBER_ID, KafkaError.FENCED_MEMBER_EPOCH})
_METADATA_HEAD = struct.Struct("=7si")
"""The head of a group's serialized metadata: a magic word, and the generation in native byte order."""
_MAGIC = b"CGMDv2:"


class Change(NamedTuple):
    """A change to one partition that the client must make before its next read."""

    topic_partition: TopicPartition
    fetch_from: int | None
    """The offset to resume at; None stops fetching."""
    reassign: bool = False
    """Whether the client has given up on the partition, so that it must be assigned again."""


class Callbacks(NamedTuple):
    """The functions by which the client's thread informs the transport; the event loop runs all but `check`."""

    check: Callable[[Collection[TopicPartition], Membership], None]
    """Raises `CommitRefusedError` if a commit of these partitions under this membership must not be sent now."""
    assigned: Callable[[list[TopicPartition], Membership], Coroutine[Any, Any, None]]
    revoked: Callable[[list[TopicPartition], bool], Coroutine[Any, Any, None]]
    """Calls `ConsumerThread.end_revocation` when it is done. The second argument says whether they are lost."""
    failed: Callable[[KafkaError], None]


class CallQueue:
    """Calls that one thread makes for all others, in order."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Queue a call; one that is cancelled before its turn never starts."""
        result: Future[T] = Future()

        def run() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - the future passes it on
                result.set_exception(error)

        self._calls.put(run)
        return result

    def end(self) -> None:
        """Let one `serve` return, after the calls already queued."""
        self._calls.put(None)

    def serve(self) -> None:
        """Make queued calls until `end`."""
        while (call := self._calls.get()) is not None:
            call()

    def serve_for(self, seconds: float) -> bool:
        """Make queued calls until `end`, or until none has come for this time; return whether it was `end`."""
        while True:
            try:
                call = self._calls.get(timeout=seconds)
            except Empty:
                return False
            if call is None:
                return True
            call()


class _Commit(NamedTuple):
    """A commit that was sent but not answered yet."""

    offsets: Offsets
    outcome: "Future[TransportError | None]"
    """The error of the commit, if any; cannot be cancelled."""

    def resolve(self, error: TransportError | None) -> None:
        """Store the outcome, unless there is one."""
        if not self.outcome.done():
            self.outcome.set_result(error)


class ConsumerThread:
    """A `confluent_kafka.Consumer` and the only thread that calls it; a daemon, because a call may hang for a session.

    The client serves one thread at a time. A rebalance callback runs inside a read, and the client waits for it. While
    the engine hands partitions over, the callback itself makes the queued calls.

    Between reads, a commit is sent without waiting for its response, which a later read returns: the client may hold a
    commit for as long as it looks for the group's coordinator. Inside a callback, a commit is sent and answered in one
    call. A commit that is unanswered when partitions are revoked is sent once more, while they are still ours.

    Invariants:
        * No commit is sent before the previous one is answered.
        * When a callback has returned, every commit sent before it is answered, or has failed for good.
        * Queued calls run in order. A call whose future is cancelled never starts.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        group_id: str,
        session_timeout: float,
        callbacks: Callbacks,
    ) -> None:
        """Create the client, and start its thread.

        Args:
            options: Options of the client.
            group_id: The group, for messages.
            session_timeout: Seconds without a response to a commit after which other members may have our partitions.
                The client itself notices that only while no rebalance is in progress, and not at all under KIP-848.
            callbacks: Where to report.

        Raises:
            KafkaException: The client refused an option; also `TypeError` and `ValueError`.
        """
        self._loop = asyncio.get_running_loop()
        self._group_id = group_id
        self._session_timeout = session_timeout
        self._callbacks = callbacks
        self._kip_848 = options.get("group.protocol") == "consumer"
        self._calls = CallQueue()
        """Each `end` ends one level: a revocation, or the thread."""
        self._closing = False
        self._left: Future[None] = Future()
        self._revoking = False
        self._lost = False
        self._unanswered: _Commit | None = None
        self._response_due: float | None = None
        """When a response to a commit must have arrived; None if no commit was sent since the last response."""
        self._last_read = False
        """Whether `_response_due` has passed once."""
        self._consumer = Consumer({**options, "error_cb": self._on_error, "on_commit": self._on_commit})
        Thread(target=self._run, name=f"confluent client of {group_id}", daemon=True).start()

    # The thread and its queue -----------------------------------------------------------

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[T]":
        """Queue a call for the client's thread.

        Raises:
            ClientLostError: `stop` was called.
        """
        if self._closing:
            raise ClientLostError("the Kafka client is closed")
        return asyncio.wrap_future(self._calls.submit(function, *args, **kwargs))

    def end_revocation(self) -> None:
        """Let the callback of a revocation return, after the calls already queued."""
        self._calls.end()

    def stop(self) -> Future[None]:
        """Leave the group and close the client, after the calls already queued.

        Returns:
            Done once the client is closed; raises `KafkaException` if it could not leave cleanly.
        """
        if not self._closing:
            self._closing = True
            self._calls.end()
        return self._left

    def _run(self) -> None:
        self._left.set_running_or_notify_cancel()  # from now on, it cannot be cancelled
        self._calls.serve()
        try:
            self._consumer.close()
        except BaseException as error:  # noqa: BLE001 - the future passes it on
            self._left.set_exception(error)
        else:
            self._left.set_result(None)
        if self._unanswered is not None:
            self._unanswered.resolve(ClientLostError("the Kafka client is closed"))

    # Reading ----------------------------------------------------------------------------

    def subscribe(self, topics: Collection[str]) -> None:
        """Subscribe. The callbacks run inside `read`."""
        self._consumer.subscribe(
            sorted(topics),
            on_assign=self._on_assign,
            on_revoke=partial(self._release, lost=False),
            on_lost=partial(self._release, lost=True),
        )

    def read(self, changes: Sequence[Change]) -> tuple[Sequence[Message], Sequence[Change]]:
        """Make *changes*, then return the next messages; wait up to 50 ms for the first one.

        Returns:
            Messages, and the changes that the client could not make yet.

        Raises:
            ClientLostError: No commit was answered for a session.
        """
        failed = [change for change in changes if not self._apply(change)]
        messages = self._consumer.consume(_MAX_MESSAGES, 0)
        if not messages:
            # A call for many messages waits until it has that many; this one ends with the first.
            messages = self._consumer.consume(1, _WAIT)
            if messages:
                messages += self._consumer.consume(_MAX_MESSAGES, 0)
        self._check_session(time.monotonic())
        return messages, failed

    def _apply(self, change: Change) -> bool:
        topic_partition, offset, reassign = change
        client_partitions = [ClientPartition(*topic_partition)]
        try:
            if offset is None:
                self._consumer.pause(client_partitions)
            elif reassign:
                self._consumer.incremental_unassign(client_partitions)
                self._consumer.incremental_assign([ClientPartition(*topic_partition, offset)])
                self._consumer.resume(client_partitions)
            else:
                self._consumer.resume(client_partitions)
                # The seek wakes the fetcher thread, which would otherwise sleep for up to a second.
                self._consumer.seek(ClientPartition(*topic_partition, offset))
        except KafkaException:
            return False
        return True

    def membership(self) -> Membership:
        """Return the client's current membership."""
        return membership_of(self.group_metadata())

    def group_metadata(self) -> object:
        """Return the client's current membership, as the client serializes it for producers."""
        return self._consumer.consumer_group_metadata()

    def assign(self, partitions: Collection[TopicPartition]) -> None:
        """Assign more partitions, paused."""
        # A position that is always valid keeps the client from giving up; nothing is read from it.
        client_partitions = [ClientPartition(*partition, OFFSET_BEGINNING) for partition in partitions]
        self._consumer.incremental_assign(client_partitions)
        if client_partitions:
            self._consumer.pause(client_partitions)

    # Rebalances: the client calls these inside a read -------------------------------------

    def _on_assign(self, _: object, client_partitions: Sequence[Any]) -> None:
        if self._closing:
            return
        partitions = _topic_partitions(client_partitions)
        self.assign(partitions)
        asyncio.run_coroutine_threadsafe(self._callbacks.assigned(partitions, self.membership()), self._loop).result()

    def _release(self, _: object, client_partitions: Sequence[Any], *, lost: bool) -> None:
        """Wait until the engine has handed partitions over; the group waits too."""
        if self._closing:
            return
        self._revoking, self._lost = True, lost
        try:
            asyncio.run_coroutine_threadsafe(
                self._callbacks.revoked(_topic_partitions(client_partitions), lost), self._loop
            )
            if lost:
                self._note_response(None)
                if self._unanswered is not None:
                    self._unanswered.resolve(
                        CommitRefusedError(
                            f"a commit of group {self._group_id!r} was not answered before the membership was lost"
                        )
                    )
            else:
                self._resend_commit()
            self._calls.serve()
        finally:
            self._revoking = self._lost = False
        self._consumer.incremental_unassign(list(client_partitions))

    # Commits ------------------------------------------------------------------------------

    async def commit(self, offsets: Offsets, membership: Membership) -> None:
        """Send one commit, and wait for its response.

        Raises:
            CommitRefusedError: *membership* is not ours any more.
            CommitError: Not acknowledged, or not sent because the previous one is unanswered.
        """
        sent = await self.call(self._send, offsets, membership)
        error = await asyncio.wrap_future(sent.outcome)
        if error is not None:
            raise error

    def _send(self, offsets: Offsets, membership: Membership) -> _Commit:
        self._callbacks.check(offsets.keys(), membership)
        if self._lost:  # `check` does not know it yet if the event loop is behind
            raise CommitRefusedError(f"a commit of group {self._group_id!r} was not sent: the membership was lost")
        commit = _Commit(offsets, Future())
        commit.outcome.set_running_or_notify_cancel()  # from now on, it cannot be cancelled
        if self._revoking:
            commit.resolve(self._commit_synchronously(offsets))
            return commit
        if self._unanswered is not None:
            raise CommitError(
                f"a commit of group {self._group_id!r} was not sent: the previous one is not answered yet; it is "
                "retried"
            )
        try:
            self._consumer.commit(offsets=client_offsets(offsets), asynchronous=True)
        except KafkaException as error:
            raise commit_error(error_of(error), offsets.keys(), self._group_id) from error
        self._unanswered = commit
        if self._response_due is None:
            self._response_due = time.monotonic() + max(self._session_timeout - _LAST_READ, 0.0)
        return commit

    def _commit_synchronously(self, offsets: Offsets) -> TransportError | None:
        """Send a commit and wait for the response; return the error of the commit, if any.

        This may hang only while the group has no coordinator, and then no group waits for the callback.
        """
        try:
            committed, overall = self._consumer.commit(offsets=client_offsets(offsets), asynchronous=False), None
        except KafkaException as error:
            committed, overall = [], error_of(error)
        self._note_response(overall)
        return self._refusal_in(committed, offsets, overall)

    def _resend_commit(self) -> None:
        """Send an unanswered commit once more and wait: nothing may be sent for partitions that we have released."""
        commit = self._unanswered
        if commit is not None and not commit.outcome.done():
            commit.resolve(self._commit_synchronously(commit.offsets))

    def _on_commit(self, error: KafkaError | None, client_partitions: Sequence[Any] | None) -> None:
        """Handle the response to the unanswered commit; the client calls this inside a read."""
        commit, self._unanswered = self._unanswered, None
        if commit is None:
            return
        self._note_response(error)
        commit.resolve(self._refusal_in(client_partitions, commit.offsets, error))
        if self._kip_848:
            # librdkafka 2.16 stops its heartbeats, but not its reads, if the coordinator is unreachable for about 20 s.
            for failure in (error, *(partition.error for partition in client_partitions or ())):
                if failure is not None and failure.code() in _MEMBER_UNKNOWN:
                    self._loop.call_soon_threadsafe(self._callbacks.failed, failure)

    def _refusal_in(
        self, client_partitions: Sequence[Any] | None, offsets: Offsets, overall: KafkaError | None = None
    ) -> TransportError | None:
        """Return the error of a commit, if any: of a partition, for a missing partition, or *overall* for all."""
        errors = {
            TopicPartition(partition.topic, partition.partition): partition.error
            for partition in client_partitions or ()
        }
        refused = [partition for partition in offsets if partition not in errors or errors[partition] is not None]
        error = next((error for error in errors.values() if error is not None), overall)
        return None if not refused and error is None else commit_error(error, refused or offsets.keys(), self._group_id)

    def _note_response(self, error: KafkaError | None) -> None:
        # A refusal is a response too: the session continues. Negative codes are the client's own errors.
        if error is None or error.code() > 0:
            self._response_due = None
            self._last_read = False

    def _check_session(self, now: float) -> None:
        if self._response_due is None or now < self._response_due:
            return
        if self._last_read:
            raise ClientLostError(f"no commit of group {self._group_id!r} was answered for {self._session_timeout:g} s")
        self._last_read = True
        self._response_due = now + _LAST_READ

    def _on_error(self, error: KafkaError) -> None:
        if is_final(error):
            self._loop.call_soon_threadsafe(self._callbacks.failed, error)


def membership_of(metadata: object) -> Membership:
    """Extract our membership from a group's metadata, as the client serializes them for producers.

    The client exposes its generation nowhere else. Under the group protocol `consumer`, it is the member epoch. A local
    counter could let a partition continue in place after another member had it.
    """
    if not isinstance(metadata, bytes) or len(metadata) < _METADATA_HEAD.size or not metadata.startswith(_MAGIC):
        return NOT_A_MEMBER
    _, generation = _METADATA_HEAD.unpack_from(metadata)
    _, member_id, *_ = metadata[_METADATA_HEAD.size :].split(b"\0")
    return Membership(member_id.decode(errors="replace"), generation)


def _topic_partitions(client_partitions: Sequence[Any]) -> list[TopicPartition]:
    return [TopicPartition(partition.topic, partition.partition) for partition in client_partitions]


def client_offsets(offsets: Offsets) -> list[ClientPartition]:
    """Convert offsets and their metadata for the client."""
    return [
        ClientPartition(*partition, committed.offset, committed.metadata)
        if committed.metadata
        else ClientPartition(*partition, committed.offset)
        for partition, committed in offsets.items()
    ]
