"""The coordinator of a group of the consumer protocol (KIP-848): what brokers of Kafka 4.1 do with heartbeats.

group = ModelConsumerGroup(random.Random(1), session=6.0)
group.topics["orders"] = 4
answer = group.heartbeat(request, now)
"""

import random
import re
import uuid
from dataclasses import dataclass, field

from aioshard.kafka.group.consumer_messages import Heartbeat, HeartbeatAnswer, TopicIdPartition

Owned = frozenset[TopicIdPartition]


@dataclass
class Entry:
    """A member, as the coordinator knows it.

    Attributes:
        epoch: Its epoch; -2 for a static member that is away.
        assigned: The partitions that it may own.
        revoking: The partitions that it has to release before anything else happens.
        session_end: When it is removed unless it says something.
        rebalance_end: When it is removed unless it releases.
    """

    member_id: str
    instance_id: str | None
    epoch: int = 0
    previous: int = -1
    topics: tuple[str, ...] = ()
    pattern: str = ""
    rebalance_timeout: float = 300.0
    assigned: Owned = frozenset()
    revoking: Owned = frozenset()
    target: Owned = frozenset()
    session_end: float = 0.0
    rebalance_end: float | None = None

    @property
    def held(self) -> Owned:
        """The partitions that nobody else may get."""
        return self.assigned | self.revoking


@dataclass
class ModelConsumerGroup:
    """One group.

    Attributes:
        topics: The number of partitions of each topic.
        ids: The ids of the topics.
        session: Seconds after which a silent member is removed.
        interval: Seconds between heartbeats.
        max_size: The most members.
        error: A code with which all heartbeats are answered; 0 for none.
    """

    rng: random.Random
    session: float = 6.0
    interval: float = 1.0
    max_size: int = 100
    error: int = 0
    topics: dict[str, int] = field(default_factory=dict)
    ids: dict[str, uuid.UUID] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    epoch: int = 0
    exists: bool = False

    # Topics ---------------------------------------------------------------------------

    def add_topic(self, topic: str, partitions: int) -> uuid.UUID:
        """Creates a topic, or adds partitions to it."""
        if topic not in self.ids:
            self.ids[topic] = uuid.UUID(int=self.rng.getrandbits(128), version=4)
        self.topics[topic] = partitions
        if self.entries:
            self.assign()
        return self.ids[topic]

    def recreate_topic(self, topic: str) -> uuid.UUID:
        """Deletes a topic and creates it again."""
        self.ids[topic] = uuid.UUID(int=self.rng.getrandbits(128), version=4)
        self.assign()
        return self.ids[topic]

    def partitions(self, topic: str) -> list[TopicIdPartition]:
        """Returns the partitions of a topic."""
        return [TopicIdPartition(self.ids[topic], number) for number in range(self.topics[topic])]

    # Heartbeats -----------------------------------------------------------------------

    def heartbeat(self, request: Heartbeat, now: float) -> HeartbeatAnswer:
        """Answers a heartbeat."""
        self.tick(now)
        if self.error:
            return HeartbeatAnswer(self.error, "as the test says")
        if request.epoch < 0:
            return self._leave(request, now)
        if not request.epoch and not self._is_valid_join(request):
            return HeartbeatAnswer(42, "a join says everything, and owns nothing")
        if request.epoch and not self.exists:
            return HeartbeatAnswer(69)
        code = self._find(request)
        if code:
            return HeartbeatAnswer(code)
        self.exists = True
        entry = self.entries[request.member_id]
        before = entry.assigned
        entry.session_end = now + self.session
        self._subscribe(entry, request)
        self._reconcile(entry, request.owned, now)
        is_full = request.rebalance_timeout is not None and request.topics is not None and request.owned is not None
        changed = not request.epoch or is_full or before != entry.assigned
        return HeartbeatAnswer(0, "", entry.epoch, self.interval, sorted(entry.assigned) if changed else None)

    def _is_valid_join(self, request: Heartbeat) -> bool:
        said = (request.rebalance_timeout, request.topics, request.owned)
        return None not in said and not request.owned

    def _find(self, request: Heartbeat) -> int:
        """Finds or makes the entry of a member, and returns an error code."""
        static = self._static(request.instance_id)
        if static is not None and not request.epoch:
            return self._inherit(static, request)
        if request.instance_id is not None and request.epoch and (static is None or static is not self._own(request)):
            return 25 if static is None else 82
        entry = self._own(request)
        if entry is not None:
            return 110 if self._is_fenced(entry, request) else 0
        if request.epoch:
            return 25
        if len(self.entries) >= self.max_size:
            return 81
        self.entries[request.member_id] = Entry(request.member_id, request.instance_id)
        return 0

    def _own(self, request: Heartbeat) -> Entry | None:
        return self.entries.get(request.member_id)

    def _inherit(self, static: Entry, request: Heartbeat) -> int:
        """Gives a new process the place of the one that had its instance id."""
        if static.epoch != -2:
            return 111
        del self.entries[static.member_id]
        heir = Entry(request.member_id, request.instance_id)
        heir.assigned = static.assigned
        heir.target = static.target
        heir.topics, heir.pattern = static.topics, static.pattern
        self.entries[heir.member_id] = heir
        return 0

    def _is_fenced(self, entry: Entry, request: Heartbeat) -> bool:
        """Whether an epoch is not the member's. The one before is accepted: the answer may have been lost."""
        if request.epoch >= entry.epoch:
            return request.epoch > entry.epoch
        owned = request.owned
        return request.epoch != entry.previous or owned is None or not owned <= entry.assigned

    def _static(self, instance_id: str | None) -> Entry | None:
        found = [entry for entry in self.entries.values() if instance_id and entry.instance_id == instance_id]
        return found[0] if found else None

    def _leave(self, request: Heartbeat, now: float) -> HeartbeatAnswer:
        entry = self.entries.get(request.member_id)
        if request.instance_id is not None:
            static = self._static(request.instance_id)
            if static is None:
                return HeartbeatAnswer(25)
            if static.member_id != request.member_id:
                return HeartbeatAnswer(82)
        if entry is None:
            return HeartbeatAnswer(25 if self.exists else 69)
        if request.epoch == -2:
            entry.epoch = -2
            entry.session_end = now + self.session
            entry.assigned = entry.assigned - entry.revoking
            entry.revoking = frozenset()
            entry.rebalance_end = None
        else:
            self._remove(entry)
        return HeartbeatAnswer(0, "", request.epoch)

    def _subscribe(self, entry: Entry, request: Heartbeat) -> None:
        topics = entry.topics if request.topics is None else request.topics
        pattern = entry.pattern if request.pattern is None else request.pattern
        if request.rebalance_timeout is not None:
            entry.rebalance_timeout = request.rebalance_timeout
        is_new = entry.epoch == 0 and not entry.target
        if is_new or (topics, pattern) != (entry.topics, entry.pattern):
            entry.topics, entry.pattern = topics, pattern
            self.assign()

    def assign(self) -> None:
        """Works out what each member shall own, differently each time."""
        self.epoch += 1
        shares: dict[str, set[TopicIdPartition]] = {member_id: set() for member_id in self.entries}
        for topic in self.topics:
            subscribed = [
                entry.member_id
                for entry in self.entries.values()
                if topic in entry.topics or (entry.pattern and re.fullmatch(entry.pattern, topic))
            ]
            self.rng.shuffle(subscribed)
            for index, partition in enumerate(self.partitions(topic)):
                if subscribed:
                    shares[subscribed[index % len(subscribed)]].add(partition)
        for member_id, share in shares.items():
            self.entries[member_id].target = frozenset(share)

    def _reconcile(self, entry: Entry, owned: Owned | None, now: float) -> None:
        """Brings a member nearer to its target."""
        if entry.revoking:
            if owned is None or owned & entry.revoking:
                return
            entry.revoking = frozenset()
            entry.rebalance_end = None
        elif entry.epoch == self.epoch and entry.assigned == entry.target:
            return
        leaving = entry.assigned - entry.target
        entry.assigned &= entry.target
        if leaving and entry.epoch > 0 and (owned is None or owned & leaving):
            entry.revoking = leaving
            entry.rebalance_end = now + entry.rebalance_timeout
            return
        held = {at for other in self.entries.values() if other is not entry for at in other.held}
        entry.assigned = entry.target - held
        if entry.epoch != self.epoch:
            entry.previous = entry.epoch
            entry.epoch = self.epoch

    # Time -----------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Removes members whose time is over."""
        for entry in list(self.entries.values()):
            is_late = entry.rebalance_end is not None and now >= entry.rebalance_end
            if is_late or now >= entry.session_end:
                self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        del self.entries[entry.member_id]
        if self.entries:
            self.assign()

    def delete(self) -> None:
        """Forgets the group."""
        self.entries.clear()
        self.exists = False
