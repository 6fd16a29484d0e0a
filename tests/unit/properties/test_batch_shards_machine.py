"""Batch shards against a naive model: any number of workers, failures and rebalances."""

import asyncio
from collections.abc import Iterable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioshard.core.options import Batch
from aioshard.engine.batch_shards import BatchShards
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.outcomes import Block, Outcome, Recovery
from aioshard.engine.shards import DeliveryBatch
from aioshard.ports import RECORD_OVERHEAD, FetchedBatch
from aioshard.records import Record, TopicPartition
from tests.engine.deliveries import make_buffer
from tests.simulation.seeds import SEEDS

WORKERS = 3
ATTEMPTS = 4
BATCH = Batch(max_records=9, linger=1e9, max_bytes=12)
KEYS = st.sampled_from(["a", "b", "c", None])
BLOCK = Block(halted=True, error="ValueError", since=0.0)
RETRY = BLOCK._replace(halted=False)
NUMBER = st.integers(0, 9)
CHOICE = st.integers(0, 2**12 - 1)


async def _recover(_delivery: Delivery) -> Outcome:
    return Outcome.SKIPPED


RECOVERY = Recovery("it is skipped", _recover)


def chosen(deliveries: Iterable[Delivery], choice: int) -> list[Delivery]:
    """Some of them, by the bits of a number."""
    return [delivery for number, delivery in enumerate(deliveries) if choice >> number & 1]


class BatchShardsMachine(RuleBasedStateMachine):
    """The model knows, for each epoch, which of its records have not ended, and applies the rule of order.

    A worker is an entry in `running`. Timers are fired by rules, not by time.
    """

    fixed = False

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.shards = BatchShards(BATCH, ATTEMPTS, 4 if self.fixed else None)
        self.buffer = make_buffer(10**6, 10**9)
        self.epochs: list[Epoch] = []
        self.running: list[DeliveryBatch] = []
        self.alive: dict[Delivery, None] = {}
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

    @rule(number=NUMBER, keys=st.lists(st.tuples(KEYS, st.sampled_from([1, 1, 4, 20])), min_size=1, max_size=6))
    def arrive(self, number: int, keys: list[tuple[str | None, int]]) -> None:
        epoch = self.living(number, Gate.OPEN)
        if epoch is None or (epoch in self.feeding and not self.feeding[epoch].done()):
            return
        position = epoch.tracker.position
        tp = epoch.topic_partition
        records = [Record(*tp, position + n, None, None, (), 0.0) for n in range(len(keys))]
        deliveries = []
        for record, (key, size) in zip(records, keys, strict=True):
            self.arrived += 1
            shard = 7 if self.fixed else key
            deliveries.append(Delivery(record, epoch, shard, size + RECORD_OVERHEAD, self.arrived))
        sizes = [delivery.size for delivery in deliveries]
        epoch.take_in(FetchedBatch(tp, records, sizes, position + len(keys)), deliveries)
        self.alive.update(dict.fromkeys(deliveries))
        self.feeding[epoch] = self.loop.create_task(self.shards.put(deliveries))
        self.within(lambda: None)

    # Running ------------------------------------------------------------------

    @precondition(lambda self: len(self.running) < WORKERS)
    @rule()
    def take(self) -> None:
        batch = self.within(self.shards.take_batch)
        if batch is not None:
            self.start(batch)

    @precondition(lambda self: len(self.running) < WORKERS)
    @rule(choice=CHOICE)
    def take_and_leave_out(self, choice: int) -> None:
        """Some of what comes next is diverted when it is looked at."""
        batch = self.within(self.shards.take_batch)
        if batch is None:
            return
        diverted = chosen(batch.deliveries, choice)
        for delivery in diverted:
            delivery.divert(RECOVERY)
        if len(batch.deliveries) > 1:
            ready: list[Delivery] = []
            blocked: set[object] = set()
            for delivery in batch.deliveries:
                if delivery in diverted or delivery.key in blocked:
                    batch.left_out.append(delivery)
                    blocked |= {delivery.key} - {None}
                else:
                    ready.append(delivery)
            batch.deliveries = ready
        if batch.deliveries:
            self.start(batch)
        else:
            self.finish(batch, [])

    def start(self, batch: DeliveryBatch) -> None:
        deliveries = batch.deliveries
        failures = deliveries[0].failures
        assert {delivery.failures for delivery in deliveries} == {failures}
        alone = any(delivery.recovery is not None for delivery in deliveries)
        assert len(deliveries) <= (1 if alone else BATCH.size_after(failures, ATTEMPTS))
        size = sum(delivery.size - RECORD_OVERHEAD for delivery in deliveries)
        assert len(deliveries) == 1 or size <= BATCH.max_bytes
        before: set[Delivery] = set()
        for delivery in deliveries:
            self.check_start(delivery, before)
            before.add(delivery)
            delivery.epoch.highest_started = max(delivery.epoch.highest_started, delivery.offset)
            delivery.starts += 1
            if delivery.recovery is None:
                delivery.begin_attempt()
        self.running.append(batch)

    def check_start(self, delivery: Delivery, before: set[Delivery]) -> None:
        assert delivery in self.alive
        assert not delivery.epoch.gate or delivery.epoch.may_start(delivery)
        if delivery.key is not None:
            others = {other.key for batch in self.running for other in [*batch.deliveries, *batch.left_out]}
            assert delivery.key not in others, "I4: two batches have a key concurrently"
            for other in self.alive:
                if other.epoch is delivery.epoch and other.key == delivery.key and other.offset < delivery.offset:
                    assert other in before, "I4: an earlier one of its key has not ended"

    def pick(self, number: int) -> DeliveryBatch:
        return self.running.pop(number % len(self.running))

    def complete(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            if delivery.epoch.complete(delivery):
                del self.alive[delivery]

    @precondition(lambda self: self.running)
    @rule(number=NUMBER)
    def succeed(self, number: int) -> None:
        batch = self.pick(number)
        self.complete(batch.deliveries)
        assert self.finish(batch, []) == []

    def finish(self, batch: DeliveryBatch, failed: list[Delivery]) -> list[Delivery]:
        left_out = [delivery for delivery in batch.left_out if delivery.epoch.gate is not Gate.ENDED]

        def end() -> list[Delivery]:
            """As a worker does."""
            heads = self.shards.end(batch, [*failed, *left_out])
            for head in heads:
                if head not in failed:
                    self.shards.resume(head)
            return [head for head in heads if head in failed]

        heads: list[Delivery] = self.within(end)
        return heads

    @precondition(lambda self: self.running)
    @rule(number=NUMBER, choice=CHOICE, what=st.sampled_from(["retry", "halt", "recovery"]))
    def fail(self, number: int, choice: int, what: str) -> None:
        batch = self.pick(number)
        failed = [d for d in chosen(batch.deliveries, choice) if d.epoch.gate is not Gate.ENDED]
        self.complete(d for d in batch.deliveries if d not in failed)
        for delivery in failed:
            delivery.fail(ValueError(), 0)
            delivery.withdraw_recovery()
        heads = self.finish(batch, failed)
        firsts = {delivery.key: delivery for delivery in reversed(failed) if delivery.key is not None}
        assert set(heads) == {d for d in failed if d.key is None} | set(firsts.values())
        for head in heads:
            match what:
                case "retry":
                    self.within(self.shards.block, head, RETRY, 3600.0)
                case "halt":
                    self.within(self.shards.block, head, BLOCK)
                case _:
                    head.divert(RECOVERY)
                    self.within(self.shards.resume, head)

    @precondition(lambda self: self.running)
    @rule(number=NUMBER)
    def cancelled(self, number: int) -> None:
        self.within(self.shards.put_back, self.pick(number))

    # Time -----------------------------------------------------------------------

    @rule(number=NUMBER)
    def retry_is_due(self, number: int) -> None:
        waiting = [d for d, due in self.shards._blocked.items() if due is not None]
        if waiting:
            delivery = waiting[number % len(waiting)]
            self.shards._blocked[delivery].timer.cancel()  # type: ignore[union-attr]
            self.within(self.shards.unblock, delivery)

    @rule()
    def linger_is_over(self) -> None:
        for batch in list(self.shards._forming.values()):
            self.within(self.shards._mark_overdue, batch)

    @rule()
    def no_room(self) -> None:
        self.within(self.shards.no_room)
        if not self.running:
            assert all(batch.overdue for batch in self.shards._forming.values())

    # Rebalances -------------------------------------------------------------------

    @rule(number=NUMBER)
    def close(self, number: int) -> None:
        epoch = self.living(number, Gate.OPEN)
        if epoch is not None:
            epoch.close()
            self.within(self.shards.close, epoch)
            revoked = {batch.revoked.is_set() for batch in self.running if epoch in {d.epoch for d in batch.deliveries}}
            assert revoked <= {True}

    @rule(number=NUMBER)
    def reopen(self, number: int) -> None:
        epoch = self.living(number, Gate.CLOSED)
        if epoch is not None:
            epoch.stop_draining()
            epoch.open()
            self.within(self.shards.reopen, epoch)

    @rule(number=NUMBER)
    def pause(self, number: int) -> None:
        epoch = self.living(number, Gate.OPEN)
        if epoch is not None:
            epoch.pause("test", "the test says so")

    @rule(number=NUMBER)
    def resume(self, number: int) -> None:
        epoch = self.living(number, Gate.PAUSED)
        if epoch is not None:
            assert epoch.resume("test")
            self.within(self.shards.reopen, epoch)

    @rule(number=NUMBER, gate=st.sampled_from([Gate.OPEN, Gate.CLOSED, Gate.PAUSED]))
    def end(self, number: int, gate: Gate) -> None:
        epoch = self.living(number, gate)
        if epoch is not None and all(feeding.done() for feeding in self.feeding.values()):
            epoch.end()
            self.within(self.shards.purge, epoch)
            for delivery in [d for d in self.alive if d.epoch is epoch]:
                del self.alive[delivery]
            self.epochs.remove(epoch)
            self.add_partition()

    @rule(number=NUMBER, gate=st.sampled_from([Gate.OPEN, Gate.PAUSED]), first=st.integers(0, 5))
    def give_back(self, number: int, gate: Gate, first: int) -> None:
        epoch = self.living(number, gate)
        if epoch is None or not all(feeding.done() for feeding in self.feeding.values()):
            return
        offsets = [delivery.offset for delivery in self.alive if delivery.epoch is epoch]
        if not offsets:
            return
        first += min(offsets)
        in_hand = {delivery for batch in self.running for delivery in [*batch.deliveries, *batch.left_out]}
        in_hand |= set(self.shards._blocked) | {entry[2] for entry in self.shards._returning}
        expected = {d for d in self.alive if d.epoch is epoch and d.offset >= first and d not in in_hand}
        given_back = self.within(self.shards.evict, epoch, first)
        assert set(given_back) == expected
        assert len(given_back) == len(expected)
        for delivery in given_back:
            del self.alive[delivery]
            epoch.tracker.complete(delivery.offset)

    # Invariants ----------------------------------------------------------------------

    @rule()
    def run_dry(self) -> None:
        """Start every startable record; only blocked or closed ones remain: nothing is lost."""
        while self.running or self._startable():
            if self.running:
                self.succeed(0)
            else:
                self.take_when_fed()
                assert self.running, "I11: something may start and nothing does"
        self.linger_is_over()
        self.take()
        assert not self.running
        assert not self.shards._forming, "what may not start stays in a batch"
        for epoch in self.epochs:
            if epoch.gate is Gate.CLOSED:
                assert not epoch.pending, f"the drain waits for {epoch.pending}, which nothing will end"

    def take_when_fed(self) -> None:
        """Take; a bounded queue gets its next deliveries only after it gave some away."""
        for _ in range(len(self.alive) + 1):
            self.take()
            self.within(lambda: None)
            if self.running:
                return
            self.linger_is_over()

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

    @rule()
    def a_drain_is_not_delayed(self) -> None:
        """While a partition drains, all that may start is ready: without a linger, it waits only for a free worker."""
        if self.shards._drains and len(self.running) < WORKERS:
            self.take()
            assert self.shards._ready() is not None or not self.shards._forming

    @invariant()
    def an_occupied_key_has_an_owner(self) -> None:
        owners = [*self.shards._blocked, *(entry[2] for entry in self.shards._returning)]
        keys = [delivery.key for delivery in owners if delivery.key is not None]
        for batch in [*self.running, *self.shards._forming.values()]:
            assert set(batch.keys) == {d.key for d in [*batch.deliveries, *batch.left_out] if d.key is not None}
            keys += batch.keys
        assert sorted(map(str, keys)) == sorted(map(str, self.shards._occupied))

    @invariant()
    def what_is_running_is_known(self) -> None:
        assert self.shards._running == set(self.running)


class FixedBatchShardMachine(BatchShardsMachine):
    """One fixed shard: everything has one key, and the queue is bounded."""

    fixed = True

    @invariant()
    def the_queue_is_bounded(self) -> None:
        assert len(self.shards._arrivals) <= 4


TestBatchShards = BatchShardsMachine.TestCase
TestBatchShards.settings = settings(max_examples=max(SEEDS, 80), stateful_step_count=50, deadline=None)
TestFixedBatchShard = FixedBatchShardMachine.TestCase
TestFixedBatchShard.settings = settings(max_examples=max(SEEDS, 60), stateful_step_count=50, deadline=None)
