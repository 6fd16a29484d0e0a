"""Rebalances that move single partitions: nothing else is revoked, and each change is reported once.

The group here moves a partition in two steps, as with the consumer protocol: its owner releases it, and after a while
another member, or the same one, is assigned it. The generation stays the same, or rises without an assignment: so only
the engine keeps a commit of the previous owner from the broker (I9).
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from aioshard import Context, Limit, Record
from aioshard.engine.rebalance import Rebalance
from aioshard.kafka.memory.transport import _Assigned
from aioshard.ports import NOT_A_MEMBER, Committed, GroupListener, Membership, Message
from aioshard.records import TopicPartition
from tests.simulation.limits import StartLedger
from tests.simulation.seeds import with_seeds
from tests.simulation.world import GROUP, ClusterTransport, Process, World, live

GAP = 5.0
"""Seconds in the end between the release of a partition and its assignment: enough to open the others."""


class IncrementalTransport(ClusterTransport):
    """A client from which single partitions are taken, and which is given single partitions.

    Attributes:
        going: The partitions to release.
        coming: The partitions that are assigned to it, each with the generation in which they were.
        moved: Called with partitions that were released.
    """

    world: "IncrementalWorld"
    going: frozenset[TopicPartition] = frozenset()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.coming: dict[TopicPartition, int] = {}

    @property
    def can_move(self) -> bool:
        """Whether the group reaches it, and it takes part in no other rebalance."""
        is_member = self._membership != NOT_A_MEMBER and self._reachable.is_set() and not self._ending
        return is_member and self._group.duty(self._member_id) == "nothing"

    def move(self, partitions: Collection[TopicPartition]) -> None:
        self.going |= frozenset(partitions)
        self._changed()

    def give(self, partition: TopicPartition) -> None:
        self._group._owners[partition] = self._member_id
        self.coming[partition] = self._group.generation
        self._changed()

    async def _take_next_step(self, listener: GroupListener) -> None:
        if not self.can_move:
            await super()._take_next_step(listener)
            return
        going = self.going & self._assigned.keys()
        self.going = frozenset()
        coming = [name for name, generation in self.coming.items() if generation == self._group.generation]
        self.coming.clear()
        if going:
            await self._release_some(listener, going)
        elif coming:
            self._assigned |= {name: _Assigned() for name in coming}
            listener.assigned(self.assigned, self._membership)
        else:
            await super()._take_next_step(listener)

    async def _release_some(self, listener: GroupListener, going: Collection[TopicPartition]) -> None:
        self.pause(going)
        remove = self._leave_in(self._rebalance_timeout)
        try:
            await listener.revoked(going)
        finally:
            remove.cancel()
        for name in going:
            self._assigned.pop(name, None)
        if not self._ending and not self._assigned:
            listener.assigned((), self._membership)
        for name in going:
            self.world.released(name, self._group.generation)

    async def commit(
        self,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: Sequence[Message] | None = None,
    ) -> None:
        if released := [name for name in offsets if name not in self._assigned]:
            self.breaches.append(f"I9: a commit of {released}, which were released, is sent")
        await super().commit(offsets, membership, messages)

    def raise_generation(self) -> None:
        self._membership = self._membership._replace(generation=self._group.generation)


class IncrementalWorld(World):
    """A world whose group also moves single partitions."""

    transport_class = IncrementalTransport
    moves = 0
    """How many partitions have moved."""

    def __init__(self, seed: int, *, fixed_shards: bool, clean: bool) -> None:
        self.ledger = StartLedger(Limit("stripe", 30.0, burst=2, per="group")) if seed % 4 == 1 else None
        super().__init__(seed, fixed_shards=fixed_shards, clean=clean)

    def consume_options(self) -> dict[str, Any]:
        limit = {} if self.ledger is None else {"limit": self.ledger.limit}
        return super().consume_options() | limit

    async def handle(self, process: Process, record: Record, context: Context) -> None:
        if self.ledger is not None:
            self.ledger.note(self, process, record)
        await super().handle(process, record, context)

    @property
    def members(self) -> list[IncrementalTransport]:
        """The clients that can take part in a move."""
        clients = [process.transports[-1] for process in self.living if process.transports]
        return [client for client in clients if isinstance(client, IncrementalTransport) and client.can_move]

    def start_process(self) -> None:
        super().start_process()
        process = self.processes[-1]
        make = process._make_transport

        def make_with_world() -> ClusterTransport:
            transport = make()
            assert isinstance(transport, IncrementalTransport)
            transport.world = self
            return transport

        process._make_transport = make_with_world  # type: ignore[method-assign]

    def latency(self, operation: str) -> float:
        """Look-ups take a while also in the end, so that partitions are revoked while others open."""
        if operation in ("committed", "log ranges") and (self.calm or self.clean):
            return 0.3
        return super().latency(operation)

    async def something_happens(self) -> None:
        if self.rng.random() < 0.4:
            self.move_some()
        elif self.rng.random() < 0.1:
            self.raise_generation()
        else:
            await super().something_happens()

    def move_some(self) -> None:
        """Begin to take some partitions from a member."""
        members = [member for member in self.members if member.assigned]
        if members:
            member = self.rng.choice(members)
            member.move(self.rng.sample(member.assigned, self.rng.randrange(len(member.assigned)) + 1))

    def released(self, name: TopicPartition, generation: int) -> None:
        """Assign a partition that was released, after a while, unless the whole group rebalances before."""
        self.moves += 1
        delay = GAP if self.calm else self.rng.choice([0.0, 0.1, 1.0, 4.0])
        asyncio.get_running_loop().call_later(delay, self._assign, name, generation)

    def _assign(self, name: TopicPartition, generation: int) -> None:
        group = self.broker.group(GROUP)
        if group.generation != generation or group.rebalancing:
            return
        if self.members:
            self.rng.choice(self.members).give(name)
        else:
            asyncio.get_running_loop().call_later(0.5, self._assign, name, generation)

    def raise_generation(self) -> None:
        """Let the group rebalance without a change for anybody."""
        group = self.broker.group(GROUP)
        members = self.members
        if group.rebalancing or len(members) < len(group.members):
            return
        group.generation += 1
        for member in members:
            member.raise_generation()

    async def calm_down(self) -> None:
        """Take partitions from members that have just got them, and then assign everything."""
        self.calm = True
        self.broker.available = True
        await asyncio.sleep(30.0)  # all faults end
        for _ in range(3):
            self.broker.group(GROUP).rebalance()
            await self.broker.until(lambda: not self.broker.group(GROUP).rebalancing)
            for member in self.members:
                member.move(member.assigned[:1])
            self.publish(20)
            await asyncio.sleep(0.8 * GAP)
            self._check_that_others_are_open()
            await asyncio.sleep(GAP)
        await super().calm_down()

    def _check_that_others_are_open(self) -> None:
        """I11: nobody has been assigned anything since others were revoked."""
        for process in self.living:
            if process.engine is None:
                continue
            for name in process.transports[-1].assigned:
                partition = process.engine.rebalance.partitions.get(name)
                is_open = partition is not None and partition.is_open
                assert is_open or name in self.broker.leaderless, f"I11: {name} does not open\n{self.describe()}"


def simulate(seed: int, *, clean: bool = False) -> IncrementalWorld:
    worlds: list[IncrementalWorld] = []

    async def life() -> None:
        worlds.append(IncrementalWorld(seed, fixed_shards=seed % 3 == 2, clean=clean))
        await worlds[0].live_through(25, [0.0, 0.01, 0.1, 0.3, 2.0])

    live(life(), seed=seed, on_step=lambda: worlds[0].check() if worlds else None)
    if worlds[0].ledger is not None:
        worlds[0].ledger.check(len(worlds[0].processes))
    return worlds[0]


@with_seeds()
def test_guarantees_hold_when_single_partitions_move(seeds: range) -> None:
    moves = 0
    for seed in seeds:
        world = simulate(seed)
        assert world.runs > 0
        moves += world.moves
    assert moves > 0


@with_seeds(2)
def test_nothing_runs_twice_when_single_partitions_move(seeds: range) -> None:
    """I12: their drains fit the deadline."""
    for seed in seeds:
        world = simulate(seed, clean=True)
        assert world.runs == sum(len(offsets) for offsets in world.offsets.values()), f"seed {seed}"


def test_the_worlds_notice_that_the_others_do_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the engine waited for another assignment."""
    leave = Rebalance._leave

    def leave_and_stop_opening(rebalance: Rebalance, names: Collection[TopicPartition], *, lost: bool) -> Any:
        leaving = leave(rebalance, names, lost=lost)
        rebalance._cancel_opening()
        return leaving

    def simulate_some() -> None:
        for seed in range(10):
            simulate(seed)

    monkeypatch.setattr(Rebalance, "_leave", leave_and_stop_opening)
    with pytest.raises(AssertionError, match="I11"):
        simulate_some()
