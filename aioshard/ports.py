"""What the engine needs from the outside: a Kafka client behind a small protocol.

The engine knows no client. `aioshard.kafka.client` implements `Transport` on aiokafka,
`aioshard.testing.broker` in memory. All methods are called from one event loop.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from aioshard.errors import CommitRefusedError, TransportError
from aioshard.records import Record, TopicPartition

__all__ = [
    "NOTHING",
    "NOT_A_MEMBER",
    "RECORD_OVERHEAD",
    "Allowance",
    "AllowanceOf",
    "Clients",
    "Committed",
    "Fault",
    "FetchedBatch",
    "GroupHasMembersError",
    "GroupListener",
    "InstanceIdTakenError",
    "LogRange",
    "Membership",
    "Message",
    "Oversized",
    "Producer",
    "ProducerFactory",
    "SideTopics",
    "SideTopicsFactory",
    "Transport",
    "TransportFactory",
    "record_size",
]

RECORD_OVERHEAD = 500
"""Bytes that a record costs in memory beyond its key, value and headers."""


class Membership(NamedTuple):
    """Who we are in the group. The generation is -1 while we are no member.

    Who has partitions that were given by hand has no member id, and a generation that no group has given out: another
    one in each life of the client. It allows commits, and nothing of it is sent.
    """

    member_id: str
    generation: int


NOT_A_MEMBER = Membership("", -1)


class InstanceIdTakenError(TransportError):
    """Another process has joined with our `group_instance_id`. Once may be an overlap; where it goes on, the app ends.

    Attributes:
        session_timeout: Seconds within which a second loss means that it goes on.
        goes_on: Whether that is known already.
    """

    retriable = False

    def __init__(
        self, group_id: str, instance_id: str, session_timeout: float, why: str = "", *, goes_on: bool = False
    ) -> None:
        super().__init__(
            f"another process has joined group {group_id!r} with our group_instance_id={instance_id!r}{why}: two with "
            "one id take the partitions from each other; give each process an id of its own"
        )
        self.session_timeout = session_timeout
        self.goes_on = goes_on


class GroupHasMembersError(CommitRefusedError):
    """Partitions are given by hand, and the group has members: brokers take no commit beside theirs. The app ends."""


class Allowance(NamedTuple):
    """How much more of one partition the engine takes in now."""

    records: int
    bytes: int
    """Counted as `record_size` counts. The first record that does not fit stays with the client,
    unless *alone* is true."""
    alone: bool = False
    """Whether the first record is taken whatever its size: nothing else is buffered."""


NOTHING = Allowance(0, 0)

AllowanceOf = Callable[[TopicPartition], Allowance]


class FetchedBatch(NamedTuple):
    """Records of one partition that came together, in offset order; possibly none.

    Invariants:
        * `next_offset` is the client's position right after these records were taken, captured in the
          same step. It passes offsets that hold no record for us: transaction markers, aborted
          batches, compacted records. A batch without records carries a position that moved.
        * `sizes[i]` is `record_size(records[i])`.
        * With `places` the client cannot go back: the engine gives nothing back to be fetched again.
    """

    topic_partition: TopicPartition
    records: Sequence[Record]
    sizes: Sequence[int]
    next_offset: int
    places: Sequence[int] | None = None
    """Where the records are in what the engine tracks, ascending, in place of their own offsets: for records of
    several partitions that come as one sequence. `next_offset` counts as these do."""


class Fault(NamedTuple):
    """A partition that cannot be read now, and why. Other partitions are not affected.

    A record that does not fit its allowance is no fault; see `Oversized`.
    """

    topic_partition: TopicPartition
    error: TransportError


class Oversized(NamedTuple):
    """The next record of a partition does not fit its allowance; it stays with the client."""

    topic_partition: TopicPartition
    size: int


class Committed(NamedTuple):
    """A committed offset and the text stored with it."""

    offset: int
    metadata: str


class LogRange(NamedTuple):
    """The first offset of a partition's log and the one past the last that may be read.

    Under `read_committed` the end is the last stable offset.
    """

    start: int
    end: int


class GroupListener(Protocol):
    """What a transport tells the engine about the group."""

    async def revoked(self, partitions: Collection[TopicPartition], *, lost: bool) -> None:
        """Partitions are being taken away; the group waits until this returns.

        Until it returns, commits under the current membership are accepted, unless *lost*: then the
        membership is already gone and nothing may be committed. Never raises; returns within the
        engine's drain deadline.
        """

    def assigned(self, partitions: Collection[TopicPartition], membership: Membership) -> None:
        """Partitions were given to us. Called synchronously, before the client fetches any of them.

        The transport has paused what is new of *partitions*; the engine seeks and resumes each when it has
        checked where to go on. *partitions* is the whole assignment: where only partitions that move are taken
        away, also those that were kept; they were not paused and go on as if nothing had happened.
        """


class Transport(Protocol):
    """A member of a consumer group, as the engine sees it.

    Owned by one engine, used from one event loop. Methods that are not coroutines neither block nor
    raise for a partition that is not assigned any more: they do nothing.
    """

    @property
    def trouble(self) -> str | None:
        """Why nothing, or not everything, can be consumed now although the client lives, else None.

        A client without brokers raises nothing: it goes on trying.
        """

    async def start(self, topics: Collection[str], pattern: str | None, listener: GroupListener) -> None:
        """Connect and begin to join the group, or take what was given by hand; *listener* is told of assignments.

        What is subscribed to are *topics* and every topic whose whole name matches *pattern*.

        Returns once the brokers answered, before or after the first assignment.

        Raises:
            ConnectError: No broker could be reached.
            AuthenticationError: The brokers refused our credentials, or we their certificate.
            AuthorizationError: The group or a topic is not allowed.
        """

    async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[FetchedBatch | Fault | Oversized]:
        """Take what the client has fetched, as far as *allowance* goes, or wait up to *timeout* seconds.

        A partition whose allowance has no records is left alone: what the client holds of it stays
        there (at most one fetch) and nothing more is fetched, so back-pressure loses nothing. Returns
        an empty sequence on time-out and after `wake`. Never hands out a record of a paused or
        unassigned partition, nor one twice unless `seek` went back. Cancelling a poll loses nothing.

        Raises:
            ClientLostError: The client's background work ended; build a new transport.
            TransportError: The group refused us (authorisation, fencing); see `retriable`.
        """

    def wake(self) -> None:
        """Make a waiting `poll` return now: allowances have changed."""

    def membership(self) -> Membership:
        """Who we are in the group now."""

    def position(self, topic_partition: TopicPartition) -> int | None:
        """The next offset that `poll` would hand out, or None when it is not known."""

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """The end of the log as of the last fetch (last stable offset under read_committed)."""

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Stop fetching and handing out these partitions; what was prefetched may be fetched again."""

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """Go on with these partitions at their positions."""

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """Set the position; what was prefetched of the partition is discarded."""

    async def commit(self, offsets: Mapping[TopicPartition, Committed], membership: Membership) -> None:
        """Send one commit request (offsets with their metadata), once, under *membership*.

        Raises:
            CommitRefusedError: *membership* is not ours any more (checked before sending and by the
                broker). The offsets must not be sent again without a new check.
            CommitError: Not acknowledged for a reason that passes; the request may have been applied.
            AuthorizationError: The group or a topic is not allowed.
        """

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """The group's committed offsets as the broker has them; None where there is none.

        Every partition is in the answer: a broker that leaves one out, or answers with an error, is asked again.
        """

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """The log's first and end offset of each partition, asked from the brokers now.

        A partition whose leader is away, or does not answer soon, is left out: it keeps no other one waiting.
        """

    async def partitions(self, topic: str) -> frozenset[int]:
        """The partition numbers of a topic as last known; empty when the topic does not exist."""

    async def topics(self) -> frozenset[str]:
        """Every topic that we may see now, without those of the brokers themselves."""

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """The first offset whose record is not older than *timestamp* (seconds since the epoch); None without one."""

    def adjust_prefetch(self, partitions: int, max_bytes: int) -> None:
        """Bound what the client may hold of *partitions* partitions together to *max_bytes*."""

    async def close(self) -> None:
        """Leave the group and close all connections; commits nothing, calls no listener.

        May take as long as a rebalance in progress: bound it with a deadline.
        """


TransportFactory = Callable[[], Transport]
"""Makes a transport for one life of the client; called again by the supervisor after a loss."""


class Message(NamedTuple):
    """What is to be published."""

    topic: str
    value: bytes | None
    """None is a tombstone."""
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    partition: int | None = None
    """None: the key chooses as Java's partitioner does, and without a key any partition."""
    timestamp: float | None = None
    """Seconds since the epoch; None is now."""


class Producer(Protocol):
    """Publishes for an app: idempotent, acknowledged by all in-sync replicas (`acks=all`).

    One per app, used from one event loop. It connects with the first message, and builds its client anew after
    an error that the client cannot get over.

    Invariants:
        * A topic that cannot be written to keeps no message of another one from being stored.
    """

    @property
    def trouble(self) -> str | None:
        """Why nothing has been acknowledged for a while although something waits for it, else None."""

    async def publish(self, message: Message) -> int:
        """Publish, and wait until the brokers have acknowledged; any number at the same time.

        Messages of one partition are stored in the order of the calls, as long as none of them fails. A call
        that was cancelled, or that failed with a retriable error, may have been stored or not. While brokers are
        gone it waits for them, but not for ever.

        Returns:
            The offset.

        Raises:
            AuthorizationError: The brokers do not allow the topic.
            MessageTooLargeError: Its topic does not take a message of this size.
            TransportError: Not acknowledged for another reason; see `retriable`.
        """

    async def close(self) -> None:
        """Close all connections; what still waits, and what is published later, raises `ClientLostError`."""


ProducerFactory = Callable[[], Producer]


class SideTopics(Protocol):
    """Reads partitions outside of the group: the parked records of the handlers.

    One per app, used from one event loop. It connects with the first call, and builds its client anew when that
    is lost.
    """

    async def ensure(self, topic: str, partitions: int) -> None:
        """See to it that a compacted topic with at least so many partitions exists; create it where there is none.

        Raises:
            SideTopicError: It is not compacted, or has too few partitions.
            TransportError: It could not be found out, or not be created.
        """

    def watch(self, partitions: Collection[TopicPartition]) -> None:
        """From now on `poll` reads exactly these: from their start where they are new, else on from where it is."""

    async def poll(self, timeout: float) -> Sequence[Record]:
        """Records of what is watched, in offset order per partition; waits up to *timeout* seconds for the first.

        Returns an empty sequence on time-out, and when a position has passed offsets that hold no record. What can
        be read is handed out before a failure of another partition is raised. Cancelling a poll loses nothing.

        Raises:
            TransportError: Nothing came, and no broker is there or a partition cannot be read. The next call tries
                again, and nothing is left out.
        """

    def position(self, topic_partition: TopicPartition) -> int:
        """The next offset of a watched partition that `poll` would give; 0 before its first one.

        It passes offsets that hold no record (compaction, transaction markers, what retention deleted), so it comes
        to `end` when everything before that was handed out.
        """

    async def end(self, topic_partition: TopicPartition) -> int:
        """The end of a partition's log, asked from the brokers now: its last stable offset.

        Raises:
            TransportError: It could not be found out.
        """

    async def read(self, topic_partition: TopicPartition, offset: int) -> Sequence[Record]:
        """Some records from *offset* on, as many as one fetch brings; empty only when there are none up to the end.

        Independent of what is watched. Where *offset* holds no record any more, the first one is the next that is left.

        Raises:
            TransportError: They cannot be read now.
        """

    async def close(self) -> None:
        """Close all connections."""


SideTopicsFactory = Callable[[], SideTopics]


def record_size(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]) -> int:
    """What a record counts against the byte bound: its bytes + `RECORD_OVERHEAD`."""
    size = RECORD_OVERHEAD
    if key is not None:
        size += len(key)
    if value is not None:
        size += len(value)
    if headers:
        size += sum(len(name) + len(content or b"") for name, content in headers)
    return size


class Clients(NamedTuple):
    """Makes what an app talks to Kafka with."""

    transport: TransportFactory
    producer: ProducerFactory
    side_topics: SideTopicsFactory
