"""Exactly-once processing with brokers that store less text with a commit than it takes to list all completions."""

import asyncio
import contextlib
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import pytest

from aioshard import App, Batch, BatchContext, Context, Record
from aioshard.errors import MetadataRefusedError
from aioshard.ports import Committed, Membership, Message
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryProducer, InMemoryTransport, run
from tests.engine.live_apps import engine_of, until

ORDERS = TopicPartition("orders", 0)
SLOW = 7
"""The offset of the first record that hangs until it is released."""
MANY = frozenset({SLOW, *random.Random(7).sample(range(SLOW, 1_000), 250)})
"""Enough hanging records for a long text."""


class StrictBroker(InMemoryBroker):
    """Refuses commits whose text is longer than `offset.metadata.max.bytes` allows."""

    def __init__(self, most: int) -> None:
        super().__init__(partitions=1, clock=lambda: 0.0)
        self.most = most
        self.refused = 0

    def commit(
        self,
        group_id: str,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: Iterable[Message] = (),
    ) -> None:
        if any(len(committed.metadata) > self.most for committed in offsets.values()):
            self.refused += 1
            raise MetadataRefusedError("the text is too long")
        super().commit(group_id, offsets, membership, messages)

    def publish_orders(self, count: int) -> None:
        for _ in range(count):
            number = self.log("orders", 0).end if "orders" in self.topics() else 0
            self.publish("orders", b"%d" % number, key=b"%d" % (number % 333))


class Deployment:
    """Processes that come one after the other on one partition, and end like after `kill -9`."""

    def __init__(self, most: int, *, hanging: frozenset[int] = MANY, batch: Batch | None = None, seed: int = 0) -> None:
        self.broker = StrictBroker(most)
        self.hanging = hanging
        self.released = asyncio.Event()
        self._batch = batch
        self._chance = random.Random(seed)

    def app(self) -> App:
        app = App(
            "billing",
            processing_guarantee="exactly_once",
            auto_offset_reset="earliest",
            commit_interval=0.05,
            drain_timeout=0.5,
            shutdown_timeout=1.0,
        )

        async def work(records: Sequence[Record], context: Context | BatchContext) -> None:
            await asyncio.sleep(self._chance.random())
            if any(record.offset in self.hanging for record in records):
                await self.released.wait()
            for record in records:
                await context.publish("out", record.value, key=record.key)

        if self._batch is None:

            @app.consume("orders", concurrency=500)
            async def on_order(record: Record, context: Context) -> None:
                await work([record], context)

        else:

            @app.consume("orders", concurrency=500, batch=self._batch)
            async def on_orders(records: list[Record], context: BatchContext) -> None:
                await work(records, context)

        return app

    @contextlib.asynccontextmanager
    async def process(self, app: App, transports: list[InMemoryTransport]) -> AsyncIterator[None]:
        def transport() -> InMemoryTransport:
            transports.append(InMemoryTransport(self.broker, "billing"))
            return transports[-1]

        async with app.started(transport, lambda: InMemoryProducer(self.broker)):
            yield

    async def crash_after(self, seconds: float) -> None:
        """Run a process for a while; then nothing of it reaches the broker any more."""
        transports: list[InMemoryTransport] = []
        with contextlib.suppress(Exception):  # it cannot stop cleanly
            async with self.process(self.app(), transports):
                await asyncio.sleep(seconds)
                for each in transports:
                    each.crash()
        assert transports
        self.broker.group("billing").lose()

    async def finish(self) -> None:
        """Release the slow record, and run a process until everything is committed."""
        self.released.set()
        async with self.process(self.app(), []):
            end = self.broker.log("orders", 0).end
            await until(lambda: self.broker.committed("billing", "orders", 0) == end)

    @property
    def visible(self) -> list[Record]:
        return list(self.broker.records("out")) if "out" in self.broker.topics() else []

    def check(self) -> None:
        """Every output is visible exactly once, and those of a key are in order."""
        end = self.broker.log("orders", 0).end
        assert Counter(int(record.value or b"") for record in self.visible) == Counter(range(end))
        by_key = defaultdict(list)
        for record in self.visible:
            by_key[record.key].append(int(record.value or b""))
        assert all(numbers == sorted(numbers) for numbers in by_key.values())


@pytest.mark.parametrize("most", [0, 40, 60, 4096])
@pytest.mark.parametrize("batch", [None, Batch(max_records=5, linger=0.2)], ids=["records", "batches"])
def test_outputs_are_visible_once_after_crashes_whatever_the_broker_stores(most: int, batch: Batch | None) -> None:
    async def test() -> None:
        world = Deployment(most, batch=batch, seed=most)
        for _ in range(4):
            world.broker.publish_orders(200)
            await world.crash_after(20.0)
        assert (world.broker.committed("billing", "orders", 0) or 0) <= SLOW
        await world.finish()
        world.check()
        assert bool(world.broker.refused) == (most < 4096), "the situation of this test"

    run(test())


def test_outputs_that_no_text_lists_wait_for_the_record_before_them() -> None:
    async def test() -> None:
        world = Deployment(0, hanging=frozenset({SLOW}))
        world.broker.publish_orders(300)
        app = world.app()
        async with world.process(app, []):
            await until(lambda: app.statistics().handlers[0].processed >= 290)
            await asyncio.sleep(5.0)
            assert engine_of(app).committer.metadata_limit == 0
            assert {int(record.value or b"") for record in world.visible} == set(range(SLOW))
            (waiting,) = (finding for finding in app.diagnose().partitions[0].findings if finding.kind == "outputs")
            assert waiting.sentence.startswith("the outputs of 292 finished runs are not published yet")
            requests = app.statistics().commits
            await asyncio.sleep(60.0)
            assert app.statistics().commits == requests, "nothing can be committed, so no transaction begins"
            world.released.set()
            await until(lambda: world.broker.committed("billing", "orders", 0) == 300)
            assert not [finding for finding in app.diagnose().partitions[0].findings if finding.kind == "outputs"]
        world.check()

    run(test())


def test_a_text_that_was_stored_once_can_be_stored_again() -> None:
    """After a refusal nothing is listed, except that what is published must stay listed."""

    async def test() -> None:
        world = Deployment(60)
        world.broker.publish_orders(30)
        await world.crash_after(10.0)
        listed = set(range(30)) - MANY
        assert {int(record.value or b"") for record in world.visible} == listed
        world.broker.publish_orders(900)
        app = world.app()
        async with world.process(app, []):
            await until(lambda: engine_of(app).committer.metadata_limit == 0)
            world.hanging = MANY - set(range(SLOW + 1))
            world.released.set()
            world.released.clear()
            await until(lambda: (world.broker.committed("billing", "orders", 0) or 0) > SLOW)
            stored = world.broker.group("billing").committed(ORDERS)
            assert stored is not None
            assert stored.metadata
            world.released.set()
            await until(lambda: world.broker.committed("billing", "orders", 0) == 930)
        world.check()

    run(test())


def test_a_broker_that_stores_less_than_before_holds_the_commit_back() -> None:
    async def test() -> None:
        world = Deployment(4096, hanging=frozenset({SLOW}))
        world.broker.publish_orders(100)
        await world.crash_after(10.0)
        assert len(world.visible) == 99
        world.broker.most = 0
        world.broker.publish_orders(100)
        await world.crash_after(40.0)
        assert len(world.visible) == 99, "a text that leaves them out would double them"
        await world.finish()
        world.check()

    run(test())


def test_waiting_outputs_do_not_keep_the_records_from_being_fetched_for_which_they_wait() -> None:
    """The outputs fill the memory; the evicted records before them must come back all the same (I11)."""
    app = App(
        "billing",
        processing_guarantee="exactly_once",
        auto_offset_reset="earliest",
        commit_interval=0.05,
        stuck_after=5.0,
        max_buffered_records=1000,
        max_buffered_bytes=2_000_000,
    )

    @app.consume("orders", concurrency=200)
    async def on_order(record: Record, context: Context) -> None:
        await asyncio.sleep(30.0 if record.offset == 0 else 0.5)
        await context.publish("out", b"%d:" % record.offset + bytes(5_000))

    async def test() -> None:
        broker = StrictBroker(0)
        broker.create_topic("orders", 1)
        for number in range(1_000):
            key = b"slow" if number % 4 == 0 and number < 400 else b"%d" % number
            broker.publish("orders", b"", key=key)
        async with (
            app.started(lambda: InMemoryTransport(broker, app.group_id), lambda: InMemoryProducer(broker)),
            asyncio.timeout(600.0),
        ):
            await broker.until(lambda: broker.committed(app.group_id, "orders", 0) == 1_000)

    run(test())
