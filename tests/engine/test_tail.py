"""A lopsided backlog is reported with its partitions and an estimate of the end."""

import asyncio

import pytest

from aioshard import App, Record
from aioshard.testing import InMemoryBroker, TestClient, run


@pytest.mark.slow
def test_lag_concentrated_in_few_partitions_is_a_finding_with_an_estimate() -> None:
    async def life() -> None:
        app = App("orders", commit_interval=0.5)

        @app.consume("orders", shard_by="partition")
        async def handle(_: Record) -> None:
            await asyncio.sleep(0.1)

        async with TestClient(app, broker=InMemoryBroker(partitions=8)) as client:
            for number in range(3_000):
                await client.publish("orders", b"x", partition=0 if number % 100 else number // 100 % 8)
            await asyncio.sleep(70.0)

            (finding,) = [finding for finding in app.diagnose().findings if finding.kind == "tail"]
            statistics = app.statistics()
            lag = sum(partition.lag or 0 for partition in statistics.partitions)
            assert "90% of the lag is in 1 of 8 partitions; the last is done in" in finding.sentence
            assert statistics.catch_up_seconds is not None
            assert abs(statistics.catch_up_seconds - lag / 10) < 0.1 * lag / 10, "ten a second"
            await asyncio.sleep(400.0)

            assert app.statistics().catch_up_seconds == 0.0
            assert not [finding for finding in app.diagnose().findings if finding.kind == "tail"]

    run(life())
