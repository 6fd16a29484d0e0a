"""Outcomes of a run into a table of a database, each record's row once however often it is written."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from aioshard.errors import PlanError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["COLUMNS", "KEY", "PostgresqlTable"]

KEY = ("topic", "partition", "offset")
COLUMNS = (*KEY, "key", "status", "attempts", "error_type", "error", "started", "duration", "result", "handler")
"""Of the outcome rows, in a table that says nothing else."""

_STAGE = "aioshard_stage"


@dataclasses.dataclass(frozen=True, slots=True)
class PostgresqlTable:
    """Writes the outcomes of each micro-batch into a PostgreSQL table; for `foreach` of `drain` and `follow`.

    Each task copies its rows into a temporary table and merges that into the table, in one transaction: `INSERT … ON
    CONFLICT (topic, partition, offset) DO UPDATE`. What a crash writes twice is there once, and rows of a later run,
    with a corrected handler, take the place of those before.

    The table has to exist, with a unique index of `topic`, `partition` and `offset`.

    Attributes:
        connect: Makes a connection of psycopg 3; called in the tasks, so that its password can come from their
            environment.
        table: The table's name, or `schema.table`.
        columns: What of the rows is written; the table's columns have the same names.
        update: Whether a later row takes the place of one that is there; else the first one stays.

    Example:
        ```python
        table = PostgresqlTable(lambda: psycopg.connect(os.environ["DATABASE_URL"]), "outcomes")
        drain(spark, "runs/7", foreach=table)
        ```
    """

    connect: Callable[[], Any]
    table: str
    columns: Sequence[str] = COLUMNS
    update: bool = True

    def __post_init__(self) -> None:
        """Check the columns.

        Raises:
            PlanError: One of those that name the record is not among them.
        """
        missing = [name for name in KEY if name not in self.columns]
        if missing:
            raise PlanError(
                f"columns={tuple(self.columns)!r} was found, which leaves out {missing[0]!r}: rows are told apart by "
                f"{', '.join(KEY)}"
            )

    def __call__(self, rows: "DataFrame", batch: int = 0) -> int:  # noqa: ARG002 - what `foreach` is called with
        """Write rows; returns how many.

        Args:
            rows: With `columns` among theirs; each `topic`, `partition` and `offset` once.
            batch: The number of the micro-batch. It makes no difference here.
        """
        chosen = rows.select(*self.columns)
        counts = chosen.mapInArrow(_writing(self), "written long").groupBy().sum("written").collect()
        return int(counts[0][0] or 0)

    def write(self, batches: "Iterator[pa.RecordBatch]") -> int:
        """Write the rows of one task, in one transaction; returns how many."""
        from psycopg import sql  # noqa: PLC0415 - in a task

        names = [sql.Identifier(name) for name in self.columns]
        written = 0
        with self.connect() as connection, connection.cursor() as cursor:
            target = sql.Identifier(*self.table.split("."))
            stage, listed = sql.Identifier(_STAGE), sql.SQL(", ").join(names)
            cursor.execute(
                sql.SQL("CREATE TEMPORARY TABLE {} ON COMMIT DROP AS SELECT {} FROM {} LIMIT 0").format(
                    stage, listed, target
                )
            )
            with cursor.copy(sql.SQL("COPY {} ({}) FROM STDIN").format(stage, listed)) as copy:
                for batch in batches:
                    for row in batch.to_pylist():
                        copy.write_row(list(row.values()))
                    written += batch.num_rows
            cursor.execute(
                sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {} ON CONFLICT ({}) DO {}").format(
                    target, listed, listed, stage, sql.SQL(", ").join(map(sql.Identifier, KEY)), self._on_conflict()
                )
            )
        return written

    def _on_conflict(self) -> Any:
        from psycopg import sql  # noqa: PLC0415

        names = [sql.Identifier(name) for name in self.columns if name not in KEY]
        if not self.update or not names:
            return sql.SQL("NOTHING")
        given = [sql.SQL("{} = EXCLUDED.{}").format(name, name) for name in names]
        return sql.SQL("UPDATE SET ") + sql.SQL(", ").join(given)


def _writing(table: PostgresqlTable) -> "Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]":
    """What a task runs: takes rows, and yields how many it wrote."""

    def write(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        import pyarrow as pa  # noqa: PLC0415 - in a task

        yield pa.RecordBatch.from_pydict({"written": pa.array([table.write(batches)], pa.int64())})

    return write
