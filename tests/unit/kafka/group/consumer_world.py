"""Processes with members of the consumer protocol, an unreliable network, and the coordinator of their group.

Everything happens in virtual time and by one random number generator, so each seed is another history.

    world = World(seed)
    world.run()   # faults for a while, then calm; raises `ViolationError`
"""

import functools
import heapq
import itertools
import random
import uuid
from collections.abc import Callable

from aioshard.kafka.group.consumer import ConsumerMember
from aioshard.kafka.group.consumer_messages import Heartbeat, HeartbeatAnswer, TopicIdPartition
from aioshard.kafka.group.member import Assigned, Ended, Event, Lost, Refused, Revoked, Troubled
from aioshard.records import TopicPartition
from tests.support.model_consumer_group import ModelConsumerGroup

SESSION = 6.0
REQUEST_TIMEOUT = 1.5
FAULTS_END = 60.0
_REMOVED = (25, 69, 110)
CALM = 40.0
"""Seconds after the last fault in which everything must find an owner."""
TOPICS = ("orders", "orders.eu", "refunds")


class ViolationError(AssertionError):
    """Something that must never happen."""


class Process:
    """A process: the driver and the engine of one member.

    Attributes:
        held: The partitions that the engine has, each with the life of its assignment.
    """

    def __init__(self, world: "World", name: str, member: ConsumerMember) -> None:
        self.world = world
        self.name = name
        self.member = member
        self.held: dict[TopicPartition, int] = {}
        self.naming: set[uuid.UUID] = set()
        """Topics whose names are being looked up."""
        self.leaving: set[tuple[int, TopicPartition]] = set()
        self.is_alive = True
        self.is_frozen = False
        self.coordinator = 0
        self.epoch = 0
        """The epoch in the last answer."""
        self.removed_id = ""
        """The member id that an operator has removed from the group, until the member hears of it."""
        self.last_arrival = 0.0
        self.wakes = itertools.count()
        self.wake = 0
        self.waiting: list[Callable[[], None]] = []
        self.last_word: Ended | Refused | None = None

    def act(self, what: Callable[[], None]) -> None:
        """Gives the member an input, now or when the process runs again."""
        if not self.is_alive:
            return
        if self.is_frozen:
            self.waiting.append(what)
            return
        what()
        self.turn()

    def turn(self) -> None:
        """Asks the member for what to do, and does it."""
        now = self.world.now
        requests = self.member.poll(now)
        for event in self.member.take_events():
            self.handle(event)
        for topic_id in self.member.unnamed - self.naming:
            self.naming.add(topic_id)
            delay = self.world.rng.choice([0.0, 0.2, 0.5] if self.world.is_calm else [0.0, 0.2, 3.0])
            self.world.later(delay, functools.partial(self.name_topic, topic_id))
        for request in requests:
            self.world.send(self, request)
        self.wake = wake = next(self.wakes)
        if self.member.deadline is not None:
            self.world.at(max(self.member.deadline, now), lambda: self.act(lambda: None) if self.wake == wake else None)

    def name_topic(self, topic_id: uuid.UUID) -> None:
        """Gives the member the name of a topic."""
        self.naming.discard(topic_id)
        names = {known: topic for topic, known in self.world.group.ids.items() if known == topic_id}
        self.act(lambda: self.member.name_topics(names, self.world.now))

    def handle(self, event: Event) -> None:
        """Does what an engine does."""
        if isinstance(event, Assigned):
            for at in event.partitions:
                self.expect(at not in self.held, f"{at} was assigned twice")
                self.held[at] = event.life
        elif isinstance(event, Revoked):
            for at in event.partitions:
                self.expect(self.held.get(at) == event.life, f"{at} was revoked, but not assigned")
                self.expect((event.life, at) not in self.leaving, f"{at} was revoked twice")
                self.leaving.add((event.life, at))
            slow = not self.world.is_calm and self.world.rng.random() < 0.3
            delay = self.world.rng.uniform(2.0, 10.0) if slow else self.world.rng.uniform(0.0, 1.0)
            self.world.later(delay, lambda: self.act(lambda: self.release(event)))
        elif isinstance(event, Lost):
            for at in event.partitions:
                self.expect(self.held.pop(at, None) == event.life, f"{at} was lost, but not assigned")
        elif isinstance(event, Troubled):
            if event.coordinator_moved:
                self.coordinator = self.world.coordinator
        elif isinstance(event, Ended | Refused):
            self.last_word = event

    def release(self, event: Revoked) -> None:
        """Lets go of revoked partitions, also when they were lost meanwhile: the engine may not know that yet."""
        for at in event.partitions:
            if self.held.get(at) == event.life:
                del self.held[at]
            self.leaving.discard((event.life, at))
        self.member.released(event.life, event.partitions, self.world.now)

    def expect(self, fact: bool, text: str) -> None:
        if not fact:
            raise ViolationError(f"{self.name} at {self.world.now:.3f}: {text}")


class World:
    """Processes, network, and coordinator.

    Attributes:
        fault_rate: How often something goes wrong.
        is_calm: Whether nothing goes wrong any more.
    """

    def __init__(self, seed: int, kind: type[ConsumerMember] = ConsumerMember) -> None:
        self.rng = random.Random(seed)
        self.kind = kind
        self.now = 0.0
        self.is_calm = False
        self.fault_rate = self.rng.choice([0.02, 0.1, 0.3])
        self.group = ModelConsumerGroup(self.rng, session=SESSION)
        self.group.add_topic("orders", 4)
        self.group.add_topic("refunds", 2)
        self.processes: list[Process] = []
        self.trouble = 0
        """The code with which the coordinator answers without a look; -1: it does not answer at all."""
        self.coordinator = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._names = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._numbers), what))

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now + seconds, what)

    def start(self, instance_id: str | None = None) -> Process:
        """Starts a process."""
        by_pattern = self.rng.random() < 0.3
        member = self.kind(
            random.Random(self.rng.getrandbits(64)),
            topics=[] if by_pattern else ["orders", "refunds"],
            patterns=["orders.*", "refunds"] if by_pattern else [],
            session=SESSION,
            interval=1.0,
            rebalance_timeout=self.rng.choice([3.0, 4.0, 20.0]),
            instance_id=instance_id,
        )
        process = Process(self, f"process {next(self._names)}", member)
        self.processes.append(process)
        process.act(lambda: None)
        return process

    def running(self) -> list[Process]:
        return [process for process in self.processes if process.is_alive and not process.member.ended]

    # Network --------------------------------------------------------------------------

    def send(self, process: Process, request: Heartbeat) -> None:
        """Carries a request to the coordinator and its answer back, or not. A connection keeps the order."""
        times = [self.rng.uniform(0.001, 0.05), self.rng.uniform(0.001, 0.05)]
        if self.rng.random() < self.fault_rate:
            times[self.rng.randrange(2)] += self.rng.uniform(0.0, 2 * REQUEST_TIMEOUT)
        arrival = max(self.now + times[0], process.last_arrival)
        is_lost = self.rng.random() < self.fault_rate / 2
        if is_lost or arrival >= self.now + REQUEST_TIMEOUT:  # then the connection is cut, and nothing of it arrives
            self.later(REQUEST_TIMEOUT, lambda: process.act(lambda: process.member.failed(request, self.now)))
            return
        process.last_arrival = arrival
        self.at(arrival, lambda: self.arrive(process, request, times[1]))

    def arrive(self, process: Process, request: Heartbeat, back: float) -> None:
        """Lets the coordinator handle a request."""
        sent = request.sent_at
        answer = self.answer(process, request)
        if answer is None or self.now + back >= sent + REQUEST_TIMEOUT:
            self.at(sent + REQUEST_TIMEOUT, lambda: process.act(lambda: process.member.failed(request, self.now)))
            return
        self.later(back, lambda: process.act(lambda: self.accept(process, request, answer)))

    def accept(self, process: Process, request: Heartbeat, answer: HeartbeatAnswer) -> None:
        """Gives a member an answer."""
        if not answer.error and request.member_id == process.member.ownership.member_id:
            process.epoch = answer.epoch
        if answer.error in _REMOVED and request.member_id == process.removed_id:
            process.removed_id = ""
        process.member.answered(request, answer, self.now)

    def answer(self, process: Process, request: Heartbeat) -> HeartbeatAnswer | None:
        if self.trouble == -1:
            return None
        if self.trouble:
            return HeartbeatAnswer(self.trouble)
        if process.coordinator != self.coordinator:
            return HeartbeatAnswer(16)
        answer = self.group.heartbeat(request, self.now)
        if self.rng.random() < self.fault_rate / 5:
            return HeartbeatAnswer(self.rng.choice([7, 15, -1]))  # stored, but not by enough replicas in time
        return answer

    # Faults ---------------------------------------------------------------------------

    def disturb(self) -> None:
        """Does something that happens."""
        running = self.running()
        if not running or self.rng.random() < 0.1:
            if len(running) < 5:
                self.start(self.rng.choice([None, None, "worker-1", "worker-2"]))
            return
        self.rng.choice([*self._faults_of_processes(), *self._events_of_the_group()])(self.rng.choice(running))

    def _faults_of_processes(self) -> list[Callable[[Process], None]]:
        return [self.kill, self.leave, self.freeze, self.suspend, self.remove, self.hurry, self.subscribe]

    def _events_of_the_group(self) -> list[Callable[[Process], None]]:
        return [self.begin_trouble, self.move, self.add_partition, self.change_times]

    def kill(self, process: Process) -> None:
        if len(self.running()) > 1:
            process.is_alive = False

    def leave(self, process: Process) -> None:
        for_good = self.rng.random() < 0.5
        if len(self.running()) > 1:
            process.act(lambda: process.member.leave(self.now, "closing", for_good=for_good))

    def suspend(self, process: Process) -> None:
        """Lets a process leave because its event loop is blocked, and join again."""
        process.act(lambda: process.member.suspend(self.now, "the event loop is blocked"))
        until = self.rng.uniform(0.0, SESSION)
        self.later(until, lambda: process.act(lambda: process.member.resume(self.now)))

    def hurry(self, process: Process) -> None:
        process.act(lambda: process.member.heartbeat_now(self.now))

    def subscribe(self, process: Process) -> None:
        process.act(lambda: process.member.subscribe(["orders"], ["refunds"], self.now))

    def begin_trouble(self, _: Process) -> None:
        self.trouble = self.rng.choice([14, 15, 16, -1, -1])
        self.later(self.rng.uniform(0.1, 1.5 * SESSION), self.end_trouble)

    def move(self, _: Process) -> None:
        self.coordinator += 1

    def add_partition(self, _: Process) -> None:
        topic = self.rng.choice(TOPICS)
        self.group.add_topic(topic, self.group.topics.get(topic, 0) + 1)

    def change_times(self, _: Process) -> None:
        self.group.session = self.rng.choice([SESSION, SESSION + 3])
        self.group.interval = self.rng.choice([0.5, 1.0, 0.0, 1e6])

    def remove(self, process: Process) -> None:
        """Removes a member as an operator does, or forgets the whole group."""
        everyone = self.rng.random() < 0.2
        removed = self.running() if everyone else [process]
        for each in removed:
            if self.group.entries.pop(each.member.ownership.member_id, None) is not None:
                each.removed_id = each.member.ownership.member_id
        if everyone:
            self.group.delete()
        elif self.group.entries:
            self.group.assign()

    def end_trouble(self) -> None:
        self.trouble = 0

    def freeze(self, process: Process) -> None:
        """Stops a process for a while; what arrives meanwhile waits. Timers may run before or after that."""
        process.is_frozen = True

        def thaw() -> None:
            process.is_frozen = False
            if not process.is_alive:
                return
            if self.rng.random() < 0.5:
                process.turn()
            waiting = process.waiting
            process.waiting = []
            for what in waiting:
                process.act(what)
            process.act(lambda: None)

        self.later(self.rng.uniform(0.1, 3 * SESSION), thaw)

    # Running --------------------------------------------------------------------------

    def run(self) -> None:
        """Lives through a history."""
        for _ in range(self.rng.randint(1, 3)):
            self.start()
        when = self.rng.expovariate(1 / 3)
        while when < FAULTS_END:
            self.at(when, self.disturb)
            when += self.rng.expovariate(1 / 3)
        self.at(FAULTS_END, self.calm_down)
        end = FAULTS_END + CALM + 3 * SESSION
        while self._queue and self._queue[0][0] <= end:
            self.now, _, what = heapq.heappop(self._queue)
            what()
            self.check()
        self.check_calm()

    def calm_down(self) -> None:
        self.is_calm = True
        self.fault_rate = 0.0
        self.start()

    def check(self) -> None:
        """Checks the facts of each moment: the coordinator gives a member's partitions to nobody else."""
        self.group.tick(self.now)
        for process in self.processes:
            own = process.member.ownership
            if not process.is_alive or self.now >= own.alive_until or own.member_id == process.removed_id:
                continue
            entry = self.group.entries.get(own.member_id)
            for at in own.partitions:
                by_id = TopicIdPartition(self.group.ids[at.topic], at.partition)
                if entry is None or by_id not in entry.held:
                    raise ViolationError(
                        f"{process.name} owns {at}, which the group may give to others, at {self.now:.3f}"
                    )
            process.expect(own.partitions == process.held.keys(), f"owns {own.partitions}, engine {process.held}")
            process.expect(own.epoch in (-1, process.epoch), f"has epoch {own.epoch}, not {process.epoch}")

    def check_calm(self) -> None:
        """Checks the facts of calm times: each partition has one owner."""
        owners: dict[TopicPartition, list[str]] = {}
        for process in self.running():
            own = process.member.ownership
            process.expect(self.now < own.alive_until, "is not a member")
            process.expect(set(own.partitions) == set(process.held), f"owns {own.partitions}, engine {process.held}")
            for at in own.partitions:
                owners.setdefault(at, []).append(process.name)
        for topic, count in self.group.topics.items():
            for number in range(count):
                at = TopicPartition(topic, number)
                is_wanted = topic != "orders.eu" or any(
                    e.pattern == "(?:orders.*)|(?:refunds)" for e in self.group.entries.values()
                )
                found = owners.get(at, [])
                if is_wanted and len(found) != 1:
                    raise ViolationError(f"{at} has the owners {found}")
        for process in self.processes:
            if process.member.ended and process.is_alive:
                process.expect(process.last_word is not None, "has ended without a word")
                process.expect(not process.held, f"has ended, but the engine has {process.held}")
