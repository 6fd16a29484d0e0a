"""Files of the journal: hidden until they are complete, and each written by a single process."""

import contextlib
import datetime as dt
import glob
import json
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aioshard.errors import MissingExtraError, SettingsError
from aioshard.telemetry.journal_rows import SCHEMA

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise MissingExtraError("the journal", "journal") from error

try:
    import fcntl
except ImportError:  # this platform has no such locks, so abandoned files are not removed
    fcntl = None  # type: ignore[assignment]

__all__ = ["CPU_KEY", "METADATA_KEY", "JournalFiles"]

METADATA_KEY = b"aioshard"
"""Metadata key of a file for facts that its rows do not contain, as JSON."""

CPU_KEY = b"aioshard.cpu_seconds"
"""Metadata key of the CPU seconds that the process used since its previous file, or since the app started. A prediction
for another number of workers has to know whether there was CPU time left."""

_FORMAT = 1
_MAX_BYTES = 64 * 1024 * 1024
"""Maximum compressed size of one file."""
_MAX_AGE = 60.0
"""Seconds after which a file is completed: if the process is killed, the journal loses its unfinished file."""
_GROUP_ROWS = 32 * 1024
_GROUP_BYTES = 8 * 1024 * 1024
_UNFINISHED = ".parquet.part"
_UNUSUAL = re.compile(r"[^A-Za-z0-9._]")


class JournalFiles:
    """Parquet files in one directory, written one after another. Owned by one thread.

    A file is written under a name with a leading dot, which Parquet readers skip. It gets its final name once it is
    complete and on disk. Readers therefore only see complete files, even if the process dies.

    Invariants:
        * Names sort by the start time of their files and are never reused.
        * Files that another process is writing are not touched.
    """

    def __init__(
        self,
        directory: Path,
        group_id: str,
        *,
        max_bytes: int | None = None,
        max_age: float | None = None,
    ) -> None:
        """Create the files of one process; call `prepare` before the first row.

        Args:
            directory: Location of the files.
            group_id: The consumer group, which is part of their names.
            max_bytes: Maximum size of one file.
            max_age: Maximum age of one file, in seconds.
        """
        self.finished = 0
        """Number of complete files."""
        self.rows = 0
        """Number of rows in them."""
        self.pending = 0
        """Number of rows in the unfinished file."""
        self.describe: Callable[[], Mapping[str, Any]] = dict
        """Returns the app's metadata for a file that begins now; must be serializable as JSON."""
        self._directory = directory
        self._max_bytes = _MAX_BYTES if max_bytes is None else max_bytes
        self._max_age = _MAX_AGE if max_age is None else max_age
        self._owner = f"{_plain(group_id)}-{_plain(socket.gethostname())}"
        self._file: _OpenFile | None = None
        self._began = 0.0
        self._cpu = time.process_time()
        self._batches: list[pa.RecordBatch] = []
        """The batches that become the next row group of the file."""
        self._group_rows = self._group_bytes = 0

    def prepare(self) -> None:
        """Create the directory, and remove files that an earlier process on this machine left unfinished.

        Raises:
            SettingsError: The directory is not writable.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._directory):
                pass
        except OSError as error:
            raise SettingsError(
                f"journal={str(self._directory)!r} cannot be written to ({error.strerror or error}): name a directory "
                "in which this user may make files"
            ) from error
        for path in self._unfinished():
            _remove_if_abandoned(path)

    def _unfinished(self) -> Iterator[Path]:
        return self._directory.glob(f".*-{glob.escape(self._owner)}-*{_UNFINISHED}")

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows; they become readable once their file is complete.

        Raises:
            OSError: The rows cannot be written. Call `discard` then.
        """
        self._batches.append(batch)
        self.pending += batch.num_rows
        if self._file is None:
            self._began = time.monotonic()
            metadata = {"format": _FORMAT, **self.describe()}
            schema = SCHEMA.with_metadata({METADATA_KEY: json.dumps(metadata).encode()})
            self._file = _OpenFile(self._directory, self._owner, schema)
        self._group_rows += batch.num_rows
        self._group_bytes += int(batch.nbytes)
        if self._group_rows >= _GROUP_ROWS or self._group_bytes >= _GROUP_BYTES:
            self.flush()
            if self._file.size >= self._max_bytes:
                self.finish()

    def flush(self) -> None:
        """Write the waiting batches as a row group of the file.

        Raises:
            OSError: The row group cannot be written. Call `discard` then.
        """
        if self._batches:
            assert self._file is not None  # noqa: S101 - opened before the first batch
            self._file.write(self._batches)
            self._forget_group()

    def _forget_group(self) -> None:
        self._batches = []
        self._group_rows = self._group_bytes = 0

    @property
    def due(self) -> float | None:
        """Seconds until the open file must be completed; None without an open file."""
        return None if self._file is None else max(self._began + self._max_age - time.monotonic(), 0.0)

    def finish(self) -> None:
        """Complete the open file, if there is one.

        Raises:
            OSError: The file cannot be completed. Call `discard` then.
        """
        if self._file is None:
            return
        self.flush()
        now = time.process_time()
        self._file.finish({CPU_KEY: f"{now - self._cpu:.6f}".encode()})
        self._cpu = now
        self._file = None
        self.finished += 1
        self.rows += self.pending
        self.pending = 0

    def discard(self) -> int:
        """Discard the open file; return the number of lost rows."""
        file, self._file = self._file, None
        lost, self.pending = self.pending, 0
        self._forget_group()
        if file is not None:
            file.discard()
        return lost


class _OpenFile:
    """A file that is being written."""

    def __init__(self, directory: Path, owner: str, schema: pa.Schema) -> None:
        self._directory = directory
        self._path, self._lock = _new_file(directory, owner)
        try:
            self._sink = pa.OSFile(str(self._path), "wb")
            self._writer = pq.ParquetWriter(self._sink, schema, compression="zstd", compression_level=1)
        except BaseException:
            self._path.unlink(missing_ok=True)
            os.close(self._lock)
            raise

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return int(self._sink.tell())

    def write(self, batches: list[pa.RecordBatch]) -> None:
        """Write a row group."""
        table = pa.Table.from_batches(batches)
        self._writer.write_table(table.replace_schema_metadata(self._writer.schema.metadata), row_group_size=len(table))

    def finish(self, told: Mapping[bytes, bytes]) -> None:
        """Add *told* to the metadata, flush the file to disk, and give it its final name."""
        self._writer.add_key_value_metadata(told)
        self._writer.close()
        self._sink.close()
        os.fsync(self._lock)  # syncs the file, including writes through other descriptors
        self._path.rename(self._path.with_name(self._path.name.removeprefix(".").removesuffix(".part")))
        _sync(self._directory)
        os.close(self._lock)

    def discard(self) -> None:
        """Remove the file."""
        with contextlib.suppress(Exception):
            self._writer.close()
        with contextlib.suppress(Exception):
            self._sink.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def _new_file(directory: Path, owner: str) -> tuple[Path, int]:
    """Create an unfinished file, locked while it is written; return it with the descriptor that holds the lock."""
    while True:
        now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        path = directory / f".{now}-{owner}-{os.getpid()}-{secrets.token_hex(4)}{_UNFINISHED}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        # Another process that is starting may have locked it first in order to remove it.
        if _locked(descriptor) is not False and path.exists():
            return path, descriptor
        os.close(descriptor)


def _remove_if_abandoned(path: Path) -> None:
    """Remove an unfinished file that no process is writing any longer."""
    with contextlib.suppress(OSError):  # it no longer exists, or belongs to another user
        descriptor = os.open(path, os.O_RDWR)
        try:
            if _locked(descriptor):
                path.unlink()
        finally:
            os.close(descriptor)


def _locked(descriptor: int) -> bool | None:
    """Lock a file for this process; return False if another process has the lock, None without locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return None
    return True


def _sync(directory: Path) -> None:
    """Flush a directory entry to disk, on systems that can synchronize directories."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _plain(name: str) -> str:
    """Make a name safe for use in a file name."""
    return _UNUSUAL.sub("_", name)[:60]
