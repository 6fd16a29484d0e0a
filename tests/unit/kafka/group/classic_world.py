"""Members of one classic group in virtual time: their coordinator, their connections, their engines, and what fails.

world = World(seed)
world.start(Node(world, "a"))
world.run(10)

After each step, the world checks that no partition has two owners, and that each member's listener was told of each
change once.
"""

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from aioshard.kafka.group.assignors import GroupAssignor
from aioshard.kafka.group.classic import ClassicEvent, ClassicMember, Elected
from aioshard.kafka.group.classic_messages import (
    ClassicAnswer,
    ClassicRequest,
    refusal_of,
)
from aioshard.kafka.group.member import Assigned, Ended, Lost, Ownership, Refused, Revoked, Troubled
from aioshard.kafka.wire.pool import Purpose
from aioshard.records import TopicPartition
from tests.support.model_classic_group import ModelClassicGroup

SESSION, INTERVAL, REBALANCE = 6.0, 1.0, 8.0
CALM = SESSION + 4 * REBALANCE
"""Seconds after which a group without faults has assigned everything."""


EAGER = ("sticky",)
INCREMENTAL = ("cooperative-sticky",)


class Faults:
    """How likely faults are; the world draws them.

    Attributes:
        lost: The share of requests that never arrive.
        unanswered: The share of requests whose answer is lost.
        slow: The share of requests that take seconds.
        stuck: The share of releases that never come.
    """

    def __init__(self, lost: float = 0.0, unanswered: float = 0.0, slow: float = 0.0, stuck: float = 0.0) -> None:
        self.lost = lost
        self.unanswered = unanswered
        self.slow = slow
        self.stuck = stuck


NO_FAULTS = Faults()


class World:
    """See the module."""

    def __init__(self, seed: int = 0, *, partitions: Mapping[str, int] | None = None, join_version: int = 9) -> None:
        self.chance = random.Random(seed)
        self.now = 1_000.0
        self.faults = NO_FAULTS
        self.group = ModelClassicGroup(join_version)
        self.coordinator = 0
        self.partitions: dict[str, int] = dict(partitions or {"orders": 6})
        self.nodes: list[Node] = []
        self.log: list[str] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    # Time -------------------------------------------------------------------------------

    def at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(time, self.now), next(self._numbers), act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.at(self.now + seconds, act)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            time = min(self.group.deadline, self._events[0][0] if self._events else math.inf)
            time = max(time, self.now, self.group.loading_until if time == self.group.deadline else -math.inf)
            if time > end:
                break
            self.now = time
            if self._events and self._events[0][0] <= time:
                heapq.heappop(self._events)[2]()
            self.group.advance(self.now)
            self.check()
        self.now = end
        self.check()

    def run_until(self, holds: Callable[[], bool], seconds: float = CALM) -> float:
        """Return how long it took."""
        begin = self.now
        while not holds():
            assert self.now - begin < seconds, self.describe()
            self.run(0.05)
        return self.now - begin

    def note(self, text: str) -> None:
        self.log.append(f"{self.now:9.3f} {text}")

    def describe(self) -> str:
        lines = [*self.log[-60:], f"{self.now:9.3f} group {self.group.state} {self.group.generation}"]
        lines += [f"  {name}: {member}" for name, member in self.group.members.items()]
        lines += [f"  {node.name}: {node.member._state} {node.member.ownership}" for node in self.nodes]
        return "\n".join(lines)

    # Checks -----------------------------------------------------------------------------

    def check(self) -> None:
        owners: dict[TopicPartition, Node] = {}
        for node in self.informed():
            if self.now >= node.member.ownership.alive_until:
                continue
            for partition in node.member.ownership.partitions:
                other = owners.setdefault(partition, node)
                assert other is node, f"{other.name} and {node.name} own {partition}\n{self.describe()}"

    def informed(self) -> "list[Node]":
        """Processes that can know that an operator, or another process, has taken their place."""
        newest = {node.instance: node for node in self.nodes}
        return [
            node
            for node in self.nodes
            if not node.is_dead
            and self.now >= node.unknown_until
            and (node.instance is None or newest[node.instance] is node)
        ]

    def owners(self) -> dict[TopicPartition, str]:
        return {
            partition: node.name
            for node in self.nodes
            if not node.is_dead
            for partition in node.member.ownership.partitions
            if node.member.ownership.owns(partition, self.now)
        }

    def unowned(self) -> set[TopicPartition]:
        topics = {topic for node in self.living() for topic in node.topics}
        expected = {
            TopicPartition(topic, number)
            for topic in topics & self.partitions.keys()
            for number in range(self.partitions[topic])
        }
        return expected - self.owners().keys()

    def living(self) -> "list[Node]":
        return [node for node in self.nodes if not node.is_dead and not node.member.ended and not node.is_leaving]

    def is_settled(self) -> bool:
        return not self.unowned() and all(not node.draining for node in self.living())

    # The world changes ------------------------------------------------------------------

    def start(self, node: "Node") -> "Node":
        self.nodes.append(node)
        node.wake()
        node.look_at_partitions()
        return node

    def move_coordinator(self, loading: float = 0.0) -> None:
        self.note(f"the coordinator moves, and loads for {loading:.1f} s")
        self.coordinator += 1
        self.group.move(self.now, loading)


class Node:
    """A process with a member, its connections, and its engine."""

    def __init__(
        self,
        world: World,
        name: str,
        *,
        topics: Collection[str] = ("orders",),
        assignors: Sequence[str] = INCREMENTAL,
        instance: str | None = None,
        kind: type[ClassicMember] = ClassicMember,
        new_assignor: type[GroupAssignor] = GroupAssignor,
        drain: float = 0.2,
    ) -> None:
        self.world = world
        self.name = name
        self.topics = frozenset(topics)
        self.instance = instance
        self.assignors = {name: new_assignor(name, instance_id=instance) for name in assignors}
        self.drain = drain
        self.member = kind(
            topics,
            list(self.assignors.values()),
            random.Random(world.chance.random()),
            session_timeout=SESSION,
            heartbeat_interval=INTERVAL,
            rebalance_timeout=REBALANCE,
            instance_id=instance,
        )
        self.coordinator = world.coordinator
        self.connections: dict[Purpose, Connection] = {}
        self.held: dict[TopicPartition, int] = {}
        """The partitions that the engine works on, and the life that they belong to."""
        self.draining: set[TopicPartition] = set()
        self.seen: list[ClassicEvent] = []
        self.sent: list[ClassicRequest] = []
        self.drains: list[Revoked] = []
        """The revocations so far."""
        self.lose: Callable[[ClassicRequest], bool] = lambda _request: False
        """Whether a request never arrives."""
        self.answers_at = -math.inf
        """No answer arrives earlier."""
        self.codes: Counter[int] = Counter()
        """The answers to commits."""
        self.is_dead = False
        self.is_leaving = False
        self.unknown_until = -math.inf
        """Until then, it may believe to be a member although it was removed."""
        self.thaws_at = -math.inf
        self._inbox: list[Callable[[], None]] = []

    # Inputs -----------------------------------------------------------------------------

    def do(self, act: Callable[[], None]) -> None:
        """Call the member now, or when the process is no longer frozen."""
        self._inbox.append(act)
        self._work()

    def _work(self) -> None:
        if self.world.now < self.thaws_at:
            self.world.at(self.thaws_at, self._work)
            return
        while self._inbox and not self.is_dead:
            self._inbox.pop(0)()
            self._step()

    def wake(self) -> None:
        self.do(lambda: None)

    def _step(self) -> None:
        self._take_events()
        for request in self.member.poll(self.world.now):
            self.sent.append(request)
            self.world.note(f"{self.name} sends {describe(request)}")
            self._send(request)
        self._take_events()
        expected = self.member.ownership.partitions
        assert self.held.keys() == expected, f"{self.name} holds {self.held}, not {expected}\n{self.world.describe()}"
        deadline = self.member.deadline
        if deadline is not None:
            self.world.at(deadline, self._wake_if_due)

    def _wake_if_due(self) -> None:
        deadline = None if self.is_dead else self.member.deadline
        if deadline is not None and deadline <= self.world.now:
            self.wake()

    def _send(self, request: ClassicRequest) -> None:
        connection = self.connections.get(request.purpose)
        replaced = connection is not None and connection.is_busy and request.purpose is Purpose.JOIN
        if connection is None or connection.is_closed or replaced or connection.broker != self.coordinator:
            if connection is not None and request.purpose is Purpose.JOIN:
                connection.is_closed = (
                    True  # nobody waits for it; heartbeats at an earlier coordinator run into their time
                )
            connection = self.connections[request.purpose] = Connection(self, self.coordinator)
        connection.send(request)

    def answered(self, request: ClassicRequest, answer: ClassicAnswer) -> None:
        self.world.note(f"{self.name} gets {answer} for {describe(request)}")
        self.do(lambda: self.member.answered(request, answer, self.world.now))

    def failed(self, request: ClassicRequest) -> None:
        self.world.note(f"{self.name} gets nothing for {describe(request)}")
        self.do(lambda: self.member.failed(request, self.world.now))

    # Events -----------------------------------------------------------------------------

    def _take_events(self) -> None:
        for event in self.member.take_events():
            self.seen.append(event)
            self.world.note(f"{self.name}: {event}")
            self._take(event)

    def _take(self, event: ClassicEvent) -> None:
        match event:
            case Assigned():
                assert not event.partitions & self.held.keys(), self.world.describe()
                assert event.partitions <= event.ownership.partitions
                self.held.update(dict.fromkeys(event.partitions, event.life))
            case Revoked():
                assert event.partitions <= self.held.keys() - self.draining, self.world.describe()
                assert event.partitions
                self.draining |= event.partitions
                self._drain(event)
            case Lost():
                assert event.partitions == self.held.keys(), self.world.describe()
                assert {self.held[partition] for partition in event.partitions} == {event.life}
                self.held.clear()
                self.draining.clear()
            case Elected():
                self.world.after(self.world.chance.uniform(0, 0.2), lambda: self.do(lambda: self._lead(event)))
            case Troubled():
                if event.coordinator_moved:
                    self.world.after(self.world.chance.uniform(0, 0.5), self._look_up_coordinator)
            case Ended() | Refused():
                assert not self.held, self.world.describe()

    def _drain(self, event: Revoked) -> None:
        self.drains.append(event)
        if self.world.chance.random() < self.world.faults.stuck:
            return
        seconds = self.world.chance.uniform(0, 2 * self.drain)
        self.world.after(seconds, lambda: self.do(lambda: self.release(event)))

    def release(self, event: Revoked) -> None:
        if self.member.ownership.life == event.life:
            for partition in event.partitions:
                self.held.pop(partition, None)
                self.draining.discard(partition)
        self.member.released(event.life, event.partitions, self.world.now)

    def _lead(self, election: Elected) -> None:
        numbers = self._numbers(election.topics)
        plan = self.assignors[election.protocol].assign(election, numbers, self.world.now)
        self.member.lead(election, plan.assignments, numbers, self.world.now, rejoin_at=plan.rejoin_at)

    def _look_up_coordinator(self) -> None:
        self.coordinator = self.world.coordinator
        self.wake()

    def _numbers(self, topics: Collection[str]) -> dict[str, range]:
        return {topic: range(self.world.partitions.get(topic, 0)) for topic in topics}

    def look_at_partitions(self) -> None:
        """The metadata of the watched topics arrive every few seconds."""
        if self.is_dead or self.member.ended:
            return
        self.do(lambda: self.member.partitions_changed(self._numbers(self.member.watched), self.world.now))
        self.world.after(self.world.chance.uniform(0.5, 2), self.look_at_partitions)

    # Commits ----------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit a partition, if the process may: the group must refuse what others own by then."""
        ownership = self.member.ownership
        owned = sorted(partition for partition in ownership.partitions if ownership.owns(partition, self.world.now))
        if owned and not self.is_dead and self.world.now >= self.thaws_at:
            partition = self.world.chance.choice(owned)
            self.world.after(self.world.chance.choice([0.01, 0.1, 3]), lambda: self._arrive(partition, ownership))

    def _arrive(self, partition: TopicPartition, ownership: Ownership) -> None:
        if self.coordinator != self.world.coordinator:
            return
        code = self.world.group.commit(ownership.member_id, self.instance, ownership.epoch, self.world.now)
        self.codes[code] += 1
        if code:
            self.do(lambda: self.member.commit_refused(ownership, code, self.world.now))
        else:
            informed = self.world.informed()
            owners = [node for node in informed if node.member.ownership.owns(partition, self.world.now)]
            assert self not in informed or owners in ([], [self]), (
                f"{self.name} commits {partition} of {owners[0].name}\n{self.world.describe()}"
            )

    # Faults of the process -----------------------------------------------------------------

    def leave(self) -> None:
        self.is_leaving = True
        self.do(lambda: self.member.leave(self.world.now, "the process ends"))

    def kill(self) -> None:
        self.world.note(f"{self.name} is killed")
        self.is_dead = True
        for connection in self.connections.values():
            connection.is_closed = True

    def hold_answers(self, seconds: float) -> None:
        self.answers_at = self.world.now + seconds

    def freeze(self, seconds: float) -> None:
        self.world.note(f"{self.name} is frozen for {seconds:.1f} s")
        self.thaws_at = max(self.thaws_at, self.world.now + seconds)

    def subscribe(self, topics: Collection[str]) -> None:
        self.topics = frozenset(topics)
        self.do(lambda: self.member.subscribe(topics, self.world.now))

    def count(self, kind: type[Any]) -> int:
        return sum(isinstance(event, kind) for event in self.seen)

    def ownership(self) -> Ownership:
        return self.member.ownership


class Connection:
    """Answers come in order; the broker handles a request when the one before it is answered."""

    def __init__(self, node: Node, broker: int) -> None:
        self.node = node
        self.world = node.world
        self.broker = broker
        self.is_closed = False
        self._queue: list[ClassicRequest] = []
        self._arrives = 0.0

    @property
    def is_busy(self) -> bool:
        return bool(self._queue)

    def send(self, request: ClassicRequest) -> None:
        chance, faults, now = self.world.chance, self.world.faults, self.world.now
        self._queue.append(request)
        latency = chance.uniform(1, 4) if chance.random() < faults.slow else chance.uniform(0.001, 0.05)
        self._arrives = max(self._arrives, now + latency)
        is_lost = chance.random() < faults.lost or self.node.lose(request)
        is_unanswered = chance.random() < faults.unanswered
        if not is_lost:
            self.world.at(self._arrives, lambda: self._handle_first(request, is_unanswered=is_unanswered))
        if (is_lost or is_unanswered) and chance.random() < 0.5:
            self.world.at(self._arrives + chance.uniform(0, 0.1), lambda: self._break(request))
        self.world.after(request.timeout, lambda: self._break(request))

    def _handle_first(self, request: ClassicRequest, *, is_unanswered: bool) -> None:
        """Handle a request if it is the first in the queue; otherwise it is handled when it is."""
        if request not in self._queue and not self.is_closed:
            return
        if self._queue and self._queue[0] is not request and not self.is_closed:
            self.world.after(0.01, lambda: self._handle_first(request, is_unanswered=is_unanswered))
            return

        def reply(answer: ClassicAnswer) -> None:
            if not is_unanswered:
                is_slow = self.world.chance.random() < self.world.faults.slow
                delay = self.world.chance.uniform(1, 4) if is_slow else self.world.chance.uniform(0.001, 0.05)
                arrives = max(self.world.now + delay, self.node.answers_at)
                self.world.at(arrives, lambda: self._answer(request, answer))

        if self.broker != self.world.coordinator:
            reply(refusal_of(request, 16))
        else:
            self.world.group.handle(request, reply, self.world.now)

    def _answer(self, request: ClassicRequest, answer: ClassicAnswer) -> None:
        if not self.is_closed and any(each is request for each in self._queue):
            self._queue = [each for each in self._queue if each is not request]
            self.node.answered(request, answer)

    def _break(self, request: ClassicRequest) -> None:
        """The connection ends, with everything on it."""
        if self.is_closed or not any(each is request for each in self._queue):
            return
        self.is_closed = True
        for each in self._queue:
            self.node.failed(each)


def describe(request: ClassicRequest) -> str:
    text = type(request).__name__.removesuffix("Request")
    values = [str(getattr(request, name)) for name in ("member_id", "generation", "reason") if hasattr(request, name)]
    return f"{text}({', '.join(values)})"
