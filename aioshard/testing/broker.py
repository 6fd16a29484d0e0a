"""An in-memory broker: topics, consumer groups and scripted failures, as plain calls."""

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from aioshard.errors import CommitRefusedError, ConnectError, TransportError
from aioshard.ports import Committed, Membership
from aioshard.records import Record, TopicPartition
from aioshard.testing.group import ConsumerGroup
from aioshard.testing.log import PartitionLog
from aioshard.testing.watched import Watched

__all__ = ["CommitRequest", "InMemoryBroker"]


class CommitRequest(NamedTuple):
    """A commit that reached the broker, in `InMemoryBroker.commits`."""

    group_id: str
    membership: Membership
    offsets: Mapping[TopicPartition, Committed]
    applied: bool
    owned: bool
    """Whether every partition belonged to the member then. A broker does not check this, but tests should."""


class InMemoryBroker(Watched):
    """Topics, partition logs and consumer groups of one simulated Kafka cluster.

    Every method that changes state is synchronous and complete when it returns; anything waiting for the change (a
    poll, `until`) is woken. Offsets, generations, member ids and commits behave as on a broker. Network and
    replication are not simulated, and the broker itself never waits.

    Owned by one test, used from one event loop.

    Example:
        >>> broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
        >>> broker.publish("orders", b"paid", key=b"k").offset
        0
        >>> broker.skip("orders", 0, 1)  # as a transaction marker does
        >>> broker.publish("orders", b"sent", key=b"k").offset
        2
    """

    def __init__(self, *, partitions: int = 4, clock: Callable[[], float] = time.time) -> None:
        """Create an empty broker.

        Args:
            partitions: Number of partitions of a topic created on first use.
            clock: Source of record timestamps, in seconds since the epoch.
        """
        super().__init__()
        self.commits: list[CommitRequest] = []
        """Every commit request that reached the broker, in order."""
        self._default_partitions = partitions
        self._clock = clock
        self._topics: dict[str, list[PartitionLog]] = {}
        self._turns: dict[str, int] = {}
        self._groups: dict[str, ConsumerGroup] = {}
        self._commit_failures: deque[tuple[TransportError, bool]] = deque()
        self._poll_failures: deque[TransportError] = deque()
        self._start_failures: deque[TransportError] = deque()
        self._faults: dict[TopicPartition, TransportError] = {}
        self._publish_faults: dict[str, tuple[TransportError, bool]] = {}
        self._leaderless: set[TopicPartition] = set()
        self._available = True

    # Topics ----------------------------------------------------------------------------

    def create_topic(self, name: str, partitions: int | None = None) -> None:
        """Create a topic; groups that subscribe to it rebalance.

        Raises:
            ValueError: The topic exists, or *partitions* is not positive.
        """
        count = self._default_partitions if partitions is None else partitions
        if name in self._topics:
            message = f"topic {name!r} exists already with {len(self._topics[name])} partitions: use add_partitions"
            raise ValueError(message)
        self._topics[name] = []
        self.add_partitions(name, count)

    def add_partitions(self, topic: str, count: int) -> None:
        """Add *count* partitions to a topic; groups that subscribe to it rebalance.

        Raises:
            ValueError: *count* is not positive.
        """
        if count < 1:
            message = f"topic {topic!r} cannot get {count} partitions: at least 1 is expected"
            raise ValueError(message)
        logs = self._topics.setdefault(topic, [])
        logs.extend(PartitionLog(TopicPartition(topic, number)) for number in range(len(logs), len(logs) + count))
        for group in self._groups.values():
            group.topics_changed([topic])
        self.notify()

    def recreate(self, topic: str, *, forget_commits: bool = True) -> None:
        """Delete a topic and create it again with the same number of partitions: all logs are empty and begin at 0.

        Args:
            topic: An existing topic.
            forget_commits: Whether to remove the groups' committed offsets as well, as brokers eventually do.
        """
        count = len(self._topics[topic])
        self._topics[topic] = [PartitionLog(TopicPartition(topic, number)) for number in range(count)]
        for group in self._groups.values():
            if forget_commits:
                group.commit_from_outside({TopicPartition(topic, number): None for number in range(count)})
        self.notify()

    def ensure_topic(self, name: str, *, at_least: int = 1) -> int:
        """Create a topic with at least the default number of partitions unless it exists; return how many it has."""
        if name not in self._topics:
            self.create_topic(name, max(at_least, self._default_partitions))
        return len(self._topics[name])

    def topics(self) -> Mapping[str, int]:
        """Return the number of partitions of each topic."""
        return {name: len(logs) for name, logs in self._topics.items()}

    def log(self, topic: str, partition: int) -> PartitionLog:
        """Return the log of a partition; its topic is created on first use.

        Raises:
            LookupError: The topic has no such partition.
        """
        self.ensure_topic(topic)
        logs = self._topics[topic]
        if not 0 <= partition < len(logs):
            message = f"topic {topic!r} has partitions 0 to {len(logs) - 1} and not {partition}: create it with more"
            raise LookupError(message)
        return logs[partition]

    def check_partition(self, topic: str, partition: int) -> None:
        """Reject a partition that does not exist: otherwise a test with a typo would pass without doing anything.

        Raises:
            LookupError: There is no such topic, or it has fewer partitions.
        """
        if topic not in self._topics:
            message = f"there is no topic {topic!r}; there are {sorted(self._topics)}"
            raise LookupError(message)
        self.log(topic, partition)

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
    ) -> Record:
        """Append a record; without *partition*, the key's crc32 chooses it, and records without a key take turns.

        Args:
            topic: Created on first use.
            value: None is a tombstone.
            key: None means no order.
            partition: Partition to append to.
            headers: Pairs of name and content.
            timestamp: Seconds since the epoch; by default the broker's clock.
        """
        self.ensure_topic(topic)
        if partition is None:
            partition = self._choose_partition(topic, key)
        log = self.log(topic, partition)
        now = self._clock() if timestamp is None else timestamp
        record = log.append(value, key=key, headers=tuple(headers), timestamp=now)
        self.notify()
        return record

    def restore(self, record: Record) -> None:
        """Append a record at its original offset; missing offsets before it become a gap.

        Raises:
            ValueError: The partition is already past that offset.
        """
        gap = record.offset - self.log(record.topic, record.partition).end
        if gap:
            self.skip(record.topic, record.partition, gap)
        self.log(record.topic, record.partition).append(
            record.value, key=record.key, headers=record.headers, timestamp=record.timestamp
        )
        self.notify()

    def records(self, topic: str, partition: int | None = None) -> Sequence[Record]:
        """Return the records of a topic, or of one partition, sorted by timestamp, partition and offset."""
        logs = self._topics.get(topic, []) if partition is None else [self.log(topic, partition)]
        records = [record for log in logs for record in log.records]
        return sorted(records, key=lambda record: (record.timestamp, record.partition, record.offset))

    def skip(self, topic: str, partition: int, count: int) -> None:
        """Leave a gap of *count* offsets at the end of a log."""
        self.log(topic, partition).skip(count)
        self.notify()

    def delete(self, topic: str, partition: int, offset: int) -> None:
        """Remove one record and leave a gap."""
        self.log(topic, partition).delete(offset)
        self.notify()

    def compact(self, topic: str, partition: int) -> None:
        """Keep the newest record of each key of a partition and leave gaps for the others."""
        self.log(topic, partition).compact()
        self.notify()

    def truncate_before(self, topic: str, partition: int, offset: int) -> None:
        """Delete all records before *offset*, as retention does."""
        self.log(topic, partition).truncate_before(offset)
        self.notify()

    def begin_transaction(self, topic: str, partition: int) -> None:
        """Freeze the last stable offset of a partition: records appended from now on are not readable yet."""
        self.log(topic, partition).begin_transaction()

    def end_transaction(self, topic: str, partition: int, *, commit: bool) -> None:
        """Make the records since `begin_transaction` readable, or a gap; the marker takes one more offset."""
        self.log(topic, partition).end_transaction(commit=commit)
        self.notify()

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

    def rebalance(self) -> None:
        """Make every member of every group release its partitions and rejoin under its member id."""
        for group in self._groups.values():
            group.rebalance()

    def revoke(self, topic: str, partition: int) -> None:
        """Take a partition away from every group here, as if another member received it."""
        self.check_partition(topic, partition)
        for group in self._groups.values():
            group.revoke(TopicPartition(topic, partition))

    def assign(self, topic: str, partition: int) -> None:
        """Return a revoked partition to the groups."""
        self.check_partition(topic, partition)
        for group in self._groups.values():
            group.assign(TopicPartition(topic, partition))

    def lose(self) -> None:
        """Forget every member: each one learns that it lost its partitions and joins under a new member id."""
        for group in self._groups.values():
            group.lose()

    # Failures --------------------------------------------------------------------------

    def fail_next_commit(self, error: TransportError, *, applied: bool = False) -> None:
        """Answer the next commit request with *error*; further calls apply to the requests after it.

        Args:
            error: `CommitRefusedError`, `CommitError` or `AuthorizationError`.
            applied: Whether the offsets are stored anyway, so that only the acknowledgement is lost.

        Raises:
            ValueError: A refused commit cannot have been applied.
        """
        if applied and isinstance(error, CommitRefusedError):
            message = "a commit that the broker refuses is never applied: use CommitError for a lost acknowledgement"
            raise ValueError(message)
        self._commit_failures.append((error, applied))

    def fail_next_poll(self, error: TransportError) -> None:
        """Raise *error* from the next poll of any client; a `ClientLostError` ends that client."""
        self._poll_failures.append(error)
        self.notify()

    def fail_next_start(self, error: TransportError) -> None:
        """Raise *error* from the next `Transport.start`."""
        self._start_failures.append(error)

    def fail_fetches(self, topic: str, partition: int, error: TransportError | None) -> None:
        """Answer every fetch of a partition with *error*, until called with None."""
        if error is None:
            self._faults.pop(TopicPartition(topic, partition), None)
        else:
            self._faults[TopicPartition(topic, partition)] = error
        self.notify()

    def set_leader(self, topic: str, partition: int, *, available: bool) -> None:
        """Make a partition leaderless, or elect a leader: without one, consumers can neither read nor query its log.

        Other partitions and commits are not affected, and published records are still stored.
        """
        self.check_partition(topic, partition)
        if available:
            self._leaderless.discard(TopicPartition(topic, partition))
        else:
            self._leaderless.add(TopicPartition(topic, partition))
        self.notify()

    def fail_publishes(self, topic: str, error: TransportError | None, *, stored: bool = False) -> None:
        """Answer everything that an app publishes to a topic with *error*, until called with None.

        Args:
            topic: The topic; records appended with this broker's own `publish` are not affected.
            error: `AuthorizationError`, `MessageTooLargeError` or another `TransportError`.
            stored: Whether the record is stored anyway, so that only the acknowledgement is lost.
        """
        if error is None:
            self._publish_faults.pop(topic, None)
        else:
            self._publish_faults[topic] = (error, stored)
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

    def commit(self, group_id: str, offsets: Mapping[TopicPartition, Committed], membership: Membership) -> None:
        """Answer a commit request.

        Raises:
            CommitRefusedError: *membership* is not in force.
            TransportError: The error set with `fail_next_commit`.
        """
        self.check_available()
        group = self.group(group_id)
        failure, applied = self._commit_failures.popleft() if self._commit_failures else (None, True)
        # Manually assigned partitions have no owner that the broker knows of.
        owned = all((group.owner(partition) or "") == membership.member_id for partition in offsets)
        request = CommitRequest(group_id, membership, dict(offsets), applied=False, owned=owned)
        self.commits.append(request)
        if applied:
            group.commit(offsets, membership)
            self.commits[-1] = request._replace(applied=True)
        self.notify()
        if failure is not None:
            raise failure

    def fault(self, topic_partition: TopicPartition) -> TransportError | None:
        """Return the error set with `fail_fetches`."""
        return self._faults.get(topic_partition)

    def has_leader(self, topic_partition: TopicPartition) -> bool:
        """Whether a partition has a leader; see `set_leader`."""
        return topic_partition not in self._leaderless

    def publish_fault(self, topic: str) -> tuple[TransportError, bool] | None:
        """Return the error set with `fail_publishes`, and whether the record is stored anyway."""
        return self._publish_faults.get(topic)

    def check_available(self) -> None:
        """Reject a request while the broker does not respond.

        Raises:
            ConnectError: The broker is not available.
        """
        if not self._available:
            message = "the in-memory broker is not available: the test has set broker.available to False"
            raise ConnectError(message)

    def check_start(self) -> None:
        """Accept a client.

        Raises:
            TransportError: The error set with `fail_next_start`.
            ConnectError: The broker is not available.
        """
        if self._start_failures:
            raise self._start_failures.popleft()
        self.check_available()

    def check_poll(self) -> None:
        """Accept a poll.

        Raises:
            TransportError: The error set with `fail_next_poll`.
        """
        if self._poll_failures:
            raise self._poll_failures.popleft()

    # Inside ----------------------------------------------------------------------------

    def _choose_partition(self, topic: str, key: bytes | None) -> int:
        count = len(self._topics[topic])
        if key is not None:
            return zlib.crc32(key) % count
        turn = self._turns.get(topic, -1) + 1
        self._turns[topic] = turn
        return turn % count
