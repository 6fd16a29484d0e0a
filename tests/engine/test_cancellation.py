"""Cancelling the app at every await: nothing is lost, nothing is committed ahead."""

import asyncio
import itertools

import pytest

from aioshard import App, Record, Retry
from aioshard.errors import AioshardError
from aioshard.testing import InMemoryBroker, InMemoryTransport, run
from tests.simulation.world import SETTINGS

TOPIC, GROUP, RECORDS = "orders", "cancelled", 12


class Life:
    """One broker, and apps on it one after the other."""

    def __init__(self) -> None:
        self.broker = InMemoryBroker(partitions=2, clock=lambda: 0.0)
        self.done: set[tuple[int, int]] = set()
        for number in range(RECORDS):
            self.broker.publish(TOPIC, b"", key=b"k%d" % (number % 3))

    def app(self) -> App:
        app = App(GROUP, **{**SETTINGS, "start_timeout": 10.0})

        @app.consume(TOPIC, concurrency=2, retry=Retry(initial=0.1, jitter=0.0))
        async def handle(record: Record) -> None:
            await asyncio.sleep(0.05)
            if record.offset == 2 and (record.partition, -1) not in self.done:
                self.done.add((record.partition, -1))
                message = "the first attempt fails"
                raise ValueError(message)
            self.done.add((record.partition, record.offset))

        return app

    async def serve(self) -> None:
        app = self.app()

        def latency(_: str) -> float:
            return 0.01

        async with app.started(lambda: InMemoryTransport(self.broker, GROUP, latency=latency)):
            self.broker.group(GROUP).rebalance()
            await self.broker.until(self.finished)

    def finished(self) -> bool:
        ends = {partition: self.broker.log(TOPIC, partition).end for partition in range(2)}
        return all(self.broker.committed(GROUP, TOPIC, partition) == end for partition, end in ends.items())

    def published(self) -> set[tuple[int, int]]:
        return {(record.partition, record.offset) for record in self.broker.records(TOPIC)}

    def check_never_ahead(self) -> None:
        for partition in range(2):
            for offset in range(self.broker.committed(GROUP, TOPIC, partition) or 0):
                assert (partition, offset) in self.done, f"committed past {partition}/{offset}"


def cancel_at(step: int) -> bool:
    """Cancel the app after that many steps of the loop; False when it had ended before."""
    life = Life()
    steps = itertools.count()
    serving: list[asyncio.Task[None]] = []
    cancelled: list[bool] = []

    def on_step() -> None:
        life.check_never_ahead()
        if next(steps) == step and serving and not serving[0].done():
            cancelled.append(serving[0].cancel())

    async def live() -> None:
        serving.append(asyncio.create_task(life.serve(), name="first life"))
        await asyncio.wait(serving)
        if not serving[0].cancelled():
            try:
                serving[0].result()
            except AioshardError:
                assert cancelled, "the app failed although nobody had cancelled it"
        left = [task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}]
        assert not left, f"these tasks outlive the app: {left}"
        await life.serve()
        assert {key for key in life.done if key[1] >= 0} == life.published()

    run(live(), on_step=on_step)
    return bool(cancelled)


@pytest.mark.slow
def test_a_cancelled_app_leaves_its_records_to_the_next_member() -> None:
    """A cancel at each step: while it joins, fetches, runs handlers, retries, commits, rebalances and stops."""
    points = 0
    for step in itertools.count(3):
        if not cancel_at(step):
            break
        points += 1

    assert points > 100
