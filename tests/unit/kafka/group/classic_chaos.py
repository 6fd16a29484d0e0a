"""A random run of a classic group, and what must hold behind it."""

from collections.abc import Sequence
from typing import NamedTuple

from aioshard.kafka.group.assignors import GroupAssignor
from aioshard.kafka.group.classic import ClassicMember
from tests.unit.kafka.group.classic_world import CALM, EAGER, INCREMENTAL, NO_FAULTS, SESSION, Faults, Node, World

TURMOIL = 40.0
"""Seconds in which things fail."""
TOPICS = ("orders", "refunds")


class Release(NamedTuple):
    """A kind of process that a group may have several of."""

    assignors: Sequence[str]
    kind: type[ClassicMember] = ClassicMember
    new_assignor: type[GroupAssignor] = GroupAssignor


MIXTURES: Sequence[Sequence[Release]] = (
    [Release(INCREMENTAL)],
    [Release(EAGER)],
    [Release((*INCREMENTAL, *EAGER)), Release(INCREMENTAL)],
    [Release((*INCREMENTAL, *EAGER)), Release(EAGER)],
)
"""The processes in a group: all of them incremental, all eager, and two steps between."""


class Chaos:
    """A world in which something happens again and again."""

    def __init__(
        self,
        seed: int,
        kind: type[ClassicMember] | None = None,
        mixtures: Sequence[Sequence[Release]] = MIXTURES,
    ) -> None:
        self.world = World(seed, partitions={"orders": 5, "refunds": 3})
        self.chance = self.world.chance
        self.world.group.join_version = self.chance.choice([5, 9])
        self.kind = kind
        self.mixture = self.chance.choice(mixtures)
        self.members = 0

    def run(self) -> World:
        world, chance = self.world, self.chance
        for _ in range(chance.randint(1, 3)):
            self.start()
        if chance.random() < 0.8:
            world.faults = Faults(
                lost=chance.choice([0, 0.03, 0.1]),
                unanswered=chance.choice([0, 0.03, 0.1]),
                slow=chance.choice([0, 0.05]),
                stuck=chance.choice([0, 0, 0.1]),
            )
        changes = [self.start, self.stop, self.kill, self.freeze, self.freeze, self.evict, self.evict, self.move]
        changes += [self.grow, self.subscribe, self.restart, self.rejoin, self.suspend]
        end = world.now + TURMOIL
        while world.now < end:
            for _ in range(chance.randint(0, 4)):
                world.run(chance.uniform(0, 1))
                for node in world.nodes:
                    node.commit()
            chance.choice(changes)()
        self.settle()
        return world

    def settle(self) -> None:
        """Everything is assigned some time after the last fault, and then nothing changes any more."""
        world = self.world
        world.faults = NO_FAULTS
        world.note("calm")
        if not world.living():
            self.start()
        world.run_until(world.is_settled, CALM)
        world.run(2 * CALM)  # sessions of dead members end, and stuck members give up
        assert world.is_settled(), world.describe()
        generation = world.group.generation
        owners = world.owners()
        world.run(20)
        assert (world.group.generation, world.owners()) == (generation, owners), world.describe()
        for node in world.living():
            node.codes.clear()
            node.commit()
            world.run(5)
            assert node.codes.keys() <= {0}, f"{node.name} cannot commit: {node.codes}\n{world.describe()}"
            assert {partition.topic for partition in node.held} <= node.topics, world.describe()

    # What happens -----------------------------------------------------------------------

    def start(self, instance: str | None = None) -> None:
        if len(self.world.living()) >= 4:
            return
        self.members += 1
        release = self.chance.choice(self.mixture)
        self.world.start(
            Node(
                self.world,
                f"n{self.members}",
                topics=self.topics(),
                assignors=release.assignors,
                instance=instance or (f"static-{self.members}" if self.chance.random() < 0.3 else None),
                kind=self.kind or release.kind,
                new_assignor=release.new_assignor,
                drain=self.chance.choice([0.05, 0.3, 2.0]),
            )
        )

    def topics(self) -> Sequence[str]:
        return self.chance.choice([TOPICS, TOPICS, TOPICS[:1], TOPICS[1:]])

    def some(self) -> Node | None:
        living = self.world.living()
        return self.chance.choice(living) if living else None

    def stop(self) -> None:
        node = self.some()
        if node is not None:
            node.leave()

    def kill(self) -> None:
        node = self.some()
        if node is not None:
            node.kill()

    def restart(self) -> None:
        """A static member comes back, sometimes while it still runs."""
        static = [node for node in self.world.living() if node.instance is not None]
        if static:
            node = self.chance.choice(static)
            if self.chance.random() < 0.8:
                node.kill()
            self.start(node.instance)

    def evict(self) -> None:
        """An operator removes a member from the group."""
        group = self.world.group
        if group.members and self.world.now >= group.loading_until:
            member = self.chance.choice(list(group.members.values()))
            self.world.note(f"{member.member_id} is removed")
            for node in self.world.nodes:
                if node.member.ownership.member_id == member.member_id:
                    node.unknown_until = self.world.now + SESSION
            group.remove(member.member_id, self.world.now)

    def freeze(self) -> None:
        node = self.some()
        if node is not None:
            node.freeze(self.chance.choice([0.5, 3, 9]))

    def move(self) -> None:
        self.world.move_coordinator(self.chance.choice([0, 0.5, 3]))

    def grow(self) -> None:
        topic = self.chance.choice(TOPICS)
        if self.world.partitions[topic] < 8:
            self.world.partitions[topic] += 1

    def subscribe(self) -> None:
        node = self.some()
        if node is not None:
            node.subscribe(self.topics())

    def rejoin(self) -> None:
        node = self.some()
        if node is not None:
            node.do(lambda: node.member.rejoin(self.world.now, "for a test"))

    def suspend(self) -> None:
        """The event loop of an engine is blocked for too long; then it runs again."""
        node = self.some()
        if node is not None:
            member, world = node.member, self.world
            node.do(lambda: member.suspend(world.now, "the engine is blocked"))
            world.after(self.chance.uniform(0, 5), lambda: node.do(lambda: member.resume(world.now)))
