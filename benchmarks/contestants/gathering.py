"""The usual way on Spark: `asyncio.gather` over one Arrow batch after the other."""

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from aioshard.loops import loop_factory
from benchmarks.contestants.history_app import handler

COLUMNS = "partition int, offset long, result binary"


class Row(NamedTuple):
    """The part of a record that the handler gets."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


class Gathering:
    """A function for `mapInArrow`: gathers the handler over each batch of rows, with limited concurrency.

    It is as quick as possible: one event loop for the whole task, of the same kind as ours, and no bookkeeping.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield which records were processed."""
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            for batch in rows:
                columns = (batch.column(name).to_pylist() for name in Row._fields)
                results = runner.run(self._gather(list(map(Row, *columns))))
                kept = [batch.column("partition"), batch.column("offset"), pa.array(results, pa.binary())]
                yield pa.RecordBatch.from_arrays(kept, names=["partition", "offset", "result"])

    async def _gather(self, rows: list[Row]) -> list[None]:
        free = asyncio.Semaphore(self._at_once)

        async def run(row: Row) -> None:
            async with free:
                await handler(row)

        return await asyncio.gather(*map(run, rows))
