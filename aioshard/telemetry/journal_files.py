"""Files of the journal: written aside, complete when they have their name, and never of two processes."""

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
except ImportError:  # where there are no such locks nothing is cleaned up
    fcntl = None  # type: ignore[assignment]

__all__ = ["CPU_KEY", "METADATA_KEY", "JournalFiles"]

METADATA_KEY = b"aioshard"
"""Under which a file's metadata has what the rows do not say, as JSON."""

CPU_KEY = b"aioshard.cpu_seconds"
"""Under which it has the processor's time that the process took since the file before it, or since the app started:
who predicts other numbers of workers has to know whether there was any left."""

_FORMAT = 1
_MAX_BYTES = 64 * 1024 * 1024
"""Of one file, as it is compressed."""
_MAX_AGE = 60.0
"""Seconds after which a file ends: what a process that is killed has not finished is lost to the journal."""
_GROUP_ROWS = 32 * 1024
_GROUP_BYTES = 8 * 1024 * 1024
_UNFINISHED = ".parquet.part"
_UNUSUAL = re.compile(r"[^A-Za-z0-9._]")


class JournalFiles:
    """Parquet files in one directory, one after the other. Owned by one thread.

    A file is written under a name that begins with a dot, which readers of Parquet leave out. When it is complete and
    on the disk it gets its own. So every file that readers see is whole, whatever happens to the process.

    Invariants:
        * Names sort by the time at which files were begun, and are given once.
        * What another process is writing is not touched.
    """

    def __init__(
        self,
        directory: Path,
        group_id: str,
        *,
        max_bytes: int | None = None,
        max_age: float | None = None,
    ) -> None:
        """Make the files of one process; `prepare` comes before the first row.

        Args:
            directory: Where they are.
            group_id: The consumer group, in their names.
            max_bytes: Of one file.
            max_age: Seconds.
        """
        self.finished = 0
        """Files that are complete."""
        self.rows = 0
        """Rows in them."""
        self.pending = 0
        """Rows in the file that is not."""
        self.describe: Callable[[], Mapping[str, Any]] = dict
        """What the metadata of a file that begins now says of the app; ready for JSON."""
        self._directory = directory
        self._max_bytes = _MAX_BYTES if max_bytes is None else max_bytes
        self._max_age = _MAX_AGE if max_age is None else max_age
        self._owner = f"{_plain(group_id)}-{_plain(socket.gethostname())}"
        self._file: _OpenFile | None = None
        self._began = 0.0
        self._cpu = time.process_time()
        self._batches: list[pa.RecordBatch] = []
        """What becomes the next group of rows of the file."""
        self._group_rows = self._group_bytes = 0

    def prepare(self) -> None:
        """Make the directory, and remove what an earlier process on this machine has left unfinished.

        Raises:
            SettingsError: Nothing can be written there.
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
        """Add rows; they are readable when their file is complete.

        Raises:
            OSError: They cannot be written. The file is given up then (`discard`).
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
        """Write what waits to become a group of rows of the file.

        Raises:
            OSError: It cannot be written. The file is given up then (`discard`).
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
        """Seconds until the file that is open has to end; None when there is none."""
        return None if self._file is None else max(self._began + self._max_age - time.monotonic(), 0.0)

    def finish(self) -> None:
        """Complete the file that is open, if one is.

        Raises:
            OSError: It cannot be. It is given up then (`discard`).
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
        """Give up the file that is open; returns how many rows are lost by that."""
        file, self._file = self._file, None
        lost, self.pending = self.pending, 0
        self._forget_group()
        if file is not None:
            file.discard()
        return lost


class _OpenFile:
    """One file that is being written."""

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
        """Bytes that were written."""
        return int(self._sink.tell())

    def write(self, batches: list[pa.RecordBatch]) -> None:
        """Write a group of rows."""
        table = pa.Table.from_batches(batches)
        self._writer.write_table(table.replace_schema_metadata(self._writer.schema.metadata), row_group_size=len(table))

    def finish(self, told: Mapping[bytes, bytes]) -> None:
        """Have it on the disk, with what its metadata is to say besides, and give it its name."""
        self._writer.add_key_value_metadata(told)
        self._writer.close()
        self._sink.close()
        os.fsync(self._lock)  # of the file, not of a descriptor
        self._path.rename(self._path.with_name(self._path.name.removeprefix(".").removesuffix(".part")))
        _sync(self._directory)
        os.close(self._lock)

    def discard(self) -> None:
        """Remove it."""
        with contextlib.suppress(Exception):
            self._writer.close()
        with contextlib.suppress(Exception):
            self._sink.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def _new_file(directory: Path, owner: str) -> tuple[Path, int]:
    """Make an unfinished file that is locked for as long as it is written; returns it with what holds the lock."""
    while True:
        now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        path = directory / f".{now}-{owner}-{os.getpid()}-{secrets.token_hex(4)}{_UNFINISHED}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        # A process that starts may have locked it before us, to remove it.
        if _locked(descriptor) is not False and path.exists():
            return path, descriptor
        os.close(descriptor)


def _remove_if_abandoned(path: Path) -> None:
    """Remove an unfinished file that no process writes any more."""
    with contextlib.suppress(OSError):  # it is gone, or somebody else's
        descriptor = os.open(path, os.O_RDWR)
        try:
            if _locked(descriptor):
                path.unlink()
        finally:
            os.close(descriptor)


def _locked(descriptor: int) -> bool | None:
    """Lock a file for this process; False when another one has it, None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has none
        return None
    return True


def _sync(directory: Path) -> None:
    """Have a name on the disk, where directories can be synchronised."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _plain(name: str) -> str:
    """A name as part of a file's."""
    return _UNUSUAL.sub("_", name)[:60]
