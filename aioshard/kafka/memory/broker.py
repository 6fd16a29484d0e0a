"""An in-memory broker: topics, consumer groups and scripted failures, as plain calls."""

import asyncio
import contextlib
import itertools
import time
import zlib
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from aioshard.errors import (
    CommitRefusedError,
    ConnectError,
    GroupHasMembersError,
    MessageRefusedError,
    MessagesRefusedError,
    TransportError,
    UnknownPartitionError,
)
from aioshard.kafka.errors import missing_topic
from aioshard.ports import Committed, Membership, Message, Partitioner
from aioshard.records import Record, TopicPartition, is_subscribed


class PartitionLog:
    """Records of one partition in offset order.

    Offsets are never reused, even after their record is removed: every deletion leaves a gap, as compaction, aborted
    transactions and control records do on a broker.

    Synchronous, owned by one `InMemoryBroker`.

    Invariants:
        * `start <= stable_end <= end`.
        * Every record's offset is in `[start, end)`, strictly increasing.
    """

    def __init__(self, topic_partition: TopicPartition, notify: Callable[[], None]) -> None:
        self.topic_partition = topic_partition
        self._notify = notify
        self._records: list[Record] = []
        self.start = 0
        """The first offset that can be read."""
        self.end = 0
        """The offset that the next record will get."""
        self.cuts: list[int] = []
        """Where the log was cut off by `truncate_from`, in order; their number is the log's leader epoch."""
        self._transaction: int | None = None

    @property
    def stable_end(self) -> int:
        """The last stable offset: `end`, or the beginning of the open transaction."""
        return self.end if self._transaction is None else max(self._transaction, self.start)

    @property
    def records(self) -> tuple[Record, ...]:
        """All records in offset order, including uncommitted ones."""
        return tuple(self._records)

    def append(self, record: Record) -> None:
        """Add a record at the end; missing offsets before it become a gap.

        Raises:
            ValueError: The log is already past the record's offset.
        """
        if record.offset < self.end:
            raise ValueError(f"{self.topic_partition} is at {self.end}: offset {record.offset} cannot be appended")
        self._records.append(record)
        self.end = record.offset + 1
        self._notify()

    def skip(self, count: int) -> None:
        """Use up *count* offsets without a record, as a transaction marker does."""
        self.end += count
        self._notify()

    def delete(self, offset: int) -> None:
        """Remove one record and leave a gap."""
        self._records = [record for record in self._records if record.offset != offset]
        self._notify()

    def compact(self) -> None:
        """Keep the newest record of each key and leave gaps for the others; records without a key are removed too."""
        newest = {record.key: record.offset for record in self._records}
        self._records = [
            record for record in self._records if record.key is not None and newest[record.key] == record.offset
        ]
        self._notify()

    def truncate_before(self, offset: int) -> None:
        """Move the start up to *offset*, as retention does; earlier records are removed."""
        self.start = max(self.start, min(offset, self.end))
        self._records = self.read(self.start, self.end)
        self._notify()

    def truncate_from(self, offset: int) -> None:
        """Cut the log off at *offset*, as an unclean leader election does: later records are lost."""
        self._records = self.read(self.start, offset)
        self.end = offset
        self.cuts.append(offset)
        self._notify()

    def epoch_of(self, offset: int) -> int:
        """Return the leader epoch in which the record at an offset was written."""
        return max((number for number, cut in enumerate(self.cuts, 1) if cut <= offset), default=0)

    def parting(self, epoch: int) -> int | None:
        """Return the first offset that the log has lost since an epoch; None if there is none."""
        return min(self.cuts[epoch:], default=None)

    def begin_transaction(self) -> None:
        """Freeze the last stable offset: records appended from now on are not readable until `end_transaction`."""
        self._transaction = self.end

    def end_transaction(self, *, commit: bool) -> None:
        """Release the last stable offset; the marker takes one offset.

        Args:
            commit: False removes every record appended since the transaction began.
        """
        if not commit:
            self._records = self.read(self.start, self.stable_end)
        self._transaction = None
        self.skip(1)

    def read(self, position: int, below: int) -> list[Record]:
        """Return the records with `position <= offset < below`."""
        first, last = (
            bisect_left(self._records, offset, key=lambda record: record.offset) for offset in (position, below)
        )
        return self._records[first:last]


Duty = Literal["nothing", "rejoin", "adopt", "join anew"]
"""The next step of a member: nothing; release its partitions and rejoin; adopt the new assignment; or join as a new
member, because the group has forgotten it."""


class ConsumerGroup:
    """The coordinator of one group, with the eager protocol.

    A rebalance has two steps. First every member releases all of its partitions and joins again (`rejoin`); until the
    last one has done so, the old generation is in force, and commits under it are accepted. Then the generation is
    incremented, the partitions are assigned round robin, and each member adopts its own (`adopt`).

    Everything here is a synchronous change of state that notifies the broker's watchers. A member then calls `duty` for
    its next step.

    Owned by one `InMemoryBroker`.

    Invariants:
        * Every completed rebalance increments the generation; it never decreases.
        * A partition has at most one owner.
    """

    def __init__(self, group_id: str, topics: Callable[[], Mapping[str, int]], notify: Callable[[], None]) -> None:
        self.group_id = group_id
        self._topics = topics
        self._notify = notify
        self._subscriptions: dict[str, tuple[Collection[str], str | None]] = {}
        """The topics and the pattern of each member, in the order of joining."""
        self._duties: dict[str, Duty] = {}
        self._member_numbers = itertools.count(1)
        self.generation = 0
        """The number of the assignment in force."""
        self.withheld: frozenset[TopicPartition] = frozenset()
        """Partitions that none of our members gets, because `revoke` gave them to an outside member."""
        self._owners: dict[TopicPartition, str] = {}
        self._pinned: dict[TopicPartition, str | None] = {}
        self._committed: dict[TopicPartition, Committed] = {}
        self.epochs: dict[TopicPartition, int] = {}
        """The leader epoch of the last record before each committed offset; written by the members."""

    # State -----------------------------------------------------------------------------

    @property
    def members(self) -> tuple[str, ...]:
        """The member ids, in the order of joining."""
        return tuple(self._subscriptions)

    @property
    def rebalancing(self) -> bool:
        """Whether members still have to release or adopt partitions."""
        return any(duty != "nothing" for duty in self._duties.values())

    def owner(self, topic_partition: TopicPartition) -> str | None:
        """Return the member that owns the partition in the current generation."""
        return self._owners.get(topic_partition)

    def assignment(self, member_id: str) -> tuple[TopicPartition, ...]:
        """Return the sorted partitions of a member in the current generation."""
        return tuple(sorted(partition for partition, owner in self._owners.items() if owner == member_id))

    def subscribed(self) -> tuple[TopicPartition, ...]:
        """Return every partition that some member subscribes to, withheld or not, sorted."""
        return tuple(
            TopicPartition(topic, partition)
            for topic, count in sorted(self._topics().items())
            if self._subscribers(topic)
            for partition in range(count)
        )

    def committed(self, topic_partition: TopicPartition) -> Committed | None:
        """Return the committed offset of a partition, or None."""
        return self._committed.get(topic_partition)

    def duty(self, member_id: str) -> Duty:
        """Return the next step of a member."""
        return self._duties.get(member_id, "join anew")

    # Calls from members ----------------------------------------------------------------

    def join(self, topics: Collection[str], pattern: str | None = None) -> str:
        """Add a member that reads *topics* and those that match; begin a rebalance; return its new member id."""
        member_id = f"{self.group_id}-member-{next(self._member_numbers)}"
        self.subscribe(member_id, topics, pattern)
        self._duties[member_id] = "rejoin"
        self.rejoin(member_id)
        return member_id

    def subscribe(self, member_id: str, topics: Collection[str], pattern: str | None = None) -> None:
        """Replace what a member reads, and begin a rebalance."""
        self._begin_rebalance()
        self._subscriptions[member_id] = topics, pattern
        self._notify()

    def rejoin(self, member_id: str) -> None:
        """Record that a member has released its partitions; the last one completes the rebalance."""
        if self._duties.get(member_id) == "rejoin":
            self._duties[member_id] = "nothing"
            self._complete_when_all_rejoined()

    def adopt(self, member_id: str) -> Membership:
        """Let a member adopt its part of the current assignment; return its new membership."""
        self._duties[member_id] = "nothing"
        self._notify()
        return Membership(member_id, self.generation)

    def leave(self, member_id: str) -> None:
        """Remove a member, on its request or because it timed out; the others rebalance."""
        if member_id in self._duties:
            self._begin_rebalance()
            del self._duties[member_id], self._subscriptions[member_id]
            self._complete_when_all_rejoined()

    def commit(self, offsets: Mapping[TopicPartition, Committed], membership: Membership) -> None:
        """Store offsets if *membership* is in force; without a member id, only if the group has no members.

        Raises:
            GroupHasMembersError: The group has members, and *membership* has no member id.
            CommitRefusedError: The group does not know the member, or has another generation.
        """
        if not membership.member_id:
            self.refuse_beside_members()
        elif membership.member_id not in self._duties:
            raise CommitRefusedError(
                f"group {self.group_id!r} refused a commit: it does not know the member {membership.member_id!r}; "
                "it must join again"
            )
        elif membership.generation != self.generation:
            raise CommitRefusedError(
                f"group {self.group_id!r} refused a commit under generation {membership.generation}: "
                f"generation {self.generation} is in force"
            )
        self._committed.update(offsets)
        self._notify()

    def refuse_beside_members(self) -> None:
        """Reject manually assigned clients while the group has members.

        Raises:
            GroupHasMembersError: The group has members.
        """
        if self.members:
            raise GroupHasMembersError(
                f"group {self.group_id!r} has members ({', '.join(self.members)}), but this app uses manual "
                "assignment (assign): stop the members, or use another group id"
            )

    # Calls from tests ------------------------------------------------------------------

    def rebalance(self) -> None:
        """Make every member release its partitions and rejoin; member ids stay the same."""
        self._begin_rebalance()
        self._complete_when_all_rejoined()

    def revoke(self, *partitions: TopicPartition) -> None:
        """Rebalance, and withhold *partitions* from now on, as if an outside member owned them."""
        self.withheld |= set(partitions)
        self.rebalance()

    def assign(self, *partitions: TopicPartition, member_id: str | None = None) -> None:
        """Rebalance, and assign *partitions* again: always to *member_id* if given, otherwise round robin."""
        self.withheld -= set(partitions)
        self._pinned |= dict.fromkeys(partitions, member_id)
        self.rebalance()

    def lose(self) -> None:
        """Forget all members: they learn that they lost their partitions, and join under new ids."""
        for member_id in self.members:
            self.leave(member_id)

    def commit_from_outside(self, offsets: Mapping[TopicPartition, int | None], *, metadata: str = "") -> None:
        """Set committed offsets as another member or a reset tool would; None removes an offset."""
        for partition, offset in offsets.items():
            if offset is None:
                self._committed.pop(partition, None)
            else:
                self._committed[partition] = Committed(offset, metadata)
            self.epochs.pop(partition, None)
        self._notify()

    # Inside ----------------------------------------------------------------------------

    def _begin_rebalance(self) -> None:
        if not any(duty == "rejoin" for duty in self._duties.values()):
            self._duties = dict.fromkeys(self._duties, "rejoin")

    def _complete_when_all_rejoined(self) -> None:
        if not any(duty == "rejoin" for duty in self._duties.values()):
            self._duties = dict.fromkeys(self._duties, "adopt")
            self.generation += 1
            self._owners = self._assign_partitions()
        self._notify()

    def _subscribers(self, topic: str) -> list[str]:
        return [name for name, subscription in self._subscriptions.items() if is_subscribed(topic, *subscription)]

    def _assign_partitions(self) -> dict[TopicPartition, str]:
        owners: dict[TopicPartition, str] = {}
        turns = itertools.count()
        for partition in self.subscribed():
            if partition not in self.withheld:
                subscribers = self._subscribers(partition.topic)
                pinned = self._pinned.get(partition)
                owners[partition] = pinned if pinned in subscribers else subscribers[next(turns) % len(subscribers)]
        return owners


class CommitRequest(NamedTuple):
    """A commit that reached the broker, in `InMemoryBroker.commits`."""

    group_id: str
    membership: Membership
    offsets: Mapping[TopicPartition, Committed]
    applied: bool
    owned: bool
    """Whether every partition belonged to the member then. A broker does not check this, but tests should."""


class InMemoryBroker:
    """Topics, partition logs and consumer groups of one simulated Kafka cluster.

    Every method that changes state is synchronous and complete when it returns; anything waiting for the change (a
    poll, `until`) is woken. Offsets, generations, member ids and commits behave as on a broker. Network and
    replication are not simulated, and the broker itself never waits.

    Owned by one test, used from one event loop.

    Example:
        >>> broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
        >>> broker.publish("orders", b"paid", key=b"k").offset
        0
        >>> broker.log("orders", 0).skip(1)  # as a transaction marker does
        >>> broker.publish("orders", b"sent", key=b"k").offset
        2
    """

    def __init__(self, *, partitions: int = 4, clock: Callable[[], float] = time.time) -> None:
        """Create an empty broker.

        Args:
            partitions: Number of partitions of a topic created on first use.
            clock: Source of record timestamps, in seconds since the epoch.
        """
        self.commits: list[CommitRequest] = []
        """Every commit request that reached the broker, in order."""
        self._default_partitions = partitions
        self.now = clock
        """Returns the time of new records, in seconds since the Unix epoch."""
        self._topics: dict[str, list[PartitionLog]] = {}
        self._turns: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._groups: dict[str, ConsumerGroup] = {}
        self._commit_failures: deque[tuple[TransportError, bool]] = deque()
        self.poll_failures: deque[TransportError] = deque()
        """Errors set with `fail_next_poll`, for the next polls."""
        self.fetch_faults: dict[TopicPartition, TransportError | None] = {}
        """Errors set with `fail_fetches`."""
        self.publish_faults: dict[str, tuple[TransportError | None, bool]] = {}
        """Errors set with `fail_publishes`, each with whether the record is stored anyway."""
        self.creates_topics = True
        """Whether a message creates its topic; otherwise publishing to a missing topic fails. Consuming creates it."""
        self.leaderless: set[TopicPartition] = set()
        """Partitions without a leader; see `set_leader`."""
        self._watchers: dict[Callable[[], None], None] = {}  # A set in order.
        self._available = True

    # Changes ---------------------------------------------------------------------------

    def watch(self, changed: Callable[[], None]) -> None:
        """Call *changed* after every change, in the same step, until `unwatch`."""
        self._watchers[changed] = None

    def unwatch(self, changed: Callable[[], None]) -> None:
        """End a `watch`."""
        self._watchers.pop(changed, None)

    def notify(self) -> None:
        """Notify all watchers of a change."""
        for changed in tuple(self._watchers):
            changed()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until *condition* holds; it is checked after every change."""
        event = asyncio.Event()
        self.watch(event.set)
        try:
            while not condition():
                event.clear()
                await event.wait()
        finally:
            self.unwatch(event.set)

    # Topics ----------------------------------------------------------------------------

    def create_topic(self, name: str, partitions: int | None = None) -> None:
        """Create a topic; groups that subscribe to it rebalance.

        Raises:
            ValueError: The topic exists.
        """
        if name in self._topics:
            raise ValueError(
                f"topic {name!r} exists already with {len(self._topics[name])} partitions: use add_partitions"
            )
        self.add_partitions(name, self._default_partitions if partitions is None else partitions)

    def add_partitions(self, topic: str, count: int) -> None:
        """Add *count* partitions to a topic; groups that subscribe to it rebalance."""
        logs = self._topics.setdefault(topic, [])
        for number in range(len(logs), len(logs) + count):
            logs.append(PartitionLog(TopicPartition(topic, number), self.notify))
        for group in self._groups.values():
            if topic in {partition.topic for partition in group.subscribed()}:
                group.rebalance()
        self.notify()

    def recreate(self, topic: str, *, forget_commits: bool = True) -> None:
        """Delete a topic and create it again with the same number of partitions: all logs are empty and begin at 0.

        Args:
            topic: An existing topic.
            forget_commits: Whether to remove the groups' committed offsets as well, as brokers eventually do.
        """
        partitions = [log.topic_partition for log in self._topics[topic]]
        self._topics[topic] = [PartitionLog(partition, self.notify) for partition in partitions]
        for group in self._groups.values() if forget_commits else ():
            group.commit_from_outside(dict.fromkeys(partitions))
        self.notify()

    def ensure_topic(self, name: str, *, at_least: int = 1) -> None:
        """Create a topic with at least the default number of partitions unless it exists."""
        if name not in self._topics:
            self.create_topic(name, max(at_least, self._default_partitions))

    def topics(self) -> Mapping[str, int]:
        """Return the number of partitions of each topic."""
        return {name: len(logs) for name, logs in self._topics.items()}

    def log(self, topic: str, partition: int) -> PartitionLog:
        """Return the log of a partition; its topic is created on first use.

        Raises:
            UnknownPartitionError: The topic has no such partition.
        """
        self.ensure_topic(topic)
        logs = self._topics[topic]
        if not 0 <= partition < len(logs):
            raise UnknownPartitionError(
                f"{topic}/{partition} cannot be read or written: topic {topic!r} has partitions 0 to {len(logs) - 1} "
                f"and not {partition}: create it with more"
            )
        return logs[partition]

    def existing_log(self, topic_partition: TopicPartition) -> PartitionLog:
        """Return the log of a partition that exists.

        Raises:
            UnknownPartitionError: The topic does not exist, or has fewer partitions.
        """
        if topic_partition.topic not in self._topics:
            raise UnknownPartitionError(
                f"{topic_partition} cannot be read or written: unknown topic {topic_partition.topic!r}; the topics are "
                f"{sorted(self._topics)}"
            )
        return self.log(*topic_partition)

    # Records ---------------------------------------------------------------------------

    def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        timestamp: float | None = None,
        partitioner: Partitioner = "key",
    ) -> Record:
        """Append a record; without *partition*, the key's crc32 chooses it, and records without a key go round robin.

        Args:
            topic: Created on first use.
            value: None is a tombstone.
            key: None means no order.
            partition: Partition to append to.
            headers: Pairs of name and content.
            timestamp: Seconds since the epoch; by default the broker's clock.
            partitioner: `"round_robin"` ignores the key.
        """
        log = self._log_for(topic, key if partitioner == "key" else None, partition)
        record = Record(
            *log.topic_partition,
            log.end,
            key,
            value,
            tuple(headers),
            self.now() if timestamp is None else timestamp,
        )
        log.append(record)
        return record

    def refuses(self, topic: str) -> bool:
        """Whether publishing to a topic fails, because it does not exist and is not created."""
        return not self.creates_topics and topic not in self._topics

    def _log_for(self, topic: str, key: bytes | None, partition: int | None) -> PartitionLog:
        self.ensure_topic(topic)
        if partition is None:
            partition = (next(self._turns[topic]) if key is None else zlib.crc32(key)) % len(self._topics[topic])
        return self.log(topic, partition)

    @contextlib.contextmanager
    def transaction(self, messages: Iterable[Message]) -> Iterator[None]:
        """Append messages that are readable once the block has ended; if it raises, only gaps remain of them.

        Raises:
            MessagesRefusedError: A topic has no such partition, or `fail_publishes` set an error that is not retriable.
            TransportError: The error set with `fail_publishes` for a topic.
        """
        messages = list(messages)
        refused = {index: found for index, message in enumerate(messages) if (found := self._refusal_of(message))}
        if refused:
            raise MessagesRefusedError(refused)
        logs: dict[PartitionLog, None] = {}
        is_committed = False
        try:
            for message in messages:
                error, _ = self.publish_faults.get(message.topic, (None, True))
                if error is not None:
                    raise error
                log = self._log_for(message.topic, message.chosen_by, message.partition)
                if log not in logs:
                    log.begin_transaction()
                    logs[log] = None
                self.publish(**{**message._asdict(), "partition": log.topic_partition.partition})
            yield
            is_committed = True
        finally:
            for log in logs:
                log.end_transaction(commit=is_committed)
            self.notify()

    def _refusal_of(self, message: Message) -> MessageRefusedError | None:
        """Return why a message cannot be written in any transaction; None if it can."""
        error, _ = self.publish_faults.get(message.topic, (None, True))
        if self.refuses(message.topic):
            error = missing_topic(message.topic)
        elif message.partition is not None:
            try:
                self.log(message.topic, message.partition)
            except UnknownPartitionError as unknown:
                error = unknown
        return None if error is None or error.retriable else MessageRefusedError(str(error))

    def restore(self, records: Iterable[Record]) -> None:
        """Append records at their original offsets; missing offsets before them become a gap."""
        for record in records:
            self.log(*record.topic_partition).append(record)

    def records(self, topic: str, partition: int | None = None) -> Sequence[Record]:
        """Return the records of a topic, or of one partition, sorted by timestamp, partition and offset."""
        logs = self._topics.get(topic, []) if partition is None else [self.log(topic, partition)]
        return sorted(
            (record for log in logs for record in log.records),
            key=lambda record: (record.timestamp, record.partition, record.offset),
        )

    # Groups ----------------------------------------------------------------------------

    def group(self, group_id: str) -> ConsumerGroup:
        """Return a consumer group, created on first use. Script rebalances of a single group there."""
        if group_id not in self._groups:
            self._groups[group_id] = ConsumerGroup(group_id, self.topics, self.notify)
        return self._groups[group_id]

    def committed(self, group_id: str, topic: str, partition: int) -> int | None:
        """Return the committed offset of a partition, or None."""
        committed = self.group(group_id).committed(TopicPartition(topic, partition))
        return None if committed is None else committed.offset

    # Failures --------------------------------------------------------------------------

    def fail_next_commit(self, error: TransportError, *, applied: bool = False) -> None:
        """Answer the next commit request with *error*; further calls apply to the requests after it.

        Args:
            error: `CommitRefusedError`, `CommitError` or `AuthorizationError`.
            applied: Whether the offsets are stored anyway, so that only the acknowledgement is lost; not possible for
                a refused commit.
        """
        self._commit_failures.append((error, applied))

    def fail_next_poll(self, error: TransportError) -> None:
        """Raise *error* from the next poll of any client, and end that client."""
        self.poll_failures.append(error)
        self.notify()

    def fail_fetches(self, topic: str, partition: int, error: TransportError | None) -> None:
        """Answer every fetch of a partition with *error*, until called with None."""
        self.fetch_faults[TopicPartition(topic, partition)] = error
        self.notify()

    def set_leader(self, topic: str, partition: int, *, available: bool) -> None:
        """Make a partition leaderless, or elect a leader: without one, consumers can neither read nor query its log.

        Other partitions and commits are not affected, and published records are still stored.
        """
        name = self.existing_log(TopicPartition(topic, partition)).topic_partition
        self.leaderless = self.leaderless - {name} if available else self.leaderless | {name}
        self.notify()

    def fail_publishes(self, topic: str, error: TransportError | None, *, stored: bool = False) -> None:
        """Answer everything that an app publishes to a topic with *error*, until called with None.

        Args:
            topic: The topic; records appended with this broker's own `publish` are not affected.
            error: `AuthorizationError`, `MessageTooLargeError` or another `TransportError`.
            stored: Whether the record is stored anyway, so that only the acknowledgement is lost.
        """
        self.publish_faults[topic] = (error, stored or error is None)
        self.notify()

    @property
    def available(self) -> bool:
        """Whether the broker responds; while it does not, requests fail and nothing is fetched."""
        return self._available

    @available.setter
    def available(self, available: bool) -> None:
        self._available = available
        self.notify()

    # Client requests -------------------------------------------------------------------

    def commit(
        self,
        group_id: str,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: Iterable[Message] = (),
    ) -> None:
        """Answer a commit request; *messages* become readable with the offsets, or leave only gaps.

        Raises:
            CommitRefusedError: *membership* is not in force.
            TransportError: The error set with `fail_next_commit`.
        """
        self.check_available()
        group = self.group(group_id)
        failure, applied = self._commit_failures.popleft() if self._commit_failures else (None, True)
        # Manually assigned partitions have no owner that the broker knows of.
        owned = all((group.owner(partition) or "") == membership.member_id for partition in offsets)
        self.commits.append(CommitRequest(group_id, membership, dict(offsets), applied=False, owned=owned))
        with self.transaction(messages):
            if failure is not None and not applied:
                raise failure
            group.commit(offsets, membership)
            self.commits[-1] = self.commits[-1]._replace(applied=True)
        if failure is not None:
            raise failure

    def check_available(self) -> None:
        """Reject a request while the broker does not respond.

        Raises:
            ConnectError: The broker is not available.
        """
        if not self._available:
            raise ConnectError("the in-memory broker is not available: the test has set broker.available to False")
