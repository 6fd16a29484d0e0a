"""What remains of an epoch that has ended."""

import asyncio
import gc

from aioshard import App, Record
from aioshard.engine.epoch import Delivery
from aioshard.testing import InMemoryBroker, InMemoryTransport, run
from tests.engine.deliveries import add, make_epoch


def test_a_run_that_outlives_its_epoch_keeps_nothing_but_its_own_record_in_memory() -> None:
    """Else each time that the group drops us the whole buffer stays in memory, uncounted (I6)."""
    app = App("memory", auto_offset_reset="earliest", max_buffered_records=1000, shutdown_timeout=2.0)
    release = asyncio.Event()

    @app.consume("orders")
    async def handle(record: Record) -> None:  # noqa: ARG001
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async def test() -> None:
        broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
        for _ in range(600):
            broker.publish("orders", b"", key=b"hot")
        async with app.started(lambda: InMemoryTransport(broker, "memory")):
            await asyncio.sleep(5.0)
            broker.group("memory").lose()
            await asyncio.sleep(5.0)
            statistics = app.statistics()
            assert statistics.handlers[0].outliving == ("orders/0/0",)
            assert "Record orders/0/0 was cancelled" in app.explain()
            gc.collect()
            alive = [
                one
                for one in gc.get_objects()
                if isinstance(one, Delivery) and one.epoch.topic_partition[0] == "orders"
            ]
            release.set()
            await asyncio.sleep(1.0)
            assert len(alive) == statistics.buffered_records + 1

    run(test())


def test_only_what_had_started_counts_as_run_again() -> None:
    epoch, (complete, waiting, running) = make_epoch(["a", "b", "c"])
    (beyond,) = add(epoch, ["d"])
    for delivery in (complete, running):
        delivery.starts = 1
        epoch.highest_started = delivery.offset
    epoch.complete(complete)

    rerun = epoch.end()

    assert [rerun.counts(delivery.record) for delivery in (complete, waiting, running, beyond)] == [
        True,
        False,
        True,
        False,
    ]
