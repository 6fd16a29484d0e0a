"""Unusable shard keys: an outcome for their record, no effect on others."""

import asyncio
from typing import Any

import pytest

from aioshard import App, DeadLetter, Park, Record, Retry
from aioshard.core.options import OnFailure
from aioshard.serde.side_records import ParkedRecord, read_parked
from aioshard.testing import TestClient, run

PARKED = "orders.parked"


class Incomparable:
    """A key that cannot be compared with another one; all of them have the same hash."""

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("this key cannot be compared")


def app_with(key: Any, on_failure: OnFailure, shards: int | None, log: list[int]) -> App:
    app = App("keys", commit_interval=0.1)

    @app.consume(
        "orders",
        shards=shards,
        retry=Retry(attempts=1),
        on_failure=on_failure,
        shard_by=lambda record: key() if record.value == b"odd" else record.key,
    )
    async def handle(record: Record) -> None:
        await asyncio.sleep(0.01)
        log.append(record.offset)

    return app


@pytest.mark.parametrize("shards", [None, 3])
@pytest.mark.parametrize("on_failure", ["skip", DeadLetter("d"), Park(PARKED, delay=100.0)], ids=str)
def test_a_key_that_cannot_be_compared_fails_its_own_record(on_failure: OnFailure, shards: int | None) -> None:
    log: list[int] = []
    app = app_with(Incomparable, on_failure, shards, log)

    async def test() -> None:
        async with TestClient(app) as client:
            for number in range(12):
                await client.publish("orders", b"odd" if number % 3 == 1 else b"", key=str(number % 2), partition=0)
            await client.settle(timeout=30.0)
            assert client.committed("orders", 0) == 12
            assert app.statistics().state == "running"

    run(test())

    assert sorted(log) == [0, 2, 3, 5, 6, 8, 9, 11]


def test_a_parked_record_without_a_fixed_shard_is_retried_alone() -> None:
    log: list[int] = []
    app = app_with(lambda: 1.5, Park(PARKED, delay=5.0), 3, log)

    async def test() -> None:
        async with TestClient(app) as client:
            for number in range(4):
                await client.publish("orders", b"odd" if number % 2 else b"", key=b"k", partition=0)
            await client.settle(timeout=30.0)
            parked = [read_parked(record) for record in client.records(PARKED)]
            assert sorted(record.coordinates.offset for record in parked if isinstance(record, ParkedRecord)) == [1, 3]
            async with asyncio.timeout(60.0):
                while len(log) < 4:  # noqa: ASYNC110 - virtual time, and nothing tells
                    await asyncio.sleep(0.1)
            assert app.statistics().state == "running"

    run(test())

    assert sorted(log) == [0, 1, 2, 3]
