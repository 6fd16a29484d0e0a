"""A backfill of one topic on a real broker: planned, drained and inspected. Spark runs in a thread."""

import asyncio
import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from aioshard import spark as history
from aioshard.spark.plans import Plan
from aioshard.spark.runs import RunStatus
from aioshard.spark.runs import run as run_plan
from aioshard.spark.verification import Verification, verify
from tests.spark.apps import AppModule
from tests.support.brokers import SharedKafka

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclasses.dataclass(frozen=True)
class HistoryRun:
    """A run in a directory."""

    spark: "SparkSession"
    kafka: SharedKafka
    topic: str
    app: AppModule
    directory: Path

    async def plan(self, **options: Any) -> Plan:
        """Plans from the start of the log on."""
        return await history.plan(self.app.target, directory=self.directory, **{"start": "earliest"} | options)

    async def drain(self, **options: Any) -> RunStatus:
        """Runs the handlers up to the end."""
        return await asyncio.to_thread(run_plan, self.spark, self.directory, **options)

    async def verify(self) -> Verification:
        """Compares with the log."""
        return await asyncio.to_thread(verify, self.spark, self.directory)

    def copied(self, directory: Path) -> "HistoryRun":
        """The same run in another directory, as far as it is; a test may spoil that one."""
        shutil.copytree(self.directory, directory)
        return dataclasses.replace(self, directory=directory)

    def outcome_files(self) -> list[Path]:
        """Files with rows, those of the first batch first."""
        files = sorted(self.directory.glob("outcomes/batch=*/*.parquet"))
        return [file for file in files if pq.read_metadata(file).num_rows]

    def rows(self) -> list[dict[str, Any]]:
        """All outcome rows, by partition and offset, as a reader without Spark sees them."""
        rows: list[dict[str, Any]] = pq.read_table(self.directory / "outcomes").to_pylist()
        return sorted(rows, key=lambda row: (row["partition"], row["offset"]))
