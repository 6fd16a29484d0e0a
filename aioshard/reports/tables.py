"""The tables of a journal, in DuckDB or on Spark. Both compute the reports with the same SQL.

The SQL of the reports uses only what both understand. `DuckTables` adds the few functions of Spark that DuckDB lacks.
"""

import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pyarrow import ArrowInvalid, dataset

from aioshard.errors import SettingsError
from aioshard.spark.run_directory import SCHEME
from aioshard.telemetry.journal import SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LARGE = 256 * 2**20
"""Bytes of Parquet from which a journal is read on Spark: about ten million records."""

_READ = frozenset(SCHEMA.names) - {"error_type", "error", "result", "status"}
_COLUMNS = """
    SELECT *,
        started_us + service_us AS finished_us,
        greatest(started_us - arrived_us, 0) AS wait_us,
        greatest(started_us - arrived_us, 0) + service_us AS total_us
    FROM (
        SELECT handler, status, attempts, error_type, error, topic, partition, {offset} AS record_offset, shard,
            key_hash,
            -- The part of a file's name with group, host and process.
            regexp_extract({file_name}, 'Z-(.+)-[0-9a-f]{{8}}[.]parquet$', 1) AS member,
            topic || '/' || CAST(partition AS STRING) AS partition_name,
            coalesce({text_of_key}, '0x' || hex(key), '#' || lower(lpad(hex(key_hash), 16, '0'))) AS key_name,
            -- Fixed shards are numbered from 0; other shards are hashes of 64 bits.
            CASE WHEN shard BETWEEN 0 AND 65535 THEN CAST(shard AS STRING)
                ELSE '#' || lower(lpad(hex(shard), 16, '0')) END AS shard_name,
            -- Sums of whole microseconds are exact in any order.
            CAST(round(timestamp * 1000000) AS BIGINT) AS produced_us,
            CAST(round(arrived * 1000000) AS BIGINT) AS arrived_us,
            CAST(round(started * 1000000) AS BIGINT) AS started_us,
            CAST(round(duration * 1000000) AS BIGINT) AS service_us
        FROM {rows})"""


class Tables(Protocol):
    """Tables that understand the SQL of the reports."""

    def read(self, path: str) -> str:
        """Return the name of a table with all rows of a journal, and with the columns that the reports use."""

    def keep(self, sql: str, **names: object) -> str:
        """Store the result of a query, as in `query`, and return the name of the table."""

    def drop(self, table: str) -> None:
        """Remove a table of `keep`."""

    def query(self, sql: str, **names: object) -> list[dict[str, Any]]:
        """Return the rows of a query; it has *names*, such as those of tables, in braces."""


class DuckTables:
    """Tables in DuckDB, in this process."""

    def __init__(self) -> None:
        """Open an empty database in memory."""
        import duckdb  # noqa: PLC0415 - imported on use

        self._connection = duckdb.connect(config={"temp_directory": tempfile.gettempdir()})
        self._connection.execute("CREATE TEMP MACRO try_divide(a, b) AS a / nullif(b, 0)")
        self._connection.execute("CREATE TEMP MACRO percentile(us, share) AS quantile_cont(us, share)")

    def read(self, path: str) -> str:
        """See `Tables.read`."""
        files = ", ".join(f"'{_escaped(file)}'" for file in journal_files(path))
        columns = _COLUMNS.format(
            offset='"offset"',
            file_name="filename",
            text_of_key="try(decode(key))",
            rows=f"read_parquet([{files}], filename = true)",
        )
        return self._create("VIEW", columns)

    def keep(self, sql: str, **names: object) -> str:
        """See `Tables.keep`."""
        return self._create("TABLE", sql.format(**names))

    def drop(self, table: str) -> None:
        """See `Tables.drop`."""
        self._connection.execute(f"DROP TABLE {table}")

    def query(self, sql: str, **names: object) -> list[dict[str, Any]]:
        """See `Tables.query`."""
        cursor = self._connection.execute(sql.format(**names))
        columns = [column[0] for column in cursor.description or ()]
        return [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]

    def _create(self, kind: str, sql: str) -> str:
        name = _new_name()
        self._connection.execute(f"CREATE TEMP {kind} {name} AS {sql}")
        return name


class SparkTables:
    """Tables in a Spark session."""

    def __init__(self, spark: "SparkSession") -> None:
        """Use a session that can read the journal."""
        self._spark = spark
        self._kept: dict[str, DataFrame] = {}

    def read(self, path: str) -> str:
        """See `Tables.read`; *path* may be a URI that Spark supports."""
        uri = path if SCHEME.match(path) else Path(path).absolute().as_uri()
        rows = self._name(self._spark.read.parquet(uri).selectExpr("*", "_metadata.file_name AS file_name"))
        columns = _COLUMNS.format(
            offset="offset", file_name="file_name", text_of_key="try_validate_utf8(key)", rows=rows
        )
        return self._name(self._spark.sql(columns))

    def keep(self, sql: str, **names: object) -> str:
        """See `Tables.keep`."""
        frame = self._spark.sql(sql.format(**names)).cache()
        name = self._name(frame)
        self._kept[name] = frame
        return name

    def drop(self, table: str) -> None:
        """See `Tables.drop`."""
        self._kept.pop(table).unpersist()
        self._spark.catalog.dropTempView(table)

    def query(self, sql: str, **names: object) -> list[dict[str, Any]]:
        """See `Tables.query`."""
        return [row.asDict() for row in self._spark.sql(sql.format(**names)).collect()]

    def _name(self, frame: "DataFrame") -> str:
        name = _new_name()
        frame.createOrReplaceTempView(name)
        return name


def _new_name() -> str:
    return f"aioshard_{uuid.uuid4().hex}"


def _escaped(text: str) -> str:
    """Escape text for a literal of SQL."""
    return text.replace("'", "''")


def journal_files(path: str) -> list[str]:
    """Return the finished files of a journal.

    Raises:
        SettingsError: The path cannot be read or is not a journal.
    """
    try:
        found = dataset.dataset(path, format="parquet")
        columns = found.schema.names
    except (OSError, ArrowInvalid) as error:
        raise SettingsError(
            f"the journal {path} cannot be read ({error}): expected the directory that an app writes with "
            "App(journal=PATH)"
        ) from error
    if missing := _READ - {*columns}:
        raise SettingsError(
            f"{path} is not a journal of aioshard: it has no column {min(missing)!r}. App(journal=PATH) writes a "
            "journal, and completes a file every minute and when the app stops"
        )
    return list(found.files)


def is_small(path: str) -> bool:
    """Return whether a journal is a local one that needs no Spark.

    Raises:
        SettingsError: As for `journal_files`.
    """
    files = journal_files(path)
    return not SCHEME.match(path) and sum(Path(file).stat().st_size for file in files) < LARGE
