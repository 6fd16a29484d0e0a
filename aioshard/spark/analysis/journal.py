"""A journal as Spark reads it, and the metadata in its files about the app that wrote it."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyarrow import fs, parquet
from pyspark.sql import functions as sql

from aioshard.errors import SettingsError
from aioshard.telemetry.journal_files import CPU_KEY, METADATA_KEY
from aioshard.telemetry.journal_rows import SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["Journal", "RecordedHandler", "check_journal", "microseconds", "read_journal"]

_COLUMNS = frozenset(SCHEMA.names) - {"error_type", "error", "result"}
"""The columns that analyses read."""
_FORMAT = 1
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_MEMBER = r"Z-(.+)-[0-9a-f]{8}\.parquet$"
"""The part of a file's name with group, host and process."""


class RecordedHandler(NamedTuple):
    """A handler as described by the journal's files; None for facts they do not contain."""

    name: str
    shards: int | None
    """None also means shards on demand."""


class Journal:
    """The rows of a journal, ready for queries.

    Attributes:
        path: Location of the journal.
        rows: Its rows, with the columns that analyses need in whole microseconds: `arrived_us`, `started_us`,
            `finished_us`, `service_us`, `wait_us`, `total_us` (for records that never ran, `wait_us` is 0 and the
            others but `arrived_us` are null), `produced_us` (the record's timestamp), and `member`, the process that
            wrote the row. Cached by Spark.
        start: Arrival of its first record, in microseconds since the epoch.
        end: Completion of its last record, in microseconds since the epoch.
        records: Number of rows.
        handlers: Number of handlers with rows.
    """

    def __init__(self, path: str, rows: "DataFrame", metadata: Iterable[Mapping[str, Any]]) -> None:
        self.path = path
        self.rows = rows.cache()
        self._metadata = tuple(metadata)
        found = self.rows.agg(
            sql.min("arrived_us"),
            sql.max("finished_us"),
            sql.count("*"),
            sql.count_distinct("member"),
            sql.count_distinct("handler"),
        ).first()
        assert found is not None  # noqa: S101 - an aggregate without groups has one row
        if found[0] is None:
            raise SettingsError(f"the journal {path} holds no records: it is written when records are complete")
        self.start: int = found[0]
        self.end: int = found[1] if found[1] is not None else found[0]
        self.records: int = found[2]
        self.members: int = found[3]
        """Number of processes that wrote it."""
        self.handlers: int = found[4]

    @property
    def wall(self) -> int:
        """Microseconds from the first arrival to the last completion."""
        return max(self.end - self.start, 1)

    @property
    def cpu(self) -> float | None:
        """Average share of one core that a process used while it wrote the journal; None if the files do not say."""
        told = [one["cpu_seconds"] for one in self._metadata if "cpu_seconds" in one]
        return sum(told) * 1_000_000 / (self.wall * max(self.members, 1)) if told else None

    def handler(self, name: str | None) -> RecordedHandler:
        """Return the facts about a handler; without *name*, about the one with the most records.

        Raises:
            SettingsError: The handler has no rows in the journal.
        """
        counts = {row["handler"]: row["count"] for row in self.rows.groupBy("handler").count().collect()}
        if name is None:
            name = max(counts, key=lambda one: (counts[one], str(one)))
        elif name not in counts:
            raise SettingsError(
                f"the journal {self.path} has no rows of handler {name!r}: it has {', '.join(sorted(map(str, counts)))}"
            )
        told = next((one for one in _handlers(reversed(self._metadata)) if one.get("name") == name), {})
        return RecordedHandler(str(name), _number(told.get("shards")))

    def of_handler(self, name: str) -> "DataFrame":
        """Return the rows of a handler that have a run."""
        return self.rows.where((sql.col("handler") == name) & sql.col("service_us").isNotNull())


def check_journal(path: str) -> None:
    """Check, without Spark, that a journal exists.

    Raises:
        SettingsError: The path does not exist, has no Parquet files, or is not a journal.
    """
    files, filesystem = _files(path)
    for name in files:
        _checked(path, name, filesystem)


def read_journal(spark: "SparkSession", path: str) -> Journal:
    """Read a journal.

    Args:
        spark: A session that can read *path*.
        path: A directory of Parquet files, or one file; a local path, or a URI that Spark and Arrow support.

    Raises:
        SettingsError: The path does not exist, is not a journal, or the journal is empty.
    """
    files, filesystem = _files(path)
    metadata = [_checked(path, name, filesystem) for name in files]
    where = path if _SCHEME.match(path) else Path(path).absolute().as_uri()
    raw = spark.read.parquet(where)
    member = sql.regexp_extract(sql.col("_metadata.file_name"), _MEMBER, 1)
    return Journal(path, _with_times(raw.select("*", member.alias("member"))), metadata)


def microseconds(seconds: "Column") -> "Column":
    """Convert seconds to whole microseconds, whose sum is exact in any order."""
    return sql.round(seconds * 1_000_000).cast("bigint")


def _with_times(rows: "DataFrame") -> "DataFrame":
    begun = microseconds(sql.col("started"))
    rows = rows.select(
        *(name for name in rows.columns if name not in {"result", "error"}),
        microseconds(sql.col("timestamp")).alias("produced_us"),
        microseconds(sql.col("arrived")).alias("arrived_us"),
        begun.alias("started_us"),
        microseconds(sql.col("duration")).alias("service_us"),
    )
    return (
        rows.withColumn("finished_us", sql.col("started_us") + sql.col("service_us"))
        .withColumn("wait_us", sql.greatest(sql.col("started_us") - sql.col("arrived_us"), sql.lit(0)))
        .withColumn("total_us", sql.col("wait_us") + sql.col("service_us"))
    )


# Files ----------------------------------------------------------------------------------


def _files(path: str) -> tuple[list[str], fs.FileSystem]:
    """Return the journal's files, oldest first, and their file system."""
    try:
        filesystem, inside = (
            fs.FileSystem.from_uri(path) if _SCHEME.match(path) else (fs.LocalFileSystem(), str(Path(path).absolute()))
        )
        info = filesystem.get_file_info(inside)
        if info.type == fs.FileType.File:
            return [inside], filesystem
        if info.type == fs.FileType.NotFound:
            raise SettingsError(
                f"there is nothing at {path}: the directory was expected that the app writes as its journal, "
                "App(journal=PATH)"
            )
        found = filesystem.get_file_info(fs.FileSelector(inside, recursive=True))
    except (OSError, pa.ArrowInvalid) as error:
        raise SettingsError(f"the journal {path} cannot be read: {error}") from error
    files = sorted(one.path for one in found if one.is_file and _is_shown(one.path, inside))
    if not files:
        raise SettingsError(
            f"{path} has no Parquet files: an app completes a file of its journal every minute and when it stops"
        )
    return files, filesystem


def _is_shown(path: str, inside: str) -> bool:
    """Return whether Spark also reads it; names with a leading dot or underscore are unfinished files or not data."""
    parts = path.removeprefix(inside).strip("/").split("/")
    return parts[-1].endswith(".parquet") and not any(part[:1] in {".", "_"} for part in parts)


def _checked(path: str, name: str, filesystem: fs.FileSystem) -> Mapping[str, Any]:
    """Check that a file belongs to a journal, and return its metadata about the app that wrote it."""
    try:
        footer = parquet.read_metadata(name, filesystem=filesystem)
    except (OSError, pa.ArrowInvalid) as error:
        raise SettingsError(f"{name} is no Parquet file ({error}): {path} is no journal of aioshard") from error
    missing = _COLUMNS - set(footer.schema.names)
    if missing:
        raise SettingsError(
            f"{path} is no journal of aioshard: its file {Path(name).name} has no column "
            f"{', '.join(map(repr, sorted(missing)))}; App(journal=PATH) writes one"
        )
    notes = footer.metadata or {}
    try:
        told = dict(_mapping(json.loads(notes.get(METADATA_KEY, b"{}"))))
        if CPU_KEY in notes:
            told["cpu_seconds"] = float(notes[CPU_KEY])
    except ValueError:
        told = {}
    found = told.get("format", _FORMAT)
    if found != _FORMAT:
        raise SettingsError(
            f"the journal {path} is of format {found!r}; this version of aioshard reads {_FORMAT}: use a newer one"
        )
    return told


def _handlers(metadata: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for one in metadata:
        handlers = one.get("handlers")
        if isinstance(handlers, Mapping):
            for name, options in handlers.items():
                yield {"name": name, **_mapping(options)}
        elif isinstance(handlers, list):
            yield from map(_mapping, handlers)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None
