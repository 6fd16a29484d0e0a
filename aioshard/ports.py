"""Ports of the engine: protocols for Kafka clients.

The engine does not depend on a client. `aioshard.kafka.group.transport` implements `Transport` for members of Kafka
groups, `aioshard.kafka.memory.transport` in memory. All methods are called from one event loop.
"""

import dataclasses
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, Literal, NamedTuple, Protocol

from aioshard.errors import DecodeError, TransportError
from aioshard.records import PartitionInfo, Record, TopicPartition

RECORD_OVERHEAD: Final = 500
"""Memory overhead of a record in bytes, beyond its key, value and headers."""
MOST_MESSAGE_BYTES: Final = 100 * 1024 * 1024 - 64 * 1024
"""The largest message that brokers read: `socket.request.max.bytes`, less room for what a request adds. On a larger
request, they close the connection without an error, and it would be resent forever. Smaller messages can only exceed
the topic's limit, with a clear error."""


class Membership(NamedTuple):
    """Our membership in the group. The generation is -1 while we are not a member.

    Manually assigned consumers have no member id, and a generation that no group has given out: a different one in
    each life of the client. It allows commits, but is never sent.
    """

    member_id: str
    generation: int


NOT_A_MEMBER = Membership("", -1)


class ChosenProtocol(NamedTuple):
    """The group protocol of a member."""

    name: Literal["classic", "consumer"]
    reason: str
    """Why it is this one, to follow "because"."""


class Allowance(NamedTuple):
    """How much more of one partition the engine accepts now."""

    records: int
    bytes: int
    """Counted as by `record_size`. The first record that does not fit stays with the client,
    unless *alone* is true."""
    alone: bool = False
    """Whether the first record is accepted regardless of its size, because nothing else is buffered."""

    def less(self, records: int, size: int) -> "Allowance":
        """Return the rest of it after records of other partitions were taken, *size* bytes in total."""
        return Allowance(self.records - records, self.bytes - size, self.alone and not records)

    def admitted(self, sizes: Iterable[int]) -> int:
        """Return how many of the next records, given by their sizes, may be taken."""
        count = 0
        room = self.bytes
        for size in islice(sizes, max(self.records, 0)):
            if size > room and (count or not self.alone):
                break
            count += 1
            room -= size
        return count


NOTHING = Allowance(0, 0)

AllowanceOf = Callable[[TopicPartition], Allowance]


class FetchedBatch(NamedTuple):
    """Records of one partition that arrived together, in offset order; possibly none.

    Invariants:
        * `next_offset` is the client's position right after these records were fetched, captured in the same step. It
          skips offsets without a record for us: transaction markers, aborted batches, compacted records. A batch
          without records carries a position that moved.
        * `sizes[i]` is `record_size(records[i])`.
        * With `positions`, the client cannot seek, so the engine does not evict records.
    """

    topic_partition: TopicPartition
    records: Sequence[Record]
    sizes: Sequence[int]
    next_offset: int
    positions: Sequence[int] | None = None
    """Ascending positions that the engine uses instead of the records' own offsets: for records of several partitions
    that arrive as one sequence. `next_offset` is then such a position too."""
    undecodable: Mapping[int, DecodeError] | None = None
    """Records that no handler may see, by offset, each with the error with which its attempts fail. It may also name
    records that are not in the batch. None for most batches."""


class Fault(NamedTuple):
    """A partition that cannot be read now, and why. Other partitions are not affected.

    A record that exceeds its allowance is not a fault; see `Oversized`.
    """

    topic_partition: TopicPartition
    error: TransportError


class Oversized(NamedTuple):
    """Reports that the next record of a partition exceeds its allowance; it stays with the client."""

    topic_partition: TopicPartition
    size: int


class Committed(NamedTuple):
    """A committed offset and its metadata."""

    offset: int
    metadata: str


class LogRange(NamedTuple):
    """The first offset of a partition's log, and one past the last readable offset.

    Under `read_committed` the end is the last stable offset.
    """

    start: int
    end: int
    newest: int = -1
    """One past the last offset, including those of open transactions; -1 if unknown."""


@dataclasses.dataclass(slots=True)
class TransactionCounts:
    """How the transactions of a client have ended. Only the client changes it."""

    committed: int = 0
    """Transactions whose commit the brokers have acknowledged."""
    aborted: int = 0
    """Transactions whose commit was not requested, or was refused."""
    decided_committed: int = 0
    """Transactions without an answer to their commit, which the committed offsets showed to be committed."""
    decided_aborted: int = 0
    """Likewise, to be aborted."""
    undecided: int = 0
    """Transactions whose outcome nobody could tell in time."""
    epochs: int = 0
    """New epochs of the producer that were requested."""

    def plus(self, other: "TransactionCounts") -> "TransactionCounts":
        """Return the counts of two clients together."""
        return TransactionCounts(
            committed=self.committed + other.committed,
            aborted=self.aborted + other.aborted,
            decided_committed=self.decided_committed + other.decided_committed,
            decided_aborted=self.decided_aborted + other.decided_aborted,
            undecided=self.undecided + other.undecided,
            epochs=self.epochs + other.epochs,
        )


class GroupListener(Protocol):
    """Callbacks by which a transport informs the engine about the group: once about each change."""

    async def revoked(self, partitions: Collection[TopicPartition]) -> None:
        """Release partitions that are being revoked; the group waits until this returns.

        Until it returns, commits under the current membership are accepted. Never raises; returns within the engine's
        drain deadline.

        If others are left, they stay ours: those that are open are not disturbed, and those that are not open yet
        continue to open, also during the drain. No `assigned` has to repeat them. The engine has forgotten the revoked
        ones when this returns.

        If nothing is left, the engine waits for `assigned`, also with no partitions. Until then it may not count as
        caught up, and keeps what it knows of the partitions, because they may come back.
        """

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        """Give up partitions whose membership is gone: other members may own them, and nothing may be committed.

        It may come while `revoked` runs, which then returns soon. The next membership begins with `assigned`.
        """

    def assigned(self, partitions: Collection[TopicPartition], membership: Membership) -> None:
        """Accept an assignment. Called synchronously, before the client fetches any of it.

        The transport has paused the new ones of *partitions*; the engine seeks and resumes each once it has checked
        where to resume. *partitions* is the whole assignment: if only moving partitions are revoked, it includes those
        that were kept; they were not paused and continue undisturbed.

        Called for new partitions, and for the first assignment after the start, after a loss, and after everything was
        revoked. A rebalance that changes nothing for us needs no call, see `Transport.membership`. A call that repeats
        what the engine knows changes nothing.
        """


class Transport(Protocol):
    """A member of a consumer group, as the engine sees it.

    Owned by one engine, used from one event loop. Methods that are not coroutines neither block nor raise for a
    partition that is no longer assigned: they do nothing.
    """

    @property
    def last_heartbeat(self) -> float | None:
        """Loop time of the last answered heartbeat; None without a session, or if the client does not tell."""

    @property
    def trouble(self) -> str | None:
        """Why consuming is impaired now although the client is alive, or None.

        A client without brokers raises no error: it keeps trying.
        """

    @property
    def hang(self) -> str | None:
        """The request that the transaction in progress has waited for too long, as a sentence; None without one.

        Brokers that answer everything else may let a transaction wait. It ends by itself, at the latest after
        `transaction_timeout`.
        """

    @property
    def transaction_counts(self) -> TransactionCounts:
        """The transactions of this client; all are 0 if its commits are none. Safe from any thread."""

    @property
    def missing_topics(self) -> Sequence[str]:
        """The subscribed topics, by name, that do not exist or that this user may not see, as far as it is known."""

    @property
    def slow_join(self) -> str | None:
        """A sentence about the members with which the group is rebalancing, if our join takes long; else None."""

    @property
    def group_protocol(self) -> ChosenProtocol | None:
        """The protocol with which we are, or want to be, a member; None with manual assignment and before the start."""

    @property
    def inherits_within(self) -> float:
        """Seconds after which a member without partitions has those of members that had died before it joined.

        0 if the group does not let a member join before that.
        """

    @property
    def owned_for(self) -> float:
        """Seconds for which our partitions are ours if the group does not answer any more; infinite without a limit.

        0 or less once other members may own them. The time during which the machine is suspended counts. Safe from any
        thread.
        """

    async def start(
        self, topics: Collection[str], pattern: str | None, listener: GroupListener, *, needs_all: bool = True
    ) -> None:
        """Connect and begin to join the group, or take the manual assignment; *listener* receives assignments.

        Subscribes to *topics* and every topic whose whole name matches *pattern*.

        Returns once the brokers have answered, before or after the first assignment.

        Args:
            topics: Topics by name.
            pattern: Regular expression for others; None without one.
            listener: Informed about the group.
            needs_all: Whether a topic that this user may not see ends the start. Otherwise it is one of
                `missing_topics`, unless there is no other.

        Raises:
            ConnectError: No broker could be reached.
            AuthenticationError: The brokers refused our credentials, or we their certificate.
            AuthorizationError: The group or a topic is not allowed.
        """

    async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[FetchedBatch | Fault | Oversized]:
        """Return fetched records, within *allowance*, or wait up to *timeout* seconds.

        A partition whose allowance has no records is left alone: records already fetched stay in the client (at most
        one fetch) and nothing more is fetched, so backpressure loses nothing. Returns an empty sequence on timeout and
        after `wake`. Never returns a record of a paused or unassigned partition, nor the same record twice unless
        `seek` went back. Cancelling a poll loses nothing.

        Raises:
            ClientLostError: The client's background work ended; create a new transport.
            TransportError: The group refused us (authorization, fencing); see `retriable`.
        """

    def wake(self) -> None:
        """Make a waiting `poll` return now: allowances have changed."""

    def membership(self) -> Membership:
        """Return our current membership in the group, for commits.

        Its generation may be newer than that of the latest `GroupListener.assigned`: the group has rebalanced, and
        nothing has changed for us. The partitions are ours as long as the member id stays the same, and it is not
        `NOT_A_MEMBER`.
        """

    def subscribe(self, topics: Collection[str], pattern: str | None) -> None:
        """Replace the subscription of `start`: the group rebalances. *pattern* is the one given there.

        Raises:
            ClientLostError: The client has not joined yet, or is closed.
        """

    def position(self, topic_partition: TopicPartition) -> int | None:
        """Return the next offset that `poll` would return, or None if it is unknown."""

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """Return the end of the log as of the last fetch (last stable offset under read_committed)."""

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Stop fetching and returning these partitions; prefetched records may be fetched again."""

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """Resume these partitions at their positions."""

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """Set the position; prefetched records of the partition are discarded."""

    async def commit(
        self,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: "Sequence[Message] | None" = None,
    ) -> None:
        """Send one commit request (offsets with their metadata), once, under *membership*.

        With *messages*, even none, they become visible together with the offsets, in one transaction. If that fails,
        or is cancelled, they may be visible or not; `committed` then waits until that is decided.

        Raises:
            MessagesRefusedError: Messages cannot be written; the rest may be sent again without them.
            CommitRefusedError: *membership* is no longer ours (checked before sending and by the
                broker). The offsets must not be sent again without a new check.
            TopicsRefusedError: Some topics were refused, and everything else is stored.
            CommitError: Not acknowledged for a transient reason; the request may have been applied, or may be later,
                even after the next one.
            AuthorizationError: The group or a topic is not allowed.
        """

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """Return the group's committed offsets from the broker; None for partitions without one.

        The result contains every partition: one that a broker leaves out, or answers with an error, is queried again.
        """

    async def truncations(self, commits: Mapping[TopicPartition, Committed]) -> Mapping[TopicPartition, int | None]:
        """Query the brokers whether they have lost records that the group has read, as in an unclean leader election.

        Args:
            commits: Committed offsets, as `committed` has returned them.

        Returns:
            For each partition the offset up to which its log is the one that the group has read; if it is before what
            the group has read, the records from there on are lost. None if nobody can tell. A partition whose leader
            does not answer soon is left out.
        """

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """Query the brokers for the first and end offset of each partition's log.

        A partition whose leader is unavailable, or does not answer soon, is left out: it does not delay the others.
        """

    async def partitions(self, topic: str) -> Mapping[int, PartitionInfo]:
        """Return the partitions of a topic by number, as last known; empty if the topic does not exist."""

    async def topics(self) -> frozenset[str]:
        """Return every topic that is visible to us now, without Kafka's internal topics."""

    async def creates_topics(self) -> bool | None:
        """Return whether the brokers create a topic when a message is published to it; None if they do not say."""

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """Return the first offset of a record at or after *timestamp* (seconds since the epoch); None without one."""

    async def close(self) -> None:
        """Leave the group and close all connections; commit nothing.

        Calls no listener. Only a `revoked` in progress is waited for, and hears of its loss.

        This may take as long as a rebalance in progress: bound it with a deadline.
        """


TransportFactory = Callable[[], Transport]
"""Creates a transport for one life of the client; called again by the supervisor after a loss."""


Partitioner = Literal["key", "round_robin"]
"""How the partition of a message is chosen; see `App.publish`."""


class Message(NamedTuple):
    """A message to publish, as `aioshard.message` builds it."""

    topic: str
    value: bytes | None
    """None is a tombstone."""
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    partition: int | None = None
    """None: `chosen_by` decides, as in Java's partitioner; messages without it are spread round-robin."""
    timestamp: float | None = None
    """Seconds since the epoch; None is now."""
    partitioner: Partitioner = "key"

    @property
    def chosen_by(self) -> bytes | None:
        """The key, if it decides the partition."""
        return self.key if self.partitioner == "key" else None


UNKNOWN_OFFSET = -1
"""The offset of a published message whose offset is not known, or not yet."""


class Producer(Protocol):
    """Publishes for an app: idempotent, acknowledged by all in-sync replicas (`acks=all`).

    One per app, used from one event loop. It connects with the first message, and recreates its client after an error
    from which the client cannot recover.

    Invariants:
        * A topic that cannot be written to does not block messages of other topics.
    """

    @property
    def trouble(self) -> str | None:
        """Why nothing has been acknowledged for a while although messages are waiting, or None."""

    async def publish(self, message: Message) -> int:
        """Publish, and wait until the brokers have acknowledged; any number of calls may run concurrently.

        Messages of one partition are stored in the order of the calls, as long as none of them fails. A message may or
        may not have been stored if its call was cancelled or failed with a retriable error. While brokers are
        unreachable it waits for them, but not indefinitely. A message that cannot be encoded fails alone, for good.

        Returns:
            The offset; `UNKNOWN_OFFSET` if the brokers had stored the message before and no longer know where.

        Raises:
            AuthorizationError: The brokers do not allow the topic.
            MessageTooLargeError: The topic does not accept a message of this size.
            TransportError: Not acknowledged for another reason; see `retriable`.
        """

    async def close(self) -> None:
        """Close all connections; waiting and later calls of `publish` raise `ClientLostError`."""


ProducerFactory = Callable[[], Producer]


class SideTopics(Protocol):
    """Reads partitions outside of the group: the parked records of the handlers.

    One per app, used from one event loop. It connects with the first call, and recreates its client when the
    client is lost.
    """

    async def ensure(self, topic: str, partitions: int) -> None:
        """Ensure that a compacted topic with at least this many partitions exists; create it if it is missing.

        Raises:
            SideTopicError: The topic is not compacted, or has too few partitions.
            TransportError: The topic could not be checked or created.
        """

    def watch(self, partitions: Collection[TopicPartition]) -> None:
        """Set the partitions that `poll` reads: new ones from their start, others from their current position."""

    async def poll(self, timeout: float) -> Sequence[Record]:
        """Return records of the watched partitions, in offset order each; wait up to *timeout* seconds for the first.

        Returns an empty sequence on timeout, and when a position has skipped offsets that hold no record. Readable
        records are returned before a failure of another partition is raised. Cancelling a poll loses nothing.

        Raises:
            TransportError: Nothing arrived, and no broker is reachable or a partition cannot be read. The next call
                tries again, and no record is skipped.
        """

    def position(self, topic_partition: TopicPartition) -> int:
        """Return the next offset of a watched partition that `poll` would return; 0 before its first poll.

        It skips offsets that hold no record (compaction, transaction markers, retention), so it reaches `end` once
        everything before that has been returned.
        """

    async def end(self, topic_partition: TopicPartition) -> int:
        """Query the brokers for the end of a partition's log.

        Raises:
            TransportError: The end could not be determined, or a transaction before it is not decided yet: records
                of it may still become visible.
        """

    async def read(
        self, topic_partition: TopicPartition, offset: int, max_bytes: int | None = None
    ) -> Sequence[Record]:
        """Return some records from *offset* on, up to one fetch; empty only if none is left up to the end.

        A fetch has at most *max_bytes*, by default a megabyte, unless the first batch is larger.

        This is independent of `watch`. If *offset* no longer holds a record, the result starts at the next existing
        one.

        Raises:
            TransportError: The records cannot be read now.
        """

    async def close(self) -> None:
        """Close all connections."""


SideTopicsFactory = Callable[[], SideTopics]

Publish = Callable[[Message], Awaitable[int]]
"""Publishes a message, waits for the brokers' acknowledgement and returns the offset."""


def record_size(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]) -> int:
    """Return the size of a record for the byte limit: its bytes + `RECORD_OVERHEAD`."""
    size = RECORD_OVERHEAD
    if key is not None:
        size += len(key)
    if value is not None:
        size += len(value)
    if headers:
        size += sum([len(name) + len(content or b"") for name, content in headers])
    return size


class Clients(NamedTuple):
    """Factories of an app's Kafka clients."""

    transport: TransportFactory
    producer: ProducerFactory
    side_topics: SideTopicsFactory
    around: Callable[[Publish], Publish] = lambda publish: publish
    """Wraps a function that publishes for a run, as tracing does."""
    now: Callable[[], float] = time.time
    """The time on the clock of the records' timestamps, in seconds since the Unix epoch."""
