"""The shards of a handler against a naive model: any number of workers, failures and rebalances."""

import asyncio
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.outcomes import Block
from aioshard.engine.shards import Shards
from aioshard.ports import FetchedBatch
from aioshard.records import Record, TopicPartition
from tests.engine.deliveries import make_buffer
from tests.simulation.seeds import SEEDS

WORKERS = 3
KEYS = st.sampled_from(["a", "b", None])
BLOCK = Block(halted=True, error="ValueError", since=0.0)
RETRY = BLOCK._replace(halted=False)


class ShardsMachine(RuleBasedStateMachine):
    """The model knows, for each epoch, which of its records have not ended, and applies the rule of order.

    A worker is an entry in `running`. Timers are fired by a rule, not by time.
    """

    fixed = False

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.shards = Shards(4 if self.fixed else None)
        self.buffer = make_buffer(10**6, 10**9)
        self.epochs: list[Epoch] = []
        self.running: list[Delivery] = []
        self.alive: dict[Delivery, None] = {}
        self.timers: list[tuple[Any, ...]] = []
        self.arrived = 0
        self.feeding: dict[Epoch, asyncio.Task[None]] = {}
        self.add_partition()

    def teardown(self) -> None:
        for task in self.feeding.values():
            task.cancel()
        if self.feeding:
            self.loop.run_until_complete(asyncio.wait(self.feeding.values()))
        self.loop.close()

    def within(self, action: Any, *arguments: Any) -> Any:
        """Call something of the shards as a callback of the loop would."""

        async def call() -> Any:
            result = action(*arguments)
            await asyncio.sleep(0)
            return result

        return self.loop.run_until_complete(call())

    @precondition(lambda self: len(self.epochs) < 3)
    @rule()
    def add_partition(self) -> None:
        epoch = Epoch(TopicPartition("t", len(self.epochs)), len(self.epochs), 0, self.buffer)
        epoch.open()
        self.epochs.append(epoch)

    def living(self, number: int, gate: Gate) -> Epoch | None:
        found = [epoch for epoch in self.epochs if epoch.gate is gate]
        return found[number % len(found)] if found else None

    @rule(number=st.integers(0, 2), keys=st.lists(KEYS, min_size=1, max_size=4))
    def arrive(self, number: int, keys: list[str | None]) -> None:
        epoch = self.living(number, Gate.OPEN)
        if epoch is None or (epoch in self.feeding and not self.feeding[epoch].done()):
            return
        position = epoch.tracker.position
        tp = epoch.topic_partition
        records = [Record(*tp, position + n, None, None, (), 0.0) for n in range(len(keys))]
        deliveries = [Delivery(record, epoch, None, 1, 0.0) for record in records]
        for delivery, key in zip(deliveries, keys, strict=True):
            delivery.key = 7 if self.fixed else key
            self.arrived += 1
            delivery.arrived = self.arrived
        epoch.take_in(FetchedBatch(tp, records, [1] * len(records), position + len(keys)), deliveries)
        self.alive.update(dict.fromkeys(deliveries))
        self.feeding[epoch] = self.loop.create_task(self.shards.put(deliveries))
        self.within(lambda: None)

    def start(self, delivery: Delivery | None) -> None:
        if delivery is None:
            return
        assert delivery in self.alive
        assert not delivery.epoch.gate or delivery.epoch.may_start(delivery)
        if delivery.key is not None:
            assert all(other.key != delivery.key for other in self.running), "I4: two of one key concurrently"
            earlier = [d for d in self.alive if d.epoch is delivery.epoch and d.key == delivery.key]
            assert min(d.offset for d in earlier) == delivery.offset, "I4: an earlier one of its key has not ended"
        epoch = delivery.epoch
        epoch.highest_started = max(epoch.highest_started, delivery.offset)
        delivery.starts += 1
        self.running.append(delivery)

    @precondition(lambda self: len(self.running) < WORKERS)
    @rule()
    def take(self) -> None:
        self.start(self.within(self.shards.take))

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 9))
    def hand_over(self, number: int) -> None:
        if self.running[number % len(self.running)].may_start:
            self.within(self.shards.hand_over, self.pick(number))

    @precondition(lambda self: len(self.running) < WORKERS)
    @rule()
    def recover(self) -> None:
        self.start(self.within(self.shards.take_handed_over))

    def pick(self, number: int) -> Delivery:
        return self.running.pop(number % len(self.running))

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 9))
    def succeed(self, number: int) -> None:
        delivery = self.pick(number)
        if delivery.epoch.complete(delivery):
            del self.alive[delivery]
        self.start(self.within(self.shards.next_after, delivery))

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 9))
    def cancelled(self, number: int) -> None:
        self.within(self.shards.again, self.pick(number))

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 9), halts=st.booleans())
    def fail(self, number: int, halts: bool) -> None:
        delivery = self.pick(number)
        if delivery.epoch.gate is Gate.ENDED:
            self.start(self.within(self.shards.next_after, delivery))
        elif halts:
            self.within(self.shards.block, delivery, BLOCK)
        else:
            self.within(self.shards.block, delivery, RETRY, 3600.0)

    @rule(number=st.integers(0, 9))
    def retry_is_due(self, number: int) -> None:
        waiting = [d for d, due in self.shards._blocked.items() if due is not None]
        if waiting:
            delivery = waiting[number % len(waiting)]
            self.shards._blocked[delivery].timer.cancel()  # type: ignore[union-attr]
            self.within(self.shards.unblock, delivery)

    @rule(number=st.integers(0, 2))
    def close(self, number: int) -> None:
        epoch = self.living(number, Gate.OPEN)
        if epoch is not None:
            epoch.close()
            self.shards.close(epoch)

    @rule(number=st.integers(0, 2))
    def reopen(self, number: int) -> None:
        epoch = self.living(number, Gate.CLOSED)
        if epoch is not None:
            epoch.stop_draining()
            epoch.open()
            self.within(self.shards.reopen, epoch)

    @rule(number=st.integers(0, 2), gate=st.sampled_from([Gate.OPEN, Gate.CLOSED]))
    def end(self, number: int, gate: Gate) -> None:
        epoch = self.living(number, gate)
        if epoch is not None and all(feeding.done() for feeding in self.feeding.values()):
            epoch.end()
            self.within(self.shards.purge, epoch)
            for delivery in [d for d in self.alive if d.epoch is epoch]:
                del self.alive[delivery]
            self.epochs.remove(epoch)
            self.add_partition()

    @rule()
    def run_dry(self) -> None:
        """Start every startable record; only blocked or closed ones remain: nothing is lost."""
        while self.running or self._startable():
            if self.running:
                self.succeed(0)
            else:
                self.take_when_fed()
                assert self.running, "I11: something may start and nothing does"
        for epoch in self.epochs:
            if epoch.gate is Gate.CLOSED:
                assert not epoch.pending, f"the drain waits for {epoch.pending}, which nothing will end"

    def take_when_fed(self) -> None:
        """Take; a bounded queue gets its next deliveries only after it gave some away."""
        for _ in range(len(self.alive) + 1):
            self.take()
            self.within(lambda: None)
            self.recover()
            if self.running:
                return

    def _startable(self) -> list[Delivery]:
        heads: dict[tuple[Epoch, object], Delivery] = {}
        for delivery in self.alive:
            shard = delivery if delivery.key is None else delivery.key
            head = heads.setdefault((delivery.epoch, shard), delivery)
            if delivery.offset < head.offset:
                heads[delivery.epoch, shard] = delivery
        blocked = {d if d.key is None else d.key for d in self.shards._blocked}
        return [
            d for (_, shard), d in heads.items() if shard not in blocked and (not d.epoch.gate or d.epoch.may_start(d))
        ]

    @invariant()
    def an_occupied_key_has_an_owner(self) -> None:
        returning = [entry[2] for entry in self.shards._returning]
        owners = [*self.running, *self.shards._blocked, *returning, *self.shards.handed_over]
        keys = [delivery.key for delivery in owners if delivery.key is not None]
        assert sorted(map(str, keys)) == sorted(map(str, self.shards._occupied))

    @invariant()
    def a_delivery_that_was_handed_over_has_not_ended(self) -> None:
        assert all(delivery in self.alive for delivery in self.shards.handed_over)


class FixedShardMachine(ShardsMachine):
    """One fixed shard: everything has one key, and the queue is bounded."""

    fixed = True

    @invariant()
    def the_queue_is_bounded(self) -> None:
        assert len(self.shards._arrivals) <= 4


TestShards = ShardsMachine.TestCase
TestShards.settings = settings(max_examples=max(SEEDS, 300), stateful_step_count=50, deadline=None)
TestFixedShard = FixedShardMachine.TestCase
TestFixedShard.settings = settings(max_examples=max(SEEDS, 60), stateful_step_count=50, deadline=None)
