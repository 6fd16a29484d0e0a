"""The known state of a cluster: its brokers, topics and the leaders of partitions.

Pure: answers and times go in, and what they change comes out. `aioshard.kafka.wire.cluster` asks the brokers.

Brokers may answer with old metadata: one that was cut off, or has just started, or lags behind its controller. So an
answer does not simply replace what is known.
"""

import dataclasses
import uuid
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from aioshard.records import TopicPartition

_NO_ERROR = 0
_UNKNOWN_TOPIC = 3
_INVALID_TOPIC = 17
_TOPIC_DENIED = 29
_UNKNOWN_TOPIC_ID = 100
_ABSENT = frozenset({_UNKNOWN_TOPIC, _INVALID_TOPIC, _UNKNOWN_TOPIC_ID})
"""Error codes of topics that a broker does not know."""

UNKNOWN_EPOCH = -1
_MOST_REWINDS = 5
"""Answers in a row with an older leader epoch after which we accept it: the newer one came from a broker that nobody
confirmed before it died. Likewise with fewer partitions: a topic without an id was created again."""
_ABSENT_AFTER = 30.0
"""Seconds for which no broker may know a topic before we forget its partitions: one that has just started is behind."""


class Broker(NamedTuple):
    """A broker as the cluster advertises it."""

    node: int
    host: str
    port: int
    rack: str | None


class Leader(NamedTuple):
    """The leader of a partition."""

    node: int
    epoch: int
    """The leader epoch; -1 if the brokers do not say."""


@dataclasses.dataclass(slots=True)
class PartitionMetadata:
    """The known state of one partition."""

    leader: int | None
    """The node that leads it; None during an election."""
    epoch: int
    """The highest confirmed leader epoch; -1 if the brokers do not say."""
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    offline: tuple[int, ...]
    rewinds: int = 0
    """Answers in a row that named an older leader epoch."""


@dataclasses.dataclass(slots=True)
class TopicMetadata:
    """The known state of one topic."""

    topic_id: uuid.UUID | None
    """None if the brokers do not give topics an id."""
    is_internal: bool
    partitions: dict[int, PartitionMetadata]
    retired_ids: set[uuid.UUID] = dataclasses.field(default_factory=set)
    """Ids that the topic had before it was deleted and created again."""
    unknown_since: float | None = None
    """Since when every broker that we asked does not know it."""
    unknown_times: int = 0
    """How many of them there were: one may be behind."""
    shrunk_times: int = 0
    """Answers in a row with fewer partitions, if the topic has no id."""


class Recreation(NamedTuple):
    """A topic that was deleted and created again."""

    topic: str
    old_id: uuid.UUID
    new_id: uuid.UUID


class Update(NamedTuple):
    """The changes of an answer."""

    recreated: tuple[Recreation, ...] = ()
    moved: frozenset[TopicPartition] = frozenset()
    """Partitions with another leader or another leader epoch than before."""
    is_stale: bool = False
    """Whether the answer, or a part of it, is older than what we know: another broker should be asked."""


class ClusterMetadata:
    """The metadata of one cluster.

    Invariants:
        * An error of a topic or partition changes only what is known of that topic or partition.
        * A known leader epoch never decreases, unless several answers in a row agree, or the topic has a new id. It is
          never replaced by an unknown one.
        * An id that a topic had before it was created again never comes back.
        * Brokers are never forgotten because of an answer without brokers.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self.version = 0
        """Counts the answers that were accepted; see `Cluster.updated_after`."""
        self.brokers: dict[int, Broker] = {}
        self.controller: int | None = None
        """The broker that changes topics; None during an election, and if the brokers name one that does not exist."""
        self._topics: dict[str, TopicMetadata] = {}
        self._names: dict[uuid.UUID, str] = {}
        self._denied: set[str] = set()
        self._missing: set[str] = set()

    # Queries --------------------------------------------------------------------------

    @property
    def denied(self) -> frozenset[str]:
        """Topics that this user may not see, by the latest answers."""
        return frozenset(self._denied)

    @property
    def missing(self) -> frozenset[str]:
        """Topics that do not exist, by the latest answers; of a topic that was known, by two in a row."""
        unknown = (name for name, topic in self._topics.items() if topic.unknown_times > 1)
        return frozenset(self._missing).union(unknown)

    @property
    def topics(self) -> Collection[str]:
        """The topics with known partitions."""
        return self._topics.keys()

    def leader(self, partition: TopicPartition) -> Leader | None:
        """Return the leader of a partition; None if it is unknown, or there is none now."""
        known = self.partition(partition)
        if known is None or known.leader is None:
            return None
        return Leader(known.leader, known.epoch)

    def partition(self, partition: TopicPartition) -> PartitionMetadata | None:
        """Return what is known of a partition."""
        topic = self._topics.get(partition.topic)
        return None if topic is None else topic.partitions.get(partition.partition)

    def partitions(self, topic: str) -> Mapping[int, PartitionMetadata]:
        """Return the partitions of a topic by number; empty if none are known."""
        known = self._topics.get(topic)
        return {} if known is None else known.partitions

    def topic_id(self, topic: str) -> uuid.UUID | None:
        """Return the id of a topic; None if the topic is unknown, or has no id."""
        known = self._topics.get(topic)
        return None if known is None else known.topic_id

    def name(self, topic_id: uuid.UUID) -> str | None:
        """Return the name of the topic with an id."""
        return self._names.get(topic_id)

    def is_internal(self, topic: str) -> bool:
        """Whether a topic is one of Kafka's own."""
        known = self._topics.get(topic)
        return known is not None and known.is_internal

    # Changes --------------------------------------------------------------------------

    def update(self, response: Any, now: float) -> Update:
        """Accept a response to Metadata.

        Args:
            response: The decoded response.
            now: Seconds on any clock that does not go back.
        """
        if not response.brokers:
            return Update(is_stale=True)  # a broker that starts, or lost its controller
        self.brokers = {node: Broker(node, host, port, rack) for node, host, port, rack in response.brokers}
        self.controller = response.controller if response.controller in self.brokers else None
        self.version += 1
        recreated: list[Recreation] = []
        moved: set[TopicPartition] = set()
        is_stale = False
        for answer in response.topics:
            update = self._update_topic(answer, now)
            recreated += update.recreated
            moved |= update.moved
            is_stale = is_stale or update.is_stale
        return Update(tuple(recreated), frozenset(moved), is_stale)

    def learn_leader(self, partition: TopicPartition, leader: Leader) -> bool:
        """Accept a leader that a broker named beside an error (KIP-951); return whether it is news."""
        known = self.partition(partition)
        if known is None or leader.node not in self.brokers or leader.epoch <= known.epoch:
            return False
        known.leader = leader.node
        known.epoch = leader.epoch
        known.rewinds = 0
        return True

    def learn_broker(self, broker: Broker) -> None:
        """Accept a broker that another one named in its answer."""
        self.brokers[broker.node] = broker

    def forget(self, topic: str) -> None:
        """Forget a topic that nobody needs any more."""
        self._remove(topic)
        self._denied.discard(topic)
        self._missing.discard(topic)

    # One topic ------------------------------------------------------------------------

    def _update_topic(self, answer: Any, now: float) -> Update:
        if answer.error != _NO_ERROR:
            return self._note_error(answer, now)
        name = answer.name
        self._denied.discard(name)
        self._missing.discard(name)
        topic_id = _id_of(answer)
        known = self._topics.get(name)
        # 1. The topic is new to us.
        if known is None:
            self._topics[name] = self._new_topic(answer, topic_id, frozenset())
            return Update(moved=_all_partitions(name, self._topics[name]))
        known.unknown_since = None
        known.unknown_times = 0
        # 2. The broker has not heard that the topic was created again.
        if topic_id in known.retired_ids:
            return Update(is_stale=True)
        # 3. The topic was created again: nothing that was known applies to it.
        if topic_id is not None and known.topic_id is not None and topic_id != known.topic_id:
            recreation = Recreation(name, known.topic_id, topic_id)
            self._names.pop(known.topic_id, None)
            self._topics[name] = self._new_topic(answer, topic_id, known.retired_ids | {known.topic_id})
            return Update((recreation,), _all_partitions(name, self._topics[name]))
        # 4. The topic that we know. A known id stays, also if an old broker does not say it.
        if known.topic_id is None and topic_id is not None:
            known.topic_id = topic_id
            self._names[topic_id] = name
        return self._update_partitions(name, known, answer.partitions)

    def _note_error(self, answer: Any, now: float) -> Update:
        name = answer.name
        # 1. It was looked up by an id that the broker does not know.
        if name is None:
            return Update(is_stale=True)
        # 2. This user may not see it. Its partitions stay known: the permission may come back.
        if answer.error == _TOPIC_DENIED:
            self._denied.add(name)
            return Update()
        self._denied.discard(name)
        # 3. The broker does not know it, and may be behind.
        if answer.error in _ABSENT:
            return self._note_absence(name, now)
        # 4. Anything else passes, such as an election: what is known stays.
        return Update(is_stale=True)

    def _new_topic(self, answer: Any, topic_id: uuid.UUID | None, retired_ids: Collection[uuid.UUID]) -> TopicMetadata:
        if topic_id is not None:
            self._names[topic_id] = answer.name
        partitions = {part.partition: _partition_of(part) for part in answer.partitions}
        return TopicMetadata(topic_id, bool(answer.internal), partitions, set(retired_ids))

    def _note_absence(self, name: str, now: float) -> Update:
        known = self._topics.get(name)
        if known is None:
            self._missing.add(name)
            return Update()
        known.unknown_times += 1
        if known.unknown_since is None:
            known.unknown_since = now
        if now - known.unknown_since < _ABSENT_AFTER:
            return Update(is_stale=True)
        self._remove(name)
        self._missing.add(name)
        return Update()

    def _remove(self, name: str) -> None:
        known = self._topics.pop(name, None)
        if known is not None and known.topic_id is not None:
            self._names.pop(known.topic_id, None)

    def _update_partitions(self, name: str, topic: TopicMetadata, answers: Collection[Any]) -> Update:
        moved: set[TopicPartition] = set()
        # Partitions are never removed from a topic: an answer without some of them is old.
        is_stale = len(answers) < len(topic.partitions)
        topic.shrunk_times = topic.shrunk_times + 1 if is_stale and topic.topic_id is None else 0
        if topic.shrunk_times == _MOST_REWINDS:
            topic.partitions.clear()
            is_stale = False
        for answer in answers:
            known = topic.partitions.get(answer.partition)
            if known is None:
                topic.partitions[answer.partition] = _partition_of(answer)
                moved.add(TopicPartition(name, answer.partition))
                continue
            before = (known.leader, known.epoch)
            is_stale = not _accept(known, answer) or is_stale
            if (known.leader, known.epoch) != before:
                moved.add(TopicPartition(name, answer.partition))
        return Update(moved=frozenset(moved), is_stale=is_stale)


def _accept(known: PartitionMetadata, answer: Any) -> bool:
    """Accept what a broker says of a partition; return whether it is up to date, as far as we can tell."""
    epoch = answer.epoch
    # 1. Older than what we know. Several such answers in a row mean that what we know was never confirmed.
    if UNKNOWN_EPOCH < epoch < known.epoch:
        known.rewinds += 1
        if known.rewinds < _MOST_REWINDS:
            return False
    known.rewinds = 0
    # 2. A known epoch is not replaced by an unknown one: the broker would no longer fence our requests.
    if epoch != UNKNOWN_EPOCH:
        known.epoch = epoch
    # 3. During an election there is no leader, and the one we know would only answer that it leads no more.
    known.leader = None if answer.leader < 0 else answer.leader
    known.replicas = tuple(answer.replicas)
    known.in_sync = tuple(answer.in_sync)
    known.offline = tuple(answer.offline or ())
    return known.leader is not None


def _partition_of(answer: Any) -> PartitionMetadata:
    return PartitionMetadata(
        leader=None if answer.leader < 0 else answer.leader,
        epoch=answer.epoch,
        replicas=tuple(answer.replicas),
        in_sync=tuple(answer.in_sync),
        offline=tuple(answer.offline or ()),
    )


def _all_partitions(name: str, topic: TopicMetadata) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition(name, number) for number in topic.partitions)


def _id_of(answer: Any) -> uuid.UUID | None:
    """Return the id of a topic; None if the broker gives it none, or only zeros, as in a cluster being upgraded."""
    topic_id: uuid.UUID | None = answer.id
    return topic_id if topic_id is not None and topic_id.int else None
