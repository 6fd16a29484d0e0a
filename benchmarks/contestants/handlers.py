"""The handler of all contestants, and its records of what ran."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from typing import Any, Protocol

from benchmarks.spec import Spec

Handler = Callable[[Any], Awaitable[None]]

SLOW_EVERY = 100
ROUNDS = 500


class Work(Protocol):
    """One kind of handler."""

    handler: Handler
    count: Callable[[], int]
    """Returns the number of finished records."""
    first_started: float
    """Seconds; 0 if times are not recorded."""
    last_ended: float

    disordered: int
    """Number of records that ran during or after a later one of their key; 0 if not observed."""
    peak_concurrency: int
    """Maximum number of concurrent runs; 0 if not observed."""

    @property
    def repeated(self) -> int:
        """Number of records that ran more than once; 0 if not observed."""

    @property
    def missing(self) -> int:
        """Number of records that never ran; 0 if not observed."""


def make_work(spec: Spec) -> Work:
    """Return the kind of handler that *spec* names."""
    match spec.work:
        case "count":
            return _Counting()
        case "hang":
            return _Hanging()
        case "journal":
            return _Journal(spec)
        case "planned" | "hash" | "compute":
            return _Observing(spec)
        case "check" | "sleep" if spec.keys:
            return _Observing(spec)
        case _:
            return _Marking(spec)


class _Unmarked:
    """A handler that does not remember which records it saw."""

    first_started = last_ended = 0.0
    repeated = missing = disordered = peak_concurrency = 0
    handler: Handler
    count: Callable[[], int]


class _Counting(_Unmarked):
    def __init__(self) -> None:
        count = 0

        async def handler(_record: Any) -> None:
            nonlocal count
            count += 1

        self.handler = handler
        self.count = lambda: count


class _Hanging(_Unmarked):
    def __init__(self) -> None:
        self._started = 0
        self.handler = self._hang
        self.count = lambda: self._started

    async def _hang(self, _record: Any) -> None:
        self._started += 1
        await asyncio.get_running_loop().create_future()


class _Journal(_Unmarked):
    """Sleeps, then appends partition, offset and the machine's time to a file, which outlives the process."""

    def __init__(self, spec: Spec) -> None:
        self._seconds = spec.seconds
        self._file = os.open(spec.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._written = 0
        self.handler = self._write
        self.count = lambda: self._written

    async def _write(self, record: Any) -> None:
        await asyncio.sleep(self._seconds)
        os.write(self._file, b"%d %d %d\n" % (record.partition, record.offset, time.monotonic_ns()))
        self._written += 1


class _Marking:
    """Marks each record; if it sleeps, it records the times of the first and the last one too."""

    disordered = peak_concurrency = 0

    def __init__(self, spec: Spec) -> None:
        self._marks = [bytearray(end) for end in spec.ends]
        self._count = 0
        self._seconds = spec.seconds
        self._slow_seconds = spec.slow_seconds
        self.first_started = self.last_ended = 0.0
        self.handler: Handler = self._sleep if spec.work == "sleep" else self._check
        self.count: Callable[[], int] = lambda: self._count

    @property
    def repeated(self) -> int:
        return sum(len(marks) - marks.count(0) - marks.count(1) for marks in self._marks)

    @property
    def missing(self) -> int:
        return sum(marks.count(0) for marks in self._marks)

    async def _check(self, record: Any) -> None:
        self._marks[record.partition][record.offset] += 1
        self._count += 1

    async def _sleep(self, record: Any) -> None:
        if not self.first_started:
            self.first_started = time.perf_counter()
        slow = self._slow_seconds and _is_slow(record.partition, record.offset)
        await asyncio.sleep(self._slow_seconds if slow else self._seconds)
        self._marks[record.partition][record.offset] += 1
        self._count += 1
        self.last_ended = time.perf_counter()


class _Observing:
    """Does the work, and observes order, repetition and concurrency, as the peers do."""

    def __init__(self, spec: Spec) -> None:
        self._marks = [bytearray(end) for end in spec.ends]
        self._expected = spec.records
        self._turns = [0] * spec.keys  # offset of a key's last record + 1, negative while it runs
        self._running = 0
        self._count = 0
        self.disordered = self.peak_concurrency = 0
        self.first_started = self.last_ended = 0.0
        self._act: Handler = _act(spec)
        self.handler: Handler = self._handle
        self.count: Callable[[], int] = lambda: self._count

    @property
    def repeated(self) -> int:
        return sum(len(marks) - marks.count(0) - marks.count(1) for marks in self._marks)

    @property
    def missing(self) -> int:
        return max(self._expected - sum(len(marks) - marks.count(0) for marks in self._marks), 0)

    async def _handle(self, record: Any) -> None:
        await self.around(record, self._act(record))

    async def around(self, record: Any, run: Awaitable[object]) -> None:
        """Await a run that computes elsewhere, and observe the record."""
        if not self.first_started:
            self.first_started = time.perf_counter()
        self._running += 1
        self.peak_concurrency = max(self.peak_concurrency, self._running)
        key = int(record.key)
        following = record.offset + 1
        before = self._turns[key]
        self._turns[key] = -following
        if before < 0 or before >= following:
            self.disordered += 1
        await run
        self._turns[key] = following
        self._marks[record.partition][record.offset] += 1
        self._running -= 1
        self._count += 1
        self.last_ended = time.perf_counter()

    async def around_batch(self, records: Sequence[Any], run: Awaitable[object]) -> None:
        """Await a batch, and observe its records once it has ended."""
        self.first_started = self.first_started or time.perf_counter()
        await run
        for record in records:
            await self.around(record, asyncio.sleep(0))


def _act(spec: Spec) -> Handler:
    """Return what an observed handler does with a record."""
    match spec.work:
        case "hash":
            return _hash
        case "check":
            return _nothing
        case "sleep":
            return _sleep(spec)
        case _:
            return _sleep_as_recorded


async def _nothing(_record: Any) -> None:
    pass


def _sleep(spec: Spec) -> Handler:
    seconds = spec.seconds
    slow_seconds = spec.slow_seconds

    async def sleep(record: Any) -> None:
        slow = slow_seconds and _is_slow(record.partition, record.offset)
        await asyncio.sleep(slow_seconds if slow else seconds)

    return sleep


async def _sleep_as_recorded(record: Any) -> None:
    await asyncio.sleep(int(record.value[:8]) / 1000)


async def _hash(record: Any) -> None:
    hash_record(record)


def hash_record(record: Any) -> None:
    """Compute 500 × SHA-256."""
    value = record.value
    for _ in range(ROUNDS):
        value = sha256(value).digest()


def hash_records(records: list[Any]) -> None:
    """Compute 500 × SHA-256 for each record of a batch."""
    for record in records:
        hash_record(record)


def compute(record: Any, turns: int = 0) -> None:  # noqa: ARG001 - every record takes the same time
    """Compute in pure Python."""
    total = 0
    for number in range(turns):
        total = (total * 31 + number) & 0xFFFF


def _is_slow(partition: int, offset: int) -> bool:
    """Return True for one record in a hundred, scattered, and the same for every contestant."""
    return ((offset * 2654435761 + partition * 40503) >> 7) % SLOW_EVERY == 0
