"""P8: a deploy under load: each of three members is stopped in order and replaced."""

import asyncio
import contextlib
import signal
import tempfile
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaProducer

from benchmarks.report import Report, Verdict
from benchmarks.stage import Process, Stage, Topic

__all__ = ["run"]

TITLE = "Clean deploy: three members under load, each stopped with SIGTERM and replaced in turn"
OURS = "aioshard"
PARTITIONS = 12
KEYS = 1_000
MEMBERS = 3
SECONDS = 0.005
CONCURRENCY = 64
STEP_TIMEOUT = 90.0
LOOK_INTERVAL = 0.05
RATES = {OURS: 2_000, "plain loop": 300, "faststream-concurrent-aiokafka": 2_000}
"""Records per second that are produced; a plain loop cannot do more than 200 in each process."""


@dataclass(slots=True)
class Group:
    """The members of one group, with a journal each."""

    stage: Stage
    contestant: str
    topic: Topic
    directory: Path
    name: str = field(default_factory=lambda: f"bench-{uuid.uuid4().hex[:8]}")
    members: list[Process] = field(default_factory=list)
    journals: list[Path] = field(default_factory=list)

    async def add(self) -> None:
        """Start a member; returns once it has processed a record."""
        journal = self.directory / f"member-{len(self.journals)}"
        journal.touch()
        self.journals.append(journal)
        spec = self.stage.spec(
            self.contestant, self.topic, records=0, work="journal", concurrency=CONCURRENCY, seconds=SECONDS
        )
        member = await self.stage.start(replace(spec, group=self.name, journal=str(journal)))
        self.members.append(member)
        async with asyncio.timeout(STEP_TIMEOUT):
            while not journal.stat().st_size:
                member.check()
                await asyncio.sleep(LOOK_INTERVAL)

    async def replace_oldest(self) -> None:
        """Stop the member that runs longest, as an operator would, and start another."""
        oldest = self.members.pop(0)
        oldest.signal(signal.SIGTERM)
        await oldest.measurement()
        await self.add()

    async def stop(self) -> None:
        """Stop all members, in order."""
        for member in self.members:
            member.signal(signal.SIGTERM)
        for member in self.members:
            await member.measurement()

    def processed(self) -> Counter[bytes]:
        """How often each record was processed, by all members that ever were."""
        return Counter(line for journal in self.journals for line in journal.read_bytes().splitlines())


async def run(stage: Stage) -> Report:
    """One deploy for each contestant."""
    report = Report("P8", TITLE)
    names = [OURS] if stage.quick else list(RATES)
    for name in names:
        produced, processed = await _deploy(stage, name)
        twice, lost = sum(processed.values()) - len(processed), produced - len(processed)
        stage.say(f"{name}: {produced:,} records, {twice} ran twice, {lost} were lost")
        report.rows.append({"contestant": name, "records": produced, "ran twice": twice, "lost": lost})
        if name == OURS:
            report.verdicts += [Verdict("records that ran twice", twice, must=0), Verdict("records lost", lost, must=0)]
    return report


async def _deploy(stage: Stage, name: str) -> tuple[int, Counter[bytes]]:
    """Produce steadily while every member is replaced; then let the rest be processed."""
    topic = await stage.fill(f"p8-{len(name)}", PARTITIONS, iter(()))
    with tempfile.TemporaryDirectory(prefix="aioshard-bench-") as directory:
        group = Group(stage, name, topic, Path(directory))
        try:
            async with _load(stage, topic, RATES[name]) as sent:
                for _ in range(stage.size(MEMBERS, 2)):
                    await group.add()
                for _ in range(stage.size(MEMBERS, 1)):
                    await group.replace_oldest()
            produced = len(sent)
            await _until_processed(group, produced)
            await group.stop()
            return produced, group.processed()
        finally:
            for member in group.members:
                await member.kill()


async def _until_processed(group: Group, records: int) -> None:
    """Wait until so many different records were processed; gives up, as they may be lost."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STEP_TIMEOUT):
            while len(group.processed()) < records:
                await asyncio.sleep(LOOK_INTERVAL * 10)


@contextlib.asynccontextmanager
async def _load(stage: Stage, topic: Topic, rate: int) -> AsyncIterator[list[int]]:
    """Produce *rate* records a second until the block ends; what was acknowledged by then is in the list."""
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
