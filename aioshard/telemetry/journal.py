"""The event journal: the outcome of each record, written as Parquet alongside the running app.

The event loop creates a small tuple per completed record and hands over a thousand of them at a time. One thread
converts them to columns and writes them. Rows that it cannot accept in time are dropped and counted: the app never
waits for its journal.
"""

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import HandlerSpec
from aioshard.engine.observed import Completed
from aioshard.engine.outcomes import Outcome
from aioshard.engine.runtime import Engine
from aioshard.handlers import Registration
from aioshard.observe import JournalStatistics
from aioshard.serde.results import encoded_result
from aioshard.serde.side_records import as_text
from aioshard.telemetry.journal_files import JournalFiles
from aioshard.telemetry.journal_rows import NO_RUN, ROW_WIDTH, Trouble, record_batch, warm_up
from aioshard.telemetry.versions import version

__all__ = ["Journal"]

logger = logging.getLogger("aioshard.telemetry.journal")

_CHUNK_VALUES = 1_000 * ROW_WIDTH
_CHUNK_BYTES = 1024 * 1024
_WAITING_CHUNKS = 64
_WAITING_BYTES = 32 * 1024 * 1024
"""Rows that may wait for the thread, in addition to those it is writing: about 60 MiB with Python's overhead."""
_VALUES_AT_ONCE = 32 * 1024 * ROW_WIDTH
_LOOK_INTERVAL = 1.0
"""Seconds after which rows are handed over even if there are fewer than a thousand."""
_LETS_GO = 2e-4
"""Seconds for which the event loop releases the interpreter lock when the thread has fallen behind.

Without this, a busy event loop takes the lock back after each poll of its sockets, before the waiting thread wakes up.
"""
_PAUSE = 5.0
"""Seconds without writing after a write has failed."""
_LOG_INTERVAL = 60.0
_CLOSE_TIMEOUT = 3.0
_CLOCK_STEP = 1.0
"""Seconds by which the wall clock may differ from loop time before it is assumed to have been set."""
_PROCESSED = Outcome.PROCESSED
_RETURNED = Outcome.RETURNED


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

    def __init__(self, files: JournalFiles, name: str, *, show_keys: bool, clock: Callable[[], float]) -> None:
        """Create a journal and start its thread.

        Args:
            files: Prepared files.
            name: Name of the app, used for the thread.
            show_keys: Whether to write keys in addition to their hashes.
            clock: Loop time, in which the engine records events.
        """
        self._files = files
        self._show_keys = show_keys
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._ahead = time.time() - clock()
        self._flat: list[Any] = []
        self._size = 0
        self._encoded: tuple[object, bytes | None] = (None, None)
        """The latest run with a result, and the result as bytes: encoded once for all records of a batch."""
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        # Only one thread changes each of these.
        self._given_rows = self._given_bytes = self._overflowed = 0
        self._taken_bytes = self._lost = 0
        self._overflow_logged = -_LOG_INTERVAL
        self._resumes_at = 0.0
        self._trouble: str | None = None
        self._thread = threading.Thread(target=self._work, name=f"aioshard journal of {name}", daemon=True)
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
        await asyncio.to_thread(warm_up)
        await asyncio.to_thread(files.prepare)
        return cls(files, group_id, show_keys=show_keys, clock=asyncio.get_running_loop().time)

    # The event loop -----------------------------------------------------------------------

    def attach(self, engine: Engine, handlers: Sequence[Registration]) -> None:
        """Describe *engine* and its *handlers* in the metadata of each new file, as they are when it is started."""
        self._files.describe = functools.partial(_set_up, engine, tuple(handlers))

    def observe(self, spec: HandlerSpec) -> Completed:
        """Return the callback that records a handler's completed records; see `aioshard.engine.observed.Observe`."""
        return functools.partial(self._note, spec)

    def _note(self, spec: HandlerSpec, delivery: Delivery) -> None:
        topic, partition, offset, key, _, _, timestamp = delivery.record
        began, ended, result = run = getattr(delivery, "run", NO_RUN)
        trouble = None
        if delivery.outcome is _PROCESSED:
            attempts = delivery.failures + 1
            if result is not None:
                result = self._as_bytes(run)
        elif delivery.outcome is _RETURNED:
            return  # parked again: the record has not ended yet
        else:
            attempts, result, trouble = delivery.failures, None, self._trouble_of(delivery)
        if key is not None:
            self._size += len(key)
        flat = self._flat
        flat += (
            spec,
            topic,
            partition,
            offset,
            key,
            timestamp,
            delivery.arrived,
            began,
            ended,
            result,
            delivery.key,
            attempts,
            trouble,
        )
        if len(flat) >= _CHUNK_VALUES or self._size >= _CHUNK_BYTES:
            self._hand_over()

    def _as_bytes(self, run: tuple[float, float, object]) -> bytes | None:
        """Encode the result of a run now, because other code that holds it may change it."""
        if self._encoded[0] is not run:
            try:
                result = encoded_result(run[2])
            except Exception as error:  # noqa: BLE001 - the user's own methods; the record is complete anyway
                message = "the journal leaves out a result of type %s, which cannot be encoded: %r"
                logger.warning(message, type(run[2]).__name__, error)
                result = None
            self._encoded = (run, result)
            self._size += len(result or b"")
        return self._encoded[1]

    def _trouble_of(self, delivery: Delivery) -> Trouble:
        note = delivery.failure
        if note is None:
            return Trouble(delivery.outcome.value, None, None)
        self._size += len(note.message)
        # Arrow rejects lone surrogates, such as in a file name that is not UTF-8.
        return Trouble(delivery.outcome.value, note.error, as_text(note.message).decode())

    def _hand_over(self, *, all_of_it: bool = False) -> None:
        """Give the collected rows to the thread; drop them if too much waits already, unless *all_of_it* is set."""
        flat, size = self._flat, self._size
        if not flat:
            return
        self._flat, self._size = [], 0
        rows = len(flat) // ROW_WIDTH
        waiting = self._given_bytes - self._taken_bytes
        full = self._chunks.qsize() >= _WAITING_CHUNKS or (waiting > 0 and waiting + size > _WAITING_BYTES)
        if full and not all_of_it:
            self._overflowed += rows
            self._log_overflow()
            return
        ahead = time.time() - self._clock()
        if abs(ahead - self._ahead) > _CLOCK_STEP:
            self._ahead = ahead  # the clock was set
        self._given_rows += rows
        self._given_bytes += size
        behind = self._chunks.qsize() > 1
        self._chunks.put(_Chunk(flat, size, self._ahead))
        if behind:
            time.sleep(_LETS_GO)

    def _log_overflow(self) -> None:
        now = self._clock()
        if now - self._overflow_logged >= _LOG_INTERVAL:
            self._overflow_logged = now
            message = "the journal is not written as fast as records end: %d row(s) were dropped so far"
            logger.warning(message, self._overflowed)

    async def close(self) -> None:
        """Write the remaining rows, complete the last file and end the thread; give up after 3 s."""
        self._hand_over(all_of_it=True)
        self._chunks.put(None)
        await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT)
        if self._thread.is_alive():
            message = "the journal's last %d row(s) were not written within %g s and are left behind"
            logger.error(message, self.statistics().waiting, _CLOSE_TIMEOUT)

    def statistics(self) -> JournalStatistics:
        """Return how much was written; safe to call from any thread."""
        written, lost = self._files.rows, self._lost
        waiting = max(self._given_rows - written - lost, 0) + len(self._flat) // ROW_WIDTH
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
            due = self._files.due
            wait = _LOOK_INTERVAL if due is None else min(due, _LOOK_INTERVAL)
            try:
                chunk = self._chunks.get(timeout=max(wait, 0.001))
            except queue.Empty:
                self._ask_for_rows()
            else:
                if not self._take(chunk):
                    break
            if self._files.due == 0.0:
                self._attempt(self._files.finish)
        self._attempt(self._files.finish)

    def _ask_for_rows(self) -> None:
        """Make the event loop hand over its rows, even if there are only a few."""
        if self._flat:
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                self._loop.call_soon_threadsafe(self._hand_over)

    def _take(self, chunk: _Chunk | None) -> bool:
        """Write a chunk and all that wait behind it; return whether more will come.

        Chunks are written together because the thread may have to wait for the interpreter lock on each call into
        Arrow. The further it falls behind, the fewer calls it makes.
        """
        if chunk is None:
            return False
        flat, ahead = chunk.flat, chunk.ahead
        self._taken_bytes += chunk.size
        while len(flat) < _VALUES_AT_ONCE:
            try:
                chunk = self._chunks.get_nowait()
            except queue.Empty:
                break
            if chunk is None:
                self._write(flat, ahead)
                return False
            flat += chunk.flat
            self._taken_bytes += chunk.size
        self._write(flat, ahead)
        return True

    def _write(self, flat: list[Any], ahead: float) -> None:
        rows = len(flat) // ROW_WIDTH
        if time.monotonic() < self._resumes_at:
            self._lost += rows
            return
        try:
            batch = record_batch(flat, ahead=ahead, show_keys=self._show_keys)
        except Exception as error:
            self._lost += rows
            self._failed(error)
            logger.exception("%d row(s) of the journal cannot be written down", rows)
            return

        def write() -> None:
            self._files.write(batch)
            if self._trouble is not None:
                self._files.flush()  # rows that are only in memory do not prove that the disk works

        if self._attempt(write) and self._trouble is not None:
            logger.warning("the journal is written again; %d row(s) were dropped so far", self._lost)
            self._trouble = None

    def _attempt(self, act: Callable[[], None]) -> bool:
        """Run a write; if it fails, discard the unfinished file and start another one after a pause."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - no failure of the journal may reach the app
            lost = self._files.discard()
            self._lost += lost
            self._resumes_at = time.monotonic() + _PAUSE
            said, sentence = self._trouble, self._failed(error)
            if sentence != said:
                message = "%s; %d row(s) are lost, and what comes is dropped until it can be written again"
                logger.error(message, sentence, lost)  # noqa: TRY400 - a sentence
            return False
        return True

    def _failed(self, error: Exception) -> str:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        self._trouble = f"the journal cannot be written: {reason}"
        return self._trouble


def _set_up(engine: Engine, handlers: Sequence[Registration]) -> dict[str, Any]:
    """Return the facts for a file's metadata that its rows do not contain."""
    return {
        "group": engine.group_id,
        "version": version(),
        "max_buffered_records": engine.settings.max_buffered_records,
        "handlers": {
            running.spec.name: {
                "topics": running.spec.topics,
                "pattern": running.spec.pattern,
                "shard_by": "function" if callable(handler.shard_by) else handler.shard_by,
                "shards": running.spec.shards,
                "concurrency": running.staff.concurrency,
                "batch": None if running.spec.batched is None else running.spec.batched.batch.max_records,
            }
            for running, handler in zip(engine.handlers, handlers, strict=True)
        },
    }
