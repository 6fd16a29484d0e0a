"""Generated journals: rows from plain values or from a seed, as Parquet."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from aioshard.core.sharding import key_hash, shard_of_hash
from aioshard.telemetry.journal import SCHEMA

BEGIN = 1_700_000_000.0


@dataclasses.dataclass(kw_only=True)
class Row:
    """One row; moments in seconds since the epoch."""

    topic: str = "orders"
    partition: int = 0
    offset: int = 0
    handler: str = "on_order"
    status: str = "processed"
    attempts: int = 1
    error_type: str | None = None
    error: str | None = None
    timestamp: float = BEGIN
    arrived: float = BEGIN
    started: float | None = BEGIN
    duration: float | None = 0.01
    shard: int | None = None
    key_hash: int | None = None
    key: bytes | None = None
    result: bytes | None = None


def rebalance(after: float, seconds: float, cause: str) -> Row:
    """The row of a rebalance that began *after* seconds after `BEGIN`."""
    nothing: Any = None
    return Row(
        topic=nothing,
        partition=nothing,
        offset=nothing,
        handler=nothing,
        status="rebalance",
        attempts=4,
        error_type="revoked",
        error=cause,
        timestamp=nothing,
        arrived=BEGIN + after,
        started=BEGIN + after,
        duration=seconds,
    )


def seeded_rows(
    seed: int,
    count: int,
    *,
    keys: int = 50,
    partitions: int = 4,
    rate: float | None = None,
    show_keys: bool = False,
    without_key: float = 0.1,
    shards: int | None = None,
) -> list[Row]:
    """Rows of records as they come in; each starts when it arrived, as with unlimited workers.

    Args:
        seed: The same seed gives the same rows.
        count: How many.
        keys: How many keys, a few of them hot.
        partitions: How many.
        rate: Records per second; None is a backlog.
        show_keys: Whether the rows have keys.
        without_key: Share of the records that have none.
        shards: Of a handler with fixed shards; None is on demand.
    """
    chance = random.Random(seed)
    weights = [1 / (number + 1) for number in range(keys)]
    offsets = [0] * partitions
    rows = []
    moment = BEGIN
    for number in range(count):
        key = None if chance.random() < without_key else b"key-%d" % chance.choices(range(keys), weights)[0]
        hashed = key_hash(key)
        partition = number % partitions if hashed is None else hashed % partitions
        if rate is not None:
            moment = round(moment + chance.expovariate(rate), 6)
        shard = hashed
        if shards is not None:
            shard = number % shards if hashed is None else shard_of_hash(hashed, shards)
        row = Row(
            partition=partition,
            offset=offsets[partition],
            timestamp=moment,
            arrived=moment,
            started=moment,
            duration=round(chance.lognormvariate(-4.5, 1.0), 6),
            shard=shard,
            key_hash=hashed,
            key=key if show_keys else None,
        )
        offsets[partition] += 1
        rows.append(row)
    return rows


def write_journal(directory: Path, rows: Sequence[Row], *, member: str = "shop-host-1", number: int = 0) -> Path:
    """Write one file of a journal and return its directory.

    Args:
        directory: Made where it is missing.
        rows: Its rows.
        member: As it stands in the file's name.
        number: Of the file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([dataclasses.asdict(row) for row in rows], SCHEMA)
    pq.write_table(table, directory / f"20261101T00000{number}.000000Z-{member}-0000000{number}.parquet")
    return directory
