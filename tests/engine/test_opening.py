"""Many partitions are opened together: other tasks run in between, and a lost membership is noticed."""

import asyncio
from itertools import pairwise

from aioshard import App, Record
from aioshard.ports import NOT_A_MEMBER
from aioshard.testing import InMemoryBroker, InMemoryTransport, run
from tests.engine.live_apps import engine_of

PARTITIONS = 250
AT_MOST = 100
"""How many are opened in one turn of the event loop."""


def open_partitions(*, lose_after: int = PARTITIONS) -> list[int]:
    """Return how many partitions were open after each turn; the membership ends once *lose_after* are."""
    opened = [0]

    async def live() -> None:
        broker = InMemoryBroker(clock=lambda: 0.0)
        broker.create_topic("orders", PARTITIONS)
        app = App("group", auto_offset_reset="earliest", start_timeout=None)

        @app.consume("orders")
        async def handle(record: Record) -> None: ...

        transport = InMemoryTransport(broker, "group")
        async with app.started(lambda: transport):
            rebalance = engine_of(app).rebalance
            while not rebalance._opening:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0)
            while not rebalance._opening.done():
                await asyncio.sleep(0)
                opened.append(sum(partition.is_open for partition in rebalance.partitions))
                if opened[-1] >= lose_after:
                    transport._membership = NOT_A_MEMBER
                    await asyncio.sleep(60.0)
                    opened.append(sum(partition.is_open for partition in rebalance.partitions))
                    break

    run(live())
    return opened


def test_other_tasks_run_while_many_partitions_are_opened() -> None:
    opened = open_partitions()

    assert opened[-1] == PARTITIONS
    assert max(after - before for before, after in pairwise(opened)) <= AT_MOST


def test_no_partition_is_opened_after_the_membership_has_ended() -> None:
    opened = open_partitions(lose_after=1)

    assert 0 < opened[-1] <= AT_MOST
