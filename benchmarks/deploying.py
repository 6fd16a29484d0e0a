"""A group of processes under a steady load, whose members are stopped and replaced."""

import asyncio
import contextlib
import itertools
import signal
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaProducer

from benchmarks.p1 import numbered_messages
from benchmarks.stage import Process, Stage, Topic

PARTITIONS = 12
KEYS = 1_000
MEMBERS = 3
SECONDS = 0.005
CONCURRENCY = 64
STEP_TIMEOUT = 90.0
LOOK_INTERVAL = 0.05

Seen = tuple[int, int, int]
"""Partition, offset and time, in nanoseconds of the machine's monotonic clock, of a record that was processed."""


@dataclass(slots=True)
class Group:
    """The members of one group, with a journal each."""

    stage: Stage
    contestant: str
    topic: Topic
    directory: Path
    concurrency: int = CONCURRENCY
    name: str = field(default_factory=lambda: f"bench-{uuid.uuid4().hex[:8]}")
    members: list[Process] = field(default_factory=list)
    journals: list[Path] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Numbers of the running members, oldest first."""

    async def add(self, number: int) -> None:
        """Start a member; return once it has processed a record."""
        journal = self.directory / f"member-{len(self.journals)}"
        journal.touch()
        self.journals.append(journal)
        spec = self.stage.spec(
            self.contestant, self.topic, records=0, work="journal", concurrency=self.concurrency, seconds=SECONDS
        )
        member = await self.stage.start(replace(spec, group=self.name, journal=str(journal), member=number))
        self.members.append(member)
        self.numbers.append(number)
        async with asyncio.timeout(STEP_TIMEOUT):
            while not journal.stat().st_size:
                member.check()
                await asyncio.sleep(LOOK_INTERVAL)

    async def replace_oldest(self) -> None:
        """Stop the oldest member with SIGTERM, and start another."""
        oldest = self.members.pop(0)
        oldest.signal(signal.SIGTERM)
        await oldest.measurement()
        await self.add(self.numbers.pop(0))

    async def stop(self) -> None:
        """Stop all members, in order."""
        for member in self.members:
            member.signal(signal.SIGTERM)
        for member in self.members:
            await member.measurement()

    def lines(self) -> int:
        """Return the number of records that all current and former members processed, repetitions included."""
        return sum(journal.read_bytes().count(b"\n") for journal in self.journals)

    def seen(self) -> Iterator[Seen]:
        """Yield the records that all current and former members processed."""
        for journal in self.journals:
            for line in journal.read_bytes().splitlines():
                partition, offset, at = map(int, line.split())
                yield partition, offset, at


@dataclass(frozen=True, slots=True)
class Deploy:
    """The records of one deploy, and its begin and end."""

    produced: int
    seen: list[Seen]
    began: int
    """When the first member was stopped; on the clock of `Seen`, as `ended`, when the last one was replaced."""
    ended: int

    @property
    def distinct(self) -> int:
        """Number of distinct records that were processed."""
        return len({(partition, offset) for partition, offset, _ in self.seen})

    @property
    def twice(self) -> int:
        """Number of runs beyond the first of each record."""
        return len(self.seen) - self.distinct

    @property
    def lost(self) -> int:
        """Number of records that were not processed."""
        return self.produced - self.distinct

    def rate_before(self, seconds: float) -> float:
        """Return the records per second in the last *seconds* before the begin."""
        since = self.began - seconds * 1e9
        return sum(since <= at < self.began for _, _, at in self.seen) / seconds

    def standstills(self) -> list[float]:
        """Return the longest pause of each partition during the deploy, in seconds, sorted."""
        times: dict[int, list[int]] = {}
        for partition, _, at in self.seen:
            times.setdefault(partition, []).append(at)
        longest = []
        for processed in times.values():
            inside = sorted([self.began, self.ended, *(at for at in processed if self.began <= at <= self.ended)])
            longest.append(max(later - earlier for earlier, later in itertools.pairwise(inside)) / 1e9)
        return sorted(longest)


async def deploy(stage: Stage, name: str, contestant: str, rate: int) -> Deploy:
    """Produce *rate* records a second while every member is replaced; then wait until all are processed."""
    topic = await stage.fill(name, PARTITIONS, iter(()))
    with tempfile.TemporaryDirectory(prefix="aioshard-bench-") as directory:
        group = Group(stage, contestant, topic, Path(directory))
        try:
            async with _load(stage, topic, rate) as sent:
                for number in range(stage.size(MEMBERS, 2)):
                    await group.add(number)
                began = time.monotonic_ns()
                for _ in range(stage.size(MEMBERS, 1)):
                    await group.replace_oldest()
                ended = time.monotonic_ns()
            await _until_processed(group, len(sent))
            await group.stop()
            return Deploy(len(sent), list(group.seen()), began, ended)
        finally:
            for member in group.members:
                await member.kill()


async def kill(stage: Stage, name: str, contestant: str, records: int = 20_000) -> Deploy:
    """Kill the only member when half of a topic of *records* is processed, and start another one."""
    records = stage.size(records, 500)
    topic = await stage.fill(name, 8, numbered_messages(records, KEYS))
    with tempfile.TemporaryDirectory(prefix="aioshard-bench-") as directory:
        group = Group(stage, contestant, topic, Path(directory), concurrency=128)
        try:
            await group.add(0)
            await _until_processed(group, records // 2)
            began = time.monotonic_ns()
            await group.members.pop().kill()
            # The next member processes this one even when all others were committed before the kill.
            await stage.cluster.produce(topic.name, [(b"last", next(numbered_messages(1, 1))[1])])
            records += 1
            await group.add(0)
            await _until_processed(group, records)
            ended = time.monotonic_ns()
            await group.stop()
            return Deploy(records, list(group.seen()), began, ended)
        finally:
            for member in group.members:
                await member.kill()


async def _until_processed(group: Group, records: int) -> None:
    """Wait until *records* distinct records were processed; give up after `STEP_TIMEOUT`, because some may be lost."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STEP_TIMEOUT):
            while group.lines() < records or len({seen[:2] for seen in group.seen()}) < records:
                await asyncio.sleep(LOOK_INTERVAL)


@contextlib.asynccontextmanager
async def _load(stage: Stage, topic: Topic, rate: int) -> AsyncIterator[list[int]]:
    """Produce *rate* records a second until the block ends; the list then has the acknowledged offsets."""
    sent: list[int] = []
    ending = asyncio.Event()

    async def produce() -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        futures: list[asyncio.Future[Any]] = []
        async with AIOKafkaProducer(bootstrap_servers=stage.cluster.bootstrap, linger_ms=5) as producer:
            while not ending.is_set():
                due = int((loop.time() - started) * rate)
                while len(futures) < due:
                    key = b"key-%d" % (len(futures) % KEYS)
                    futures.append(await producer.send(topic.name, b"x" * 100, key=key))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await ending.wait()
            await producer.flush()
            sent.extend([(await future).offset for future in futures])

    producing = asyncio.create_task(produce(), name="load")
    try:
        yield sent
    finally:
        ending.set()
        await producing
