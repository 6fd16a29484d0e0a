"""The event journal: the outcome of each record, written as Parquet alongside the running app.

The event loop collects a few values per completed record and hands over a thousand records at a time. One thread
converts them to columns and writes them. Rows that it cannot accept in time are dropped and counted: the app never
waits for its journal.
"""

import asyncio
import contextlib
import datetime as dt
import glob
import itertools
import logging
import math
import os
import queue
import re
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

from aioshard.core.text import message_of
from aioshard.errors import MissingExtraError, SettingsError
from aioshard.observe import JournalStatistics, RebalanceReport

try:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from aioshard.telemetry.outcome_rows import ROW_WIDTH, OutcomeRows, columns_of, hashes, outcome_columns
except ImportError as error:
    raise MissingExtraError("the journal", "journal") from error

logger = logging.getLogger("aioshard.telemetry.journal")

SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("handler", pa.string()),
        ("status", pa.string()),
        ("attempts", pa.int32()),
        ("error_type", pa.string()),
        ("error", pa.string()),
        ("timestamp", pa.float64()),
        ("arrived", pa.float64()),
        ("started", pa.float64()),
        ("duration", pa.float64()),
        ("shard", pa.int64()),
        ("key_hash", pa.int64()),
        ("key", pa.binary()),
        ("result", pa.binary()),
    ]
)
"""Schema of journal files. Times are seconds since the epoch, `duration` is in seconds; see docs/journal.md."""


def record_batch(flat: list[Any], *, ahead: float, show_keys: bool) -> pa.RecordBatch:
    """Convert rows to a batch of the journal.

    Args:
        flat: `ROW_WIDTH` values per row; at least one row.
        ahead: Seconds to add to loop time for wall-clock time.
        show_keys: Whether to write keys in addition to their hashes.
    """
    _, _, _, _, keys, timestamps, arrivals, *_ = columns_of(flat)
    columns = outcome_columns(flat, ahead) | {
        "timestamp": pa.array(timestamps, pa.float64()),
        "arrived": pa.array([arrived + ahead for arrived in arrivals], pa.float64()),
        "key_hash": hashes(keys),
    }
    if not show_keys:
        columns["key"] = pa.nulls(len(keys), pa.binary())
    return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


_MAX_BYTES = 64 * 1024 * 1024
"""Maximum compressed size of one file."""
_MAX_AGE = 60.0
"""Seconds after which a file is completed: if the process is killed, the journal loses its unfinished file."""
_GROUP_ROWS = 32 * 1024
_GROUP_BYTES = 8 * 1024 * 1024
_ABANDONED_AGE = 600.0
"""Seconds without a write after which an unfinished file belongs to a process that died."""
_UNFINISHED = ".parquet.part"


class JournalFiles:
    """Parquet files in one directory, written one after another. Owned by one thread.

    A file is written under a name with a leading dot, which Parquet readers skip. It gets its final name once it is
    complete and on disk. Readers therefore only see complete files, even if the process dies.

    Invariants:
        * Names sort by the start time of their files and are never reused.
    """

    def __init__(self, directory: Path, group_id: str) -> None:
        """Create the files of one process; call `prepare` before the first row.

        Args:
            directory: Location of the files.
            group_id: The consumer group, which is part of their names.
        """
        self.finished = 0
        """Number of complete files."""
        self.rows = 0
        """Number of rows in them."""
        self.pending = 0
        """Number of rows in the unfinished file."""
        self._directory = directory
        self._owner = f"{_plain(group_id)}-{_plain(socket.gethostname())}"
        self._path: Path | None = None
        """The unfinished file; `_sink` and `_writer` exist while it is open."""
        self._began = 0.0
        self._batches: list[pa.RecordBatch] = []
        """The batches that become the next row group of the file."""

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
                "in which this user may create files"
            ) from error
        for path in self._directory.glob(f".*-{glob.escape(self._owner)}-*{_UNFINISHED}"):
            with contextlib.suppress(OSError):  # it no longer exists, or belongs to another user
                if time.time() - path.stat().st_mtime > _ABANDONED_AGE:
                    path.unlink()

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows; they become readable once their file is complete.

        Raises:
            OSError: The rows cannot be written. Call `discard` then.
        """
        self._batches.append(batch)
        self.pending += batch.num_rows
        if self._path is None:
            now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
            self._path = self._directory / f".{now}-{self._owner}-{os.getpid()}-{secrets.token_hex(4)}{_UNFINISHED}"
            self._began = time.monotonic()
            self._sink = pa.OSFile(str(self._path), "wb")
            self._writer = pq.ParquetWriter(self._sink, SCHEMA, compression="zstd", compression_level=1)
        group = pa.Table.from_batches(self._batches)
        if group.num_rows >= _GROUP_ROWS or group.nbytes >= _GROUP_BYTES:
            self.flush()
            if self._sink.tell() >= _MAX_BYTES:
                self.finish()

    def flush(self) -> None:
        """Write the waiting batches as a row group of the file.

        Raises:
            OSError: The row group cannot be written. Call `discard` then.
        """
        if self._batches:
            group = pa.Table.from_batches(self._batches)
            self._writer.write_table(group, row_group_size=group.num_rows)
            self._batches = []

    @property
    def due(self) -> float:
        """Seconds until the open file must be completed; infinite without an open file."""
        if self._path is None:
            return math.inf
        return max(self._began + _MAX_AGE - time.monotonic(), 0.0)

    def finish(self) -> None:
        """Complete the open file, if there is one: flush it to disk and give it its final name.

        Raises:
            OSError: The file cannot be completed. Call `discard` then.
        """
        if self._path is None:
            return
        self.flush()
        self._writer.close()
        self._sink.close()
        _sync(self._path)
        self._path.rename(self._path.with_name(self._path.name.removeprefix(".").removesuffix(".part")))
        self._path = None
        with contextlib.suppress(OSError):  # not every system can synchronize directories
            _sync(self._directory)
        self.finished += 1
        self.rows += self.pending
        self.pending = 0

    def discard(self) -> int:
        """Discard the open file; return the number of lost rows."""
        path = self._path
        self._path = None
        lost = self.pending
        self.pending = 0
        self._batches = []
        if path is not None:
            with contextlib.suppress(Exception), self._sink:  # the disk may still fail, or the file was not opened
                self._writer.close()
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        return lost


def _sync(path: Path) -> None:
    """Flush a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _plain(name: str) -> str:
    """Make a name safe for use in a file name."""
    return re.sub(r"[^A-Za-z0-9._]", "_", name)[:60]


_CHUNK_ROWS = 1_000
_CHUNK_BYTES = 1024 * 1024
_WAITING_CHUNKS = 64
_WAITING_BYTES = 32 * 1024 * 1024
"""Rows that may wait for the thread, in addition to those it is writing: about 60 MiB with Python's overhead."""
_MOST_CHUNKS = 32
_FLUSH_INTERVAL = 1.0
"""Seconds after which rows are handed over even if there are fewer than a thousand."""
_LOCK_RELEASE = 2e-4
"""Seconds for which the event loop releases the interpreter lock when the thread has fallen behind.

Without this, a busy event loop takes the lock back after each poll of its sockets, before the waiting thread wakes up.
"""
_PAUSE = 5.0
"""Seconds without writing after a write has failed."""
_LOG_INTERVAL = 60.0
_CLOSE_TIMEOUT = 3.0


class _Chunk(NamedTuple):
    flat: list[Any]
    """`ROW_WIDTH` values per row."""
    size: int
    """Bytes of their keys, results and messages."""
    ahead: float
    """Seconds to add to loop time for wall-clock time."""


class Journal:
    """Writes a row for each completed record. Each run of an app has its own.

    `observe` and `close` belong to the event loop; `statistics` is safe to call from any thread.

    Invariants:
        * Every observed record is in a finished file, waits, or is counted as dropped.
        * Only the journal's thread waits for the disk.
    """

    def __init__(self, files: JournalFiles, group_id: str, *, show_keys: bool) -> None:
        """Create a journal in the running event loop and start its thread.

        Args:
            files: Prepared files.
            group_id: The consumer group, used for the thread's name.
            show_keys: Whether to write keys in addition to their hashes.
        """
        self._files = files
        self._show_keys = show_keys
        self._loop = asyncio.get_running_loop()
        self._rows = OutcomeRows(self._hand_over, _CHUNK_ROWS, max_bytes=_CHUNK_BYTES)
        self.observe = self._rows.observe
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        # Only one thread changes each of these.
        self._queued_rows = self._queued_bytes = self._overflowed = 0
        self._dequeued_bytes = self._lost = 0
        self._overflow_logged = -_LOG_INTERVAL
        self._resumes_at = 0.0
        self._trouble: str | None = None
        self._thread = threading.Thread(target=self._work, name=f"aioshard journal of {group_id}", daemon=True)
        self._thread.start()

    @classmethod
    async def open(cls, directory: str, group_id: str, *, show_keys: bool) -> Self:
        """Create a journal in a directory.

        Args:
            directory: Created if it is missing.
            group_id: The consumer group.
            show_keys: As in the constructor.

        Raises:
            SettingsError: The directory is not writable.
        """
        files = JournalFiles(Path(directory), group_id)
        # Arrow's first array imports pandas, if it is installed: while the event loop is busy, that would take seconds.
        await asyncio.to_thread(pa.array, (b"",), pa.binary())
        await asyncio.to_thread(files.prepare)
        return cls(files, group_id, show_keys=show_keys)

    # The event loop -----------------------------------------------------------------------

    def _hand_over(self, *, force: bool = False) -> None:
        """Give the collected rows to the thread; drop them if too many are waiting, unless *force* is set."""
        rows = len(self._rows)
        if not rows:
            return
        flat, size = self._rows.take()
        waiting = self._queued_bytes - self._dequeued_bytes
        full = self._chunks.qsize() >= _WAITING_CHUNKS or (waiting > 0 and waiting + size > _WAITING_BYTES)
        if full and not force:
            self._overflowed += rows
            now = self._loop.time()
            if now - self._overflow_logged >= _LOG_INTERVAL:
                self._overflow_logged = now
                logger.warning(
                    "the journal cannot keep up with completed records; rows dropped so far: %d", self._overflowed
                )
            return
        self._queued_rows += rows
        self._queued_bytes += size
        behind = self._chunks.qsize() > 1
        self._chunks.put(_Chunk(flat, size, time.time() - self._loop.time()))
        if behind:
            time.sleep(_LOCK_RELEASE)

    def rebalanced(self, report: RebalanceReport) -> None:
        """Add a row for a finished rebalance that revoked partitions."""
        if report.revoked:
            self._rows.add_rebalance(report.at - (time.time() - self._loop.time()), report)

    async def close(self) -> None:
        """Write the remaining rows, complete the last file and end the thread; give up after 3 s."""
        self._hand_over(force=True)
        self._chunks.put(None)
        await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT)
        if self._thread.is_alive():
            logger.error(
                "the journal was not closed within its limit; rows lost: %d (limit %g s)",
                self.statistics().waiting,
                _CLOSE_TIMEOUT,
            )

    def statistics(self) -> JournalStatistics:
        """Return how much was written; safe to call from any thread."""
        written = self._files.rows
        lost = self._lost
        waiting = max(self._queued_rows - written - lost, 0) + len(self._rows)
        return JournalStatistics(
            written=written,
            waiting=waiting,
            dropped=self._overflowed + lost,
            files=self._files.finished,
            trouble=self._trouble,
        )

    # The thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            if self._files.due == 0.0:
                self._attempt(self._files.finish)
            try:
                chunks = [self._chunks.get(timeout=max(min(self._files.due, _FLUSH_INTERVAL), 0.001))]
            except queue.Empty:
                if len(self._rows):  # even if there are only a few
                    with contextlib.suppress(RuntimeError):  # the event loop was closed
                        self._loop.call_soon_threadsafe(self._hand_over)
                continue
            # The thread may have to wait for the interpreter lock on each call into Arrow: the further it falls behind,
            # the fewer calls it makes.
            while chunks[-1] is not None and len(chunks) < _MOST_CHUNKS and not self._chunks.empty():
                chunks.append(self._chunks.get())
            self._write([chunk for chunk in chunks if chunk is not None])
            if chunks[-1] is None:
                break
        self._attempt(self._files.finish)

    def _write(self, chunks: list[_Chunk]) -> None:
        if not chunks:
            return
        flat = list(itertools.chain.from_iterable(chunk.flat for chunk in chunks))
        self._dequeued_bytes += sum(chunk.size for chunk in chunks)
        rows = len(flat) // ROW_WIDTH
        if time.monotonic() < self._resumes_at:
            self._lost += rows
            return
        try:
            batch = record_batch(flat, ahead=chunks[0].ahead, show_keys=self._show_keys)
        except Exception as error:
            self._lost += rows
            self._failed(error)
            logger.exception("journal rows cannot be converted; rows lost: %d", rows)
            return

        def write() -> None:
            self._files.write(batch)
            if self._trouble is not None:
                self._files.flush()  # rows that are only in memory do not prove that the disk works
                logger.warning("the journal is written again; rows dropped so far: %d", self._lost)
                self._trouble = None

        self._attempt(write)

    def _attempt(self, act: Callable[[], None]) -> None:
        """Run a write; if it fails, discard the unfinished file and start another one after a pause."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - no failure of the journal may reach the app
            lost = self._files.discard()
            self._lost += lost
            self._resumes_at = time.monotonic() + _PAUSE
            previous = self._trouble
            trouble = self._failed(error)
            if trouble != previous:
                logger.error("%s; rows lost: %d; new rows are dropped until writing works again", trouble, lost)  # noqa: TRY400 - a sentence

    def _failed(self, error: Exception) -> str:
        reason = getattr(error, "strerror", None) or message_of(error) or type(error).__name__
        self._trouble = f"the journal cannot be written: {reason}"
        return self._trouble
